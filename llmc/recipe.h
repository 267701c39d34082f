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
    ROUND_MS_EDEN_POSTHOC, // the same in one pass, range aligned after the fact
    ROUND_SEARCH,          // nearest, the block scale of least squared error
    ROUND_SEARCH_TRUE,     // the same, then the block scale corrected towards keeping magnitudes, <x,q> = <x,x>
    ROUND_MS_EDEN_SEARCH,  // MS-EDEN post hoc with the block scale searched inside
    ROUND_QUEST            // nearest, block scale from the block's standard deviation; what it clips is masked
} Rounding;
typedef enum {
    FORMAT_FLOAT,
    FORMAT_NVFP4,          // E2M1 x E4M3 block scale x float32 tensor scale
    FORMAT_MXFP4,          // E2M1 x E8M0 block scale; its rotation is normalised, as the scale is part of no alpha
    FORMAT_E2M1,           // E2M1 x float32 scale of a row of the operand
    FORMAT_E4M3,           // FP8 x float32 tensor scale
    FORMAT_E5M2
} Format;
typedef enum { BLOCK_NONE, BLOCK_1X16, BLOCK_16X16, BLOCK_1X32, BLOCK_ROW, BLOCK_TENSOR } BlockShape;
typedef enum {
    FROM_ORIGINAL,         // quantize the tensor itself
    FROM_FORWARD           // quantize what the forward GEMM used (its quantized X or W, dequantized exactly)
} OperandSource;
typedef enum { SIGNS_RANDOM, SIGNS_NONE } RotationSigns;  // new signs each step, layer and GEMM; or the bare transform
typedef enum { SEARCH_FEW, SEARCH_ALL } ScaleSearch;      // block scales that a search tries: four (two inside MS-EDEN), or all that can win

typedef struct {
    Rounding rounding;
    Format format;
    BlockShape block;
    int rotation;          // length of the Hadamard rotation along the inner dimension, 0: none
    OperandSource source;  // backward operands W and X only
    RotationSigns signs;
    ScaleSearch search;
    int clamp_percent;     // the largest and the smallest so many per cent of the tensor are clamped first; 0: none
} OperandSpec;

// Values that share a block scale along the inner dimension.
FN int operand_block(const OperandSpec *s) { return s->format == FORMAT_NVFP4 ? 16 : s->format == FORMAT_MXFP4 ? 32 : 1; }
// MXFP4's rotated operands are multiplied by rotation^-1/2 before their scales are chosen; all others leave 1/rotation to the
// GEMM's alpha.
FN int rotation_is_normalised(const OperandSpec *s) { return s->format == FORMAT_MXFP4; }

// What is done to a GEMM's product before it is the layer's result. (A backward product of operands that the forward rotated
// is turned back by itself.)
typedef enum {
    PRODUCT_PLAIN,
    PRODUCT_ADD_OUTLIERS,  // forward: plus what A's clamp cut off, in BF16, times B
    PRODUCT_CLIP_MASK,     // dgrad, wgrad: zero where the forward's rounding clipped X (dgrad) or W (wgrad)
    PRODUCT_DGE            // wgrad: times the slope of a smooth stand-in for W's rounding (differentiable gradient estimator)
} ProductRule;

typedef struct { OperandSpec a, b; ProductRule product; } GemmSpec;

typedef struct {
    const char *name, *summary;
    GemmSpec gemm[3];      // indexed by GEMM_FORWARD, GEMM_DGRAD, GEMM_WGRAD
} Recipe;

