#!/usr/bin/env bash
# Finds the compilers and libraries by compiling and linking a few lines with each, and writes what it found for make.
#   scripts/probe.sh OUT.mk        prints one line a dependency: what was found, or what its absence turns off
# A library that stands elsewhere is named by CUDA_HOME, NCCL_HOME, MPI_HOME, CUDNN_HOME, CJSON_HOME, OPENBLAS_HOME.
# Minimum versions: gcc 10 (or clang 12), cJSON 1.7.14, OpenBLAS 0.3.13, cmocka 1.1.5, CUDA 12.8, cuDNN 9.5, NCCL 2.18, OpenMPI 4.1.
set -u
out=${1:?the makefile fragment to write}
mkdir -p "$(dirname "$out")"
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
cc=${CC:-cc}
missing=0
mk=$tmp/config.mk; : >"$mk"

say() { printf '  %-10s %s\n' "$1" "$2"; }
put() { printf '%s := %s\n' "$1" "$2" >>"$mk"; }
# links FLAGS... : does the C program on standard input compile and link with these flags?
links() { cat >"$tmp/t.c"; "$cc" -std=c11 -D_GNU_SOURCE "$tmp/t.c" -o "$tmp/t" "$@" >"$tmp/log" 2>&1; }
# home VAR : compiler and linker flags for a library under $VAR, one per line (paths may hold spaces)
home_flags() { local h=$1; printf '%s\n' "-I$h/include" "-L$h/lib" "-L$h/lib64" "-L$h/lib/$(uname -m)-linux-gnu" "-Wl,-rpath,$h/lib" "-Wl,-rpath,$h/lib/$(uname -m)-linux-gnu"; }
quoted() { local s=; for f in "$@"; do s+=" '$f'"; done; printf '%s' "${s# }"; }

for name in CUDA_HOME NCCL_HOME MPI_HOME CUDNN_HOME CJSON_HOME OPENBLAS_HOME; do
    [ -z "${!name:-}" ] || [ -d "${!name}" ] || { echo "error: $name=${!name} is not a folder; name the one that holds include and lib, or unset it" >&2; exit 1; }
done
echo "looking for compilers and libraries:"
echo 'int main(void){return 0;}' | links || { echo "error: the C compiler '$cc' does not work; install one (Debian: apt install build-essential)"; cat "$tmp/log"; exit 1; }
say compiler "$("$cc" --version | head -1)"
put CC "$cc"
native=; echo 'int main(void){return 0;}' | links -march=native && native=-march=native
put NATIVE "$native"
if printf '#include <omp.h>\nint main(void){return omp_get_max_threads()<1;}' | links -fopenmp; then put OPENMP -fopenmp; say OpenMP "yes"
else put OPENMP ""; say OpenMP "no: loops run on one core"; fi

# try_library NAME MK-PREFIX HOME-VALUE PKG-CONFIG-NAME DEFAULT-LIBS : leaves flags in $found
try_library() {
    local source=$1 home=$2 pkg=$3 libs=$4; shift 4
    printf '%s' "$source" >"$tmp/probe_source.c"
    local -a flags=()
    if [ -n "$home" ]; then
        mapfile -t flags < <(home_flags "$home"); flags+=($libs)
        links "${flags[@]}" <"$tmp/probe_source.c" && { found=$(quoted "${flags[@]}"); return 0; }
        echo "error: $home was named for $pkg but a program does not link with it:"; tail -3 "$tmp/log"; exit 1
    fi
    if command -v pkg-config >/dev/null && pkg-config --exists "$pkg" 2>/dev/null; then
        read -r -a flags <<<"$(pkg-config --cflags --libs "$pkg")"
        links "${flags[@]}" <"$tmp/probe_source.c" && { found="${flags[*]}"; return 0; }
    fi
    links $libs <"$tmp/probe_source.c" && { found=$libs; return 0; }
    found=; return 1
}
version_of() { command -v pkg-config >/dev/null && pkg-config --modversion "$1" 2>/dev/null; }

