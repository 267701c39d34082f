// cuda/gemm.cuh: matrix products by cuBLASLt. All matrices are row-major and dense; either operand may be stored transposed, so no
// pass needs a transposing copy. BF16 operands, float32 accumulation, D in BF16 or float32.
//
// Operands may also be FP8 bytes, both of them, where fp8_gemm_supported(). FP8 tensor cores of these cards read both operands along
// the inner dimension only: A is stored (m,k) and B (n,k), and a transposed copy is the quantizer's business. m, n and k are multiples of
// 16, and one operand at least is E4M3. Inside an instruction FP8 products are summed with fewer bits than float32 has (on Hopper
// about 14); the sums of a few instructions are then added in float32, unless fast_accumulation says otherwise.
//
// A plan is made once a shape, before training: cuBLASLt proposes algorithms, each is run and timed on real buffers, the
// fastest is kept. Only algorithms that give the same bits as the first proposal compete, so a timing that falls out otherwise on the
// next start cannot change a result: two runs of one program on one kind of card give the same losses bit for bit.
// Split-K is allowed in the form that sums its parts in a fixed order in float32 (the workspace reduction).
#ifndef LLMC_CUDA_GEMM_CUH
#define LLMC_CUDA_GEMM_CUH

#include <cublasLt.h>

#include "../recipe.h"
#include "common.cuh"

#define GEMM_WORKSPACE_BYTES ((size_t)64 << 20)
#ifndef GEMM_CANDIDATES
#define GEMM_CANDIDATES 16
#endif
#define GEMM_MAX_PLANS 64
#define GEMM_TIMED_RUNS 4

typedef struct {
    int64_t m, n, k;               // D (m,n) = alpha op(A) op(B) + beta D, inner dimension k
    int a_transposed;              // A is stored (k,m), else (m,k)
    int b_transposed;              // B is stored (n,k), else (k,n)
    int d_float32;                 // D is float32, else BF16
    int device_alpha;              // alpha and beta are read from device memory by the kernel
    Format a_format, b_format;     // FORMAT_FLOAT: BF16; or FORMAT_E4M3, FORMAT_E5M2
} GemmShape;

typedef struct {
    GemmShape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    int fast_accumulation;
    float ms;                      // measured when tuned, 0: not timed
    float best_ms;                 // of all proposals, those with other bits included
    int proposals, same_bits;
} GemmPlan;

typedef struct {
    cublasLtHandle_t handle;
    void *workspace;               // GEMM_WORKSPACE_BYTES, the owner's
    float *constants;              // device: 0, 1
    uint64_t *hash;                // device: hash of a result while tuning
    GemmPlan plans[GEMM_MAX_PLANS];
    int count;
    int verbose;
    int fast_accumulation;         // plans made from now on leave FP8 sums in the tensor core: a little faster, less exact
} Gemm;

// Whether the card multiplies FP8 (compute capability 8.9 and above).
FN int fp8_gemm_supported(void) {
    int device = 0, major = 0, minor = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return major * 10 + minor >= 89;
}
FN int gemm_is_fp8(const GemmShape *s) { return s->a_format != FORMAT_FLOAT; }
FN const char *format_name(Format f) { return f == FORMAT_E4M3 ? "e4m3" : f == FORMAT_E5M2 ? "e5m2" : "bf16"; }
FN cudaDataType_t gemm_type(Format f) { return f == FORMAT_E4M3 ? CUDA_R_8F_E4M3 : f == FORMAT_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_16BF; }

FN const char *gemm_describe(const GemmShape *s, char *text, size_t size) {
    char formats[24] = "";
    if (gemm_is_fp8(s)) snprintf(formats, sizeof formats, " %s x %s", format_name(s->a_format), format_name(s->b_format));
    snprintf(text, size, "%lldx%lldx%lld %c%c%s -> %s", (long long)s->m, (long long)s->n, (long long)s->k, s->a_transposed ? 'T' : 'N',
             s->b_transposed ? 'T' : 'N', formats, s->d_float32 ? "float32" : "bf16");
    return text;
}
FN void gemm_check(cublasStatus_t status, const char *what, const GemmShape *s) {
    char text[96] = "";
    if (status == CUBLAS_STATUS_SUCCESS) return;
    if (s) gemm_describe(s, text, sizeof text);
    fatal("cuBLASLt: %s failed%s%s: %s", what, s ? " for GEMM (m x n x k) " : "", text, cublasLtGetStatusString(status));
}

