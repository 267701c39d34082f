// dev/cuda/rotate_eden.cu: the ladder of rotation + MS-EDEN posthoc (dY both ways, saved X and W again).
//   nvcc -std=c++17 -O3 -arch=native -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/rotate_eden.cu -o rotate_eden && ./rotate_eden
#include "ladder.cuh"
#include "ladder_address.cuh"

#include "../../llmc/cpu/pack.h"
#include "../../llmc/cuda/quantize.cuh"

static const OperandSpec EDEN = NVFP4_ROTATED(ROUND_MS_EDEN_POSTHOC, 128, FROM_ORIGINAL), SEARCHED = NVFP4_ROTATED(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL), FOUR_SIX = NVFP4(ROUND_FOUR_SIX, BLOCK_1X16);

// ---------------------------------------------------------------------------------------------------------------------
// The first rung: a CTA a run, the run in shared memory, a barrier a stage, and the block functions of quantize.h as they are.
// Each direction reads dY again. Scales that turn out subnormal are mended by the trainer's second kernel.

static __global__ void naive_kernel(const __grid_constant__ EdenJob job, int direction) {
    __shared__ float y[EDEN_TILE];
    const EdenSide &side = job.side[direction];
    const int64_t run = blockIdx.x, runs = (direction == ALONG_M ? job.M : job.N) / EDEN_TILE, row = run / runs, at = run % runs;
    const int i = threadIdx.x;
    const int64_t from = direction == ALONG_M ? (at * EDEN_TILE + i) * job.N + row : row * job.N + at * EDEN_TILE + i;
    y[i] = f32_from_bits(f32_bits(__bfloat162float(job.x[from])) ^ side.sign[i]);
    for (int h = 1; h < EDEN_TILE; h *= 2) {
        __syncthreads();
        const float mine = y[i], other = y[i ^ h];
        __syncthreads();
        y[i] = i & h ? f32_sub(other, mine) : f32_add(mine, other);
    }
    __syncthreads();
    __shared__ float value[EDEN_TILE];
    if (i < 8) {
        LaneBlock v, q;
        float amax[1], c[1];
        for (int k = 0; k < 16; k++) v[k][0] = y[16 * i + k];
        block_amax(v, amax);
        ms_eden_posthoc_block(v, amax, q, c);
        const uint64_t index = (uint64_t)(row * side.blocks + at * 8 + i);
        const Philox4 p = philox_keyed((uint32_t)(side.first + index / 4), (uint32_t)((side.first + index / 4) >> 32), side.step, side.address, side.keys);
        const float s = ms_eden_posthoc_extended(c[0], p.w[index & 3]);
        for (int k = 0; k < 16; k++) value[16 * i + k] = f32_mul(q[k][0], s);
        reinterpret_cast<uint16_t *>(side.c + (direction == ALONG_M ? at * job.N + row : run) * 4)[2 * (i & 3) + (i >> 2)] = bf16_encode(c[0]);
        atomicMax(side.cta_max, f32_bits(c[0]));
        const int64_t tile = direction == ALONG_M ? at * job.tiles_n + row / EDEN_TILE : row / EDEN_TILE * job.tiles_n + at;
        atomicMin(&side.tile_min[tile], f32_bits(c[0]) - 1u);
    }
    __syncthreads();
    side.decoded[from] = __float2bfloat16_rn(value[i]);
}
static void naive_launch(const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m, EdenAddress n, EdenAddress m, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].decoded = along_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].decoded = along_m;
    for (int d = 0; d < 2; d++) {
        CUDA_CHECK(cudaMemsetAsync(job.side[d].cta_max, 0, 4));
        CUDA_CHECK(cudaMemsetAsync(job.side[d].tile_min, 0xFF, (size_t)eden_min_bytes(M, N)));
        naive_kernel<<<(unsigned)(M * N / EDEN_TILE), EDEN_TILE>>>(job, d);
        CUDA_LAUNCHED();
    }
    eden_finish(0, job, 0, DO_N | DO_M, 1, st, NULL, NULL);
}
// Both directions by two kernels that each read dY: what one read saves.
static void separate_launch(const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m, EdenAddress n, EdenAddress m, void *workspace, float *st) {
    eden_one_launch(0, &EDEN, dy, M, N, 0, along_n, n, workspace, st);
    eden_one_launch(0, &EDEN, dy, M, N, 1, along_m, m, workspace, st ? st + 1 : NULL);
}
// One kernel, in its variants: STAGES source buffers (with one, only the SM's other CTA hides the wait for a tile); APART: each
// direction has its own code.
template <int STAGES, bool APART>
static void variant_launch(const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m, EdenAddress n, EdenAddress m, void *workspace, float *st) {
    EdenJob job = eden_job(M, N, workspace);
    job.x = dy;
    eden_side(&job, ALONG_N, n); job.side[ALONG_N].decoded = along_n;
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].decoded = along_m;
    const int ctas = eden_start<SOURCE_BF16, DO_N | DO_M, STAGES, EDEN_DECODED, APART>(0, job);
    eden_finish(0, job, 0, DO_N | DO_M, ctas, st, NULL, NULL);
}
static void trainer_launch(const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m, EdenAddress n, EdenAddress m, void *workspace, float *st) {
    eden_both_launch(0, &EDEN, dy, M, N, along_n, along_m, n, m, workspace, st);
}
// MS-EDEN with the better of two scales a block (quartet2-search).
static void searched_launch(const bf16 *dy, int64_t M, int64_t N, bf16 *along_n, bf16 *along_m, EdenAddress n, EdenAddress m, void *workspace, float *st) {
    eden_both_launch(0, &SEARCHED, dy, M, N, along_n, along_m, n, m, workspace, st);
}
struct Version { const char *name; void (*launch)(const bf16 *, int64_t, int64_t, bf16 *, bf16 *, EdenAddress, EdenAddress, void *, float *); double bytes, instructions; };

