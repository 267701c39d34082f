#!/usr/bin/env bash
# Are checkpoints of the GPU program, of every recipe, the same model to Hugging Face transformers? Trains tiny for 20 steps in each
# recipe, and one model with grouped KV heads of size 64 and a tied head, then compares every logit (check_transformers.py).
# Last line "N passed, N failed". Needs torch and transformers; PYTHON names their interpreter.
#   dev/test/transformers_gpu.sh          the GPU program (its time on a card is not measured yet)
#   dev/test/transformers_gpu.sh --cpu    the same with the CPU program
set -u
cd "$(dirname "$0")/../.."
trainer=train_gpt_nvfp4; program=build/dump_logits
case ${1:-} in "") ;; --cpu) trainer=train_gpt_nvfp4_cpu; program=build/dump_logits_cpu ;; *) echo "usage: dev/test/transformers_gpu.sh [--cpu]" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
make --no-print-directory "$trainer" "$program" >"$tmp/log" 2>&1 || { tail -20 "$tmp/log"; echo "0 passed, 1 failed"; exit 1; }
python3 dev/test/made_text.py "$tmp/made.txt" && python3 data/prepare.py --tokenizer bytes --text "$tmp/made.txt" --out "$tmp/data" >"$tmp/log" 2>&1 || { cat "$tmp/log"; echo "0 passed, 1 failed"; exit 1; }
cat >"$tmp/grouped.json" <<'J'
{"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
 "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": true}
J
check() { # NAME MODEL RECIPE CHECK'S OPTIONS... : trains, compares; leaves NAME.log and NAME.rc
    local name=$1 model=$2 recipe=$3; shift 3
    { "./$trainer" --model "$model" --recipe "$recipe" --lr 3e-3 --batch 16 --total-batch 0 --train-data "$tmp/data/train_*.bin" --val-data "$tmp/data/val_*.bin" \
          --steps 20 --eval-every 0 --save-every 20 --log-every 20 --out "$tmp/$name" && "$python" dev/test/check_transformers.py "$tmp/$name" --logits-program "$program" "$@"; } >"$tmp/$name.log" 2>&1
    echo $? >"$tmp/$name.rc"
}
recipes=$("./$trainer" --help | awk '/^Recipes/ { on = 1; next } /^$/ { on = 0 } on { print $1 }')
jobs=$(($(nproc) / 4 > 1 ? $(nproc) / 4 : 1)); names=()
for recipe in $recipes grouped; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    if [ "$recipe" = grouped ]; then check grouped "$tmp/grouped.json" quartet2 & else check "$recipe" tiny "$recipe" & fi
    names+=("$recipe")
done
wait
passed=0; failed=0
[ ${#names[@]} -gt 1 ] || { echo "error: $trainer --help lists no recipes"; failed=1; }
for name in "${names[@]}"; do
    if [ "$(cat "$tmp/$name.rc")" = 0 ]; then passed=$((passed + 1)); sed -nE "s|^$tmp/[^:]*: |$name: |p" "$tmp/$name.log"
    else failed=$((failed + 1)); echo "$name FAILED"; tail -5 "$tmp/$name.log" | sed 's/^/    /'; fi
done
# The comparison must be able to fail: another rotary base, another norm epsilon.
for spoil in rope_theta=0.01 rms_norm_eps=100; do
    "$python" dev/test/check_transformers.py "$tmp/bf16" --logits-program "$program" --spoil "$spoil" >"$tmp/log" 2>&1
    if grep -q '^0 passed, 1 failed$' "$tmp/log"; then passed=$((passed + 1)); sed -nE "s|^$tmp/[^:]*: (.*) FAILED|$spoil is noticed: \1|p" "$tmp/log"
    else failed=$((failed + 1)); echo "$spoil FAILED to be noticed"; tail -3 "$tmp/log" | sed 's/^/    /'; fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
