// cuda/operand.cuh: what a recipe's row asks of a linear layer on the GPU, found once: which kernel makes each operand of its three
// GEMMs, what the forward keeps for backward, which largest magnitudes producers must tell, and how the products are formed.
//
// Nothing here or in linear.cuh knows a recipe by name. A new row of known quantizers needs no change; a new quantizer is a new kind:
// a line in operand_kind() and a case where linear.cuh makes operands.
#ifndef LLMC_CUDA_OPERAND_CUH
#define LLMC_CUDA_OPERAND_CUH

#include "gemm_nvfp4.cuh"
#include "quantize.cuh"
#include "quantize_fp8.cuh"
#include "quantize_mx.cuh"
#include "quantize_nvfp4.cuh"
#include "quantize_rows.cuh"

typedef enum {
    KIND_PLAIN,      // the BF16 tensor itself
    KIND_AGAIN,      // the forward's quantized operand once more
    KIND_NVFP4,      // blocks 1x16, amax known: X and W of the forward (quantize_forward.cuh)
    KIND_SQUARE,     // blocks 16x16 of W (quantize_nvfp4.cuh)
    KIND_EDEN,       // rotation of 128 + MS-EDEN posthoc (quantize_eden.cuh); its tensor scale is in the values
    KIND_TILES,      // nearest or stochastic, any rotation (quantize_nvfp4.cuh)
    KIND_QUEST,      // MXFP4 of the forward (quantize_mx.cuh)
    KIND_MX,         // MXFP4 of backward
    KIND_FP8,        // one scale a tensor (quantize_fp8.cuh)
    KIND_ROWS        // E2M1, one scale a row (quantize_rows.cuh)
} OperandKind;

FN const OperandSpec *operand_spec(const Recipe *r, int gemm, int operand) { return operand == OPERAND_A ? &r->gemm[gemm].a : &r->gemm[gemm].b; }

typedef struct {
    const Recipe *recipe;
    OperandKind kind[3][2];        // by GEMM and operand
    int native;                    // products by FP4 tensor cores (linear_native.cuh): native_choose() decides
    int fp8;                       // FP8 operands are bytes for FP8 tensor cores; else they are decoded to BF16, like the others
    int from_plain[2];             // dgrad's W, wgrad's X: made from the BF16 tensor, not from the forward's operand
    int keeps_x;                   // wgrad starts from X itself
    int packed_x, packed_w;        // values that share a scale of the packed X, W that the forward keeps; 0: none is kept
    int x8;                        // the forward keeps its FP8 operand X for wgrad
    int masks;                     // the forward keeps what it clipped
    int amax_x, amax_w, amax_dy;   // max |x| of those tensors must be known
    int makes_w_dgrad;             // dgrad's W is neither W nor, where that is kept, the forward's operand
    int scaled[3];                 // the product has factors: alpha in device memory
    int float_product[3];          // something is done to the product: it is float32 in work space first
} LinearPlan;

FN int operand_is_fp8(const OperandSpec *s) { return s->format == FORMAT_E4M3 || s->format == FORMAT_E5M2; }

// Which kernel makes this operand; fatal where none does.
FN OperandKind operand_kind(const Recipe *r, int gemm, int operand) {
    const OperandSpec *s = operand_spec(r, gemm, operand);
    const int forward = gemm == GEMM_FORWARD, nearest = s->rounding == ROUND_RTN || s->rounding == ROUND_FOUR_SIX;
    const int search = s->rounding == ROUND_SEARCH || s->rounding == ROUND_SEARCH_TRUE, no_rotation = s->rotation == 0;
    if (s->format == FORMAT_FLOAT && no_rotation) {
        // wgrad's B is X, the forward's A; dgrad's B is W, the forward's B.
        const int again = s->source == FROM_FORWARD && operand_kind(r, GEMM_FORWARD, gemm == GEMM_WGRAD ? OPERAND_A : OPERAND_B) != KIND_PLAIN;
        return again ? KIND_AGAIN : KIND_PLAIN;
    }
    if (s->format == FORMAT_NVFP4 && s->block == BLOCK_16X16 && forward && operand == OPERAND_B && nearest && no_rotation) return KIND_SQUARE;
    if (s->format == FORMAT_NVFP4 && s->block == BLOCK_1X16) {
        if (forward && no_rotation && (nearest || search)) return KIND_NVFP4;
        if (!forward && s->rotation == 128 && (s->rounding == ROUND_MS_EDEN_POSTHOC || s->rounding == ROUND_MS_EDEN_SEARCH)) return KIND_EDEN;
        if (!forward && (nearest || s->rounding == ROUND_SR)) return KIND_TILES;
    }
    if (s->format == FORMAT_MXFP4 && forward && s->rounding == ROUND_QUEST) return KIND_QUEST;
    if (s->format == FORMAT_MXFP4 && !forward && s->rounding == ROUND_SR) return KIND_MX;
    if (operand_is_fp8(s) && s->rounding == ROUND_RTN && s->block == BLOCK_TENSOR && no_rotation) return KIND_FP8;
    if (s->format == FORMAT_E2M1 && s->rounding == ROUND_RTN && s->block == BLOCK_ROW && forward && no_rotation) return KIND_ROWS;
    fatal("--recipe %s: operand %s of its %s GEMM has no kernel in the GPU backend; train it with the CPU program", r->name,
          operand == OPERAND_A ? "A" : "B", gemm == GEMM_FORWARD ? "forward" : gemm == GEMM_DGRAD ? "dgrad" : "wgrad");
}
// Values that share a scale in what the forward packs, 0: it packs nothing.
FN int kind_packs(OperandKind k) { return k == KIND_NVFP4 ? NVFP4_BLOCK : k == KIND_QUEST ? MXFP4_BLOCK : 0; }

