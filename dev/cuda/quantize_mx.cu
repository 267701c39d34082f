// dev/cuda/quantize_mx.cu: the ladder of the MXFP4 quantizers: QuEST along columns, stochastic rounding in both directions, a saved tensor
// again, decoded, and a backward product turned back.
//   nvcc -std=c++17 -O3 -arch=native -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/quantize_mx.cu -o quantize_mx && ./quantize_mx
#include "ladder.cuh"
#include "ladder_address.cuh"

#include "../../llmc/cpu/quantize.h"
#include "../../llmc/cuda/quantize_mx.cuh"

static OperandSpec quest_spec(int rotation, RotationSigns signs) {
    const OperandSpec s = {ROUND_QUEST, FORMAT_MXFP4, BLOCK_1X32, rotation, FROM_ORIGINAL, signs, SEARCH_FEW, 0};
    return s;
}
static OperandSpec sr_spec(int rotation) {
    const OperandSpec s = {ROUND_SR, FORMAT_MXFP4, BLOCK_1X32, rotation, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0};
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The first rung: a thread a run (of the rotation, at least a block), the functions of quantize.h as they are, each direction by itself.

static __device__ void naive_run(const bf16 *x, int64_t stride, const MxRotation &r, int length, float *y) {
    for (int i = 0; i < length; i++) {
        const uint32_t sign = r.length ? r.signs[i / 32] >> i % 32 << 31 : 0u;
        y[i] = f32_from_bits(f32_bits(__bfloat162float(x[i * stride])) ^ sign);
    }
    if (!r.length) return;
    for (int i = 0; i < length; i += r.length) hadamard(y + i, r.length);
    for (int i = 0; i < length; i++) y[i] = f32_mul(y[i], r.norm);
}
static __host__ __device__ int run_length(const MxRotation &r) { return r.length > MXFP4_BLOCK ? r.length : MXFP4_BLOCK; }
static __global__ void naive_quest_kernel(const __grid_constant__ QuestJob job) {
    const int length = run_length(job.rotation), parts = length / MXFP4_BLOCK;
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * parts;
    if (first >= job.blocks) return;
    float y[ROTATION_MAX];
    naive_run((const bf16 *)job.x + 32 * first, 1, job.rotation, length, y);
    for (int part = 0; part < parts; part++) {
        const int64_t at = first + part;
        LaneBlock32 v, q;
        LaneBlock32Bits unclipped;
        uint32_t scale[1], mask = 0u;
        for (int i = 0; i < 32; i++) v[i][0] = y[32 * part + i];
        mx_quest_block(v, q, scale, unclipped);
        if (!mx_is_finite(v)) scale[0] = MX_SCALE_NAN;
        for (int i = 0; i < 32; i++) mask |= unclipped[i][0] << i;
        for (int i = 0; i < 32; i += 2) ((uint8_t *)job.codes)[16 * at + i / 2] = (uint8_t)(e2m1_encode(q[i][0]) | e2m1_encode(q[i + 1][0]) << 4);
        for (int i = 0; i < 32; i++) ((bf16 *)job.decoded)[32 * at + i] = __float2bfloat16_rn(f32_mul(q[i][0], mx_step(scale[0])));
        job.scales[at] = (uint8_t)scale[0];
        job.mask[at] = mask;
    }
}
static __global__ void naive_sr_kernel(const bf16 *x, int64_t M, int64_t N, bool along_m, const __grid_constant__ MxWay way) {
    const int length = run_length(way.rotation);
    const int64_t inner = along_m ? M : N, outer = along_m ? N : M, stride = along_m ? N : 1;
    const int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= outer * (inner / length)) return;
    const int64_t row = along_m ? k % outer : k / (inner / length), first = (along_m ? k / outer : k % (inner / length)) * length;
    const int64_t at = along_m ? first * N + row : row * N + first;
    float y[ROTATION_MAX];
    naive_run(x + at, stride, way.rotation, length, y);
    for (int b = 0; b < length; b += 32) {
        LaneBlock32 v, q;
        LaneBlock32Bits u;
        uint32_t scale[1];
        for (int i = 0; i < 32; i++) {
            v[i][0] = y[b + i];
            u[i][0] = rng_word(way.words, 4 * way.first + (uint64_t)(row * inner + first + b + i));
        }
        mx_sr_block(v, u, q, scale);
        const float step = mx_step(mx_is_finite(v) ? scale[0] : MX_SCALE_NAN);
        for (int i = 0; i < 32; i++) way.out[at + (b + i) * stride] = __float2bfloat16_rn(f32_mul(q[i][0], step));
    }
}
// What the trainer's launches do, by the first rung. All outputs are wanted.
static void quest_launch(bool naive, const OperandSpec *spec, EdenAddress at, const bf16 *x, int64_t rows, int64_t cols, uint8_t *codes,
                         uint8_t *scales, uint32_t *mask, bf16 *decoded) {
    if (!naive) { mx_quest_launch(0, spec, at, x, rows, cols, codes, scales, mask, decoded); return; }
    const QuestJob job = {(const uint4 *)x, rows * cols / 32, mx_rotation(spec, at, at.gemm, cols), (uint4 *)codes, (uint4 *)decoded, scales, mask};
    naive_quest_kernel<<<(unsigned)ceil_div(rows * cols / run_length(job.rotation), 128), 128>>>(job);
    CUDA_LAUNCHED();
}
static void sr_launch(bool naive, const bf16 *x, int64_t M, int64_t N, const MxSide *along_n, const MxSide *along_m) {
    if (!naive) { mx_sr_launch(0, x, M, N, along_n, along_m); return; }
    for (int d = 0; d < 2; d++) {
        const MxSide *side = d ? along_m : along_n;
        if (!side) continue;
        const MxWay way = mx_way(side, d ? N : M, d ? M : N);
        naive_sr_kernel<<<(unsigned)ceil_div(M * N / run_length(way.rotation), 128), 128>>>(x, M, N, d == 1, way);
        CUDA_LAUNCHED();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks

static std::vector<float> as_floats(const std::vector<uint16_t> &bits) {
    std::vector<float> x(bits.size());
    for (size_t i = 0; i < bits.size(); i++) x[i] = bf16_decode(bits[i]);
    return x;
}
// The same bits, but for the sign of a zero; where the CPU's value is not finite, the other is not finite either.
static int same_value(uint16_t got, float want) {
    if (!(fabsf(want) < INFINITY)) return (got & 0x7F80u) == 0x7F80u;
    const uint16_t w = bf16_encode(want);
    return got == w || (((got | w) & 0x7FFFu) == 0u);
}
static void check_values(Ladder *l, const char *what, const std::vector<uint16_t> &got, const std::vector<float> &want, int64_t cols) {
    int64_t bad = 0, first = 0;
    for (int64_t i = (int64_t)want.size() - 1; i >= 0; i--) if (!same_value(got[(size_t)i], want[(size_t)i])) { bad++; first = i; }
    ladder_check(l, bad == 0, "%s: %lld of %lld values differ, the first at row %lld, column %lld: %a, CPU %a", what, (long long)bad, (long long)want.size(),
                 (long long)(first / cols), (long long)(first % cols), bf16_decode(got[(size_t)first]), want[(size_t)first]);
}
template <typename T> static void check_same(Ladder *l, const char *what, const char *which, const std::vector<T> &got, const std::vector<T> &want) {
    int64_t bad = 0;
    for (size_t i = 0; i < want.size(); i++) bad += got[i] != want[i];
    ladder_check(l, bad == 0, "%s: %lld of %lld %s differ", what, (long long)bad, (long long)want.size(), which);
}
// A NaN or an infinity at value `at` of (rows, cols): the whole run that the rotation spreads it over is NaN, and nothing else.
static void check_non_finite(Ladder *l, const char *what, const std::vector<uint16_t> &got, int64_t at, int64_t cols, int along_rows, int run) {
    int64_t bad = 0;
    for (int64_t i = 0; i < (int64_t)got.size(); i++) {
        const int inside = along_rows ? i % cols == at % cols && i / cols / run == at / cols / run : i / run == at / run;
        bad += inside != (got[(size_t)i] & 0x7FFFu) > 0x7F80u;
    }
    ladder_check(l, bad == 0, "%s: %lld values are NaN where they should not be, or not where they should", what, (long long)bad);
}

struct QuestWant { std::vector<float> decoded; std::vector<uint8_t> codes, scales; std::vector<uint32_t> mask; float factor; };
static QuestWant quest_want(const OperandSpec *spec, EdenAddress at, const std::vector<float> &x, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    QuestWant w;
    w.decoded.resize((size_t)n); w.codes.assign((size_t)(n / 2), 0); w.scales.resize((size_t)(n / 32)); w.mask.assign((size_t)(n / 32), 0u);
    std::vector<float> q((size_t)n);
    std::vector<uint8_t> mask((size_t)n);
    const QuantizeAddress cpu = cpu_address(at);
    const QuantizeRandom random = quantize_random(&cpu, spec);
    w.factor = quantize_operand_masked(w.decoded.data(), mask.data(), x.data(), rows, cols, 0, spec, &cpu);
    quantize_tensor(q.data(), w.scales.data(), x.data(), rows, cols, 0, spec, &random, 0);
    for (int64_t i = 0; i < n; i++) {
        w.codes[(size_t)(i / 2)] |= (uint8_t)(e2m1_encode(q[(size_t)i]) << (i % 2 * 4));
        w.mask[(size_t)(i / 32)] |= (uint32_t)mask[(size_t)i] << i % 32;
    }
    return w;
}
static void check_quest(Ladder *l, bool naive, const OperandSpec *spec, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const std::vector<uint16_t> bits = make_data(kind, rows, cols, (uint64_t)(rows * 131 + cols));
    const EdenAddress at = an_address(GEMM_FORWARD, OPERAND_A);
    const QuestWant want = quest_want(spec, at, as_floats(bits), rows, cols);
    DeviceArray<uint16_t> x(bits), decoded(std::vector<uint16_t>((size_t)n, 0xAAAA)), again(std::vector<uint16_t>((size_t)n, 0xAAAA));
    DeviceArray<uint8_t> codes(std::vector<uint8_t>((size_t)(n / 2), 0xAA)), scales(std::vector<uint8_t>((size_t)(n / 32), 0xAA));
    DeviceArray<uint32_t> mask(std::vector<uint32_t>((size_t)(n / 32), 0xAAAAAAAAu));
    quest_launch(naive, spec, at, (const bf16 *)x.p, rows, cols, codes, scales, mask, (bf16 *)decoded.p);
    mx_decode_launch(0, codes, scales, rows, cols, (bf16 *)again.p);
    CUDA_CHECK(cudaDeviceSynchronize());
    char what[160];
    snprintf(what, sizeof what, "quest%s, rotation %d, %s, %lld x %lld", naive ? " naive" : "", spec->rotation, DATA_NAMES[kind], (long long)rows, (long long)cols);
    if (isnan(want.factor)) {
        const int run = spec->rotation > 32 ? spec->rotation : 32;
        check_non_finite(l, what, decoded.host(n), n / 2, cols, 0, run);
        check_non_finite(l, what, again.host(n), n / 2, cols, 0, run);
        return;
    }
    check_same(l, what, "code bytes", codes.host(n / 2), want.codes);
    check_same(l, what, "scales", scales.host(n / 32), want.scales);
    check_same(l, what, "mask words", mask.host(n / 32), want.mask);
    check_values(l, what, decoded.host(n), want.decoded, cols);
    check_values(l, "decoded again", again.host(n), want.decoded, cols);
    if (naive) return;
    DeviceArray<uint16_t> alone(std::vector<uint16_t>((size_t)n, 0xAAAA));
    mx_quest_launch(0, spec, at, (const bf16 *)x.p, rows, cols, NULL, NULL, NULL, (bf16 *)alone.p);
    ladder_check(l, alone.host(n) == decoded.host(n), "%s: decoded alone is not the same", what);
}
// directions: 1 along N, 2 along M, 3 both.
static void check_sr(Ladder *l, bool naive, const OperandSpec *spec, DataKind kind, int64_t M, int64_t N, int directions) {
    const int64_t n = M * N;
    const std::vector<uint16_t> bits = make_data(kind, M, N, (uint64_t)(M * 131 + N));
    const std::vector<float> x = as_floats(bits);
    DeviceArray<uint16_t> dx(bits), out_n(std::vector<uint16_t>((size_t)n, 0xAAAA)), out_m(std::vector<uint16_t>((size_t)n, 0xAAAA));
    const MxSide sides[2] = {{spec, an_address(GEMM_DGRAD, OPERAND_A), (bf16 *)out_n.p}, {spec, an_address(GEMM_WGRAD, OPERAND_A), (bf16 *)out_m.p}};
    sr_launch(naive, (const bf16 *)dx.p, M, N, directions & 1 ? &sides[0] : NULL, directions & 2 ? &sides[1] : NULL);
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int d = 0; d < 2; d++) {
        if (!(directions >> d & 1)) continue;
        char what[160];
        snprintf(what, sizeof what, "sr%s along %s, rotation %d, %s, %lld x %lld", naive ? " naive" : "", d ? "M" : "N", spec->rotation, DATA_NAMES[kind],
                 (long long)M, (long long)N);
        std::vector<float> want((size_t)n);
        const QuantizeAddress at = cpu_address(sides[d].at);
        const float factor = quantize_operand(want.data(), x.data(), M, N, d, spec, &at);
        const std::vector<uint16_t> got = (d ? out_m : out_n).host(n);
        if (isnan(factor)) { check_non_finite(l, what, got, n / 2, N, d, spec->rotation > 32 ? spec->rotation : 32); continue; }
        ladder_check(l, factor == MX_SR_FACTOR, "%s: the CPU's factor is %a", what, factor);
        check_values(l, what, got, want, N);
    }
}
static void check_requantize(Ladder *l, const OperandSpec *spec, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const OperandSpec forward = quest_spec(32, SIGNS_NONE);
    const QuestWant saved = quest_want(&forward, an_address(GEMM_FORWARD, OPERAND_B), as_floats(make_data(kind, rows, cols, 11)), rows, cols);
    if (isnan(saved.factor)) return;  // what QuEST leaves of it is no saved tensor
    DeviceArray<uint8_t> codes(saved.codes), scales(saved.scales);
    DeviceArray<uint16_t> out(std::vector<uint16_t>((size_t)n, 0xAAAA));
    const MxSide side = {spec, an_address(GEMM_WGRAD, OPERAND_B), (bf16 *)out.p};
    mx_requantize_launch(0, codes, scales, rows, cols, &side);
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<float> want((size_t)n);
    const QuantizeAddress at = cpu_address(side.at);
    const float factor = quantize_operand(want.data(), saved.decoded.data(), rows, cols, 1, spec, &at);
    char what[160];
    snprintf(what, sizeof what, "saved tensor again, rotation %d, %s, %lld x %lld", spec->rotation, DATA_NAMES[kind], (long long)rows, (long long)cols);
    if (isnan(factor)) return;
    check_values(l, what, out.host(n), want, cols);
}
// The transposed rotation, run by run, by its definition.
static std::vector<float> turned_back(const OperandSpec *spec, EdenAddress at, std::vector<float> p, const std::vector<uint32_t> *mask) {
    uint32_t bits[4] = {0, 0, 0, 0};
    if (spec && spec->signs == SIGNS_RANDOM) rotation_bits(at.seed, at.step, at.layer, at.linear, GEMM_FORWARD, bits);
    for (size_t i = 0; mask && i < p.size(); i++) p[i] *= (float)((*mask)[i / 32] >> i % 32 & 1u);
    for (size_t first = 0; spec && spec->rotation && first < p.size(); first += (size_t)spec->rotation) {
        hadamard(p.data() + first, spec->rotation);
        const float scale = rotation_is_normalised(spec) ? rotation_norm(spec->rotation) : 1.0f / (float)spec->rotation;
        for (int i = 0; i < spec->rotation; i++) p[first + (size_t)i] = f32_from_bits(f32_bits(p[first + (size_t)i] * scale) ^ rotation_sign(bits, i));
    }
    return p;
}
static void check_turn_back(Ladder *l, const OperandSpec *spec, bool masked, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const EdenAddress at = an_address(GEMM_WGRAD, OPERAND_A);
    std::vector<float> p((size_t)n), before((size_t)n);
    std::vector<uint16_t> before16((size_t)n);
    std::vector<uint32_t> mask((size_t)(n / 32));
    for (int64_t i = 0; i < n; i++) {
        p[(size_t)i] = gauss_value(21, (uint64_t)i);
        before16[(size_t)i] = bf16_encode(gauss_value(22, (uint64_t)i));
        before[(size_t)i] = gauss_value(23, (uint64_t)i);
    }
    for (int64_t i = 0; i < n / 32; i++) mask[(size_t)i] = rng_word(rng_stream(24, 0, 0), (uint64_t)i);
    p[(size_t)(n / 3)] = NAN;  // stays, whatever the mask says, and spreads over its run alone
    const std::vector<float> want = turned_back(spec, at, p, masked ? &mask : NULL);
    DeviceArray<float> dp(p);
    DeviceArray<uint32_t> dmask(mask);
    for (int mode = 0; mode < 5; mode++) {  // BF16 out; dw float32, BF16; the same added to
        const int is_bf16 = mode == 0 || mode == 2 || mode == 4, accumulate = mode > 2;
        DeviceArray<float> dw(before);
        DeviceArray<uint16_t> dw16(before16);
        product_turn_back_launch(0, spec, at, dp, rows, cols, masked ? dmask.p : NULL, mode == 0 ? (bf16 *)dw16.p : NULL,
                                 is_bf16 ? (void *)dw16.p : (void *)dw.p, is_bf16, accumulate);
        CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<float> got = dw.host(n);
        const std::vector<uint16_t> got16 = dw16.host(n);
        int64_t bad = 0;
        for (int64_t i = 0; i < n; i++) {
            const float v = want[(size_t)i], old = is_bf16 ? bf16_decode(before16[(size_t)i]) : before[(size_t)i], sum = accumulate ? old + v : v;
            bad += is_bf16 ? !same_value(got16[(size_t)i], sum) : !(got[(size_t)i] == sum || (isnan(sum) && isnan(got[(size_t)i])));
        }
        ladder_check(l, bad == 0, "product turned back, rotation %d, %s, %lld x %lld, output %d: %lld of %lld values differ", spec ? spec->rotation : 0,
                     masked ? "masked" : "no mask", (long long)rows, (long long)cols, mode, (long long)bad, (long long)n);
    }
}
static __global__ void differences_kernel(const uint32_t *a, const uint32_t *b, int64_t words, unsigned long long *count) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (int64_t)gridDim.x * blockDim.x)
        if (a[i] != b[i]) atomicAdd(count, 1ull);
}
static void check_device_same(Ladder *l, const char *what, const void *a, const void *b, int64_t bytes) {
    DeviceArray<unsigned long long> count(std::vector<unsigned long long>(1, 0ull));
    differences_kernel<<<2048, 256>>>((const uint32_t *)a, (const uint32_t *)b, bytes / 4, count);
    CUDA_LAUNCHED();
    const unsigned long long n = count.host(1)[0];
    ladder_check(l, n == 0, "%s, over 2^31 values: %llu words differ from the first rung's", what, n);
}
// More than 2^31 values, against the first rung, whose indices are 64 bits wide throughout.
static void check_large(Ladder *l) {
    const int64_t M = (1 << 20) + 128, N = 2080, n = M * N;
    const OperandSpec sr = sr_spec(32), quest = quest_spec(32, SIGNS_NONE);
    DeviceArray<bf16> x(n), a(n), b(n);
    fill_gauss(x, n, 5);
    for (int d = 0; d < 2; d++) {
        MxSide side = {&sr, an_address(d ? GEMM_WGRAD : GEMM_DGRAD, OPERAND_A), a};
        sr_launch(false, x, M, N, d ? NULL : &side, d ? &side : NULL);
        side.out = b;
        sr_launch(true, x, M, N, d ? NULL : &side, d ? &side : NULL);
        check_device_same(l, d ? "sr along M" : "sr along N", a, b, 2 * n);
    }
    DeviceArray<uint8_t> codes(n / 2), scales(n / 32);
    DeviceArray<uint32_t> mask(n / 32);
    const EdenAddress at = an_address(GEMM_FORWARD, OPERAND_A);
    quest_launch(true, &quest, at, x, M, N, codes, scales, mask, b);
    quest_launch(false, &quest, at, x, M, N, codes, scales, mask, a);
    check_device_same(l, "quest", a, b, 2 * n);
    mx_decode_launch(0, codes, scales, M, N, a);
    check_device_same(l, "decoded", a, b, 2 * n);
}

