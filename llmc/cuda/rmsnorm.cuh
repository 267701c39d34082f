// cuda/rmsnorm.cuh: RMSNorm fused with the residual addition before it (Zhang and Sennrich, arXiv 1910.07467).
//
//   residual = residual_in + delta;   rstd = 1/sqrt(mean(residual^2) + eps);   normed = residual * rstd * gain
//
// The residual stream is BF16; statistics are taken in float32 from the stored (rounded) residual, so that backward, which reads
// the stored one, differentiates the forward that ran.
//
// A row is held in registers by 1, 2, 4 or 8 warps, at most 4 vectors of 8 values a lane, so that it is read once.
#ifndef LLMC_CUDA_RMSNORM_CUH
#define LLMC_CUDA_RMSNORM_CUH

#include "elementwise.cuh"

#define RMSNORM_WARPS 8                      // of a block
#define RMSNORM_MAX_WIDTH (RMSNORM_WARPS * 32 * 4 * 8)
#define RMSNORM_BACKWARD_BLOCKS_PER_SM 2

// Sum over the WARPS warps that share a row, the same in every lane, always added in the same order. `turn` alternates from call to call, so
// that one barrier a call is enough. Each row has its own barrier: rows that waited for each other would load, and compute, all at once.
template <int WARPS>
__device__ __forceinline__ float row_sum(float x, int turn) {
    x = warp_sum(x);
    if (WARPS > 1) {
        __shared__ float sums[2][RMSNORM_WARPS];
        const int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
        if (threadIdx.x % 32 == 0) sums[turn][warp] = x;
        if (WARPS == RMSNORM_WARPS) __syncthreads();
#pragma unroll
        for (int row = 0; WARPS < RMSNORM_WARPS && row < RMSNORM_WARPS / WARPS; row++)  // numbers known to the compiler: it reserves no others
            if (row == warp / WARPS) asm volatile("bar.sync %0, %1;" ::"r"(1 + row), "n"(WARPS * 32) : "memory");
        x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += sums[turn][first + w];
    }
    return x;
}

// Which row and which vectors of it a thread owns: lane `lane` of the row's 32*WARPS lanes owns vectors lane, lane + 32*WARPS ...
template <int WARPS>
struct RowLanes {
    static constexpr int ROWS = RMSNORM_WARPS / WARPS;       // rows a block works on at a time
    int slot = threadIdx.x / (32 * WARPS), lane = threadIdx.x % (32 * WARPS);
    __device__ __forceinline__ int vector(int i) const { return lane + i * 32 * WARPS; }
};

// Floor: 8 bytes a value with delta, 4 without.
template <int VECTORS, int WARPS, bool DELTA>
__global__ void __launch_bounds__(RMSNORM_WARPS * 32) rmsnorm_forward_kernel(bf16 *residual_out, bf16 *normed, float *rstd, float *amax,
        const bf16 *residual_in, const bf16 *delta, const bf16 *gain, int64_t rows, int width, float eps) {
    const RowLanes<WARPS> own;
    const int vectors = width / 8;
    Bf16x8 g[VECTORS], x[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) if (own.vector(i) < vectors) g[i] = load8(gain + own.vector(i) * 8);
    AmaxPairs largest;
    int turn = 0;
    // The warps of a row go round equally often: row_sum() may hold a barrier.
    for (int64_t first = (int64_t)blockIdx.x * own.ROWS; first < rows; first += (int64_t)gridDim.x * own.ROWS, turn ^= 1) {
        const int64_t row = first + own.slot, base = row * width;
        const bool live = row < rows;
        Bf16x8 d[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            x[i] = load8(residual_in + base + own.vector(i) * 8);
            if (DELTA) d[i] = load8_streaming(delta + base + own.vector(i) * 8);
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            float v[8], a[8];
            unpack8(x[i], v);
            if (DELTA) {
                unpack8(d[i], a);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] += a[j];
                x[i] = pack8(v);
                store8(residual_out + base + own.vector(i) * 8, x[i]);
                unpack8(x[i], v);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) squares = fmaf(v[j], v[j], squares);
        }
        const float r = rsqrtf(row_sum<WARPS>(squares, turn) / (float)width + eps);
        if (live && own.lane == 0) rstd[row] = r;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            float v[8], w[8];
            unpack8(x[i], v); unpack8(g[i], w);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = v[j] * r * w[j];
            const Bf16x8 out = pack8(v);
            largest.add(out);
            store8(normed + base + own.vector(i) * 8, out);
        }
    }
    if (amax) block_amax_flush(largest.value(), amax);
}

// normed once more. A thread owns a vector; floor: 4 bytes a value.
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) rmsnorm_recompute_kernel(bf16 *__restrict__ normed, const bf16 *__restrict__ residual,
        const float *__restrict__ rstd, const bf16 *__restrict__ gain, int64_t rows, int width) {
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, (int64_t)gridDim.x * ELEMENTWISE_THREADS, width / 8);
    for (; at.row < rows; at.next()) {
        float v[8], w[8];
        const int64_t i = at.row * width + at.col * 8;
        unpack8(load8(residual + i), v); unpack8(load8(gain + at.col * 8), w);
        const float r = rstd[at.row];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * r * w[j];
        store8(normed + i, pack8(v));
    }
}

