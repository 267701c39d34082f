// cuda/quantize_fp8.cuh: FP8 operands, one float32 scale a tensor (current scaling). Same bits as cpu/quantize.h.
//
// FP8 tensor cores read both operands along the inner dimension, so a tensor that serves two GEMMs is wanted twice, as it is and
// transposed. One read makes both: 2 B in, 1 B out for each, bound by memory. A tile of 128x128 goes through registers, eight rows
// by eight columns a thread, whose bytes are transposed there and gathered in shared memory to whole lines of the transpose.
#ifndef LLMC_CUDA_QUANTIZE_FP8_CUH
#define LLMC_CUDA_QUANTIZE_FP8_CUH

#include "../recipe.h"
#include "elementwise.cuh"
#include "quantize_device.cuh"

#define FP8_TILE 128
#define FP8_THREADS 256
#define FP8_UNIT 16  // rows and columns are multiples of it: a 16-byte store never crosses an edge

// x (rows, cols), FORMAT_E4M3 or FORMAT_E5M2, -> bytes: out (rows, cols) and out_t (cols, rows); either may be NULL.
//   amax     device: max |x|. As the producers of X leave it, NaNs skipped, or as amax_launch finds it.
//   decoded  (rows, cols): the same values in BF16, exact, for cards that multiply no FP8; NULL if not wanted
//   factor   device, written: what turns out into the operand, plain_scale().factor; NaN where amax is not finite
// A NaN in x stays a NaN. rows and cols are multiples of 16. Reads 2 B a value, writes 1 B a copy. (The decoded values, an alternative
// to the bytes, are a pass of their own: 2 B read, 2 B written.)
FN void fp8_quantize_launch(cudaStream_t stream, Format format, const bf16 *x, int64_t rows, int64_t cols, const float *amax,
                            uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor);

// The same of a tensor with row scales: what is quantized is values[r][c] x row_factor[r] in float32, by the largest of these products.
// workspace: 4 bytes. Reads 4 B a value.
FN void fp8_from_rows_launch(cudaStream_t stream, Format format, const bf16 *values, const float *row_factor, int64_t rows, int64_t cols,
                             uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor, void *workspace);

// ---------------------------------------------------------------------------------------------------------------------
// Numbers. A NaN gives FP8's NaN, so that the product shows it; else these are the roundings of formats.h (dev/cuda/quantize_fp8.cu
// compares all of float32).

template <bool E5M2> __device__ __forceinline__ uint32_t fp8_encode(float v) {
    const uint32_t code = E5M2 ? e5m2_encode(v) : e4m3_encode_signed(v);
    return v == v ? code : 0x7Fu;
}
// The codes of a (lower byte) and b.
template <bool E5M2> __device__ __forceinline__ uint32_t fp8_encode2(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t w;
    if (E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(w) : "f"(b), "f"(a));
    else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(b), "f"(a));
    return w;
#else
    return fp8_encode<E5M2>(a) | fp8_encode<E5M2>(b) << 8;
#endif
}
template <bool E5M2> __device__ __forceinline__ float fp8_round(float v) {
    return v == v ? E5M2 ? e5m2_round(v) : e4m3_round(v) : v;
}
// Four words of four bytes, row by row -> column by column.
__device__ __forceinline__ void bytes_transpose(uint32_t w[4]) {
    const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);  // bytes 0 and 1 of two rows
    const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);  // bytes 2 and 3
    w[0] = __byte_perm(a, b, 0x5410); w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410); w[3] = __byte_perm(c, d, 0x7632);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct Fp8Job {
    const bf16 *x;
    int64_t rows, cols;
    const float *amax, *row_factor;  // row_factor: NULL: 1
    uint8_t *out, *out_t;
    bf16 *decoded;
    float *factor;
};
// Transposed bytes of a tile: column c has 128, in 16 units of 8. Unit u lies at u ^ c/8, so that the 16 threads that write units of the
// same number, eight columns apart, hit different banks.
struct Fp8Tile {
    uint4 pair[FP8_TILE][FP8_TILE / 16];
    __device__ __forceinline__ void store(int column, int unit, uint2 bytes) {
        reinterpret_cast<uint2 *>(pair[column])[unit ^ column >> 3] = bytes;
    }
    __device__ __forceinline__ uint4 load(int column, int p) const {
        const uint4 w = pair[column][p ^ column >> 4];
        return column & 8 ? make_uint4(w.z, w.w, w.x, w.y) : w;
    }
};

