// layer.h: what a single linear layer needs around it, for tests and benchmarks that run one outside a model.
#ifndef BENCH_LAYER_H
#define BENCH_LAYER_H

#include "llmc/cpu/linear.h"

// l: recipe, N, K, w and x are set. Allocates what the recipe needs for M rows; to be freed by layer_buffers_free().
FN void layer_buffers(Linear *l, LinearWork *work, int64_t M) {
    const size_t weights = (size_t)(l->N * l->K), inputs = (size_t)(M * l->K), operand = (size_t)linear_work(M, l->N, l->K);
    l->w_operand = linear_rounds_w(l->recipe) ? (float *)xcalloc(weights, sizeof(float)) : (float *)l->w;
    l->x_operand = linear_keeps_x_operand(l->recipe) ? (float *)xcalloc(inputs, sizeof(float)) : NULL;
    l->w_mask = linear_masks(l->recipe, GEMM_WGRAD) ? (uint8_t *)xcalloc(weights, 1) : NULL;
    l->x_mask = linear_masks(l->recipe, GEMM_DGRAD) ? (uint8_t *)xcalloc(inputs, 1) : NULL;
    work->product = linear_works_on_dw(l->recipe) ? (float *)xcalloc(weights, sizeof(float)) : NULL;
    work->a = (float *)xcalloc(operand, sizeof(float));
    work->b = (float *)xcalloc(operand, sizeof(float));
}
FN void layer_buffers_free(Linear *l, LinearWork *work) {
    if (l->w_operand != l->w) free(l->w_operand);
    free(l->x_operand); free(l->w_mask); free(l->x_mask);
    free(work->product); free(work->a); free(work->b);
}

#endif
