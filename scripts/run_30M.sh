#!/usr/bin/env bash
# The reference run of 30M on 3B tokens, by any recipe: scripts/run_30M.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 30M 3e9
#   71.4 M parameters, 3 B tokens (42 a parameter), 0.318 GFLOP a token: 9.53e+17 FLOPs
#   H200 hours at a stated MFU: 0.5 for bf16 (50%), 0.7 for quartet2 (40%)
#   memory a GPU at batch 128: 8.9 GiB, of which 0.5 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 30M 3B "$@"