// workspace: GEMM_WORKSPACE_BYTES of device memory, 256-aligned; scalars: 32 bytes of device memory.
FN void gemm_open(Gemm *g, void *workspace, void *scalars, int verbose) {
    memset(g, 0, sizeof *g);
    gemm_check(cublasLtCreate(&g->handle), "opening the library", NULL);
    g->workspace = workspace; g->verbose = verbose;
    g->hash = (uint64_t *)scalars;
    g->constants = (float *)((char *)scalars + 8);
    const float constants[2] = {0.0f, 1.0f};
    CUDA_CHECK(cudaMemcpy(g->constants, constants, sizeof constants, cudaMemcpyHostToDevice));
}
// Forgets all plans but the first `keep`.
FN void gemm_trim(Gemm *g, int keep) {
    for (; g->count > keep; g->count--) {
        GemmPlan *p = &g->plans[g->count - 1];
        gemm_check(cublasLtMatmulDescDestroy(p->desc), "freeing a plan", &p->shape);
        gemm_check(cublasLtMatrixLayoutDestroy(p->a), "freeing a plan", &p->shape);
        gemm_check(cublasLtMatrixLayoutDestroy(p->b), "freeing a plan", &p->shape);
        gemm_check(cublasLtMatrixLayoutDestroy(p->d), "freeing a plan", &p->shape);
    }
}
FN void gemm_close(Gemm *g) {
    gemm_trim(g, 0);
    gemm_check(cublasLtDestroy(g->handle), "closing the library", NULL);
}

// fatal for operands that no FP8 product takes; the library would say no more than that it found no algorithm.
FN void gemm_check_formats(const GemmShape *s) {
    char text[96];
    if (s->a_format == FORMAT_FLOAT && s->b_format == FORMAT_FLOAT) return;
    const int known = (s->a_format == FORMAT_E4M3 || s->a_format == FORMAT_E5M2) && (s->b_format == FORMAT_E4M3 || s->b_format == FORMAT_E5M2);
    if (!known || (s->a_format == FORMAT_E5M2 && s->b_format == FORMAT_E5M2))
        fatal("GEMM (m x n x k) %s of formats %d and %d: FP8 is multiplied by FP8, and not E5M2 by E5M2; mend the recipe's row",
              gemm_describe(s, text, sizeof text), (int)s->a_format, (int)s->b_format);
    if (s->a_transposed || !s->b_transposed)
        fatal("GEMM (m x n x k) %s: FP8 operands are read along the inner dimension, A (m,k) and B (n,k): this is a bug",
              gemm_describe(s, text, sizeof text));
    if (s->m % 16 || s->n % 16 || s->k % 16)
        fatal("GEMM (m x n x k) %s: an FP8 product needs multiples of 16 (widths, and tokens a micro-batch)", gemm_describe(s, text, sizeof text));
}
// cuBLASLt is column-major: our row-major D = op(A) op(B) is its D^T = op(B)^T op(A)^T, so operands change places and a
// row-major (r,c) is a column-major (c,r) with leading dimension c.
FN void gemm_describe_operands(GemmPlan *p) {
    const GemmShape *s = &p->shape;
    const cublasOperation_t first = s->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, second = s->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int8_t fast = p->fast_accumulation ? 1 : 0;
    const int32_t mode = s->device_alpha ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    gemm_check(cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product", s);
    gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "describing a product", s);
    gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "describing a product", s);
    gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode), "describing a product", s);
    if (gemm_is_fp8(s))
        gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "describing a product", s);
    const int64_t m = s->m, n = s->n, k = s->k;
    const cudaDataType_t type_a = gemm_type(s->a_format), type_b = gemm_type(s->b_format);
    gemm_check(s->b_transposed ? cublasLtMatrixLayoutCreate(&p->a, type_b, (uint64_t)k, (uint64_t)n, k)
                               : cublasLtMatrixLayoutCreate(&p->a, type_b, (uint64_t)n, (uint64_t)k, n), "describing operand B", s);
    gemm_check(s->a_transposed ? cublasLtMatrixLayoutCreate(&p->b, type_a, (uint64_t)m, (uint64_t)k, m)
                               : cublasLtMatrixLayoutCreate(&p->b, type_a, (uint64_t)k, (uint64_t)m, k), "describing operand A", s);
    gemm_check(cublasLtMatrixLayoutCreate(&p->d, s->d_float32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)n, (uint64_t)m, n), "describing the result", s);
}
// What an algorithm for a shape may do. The caller destroys it.
FN cublasLtMatmulPreference_t gemm_preference(const GemmShape *s) {
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = GEMM_WORKSPACE_BYTES;
    // Without split-K, or, for weight gradients (few tiles, a long inner dimension), with its parts summed in order through the
    // workspace, in float32 whatever D is.
    const int long_inner = s->a_transposed || (gemm_is_fp8(s) && s->k > s->m && s->k > s->n);
    const uint32_t reductions = long_inner ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    gemm_check(cublasLtMatmulPreferenceCreate(&preference), "asking for algorithms", s);
    gemm_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace), "asking for algorithms", s);
    gemm_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions), "asking for algorithms", s);
    return preference;
}
// The library's proposals, best first by its own judgement. Returns their number, at least 1.
FN int gemm_propose(Gemm *g, GemmPlan *p, cublasLtMatmulHeuristicResult_t *found, int most) {
    const cublasLtMatmulPreference_t preference = gemm_preference(&p->shape);
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(g->handle, p->desc, p->a, p->b, p->d, p->d, preference, most, found, &count);
    gemm_check(cublasLtMatmulPreferenceDestroy(preference), "asking for algorithms", &p->shape);
    int kept = 0;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= GEMM_WORKSPACE_BYTES) found[kept++] = found[i];
    if (kept == 0) gemm_check(status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status, "finding an algorithm", &p->shape);
    return kept;
}

