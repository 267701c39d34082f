// cpu/linear.h: a linear layer: three GEMMs whose operands the recipe quantizes.
//
//   forward  Y  = X  W^T     A = X    (M,K) along K     B = W    (N,K) along K
//   dgrad    dX = dY W       A = dY   (M,N) along N     B = W^T  (K,N) along N
//   wgrad    dW = dY^T X     A = dY^T (N,M) along M     B = X^T  (K,M) along M
//
// Nothing here knows a recipe by name: an operand is its OperandSpec, and a product its ProductRule. Operands are multiplied as
// the quantizers leave them (codes x block scale, exact in BF16); tensor scales and 1/rotation go into the GEMM's alpha, so that
// the product is the one that FP4 tensor cores form, up to the order of float32 accumulation.
#ifndef LLMC_CPU_LINEAR_H
#define LLMC_CPU_LINEAR_H

#include "gemm.h"
#include "quantize.h"
#include "stats.h"

typedef struct {
    const Recipe *recipe;
    int layer, linear;             // its place in the addresses of random words
    int64_t N, K;                  // output and input features
    const float *w;                // (N,K)
    float *dw;                     // (N,K), added to
    float *x;                      // (M,K) input; the producer writes it here
    float *w_operand;              // (N,K) forward's operand W, found once a step; w itself if the recipe leaves it as it is
    float *x_operand;              // (M,K) forward's operand X, kept where backward starts from it; else NULL
    uint8_t *w_mask, *x_mask;      // 1 where the forward did not clip W (N,K), X (M,K): for PRODUCT_CLIP_MASK, else NULL
    float w_factor, x_factor;      // what turns the operands into W and X
    LinearProbe *probe;            // not NULL: this micro-batch is measured
} Linear;

// What the layers of one micro-step share. a, b: work space for a GEMM's operands, linear_work() values each; product: N K values
// for a recipe whose linear_works_on_dw(), else NULL.
typedef struct {
    uint64_t seed;
    int64_t step;
    int rank, micro;
    float *a, *b, *product;
} LinearWork;

FN int operand_is_plain(const OperandSpec *s) { return s->rounding == ROUND_NONE && s->rotation == 0; }
// Whether backward wants the forward's operand X rather than X.
FN int linear_keeps_x_operand(const Recipe *r) {
    return r->gemm[GEMM_WGRAD].b.source == FROM_FORWARD && !operand_is_plain(&r->gemm[GEMM_FORWARD].a);
}
FN int linear_rounds_w(const Recipe *r) { return !operand_is_plain(&r->gemm[GEMM_FORWARD].b); }
FN int linear_masks(const Recipe *r, int gemm) { return r->gemm[gemm].product == PRODUCT_CLIP_MASK; }
// Whether wgrad's product is something else than dW.
FN int linear_works_on_dw(const Recipe *r) { return r->gemm[GEMM_WGRAD].product != PRODUCT_PLAIN || recipe_turns_back(r, GEMM_WGRAD); }
// Largest number of values in an operand of an (N,K) layer on M rows.
FN int64_t linear_work(int64_t M, int64_t N, int64_t K) {
    const int64_t data = M * (N > K ? N : K), weight = N * K;
    return data > weight ? data : weight;
}

