// test_linear_gpu.cu: one linear layer on the GPU, its three GEMMs under every recipe of the table, against operands quantized by the CPU
// with the same seeds and products summed, and finished as the recipe says, in float64.
//
// Operands must equal the CPU's bit for bit (up to the sign of a zero). Products differ by float32 accumulation alone: an inner
// product of n terms is off by at most n * 2^-23 of the sum of its terms' magnitudes (tensor cores may truncate instead of rounding,
// hence a whole unit). FP8: fp8_tolerance(). A BF16 result is off by half of its last place, 2^-8 of its value at most, more. alpha costs three
// roundings, 2^-22.
// A BF16 dW of two micro-batches is rounded twice, the first time when it holds one of them: 2^-8 of that one's value more.
// The native path (linear_native.cuh): its packed operands and alphas on any card; its products where there are FP4 tensor cores, which may drop what
// lies 22 bits below the largest term: twice the tolerance. Elsewhere they must be refused, with the reason.
#include <sys/wait.h>

#include "llmc/cpu/quantize.h"
#include "llmc/cuda/linear.cuh"
#include "llmc/cuda/selfcheck_nvfp4.cuh"

#include "check.h"

enum { TEST_SEED = 77, TEST_STEP = 5, TEST_LAYER = 3, TEST_RANK = 2 };

