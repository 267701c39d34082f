#!/usr/bin/env bash
# Installs what is missing, builds, and runs every CPU test, then the same tests under AddressSanitizer and UBSan.
# Where nvcc exists, the CUDA sources are compiled too, the memory layout is checked and the machine code for Blackwell is read (nothing runs on a card).
#   ./scripts/test.sh [--no-install] [--quick]       --quick leaves the sanitizer run out
#   ./scripts/test.sh --faults [--no-install]        kills, full disks, bad bytes and the like, all of them (some minutes); then
#                                                    a tally. The other form does a tenth of them.
#   ./scripts/test.sh --fuzz SECONDS [--no-install]  fuzzes every reader of files for so long each (needs clang)
# The last line is the total: "N passed, N failed". Exit status 0 only if nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."
install=; quick=0; faults=0; fuzz=
usage() { echo "usage: ./scripts/test.sh [--no-install] [--quick | --faults | --fuzz SECONDS]" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        --no-install) install=--no-install ;;
        --quick) quick=1 ;;
        --faults) faults=1 ;;
        --fuzz) [[ ${2:-} =~ ^[0-9]+$ ]] || usage; fuzz=$2; shift ;;
        *) usage ;;
    esac
    shift
done
scripts/setup.sh $install
make --no-print-directory probe
jobs=$(getconf _NPROCESSORS_ONLN)
if [ $faults = 1 ]; then
    make --no-print-directory cpu
    exec python3 dev/test/faults.py
fi
[ -z "$fuzz" ] || exec dev/fuzz/fuzz.sh "$fuzz"
totals=$(mktemp); trap 'rm -f "$totals"' EXIT
status=0
# run NAME COMMAND... : runs one suite, whose last line is "N passed, N failed"; a suite that ends without it has failed.
run() {
    local name=$1 log; shift; log=$(mktemp)
    echo "== $name"
    local rc=0; "$@" 2>&1 | tee "$log" || rc=$?
    local line; line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -1 || true)
    if [ -z "$line" ]; then echo "0 passed, 1 failed" >>"$totals"; echo "== $name broke before its tests ended (exit status $rc)"; status=1
    else echo "$line" >>"$totals"; [ "$rc" = 0 ] || status=1; fi
    rm -f "$log"
}
run "CPU tests" bash -c "make --no-print-directory -j$jobs all-cpu-tests && make --no-print-directory test"
[ $quick = 1 ] || run "CPU tests under AddressSanitizer and UBSan" \
    bash -c "make --no-print-directory -j$jobs SANITIZE=1 all-cpu-tests && make --no-print-directory SANITIZE=1 test"
nvcc=$(sed -n 's/^NVCC := //p' build/config.mk)
if [ -n "$nvcc" ]; then
    run "CUDA sources compile" make --no-print-directory cuda-compile
    run "memory layout of the GPU program" make --no-print-directory test-layout
    run "SASS for Blackwell" dev/test/sass_check.sh "$nvcc"
else echo "== CUDA sources, SASS for Blackwell: no nvcc here, skipped"; fi
awk '{p += $1; f += $3} END {printf "%d passed, %d failed\n", p, f}' "$totals"
awk '{f += $3} END {exit f > 0}' "$totals" || status=1
exit $status