// Instructions a value that a warp executes, counted in sm_90a code: both directions, with a code for each or a common one; one
// direction; a saved tensor again.
#define COUNT_APART 50.6
#define COUNT_COMMON 54.9
#define COUNT_ONE 26.5
#define COUNT_REQUANT 31.0
#define COUNT_SEARCHED 75.0
#define COUNT_REQUANT_SEARCHED 43.0
static const Version VERSIONS[] = {
    {"naive: barrier a stage", naive_launch, 8, 0},
    {"a direction a kernel", separate_launch, 8.25, 2 * COUNT_ONE},
    {"1 buffer, common code", variant_launch<1, false>, 6.25, COUNT_COMMON},
    {"1 buffer, own code", variant_launch<1, true>, 6.25, COUNT_APART},
    {"2 buffers, common code", variant_launch<2, false>, 6.25, COUNT_COMMON},
    {"2 buffers, own code", variant_launch<2, true>, 6.25, COUNT_APART},
    {"trainer's choice", trainer_launch, 6.25, EDEN_APART ? COUNT_APART : COUNT_COMMON},
    {"two scales searched", searched_launch, 6.25, COUNT_SEARCHED},
};

// ---------------------------------------------------------------------------------------------------------------------
// Checks

static QuantizeRandom random_of(EdenAddress a) {
    const QuantizeAddress q = cpu_address(a);
    return quantize_random(&q, &EDEN);
}
static int same_or_both_nan(float a, float b) { return f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b)); }