// Eight values, scaled. The row's factor first, in float32, then 1/scale of the tensor, as the CPU rounds them.
__device__ __forceinline__ void fp8_scaled(Bf16x8 x, float row_factor, float inv, float v[8]) {
    unpack8(x, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = f32_mul(f32_mul(v[i], row_factor), inv);
}
// 1/scale for every thread; the grid's first thread writes the factor.
template <bool E5M2> __device__ __forceinline__ float fp8_inverse(const Fp8Job &job) {
    const float amax = *job.amax;
    const PlainScale s = plain_scale(amax, E5M2 ? E5M2_MAX : E4M3_MAX);
    if (blockIdx.x == 0 && threadIdx.x == 0) *job.factor = f32_abs(amax) < INFINITY ? s.factor : f32_from_bits(0x7FC00000u);
    return s.inv;
}
// A tile of 128x128 a block: out, out_t or both.
template <bool E5M2>
static __global__ void __launch_bounds__(FP8_THREADS, 4) fp8_kernel(const __grid_constant__ Fp8Job job) {
    __shared__ Fp8Tile tile;
    const unsigned across = (unsigned)((job.cols + FP8_TILE - 1) / FP8_TILE);
    const int64_t row0 = (int64_t)(blockIdx.x / across) * FP8_TILE, col0 = (int64_t)(blockIdx.x % across) * FP8_TILE;
    const int unit = threadIdx.x / 16, part = threadIdx.x % 16;  // its eight rows and its eight columns of the tile
    const int64_t row = row0 + unit * 8, column = col0 + part * 8, at = row * job.cols + column;
    const float inv = fp8_inverse<E5M2>(job);
    if (row < job.rows && column < job.cols) {
        Bf16x8 x[8];
        float f[8];
        uint32_t low[8], high[8];  // bytes of columns 0..3 and 4..7
#pragma unroll
        for (int r = 0; r < 8; r++) { x[r] = load8_streaming(job.x + at + r * job.cols); f[r] = job.row_factor ? job.row_factor[row + r] : 1.0f; }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            float v[8];
            fp8_scaled(x[r], f[r], inv, v);
            low[r] = fp8_encode2<E5M2>(v[0], v[1]) | fp8_encode2<E5M2>(v[2], v[3]) << 16;
            high[r] = fp8_encode2<E5M2>(v[4], v[5]) | fp8_encode2<E5M2>(v[6], v[7]) << 16;
            if (job.out) *reinterpret_cast<uint2 *>(job.out + at + r * job.cols) = make_uint2(low[r], high[r]);
        }
        if (job.out_t) {
            bytes_transpose(low); bytes_transpose(low + 4); bytes_transpose(high); bytes_transpose(high + 4);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                tile.store(part * 8 + c, unit, make_uint2(low[c], low[4 + c]));
                tile.store(part * 8 + 4 + c, unit, make_uint2(high[c], high[4 + c]));
            }
        }
    }
    if (!job.out_t) return;
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < FP8_TILE * FP8_TILE / 16; i += FP8_THREADS) {
        const int c = i / 8, p = i % 8;  // 16 rows of one column
        if (col0 + c < job.cols && row0 + p * 16 < job.rows)
            *reinterpret_cast<uint4 *>(job.out_t + (col0 + c) * job.rows + row0 + p * 16) = tile.load(c, p);
    }
}
// The values in BF16. vectors: of eight, in a row.
template <bool E5M2>
static __global__ void __launch_bounds__(ELEMENTWISE_THREADS) fp8_decoded_kernel(const __grid_constant__ Fp8Job job, int vectors) {
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, (int64_t)gridDim.x * ELEMENTWISE_THREADS, vectors);
    const float inv = fp8_inverse<E5M2>(job);
    for (; at.row < job.rows; at.next()) {
        const int64_t first = (at.row * vectors + at.col) * 8;
        float v[8];
        fp8_scaled(load8_streaming(job.x + first), job.row_factor ? job.row_factor[at.row] : 1.0f, inv, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = fp8_round<E5M2>(v[i]);
        store8(job.decoded + first, pack8(v));
    }
}
template <bool E5M2> static void fp8_run_format(cudaStream_t stream, const Fp8Job &job, unsigned tiles) {
    if (job.out || job.out_t) {
        fp8_kernel<E5M2><<<tiles, FP8_THREADS, 0, stream>>>(job);
        CUDA_LAUNCHED();
    }
    if (job.decoded) {
        const int blocks = persistent_blocks(fp8_decoded_kernel<E5M2>, ELEMENTWISE_THREADS, 0, ceil_div(job.rows * job.cols / 8, ELEMENTWISE_THREADS));
        fp8_decoded_kernel<E5M2><<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(job, (int)(job.cols / 8));
        CUDA_LAUNCHED();
    }
}
FN void fp8_run(cudaStream_t stream, Format format, const Fp8Job &job) {
    if (job.rows < 1 || job.cols < 1 || job.rows % FP8_UNIT || job.cols % FP8_UNIT)
        fatal("cannot quantize a tensor of %lld x %lld to FP8 on the GPU: both must be multiples of %d (tokens a micro-batch and widths)",
              (long long)job.rows, (long long)job.cols, FP8_UNIT);
    if (format != FORMAT_E4M3 && format != FORMAT_E5M2) fatal("format %d is no FP8: this is a bug", (int)format);
    const int64_t across = ceil_div(job.cols, FP8_TILE), tiles = ceil_div(job.rows, FP8_TILE) * across;
    if (tiles > INT32_MAX) fatal("cannot quantize a tensor of %lld x %lld: it is too large", (long long)job.rows, (long long)job.cols);
    if (format == FORMAT_E5M2) fp8_run_format<true>(stream, job, (unsigned)tiles);
    else fp8_run_format<false>(stream, job, (unsigned)tiles);
}
FN void fp8_quantize_launch(cudaStream_t stream, Format format, const bf16 *x, int64_t rows, int64_t cols, const float *amax,
                            uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor) {
    const Fp8Job job = {x, rows, cols, amax, NULL, out, out_t, decoded, factor};
    fp8_run(stream, format, job);
}

