// cuda/linear.cuh: a linear layer: three GEMMs whose operands the recipe quantizes.
//
//   forward  Y  = X  W^T     A = X    (M,K) along K     B = W    (N,K) along K
//   dgrad    dX = dY W       A = dY   (M,N) along N     B = W^T  (K,N) along N
//   wgrad    dW = dY^T X     A = dY^T (N,M) along M     B = X^T  (K,M) along M
//
// A plan (operand.cuh) says which kernel makes which operand. FP4 operands are decoded to BF16 (exact) and multiplied by BF16 tensor cores, or
// (linear_native.cuh) stay packed for FP4 tensor cores;
// FP8 operands are multiplied as bytes, for which dgrad's and wgrad's are stored transposed. What of an operand is a factor (tensor scales,
// 1/128 of a rotation) reaches the GEMM as alpha in device memory. X and W of a forward in FP4 are kept packed for backward.
#ifndef LLMC_CUDA_LINEAR_CUH
#define LLMC_CUDA_LINEAR_CUH

#include "../llama.h"
#include "operand.cuh"
#include "profile.cuh"

// Device scalars of a linear: tensor scales of X and W (forward), of what backward makes of dY (for dgrad and for wgrad), W and X, and a GEMM's alpha.
enum { FACTOR_X, FACTOR_W, FACTOR_DY_DGRAD, FACTOR_DY_WGRAD, FACTOR_W_DGRAD, FACTOR_X_WGRAD, FACTOR_ALPHA, FACTOR_COUNT = FACTOR_ALPHA + 3 };

typedef struct {
    const LinearPlan *plan;
    int layer, linear;             // its place in the addresses of random words
    int64_t N, K;                  // output and input features
    const bf16 *w;                 // (N,K)
    void *dw;                      // (N,K) float32, or
    int dw_bf16;                   // BF16
    bf16 *x;                       // (M,K) where the producer writes the input
    uint8_t *x_codes, *x_scales;   // kept X: packed, (M,K/2) and (M,K/16 or K/32); FP8: codes are X^T (K,M), or decoded X
    uint8_t *w_codes, *w_scales;   // the same of W
    uint32_t *x_mask, *w_mask;     // bit 1: the forward did not clip the value, (M,K/32), (N,K/32)
    void *w_forward, *w_dgrad;     // W's operands, up to (N,K) BF16 each; shared by the layers unless work->weights_kept
    float *w_rows;                 // (N) row scales of w_forward
    void *dy_dgrad;                // (M,N) dY's operand of dgrad; shared memory
    int forward_ready, dgrad_ready;  // those operands belong to the weights, and the signs, of this step
    float *amax_x, *amax_w;        // device scalars: written by the producers of X and W
    float *factor;                 // device scalars (FACTOR_COUNT)
} Linear;

// What the layers share.
typedef struct {
    Gemm *gemm;
    int weights_kept;              // every layer has its own w_forward and w_dgrad: W is quantized once a step
    int64_t kept_rows;             // rows of a micro-batch; other numbers of rows have no backward, and keep nothing
    cudaStream_t stream;
    Profile *profile;
    uint64_t seed;
    uint32_t step;
    int rank, micro;
    void *x_forward;               // (M,K) X's operand
    bf16 *residual;                // (M,K) what X's clamp cut off
    float *x_rows;                 // (M) row scales of x_forward
    void *dy_wgrad;                // dY's operand of wgrad
    void *x_wgrad;                 // X's; may lie on dy_dgrad, which has had its use by then
    float *product;                // a product that something is done to, float32
    float *scalars;                // device (4): limits of a clamp (2), max |dY|
    void *quantizer_work;
} LinearWork;