// fatal for a row that cannot be what its author meant, or that no kernel here serves.
FN LinearPlan linear_plan(const Recipe *r, int fp8) {
    LinearPlan p;
    memset(&p, 0, sizeof p);
    recipe_check(r);
    p.recipe = r; p.fp8 = fp8;
    for (int g = 0; g < 3; g++) for (int o = 0; o < 2; o++) p.kind[g][o] = operand_kind(r, g, o);
    const OperandKind x = p.kind[GEMM_FORWARD][OPERAND_A], w = p.kind[GEMM_FORWARD][OPERAND_B];
    const OperandKind w_dgrad = p.kind[GEMM_DGRAD][OPERAND_B], x_wgrad = p.kind[GEMM_WGRAD][OPERAND_B];
    p.from_plain[0] = w == KIND_PLAIN || r->gemm[GEMM_DGRAD].b.source == FROM_ORIGINAL;
    p.from_plain[1] = x == KIND_PLAIN || r->gemm[GEMM_WGRAD].b.source == FROM_ORIGINAL;
    p.keeps_x = p.from_plain[1];
    p.packed_w = p.from_plain[0] ? 0 : kind_packs(w);
    p.packed_x = p.from_plain[1] ? 0 : kind_packs(x);
    p.x8 = !p.from_plain[1] && x == KIND_FP8;
    if (!p.from_plain[1] && !p.packed_x && !p.x8)
        fatal("--recipe %s: wgrad starts from an X of kind %d, which the GPU's forward does not keep; train it with the CPU program", r->name, (int)x);
    p.masks = r->gemm[GEMM_DGRAD].product == PRODUCT_CLIP_MASK || r->gemm[GEMM_WGRAD].product == PRODUCT_CLIP_MASK;
    p.amax_x = x == KIND_NVFP4 || x == KIND_FP8 || x_wgrad == KIND_FP8;
    p.amax_w = w == KIND_NVFP4 || w == KIND_SQUARE || w == KIND_FP8 || (w_dgrad == KIND_FP8 && p.from_plain[0]);
    p.makes_w_dgrad = w_dgrad != KIND_PLAIN && !(w_dgrad == KIND_AGAIN && w != KIND_FP8);
    for (int g = 0; g < 3; g++) {
        const OperandKind a = p.kind[g][OPERAND_A], b = p.kind[g][OPERAND_B];
        const OperandSpec *spec = &r->gemm[g].a;
        if (g != GEMM_FORWARD) p.amax_dy |= a == KIND_FP8 || (a == KIND_TILES && spec->rotation == 0);
        p.scaled[g] = !(a == KIND_PLAIN && b == KIND_PLAIN) && a != KIND_QUEST && a != KIND_ROWS;
        p.float_product[g] = r->gemm[g].product != PRODUCT_PLAIN || recipe_turns_back(r, g) || a == KIND_ROWS;
        if ((a == KIND_QUEST) != (b == KIND_QUEST) || (a == KIND_ROWS) != (b == KIND_ROWS))
            fatal("--recipe %s: the GPU multiplies MXFP4 or row-scaled operands by their like only; train it with the CPU program", r->name);
    }
    return p;
}
// Whether the operands of any GEMM are made at all.
FN int plan_quantizes(const LinearPlan *p) {
    for (int g = 0; g < 3; g++) if (p->kind[g][0] != KIND_PLAIN || p->kind[g][1] != KIND_PLAIN) return 1;
    return 0;
}
// Whether the forward keeps something of X besides X.
FN int plan_keeps_operand_x(const LinearPlan *p) { return p->packed_x || p->x8 || p->masks; }
FN int plan_makes(const LinearPlan *p, int gemm, int operand) { return p->kind[gemm][operand] != KIND_PLAIN; }
// Whether an operand reaches its product as FP8 bytes.
FN int plan_bytes(const LinearPlan *p, int gemm, int operand) {
    const int forward = gemm == GEMM_WGRAD ? OPERAND_A : OPERAND_B;
    const OperandKind k = p->kind[gemm][operand];
    return p->fp8 && (k == KIND_FP8 || (k == KIND_AGAIN && p->kind[GEMM_FORWARD][forward] == KIND_FP8));
}
// The format that such an operand has, FORMAT_FLOAT: BF16.
FN Format plan_format(const LinearPlan *p, int gemm, int operand) {
    if (!plan_bytes(p, gemm, operand)) return FORMAT_FLOAT;
    if (p->kind[gemm][operand] == KIND_FP8) return operand_spec(p->recipe, gemm, operand)->format;
    return operand_spec(p->recipe, GEMM_FORWARD, gemm == GEMM_WGRAD ? OPERAND_A : OPERAND_B)->format;
}

#endif
