#!/usr/bin/env bash
# Reads the machine code for Blackwell: the conversions of cuda/convert.cuh and the quantizers that write packed codes must hold the hardware's
# conversion instructions. A target that fell back in silence (a plain sm_100 or sm_120, say) fails.
# Also runs test_convert over all 2^32 floats against the toolkit's conversions.
#   dev/test/sass_check.sh NVCC
# Disassembles with the toolkit's nvdisasm, else with one on the PATH, else with the Python package nvidia-cuda-nvdisasm, which it puts into
# build/disassembler (from PyPI; without a network, run that command elsewhere and bring the folder). Needs no card. The last line is
# "N passed, N failed".
set -u
nvcc=${1:?path of nvcc}
cd "$(dirname "$0")/../.."
passed=0; failed=0
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
ok() { passed=$((passed + 1)); echo "ok      $*"; }
bad() { failed=$((failed + 1)); echo "FAILED  $*"; }
finish() { echo "$passed passed, $failed failed"; [ $failed = 0 ]; exit; }

disassembler() { # -> its path
    local beside; beside=$(dirname "$nvcc")/nvdisasm
    [ -x "$beside" ] && { echo "$beside"; return; }
    command -v nvdisasm && return
    local python=python3 found
    [ -x /usr/bin/python3 ] && /usr/bin/python3 -m pip --version >/dev/null 2>&1 && python=/usr/bin/python3
    found=$(find build/disassembler -name nvdisasm -type f 2>/dev/null | head -1)
    if [ -z "$found" ]; then
        "$python" -m pip install --quiet --target build/disassembler nvidia-cuda-nvdisasm >"$folder/pip" 2>&1 || { grep -v WARNING "$folder/pip" | tail -2 >&2; return 1; }
        found=$(find build/disassembler -name nvdisasm -type f | head -1)
    fi
    chmod +x "$found" && echo "$found"
}
nvdisasm=$(disassembler) && "$nvdisasm" --version >/dev/null 2>&1 ||
    { bad "no nvdisasm, so the machine code was not read: python3 -m pip install --target build/disassembler nvidia-cuda-nvdisasm"; finish; }

cat >"$folder/convert.cu" <<'CUDA'
#include "llmc/cuda/convert.cuh"
extern "C" __global__ void two_codes(uint32_t *out, const float *in) { out[threadIdx.x] = convert_e2m1x2(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]); }
extern "C" __global__ void eight_codes(uint32_t *out, const float *in) {
    float v[8];
    for (int i = 0; i < 8; i++) v[i] = in[8 * threadIdx.x + i];
    out[threadIdx.x] = convert_e2m1x8_numbers(v);
}
extern "C" __global__ void two_scales(uint32_t *out, const float *in) { out[threadIdx.x] = convert_e4m3x2(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]); }
CUDA
cat >"$folder/quantizers.cu" <<'CUDA'
#include "llmc/cuda/quantize.cuh"
void use(cudaStream_t s, OperandSpec spec, const bf16 *x, float *f, uint8_t *b, EdenAddress a) {
    quantize_forward_native_launch(s, &spec, x, 128, 128, f, b, b, f, f, f);
    eden_both_native_launch(s, x, 128, 128, b, b, b, b, a, a, b, f);
    eden_requant_native_launch(s, b, b, 128, 128, b, b, a, f, f, b, f);
}
CUDA
# compile SOURCE ARCHITECTURE -> SOURCE.ARCHITECTURE.sass
compile() {
    "$nvcc" -std=c++17 -O3 -I. -arch="$2" -cubin "$folder/$1.cu" -o "$folder/$1.cubin" >"$folder/log" 2>&1 || { tail -5 "$folder/log"; return 1; }
    "$nvdisasm" -c "$folder/$1.cubin" >"$folder/$1.$2.sass"
}
# least SOURCE ARCHITECTURE KERNEL INSTRUCTION : how often in that of the kernels whose (mangled) name matches KERNEL which has fewest
least() {
    awk -v kernel="$3" -v what="$4" '/^[ \t]*\.section[ \t]+\.text\./ {inside = $0 ~ kernel; if (inside) seen[$0] = 0; name = $0} inside && index($0, what) {seen[name]++}
        END {for (k in seen) if (!any++ || seen[k] < low) low = seen[k]; print any ? low : "no such kernel, 0"}' "$folder/$1.$2.sass"
}
# expect SOURCE ARCHITECTURE KERNEL INSTRUCTION LEAST [NAME]
expect() {
    local n; n=$(least "$1" "$2" "$3" "$4")
    if [[ $n =~ ^[0-9]+$ ]] && [ "$n" -ge "$5" ]; then ok "$2 ${6:-$3}: $n $4"
    else bad "$2 ${6:-$3}: $n $4, at least $5 are needed: it fell back to software"; fi
}
E2M1=F2FP.SATFINITE.E2M1.F32 E4M3=F2FP.SATFINITE.E4M3.F32
for arch in sm_100a sm_103a sm_120a sm_121a sm_120f; do
    compile convert $arch || { bad "$arch does not compile"; continue; }
    expect convert $arch two_codes $E2M1 1
    expect convert $arch eight_codes $E2M1 4
    expect convert $arch two_scales $E4M3 1
done
# The check can fail: without the family's own features there is no such instruction.
if compile convert sm_120; then
    n=$(least convert sm_120 eight_codes $E2M1)
    [ "$n" = 0 ] && ok "sm_120 eight_codes: none, by software, as expected" || bad "sm_120 eight_codes: $n $E2M1 where there can be none: this check reads the wrong thing"
else bad "sm_120 does not compile"; fi
for arch in sm_100a sm_120a; do
    compile quantizers $arch || { bad "the quantizers do not compile for $arch"; continue; }
    # A thread of the forward has a block: 16 values, two to an instruction, and its scale. One of MS-EDEN's packed kernels has 32 values of a run; its
    # scales are rounded stochastically, which is software's on every target (convert.cuh says why).
    expect quantizers $arch 'forward_kernelIL11ForwardMode[01]ELb1E' $E2M1 8 'forward_kernel, packed'
    expect quantizers $arch 'forward_kernelIL11ForwardMode[01]ELb1E' $E4M3 1 'forward_kernel, packed'
    expect quantizers $arch 'eden_kernel.*EdenForm1E' $E2M1 16 'eden_kernel, packed'
done

${CC:-cc} -std=c11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra -I. -isystem "$(dirname "$nvcc")/../include" \
    dev/test/test_convert.c -o "$folder/test_convert" -lcmocka -lm || bad "test_convert.c does not compile"
if [ -x "$folder/test_convert" ]; then
    "$folder/test_convert" --all >"$folder/log" 2>&1; rc=$?
    grep -q "against the CUDA toolkit" "$folder/log" || rc=1
    [ $rc = 0 ] && ok "e2m1_encode and e4m3_encode: all 2^32 floats as the toolkit converts them" || { cat "$folder/log"; bad "e2m1_encode, e4m3_encode: see above"; }
fi
finish
