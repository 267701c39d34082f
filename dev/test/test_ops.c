// test_ops: every op of the CPU backend, and GEMM, against its definition in float64 written here; every backward against
// central differences of that definition.
//
// Differences: with step h = 1e-5 on values of size 1 the error is h^2 f'''/6 + 1e-16 f/h, about 1e-10, far below float32's.
// Tolerance: a float32 result that sums n terms is off by about sqrt(n) 2^-24 of their norm, for the n <= 512 here 1.4e-6, and an
// op has a few such roundings in a row: 1e-5 of the norm of the whole result.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "llmc/cpu/attention.h"

#define TOLERANCE 1e-5

// Numbers of about unit size, the same in every run: word `i` of a stream, as a sum of four uniform bytes.
static float number(int stream, int64_t i) {
    const uint32_t w = rng_word(rng_stream(11, (uint32_t)stream, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0)), (uint64_t)i);
    return ((float)(w & 255) + (float)(w >> 8 & 255) + (float)(w >> 16 & 255) + (float)(w >> 24) - 510) / 148;
}
static float *numbers(int stream, int64_t n) {
    float *x = (float *)xcalloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = number(stream, i);
    return x;
}
static void assert_close(const float *x, const double *reference, int64_t n, const char *what) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    if (!(error <= TOLERANCE * TOLERANCE * norm)) fail_msg("%s: error %g of norm %g", what, sqrt(error), sqrt(norm));
}

// An op as its definition: float64 inputs -> outputs.
typedef void (*Definition)(double *y, const double *x);
// y and dx are what the float32 op gave for inputs x and output gradient dy.
static void check_op(Definition f, const float *x, int64_t inputs, const float *y, const float *dy, int64_t outputs, const float *dx,
                     const char *what) {
    double *xd = (double *)xcalloc((size_t)inputs, sizeof(double)), *g = (double *)xcalloc((size_t)inputs, sizeof(double));
    double *yd = (double *)xcalloc((size_t)outputs, sizeof(double));
    for (int64_t i = 0; i < inputs; i++) xd[i] = x[i];
    f(yd, xd);
    assert_close(y, yd, outputs, what);
    const double h = 1e-5;
    for (int64_t i = 0; i < inputs; i++)
        for (int sign = 1; sign >= -1; sign -= 2) {
            xd[i] = x[i] + sign * h;
            f(yd, xd);
            for (int64_t o = 0; o < outputs; o++) g[i] += sign * yd[o] * dy[o] / (2 * h);
            xd[i] = x[i];
        }
    assert_close(dx, g, inputs, what);
    free(xd); free(g); free(yd);
}

// ---------------------------------------------------------------------------------------------------------------------

// e^x within 2 units in the last place on all of [-87, 88]; monotone ends; NaN stays NaN.
static void exponential(void **state) {
    (void)state;
    double worst = 0;
    for (int64_t i = 0; i <= 3500000; i++) {
        const float x = -87.0f + (float)i * 5e-5f;
        const double exact = exp((double)x), unit = ldexp(1, ilogb(exact) - 23);
        const double error = fabs(f32_exp(x) - exact) / unit;
        if (error > worst) worst = error;
    }
    print_message("largest error of f32_exp: %.2f units in the last place\n", worst);
    assert_true(worst < 2);
    assert_true(f32_exp(0) == 1);
    assert_true(f32_exp(-1e30f) == f32_exp(-87) && f32_exp(INFINITY) == f32_exp(88) && isfinite(f32_exp(INFINITY)));
    assert_true(isnan(f32_exp(NAN)));
    assert_true(fabsf(f32_sigmoid(-100)) < 1e-37f && f32_sigmoid(100) == 1);
}

enum { ROWS = 5, WIDTH = 48, FFN = 24, VOCAB = 37 };

