// cuda/attention_flash.cuh: causal attention on the tensor cores without a T x T buffer (FlashAttention-2, arXiv 2307.08691).
//
// Forward: a block owns 64 or 128 queries and walks over the key tiles at or before them with an online softmax, the next
// scores' product running beside the last one's P V. Backward, deterministic and without atomics: one kernel owns queries and
// sums dQ over keys (and makes the row sums dO.O on its way), a second owns keys and sums dK and dV over queries and over the
// heads of its group; both recompute the scores, 7 products instead of the 5 a fused kernel with ordered additions needs.
// Scores never leave registers: a product's result is the next one's A operand.
//
// Rows of qkv and dqkv are q heads | k heads | v heads, so nothing is copied or transposed. Rows at or beyond T are zeros in
// shared memory and never stored. Limits: (heads + 2 kv_heads) * head_dim * T < 2^31 elements a sequence; B any.
#ifndef LLMC_CUDA_ATTENTION_FLASH_CUH
#define LLMC_CUDA_ATTENTION_FLASH_CUH

#include "attention_tile.cuh"

typedef struct { int B, T, heads, kv_heads, head_dim; } AttentionShape;

extern __shared__ __align__(1024) unsigned char attention_shared[];

// Which (sequence, head) and which tile a block works on: `section` pairs at a time, whose keys and values fit in the L2 cache,
// and of these the same tile one after the other, so that the tiles with most work can go first.
struct AttentionWork { int pair, rank; };
__device__ __forceinline__ AttentionWork attention_work(int pairs, int tiles, int section) {
    const int block = (int)blockIdx.x, first = block / (section * tiles) * section, r = block - first * tiles;
    const int n = min(section, pairs - first);
    AttentionWork w = {first + r % n, r / n};
    return w;
}

// Hides scores of keys after their query. row: query of acc's element (0, 0), column: its key (or, TRANSPOSED, key and query).
template <int N, bool TRANSPOSED>
__device__ __forceinline__ void mask_causal(float (&s)[N / 8][4], int row, int column, int T) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = row + (e >> 1) * 8, c = column + n * 8 + (e & 1);
            if (TRANSPOSED ? r > c || c >= T : c > r) s[n][e] = -INFINITY;
        }
}

// One step of the online softmax over a tile of scores s (rows 0 and 8 of this thread): s becomes exp2(c (s - max)), the largest
// score m and this thread's part of the sum l follow, and `rescale` is what earlier results must be multiplied by.
template <int N>
__device__ __forceinline__ void softmax_step(float (&s)[N / 8][4], float m[2], float l[2], float rescale[2], float c) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float largest = m[h];
#pragma unroll
        for (int n = 0; n < N / 8; n++) largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        rescale[h] = exp2_fast((m[h] - largest) * c);
        m[h] = largest;
        const float shift = largest * c;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], c, -shift));
            s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], c, -shift));
            sum += s[n][2 * h] + s[n][2 * h + 1];
        }
        l[h] = l[h] * rescale[h] + sum;
    }
}

// Scores s become probabilities exp2(c s - lse2). of(n, x) gives the log sums of columns 8n + {0, 1} of rows 0 and 8: x[row][column].
template <int N, class Of>
__device__ __forceinline__ void probabilities(float (&s)[N / 8][4], float c, Of of) {
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float x[2][2];
        of(n, x);
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = exp2_fast(fmaf(s[n][e], c, -x[e >> 1][e & 1]));
    }
}
// dP becomes dS = P (dP - delta), of(n, x) as above for delta.
template <int N, class Of>
__device__ __forceinline__ void score_gradients(float (&dp)[N / 8][4], const float (&p)[N / 8][4], Of of) {
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float x[2][2];
        of(n, x);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[n][e] = p[n][e] * (dp[n][e] - x[e >> 1][e & 1]);
    }
}

