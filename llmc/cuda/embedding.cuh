// cuda/embedding.cuh: token embedding: a gather forward, a deterministic scatter-add backward.
//
// Backward sorts (token, row) pairs by token (stable, so rows of a token keep their order) and cuts the sorted list into tiles
// of EMBEDDING_TILE entries. A tile adds up its runs of equal tokens; a run that lies in one tile goes straight to its row of the
// gradient, a run that crosses tiles leaves partial sums, which a second kernel adds in the tiles' order. A token that is a
// third of the batch is thus shared by hundreds of warps, and every sum has a fixed order.
#ifndef LLMC_CUDA_EMBEDDING_CUH
#define LLMC_CUDA_EMBEDDING_CUH

#include <cub/device/device_radix_sort.cuh>

#include "elementwise.cuh"

#define EMBEDDING_TILE 64
#define EMBEDDING_GROUP 4     // entries in flight at a time
#define EMBEDDING_JOIN_WARPS 8

// Floor: 4 bytes a value (the table's rows that repeat come from L2).
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) embedding_forward_kernel(bf16 *__restrict__ out, const bf16 *__restrict__ embed,
                                                                               const int32_t *__restrict__ tokens, int64_t rows, int width) {
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, (int64_t)gridDim.x * ELEMENTWISE_THREADS, width / 8);
    for (; at.row < rows; at.next())
        store8(out + at.row * width + at.col * 8, load8(embed + (int64_t)tokens[at.row] * width + at.col * 8));
}

__global__ void row_numbers_kernel(int32_t *numbers, int64_t rows) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) numbers[i] = (int32_t)i;
}

__device__ __forceinline__ void store_sum8(float *to, const float x[8]) {
    ((float4 *)to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    ((float4 *)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ void add_sum8(float x[8], const float *from) {
    const float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    x[0] += a.x; x[1] += a.y; x[2] += a.z; x[3] += a.w;
    x[4] += b.x; x[5] += b.y; x[6] += b.z; x[7] += b.w;
}

// One warp: a tile (blockIdx.x) and 256 columns (blockIdx.y). heads, tails (tiles, width): the tile's part of a run that began in
// an earlier tile, and of one that begins here and goes on. Floor: 2 bytes a value of dout, 8 a value of each distinct token's row.
__global__ void __launch_bounds__(32) embedding_runs_kernel(float *dembed, float *heads, float *tails, const bf16 *__restrict__ dout,
        const int32_t *__restrict__ tokens, const int32_t *__restrict__ order, int64_t rows, int width) {
    const int64_t begin = (int64_t)blockIdx.x * EMBEDDING_TILE, end = min(begin + EMBEDDING_TILE, rows);
    const int column = (blockIdx.y * 32 + threadIdx.x) * 8;
    if (column >= width) return;
    const int64_t slot = (int64_t)blockIdx.x * width + column;
    bool from_before = begin > 0 && tokens[begin - 1] == tokens[begin];
    const bool goes_on = end < rows && tokens[end] == tokens[end - 1];
    float sum[8] = {};
    for (int64_t first = begin; first < end; first += EMBEDDING_GROUP) {
        int32_t token[EMBEDDING_GROUP];
        bool ends[EMBEDDING_GROUP];        // the entry is its run's last of this tile
        Bf16x8 v[EMBEDDING_GROUP];
        float old[EMBEDDING_GROUP][8];     // the gradient so far, fetched early, of runs that end here for good
#pragma unroll
        for (int i = 0; i < EMBEDDING_GROUP; i++) if (first + i < end) {
            token[i] = tokens[first + i];
            ends[i] = first + i + 1 == end || tokens[first + i + 1] != token[i];
            v[i] = load8_streaming(dout + (int64_t)order[first + i] * width + column);
#pragma unroll
            for (int j = 0; j < 8; j++) old[i][j] = 0.0f;
            if (ends[i] && !(first + i + 1 == end && goes_on)) add_sum8(old[i], dembed + (int64_t)token[i] * width + column);
        }
#pragma unroll
        for (int i = 0; i < EMBEDDING_GROUP; i++) if (first + i < end) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[i].get(j);
            if (!ends[i]) continue;
            if (from_before) store_sum8(heads + slot, sum);
            else if (first + i + 1 == end && goes_on) store_sum8(tails + slot, sum);
            else {
#pragma unroll
                for (int j = 0; j < 8; j++) old[i][j] += sum[j];
                store_sum8(dembed + (int64_t)token[i] * width + column, old[i]);
            }
            from_before = false;
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] = 0.0f;
        }
    }
}

// A block: the run that begins in tile blockIdx.x and crosses into later ones, if there is one; 256 columns (blockIdx.y). The
// warps take the later tiles in turn, then the warps' sums are added in order.
__global__ void __launch_bounds__(32 * EMBEDDING_JOIN_WARPS) embedding_join_kernel(float *dembed, const float *heads, const float *tails,
        const int32_t *__restrict__ tokens, int64_t rows, int width) {
    const int64_t tile = blockIdx.x, begin = tile * EMBEDDING_TILE, end = begin + EMBEDDING_TILE;
    if (end >= rows || tokens[end] != tokens[end - 1]) return;
    const int32_t token = tokens[end - 1];
    if (begin > 0 && tokens[begin - 1] == token) return;             // it began earlier
    int64_t low = end, high = rows;                                  // first entry beyond the run
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (tokens[middle] == token) low = middle + 1; else high = middle;
    }
    const int64_t last = (low - 1) / EMBEDDING_TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = (blockIdx.y * 32 + lane) * 8;
    __shared__ float sums[EMBEDDING_JOIN_WARPS][8][32];
    float sum[8] = {};
    if (column < width) {
#pragma unroll 4
        for (int64_t t = tile + 1 + warp; t <= last; t += EMBEDDING_JOIN_WARPS) add_sum8(sum, heads + t * width + column);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) sums[warp][j][lane] = sum[j];
    __syncthreads();
    if (warp > 0 || column >= width) return;
    float *const to = dembed + (int64_t)token * width + column;
    add_sum8(sum, tails + tile * width + column);
    for (int w = 1; w < EMBEDDING_JOIN_WARPS; w++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += sums[w][j][lane];
    add_sum8(sum, to);
    store_sum8(to, sum);
}

// Where things lie in backward's scratch memory, in bytes; `sort` is the sort's own.
typedef struct { size_t tokens, numbers, order, heads, tails, sort, sort_bytes, total; int bits; } EmbeddingScratch;
FN EmbeddingScratch embedding_scratch(int64_t rows, int width, int vocab) {
    if (width < 8 || width % 8 || rows > INT32_MAX || vocab < 1)
        fatal("embedding of %lld rows, width %d, vocabulary %d: the width must be a multiple of 8, the rows below 2^31", (long long)rows, width, vocab);
    EmbeddingScratch s;
    const size_t index_bytes = ((size_t)rows * 4 + 255) / 256 * 256, partial_bytes = (size_t)ceil_div(rows, EMBEDDING_TILE) * (size_t)width * 4;
    s.bits = 1;
    while (s.bits < 31 && (1 << s.bits) < vocab) s.bits++;
    s.tokens = 0; s.numbers = index_bytes; s.order = 2 * index_bytes; s.heads = 3 * index_bytes;
    s.tails = s.heads + (partial_bytes + 255) / 256 * 256;
    s.sort = s.tails + (partial_bytes + 255) / 256 * 256;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, s.sort_bytes, (const int32_t *)NULL, (int32_t *)NULL, (const int32_t *)NULL, (int32_t *)NULL,
                                               (int)rows, 0, s.bits));
    s.total = s.sort + (s.sort_bytes + 255) / 256 * 256;
    return s;
}

