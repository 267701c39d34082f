// test_linear_gpu.cu: one linear layer on the GPU, its three GEMMs under each recipe, against operands quantized by the CPU with the same
// seeds and products summed in float64.
//
// Operands must equal the CPU's bit for bit (up to the sign of a zero). Products differ by float32 accumulation alone: an inner
// product of n terms is off by at most n * 2^-23 of the sum of its terms' magnitudes (tensor cores may truncate instead of rounding,
// hence a whole unit), and a BF16 result by half of its last place, 2^-8 of its value at most, more. alpha costs three roundings, 2^-22.
// A BF16 dW of two micro-batches is rounded twice, the first time when it holds one of them: 2^-8 of that one's value more.
#include "llmc/cpu/quantize.h"
#include "llmc/cuda/linear.cuh"

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

typedef struct { float *values; float factor; } HostOperand;  // operand = values * factor

// What the CPU multiplies. from: the forward's operand that backward starts from, NULL: x itself.
static HostOperand host_operand(const Linear *l, const Recipe *r, int gemm, int operand, const float *x, int64_t rows, int64_t cols,
                                const HostOperand *from, int micro) {
    const OperandSpec *spec = operand == OPERAND_A ? &r->gemm[gemm].a : &r->gemm[gemm].b;
    const int is_weight = operand == OPERAND_B && gemm != GEMM_WGRAD;
    const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    QuantizeAddress at = {TEST_SEED, TEST_STEP, l->layer, l->linear, gemm, operand, is_weight ? 0 : TEST_RANK, is_weight ? 0 : micro};
    HostOperand o = {(float *)xcalloc((size_t)(rows * cols), sizeof(float)), 1};
    const int again = from && spec->source == FROM_FORWARD;
    o.factor = quantize_operand(o.values, again ? from->values : x, rows, cols, along_rows, spec, &at);
    if (again) o.factor *= from->factor;
    return o;
}
// device holds values * scale; equal: the same numbers, a zero's sign aside.
static void check_operand(const char *recipe, const char *what, const bf16 *device, const HostOperand *host, float scale, int64_t count) {
    float *got = from_device(device, count);
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < count; i++)
        if (!(got[i] == host->values[i] * scale)) { wrong++; if (first < 0) first = i; }
    check(wrong == 0, "%-14s %-22s %lld of %lld values differ from the CPU's%s", recipe, what, (long long)wrong, (long long)count, wrong ? "" : " (bit for bit)");
    if (wrong) printf("        first at %lld: GPU %.9g, CPU %.9g\n", (long long)first, got[first], host->values[first] * scale);
    free(got);
}
// got (m,n) against sum over micro-batches of factor * A B, A(i,t) = a[i*ai + t*at], B(j,t) likewise.
typedef struct { const HostOperand *a, *b; int64_t ai, at, bj, bt, inner; double rotation; } HostProduct;
// rounding: of the result, relative to its value; between: of what each part adds, relative to that.
static void check_product(const char *recipe, const char *what, const float *got, const HostProduct *parts, int count, int64_t m, int64_t n, double rounding,
                          double between) {
    double worst = 0;
#pragma omp parallel for reduction(max : worst)
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0, terms = 0, added = 0;
            for (int k = 0; k < count; k++) {
                const HostProduct *p = &parts[k];
                const double factor = (double)p->a->factor * p->b->factor / p->rotation;
                const double before = sum;
                for (int64_t t = 0; t < p->inner; t++) {
                    const double v = factor * p->a->values[i * p->ai + t * p->at] * p->b->values[j * p->bj + t * p->bt];
                    sum += v; size += fabs(v);
                }
                terms += (double)p->inner;
                added += fabs(sum - before);
            }
            const double tolerance = terms * 0x1p-23 * size + between * added + (rounding + 0x1p-22) * fabs(sum) + 1e-30;
            double error = fabs(got[i * n + j] - sum) / tolerance;
            if (!(error <= 1e30)) error = 1e30;            // a NaN is as wrong as can be
            if (error > worst) worst = error;
        }
    check(worst <= 1, "%-14s %-22s largest error %.3f of the tolerance", recipe, what, worst);
}

