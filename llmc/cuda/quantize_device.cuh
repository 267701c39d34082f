// cuda/quantize_device.cuh: cheap device formulations of what formats.h and rng.h define, with the same bits (each says for
// which inputs; dev/cuda/rotate_eden.cu checks them exhaustively), and the few PTX instructions the quantizers need. Codes come from convert.cuh.
#ifndef LLMC_CUDA_QUANTIZE_DEVICE_CUH
#define LLMC_CUDA_QUANTIZE_DEVICE_CUH

#include "../quantize.h"
#include "common.cuh"
#include "convert.cuh"

FN int device_attribute(cudaDeviceAttr what) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, what, device));
    return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Numbers

// e2m1_round(v) for |v| < 7, but a value that rounds to zero gives +0. Four instructions: P = the power of two below
// max(|v|, 1), with v's sign, by one maximum and one three-input logic operation; then the adder rounds (see e2m1_round).
// mask ? t : v & ~t. Where the mask is 0: t's sign bit is 0, so v's sign passes; t's mantissa bits are all ones, or |v|'s own: 0.
// A NaN gives a NaN.
__device__ __forceinline__ float e2m1_round_unclamped(float v) {
    const float t = fmaxf(fabsf(v), f32_from_bits(0x3FFFFFFFu));
    uint32_t p;
    asm("lop3.b32 %0, %1, %2, %3, 0xA4;" : "=r"(p) : "r"(f32_bits(t)), "r"(f32_bits(v)), "r"(0x7F800000u));
    const float r = __fmaf_rn(f32_from_bits(p), 0x1p22f, v);
    return __fmaf_rn(f32_from_bits(p), -0x1p22f, r);
}
__device__ __forceinline__ float rcp_approximate(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// 1/d rounded to nearest, for d in [2^-126, 2^126]: what __frcp_rn does after its check of the exponent.
__device__ __forceinline__ float f32_reciprocal(float d) {
    const float r = rcp_approximate(d);
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}
// n/d rounded to nearest while exponents are far from the ends (the division's own sequence without its check of them).
__device__ __forceinline__ float f32_quotient(float n, float d) {
    const float r = f32_reciprocal(d);
    float q = f32_mul(n, r);
    q = __fmaf_rn(r, __fmaf_rn(-d, q, n), q);
    return __fmaf_rn(r, __fmaf_rn(-d, q, n), q);
}

// The value of e4m3_encode(t), for t in [0, 448). e4m3_code(): the code of an E4M3 value. (Cards before Blackwell convert to E4M3 too; the quantizers
// were measured on Hopper as they are, and stay so.)
__device__ __forceinline__ float e4m3_round_unclamped(float t) {
    const float p = f32_from_bits(f32_bits(fmaxf(t, 0x1p-6f)) & 0x7F800000u);
    return __fmaf_rn(p, -0x1p20f, __fmaf_rn(p, 0x1p20f, t));
}
__device__ __forceinline__ uint32_t e4m3_code(float value) {
#if CONVERT_E2M1_HARDWARE
    return convert_e4m3_magnitude(value);
#else
    return f32_bits(f32_mul(value, 0x1p-120f)) >> 20;
#endif
}

// Lower and upper BF16 of a word as float32, its sign flipped where sign is 0x80000000. One instruction each.
__device__ __forceinline__ float bf16_lower_signed(uint32_t w, uint32_t sign) { return f32_from_bits(w * 65536u + sign); }
__device__ __forceinline__ float bf16_upper_signed(uint32_t w, uint32_t sign) { return f32_from_bits((w & 0xFFFF0000u) ^ sign); }
__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {  // two products, each rounded once
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0: no change, not even to a zero's sign
    return d;
}
// x, exact in BF16, in both halves.
__device__ __forceinline__ uint32_t bf16x2_twice(float x) { return __byte_perm(f32_bits(x), 0u, 0x3232); }

// Packed values decoded two at a time. A code's three magnitude bits at bits 8..6 of a BF16 are its value times 2^-126; one
// product with s_b*2^119 gives code x s_b x 2^-7, exact (2^126 and s_b would not fit one BF16 factor). Everything MS-EDEN
// computes from them is the same but for that power of two, which c is freed from again.
#define PACKED_SCALE 0x1p-7f
__device__ __forceinline__ uint32_t packed_scale_bf16x2(uint32_t code) {
    return bf16x2_twice(f32_mul(f32_mul(f32_from_bits(code << 20), 0x1p120f), 0x1p119f));
}
__device__ __forceinline__ uint32_t packed_decode2(uint32_t word, int byte, uint32_t scale) {  // codes 2*byte, 2*byte+1
    const uint32_t b = __byte_perm(word, 0u, 0x4440 + byte);
    return bf16x2_mul(((b * 0x00040040u) & 0x01C001C0u) | ((b * 0x01001000u) & 0x80008000u), scale);
}

// ---------------------------------------------------------------------------------------------------------------------
// Philox with the round keys made once on the host: four instructions a round

struct PhiloxKeys { uint32_t k0[10], k1[10]; };
FN PhiloxKeys philox_keys(uint32_t k0, uint32_t k1) {
    PhiloxKeys k;
    for (int r = 0; r < 10; r++) { k.k0[r] = k0 + (uint32_t)r * PHILOX_KEY0; k.k1[r] = k1 + (uint32_t)r * PHILOX_KEY1; }
    return k;
}
__device__ __forceinline__ Philox4 philox_keyed(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, const PhiloxKeys &k) {
    Philox4 c;
    c.w[0] = c0; c.w[1] = c1; c.w[2] = c2; c.w[3] = c3;
#pragma unroll
    for (int r = 0; r < 10; r++) philox_round(&c.w[0], &c.w[1], &c.w[2], &c.w[3], k.k0[r], k.k1[r]);
    return c;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

__device__ __forceinline__ void cp_async16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async8(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix_transposed(uint32_t address, const uint32_t w[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
#endif
__device__ __forceinline__ void store_shared_u16(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((uint16_t)x) : "memory");
}

#endif
