// cuda/quantize_rows.cuh: E2M1 operands with a float32 scale a row, and what their recipe does besides: the clamp at the tensor's
// quantiles, scaling a product's rows and columns, the differentiable gradient estimator (arXiv 2501.17116). Same bits as cpu/quantize.h and
// cpu/linear.h, up to the sign of a zero.
//
// Everything runs on `stream`; nothing synchronizes. Pointers are device memory, 16-byte aligned; widths are multiples of 8.
#ifndef LLMC_CUDA_QUANTIZE_ROWS_CUH
#define LLMC_CUDA_QUANTIZE_ROWS_CUH

#include "elementwise.cuh"
#include "quantize_device.cuh"

// limits[0], limits[1] (device): the values of rank k and count-1-k of x (from 0, ascending), k = percent % of count rounded
// down, exact: clamp_limits() of cpu/quantize.h. Any count. With NaNs in x the limits are unspecified values of x.
// Reads 2 B a value twice. workspace: clamp_workspace_bytes().
FN void clamp_limits_launch(cudaStream_t stream, const bf16 *x, int64_t count, int percent, float *limits, void *workspace);
FN int64_t clamp_workspace_bytes(void);

// x (rows, cols), clamped to limits first unless they are NULL -> values (rows, cols): of the E2M1 grid, in BF16; the operand is
// values[r][c] x row_factor[r]. row_factor (rows): NaN for a row that holds a NaN or an infinity before the clamp.
// residual (rows, cols), unless NULL: what the clamp cut off, BF16 of x - clamp(x).
// Reads 2 B a value (and again, from the cache), writes 2 B a tensor.
FN void rows_quantize_launch(cudaStream_t stream, const bf16 *x, int64_t rows, int64_t cols, const float *limits, bf16 *values,
                             float *row_factor, bf16 *residual);

// p (rows, cols) float32 times row[r], then times col[c] (either NULL: 1), in place, or rounded into out (BF16) if that is not NULL.
// Reads 4 B a value, writes 4 B or 2 B.
FN void product_scale_launch(cudaStream_t stream, float *p, int64_t rows, int64_t cols, const float *row, const float *col, bf16 *out);

// dw (rows, cols), float32 or BF16, = p x dge_slope(w x inv), inv = plain_scale(max |w| of the row, 6).inv; added to dw if accumulate.
// p (rows, cols): dY^T X in float32. Reads 6 B a value (w again from the cache; 4 B more to accumulate), writes 4 B; about 45 instructions.
FN void dge_finish_launch(cudaStream_t stream, const float *p, const bf16 *w, int64_t rows, int64_t cols, void *dw, int dw_bf16,
                          int accumulate);

// ---------------------------------------------------------------------------------------------------------------------
// Order statistics. BF16 values have 2^16 keys in the order of the values: their upper 12 bits are counted, then the lower 4 of
// those keys whose upper 12 the ranks fall into.

#define CLAMP_THREADS 512
#define CLAMP_BINS 4096
#define CLAMP_FINE 16
#define CLAMP_FIND_THREADS 256

struct ClampWork {
    unsigned long long coarse[CLAMP_BINS], fine[2][CLAMP_FINE];
    unsigned long long rank[2];    // of the limits: within their coarse bins
    uint32_t bin[2];
};
FN int64_t clamp_workspace_bytes(void) { return (int64_t)sizeof(ClampWork); }

// Two BF16 -> their keys: negative values' bits inverted, the others' signs set.
__device__ __forceinline__ uint32_t bf16x2_keys(uint32_t w) { return w ^ (__vcmplts2(w, 0u) | 0x80008000u); }
__device__ __forceinline__ float bf16_of_key(uint32_t key) { return f32_from_bits((key & 0x8000u ? key & 0x7FFFu : ~key & 0xFFFFu) << 16); }

