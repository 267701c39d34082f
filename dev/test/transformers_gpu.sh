#!/usr/bin/env bash
# Are checkpoints of the GPU program, of every recipe, the same model to Hugging Face transformers? Trains tiny for 20 steps in each
# recipe, and one model with grouped KV heads of size 64 and a tied head, then compares every logit (check_transformers.py).
# Last line "N passed, N failed". Needs torch and transformers; PYTHON names their interpreter.
#   dev/test/transformers_gpu.sh          the GPU program
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
train() { # NAME MODEL RECIPE
    "./$trainer" --model "$2" --recipe "$3" --lr 3e-3 --batch 16 --total-batch 0 --train-data "$tmp/data/train_*.bin" --val-data "$tmp/data/val_*.bin" \
        --steps 20 --eval-every 0 --save-every 20 --log-every 20 --out "$tmp/$1" >"$tmp/log" 2>&1 || { tail -5 "$tmp/log"; echo "0 passed, 1 failed"; exit 1; }
    runs+=("$tmp/$1")
}
runs=()
train bf16 tiny bf16                                   # the first: --must-notice spoils it
for recipe in $("./$trainer" --help | awk '/^Recipes/ { on = 1; next } /^$/ { on = 0 } on { print $1 }'); do [ "$recipe" = bf16 ] || train "$recipe" tiny "$recipe"; done
train grouped "$tmp/grouped.json" quartet2
[ ${#runs[@]} -gt 2 ] || { echo "error: $trainer --help lists no recipes"; echo "0 passed, 1 failed"; exit 1; }
"$python" dev/test/check_transformers.py "${runs[@]}" --logits-program "$program" --must-notice rope_theta=0.01 --must-notice rms_norm_eps=100 2>"$tmp/log"
status=$?
[ $status = 0 ] || grep -v "Loading weights" "$tmp/log" | tail -5
exit $status
