#!/usr/bin/env bash
# The reference run of 1.9B on 38B tokens, by any recipe: scripts/run_1.9B_38B.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 1.9B 38e9
#   1912.7 M parameters, 38 B tokens (20 a parameter), 11.476 GFLOP a token: 4.36e+20 FLOPs
#   H200 hours at a stated MFU: 245.0 for bf16 (50%), 306.2 for quartet2 (40%)
#   memory a GPU at batch 8: 54.4 GiB, of which 14.3 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 1.9B 38B "$@"
