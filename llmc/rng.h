// rng.h: random words with an address. There is no generator state: a word is a pure function of
// (seed; step, address, index), so a run is bit-reproducible, resume is exact and launch geometry does not matter.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
#ifndef LLMC_RNG_H
#define LLMC_RNG_H

#include "formats.h"

typedef struct { uint32_t w[4]; } Philox4;

HD uint32_t u32_mulhi(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);
#else
    return (uint32_t)(((uint64_t)a * b) >> 32);
#endif
}

#define PHILOX_KEY0 0x9E3779B9u  // what a round adds to the two key words
#define PHILOX_KEY1 0xBB67AE85u
HD void philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t k0, uint32_t k1) {
    uint32_t h0 = u32_mulhi(0xD2511F53u, *c0), l0 = 0xD2511F53u * *c0;
    uint32_t h1 = u32_mulhi(0xCD9E8D57u, *c2), l1 = 0xCD9E8D57u * *c2;
    *c0 = h1 ^ *c1 ^ k0; *c1 = l1; *c2 = h0 ^ *c3 ^ k1; *c3 = l0;
}
// counter (c0..c3), key (k0, k1) -> four independent 32-bit words.
HD Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    Philox4 c;
    c.w[0] = c0; c.w[1] = c1; c.w[2] = c2; c.w[3] = c3;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; round++) {
        philox_round(&c.w[0], &c.w[1], &c.w[2], &c.w[3], k0, k1);
        k0 += PHILOX_KEY0; k1 += PHILOX_KEY1;
    }
    return c;
}

// What a random stream is for. Part of the address, so streams of different purposes never meet.
enum RngPurpose {
    RNG_INIT = 1,        // initial values: index = element of the tensor's pair stream, layer field = tensor index
    RNG_SIGNS = 2,       // rotation signs of a GEMM: index = position / 32, one bit a position
    RNG_SCALE = 3,       // stochastic block scales (MS-EDEN): index = block
    RNG_VALUE = 4,       // stochastic values (SR): index = element
    RNG_MASTER = 5,      // BF16 master weights in AdamW: index = element / 2 of the flat parameter buffer, 16 bits each
    RNG_SHUFFLE = 6,     // the loader's permutation
    RNG_SAMPLE = 7       // text samples
};
enum RngGemm { GEMM_FORWARD = 0, GEMM_DGRAD = 1, GEMM_WGRAD = 2 };
enum RngOperand { OPERAND_A = 0, OPERAND_B = 1 };  // A: X or dY, the data side; B: W (forward, dgrad) or X (wgrad)

// purpose (4 bits) | layer (10) | linear 0..3 of the layer (2) | gemm (2) | operand (2) | rank or 0 (12)
HD uint32_t rng_address(int purpose, int layer, int linear, int gemm, int operand, int rank) {
    return ((uint32_t)purpose << 28) | ((uint32_t)layer & 1023u) << 18 | ((uint32_t)linear & 3u) << 16 |
           ((uint32_t)gemm & 3u) << 14 | ((uint32_t)operand & 3u) << 12 | ((uint32_t)rank & 4095u);
}

// One stream: everything but the index.
typedef struct { uint32_t key0, key1, step, address; } RngStream;

HD RngStream rng_stream(uint64_t seed, uint32_t step, uint32_t address) {
    RngStream s;
    s.key0 = (uint32_t)seed; s.key1 = (uint32_t)(seed >> 32); s.step = step; s.address = address;
    return s;
}
// Words 4i .. 4i+3 of the stream.
HD Philox4 rng_words4(RngStream s, uint64_t i) {
    return philox4x32((uint32_t)i, (uint32_t)(i >> 32), s.step, s.address, s.key0, s.key1);
}
// Word `index` of the stream.
HD uint32_t rng_word(RngStream s, uint64_t index) {
    Philox4 p = rng_words4(s, index >> 2);
    uint32_t j = (uint32_t)index & 3u;
    return j == 0 ? p.w[0] : j == 1 ? p.w[1] : j == 2 ? p.w[2] : p.w[3];
}
// Word -> uniform float in (0, 1], with 24 bits.
HD float rng_uniform(uint32_t word) { return ((float)(word >> 8) + 1.0f) * 0x1p-24f; }

#endif
