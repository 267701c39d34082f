// quantize.h: the block quantizers, one block at a time, on top of formats.h. Host and device, one definition.
//
// NVFP4 (numerics of every quantizer: README, "Numerics"): value = E2M1 code x E4M3 block scale s_b x float32 tensor scale
// s_t, blocks of 16 along the GEMM's inner dimension. The caller finds amax (of the tensor, and of the block), asks
// nvfp4_tensor_scale() once a tensor and a *_block() function once a block of 16 values.
//
// A block function works on LANES blocks at once, x[16][LANES] -> q[16][LANES]: one on the GPU, where a thread owns a
// block, and a vector register's worth on the CPU, where the loops over lanes become vector instructions.
// q holds values of the E2M1 grid (what code x 1 decodes to); e2m1_encode(q) is the code to store, and
// bf16(q * e4m3_decode(s_b)) the exact operand of an emulated GEMM. sb holds the E4M3 codes of the block scales.
// Sums over a block are taken in two runs of eight in index order, then the two, so that two threads can share a block.
#ifndef LLMC_QUANTIZE_H
#define LLMC_QUANTIZE_H

#include "formats.h"
#include "rng.h"

#ifdef __CUDACC__
#define LANES 1
#else
#define LANES 8
#endif
#ifdef __CUDA_ARCH__
#define UNROLL _Pragma("unroll")  // arrays of a block live in registers only if every index is a constant
#else
#define UNROLL
#endif
// The lanes become one vector instruction. Without the pragma gcc unrolls the loop first and then fails to see the vector.
#if defined(_OPENMP) && !defined(__CUDACC__)
#define EACH_LANE(l) _Pragma("omp simd") for (int l = 0; l < LANES; l++)
#else
#define EACH_LANE(l) for (int l = 0; l < LANES; l++)
#endif

typedef float LaneBlock[16][LANES];       // 16 consecutive values of each of LANES blocks
typedef uint32_t LaneBlockBits[16][LANES];

typedef float LaneBlock32[32][LANES];     // the same of MXFP4's blocks
typedef uint32_t LaneBlock32Bits[32][LANES];

#define NVFP4_BLOCK 16
#define MXFP4_BLOCK 32
#define ROTATION_MAX 128

// Bound F that the largest block scale is mapped to, and the override o by which amax is multiplied first.
#define RTN_BOUND 448.0f        // all of E4M3's range
#define FOUR_SIX_BOUND 256.0f   // room for the second candidate, 1.5 times the first
#define SR_OVERRIDE 1.0625f     // 17/16: rounding to E4M3 can shrink a scale by 1/17; without it the largest value clips
#define EDEN_BOUND 256.0f       // room for the correction S
#define EDEN_OVERRIDE 0.988125f // (17/16) * 0.93: the largest value may clip a little, which lowers the error
// An amax below this is taken as zero: its reciprocal would leave float32's range.
#define AMAX_FLOOR 0x1p-100f

// inv maps amax to F; s_t is the tensor scale.
typedef struct { float inv, st; } TensorScale;

// amax = max |x| of the tensor; A = amax*o; inv = F/A, s_t = A/(6F). amax = 0: inv = 0, s_t = 1.
HD TensorScale nvfp4_tensor_scale(float amax, float override_, float bound) {
    TensorScale t;
    float A = f32_mul(amax, override_);
    int zero = !(A >= AMAX_FLOOR);
    t.inv = zero ? 0.0f : f32_div(bound, A);
    t.st = zero ? 1.0f : f32_div(A, f32_mul(6.0f, bound));
    return t;
}

// Largest magnitude of each block. A NaN is skipped: non-finite input is the caller's to flag.
HD void block_amax(LaneBlock x, float amax[LANES]) {
    EACH_LANE(l) amax[l] = 0.0f;
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) amax[l] = f32_max(f32_abs(x[i][l]), amax[l]);
}
// E4M3 code of a block scale t = (block_amax*o)*inv: at least 2^-9 for a block that is not all zero.
HD uint32_t nvfp4_block_scale(float block_amax, float t) {
    return block_amax > 0.0f ? u32_max(e4m3_encode(t), 1u) : 0u;
}
// 1/d, d = s_b*s_t the block's decode step; 0 where s_b is 0.
HD float nvfp4_inverse_step(float d) { return d > 0.0f ? f32_div(1.0f, d) : 0.0f; }

