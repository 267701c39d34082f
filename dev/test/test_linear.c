// test_linear: a linear layer under every recipe of the table: its three GEMMs against float64 products of the operands that
// the recipe's row prescribes, and that backward's noise averages out.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "llmc/cpu/linear.h"

enum { M = 256, N = 128, K = 384, LAYER = 3, LINEAR = 2, RANK = 5, MICRO = 3, STEP = 77 };
static const uint64_t SEED = 0x123456789ull;

// About N(0,1): the sum of the four bytes of a word.
static float *normals(int stream, int64_t n) {
    float *x = (float *)xcalloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        const uint32_t w = rng_word(rng_stream(9, (uint32_t)stream, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0)), (uint64_t)i);
        x[i] = ((float)(w & 255) + (float)(w >> 8 & 255) + (float)(w >> 16 & 255) + (float)(w >> 24) - 510) / 148;
    }
    return x;
}

typedef struct {
    Linear l;
    LinearWork work;
    float *w, *x, *dy, *y, *dx, *dw;
} Layer;
static Layer layer_make(const Recipe *recipe) {
    Layer t;
    memset(&t, 0, sizeof t);
    t.w = normals(1, N * K); t.x = normals(2, M * K); t.dy = normals(3, M * N);
    t.y = normals(4, M * N); t.dx = normals(5, M * K); t.dw = (float *)xcalloc(N * K, sizeof(float));
    t.l.recipe = recipe; t.l.layer = LAYER; t.l.linear = LINEAR; t.l.N = N; t.l.K = K;
    t.l.w = t.w; t.l.dw = t.dw; t.l.x = t.x;
    t.l.w_operand = linear_rounds_w(recipe) ? (float *)xcalloc(N * K, sizeof(float)) : t.w;
    t.l.x_operand = linear_keeps_x_operand(recipe) ? (float *)xcalloc(M * K, sizeof(float)) : NULL;
    t.work.seed = SEED; t.work.step = STEP; t.work.rank = RANK; t.work.micro = MICRO;
    t.work.a = (float *)xcalloc((size_t)linear_work(M, N, K), sizeof(float));
    t.work.b = (float *)xcalloc((size_t)linear_work(M, N, K), sizeof(float));
    linear_quantize_weight(&t.l, &t.work);
    return t;
}
static void layer_free(Layer *t) {
    if (t->l.w_operand != t->w) free(t->l.w_operand);
    free(t->l.x_operand); free(t->w); free(t->x); free(t->dy); free(t->y); free(t->dx); free(t->dw); free(t->work.a); free(t->work.b);
}

// The operand a row prescribes for x (rows, cols), in float64, tensor scale included; the GEMM's inner dimension is the columns,
// or the rows. Random words by the address written out here.
static double *operand(const OperandSpec *s, const float *x, double factor, int rows, int cols, int along_rows, int gemm, int which, int weight) {
    float *out = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    double *d = (double *)xcalloc((size_t)(rows * cols), sizeof(double));
    memcpy(out, x, (size_t)(rows * cols) * sizeof(float));
    if (s->rounding == ROUND_BF16) for (int i = 0; i < rows * cols; i++) out[i] = bf16_round(x[i]);
    else if (s->rounding != ROUND_NONE) {
        const QuantizeAddress at = {SEED, STEP, LAYER, LINEAR, gemm, which, weight ? 0 : RANK, weight ? 0 : MICRO};
        factor *= quantize_operand(out, x, rows, cols, along_rows, s, &at);
    }
    for (int i = 0; i < rows * cols; i++) d[i] = out[i] * factor;
    free(out);
    return d;
}
// Element (i,j) of the product is the sum over k of a[i*ai + k*ak] b[j*bj + k*bk] / rotation. Error norm over norm against c.
static double product_error(const float *c, const double *a, int ai, int ak, const double *b, int bj, int bk, int I, int J, int L, int rotation) {
    double error = 0, norm = 0;
    for (int i = 0; i < I; i++)
        for (int j = 0; j < J; j++) {
            double sum = 0;
            for (int k = 0; k < L; k++) sum += a[i * ai + k * ak] * b[j * bj + k * bk];
            if (rotation) sum /= rotation;
            error += (c[i * J + j] - sum) * (c[i * J + j] - sum);
            norm += sum * sum;
        }
    return sqrt(error / norm);
}
// A float32 sum of up to 384 products of unit size is off by about sqrt(384) 2^-24 = 1.2e-6 of its norm.
#define SUM_TOLERANCE 3e-6