static Linear layer_new(int64_t M, int64_t N, int64_t K, LinearWork *work, const float *w, int dw_bf16) {
    Linear l;
    memset(&l, 0, sizeof l);
    l.layer = TEST_LAYER; l.linear = LINEAR_GATE_UP; l.N = N; l.K = K;
    l.w = to_device(w, N * K);
    l.dw_bf16 = dw_bf16;
    l.dw = device_new(N * K * (dw_bf16 ? 2 : 4));
    l.x_codes = (uint8_t *)device_new(M * K / 2); l.x_scales = (uint8_t *)device_new(M * K / 16);
    l.w_codes = (uint8_t *)device_new(N * K / 2); l.w_scales = (uint8_t *)device_new(N * K / 16);
    l.w_forward = (bf16 *)device_new(N * K * 2); l.w_dgrad = (bf16 *)device_new(N * K * 2);
    l.dy_dgrad = (bf16 *)device_new(M * N * 2);
    float *scalars = (float *)device_new(7 * 4);
    l.amax_x = scalars; l.amax_w = scalars + 1; l.st_x = scalars + 2; l.st_w = scalars + 3; l.alpha = scalars + 4;
    work->x_forward = (bf16 *)device_new(M * K * 2);
    work->dy_wgrad = (bf16 *)device_new(M * N * 2);
    work->x_wgrad = (bf16 *)device_new(M * K * 2);
    const int64_t a = eden_workspace_bytes(M, N), b = eden_workspace_bytes(M, K), c = eden_workspace_bytes(N, K);
    work->eden_work = device_new(a > b ? (a > c ? a : c) : (b > c ? b : c));
    amax_launch(work->stream, l.w, N * K, l.amax_w);
    return l;
}
static void layer_free(Linear *l, LinearWork *w) {
    void *all[] = {(void *)l->w, l->dw, l->x_codes, l->x_scales, l->w_codes, l->w_scales, l->w_forward, l->w_dgrad, l->dy_dgrad, l->amax_x,
                   w->x_forward, w->dy_wgrad, w->x_wgrad, w->eden_work};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) CUDA_CHECK(cudaFree(all[i]));
}