struct CoarseCount {
    __device__ __forceinline__ void add(uint32_t *bins, uint32_t key) const { atomicAdd(&bins[key / CLAMP_FINE], 1u); }
};
struct FineCount {
    uint32_t low, high;
    __device__ __forceinline__ void add(uint32_t *bins, uint32_t key) const {
        if (key / CLAMP_FINE == low) atomicAdd(&bins[key % CLAMP_FINE], 1u);
        if (key / CLAMP_FINE == high) atomicAdd(&bins[CLAMP_FINE + key % CLAMP_FINE], 1u);
    }
};
// Counts all keys of x in shared memory, then adds this block's counts to `counts`. A block sees fewer than 2^32 values.
template <int BINS, typename Count>
__device__ __forceinline__ void clamp_count(const bf16 *x, int64_t count, Count c, unsigned long long *counts) {
    __shared__ uint32_t bins[BINS];
    for (int i = threadIdx.x; i < BINS; i += CLAMP_THREADS) bins[i] = 0u;
    __syncthreads();
    const int64_t thread = (int64_t)blockIdx.x * CLAMP_THREADS + threadIdx.x, threads = (int64_t)gridDim.x * CLAMP_THREADS;
    for (int64_t i = thread; i < count / 8; i += threads) {
        const uint4 v = *reinterpret_cast<const uint4 *>(x + i * 8);
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t keys = bf16x2_keys(w[k]);
            c.add(bins, keys & 0xFFFFu);
            c.add(bins, keys >> 16);
        }
    }
    if (thread < count % 8) c.add(bins, bf16x2_keys(__bfloat16_as_ushort(x[count / 8 * 8 + thread])) & 0xFFFFu);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += CLAMP_THREADS)
        if (bins[i]) atomicAdd(&counts[i], (unsigned long long)bins[i]);
}
static __global__ void __launch_bounds__(CLAMP_THREADS) clamp_coarse_kernel(const bf16 *x, int64_t count, ClampWork *work) {
    clamp_count<CLAMP_BINS>(x, count, CoarseCount(), work->coarse);
}
static __global__ void __launch_bounds__(CLAMP_THREADS) clamp_fine_kernel(const bf16 *x, int64_t count, ClampWork *work) {
    const FineCount c = {work->bin[0], work->bin[1]};
    clamp_count<2 * CLAMP_FINE>(x, count, c, work->fine[0]);
}
// The coarse bins that ranks `low` and `high` fall into. One block; a thread adds up 16 neighbouring bins.
static __global__ void __launch_bounds__(CLAMP_FIND_THREADS) clamp_find_kernel(ClampWork *work, unsigned long long low, unsigned long long high) {
    const int each = CLAMP_BINS / CLAMP_FIND_THREADS;
    __shared__ unsigned long long sums[CLAMP_FIND_THREADS];
    const unsigned long long *mine = work->coarse + threadIdx.x * each, ranks[2] = {low, high};
    unsigned long long sum = 0, before = 0;
    for (int i = 0; i < each; i++) sum += mine[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int i = 0; i < (int)threadIdx.x; i++) before += sums[i];
    for (int side = 0; side < 2; side++) {
        if (ranks[side] < before || ranks[side] >= before + sum) continue;
        unsigned long long rank = ranks[side] - before;
        int bin = 0;
        while (rank >= mine[bin]) rank -= mine[bin++];
        work->bin[side] = threadIdx.x * each + (unsigned)bin;
        work->rank[side] = rank;
    }
}
// One thread a side: the key within the bin.
static __global__ void clamp_limits_kernel(const ClampWork *work, float *limits) {
    const int side = threadIdx.x;
    unsigned long long rank = work->rank[side];
    uint32_t fine = 0;
    while (fine < CLAMP_FINE - 1 && rank >= work->fine[side][fine]) rank -= work->fine[side][fine++];
    limits[side] = bf16_of_key(work->bin[side] * CLAMP_FINE + fine);
}
FN void clamp_limits_launch(cudaStream_t stream, const bf16 *x, int64_t count, int percent, float *limits, void *workspace) {
    ClampWork *const work = (ClampWork *)workspace;
    if (count < 1 || percent < 0 || percent > 50) fatal("clamping %d per cent of %lld values: this is a bug", percent, (long long)count);
    const int64_t k = count / 100 * percent + count % 100 * percent / 100, rank = k < count ? k : count - 1;
    const int64_t blocks = ceil_div(count / 8 + 1, CLAMP_THREADS);
    CUDA_CHECK(cudaMemsetAsync(work, 0, sizeof *work, stream));
    clamp_coarse_kernel<<<persistent_blocks(clamp_coarse_kernel, CLAMP_THREADS, 0, blocks), CLAMP_THREADS, 0, stream>>>(x, count, work);
    CUDA_LAUNCHED();
    clamp_find_kernel<<<1, CLAMP_FIND_THREADS, 0, stream>>>(work, (unsigned long long)rank, (unsigned long long)(count - 1 - rank));
    CUDA_LAUNCHED();
    clamp_fine_kernel<<<persistent_blocks(clamp_fine_kernel, CLAMP_THREADS, 0, blocks), CLAMP_THREADS, 0, stream>>>(x, count, work);
    CUDA_LAUNCHED();
    clamp_limits_kernel<<<1, 2, 0, stream>>>(work, limits);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows: a block takes one

#define ROWS_THREADS 128

// The block's largest x. Every thread of the block must call it.
__device__ __forceinline__ uint32_t rows_block_max(uint32_t x) {
    __shared__ uint32_t warps[ROWS_THREADS / 32];
    x = __reduce_max_sync(0xFFFFFFFFu, x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS_THREADS / 32; i++) x = max(x, warps[i]);
    return x;
}
FN void rows_check(const char *what, int64_t rows, int64_t cols) {
    if (rows < 1 || cols < 1 || cols % 8 || rows > INT32_MAX || cols > INT32_MAX)
        fatal("%s of %lld x %lld on the GPU: the width must be a multiple of 8, and both below 2^31", what, (long long)rows, (long long)cols);
}

struct ClampRange {
    float low, high;
    __device__ __forceinline__ float operator()(float x) const { return x < low ? low : x > high ? high : x; }
};
static __global__ void __launch_bounds__(ROWS_THREADS) rows_kernel(const bf16 *x, int cols, const float *limits, bf16 *values, float *row_factor,
                                                                   bf16 *residual) {
    const int64_t first = (int64_t)blockIdx.x * cols;
    const ClampRange clamp = {limits ? limits[0] : -INFINITY, limits ? limits[1] : INFINITY};
    uint32_t most = 0u;  // bits of the largest clamped magnitude, of a NaN where x is not finite
    for (int k = threadIdx.x * 8; k < cols; k += ROWS_THREADS * 8) {
        float v[8];
        unpack8(load8(x + first + k), v);
#pragma unroll
        for (int i = 0; i < 8; i++) most = max(most, f32_abs(v[i]) < INFINITY ? f32_bits(clamp(v[i])) & 0x7FFFFFFFu : 0x7FC00000u);
    }
    most = rows_block_max(most);
    const PlainScale s = plain_scale(f32_from_bits(most), E2M1_MAX);
    if (threadIdx.x == 0) row_factor[blockIdx.x] = most < 0x7F800000u ? s.factor : f32_from_bits(most);
    for (int k = threadIdx.x * 8; k < cols; k += ROWS_THREADS * 8) {
        float v[8], q[8], cut[8];
        unpack8(load8(x + first + k), v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float c = clamp(v[i]);
            q[i] = e2m1_round_unclamped(f32_mul(c, s.inv));
            cut[i] = f32_sub(v[i], c);
        }
        store8(values + first + k, pack8(q));
        if (residual) store8(residual + first + k, pack8(cut));
    }
}
FN void rows_quantize_launch(cudaStream_t stream, const bf16 *x, int64_t rows, int64_t cols, const float *limits, bf16 *values,
                             float *row_factor, bf16 *residual) {
    rows_check("quantizing the rows", rows, cols);
    rows_kernel<<<(unsigned)rows, ROWS_THREADS, 0, stream>>>(x, (int)cols, limits, values, row_factor, residual);
    CUDA_LAUNCHED();
}

// Eight floats.
__device__ __forceinline__ void load8_float(const float *p, float x[8]) {
    const float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
    x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w; x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}
__device__ __forceinline__ void store8_float(float *p, const float x[8]) {
    reinterpret_cast<float4 *>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4 *>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

static __global__ void __launch_bounds__(ELEMENTWISE_THREADS) product_scale_kernel(float *p, int64_t rows, int vectors, const float *row, const float *col,
                                                                                   bf16 *out) {
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, (int64_t)gridDim.x * ELEMENTWISE_THREADS, vectors);
    for (; at.row < rows; at.next()) {
        const int64_t first = (at.row * vectors + at.col) * 8;
        float v[8], c[8];
        load8_float(p + first, v);
        const float r = row ? row[at.row] : 1.0f;
        if (col) load8_float(col + at.col * 8, c);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = f32_mul(f32_mul(v[i], r), col ? c[i] : 1.0f);
        if (out) store8(out + first, pack8(v));
        else store8_float(p + first, v);
    }
}
FN void product_scale_launch(cudaStream_t stream, float *p, int64_t rows, int64_t cols, const float *row, const float *col, bf16 *out) {
    rows_check("scaling a product", rows, cols);
    const int blocks = persistent_blocks(product_scale_kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * cols / 8, ELEMENTWISE_THREADS));
    product_scale_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(p, rows, (int)(cols / 8), row, col, out);
    CUDA_LAUNCHED();
}

