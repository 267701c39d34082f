#!/usr/bin/env bash
# Trains every recipe on the same data, in the same order, from the same seed, and lays the runs side by side.
#
#   ./scripts/compare.sh --recipes bf16,quartet2,nvidia [--seeds 1,2,3] [--program PROGRAM] [--out FOLDER] [--meta META_JSON] [--dry-run] [option of the trainer]...
#   ./scripts/compare.sh [--out FOLDER] [--meta META_JSON] RUN_FOLDER...       finished runs, or runs still going on
#
# The first form goes on where it was interrupted: a finished run is not repeated, an unfinished one resumes from its newest checkpoint (--save-every;
# without one it starts over), and a folder whose run had other options is an error that names them. FOLDER (runs/compare) gets a folder a run, the table as
# summary.csv, loss.png, quant.png where --quant-stats was on, and samples.txt. PROGRAM: ./train_gpt_nvfp4 where it is built and a card answers,
# else ./train_gpt_nvfp4_cpu. --dry-run prints the trainer's command lines and runs nothing.
set -euo pipefail
usage() { echo "usage: ./scripts/compare.sh --recipes A,B,... [--seeds 1,2,...] [--program PROGRAM] [--out FOLDER] [--meta META_JSON] [option of the trainer]..., or ./scripts/compare.sh [--out FOLDER] RUN_FOLDER...${1:+: $1}" >&2; exit 2; }
recipes=; seeds=; program=; out=runs/compare; meta=; dry=; rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --recipes|--seeds|--program|--out|--meta)
            [ $# -gt 1 ] && [ -n "$2" ] || usage "$1 needs a value"
            case $1 in --recipes) recipes=$2 ;; --seeds) seeds=$2 ;; --program) program=$2 ;; --out) out=$2 ;; --meta) meta=$2 ;; esac
            shift 2 ;;
        --dry-run) dry=1; shift ;;
        --recipe|--seed) usage "name recipes by --recipes and seeds by --seeds" ;;
        --resume) usage "every run resumes by itself" ;;
        -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) rest+=("$1"); shift ;;
    esac
done
here=$(cd "$(dirname "$0")" && pwd)

compare() { # RUN_FOLDER...
    # Debian's matplotlib belongs to /usr/bin/python3; the python3 of a virtual environment may lack it.
    local python=python3
    "$python" -c 'import matplotlib' 2>/dev/null || ! /usr/bin/python3 -c 'import matplotlib' 2>/dev/null || python=/usr/bin/python3
    "$python" "$here/compare.py" --out "$out" ${meta:+--meta "$meta"} "$@"
}
if [ -z "$recipes" ]; then
    [ -z "$seeds$program$dry" ] || usage "--seeds, --program and --dry-run need --recipes"
    [ ${#rest[@]} -gt 0 ] || usage
    compare "${rest[@]}"
    exit
fi

if [ -z "$program" ]; then
    program=$here/../train_gpt_nvfp4_cpu
    if [ -x "$here/../train_gpt_nvfp4" ] && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then program=$here/../train_gpt_nvfp4; fi
fi
[ -n "$dry" ] || [ -x "$program" ] || { echo "error: $program: there is no such program; build it with make, or name another by --program" >&2; exit 1; }
[ -n "$dry" ] || echo "training with $program"

# finished FOLDER: whether the log ends with the evaluation after the last step.
finished() { python3 - "$1/log.jsonl" <<'PY'
import json, sys
try:
    lines = [json.loads(l) for l in open(sys.argv[1], encoding="utf-8").read().splitlines() if l.endswith("}")]
    steps = lines[0]["run"]["options"]["steps"]
except (OSError, ValueError, LookupError, TypeError):
    sys.exit(1)
sys.exit(not any(o.get("eval") == steps for o in lines))
PY
}
# train_one FOLDER ARGUMENT... : a run, unless it is finished; its command, an argument a line, is kept beside it.
train_one() {
    local folder=$1 differ; shift
    if [ -n "$dry" ]; then
        printf '%q ' "$program" "$@" --out "$folder" --resume auto
        echo
        return
    fi
    if [ -f "$folder/command.txt" ]; then
        differ=$(diff <(printf '%s\n' "$@") "$folder/command.txt" | sed -n 's/^\([<>]\) /\1 /p' | tr '\n' ' ' || true)
        [ -z "$differ" ] || { echo "error: $folder holds a run with other options (now <, then >): $differ; use another --out, or remove the folder" >&2; exit 1; }
        if finished "$folder"; then echo "== $folder: finished before"; return; fi
    fi
    mkdir -p "$folder"
    printf '%s\n' "$@" >"$folder/command.txt"
    echo "== $folder"
    "$program" "$@" --out "$folder" --resume auto
}
IFS=, read -r -a recipe_list <<<"$recipes"
IFS=, read -r -a seed_list <<<"${seeds:-1}"
folders=()
for seed in "${seed_list[@]}"; do
    for recipe in "${recipe_list[@]}"; do
        folder=$out/$recipe$([ ${#seed_list[@]} = 1 ] || echo "-seed$seed")
        train_one "$folder" --recipe "$recipe" --seed "$seed" ${rest[@]+"${rest[@]}"}
        folders+=("$folder")
    done
done
[ -z "$dry" ] || exit 0
echo "== comparing"
compare "${folders[@]}"
