// cpu/quantize.h: quantizes whole tensors on the CPU, tile by tile, with the block functions of quantize.h.
//
// A GEMM sees an operand as `outer` rows of `inner` values, the GEMM's inner dimension; blocks and rotations run along it.
// In memory the tensor is (rows, cols) row-major and the operand is the tensor (inner = cols) or its transpose (inner =
// rows): only the strides differ. A tile is 16 rows of the operand (a cache line of the transpose, and the height of a 16x16 block)
// by up to 128 inner values (the longest rotation), held as [group][inner][LANES], so that a loop over lanes is a vector
// instruction. Tiles are read whole before they are written, so output may overwrite input; they are independent of each other, so
// OpenMP threads share them and the bits do not depend on the number of threads.
//
// These functions start their own OpenMP threads and share one scratch buffer: call them from one thread at a time.
#ifndef LLMC_CPU_QUANTIZE_H
#define LLMC_CPU_QUANTIZE_H

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "../common.h"
#include "../quantize.h"
#include "../recipe.h"

#define TILE_OUTER NVFP4_BLOCK
#define TILE_INNER ROTATION_MAX
#define TILE_GROUPS (TILE_OUTER / LANES)
#define TILE_BLOCKS (TILE_INNER / NVFP4_BLOCK)
#define PARALLEL_TILES 16            // fewer tiles than this (about 0.1 ms) are not worth waking threads for
#define PARALLEL_COUNT (PARALLEL_TILES * TILE_OUTER * TILE_INNER)
typedef float Tile[TILE_GROUPS][TILE_INNER][LANES];

// Address of an operand's random words (rng.h). rank: 0 for weights; micro: micro-batch of the step, 0 for weights.
typedef struct { uint64_t seed; int64_t step; int layer, linear, gemm, operand, rank, micro; } QuantizeAddress;

// Where an operand's random words and rotation signs come from: an address, or, for tests, arrays of words.
typedef struct {
    uint32_t sign_bits[4];           // bit i of the 128: position i of every run is negated
    RngStream stream;
    int64_t micro;
    const uint32_t *words;           // not NULL: word of block (row, block) at [row*blocks + block]; SR: of (row, i) at [row*inner + i]
} QuantizeRandom;

// One tensor on its way: the operand's shape and strides (in values), and what every tile needs to know.
typedef struct {
    int64_t outer, inner, outer_stride, inner_stride;
    const OperandSpec *spec;
    const QuantizeRandom *random;
    TensorScale ts;
    int decode;                      // out = code x s_b instead of code
    float *out;                      // laid out like the tensor
    uint8_t *scales;                 // E4M3 codes (outer, inner/16), or (outer/16 rounded up, inner/16) for 16x16; E8M0 bytes
                                     // (outer, inner/32) for MXFP4; may be NULL
    uint8_t *mask;                   // QuEST: 1 where a value was not clipped, laid out like the tensor; may be NULL
    float *c;                        // MS-EDEN post hoc: the block scales before alignment, (outer, inner/16)
} QuantizeJob;

FN QuantizeRandom quantize_random(const QuantizeAddress *at, const OperandSpec *spec) {
    QuantizeRandom r;
    memset(&r, 0, sizeof r);
    int purpose = spec->rounding == ROUND_SR ? RNG_VALUE : RNG_SCALE;
    r.stream = rng_stream(at->seed, (uint32_t)at->step, rng_address(purpose, at->layer, at->linear, at->gemm, at->operand, at->rank));
    r.micro = at->micro;
    if (spec->rotation && spec->signs == SIGNS_RANDOM) rotation_bits(at->seed, (uint32_t)at->step, at->layer, at->linear, at->gemm, r.sign_bits);
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// Its corner, and its rows and inner values inside the operand.
typedef struct { int64_t o, i; int rows, n; } TilePlace;
FN int64_t tile_count(const QuantizeJob *j) {
    return (j->outer + TILE_OUTER - 1) / TILE_OUTER * ((j->inner + TILE_INNER - 1) / TILE_INNER);
}
// Tile number `tile`: their order follows memory.
FN TilePlace tile_place(const QuantizeJob *j, int64_t tile) {
    const int64_t groups = (j->outer + TILE_OUTER - 1) / TILE_OUTER, runs = (j->inner + TILE_INNER - 1) / TILE_INNER;
    TilePlace p;
    p.o = (j->inner_stride == 1 ? tile / runs : tile % groups) * TILE_OUTER;
    p.i = (j->inner_stride == 1 ? tile % runs : tile / groups) * TILE_INNER;
    p.rows = j->outer - p.o < TILE_OUTER ? (int)(j->outer - p.o) : TILE_OUTER;
    p.n = j->inner - p.i < TILE_INNER ? (int)(j->inner - p.i) : TILE_INNER;
    return p;
}
FN int64_t tile_offset(const QuantizeJob *j, TilePlace p) { return p.o * j->outer_stride + p.i * j->inner_stride; }

// dst[i][k] = src[k][i], i, k < LANES; strides in values.
FN void square_transpose(float *dst, int64_t dst_stride, const float *src, int64_t src_stride) {
#if defined(__AVX__) && LANES == 8
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(src + i * src_stride);
    for (int i = 0; i < 8; i += 2) { b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]); b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]); }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0x44);
            a[i + 2 * k + 1] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0xEE);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + i * dst_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4) * dst_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
