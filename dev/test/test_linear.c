// test_linear: a linear layer under every recipe of the table: its three GEMMs against float64 products of the operands that
// the recipe's row prescribes, with what the row does to products written out again in float64; and what backward is on average.
#include "dev/test/expect.h"
#include "dev/bench/layer.h"

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
    t.work.seed = SEED; t.work.step = STEP; t.work.rank = RANK; t.work.micro = MICRO;
    layer_buffers(&t.l, &t.work, M);
    linear_quantize_weight(&t.l, &t.work);
    return t;
}
static void layer_free(Layer *t) {
    layer_buffers_free(&t->l, &t->work);
    free(t->w); free(t->x); free(t->dy); free(t->y); free(t->dx); free(t->dw);
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
// Element (i,j) is the sum over k of a[i*ai + k*ak] b[j*bj + k*bk] / rotation. (I,J), to be freed.
static double *product(const double *a, int ai, int ak, const double *b, int bj, int bk, int I, int J, int L, int rotation) {
    double *c = (double *)xcalloc((size_t)(I * J), sizeof(double));
    for (int i = 0; i < I; i++)
        for (int j = 0; j < J; j++) {
            for (int k = 0; k < L; k++) c[i * J + j] += a[i * ai + k * ak] * b[j * bj + k * bk];
            if (rotation) c[i * J + j] /= rotation;
        }
    return c;
}
// Error norm over norm.
static double product_error(const float *c, const double *want, int count) {
    double error = 0, norm = 0;
    for (int i = 0; i < count; i++) { error += (c[i] - want[i]) * (c[i] - want[i]); norm += want[i] * want[i]; }
    return sqrt(error / norm);
}

// ---------------------------------------------------------------------------------------------------------------------
// What rows do to products, by definition, in float64

// Normalised Sylvester-Hadamard transform of runs of 32, from the parity of i & j; its own transpose.
static double *hadamard32(const double *x, int count) {
    double *y = (double *)xcalloc((size_t)count, sizeof(double));
    for (int i = 0; i < count; i++)
        for (int j = 0; j < 32; j++) y[i] += (__builtin_parity((unsigned)(i % 32 & j)) ? -1 : 1) * x[i / 32 * 32 + j] / sqrt(32);
    return y;
}
// QuEST's mask of x, and the product times it, turned back, in place. (That float64 and the layer's float32 agree on every comparison
// with 6 and every power of two is likely and not certain; these inputs are fixed.)
static void quest_backward(double *p, const float *x, int count) {
    double *d = (double *)xcalloc((size_t)count, sizeof(double));
    int clipped = 0;
    for (int i = 0; i < count; i++) d[i] = x[i];
    double *y = hadamard32(d, count);
    for (int block = 0; block < count; block += 32) {
        double mean = 0, square = 0;
        for (int i = 0; i < 32; i++) { mean += y[block + i] / 32; square += y[block + i] * y[block + i] / 32; }
        const double scale = exp2(floor(log2(sqrt(square - mean * mean) * (2.92247856 / 6) + 1e-8)));
        for (int i = block; i < block + 32; i++) if (fabs(y[i] / scale) >= 6) { p[i] = 0; clipped++; }
    }
    assert_true(clipped > count / 1000);                               // the mask is at work
    double *back = hadamard32(p, count);
    memcpy(p, back, (size_t)count * sizeof(double));
    free(d); free(y); free(back);
}
static int compare_floats(const void *a, const void *b) { return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b); }
// x beyond its values of rank n/100 and n-1-n/100, rounded to BF16; 0 between them.
static double *outliers(const float *x, int count) {
    float *sorted = (float *)xcalloc((size_t)count, sizeof(float));
    double *r = (double *)xcalloc((size_t)count, sizeof(double));
    memcpy(sorted, x, (size_t)count * sizeof(float));
    qsort(sorted, (size_t)count, sizeof(float), compare_floats);
    const float low = sorted[count / 100], high = sorted[count - 1 - count / 100];
    for (int i = 0; i < count; i++) r[i] = bf16_round(x[i] < low ? x[i] - low : x[i] > high ? x[i] - high : 0);
    free(sorted);
    return r;
}
static double dge(double w) {  // the slope at the scaled weight
    static const double grid[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    int k = 0;
    w = fmin(fabs(w), 6);
    while (k < 6 && grid[k + 1] <= w) k++;
    return fmin(0.2 * pow(fabs(2 * (w - grid[k]) / (grid[k + 1] - grid[k]) - 1), -0.8), 3);
}
static void dge_backward(double *p, const float *w) {
    for (int n = 0; n < N; n++) {
        double amax = 0;
        for (int k = 0; k < K; k++) amax = fmax(amax, fabs((double)w[n * K + k]));
        for (int k = 0; k < K; k++) p[n * K + k] *= dge(w[n * K + k] * 6 / amax);
    }
}
// Its own check: the layer's function against pow(), everywhere from 0 to beyond 6. t = |2(|w|-a)/delta - 1| is a difference of float32
// numbers near 1 and at least 0.034, so its relative error is up to 2^-24 * 4/0.034 = 7e-6, and the slope's 0.8 of that.
static void dge_slopes(void **state) {
    (void)state;
    double sum = 0;
    for (int i = 0; i <= 600000; i++) {
        const float w = (float)i * 1e-5f;
        sum += dge_slope(w) * 1e-5;
        if (fabs(dge_slope(w) / dge(w) - 1) > 7e-6 || dge_slope(-w) != dge_slope(w)) fail_msg("slope at %.9g: %.9g, expected %.9g", w, dge_slope(w), dge(w));
    }
    // The stand-in rises by delta over each interval; the cap at 3 takes 2 * (delta/2) * (t0^(1/5) - 3 t0) of it, t0 = 15^(-5/4).
    const double t0 = pow(15, -1.25);
    assert_true(fabs(sum / (6 * (1 - pow(t0, 0.2) + 3 * t0)) - 1) < 1e-3);
    assert_true(dge_slope(6.1f) == 0 && dge_slope(-100) == 0 && dge_slope(6.000001f) > 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer

// A float32 sum of up to 384 products of unit size is off by about sqrt(384) 2^-24 = 1.2e-6 of its norm.
#define SUM_TOLERANCE 3e-6

// Float64 results of the layer under the recipe: forward, dgrad, wgrad.
static void reference(const Recipe *r, const Layer *t, double *want[3]) {
    const GemmSpec *forward = &r->gemm[GEMM_FORWARD], *dgrad = &r->gemm[GEMM_DGRAD], *wgrad = &r->gemm[GEMM_WGRAD];
    const int mx = forward->a.format == FORMAT_MXFP4;                  // its rotations are normalised
    double *xo = operand(&forward->a, t->x, 1, M, K, 0, GEMM_FORWARD, OPERAND_A, 0);
    double *wo = operand(&forward->b, t->w, 1, N, K, 0, GEMM_FORWARD, OPERAND_B, 1);
    want[0] = product(xo, K, 1, wo, K, 1, M, N, K, mx ? 0 : forward->a.rotation);
    if (forward->product == PRODUCT_ADD_OUTLIERS) {
        double *rest = outliers(t->x, M * K), *more = product(rest, K, 1, wo, K, 1, M, N, K, 0);
        for (int i = 0; i < M * N; i++) want[0][i] += more[i];
        free(rest); free(more);
    }
    const int wq = dgrad->b.source == FROM_FORWARD, xq = wgrad->b.source == FROM_FORWARD;
    double *a = operand(&dgrad->a, t->dy, 1, M, N, 0, GEMM_DGRAD, OPERAND_A, 0);
    double *b = operand(&dgrad->b, wq ? t->l.w_operand : t->w, wq ? t->l.w_factor : 1, N, K, 1, GEMM_DGRAD, OPERAND_B, 1);
    want[1] = product(a, N, 1, b, 1, K, M, K, N, mx ? 0 : dgrad->a.rotation);
    free(a); free(b);
    a = operand(&wgrad->a, t->dy, 1, M, N, 1, GEMM_WGRAD, OPERAND_A, 0);
    b = operand(&wgrad->b, xq && t->l.x_operand ? t->l.x_operand : t->x, xq ? t->l.x_factor : 1, M, K, 1, GEMM_WGRAD, OPERAND_B, 0);
    want[2] = product(a, 1, N, b, 1, K, N, K, M, mx ? 0 : wgrad->a.rotation);
    if (dgrad->product == PRODUCT_CLIP_MASK) quest_backward(want[1], t->x, M * K);
    if (wgrad->product == PRODUCT_CLIP_MASK) quest_backward(want[2], t->w, N * K);
    if (wgrad->product == PRODUCT_DGE) dge_backward(want[2], t->w);
    free(a); free(b); free(xo); free(wo);
}
static void every_recipe(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) {
        Layer t = layer_make(&RECIPES[r]);
        float *y0 = normals(4, M * N), *plain = normals(4, M * N), *dw_once = (float *)xcalloc(N * K, sizeof(float));
        linear_forward(&t.l, plain, M, 0, &t.work);
        linear_forward(&t.l, t.y, M, 1, &t.work);
        for (int i = 0; i < M * N; i++) assert_true(fabsf(t.y[i] - (y0[i] + plain[i])) <= 1e-5f * (fabsf(plain[i]) + fabsf(y0[i]) + 1));
        linear_backward(&t.l, t.dx, t.dy, M, &t.work);
        memcpy(dw_once, t.dw, N * K * sizeof(float));

        double *want[3];
        reference(&RECIPES[r], &t, want);
        const double fy = product_error(plain, want[0], M * N), fdx = product_error(t.dx, want[1], M * K), fdw = product_error(dw_once, want[2], N * K);
        linear_backward(&t.l, t.dx, t.dy, M, &t.work);                 // dw is added to, dx overwritten
        double twice = 0, norm = 0;
        for (int i = 0; i < N * K; i++) { twice += pow(t.dw[i] - 2.0 * dw_once[i], 2); norm += pow(dw_once[i], 2); }
        print_message("%-20s forward %.1e  dgrad %.1e  wgrad %.1e\n", RECIPES[r].name, fy, fdx, fdw);
        assert_true(fy < SUM_TOLERANCE && fdx < SUM_TOLERANCE && fdw < SUM_TOLERANCE && sqrt(twice / norm) < SUM_TOLERANCE);
        for (int g = 0; g < 3; g++) free(want[g]);
        free(y0); free(plain); free(dw_once);
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
    double *want = product(x, K, 1, w, K, 1, M, N, K, 0);
    assert_true(product_error(t.y, want, M * N) < SUM_TOLERANCE);
    free(x); free(w); free(want);
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

// A forward that rotates NVFP4 operands (unnormalised, random signs) and a backward from those operands: no row does so yet, and the next
// may. The gradients are those of the product in the plain space.
static void turned_back(void **state) {
    (void)state;
    const Recipe rotated = {"rotated", "", {BACKWARD_FROM_FORWARD(ROUND_RTN, 64), {PLAIN(ROUND_NONE), AS_FORWARD, PRODUCT_PLAIN}, {PLAIN(ROUND_NONE), AS_FORWARD, PRODUCT_PLAIN}}};
    Recipe r = rotated;
    r.gemm[GEMM_FORWARD].b.source = FROM_ORIGINAL;
    recipe_check(&r);
    Layer t = layer_make(&r), plain = layer_make(recipe_find("fp32"));
    for (int pass = 0; pass < 2; pass++) {
        Layer *l = pass ? &plain : &t;
        linear_forward(&l->l, l->y, M, 0, &l->work);
        linear_backward(&l->l, l->dx, l->dy, M, &l->work);
    }
    const float *got[3] = {t.y, t.dx, t.dw}, *want[3] = {plain.y, plain.dx, plain.dw};
    const int count[3] = {M * N, M * K, N * K};
    // Each operand errs by 9e-3 squared (numerics of rtn 1x16 on N(0,1)): two of them in the forward, one in each gradient.
    for (int g = 0; g < 3; g++) {
        double error = 0, norm = 0;
        for (int i = 0; i < count[g]; i++) { error += pow((double)got[g][i] - want[g][i], 2); norm += pow(want[g][i], 2); }
        assert_true(fabs(error / norm / (g ? 9e-3 : 18e-3) - 1) < 0.1);
    }
    layer_free(&t);
    layer_free(&plain);
}

// What backward is on average. The mean of B draws of dgrad (wgrad) comes to the product that the same row gives without rounding in
// backward (every_recipe has shown that product to be right) with squared error e/B, e the squared error of one draw, where both
// operands are unbiased. An error of the mean that stays, b^2, shows as b^2 B/e above 1. How far B err(B)/e may stray from 1 by
// chance: dY alone has M N/16 = 2048 blocks (of 32: 1024), whose errors are independent, so its standard deviation is about
// sqrt(2/2048); 5 of them. Where one operand is rounded to nearest the error of the mean levels off, and the ratio leaves 1.
typedef struct { double one, ratio[11]; int points; } Average;  // B = 1, 2, 4 ... draws
static void average(const Recipe *recipe, int draws, Average result[2]) {
    const Recipe exact = recipe_exact_backward(recipe);
    Layer t = layer_make(recipe), e = layer_make(&exact);
    linear_forward(&t.l, t.y, M, 0, &t.work);
    linear_forward(&e.l, e.y, M, 0, &e.work);
    linear_backward(&e.l, e.dx, e.dy, M, &e.work);
    const int count[2] = {M * K, N * K};
    double *mean[2] = {(double *)xcalloc(M * K, sizeof(double)), (double *)xcalloc(N * K, sizeof(double))};
    memset(result, 0, 2 * sizeof *result);
    for (int b = 1; b <= draws; b++) {
        memset(t.dw, 0, N * K * sizeof(float));
        t.work.step = b;
        linear_backward(&t.l, t.dx, t.dy, M, &t.work);
        for (int g = 0; g < 2; g++) {
            const float *draw = g ? t.dw : t.dx, *want = g ? e.dw : e.dx;
            double error = 0, of_mean = 0, norm = 0;
            for (int i = 0; i < count[g]; i++) {
                mean[g][i] += draw[i];
                error += pow((double)draw[i] - want[i], 2);
                of_mean += pow(mean[g][i] / b - want[i], 2);
                norm += pow(want[i], 2);
            }
            result[g].one += error / norm / draws;
            if ((b & (b - 1)) == 0) result[g].ratio[result[g].points++] = b * of_mean / norm;
        }
    }
    for (int g = 0; g < 2; g++) { for (int p = 0; p < result[g].points; p++) result[g].ratio[p] /= result[g].one; free(mean[g]); }
    layer_free(&t);
    layer_free(&e);
}
static void on_average(void **state) {
    (void)state;
    // Squared error of one draw: the sum of its operands' (test_unbiased's table, on N(0,1)).
    static const struct { const char *name; int draws; double one[2]; int unbiased[2]; } expected[] = {
        {"quartet2", 1024, {2 * 9.4e-3, 2 * 9.4e-3}, {1, 1}}, {"quartet2-search", 256, {7.66e-3 + 7.4e-3, 2 * 7.66e-3}, {1, 1}},
        {"tetrajet2", 256, {2 * 2.355e-2, 2 * 2.355e-2}, {1, 1}}, {"nvidia", 1024, {2.355e-2, 2.355e-2 + 9.05e-3}, {1, 0}},
        {"quartet", 256, {2 * 2.82e-2, 2 * 2.82e-2}, {1, 1}}, {"fp8", 4, {2.79e-3, 2.79e-3}, {0, 0}}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        Average result[2];
        average(recipe_find(expected[i].name), expected[i].draws, result);
        for (int g = 0; g < 2; g++) {
            print_message("%-16s %s: squared error of a draw %.4f; B err(B)/e for B = 1, 2, 4 ...:", expected[i].name, g ? "wgrad" : "dgrad", result[g].one);
            for (int p = 0; p < result[g].points; p++) print_message(" %.3f", result[g].ratio[p]);
            print_message("\n");
            // Small tensors' amax moves the NVFP4 quantizers by a few per cent, MXFP4's scales by their powers of two.
            assert_true(fabs(result[g].one / expected[i].one[g] - 1) < (strcmp(expected[i].name, "quartet") ? 0.1 : 0.25));
            if (expected[i].unbiased[g]) for (int p = 0; p < result[g].points; p++) assert_true(fabs(result[g].ratio[p] - 1) < 5 * sqrt(2.0 / 1024));
            else assert_true(result[g].ratio[result[g].points - 1] > 1.5);
        }
    }
}

static void act_check(const void *recipe) { recipe_check((const Recipe *)recipe); }
// Rows that contradict themselves are refused; every row of the table passes.
static void bad_rows(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) recipe_check(&RECIPES[r]);
    Recipe bad = *recipe_find("quartet2");
    bad.gemm[GEMM_DGRAD].b.rotation = 64;
    expect_fatal(act_check, &bad, "recipe quartet2, GEMM 1|rotations of 128 and 64");
    bad = *recipe_find("quartet2");
    bad.gemm[GEMM_WGRAD].a.source = FROM_FORWARD;
    expect_fatal(act_check, &bad, "GEMM 2|only the backward operands");
    bad = *recipe_find("quartet2");
    bad.gemm[GEMM_FORWARD].product = PRODUCT_ADD_OUTLIERS;
    expect_fatal(act_check, &bad, "GEMM 0|does not fit");
    bad = *recipe_find("quartet2");
    bad.gemm[GEMM_DGRAD].product = PRODUCT_CLIP_MASK;
    expect_fatal(act_check, &bad, "GEMM 1|does not fit");
    bad = *recipe_find("fp4-dge-occ");
    bad.gemm[GEMM_DGRAD].product = PRODUCT_DGE;
    expect_fatal(act_check, &bad, "GEMM 1|does not fit");
    bad = *recipe_find("quartet");
    bad.gemm[GEMM_DGRAD].b.source = FROM_ORIGINAL;                     // the mask would be in another space than the product
    expect_fatal(act_check, &bad, "GEMM 1|does not fit");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(bad_rows),     // first: forks before OpenMP has threads
                                       cmocka_unit_test(every_recipe), cmocka_unit_test(fp32_is_plain), cmocka_unit_test(dge_slopes),
                                       cmocka_unit_test(addresses), cmocka_unit_test(not_finite), cmocka_unit_test(turned_back),
                                       cmocka_unit_test(on_average)};
    return cmocka_run_group_tests_name("linear layer", tests, NULL, NULL);
}
