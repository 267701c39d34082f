// cuda/gemm_nvfp4.cuh: products of packed NVFP4 operands on the tensor cores of Blackwell (compute capability 10.x and 12.x), by cuBLASLt's
// block-scaled FP4 GEMM: both operands CUDA_R_4F_E2M1 with E4M3 scales a block of 16 (VEC16_UE4M3), float32 accumulation, D in BF16 or float32,
// alpha (the tensor scales' product, and 1/128 of a rotation) from device memory.
//
//   D (m,n) = alpha A (m,k) B (n,k)^T + beta D
//
// FP4 tensor cores read along the inner dimension only: A is (m,k), B (n,k), and a transposed copy is the quantizer's business. An operand is
//   codes   (rows, k/2)   two E2M1 codes a byte, the even index in the low nibble
//   scales  128x4 tiles, tiled_scale_bytes(rows, k) bytes: rows padded to 128 and columns to 4 with zeros (tiled_scale_offset, quantize.h)
// as quantize_forward_native_launch, eden_both_native_launch and eden_requant_native_launch write them. k is a multiple of 32, n of 16; m is anything.
// Pointers are 256-aligned device memory, as cudaMalloc gives them.
//
// Plans live in gemm.cuh's table and are tuned by gemm_tune(), under its rules: once a shape, only algorithms that give the same bits compete.
//
// --nvfp4-gemm says which product a recipe's NVFP4 operands meet (linear_native.cuh):
//   auto       native if the card has FP4 tensor cores and cuBLASLt has an algorithm on it, else emulated; the choice and its reason are printed
//   native     native; where that cannot be, an error that says why
//   emulated   BF16 operands code x s_b, exact: the same products, summed in another order; on every card
// Never run on a Blackwell card so far: --check (selfcheck.cuh) compares the two products there.
// Documentation: cuBLAS, "Narrow precision data types usage" and "1D block scaling factors layout".
#ifndef LLMC_CUDA_GEMM_NVFP4_CUH
#define LLMC_CUDA_GEMM_NVFP4_CUH

#include "gemm.cuh"

typedef enum { NVFP4_GEMM_AUTO, NVFP4_GEMM_NATIVE, NVFP4_GEMM_EMULATED } Nvfp4GemmMode;

typedef struct { const uint8_t *codes, *scales; } Nvfp4Operand;

FN GemmShape nvfp4_gemm_shape(int64_t m, int64_t n, int64_t k, int d_float32) {
    GemmShape s;
    memset(&s, 0, sizeof s);
    s.m = m; s.n = n; s.k = k;
    s.b_transposed = 1; s.d_float32 = d_float32; s.device_alpha = 1;
    s.a_format = s.b_format = FORMAT_NVFP4;
    return s;
}
// gemm_check() with this product's name.
FN void nvfp4_gemm_check(cublasStatus_t status, const char *what, const GemmShape *s) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fatal("cuBLASLt: %s failed for NVFP4 GEMM (m x n x k) %lldx%lldx%lld -> %s: %s; --nvfp4-gemm emulated does without it", what, (long long)s->m, (long long)s->n,
              (long long)s->k, s->d_float32 ? "float32" : "bf16", cublasLtGetStatusString(status));
}
// Where the plan's next launch finds the operands' scales. cuBLASLt's A is our B (see gemm_describe_operands).
FN void nvfp4_gemm_scales(GemmPlan *p, const uint8_t *a, const uint8_t *b) {
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b, sizeof b), "naming the scales", &p->shape);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a, sizeof a), "naming the scales", &p->shape);
}
// Describes D^T = B A^T, column-major, both operands along their columns. The library asks for scale pointers before it proposes anything: `some`
// stands in for them, any aligned device memory.
FN void nvfp4_gemm_describe(GemmPlan *p, const void *some) {
    const GemmShape *s = &p->shape;
    const cublasOperation_t first = CUBLAS_OP_T, second = CUBLAS_OP_N;
    const int32_t pointers = CUBLASLT_POINTER_MODE_DEVICE, blocks = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    const char *what = "describing a product";
    nvfp4_gemm_check(cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), what, s);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), what, s);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), what, s);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers, sizeof pointers), what, s);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks, sizeof blocks), what, s);
    nvfp4_gemm_check(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &blocks, sizeof blocks), what, s);
    nvfp4_gemm_scales(p, (const uint8_t *)some, (const uint8_t *)some);
    nvfp4_gemm_check(cublasLtMatrixLayoutCreate(&p->a, CUDA_R_4F_E2M1, (uint64_t)s->k, (uint64_t)s->n, s->k), what, s);
    nvfp4_gemm_check(cublasLtMatrixLayoutCreate(&p->b, CUDA_R_4F_E2M1, (uint64_t)s->k, (uint64_t)s->m, s->k), what, s);
    nvfp4_gemm_check(cublasLtMatrixLayoutCreate(&p->d, s->d_float32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)s->n, (uint64_t)s->m, s->n), what, s);
}
// The plan of a shape, untuned (the library's first proposal) when new.
FN GemmPlan *nvfp4_gemm_plan(Gemm *g, int64_t m, int64_t n, int64_t k, int d_float32) {
    const GemmShape s = nvfp4_gemm_shape(m, n, k, d_float32);
    for (int i = 0; i < g->count; i++)
        if (g->plans[i].fast_accumulation == g->fast_accumulation && memcmp(&g->plans[i].shape, &s, sizeof s) == 0) return &g->plans[i];
    if (m < 1 || n < 1 || k < 1 || n % 16 || k % 32)
        fatal("NVFP4 GEMM (m x n x k) %lldx%lldx%lld: n must be a multiple of 16 and k of 32 (widths, and tokens a micro-batch)", (long long)m, (long long)n, (long long)k);
    if (g->count == GEMM_MAX_PLANS) fatal("more than %d GEMM shapes in one program: this is a bug", GEMM_MAX_PLANS);
    GemmPlan *p = &g->plans[g->count++];
    memset(p, 0, sizeof *p);
    p->shape = s; p->fast_accumulation = g->fast_accumulation;  // gemm_plan() looks for both; the second means nothing here
    nvfp4_gemm_describe(p, g->workspace);
    cublasLtMatmulHeuristicResult_t first;
    gemm_propose(g, p, &first, 1);
    p->algo = first.algo;
    return p;
}
// Times the proposals on these operands (D's contents are lost) and keeps the fastest of those that give the bits of the first.
FN GemmPlan *nvfp4_gemm_tune(Gemm *g, int64_t m, int64_t n, int64_t k, int d_float32, void *d, Nvfp4Operand a, Nvfp4Operand b, cudaStream_t stream) {
    GemmPlan *p = nvfp4_gemm_plan(g, m, n, k, d_float32);
    nvfp4_gemm_scales(p, a.scales, b.scales);
    return gemm_tune(g, p->shape, d, a.codes, b.codes, stream);
}
// D = alpha A B^T, added to D when accumulate. alpha: a float in device memory, NULL: 1.
FN void nvfp4_gemm_run(Gemm *g, GemmPlan *p, void *d, Nvfp4Operand a, Nvfp4Operand b, const float *alpha, int accumulate, cudaStream_t stream) {
    nvfp4_gemm_scales(p, a.scales, b.scales);
    nvfp4_gemm_check(gemm_launch(g, p, &p->algo, d, a.codes, b.codes, alpha, accumulate, stream), "running a product", &p->shape);
}

