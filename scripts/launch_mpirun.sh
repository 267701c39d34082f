#!/usr/bin/env bash
# Starts a program as several processes with OpenMPI's mpirun: one a GPU, on this host or on several.
#
#   scripts/launch_mpirun.sh -n PROCESSES [--hosts HOST:GPUS,HOST:GPUS,...] PROGRAM [argument]...
#   scripts/launch_mpirun.sh -n 8 ./train_gpt_nvfp4 --model 560M --zero 1 ...
#   scripts/launch_mpirun.sh -n 16 --hosts node1:8,node2:8 ./train_gpt_nvfp4 ...      program, data and --out at the same path on every host
#
# NCCL_* variables of this shell go along, as do OMP_* and CUDA_VISIBLE_DEVICES. Processes on a CPU share its cores: set OMP_NUM_THREADS.
set -euo pipefail
usage() { echo "usage: scripts/launch_mpirun.sh -n PROCESSES [--hosts HOST:GPUS,...] PROGRAM [argument]...${1:+: $1}" >&2; exit 2; }
n=; hosts=
while [ $# -gt 0 ]; do
    case $1 in
        -n) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage "-n needs a number"; n=$2; shift 2 ;;
        --hosts) [ -n "${2:-}" ] || usage "--hosts needs a list"; hosts=$2; shift 2 ;;
        -*) usage "$1 is not known" ;;
        *) break ;;
    esac
done
[ -n "$n" ] && [ $# -gt 0 ] || usage
command -v mpirun >/dev/null || { echo "error: mpirun is not there (Debian: apt install openmpi-bin)" >&2; exit 1; }
options=(-np "$n" --bind-to none)
if [ -n "$hosts" ]; then options+=(--host "$hosts"); else options+=(--oversubscribe); fi
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
while IFS= read -r name; do options+=(-x "$name"); done < <(compgen -e | grep -E '^(NCCL_|OMP_|OPENBLAS_|CUDA_VISIBLE_DEVICES$|LD_LIBRARY_PATH$)' || true)
exec mpirun "${options[@]}" "$@"
