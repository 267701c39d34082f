#!/usr/bin/env bash
# In a SLURM job: starts a program as the job's tasks, one a GPU, connected by the program's own TCP rendezvous (MPI is not needed).
#
#   scripts/launch_slurm.sh PROGRAM [argument]...
#
# A whole job, from the repository's root, two nodes of eight GPUs, saved and ended in order three minutes before its time is up:
#   LAUNCH=scripts/launch_slurm.sh sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --time 24:00:00 --signal USR1@180 scripts/run_1.9B_38B.sh --zero 1
# The next job goes on where that one ended. Repository, data and --out stand on a file system that all nodes share.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: scripts/launch_slurm.sh PROGRAM [argument]..." >&2; exit 2; }
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: this is no SLURM job; see the head of scripts/launch_slurm.sh, or take scripts/launch_mpirun.sh" >&2; exit 1; }
MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | head -1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
# Each task knows its numbers only once it runs.
exec srun --kill-on-bad-exit=1 bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"' task "$@"