// Round to nearest. amax: of each block, or of its 16x16 tile.
HD void nvfp4_rtn_block(LaneBlock x, float amax[LANES], TensorScale ts, LaneBlock q, uint32_t sb[LANES]) {
    float e[LANES];
    EACH_LANE(l) {
        sb[l] = nvfp4_block_scale(amax[l], f32_mul(amax[l], ts.inv));
        e[l] = nvfp4_inverse_step(f32_mul(e4m3_decode(sb[l]), ts.st));
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = e2m1_round(f32_mul(x[i][l], e[l]));
}

// Four-over-six (arXiv 2512.02010): the block's largest value goes to 6 or, by the second candidate, to 4; the candidate
// of the strictly smaller squared error (original domain) wins. Candidate 0: t = amax*inv, candidate 1: 1.5 t.
// four_six_try rounds with one candidate and returns its error, so that a 16x16 tile can add up its 16 rows' errors first.
HD uint32_t four_six_scale(float amax, TensorScale ts, int candidate) {
    float t = f32_mul(amax, ts.inv);
    return nvfp4_block_scale(amax, candidate ? f32_mul(t, 1.5f) : t);
}
// error[2]: the sums of the first and second eight, so that the caller adds them in the shared order.
HD void four_six_try(LaneBlock x, uint32_t sb[LANES], TensorScale ts, LaneBlock q, float error[2][LANES]) {
    float d[LANES], e[LANES];
    EACH_LANE(l) {
        d[l] = f32_mul(e4m3_decode(sb[l]), ts.st);
        e[l] = nvfp4_inverse_step(d[l]);
        error[0][l] = error[1][l] = 0.0f;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        q[i][l] = e2m1_round(f32_mul(x[i][l], e[l]));
        float r = f32_sub(x[i][l], f32_mul(q[i][l], d[l]));
        error[i / 8][l] = f32_add(error[i / 8][l], f32_mul(r, r));
    }
}
HD void four_six_block(LaneBlock x, float amax[LANES], TensorScale ts, LaneBlock q, uint32_t sb[LANES]) {
    LaneBlock q4;
    uint32_t s4[LANES], four[LANES];
    float error6[2][LANES], error4[2][LANES];
    EACH_LANE(l) { sb[l] = four_six_scale(amax[l], ts, 0); s4[l] = four_six_scale(amax[l], ts, 1); }
    four_six_try(x, sb, ts, q, error6);
    four_six_try(x, s4, ts, q4, error4);
    EACH_LANE(l) {
        four[l] = f32_add(error4[0][l], error4[1][l]) < f32_add(error6[0][l], error6[1][l]);
        sb[l] = four[l] ? s4[l] : sb[l];
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = four[l] ? q4[i][l] : q[i][l];
}

// Scale search: the block scale may be any E4M3 code; of those tried, the one of least squared error (original domain) wins, the
// smaller of equals. First candidate code, and how far the others lie above it. SEARCH_ALL's nine codes reach from the scale
// that maps the block's largest value to 7 (it clips, to 6) to the one that maps it to 3.4: no other ever wins on N(0,1). SEARCH_FEW's
// four, the codes around those that map it to 6 and to 4, get most of the gain.
#define SEARCH_ALL_COUNT 9
#define SEARCH_FEW_COUNT 4
HD uint32_t search_offset(int all, int candidate) { return (uint32_t)(all || candidate < 2 ? candidate : candidate + 3); }  // 0 1 ..., or 0 1 5 6
HD uint32_t search_first(float amax, TensorScale ts, int all) {
    uint32_t code = nvfp4_block_scale(amax, f32_mul(f32_mul(amax, ts.inv), all ? 6.0f / 7.0f : 1.0f));
    return all || code <= 1u ? code : code - 1u;
}
// The candidate code + offset: 0 stays 0 (a block of zeros), and none is above 448.
HD uint32_t search_scale(uint32_t first, int all, int candidate) {
    return first ? u32_min(first + search_offset(all, candidate), 0x7Eu) : 0u;
}
// four_six_try() with errors fused: fewer instructions where they are what is short.
HD void search_try(LaneBlock x, uint32_t sb[LANES], TensorScale ts, LaneBlock q, float error[2][LANES]) {
    float d[LANES], e[LANES];
    EACH_LANE(l) {
        d[l] = f32_mul(e4m3_decode(sb[l]), ts.st);
        e[l] = nvfp4_inverse_step(d[l]);
        error[0][l] = error[1][l] = 0.0f;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        q[i][l] = e2m1_round(f32_mul(x[i][l], e[l]));
        float r = f32_fma(-q[i][l], d[l], x[i][l]);
        error[i / 8][l] = f32_fma(r, r, error[i / 8][l]);
    }
}
// magnitude_true: the winner's scale is then corrected to s_b <- nearest E4M3(s_b * S), S = <x,x>/<x,q*d>, so that the block keeps its
// magnitude, <x, q*d> = <x,x>, as far as 4 significant bits can: S is mostly nearer to 1 than the next scale is.
HD void search_block(LaneBlock x, float amax[LANES], TensorScale ts, int all, int magnitude_true, LaneBlock q, uint32_t sb[LANES]) {
    uint32_t first[LANES];
    float least[LANES];
    EACH_LANE(l) { first[l] = search_first(amax[l], ts, all); sb[l] = 0; least[l] = 0.0f; }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = 0.0f;
    for (int candidate = 0; candidate < (all ? SEARCH_ALL_COUNT : SEARCH_FEW_COUNT); candidate++) {
        LaneBlock tried;
        uint32_t code[LANES], better[LANES];
        float error[2][LANES];
        EACH_LANE(l) code[l] = search_scale(first[l], all, candidate);
        search_try(x, code, ts, tried, error);
        EACH_LANE(l) {
            float e = f32_add(error[0][l], error[1][l]);
            better[l] = candidate == 0 || e < least[l];
            least[l] = better[l] ? e : least[l];
            sb[l] = better[l] ? code[l] : sb[l];
        }
        UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = better[l] ? tried[i][l] : q[i][l];
    }
    if (!magnitude_true) return;
    float xx[2][LANES], xq[2][LANES], d[LANES];
    EACH_LANE(l) { d[l] = f32_mul(e4m3_decode(sb[l]), ts.st); xx[0][l] = xx[1][l] = xq[0][l] = xq[1][l] = 0.0f; }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        xx[i / 8][l] = f32_add(xx[i / 8][l], f32_mul(x[i][l], x[i][l]));
        xq[i / 8][l] = f32_add(xq[i / 8][l], f32_mul(x[i][l], f32_mul(q[i][l], d[l])));
    }
    EACH_LANE(l) {
        float N = f32_add(xx[0][l], xx[1][l]), D = f32_add(xq[0][l], xq[1][l]);
        float S = D > 0.0f ? f32_div(N, D > 0.0f ? D : 1.0f) : 1.0f;
        sb[l] = sb[l] ? u32_max(e4m3_encode(f32_mul(e4m3_decode(sb[l]), S)), 1u) : 0u;
    }
}

// Stochastic rounding; u: one random word a value.
HD void nvfp4_sr_block(LaneBlock x, float amax[LANES], TensorScale ts, LaneBlockBits u, LaneBlock q, uint32_t sb[LANES]) {
    float e[LANES];
    EACH_LANE(l) {
        sb[l] = nvfp4_block_scale(amax[l], f32_mul(f32_mul(amax[l], SR_OVERRIDE), ts.inv));
        e[l] = nvfp4_inverse_step(f32_mul(e4m3_decode(sb[l]), ts.st));
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l)
        q[i][l] = e2m1_decode(e2m1_encode_sr(f32_mul(x[i][l], e[l]), u[i][l]));
}

// MS-EDEN (Quartet II, arXiv 2601.22813, section on MS-EDEN) on rotated values y: nearest codes, then the block scale times
// S = <y,y>/<y,q*d>, stochastically rounded with one word u a block. Unbiased over rotations and u.
HD void ms_eden_block(LaneBlock y, float amax[LANES], TensorScale ts, uint32_t u[LANES], LaneBlock q, uint32_t sb[LANES]) {
    float s[LANES], d[LANES], e[LANES], yy[2][LANES], yq[2][LANES];
    EACH_LANE(l) {
        s[l] = e4m3_decode(nvfp4_block_scale(amax[l], f32_mul(f32_mul(amax[l], EDEN_OVERRIDE), ts.inv)));
        d[l] = f32_mul(s[l], ts.st);
        e[l] = nvfp4_inverse_step(d[l]);
        yy[0][l] = yy[1][l] = yq[0][l] = yq[1][l] = 0.0f;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        q[i][l] = e2m1_round(f32_mul(y[i][l], e[l]));
        yy[i / 8][l] = f32_add(yy[i / 8][l], f32_mul(y[i][l], y[i][l]));
        yq[i / 8][l] = f32_add(yq[i / 8][l], f32_mul(y[i][l], f32_mul(q[i][l], d[l])));
    }
    EACH_LANE(l) {
        float N = f32_add(yy[0][l], yy[1][l]), D = f32_add(yq[0][l], yq[1][l]);
        float S = D > 0.0f ? f32_div(N, D > 0.0f ? D : 1.0f) : 1.0f;
        sb[l] = e4m3_encode_sr(f32_mul(s[l], S), u[l]);
    }
}

// MS-EDEN with the range aligned after the fact: one pass over y, for which no tensor amax is needed.
// Pass 1, a block: m = amax/6 with its mantissa cut to 4 explicit bits, v = y/m (at most 6.375, which still rounds to 6),
// q nearest, S = <v,v>/<v,q>, and c = m*S in BF16 is kept beside the codes. In units of m the sums neither overflow nor
// underflow, whatever the gradient's size.
// Pass 2, a tensor: s_t = the power of two at or above max(c)/256; a block: s_b = stochastic E4M3(c/s_t). Since s_t is a
// power of two, s_b*s_t does not depend on it while c/s_t >= 2^-6: a one-pass kernel may emit
// q*ms_eden_posthoc_extended(c, u) at once and mend only the blocks whose scale turns out subnormal.
HD void ms_eden_posthoc_block(LaneBlock y, float amax[LANES], LaneBlock q, float c[LANES]) {
    float m[LANES], e[LANES], vv[2][LANES], vq[2][LANES];
    EACH_LANE(l) {
        float cut = f32_from_bits(f32_bits(f32_mul(amax[l], 1.0f / 6.0f)) & 0xFFF80000u);
        m[l] = cut >= AMAX_FLOOR ? cut : 0.0f;
        e[l] = nvfp4_inverse_step(m[l]);
        vv[0][l] = vv[1][l] = vq[0][l] = vq[1][l] = 0.0f;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        float v = f32_mul(y[i][l], e[l]);
        q[i][l] = e2m1_round(v);
        vv[i / 8][l] = f32_fma(v, v, vv[i / 8][l]);                        // fused: fewer instructions where they are what is short
        vq[i / 8][l] = f32_fma(v, q[i][l], vq[i / 8][l]);
    }
    EACH_LANE(l) {
        float D = f32_add(vq[0][l], vq[1][l]);
        float S = f32_div(f32_add(vv[0][l], vv[1][l]), D > 0.0f ? D : 1.0f);
        c[l] = bf16_round(f32_mul(m[l], S));
    }
}
// The same with a search for m among values of 4 significant bits, the grid that s_b lies on as long as it is not subnormal: the
// least squared error wins, the smaller m of equals. (S is then near 1 and c near the grid, so that the stochastic rounding of
// the scale adds little.) Nine candidates lie above amax/7, cut to 4 bits, by whole steps.
HD void ms_eden_search_all_block(LaneBlock y, float amax[LANES], LaneBlock q, float c[LANES]) {
    float first[LANES], unit[LANES], m[LANES], least[LANES], vv[LANES], vq[LANES];
    EACH_LANE(l) {
        float cut = f32_from_bits(f32_bits(f32_mul(amax[l], 1.0f / 7.0f)) & 0xFFF00000u);
        first[l] = cut >= AMAX_FLOOR ? cut : 0.0f;
        unit[l] = nvfp4_inverse_step(first[l]);
        m[l] = least[l] = vv[l] = vq[l] = 0.0f;
    }
    for (int candidate = 0; candidate < SEARCH_ALL_COUNT; candidate++) {
        LaneBlock tried;
        uint32_t better[LANES];
        float M[LANES], e[LANES], rr[2][LANES], V[2][LANES], D[2][LANES];
        EACH_LANE(l) {
            uint32_t up = f32_bits(first[l]) + ((uint32_t)candidate << 20);
            M[l] = first[l] > 0.0f ? f32_from_bits(up) : 0.0f;
            e[l] = nvfp4_inverse_step(M[l]);
            rr[0][l] = rr[1][l] = V[0][l] = V[1][l] = D[0][l] = D[1][l] = 0.0f;
        }
        UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
            float v = f32_mul(y[i][l], e[l]);
            tried[i][l] = e2m1_round(v);
            float r = f32_sub(v, tried[i][l]);
            rr[i / 8][l] = f32_add(rr[i / 8][l], f32_mul(r, r));
            V[i / 8][l] = f32_fma(v, v, V[i / 8][l]);
            D[i / 8][l] = f32_fma(v, tried[i][l], D[i / 8][l]);
        }
        EACH_LANE(l) {
            float steps = f32_mul(M[l], unit[l]);                          // M in units of the first candidate: errors compare in it
            float error = f32_mul(f32_add(rr[0][l], rr[1][l]), f32_mul(steps, steps));
            better[l] = candidate == 0 || error < least[l];
            least[l] = better[l] ? error : least[l];
            m[l] = better[l] ? M[l] : m[l];
            vv[l] = better[l] ? f32_add(V[0][l], V[1][l]) : vv[l];
            vq[l] = better[l] ? f32_add(D[0][l], D[1][l]) : vq[l];
        }
        UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = better[l] ? tried[i][l] : q[i][l];
    }
    EACH_LANE(l) {
        float D = vq[l], S = f32_div(vv[l], D > 0.0f ? D : 1.0f);
        c[l] = bf16_round(f32_mul(m[l], S));
    }
}
// A cheaper search, for kernels that are short of instructions: of two candidates the one whose expected error is less, the rounding of
// its scale included. Corrected by S = <v,v>/<v,q> and stochastically rounded to E4M3, a block's expected squared error is
//   <y,y> (A (1 + h/w) - 1),   A = <v,v><q,q>/<v,q>^2,   w = t^2, t in [1,2) the mantissa of c,   h/w = f(1-f) (step/c)^2
// where f is c's place between its neighbours of 4 significant bits (c has 8, so h is exact). m maps the block's largest value to 4, or
// to 6; or to 6.4, where another value comes near it (0.8): that one then lies above 5 and rounds to 6 too. Near: the second largest
// of the four maxima over i = j mod 4, which most often is the second largest value.
#define EDEN_NEAR 0.8f
typedef struct { float m[2], e0, ratio, ratio2; } EdenPair;                // e0 = 1/m[0]; ratio = m[0]/m[1], and its square
HD EdenPair eden_pair(float amax, float second) {
    EdenPair p;
    const int near_ = second >= f32_mul(amax, EDEN_NEAR);
    const float m = f32_mul(amax, near_ ? 0.15625f : 1.0f / 6.0f);
    p.m[0] = m >= AMAX_FLOOR ? m : 0.0f;
    p.m[1] = m >= AMAX_FLOOR ? f32_mul(amax, 0.25f) : 0.0f;
    p.e0 = nvfp4_inverse_step(p.m[0]);
    p.ratio = near_ ? 0.625f : 4.0f / 6.0f;
    p.ratio2 = near_ ? 0.390625f : 4.0f / 9.0f;
    return p;
}
// c = m*S in BF16 and A of a candidate from <v,v>, <v,q>, <q,q>.
typedef struct { float c, A; } EdenTry;
HD EdenTry eden_try(float m, float vv, float vq, float qq) {
    EdenTry t;
    const float r = f32_div(1.0f, f32_max(vq, 1.0f)), S = f32_mul(vv, r);  // <v,q> is at least 16, or 0
    t.c = bf16_round(f32_mul(m, S));
    t.A = f32_mul(S, f32_mul(qq, r));
    return t;
}
// Whether the second is expected to err less: A1 (1 + h1/w1) < A0 (1 + h0/w0).
HD int eden_second_is_better(EdenTry t0, EdenTry t1) {
    const uint32_t b0 = f32_bits(t0.c), b1 = f32_bits(t1.c);
    const float n0 = f32_from_bits((b0 & 0x007F0000u) | 0x3F800000u), n1 = f32_from_bits((b1 & 0x007F0000u) | 0x3F800000u);
    const float k0 = f32_sub(f32_from_bits((b0 & 0x000F0000u) | 0x3F800000u), 1.0f), k1 = f32_sub(f32_from_bits((b1 & 0x000F0000u) | 0x3F800000u), 1.0f);
    const float w0 = f32_mul(n0, n0), w1 = f32_mul(n1, n1);
    const float wh0 = f32_fma(k0, f32_sub(0.125f, k0), w0), wh1 = f32_fma(k1, f32_sub(0.125f, k1), w1);  // exact
    return f32_mul(f32_mul(t1.A, wh1), w0) < f32_mul(f32_mul(t0.A, wh0), w1);
}
HD void ms_eden_search_block(LaneBlock y, LaneBlock q, float c[LANES]) {
    LaneBlock q1;
    float top[4][LANES], m[2][LANES], e[2][LANES], ratio2[LANES], vv[2][LANES], vq[4][LANES], qq[4][LANES];
    uint32_t second[LANES];
    for (int j = 0; j < 4; j++) EACH_LANE(l) top[j][l] = 0.0f;
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) top[i % 4][l] = f32_max(f32_abs(y[i][l]), top[i % 4][l]);
    EACH_LANE(l) {
        const float high0 = f32_max(top[0][l], top[2][l]), low0 = f32_min(top[0][l], top[2][l]), high1 = f32_max(top[1][l], top[3][l]), low1 = f32_min(top[1][l], top[3][l]);
        const EdenPair p = eden_pair(f32_max(high0, high1), f32_max(f32_min(high0, high1), f32_max(low0, low1)));
        m[0][l] = p.m[0]; m[1][l] = p.m[1]; e[0][l] = p.e0; e[1][l] = f32_mul(p.e0, p.ratio); ratio2[l] = p.ratio2;
        vv[0][l] = vv[1][l] = 0.0f;
        for (int k = 0; k < 4; k++) vq[k][l] = qq[k][l] = 0.0f;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) {
        const float v0 = f32_mul(y[i][l], e[0][l]), v1 = f32_mul(y[i][l], e[1][l]);
        q[i][l] = e2m1_round(v0);
        q1[i][l] = e2m1_round(v1);
        vv[i / 8][l] = f32_fma(v0, v0, vv[i / 8][l]);
        vq[i / 8][l] = f32_fma(v0, q[i][l], vq[i / 8][l]); qq[i / 8][l] = f32_fma(q[i][l], q[i][l], qq[i / 8][l]);
        vq[2 + i / 8][l] = f32_fma(v1, q1[i][l], vq[2 + i / 8][l]); qq[2 + i / 8][l] = f32_fma(q1[i][l], q1[i][l], qq[2 + i / 8][l]);
    }
    EACH_LANE(l) {
        const float V = f32_add(vv[0][l], vv[1][l]);
        const EdenTry t0 = eden_try(m[0][l], V, f32_add(vq[0][l], vq[1][l]), f32_add(qq[0][l], qq[1][l]));
        const EdenTry t1 = eden_try(m[1][l], f32_mul(V, ratio2[l]), f32_add(vq[2][l], vq[3][l]), f32_add(qq[2][l], qq[3][l]));
        second[l] = (uint32_t)eden_second_is_better(t0, t1);
        c[l] = second[l] ? t1.c : t0.c;
    }
    UNROLL for (int i = 0; i < 16; i++) EACH_LANE(l) q[i][l] = second[l] ? q1[i][l] : q[i][l];
}
// The tensor scale from max c. No block has c: s_t = 1.
HD float ms_eden_posthoc_tensor_scale(float cmax) {
    uint32_t u = f32_bits(f32_mul(cmax, 0x1p-8f));
    float up = f32_from_bits((u + 0x007FFFFFu) & 0x7F800000u);         // c has 8 significant bits: rounds up to 2^k
    return cmax > 0.0f ? up : 1.0f;
}
HD uint32_t ms_eden_posthoc_scale(float c, float st, uint32_t u) { return e4m3_encode_sr(f32_div(c, st), u); }
// s_b*s_t of a block whose scale is not subnormal: c stochastically rounded to 4 significant bits.
HD float ms_eden_posthoc_extended(float c, uint32_t u) {
    // Up iff u < (c's low 20 bits) * 2^12, that is, iff those bits are more than u/2^12: iff this sum carries beyond them.
    // A c that is not finite stays so.
    const uint32_t b = f32_bits(c), rounded = (b + 0x000FFFFFu - (u >> 12)) & 0xFFF00000u;
    return f32_from_bits(b < 0x7F800000u ? rounded : b);
}