// With n = residual * rstd and s = mean(gain * d_normed * n) over the row:
//   d_residual_out = d_residual_in + rstd * (gain * d_normed - n * s);   d gain += sum over rows of d_normed * n
// Multiply-adds are written out, so that every variant of the kernel gives the same bits.
// A block keeps its rows' gain gradient in registers and leaves one partial row. Floor: 8 bytes a value (d_residual_in NULL: 6;
// NORMED: 2 more).
template <int VECTORS, int WARPS, bool NORMED>
__global__ void __launch_bounds__(RMSNORM_WARPS * 32, RMSNORM_BACKWARD_BLOCKS_PER_SM) rmsnorm_backward_kernel(bf16 *d_residual_out,
        float *partials, bf16 *normed, const bf16 *d_residual_in, const bf16 *d_normed, const bf16 *residual, const float *rstd,
        const bf16 *gain, int64_t rows, int width) {
    const RowLanes<WARPS> own;
    const int vectors = width / 8;
    float dgain[VECTORS][8] = {};
    int turn = 0;
    for (int64_t first = (int64_t)blockIdx.x * own.ROWS; first < rows; first += (int64_t)gridDim.x * own.ROWS, turn ^= 1) {
        const int64_t row = first + own.slot, base = row * width;
        const bool live = row < rows;
        Bf16x8 x[VECTORS], dy[VECTORS], d[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            const int64_t at = base + own.vector(i) * 8;
            x[i] = load8_streaming(residual + at);
            dy[i] = load8_streaming(d_normed + at);
            if (d_residual_in) d[i] = load8_streaming(d_residual_in + at);
            else d[i].u = make_uint4(0, 0, 0, 0);
        }
        const float r = live ? rstd[row] : 0.0f;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            const Bf16x8 g = load8(gain + own.vector(i) * 8);  // from L1: registers are for the rows and their sums
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float n = x[i].get(j) * r, dn = dy[i].get(j);
                dgain[i][j] = fmaf(dn, n, dgain[i][j]);
                dot = fmaf(g.get(j) * dn, n, dot);
            }
        }
        const float s = row_sum<WARPS>(dot, turn) / (float)width;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (live && own.vector(i) < vectors) {
            float v[8], again[8];
            const Bf16x8 g = load8(gain + own.vector(i) * 8);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float n = x[i].get(j) * r;
                v[j] = fmaf(r, fmaf(-n, s, g.get(j) * dy[i].get(j)), d[i].get(j));
                if (NORMED) again[j] = n * g.get(j);
            }
            store8(d_residual_out + base + own.vector(i) * 8, pack8(v));
            if (NORMED) store8(normed + base + own.vector(i) * 8, pack8(again));
        }
    }
    // The block's row groups hold gain gradients of the same columns: add them in the groups' order.
    __shared__ float sums[RMSNORM_WARPS * 32 * VECTORS * 8];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) if (own.vector(i) < vectors)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[own.slot * width + own.vector(i) * 8 + j] = dgain[i][j];
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += RMSNORM_WARPS * 32) {
        float sum = 0.0f;
        for (int group = 0; group < own.ROWS; group++) sum += sums[group * width + c];
        partials[(int64_t)blockIdx.x * width + c] = sum;
    }
}

__device__ __forceinline__ void add_to(float *p, float x) { *p += x; }
__device__ __forceinline__ void add_to(bf16 *p, float x) { *p = __float2bfloat16_rn(__bfloat162float(*p) + x); }

// out (width) float32 or BF16 += the columns of partials (count, width). A block owns 32 columns; 32 warps take every 32nd row.
template <typename Grad>
__global__ void __launch_bounds__(1024) column_sum_kernel(Grad *out, const float *partials, int count, int width) {
    __shared__ float sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0.0f;
    if (column < width)
        for (int i = warp; i < count; i += 32) sum += partials[(int64_t)i * width + column];
    sums[warp][threadIdx.x % 32] = sum;
    __syncthreads();
    if (warp == 0 && column < width) {
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 32; w++) sum += sums[w][threadIdx.x];
        add_to(out + column, sum);
    }
}

