// gemm.cu: every algorithm that cuBLASLt proposes for the models' products, in BF16 and in FP8, cold and under sustained load. FP8 twice:
// sums added up in float32, as the trainer has it, and left in the tensor core ("fast").
//
//   nvcc -std=c++17 -O3 -arch=native dev/cuda/gemm.cu -o gemm -lcublasLt && ./gemm [--quick]
//
// A card at its power limit lowers its clock, so what a product costs in a step is decided by the energy of its algorithm as well:
// "cold" is the median of a few runs after a pause, "sustained" the rate over the last half of 0.4 s without one.
// Checks: every algorithm's result on some elements against float64; alpha from device memory and accumulation on small FP8 products.
#include <unistd.h>

#include "ladder.cuh"
#include "llmc/cuda/gemm.cuh"

// FP8 operands are both stored along the inner dimension. The last: gradients in E4M3.
#define BF16_BF16 FORMAT_FLOAT, FORMAT_FLOAT
#define E4M3_E4M3 FORMAT_E4M3, FORMAT_E4M3
#define E5M2_E4M3 FORMAT_E5M2, FORMAT_E4M3
static const GemmShape SHAPES[] = {
    {16384, 6144, 2048, 0, 1, 0, 0, BF16_BF16}, {16384, 2048, 6144, 0, 0, 0, 0, BF16_BF16}, {6144, 2048, 16384, 1, 0, 1, 0, BF16_BF16},
    {16384, 11264, 2048, 0, 1, 0, 0, BF16_BF16}, {16384, 2048, 11264, 0, 0, 0, 0, BF16_BF16}, {11264, 2048, 16384, 1, 0, 1, 0, BF16_BF16},
    {16384, 2048, 5632, 0, 1, 0, 0, BF16_BF16}, {16384, 5632, 2048, 0, 0, 0, 0, BF16_BF16}, {2048, 5632, 16384, 1, 0, 1, 0, BF16_BF16},
    {16384, 6144, 2048, 0, 1, 0, 0, E4M3_E4M3}, {16384, 2048, 6144, 0, 1, 0, 0, E5M2_E4M3}, {6144, 2048, 16384, 0, 1, 1, 0, E5M2_E4M3},
    {16384, 11264, 2048, 0, 1, 0, 0, E4M3_E4M3}, {16384, 2048, 11264, 0, 1, 0, 0, E5M2_E4M3}, {11264, 2048, 16384, 0, 1, 1, 0, E5M2_E4M3},
    {16384, 2048, 5632, 0, 1, 0, 0, E4M3_E4M3}, {16384, 5632, 2048, 0, 1, 0, 0, E5M2_E4M3}, {2048, 5632, 16384, 0, 1, 1, 0, E5M2_E4M3},
    {6144, 2048, 16384, 0, 1, 1, 0, E4M3_E4M3},
};

static double seconds_of(Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, void *d, const void *a, const void *b, int runs) {
    cudaEvent_t from, to;
    float ms;
    CUDA_CHECK(cudaEventCreate(&from));
    CUDA_CHECK(cudaEventCreate(&to));
    CUDA_CHECK(cudaEventRecord(from, 0));
    for (int i = 0; i < runs; i++) gemm_check(gemm_launch(g, p, algo, d, a, b, NULL, 0, 0), "timing a product", &p->shape);
    CUDA_CHECK(cudaEventRecord(to, 0));
    CUDA_CHECK(cudaEventSynchronize(to));
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    CUDA_CHECK(cudaEventDestroy(from));
    CUDA_CHECK(cudaEventDestroy(to));
    return ms * 1e-3;
}
// An operand of `count` values from N(0,1), times 32 or 4096 in FP8 (then the largest of them are near the format's largest, but do
// not reach it), on the card and as values on the host.
struct Operand {
    void *device;
    std::vector<float> values;
};
static float format_decode(Format f, uint32_t code) { return f == FORMAT_E5M2 ? e5m2_decode(code) : e4m3_decode_signed(code); }
static __global__ void fill_fp8_kernel(uint8_t *x, int64_t count, int e5m2, uint64_t seed) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = (uint8_t)(e5m2 ? e5m2_encode(4096.0f * gauss_value(seed, (uint64_t)i)) : e4m3_encode_signed(32.0f * gauss_value(seed, (uint64_t)i)));
}
static Operand operand_new(Format format, int64_t count, uint64_t seed) {
    Operand o;
    o.values.resize((size_t)count);
    if (format == FORMAT_FLOAT) {
        o.device = device_new<bf16>(count);
        fill_gauss((bf16 *)o.device, count, seed);
        const std::vector<uint16_t> bits = host_copy((const uint16_t *)o.device, count);
        for (int64_t i = 0; i < count; i++) o.values[(size_t)i] = bf16_decode(bits[(size_t)i]);
        return o;
    }
    o.device = device_new<uint8_t>(count);
    fill_fp8_kernel<<<2048, 256>>>((uint8_t *)o.device, count, format == FORMAT_E5M2, seed);
    CUDA_LAUNCHED();
    const std::vector<uint8_t> bytes = host_copy((const uint8_t *)o.device, count);
    for (int64_t i = 0; i < count; i++) o.values[(size_t)i] = format_decode(format, bytes[(size_t)i]);
    return o;
}