static void every_recipe(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) {
        const GemmSpec *forward = &RECIPES[r].gemm[GEMM_FORWARD], *dgrad = &RECIPES[r].gemm[GEMM_DGRAD], *wgrad = &RECIPES[r].gemm[GEMM_WGRAD];
        Layer t = layer_make(&RECIPES[r]);
        float *y0 = normals(4, M * N), *plain = normals(4, M * N), *dw_once = (float *)xcalloc(N * K, sizeof(float));
        linear_forward(&t.l, plain, M, 0, &t.work);
        linear_forward(&t.l, t.y, M, 1, &t.work);
        for (int i = 0; i < M * N; i++) assert_true(fabsf(t.y[i] - (y0[i] + plain[i])) <= 1e-5f * (fabsf(plain[i]) + fabsf(y0[i]) + 1));
        linear_backward(&t.l, t.dx, t.dy, M, &t.work);
        memcpy(dw_once, t.dw, N * K * sizeof(float));

        double *xo = operand(&forward->a, t.x, 1, M, K, 0, GEMM_FORWARD, OPERAND_A, 0);
        double *wo = operand(&forward->b, t.w, 1, N, K, 0, GEMM_FORWARD, OPERAND_B, 1);
        const double fy = product_error(plain, xo, K, 1, wo, K, 1, M, N, K, forward->a.rotation);

        const int wq = dgrad->b.source == FROM_FORWARD, xq = wgrad->b.source == FROM_FORWARD;
        double *a = operand(&dgrad->a, t.dy, 1, M, N, 0, GEMM_DGRAD, OPERAND_A, 0);
        double *b = operand(&dgrad->b, wq ? t.l.w_operand : t.w, wq ? t.l.w_factor : 1, N, K, 1, GEMM_DGRAD, OPERAND_B, 1);
        const double fdx = product_error(t.dx, a, N, 1, b, 1, K, M, K, N, dgrad->a.rotation);
        free(a); free(b);
        a = operand(&wgrad->a, t.dy, 1, M, N, 1, GEMM_WGRAD, OPERAND_A, 0);
        b = operand(&wgrad->b, xq && t.l.x_operand ? t.l.x_operand : t.x, xq ? t.l.x_factor : 1, M, K, 1, GEMM_WGRAD, OPERAND_B, 0);
        const double fdw = product_error(dw_once, a, 1, N, b, 1, K, N, K, M, wgrad->a.rotation);
        free(a); free(b);

        linear_backward(&t.l, t.dx, t.dy, M, &t.work);                 // dw is added to, dx overwritten
        double twice = 0, norm = 0;
        for (int i = 0; i < N * K; i++) { twice += pow(t.dw[i] - 2.0 * dw_once[i], 2); norm += pow(dw_once[i], 2); }
        print_message("%-14s forward %.1e  dgrad %.1e  wgrad %.1e\n", RECIPES[r].name, fy, fdx, fdw);
        assert_true(fy < SUM_TOLERANCE && fdx < SUM_TOLERANCE && fdw < SUM_TOLERANCE && sqrt(twice / norm) < SUM_TOLERANCE);
        free(xo); free(wo); free(y0); free(plain); free(dw_once);
        layer_free(&t);
    }
}

// fp32 is the plain product of the tensors as they are, and nothing of them is copied or kept.
static void fp32_is_plain(void **state) {
    (void)state;
    Layer t = layer_make(recipe_find("fp32"));
    assert_true(t.l.w_operand == t.w && t.l.x_operand == NULL);
    double *x = (double *)xcalloc(M * K, sizeof(double)), *w = (double *)xcalloc(N * K, sizeof(double));
    for (int i = 0; i < M * K; i++) x[i] = t.x[i];
    for (int i = 0; i < N * K; i++) w[i] = t.w[i];
    linear_forward(&t.l, t.y, M, 0, &t.work);
    assert_true(product_error(t.y, x, K, 1, w, K, 1, M, N, K, 0) < SUM_TOLERANCE);
    free(x); free(w);
    layer_free(&t);
}

// Noise: another micro-batch or rank draws other scales for data, the same for weights; another step, all anew.
static void addresses(void **state) {
    (void)state;
    const Recipe *quartet2 = recipe_find("quartet2");
    Layer t = layer_make(quartet2);
    float *first = (float *)xcalloc(M * K, sizeof(float)), *again = (float *)xcalloc(M * K, sizeof(float)), alpha = 1;
    const int data[2] = {N * K, M * N};                                // values of dgrad's B, A
    for (int which = 0; which < 2; which++) {
        const float *x = which == OPERAND_A ? t.dy : t.w;
        const int rows = which == OPERAND_A ? M : N, cols = which == OPERAND_A ? N : K, size = data[which == OPERAND_A] * (int)sizeof(float);
        t.work.step = STEP; t.work.micro = MICRO; t.work.rank = RANK;
        linear_operand(&t.l, &t.work, GEMM_DGRAD, which, first, x, rows, cols, &alpha);
        for (int change = 0; change < 4; change++) {                   // nothing, micro-batch, rank, step
            t.work.step = STEP + (change == 3); t.work.micro = MICRO + (change == 1); t.work.rank = RANK + (change == 2);
            linear_operand(&t.l, &t.work, GEMM_DGRAD, which, again, x, rows, cols, &alpha);
            const int differs = memcmp(first, again, (size_t)size) != 0;
            assert_int_equal(differs, change == 3 || (which == OPERAND_A && change > 0));
        }
    }
    free(first); free(again);
    layer_free(&t);
}