// Bytes of shared memory: the queries' tile(s), two stages of keys and values.
template <int D, int WGS, int BN> struct ForwardTiles { enum { Q = 0, K = WGS * 64 * D * 2, V = K + 2 * BN * D * 2, BYTES = V + 2 * BN * D * 2 }; };
template <int D, int WGS, int BN> struct DqTiles {
    enum { Q = 0, DO = WGS * 64 * D * 2, K = 2 * DO, V = K + 2 * BN * D * 2, DELTA = V + 2 * BN * D * 2, BYTES = DELTA + WGS * 64 * 4 };
};
template <int D, int WGS, int BM> struct DkvTiles {
    enum { K = 0, V = WGS * 64 * D * 2, Q = 2 * V, DO = Q + 2 * BM * D * 2, LSE = DO + 2 * BM * D * 2, DELTA = LSE + 2 * BM * 4, BYTES = DELTA + 2 * BM * 4 };
};

// The forward's end, for a warp's 16 rows: lse, and out = o / l in BF16. m, l: of rows `row` and row + 8, l this thread's part.
// out: the warp's first row; shared_row: its place in the queries' tile of R rows, which nobody reads any more.
template <int R, int D>
__device__ __forceinline__ void forward_finish(bf16 *out, int64_t stride, int rows, float *lse, int row, int T, float (&o)[D / 8][4],
                                               const float m[2], float l[2], float scale, int shared_row) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 1);
        l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 2);
        if (threadIdx.x % 4 == 0 && row + 8 * h < T) lse[row + 8 * h] = m[h] * scale + logf(l[h]);
    }
    acc_scale(o, 1.0f / l[0], 1.0f / l[1]);
    tile_store_warp<R, D>(out, stride, rows, attention_shared, shared_row, o);
}

// Forward. Grid: B * heads * ceil(T / (64 WGS)); WGS warp groups of 64 queries; key tiles of BN. Reads q, k, v once a query tile
// (k, v from L2 mostly), writes out and lse once. 4 D FLOPs a visited score.
template <int D, int WGS, int BN, bool WG>
__global__ void __launch_bounds__(WGS * 128, 1) flash_forward_kernel(bf16 *out, float *lse, const bf16 *qkv, AttentionShape s, float scale, int section) {
    typedef ForwardTiles<D, WGS, BN> L;
    const int BM = WGS * 64, THREADS = WGS * 128;
    const int tiles = (s.T + BM - 1) / BM, lane = threadIdx.x & 31, warp_row = (int)(threadIdx.x >> 5) * 16;
    const AttentionWork work = attention_work(s.B * s.heads, tiles, section);
    const int b = work.pair / s.heads, head = work.pair % s.heads, q0 = (tiles - 1 - work.rank) * BM;
    const int64_t stride = (int64_t)(s.heads + 2 * s.kv_heads) * D;
    const bf16 *q = qkv + b * (s.T * stride) + (int64_t)head * D + q0 * stride;
    const bf16 *k = qkv + b * (s.T * stride) + (int64_t)(s.heads + head / (s.heads / s.kv_heads)) * D, *v = k + (int64_t)s.kv_heads * D;
    const uint32_t base = shared_address(attention_shared), tile_bytes = BN * D * 2;
    const int steps = (min(q0 + BM, s.T) + BN - 1) / BN;
    const float c = scale * LOG2_E;

    tile_load<BM, D, THREADS>(base + L::Q, q, stride, s.T - q0);
    tile_load<BN, D, THREADS>(base + L::K, k, stride, s.T);
    copy_commit();
    if (steps > 1) tile_load<BN, D, THREADS>(base + L::K + tile_bytes, k + BN * stride, stride, s.T - BN);
    tile_load<BN, D, THREADS>(base + L::V, v, stride, s.T);
    copy_commit();

    const int group = warp_group() * 64, row = q0 + warp_row + lane / 4, column = lane % 4 * 2, group_q0 = q0 + group;
    const uint32_t q_rows = base + L::Q + group * 128;
    float o[D / 8][4], sc[BN / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, rescale[2];
    uint32_t p[BN / 16][4];
    acc_clear(o);

    copy_wait_block<1>();
    gemm_shared<WG, BN, D, WGS * 64>(sc, q_rows, base + L::K);
    gemm_wait<WG, 0>(sc);
    if (BN > group_q0 + 1) mask_causal<BN, false>(sc, row, column, s.T);
    softmax_step<BN>(sc, m, l, rescale, c);
    gemm_pack<BN>(p, sc);
    for (int j = 0; j < steps - 1; j++) {  // scores of tile j + 1 and P V of tile j
        copy_wait_block<0>();              // both are here, and everybody is done with K of tile j and V of tile j - 1
        const uint32_t now = (j & 1) * tile_bytes, next = tile_bytes - now;
        if (j + 2 < steps) tile_load<BN, D, THREADS>(base + L::K + now, k + (j + 2) * BN * stride, stride, s.T - (j + 2) * BN);
        tile_load<BN, D, THREADS>(base + L::V + next, v + (j + 1) * BN * stride, stride, s.T - (j + 1) * BN);
        copy_commit();
        gemm_shared<WG, BN, D, WGS * 64>(sc, q_rows, base + L::K + next);
        gemm_registers<WG, D, BN>(o, p, base + L::V + now);
        gemm_wait<WG, 1>(sc);
        if ((j + 2) * BN > group_q0 + 1) mask_causal<BN, false>(sc, row, (j + 1) * BN + column, s.T);
        softmax_step<BN>(sc, m, l, rescale, c);
        gemm_wait<WG, 0>(o);
        gemm_pack<BN>(p, sc);
        acc_scale(o, rescale[0], rescale[1]);
    }
    copy_wait_block<0>();
    gemm_registers<WG, D, BN>(o, p, base + L::V + (steps - 1 & 1) * tile_bytes);
    gemm_wait<WG, 0>(o);

    const int64_t out_stride = (int64_t)s.heads * D;
    forward_finish<WGS * 64, D>(out + ((int64_t)b * s.T + q0 + warp_row) * out_stride + head * D, out_stride, s.T - q0 - warp_row,
                                lse + (int64_t)work.pair * s.T, row, s.T, o, m, l, scale, warp_row);
}

// delta[row] = sum over the head of dO O for the warp's 16 rows: to shared memory and to global (rows < `rows`).
// d_out: the tile of dO; o: the matrix's row of the warp's first.
template <int R, int D>
__device__ __forceinline__ void delta_of_warp(float *delta, float *delta_global, const unsigned char *d_out, const bf16 *o, int64_t stride, int warp_row, int rows) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {  // D/8 lanes a row
        const int at = lane + 32 * i, r = at / (D / 8), chunk = at % (D / 8);
        float x[8], y[8], sum = 0;
        if (r < rows) {
            Bf16x8 g;
            g.u = *(const uint4 *)(d_out + tile_offset<R>(warp_row + r, chunk));
            unpack8(g, x);
            unpack8(load8(o + r * stride + chunk * 8), y);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += x[e] * y[e];
        }
#pragma unroll
        for (int w = D / 16; w > 0; w >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, w);
        if (chunk == 0) {
            delta[warp_row + r] = sum;
            if (r < rows) delta_global[r] = sum;
        }
    }
    __syncwarp();
}

