#!/usr/bin/env bash
# Compiles each CUDA source for sm_90a, sm_100a and sm_120a (one pass each, no link). Warnings of ptxas about spills are shown.
# The trainer alone is compiled with NCCL and MPI where they were found, as the Makefile does.
#   dev/test/cuda_compile.sh NVCC "CUDNN_FLAGS" "CJSON_FLAGS" ["NCCL_FLAGS MPI_FLAGS"]
set -u
nvcc=${1:?path of nvcc}; eval "cudnn=(${2:-})"; eval "cjson=(${3:-})"
flags=(); for f in ${cudnn[@]+"${cudnn[@]}"} ${cjson[@]+"${cjson[@]}"}; do case $f in -I*|-D*) flags+=("$f") ;; esac; done
groups=(); eval "dist=(${4:-})"; for f in ${dist[@]+"${dist[@]}"}; do case $f in -I*|-D*) groups+=("$f") ;; esac; done
passed=0; failed=0; log=$(mktemp); object=$(mktemp); trap 'rm -f "$log" "$object"' EXIT
for source in train_gpt_nvfp4.cu test_gpt2.cu dev/cuda/*.cu dev/test/*.cu dev/bench/*.cu; do
    [ -f "$source" ] || continue
    [ "$source" != dev/test/test_memory_layout.cu ] || continue    # never runs on a card; has a target of its own
    more=(); [ "$source" != train_gpt_nvfp4.cu ] || more=(${groups[@]+"${groups[@]}"})
    if "$nvcc" -std=c++17 -O3 -I. "${flags[@]}" ${more[@]+"${more[@]}"} -Xcompiler "-ffp-contract=off -fopenmp" -c "$source" -o "$object" --threads 2 \
         -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100a,code=sm_100a -gencode arch=compute_120a,code=sm_120a >"$log" 2>&1
    then passed=$((passed + 1)); echo "compiled $source"
    else failed=$((failed + 1)); echo "FAILED $source"; tail -20 "$log"; fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