FN GemmShape linear_shape(const Linear *l, int gemm, int64_t M) {
    GemmShape s;
    memset(&s, 0, sizeof s);
    const LinearPlan *p = l->plan;
    s.m = M; s.n = l->N; s.k = l->K; s.b_transposed = 1;
    if (gemm == GEMM_DGRAD) { s.n = l->K; s.k = l->N; s.b_transposed = 0; }
    if (gemm == GEMM_WGRAD) { s.m = l->N; s.n = l->K; s.k = M; s.a_transposed = 1; s.b_transposed = 0; s.d_float32 = !l->dw_bf16; }
    if (!p) return s;
    s.device_alpha = p->scaled[gemm];
    s.a_format = plan_format(p, gemm, OPERAND_A); s.b_format = plan_format(p, gemm, OPERAND_B);
    if (s.a_format != FORMAT_FLOAT) { s.a_transposed = 0; s.b_transposed = 1; }
    if (p->float_product[gemm]) s.d_float32 = 1;
    return s;
}
FN EdenAddress linear_address(const Linear *l, const LinearWork *work, int gemm, int operand) {
    const int is_weight = operand == OPERAND_B && gemm != GEMM_WGRAD;  // the same for every rank and micro-batch
    EdenAddress a = {work->seed, work->step, l->layer, l->linear, gemm, operand, is_weight ? 0 : work->rank, is_weight ? 0 : work->micro};
    return a;
}
FN void linear_mark(const LinearWork *work, Family family, double bytes_a_value, int64_t values) {
    profile_mark(work->profile, family, bytes_a_value * (double)values, 0, work->stream);
}
FN void linear_product(const Linear *l, const LinearWork *work, int gemm, int64_t M, void *d, const void *a, const void *b, int accumulate) {
    const GemmPlan *p = gemm_plan(work->gemm, linear_shape(l, gemm, M));
    profile_mark(work->profile, (Family)(FAMILY_GEMM_FORWARD + gemm), 0, p->ms, work->stream);
    gemm_run(work->gemm, p, d, a, b, l->plan->scaled[gemm] ? l->factor + FACTOR_ALPHA + gemm : NULL, accumulate, work->stream);
}

#include "linear_native.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// alpha