// Turns rows of a gradient back by their positions' angles: what RoPE's backward does, while the values are here. table (T, D/2) of (cos, sin),
// NULL: they stay. row, column: of acc's element (0, 0). The pair of column i, i + D/2, lies in the same thread, D/16 groups of 8 further.
template <int D>
__device__ __forceinline__ void acc_turn_back(float (&acc)[D / 8][4], const float2 *__restrict__ table, int row, int column, int T) {
    if (!table) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= T) continue;                    // not stored
        const float2 *angles = table + (int64_t)(row + 8 * h) * (D / 2) + column;
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            const float4 a = __ldg((const float4 *)(angles + n * 8));  // two columns'
            const float c[2] = {a.x, a.z}, s[2] = {a.y, a.w};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &low = acc[n][2 * h + e], &high = acc[n + D / 16][2 * h + e];
                const float p = low, q = high;
                low = p * c[e] + q * s[e];
                high = q * c[e] - p * s[e];
            }
        }
    }
}

// dQ = scale * sum over keys of dS K, dS = P (dO V^T - delta), and delta (B,heads,T) for the next kernel. Grid and tiles as in the
// forward. 6 D FLOPs a visited score.
template <int D, int WGS, int BN, bool WG>
__global__ void __launch_bounds__(WGS * 128, 1) flash_dq_kernel(bf16 *dqkv, float *delta, const bf16 *dout, const bf16 *out, const float *lse,
                                                                const bf16 *qkv, const float2 *rope, AttentionShape s, float scale, int section) {
    typedef DqTiles<D, WGS, BN> L;
    const int BM = WGS * 64, THREADS = WGS * 128;
    const int tiles = (s.T + BM - 1) / BM, lane = threadIdx.x & 31, warp_row = (int)(threadIdx.x >> 5) * 16;
    const AttentionWork work = attention_work(s.B * s.heads, tiles, section);
    const int b = work.pair / s.heads, head = work.pair % s.heads, q0 = (tiles - 1 - work.rank) * BM;
    const int64_t stride = (int64_t)(s.heads + 2 * s.kv_heads) * D, out_stride = (int64_t)s.heads * D;
    const int64_t q_at = b * (s.T * stride) + (int64_t)head * D + q0 * stride, out_at = ((int64_t)b * s.T + q0) * out_stride + head * D;
    const bf16 *k = qkv + b * (s.T * stride) + (int64_t)(s.heads + head / (s.heads / s.kv_heads)) * D, *v = k + (int64_t)s.kv_heads * D;
    const uint32_t base = shared_address(attention_shared), tile_bytes = BN * D * 2;
    const int steps = (min(q0 + BM, s.T) + BN - 1) / BN;
    const float c = scale * LOG2_E;

    tile_load<BM, D, THREADS>(base + L::DO, dout + out_at, out_stride, s.T - q0);
    copy_commit();
    tile_load<BM, D, THREADS>(base + L::Q, qkv + q_at, stride, s.T - q0);
    tile_load<BN, D, THREADS>(base + L::K, k, stride, s.T);
    tile_load<BN, D, THREADS>(base + L::V, v, stride, s.T);
    copy_commit();

    float *const delta_rows = (float *)(attention_shared + L::DELTA);
    copy_wait_block<1>();
    delta_of_warp<WGS * 64, D>(delta_rows, delta + (int64_t)work.pair * s.T + q0 + warp_row, attention_shared + L::DO,
                               out + out_at + warp_row * out_stride, out_stride, warp_row, s.T - q0 - warp_row);
    const int row = q0 + warp_row + lane / 4, column = lane % 4 * 2, group = warp_group() * 64;
    float lse2[2], d[2], dq[D / 8][4], sc[BN / 8][4], dp[BN / 8][4];
    uint32_t ds[BN / 16][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        lse2[h] = row + 8 * h < s.T ? lse[(int64_t)work.pair * s.T + row + 8 * h] * LOG2_E : 0;
        d[h] = delta_rows[warp_row + lane / 4 + 8 * h];
    }
    acc_clear(dq);

    for (int j = 0; j < steps; j++) {
        copy_wait_block<0>();  // tile j is here, and everybody is done with tile j - 1
        const uint32_t now = (j & 1) * tile_bytes, next = tile_bytes - now;
        if (j + 1 < steps) {
            tile_load<BN, D, THREADS>(base + L::K + next, k + (j + 1) * BN * stride, stride, s.T - (j + 1) * BN);
            tile_load<BN, D, THREADS>(base + L::V + next, v + (j + 1) * BN * stride, stride, s.T - (j + 1) * BN);
        }
        copy_commit();
        gemm_shared<WG, BN, D, WGS * 64>(sc, base + L::Q + group * 128, base + L::K + now);
        gemm_shared<WG, BN, D, WGS * 64>(dp, base + L::DO + group * 128, base + L::V + now);
        gemm_wait<WG, 1>(sc);
        if ((j + 1) * BN > q0 + group + 1) mask_causal<BN, false>(sc, row, j * BN + column, s.T);
        probabilities<BN>(sc, c, [&](int, float x[2][2]) { x[0][0] = x[0][1] = lse2[0]; x[1][0] = x[1][1] = lse2[1]; });
        gemm_wait<WG, 0>(dp);
        score_gradients<BN>(dp, sc, [&](int, float x[2][2]) { x[0][0] = x[0][1] = d[0]; x[1][0] = x[1][1] = d[1]; });
        gemm_pack<BN>(ds, dp);
        gemm_registers<WG, D, BN>(dq, ds, base + L::K + now);
        gemm_wait<WG, 0>(dq);
    }
    acc_scale(dq, scale, scale);
    acc_turn_back<D>(dq, rope, row, column, s.T);
    __syncthreads();  // Q is read by nobody any more
    tile_store_warp<WGS * 64, D>(dqkv + q_at + warp_row * stride, stride, s.T - q0 - warp_row, attention_shared + L::Q, warp_row, dq);
}

