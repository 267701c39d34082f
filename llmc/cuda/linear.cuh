// cuda/linear.cuh: a linear layer: three GEMMs whose operands the recipe quantizes.
//
//   forward  Y  = X  W^T     A = X    (M,K) along K     B = W    (N,K) along K
//   dgrad    dX = dY W       A = dY   (M,N) along N     B = W^T  (K,N) along N
//   wgrad    dW = dY^T X     A = dY^T (N,M) along M     B = X^T  (K,M) along M
//
// Plain recipes: BF16 tensors as they are. NVFP4 recipes: X and W are quantized for the forward and kept packed (4.5 bits a
// value); backward re-quantizes them along its own inner dimension. Here every operand is decoded to BF16 (exact) and multiplied by
// BF16 tensor cores; what stands behind an operand is codes and scales, so that a native FP4 product can take its place.
// Tensor scales and 1/128 of the rotation reach the GEMM as alpha in device memory.
#ifndef LLMC_CUDA_LINEAR_CUH
#define LLMC_CUDA_LINEAR_CUH

#include "../llama.h"
#include "gemm.cuh"
#include "profile.cuh"
#include "quantize.cuh"

typedef struct {
    int layer, linear;             // its place in the addresses of random words
    int64_t N, K;                  // output and input features
    const bf16 *w;                 // (N,K)
    void *dw;                      // (N,K) float32, or
    int dw_bf16;                   // BF16
    bf16 *x;                       // (M,K) where the producer writes the input; plain recipes need it again in wgrad
    uint8_t *x_codes, *x_scales;   // NVFP4: X_q, (M,K/2) and (M,K/16)
    uint8_t *w_codes, *w_scales;   // NVFP4: W_q, (N,K/2) and (N,K/16)
    bf16 *w_forward, *w_dgrad;     // NVFP4: W's decoded operands, (N,K) each; shared by the layers unless work->weights_kept
    bf16 *dy_dgrad;                // NVFP4: (M,N) dY rotated along N; shared memory
    int forward_ready, dgrad_ready;  // those operands belong to the weights, and the signs, of this step
    float *amax_x, *amax_w;        // device scalars: written by the producers of X and W
    float *st_x, *st_w;            // device scalars: tensor scales of X_q and W_q
    float *alpha;                  // (3) device, by GEMM
} Linear;

// What the layers share.
typedef struct {
    Gemm *gemm;
    const Recipe *recipe;
    int quantized;                 // an NVFP4 recipe
    int weights_kept;              // every layer has its own w_forward and w_dgrad: W is quantized once a step
    cudaStream_t stream;
    Profile *profile;
    uint64_t seed;
    uint32_t step;
    int rank, micro;
    bf16 *x_forward;               // NVFP4: (M,K) decoded X
    bf16 *dy_wgrad;                // NVFP4: (M,N) dY rotated along M
    bf16 *x_wgrad;                 // NVFP4: (M,K) X_q rotated along M; may lie on dy_dgrad, which has had its use by then
    void *eden_work;
} LinearWork;

FN int operand_is_plain(const OperandSpec *s) { return s->format == FORMAT_FLOAT && s->rotation == 0; }
FN int operand_is_forward_nvfp4(const OperandSpec *s) {
    return s->format == FORMAT_NVFP4 && s->block == BLOCK_1X16 && s->rotation == 0 && (s->rounding == ROUND_RTN || s->rounding == ROUND_FOUR_SIX);
}
FN int operand_is_eden(const OperandSpec *s, OperandSource source) {
    return s->format == FORMAT_NVFP4 && s->block == BLOCK_1X16 && s->rotation == 128 && s->rounding == ROUND_MS_EDEN_POSTHOC && s->source == source;
}
// Whether the recipe is an NVFP4 one; fatal when an operand asks for what no kernel here does.
FN int linear_recipe_quantized(const Recipe *r) {
    int plain = 1, nvfp4 = operand_is_forward_nvfp4(&r->gemm[GEMM_FORWARD].a) && operand_is_forward_nvfp4(&r->gemm[GEMM_FORWARD].b);
    for (int g = 0; g < 3; g++) {
        plain &= operand_is_plain(&r->gemm[g].a) && operand_is_plain(&r->gemm[g].b);
        if (g != GEMM_FORWARD) nvfp4 &= operand_is_eden(&r->gemm[g].a, FROM_ORIGINAL) && operand_is_eden(&r->gemm[g].b, FROM_FORWARD);
    }
    if (!plain && !nvfp4) fatal("--recipe %s: one of its operands has no kernel in the GPU backend; train it with the CPU program", r->name);
    return nvfp4;
}

