// cuda/selfcheck_nvfp4.cuh: what --check asks of NVFP4 on the card at hand: that conversions give the bits of formats.h, that packed operands hold
// what the emulated ones hold, and that the products of both are right: the emulated one everywhere, the tensor cores' own where cuBLASLt has it.
//
// The expected product is summed in float64 on the host from the emulated operands. The packed ones are read back by quantize.h's layout; test_native_layout
// holds that layout against cuBLAS's documentation, and only a run on a Blackwell card holds it against the tensor core: this one.
#ifndef LLMC_CUDA_SELFCHECK_NVFP4_CUH
#define LLMC_CUDA_SELFCHECK_NVFP4_CUH

#include "../selfcheck.h"
#include "convert.cuh"
#include "gemm_nvfp4.cuh"
#include "quantize.cuh"

static const OperandSpec SELFCHECK_FOUR_SIX = NVFP4(ROUND_FOUR_SIX, BLOCK_1X16), SELFCHECK_EDEN = NVFP4_ROTATED(ROUND_MS_EDEN_POSTHOC, 128, FROM_ORIGINAL);

// Device memory of one check, freed together.
typedef struct { void *p[64]; int count; } DeviceArena;
FN void *arena_take(DeviceArena *a, int64_t bytes) {
    if (a->count == 64) fatal("a self-check holds more than 64 buffers: this is a bug");
    void **p = &a->p[a->count++];
    CUDA_CHECK(cudaMalloc(p, (size_t)bytes));
    CUDA_CHECK(cudaMemset(*p, 0xA5, (size_t)bytes));  // padding that nobody writes shows
    return *p;
}
FN void arena_free(DeviceArena *a) {
    for (; a->count > 0; a->count--) CUDA_CHECK(cudaFree(a->p[a->count - 1]));
}
FN void *device_read(const void *p, int64_t bytes) {  // -> a copy on the host, to be freed
    void *copy = xcalloc((size_t)bytes, 1);
    CUDA_CHECK(cudaMemcpy(copy, p, (size_t)bytes, cudaMemcpyDeviceToHost));
    return copy;
}
// count normal values in BF16 on the device: every 300th 40 times as large, so that scales differ from block to block.
FN bf16 *arena_normal(DeviceArena *a, int64_t count, uint32_t stream) {
    uint16_t *x = (uint16_t *)xcalloc((size_t)count, sizeof *x);
    const RngStream s = rng_stream(2601, stream, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < count; i++) {
        const Philox4 w = rng_words4(s, (uint64_t)i);
        const double r = sqrt(-2 * log((double)rng_uniform(w.w[0]))) * cos(6.283185307179586 * w.w[1] * 0x1p-32);
        x[i] = bf16_encode((float)(r * (w.w[2] % 300 == 0 ? 40 : 1)));
    }
    bf16 *p = (bf16 *)arena_take(a, count * 2);
    CUDA_CHECK(cudaMemcpy(p, x, (size_t)count * 2, cudaMemcpyHostToDevice));
    free(x);
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// Conversions: all 2^32 floats, in both halves of a pair, against formats.h compiled for the same card

// wrong[0..2]: floats whose codes differ, of convert_e2m1x2, convert_e2m1x8_numbers (no NaNs), convert_e4m3x2. wrong[3..4]: 1 where E2M1, E4M3 are
// converted by hardware.
__global__ static void convert_check_kernel(unsigned long long *wrong) {
    unsigned long long bad[3] = {0, 0, 0};
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 29; i += (uint64_t)gridDim.x * blockDim.x) {
        float v[8];
        uint32_t word = 0u;
        for (int j = 0; j < 8; j++) {
            const float x = f32_from_bits((uint32_t)(8 * i) + (uint32_t)j), y = f32_from_bits(~f32_bits(x));
            bad[0] += convert_e2m1x2(x, y) != (e2m1_encode(x) | e2m1_encode(y) << 4);
            bad[2] += convert_e4m3x2(x, y) != (e4m3_encode(x) | e4m3_encode(y) << 8);
            v[j] = x == x ? x : 0.0f;
            word |= e2m1_encode(v[j]) << (4 * j);
        }
        bad[1] += convert_e2m1x8_numbers(v) != word;
    }
    for (int k = 0; k < 3; k++) if (bad[k]) atomicAdd(&wrong[k], bad[k]);
    if (blockIdx.x == 0 && threadIdx.x == 0) { wrong[3] = CONVERT_E2M1_HARDWARE; wrong[4] = CONVERT_E4M3_HARDWARE; }
}
FN void selfcheck_conversions(SelfCheck *s, int major) {
    DeviceArena arena;
    arena.count = 0;
    unsigned long long *wrong = (unsigned long long *)arena_take(&arena, 5 * 8), n[5];
    CUDA_CHECK(cudaMemset(wrong, 0, 5 * 8));
    convert_check_kernel<<<4 * device_attribute(cudaDevAttrMultiProcessorCount), 256>>>(wrong);
    CUDA_LAUNCHED();
    CUDA_CHECK(cudaMemcpy(n, wrong, sizeof n, cudaMemcpyDeviceToHost));
    arena_free(&arena);
    const unsigned long long bad = n[0] + n[1] + n[2];
    selfcheck_line(s, bad == 0, "conversions: E2M1 by %s, E4M3 by %s: %s", n[3] ? "hardware" : "software", n[4] ? "hardware" : "software",
                   bad ? "codes differ from formats.h for some floats; please report this card" : "the bits of formats.h for all 2^32 floats");
    if ((major == 10 || major == 12) && !n[3])
        selfcheck_line(s, 0, "conversions: this card converts to E2M1 in hardware, and this program does not use it: build it for sm_%d0a", major);
}