static void *device_new(int64_t bytes) {                   // poisoned: NaN in BF16 and float32
    void *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)bytes));
    CUDA_CHECK(cudaMemset(p, 0xFF, (size_t)bytes));
    return p;
}
// Normal values times `size`, in BF16; one in 500 is 30 times as large, so that blocks of very different scale occur.
static float *random_values(int64_t count, int stream, float size) {
    float *x = (float *)xcalloc((size_t)count, sizeof *x);
    const RngStream s = rng_stream(99, (uint32_t)stream, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < count; i++) {
        Philox4 w = rng_words4(s, (uint64_t)i);
        const double r = sqrt(-2 * log((double)rng_uniform(w.w[0]))) * cos(6.283185307179586 * w.w[1] * 0x1p-32);
        x[i] = bf16_round((float)(size * r * (w.w[2] % 500 == 0 ? 30 : 1)));
    }
    return x;
}
static bf16 *to_device(const float *x, int64_t count) {
    uint16_t *stored = (uint16_t *)xcalloc((size_t)count, sizeof *stored);
    for (int64_t i = 0; i < count; i++) stored[i] = bf16_encode(x[i]);
    bf16 *p = (bf16 *)device_new(count * 2);
    CUDA_CHECK(cudaMemcpy(p, stored, (size_t)count * 2, cudaMemcpyHostToDevice));
    free(stored);
    return p;
}
static float *from_device(const bf16 *p, int64_t count) {
    uint16_t *stored = (uint16_t *)xcalloc((size_t)count, sizeof *stored);
    float *x = (float *)xcalloc((size_t)count, sizeof *x);
    CUDA_CHECK(cudaMemcpy(stored, p, (size_t)count * 2, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) x[i] = bf16_decode(stored[i]);
    free(stored);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands. What the CPU multiplies is values * factor; own: the part of factor that this quantizer found.

typedef struct { float *values; uint8_t *mask; float factor, own; } HostOperand;

// from: the forward's operand that backward starts from, NULL: x itself. (rows, cols) as x lies.
static HostOperand host_operand(const Linear *l, int gemm, int operand, const float *x, int64_t rows, int64_t cols, const HostOperand *from, int micro) {
    const OperandSpec *spec = operand_spec(l->plan->recipe, gemm, operand);
    const int is_weight = operand == OPERAND_B && gemm != GEMM_WGRAD, again = from && spec->source == FROM_FORWARD;
    const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    const QuantizeAddress at = {TEST_SEED, TEST_STEP, l->layer, l->linear, gemm, operand, is_weight ? 0 : TEST_RANK, is_weight ? 0 : micro};
    HostOperand o = {(float *)xcalloc((size_t)(rows * cols), sizeof(float)), (uint8_t *)xcalloc((size_t)(rows * cols), 1), 1, 1};
    if (again) x = from->values;
    if (spec->rounding == ROUND_NONE && !spec->rotation) memcpy(o.values, x, (size_t)(rows * cols) * sizeof(float));
    else o.own = quantize_operand_masked(o.values, spec->rounding == ROUND_QUEST ? o.mask : NULL, x, rows, cols, along_rows, spec, &at);
    o.factor = o.own * (again ? from->factor : 1);
    return o;
}
static void host_free(HostOperand *o) { free(o->values); free(o->mask); }

static float fp8_decode(uint8_t code, Format f) { return f == FORMAT_E5M2 ? e5m2_decode(code) : e4m3_decode_signed(code); }
// An operand in device memory, (rows, cols) as the tensor lies, as numbers: BF16, or FP8 bytes, transposed or not; times row factors unless NULL.
static float *device_operand(const void *p, Format format, int transposed, const float *row_factor, int64_t rows, int64_t cols) {
    const int64_t count = rows * cols;
    float *x = format == FORMAT_FLOAT ? from_device((const bf16 *)p, count) : (float *)xcalloc((size_t)count, sizeof(float));
    if (format != FORMAT_FLOAT) {
        uint8_t *bytes = (uint8_t *)xcalloc((size_t)count, 1);
        CUDA_CHECK(cudaMemcpy(bytes, p, (size_t)count, cudaMemcpyDeviceToHost));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) x[r * cols + c] = fp8_decode(bytes[transposed ? c * rows + r : r * cols + c], format);
        free(bytes);
    }
    if (row_factor) {
        float *factor = (float *)xcalloc((size_t)rows, sizeof(float));
        CUDA_CHECK(cudaMemcpy(factor, row_factor, (size_t)rows * sizeof(float), cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < count; i++) x[i] = f32_mul(x[i], factor[i / cols]);
        free(factor);
    }
    return x;
}
// The same of a packed operand, whose padding must be zero. (Where a place depends on M, rows is M.)
static float *packed_operand(const Linear *l, const LinearWork *work, int gemm, int operand, int transposed, int64_t rows, int64_t cols) {
    float *x = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    float *packed = packed_values(native_read(l, work, gemm, operand, rows), transposed ? cols : rows, transposed ? rows : cols);
    for (int64_t i = 0; i < rows * cols; i++) x[i] = !packed ? NAN : transposed ? packed[i % cols * rows + i / cols] : packed[i];
    free(packed);
    return x;
}
// The device scalar that making an operand found, NULL: there is none; *want: what the CPU has for it.
static const float *operand_factor(const Linear *l, int gemm, int operand, const HostOperand *host, float *want) {
    static const int place[3][2] = {{FACTOR_X, FACTOR_W}, {FACTOR_DY_DGRAD, FACTOR_W_DGRAD}, {FACTOR_DY_WGRAD, FACTOR_X_WGRAD}};
    const int again = gemm != GEMM_FORWARD && operand == OPERAND_B;
    *want = l->plan->native && again ? host->factor / 128 : host->own;
    if (l->plan->native) return l->factor + place[gemm][operand];
    return l->plan->kind[gemm][operand] == KIND_AGAIN ? NULL : linear_factor(l, gemm, operand);
}
// device holds values * scale; equal: the same numbers, a zero's sign aside. Packed operands are where linear_native.cuh has them.
static void check_operand(const char *test, const Linear *l, const LinearWork *work, int gemm, int operand, const void *device, const float *row_factor,
                          const HostOperand *host, int64_t rows, int64_t cols) {
    static const char *const names[3][2] = {{"X forward", "W forward"}, {"dY dgrad", "W dgrad"}, {"dY wgrad", "X wgrad"}};
    const LinearPlan *p = l->plan;
    const OperandKind kind = p->kind[gemm][operand];
    if (kind == KIND_PLAIN) return;
    const int transposed = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    const float scale = kind == KIND_EDEN && !p->native ? host->own : 1;  // whose tensor scale is in the values
    float *got = p->native ? packed_operand(l, work, gemm, operand, transposed, rows, cols)
                           : device_operand(device, plan_format(p, gemm, operand), transposed, row_factor, rows, cols);
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < rows * cols; i++)
        if (!(got[i] == host->values[i] * scale)) { wrong++; if (first < 0) first = i; }
    check(wrong == 0, "%-22s %-10s %lld of %lld values differ from the CPU's%s", test, names[gemm][operand], (long long)wrong, (long long)(rows * cols),
          wrong ? "" : " (bit for bit)");
    if (wrong) printf("        first at %lld: GPU %.9g, CPU %.9g\n", (long long)first, got[first], host->values[first] * scale);
    float found, want;
    const float *factor = operand_factor(l, gemm, operand, host, &want);
    if (factor) {
        CUDA_CHECK(cudaMemcpy(&found, factor, sizeof found, cudaMemcpyDeviceToHost));
        check(found == want, "%-22s %-10s factor %.9g, CPU's %.9g", test, names[gemm][operand], found, want);
    }
    free(got);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products: value and tolerance of every element, both carried through what the recipe does to a product

typedef struct { int64_t m, n; double *value, *tolerance; } HostProduct;

static HostProduct product_new(int64_t m, int64_t n) {
    HostProduct p = {m, n, (double *)xcalloc((size_t)(m * n), sizeof(double)), (double *)xcalloc((size_t)(m * n), sizeof(double))};
    return p;
}
static void product_free(HostProduct *p) { free(p->value); free(p->tolerance); }
// Hopper's FP8 tensor core adds the 32 products of an instruction and what was summed before after aligning all 33 to the largest, of which it
// keeps 13 bits behind the point: each addend may lose 2^-13 of the largest. What was summed goes to float32 every 128 products (without
// fast accumulation). `v`: the products of one element, in order.
static double fp8_tolerance(const double *v, int64_t count) {
    double lost = 0, sum = 0;
    for (int64_t group = 0; group < count; group += 32) {
        double largest = fabs(sum);
        for (int64_t t = group; t < group + 32 && t < count; t++) {
            sum += v[t];
            largest = fmax(largest, fabs(v[t]));
        }
        lost += 33 * 0x1p-13 * fmax(largest, fabs(sum));
        if ((group + 32) % 128 == 0) sum = 0;
    }
    return lost;
}
// += factor * A B, A(i,t) = a[i*ai + t*at], B(j,t) likewise. fp8: multiplied by FP8 tensor cores.
static void product_add(HostProduct *p, double factor, const float *a, int64_t ai, int64_t at, const float *b, int64_t bj, int64_t bt, int64_t inner, int fp8) {
    if (inner > 1024) fatal("a product of this test has at most 1024 terms");
#pragma omp parallel for
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double v[1024], sum = 0, size = 0;
            for (int64_t t = 0; t < inner; t++) {
                v[t] = factor * a[i * ai + t * at] * b[j * bj + t * bt];
                sum += v[t]; size += fabs(v[t]);
            }
            p->value[i * p->n + j] += sum;
            p->tolerance[i * p->n + j] += (double)inner * 0x1p-23 * size + (fp8 ? fp8_tolerance(v, inner) : 0) + 0x1p-22 * fabs(sum) + 1e-30;
        }
}
static void product_mask(HostProduct *p, const uint8_t *mask) {
    for (int64_t i = 0; i < p->m * p->n; i++) if (!mask[i]) p->value[i] = p->tolerance[i] = 0;
}
// Runs of 32 times the normalised Sylvester-Hadamard matrix, by the parity of i & j: six roundings a value.
static void product_turn_back(HostProduct *p) {
    for (int64_t run = 0; run < p->m * p->n; run += 32) {
        double value[32], tolerance[32];
        for (int i = 0; i < 32; i++) {
            value[i] = tolerance[i] = 0;
            for (int j = 0; j < 32; j++) {
                value[i] += (__builtin_parity((unsigned)(i & j)) ? -1 : 1) * p->value[run + j] / sqrt(32.0);
                tolerance[i] += (p->tolerance[run + j] + 6 * 0x1p-24 * fabs(p->value[run + j])) / sqrt(32.0);
            }
        }
        memcpy(p->value + run, value, sizeof value); memcpy(p->tolerance + run, tolerance, sizeof tolerance);
    }
}
// Times the slope of the smooth stand-in for W's rounding (the function that test_linear.c holds against its definition). The GPU's powf: 2^-20.
static void product_dge(HostProduct *p, const float *w) {
    for (int64_t i = 0; i < p->m; i++) {
        float amax = 0;
        for (int64_t j = 0; j < p->n; j++) amax = f32_max(f32_abs(w[i * p->n + j]), amax);
        for (int64_t j = 0; j < p->n; j++) {
            const double slope = dge_slope(f32_mul(w[i * p->n + j], plain_scale(amax, E2M1_MAX).inv));
            p->value[i * p->n + j] *= slope;
            p->tolerance[i * p->n + j] = slope * p->tolerance[i * p->n + j] + 0x1p-20 * fabs(p->value[i * p->n + j]);
        }
    }
}
static void product_finish(HostProduct *p, const Linear *l, int gemm, const uint8_t *mask, const float *w) {
    const Recipe *r = l->plan->recipe;
    if (r->gemm[gemm].product == PRODUCT_CLIP_MASK) product_mask(p, mask);
    if (recipe_turns_back(r, gemm)) product_turn_back(p);
    if (r->gemm[gemm].product == PRODUCT_DGE) product_dge(p, w);
}
static double slack = 1;                                    // times the tolerance: 2 for FP4 tensor cores
static int products = 1;                                   // 0: the plan is native and the card has no FP4 products: operands alone
// rounding: of the result, relative to its value.
static void check_product(const char *test, const char *what, const float *got, const HostProduct *p, double rounding) {
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < p->m * p->n; i++) {
        const double tolerance = slack * p->tolerance[i] + rounding * fabs(p->value[i]) + 1e-30;
        double error = fabs(got[i] - p->value[i]) / tolerance;
        if (!(error <= 1e30)) error = 1e30;                // a NaN is as wrong as can be
        worst = fmax(worst, error);
        largest = fmax(largest, fabs(p->value[i]));
    }
    check(worst <= 1 && largest > 0, "%-22s %-24s largest error %.3f of the tolerance", test, what, worst);
}
static double rotation_factor(const Linear *l, int gemm) {
    const OperandSpec *a = &l->plan->recipe->gemm[gemm].a;
    return a->rotation && !rotation_is_normalised(a) ? 1.0 / a->rotation : 1;
}
static double operands_factor(const HostOperand *a, const HostOperand *b) { return (double)a->factor * b->factor; }

