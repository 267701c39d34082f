#!/usr/bin/env bash
# Trains a preset on a number of tokens until the run is complete: starts it, and after a failure starts it again from its newest checkpoint as
# long as it gets further each time. The scripts run_30M.sh ... run_1.9B_38B.sh are this one with their model and tokens.
#
#   scripts/run_reference.sh MODEL TOKENS [--recipe R] [--data FOLDER] [--out FOLDER] [--program PROGRAM] [option of the trainer]...
#
# FOLDER of --data (data/text) holds train_*.bin and val_*.bin. PROGRAM: ./train_gpt_nvfp4. One process, unless LAUNCH is set to a command that
# starts several, e.g. LAUNCH="scripts/launch_mpirun.sh -n 8", or in a SLURM job LAUNCH=scripts/launch_slurm.sh.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
usage() { echo "usage: scripts/run_reference.sh MODEL TOKENS [--recipe R] [--data FOLDER] [--out FOLDER] [--program PROGRAM] [option of the trainer]...${1:+: $1}" >&2; exit 2; }
[ $# -ge 2 ] && [[ $1 != -* && $2 != -* ]] || usage
model=$1; tokens=$2; shift 2
recipe=quartet2; data=data/text; out=; program=./train_gpt_nvfp4; rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --recipe|--data|--out|--program)
            [ $# -gt 1 ] && [ -n "$2" ] || usage "$1 needs a value"
            case $1 in --recipe) recipe=$2 ;; --data) data=$2 ;; --out) out=$2 ;; --program) program=$2 ;; esac
            shift 2 ;;
        --model|--tokens|--steps|--resume|--train-data) usage "$1 is this script's own" ;;
        *) rest+=("$1"); shift ;;
    esac
done
out=${out:-runs/$model-$tokens-$recipe}
[ -x "$program" ] || { echo "error: $program is not there; build it with make, or name another by --program" >&2; exit 1; }
read -r -a launch <<<"${LAUNCH:-}"
output=$(mktemp); trap 'rm -f "$output"' EXIT
newest() { find "$out" -maxdepth 1 -name 'step_*' 2>/dev/null | sort | tail -1 || true; }  # no folder yet: nothing
while :; do
    before=$(newest)
    set +e
    ${launch[@]+"${launch[@]}"} "$program" --model "$model" --tokens "$tokens" --recipe "$recipe" --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" \
        --save-every 500 --eval-every 500 --eval-tokens 1Mi --out "$out" --resume auto ${rest[@]+"${rest[@]}"} | tee -i "$output"  # Ctrl-C is for the trainer, which saves
    status=${PIPESTATUS[0]}
    set -e
    [ $status != 2 ] || exit 2
    if [ $status = 0 ] && grep -q '^run complete' "$output"; then exit 0; fi
    if [ $status = 0 ]; then echo "stopped by a signal; the same command goes on with it"; exit 0; fi
    [ "$(newest)" != "$before" ] || { echo "error: the run failed (status $status) without getting further than ${before:-its start}; see above" >&2; exit 1; }
    echo "the run failed (status $status); it goes on from $(newest)"
done
