// cpu/linear.h: a linear layer: three GEMMs whose operands the recipe quantizes.
//
//   forward  Y  = X  W^T     A = X    (M,K) along K     B = W    (N,K) along K
//   dgrad    dX = dY W       A = dY   (M,N) along N     B = W^T  (K,N) along N
//   wgrad    dW = dY^T X     A = dY^T (N,M) along M     B = X^T  (K,M) along M
//
// Nothing here knows a recipe by name: an operand is its OperandSpec. Operands are multiplied as the quantizers leave them
// (codes x block scale, exact in BF16); tensor scales and 1/rotation go into the GEMM's alpha, so that the product is the
// one that FP4 tensor cores form, up to the order of float32 accumulation.
#ifndef LLMC_CPU_LINEAR_H
#define LLMC_CPU_LINEAR_H

#include "gemm.h"
#include "quantize.h"

typedef struct {
    const Recipe *recipe;
    int layer, linear;             // its place in the addresses of random words
    int64_t N, K;                  // output and input features
    const float *w;                // (N,K)
    float *dw;                     // (N,K), added to
    float *x;                      // (M,K) input; the producer writes it here
    float *w_operand;              // (N,K) forward's operand W, found once a step; w itself if the recipe leaves it as it is
    float *x_operand;              // (M,K) forward's operand X, kept where backward starts from it; else NULL
    float w_factor, x_factor;      // what turns the operands into W and X
} Linear;

// What the layers of one micro-step share. a, b: work space for a GEMM's operands, linear_work() values each.
typedef struct {
    uint64_t seed;
    int64_t step;
    int rank, micro;
    float *a, *b;
} LinearWork;

FN int operand_is_plain(const OperandSpec *s) { return s->rounding == ROUND_NONE && s->rotation == 0; }
// Whether backward wants the forward's operand X rather than X.
FN int linear_keeps_x_operand(const Recipe *r) {
    return r->gemm[GEMM_WGRAD].b.source == FROM_FORWARD && !operand_is_plain(&r->gemm[GEMM_FORWARD].a);
}
FN int linear_rounds_w(const Recipe *r) { return !operand_is_plain(&r->gemm[GEMM_FORWARD].b); }
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
    *factor *= quantize_operand(out, x, rows, cols, along_rows, spec, &at);
    return out;
}
// 1/rotation: what the unnormalised transform of both operands has multiplied the product by. Errors: fatal, a row whose
// operands would be multiplied in different spaces.
FN float linear_unrotate(const Linear *l, int gemm) {
    const Recipe *r = l->recipe;
    const GemmSpec *g = &r->gemm[gemm];
    if (g->a.rotation != g->b.rotation)
        fatal("recipe %s, GEMM %d: rotations of %d and %d do not cancel; give both operands the same one", r->name, gemm, g->a.rotation,
              g->b.rotation);
    if (gemm == GEMM_FORWARD && g->a.rotation && (r->gemm[GEMM_DGRAD].b.source == FROM_FORWARD || r->gemm[GEMM_WGRAD].b.source == FROM_FORWARD))
        fatal("recipe %s: backward starts from the forward's operands, so the forward cannot rotate them", r->name);
    return g->a.rotation ? 1.0f / (float)g->a.rotation : 1.0f;
}

// W's operand of the forward GEMM. Once a step, before the first forward.
FN void linear_quantize_weight(Linear *l, const LinearWork *work) {
    l->w_factor = 1;
    if (linear_rounds_w(l->recipe))
        linear_operand(l, work, GEMM_FORWARD, OPERAND_B, l->w_operand, l->w, l->N, l->K, &l->w_factor);
}

// y (M,N) = x W^T + beta y. x is in l->x.
FN void linear_forward(Linear *l, float *y, int64_t M, float beta, const LinearWork *work) {
    l->x_factor = 1;
    float *out = l->x_operand ? l->x_operand : work->a;
    const float *x = linear_operand(l, work, GEMM_FORWARD, OPERAND_A, out, l->x, M, l->K, &l->x_factor);
    const float alpha = l->x_factor * l->w_factor * linear_unrotate(l, GEMM_FORWARD);
    gemm(0, 1, M, l->N, l->K, alpha, x, l->K, l->w_operand, l->K, beta, y, l->N);
}

// dx (M,K) = dy W, overwritten; dw += dy^T x. dy (M,N). M: the rows of the last linear_forward.
FN void linear_backward(Linear *l, float *dx, const float *dy, int64_t M, const LinearWork *work) {
    const Recipe *r = l->recipe;
    const int w_again = r->gemm[GEMM_DGRAD].b.source == FROM_FORWARD, x_again = l->x_operand != NULL;

    float alpha = linear_unrotate(l, GEMM_DGRAD) * (w_again ? l->w_factor : 1);
    const float *a = linear_operand(l, work, GEMM_DGRAD, OPERAND_A, work->a, dy, M, l->N, &alpha);
    const float *b = linear_operand(l, work, GEMM_DGRAD, OPERAND_B, work->b, w_again ? l->w_operand : l->w, l->N, l->K, &alpha);
    gemm(0, 0, M, l->K, l->N, alpha, a, l->N, b, l->K, 0, dx, l->K);

    alpha = linear_unrotate(l, GEMM_WGRAD) * (x_again ? l->x_factor : 1);
    a = linear_operand(l, work, GEMM_WGRAD, OPERAND_A, work->a, dy, M, l->N, &alpha);
    b = linear_operand(l, work, GEMM_WGRAD, OPERAND_B, work->b, x_again ? l->x_operand : l->x, M, l->K, &alpha);
    gemm(1, 0, l->N, l->K, M, alpha, a, l->N, b, l->K, 1, l->dw, l->K);
}

#endif