// Operands, for the rows below.
#define OPERAND(rounding, format, block, rotation, source) {rounding, format, block, rotation, source, SIGNS_RANDOM, SEARCH_FEW, 0}
#define PLAIN(rounding) OPERAND(rounding, FORMAT_FLOAT, BLOCK_NONE, 0, FROM_ORIGINAL)
#define AS_FORWARD OPERAND(ROUND_NONE, FORMAT_FLOAT, BLOCK_NONE, 0, FROM_FORWARD)  // the forward's operand once more
#define NVFP4(rounding, block) OPERAND(rounding, FORMAT_NVFP4, block, 0, FROM_ORIGINAL)
#define NVFP4_ROTATED(rounding, rotation, source) OPERAND(rounding, FORMAT_NVFP4, BLOCK_1X16, rotation, source)
#define NVFP4_SEARCH(rounding, rotation, source, search) {rounding, FORMAT_NVFP4, BLOCK_1X16, rotation, source, SIGNS_RANDOM, search, 0}
#define MXFP4_QUEST {ROUND_QUEST, FORMAT_MXFP4, BLOCK_1X32, 32, FROM_ORIGINAL, SIGNS_NONE, SEARCH_FEW, 0}
#define MXFP4_SR(source) OPERAND(ROUND_SR, FORMAT_MXFP4, BLOCK_1X32, 32, source)
#define FP8(format, source) OPERAND(ROUND_RTN, format, BLOCK_TENSOR, 0, source)
#define FP4_ROWS(clamp) {ROUND_RTN, FORMAT_E2M1, BLOCK_ROW, 0, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, clamp}

// GEMMs. {A, B, what is done to the product}
#define BF16_GEMM {PLAIN(ROUND_BF16), PLAIN(ROUND_BF16), PRODUCT_PLAIN}
#define FP32_GEMM {PLAIN(ROUND_NONE), PLAIN(ROUND_NONE), PRODUCT_PLAIN}
#define NVFP4_FORWARD(rounding, w_block) {NVFP4(rounding, BLOCK_1X16), NVFP4(rounding, w_block), PRODUCT_PLAIN}
#define BACKWARD_FROM_FORWARD(rounding, rotation) \
    {NVFP4_ROTATED(rounding, rotation, FROM_ORIGINAL), NVFP4_ROTATED(rounding, rotation, FROM_FORWARD), PRODUCT_PLAIN}
#define EDEN_BACKWARD BACKWARD_FROM_FORWARD(ROUND_MS_EDEN_POSTHOC, 128)
#define NVIDIA_DGRAD {NVFP4(ROUND_SR, BLOCK_1X16), AS_FORWARD, PRODUCT_PLAIN}  // 16x16 blocks of W are those of W^T
#define NVIDIA_WGRAD {NVFP4_ROTATED(ROUND_SR, 16, FROM_ORIGINAL), NVFP4_ROTATED(ROUND_RTN, 16, FROM_ORIGINAL), PRODUCT_PLAIN}
#define SEARCH_BACKWARD BACKWARD_FROM_FORWARD(ROUND_MS_EDEN_SEARCH, 128)
#define BF16_BACKWARD {PLAIN(ROUND_BF16), AS_FORWARD, PRODUCT_PLAIN}
#define FP8_FORWARD {FP8(FORMAT_E4M3, FROM_ORIGINAL), FP8(FORMAT_E4M3, FROM_ORIGINAL), PRODUCT_PLAIN}
#define FP8_BACKWARD(gradient) {FP8(gradient, FROM_ORIGINAL), AS_FORWARD, PRODUCT_PLAIN}

