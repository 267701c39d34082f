// cuda/measure.cuh: --quant-stats in a micro-step: each operand of each linear against what it was rounded from, and both gradients
// against those of the layer without rounding, dY W and dY^T X (stats.cuh, cpu/stats.h).
//
// Hooks in step.cuh call measure_forward(), measure_dgrad() and measure_wgrad() right after the products they are about, while the
// tensors are where the products found them. Off (m->measuring 0) they are a branch each. An operand that is a BF16 tensor as it is
// has nothing to measure here.
#ifndef LLMC_CUDA_MEASURE_CUH
#define LLMC_CUDA_MEASURE_CUH

#include "memory.cuh"

FN void mark(Llama *m, Family family, double bytes) { profile_mark(m->profile, family, bytes, 0, m->stream); }
FN double *measure_place(const Llama *m, const Linear *l) { return m->measured + (int64_t)(l->layer * LINEARS_PER_LAYER + l->linear) * MEASURED_VALUES; }
// x (rows, cols): what the operand was rounded from; factor: that it has besides, NULL: 1.
FN void measure_operand(const Llama *m, const Linear *l, int gemm, int operand, const bf16 *x, const float *row_factor, const float *factor, int64_t rows, int64_t cols) {
    const OperandKind kind = l->plan->kind[gemm][operand];
    if (kind == KIND_PLAIN || kind == KIND_AGAIN) return;
    const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    stats_operand_launch(m->stream, operand_spec(l->plan->recipe, gemm, operand), linear_address(l, &m->work, gemm, operand), x, row_factor, factor, rows, cols,
                         along_rows, m->measure_work, measure_place(m, l) + (gemm * 2 + operand) * STATS_OPERAND_VALUES);
}
// Backward's operand B: from the BF16 tensor, or from what the forward multiplied, which is decoded once more.
FN void measure_again(const Llama *m, const Linear *l, int gemm, const bf16 *plain, const uint8_t *codes, const uint8_t *scales, int64_t rows) {
    const LinearPlan *p = l->plan;
    const int is_x = gemm == GEMM_WGRAD, packed = is_x ? p->packed_x : p->packed_w;
    const OperandKind kind = p->kind[gemm][OPERAND_B];
    if (kind == KIND_PLAIN || kind == KIND_AGAIN) return;
    if (p->from_plain[is_x]) { measure_operand(m, l, gemm, OPERAND_B, plain, NULL, NULL, rows, l->K); return; }
    bf16 *const values = (bf16 *)m->measure_exact;
    const float *row_factor = NULL;
    if (packed == MXFP4_BLOCK) mx_decode_launch(m->stream, codes, scales, rows, l->K, values);
    else if (p->native) native_decode_launch(m->stream, native_operand(l, &m->work, GEMM_FORWARD, is_x ? OPERAND_A : OPERAND_B, rows), rows, l->K, values);
    else if (packed == NVFP4_BLOCK) nvfp4_decode_launch(m->stream, codes, scales, rows, l->K, values);
    else if (p->kind[GEMM_FORWARD][OPERAND_B] == KIND_ROWS && !is_x) {
        rows_quantize_launch(m->stream, l->w, l->N, l->K, NULL, values, l->w_rows, NULL);
        row_factor = l->w_rows;
    } else fatal("--quant-stats: the forward's operand of recipe %s cannot be made again: this is a bug", p->recipe->name);
    measure_operand(m, l, gemm, OPERAND_B, values, row_factor, linear_factor(l, GEMM_FORWARD, is_x ? OPERAND_A : OPERAND_B), rows, l->K);
}
// got, BF16 or float32, against dY W (gemm GEMM_DGRAD) or dY^T X.
FN void measure_gradient(Llama *m, const Linear *l, int gemm, const void *got, int got_bf16, const bf16 *dy, const bf16 *b, int64_t M) {
    GemmShape s;
    memset(&s, 0, sizeof s);
    s.m = M; s.n = l->K; s.k = l->N; s.d_float32 = 1;
    if (gemm == GEMM_WGRAD) { s.m = l->N; s.k = M; s.a_transposed = 1; }
    gemm_run(&m->gemm, gemm_plan(&m->gemm, s), m->measure_exact, dy, b, NULL, 0, m->stream);
    stats_gradient_launch(m->stream, got, got_bf16, m->measure_exact, 0, NULL, 0, s.m * s.n, m->measure_work,
                          measure_place(m, l) + 6 * STATS_OPERAND_VALUES + (gemm == GEMM_WGRAD) * STATS_GRADIENT_VALUES);
}