// ---------------------------------------------------------------------------------------------------------------------
// A layer

typedef struct {
    Linear l;
    LinearWork work;
    LinearPlan plan;
    int64_t M;
    void *owned[32];
    int owned_count;
} Layer;
static void *layer_take(Layer *t, int64_t bytes) {
    if (t->owned_count == 32) fatal("a layer of this test has more than 32 buffers");
    return t->owned[t->owned_count++] = device_new(bytes ? bytes : 1);
}
static void layer_make(Layer *t, Gemm *g, const char *recipe, int fp8, int native, int weights_kept, int64_t M, int64_t N, int64_t K, const float *w, int dw_bf16) {
    Linear *l = &t->l;
    LinearWork *work = &t->work;
    memset(t, 0, sizeof *t);
    t->plan = linear_plan(recipe_find(recipe), fp8); t->M = M;
    t->plan.native = native;
    l->plan = &t->plan;
    l->layer = TEST_LAYER; l->linear = LINEAR_GATE_UP; l->N = N; l->K = K;
    l->w = (bf16 *)(t->owned[t->owned_count++] = to_device(w, N * K));
    l->dw_bf16 = dw_bf16;
    l->dw = layer_take(t, N * K * 4);
    const auto take = [&](int64_t bytes) { return layer_take(t, bytes); };
    linear_take_input(l, M, take);
    linear_take_weight(l, 1, take);
    if (!l->w_dgrad) l->w_dgrad = layer_take(t, N * K * 2);
    l->dy_dgrad = layer_take(t, M * N * 2);
    float *scalars = (float *)layer_take(t, (2 + FACTOR_COUNT + 4) * 4);
    l->amax_x = scalars; l->amax_w = scalars + 1; l->factor = scalars + 2;
    work->scalars = scalars + 2 + FACTOR_COUNT;
    work->gemm = g; work->weights_kept = weights_kept; work->kept_rows = M;
    work->seed = TEST_SEED; work->step = TEST_STEP; work->rank = TEST_RANK;
    CUDA_CHECK(cudaStreamCreate(&work->stream));           // ordered with the default stream, as the trainer's is
    work->x_forward = layer_take(t, M * K * 2); work->residual = (bf16 *)layer_take(t, M * K * 2);
    work->x_rows = (float *)layer_take(t, M * 4);
    work->dy_wgrad = layer_take(t, M * N * 2); work->x_wgrad = layer_take(t, M * K * 2);
    const int64_t most = (M > N ? M : N) * (N > K ? N : K);
    work->product = (float *)layer_take(t, most * 4);
    work->quantizer_work = layer_take(t, linear_quantizer_bytes(&t->plan, M, N, K));
    if (t->plan.amax_w) amax_launch(work->stream, l->w, N * K, l->amax_w);
}
static void layer_free(Layer *t) {
    for (int i = 0; i < t->owned_count; i++) CUDA_CHECK(cudaFree(t->owned[i]));
    CUDA_CHECK(cudaStreamDestroy(t->work.stream));
}

