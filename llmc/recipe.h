// recipe.h: which quantizer stands on which operand of which of a linear layer's three GEMMs. A recipe is data: a row.
//
//   forward  Y  = X  W^T     A = X    (M,K) along K     B = W    (N,K) along K
//   dgrad    dX = dY W       A = dY   (M,N) along N     B = W^T  (K,N) along N
//   wgrad    dW = dY^T X     A = dY^T (N,M) along M     B = X^T  (K,M) along M
//
// "along" is the GEMM's inner dimension: blocks and rotations run along it. Both operands of a GEMM share one rotation.
#ifndef LLMC_RECIPE_H
#define LLMC_RECIPE_H

#include "common.h"
#include "rng.h"

typedef enum {
    ROUND_NONE,            // float32 as it is (the CPU's fp32 baseline; BF16 storage on the GPU)
    ROUND_BF16,            // to BF16, nearest even
    ROUND_RTN,             // nearest
    ROUND_FOUR_SIX,        // nearest, the better of two block scales
    ROUND_SR,              // stochastic values
    ROUND_MS_EDEN,         // nearest values, corrected and stochastically rounded block scales; tensor amax known first
    ROUND_MS_EDEN_POSTHOC  // the same in one pass, range aligned after the fact
} Rounding;
typedef enum { FORMAT_FLOAT, FORMAT_NVFP4 } Format;
typedef enum { BLOCK_NONE, BLOCK_1X16, BLOCK_16X16 } BlockShape;
typedef enum {
    FROM_ORIGINAL,         // quantize the tensor itself
    FROM_FORWARD           // quantize what the forward GEMM used (its quantized X or W, dequantized exactly)
} OperandSource;

typedef struct {
    Rounding rounding;
    Format format;
    BlockShape block;
    int rotation;          // length of the randomized Hadamard rotation along the inner dimension, 0: none
    OperandSource source;  // backward operands W and X only
} OperandSpec;

typedef struct { OperandSpec a, b; } GemmSpec;

typedef struct {
    const char *name, *summary;
    GemmSpec gemm[3];      // indexed by GEMM_FORWARD, GEMM_DGRAD, GEMM_WGRAD
} Recipe;

#define PLAIN(rounding) {rounding, FORMAT_FLOAT, BLOCK_NONE, 0, FROM_ORIGINAL}
#define NVFP4_FORWARD(rounding) {rounding, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL}
#define NVFP4_EDEN(source) {ROUND_MS_EDEN_POSTHOC, FORMAT_NVFP4, BLOCK_1X16, 128, source}
#define EDEN_BACKWARD {NVFP4_EDEN(FROM_ORIGINAL), NVFP4_EDEN(FROM_FORWARD)}

static const Recipe RECIPES[] = {
    {"fp32", "float32 operands: the reference (on the GPU: BF16 tensors, like bf16)",
     {{PLAIN(ROUND_NONE), PLAIN(ROUND_NONE)}, {PLAIN(ROUND_NONE), PLAIN(ROUND_NONE)}, {PLAIN(ROUND_NONE), PLAIN(ROUND_NONE)}}},
    {"bf16", "BF16 operands, float32 accumulation: the baseline every gap is measured from",
     {{PLAIN(ROUND_BF16), PLAIN(ROUND_BF16)}, {PLAIN(ROUND_BF16), PLAIN(ROUND_BF16)}, {PLAIN(ROUND_BF16), PLAIN(ROUND_BF16)}}},
    {"quartet2", "Quartet II: NVFP4 everywhere, four-over-six forward, MS-EDEN backward from the quantized X and W",
     {{NVFP4_FORWARD(ROUND_FOUR_SIX), NVFP4_FORWARD(ROUND_FOUR_SIX)}, EDEN_BACKWARD, EDEN_BACKWARD}},
    {"quartet2-no46", "Quartet II with plain round-to-nearest in the forward pass",
     {{NVFP4_FORWARD(ROUND_RTN), NVFP4_FORWARD(ROUND_RTN)}, EDEN_BACKWARD, EDEN_BACKWARD}},
};
#define RECIPE_COUNT ((int)(sizeof RECIPES / sizeof RECIPES[0]))

// The row of that name; an unknown name is an error that lists the names.
FN const Recipe *recipe_find(const char *name) {
    char names[512] = "";
    for (int i = 0; i < RECIPE_COUNT; i++) {
        if (strcmp(RECIPES[i].name, name) == 0) return &RECIPES[i];
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", RECIPES[i].name);
    }
    fatal_usage("--recipe %s: there is no such recipe; the recipes are %s", name, names);
}
// Whether any operand of the recipe is stored in four bits (then widths must suit blocks and rotations).
FN int recipe_is_quantized(const Recipe *r) {
    for (int g = 0; g < 3; g++)
        if (r->gemm[g].a.format != FORMAT_FLOAT || r->gemm[g].b.format != FORMAT_FLOAT) return 1;
    return 0;
}

#endif