// The worst of a few elements of D = alpha A B + beta D0, in units of its tolerance, and their error in all: rms of the errors over rms of D.
// Tolerance, with size = sum |a b|: every float32 addition may miss by 2^-24 of a partial sum, which is at most size; and by 2^-23 where a tensor core
// truncates. FP8 is summed with 14 bits inside a tensor core: an instruction, of 32 products, may miss by 2^-13 of what it has summed. Added
// up in float32 every four instructions, these sums are at most 4 size together; left there, at most k/32 size.
struct Errors { double worst, relative; };
static Errors errors_of(const GemmShape *s, const void *d, const Operand &a, const Operand &b, int fast, double alpha, const std::vector<float> &before) {
    Errors e = {0, 0};
    double errors = 0, values = 0;
    for (int t = 0; t < 64; t++) {
        const int64_t i = (int64_t)t * 7919 % s->m, j = (int64_t)t * 104729 % s->n;
        double sum = 0, size = 0;
        for (int64_t k = 0; k < s->k; k++) {
            const double v = (double)a.values[(size_t)(s->a_transposed ? k * s->m + i : i * s->k + k)] *
                             (double)b.values[(size_t)(s->b_transposed ? j * s->k + k : k * s->n + j)];
            sum += v; size += fabs(v);
        }
        float got;
        if (s->d_float32) CUDA_CHECK(cudaMemcpy(&got, (const float *)d + i * s->n + j, 4, cudaMemcpyDeviceToHost));
        else { uint16_t w; CUDA_CHECK(cudaMemcpy(&w, (const uint16_t *)d + i * s->n + j, 2, cudaMemcpyDeviceToHost)); got = bf16_decode(w); }
        const double want = alpha * sum + (before.empty() ? 0 : (double)before[(size_t)(i * s->n + j)]);
        const double inside = gemm_is_fp8(s) ? 0x1p-13 * (fast ? std::max(1.0, (double)s->k / 32) : 4) : 0;
        const double tolerance = fabs(alpha) * ((double)s->k * 0x1p-23 + inside) * size + (s->d_float32 ? 0x1p-22 : 0x1p-8) * fabs(want);
        const double error = fabs(got - want);
        if (!(error / tolerance <= e.worst)) e.worst = error / tolerance;
        errors += error * error; values += want * want;
    }
    e.relative = sqrt(errors / values);
    return e;
}