template <bool DW_BF16>
static __global__ void __launch_bounds__(ROWS_THREADS) dge_kernel(const float *p, const bf16 *w, int cols, void *dw, int accumulate) {
    const int64_t first = (int64_t)blockIdx.x * cols;
    uint32_t most = 0u;
    for (int k = threadIdx.x * 8; k < cols; k += ROWS_THREADS * 8) {
        float v[8];
        unpack8(load8(w + first + k), v);
#pragma unroll
        for (int i = 0; i < 8; i++) most = max(most, f32_bits(v[i]) & 0x7FFFFFFFu);
    }
    const float inv = plain_scale(f32_from_bits(rows_block_max(most)), E2M1_MAX).inv;
    for (int k = threadIdx.x * 8; k < cols; k += ROWS_THREADS * 8) {
        float v[8], g[8], old[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        unpack8(load8(w + first + k), v);
        load8_float(p + first + k, g);
        if (accumulate && DW_BF16) unpack8(load8((const bf16 *)dw + first + k), old);
        if (accumulate && !DW_BF16) load8_float((const float *)dw + first + k, old);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = f32_add(old[i], f32_mul(g[i], dge_slope(f32_mul(v[i], inv))));
        if (DW_BF16) store8((bf16 *)dw + first + k, pack8(g));
        else store8_float((float *)dw + first + k, g);
    }
}
FN void dge_finish_launch(cudaStream_t stream, const float *p, const bf16 *w, int64_t rows, int64_t cols, void *dw, int dw_bf16,
                          int accumulate) {
    rows_check("finishing a weight gradient", rows, cols);
    if (dw_bf16) dge_kernel<true><<<(unsigned)rows, ROWS_THREADS, 0, stream>>>(p, w, (int)cols, dw, accumulate);
    else dge_kernel<false><<<(unsigned)rows, ROWS_THREADS, 0, stream>>>(p, w, (int)cols, dw, accumulate);
    CUDA_LAUNCHED();
}

#endif
