// cuda/attention_tile.cuh: tiles of BF16 in shared memory, and their products on the tensor cores.
//
// A tile (R, D) lies in shared memory as D/64 panels of (R, 64): rows of 128 bytes whose eight 16-byte chunks are XORed with
// row % 8. That is both conflict-free for ldmatrix and the 128-byte swizzle wgmma expects, so one kernel source serves both:
// on Hopper (sm_90a) the products are wgmma, on every other architecture mma.sync. Both leave the same fragment in a thread:
// of a warp group's 64 rows, warp w holds 16w..16w+15, and acc[n][e] is row 16w + lane/4 + 8*(e/2), column 8n + 2*(lane%4) + e%2.
// Tiles start at multiples of 1024 bytes.
#ifndef LLMC_CUDA_ATTENTION_TILE_CUH
#define LLMC_CUDA_ATTENTION_TILE_CUH

#include "common.cuh"

// Asynchronous copies into shared memory; an invalid source is not read and leaves zeros.
__device__ __forceinline__ void copy_async16(uint32_t dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async4(uint32_t dst, const void *src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are in flight, then makes what arrived visible to the whole block and to wgmma.
template <int N>
__device__ __forceinline__ void copy_wait_block() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}

// Byte offset of a row's 16-byte chunk (8 columns) in a tile of R rows.
template <int R>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
    return (uint32_t)((chunk >> 3) * (R * 128) + row * 128 + (((chunk ^ row) & 7) << 4));
}
// Starts copying rows 0..R-1 of a (rows, D) matrix with row stride `stride` elements; rows from `rows` on become zero.
// A thread's chunks lie a multiple of 8 rows apart, so that their swizzle is one and their addresses differ by constants.
template <int R, int D, int THREADS>
__device__ __forceinline__ void tile_load(uint32_t tile, const bf16 *g, int64_t stride, int rows) {
    const int ROWS_APART = THREADS * 8 / D, COPIES = R / ROWS_APART;
    static_assert(ROWS_APART % 8 == 0 && R % ROWS_APART == 0, "tile_load: threads and tile do not fit");
    const int row = (int)threadIdx.x / (D / 8), chunk = (int)threadIdx.x % (D / 8);
    const uint32_t dst = tile + tile_offset<R>(row, chunk);
    const bf16 *src = g + row * stride + chunk * 8;
    if (rows >= R) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) copy_async16(dst + i * ROWS_APART * 128, src + i * (ROWS_APART * stride), true);
        return;
    }
    for (int i = 0; i < COPIES; i++) {
        const bool valid = row + i * ROWS_APART < rows;
        copy_async16(dst + i * ROWS_APART * 128, valid ? src + i * (ROWS_APART * stride) : g, valid);
    }
}

__device__ __forceinline__ void ldmatrix4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void mma_m16n8k16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#include "attention_wgmma.cuh"

template <int COLUMNS8>
__device__ __forceinline__ void acc_clear(float (&acc)[COLUMNS8][4]) {
#pragma unroll
    for (int n = 0; n < COLUMNS8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
}
// Multiplies this thread's rows 0 and 8 by factors of their own.
template <int COLUMNS8>
__device__ __forceinline__ void acc_scale(float (&acc)[COLUMNS8][4], float row0, float row8) {
#pragma unroll
    for (int n = 0; n < COLUMNS8; n++) { acc[n][0] *= row0; acc[n][1] *= row0; acc[n][2] *= row8; acc[n][3] *= row8; }
}

// The thread's warp group, in a form the compiler knows to be the same for the whole warp.
__device__ __forceinline__ int warp_group(void) { return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 7, 0); }

// acc (64, N) = A (64, K) B (N, K)^T: A is 64 rows of a tile of RA rows (`a` the address of the first), B a whole tile.
// WG: on wgmma where the architecture has it. Then the result is there after gemm_wait, and several may be in flight.
template <bool WG, int N, int K, int RA>
__device__ __forceinline__ void gemm_shared(float (&acc)[N / 8][4], uint32_t a, uint32_t b) {
    if (WG && HAS_WGMMA) { wgmma_shared<N, K, RA>(acc, a, b); return; }
    const int lane = threadIdx.x & 31, warp_row = (threadIdx.x >> 5 & 3) * 16;
    acc_clear(acc);
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint32_t fa[4], fb[4];
        ldmatrix4(fa, a + tile_offset<RA>(warp_row + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
            ldmatrix4(fb, b + tile_offset<N>(n * 8 + (lane & 7) + (lane >> 4 << 3), 2 * k + (lane >> 3 & 1)));
            mma_m16n8k16(acc[n], fa, fb[0], fb[1]);
            mma_m16n8k16(acc[n + 1], fa, fb[2], fb[3]);
        }
    }
}
// acc (64, N) += A (64, K) B (K, N): A the fragments of gemm_pack, B a whole tile of K rows.
template <bool WG, int N, int K>
__device__ __forceinline__ void gemm_registers(float (&acc)[N / 8][4], uint32_t (&a)[K / 16][4], uint32_t b) {
    if (WG && HAS_WGMMA) { wgmma_registers<N, K>(acc, a, b); return; }
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
            uint32_t fb[4];
            ldmatrix_transposed(fb, b + tile_offset<K>(k * 16 + (lane & 15), n + (lane >> 4)));
            mma_m16n8k16(acc[n], a[k], fb[0], fb[1]);
            mma_m16n8k16(acc[n + 1], a[k], fb[2], fb[3]);
        }
}
// Waits until at most N products are in flight; `acc` is the result of one that thereby ended.
template <bool WG, int N, int COLUMNS8>
__device__ __forceinline__ void gemm_wait(float (&acc)[COLUMNS8][4]) {
    if (WG && HAS_WGMMA) wgmma_wait<N, COLUMNS8>(acc);
}
// A result (64, K) rounded to BF16 as the A operand of a further product.
template <int K>
__device__ __forceinline__ void gemm_pack(uint32_t (&a)[K / 16][4], const float (&acc)[K / 8][4]) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16x2(acc[2 * k + i / 2][i % 2 * 2], acc[2 * k + i / 2][i % 2 * 2 + 1]);
}

// Writes the warp's 16 rows of acc (64, D), as BF16, to rows of a matrix: through the same rows of a shared tile (of R rows,
// no longer read by anybody), so that the stores are whole 16-byte chunks. row: the warp's first in
// the tile; g: the warp's first in the matrix, of which `rows` are stored.
template <int R, int D>
__device__ __forceinline__ void tile_store_warp(bf16 *g, int64_t stride, int rows, unsigned char *tile, int row, const float (&acc)[D / 8][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(uint32_t *)(tile + tile_offset<R>(row + lane / 4 + 8 * h, n) + lane % 4 * 4) = pack_bf16x2(acc[n][2 * h], acc[n][2 * h + 1]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int at = lane + 32 * i, r = at / (D / 8), chunk = at % (D / 8);
        if (r < rows) *(uint4 *)(g + r * stride + chunk * 8) = *(const uint4 *)(tile + tile_offset<R>(row + r, chunk));
    }
}

#endif
