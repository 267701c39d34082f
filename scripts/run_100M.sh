#!/usr/bin/env bash
# The reference run of 100M on 10B tokens, by any recipe: scripts/run_100M.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 100M 10e9
#   168.3 M parameters, 10 B tokens (59 a parameter), 0.838 GFLOP a token: 8.38e+18 FLOPs
#   H200 hours at a stated MFU: 4.7 for bf16 (50%), 5.9 for quartet2 (40%)
#   memory a GPU at batch 128: 18.4 GiB, of which 1.3 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 100M 10B "$@"