// What the host found for one micro-batch.
typedef struct { HostOperand x_forward, dy_dgrad, dy_wgrad, x_wgrad; } HostMicro;
typedef struct { float *w; HostOperand forward, dgrad; } HostWeight;

static HostProduct host_forward(const Layer *t, const float *x, const HostMicro *h, const HostWeight *w) {
    const Linear *l = &t->l;
    const GemmSpec *spec = &l->plan->recipe->gemm[GEMM_FORWARD];
    const int64_t K = l->K;
    HostProduct p = product_new(t->M, l->N);
    product_add(&p, operands_factor(&h->x_forward, &w->forward) * rotation_factor(l, GEMM_FORWARD), h->x_forward.values, K, 1, w->forward.values, K, 1, K,
                plan_bytes(l->plan, GEMM_FORWARD, OPERAND_A));
    if (spec->product == PRODUCT_ADD_OUTLIERS) {
        float *rest = (float *)xcalloc((size_t)(t->M * K), sizeof *rest);
        clamp_residual(rest, x, t->M * K, spec->a.clamp_percent);
        product_add(&p, w->forward.factor, rest, K, 1, w->forward.values, K, 1, K, 0);
        free(rest);
    }
    return p;
}
static void check_forward_operands(const char *test, const Layer *t, const HostMicro *h, const HostWeight *w) {
    const Linear *l = &t->l;
    const LinearPlan *p = l->plan;
    const int rows = p->kind[GEMM_FORWARD][OPERAND_A] == KIND_ROWS;
    check_operand(test, l, &t->work, GEMM_FORWARD, OPERAND_A, p->x8 && !p->fp8 ? (void *)l->x_codes : t->work.x_forward, rows ? t->work.x_rows : NULL, &h->x_forward, t->M, l->K);
    check_operand(test, l, &t->work, GEMM_FORWARD, OPERAND_B, l->w_forward, rows ? l->w_rows : NULL, &w->forward, l->N, l->K);
}
// Where dgrad found W.
static const void *w_dgrad_place(const Layer *t) {
    const LinearPlan *p = t->l.plan;
    const int kept = p->kind[GEMM_DGRAD][OPERAND_B] == KIND_AGAIN && t->work.weights_kept && !(p->kind[GEMM_FORWARD][OPERAND_B] == KIND_FP8 && p->fp8);
    return kept ? t->l.w_forward : t->l.w_dgrad;
}
// Y and dX against the host's; the host's dW is added to *dw.
static void check_products(const char *test, const Layer *t, const float *x, const float *dy, const bf16 *y, const bf16 *dx, const HostMicro *h, const HostWeight *w,
                           HostProduct *dw) {
    const Linear *l = &t->l;
    const LinearPlan *p = l->plan;
    const int64_t M = t->M, N = l->N, K = l->K;
    HostProduct want = host_forward(t, x, h, w);
    float *got = from_device(y, M * N);
    check_product(test, "Y", got, &want, 0x1p-8);
    product_free(&want); free(got);
    want = product_new(M, K);
    product_add(&want, operands_factor(&h->dy_dgrad, &w->dgrad) * rotation_factor(l, GEMM_DGRAD), h->dy_dgrad.values, N, 1, w->dgrad.values, 1, K, N,
                plan_bytes(p, GEMM_DGRAD, OPERAND_A));
    product_finish(&want, l, GEMM_DGRAD, h->x_forward.mask, NULL);
    got = from_device(dx, M * K);
    check_product(test, "dX", got, &want, 0x1p-8);
    product_free(&want); free(got);
    HostProduct part = product_new(N, K);
    product_add(&part, operands_factor(&h->dy_wgrad, &h->x_wgrad) * rotation_factor(l, GEMM_WGRAD), h->dy_wgrad.values, 1, N, h->x_wgrad.values, 1, K, M,
                plan_bytes(p, GEMM_WGRAD, OPERAND_A));
    product_finish(&part, l, GEMM_WGRAD, w->forward.mask, w->w);
    for (int64_t i = 0; i < N * K; i++) {
        dw->value[i] += part.value[i];
        dw->tolerance[i] += part.tolerance[i] + (l->dw_bf16 ? 0x1p-8 : 0x1p-23) * fabs(part.value[i]);
    }
    product_free(&part);
}
// What else a native layer made: alphas (exact: backward's tensor scales are powers of two), a forward's operand of a number of rows that is no
// multiple of 128, in work space, and X decoded again for --quant-stats.
static void check_native(const char *test, Layer *t, const float *x, const HostMicro *h, const HostWeight *w, int micro) {
    Linear *l = &t->l;
    const int64_t few = 77, K = l->K;
    const double want[3] = {operands_factor(&h->x_forward, &w->forward), operands_factor(&h->dy_dgrad, &w->dgrad) * rotation_factor(l, GEMM_DGRAD),
                            operands_factor(&h->dy_wgrad, &h->x_wgrad) * rotation_factor(l, GEMM_WGRAD)};
    float alpha[3];
    CUDA_CHECK(cudaMemcpy(alpha, l->factor + FACTOR_ALPHA, sizeof alpha, cudaMemcpyDeviceToHost));
    check(alpha[0] == (float)want[0] && alpha[1] == (float)want[1] && alpha[2] == (float)want[2], "%-22s alphas %.9g %.9g %.9g, CPU's %.9g %.9g %.9g", test, alpha[0], alpha[1],
          alpha[2], want[0], want[1], want[2]);
    bf16 *decoded = (bf16 *)device_new(t->M * K * 2);
    native_decode_launch(t->work.stream, native_operand(l, &t->work, GEMM_FORWARD, OPERAND_A, t->M), t->M, K, decoded);
    CUDA_CHECK(cudaStreamSynchronize(t->work.stream));
    float *got = from_device(decoded, t->M * K);
    int64_t wrong = 0;
    for (int64_t i = 0; i < t->M * K; i++) wrong += !(got[i] == h->x_forward.values[i]);
    check(wrong == 0, "%-22s X decoded for measuring: %lld values differ", test, (long long)wrong);
    if (micro == 0) {
        amax_launch(t->work.stream, l->x, few * K, l->amax_x);
        native_make_input(l, &t->work, few);
        CUDA_CHECK(cudaStreamSynchronize(t->work.stream));
        HostOperand host = host_operand(l, GEMM_FORWARD, OPERAND_A, x, few, K, NULL, micro);
        check_operand(test, l, &t->work, GEMM_FORWARD, OPERAND_A, NULL, NULL, &host, few, K);
        host_free(&host);
    }
    free(got);
    CUDA_CHECK(cudaFree(decoded));
}
// One micro-batch: everything checked but dW, whose value is added to *dw.
static void check_micro(const char *test, Layer *t, int micro, float dy_size, const HostWeight *w, HostProduct *dw) {
    Linear *l = &t->l;
    const LinearPlan *p = l->plan;
    const int64_t M = t->M, N = l->N, K = l->K;
    float *x = random_values(M * K, 10 + micro, 1), *dy = random_values(M * N, 20 + micro, dy_size);
    bf16 *device_dy = to_device(dy, M * N), *y = (bf16 *)device_new(M * N * 2), *dx = (bf16 *)device_new(M * K * 2);
    l->x = to_device(x, M * K);
    t->work.micro = micro;
    if (p->amax_x) amax_launch(t->work.stream, l->x, M * K, l->amax_x);
    if (products) linear_forward(l, &t->work, y, M);
    else {
        if (!l->forward_ready) native_make_weight(l, &t->work);
        native_make_input(l, &t->work, M);
    }
    CUDA_CHECK(cudaStreamSynchronize(t->work.stream));
    HostMicro h;
    h.x_forward = host_operand(l, GEMM_FORWARD, OPERAND_A, x, M, K, NULL, micro);
    check_forward_operands(test, t, &h, w);
    if (products) linear_dgrad(l, &t->work, dx, device_dy, M);
    else native_make_dgrad(l, &t->work, device_dy, M);
    CUDA_CHECK(cudaStreamSynchronize(t->work.stream));
    h.dy_dgrad = host_operand(l, GEMM_DGRAD, OPERAND_A, dy, M, N, NULL, micro);
    h.dy_wgrad = host_operand(l, GEMM_WGRAD, OPERAND_A, dy, M, N, NULL, micro);
    h.x_wgrad = host_operand(l, GEMM_WGRAD, OPERAND_B, x, M, K, &h.x_forward, micro);
    check_operand(test, l, &t->work, GEMM_DGRAD, OPERAND_A, l->dy_dgrad, NULL, &h.dy_dgrad, M, N);
    check_operand(test, l, &t->work, GEMM_DGRAD, OPERAND_B, w_dgrad_place(t), NULL, &w->dgrad, N, K);
    check_operand(test, l, &t->work, GEMM_WGRAD, OPERAND_A, t->work.dy_wgrad, NULL, &h.dy_wgrad, M, N);
    if (products) linear_wgrad(l, &t->work, device_dy, l->x, M);
    else native_make_wgrad(l, &t->work, M);
    CUDA_CHECK(cudaStreamSynchronize(t->work.stream));
    const int kept = p->kind[GEMM_WGRAD][OPERAND_B] == KIND_AGAIN && p->x8;
    check_operand(test, l, &t->work, GEMM_WGRAD, OPERAND_B, kept ? (void *)l->x_codes : t->work.x_wgrad, NULL, &h.x_wgrad, M, K);
    if (p->native) check_native(test, t, x, &h, w, micro);
    if (products) check_products(test, t, x, dy, y, dx, &h, w, dw);
    host_free(&h.x_forward); host_free(&h.dy_dgrad); host_free(&h.dy_wgrad); host_free(&h.x_wgrad);
    free(x); free(dy);
    CUDA_CHECK(cudaFree(l->x)); CUDA_CHECK(cudaFree(device_dy)); CUDA_CHECK(cudaFree(y)); CUDA_CHECK(cudaFree(dx));
}
// Two micro-batches of one layer: everything checked on each, the weight gradient after both.
static void check_recipe(Gemm *g, const char *name, int fp8, int native, int weights_kept, int64_t M, int64_t N, int64_t K, float dy_size, int dw_bf16) {
    static Layer t;
    char test[96];
    HostWeight w;
    w.w = random_values(N * K, 1, 0.02f);
    layer_make(&t, g, name, fp8, native, weights_kept, M, N, K, w.w, dw_bf16);
    snprintf(test, sizeof test, "%s%s", name, native ? " (native)" : t.plan.fp8 && plan_bytes(&t.plan, GEMM_FORWARD, OPERAND_A) ? " (FP8 products)" : "");
    printf("%s: M %lld, N %lld, K %lld, dY of size %g, dW in %s, W's operands %s\n", test, (long long)M, (long long)N, (long long)K, dy_size,
           dw_bf16 ? "BF16" : "float32", weights_kept ? "kept" : "made again");
    w.forward = host_operand(&t.l, GEMM_FORWARD, OPERAND_B, w.w, N, K, NULL, 0);
    w.dgrad = host_operand(&t.l, GEMM_DGRAD, OPERAND_B, w.w, N, K, &w.forward, 0);
    HostProduct dw = product_new(N, K);
    for (int micro = 0; micro < 2; micro++) check_micro(test, &t, micro, dy_size, &w, &dw);
    float *got = dw_bf16 ? from_device((const bf16 *)t.l.dw, N * K) : (float *)xcalloc((size_t)(N * K), sizeof *got);
    if (!dw_bf16) CUDA_CHECK(cudaMemcpy(got, t.l.dw, (size_t)(N * K) * 4, cudaMemcpyDeviceToHost));
    if (products) check_product(test, "dW of two micro-batches", got, &dw, dw_bf16 ? 0x1p-8 : 0x1p-23);
    free(got); free(w.w); host_free(&w.forward); host_free(&w.dgrad);
    product_free(&dw);
    layer_free(&t);
}


