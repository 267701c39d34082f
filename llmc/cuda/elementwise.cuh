// cuda/elementwise.cuh: what the element-wise kernels share: persistent grids, positions in a row, amax in passing.
#ifndef LLMC_CUDA_ELEMENTWISE_CUH
#define LLMC_CUDA_ELEMENTWISE_CUH

#include "common.cuh"

#define ELEMENTWISE_THREADS 256

// Blocks that fill the device once: a persistent grid, whose blocks stride over the work. Kernels that end with one atomic
// or one partial sum a block need few blocks, and no block is launched into a full device. waves: see grid_blocks().
template <typename Kernel>
static int persistent_blocks(Kernel kernel, int threads, size_t shared_bytes, int64_t work_blocks, int waves = 1) {
    int device, sms, per_sm;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes));
    if (per_sm < 1) fatal("a kernel of %d threads and %zu bytes of shared memory does not fit this device", threads, shared_bytes);
    return grid_blocks(work_blocks, (int64_t)sms * per_sm, 2, waves);
}

// Vector `index` (16 bytes, 8 values) of a (rows, vectors) matrix as (row, col), advanced by a fixed stride without dividing.
struct VectorCursor {
    int64_t row, step_rows;
    int col, step_cols, vectors;
    __device__ VectorCursor(int64_t index, int64_t stride, int vectors_) : vectors(vectors_) {
        row = index / vectors; col = (int)(index - row * vectors);
        step_rows = stride / vectors; step_cols = (int)(stride - step_rows * vectors);
    }
    __device__ __forceinline__ void next() {
        row += step_rows; col += step_cols;
        if (col >= vectors) { col -= vectors; row++; }
    }
};

// Running max |x| of stored BF16 pairs: one instruction for the magnitude, one for the max, two values each. NaN is passed
// over (non-finite values are found by the loss and the gradient norm).
struct AmaxPairs {
    uint32_t pair;
    __device__ __forceinline__ AmaxPairs() : pair(0) {}
    __device__ __forceinline__ void add(uint32_t values) {
        values &= 0x7FFF7FFFu;
        __nv_bfloat162 m = __hmax2(*reinterpret_cast<__nv_bfloat162 *>(&pair), *reinterpret_cast<__nv_bfloat162 *>(&values));
        pair = *reinterpret_cast<uint32_t *>(&m);
    }
    __device__ __forceinline__ void add(Bf16x8 v) { add(v.u.x); add(v.u.y); add(v.u.z); add(v.u.w); }
    __device__ __forceinline__ float value() const { return fmaxf(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)); }
};
// *slot = max(*slot, the block's largest x): one atomic a block. Every thread of the block must call it.
__device__ __forceinline__ void block_amax_flush(float x, float *slot) {
    __shared__ float warps[32];
    x = warp_max(x);
    __syncthreads();  // an earlier call's reads are done
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        x = warp_max(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0.0f);
        if (threadIdx.x == 0 && x > 0.0f) atomic_max_nonneg(slot, x);
    }
}

#endif