// ---------------------------------------------------------------------------------------------------------------------
// MXFP4 (Quartet, arXiv 2505.14669): value = E2M1 code x 2^e, blocks of 32, on values rotated by a normalised transform.
// scale: E8M0 bytes; e8m0_decode(scale) = 2^e.

// QuEST: the scale comes from the block's standard deviation, whose multiple 2.92247856 (mapped to 6) is where clipping and
// rounding errors of Gaussian values balance; 2^e is the power of two at or below it, as its authors code it. Nearest codes.
// mask: 1 where |y/2^e| < 6, 0 where the value was clipped (its gradient is then zero).
#define QUEST_STEP ((float)(2.92247856 / 6))
#define QUEST_FLOOR 1e-8f
HD void mx_quest_block(LaneBlock32 y, LaneBlock32 q, uint32_t scale[LANES], LaneBlock32Bits mask) {
    float sum[4][LANES], squares[4][LANES], e[LANES];
    for (int k = 0; k < 4; k++) EACH_LANE(l) sum[k][l] = squares[k][l] = 0.0f;
    UNROLL for (int i = 0; i < 32; i++) EACH_LANE(l) {
        sum[i / 8][l] = f32_add(sum[i / 8][l], y[i][l]);
        squares[i / 8][l] = f32_add(squares[i / 8][l], f32_mul(y[i][l], y[i][l]));
    }
    EACH_LANE(l) {
        float mean = f32_mul(f32_add(f32_add(f32_add(sum[0][l], sum[1][l]), sum[2][l]), sum[3][l]), 0.03125f);
        float square = f32_mul(f32_add(f32_add(f32_add(squares[0][l], squares[1][l]), squares[2][l]), squares[3][l]), 0.03125f);
        float std = f32_sqrt(f32_max(f32_sub(square, f32_mul(mean, mean)), 0.0f));
        uint32_t exponent = f32_bits(f32_add(f32_mul(std, QUEST_STEP), QUEST_FLOOR)) & 0x7F800000u;
        scale[l] = exponent >> 23;                                         // at least 2^-27
        e[l] = f32_from_bits((254u << 23) - exponent);                     // 2^-e
    }
    UNROLL for (int i = 0; i < 32; i++) EACH_LANE(l) {
        float v = f32_mul(y[i][l], e[l]);
        q[i][l] = e2m1_round(v);
        mask[i][l] = f32_abs(v) < E2M1_MAX ? 1u : 0u;
    }
}
// Stochastic: e = floor(log2 amax) - 2, and values times 3/4 so that the largest, below 8, is below 6 and nothing clips.
// value = q * 2^e * 4/3; MX_SR_FACTOR goes into the GEMM's alpha. A block whose amax is below AMAX_FLOOR is zero.
#define MX_SR_FACTOR (4.0f / 3.0f)
HD void mx_sr_block(LaneBlock32 y, LaneBlock32Bits u, LaneBlock32 q, uint32_t scale[LANES]) {
    float amax[LANES], e[LANES];
    EACH_LANE(l) amax[l] = 0.0f;
    UNROLL for (int i = 0; i < 32; i++) EACH_LANE(l) amax[l] = f32_max(f32_abs(y[i][l]), amax[l]);
    EACH_LANE(l) {
        uint32_t exponent = (f32_bits(amax[l]) & 0x7F800000u) - (2u << 23);
        scale[l] = amax[l] >= AMAX_FLOOR ? exponent >> 23 : 0u;
        e[l] = amax[l] >= AMAX_FLOOR ? f32_from_bits((254u << 23) - exponent) : 0.0f;
    }
    UNROLL for (int i = 0; i < 32; i++) EACH_LANE(l)
        q[i][l] = e2m1_decode(e2m1_encode_sr(f32_mul(f32_mul(y[i][l], e[l]), 0.75f), u[i][l]));
}
// What a normalised transform multiplies by: float32(n^-1/2).
HD float rotation_norm(int n) { return (float)(1.0 / sqrt((double)n)); }

