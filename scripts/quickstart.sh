#!/usr/bin/env bash
# From a bare machine to two trained models: installs what is missing, builds, prepares the text, trains the preset `tiny`
# with BF16 and with Quartet II (NVFP4) linear layers, and lays the two loss curves side by side.
#   ./scripts/quickstart.sh [--no-install] [--steps N] [--text FILE...]
# Writes runs/quickstart/: one folder a run, summary.csv, loss.png, samples.txt. Run twice, it starts over.
set -euo pipefail
usage() { echo "usage: ./scripts/quickstart.sh [--no-install] [--steps N] [--text FILE...]" >&2; exit 2; }
steps=320; install=(); text=()
while [ $# -gt 0 ]; do
    case $1 in
        --no-install) install=(--no-install); shift ;;
        --steps) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage; steps=$2; shift 2 ;;
        --text) shift; [ $# -gt 0 ] || usage
                while [ $# -gt 0 ] && [[ $1 != --* ]]; do text+=("$(realpath -m -- "$1")"); shift; done ;;
        *) usage ;;
    esac
done
cd "$(dirname "$0")/.."
started=$SECONDS
export OMP_WAIT_POLICY=passive   # idle threads yield: on a busy machine spinning costs far more than it saves

echo "== 1/5 setting up"
scripts/setup.sh ${install[@]+"${install[@]}"}

echo "== 2/5 building"
make --no-print-directory probe
make --no-print-directory cpu

echo "== 3/5 preparing the text"
if [ ${#text[@]} -gt 0 ]; then
    data=data/quickstart-text
    python3 data/prepare.py --tokenizer bytes --text "${text[@]}" --out "$data"
else
    data=data/gcide-bytes   # Webster's dictionary of 1913; made once
    [ -f "$data/meta.json" ] || python3 data/prepare.py --tokenizer bytes --out "$data"
fi

echo "== 4/5 training twice: bf16, then quartet2 (every linear layer in NVFP4)"
out=runs/quickstart
# lr 1e-3 ends where the preset's 3e-3 does, without its spikes, whose chance hides a gap this small.
every=$((steps < 10 ? 1 : steps / 10))
for recipe in bf16 quartet2; do
    rm -rf "${out:?}/$recipe"
    ./train_gpt_nvfp4_cpu --model tiny --recipe "$recipe" --lr 1e-3 --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" \
        --steps "$steps" --log-every "$every" --eval-every "$every" --eval-tokens 32768 --sample-every "$steps" \
        --sample-tokens 120 --save-every "$steps" --out "$out/$recipe"
done

echo "== 5/5 comparing"
# Debian's matplotlib belongs to /usr/bin/python3; the python3 of a virtual environment may lack it.
python=python3
"$python" -c 'import matplotlib' 2>/dev/null || ! /usr/bin/python3 -c 'import matplotlib' 2>/dev/null || python=/usr/bin/python3
"$python" scripts/compare.py --out "$out" --meta "$data/meta.json" "$out/bf16" "$out/quartet2"
echo "quick start finished in $((SECONDS - started)) s; the models are $out/*/step_*"