// ---------------------------------------------------------------------------------------------------------------------
// --nvfp4-gemm

// The layer with packed operands, where the recipe has them; its products where the card does. What cannot be native is refused, and `auto` is emulated.
static void check_choice(Gemm *g, const char *name, const char *self) {
    LinearPlan p = linear_plan(recipe_find(name), 0);
    const char *lacks = plan_has_nvfp4(&p) ? native_plan_lacks(&p) : "no NVFP4 products";
    char card[256], why[256] = "";
    const int card_has = nvfp4_gemm_supported(g, card, sizeof card), expected = !lacks && card_has;
    if (!lacks) {
        slack = 2; products = card_has;
        check_recipe(g, name, 0, 1, 1, 256, 384, 256, 1, 0);
        check_recipe(g, name, 0, 1, 0, 384, 128, 640, 1e-7f, 1);
        slack = products = 1;
        if (!card_has) printf("%s (native): the products were not looked at: %s\n", name, card);
    }
    native_choose(&p, NVFP4_GEMM_AUTO, why, sizeof why);
    check(p.native == expected && strstr(why, lacks ? lacks : card), "%-22s --nvfp4-gemm auto: %s: %s", name, p.native ? "native" : "emulated", why);
    native_choose(&p, NVFP4_GEMM_EMULATED, why, sizeof why);
    check(!p.native, "%-22s --nvfp4-gemm emulated", name);
    if (expected) return;
    char *command = xasprintf("'%s' --native %s 2>&1", self, name), said[1024] = "";   // in a process of its own, as it ends it
    FILE *f = popen(command, "r");
    if (!f) fatal("cannot run %s", command);
    const size_t n = fread(said, 1, sizeof said - 1, f);
    const int status = pclose(f);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(said, "error: --nvfp4-gemm native: ") == said && strstr(said, lacks ? lacks : card) &&
          strchr(said, '\n') == said + n - 1, "%-22s --nvfp4-gemm native is refused: %.*s", name, (int)strcspn(said, "\n"), said);
    free(command);
}