// One operand of one GEMM, multiplied by *factor into alpha: x (rows, cols) itself if the recipe leaves it, else quantized
// into out.
FN const float *linear_operand(const Linear *l, const LinearWork *work, int gemm, int operand, float *out, const float *x,
                               int64_t rows, int64_t cols, float *factor) {
    const GemmSpec *g = &l->recipe->gemm[gemm];
    const OperandSpec *spec = operand == OPERAND_A ? &g->a : &g->b;
    if (operand_is_plain(spec)) return x;
    const int is_weight = operand == OPERAND_B && gemm != GEMM_WGRAD;  // the same for every rank and micro-batch
    QuantizeAddress at;
    at.seed = work->seed; at.step = work->step;
    at.layer = l->layer; at.linear = l->linear; at.gemm = gemm; at.operand = operand;
    at.rank = is_weight ? 0 : work->rank;
    at.micro = is_weight ? 0 : work->micro;
    const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    uint8_t *mask = gemm != GEMM_FORWARD ? NULL : operand == OPERAND_A ? l->x_mask : l->w_mask;
    const float own = quantize_operand_masked(out, mask, x, rows, cols, along_rows, spec, &at);
    if (l->probe) {
        const double x_factor = spec->source == FROM_ORIGINAL ? 1 : is_weight ? l->w_factor : l->x_factor;
        stats_operand(&l->probe->stats.operand[gemm][operand], x, x_factor, out, own, rows, cols, along_rows, spec, &at);
    }
    *factor *= own;
    return out;
}
// 1/rotation: what the unnormalised transform of both operands has multiplied the product by.
FN float linear_unrotate(const Linear *l, int gemm) {
    const OperandSpec *a = &l->recipe->gemm[gemm].a;
    return a->rotation && !rotation_is_normalised(a) ? 1.0f / (float)a->rotation : 1.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is done to products

// p (rows, K) in the space that the forward rotated its operands into -> the gradient of what it rotated: the transposed rotation
// s * H(p) of every run, in place. Of dY W_r the forward's transform has multiplied every run by rotation^1/2 where it is not
// normalised, and H does so again.
FN void linear_turn_back(const Linear *l, const LinearWork *work, float *p, int64_t rows) {
    const OperandSpec *spec = &l->recipe->gemm[GEMM_FORWARD].a;
    const int d = spec->rotation;
    const float scale = rotation_is_normalised(spec) ? rotation_norm(d) : 1.0f / (float)d;
    uint32_t bits[4] = {0, 0, 0, 0};
    if (spec->signs == SIGNS_RANDOM) rotation_bits(work->seed, (uint32_t)work->step, l->layer, l->linear, GEMM_FORWARD, bits);
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < rows * l->K / d; run++) {
        float *y = p + run * d;
        hadamard(y, d);
        for (int i = 0; i < d; i++) y[i] = f32_from_bits(f32_bits(f32_mul(y[i], scale)) ^ rotation_sign(bits, i));
    }
}
FN void linear_mask(float *p, const uint8_t *mask, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) p[i] *= (float)mask[i];        // a NaN stays
}
// p (N,K) = dY^T X times the slope of W's smooth rounding, at W over its row's scale.
FN void linear_dge(const Linear *l, float *p) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < l->N; n++) {
        const float *w = l->w + n * l->K;
        float amax = 0.0f;
        for (int64_t k = 0; k < l->K; k++) amax = f32_max(f32_abs(w[k]), amax);
        const float inv = plain_scale(amax, E2M1_MAX).inv;
        for (int64_t k = 0; k < l->K; k++) p[n * l->K + k] *= dge_slope(f32_mul(w[k], inv));
    }
}
// A backward product p (rows, K) -> dX or what wgrad adds to dW, in place.
FN void linear_finish(const Linear *l, const LinearWork *work, int gemm, float *p, int64_t rows) {
    const ProductRule rule = l->recipe->gemm[gemm].product;
    if (rule == PRODUCT_CLIP_MASK) linear_mask(p, gemm == GEMM_DGRAD ? l->x_mask : l->w_mask, rows * l->K);
    if (recipe_turns_back(l->recipe, gemm)) linear_turn_back(l, work, p, rows);
    if (rule == PRODUCT_DGE) linear_dge(l, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer

// W's operand of the forward GEMM. Once a step, before the first forward.
FN void linear_quantize_weight(Linear *l, const LinearWork *work) {
    l->w_factor = 1;
    if (linear_rounds_w(l->recipe))
        linear_operand(l, work, GEMM_FORWARD, OPERAND_B, l->w_operand, l->w, l->N, l->K, &l->w_factor);
}

// y (M,N) = x W^T + beta y. x is in l->x.
FN void linear_forward(Linear *l, float *y, int64_t M, float beta, const LinearWork *work) {
    l->x_factor = 1;
    if (l->probe) memcpy(l->probe->x, l->x, (size_t)(M * l->K) * sizeof(float));
    float *out = l->x_operand ? l->x_operand : work->a;
    const float *x = linear_operand(l, work, GEMM_FORWARD, OPERAND_A, out, l->x, M, l->K, &l->x_factor);
    const float alpha = l->x_factor * l->w_factor * linear_unrotate(l, GEMM_FORWARD);
    gemm(0, 1, M, l->N, l->K, alpha, x, l->K, l->w_operand, l->K, beta, y, l->N);
    if (l->recipe->gemm[GEMM_FORWARD].product == PRODUCT_ADD_OUTLIERS) {
        clamp_residual(work->a, l->x, M * l->K, l->recipe->gemm[GEMM_FORWARD].a.clamp_percent);
        gemm(0, 1, M, l->N, l->K, l->w_factor, work->a, l->K, l->w_operand, l->K, 1, y, l->N);
    }
}

// dx (M,K) = dy W, overwritten. dy (M,N). M: the rows of the last linear_forward.
FN void linear_dgrad(Linear *l, float *dx, const float *dy, int64_t M, const LinearWork *work) {
    const int w_again = l->recipe->gemm[GEMM_DGRAD].b.source == FROM_FORWARD;
    float alpha = linear_unrotate(l, GEMM_DGRAD) * (w_again ? l->w_factor : 1);
    const float *a = linear_operand(l, work, GEMM_DGRAD, OPERAND_A, work->a, dy, M, l->N, &alpha);
    const float *b = linear_operand(l, work, GEMM_DGRAD, OPERAND_B, work->b, w_again ? l->w_operand : l->w, l->N, l->K, &alpha);
    gemm(0, 0, M, l->K, l->N, alpha, a, l->N, b, l->K, 0, dx, l->K);
    linear_finish(l, work, GEMM_DGRAD, dx, M);
}
// dw += dy^T x.
FN void linear_wgrad(Linear *l, const float *dy, int64_t M, const LinearWork *work) {
    const int x_again = l->x_operand != NULL;
    float alpha = linear_unrotate(l, GEMM_WGRAD) * (x_again ? l->x_factor : 1);
    const float *a = linear_operand(l, work, GEMM_WGRAD, OPERAND_A, work->a, dy, M, l->N, &alpha);
    const float *b = linear_operand(l, work, GEMM_WGRAD, OPERAND_B, work->b, x_again ? l->x_operand : l->x, M, l->K, &alpha);
    if (!linear_works_on_dw(l->recipe)) { gemm(1, 0, l->N, l->K, M, alpha, a, l->N, b, l->K, 1, l->dw, l->K); return; }
    gemm(1, 0, l->N, l->K, M, alpha, a, l->N, b, l->K, 0, work->product, l->K);
    linear_finish(l, work, GEMM_WGRAD, work->product, l->N);
    for (int64_t i = 0; i < l->N * l->K; i++) l->dw[i] += work->product[i];
}
// Both gradients against those of the layer without rounding, dy W and dy^T x.
FN void linear_measure(const Linear *l, const float *dx, const float *dw_before, const float *dy, int64_t M) {
    const int64_t weights = l->N * l->K, inputs = M * l->K;
    float *exact = (float *)xcalloc((size_t)(weights > inputs ? weights : inputs), sizeof(float));
    float *dw = (float *)xcalloc((size_t)weights, sizeof(float));
    gemm(0, 0, M, l->K, l->N, 1, dy, l->N, l->w, l->K, 0, exact, l->K);
    stats_gradient(&l->probe->stats.dx, dx, exact, inputs);
    gemm(1, 0, l->N, l->K, M, 1, dy, l->N, l->probe->x, l->K, 0, exact, l->K);
    for (int64_t i = 0; i < weights; i++) dw[i] = l->dw[i] - dw_before[i];
    stats_gradient(&l->probe->stats.dw, dw, exact, weights);
    free(exact); free(dw);
}
// dx (M,K) = dy W, overwritten; dw += dy^T x. dy (M,N). M: the rows of the last linear_forward.
FN void linear_backward(Linear *l, float *dx, const float *dy, int64_t M, const LinearWork *work) {
    float *before = NULL;
    if (l->probe) {
        before = (float *)xcalloc((size_t)(l->N * l->K), sizeof(float));
        memcpy(before, l->dw, (size_t)(l->N * l->K) * sizeof(float));
    }
    linear_dgrad(l, dx, dy, M, work);
    linear_wgrad(l, dy, M, work);
    if (l->probe) linear_measure(l, dx, before, dy, M);
    free(before);
}

#endif
