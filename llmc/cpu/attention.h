// cpu/attention.h: causal softmax attention with grouped KV heads, forward and backward.
//
// qkv (B*T, stride = (heads + 2 kv_heads) head_dim): a row holds the heads of q, then k, then v, rotary already applied.
// Query head h reads KV head h / (heads/kv_heads). A task is one KV head of one sequence with the query heads that read it,
// walked in blocks of queries, so no T x T matrix exists and no two tasks write the same values.
#ifndef LLMC_CPU_ATTENTION_H
#define LLMC_CPU_ATTENTION_H

#include "gemm.h"
#include "ops.h"

#define QUERY_BLOCK 64

typedef struct { int64_t B, T; int heads, kv_heads, head_dim; } AttentionShape;

FN int64_t attention_stride(const AttentionShape *s) { return (int64_t)(s->heads + 2 * s->kv_heads) * s->head_dim; }
// Floats of work space for `threads` threads: scores and their gradients of one block of queries each.
FN int64_t attention_work(int64_t T, int threads) { return (int64_t)threads * 2 * QUERY_BLOCK * T; }

// Where a head of a sequence begins in a row of qkv.
FN int64_t attention_q(const AttentionShape *s, int64_t b, int h) { return b * s->T * attention_stride(s) + (int64_t)h * s->head_dim; }
FN int64_t attention_k(const AttentionShape *s, int64_t b, int g) { return attention_q(s, b, s->heads + g); }
FN int64_t attention_v(const AttentionShape *s, int64_t b, int g) { return attention_q(s, b, s->heads + s->kv_heads + g); }

// One block: rows queries from position `first`, keys 0 .. first+rows. p (rows, keys) becomes softmax(scale q k^T), zero
// above the diagonal; lse (rows) = log sum exp of the scores.
FN void attention_softmax(float *p, float *lse, int64_t first, int64_t rows, int64_t keys) {
    for (int64_t i = 0; i < rows; i++) {
        float *x = p + i * keys, max = x[0], sum = 0;
        const int64_t n = first + i + 1;
#pragma omp simd reduction(max : max)
        for (int64_t j = 0; j < n; j++) max = x[j] > max ? x[j] : max;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) { x[j] = f32_exp(x[j] - max); sum += x[j]; }
        const float inverse = 1.0f / sum;
        for (int64_t j = 0; j < n; j++) x[j] *= inverse;
        memset(x + n, 0, (size_t)(keys - n) * sizeof(float));
        lse[i] = max + logf(sum);
    }
}

// out (B*T, heads*head_dim); lse (B, heads, T) is kept for backward.
FN void attention_forward(float *out, float *lse, const float *qkv, const AttentionShape *s, float *work, int threads) {
    const int64_t stride = attention_stride(s), T = s->T, hd = s->head_dim, width = s->heads * hd;
    const int group = s->heads / s->kv_heads;
    const float scale = 1.0f / sqrtf((float)hd);
    gemm_prepare();
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < s->B * s->kv_heads; task++) {
        const int64_t b = task / s->kv_heads;
        const int g = (int)(task % s->kv_heads);
        const float *k = qkv + attention_k(s, b, g), *v = qkv + attention_v(s, b, g);
        float *p = work + (int64_t)thread_index() * 2 * QUERY_BLOCK * T;
        for (int h = g * group; h < (g + 1) * group; h++) {
            const float *q = qkv + attention_q(s, b, h);
            for (int64_t first = 0; first < T; first += QUERY_BLOCK) {
                const int64_t rows = T - first < QUERY_BLOCK ? T - first : QUERY_BLOCK, keys = first + rows;
                gemm_serial(0, 1, rows, keys, hd, scale, q + first * stride, stride, k, stride, 0, p, keys);
                attention_softmax(p, lse + (b * s->heads + h) * T + first, first, rows, keys);
                gemm_serial(0, 0, rows, hd, keys, 1, p, keys, v, stride, 0, out + (b * T + first) * width + h * hd, width);
            }
        }
    }
}

// One block of backward, rows queries from `first`: scores p (rows, keys) -> probabilities, and their gradients
// dp -> gradients of the scores, ds = p (dp - <p, dp>) scale.
FN void attention_softmax_backward(float *p, float *dp, const float *lse, float scale, int64_t first, int64_t rows, int64_t keys) {
    for (int64_t i = 0; i < rows; i++) {
        float *x = p + i * keys, *dx = dp + i * keys, dot = 0;
        const int64_t n = first + i + 1;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < n; j++) { x[j] = f32_exp(x[j] - lse[i]); dot += x[j] * dx[j]; }
        for (int64_t j = 0; j < n; j++) dx[j] = x[j] * (dx[j] - dot) * scale;
        memset(x + n, 0, (size_t)(keys - n) * sizeof(float));
        memset(dx + n, 0, (size_t)(keys - n) * sizeof(float));
    }
}

// dqkv (B*T, stride) is overwritten with the gradient of qkv; dout (B*T, heads*head_dim).
FN void attention_backward(float *dqkv, const float *dout, const float *qkv, const float *lse, const AttentionShape *s, float *work,
                           int threads) {
    const int64_t stride = attention_stride(s), T = s->T, hd = s->head_dim, width = s->heads * hd;
    const int group = s->heads / s->kv_heads;
    const float scale = 1.0f / sqrtf((float)hd);
    gemm_prepare();
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < s->B * s->kv_heads; task++) {
        const int64_t b = task / s->kv_heads;
        const int g = (int)(task % s->kv_heads);
        const int64_t k_at = attention_k(s, b, g), v_at = attention_v(s, b, g);
        float *p = work + (int64_t)thread_index() * 2 * QUERY_BLOCK * T, *dp = p + QUERY_BLOCK * T;
        for (int64_t t = 0; t < T; t++) {
            memset(dqkv + k_at + t * stride, 0, (size_t)hd * sizeof(float));
            memset(dqkv + v_at + t * stride, 0, (size_t)hd * sizeof(float));
        }
        for (int h = g * group; h < (g + 1) * group; h++)
            for (int64_t first = 0; first < T; first += QUERY_BLOCK) {
                const int64_t rows = T - first < QUERY_BLOCK ? T - first : QUERY_BLOCK, keys = first + rows;
                const int64_t q_at = attention_q(s, b, h) + first * stride;
                const float *dy = dout + (b * T + first) * width + h * hd;
                gemm_serial(0, 1, rows, keys, hd, scale, qkv + q_at, stride, qkv + k_at, stride, 0, p, keys);
                gemm_serial(0, 1, rows, keys, hd, 1, dy, width, qkv + v_at, stride, 0, dp, keys);
                attention_softmax_backward(p, dp, lse + (b * s->heads + h) * T + first, scale, first, rows, keys);
                gemm_serial(1, 0, keys, hd, rows, 1, p, keys, dy, width, 1, dqkv + v_at, stride);
                gemm_serial(0, 0, rows, hd, keys, 1, dp, keys, qkv + k_at, stride, 0, dqkv + q_at, stride);
                gemm_serial(1, 0, keys, hd, rows, 1, dp, keys, qkv + q_at, stride, 1, dqkv + k_at, stride);
            }
    }
}

#endif
