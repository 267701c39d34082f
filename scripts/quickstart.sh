#!/usr/bin/env bash
# From a bare machine to two trained models: installs what is missing, builds, prepares the text, trains the preset `tiny`
# with BF16 and with Quartet II (NVFP4) linear layers, and lays the two loss curves side by side.
#   ./scripts/quickstart.sh [--no-install] [--text FILE...] [--steps N]
# Writes runs/quickstart/: one folder a run, summary.csv, loss.png. Run twice, it starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
steps=400; install=; text=()
while [ $# -gt 0 ]; do
    case $1 in
        --no-install) install=--no-install; shift ;;
        --steps) steps=${2:?--steps needs a number}; shift 2 ;;
        --text) shift; while [ $# -gt 0 ] && [[ $1 != --* ]]; do text+=("$1"); shift; done ;;
        *) echo "usage: ./scripts/quickstart.sh [--no-install] [--text FILE...] [--steps N]" >&2; exit 2 ;;
    esac
done
started=$SECONDS
export OMP_WAIT_POLICY=passive   # idle threads yield: on a busy machine spinning costs far more than it saves
echo "== 1/5 setting up"
scripts/setup.sh $install
echo "== 2/5 building"
make --no-print-directory cpu
echo "== 3/5 preparing the text"
if [ ${#text[@]} -gt 0 ]; then data=data/quickstart-text; python3 data/prepare.py --tokenizer bytes --text "${text[@]}" --out "$data"
else data=data/gcide-bytes; [ -f "$data/meta.json" ] || python3 data/prepare.py --tokenizer bytes --out "$data"; fi
echo "== 4/5 training twice: bf16, then quartet2 (every linear layer in NVFP4)"
out=runs/quickstart
mkdir -p "$out"
for recipe in bf16 quartet2; do
    rm -rf "${out:?}/$recipe"
    ./train_gpt_nvfp4_cpu --model tiny --recipe "$recipe" --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" \
        --steps "$steps" --batch 16 --eval-every $((steps / 6 > 0 ? steps / 6 : 1)) --eval-tokens 65536 --sample-every "$steps" --save-every "$steps" \
        --log-every 20 --out "$out/$recipe"
done
echo "== 5/5 comparing"
python3 scripts/compare.py --out "$out" --meta "$data/meta.json" "$out/bf16" "$out/quartet2"
echo "quick start finished in $((SECONDS - started)) s"