// One query tile's part of dK (unscaled) and dV. k, v: the warp group's first rows of their tiles; lse, delta: this thread's
// columns; row, column: key and query of an accumulator's element (0, 0). hidden: some keys come after some queries.
template <int D, int WGS, int BM, bool WG>
__device__ __forceinline__ void dkv_step(float (&dk)[D / 8][4], float (&dv)[D / 8][4], uint32_t k, uint32_t v, uint32_t q, uint32_t d_out,
                                         const float *lse, const float *delta, bool hidden, int row, int column, int T, float c) {
    float p[BM / 8][4], dp[BM / 8][4];
    uint32_t a[BM / 16][4], ds[BM / 16][4];
    gemm_shared<WG, BM, D, WGS * 64>(p, k, q);
    gemm_shared<WG, BM, D, WGS * 64>(dp, v, d_out);
    gemm_wait<WG, 1>(p);
    if (hidden) mask_causal<BM, true>(p, row, column, T);
    probabilities<BM>(p, c, [&](int n, float x[2][2]) {
        const float2 l = *(const float2 *)(lse + n * 8);
        x[0][0] = x[1][0] = l.x * LOG2_E; x[0][1] = x[1][1] = l.y * LOG2_E;
    });
    gemm_pack<BM>(a, p);
    gemm_wait<WG, 0>(dp);
    gemm_registers<WG, D, BM>(dv, a, d_out);
    score_gradients<BM>(dp, p, [&](int n, float x[2][2]) {
        const float2 d = *(const float2 *)(delta + n * 8);
        x[0][0] = x[1][0] = d.x; x[0][1] = x[1][1] = d.y;
    });
    gemm_pack<BM>(ds, dp);
    gemm_registers<WG, D, BM>(dk, ds, q);
    gemm_wait<WG, 0>(dv);
    gemm_wait<WG, 0>(dk);
}

