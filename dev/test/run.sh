#!/usr/bin/env bash
# Runs every CPU test program of a build folder and the Python tests; prints what failed, and last "N passed, N failed".
#   dev/test/run.sh build
set -u
B=${1:?the build folder}
passed=0; failed=0
# Idle threads of OpenMP yield instead of spinning: on a busy machine spinning costs far more than it saves.
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} UBSAN_OPTIONS=print_stacktrace=1
# OpenBLAS and MPI keep memory to the end of the process; leaks of our own tests are not what AddressSanitizer is here for.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
log=$(mktemp); trap 'rm -f "$log"' EXIT
count() { # NAME STATUS PASSED FAILED : one suite's result
    local p=$3 f=$4
    [ "$2" = 0 ] || [ "$f" -gt 0 ] || f=1      # died without saying which test
    [ $((p + f)) -gt 0 ] || f=1                # ran nothing
    passed=$((passed + p)); failed=$((failed + f))
    printf '%-36s %3d passed, %d failed  (%s s)\n' "$1" "$p" "$f" "$seconds"
    [ "$f" = 0 ] || { sed 's/^/    /' "$log" | tail -40; }
}
timed() { local t=$SECONDS; "$@" >"$log" 2>&1; rc=$?; seconds=$((SECONDS - t)); }
for t in "$B"/test_*; do
    [ -x "$t" ] && [ -f "$t" ] || continue
    case $t in *_gpu|*/test_gpt2) continue ;; esac
    timed "$t"
    if grep -qE '^[0-9]+ passed, [0-9]+ failed' "$log"; then
        read -r p f < <(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -1 | sed -E 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/')
    else
        p=$(grep -c '^\[       OK \]' "$log"); f=$(grep -cE '^\[  (FAILED|ERROR) *\] [a-zA-Z_]' "$log")
        [ "$f" = 0 ] || f=$(grep -E '^\[  (FAILED|ERROR) *\] [a-zA-Z_]' "$log" | sort -u | wc -l)
    fi
    count "${t##*/}" "$rc" "$p" "$f"
done
for t in dev/test/test_*.py; do
    [ -f "$t" ] || continue
    timed env TRAINER="$B/train_gpt_nvfp4_cpu" python3 "$t"
    total=$(sed -nE 's/^Ran ([0-9]+) tests?.*/\1/p' "$log" | tail -1); total=${total:-0}
    f=$(sed -nE 's/^FAILED \((.*)\)/\1/p' "$log" | tail -1 | grep -oE '(failures|errors)=[0-9]+' | awk -F= '{n += $2} END {print n + 0}'); f=${f:-0}
    skipped=$(sed -nE 's/.*skipped=([0-9]+).*/\1/p' "$log" | tail -1); skipped=${skipped:-0}
    count "${t##*/}" "$rc" $((total - f - skipped)) "$f"
    [ "$skipped" = 0 ] || echo "    $skipped skipped (python3 dev/test/${t##*/} -v says why)"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
