// cuda/common.cuh: what every kernel file uses: error checks, 16-byte vectors of BF16, warp and block reductions.
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../common.h"
#include "../formats.h"

typedef __nv_bfloat16 bf16;

// A CUDA call that failed: where, which call, and CUDA's own words.
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
FN void cuda_check(cudaError_t e, const char *call, const char *file, int line) {
    if (e != cudaSuccess) fatal("%s:%d: %s failed: %s (%s)", file, line, call, cudaGetErrorString(e), cudaGetErrorName(e));
}
// After a launch. Launches are asynchronous: a kernel's own fault shows at the next synchronizing call.
#define CUDA_LAUNCHED() CUDA_CHECK(cudaGetLastError())

FN int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Blocks that share `work` pieces, where the device holds `resident` at once. Blocks with equal shares end at different times, as an SM's scheduler
// prefers one of its blocks and SMs are not equally far from memory: a grid of one wave leaves SMs half empty before its end (forward quantizer: 24
// of 32 warps on average), and later blocks fill the gaps. Up to `waves`, as long as a block has at least `least` pieces.
FN int grid_blocks(int64_t work, int64_t resident, int least, int waves) {
    const int64_t full = work / (resident * least), blocks = resident * (full < 1 ? 1 : full < waves ? full : waves);
    return (int)(work < blocks ? work : blocks);
}

// Eight BF16 values in one 16-byte load or store.
struct alignas(16) Bf16x8 {
    uint4 u;
    __device__ __forceinline__ float get(int i) const {
        const uint32_t w = i < 2 ? u.x : i < 4 ? u.y : i < 6 ? u.z : u.w;
        return __uint_as_float(i & 1 ? w & 0xFFFF0000u : w << 16);
    }
};
__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi) {  // lo in the lower half, nearest even
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}
__device__ __forceinline__ Bf16x8 load8(const bf16 *p) { Bf16x8 v; v.u = *reinterpret_cast<const uint4 *>(p); return v; }
// Streaming: read once, not kept in cache.
__device__ __forceinline__ Bf16x8 load8_streaming(const bf16 *p) { Bf16x8 v; v.u = __ldcs(reinterpret_cast<const uint4 *>(p)); return v; }
__device__ __forceinline__ void unpack8(Bf16x8 v, float x[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = v.get(i);
}
__device__ __forceinline__ Bf16x8 pack8(const float x[8]) {
    Bf16x8 v;
    v.u = make_uint4(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]), pack_bf16x2(x[4], x[5]), pack_bf16x2(x[6], x[7]));
    return v;
}
__device__ __forceinline__ void store8(bf16 *p, Bf16x8 v) { *reinterpret_cast<uint4 *>(p) = v.u; }
__device__ __forceinline__ void store8_streaming(bf16 *p, Bf16x8 v) { __stcs(reinterpret_cast<uint4 *>(p), v.u); }

// Address in shared memory, as the PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// Four 8x8 matrices of BF16, each transposed: lane 4g+j gets rows 2j and 2j+1 of column g, lane l gave the address of row l%8 of matrix l/8.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t w[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address) : "memory");
}
static const float LOG2_E = 1.4426950408889634f;
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, o));
    return x;
}
// Largest of non-negative floats in global memory: their order is that of their bits, and max does not depend on order.
__device__ __forceinline__ void atomic_max_nonneg(float *p, float x) { atomicMax(reinterpret_cast<unsigned int *>(p), __float_as_uint(x)); }

#endif
