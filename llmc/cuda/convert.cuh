// cuda/convert.cuh: values -> E2M1 codes and E4M3 scale codes by the hardware's conversions where the target has them, with the bits of
// formats.h; elsewhere by formats.h itself.
//
//   cvt.rn.satfinite.e2m1x2.f32   two values to a byte of codes    sm_100a, 103a, 110a, 120a, 121a (and their family-specific f targets)
//   cvt.rn.satfinite.e4m3x2.f32   two values to two E4M3 bytes     sm_89 and above
//
// A plain sm_100 or sm_120 target lacks the first: it exists where the compiler defines __CUDA_ARCH_FAMILY_SPECIFIC__. dev/test/sass_check.sh
// reads the machine code and fails when a conversion is missing, so that a silent fall back shows.
//
// What formats.h defines decides. The hardware agrees with it for every float but (dev/test/test_convert.c, all 2^32 of them, against the
// toolkit's own host conversions):
//   E2M1  a NaN of either sign becomes +6 (formats.h: 6 with the NaN's sign)
//   E4M3  a NaN becomes the code 0x7F (formats.h: 448, the code 0x7E), and a negative value keeps its sign (formats.h: magnitudes only)
// Each wrapper mends its difference: e2m1 by taking the sign from the value, e4m3 by |v| limited to 448 first, one minimum that makes a NaN 448.
//
// Stochastic conversion in hardware (cvt.rs) exists on sm_100a and 103a only and draws its random bits otherwise than formats.h: it is not used.
// e2m1_encode_sr() and e4m3_encode_sr() are the one definition everywhere, so that no target can differ from another, or return zeros.
#ifndef LLMC_CUDA_CONVERT_CUH
#define LLMC_CUDA_CONVERT_CUH

#include <cuda_runtime.h>

#include "../formats.h"

// cuda_fp8.hpp's condition for the conversions of Blackwell.
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1300
#define CONVERT_E2M1_HARDWARE 1
#endif
#endif
#ifndef CONVERT_E2M1_HARDWARE
#define CONVERT_E2M1_HARDWARE 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define CONVERT_E4M3_HARDWARE 1
#else
#define CONVERT_E4M3_HARDWARE 0
#endif

// e2m1_encode(even) in bits 0..3, e2m1_encode(odd) in bits 4..7: the order of packed codes. No NaNs: a NaN gives 6 of either sign. One
// instruction where the hardware converts.
__device__ __forceinline__ uint32_t convert_e2m1x2_numbers(float even, float odd) {
#if CONVERT_E2M1_HARDWARE
    uint32_t codes;
    asm("{ .reg .b8 both;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 both, %2, %1;\n"  // the first source goes to the upper half
        "  cvt.u32.u8 %0, both; }" : "=r"(codes) : "f"(even), "f"(odd));
    return codes;
#else
    return e2m1_encode(even) | e2m1_encode(odd) << 4;
#endif
}
// The same for any two floats, NaNs included: the sign bits are the values' own.
__device__ __forceinline__ uint32_t convert_e2m1x2(float even, float odd) {
#if CONVERT_E2M1_HARDWARE
    const uint32_t magnitudes = convert_e2m1x2_numbers(even, odd) & 0x77u;
    return magnitudes | (f32_bits(even) >> 28 & 8u) | (f32_bits(odd) >> 24 & 0x80u);
#else
    return convert_e2m1x2_numbers(even, odd);
#endif
}
// Eight codes in a word, v[0] in the lowest bits, as packed tensors store them. No NaNs, as above.
__device__ __forceinline__ uint32_t convert_e2m1x8_numbers(const float v[8]) {
#if CONVERT_E2M1_HARDWARE
    uint32_t word;
    asm("{ .reg .b8 b0, b1, b2, b3;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
        "  mov.b32 %0, {b0, b1, b2, b3}; }"
        : "=r"(word) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
    return word;
#else
    uint32_t word = 0u;
#pragma unroll
    for (int i = 0; i < 8; i++) word |= e2m1_encode(v[i]) << (4 * i);
    return word;
#endif
}
// The same for any eight floats.
__device__ __forceinline__ uint32_t convert_e2m1x8(const float v[8]) {
    uint32_t word = 0u;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= convert_e2m1x2(v[2 * i], v[2 * i + 1]) << (8 * i);
    return word;
}

// e4m3_encode(low) in bits 0..7, e4m3_encode(high) in bits 8..15: magnitudes, 0..0x7E each, for any two floats.
__device__ __forceinline__ uint32_t convert_e4m3x2(float low, float high) {
#if CONVERT_E4M3_HARDWARE
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(f32_abs_min(low, E4M3_MAX)), "f"(f32_abs_min(high, E4M3_MAX)));
    return codes;
#else
    return e4m3_encode(low) | e4m3_encode(high) << 8;
#endif
}
__device__ __forceinline__ uint32_t convert_e4m3(float v) { return convert_e4m3x2(v, 0.0f) & 0xFFu; }
// The same for v >= 0 that is no NaN: one instruction where the hardware converts.
__device__ __forceinline__ uint32_t convert_e4m3_magnitude(float v) {
#if CONVERT_E4M3_HARDWARE
    uint16_t code;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(code) : "f"(v), "f"(0.0f));
    return code;
#else
    return e4m3_encode(v);
#endif
}

#endif