// Calls launch(vectors a lane, warps a row) with both as types, so that kernels are chosen by width in one place.
template <int N> struct Constant { static constexpr int value = N; };
template <typename Launch>
static void rmsnorm_by_width(int width, Launch launch) {
    if (width < 8 || width % 8 || width > RMSNORM_MAX_WIDTH)
        fatal("RMSNorm of width %d: it must be a multiple of 8 and at most %d", width, RMSNORM_MAX_WIDTH);
    int warps = 1;
    while (ceil_div(width, 256 * warps) > 4) warps *= 2;
    switch (warps * 10 + (int)ceil_div(width, 256 * warps)) {
        case 11: return launch(Constant<1>(), Constant<1>());
        case 12: return launch(Constant<2>(), Constant<1>());
        case 13: return launch(Constant<3>(), Constant<1>());
        case 14: return launch(Constant<4>(), Constant<1>());
        case 23: return launch(Constant<3>(), Constant<2>());
        case 24: return launch(Constant<4>(), Constant<2>());
        case 43: return launch(Constant<3>(), Constant<4>());
        case 44: return launch(Constant<4>(), Constant<4>());
        case 83: return launch(Constant<3>(), Constant<8>());
        case 84: return launch(Constant<4>(), Constant<8>());
        default: fatal("RMSNorm of width %d has no kernel: this is a bug", width);
    }
}

// residual_out = residual_in + delta (delta NULL: nothing is added, residual_out is not written); rstd and normed from it.
// residual, delta, normed (rows, width) bf16, residual_out may be residual_in or delta; gain (width) bf16; rstd (rows) float32. amax (device
// float, nullable): max with |normed| as stored; the caller zeroes it first. width: a multiple of 8, at most 8192.
// 4 B read, 4 written a value (without delta 2 and 2).
FN void rmsnorm_forward_launch(bf16 *residual_out, bf16 *normed, float *rstd, float *amax, const bf16 *residual_in, const bf16 *delta,
                               const bf16 *gain, int64_t rows, int width, float eps, cudaStream_t stream) {
    if (rows == 0) return;
    rmsnorm_by_width(width, [=](auto vectors, auto warps) {
        constexpr int V = decltype(vectors)::value, W = decltype(warps)::value;
        auto kernel = delta ? rmsnorm_forward_kernel<V, W, true> : rmsnorm_forward_kernel<V, W, false>;
        const int blocks = persistent_blocks(kernel, RMSNORM_WARPS * 32, 0, ceil_div(rows, RowLanes<W>::ROWS), 8);
        kernel<<<blocks, RMSNORM_WARPS * 32, 0, stream>>>(residual_out, normed, rstd, amax, residual_in, delta, gain, rows, width, eps);
    });
    CUDA_LAUNCHED();
}

// normed again, the forward's bits, from what backward keeps (--recompute norm). 2 B read, 2 written a value.
FN void rmsnorm_recompute_launch(bf16 *normed, const bf16 *residual, const float *rstd, const bf16 *gain, int64_t rows, int width,
                                 cudaStream_t stream) {
    if (rows == 0) return;
    const int blocks = persistent_blocks(rmsnorm_recompute_kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * (width / 8), ELEMENTWISE_THREADS), 8);
    rmsnorm_recompute_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(normed, residual, rstd, gain, rows, width);
    CUDA_LAUNCHED();
}

FN int rmsnorm_backward_blocks(void) {
    int device, sms;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    return sms * RMSNORM_BACKWARD_BLOCKS_PER_SM;
}
// Bytes of the partial gain gradients, a row a block.
FN size_t rmsnorm_backward_scratch_bytes(int width) { return (size_t)rmsnorm_backward_blocks() * (size_t)width * sizeof(float); }

// d_residual_out = d_residual_in (NULL: 0) + gradient through the norm; dgain (width) float32 or BF16 += its gradient, in a fixed order.
// d_residual_out may be d_residual_in or d_normed. normed (nullable): the forward's output once more, for a wgrad that comes after.
// residual: what the forward normed (its residual_out). scratch: rmsnorm_backward_scratch_bytes(width).
// 6 B read, 2 (with normed 4) written a value.
template <typename Grad>
static void rmsnorm_backward_launch(bf16 *d_residual_out, Grad *dgain, bf16 *normed, const bf16 *d_residual_in, const bf16 *d_normed,
                                    const bf16 *residual, const float *rstd, const bf16 *gain, void *scratch, int64_t rows, int width,
                                    cudaStream_t stream) {
    if (rows == 0) return;
    int blocks = rmsnorm_backward_blocks();
    rmsnorm_by_width(width, [=, &blocks](auto vectors, auto warps) {
        constexpr int V = decltype(vectors)::value, W = decltype(warps)::value;
        if (ceil_div(rows, RowLanes<W>::ROWS) < blocks) blocks = (int)ceil_div(rows, RowLanes<W>::ROWS);
        auto kernel = normed ? rmsnorm_backward_kernel<V, W, true> : rmsnorm_backward_kernel<V, W, false>;
        kernel<<<blocks, RMSNORM_WARPS * 32, 0, stream>>>(d_residual_out, (float *)scratch, normed, d_residual_in, d_normed, residual, rstd, gain,
                                                          rows, width);
    });
    column_sum_kernel<<<(unsigned)ceil_div(width, 32), 1024, 0, stream>>>(dgain, (const float *)scratch, blocks, width);
    CUDA_LAUNCHED();
}

#endif
