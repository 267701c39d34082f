// cpu/pack.h: packed NVFP4 tensors: what a GPU stores, and what block-scaled FP4 GEMMs read.
#ifndef LLMC_CPU_PACK_H
#define LLMC_CPU_PACK_H

#include "quantize.h"

typedef struct {
    int64_t outer, inner;            // of the operand: for along_rows = 1 the transpose of the tensor
    int64_t padded;                  // outer rounded up to 128; the rows beyond outer hold zero codes and zero scales
    uint8_t *codes;                  // (padded, inner/2): E2M1, the even index in the low nibble
    uint8_t *scales;                 // E4M3 block scales in cuBLASLt's 128x4 tiles, see tiled_scale_offset()
    int64_t code_bytes, scale_bytes;
    float st;                        // tensor scale
} PackedTensor;

FN void packed_free(PackedTensor *p) {
    free(p->codes); free(p->scales);
    memset(p, 0, sizeof *p);
}
// Quantizes x as quantize_tensor() does and packs the operand. A 16x16 tile's scale is stored for each of its 16 rows. To be
// freed by packed_free().
FN PackedTensor quantize_pack(const float *x, int64_t rows, int64_t cols, int along_rows, const OperandSpec *spec, const QuantizeRandom *random) {
    if (spec->format != FORMAT_NVFP4) fatal("only NVFP4 operands can be packed in four bits");
    const QuantizeJob j = quantize_job(rows, cols, along_rows, spec);
    PackedTensor p;
    p.outer = j.outer; p.inner = j.inner;
    p.padded = (p.outer + 127) / 128 * 128;
    const int64_t blocks = p.inner / NVFP4_BLOCK, tile_rows = spec->block == BLOCK_16X16 ? NVFP4_BLOCK : 1;
    float *q = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    uint8_t *scales = (uint8_t *)xcalloc((size_t)(p.outer * blocks), 1);
    p.st = quantize_tensor(q, scales, x, rows, cols, along_rows, spec, random, 0);
    p.code_bytes = p.padded * (p.inner / 2);
    p.scale_bytes = p.padded * ((blocks + 3) / 4 * 4);
    p.codes = (uint8_t *)xcalloc((size_t)p.code_bytes, 1);
    p.scales = (uint8_t *)xcalloc((size_t)p.scale_bytes, 1);
    for (int64_t o = 0; o < p.outer; o++) {
        for (int64_t i = 0; i < p.inner; i++) {
            const uint32_t code = e2m1_encode(q[o * j.outer_stride + i * j.inner_stride]);
            p.codes[o * (p.inner / 2) + i / 2] |= (uint8_t)(code << (i % 2 * 4));
        }
        for (int64_t b = 0; b < blocks; b++) p.scales[tiled_scale_offset(o, b, blocks)] = scales[o / tile_rows * blocks + b];
    }
    free(q); free(scales);
    return p;
}
// out (outer, inner) = code x s_b, exact in BF16; -> s_t.
FN float packed_unpack(const PackedTensor *p, float *out) {
    const int64_t blocks = p->inner / NVFP4_BLOCK;
    for (int64_t o = 0; o < p->outer; o++) for (int64_t i = 0; i < p->inner; i++) {
        const uint32_t code = (uint32_t)p->codes[o * (p->inner / 2) + i / 2] >> (i % 2 * 4) & 15u;
        out[o * p->inner + i] = f32_mul(e2m1_decode(code), e4m3_decode(p->scales[tiled_scale_offset(o, i / NVFP4_BLOCK, blocks)]));
    }
    return p->st;
}

#endif