cjson_source='#if __has_include(<cjson/cJSON.h>)
#include <cjson/cJSON.h>
#else
#include <cJSON.h>
#endif
int main(void){cJSON *j=cJSON_Parse("{}"); cJSON_Delete(j); return j==0;}'
if try_library "$cjson_source" "${CJSON_HOME:-}" libcjson -lcjson; then put CJSON_FLAGS "$found"; say cJSON "yes $(version_of libcjson)"
else say cJSON "NO: required; install it (Debian: apt install libcjson-dev) or set CJSON_HOME"; missing=1; put CJSON_FLAGS ""; fi

if try_library '#include <cblas.h>
int main(void){float a=1,c; cblas_sgemm(CblasRowMajor,CblasNoTrans,CblasNoTrans,1,1,1,1,&a,1,&a,1,0,&c,1); return c!=1;}' "${OPENBLAS_HOME:-}" openblas -lopenblas; then
    put OPENBLAS_FLAGS "$found"; say OpenBLAS "yes $(version_of openblas)"
else put OPENBLAS_FLAGS "-DNO_OPENBLAS"; say OpenBLAS "no: the CPU program multiplies matrices with its own slower loop (Debian: apt install libopenblas-dev)"; fi

if try_library '#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
int main(void){return 0;}' "" cmocka -lcmocka; then put CMOCKA_FLAGS "$found"; say cmocka "yes $(version_of cmocka)"
else put CMOCKA_FLAGS ""; say cmocka "no: make test is off (Debian: apt install libcmocka-dev)"; fi

mpicc=${MPI_HOME:+$MPI_HOME/bin/}mpicc
# The wrapper says what to compile and link with (OpenMPI --showme, MPICH -show); the program is built by cc and nvcc, not by it.
mpi_flags=
if command -v "$mpicc" >/dev/null; then
    mpi_flags=$("$mpicc" --showme:compile 2>/dev/null && "$mpicc" --showme:link 2>/dev/null) || mpi_flags=$("$mpicc" -show 2>/dev/null | cut -d' ' -f2-)
    mpi_flags=$(tr '\n' ' ' <<<"$mpi_flags")