// A row's sources and its deviations from them, if any, stand above it.
static const Recipe RECIPES[] = {
    {"fp32", "float32 operands: the reference (on the GPU: BF16 tensors, like bf16)", {FP32_GEMM, FP32_GEMM, FP32_GEMM}},
    {"bf16", "BF16 operands, float32 accumulation: the baseline every gap is measured from", {BF16_GEMM, BF16_GEMM, BF16_GEMM}},
    // Current scaling by the tensor's largest magnitude. Codes of a transposed tensor are the same, so backward uses forward's.
    {"fp8", "FP8: E4M3 forward, E5M2 gradients, one scale a tensor",
     {FP8_FORWARD, FP8_BACKWARD(FORMAT_E5M2), FP8_BACKWARD(FORMAT_E5M2)}},
    {"fp8-e4m3", "FP8: E4M3 everywhere, gradients too",
     {FP8_FORWARD, FP8_BACKWARD(FORMAT_E4M3), FP8_BACKWARD(FORMAT_E4M3)}},
    // arXiv 2601.22813; four-over-six: arXiv 2512.02010.
    {"quartet2", "Quartet II: NVFP4 everywhere, four-over-six forward, MS-EDEN backward from the quantized X and W",
     {NVFP4_FORWARD(ROUND_FOUR_SIX, BLOCK_1X16), EDEN_BACKWARD, EDEN_BACKWARD}},
    {"quartet2-no46", "Quartet II with plain round-to-nearest in the forward pass",
     {NVFP4_FORWARD(ROUND_RTN, BLOCK_1X16), EDEN_BACKWARD, EDEN_BACKWARD}},
    // The paper's ablations. W_q and X_q are exact in BF16: backward still differentiates the forward that ran.
    {"quartet2-fwd", "ablation: Quartet II's forward; backward in BF16 from the quantized X and W",
     {NVFP4_FORWARD(ROUND_FOUR_SIX, BLOCK_1X16), BF16_BACKWARD, BF16_BACKWARD}},
    {"quartet2-bwd", "ablation: BF16 forward, Quartet II's MS-EDEN backward",
     {BF16_GEMM, EDEN_BACKWARD, EDEN_BACKWARD}},
    // Beyond the paper: the block scale is searched among as few codes as get most of the gain. (All that can win: SEARCH_ALL, CPU only.)
    {"quartet2-search", "Quartet II with searched block scales (least squared error), forward and inside MS-EDEN",
     {NVFP4_FORWARD(ROUND_SEARCH, BLOCK_1X16), SEARCH_BACKWARD, SEARCH_BACKWARD}},
    {"quartet2-search-true", "quartet2-search with magnitude-true forward scales: times <x,x>/<x,q>, to nearest",
     {NVFP4_FORWARD(ROUND_SEARCH_TRUE, BLOCK_1X16), SEARCH_BACKWARD, SEARCH_BACKWARD}},
    // arXiv 2509.25149 and TransformerEngine. Keep the last layers in BF16 with --bf16-layers, as they do.
    {"nvidia", "NVIDIA's NVFP4: 16x16 blocks of W, stochastic gradients, rotation of 16 in wgrad only",
     {NVFP4_FORWARD(ROUND_RTN, BLOCK_16X16), NVIDIA_DGRAD, NVIDIA_WGRAD}},
    {"nvidia-46", "nvidia with four-over-six in the forward pass", {NVFP4_FORWARD(ROUND_FOUR_SIX, BLOCK_16X16), NVIDIA_DGRAD, NVIDIA_WGRAD}},
    {"tetrajet2", "TetraJet-v2: NVFP4 nearest forward; rotation of 32 and stochastic rounding on all backward operands",
     {NVFP4_FORWARD(ROUND_RTN, BLOCK_1X16), BACKWARD_FROM_FORWARD(ROUND_SR, 32), BACKWARD_FROM_FORWARD(ROUND_SR, 32)}},
    // arXiv 2505.14669.
    {"quartet", "Quartet: MXFP4; QuEST forward in a rotated space with a trust mask, stochastic backward",
     {{MXFP4_QUEST, MXFP4_QUEST, PRODUCT_PLAIN},
      {MXFP4_SR(FROM_ORIGINAL), MXFP4_SR(FROM_FORWARD), PRODUCT_CLIP_MASK},
      {MXFP4_SR(FROM_ORIGINAL), MXFP4_SR(FROM_FORWARD), PRODUCT_CLIP_MASK}}},
    // arXiv 2501.17116. Its released code leaves the outliers out and scales W by input channel; this follows the paper. wgrad takes X
    // itself, as the forward's FP4 operand lacks the outliers that the layer did multiply.
    {"fp4-dge-occ", "Microsoft's FP4: row-scaled E2M1 forward, outliers in BF16, differentiable gradient estimator; FP8 backward",
     {{FP4_ROWS(1), FP4_ROWS(0), PRODUCT_ADD_OUTLIERS},
      {FP8(FORMAT_E5M2, FROM_ORIGINAL), FP8(FORMAT_E4M3, FROM_FORWARD), PRODUCT_PLAIN},
      {FP8(FORMAT_E5M2, FROM_ORIGINAL), FP8(FORMAT_E4M3, FROM_ORIGINAL), PRODUCT_DGE}}},
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
// Whether any operand of the recipe is stored in eight or four bits (then widths must suit blocks and rotations).
FN int recipe_is_quantized(const Recipe *r) {
    for (int g = 0; g < 3; g++)
        if (r->gemm[g].a.format != FORMAT_FLOAT || r->gemm[g].b.format != FORMAT_FLOAT) return 1;
    return 0;
}

// Whether a backward product of this recipe is in the space that the forward rotated its operands into.
FN int recipe_turns_back(const Recipe *r, int gemm) {
    return gemm != GEMM_FORWARD && r->gemm[gemm].b.source == FROM_FORWARD && r->gemm[GEMM_FORWARD].b.rotation > 0;
}
// fatal for a row that cannot be what its author meant.
FN void recipe_check(const Recipe *r) {
    for (int g = 0; g < 3; g++) {
        const OperandSpec *a = &r->gemm[g].a, *b = &r->gemm[g].b;
        const ProductRule product = r->gemm[g].product;
        if (a->rotation != b->rotation || a->signs != b->signs || rotation_is_normalised(a) != rotation_is_normalised(b))
            fatal("recipe %s, GEMM %d: rotations of %d and %d do not cancel; give both operands the same one", r->name, g, a->rotation, b->rotation);
        if (a->source == FROM_FORWARD || (g == GEMM_FORWARD && b->source == FROM_FORWARD))
            fatal("recipe %s, GEMM %d: only the backward operands W and X can come from the forward's", r->name, g);
        const OperandSpec *clipped = g == GEMM_DGRAD ? &r->gemm[GEMM_FORWARD].a : &r->gemm[GEMM_FORWARD].b;
        if ((product == PRODUCT_ADD_OUTLIERS && (g != GEMM_FORWARD || a->clamp_percent == 0)) ||
            (product == PRODUCT_CLIP_MASK &&
             (g == GEMM_FORWARD || clipped->rounding != ROUND_QUEST || recipe_turns_back(r, g) != (clipped->rotation > 0))) ||
            (product == PRODUCT_DGE && (g != GEMM_WGRAD || clipped->format != FORMAT_E2M1)))
            fatal("recipe %s, GEMM %d: rule %d for the product does not fit the operands' quantizers", r->name, g, (int)product);
    }
}

// The row with backward's operands as they are: its exact gradient of the forward that ran.
FN Recipe recipe_exact_backward(const Recipe *r) {
    const OperandSpec plain = PLAIN(ROUND_NONE), forward = AS_FORWARD;
    Recipe exact = *r;
    for (int g = GEMM_DGRAD; g <= GEMM_WGRAD; g++) {
        exact.gemm[g].a = plain;
        exact.gemm[g].b = r->gemm[g].b.source == FROM_FORWARD ? forward : plain;
    }
    return exact;
}
// Whether backward draws random words or signs.
FN int recipe_is_stochastic(const Recipe *r) {
    for (int g = GEMM_DGRAD; g <= GEMM_WGRAD; g++)
        for (int operand = 0; operand < 2; operand++) {
            const OperandSpec *s = operand ? &r->gemm[g].b : &r->gemm[g].a;
            if (s->rounding == ROUND_SR || (s->rotation && s->signs == SIGNS_RANDOM)) return 1;  // MS-EDEN is always rotated
        }
    return 0;
}

#endif