// Times one proposal and prints its row.
static void time_proposal(Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, int number, void *d, const void *a, const void *b, double relative,
                          int same_bits) {
    const GemmShape *s = &p->shape;
    const double flops = 2.0 * (double)s->m * (double)s->n * (double)s->k;
    CUDA_CHECK(cudaDeviceSynchronize());
    usleep(100000);
    seconds_of(g, p, algo, d, a, b, 1);
    const double cold = seconds_of(g, p, algo, d, a, b, 3) / 3;
    const int runs = (int)(0.2 / cold) + 1;
    seconds_of(g, p, algo, d, a, b, runs);
    const double hot = seconds_of(g, p, algo, d, a, b, runs) / runs;
    int tile = 0, stages = 0;
    uint16_t cluster = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages, &written);
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, sizeof cluster, &written);
    printf("  %2d tile %3d stages %2d cluster %2d  cold %7.3f ms %6.1f TFLOP/s   sustained %7.3f ms %6.1f TFLOP/s  error %.1e  %s\n", number, tile, stages,
           cluster, cold * 1e3, flops / cold * 1e-12, hot * 1e3, flops / hot * 1e-12, relative, same_bits ? "same bits" : "other bits");
    fflush(stdout);
}
// All proposals of a shape: checked and, unless --quick, timed.
static void measure_shape(Ladder *l, Gemm *g, const GemmShape &s, void *d, const Operand &a, const Operand &b) {
    GemmPlan *p = gemm_plan(g, s);
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    const int count = gemm_propose(g, p, found, GEMM_CANDIDATES);
    char text[96];
    printf("\n%s%s: %d proposals\n", gemm_describe(&s, text, sizeof text), !gemm_is_fp8(&s) ? "" : g->fast_accumulation ? ", fast" : ", added in float32", count);
    uint64_t first = 0;
    for (int i = 0; i < count; i++) {
        if (gemm_launch(g, p, &found[i].algo, d, a.device, b.device, NULL, 0, 0) != CUBLAS_STATUS_SUCCESS) { printf("  %2d refused\n", i); continue; }
        CUDA_CHECK(cudaDeviceSynchronize());
        const uint64_t hash = gemm_hash(g, p, d, 0);
        const Errors e = errors_of(&s, d, a, b, g->fast_accumulation, 1, std::vector<float>());
        ladder_check(l, e.worst <= 1, "%s, proposal %d: error %.3f of the tolerance", text, i, e.worst);
        if (i == 0) first = hash;
        if (!l->quick) time_proposal(g, p, &found[i].algo, i, d, a.device, b.device, e.relative, hash == first);
    }
    gemm_trim(g, 0);
}
static void measure(Ladder *l, Gemm *g, const GemmShape &s) {
    const Operand a = operand_new(s.a_format, s.m * s.k, 1), b = operand_new(s.b_format, s.k * s.n, 2);
    void *d = device_new<char>(s.m * s.n * 4);
    for (int fast = 0; fast <= gemm_is_fp8(&s); fast++) {
        g->fast_accumulation = fast;
        measure_shape(l, g, s, d, a, b);
    }
    CUDA_CHECK(cudaFree(a.device)); CUDA_CHECK(cudaFree(b.device)); CUDA_CHECK(cudaFree(d));
}
// D = alpha A B + D, alpha in device memory, on shapes that are multiples of 16 and no more.
static void check_small(Ladder *l, Gemm *g, GemmShape s) {
    const float scale = 3.25e-7f;                          // what scales of two FP8 tensors come to
    const Operand a = operand_new(s.a_format, s.m * s.k, 3), b = operand_new(s.b_format, s.k * s.n, 4);
    const DeviceArray<float> alpha(std::vector<float>(1, scale));
    DeviceArray<float> d(s.m * s.n);
    CUDA_CHECK(cudaMemset(d, 0xFF, (size_t)(s.m * s.n) * 4));  // NaN: what is overwritten must not be read
    g->fast_accumulation = 0;
    const GemmPlan *p = gemm_plan(g, s);
    std::vector<float> before;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        gemm_run(g, p, d.p, a.device, b.device, alpha.p, accumulate, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
        const Errors e = errors_of(&s, d.p, a, b, 0, scale, before);
        char text[96];
        ladder_check(l, e.worst <= 1, "%s, alpha on the card%s: error %.3f of the tolerance", gemm_describe(&s, text, sizeof text), accumulate ? ", accumulated" : "",
                     e.worst);
        if (s.d_float32) before = d.host(s.m * s.n);
        else for (uint16_t w : host_copy((const uint16_t *)d.p, s.m * s.n)) before.push_back(bf16_decode(w));
    }
    gemm_trim(g, 0);
    CUDA_CHECK(cudaFree(a.device)); CUDA_CHECK(cudaFree(b.device));
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    Gemm g;
    gemm_open(&g, device_new<char>(GEMM_WORKSPACE_BYTES), device_new<char>(256), 0);
    const int fp8 = fp8_gemm_supported();
    if (!fp8) printf("this card multiplies no FP8\n");
    const int64_t small[][3] = {{16, 16, 16}, {48, 80, 112}, {256, 128, 144}, {128, 256, 2048}};
    for (int i = 0; fp8 && i < 4; i++)
        for (int wide = 0; wide < 2; wide++) {
            const int64_t m = small[i][0], n = small[i][1], k = small[i][2];
            check_small(&l, &g, {m, n, k, 0, 1, wide, 1, E4M3_E4M3});
            check_small(&l, &g, {m, n, k, 0, 1, wide, 1, E5M2_E4M3});
        }
    if (!l.small) {
        for (const GemmShape &s : SHAPES)
            if (fp8 || !gemm_is_fp8(&s)) measure(&l, &g, s);
    }
    return ladder_finish(&l);
}