// dK = scale * sum over queries of dS^T Q and dV = sum of P^T dO. Grid: B * kv_heads * ceil(T / (64 WGS)); WGS warp groups of 64 keys
// each; query tiles of BM, over the heads of the group in order. 8 D FLOPs a visited score.
template <int D, int WGS, int BM, bool WG>
__global__ void __launch_bounds__(WGS * 128, 1) flash_dkv_kernel(bf16 *dqkv, const float *delta, const bf16 *dout, const float *lse, const bf16 *qkv,
                                                                 const float2 *rope, AttentionShape s, float scale, int section) {
    typedef DkvTiles<D, WGS, BM> L;
    const int BN = WGS * 64, THREADS = WGS * 128, heads_a_group = s.heads / s.kv_heads;
    const int tiles = (s.T + BN - 1) / BN, lane = threadIdx.x & 31, warp_row = (int)(threadIdx.x >> 5) * 16;
    const AttentionWork work = attention_work(s.B * s.kv_heads, tiles, section);
    const int b = work.pair / s.kv_heads, kv_head = work.pair % s.kv_heads, k0 = work.rank * BN;
    const int64_t stride = (int64_t)(s.heads + 2 * s.kv_heads) * D, out_stride = (int64_t)s.heads * D;
    const int64_t k_at = b * (s.T * stride) + (int64_t)(s.heads + kv_head) * D + k0 * stride, v_at = k_at + (int64_t)s.kv_heads * D;
    const int head0 = kv_head * heads_a_group;
    const bf16 *const q = qkv + b * (s.T * stride) + (int64_t)head0 * D, *const d_out = dout + (int64_t)b * s.T * out_stride + head0 * D;
    const int64_t stats = ((int64_t)b * s.heads + head0) * s.T;
    const uint32_t base = shared_address(attention_shared), tile_bytes = BM * D * 2;
    const int first = k0 / BM, end = (s.T + BM - 1) / BM, steps = (end - first) * heads_a_group;
    const float c = scale * LOG2_E;

    // Copies a query tile of the group's head h into a stage.
    const auto load_queries = [&](int h, int tile, int stage) {
        const int q0 = tile * BM;
        tile_load<BM, D, THREADS>(base + L::Q + stage * tile_bytes, q + (int64_t)h * D + q0 * stride, stride, s.T - q0);
        tile_load<BM, D, THREADS>(base + L::DO + stage * tile_bytes, d_out + h * D + q0 * out_stride, out_stride, s.T - q0);
        if (threadIdx.x < BM) {
            const bool valid = q0 + (int)threadIdx.x < s.T;
            const int64_t at = stats + (int64_t)h * s.T + (valid ? q0 + (int)threadIdx.x : 0);
            copy_async4(base + L::LSE + (stage * BM + threadIdx.x) * 4, lse + at, valid);
            copy_async4(base + L::DELTA + (stage * BM + threadIdx.x) * 4, delta + at, valid);
        }
    };
    tile_load<WGS * 64, D, THREADS>(base + L::K, qkv + k_at, stride, s.T - k0);
    tile_load<WGS * 64, D, THREADS>(base + L::V, qkv + v_at, stride, s.T - k0);
    load_queries(0, first, 0);
    copy_commit();

    const int row = k0 + warp_row + lane / 4, column = lane % 4 * 2, group = warp_group() * 64;
    float dk[D / 8][4], dv[D / 8][4];
    acc_clear(dk);
    acc_clear(dv);

    for (int j = 0, h = 0, tile = first; j < steps; j++) {
        copy_wait_block<0>();  // tile j is here, and everybody is done with tile j - 1
        const int q0 = tile * BM;
        if (++tile == end) { tile = first; h++; }
        if (j + 1 < steps) load_queries(h, tile, (j + 1) & 1);
        copy_commit();
        const uint32_t q_tile = base + L::Q + (j & 1) * tile_bytes, do_tile = base + L::DO + (j & 1) * tile_bytes;
        const float *const lse_tile = (const float *)(attention_shared + L::LSE) + (j & 1) * BM + column;
        const float *const delta_tile = (const float *)(attention_shared + L::DELTA) + (j & 1) * BM + column;
        dkv_step<D, WGS, BM, WG>(dk, dv, base + L::K + group * 128, base + L::V + group * 128, q_tile, do_tile, lse_tile, delta_tile,
                                 q0 < k0 + group + 63 || q0 + BM > s.T, row, q0 + column, s.T, c);
    }
    acc_scale(dk, scale, scale);
    acc_turn_back<D>(dk, rope, row, column, s.T);
    const int rows = s.T - k0 - warp_row;
    __syncthreads();  // K and V are read by nobody any more
    tile_store_warp<WGS * 64, D>(dqkv + k_at + warp_row * stride, stride, rows, attention_shared + L::K, warp_row, dk);
    tile_store_warp<WGS * 64, D>(dqkv + v_at + warp_row * stride, stride, rows, attention_shared + L::V, warp_row, dv);
}