static void rmsnorm_definition(double *y, const double *x) {  // x: (ROWS, WIDTH), then the gain
    for (int i = 0; i < ROWS; i++) {
        double mean = 0;
        for (int j = 0; j < WIDTH; j++) mean += x[i * WIDTH + j] * x[i * WIDTH + j] / WIDTH;
        for (int j = 0; j < WIDTH; j++) y[i * WIDTH + j] = x[i * WIDTH + j] / sqrt(mean + 0.25) * x[ROWS * WIDTH + j];
    }
}
static void rmsnorm(void **state) {  // eps is large, so that an error in its place would show
    (void)state;
    float *x = numbers(1, (ROWS + 1) * WIDTH), *dy = numbers(2, ROWS * WIDTH), y[ROWS * WIDTH], r[ROWS], parts[NORM_PARTS * WIDTH];
    float dx[(ROWS + 1) * WIDTH] = {0};
    rmsnorm_forward(y, r, x, x + ROWS * WIDTH, ROWS, WIDTH, 0.25f);
    rmsnorm_backward(dx, dx + ROWS * WIDTH, parts, dy, x, x + ROWS * WIDTH, r, ROWS, WIDTH);
    check_op(rmsnorm_definition, x, (ROWS + 1) * WIDTH, y, dy, ROWS * WIDTH, dx, "rmsnorm");
    // Both gradients are added to what is there.
    float again[(ROWS + 1) * WIDTH];
    memcpy(again, dx, sizeof dx);
    rmsnorm_backward(again, again + ROWS * WIDTH, parts, dy, x, x + ROWS * WIDTH, r, ROWS, WIDTH);
    for (int i = 0; i < (ROWS + 1) * WIDTH; i++) assert_true(fabsf(again[i] - 2 * dx[i]) <= 1e-5f * (1 + fabsf(dx[i])));
    free(x); free(dy);
}

static void swiglu_definition(double *y, const double *x) {
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < FFN; j++) {
            const double gate = x[i * 2 * FFN + j], up = x[i * 2 * FFN + FFN + j];
            y[i * FFN + j] = gate / (1 + exp(-gate)) * up;
        }
}
static void swiglu(void **state) {
    (void)state;
    float *x = numbers(3, ROWS * 2 * FFN), *dy = numbers(4, ROWS * FFN), y[ROWS * FFN], dx[ROWS * 2 * FFN];
    swiglu_forward(y, x, ROWS, FFN);
    swiglu_backward(dx, dy, x, ROWS, FFN);
    check_op(swiglu_definition, x, ROWS * 2 * FFN, y, dy, ROWS * FFN, dx, "swiglu");
    free(x); free(dy);
}

// Two sequences of 3 positions; 2 heads of 8 turn, one more does not.
enum { ROPE_T = 3, ROPE_HEADS = 2, ROPE_DIM = 8, ROPE_STRIDE = 24 };
static void rope_definition(double *y, const double *x) {
    for (int i = 0; i < 2 * ROPE_T; i++) {
        memcpy(y + i * ROPE_STRIDE, x + i * ROPE_STRIDE, ROPE_STRIDE * sizeof(double));
        for (int h = 0; h < ROPE_HEADS; h++)
            for (int j = 0; j < ROPE_DIM / 2; j++) {
                const double angle = i % ROPE_T / pow(100, 2.0 * j / ROPE_DIM);
                const int a = i * ROPE_STRIDE + h * ROPE_DIM + j, b = a + ROPE_DIM / 2;
                y[a] = x[a] * cos(angle) - x[b] * sin(angle);
                y[b] = x[b] * cos(angle) + x[a] * sin(angle);
            }
    }
}
static void rope(void **state) {
    (void)state;
    enum { N = 2 * ROPE_T * ROPE_STRIDE, HALF = ROPE_T * ROPE_DIM / 2 };
    float *x = numbers(5, N), *dy = numbers(6, N), y[N], dx[N], c[HALF], s[HALF];
    rope_tables(c, s, ROPE_T, ROPE_DIM, 100);
    memcpy(y, x, sizeof y);
    memcpy(dx, dy, sizeof dx);
    rope_apply(y, c, s, 2 * ROPE_T, ROPE_T, ROPE_STRIDE, ROPE_HEADS, ROPE_DIM, 1);
    rope_apply(dx, c, s, 2 * ROPE_T, ROPE_T, ROPE_STRIDE, ROPE_HEADS, ROPE_DIM, -1);
    check_op(rope_definition, x, N, y, dy, N, dx, "rope");
    free(x); free(dy);
}