FN void measure_forward(Llama *m, const Linear *l, int64_t M) {
    if (!m->measuring) return;
    mark(m, FAMILY_OTHER, 0);
    measure_operand(m, l, GEMM_FORWARD, OPERAND_A, l->x, NULL, NULL, M, l->K);
    measure_operand(m, l, GEMM_FORWARD, OPERAND_B, l->w, NULL, NULL, l->N, l->K);
}
FN void measure_dgrad(Llama *m, const Linear *l, const bf16 *dx, const bf16 *dy, int64_t M) {
    if (!m->measuring) return;
    mark(m, FAMILY_OTHER, 0);
    measure_operand(m, l, GEMM_DGRAD, OPERAND_A, dy, NULL, NULL, M, l->N);
    measure_again(m, l, GEMM_DGRAD, l->w, l->w_codes, l->w_scales, l->N);
    measure_gradient(m, l, GEMM_DGRAD, dx, 1, dy, l->w, M);
}
// The first micro-batch is the one measured: dW holds its gradient alone.
FN void measure_wgrad(Llama *m, const Linear *l, const bf16 *dy, const bf16 *x, int64_t M) {
    if (!m->measuring) return;
    mark(m, FAMILY_OTHER, 0);
    measure_operand(m, l, GEMM_WGRAD, OPERAND_A, dy, NULL, NULL, M, l->N);
    measure_again(m, l, GEMM_WGRAD, x, l->x_codes, l->x_scales, M);
    measure_gradient(m, l, GEMM_WGRAD, l->dw, l->dw_bf16, dy, x, M);
}

// ---------------------------------------------------------------------------------------------------------------------
// llama.h

FN void llama_stats_begin(Llama *m) {
    if (!m->measured) fatal("measurements were begun in a model that has no memory for them: this is a bug");
    m->measuring = 1;
}
FN const LinearStats *llama_stats_end(Llama *m) {
    const int64_t linears = (int64_t)m->options.config.layers * LINEARS_PER_LAYER;
    if (!m->stats) m->stats = (LinearStats *)xcalloc((size_t)linears, sizeof *m->stats);
    double *values = (double *)xcalloc((size_t)linears * MEASURED_VALUES, sizeof *values);
    CUDA_CHECK(cudaMemcpyAsync(values, m->measured, (size_t)linears * MEASURED_VALUES * sizeof *values, cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    for (int64_t i = 0; i < linears; i++) {
        const double *v = values + i * MEASURED_VALUES;
        const LinearPlan *p = layer_plan(m, (int)(i / LINEARS_PER_LAYER));
        LinearStats *s = &m->stats[i];
        memset(s, 0, sizeof *s);
        for (int o = 0; o < 6; o++) {
            const OperandKind kind = p->kind[o / 2][o % 2];
            if (kind != KIND_PLAIN && kind != KIND_AGAIN) stats_operand_read(&s->operand[o / 2][o % 2], v + o * STATS_OPERAND_VALUES);
        }
        stats_gradient_read(&s->dx, v + 6 * STATS_OPERAND_VALUES);
        stats_gradient_read(&s->dw, v + 6 * STATS_OPERAND_VALUES + STATS_GRADIENT_VALUES);
    }
    free(values);
    return m->stats;
}

#endif