// A decoded operand against the CPU's (codes x s_b and s_t): bits, but for the sign of a zero.
static void check_decoded(Ladder *l, const char *what, const bf16 *device, float device_st, const std::vector<float> &x, int64_t rows,
                          int64_t cols, int along_rows, EdenAddress a, const OperandSpec *spec = &EDEN) {
    const int64_t n = rows * cols;
    std::vector<float> want((size_t)n);
    const QuantizeRandom random = random_of(a);
    const float st = quantize_tensor(want.data(), NULL, x.data(), rows, cols, along_rows, spec, &random, 1);
    ladder_check(l, same_or_both_nan(st, device_st), "%s: tensor scale %a, CPU %a", what, device_st, st);
    const std::vector<uint16_t> got = host_copy((const uint16_t *)device, n);
    if (isnan(st)) {  // the operand must not look healthy
        int64_t odd = 0;
        for (int64_t i = 0; i < n; i++) odd += (got[(size_t)i] & 0x7F80u) == 0x7F80u;
        ladder_check(l, odd > 0, "%s: a non-finite input left no trace in the operand", what);
        return;
    }
    int64_t bad = 0, first = -1;
    for (int64_t i = 0; i < n; i++) {
        const float v = f32_mul(want[(size_t)i], st);
        const uint16_t w = v == 0.0f ? 0 : bf16_encode(v), g = got[(size_t)i] == 0x8000u ? 0 : got[(size_t)i];
        if (w != g) { bad++; if (first < 0) first = i; }
    }
    ladder_check(l, bad == 0, "%s: %lld of %lld values differ, the first at row %lld, column %lld: %a, CPU %a", what, (long long)bad, (long long)n,
                 (long long)(first / cols), (long long)(first % cols), bad ? bf16_decode(got[(size_t)first]) : 0.0f, bad ? f32_mul(want[(size_t)first], st) : 0.0f);
}
// Codes without the sign of a zero (8: -0).
static uint8_t unsigned_zeros(uint8_t two) { return (uint8_t)((two & 0x0Fu) == 0x08u ? two & 0xF0u : two) & (uint8_t)((two & 0xF0u) == 0x80u ? 0x0Fu : 0xFFu); }
// A packed operand against quantize_pack(): codes (but for the sign of a zero), tiled scales, tensor scale.
static void check_packed(Ladder *l, const char *what, const uint8_t *codes, const uint8_t *tiled, float device_st, const std::vector<float> &x,
                         int64_t rows, int64_t cols, int along_rows, EdenAddress a) {
    const QuantizeRandom random = random_of(a);
    PackedTensor p = quantize_pack(x.data(), rows, cols, along_rows, &EDEN, &random);
    ladder_check(l, same_or_both_nan(p.st, device_st), "%s: tensor scale %a, CPU %a", what, device_st, p.st);
    if (!isnan(p.st)) {
        const std::vector<uint8_t> c = host_copy(codes, p.code_bytes), s = host_copy(tiled, p.scale_bytes);
        int64_t bad_codes = 0, bad_scales = 0;
        for (int64_t i = 0; i < p.code_bytes; i++) bad_codes += unsigned_zeros(c[(size_t)i]) != unsigned_zeros(p.codes[i]);
        for (int64_t i = 0; i < p.scale_bytes; i++) bad_scales += s[(size_t)i] != p.scales[i];
        ladder_check(l, bad_codes == 0, "%s: %lld of %lld code bytes differ", what, (long long)bad_codes, (long long)p.code_bytes);
        ladder_check(l, bad_scales == 0, "%s: %lld of %lld scales differ", what, (long long)bad_scales, (long long)p.scale_bytes);
    }
    packed_free(&p);
}
static std::vector<float> as_floats(const std::vector<uint16_t> &bits) {
    std::vector<float> x(bits.size());
    for (size_t i = 0; i < bits.size(); i++) x[i] = bf16_decode(bits[i]);
    return x;
}

