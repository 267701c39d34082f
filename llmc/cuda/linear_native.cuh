// cuda/linear_native.cuh: a linear layer whose three products are taken by FP4 tensor cores (--nvfp4-gemm). Included by linear.cuh, whose forward,
// dgrad and wgrad call these where the plan says `native`.
//
//   GEMM      A                                    B                                       alpha
//   forward   X      (M,K) x_codes, x_scales       W   (N,K) w_codes, w_scales             s_t of X x s_t of W
//   dgrad     dY     (M,N) dy_dgrad                W^T (K,N) w_dgrad, from w_codes         s_t of dY x (s_t of W / 128 x the new one)
//   wgrad     dY^T   (N,M) dy_wgrad                X^T (K,M) x_wgrad, from x_codes         s_t of dY^T x (s_t of X / 128 x the new one)
//
// Every operand is packed along the product's inner dimension, scales in 128x4 tiles, as gemm_nvfp4.cuh reads it: nothing is decoded to BF16. What the
// forward multiplied is what backward starts from, and W's packed codes are each layer's own, so W is quantized once a step whatever weights_kept says.
// Operands have the values of the emulated ones (test_linear_gpu.cu, on any card); products differ by the order of sums alone.
#ifndef LLMC_CUDA_LINEAR_NATIVE_CUH
#define LLMC_CUDA_LINEAR_NATIVE_CUH

// ---------------------------------------------------------------------------------------------------------------------
// Which plans, and whether here

// Why no packed kernels make this plan's operands; NULL: they do. Mixed recipes (a product of BF16, of 16x16 blocks, of stochastic rounding) stay emulated.
FN const char *native_plan_lacks(const LinearPlan *p) {
    const Recipe *r = p->recipe;
    for (int o = 0; o < 2; o++) {
        const Rounding rounding = operand_spec(r, GEMM_FORWARD, o)->rounding;
        if (p->kind[GEMM_FORWARD][o] != KIND_NVFP4 || (rounding != ROUND_RTN && rounding != ROUND_FOUR_SIX))
            return "its forward operands are not nearest or four-over-six NVFP4 in blocks of 16";
    }
    for (int g = GEMM_DGRAD; g <= GEMM_WGRAD; g++) {
        for (int o = 0; o < 2; o++)
            if (p->kind[g][o] != KIND_EDEN || operand_spec(r, g, o)->rounding != ROUND_MS_EDEN_POSTHOC) return "its backward operands are not MS-EDEN";
        if (p->from_plain[g == GEMM_WGRAD]) return "its backward starts from the unquantized tensors";
    }
    for (int g = 0; g < 3; g++) if (p->float_product[g]) return "something is done to its products";
    return NULL;
}
// Whether any product has two NVFP4 operands, native or not.
FN int plan_has_nvfp4(const LinearPlan *p) {
    for (int g = 0; g < 3; g++)
        if (p->recipe->gemm[g].a.format == FORMAT_NVFP4 && p->recipe->gemm[g].b.format == FORMAT_NVFP4) return 1;
    return 0;
}
// Settles p->native for this device; why: the reason, either way. A `native` that cannot be is fatal, with the reason.
FN void native_choose(LinearPlan *p, Nvfp4GemmMode mode, char *why, size_t size) {
    p->native = 0;
    snprintf(why, size, "--nvfp4-gemm emulated");
    if (mode == NVFP4_GEMM_EMULATED) return;
    const char *lacks = plan_has_nvfp4(p) ? native_plan_lacks(p) : "it has no NVFP4 products";
    if (lacks) {
        snprintf(why, size, "--recipe %s: %s", p->recipe->name, lacks);
        if (mode == NVFP4_GEMM_NATIVE) fatal("--nvfp4-gemm native: %s; use auto or emulated", why);
        return;
    }
    // The question takes a handle and some device memory to point at.
    void *memory;
    Gemm g;
    CUDA_CHECK(cudaMalloc(&memory, 512));
    gemm_open(&g, memory, (char *)memory + 256, 0);
    p->native = nvfp4_gemm_native(&g, mode, why, size);
    gemm_close(&g);
    CUDA_CHECK(cudaFree(memory));
}

// ---------------------------------------------------------------------------------------------------------------------
// Places. In one buffer: codes, then the scales' tiles.

typedef struct { uint8_t *codes, *scales; } NativePlace;

