#!/usr/bin/env bash
# The reference run of 50M on 5B tokens, by any recipe: scripts/run_50M.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 50M 5e9
#   98.7 M parameters, 5 B tokens (51 a parameter), 0.461 GFLOP a token: 2.31e+18 FLOPs
#   H200 hours at a stated MFU: 1.3 for bf16 (50%), 1.6 for quartet2 (40%)
#   memory a GPU at batch 128: 11.9 GiB, of which 0.7 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 50M 5B "$@"
