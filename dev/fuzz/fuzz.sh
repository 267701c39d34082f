#!/usr/bin/env bash
# Fuzzes the readers of files from strangers with libFuzzer (clang), AddressSanitizer and UBSan.
#   dev/fuzz/fuzz.sh SECONDS [TARGET...]      so long each; all targets unless named. Inputs: dev/fuzz/corpus/TARGET
# An input that breaks something is stored as dev/fuzz/corpus/TARGET/found-*: mend the reader, keep the file; make test replays it.
# What it found of interest otherwise is in build/fuzz/corpus-TARGET; to keep the smallest set of it (names are hashes):
#   build/fuzz/TARGET -set_cover_merge=1 dev/fuzz/corpus/TARGET build/fuzz/corpus-TARGET
# The last line is "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:?seconds a target}; shift
[ $# -gt 0 ] || set -- shard safetensors json tokenizer cli index
clang=$(command -v clang || ls /usr/bin/clang-[0-9]* 2>/dev/null | sort -V | tail -1 || true)
[ -n "$clang" ] || { echo "error: no clang was found; install it (apt-get install clang), or run make test, which replays the corpus without it" >&2; exit 1; }
[ -f build/config.mk ] || make --no-print-directory probe
cjson=$(sed -n 's/^CJSON_FLAGS := //p' build/config.mk)
mkdir -p build/fuzz
# A reader that ends the process leaves what the C library took for it.
export ASAN_OPTIONS=detect_leaks=0
passed=0; failed=0
for target in "$@"; do
    [ -f "dev/fuzz/$target.c" ] || { echo "error: dev/fuzz/$target.c is not there" >&2; exit 2; }
    # shellcheck disable=SC2086
    "$clang" -std=c11 -D_GNU_SOURCE -g -O1 -I. -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Wno-unknown-pragmas \
        "dev/fuzz/$target.c" -o "build/fuzz/$target" $cjson -lm
    mkdir -p "build/fuzz/corpus-$target"      # what libFuzzer finds of interest stays here, out of the repository
    if nice -n 19 "build/fuzz/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=8192 -detect_leaks=0 -close_fd_mask=3 \
        -artifact_prefix="dev/fuzz/corpus/$target/found-" "build/fuzz/corpus-$target" "dev/fuzz/corpus/$target" >"build/fuzz/$target.log" 2>&1
    then passed=$((passed + 1)); else failed=$((failed + 1)); grep -E 'ERROR|SUMMARY|Test unit' "build/fuzz/$target.log" || tail -5 "build/fuzz/$target.log"; fi
    echo "$target: $(grep -E '^#[0-9]+.*DONE' "build/fuzz/$target.log" || tail -1 "build/fuzz/$target.log")"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