// ---------------------------------------------------------------------------------------------------------------------
// Times

static void time_shape(const Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const double values = (double)n;
    const OperandSpec sr = sr_spec(32), quest = quest_spec(32, SIGNS_NONE);
    DeviceArray<bf16> x(n), a(n), b(n);
    DeviceArray<uint8_t> codes(n / 2), scales(n / 32);
    DeviceArray<uint32_t> mask(n / 32);
    DeviceArray<float> p(std::min<int64_t>(n, 1 << 27));
    fill_gauss(x, n, 7);
    const EdenAddress at = an_address(GEMM_FORWARD, OPERAND_A);
    const MxSide along_n = {&sr, an_address(GEMM_DGRAD, OPERAND_A), a}, along_m = {&sr, an_address(GEMM_WGRAD, OPERAND_A), b};
    char title[96];
    snprintf(title, sizeof title, "MXFP4, %lld x %lld", (long long)rows, (long long)cols);
    ladder_heading(title);
    for (int naive = 1; naive >= 0; naive--) {
        ladder_row(l, naive ? "quest, naive" : "quest", ladder_time([&](int) { quest_launch(naive, &quest, at, x, rows, cols, codes, scales, mask, a); }),
                   values, 4.65625, 0);
        ladder_row(l, naive ? "sr both, naive" : "sr both", ladder_time([&](int) { sr_launch(naive, x, rows, cols, &along_n, &along_m); }), values, 6, 0);
        ladder_row(l, naive ? "sr along M, naive" : "sr along M", ladder_time([&](int) { sr_launch(naive, x, rows, cols, NULL, &along_m); }), values, 4, 0);
    }
    ladder_row(l, "sr along N", ladder_time([&](int) { sr_launch(false, x, rows, cols, &along_n, NULL); }), values, 4, 0);
    ladder_row(l, "saved tensor again", ladder_time([&](int) { mx_requantize_launch(0, codes, scales, rows, cols, &along_m); }), values, 2.53125, 0);
    ladder_row(l, "decoded", ladder_time([&](int) { mx_decode_launch(0, codes, scales, rows, cols, a); }), values, 2.53125, 0);
    if (n > 1 << 27) return;
    CUDA_CHECK(cudaMemset(p, 0, (size_t)n * sizeof(float)));
    ladder_row(l, "turned back, dX", ladder_time([&](int) { product_turn_back_launch(0, &quest, at, p, rows, cols, mask, a, NULL, 0, 0); }), values, 6.125, 0);
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) { check_large(&l); return ladder_finish(&l); }
    const OperandSpec quests[] = {quest_spec(32, SIGNS_NONE), quest_spec(0, SIGNS_NONE), quest_spec(16, SIGNS_RANDOM), quest_spec(64, SIGNS_RANDOM), quest_spec(128, SIGNS_RANDOM)};
    const OperandSpec srs[] = {sr_spec(32), sr_spec(0), sr_spec(16), sr_spec(64), sr_spec(128)};
    static const int64_t shapes[][2] = {{1, 32}, {3, 96}, {5, 128}, {127, 640}, {257, 1024}, {130, 192}};
    for (const int64_t *s : shapes) {
        if (l.small && s[1] > 128) continue;
        for (const OperandSpec &spec : quests) {
            if (spec.rotation && s[1] % spec.rotation) continue;
            for (DataKind kind : ladder_kinds(&l))
                for (int naive = 0; naive < 2; naive++) check_quest(&l, naive, &spec, kind, s[0], s[1]);
            for (int masked = 0; masked < 2; masked++) check_turn_back(&l, &spec, masked, s[0], s[1]);
        }
        for (int masked = 0; masked < 2; masked++) check_turn_back(&l, NULL, masked, s[0], s[1]);
    }
    static const int64_t tiles[][2] = {{32, 32}, {160, 96}, {128, 128}, {256, 640}, {384, 1024}, {416, 1056}};
    for (const int64_t *s : tiles) {
        if (l.small && s[0] * s[1] > 128 * 128) continue;
        for (const OperandSpec &spec : srs) for (DataKind kind : ladder_kinds(&l)) {
            const int d = spec.rotation ? spec.rotation : 1, along_n = s[1] % d == 0, along_m = s[0] % d == 0;
            if (along_n) check_sr(&l, false, &spec, kind, s[0], s[1], 1);
            if (along_m) check_sr(&l, false, &spec, kind, s[0], s[1], 2);
            if (along_m) check_requantize(&l, &spec, kind, s[0], s[1]);
            for (int naive = 0; along_n && along_m && naive < 2; naive++) check_sr(&l, naive, &spec, kind, s[0], s[1], 3);
        }
    }
    if (!l.quick) {
        ladder_ceilings(&l);
        static const int64_t sizes[][2] = {{65536, 640}, {65536, 1024}, {16384, 2048}, {65536, 2816}, {65536, 5632}};
        for (const int64_t *s : sizes) time_shape(&l, s[0], s[1]);
    }
    return ladder_finish(&l);
}