// A NaN or an infinity anywhere in the inputs reaches the output, whatever the rounding.
static void not_finite(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++)
        for (int bad = 0; bad < 2; bad++) {
            Layer t = layer_make(&RECIPES[r]);
            t.x[5 * K + 7] = bad ? INFINITY : NAN;
            linear_forward(&t.l, t.y, M, 0, &t.work);
            assert_false(isfinite(t.y[5 * N]));
            linear_backward(&t.l, t.dx, t.dy, M, &t.work);
            assert_false(isfinite(t.dw[7]));
            layer_free(&t);
            t = layer_make(&RECIPES[r]);
            linear_forward(&t.l, t.y, M, 0, &t.work);
            t.dy[9 * N + 3] = bad ? INFINITY : NAN;
            linear_backward(&t.l, t.dx, t.dy, M, &t.work);
            assert_false(isfinite(t.dx[9 * K]) || isfinite(t.dw[3 * K]));
            layer_free(&t);
        }
}

// Backward's quantizers are unbiased: the mean of B draws of dgrad (and wgrad) of a quartet2 layer comes to the exact product of
// dY with the forward's W_q (X_q), with squared error e/B, e the squared error of one draw (measured as the mean over all
// draws). An error of the mean that stays, b^2, would show as b^2 B/e above 1. How far B err(B)/e may stray from 1 by chance: dY
// alone has M N/16 = 2048 blocks, whose errors are independent, so its standard deviation is about sqrt(2/2048); 5 of them.
static double squared_distance(const double *mean, double scale, const double *exact, int n, double *norm) {
    double sum = 0;
    *norm = 0;
    for (int i = 0; i < n; i++) { sum += pow(mean[i] * scale - exact[i], 2); *norm += exact[i] * exact[i]; }
    return sum / *norm;
}
static void unbiased(void **state) {
    (void)state;
    enum { DRAWS = 1024 };
    Layer t = layer_make(recipe_find("quartet2"));
    linear_forward(&t.l, t.y, M, 0, &t.work);
    double *exact[2] = {(double *)xcalloc(M * K, sizeof(double)), (double *)xcalloc(N * K, sizeof(double))};
    double *mean[2] = {(double *)xcalloc(M * K, sizeof(double)), (double *)xcalloc(N * K, sizeof(double))};
    const int count[2] = {M * K, N * K};
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) {
                exact[0][m * K + k] += (double)t.dy[m * N + n] * t.l.w_operand[n * K + k] * t.l.w_factor;
                exact[1][n * K + k] += (double)t.dy[m * N + n] * t.l.x_operand[m * K + k] * t.l.x_factor;
            }
    double one[2] = {0, 0}, ratio[2][11], norm;
    for (int b = 1, point = 0; b <= DRAWS; b++) {
        memset(t.dw, 0, N * K * sizeof(float));
        t.work.step = b;
        linear_backward(&t.l, t.dx, t.dy, M, &t.work);
        for (int g = 0; g < 2; g++) {
            const float *draw = g ? t.dw : t.dx;
            double error = 0;
            norm = 0;
            for (int i = 0; i < count[g]; i++) {
                error += pow(draw[i] - exact[g][i], 2);
                norm += exact[g][i] * exact[g][i];
                mean[g][i] += draw[i];
            }
            one[g] += error / norm / DRAWS;
            if ((b & (b - 1)) == 0) ratio[g][point] = b * squared_distance(mean[g], 1.0 / b, exact[g], count[g], &norm);
        }
        if ((b & (b - 1)) == 0) point++;
    }
    for (int g = 0; g < 2; g++) {
        print_message("%s: squared error of a draw %.4f; B err(B)/e for B = 1, 2, ... 1024:", g ? "wgrad" : "dgrad", one[g]);
        for (int p = 0; p <= 10; p++) print_message(" %.3f", ratio[g][p] / one[g]);
        print_message("\n");
        // Both operands err by about 9.4e-3 (numerics of MS-EDEN on N(0,1)), independently.
        assert_true(fabs(one[g] - 2 * 9.4e-3) < 0.1 * 2 * 9.4e-3);
        for (int p = 0; p <= 10; p++) assert_true(fabs(ratio[g][p] / one[g] - 1) < 5 * sqrt(2.0 / 2048));
        free(exact[g]); free(mean[g]);
    }
    layer_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_recipe), cmocka_unit_test(fp32_is_plain), cmocka_unit_test(addresses),
                                       cmocka_unit_test(not_finite), cmocka_unit_test(unbiased)};
    return cmocka_run_group_tests_name("linear layer", tests, NULL, NULL);
}
