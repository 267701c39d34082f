#!/usr/bin/env bash
# The reference run of 200M on 20B tokens, by any recipe: scripts/run_200M.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 200M 20e9
#   285.1 M parameters, 20 B tokens (70 a parameter), 1.504 GFLOP a token: 3.01e+19 FLOPs
#   H200 hours at a stated MFU: 16.9 for bf16 (50%), 21.1 for quartet2 (40%)
#   memory a GPU at batch 64: 16.2 GiB, of which 2.1 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 200M 20B "$@"