// ---------------------------------------------------------------------------------------------------------------------
// A product, both ways

typedef struct {
    const char *name;
    int64_t m, n, k;               // D (m,n) = alpha A (m,k) B (n,k)^T
    Nvfp4Operand a, b;             // packed
    const bf16 *a_values, *b_values; // emulated operands, stored (k,m) and (k,n) where transposed
    int a_transposed, b_transposed;  // as gemm.cuh's: A stored (k,m); B stored (n,k)
    const float *a_st, *b_st;      // device: what packed values times this are the emulated ones; NULL: 1
    const float *alpha, *native_alpha;
} ProductCheck;

// (rows, k) code x s_b of a packed operand, exact. -> NULL when padding of the scales is not zero.
FN float *packed_values(Nvfp4Operand o, int64_t rows, int64_t k) {
    const int64_t blocks = k / 16, bytes = tiled_scale_bytes(rows, k);
    uint8_t *codes = (uint8_t *)device_read(o.codes, rows * k / 2), *scales = (uint8_t *)device_read(o.scales, bytes);
    float *x = (float *)xcalloc((size_t)(rows * k), sizeof *x);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < k; c++)
            x[r * k + c] = f32_mul(e2m1_decode((uint32_t)codes[(r * k + c) / 2] >> (c % 2 * 4)), e4m3_decode(scales[tiled_scale_offset(r, c / 16, blocks)]));
    int64_t padding = 0;
    for (int64_t r = 0; r < ceil_div(rows, 128) * 128; r++)
        for (int64_t c = 0; c < ceil_div(blocks, 4) * 4; c++) padding += (r >= rows || c >= blocks) && scales[tiled_scale_offset(r, c, blocks)] != 0;
    free(codes); free(scales);
    if (padding) { free(x); return NULL; }
    return x;
}
// (rows, k) values of an emulated operand.
FN float *emulated_values(const bf16 *p, int64_t rows, int64_t k, int inner_first) {
    uint16_t *raw = (uint16_t *)device_read(p, rows * k * 2);
    float *x = (float *)xcalloc((size_t)(rows * k), sizeof *x);
    for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < k; c++) x[r * k + c] = bf16_decode(raw[inner_first ? c * rows + r : r * k + c]);
    free(raw);
    return x;
}
// Values that are not the same in both (zeros of either sign are), -1: the padding is not zero.
FN int64_t operand_differences(Nvfp4Operand o, const float *emulated, int64_t rows, int64_t k, const float *st) {
    float *packed = packed_values(o, rows, k), *scale = st ? (float *)device_read(st, sizeof(float)) : NULL;
    int64_t n = 0;
    for (int64_t i = 0; packed && i < rows * k; i++) n += f32_mul(packed[i], scale ? *scale : 1.0f) != emulated[i];
    if (!packed) n = -1;
    free(packed); free(scale);
    return n;
}