// ---------------------------------------------------------------------------------------------------------------------
// Row-scaled tensors

// *amax = max |values x row_factor|, by their bits: a NaN makes it NaN. vectors: of eight, in a row.
static __global__ void __launch_bounds__(ELEMENTWISE_THREADS) fp8_rows_amax_kernel(const bf16 *values, const float *row_factor, int64_t rows, int vectors,
                                                                                   uint32_t *amax) {
    const int64_t first = (int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x;
    VectorCursor at(first, (int64_t)gridDim.x * ELEMENTWISE_THREADS, vectors);
    uint32_t most = 0u;
    for (; at.row < rows; at.next()) {
        float v[8];
        unpack8(load8(values + (at.row * vectors + at.col) * 8), v);
        const float f = row_factor[at.row];
#pragma unroll
        for (int i = 0; i < 8; i++) most = max(most, f32_bits(f32_mul(v[i], f)) & 0x7FFFFFFFu);
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) atomicMax(amax, most);
}
FN void fp8_from_rows_launch(cudaStream_t stream, Format format, const bf16 *values, const float *row_factor, int64_t rows, int64_t cols,
                             uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor, void *workspace) {
    const Fp8Job job = {values, rows, cols, (const float *)workspace, row_factor, out, out_t, decoded, factor};
    CUDA_CHECK(cudaMemsetAsync(workspace, 0, sizeof(uint32_t), stream));
    const int blocks = persistent_blocks(fp8_rows_amax_kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * cols / 8, ELEMENTWISE_THREADS));
    fp8_rows_amax_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(values, row_factor, rows, (int)(cols / 8), (uint32_t *)workspace);
    CUDA_LAUNCHED();
    fp8_run(stream, format, job);
}

#endif