FN NativePlace native_place(void *buffer, int64_t rows, int64_t inner) {
    const int64_t codes = (rows * inner / 2 + 255) / 256 * 256;
    NativePlace p = {(uint8_t *)buffer, (uint8_t *)buffer + codes};
    return p;
}
// Where an operand of a GEMM on M rows lies.
FN NativePlace native_operand(const Linear *l, const LinearWork *work, int gemm, int operand, int64_t M) {
    const NativePlace x = {l->x_codes, l->x_scales}, w = {l->w_codes, l->w_scales};
    switch (gemm) {
    case GEMM_DGRAD: return operand == OPERAND_A ? native_place(l->dy_dgrad, M, l->N) : native_place(l->w_dgrad, l->K, l->N);
    case GEMM_WGRAD: return operand == OPERAND_A ? native_place(work->dy_wgrad, l->N, M) : native_place(work->x_wgrad, l->K, M);
    default: return operand == OPERAND_B ? w : M == work->kept_rows ? x : native_place(work->x_forward, M, l->K);
    }
}
// Bytes of work space for an operand of so many values, both of its dimensions multiples of 128: then its tiles have no padding. (Fewer rows than a
// micro-batch's fit too: padded to 128 they are no more than those.)
FN int64_t plan_operand_bytes(const LinearPlan *p, int64_t values) { return !p->native ? values * 2 : values ? values / 2 + values / NVFP4_BLOCK + 256 : 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Operands

FN void native_make_weight(Linear *l, const LinearWork *work) {
    const NativePlace w = native_operand(l, work, GEMM_FORWARD, OPERAND_B, 0);
    linear_mark(work, FAMILY_QUANTIZE_W, 2.5625, l->N * l->K);
    quantize_forward_native_launch(work->stream, &l->plan->recipe->gemm[GEMM_FORWARD].b, l->w, l->N, l->K, l->amax_w, w.codes, w.scales, l->factor + FACTOR_W, NULL, NULL);
    l->forward_ready = 1;
}
// Also the forward's alpha: W comes first.
FN void native_make_input(const Linear *l, const LinearWork *work, int64_t M) {
    const NativePlace x = native_operand(l, work, GEMM_FORWARD, OPERAND_A, M);
    linear_mark(work, FAMILY_QUANTIZE_X, 2.5625, M * l->K);
    quantize_forward_native_launch(work->stream, &l->plan->recipe->gemm[GEMM_FORWARD].a, l->x, M, l->K, l->amax_x, x.codes, x.scales, l->factor + FACTOR_X,
                                   l->factor + FACTOR_W, l->factor + FACTOR_ALPHA + GEMM_FORWARD);
}
// dY's operands of both backward GEMMs, from one read.
FN void native_make_gradient(const Linear *l, const LinearWork *work, const bf16 *dy, int64_t M) {
    static_assert(FACTOR_DY_WGRAD == FACTOR_DY_DGRAD + 1, "eden_both_native_launch writes the two tensor scales next to each other");
    const NativePlace n = native_operand(l, work, GEMM_DGRAD, OPERAND_A, M), m = native_operand(l, work, GEMM_WGRAD, OPERAND_A, M);
    linear_mark(work, FAMILY_EDEN_DY, 3.625, M * l->N);
    eden_both_native_launch(work->stream, dy, M, l->N, n.codes, n.scales, m.codes, m.scales, linear_address(l, work, GEMM_DGRAD, OPERAND_A),
                            linear_address(l, work, GEMM_WGRAD, OPERAND_A), work->quantizer_work, l->factor + FACTOR_DY_DGRAD);
}
// Operand B of a backward GEMM from what the forward multiplied, (rows, K), along its rows.
FN void native_make_again(const Linear *l, const LinearWork *work, int gemm, int64_t M) {
    const int is_x = gemm == GEMM_WGRAD;
    const NativePlace from = native_operand(l, work, GEMM_FORWARD, is_x ? OPERAND_A : OPERAND_B, M), to = native_operand(l, work, gemm, OPERAND_B, M);
    const int64_t rows = is_x ? M : l->N;
    linear_mark(work, is_x ? FAMILY_EDEN_X : FAMILY_EDEN_W, 1.375, rows * l->K);
    eden_requant_native_launch(work->stream, from.codes, from.scales, rows, l->K, to.codes, to.scales, linear_address(l, work, gemm, OPERAND_B),
                               l->factor + (is_x ? FACTOR_X : FACTOR_W), l->factor + (is_x ? FACTOR_X_WGRAD : FACTOR_W_DGRAD), work->quantizer_work, NULL);
}
FN void native_alpha(const Linear *l, const LinearWork *work, int gemm) {
    const int is_x = gemm == GEMM_WGRAD;
    nvfp4_alpha_launch(work->stream, l->factor + FACTOR_ALPHA + gemm, l->factor + (is_x ? FACTOR_DY_WGRAD : FACTOR_DY_DGRAD),
                       l->factor + (is_x ? FACTOR_X_WGRAD : FACTOR_W_DGRAD));
}
// All that dgrad and wgrad need; the products may follow.
FN void native_make_dgrad(Linear *l, const LinearWork *work, const bf16 *dy, int64_t M) {
    native_make_gradient(l, work, dy, M);
    if (!l->dgrad_ready) native_make_again(l, work, GEMM_DGRAD, M);
    l->dgrad_ready = work->weights_kept;                   // else the next layer's operand takes its place
    native_alpha(l, work, GEMM_DGRAD);
}
FN void native_make_wgrad(const Linear *l, const LinearWork *work, int64_t M) {
    native_make_again(l, work, GEMM_WGRAD, M);
    native_alpha(l, work, GEMM_WGRAD);
}

// The forward's operand (rows, cols) as BF16 values code x s_b, for --quant-stats: a thread a block.
__global__ static void native_decode_kernel(const uint8_t *codes, const uint8_t *scales, int64_t blocks, int64_t columns, bf16 *out) {
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < blocks; k += (int64_t)gridDim.x * blockDim.x) {
        const float s = e4m3_decode(scales[tiled_scale_offset(k / columns, k % columns, columns)]);
        for (int i = 0; i < NVFP4_BLOCK; i++)
            out[k * NVFP4_BLOCK + i] = __float2bfloat16_rn(f32_mul(e2m1_decode((uint32_t)codes[k * (NVFP4_BLOCK / 2) + i / 2] >> (i % 2 * 4)), s));
    }
}
FN void native_decode_launch(cudaStream_t stream, NativePlace from, int64_t rows, int64_t cols, bf16 *out) {
    const int64_t blocks = rows * (cols / NVFP4_BLOCK), ctas = ceil_div(blocks, 256), most = 8 * (int64_t)device_attribute(cudaDevAttrMultiProcessorCount);
    native_decode_kernel<<<(int)(ctas < most ? ctas : most), 256, 0, stream>>>(from.codes, from.scales, blocks, cols / NVFP4_BLOCK, out);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

FN Nvfp4Operand native_read(const Linear *l, const LinearWork *work, int gemm, int operand, int64_t M) {
    const NativePlace p = native_operand(l, work, gemm, operand, M);
    Nvfp4Operand o = {p.codes, p.scales};
    return o;
}
FN void native_product(const Linear *l, const LinearWork *work, int gemm, int64_t M, void *d, int accumulate) {
    const GemmShape s = linear_shape(l, gemm, M);
    GemmPlan *p = nvfp4_gemm_plan(work->gemm, s.m, s.n, s.k, s.d_float32);
    profile_mark(work->profile, (Family)(FAMILY_GEMM_FORWARD + gemm), 0, p->ms, work->stream);
    nvfp4_gemm_run(work->gemm, p, d, native_read(l, work, gemm, OPERAND_A, M), native_read(l, work, gemm, OPERAND_B, M), l->factor + FACTOR_ALPHA + gemm, accumulate,
                   work->stream);
}
FN void native_forward(Linear *l, const LinearWork *work, bf16 *y, int64_t M) {
    if (!l->forward_ready) native_make_weight(l, work);
    native_make_input(l, work, M);
    native_product(l, work, GEMM_FORWARD, M, y, 0);
}
FN void native_dgrad(Linear *l, const LinearWork *work, bf16 *dx, const bf16 *dy, int64_t M) {
    native_make_dgrad(l, work, dy, M);
    native_product(l, work, GEMM_DGRAD, M, dx, 0);
}
FN void native_wgrad(const Linear *l, const LinearWork *work, int64_t M) {
    native_make_wgrad(l, work, M);
    native_product(l, work, GEMM_WGRAD, M, l->dw, work->micro > 0);
}
// Times the three products' algorithms on the operands' own places, whatever codes lie there, with scales of 1. work: of this layer's M rows.
FN void native_tune(Linear *l, const LinearWork *work, int64_t M, void *y, void *dx) {
    void *const d[3] = {y, dx, l->dw};
    for (int gemm = 0; gemm < 3; gemm++) {
        const GemmShape s = linear_shape(l, gemm, M);
        const NativePlace a = native_operand(l, work, gemm, OPERAND_A, M), b = native_operand(l, work, gemm, OPERAND_B, M);
        CUDA_CHECK(cudaMemsetAsync(a.scales, 0x38, (size_t)tiled_scale_bytes(s.m, s.k), work->stream));
        CUDA_CHECK(cudaMemsetAsync(b.scales, 0x38, (size_t)tiled_scale_bytes(s.n, s.k), work->stream));
        nvfp4_gemm_tune(work->gemm, s.m, s.n, s.k, s.d_float32, d[gemm], native_read(l, work, gemm, OPERAND_A, M), native_read(l, work, gemm, OPERAND_B, M), work->stream);
    }
}

#endif