// *alpha = *a x *b (device): of a backward GEMM, the tensor scale of dY and what eden_requant_native_launch found. alpha may be a or b.
__global__ static void nvfp4_alpha_kernel(float *alpha, const float *a, const float *b) { *alpha = f32_mul(*a, *b); }
FN void nvfp4_alpha_launch(cudaStream_t stream, float *alpha, const float *a, const float *b) {
    nvfp4_alpha_kernel<<<1, 1, 0, stream>>>(alpha, a, b);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Whether there is such a product here

// Whether cuBLASLt proposes anything for a shape. -> its status.
FN cublasStatus_t nvfp4_gemm_ask(Gemm *g, int64_t m, int64_t n, int64_t k, int d_float32) {
    GemmPlan p;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    memset(&p, 0, sizeof p);
    p.shape = nvfp4_gemm_shape(m, n, k, d_float32);
    nvfp4_gemm_describe(&p, g->workspace);
    const cublasLtMatmulPreference_t preference = gemm_preference(&p.shape);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(g->handle, p.desc, p.a, p.b, p.d, p.d, preference, 1, &found, &count);
    if (status == CUBLAS_STATUS_SUCCESS) status = count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED;
    nvfp4_gemm_check(cublasLtMatmulPreferenceDestroy(preference), "freeing a question", &p.shape);
    nvfp4_gemm_check(cublasLtMatmulDescDestroy(p.desc), "freeing a question", &p.shape);
    nvfp4_gemm_check(cublasLtMatrixLayoutDestroy(p.a), "freeing a question", &p.shape);
    nvfp4_gemm_check(cublasLtMatrixLayoutDestroy(p.b), "freeing a question", &p.shape);
    nvfp4_gemm_check(cublasLtMatrixLayoutDestroy(p.d), "freeing a question", &p.shape);
    return status;
}
// Whether this device multiplies NVFP4 with D in BF16 and in float32, a micro-batch's rows and a single one (a sample's first token); why: the reason, either way, without a full stop.
FN int nvfp4_gemm_supported(Gemm *g, char *why, size_t size) {
    int device = 0, major = 0, minor = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    if (major != 10 && major != 12) {
        snprintf(why, size, "sm_%d%d has no FP4 tensor cores that this program serves (compute capability 10.x and 12.x do)", major, minor);
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        const int d_float32 = i & 1, rows = i & 2 ? 1 : 256;
        const cublasStatus_t status = nvfp4_gemm_ask(g, rows, 512, 1024, d_float32);
        if (status == CUBLAS_STATUS_SUCCESS) continue;
        snprintf(why, size, "cuBLASLt %zu has no NVFP4 algorithm on sm_%d%d for %dx512x1024 -> %s (%s); a newer CUDA toolkit may", cublasLtGetVersion(), major, minor, rows,
                 d_float32 ? "float32" : "BF16", cublasLtGetStatusString(status));
        return 0;
    }
    snprintf(why, size, "cuBLASLt %zu has NVFP4 algorithms on sm_%d%d", cublasLtGetVersion(), major, minor);
    return 1;
}
// What --nvfp4-gemm comes to on this device: 1 native, 0 emulated. fatal for `native` where that cannot be.
FN int nvfp4_gemm_native(Gemm *g, Nvfp4GemmMode mode, char *why, size_t size) {
    snprintf(why, size, "--nvfp4-gemm emulated");
    if (mode == NVFP4_GEMM_EMULATED) return 0;
    const int native = nvfp4_gemm_supported(g, why, size);
    if (mode == NVFP4_GEMM_NATIVE && !native) fatal("--nvfp4-gemm native: %s; use auto or emulated", why);
    return native;
}

#endif