static void check_both(Ladder *l, DataKind kind, int64_t M, int64_t N) {
    const int64_t n = M * N;
    const std::vector<uint16_t> bits = make_data(kind, M, N, (uint64_t)(M * 131 + N));
    const std::vector<float> x = as_floats(bits);
    DeviceArray<uint16_t> dx(bits);
    DeviceArray<uint8_t> workspace(eden_workspace_bytes(M, N));
    DeviceArray<float> st(2);
    const EdenAddress an = an_address(GEMM_DGRAD, OPERAND_A), am = an_address(GEMM_WGRAD, OPERAND_A);
    char what[160];
    for (const Version &v : VERSIONS) {
        DeviceArray<uint16_t> along_n(std::vector<uint16_t>((size_t)n, 0xAAAA)), along_m(std::vector<uint16_t>((size_t)n, 0xAAAA));
        v.launch((const bf16 *)dx.p, M, N, (bf16 *)along_n.p, (bf16 *)along_m.p, an, am, workspace, st);
        CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<float> s = st.host(2);
        snprintf(what, sizeof what, "%s, along N, %s, %lld x %lld", v.name, DATA_NAMES[kind], (long long)M, (long long)N);
        const OperandSpec *spec = v.launch == searched_launch ? &SEARCHED : &EDEN;
        check_decoded(l, what, (const bf16 *)along_n.p, s[0], x, M, N, 0, an, spec);
        snprintf(what, sizeof what, "%s, along M, %s, %lld x %lld", v.name, DATA_NAMES[kind], (long long)M, (long long)N);
        check_decoded(l, what, (const bf16 *)along_m.p, s[1], x, M, N, 1, am, spec);
    }
    DeviceArray<uint8_t> codes_n(std::vector<uint8_t>((size_t)(n / 2), 0xAA)), codes_m(std::vector<uint8_t>((size_t)(n / 2), 0xAA));
    DeviceArray<uint8_t> tiled_n(std::vector<uint8_t>((size_t)tiled_scale_bytes(M, N), 0xAA)), tiled_m(std::vector<uint8_t>((size_t)tiled_scale_bytes(N, M), 0xAA));
    eden_both_native_launch(0, (const bf16 *)dx.p, M, N, codes_n, tiled_n, codes_m, tiled_m, an, am, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<float> s = st.host(2);
    snprintf(what, sizeof what, "native, along N, %s, %lld x %lld", DATA_NAMES[kind], (long long)M, (long long)N);
    check_packed(l, what, codes_n, tiled_n, s[0], x, M, N, 0, an);
    snprintf(what, sizeof what, "native, along M, %s, %lld x %lld", DATA_NAMES[kind], (long long)M, (long long)N);
    check_packed(l, what, codes_m, tiled_m, s[1], x, M, N, 1, am);
}
// A saved tensor: quantized forward on the GPU (dev/cuda/quantize.cu checks that), unpacked on the CPU, re-quantized on both.
static void check_requant(Ladder *l, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols, C = cols / 16;
    DeviceArray<uint16_t> x(make_data(kind, rows, cols, (uint64_t)(rows * 137 + cols))), out(std::vector<uint16_t>((size_t)n, 0xAAAA));
    DeviceArray<uint8_t> codes(n / 2), scales(n / 16), tiled(tiled_scale_bytes(rows, cols)), codes_t(n / 2), tiled_t(tiled_scale_bytes(cols, rows));
    DeviceArray<uint8_t> workspace(eden_workspace_bytes(rows, cols));
    DeviceArray<float> amax(1), saved(1), alpha(1), st(1);
    const EdenAddress a = an_address(GEMM_WGRAD, OPERAND_B);
    amax_launch(0, (const bf16 *)x.p, n, amax);
    quantize_forward_launch(0, &FOUR_SIX, (const bf16 *)x.p, rows, cols, amax, codes, scales, NULL, saved, NULL, NULL);
    eden_requant_launch(0, &EDEN, codes, scales, rows, cols, (bf16 *)out.p, a, saved, alpha, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> c = codes.host(n / 2), s = scales.host(n / 16);
    std::vector<float> values((size_t)n);
    for (int64_t i = 0; i < n; i++)
        values[(size_t)i] = f32_mul(e2m1_decode((uint32_t)c[(size_t)(i / 2)] >> (i % 2 * 4) & 15u), e4m3_decode(s[(size_t)(i / cols * C + i % cols / 16)]));
    char what[160];
    snprintf(what, sizeof what, "requant, %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    const float saved_st = saved.host(1)[0];
    check_decoded(l, what, (const bf16 *)out.p, st.host(1)[0], values, rows, cols, 1, a);
    ladder_check(l, same_or_both_nan(alpha.host(1)[0], f32_mul(saved_st, 1.0f / 128.0f)), "%s: alpha %a of saved scale %a", what, alpha.host(1)[0], saved_st);
    eden_requant_launch(0, &SEARCHED, codes, scales, rows, cols, (bf16 *)out.p, a, saved, alpha, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
    snprintf(what, sizeof what, "requant, two scales searched, %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    check_decoded(l, what, (const bf16 *)out.p, st.host(1)[0], values, rows, cols, 1, a, &SEARCHED);
    // and the one direction of a tensor that was not saved
    eden_one_launch(0, &SEARCHED, (const bf16 *)x.p, rows, cols, 0, (bf16 *)out.p, a, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
    snprintf(what, sizeof what, "along N only, two scales searched, %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    check_decoded(l, what, (const bf16 *)out.p, st.host(1)[0], as_floats(x.host(n)), rows, cols, 0, a, &SEARCHED);

    quantize_forward_native_launch(0, &FOUR_SIX, (const bf16 *)x.p, rows, cols, amax, codes, tiled, saved, NULL, NULL);
    eden_requant_native_launch(0, codes, tiled, rows, cols, codes_t, tiled_t, a, saved, alpha, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
    snprintf(what, sizeof what, "native requant, %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    const float new_st = st.host(1)[0];
    check_packed(l, what, codes_t, tiled_t, new_st, values, rows, cols, 1, a);
    ladder_check(l, same_or_both_nan(alpha.host(1)[0], f32_mul(f32_mul(saved_st, 1.0f / 128.0f), new_st)), "%s: alpha %a", what, alpha.host(1)[0]);
}

// Device formulations that only this family uses, against their definitions.
static __global__ void formulations_kernel(unsigned long long *wrong) {
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = thread; i < 1ull << 30; i += threads) {  // quotients of sums: 2^-4 to 2^12, mantissas at random
        const Philox4 p = philox4x32((uint32_t)i, 0u, 0u, 0u, 1u, 2u);
        const float n = f32_from_bits((p.w[0] & 0x7FFFFFu) | (123u + p.w[1] % 16u) << 23), d = f32_from_bits((p.w[2] & 0x7FFFFFu) | (123u + p.w[3] % 16u) << 23);
        if (f32_bits(f32_quotient(n, d)) != f32_bits(f32_div(n, d))) atomicAdd(&wrong[0], 1ull);
    }
    for (uint64_t i = thread; i < 127u * 256u; i += threads) {  // every scale, every pair of codes
        const uint32_t code = (uint32_t)i / 256u, byte = (uint32_t)i & 255u, got = packed_decode2(byte << 16, 2, packed_scale_bf16x2(code));
        for (int h = 0; h < 2; h++) {
            const float want = f32_mul(f32_mul(e2m1_decode(byte >> (4 * h) & 15u), e4m3_decode(code)), PACKED_SCALE);
            if (f32_bits(want) != (h ? got & 0xFFFF0000u : got << 16)) atomicAdd(&wrong[1], 1ull);
        }
    }
    if (thread < 128) {  // every block of every run once
        int owners = 0;
        for (int d = 0; d < 2; d++) for (int w = 0; w < EDEN_WARPS; w++) for (int l = 0; l < 32; l++) {
            const EdenPlace p = eden_place(d, w, l);
            if (p.run == (int)thread) for (int half = 0; half < 2; half++) owners += 1 << 2 * run_block(p.part, half);
        }
        if (owners != 0xAAAA) atomicAdd(&wrong[2], 1ull);  // two directions: twice each of eight blocks
    }
}
static void check_formulations(Ladder *l) {
    static const char *const names[] = {"f32_quotient", "packed_decode2", "eden_place, run_block: owners of a block"};
    DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>(3, 0ull));
    formulations_kernel<<<2048, 256>>>(wrong);
    CUDA_LAUNCHED();
    const std::vector<unsigned long long> w = wrong.host(3);
    for (int i = 0; i < 3; i++) ladder_check(l, w[(size_t)i] == 0, "%s: %llu inputs differ from the definition", names[i], w[(size_t)i]);
}

// More than 2^31 values. The last 128 rows along N are what they give alone at the micro-batch that has the same block indices;
// the last 128 columns along M are what the CPU gives with the words of their rows. Scales are not subnormal there (Gaussian
// values), so the tensor scale does not matter.
static void check_large(Ladder *l) {
    const int64_t M = 1 << 20, N = 2176, n = M * N, T = EDEN_TILE;
    DeviceArray<bf16> x(n), along_n(n), along_m(n), alone(T * N);
    DeviceArray<uint8_t> workspace(eden_workspace_bytes(M, N)), workspace1(eden_workspace_bytes(T, N));
    fill_gauss(x, n, 5);
    EdenAddress a = an_address(GEMM_DGRAD, OPERAND_A), m = an_address(GEMM_WGRAD, OPERAND_A);
    a.micro = m.micro = 0;
    eden_both_launch(0, &EDEN, x, M, N, along_n, along_m, a, m, workspace, NULL);
    a.micro = (M - T) / T;
    eden_one_launch(0, &EDEN, x + (M - T) * N, T, N, 0, alone, a, workspace1, NULL);
    CUDA_CHECK(cudaDeviceSynchronize());
    ladder_check(l, host_copy((const uint16_t *)along_n.p + (M - T) * N, T * N) == host_copy((const uint16_t *)alone.p, T * N),
                 "%lld x %lld (over 2^31 values), along N: the last rows differ from the same rows alone", (long long)M, (long long)N);

    std::vector<uint16_t> corner((size_t)(T * T)), got((size_t)(T * T));
    CUDA_CHECK(cudaMemcpy2D(corner.data(), T * 2, x + (M - T) * N + N - T, (size_t)N * 2, T * 2, T, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy2D(got.data(), T * 2, along_m + (M - T) * N + N - T, (size_t)N * 2, T * 2, T, cudaMemcpyDeviceToHost));
    QuantizeRandom random = random_of(m);
    std::vector<uint32_t> words((size_t)(T * 8));
    for (int64_t r = 0; r < T; r++) for (int64_t b = 0; b < 8; b++)
        words[(size_t)(r * 8 + b)] = rng_word(random.stream, block_word_index(0, N, M / 16, N - T + r, M / 16 - 8 + b));
    random.words = words.data();
    std::vector<float> want((size_t)(T * T)), values = as_floats(corner);
    const float st = quantize_tensor(want.data(), NULL, values.data(), T, T, 1, &EDEN, &random, 1);
    int64_t bad = 0;
    for (int64_t i = 0; i < T * T; i++) bad += bf16_decode(got[(size_t)i]) != f32_mul(want[(size_t)i], st);
    ladder_check(l, bad == 0, "%lld x %lld (over 2^31 values), along M: %lld values of the last tile differ", (long long)M, (long long)N, (long long)bad);
}

// ---------------------------------------------------------------------------------------------------------------------
// Times

// Two thirds of the columns 2^-15 of the others' size, as gradients of queries and keys lie beside those of values: all of their
// blocks get a subnormal scale.
static __global__ void shrink_kernel(bf16 *x, int64_t M, int64_t N) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < M * N; i += (int64_t)gridDim.x * blockDim.x)
        if (i % N < N / 3 * 2) x[i] = __float2bfloat16_rn(__bfloat162float(x[i]) * 0x1p-15f);
}
static void time_shape(const Ladder *l, int64_t M, int64_t N) {
    const int64_t n = M * N;
    const int copies = rotation_copies(n * 6);
    std::vector<bf16 *> x, along_n, along_m;
    for (int i = 0; i < copies; i++) {
        x.push_back(device_new<bf16>(n)); along_n.push_back(device_new<bf16>(n)); along_m.push_back(device_new<bf16>(n));
        fill_gauss(x.back(), n, 7);
    }
    DeviceArray<uint8_t> workspace(eden_workspace_bytes(M, N)), codes(n / 2), scales(n / 16), codes_m(n / 2), tiled(tiled_scale_bytes(M, N)), tiled_m(tiled_scale_bytes(N, M));
    DeviceArray<float> amax(1), saved(1), alpha(1), st(2);
    const EdenAddress a = an_address(GEMM_DGRAD, OPERAND_A), m = an_address(GEMM_WGRAD, OPERAND_A), b = an_address(GEMM_WGRAD, OPERAND_B);
    char title[96];
    snprintf(title, sizeof title, "dY both ways, %lld x %lld", (long long)M, (long long)N);
    ladder_heading(title);
    for (const Version &v : VERSIONS) {
        if (v.launch == naive_launch && n > 1ll << 27) continue;
        ladder_row(l, v.name, ladder_time([&](int i) {
            v.launch(x[i % copies], M, N, along_n[i % copies], along_m[i % copies], a, m, workspace, st); }), (double)n, v.bytes, v.instructions);
    }
    ladder_row(l, "along N only", ladder_time([&](int i) { eden_one_launch(0, &EDEN, x[i % copies], M, N, 0, along_n[i % copies], a, workspace, st); }), (double)n, 4.125, COUNT_ONE);
    ladder_row(l, "along M only", ladder_time([&](int i) { eden_one_launch(0, &EDEN, x[i % copies], M, N, 1, along_m[i % copies], m, workspace, st); }), (double)n, 4.125, COUNT_ONE);
    ladder_row(l, "native", ladder_time([&](int i) {
        eden_both_native_launch(0, x[i % copies], M, N, codes, tiled, codes_m, tiled_m, a, m, workspace, st); }), (double)n, 3.625, 0);
    EdenJob job = eden_job(M, N, workspace);
    job.x = x[0];
    eden_side(&job, ALONG_N, a); job.side[ALONG_N].decoded = along_n[0];
    eden_side(&job, ALONG_M, m); job.side[ALONG_M].decoded = along_m[0];
    const int ctas = eden_start_staged<SOURCE_BF16, DO_N | DO_M, EDEN_DECODED>(0, job);
    ladder_row(l, "  of it, looking for blocks to mend", ladder_time([&](int) { eden_finish(0, job, 0, DO_N | DO_M, ctas, st, NULL, NULL); }), (double)n, 0, 0);

    for (int i = 0; i < copies; i++) shrink_kernel<<<1024, 256>>>(x[i], M, N);
    CUDA_LAUNCHED();
    ladder_row(l, "trainer, two thirds to be mended", ladder_time([&](int i) {
        eden_both_launch(0, &EDEN, x[i % copies], M, N, along_n[i % copies], along_m[i % copies], a, m, workspace, st); }), (double)n, 6.25 + 16.0 / 3, 0);

    quantize_forward_launch(0, &FOUR_SIX, x[0], M, N, amax, codes, scales, NULL, saved, NULL, NULL);
    ladder_row(l, "saved X again, along M", ladder_time([&](int i) {
        eden_requant_launch(0, &EDEN, codes, scales, M, N, along_m[i % copies], b, saved, alpha, workspace, st); }), (double)n, 2.6875, COUNT_REQUANT);
    ladder_row(l, "saved X again, two scales searched", ladder_time([&](int i) {
        eden_requant_launch(0, &SEARCHED, codes, scales, M, N, along_m[i % copies], b, saved, alpha, workspace, st); }), (double)n, 2.6875, COUNT_REQUANT_SEARCHED);
    for (int i = 0; i < copies; i++) { CUDA_CHECK(cudaFree(x[i])); CUDA_CHECK(cudaFree(along_n[i])); CUDA_CHECK(cudaFree(along_m[i])); }
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) { check_large(&l); return ladder_finish(&l); }
    if (!l.small) check_formulations(&l);
    static const int64_t shapes[][2] = {{128, 128}, {256, 384}, {384, 256}, {1024, 640}};
    for (const int64_t *s : shapes) for (DataKind kind : ladder_kinds(&l)) {
        if (l.small && s[0] > 256) continue;
        check_both(&l, kind, s[0], s[1]);
        check_requant(&l, kind, s[0], s[1]);
    }
    if (!l.quick) {
        ladder_ceilings(&l);
        static const int64_t sizes[][2] = {{65536, 640}, {65536, 1024}, {65536, 2816}, {16384, 2048}, {16384, 5632}, {65536, 5632}};
        for (const int64_t *s : sizes) time_shape(&l, s[0], s[1]);
    }
    return ladder_finish(&l);
}
