#!/usr/bin/env bash
# The reference run of 560M on 11B tokens, by any recipe: scripts/run_560M.sh [--recipe bf16] [--data FOLDER] [--zero 1] [option of the trainer]...
# Options, and several GPUs: scripts/run_reference.sh. What it takes (dev/bench/cost.py --headers writes these lines):
# cost: 560M 11e9
#   574.1 M parameters, 11 B tokens (19 a parameter), 3.256 GFLOP a token: 3.58e+19 FLOPs
#   H200 hours at a stated MFU: 20.1 for bf16 (50%), 25.1 for quartet2 (40%)
#   memory a GPU at batch 16: 31.2 GiB, of which 4.3 GiB optimizer state (1/N of that with --zero 1 on N GPUs)
exec "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/scripts/run_reference.sh" 560M 11B "$@"