// out (rows, width) bf16: the rows of embed (vocab, width) bf16 at tokens (rows) int32 on the device, each in [0, vocab): the loader's
// promise. width a multiple of 8. 2 B read, 2 written a value.
FN void embedding_forward_launch(bf16 *out, const bf16 *embed, const int32_t *tokens, int64_t rows, int width, cudaStream_t stream) {
    if (width < 8 || width % 8) fatal("embedding of width %d: it must be a multiple of 8", width);
    if (rows == 0) return;
    const int blocks = persistent_blocks(embedding_forward_kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * (width / 8), ELEMENTWISE_THREADS));
    embedding_forward_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(out, embed, tokens, rows, width);
    CUDA_LAUNCHED();
}

FN size_t embedding_backward_scratch_bytes(int64_t rows, int width, int vocab) { return embedding_scratch(rows, width, vocab).total; }

// dembed (vocab, width) float32 += the rows of dout (rows, width) bf16 at their tokens, in a fixed order. scratch: aligned to
// 256, embedding_backward_scratch_bytes(). 2 B read a value of dout; 4 read, 4 written a value of each distinct token's row.
FN void embedding_backward_launch(float *dembed, const bf16 *dout, const int32_t *tokens, void *scratch, int64_t rows, int width, int vocab,
                                  cudaStream_t stream) {
    if (rows == 0) return;
    EmbeddingScratch s = embedding_scratch(rows, width, vocab);
    char *const at = (char *)scratch;
    int32_t *const sorted = (int32_t *)(at + s.tokens), *const numbers = (int32_t *)(at + s.numbers), *const order = (int32_t *)(at + s.order);
    float *const heads = (float *)(at + s.heads), *const tails = (float *)(at + s.tails);
    row_numbers_kernel<<<(unsigned)ceil_div(rows, 256), 256, 0, stream>>>(numbers, rows);
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(at + s.sort, s.sort_bytes, tokens, sorted, numbers, order, (int)rows, 0, s.bits, stream));
    const dim3 grid((unsigned)ceil_div(rows, EMBEDDING_TILE), (unsigned)ceil_div(width, 256));
    embedding_runs_kernel<<<grid, 32, 0, stream>>>(dembed, heads, tails, dout, sorted, order, rows, width);
    embedding_join_kernel<<<grid, 32 * EMBEDDING_JOIN_WARPS, 0, stream>>>(dembed, heads, tails, sorted, rows, width);
    CUDA_LAUNCHED();
}

#endif