FN GemmShape linear_shape(const Linear *l, int gemm, int64_t M, int device_alpha) {
    GemmShape s = {M, l->N, l->K, 0, 1, 0, device_alpha};
    if (gemm == GEMM_DGRAD) { s.n = l->K; s.k = l->N; s.b_transposed = 0; }
    if (gemm == GEMM_WGRAD) { s.m = l->N; s.n = l->K; s.k = M; s.a_transposed = 1; s.b_transposed = 0; s.d_float32 = !l->dw_bf16; }
    return s;
}
FN EdenAddress linear_address(const Linear *l, const LinearWork *work, int gemm, int operand) {
    const int is_weight = gemm == GEMM_DGRAD && operand == OPERAND_B;  // the same for every rank and micro-batch
    EdenAddress a = {work->seed, work->step, l->layer, l->linear, gemm, operand, is_weight ? 0 : work->rank, is_weight ? 0 : work->micro};
    return a;
}
FN void linear_product(const Linear *l, const LinearWork *work, int gemm, int64_t M, void *d, const bf16 *a, const bf16 *b, int accumulate) {
    const GemmPlan *p = gemm_plan(work->gemm, linear_shape(l, gemm, M, work->quantized));
    profile_mark(work->profile, (Family)(FAMILY_GEMM_FORWARD + gemm), 0, p->ms, work->stream);
    gemm_run(work->gemm, p, d, a, b, work->quantized ? &l->alpha[gemm] : NULL, accumulate, work->stream);
}

// W_q and the forward's operand of it. amax_w is known.
FN void linear_quantize_weight(Linear *l, const LinearWork *work) {
    profile_mark(work->profile, FAMILY_QUANTIZE_W, 4.5625 * (double)(l->N * l->K), 0, work->stream);
    quantize_forward_launch(work->stream, work->recipe->gemm[GEMM_FORWARD].b.rounding, l->w, l->N, l->K, l->amax_w, l->w_codes, l->w_scales,
                            l->w_forward, l->st_w, NULL, NULL);
    l->forward_ready = work->weights_kept;
}
// X_q and the forward's operand of it, from l->x and *amax_x; also the forward GEMM's alpha.
FN void linear_quantize_input(Linear *l, const LinearWork *work, int64_t M) {
    profile_mark(work->profile, FAMILY_QUANTIZE_X, 4.5625 * (double)(M * l->K), 0, work->stream);
    quantize_forward_launch(work->stream, work->recipe->gemm[GEMM_FORWARD].a.rounding, l->x, M, l->K, l->amax_x, l->x_codes, l->x_scales,
                            work->x_forward, l->st_x, l->st_w, &l->alpha[GEMM_FORWARD]);
}
// y (M,N) = X W^T. X (M,K) is in l->x and, under an NVFP4 recipe, its largest magnitude in *amax_x.
FN void linear_forward(Linear *l, const LinearWork *work, bf16 *y, int64_t M) {
    if (!work->quantized) { linear_product(l, work, GEMM_FORWARD, M, y, l->x, l->w, 0); return; }
    if (!l->forward_ready) linear_quantize_weight(l, work);
    linear_quantize_input(l, work, M);
    linear_product(l, work, GEMM_FORWARD, M, y, work->x_forward, l->w_forward, 0);
}
// dx (M,K) = dY W. Also leaves wgrad's operand of dY in work->dy_wgrad: linear_wgrad of the same layer comes next.
FN void linear_dgrad(Linear *l, const LinearWork *work, bf16 *dx, const bf16 *dy, int64_t M) {
    if (!work->quantized) { linear_product(l, work, GEMM_DGRAD, M, dx, dy, l->w, 0); return; }
    profile_mark(work->profile, FAMILY_EDEN_DY, 6.25 * (double)(M * l->N), 0, work->stream);
    eden_both_launch(work->stream, dy, M, l->N, l->dy_dgrad, work->dy_wgrad, linear_address(l, work, GEMM_DGRAD, OPERAND_A),
                     linear_address(l, work, GEMM_WGRAD, OPERAND_A), work->eden_work, NULL);
    if (!l->dgrad_ready) {
        profile_mark(work->profile, FAMILY_EDEN_W, 2.6875 * (double)(l->N * l->K), 0, work->stream);
        eden_requant_launch(work->stream, l->w_codes, l->w_scales, l->N, l->K, l->w_dgrad, linear_address(l, work, GEMM_DGRAD, OPERAND_B),
                            l->st_w, &l->alpha[GEMM_DGRAD], work->eden_work, NULL);
        l->dgrad_ready = work->weights_kept;
    }
    linear_product(l, work, GEMM_DGRAD, M, dx, l->dy_dgrad, l->w_dgrad, 0);
}
// dW (N,K), float32 or BF16, = dY^T X, added to what is there from the second micro-batch on. Plain recipes multiply dy and x (M,K);
// NVFP4 recipes what linear_dgrad left and X_q.
FN void linear_wgrad(Linear *l, const LinearWork *work, const bf16 *dy, const bf16 *x, int64_t M) {
    if (!work->quantized) { linear_product(l, work, GEMM_WGRAD, M, l->dw, dy, x, work->micro > 0); return; }
    profile_mark(work->profile, FAMILY_EDEN_X, 2.6875 * (double)(M * l->K), 0, work->stream);
    eden_requant_launch(work->stream, l->x_codes, l->x_scales, M, l->K, work->x_wgrad, linear_address(l, work, GEMM_WGRAD, OPERAND_B),
                        l->st_x, &l->alpha[GEMM_WGRAD], work->eden_work, NULL);
    linear_product(l, work, GEMM_WGRAD, M, l->dw, work->dy_wgrad, work->x_wgrad, work->micro > 0);
}

#endif