// Two micro-batches of one layer: everything checked on each, the weight gradient after both.
static void check_recipe(Gemm *g, const char *name, int64_t M, int64_t N, int64_t K, float dy_size, int dw_bf16) {
    LinearWork work;
    memset(&work, 0, sizeof work);
    work.gemm = g; work.recipe = recipe_find(name);
    work.quantized = linear_recipe_quantized(work.recipe);
    work.weights_kept = 1;
    work.seed = TEST_SEED; work.step = TEST_STEP; work.rank = TEST_RANK;
    CUDA_CHECK(cudaStreamCreate(&work.stream));  // ordered with the default stream, as the trainer's is
    float *w = random_values(N * K, 1, 0.02f);
    Linear l = layer_new(M, N, K, &work, w, dw_bf16);
    const HostOperand w_forward = host_operand(&l, work.recipe, GEMM_FORWARD, OPERAND_B, w, N, K, NULL, 0);
    const HostOperand w_dgrad = host_operand(&l, work.recipe, GEMM_DGRAD, OPERAND_B, w, N, K, &w_forward, 0);
    const double rotation = work.quantized ? 128 : 1;
    HostOperand dy_wgrad[2], x_wgrad[2];
    bf16 *y = (bf16 *)device_new(M * N * 2), *dx = (bf16 *)device_new(M * K * 2);
    printf("%s: M %lld, N %lld, K %lld, dY of size %g, dW in %s\n", name, (long long)M, (long long)N, (long long)K, dy_size, dw_bf16 ? "BF16" : "float32");
    for (int micro = 0; micro < 2; micro++) {
        float *x = random_values(M * K, 10 + micro, 1), *dy = random_values(M * N, 20 + micro, dy_size);
        bf16 *device_x = to_device(x, M * K), *device_dy = to_device(dy, M * N);
        work.micro = micro;
        l.x = device_x;
        amax_launch(work.stream, l.x, M * K, l.amax_x);
        linear_forward(&l, &work, y, M);
        linear_dgrad(&l, &work, dx, device_dy, M);
        CUDA_CHECK(cudaStreamSynchronize(work.stream));

        const HostOperand x_forward = host_operand(&l, work.recipe, GEMM_FORWARD, OPERAND_A, x, M, K, NULL, micro);
        const HostOperand dy_dgrad = host_operand(&l, work.recipe, GEMM_DGRAD, OPERAND_A, dy, M, N, NULL, micro);
        dy_wgrad[micro] = host_operand(&l, work.recipe, GEMM_WGRAD, OPERAND_A, dy, M, N, NULL, micro);
        x_wgrad[micro] = host_operand(&l, work.recipe, GEMM_WGRAD, OPERAND_B, x, M, K, &x_forward, micro);
        if (work.quantized) {
            check_operand(name, "X forward", work.x_forward, &x_forward, 1, M * K);
            check_operand(name, "W forward", l.w_forward, &w_forward, 1, N * K);
            check_operand(name, "dY dgrad", l.dy_dgrad, &dy_dgrad, dy_dgrad.factor, M * N);
            check_operand(name, "W dgrad", l.w_dgrad, &w_dgrad, w_dgrad.factor / w_forward.factor, N * K);
            check_operand(name, "dY wgrad", work.dy_wgrad, &dy_wgrad[micro], dy_wgrad[micro].factor, M * N);
        }
        linear_wgrad(&l, &work, device_dy, device_x, M);
        CUDA_CHECK(cudaStreamSynchronize(work.stream));
        if (work.quantized) check_operand(name, "X wgrad", work.x_wgrad, &x_wgrad[micro], x_wgrad[micro].factor / x_forward.factor, M * K);

        float *got = from_device(y, M * N);
        const HostProduct forward = {&x_forward, &w_forward, K, 1, K, 1, K, 1};
        check_product(name, "Y", got, &forward, 1, M, N, 0x1p-8, 0);
        free(got);
        got = from_device(dx, M * K);
        const HostProduct dgrad = {&dy_dgrad, &w_dgrad, N, 1, 1, K, N, rotation};
        check_product(name, "dX", got, &dgrad, 1, M, K, 0x1p-8, 0);
        free(got); free(x); free(dy); free(x_forward.values); free(dy_dgrad.values);
        CUDA_CHECK(cudaFree(device_x)); CUDA_CHECK(cudaFree(device_dy));
    }
    float *dw = dw_bf16 ? from_device((const bf16 *)l.dw, N * K) : (float *)xcalloc((size_t)(N * K), sizeof *dw);
    if (!dw_bf16) CUDA_CHECK(cudaMemcpy(dw, l.dw, (size_t)(N * K) * 4, cudaMemcpyDeviceToHost));
    const HostProduct wgrad[2] = {{&dy_wgrad[0], &x_wgrad[0], 1, N, 1, K, M, rotation}, {&dy_wgrad[1], &x_wgrad[1], 1, N, 1, K, M, rotation}};
    check_product(name, "dW of two micro-batches", dw, wgrad, 2, N, K, dw_bf16 ? 0x1p-8 : 0x1p-23, dw_bf16 ? 0x1p-8 : 0);
    free(dw); free(w); free(w_forward.values); free(w_dgrad.values);
    for (int i = 0; i < 2; i++) { free(dy_wgrad[i].values); free(x_wgrad[i].values); }
    CUDA_CHECK(cudaFree(y)); CUDA_CHECK(cudaFree(dx));
    layer_free(&l, &work);
    CUDA_CHECK(cudaStreamDestroy(work.stream));
}

int main(void) {
    Gemm g;
    void *workspace = device_new((int64_t)GEMM_WORKSPACE_BYTES), *scalars = device_new(256);
    gemm_open(&g, workspace, scalars, 0);
    check_recipe(&g, "bf16", 256, 384, 256, 1, 0);
    check_recipe(&g, "bf16", 256, 384, 256, 1, 1);
    check_recipe(&g, "quartet2", 256, 384, 256, 1, 0);
    check_recipe(&g, "quartet2", 384, 128, 640, 1e-7f, 1);  // gradients as small as training's
    check_recipe(&g, "quartet2-no46", 128, 256, 128, 1e-3f, 0);
    gemm_close(&g);
    CUDA_CHECK(cudaFree(workspace)); CUDA_CHECK(cudaFree(scalars));
    return checks_finish();
}