// Lets a kernel use that much shared memory, and says clearly when the card has less.
FN void flash_prepare(const void *kernel, int bytes) {
    int device, most;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (bytes > most) fatal("attention needs %d bytes of shared memory a block, this card has %d: use --attention cudnn", bytes, most);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
// (sequence, head) pairs whose k and v (forward) or q, k, v, dO (backward) together take about a third of the L2 cache.
FN int flash_section(const AttentionShape *s, int tensors) {
    const int64_t bytes = (int64_t)tensors * s->T * s->head_dim * 2, pairs = (16 << 20) / bytes;
    return pairs < 1 ? 1 : (int)pairs;
}
FN int flash_on_hopper(void) {
    int device, major;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9;
}
FN float flash_scale(const AttentionShape *s) { return 1.0f / sqrtf((float)s->head_dim); }
FN int flash_grid(int64_t pairs, int T, int rows) {
    const int64_t blocks = pairs * ceil_div(T, rows);
    if (blocks > INT32_MAX) fatal("attention of %lld tiles in one call: use a smaller --batch", (long long)blocks);
    return (int)blocks;
}

// WGS, BN: see the kernels. WG: wgmma where the card has it.
template <int D, int WGS, int BN, bool WG>
static void flash_forward_launch(const AttentionShape *s, bf16 *out, float *lse, const bf16 *qkv, cudaStream_t stream) {
    const auto kernel = flash_forward_kernel<D, WGS, BN, WG>;
    const int bytes = ForwardTiles<D, WGS, BN>::BYTES;
    flash_prepare((const void *)kernel, bytes);
    kernel<<<flash_grid((int64_t)s->B * s->heads, s->T, WGS * 64), WGS * 128, bytes, stream>>>(out, lse, qkv, *s, flash_scale(s), flash_section(s, 2));
    CUDA_LAUNCHED();
}
template <int D, int WGS, int BN, bool WG>
static void flash_dq_launch(const AttentionShape *s, bf16 *dqkv, float *delta, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *qkv, const float2 *rope, cudaStream_t stream) {
    const auto kernel = flash_dq_kernel<D, WGS, BN, WG>;
    const int bytes = DqTiles<D, WGS, BN>::BYTES;
    flash_prepare((const void *)kernel, bytes);
    kernel<<<flash_grid((int64_t)s->B * s->heads, s->T, WGS * 64), WGS * 128, bytes, stream>>>(dqkv, delta, dout, out, lse, qkv, rope, *s, flash_scale(s), flash_section(s, 2));
    CUDA_LAUNCHED();
}
template <int D, int WGS, int BM, bool WG>
static void flash_dkv_launch(const AttentionShape *s, bf16 *dqkv, const float *delta, const bf16 *dout, const float *lse, const bf16 *qkv, const float2 *rope, cudaStream_t stream) {
    const auto kernel = flash_dkv_kernel<D, WGS, BM, WG>;
    const int bytes = DkvTiles<D, WGS, BM>::BYTES;
    flash_prepare((const void *)kernel, bytes);
    kernel<<<flash_grid((int64_t)s->B * s->kv_heads, s->T, WGS * 64), WGS * 128, bytes, stream>>>(dqkv, delta, dout, lse, qkv, rope, *s, flash_scale(s), flash_section(s, 2 * (s->heads / s->kv_heads)));
    CUDA_LAUNCHED();
}

// Workspace of a backward pass: delta (B,heads,T) float32.
FN int64_t flash_workspace_bytes(const AttentionShape *s) { return (int64_t)s->B * s->heads * s->T * (int64_t)sizeof(float); }

// Tile sizes: on Hopper the fastest of those dev/cuda/attention.cu times; elsewhere those that fit in 99 KiB of shared memory.
template <int D>
static void flash_forward_of(const AttentionShape *s, bf16 *out, float *lse, const bf16 *qkv, cudaStream_t stream) {
    if (flash_on_hopper()) flash_forward_launch<D, 1, D == 128 ? 64 : 128, true>(s, out, lse, qkv, stream);
    else flash_forward_launch<D, 1, 64, false>(s, out, lse, qkv, stream);
}
template <int D>
static void flash_backward_of(const AttentionShape *s, bf16 *dqkv, float *delta, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *qkv, const float2 *rope, cudaStream_t stream) {
    if (flash_on_hopper()) {
        flash_dq_launch<D, 1, 64, true>(s, dqkv, delta, dout, out, lse, qkv, rope, stream);
        flash_dkv_launch<D, 1, 64, true>(s, dqkv, delta, dout, lse, qkv, rope, stream);
    } else {
        flash_dq_launch<D, 1, 64, false>(s, dqkv, delta, dout, out, lse, qkv, rope, stream);
        flash_dkv_launch<D, 1, 64, false>(s, dqkv, delta, dout, lse, qkv, rope, stream);
    }
}
// See attention.cuh for the arguments.
FN void flash_forward(const AttentionShape *s, bf16 *out, float *lse, const bf16 *qkv, cudaStream_t stream) {
    if (s->head_dim == 128) flash_forward_of<128>(s, out, lse, qkv, stream);
    else flash_forward_of<64>(s, out, lse, qkv, stream);
}
FN void flash_backward(const AttentionShape *s, bf16 *dqkv, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *qkv, const float2 *rope,
                       void *workspace, cudaStream_t stream) {
    if (s->head_dim == 128) flash_backward_of<128>(s, dqkv, (float *)workspace, dout, out, lse, qkv, rope, stream);
    else flash_backward_of<64>(s, dqkv, (float *)workspace, dout, out, lse, qkv, rope, stream);
}

#endif