// *alpha = constant * the factors (NULL: 1), in this order.
__global__ static void linear_alpha_kernel(float *alpha, float constant, const float *a, const float *b, const float *c) {
    float x = constant;
    if (a) x = f32_mul(x, *a);
    if (b) x = f32_mul(x, *b);
    if (c) x = f32_mul(x, *c);
    *alpha = x;
}
// What the kernels that make operand A and B put into no factor on the device: the transforms' length, MXFP4's 4/3.
FN float linear_constant(const LinearPlan *p, int gemm) {
    const OperandSpec *a = &p->recipe->gemm[gemm].a;
    float constant = a->rotation && !rotation_is_normalised(a) ? 1.0f / (float)a->rotation : 1.0f;
    for (int o = 0; o < 2; o++) if (p->kind[gemm][o] == KIND_MX) constant *= MX_SR_FACTOR;
    return constant;
}
// The factor that making this operand found, NULL: it is in the values, or a constant.
FN const float *linear_factor(const Linear *l, int gemm, int operand) {
    static const int place[3][2] = {{FACTOR_X, FACTOR_W}, {FACTOR_DY_DGRAD, FACTOR_W_DGRAD}, {FACTOR_DY_WGRAD, FACTOR_X_WGRAD}};
    switch (l->plan->kind[gemm][operand]) {
    case KIND_NVFP4: case KIND_SQUARE: case KIND_TILES: case KIND_FP8: return l->factor + place[gemm][operand];
    default: return NULL;
    }
}
FN void linear_alpha(const Linear *l, const LinearWork *work, int gemm) {
    const LinearPlan *p = l->plan;
    const float *source = NULL;  // of the forward's operand that B started from
    const int from_plain = gemm == GEMM_FORWARD || p->from_plain[gemm == GEMM_WGRAD];
    if (!from_plain) source = linear_factor(l, GEMM_FORWARD, gemm == GEMM_WGRAD ? OPERAND_A : OPERAND_B);
    if (gemm == GEMM_DGRAD && p->kind[GEMM_FORWARD][OPERAND_B] == KIND_ROWS) source = NULL;  // its row scales are in the values
    linear_alpha_kernel<<<1, 1, 0, work->stream>>>(l->factor + FACTOR_ALPHA + gemm, linear_constant(p, gemm), source, linear_factor(l, gemm, OPERAND_A),
                                                   linear_factor(l, gemm, OPERAND_B));
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward's operands

// Whether the kernel that makes X can write the forward's alpha at once.
FN int linear_forward_alpha_fused(const LinearPlan *p) {
    const OperandKind w = p->kind[GEMM_FORWARD][OPERAND_B];
    return p->kind[GEMM_FORWARD][OPERAND_A] == KIND_NVFP4 && (w == KIND_NVFP4 || w == KIND_SQUARE);
}
// W's operand of the forward GEMM, and what backward starts from. amax_w is known.
FN void linear_make_weight(Linear *l, const LinearWork *work) {
    const LinearPlan *p = l->plan;
    const OperandSpec *spec = &p->recipe->gemm[GEMM_FORWARD].b;
    const EdenAddress at = linear_address(l, work, GEMM_FORWARD, OPERAND_B);
    float *const factor = l->factor + FACTOR_W;
    linear_mark(work, FAMILY_QUANTIZE_W, 4.5625, l->N * l->K);
    switch (p->kind[GEMM_FORWARD][OPERAND_B]) {
    case KIND_NVFP4:
        quantize_forward_launch(work->stream, spec, l->w, l->N, l->K, l->amax_w, l->w_codes, l->w_scales, (bf16 *)l->w_forward, factor, NULL, NULL);
        break;
    case KIND_SQUARE:
        nvfp4_square_launch(work->stream, spec->rounding, l->w, l->N, l->K, l->amax_w, NULL, NULL, (bf16 *)l->w_forward, factor);
        break;
    case KIND_QUEST:
        mx_quest_launch(work->stream, spec, at, l->w, l->N, l->K, l->w_codes, l->w_scales, l->w_mask, (bf16 *)l->w_forward);
        break;
    case KIND_FP8:
        fp8_quantize_launch(work->stream, spec->format, l->w, l->N, l->K, l->amax_w, p->fp8 ? (uint8_t *)l->w_forward : NULL, NULL,
                            p->fp8 ? NULL : (bf16 *)l->w_forward, factor);
        break;
    case KIND_ROWS: rows_quantize_launch(work->stream, l->w, l->N, l->K, NULL, (bf16 *)l->w_forward, l->w_rows, NULL); break;
    default: break;                                        // W itself
    }
    l->forward_ready = work->weights_kept;
}
// X's operand of the forward GEMM, from l->x and *amax_x, and what backward starts from; the forward's alpha.
FN void linear_make_input(Linear *l, const LinearWork *work, int64_t M) {
    const LinearPlan *p = l->plan;
    if (p->native) { native_make_input(l, work, M); return; }
    const OperandSpec *spec = &p->recipe->gemm[GEMM_FORWARD].a;
    const EdenAddress at = linear_address(l, work, GEMM_FORWARD, OPERAND_A);
    float *const factor = l->factor + FACTOR_X;
    const int keep = M == work->kept_rows, fused = linear_forward_alpha_fused(p);
    uint8_t *const codes = keep ? l->x_codes : NULL, *const scales = keep ? l->x_scales : NULL;
    linear_mark(work, FAMILY_QUANTIZE_X, p->kind[GEMM_FORWARD][OPERAND_A] == KIND_FP8 ? 4 : 4.5625, M * l->K);
    switch (p->kind[GEMM_FORWARD][OPERAND_A]) {
    case KIND_NVFP4:
        quantize_forward_launch(work->stream, spec, l->x, M, l->K, l->amax_x, p->packed_x ? codes : NULL, p->packed_x ? scales : NULL, (bf16 *)work->x_forward,
                                factor, fused ? l->factor + FACTOR_W : NULL, fused ? l->factor + FACTOR_ALPHA + GEMM_FORWARD : NULL);
        break;
    case KIND_QUEST:
        mx_quest_launch(work->stream, spec, at, l->x, M, l->K, codes, scales, keep ? l->x_mask : NULL, (bf16 *)work->x_forward);
        break;
    case KIND_FP8:  // on cards without FP8 products the decoded operand serves both GEMMs
        fp8_quantize_launch(work->stream, spec->format, l->x, M, l->K, l->amax_x, p->fp8 ? (uint8_t *)work->x_forward : NULL, p->fp8 && p->x8 ? codes : NULL,
                            p->fp8 ? NULL : p->x8 && keep ? (bf16 *)codes : (bf16 *)work->x_forward, factor);
        break;
    case KIND_ROWS:
        if (spec->clamp_percent) clamp_limits_launch(work->stream, l->x, M * l->K, spec->clamp_percent, work->scalars, work->quantizer_work);
        rows_quantize_launch(work->stream, l->x, M, l->K, spec->clamp_percent ? work->scalars : NULL, (bf16 *)work->x_forward, work->x_rows,
                             spec->clamp_percent ? work->residual : NULL);
        break;
    default: break;
    }
    if (p->scaled[GEMM_FORWARD] && !fused) linear_alpha(l, work, GEMM_FORWARD);
}
// Row-scaled operands: D1 = codes_x codes_w^T; its rows times X's scales; + (what X's clamp cut off) codes_w^T; columns times W's scales.
FN void linear_forward_rows(const Linear *l, const LinearWork *work, bf16 *y, int64_t M) {
    linear_product(l, work, GEMM_FORWARD, M, work->product, work->x_forward, l->w_forward, 0);
    product_scale_launch(work->stream, work->product, M, l->N, work->x_rows, NULL, NULL);
    if (l->plan->recipe->gemm[GEMM_FORWARD].product == PRODUCT_ADD_OUTLIERS)
        linear_product(l, work, GEMM_FORWARD, M, work->product, work->residual, l->w_forward, 1);
    product_scale_launch(work->stream, work->product, M, l->N, NULL, l->w_rows, y);
}
// y (M,N) = X W^T. X (M,K) is in l->x and, where the plan asks for it, its largest magnitude in *amax_x.
FN void linear_forward(Linear *l, const LinearWork *work, bf16 *y, int64_t M) {
    const LinearPlan *p = l->plan;
    if (p->native) { native_forward(l, work, y, M); return; }
    const int own_x = plan_makes(p, GEMM_FORWARD, OPERAND_A), own_w = plan_makes(p, GEMM_FORWARD, OPERAND_B);
    if (own_w && !l->forward_ready) linear_make_weight(l, work);
    if (own_x) linear_make_input(l, work, M);
    if (p->kind[GEMM_FORWARD][OPERAND_A] == KIND_ROWS) { linear_forward_rows(l, work, y, M); return; }
    const int in_kept = p->x8 && !p->fp8 && M == work->kept_rows;
    linear_product(l, work, GEMM_FORWARD, M, y, in_kept ? (const void *)l->x_codes : own_x ? work->x_forward : l->x, own_w ? l->w_forward : l->w, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward's operands

// dY's operands of both GEMMs, from one read where one kernel makes both.
FN void linear_make_gradient(const Linear *l, const LinearWork *work, const bf16 *dy, int64_t M) {
    const LinearPlan *p = l->plan;
    const OperandKind n = p->kind[GEMM_DGRAD][OPERAND_A], m = p->kind[GEMM_WGRAD][OPERAND_A];
    const OperandSpec *spec_n = &p->recipe->gemm[GEMM_DGRAD].a, *spec_m = &p->recipe->gemm[GEMM_WGRAD].a;
    const EdenAddress at_n = linear_address(l, work, GEMM_DGRAD, OPERAND_A), at_m = linear_address(l, work, GEMM_WGRAD, OPERAND_A);
    bf16 *const out_n = (bf16 *)l->dy_dgrad, *const out_m = (bf16 *)work->dy_wgrad;
    float *const amax = work->scalars + 2, *const factor_n = l->factor + FACTOR_DY_DGRAD, *const factor_m = l->factor + FACTOR_DY_WGRAD;
    if (n == KIND_PLAIN && m == KIND_PLAIN) return;
    linear_mark(work, FAMILY_EDEN_DY, n == KIND_FP8 ? 6 : 6.25, M * l->N);
    if (p->amax_dy) amax_launch(work->stream, dy, M * l->N, amax);
    if (n == KIND_EDEN && m == KIND_EDEN && spec_n->rounding == spec_m->rounding && spec_n->search == spec_m->search)
        eden_both_launch(work->stream, spec_n, dy, M, l->N, out_n, out_m, at_n, at_m, work->quantizer_work, NULL);
    else {
        if (n == KIND_EDEN) eden_one_launch(work->stream, spec_n, dy, M, l->N, 0, out_n, at_n, work->quantizer_work, NULL);
        if (m == KIND_EDEN) eden_one_launch(work->stream, spec_m, dy, M, l->N, 1, out_m, at_m, work->quantizer_work, NULL);
    }
    const Nvfp4Side tiles_n = {spec_n, at_n, out_n, factor_n}, tiles_m = {spec_m, at_m, out_m, factor_m};
    if (n == KIND_TILES || m == KIND_TILES)
        nvfp4_quantize_launch(work->stream, dy, M, l->N, n == KIND_TILES ? &tiles_n : NULL, m == KIND_TILES ? &tiles_m : NULL, p->amax_dy ? amax : NULL,
                              work->quantizer_work);
    const MxSide mx_n = {spec_n, at_n, out_n}, mx_m = {spec_m, at_m, out_m};
    if (n == KIND_MX || m == KIND_MX) mx_sr_launch(work->stream, dy, M, l->N, n == KIND_MX ? &mx_n : NULL, m == KIND_MX ? &mx_m : NULL);
    if (n == KIND_FP8 && m == KIND_FP8 && p->fp8 && spec_n->format == spec_m->format) {
        fp8_quantize_launch(work->stream, spec_n->format, dy, M, l->N, amax, (uint8_t *)out_n, (uint8_t *)out_m, NULL, factor_n);
        CUDA_CHECK(cudaMemcpyAsync(factor_m, factor_n, sizeof *factor_m, cudaMemcpyDeviceToDevice, work->stream));
        return;
    }
    if (n == KIND_FP8) fp8_quantize_launch(work->stream, spec_n->format, dy, M, l->N, amax, p->fp8 ? (uint8_t *)out_n : NULL, NULL, p->fp8 ? NULL : out_n, factor_n);
    if (m == KIND_FP8) fp8_quantize_launch(work->stream, spec_m->format, dy, M, l->N, amax, NULL, p->fp8 ? (uint8_t *)out_m : NULL, p->fp8 ? NULL : out_m, factor_m);
}
// A backward operand B: W (rows N) for dgrad or X (rows M) for wgrad, quantized along its rows, into out. plain: the BF16 tensor; codes, scales: as the
// forward packed it.
FN void linear_make_again(const Linear *l, const LinearWork *work, int gemm, const bf16 *plain, const uint8_t *codes, const uint8_t *scales, int64_t rows, void *out) {
    const LinearPlan *p = l->plan;
    const OperandSpec *spec = &p->recipe->gemm[gemm].b;
    const EdenAddress at = linear_address(l, work, gemm, OPERAND_B);
    const int from_plain = p->from_plain[gemm == GEMM_WGRAD];
    const int64_t K = l->K;
    float *const factor = l->factor + (gemm == GEMM_WGRAD ? FACTOR_X_WGRAD : FACTOR_W_DGRAD), *const alpha = l->factor + FACTOR_ALPHA + gemm;
    const float *const source = l->factor + (gemm == GEMM_WGRAD ? FACTOR_X : FACTOR_W), *const amax = gemm == GEMM_WGRAD ? l->amax_x : l->amax_w;
    const Nvfp4Side tiles = {spec, at, (bf16 *)out, factor};
    const MxSide mx = {spec, at, (bf16 *)out};
    switch (p->kind[gemm][OPERAND_B]) {
    case KIND_EDEN:
        if (from_plain) eden_one_launch(work->stream, spec, plain, rows, K, 1, (bf16 *)out, at, work->quantizer_work, NULL);
        else eden_requant_launch(work->stream, spec, codes, scales, rows, K, (bf16 *)out, at, source, alpha, work->quantizer_work, NULL);
        break;
    case KIND_TILES:
        if (from_plain) nvfp4_quantize_launch(work->stream, plain, rows, K, NULL, &tiles, amax, work->quantizer_work);
        else nvfp4_requantize_launch(work->stream, codes, scales, rows, K, &tiles, work->quantizer_work);
        break;
    case KIND_MX:
        if (from_plain) mx_sr_launch(work->stream, plain, rows, K, NULL, &mx);
        else mx_requantize_launch(work->stream, codes, scales, rows, K, &mx);
        break;
    case KIND_FP8:
        fp8_quantize_launch(work->stream, spec->format, plain, rows, K, amax, NULL, p->fp8 ? (uint8_t *)out : NULL, p->fp8 ? NULL : (bf16 *)out, factor);
        break;
    default:                                               // KIND_AGAIN of a packed tensor
        if ((gemm == GEMM_WGRAD ? p->packed_x : p->packed_w) == MXFP4_BLOCK) mx_decode_launch(work->stream, codes, scales, rows, K, (bf16 *)out);
        else nvfp4_decode_launch(work->stream, codes, scales, rows, K, (bf16 *)out);
    }
}
// Whether making B wrote the GEMM's alpha: it does where A's tensor scale is in A's values.
FN int linear_backward_alpha_fused(const LinearPlan *p, int gemm) {
    return p->kind[gemm][OPERAND_A] == KIND_EDEN && p->kind[gemm][OPERAND_B] == KIND_EDEN && !p->from_plain[gemm == GEMM_WGRAD];
}
// W's operand of dgrad. Returns where it is.
FN const void *linear_weight_dgrad(Linear *l, const LinearWork *work) {
    const LinearPlan *p = l->plan;
    const OperandKind forward = p->kind[GEMM_FORWARD][OPERAND_B], own = p->kind[GEMM_DGRAD][OPERAND_B];
    if (own == KIND_PLAIN) return l->w;
    if (own == KIND_AGAIN && work->weights_kept && !(forward == KIND_FP8 && p->fp8)) return l->w_forward;
    if (l->dgrad_ready) return l->w_dgrad;
    linear_mark(work, FAMILY_EDEN_W, 2.6875, l->N * l->K);
    const OperandSpec *spec = &p->recipe->gemm[GEMM_FORWARD].b;
    if (own == KIND_AGAIN && forward == KIND_SQUARE)
        nvfp4_square_launch(work->stream, spec->rounding, l->w, l->N, l->K, l->amax_w, NULL, NULL, (bf16 *)l->w_dgrad, l->factor + FACTOR_W);
    else if (own == KIND_AGAIN && forward == KIND_FP8)
        fp8_quantize_launch(work->stream, spec->format, l->w, l->N, l->K, l->amax_w, NULL, p->fp8 ? (uint8_t *)l->w_dgrad : NULL,
                            p->fp8 ? NULL : (bf16 *)l->w_dgrad, l->factor + FACTOR_W);
    else if (own == KIND_FP8 && forward == KIND_ROWS && !p->from_plain[0]) {
        bf16 *const values = work->weights_kept ? (bf16 *)l->w_forward : (bf16 *)work->product;  // no product is waiting now
        if (!work->weights_kept) rows_quantize_launch(work->stream, l->w, l->N, l->K, NULL, values, l->w_rows, NULL);
        fp8_from_rows_launch(work->stream, p->recipe->gemm[GEMM_DGRAD].b.format, values, l->w_rows, l->N, l->K, NULL, p->fp8 ? (uint8_t *)l->w_dgrad : NULL,
                             p->fp8 ? NULL : (bf16 *)l->w_dgrad, l->factor + FACTOR_W_DGRAD, work->quantizer_work);
    } else linear_make_again(l, work, GEMM_DGRAD, l->w, l->w_codes, l->w_scales, l->N, l->w_dgrad);
    l->dgrad_ready = work->weights_kept;
    return l->w_dgrad;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Turned back and masked, as the rule asks: a float32 product (rows, K) -> dX, or dW (out NULL).
FN void linear_finish(const Linear *l, const LinearWork *work, int gemm, int64_t rows, bf16 *out, int accumulate) {
    const Recipe *r = l->plan->recipe;
    const OperandSpec *spec = recipe_turns_back(r, gemm) ? &r->gemm[GEMM_FORWARD].a : NULL;
    const uint32_t *mask = r->gemm[gemm].product == PRODUCT_CLIP_MASK ? (gemm == GEMM_DGRAD ? l->x_mask : l->w_mask) : NULL;
    if (r->gemm[gemm].product == PRODUCT_DGE) dge_finish_launch(work->stream, work->product, l->w, rows, l->K, l->dw, l->dw_bf16, accumulate);
    else product_turn_back_launch(work->stream, spec, linear_address(l, work, GEMM_FORWARD, OPERAND_A), work->product, rows, l->K, mask, out,
                                  out ? NULL : l->dw, l->dw_bf16, accumulate);
}
// dx (M,K) = dY W. Also leaves wgrad's operand of dY in work->dy_wgrad: linear_wgrad of the same layer comes next.
FN void linear_dgrad(Linear *l, const LinearWork *work, bf16 *dx, const bf16 *dy, int64_t M) {
    const LinearPlan *p = l->plan;
    if (p->native) { native_dgrad(l, work, dx, dy, M); return; }
    linear_make_gradient(l, work, dy, M);
    const void *w = linear_weight_dgrad(l, work);
    if (p->scaled[GEMM_DGRAD] && !linear_backward_alpha_fused(p, GEMM_DGRAD)) linear_alpha(l, work, GEMM_DGRAD);
    const void *a = plan_makes(p, GEMM_DGRAD, OPERAND_A) ? l->dy_dgrad : dy;
    linear_product(l, work, GEMM_DGRAD, M, p->float_product[GEMM_DGRAD] ? (void *)work->product : dx, a, w, 0);
    if (p->float_product[GEMM_DGRAD]) linear_finish(l, work, GEMM_DGRAD, M, dx, 0);
}
// dW (N,K), float32 or BF16, = dY^T X, added to what is there from the second micro-batch on. x (M,K): X itself, read where the plan keeps
// it; else X is what the forward kept. dY: what linear_dgrad left, or dy itself.
FN void linear_wgrad(Linear *l, const LinearWork *work, const bf16 *dy, const bf16 *x, int64_t M) {
    const LinearPlan *p = l->plan;
    if (p->native) { native_wgrad(l, work, M); return; }
    const OperandKind own = p->kind[GEMM_WGRAD][OPERAND_B];
    const void *b = own == KIND_PLAIN ? (const void *)x : work->x_wgrad;
    if (own == KIND_AGAIN && p->x8) b = l->x_codes;
    else if (own != KIND_PLAIN) {
        linear_mark(work, FAMILY_EDEN_X, 2.6875, M * l->K);
        linear_make_again(l, work, GEMM_WGRAD, x, l->x_codes, l->x_scales, M, work->x_wgrad);
    }
    if (p->scaled[GEMM_WGRAD] && !linear_backward_alpha_fused(p, GEMM_WGRAD)) linear_alpha(l, work, GEMM_WGRAD);
    const void *a = plan_makes(p, GEMM_WGRAD, OPERAND_A) ? work->dy_wgrad : dy;
    const int accumulate = work->micro > 0, via_product = p->float_product[GEMM_WGRAD];
    linear_product(l, work, GEMM_WGRAD, M, via_product ? (void *)work->product : l->dw, a, b, via_product ? 0 : accumulate);
    if (via_product) linear_finish(l, work, GEMM_WGRAD, l->N, NULL, accumulate);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory. take(bytes) gives device memory.

// What the forward of M rows keeps of X for backward besides X itself.
template <typename Take> static void linear_take_input(Linear *l, int64_t M, Take take) {
    const LinearPlan *p = l->plan;
    if (p->packed_x) {
        l->x_codes = (uint8_t *)take(M * l->K / 2);
        l->x_scales = (uint8_t *)take(p->native ? tiled_scale_bytes(M, l->K) : M * l->K / p->packed_x);
    }
    if (p->x8) l->x_codes = (uint8_t *)take(M * l->K * (p->fp8 ? 1 : 2));
    if (p->masks) l->x_mask = (uint32_t *)take(M * l->K / 8);
}
// What it keeps of W; with `operands`, its decoded operands too.
template <typename Take> static void linear_take_weight(Linear *l, int operands, Take take) {
    const LinearPlan *p = l->plan;
    if (p->packed_w) {
        l->w_codes = (uint8_t *)take(l->N * l->K / 2);
        l->w_scales = (uint8_t *)take(p->native ? tiled_scale_bytes(l->N, l->K) : l->N * l->K / p->packed_w);
    }
    if (p->masks) l->w_mask = (uint32_t *)take(l->N * l->K / 8);
    if (p->kind[GEMM_FORWARD][OPERAND_B] == KIND_ROWS) l->w_rows = (float *)take(l->N * 4);
    if (operands && !p->native && plan_makes(p, GEMM_FORWARD, OPERAND_B)) l->w_forward = take(l->N * l->K * 2);
    if (operands && p->makes_w_dgrad) l->w_dgrad = take(plan_operand_bytes(p, l->N * l->K));
}
// Bytes of quantizer_work for the tensors of a layer (N,K) on M rows.
FN int64_t linear_quantizer_bytes(const LinearPlan *p, int64_t M, int64_t N, int64_t K) {
    int64_t most = 0;
    const int64_t shapes[3][2] = {{M, N}, {M, K}, {N, K}};
    for (int g = 0; g < 3; g++) for (int o = 0; o < 2; o++) for (int s = 0; s < 3; s++) {
        const OperandKind k = p->kind[g][o];
        const int64_t bytes = k == KIND_EDEN ? eden_workspace_bytes(shapes[s][0], shapes[s][1]) : k == KIND_TILES ? nvfp4_workspace_bytes(shapes[s][0], shapes[s][1])
                            : k == KIND_ROWS ? clamp_workspace_bytes() : k == KIND_FP8 ? 256 : 0;
        if (bytes > most) most = bytes;
    }
    return most;
}

#endif