#define PRODUCT_SAMPLES 4096
// Largest error of D (m,n), in units of its bound, over a sample of its elements. Products of two values of six bits are exact in float32; what differs is
// the order and the rounding of k additions. A tensor core cuts, at each addition, what lies 22 bits or more below the largest term, which is at
// most S = sum |a b|: k S 2^-22 in all. Then D's own rounding. An operand read in the wrong order is off by about S/sqrt(k), hundreds of times that.
FN double product_error(const ProductCheck *c, const void *d, int d_float32, const float *a, const float *b, float alpha) {
    void *raw = device_read(d, c->m * c->n * (d_float32 ? 4 : 2));
    const RngStream s = rng_stream(2602, (uint32_t)c->k, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    double worst = 0;
    for (int i = 0; i < PRODUCT_SAMPLES; i++) {
        const Philox4 w = rng_words4(s, (uint64_t)i);
        const int64_t row = w.w[0] % c->m, col = w.w[1] % c->n;
        double sum = 0, size = 0;
        for (int64_t k = 0; k < c->k; k++) {
            const double p = (double)a[row * c->k + k] * b[col * c->k + k];
            sum += p; size += fabs(p);
        }
        const float got = d_float32 ? ((float *)raw)[row * c->n + col] : bf16_decode(((uint16_t *)raw)[row * c->n + col]);
        const double bound = fabs((double)alpha) * size * (double)c->k * 0x1p-22 + fabs(alpha * sum) * (d_float32 ? 0x1p-23 : 0x1p-8) + 1e-30;
        const double error = fabs(got - alpha * sum) / bound;
        if (!(error <= worst)) worst = error == error ? error : INFINITY;
    }
    free(raw);
    return worst;
}
// D by the emulated GEMM (native 0) or by FP4 tensor cores (1). -> its error.
FN double product_run(Gemm *g, const ProductCheck *c, int native, int d_float32, const float *a, const float *b) {
    DeviceArena arena;
    arena.count = 0;
    void *d = arena_take(&arena, c->m * c->n * (d_float32 ? 4 : 2));
    if (native) nvfp4_gemm_run(g, nvfp4_gemm_plan(g, c->m, c->n, c->k, d_float32), d, c->a, c->b, c->native_alpha, 0, 0);
    else {
        GemmShape shape;
        memset(&shape, 0, sizeof shape);
        shape.m = c->m; shape.n = c->n; shape.k = c->k;
        shape.a_transposed = c->a_transposed; shape.b_transposed = c->b_transposed; shape.d_float32 = d_float32; shape.device_alpha = 1;
        gemm_run(g, gemm_plan(g, shape), d, c->a_values, c->b_values, c->alpha, 0, 0);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    float *alpha = (float *)device_read(c->alpha, sizeof(float));
    const double error = product_error(c, d, d_float32, a, b, *alpha);
    free(alpha);
    arena_free(&arena);
    return error;
}
FN void product_check(SelfCheck *s, Gemm *g, const ProductCheck *c, int native) {
    float *a = emulated_values(c->a_values, c->m, c->k, c->a_transposed), *b = emulated_values(c->b_values, c->n, c->k, !c->b_transposed);
    const int64_t wrong_a = operand_differences(c->a, a, c->m, c->k, c->a_st), wrong_b = operand_differences(c->b, b, c->n, c->k, c->b_st);
    if (wrong_a || wrong_b)
        selfcheck_line(s, 0, "NVFP4 %s %lldx%lldx%lld: packed and emulated operands differ (%lld values of A, %lld of B; -1: padding): please report this card", c->name,
                       (long long)c->m, (long long)c->n, (long long)c->k, (long long)wrong_a, (long long)wrong_b);
    for (int by = 0; by <= native; by++) {
        const double bf16_error = product_run(g, c, by, 0, a, b), float_error = product_run(g, c, by, 1, a, b);
        const int right = bf16_error <= 1 && float_error <= 1;
        selfcheck_line(s, right, "NVFP4 %s %lldx%lldx%lld, %s product: error %.3f of its bound in BF16, %.3f in float32%s", c->name, (long long)c->m, (long long)c->n,
                       (long long)c->k, by ? "native" : "emulated", bf16_error, float_error, right ? "" : by ? "; train with --nvfp4-gemm emulated" : "; please report this card");
    }
    free(a); free(b);
}

// ---------------------------------------------------------------------------------------------------------------------
// A linear layer's products, as quartet2 makes their operands

FN EdenAddress selfcheck_address(int gemm, int operand) {
    EdenAddress a;
    memset(&a, 0, sizeof a);
    a.seed = 2603; a.step = 5; a.layer = 1; a.linear = 2; a.gemm = gemm; a.operand = operand;
    return a;
}
typedef struct { bf16 *x, *values; uint8_t *codes, *tiled; float *amax, *st; } ForwardOperand;  // device
// x (rows, cols) both ways. other_st, alpha: as quantize_forward_launch's.
FN ForwardOperand forward_operand(DeviceArena *arena, int64_t rows, int64_t cols, uint32_t stream, const float *other_st, float *alpha) {
    ForwardOperand o;
    o.x = arena_normal(arena, rows * cols, stream);
    o.values = (bf16 *)arena_take(arena, rows * cols * 2);
    o.codes = (uint8_t *)arena_take(arena, rows * cols / 2);
    o.tiled = (uint8_t *)arena_take(arena, tiled_scale_bytes(rows, cols));
    o.amax = (float *)arena_take(arena, 4); o.st = (float *)arena_take(arena, 4);
    amax_launch(0, o.x, rows * cols, o.amax);
    quantize_forward_launch(0, &SELFCHECK_FOUR_SIX, o.x, rows, cols, o.amax, NULL, NULL, o.values, o.st, other_st, alpha);
    quantize_forward_native_launch(0, &SELFCHECK_FOUR_SIX, o.x, rows, cols, o.amax, o.codes, o.tiled, o.st, other_st, alpha);
    return o;
}
// W or X of the forward (rows, cols), again along its rows: operand B of a backward GEMM, (cols, rows). -> its part of c, and alpha's two factors.
FN void backward_operand(DeviceArena *arena, ProductCheck *c, const ForwardOperand *o, int64_t rows, int64_t cols, EdenAddress at, float *factor) {
    uint8_t *plain_codes = (uint8_t *)arena_take(arena, rows * cols / 2), *plain_scales = (uint8_t *)arena_take(arena, rows * cols / 16);
    uint8_t *codes = (uint8_t *)arena_take(arena, rows * cols / 2), *tiled = (uint8_t *)arena_take(arena, tiled_scale_bytes(cols, rows));
    bf16 *values = (bf16 *)arena_take(arena, rows * cols * 2);
    float *st = (float *)arena_take(arena, 4), *alpha = (float *)arena_take(arena, 4);
    void *workspace = arena_take(arena, eden_workspace_bytes(rows, cols));
    quantize_forward_launch(0, &SELFCHECK_FOUR_SIX, o->x, rows, cols, o->amax, plain_codes, plain_scales, NULL, o->st, NULL, NULL);
    eden_requant_launch(0, &SELFCHECK_EDEN, plain_codes, plain_scales, rows, cols, values, at, o->st, alpha, workspace, st);
    eden_requant_native_launch(0, o->codes, o->tiled, rows, cols, codes, tiled, at, o->st, factor, workspace, st);
    c->b.codes = codes; c->b.scales = tiled; c->b_values = values; c->b_st = st; c->alpha = alpha;
}
// Y = X W^T and, where tokens and widths are multiples of 128, dX = dY W and dW = dY^T X. X (M,K), W (N,K), dY (M,N).
FN void selfcheck_products(SelfCheck *s, Gemm *g, int native, int64_t M, int64_t N, int64_t K) {
    DeviceArena arena;
    arena.count = 0;
    ProductCheck c;
    memset(&c, 0, sizeof c);
    float *alpha = (float *)arena_take(&arena, 4);
    const ForwardOperand w = forward_operand(&arena, N, K, 1, NULL, NULL), x = forward_operand(&arena, M, K, 2, w.st, alpha);
    c.name = "forward"; c.m = M; c.n = N; c.k = K;
    c.a.codes = x.codes; c.a.scales = x.tiled; c.a_values = x.values;
    c.b.codes = w.codes; c.b.scales = w.tiled; c.b_values = w.values; c.b_transposed = 1;
    c.alpha = c.native_alpha = alpha;
    product_check(s, g, &c, native);
    if (M % 128 == 0 && N % 128 == 0 && K % 128 == 0) {
        const EdenAddress along_n = selfcheck_address(GEMM_DGRAD, OPERAND_A), along_m = selfcheck_address(GEMM_WGRAD, OPERAND_A);
        bf16 *dy = arena_normal(&arena, M * N, 3), *values_n = (bf16 *)arena_take(&arena, M * N * 2), *values_m = (bf16 *)arena_take(&arena, M * N * 2);
        uint8_t *codes_n = (uint8_t *)arena_take(&arena, M * N / 2), *codes_m = (uint8_t *)arena_take(&arena, M * N / 2);
        uint8_t *tiled_n = (uint8_t *)arena_take(&arena, tiled_scale_bytes(M, N)), *tiled_m = (uint8_t *)arena_take(&arena, tiled_scale_bytes(N, M));
        float *st = (float *)arena_take(&arena, 8), *factor = (float *)arena_take(&arena, 4);
        void *workspace = arena_take(&arena, eden_workspace_bytes(M, N));
        eden_both_launch(0, &SELFCHECK_EDEN, dy, M, N, values_n, values_m, along_n, along_m, workspace, st);
        eden_both_native_launch(0, dy, M, N, codes_n, tiled_n, codes_m, tiled_m, along_n, along_m, workspace, st);
        c.name = "dgrad"; c.m = M; c.n = K; c.k = N;
        c.a.codes = codes_n; c.a.scales = tiled_n; c.a_values = values_n; c.a_st = st; c.b_transposed = 0;
        backward_operand(&arena, &c, &w, N, K, selfcheck_address(GEMM_DGRAD, OPERAND_B), factor);
        nvfp4_alpha_launch(0, factor, factor, st);
        c.native_alpha = factor;
        product_check(s, g, &c, native);
        c.name = "wgrad"; c.m = N; c.n = K; c.k = M;
        c.a.codes = codes_m; c.a.scales = tiled_m; c.a_values = values_m; c.a_st = st + 1; c.a_transposed = 1;
        backward_operand(&arena, &c, &x, M, K, selfcheck_address(GEMM_WGRAD, OPERAND_B), factor);
        nvfp4_alpha_launch(0, factor, factor, st + 1);
        product_check(s, g, &c, native);
    }
    arena_free(&arena);
}
FN void selfcheck_nvfp4(SelfCheck *s, int major) {
    DeviceArena arena;
    Gemm g;
    char why[256];
    arena.count = 0;
    gemm_open(&g, arena_take(&arena, (int64_t)GEMM_WORKSPACE_BYTES), arena_take(&arena, 32), 0);
    const int native = nvfp4_gemm_supported(&g, why, sizeof why);
    selfcheck_note("--nvfp4-gemm auto is %s here: %s", native ? "native" : "emulated", why);  // a card without still trains, by the emulated product
    selfcheck_conversions(s, major);
    selfcheck_products(s, &g, native, 256, 384, 640);
    const RngStream r = rng_stream(2604, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int i = 0; i < 2; i++)
        selfcheck_products(s, &g, native, 128 * (1 + rng_word(r, 3 * i) % 6), 128 * (1 + rng_word(r, 3 * i + 1) % 6), 128 * (1 + rng_word(r, 3 * i + 2) % 6));
    selfcheck_products(s, &g, native, 200, 272, 352);  // rows no multiple of 128, scale columns none of 4
    gemm_close(&g);
    arena_free(&arena);
}

#endif
