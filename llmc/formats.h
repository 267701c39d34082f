// formats.h: the number formats (E2M1, E4M3, E5M2, E8M0, BF16) and how values are rounded to them.
//
// One definition for the CPU loops, the GPU kernels and the tests: every function is HD (host and device) and uses only
// IEEE float32 operations in a stated order, so both machines give the same bits. Nothing here may be contracted into a
// fused multiply-add where f32_fma does not say so: the device side uses the _rn intrinsics, the host side -ffp-contract=off.
//
// Everything is branch-free, so that compilers turn a loop over values into vector code.
#ifndef LLMC_FORMATS_H
#define LLMC_FORMATS_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HD static __host__ __device__ __forceinline__
#else
#define HD static inline __attribute__((always_inline, unused))
#endif

// ---------------------------------------------------------------------------------------------------------------------
// float32 building blocks

typedef union { float f; uint32_t u; } F32Bits;

HD uint32_t f32_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    F32Bits b; b.f = x; return b.u;  // a union, not memcpy: gcc vectorizes it
#endif
}
HD float f32_from_bits(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    F32Bits b; b.u = u; return b.f;
#endif
}
#ifdef __CUDA_ARCH__
HD float f32_mul(float a, float b) { return __fmul_rn(a, b); }
HD float f32_add(float a, float b) { return __fadd_rn(a, b); }
HD float f32_sub(float a, float b) { return __fsub_rn(a, b); }
HD float f32_div(float a, float b) { return __fdiv_rn(a, b); }
HD float f32_sqrt(float a) { return __fsqrt_rn(a); }
HD float f32_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HD float f32_min(float a, float b) { return fminf(a, b); }
HD float f32_max(float a, float b) { return fmaxf(a, b); }
HD uint32_t f32_to_u32_ceil(float a) { return __float2uint_ru(a); }
#else
HD float f32_mul(float a, float b) { return a * b; }
HD float f32_add(float a, float b) { return a + b; }
HD float f32_sub(float a, float b) { return a - b; }
HD float f32_div(float a, float b) { return a / b; }
HD float f32_sqrt(float a) { return sqrtf(a); }
HD float f32_fma(float a, float b, float c) { return fmaf(a, b, c); }  // a*b + c, rounded once: slow without the hardware, never wrong
HD float f32_min(float a, float b) { return a < b ? a : b; }  // a NaN in a gives b, as fminf does
HD float f32_max(float a, float b) { return a > b ? a : b; }
HD uint32_t f32_to_u32_ceil(float a) {  // 0 <= a < 2^32, in two halves: int32 has vector conversions, uint32 has none
    int32_t high = (int32_t)(a * 0x1p-16f);
    return ((uint32_t)high << 16) + (uint32_t)(int32_t)ceilf(a - (float)high * 0x1p16f);
}
#endif
HD float f32_abs(float x) { return f32_from_bits(f32_bits(x) & 0x7FFFFFFFu); }
HD uint32_t u32_max(uint32_t a, uint32_t b) { return a > b ? a : b; }
HD uint32_t u32_min(uint32_t a, uint32_t b) { return a < b ? a : b; }
// |x|, at most limit; a NaN gives limit. Magnitudes are in the order of their bits; on the CPU a float minimum would become
// a branch and keep the loop out of vector registers.
HD float f32_abs_min(float x, float limit) {
#ifdef __CUDA_ARCH__
    return fminf(fabsf(x), limit);
#else
    return f32_from_bits(u32_min(f32_bits(x) & 0x7FFFFFFFu, f32_bits(limit)));
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// E2M1 (FP4): magnitudes 0 .5 1 1.5 2 3 4 6 = codes 0..7, sign = bit 3. Two codes a byte, even index in the low nibble.

#define E2M1_MAX 6.0f

// The exponent field of |v|, at least that of 1.0: below 2 the grid is uniform with step 0.5, above it step = 2^(e-1).
HD uint32_t e2m1_exponent(float a) { return u32_max(f32_bits(a) & 0x7F800000u, 0x3F800000u); }

// Nearest value of the E2M1 grid, ties to the even code, saturating at 6 (a NaN gives 6: non-finite input is the caller's
// to flag). Adding 2^(e+22), whose unit in the last place is the grid's step, makes the adder do the rounding.
HD float e2m1_round(float v) {
    float a = f32_abs_min(v, E2M1_MAX);
    float magic = f32_from_bits(e2m1_exponent(a) + (22u << 23));
    float q = f32_sub(f32_add(a, magic), magic);
    return f32_from_bits(f32_bits(q) | (f32_bits(v) & 0x80000000u));
}
// The code of e2m1_round(v), 0..15. A negative v that rounds to zero keeps its sign (code 8, equal to code 0).
HD uint32_t e2m1_encode(float v) {
    float a = f32_abs_min(v, E2M1_MAX);
    uint32_t e = e2m1_exponent(a);
    float magic = f32_from_bits(e + (22u << 23));
    uint32_t n = f32_bits(f32_add(a, magic)) - f32_bits(magic);  // |v| in steps, 0..4
    return (n + ((e - 0x3F800000u) >> 22)) | ((f32_bits(v) >> 28) & 8u);
}
// Stochastic rounding: up in magnitude iff u < frac * 2^32, frac = position between the two neighbours (exact here: the
// scaling is by powers of two and the subtraction is exact). Saturates at 6. Returns the code, 0..15.
HD uint32_t e2m1_encode_sr(float v, uint32_t u) {
    float a = f32_abs_min(v, E2M1_MAX);
    uint32_t e = e2m1_exponent(a);
    float s = f32_mul(a, f32_from_bits((255u << 23) - e));           // |v| in steps: a * 2^(1-e)
    uint32_t n = (uint32_t)(int32_t)s;
    float frac = f32_sub(s, (float)(int32_t)n);
    uint32_t up = u < f32_to_u32_ceil(f32_mul(frac, 4294967296.0f)) ? 1u : 0u;
    return (n + ((e - 0x3F800000u) >> 22) + up) | ((f32_bits(v) >> 28) & 8u);
}
// Code 0..15 -> value. The three magnitude bits, placed at the exponent of a float32, are the value times 2^-126.
HD float e2m1_decode(uint32_t code) {
    uint32_t m = code & 7u;
    uint32_t normal = (m + 252u) << 22;                                // codes 2..7: 1 and above
    uint32_t small = m ? 0x3F000000u : 0u;                             // codes 0, 1: 0 and 0.5
    return f32_from_bits((m >= 2u ? normal : small) | ((code & 8u) << 28));
}

// ---------------------------------------------------------------------------------------------------------------------
// E4M3 (fn) for block scales: non-negative, codes 0..0x7E, largest 448, subnormals are multiples of 2^-9. 0x7F and bit 7
// are never stored.

#define E4M3_MAX 448.0f

// The exponent field of a, at least that of 2^-6: below that the grid is uniform with step 2^-9.
HD uint32_t e4m3_exponent(float a) { return u32_max(f32_bits(a) & 0x7F800000u, 121u << 23); }

// Nearest, ties to even, saturating at 448. a >= 0 (the sign is ignored). Returns the code, 0..126.
HD uint32_t e4m3_encode(float v) {
    float a = f32_abs_min(v, E4M3_MAX);
    uint32_t e = e4m3_exponent(a);
    float magic = f32_from_bits(e + (20u << 23));
    uint32_t n = f32_bits(f32_add(a, magic)) - f32_bits(magic);  // in steps, 0..16
    return n + ((e - (121u << 23)) >> 20);
}
// Stochastic between the two neighbours; from 448 never upward.
HD uint32_t e4m3_encode_sr(float v, uint32_t u) {
    float a = f32_abs_min(v, E4M3_MAX);
    uint32_t e = e4m3_exponent(a);
    float s = f32_mul(a, f32_from_bits((257u << 23) - e));             // a * 2^(3-e): in steps
    uint32_t n = (uint32_t)(int32_t)s;
    float frac = f32_sub(s, (float)(int32_t)n);
    uint32_t up = u < f32_to_u32_ceil(f32_mul(frac, 4294967296.0f)) ? 1u : 0u;
    return n + ((e - (121u << 23)) >> 20) + up;
}
// Code -> value: its seven bits are a float32's exponent and mantissa, 120 too low in the exponent.
HD float e4m3_decode(uint32_t code) { return f32_mul(f32_from_bits((code & 0x7Fu) << 20), 0x1p120f); }

// ---------------------------------------------------------------------------------------------------------------------
// FP8 tensors: E4M3 as above with a sign in bit 7, and E5M2, whose largest is 57344 (code 0x7B) and whose subnormals are
// multiples of 2^-16. Nearest, ties to even, saturating; infinities and NaNs are never stored (a NaN gives the largest).

#define E5M2_MAX 57344.0f

HD uint32_t f32_sign(float v) { return f32_bits(v) & 0x80000000u; }
HD float e4m3_round(float v) {  // nearest value of the grid, signed
    float a = f32_abs_min(v, E4M3_MAX);
    float magic = f32_from_bits(e4m3_exponent(a) + (20u << 23));
    return f32_from_bits(f32_bits(f32_sub(f32_add(a, magic), magic)) | f32_sign(v));
}
HD uint32_t e4m3_encode_signed(float v) { return e4m3_encode(v) | f32_sign(v) >> 24; }
HD float e4m3_decode_signed(uint32_t code) { return f32_from_bits(f32_bits(e4m3_decode(code)) | (code & 0x80u) << 24); }

// The exponent field of a, at least that of 2^-14: below that the grid is uniform with step 2^-16.
HD uint32_t e5m2_exponent(float a) { return u32_max(f32_bits(a) & 0x7F800000u, 113u << 23); }
HD float e5m2_round(float v) {
    float a = f32_abs_min(v, E5M2_MAX);
    float magic = f32_from_bits(e5m2_exponent(a) + (21u << 23));
    return f32_from_bits(f32_bits(f32_sub(f32_add(a, magic), magic)) | f32_sign(v));
}
HD uint32_t e5m2_encode(float v) {
    float a = f32_abs_min(v, E5M2_MAX);
    uint32_t e = e5m2_exponent(a);
    float magic = f32_from_bits(e + (21u << 23));
    uint32_t n = f32_bits(f32_add(a, magic)) - f32_bits(magic);  // in steps, 0..8
    return (n + ((e - (113u << 23)) >> 21)) | f32_sign(v) >> 24;
}
HD float e5m2_decode(uint32_t code) {
    return f32_from_bits(f32_bits(f32_mul(f32_from_bits((code & 0x7Fu) << 21), 0x1p112f)) | (code & 0x80u) << 24);
}

// ---------------------------------------------------------------------------------------------------------------------
// E8M0: a power of two, byte = exponent + 127.

HD uint32_t e8m0_from_exponent(int e) { return (uint32_t)(e + 127); }
HD float e8m0_decode(uint32_t byte) { return byte ? f32_from_bits(byte << 23) : 0x1p-127f; }
// floor(log2 a) of a normal positive float32, from the exponent bits (a subnormal or zero gives -127).
HD int f32_floor_log2(float a) { return (int)((f32_bits(a) >> 23) & 0xFFu) - 127; }

// ---------------------------------------------------------------------------------------------------------------------
// BF16: the upper half of a float32.

HD uint16_t bf16_encode(float x) {  // nearest even; NaN stays NaN
    uint32_t u = f32_bits(x);
    uint32_t r = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? ((u >> 16) | 0x40u) : r);
}
// Stochastic: 16 random bits are added below the cut. Non-finite values pass unchanged.
HD uint16_t bf16_encode_sr(float x, uint32_t random16) {
    uint32_t u = f32_bits(x);
    uint32_t finite = (u & 0x7F800000u) != 0x7F800000u;
    uint32_t r = (u + (finite ? (random16 & 0xFFFFu) : 0u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? ((u >> 16) | 0x40u) : r);
}
HD float bf16_decode(uint16_t b) { return f32_from_bits((uint32_t)b << 16); }
HD float bf16_round(float x) { return bf16_decode(bf16_encode(x)); }

#endif