static int32_t targets[ROWS] = {0, 36, 7, 7, 21};
static void cross_entropy_definition(double *y, const double *x) {
    for (int i = 0; i < ROWS; i++) {
        double sum = 0;
        for (int j = 0; j < VOCAB; j++) sum += exp(x[i * VOCAB + j]);
        y[i] = log(sum) - x[i * VOCAB + targets[i]];
    }
}
static void cross_entropy_loss(void **state) {
    (void)state;
    float *x = numbers(7, ROWS * VOCAB), y[ROWS], dy[ROWS], dx[ROWS * VOCAB], same[ROWS * VOCAB];
    double losses[ROWS], eval[ROWS];
    memcpy(dx, x, sizeof dx);
    memcpy(same, x, sizeof same);
    cross_entropy(losses, dx, targets, ROWS, VOCAB, 0.125f);
    cross_entropy(eval, same, targets, ROWS, VOCAB, 0);
    assert_memory_equal(same, x, sizeof same);                         // scale 0 leaves the logits alone
    for (int i = 0; i < ROWS; i++) { y[i] = (float)losses[i]; dy[i] = 0.125f; assert_true(losses[i] == eval[i]); }
    check_op(cross_entropy_definition, x, ROWS * VOCAB, y, dy, ROWS, dx, "cross entropy");

    float huge[3] = {3e38f, -3e38f, 0}, bad[3] = {0, NAN, 0};
    cross_entropy(losses, huge, targets, 1, 3, 1);                     // no overflow: the target holds all the probability
    assert_true(losses[0] == 0 && huge[0] == 0 && fabsf(huge[1]) < 1e-37f);
    cross_entropy(losses, bad, targets, 1, 3, 0);
    assert_true(isnan(losses[0]));
    free(x);
}