// ---------------------------------------------------------------------------------------------------------------------
// One scale for a row or a tensor: largest magnitude to the format's largest. The operand is value x factor.

typedef struct { float inv, factor; } PlainScale;
HD PlainScale plain_scale(float amax, float largest) {
    PlainScale s;
    int zero = !(amax >= AMAX_FLOOR);
    s.inv = zero ? 0.0f : f32_div(largest, amax);
    s.factor = zero ? 1.0f : f32_div(amax, largest);
    return s;
}

// Differentiable gradient estimator (arXiv 2501.17116): the slope of a smooth stand-in for E2M1 rounding at the scaled weight w, in
// the interval [a, a + delta] of the grid that holds |w|: min((1/5) |2(|w| - a)/delta - 1|^(-4/5), 3); 0 beyond 6, but for what the
// rounding of w = x * (6/amax) can add to 6.
// t^(-1/5) by Newton's method in stated float32 operations, so that CPU and GPU give the same bits (powf does not).
#define DGE_LARGEST 3.0f
HD float dge_slope(float w) {
    float a = f32_abs_min(w, E2M1_MAX);
    float steps = f32_mul(a, f32_from_bits((255u << 23) - e2m1_exponent(a)));  // |w| in steps of its part of the grid
    float t = f32_abs(f32_sub(f32_mul(2.0f, f32_sub(steps, (float)(int32_t)steps)), 1.0f));
    float x = f32_max(t, 0x1p-6f);                                         // below 15^(-5/4) = 0.034 the slope is DGE_LARGEST
    float y = f32_from_bits(0x4C2F0000u - f32_bits(x) / 5u);               // t^(-1/5) within a few per cent
    for (int i = 0; i < 4; i++) {
        float y2 = f32_mul(y, y), y5 = f32_mul(f32_mul(y2, y2), y);
        y = f32_mul(y, f32_mul(f32_sub(6.0f, f32_mul(x, y5)), 0.2f));
    }
    float y2 = f32_mul(y, y), slope = f32_min(f32_mul(0.2f, f32_mul(y2, y2)), DGE_LARGEST);
    return f32_abs(w) > E2M1_MAX + 1e-5f ? 0.0f : slope;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotation, random words, layout

// Unnormalised Sylvester Walsh-Hadamard transform of n = 2^k values in place, stages h = 1, 2, 4 ...: (a, b) -> (a+b, a-b).
HD void hadamard(float *y, int n) {
    for (int h = 1; h < n; h *= 2)
        for (int i = 0; i < n; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                float a = y[j], b = y[j + h];
                y[j] = f32_add(a, b); y[j + h] = f32_sub(a, b);
            }
}
// Rotation sign of position i (0..127) of every run: 0x80000000 for minus, to be XORed into a float32.
HD uint32_t rotation_sign(const uint32_t bits[4], int i) { return ((bits[i >> 5] >> (i & 31)) & 1u) << 31; }
// The 128 signs of one GEMM of one step, shared by its two operands: bit i set = minus.
HD void rotation_bits(uint64_t seed, uint32_t step, int layer, int linear, int gemm, uint32_t bits[4]) {
    Philox4 p = rng_words4(rng_stream(seed, step, rng_address(RNG_SIGNS, layer, linear, gemm, 0, 0)), 0);
    for (int i = 0; i < 4; i++) bits[i] = p.w[i];
}

// Index of a block's random word in its operand's RNG_SCALE stream. The operand has `rows` rows (outer index) of `blocks`
// blocks along the inner dimension; micro: the micro-batch of the step (0 for weights). Four neighbouring blocks of a row
// share one Philox call. Step, layer, linear, gemm, operand and rank (0 for weights) are in the stream's address.
HD uint64_t block_word_index(int64_t micro, int64_t rows, int64_t blocks, int64_t row, int64_t block) {
    return (uint64_t)((micro * rows + row) * blocks + block);
}

// Offset of the block scale of row r, scale column c (= k/16) in cuBLASLt's 128x4 tiles (VEC16_UE4M3), C = K/16 columns.
HD int64_t tiled_scale_offset(int64_t r, int64_t c, int64_t C) {
    return ((r / 128) * ((C + 3) / 4) + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4;
}

#endif
