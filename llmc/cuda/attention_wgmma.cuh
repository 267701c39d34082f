// cuda/attention_wgmma.cuh: Hopper's warp-group products (wgmma, PTX ISA 8.0+, sm_90a) for attention_tile.cuh.
//
// Operands are tiles in the 128-byte swizzle. As A, or as B = (N, K), the inner dimension is contiguous ("K-major"): a step of 16
// along K is 32 bytes further in the row. As B = (K, N) the outer dimension is contiguous ("MN-major"): a step of 16 along K is
// 16 rows further, and panels of 64 columns lie K*128 bytes apart.
#ifndef LLMC_CUDA_ATTENTION_WGMMA_CUH
#define LLMC_CUDA_ATTENTION_WGMMA_CUH

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum { HAS_WGMMA = 1 };

// Shared-memory matrix descriptor: bits 0-13 address/16, 16-29 distance of 64-column panels/16 (MN-major only), 32-45 distance
// of groups of 8 rows/16, 62-63 = 1: 128-byte swizzle. In two words, so that a step further in the tile is one addition:
// addresses stay below 2^18, no carry leaves bits 0-13.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address, uint32_t panel_bytes) { return address >> 4 | panel_bytes >> 4 << 16; }
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t low) { return (uint64_t)low | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62; }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving accesses of these registers over the asynchronous products around it.
template <int COLUMNS8>
__device__ __forceinline__ void wgmma_pin(float (&acc)[COLUMNS8][4]) {
#pragma unroll
    for (int n = 0; n < COLUMNS8; n++) asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
}
template <int STEPS>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[STEPS][4]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
}
template <int N, int COLUMNS8>
__device__ __forceinline__ void wgmma_wait(float (&acc)[COLUMNS8][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    wgmma_pin(acc);
}

// Operand lists of the instructions below: four accumulators, and eight times four.
#define WGMMA_ACC4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_ACC32(d, n) WGMMA_ACC4(d, n), WGMMA_ACC4(d, n + 1), WGMMA_ACC4(d, n + 2), WGMMA_ACC4(d, n + 3), \
                          WGMMA_ACC4(d, n + 4), WGMMA_ACC4(d, n + 5), WGMMA_ACC4(d, n + 6), WGMMA_ACC4(d, n + 7)

// One step along K: d (64, 128) = A B^T (+ d when `accumulate`), A and B by descriptors, both K-major.
__device__ __forceinline__ void wgmma_step(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0;\n}\n"
                 : WGMMA_ACC32(d, 0), WGMMA_ACC32(d, 8)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// One step along K: d (64, 64) = A B^T (+ d when `accumulate`), A and B by descriptors, both K-major.
__device__ __forceinline__ void wgmma_step(float (&d)[8][4], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}\n"
                 : WGMMA_ACC32(d, 0)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// One step along K: d (64, 128) += A B, A in registers, B by descriptor, MN-major.
__device__ __forceinline__ void wgmma_step(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : WGMMA_ACC32(d, 0), WGMMA_ACC32(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// One step along K: d (64, 64) += A B, A in registers, B by descriptor, MN-major.
__device__ __forceinline__ void wgmma_step(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
                 : WGMMA_ACC32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d (64, N) = A B^T as one group in flight; see gemm_shared.
template <int N, int K, int RA>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 8][4], uint32_t a, uint32_t b) {
    wgmma_pin(d);
    wgmma_fence();
    const uint32_t low_a = wgmma_descriptor_low(a, 16), low_b = wgmma_descriptor_low(b, 16);
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        wgmma_step(d, wgmma_descriptor(low_a + (k / 4 * (RA * 128) + k % 4 * 32) / 16), wgmma_descriptor(low_b + (k / 4 * (N * 128) + k % 4 * 32) / 16), k > 0);
    wgmma_commit();
}
// d (64, N) += A B as one group in flight; see gemm_registers.
template <int N, int K>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 8][4], uint32_t (&a)[K / 16][4], uint32_t b) {
    wgmma_pin(d);
    wgmma_pin(a);
    wgmma_fence();
    const uint32_t low_b = wgmma_descriptor_low(b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma_step(d, a[k], wgmma_descriptor(low_b + k * 2048 / 16));
    wgmma_commit();
}

#else  // no wgmma on this architecture: named only so that the discarded branch compiles

enum { HAS_WGMMA = 0 };
template <int N, int COLUMNS8>
__device__ __forceinline__ void wgmma_wait(float (&)[COLUMNS8][4]) {}
template <int N, int K, int RA>
__device__ __forceinline__ void wgmma_shared(float (&)[N / 8][4], uint32_t, uint32_t) {}
template <int N, int K>
__device__ __forceinline__ void wgmma_registers(float (&)[N / 8][4], uint32_t (&)[K / 16][4], uint32_t) {}

#endif
#endif