// test_linear_gpu [RECIPE ...]      only those; without, all
// test_linear_gpu --small           every recipe on one shape: for compute-sanitizer
// test_linear_gpu --native RECIPE   its own call of itself: what --nvfp4-gemm native says
static int asked_for(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++) if (strcmp(argv[i], name) == 0) return 1;
    return argc == 1;
}
int main(int argc, char **argv) {
    Gemm g;
    if (argc == 3 && strcmp(argv[1], "--native") == 0) {
        LinearPlan p = linear_plan(recipe_find(argv[2]), 0);
        char why[256];
        native_choose(&p, NVFP4_GEMM_NATIVE, why, sizeof why);
        return 0;
    }
    const int small = argc == 2 && strcmp(argv[1], "--small") == 0;
    if (small) argc = 1;
    for (int i = 1; i < argc; i++) (void)recipe_find(argv[i]);
    void *workspace = device_new((int64_t)GEMM_WORKSPACE_BYTES), *scalars = device_new(256);
    gemm_open(&g, workspace, scalars, 0);
    for (int i = 0; i < RECIPE_COUNT; i++) {
        const char *name = RECIPES[i].name;
        if (!asked_for(name, argc, argv)) continue;
        for (int fp8 = 0; fp8 <= fp8_gemm_supported(); fp8++) {
            const LinearPlan plan = linear_plan(&RECIPES[i], fp8);
            int bytes = 0;
            for (int gemm = 0; gemm < 3; gemm++) for (int o = 0; o < 2; o++) bytes |= plan_bytes(&plan, gemm, o);
            if (fp8 && !bytes) continue;                   // the same again
            check_recipe(&g, name, fp8, 0, 1, 256, 384, 256, 1, 0);
            if (!small) check_recipe(&g, name, fp8, 0, 0, 384, 128, 640, 1e-7f, 1);  // gradients as small as training's
        }
        if (!small) check_choice(&g, name, argv[0]);
    }
    gemm_close(&g);
    CUDA_CHECK(cudaFree(workspace)); CUDA_CHECK(cudaFree(scalars));
    return checks_finish();
}