fi
if [ -n "$mpi_flags" ] && printf '#include <mpi.h>\nint main(int c,char**v){MPI_Init(&c,&v);return MPI_Finalize();}' | links $mpi_flags; then
    put MPI_FLAGS "-DUSE_MPI $mpi_flags"
    nvcc_flags=-DUSE_MPI; for f in $mpi_flags; do case $f in -Wl,*) f=${f#-Wl,}; nvcc_flags+=" -Xlinker=${f//,/ -Xlinker=}" ;; -pthread) nvcc_flags+=" -Xcompiler -pthread" ;; *) nvcc_flags+=" $f" ;; esac; done
    put MPI_NVCC_FLAGS "$nvcc_flags"
    say MPI "yes $("$mpicc" --showme:version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -1)"
else put MPI_FLAGS ""; put MPI_NVCC_FLAGS ""; say MPI "no: mpirun cannot start it; several processes run over TCP, started with RANK and WORLD_SIZE (Debian: libopenmpi-dev)"; fi

nvcc=; for n in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc /usr/local/cuda/bin/nvcc; do [ -n "$n" ] && command -v "$n" >/dev/null && { nvcc=$(command -v "$n"); break; }; done
cuda_links() { cat >"$tmp/t.cu"; "$nvcc" -std=c++17 "$tmp/t.cu" -o "$tmp/tcu" "$@" >"$tmp/log" 2>&1; }
if [ -z "$nvcc" ]; then say CUDA "no nvcc: only the CPU program is built (set CUDA_HOME if the toolkit stands elsewhere)"
elif ! printf '#include <cublasLt.h>\n__global__ void k(){} int main(){cublasLtHandle_t h; k<<<1,1>>>(); return cublasLtCreate(&h);}' | cuda_links -lcublasLt; then
    say CUDA "nvcc found but a program with cuBLASLt does not build: $(grep -m1 -iE 'error|cannot|unsupported' "$tmp/log" | cut -c1-160)"; nvcc=
else
    say CUDA "yes $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') ($nvcc)"
    # A C test holds our conversions against the toolkit's own. As system headers: their warnings are not ours.
    headers=; include=$(cd "$(dirname "$(readlink -f "$nvcc")")/../include" 2>/dev/null && pwd)
    [ -z "$include" ] || [ "$include" = /usr/include ] || headers="-isystem '$include'"
    if printf '#include <cuda_fp4.h>\n#include <cuda_fp8.h>\nint main(void){return __nv_cvt_float_to_fp4(0.0f,__NV_E2M1,cudaRoundNearest);}' | eval "links $headers"; then put CUDA_HEADERS "$headers"
    else say "CUDA" "no cuda_fp4.h for C beside nvcc: test_convert compares with a second definition of ours only"; fi
    gencodes=
    if [ -n "${GPU_ARCHS:-}" ]; then archs=$GPU_ARCHS; why="GPU_ARCHS"
    else
        capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d '. ')
        case "$capability" in 90|10[0-9]|12[0-9]) archs=sm_${capability}a; why="this machine's card" ;; [89][0-9]) archs=sm_$capability; why="this machine's card" ;; *) archs="sm_80 sm_90a sm_100a sm_120a"; why="no card here: all" ;; esac
    fi
    for a in $archs; do gencodes+=" -gencode arch=compute_${a#sm_},code=$a"; done
    put GENCODES "$gencodes"; say "GPU archs" "$archs ($why; GPU_ARCHS=\"sm_90a ...\" chooses)"
    # home_flags for nvcc, which takes the linker's options one by one (and, unlike cc, no path with a space)
    cuda_home() { [ -z "$1" ] || printf '%s\n' "-I$1/include" "-L$1/lib" "-L$1/lib64" "-L$1/lib/$(uname -m)-linux-gnu" -Xlinker "-rpath=$1/lib"; }
    # Python packages bring libraries by their full name only.
    cuda_library() { local lib=$1 home=$2 file; for file in "$home"/lib/lib"$lib".so.*; do [ -n "$home" ] && [ ! -e "$home/lib/lib$lib.so" ] && [ -e "$file" ] && { echo "-l:${file##*/}"; return; }; done; echo "-l$lib"; }
    mapfile -t cudnn < <(cuda_home "${CUDNN_HOME:-}"); cudnn+=("$(cuda_library cudnn "${CUDNN_HOME:-}")")
    if printf '#include <cudnn.h>\nint main(){cudnnBackendDescriptor_t d; return cudnnBackendCreateDescriptor(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,&d);}' | cuda_links "${cudnn[@]}"; then
        put CUDNN_FLAGS "-DUSE_CUDNN $(quoted "${cudnn[@]}")"; say cuDNN "yes"
    elif [ -n "${CUDNN_HOME:-}" ]; then echo "error: CUDNN_HOME=$CUDNN_HOME was named but a program does not link with it:"; tail -3 "$tmp/log"; exit 1
    else put CUDNN_FLAGS ""; say cuDNN "no: attention uses the program's own kernel (set CUDNN_HOME if it stands elsewhere)"; fi
    mapfile -t nccl < <(cuda_home "${NCCL_HOME:-}"); nccl+=("$(cuda_library nccl "${NCCL_HOME:-}")")
    if printf '#include <nccl.h>\nint main(){int v; return ncclGetVersion(&v);}' | cuda_links "${nccl[@]}"; then
        put NCCL_FLAGS "-DUSE_NCCL $(quoted "${nccl[@]}")"; say NCCL "yes"
    elif [ -n "${NCCL_HOME:-}" ]; then echo "error: NCCL_HOME=$NCCL_HOME was named but a program does not link with it:"; tail -3 "$tmp/log"; exit 1
    else put NCCL_FLAGS ""; say NCCL "no: the GPU program runs on one card (several only with --dist-host-staged, slowly)"; fi
fi
put NVCC "$nvcc"
if [ $missing = 1 ]; then echo "error: a required library is missing (above)"; exit 1; fi
cmp -s "$mk" "$out" || mv "$mk" "$out"   # unchanged: nothing is built anew