#else
    for (int i = 0; i < LANES; i++) for (int k = 0; k < LANES; k++) dst[i * dst_stride + k] = src[k * src_stride + i];
#endif
}
// Rows beyond the operand read as zero.
FN void tile_load(Tile t, const float *x, const QuantizeJob *j, TilePlace p) {
    x += tile_offset(j, p);
    if (p.rows < TILE_OUTER || p.n % LANES) {
        memset(t, 0, sizeof(Tile));
        for (int r = 0; r < p.rows; r++)
            for (int k = 0; k < p.n; k++) t[r / LANES][k][r % LANES] = x[r * j->outer_stride + k * j->inner_stride];
    } else if (j->outer_stride == 1) {
        for (int k = 0; k < p.n; k++)
            for (int g = 0; g < TILE_GROUPS; g++) EACH_LANE(l) t[g][k][l] = x[k * j->inner_stride + g * LANES + l];
    } else {
        for (int g = 0; g < TILE_GROUPS; g++)
            for (int k = 0; k < p.n; k += LANES) square_transpose(t[g][k], LANES, x + g * LANES * j->outer_stride + k, j->outer_stride);
    }
}
FN void tile_store(Tile t, float *out, const QuantizeJob *j, TilePlace p) {
    out += tile_offset(j, p);
    if (p.rows < TILE_OUTER || p.n % LANES) {
        for (int r = 0; r < p.rows; r++)
            for (int k = 0; k < p.n; k++) out[r * j->outer_stride + k * j->inner_stride] = t[r / LANES][k][r % LANES];
    } else if (j->outer_stride == 1) {
        for (int k = 0; k < p.n; k++)
            for (int g = 0; g < TILE_GROUPS; g++) EACH_LANE(l) out[k * j->inner_stride + g * LANES + l] = t[g][k][l];
    } else {
        for (int g = 0; g < TILE_GROUPS; g++)
            for (int k = 0; k < p.n; k += LANES) square_transpose(out + g * LANES * j->outer_stride + k, j->outer_stride, t[g][k], LANES);
    }
}
// hadamard() of LANES columns: the same sums in the same order, two stages at a time.
FN void lane_hadamard(float y[][LANES], int n) {
    int h = 1;
    for (; 2 * h < n; h *= 4)
        for (int i = 0; i < n; i += 4 * h)
            for (int k = i; k < i + h; k++) EACH_LANE(l) {
                const float a = y[k][l], b = y[k + h][l], c = y[k + 2 * h][l], d = y[k + 3 * h][l];
                const float ab = f32_add(a, b), a_b = f32_sub(a, b), cd = f32_add(c, d), c_d = f32_sub(c, d);
                y[k][l] = f32_add(ab, cd); y[k + 2 * h][l] = f32_sub(ab, cd);
                y[k + h][l] = f32_add(a_b, c_d); y[k + 3 * h][l] = f32_sub(a_b, c_d);
            }
    if (h < n)
        for (int k = 0; k < h; k++) EACH_LANE(l) {
            const float a = y[k][l], b = y[k + h][l];
            y[k][l] = f32_add(a, b); y[k + h][l] = f32_sub(a, b);
        }
}
// Signs and Hadamard transform of every run of `rotation` inner values: unnormalised, but for MXFP4.
FN void tile_rotate(Tile t, const QuantizeJob *j, int n) {
    const int d = j->spec->rotation;
    for (int g = 0; g < TILE_GROUPS; g++) {
        for (int k = 0; k < n; k++) {
            const uint32_t sign = rotation_sign(j->random->sign_bits, k % d);
            EACH_LANE(l) t[g][k][l] = f32_from_bits(f32_bits(t[g][k][l]) ^ sign);
        }
        for (int k = 0; k < n; k += d) lane_hadamard(t[g] + k, d);
        if (rotation_is_normalised(j->spec))
            for (int k = 0; k < n; k++) EACH_LANE(l) t[g][k][l] = f32_mul(t[g][k][l], rotation_norm(d));
    }
}
// Largest bits of |x|: those of the largest magnitude, or of a NaN or an infinity where there is one.
FN uint32_t tile_amax_bits(Tile t, int n) {
    uint32_t m[LANES], all = 0;
    EACH_LANE(l) m[l] = 0;
    for (int g = 0; g < TILE_GROUPS; g++)
        for (int k = 0; k < n; k++) EACH_LANE(l) m[l] = u32_max(m[l], f32_bits(t[g][k][l]) & 0x7FFFFFFFu);
    for (int l = 0; l < LANES; l++) all = u32_max(all, m[l]);
    return all;
}
// Words 4i .. 4i+3 of a stream for LANES different i: rng_words4() on every lane.
FN void lane_words4(RngStream s, const uint64_t i[LANES], uint32_t u[4][LANES]) {
    EACH_LANE(l) { u[0][l] = (uint32_t)i[l]; u[1][l] = (uint32_t)(i[l] >> 32); u[2][l] = s.step; u[3][l] = s.address; }
    for (int round = 0; round < 10; round++) {
        EACH_LANE(l) philox_round(&u[0][l], &u[1][l], &u[2][l], &u[3][l], s.key0, s.key1);
        s.key0 += PHILOX_KEY0; s.key1 += PHILOX_KEY1;
    }
}
// Random words first .. first+n-1 of rows o .. o+LANES-1, of per_row in a row (one a block, or one a value for SR).
FN void tile_words(const QuantizeJob *j, int64_t o, int64_t first, int64_t per_row, int n, uint32_t u[][LANES]) {
    const QuantizeRandom *r = j->random;
    if (!r->words && per_row % 4 == 0 && first % 4 == 0 && n % 4 == 0) {  // whole Philox calls
        for (int k = 0; k < n; k += 4) {
            uint64_t i[LANES];
            EACH_LANE(l) i[l] = block_word_index(r->micro, j->outer, per_row, o + l, first + k) / 4;
            lane_words4(r->stream, i, u + k);
        }
        return;
    }
    for (int k = 0; k < n; k++) for (int l = 0; l < LANES; l++) {
        int64_t row = o + l < j->outer ? o + l : j->outer - 1;
        u[k][l] = r->words ? r->words[row * per_row + first + k]
                           : rng_word(r->stream, block_word_index(r->micro, j->outer, per_row, row, first + k));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Quantizing a tile: t -> codes (or codes x s_b), in place. The tensor scale is known.

// Blocks of 16 of one group of rows, the first of them row o.
FN void group_quantize(float t[][LANES], const QuantizeJob *j, int64_t o, int64_t i, int n) {
    const int64_t blocks = j->inner / NVFP4_BLOCK;
    const Rounding rounding = j->spec->rounding;
    uint32_t words[TILE_BLOCKS][LANES];
    if (rounding == ROUND_MS_EDEN) tile_words(j, o, i / NVFP4_BLOCK, blocks, n / NVFP4_BLOCK, words);
    for (int b = 0; b < n / NVFP4_BLOCK; b++) {
        float (*x)[LANES] = t + b * NVFP4_BLOCK, amax[LANES], s[LANES];
        LaneBlock q;
        uint32_t sb[LANES];
        block_amax(x, amax);
        if (rounding == ROUND_RTN) nvfp4_rtn_block(x, amax, j->ts, q, sb);
        else if (rounding == ROUND_FOUR_SIX) four_six_block(x, amax, j->ts, q, sb);
        else if (rounding == ROUND_SEARCH || rounding == ROUND_SEARCH_TRUE)
            search_block(x, amax, j->ts, j->spec->search == SEARCH_ALL, rounding == ROUND_SEARCH_TRUE, q, sb);
        else if (rounding == ROUND_MS_EDEN) ms_eden_block(x, amax, j->ts, words[b], q, sb);
        else {
            LaneBlockBits u;
            tile_words(j, o, i + b * NVFP4_BLOCK, j->inner, NVFP4_BLOCK, u);
            nvfp4_sr_block(x, amax, j->ts, u, q, sb);
        }
        EACH_LANE(l) s[l] = j->decode ? e4m3_decode(sb[l]) : 1.0f;
        for (int k = 0; k < NVFP4_BLOCK; k++) EACH_LANE(l) x[k][l] = f32_mul(q[k][l], s[l]);
        if (j->scales)
            for (int l = 0; l < LANES && o + l < j->outer; l++) j->scales[(o + l) * blocks + i / NVFP4_BLOCK + b] = (uint8_t)sb[l];
    }
}

// 16x16 blocks: the tile's 16 rows share a block scale. Rows beyond the operand are zero and change nothing.
// Rounds block b with one scale for all 256 values; -> four-over-six's squared error: the sums of eight, row by row.
FN float square_try(Tile t, int b, uint32_t scale, TensorScale ts, LaneBlock q[TILE_GROUPS]) {
    uint32_t sb[LANES];
    float error[2][LANES], sum = 0.0f;
    EACH_LANE(l) sb[l] = scale;
    for (int g = 0; g < TILE_GROUPS; g++) {
        four_six_try(t[g] + b * NVFP4_BLOCK, sb, ts, q[g], error);
        for (int l = 0; l < LANES; l++) sum = f32_add(f32_add(sum, error[0][l]), error[1][l]);
    }
    return sum;
}
FN void square_quantize(Tile t, const QuantizeJob *j, TilePlace p) {
    for (int b = 0; b < p.n / NVFP4_BLOCK; b++) {
        LaneBlock q[2][TILE_GROUPS];
        float amax = 0.0f, a[LANES];
        for (int g = 0; g < TILE_GROUPS; g++) {
            block_amax(t[g] + b * NVFP4_BLOCK, a);
            for (int l = 0; l < LANES; l++) amax = f32_max(a[l], amax);
        }
        uint32_t sb = four_six_scale(amax, j->ts, 0);
        const float error = square_try(t, b, sb, j->ts, q[0]);
        int four = 0;
        if (j->spec->rounding == ROUND_FOUR_SIX) {
            const uint32_t s4 = four_six_scale(amax, j->ts, 1);
            four = square_try(t, b, s4, j->ts, q[1]) < error;
            if (four) sb = s4;
        }
        const float s = j->decode ? e4m3_decode(sb) : 1.0f;
        for (int g = 0; g < TILE_GROUPS; g++)
            for (int k = 0; k < NVFP4_BLOCK; k++) EACH_LANE(l) t[g][b * NVFP4_BLOCK + k][l] = f32_mul(q[four][g][k][l], s);
        if (j->scales) j->scales[p.o / NVFP4_BLOCK * (j->inner / NVFP4_BLOCK) + p.i / NVFP4_BLOCK + b] = (uint8_t)sb;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// MS-EDEN post hoc, in two passes

// Codes in place of the values, c of every block; -> bits of the largest c.
FN uint32_t tile_posthoc_codes(Tile t, const QuantizeJob *j, TilePlace p) {
    const int64_t blocks = j->inner / NVFP4_BLOCK;
    uint32_t most = 0;
    for (int g = 0; g < TILE_GROUPS; g++)
        for (int b = 0; b < p.n / NVFP4_BLOCK; b++) {
            float (*x)[LANES] = t[g] + b * NVFP4_BLOCK, amax[LANES], c[LANES];
            LaneBlock q;
            block_amax(x, amax);
            if (j->spec->rounding != ROUND_MS_EDEN_SEARCH) ms_eden_posthoc_block(x, amax, q, c);
            else if (j->spec->search == SEARCH_ALL) ms_eden_search_all_block(x, amax, q, c);
            else ms_eden_search_block(x, q, c);
            memcpy(x, q, sizeof q);
            for (int l = 0; l < LANES && g * LANES + l < p.rows; l++) {
                j->c[(p.o + g * LANES + l) * blocks + p.i / NVFP4_BLOCK + b] = c[l];
                most = u32_max(most, f32_bits(c[l]));
            }
        }
    return most;
}
// Block scales from c and the tensor scale; the tile's codes in memory times s_b if decode.
FN void tile_posthoc_scales(const QuantizeJob *j, TilePlace p) {
    const int64_t blocks = j->inner / NVFP4_BLOCK, first = p.i / NVFP4_BLOCK;
    float s[TILE_BLOCKS][TILE_OUTER], *out = j->out + tile_offset(j, p);
    for (int g = 0; g < TILE_GROUPS; g++) {
        uint32_t words[TILE_BLOCKS][LANES];
        tile_words(j, p.o + g * LANES, first, blocks, p.n / NVFP4_BLOCK, words);
        for (int b = 0; b < p.n / NVFP4_BLOCK; b++)
            for (int l = 0; l < LANES && g * LANES + l < p.rows; l++) {
                const int64_t at = (p.o + g * LANES + l) * blocks + first + b;
                const uint32_t sb = ms_eden_posthoc_scale(j->c[at], j->ts.st, words[b][l]);
                s[b][g * LANES + l] = e4m3_decode(sb);
                if (j->scales) j->scales[at] = (uint8_t)sb;
            }
    }
    if (!j->decode) return;
    if (j->inner_stride == 1) {
        for (int r = 0; r < p.rows; r++) for (int b = 0; b < p.n / NVFP4_BLOCK; b++)
            for (int k = 0; k < NVFP4_BLOCK; k++) out[r * j->outer_stride + b * NVFP4_BLOCK + k] *= s[b][r];
    } else {
        for (int k = 0; k < p.n; k++) for (int r = 0; r < p.rows; r++) out[k * j->inner_stride + r] *= s[k / NVFP4_BLOCK][r];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// MXFP4: no tensor scale, one pass. The tile's rotated values -> codes (or codes x 2^e), in place.

FN void tile_mx_quantize(Tile t, const QuantizeJob *j, TilePlace p) {
    const int64_t blocks = j->inner / MXFP4_BLOCK;
    for (int g = 0; g < TILE_GROUPS && g * LANES < p.rows; g++)
        for (int b = 0; b < p.n / MXFP4_BLOCK; b++) {
            float (*x)[LANES] = t[g] + b * MXFP4_BLOCK, s[LANES];
            const int64_t o = p.o + g * LANES, i = p.i + b * MXFP4_BLOCK;
            LaneBlock32 q;
            LaneBlock32Bits u;                                         // random words, or QuEST's mask
            uint32_t scale[LANES];
            if (j->spec->rounding == ROUND_QUEST) mx_quest_block(x, q, scale, u);
            else {
                tile_words(j, o, i, j->inner, MXFP4_BLOCK, u);
                mx_sr_block(x, u, q, scale);
            }
            EACH_LANE(l) s[l] = j->decode ? e8m0_decode(scale[l]) : 1.0f;
            for (int k = 0; k < MXFP4_BLOCK; k++) EACH_LANE(l) x[k][l] = f32_mul(q[k][l], s[l]);
            for (int l = 0; l < LANES && o + l < j->outer; l++) {
                if (j->scales) j->scales[(o + l) * blocks + i / MXFP4_BLOCK] = (uint8_t)scale[l];
                for (int k = 0; j->mask && k < MXFP4_BLOCK; k++)
                    j->mask[(o + l) * j->outer_stride + (i + k) * j->inner_stride] = (uint8_t)u[k][l];
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Passes over a tensor

FN uint32_t pass_amax_bits(const float *x, int64_t count) {
    uint32_t m = 0;
#pragma omp parallel for schedule(static) reduction(max : m) if (count >= PARALLEL_COUNT)
    for (int64_t k = 0; k < count; k++) m = u32_max(m, f32_bits(x[k]) & 0x7FFFFFFFu);
    return m;
}
// Rotates x into out; -> bits of the rotated amax. MXFP4: quantizes too. cmax not NULL: MS-EDEN post hoc, codes into out; *cmax: bits
// of the largest c.
FN uint32_t pass_rotate(const float *x, const QuantizeJob *j, uint32_t *cmax) {
    const int64_t tiles = tile_count(j);
    uint32_t m = 0, most = 0;
#pragma omp parallel for schedule(static) reduction(max : m, most) if (tiles >= PARALLEL_TILES)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const TilePlace p = tile_place(j, tile);
        Tile t;
        tile_load(t, x, j, p);
        if (j->spec->rotation) tile_rotate(t, j, p.n);
        m = u32_max(m, tile_amax_bits(t, p.n));
        if (cmax) most = u32_max(most, tile_posthoc_codes(t, j, p));
        else if (j->spec->format == FORMAT_MXFP4) tile_mx_quantize(t, j, p);
        tile_store(t, j->out, j, p);
    }
    if (cmax) *cmax = most;
    return m;
}
FN void pass_quantize(const float *x, const QuantizeJob *j) {
    const int64_t tiles = tile_count(j);
#pragma omp parallel for schedule(static) if (tiles >= PARALLEL_TILES)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const TilePlace p = tile_place(j, tile);
        Tile t;
        tile_load(t, x, j, p);
        if (j->spec->block == BLOCK_16X16) square_quantize(t, j, p);
        else for (int g = 0; g < TILE_GROUPS && g * LANES < p.rows; g++) group_quantize(t[g], j, p.o + g * LANES, p.i, p.n);
        tile_store(t, j->out, j, p);
    }
}
FN void pass_posthoc_scales(const QuantizeJob *j) {
    const int64_t tiles = tile_count(j);
#pragma omp parallel for schedule(static) if (tiles >= PARALLEL_TILES)
    for (int64_t tile = 0; tile < tiles; tile++) tile_posthoc_scales(j, tile_place(j, tile));
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

// Grow-only scratch: a training step quantizes the same shapes again and again.
FN float *quantize_scratch(int64_t count) {
    static float *scratch;
    static int64_t capacity;
    if (count > capacity) {
        free(scratch);
        scratch = (float *)xcalloc((size_t)count, sizeof(float));
        capacity = count;
    }
    return scratch;
}
// Bits of a float32 in the order of its values, and back.
FN uint32_t order_bits(float x) { const uint32_t u = f32_bits(x); return u >> 31 ? ~u : u | 0x80000000u; }
FN float order_value(uint32_t o) { return f32_from_bits(o >> 31 ? o & 0x7FFFFFFFu : ~o); }
// The value of rank k of count, from 0 in ascending order: counts the upper halves of the bits, then the lower halves below the
// upper half found. Two passes, no sorting. x: no NaN.
FN float value_of_rank(const float *x, int64_t count, int64_t k) {
    int64_t *counts = (int64_t *)xcalloc(1 << 16, sizeof(int64_t));
    uint32_t upper = 0, lower = 0;
    for (int64_t i = 0; i < count; i++) counts[order_bits(x[i]) >> 16]++;
    while (k >= counts[upper]) k -= counts[upper++];
    memset(counts, 0, (1 << 16) * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) if (order_bits(x[i]) >> 16 == upper) counts[order_bits(x[i]) & 0xFFFFu]++;
    while (k >= counts[lower]) k -= counts[lower++];
    free(counts);
    return order_value(upper << 16 | lower);
}
// Whether some quantizer here is what spec asks for.
FN int operand_is_known(const OperandSpec *s) {
    const int nearest = s->rounding == ROUND_RTN || s->rounding == ROUND_FOUR_SIX;
    switch (s->format) {
    case FORMAT_FLOAT: return (s->rounding == ROUND_NONE || s->rounding == ROUND_BF16) && s->block == BLOCK_NONE;
    case FORMAT_NVFP4:
        if (s->block == BLOCK_16X16) return nearest;
        return s->block == BLOCK_1X16 && s->rounding >= ROUND_RTN && s->rounding <= ROUND_MS_EDEN_SEARCH;
    case FORMAT_MXFP4: return s->block == BLOCK_1X32 && (s->rounding == ROUND_QUEST || s->rounding == ROUND_SR);
    case FORMAT_E2M1: return s->block == BLOCK_ROW && s->rounding == ROUND_RTN;
    default: return s->block == BLOCK_TENSOR && s->rounding == ROUND_RTN;  // FP8
    }
}
// The operand's shape and strides; fatal if its blocks or its rotation do not divide it.
FN QuantizeJob quantize_job(int64_t rows, int64_t cols, int along_rows, const OperandSpec *spec) {
    QuantizeJob j;
    memset(&j, 0, sizeof j);
    j.outer = along_rows ? cols : rows; j.inner = along_rows ? rows : cols;
    j.outer_stride = along_rows ? 1 : cols; j.inner_stride = along_rows ? cols : 1;
    j.spec = spec;
    j.ts.st = 1.0f;
    const int d = spec->rotation, unit = d > operand_block(spec) ? d : operand_block(spec);
    if (d && (d < 2 || d > ROTATION_MAX || (d & (d - 1))))
        fatal("rotation of %d: it must be a power of two from 2 to %d", d, ROTATION_MAX);
    if (!operand_is_known(spec))
        fatal("no quantizer rounds by %d to format %d in blocks of kind %d: mend the recipe's row", (int)spec->rounding,
              (int)spec->format, (int)spec->block);
    if (rows < 1 || cols < 1 || j.inner % unit)
        fatal("cannot quantize a tensor of %lld x %lld along its %s: the length along the blocks must be a multiple of %d",
              (long long)rows, (long long)cols, along_rows ? "rows" : "columns", unit);
    return j;
}
FN void quantize_plain(const float *x, const QuantizeJob *j) {
    const int64_t count = j->outer * j->inner;
    float *out = j->out;
    if (j->spec->rounding == ROUND_BF16) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_COUNT)
        for (int64_t k = 0; k < count; k++) out[k] = bf16_round(x[k]);
    } else if (x != out) memcpy(out, x, (size_t)count * sizeof(float));
}
// FP8, one scale a tensor: out = FP8 values; -> the factor that turns them into x.
FN float quantize_fp8(const float *x, const QuantizeJob *j, float amax) {
    const int64_t count = j->outer * j->inner;
    const int e5m2 = j->spec->format == FORMAT_E5M2;
    const PlainScale s = plain_scale(amax, e5m2 ? E5M2_MAX : E4M3_MAX);
    float *out = j->out;
#pragma omp parallel for schedule(static) if (count >= PARALLEL_COUNT)
    for (int64_t k = 0; k < count; k++) {
        const float v = f32_mul(x[k], s.inv);
        out[k] = e5m2 ? e5m2_round(v) : e4m3_round(v);
    }
    return s.factor;
}
// E2M1, a float32 scale for each row of the operand. The rows' factors are no part of an alpha: with decode they are multiplied in,
// out = code x factor in float32 (a GPU multiplies codes and scales the product's rows and columns).
FN void quantize_rows(const float *x, const QuantizeJob *j) {
#pragma omp parallel for schedule(static) if (j->outer * j->inner >= PARALLEL_COUNT)
    for (int64_t o = 0; o < j->outer; o++) {
        const float *from = x + o * j->outer_stride;
        float *to = j->out + o * j->outer_stride, amax = 0.0f;
        for (int64_t i = 0; i < j->inner; i++) amax = f32_max(f32_abs(from[i * j->inner_stride]), amax);
        const PlainScale s = plain_scale(amax, E2M1_MAX);
        const float factor = j->decode ? s.factor : 1.0f;
        for (int64_t i = 0; i < j->inner; i++)
            to[i * j->inner_stride] = f32_mul(e2m1_round(f32_mul(from[i * j->inner_stride], s.inv)), factor);
    }
}
// NVFP4. -> bits of the largest magnitude; j->ts.st: the tensor scale.
FN uint32_t quantize_nvfp4(const float *x, QuantizeJob *j) {
    const Rounding rounding = j->spec->rounding;
    uint32_t amax, cmax;
    if (rounding == ROUND_MS_EDEN_POSTHOC || rounding == ROUND_MS_EDEN_SEARCH) {
        j->c = quantize_scratch(j->outer * (j->inner / NVFP4_BLOCK));
        amax = pass_rotate(x, j, &cmax);
        j->ts.st = ms_eden_posthoc_tensor_scale(f32_from_bits(cmax));
        if (amax < 0x7F800000u) pass_posthoc_scales(j);
        return amax;
    }
    amax = j->spec->rotation ? pass_rotate(x, j, NULL) : pass_amax_bits(x, j->outer * j->inner);
    const float override_ = rounding == ROUND_SR ? SR_OVERRIDE : rounding == ROUND_MS_EDEN ? EDEN_OVERRIDE : 1.0f;
    const float bound = rounding == ROUND_RTN || rounding == ROUND_SR ? RTN_BOUND : rounding == ROUND_MS_EDEN ? EDEN_BOUND : FOUR_SIX_BOUND;
    j->ts = nvfp4_tensor_scale(f32_from_bits(amax), override_, bound);
    if (amax < 0x7F800000u) pass_quantize(j->spec->rotation ? j->out : x, j);
    return amax;
}

// Limits of the clamp: the values of rank k and count-1-k (from 0, ascending), k = clamp_percent % of count rounded down. x: no NaN.
typedef struct { float low, high; } ClampLimits;
FN ClampLimits clamp_limits(const float *x, int64_t count, int percent) {
    const int64_t k = count / 100 * percent + count % 100 * percent / 100;
    ClampLimits c;
    c.low = value_of_rank(x, count, k);
    c.high = value_of_rank(x, count, count - 1 - k);
    return c;
}
HD float clamp_value(float x, ClampLimits c) { return x < c.low ? c.low : x > c.high ? c.high : x; }
FN void pass_clamp(const float *x, float *out, int64_t count, int percent) {
    const ClampLimits c = clamp_limits(x, count, percent);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_COUNT)
    for (int64_t k = 0; k < count; k++) out[k] = clamp_value(x[k], c);
}
// out = what the clamp cuts off x, in BF16: 0 within the limits.
FN void clamp_residual(float *out, const float *x, int64_t count, int percent) {
    const ClampLimits c = clamp_limits(x, count, percent);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_COUNT)
    for (int64_t k = 0; k < count; k++) out[k] = bf16_round(f32_sub(x[k], clamp_value(x[k], c)));
}

// Every quantizer. j->out: codes, or codes x block (or row) scales with j->decode; -> the factor that turns those into the operand. A NaN
// or an infinity in x (or in the rotated x) makes factor and out NaN and the block scales 0, so that it cannot be trained on
// unseen; but the plain roundings hand it on as it is.
FN float quantize_run(QuantizeJob *j, const float *x) {
    const OperandSpec *spec = j->spec;
    const int64_t count = j->outer * j->inner;
    uint32_t amax = spec->clamp_percent ? pass_amax_bits(x, count) : 0;
    float factor = 1.0f;
    if (spec->clamp_percent && amax < 0x7F800000u) { pass_clamp(x, j->out, count, spec->clamp_percent); x = j->out; }
    if (spec->format == FORMAT_FLOAT) {
        if (spec->rotation) { pass_rotate(x, j, NULL); x = j->out; }
        quantize_plain(x, j);
        return 1.0f;
    }
    if (amax < 0x7F800000u && spec->format == FORMAT_NVFP4) {
        amax = quantize_nvfp4(x, j);
        factor = j->ts.st;
    } else if (amax < 0x7F800000u && spec->format == FORMAT_MXFP4) {
        amax = pass_rotate(x, j, NULL);
        factor = spec->rounding == ROUND_SR ? MX_SR_FACTOR : 1.0f;
    } else if (amax < 0x7F800000u) {
        amax = spec->rotation ? pass_rotate(x, j, NULL) : pass_amax_bits(x, count);
        if (spec->rotation) x = j->out;
        if (spec->format == FORMAT_E2M1) quantize_rows(x, j);
        else factor = quantize_fp8(x, j, f32_from_bits(amax));
    }
    if (amax < 0x7F800000u) return factor;
    for (int64_t k = 0; k < count; k++) j->out[k] = NAN;
    const int64_t outer = spec->block == BLOCK_16X16 ? (j->outer + 15) / 16 : j->outer;
    if (j->scales) memset(j->scales, 0, (size_t)(outer * (j->inner / operand_block(spec))));
    return NAN;
}

// Quantizes x, (rows, cols) row-major, along its columns (along_rows = 0) or along its rows (1: the operand is the transpose),
// after the rotation that spec asks for. out: laid out like x, may be x; values of the E2M1 grid (codes), or codes x s_b
// (decode), exact in BF16 but for FORMAT_E2M1. scales: see QuantizeJob; may be NULL. -> the tensor scale: operand = code x s_b x s_t (see
// quantize_run; there also: NaN and infinity). Errors: fatal, a length that blocks or rotation do not divide.
FN float quantize_tensor(float *out, uint8_t *scales, const float *x, int64_t rows, int64_t cols, int along_rows,
                         const OperandSpec *spec, const QuantizeRandom *random, int decode) {
    QuantizeJob j = quantize_job(rows, cols, along_rows, spec);
    j.random = random; j.decode = decode;
    j.out = out; j.scales = scales;
    return quantize_run(&j, x);
}

// A GEMM operand for an emulated product: out = code x s_b as float32, each value exact in BF16 (float32 or BF16-rounded values
// for the plain roundings; FORMAT_E2M1: code x row scale in float32); -> the factor that turns out into the operand (s_t; 1 for the plain
// roundings), NaN if x holds a NaN or an infinity. The rotation is not normalised (but MXFP4's is): the product of two rotated
// operands is to be multiplied by 1/rotation. mask: QuEST's, laid out like x; NULL if not wanted.
FN float quantize_operand_masked(float *out, uint8_t *mask, const float *x, int64_t rows, int64_t cols, int along_rows,
                                 const OperandSpec *spec, const QuantizeAddress *at) {
    const QuantizeRandom random = quantize_random(at, spec);
    QuantizeJob j = quantize_job(rows, cols, along_rows, spec);
    j.random = &random; j.decode = 1;
    j.out = out; j.mask = mask;
    return quantize_run(&j, x);
}
FN float quantize_operand(float *out, const float *x, int64_t rows, int64_t cols, int along_rows, const OperandSpec *spec,
                          const QuantizeAddress *at) {
    return quantize_operand_masked(out, NULL, x, rows, cols, along_rows, spec, at);
}

#endif