static void embedding(void **state) {
    (void)state;
    enum { W = 80 };                                                   // more than one part of 64 columns
    const int32_t tokens[4] = {2, 0, 2, 1};
    float *table = numbers(8, 3 * W), *dx = numbers(9, 4 * W), x[4 * W], dtable[3 * W] = {0};
    embedding_forward(x, table, tokens, 4, W);
    embedding_backward(dtable, dx, tokens, 4, W);
    for (int j = 0; j < W; j++) {
        for (int i = 0; i < 4; i++) assert_true(x[i * W + j] == table[tokens[i] * W + j]);
        assert_true(dtable[j] == dx[W + j] && dtable[W + j] == dx[3 * W + j] && dtable[2 * W + j] == dx[j] + dx[2 * W + j]);
    }
    free(table); free(dx);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention: its definition, softmax over the positions up to one's own, for any shape

static AttentionShape shape;
static void attention_definition(double *y, const double *qkv) {
    const int64_t stride = attention_stride(&shape), T = shape.T, D = shape.head_dim;
    double *p = (double *)xcalloc((size_t)T, sizeof(double));
    for (int64_t b = 0; b < shape.B; b++)
        for (int h = 0; h < shape.heads; h++)
            for (int64_t t = 0; t < T; t++) {
                const int kv = h * shape.kv_heads / shape.heads;
                const double *q = qkv + (b * T + t) * stride + h * D;
                const double *k = qkv + b * T * stride + (shape.heads + kv) * D, *v = k + shape.kv_heads * D;
                double sum = 0, *out = y + (b * T + t) * shape.heads * D + h * D;
                for (int64_t j = 0; j <= t; j++) {
                    double dot = 0;
                    for (int64_t i = 0; i < D; i++) dot += q[i] * k[j * stride + i];
                    p[j] = exp(dot / sqrt((double)D));
                    sum += p[j];
                }
                for (int64_t i = 0; i < D; i++) {
                    out[i] = 0;
                    for (int64_t j = 0; j <= t; j++) out[i] += p[j] / sum * v[j * stride + i];
                }
            }
    free(p);
}
static void check_attention(int64_t B, int64_t T, int heads, int kv_heads, int head_dim) {
    const AttentionShape s = {B, T, heads, kv_heads, head_dim};
    shape = s;
    const int64_t inputs = B * T * attention_stride(&s), outputs = B * T * heads * head_dim;
    const int threads = thread_count();
    float *x = numbers(10, inputs), *dy = numbers(11, outputs), *dx = numbers(12, inputs), *y = numbers(13, outputs);
    float *lse = numbers(14, B * heads * T), *work = numbers(15, attention_work(T, threads));
    attention_forward(y, lse, x, &s, work, threads);
    attention_backward(dx, dy, x, lse, &s, work, threads);
    check_op(attention_definition, x, inputs, y, dy, outputs, dx, "attention");
    free(x); free(dy); free(dx); free(y); free(lse); free(work);
}
static void attention(void **state) {
    (void)state;
    check_attention(2, 9, 2, 2, 4);
    check_attention(1, 7, 4, 2, 4);                                    // grouped KV heads
    check_attention(1, 5, 3, 1, 2);
    check_attention(1, 1, 1, 1, 2);                                    // one token attends to itself
    check_attention(1, QUERY_BLOCK + 5, 2, 1, 2);                      // more than one block of queries
}

// ---------------------------------------------------------------------------------------------------------------------

static void gemm_definition(int ta, int tb, int M, int N, int K, float alpha, float beta) {
    const int lda = (ta ? M : K) + 3, ldb = (tb ? K : N) + 1, ldc = N + 2;
    float *a = numbers(20, (ta ? K : M) * lda), *b = numbers(21, (tb ? N : K) * ldb), *c = numbers(22, M * ldc), *c0 = numbers(22, M * ldc);
    gemm(ta, tb, M, N, K, alpha, a, lda, b, ldb, beta, c, ldc);
    double error = 0, norm = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += (double)a[ta ? k * lda + i : i * lda + k] * b[tb ? j * ldb + k : k * ldb + j];
            const double exact = alpha * sum + beta * c0[i * ldc + j], d = c[i * ldc + j] - exact;
            error += d * d;
            norm += exact * exact;
        }
        assert_memory_equal(c + i * ldc + N, c0 + i * ldc + N, 2 * sizeof(float));  // nothing beyond the row
    }
    assert_true(error <= TOLERANCE * TOLERANCE * norm);
    free(a); free(b); free(c); free(c0);
}
static void matrix_product(void **state) {
    (void)state;
    for (int ta = 0; ta < 2; ta++)
        for (int tb = 0; tb < 2; tb++) {
            gemm_definition(ta, tb, 1, 1, 1, 1, 0);
            gemm_definition(ta, tb, 33, 18, 70, 0.5f, 0);
            gemm_definition(ta, tb, 70, 33, 18, 2, 1);
        }
}

static void squares(void **state) {
    (void)state;
    float *x = numbers(30, 1000);
    for (int n = 0; n <= 1000; n += 125) {
        double sum = 0;
        for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
        assert_true(fabs(sum_of_squares(x, n) - sum) <= 1e-13 * sum);
    }
    x[999] = NAN;
    assert_true(isnan(sum_of_squares(x, 1000)));
    free(x);
}