// The plan of a shape, made untuned (the library's first proposal) when there is none yet.
FN GemmPlan *gemm_plan(Gemm *g, GemmShape s) {
    for (int i = 0; i < g->count; i++)
        if (g->plans[i].fast_accumulation == g->fast_accumulation && memcmp(&g->plans[i].shape, &s, sizeof s) == 0) return &g->plans[i];
    gemm_check_formats(&s);
    if (g->count == GEMM_MAX_PLANS) fatal("more than %d GEMM shapes in one program: this is a bug", GEMM_MAX_PLANS);
    GemmPlan *p = &g->plans[g->count++];
    memset(p, 0, sizeof *p);
    p->shape = s; p->fast_accumulation = g->fast_accumulation;
    gemm_describe_operands(p);
    cublasLtMatmulHeuristicResult_t first;
    gemm_propose(g, p, &first, 1);
    p->algo = first.algo;
    return p;
}
// One launch with a given algorithm. a and b are the row-major operands A and B; alpha: device memory, NULL: 1.
FN cublasStatus_t gemm_launch(Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, void *d, const void *a, const void *b,
                                  const float *alpha, int accumulate, cudaStream_t stream) {
    const float host[2] = {0.0f, 1.0f};
    const float *scalars = p->shape.device_alpha ? g->constants : host;
    return cublasLtMatmul(g->handle, p->desc, alpha ? alpha : &scalars[1], b, p->a, a, p->b, &scalars[accumulate ? 1 : 0], d, p->d, d, p->d,
                          algo, g->workspace, GEMM_WORKSPACE_BYTES, stream);
}
// D = alpha op(A) op(B), added to D when accumulate. alpha: a float in device memory (the shape's device_alpha), NULL: 1.
FN void gemm_run(Gemm *g, const GemmPlan *p, void *d, const void *a, const void *b, const float *alpha, int accumulate, cudaStream_t stream) {
    gemm_check(gemm_launch(g, p, &p->algo, d, a, b, alpha, accumulate, stream), "running a product", &p->shape);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tuning

// *hash += a mix of every 4-byte word and its place. An integer sum: the order does not matter.
__global__ static void gemm_hash_kernel(unsigned long long *hash, const uint32_t *words, int64_t count) {
    unsigned long long sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        unsigned long long x = (words[i] + 1ull) * 0x9E3779B97F4A7C15ull ^ (unsigned long long)i * 0xC2B2AE3D27D4EB4Full;
        x ^= x >> 29; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 32;
        sum += x;
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
    if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}
FN uint64_t gemm_hash(Gemm *g, const GemmPlan *p, const void *d, cudaStream_t stream) {
    const int64_t words = p->shape.m * p->shape.n * (p->shape.d_float32 ? 4 : 2) / 4;
    uint64_t hash;
    CUDA_CHECK(cudaMemsetAsync(g->hash, 0, sizeof hash, stream));
    gemm_hash_kernel<<<512, 256, 0, stream>>>((unsigned long long *)g->hash, (const uint32_t *)d, words);
    CUDA_LAUNCHED();
    CUDA_CHECK(cudaMemcpyAsync(&hash, g->hash, sizeof hash, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return hash;
}
// Milliseconds of one run, the median of GEMM_TIMED_RUNS - 1 after a first that warms up.
FN float gemm_time(Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, void *d, const void *a, const void *b,
                       cudaEvent_t *events, cudaStream_t stream) {
    float ms[GEMM_TIMED_RUNS];
    for (int i = 0; i <= GEMM_TIMED_RUNS; i++) {
        CUDA_CHECK(cudaEventRecord(events[i], stream));
        if (i < GEMM_TIMED_RUNS) gemm_check(gemm_launch(g, p, algo, d, a, b, NULL, 0, stream), "timing a product", &p->shape);
    }
    CUDA_CHECK(cudaEventSynchronize(events[GEMM_TIMED_RUNS]));
    for (int i = 1; i < GEMM_TIMED_RUNS; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i - 1], events[i], events[i + 1]));
    for (int i = 0; i < GEMM_TIMED_RUNS - 1; i++)
        for (int j = i + 1; j < GEMM_TIMED_RUNS - 1; j++)
            if (ms[j] < ms[i]) { float t = ms[i]; ms[i] = ms[j]; ms[j] = t; }
    return ms[(GEMM_TIMED_RUNS - 1) / 2];
}
// Times the proposals on these buffers (random values, finite in the operands' formats; D's contents are lost) and keeps the
// fastest of those that give the bits of the first one that runs.
FN GemmPlan *gemm_tune(Gemm *g, GemmShape shape, void *d, const void *a, const void *b, cudaStream_t stream) {
    GemmPlan *p = gemm_plan(g, shape);
    if (p->ms > 0) return p;
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    cudaEvent_t events[GEMM_TIMED_RUNS + 1];
    p->proposals = gemm_propose(g, p, found, GEMM_CANDIDATES);
    for (int i = 0; i <= GEMM_TIMED_RUNS; i++) CUDA_CHECK(cudaEventCreate(&events[i]));
    uint64_t first_hash = 0;
    const size_t bytes = (size_t)(shape.m * shape.n) * (shape.d_float32 ? 4 : 2);
    for (int i = 0; i < p->proposals; i++) {
        CUDA_CHECK(cudaMemsetAsync(d, 0xFF, bytes, stream));  // NaN: an element that an algorithm leaves out changes the hash
        if (gemm_launch(g, p, &found[i].algo, d, a, b, NULL, 0, stream) != CUBLAS_STATUS_SUCCESS) continue;  // proposed, but refused: not a candidate
        const uint64_t hash = gemm_hash(g, p, d, stream);
        const float ms = gemm_time(g, p, &found[i].algo, d, a, b, events, stream);
        if (p->best_ms == 0 || ms < p->best_ms) p->best_ms = ms;
        if (p->same_bits == 0) first_hash = hash;
        else if (hash != first_hash) continue;
        p->same_bits++;
        if (p->ms == 0 || ms < p->ms) { p->ms = ms; p->algo = found[i].algo; }
    }
    for (int i = 0; i <= GEMM_TIMED_RUNS; i++) CUDA_CHECK(cudaEventDestroy(events[i]));
    if (p->same_bits == 0) gemm_check(CUBLAS_STATUS_EXECUTION_FAILED, "running any proposed algorithm", &p->shape);
    if (g->verbose) {
        char text[96];
        printf("gemm %-40s %8.3f ms %6.1f TFLOP/s (%d proposals, %d of the same bits, best of all %.3f ms)\n",
               gemm_describe(&shape, text, sizeof text), p->ms, 2e-9 * (double)shape.m * (double)shape.n * (double)shape.k / p->ms,
               p->proposals, p->same_bits, p->best_ms);
    }
    return p;
}

#endif
