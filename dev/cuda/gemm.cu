// gemm.cu: every algorithm that cuBLASLt proposes for the models' products, cold and under sustained load.
//
//   nvcc -std=c++17 -O3 -arch=native dev/cuda/gemm.cu -o gemm -lcublasLt && ./gemm [--quick]
//
// A card at its power limit lowers its clock, so what a product costs in a step is decided by the energy of its algorithm as well:
// "cold" is the median of a few runs after a pause, "sustained" the rate over the last half of 0.4 s without one.
// Checks: every algorithm's result against the first one's, and the first one's against float64 on some elements.
#include <unistd.h>

#include "ladder.cuh"
#include "llmc/cuda/gemm.cuh"

static const GemmShape SHAPES[] = {
    {16384, 6144, 2048, 0, 1, 0, 0}, {16384, 2048, 6144, 0, 0, 0, 0}, {6144, 2048, 16384, 1, 0, 1, 0},
    {16384, 11264, 2048, 0, 1, 0, 0}, {16384, 2048, 11264, 0, 0, 0, 0}, {11264, 2048, 16384, 1, 0, 1, 0},
    {16384, 2048, 5632, 0, 1, 0, 0}, {16384, 5632, 2048, 0, 0, 0, 0}, {2048, 5632, 16384, 1, 0, 1, 0},
};

static double seconds_of(Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, void *d, const bf16 *a, const bf16 *b, int runs) {
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
// Largest error of a few elements of D, in units of what float32 accumulation and D's rounding allow.
static double error_of(const GemmShape *s, const void *d, const std::vector<uint16_t> &a, const std::vector<uint16_t> &b) {
    double worst = 0;
    for (int t = 0; t < 64; t++) {
        const int64_t i = (int64_t)t * 7919 % s->m, j = (int64_t)t * 104729 % s->n;
        double sum = 0, size = 0;
        for (int64_t k = 0; k < s->k; k++) {
            const double v = (double)bf16_decode(a[(size_t)(s->a_transposed ? k * s->m + i : i * s->k + k)]) *
                             (double)bf16_decode(b[(size_t)(s->b_transposed ? j * s->k + k : k * s->n + j)]);
            sum += v; size += fabs(v);
        }
        float got;
        if (s->d_float32) CUDA_CHECK(cudaMemcpy(&got, (const float *)d + i * s->n + j, 4, cudaMemcpyDeviceToHost));
        else { uint16_t w; CUDA_CHECK(cudaMemcpy(&w, (const uint16_t *)d + i * s->n + j, 2, cudaMemcpyDeviceToHost)); got = bf16_decode(w); }
        const double tolerance = (double)s->k * 0x1p-23 * size + (s->d_float32 ? 0x1p-23 : 0x1p-8) * fabs(sum);
        const double e = fabs(got - sum) / tolerance;
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    Gemm g;
    gemm_open(&g, device_new<char>(GEMM_WORKSPACE_BYTES), device_new<char>(256), 0);
    for (const GemmShape &s : SHAPES) {
        bf16 *a = device_new<bf16>(s.m * s.k), *b = device_new<bf16>(s.k * s.n);
        void *d = device_new<char>(s.m * s.n * 4);
        fill_gauss(a, s.m * s.k, 1); fill_gauss(b, s.k * s.n, 2);
        GemmPlan *p = gemm_plan(&g, s);
        cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
        const int count = gemm_propose(&g, p, found, GEMM_CANDIDATES);
        char text[96];
        printf("\n%s: %d proposals\n", gemm_describe(&s, text, sizeof text), count);
        const std::vector<uint16_t> ha = host_copy((const uint16_t *)a, s.m * s.k), hb = host_copy((const uint16_t *)b, s.k * s.n);
        uint64_t first = 0;
        const double flops = 2.0 * (double)s.m * (double)s.n * (double)s.k;
        for (int i = 0; i < count; i++) {
            if (gemm_launch(&g, p, &found[i].algo, d, a, b, NULL, 0, 0) != CUBLAS_STATUS_SUCCESS) { printf("  %2d refused\n", i); continue; }
            CUDA_CHECK(cudaDeviceSynchronize());
            const uint64_t hash = gemm_hash(&g, p, d, 0);
            const double error = error_of(&s, d, ha, hb);
            ladder_check(&l, error <= 1, "%s, proposal %d: error %.3f of the tolerance", text, i, error);
            if (i == 0) first = hash;
            if (l.quick) continue;
            CUDA_CHECK(cudaDeviceSynchronize());
            usleep(100000);
            seconds_of(&g, p, &found[i].algo, d, a, b, 1);
            const double cold = seconds_of(&g, p, &found[i].algo, d, a, b, 3) / 3;
            const int runs = (int)(0.2 / cold) + 1;
            seconds_of(&g, p, &found[i].algo, d, a, b, runs);
            const double hot = seconds_of(&g, p, &found[i].algo, d, a, b, runs) / runs;
            int tile = 0, stages = 0, cluster = 0;
            size_t written;
            cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
            cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages, &written);
            uint16_t cluster16 = 0;
            cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster16, sizeof cluster16, &written);
            cluster = cluster16;
            printf("  %2d tile %3d stages %2d cluster %2d  cold %7.3f ms %6.1f TFLOP/s   sustained %7.3f ms %6.1f TFLOP/s  %s\n", i, tile, stages, cluster,
                   cold * 1e3, flops / cold * 1e-12, hot * 1e3, flops / hot * 1e-12, hash == first ? "same bits" : "other bits");
        }
        CUDA_CHECK(cudaFree(a)); CUDA_CHECK(cudaFree(b)); CUDA_CHECK(cudaFree(d));
    }
    return ladder_finish(&l);
}