// Three steps of AdamW in float64, from the paper's lines.
static void adamw(void **state) {
    (void)state;
    enum { N = 32 };
    float *w = numbers(40, N), *m = (float *)xcalloc(N, 4), *v = (float *)xcalloc(N, 4), *g = numbers(41, N);
    double wd[N], md[N] = {0}, vd[N] = {0};
    for (int i = 0; i < N; i++) wd[i] = w[i];
    for (int t = 0; t < 3; t++) {
        const AdamWScalars k = adamw_scalars(0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, t);
        for (int i = 0; i < N; i++) g[i] = number(41, t * N + i);
        adamw_tensor(w, m, v, g, 0, N / 2, &k, 1, 0.5f, NULL);
        adamw_tensor(w, m + N / 2, v + N / 2, g, N / 2, N / 2, &k, 0, 0.5f, NULL);     // the second half does not decay
        for (int i = 0; i < N; i++) {
            const double gi = 0.5 * g[i];
            md[i] = 0.9 * md[i] + 0.1 * gi;
            vd[i] = 0.95 * vd[i] + 0.05 * gi * gi;
            const double mhat = md[i] / (1 - pow(0.9, t + 1)), vhat = vd[i] / (1 - pow(0.95, t + 1));
            wd[i] -= 0.01 * (mhat / (sqrt(vhat) + 1e-8) + (i < N / 2 ? 0.1 * wd[i] : 0));
        }
    }
    assert_close(w, wd, N, "adamw: weights");
    assert_close(m, md, N, "adamw: m");
    assert_close(v, vd, N, "adamw: v");
    free(w); free(m); free(v); free(g);
}
// BF16 masters: the float32 result, rounded with the half word at the element's address; its mean is the float32 result.
static void adamw_stochastic(void **state) {
    (void)state;
    enum { N = 64, OFFSET = 128, DRAWS = 4096 };
    float *start = numbers(42, OFFSET + N), *g = numbers(43, OFFSET + N), *zero = (float *)xcalloc(OFFSET + N, 4);
    float m[OFFSET + N], v[OFFSET + N], exact[OFFSET + N], w[OFFSET + N];
    const AdamWScalars k = adamw_scalars(0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0);
    double mean[N] = {0};
    for (int d = 0; d < DRAWS; d++) {
        const RngStream random = rng_stream(3, (uint32_t)d, rng_address(RNG_MASTER, 0, 0, 0, 0, 0));
        for (int master = 0; master < 2; master++) {
            memcpy(m, zero, sizeof m);
            memcpy(v, zero, sizeof v);
            memcpy(master ? w : exact, start, sizeof w);
            adamw_tensor(master ? w : exact, m + OFFSET, v + OFFSET, g, OFFSET, N, &k, 1, 1, master ? &random : NULL);
        }
        for (int i = 0; i < N; i++) {
            const uint32_t word = rng_word(random, (uint64_t)(OFFSET + i) / 2), half = i % 2 ? word >> 16 : word & 0xFFFF;
            assert_true(w[OFFSET + i] == bf16_decode(bf16_encode_sr(exact[OFFSET + i], half)));
            mean[i] += w[OFFSET + i] / (double)DRAWS;
        }
    }
    // The mean of D draws, each within one BF16 unit u of the exact value: standard deviation at most u/2/sqrt(D); 5 of them.
    for (int i = 0; i < N; i++) {
        const double unit = ldexp(1, ilogb(exact[OFFSET + i]) - 7);
        assert_true(fabs(mean[i] - exact[OFFSET + i]) <= 5 * unit / 2 / sqrt(DRAWS));
    }
    free(start); free(g); free(zero);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exponential), cmocka_unit_test(rmsnorm), cmocka_unit_test(swiglu), cmocka_unit_test(rope),
        cmocka_unit_test(cross_entropy_loss), cmocka_unit_test(embedding), cmocka_unit_test(attention), cmocka_unit_test(matrix_product),
        cmocka_unit_test(squares), cmocka_unit_test(adamw), cmocka_unit_test(adamw_stochastic)};
    return cmocka_run_group_tests_name("CPU ops", tests, NULL, NULL);
}
