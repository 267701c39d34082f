// dev/cuda/quantize.cu: the ladder of the forward quantizers (amax; rtn, four_six and the scale searches, 1x16).
//   nvcc -std=c++17 -O3 -arch=native -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/quantize.cu -o quantize && ./quantize
#include "ladder.cuh"

#include "../../llmc/cpu/quantize.h"
#include "../../llmc/cuda/quantize.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The first rung: a thread a block, the block functions of quantize.h as they are, every store where it falls.

static __global__ void naive_kernel(const bf16 *x, int64_t blocks, Rounding rounding, const float *amax, uint8_t *codes, uint8_t *scales, bf16 *decoded, float *st) {
    const int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const TensorScale ts = nvfp4_tensor_scale(*amax, 1.0f, rounding == ROUND_RTN ? RTN_BOUND : FOUR_SIX_BOUND);
    if (k == 0) *st = *amax < INFINITY ? ts.st : NAN;
    if (k >= blocks) return;
    LaneBlock v, q;
    float most[1];
    uint32_t sb[1];
    for (int i = 0; i < 16; i++) v[i][0] = __bfloat162float(x[16 * k + i]);
    block_amax(v, most);
    if (rounding == ROUND_FOUR_SIX) four_six_block(v, most, ts, q, sb);
    else if (rounding == ROUND_RTN) nvfp4_rtn_block(v, most, ts, q, sb);
    else search_block(v, most, ts, 0, rounding == ROUND_SEARCH_TRUE, q, sb);
    for (int i = 0; i < 8; i++) codes[8 * k + i] = (uint8_t)(e2m1_encode(q[2 * i][0]) | e2m1_encode(q[2 * i + 1][0]) << 4);
    for (int i = 0; i < 16; i++) decoded[16 * k + i] = __float2bfloat16_rn(f32_mul(q[i][0], e4m3_decode(sb[0])));
    scales[k] = (uint8_t)sb[0];
}
// The trainer's kernel, in its variants: when a thread loads its next block, and how many CTAs an SM has room for.
enum Version { NAIVE, AFTER_3, AFTER_4, AFTER_5, AHEAD_3, AHEAD_4, AHEAD_5, TRAINER, NATIVE, VERSIONS };
static const char *const VERSION_NAMES[] = {"naive", "next after, 3 CTAs", "next after, 4 CTAs", "next after, 5 CTAs",
                                            "next ahead, 3 CTAs", "next ahead, 4 CTAs", "next ahead, 5 CTAs", "trainer", "native"};
template <bool AHEAD, int CTAS> static void variant_launch(Rounding rounding, const ForwardJob &job) {
    if (rounding == ROUND_FOUR_SIX) forward_start<MODE_FOUR_SIX, false, AHEAD, CTAS>(0, job);
    else if (rounding == ROUND_SEARCH) forward_start<MODE_SEARCH, false, AHEAD, CTAS>(0, job);
    else if (rounding == ROUND_SEARCH_TRUE) forward_start<MODE_SEARCH_TRUE, false, AHEAD, CTAS>(0, job);
    else forward_start<MODE_RTN, false, AHEAD, CTAS>(0, job);
}

static const OperandSpec FOUR_SIX = NVFP4(ROUND_FOUR_SIX, BLOCK_1X16);

static void version_launch(Version v, Rounding rounding, const bf16 *x, int64_t rows, int64_t cols, const float *amax, uint8_t *codes,
                           uint8_t *scales, bf16 *decoded, float *st, const float *other, float *alpha) {
    const OperandSpec spec = NVFP4(rounding, BLOCK_1X16);
    if (v == TRAINER) quantize_forward_launch(0, &spec, x, rows, cols, amax, codes, scales, decoded, st, other, alpha);
    if (v == NATIVE) quantize_forward_native_launch(0, &spec, x, rows, cols, amax, codes, scales, st, other, alpha);
    if (v > NAIVE && v < TRAINER) {
        static void (*const variants[])(Rounding, const ForwardJob &) = {variant_launch<false, 3>, variant_launch<false, 4>, variant_launch<false, 5>,
                                                                         variant_launch<true, 3>, variant_launch<true, 4>, variant_launch<true, 5>};
        variants[v - 1](rounding, forward_job(&spec, 0, x, rows, cols, amax, codes, scales, decoded, st, other, alpha));
    }
    if (v != NAIVE) return;
    const int64_t blocks = rows * cols / 16;
    naive_kernel<<<(int)ceil_div(blocks, 256), 256>>>(x, blocks, rounding, amax, codes, scales, decoded, st);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks

template <typename T> static int64_t count_differences(const T *a, const T *b, int64_t n) {
    int64_t d = 0;
    for (int64_t i = 0; i < n; i++) d += a[i] != b[i];
    return d;
}
static int same_or_both_nan(float a, float b) { return f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b)); }

// Every device formulation against its definition, on every input it is made for.
static __global__ void formulations_kernel(unsigned long long *wrong) {
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = thread; i < 1ull << 32; i += threads) {
        const float v = f32_from_bits((uint32_t)i);
        if (fabsf(v) < 7.0f) {
            const float q = e2m1_round(v);
            if (f32_bits(e2m1_round_unclamped(v)) != (q == 0.0f ? 0u : f32_bits(q))) atomicAdd(&wrong[0], 1ull);
        }
        if (v >= 0x1p-126f && v <= 0x1p126f && f32_bits(f32_reciprocal(v)) != f32_bits(f32_div(1.0f, v))) atomicAdd(&wrong[1], 1ull);
        if (f32_bits(v) < f32_bits(448.0f)) {
            const uint32_t code = e4m3_encode(v);
            if (f32_bits(e4m3_round_unclamped(v)) != f32_bits(e4m3_decode(code)) || e4m3_code(e4m3_decode(code)) != code) atomicAdd(&wrong[2], 1ull);
        }
    }
    // Eight codes, every pair of neighbours in every place.
    for (uint64_t i = thread; i < 1u << 20; i += threads) {
        const uint32_t word = (uint32_t)i * 0x9E3779B1u ^ ((uint32_t)i & 255u) * 0x01010101u;
        uint32_t q[4], sign[4];
        for (int j = 0; j < 4; j++) {
            const uint32_t b = word >> (8 * j) & 255u;
            q[j] = pack_bf16x2(e2m1_decode(b & 15u), e2m1_decode(b >> 4));
            sign[j] = q[j] & 0x80008000u;
            q[j] &= (b & 7u ? 0xFFFFu : 0u) | (b & 0x70u ? 0xFFFF0000u : 0u);
        }
        if (pack_codes8(q, sign) != word) atomicAdd(&wrong[3], 1ull);
    }
}
static void check_formulations(Ladder *l) {
    static const char *const names[] = {"e2m1_round_unclamped, |v| < 7", "f32_reciprocal, 2^-126 to 2^126", "e4m3_round_unclamped and e4m3_code, below 448", "pack_codes8"};
    DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>(4, 0ull));
    formulations_kernel<<<2048, 256>>>(wrong);
    CUDA_LAUNCHED();
    const std::vector<unsigned long long> w = wrong.host(4);
    for (int i = 0; i < 4; i++) ladder_check(l, w[(size_t)i] == 0, "%s: %llu inputs differ from the definition", names[i], w[(size_t)i]);
}

static const Rounding ROUNDINGS[] = {ROUND_RTN, ROUND_FOUR_SIX, ROUND_SEARCH, ROUND_SEARCH_TRUE};
static const char *rounding_name(Rounding r) { return r == ROUND_RTN ? "rtn" : r == ROUND_FOUR_SIX ? "four_six" : r == ROUND_SEARCH ? "search" : "search_true"; }
static int version_has(Version v, Rounding r) { return v != NATIVE || r == ROUND_RTN || r == ROUND_FOUR_SIX; }
static void check_tensor(Ladder *l, Version v, Rounding rounding, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols, blocks = n / 16, tiled = tiled_scale_bytes(rows, cols), scale_count = v == NATIVE ? tiled : blocks;
    const std::vector<uint16_t> bits = make_data(kind, rows, cols, (uint64_t)(rows * 131 + cols));
    std::vector<float> x((size_t)n), q((size_t)n);
    for (int64_t i = 0; i < n; i++) x[(size_t)i] = bf16_decode(bits[(size_t)i]);

    OperandSpec spec = {rounding, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL};
    QuantizeRandom random;
    memset(&random, 0, sizeof random);
    std::vector<uint8_t> scales((size_t)blocks);
    const float st = quantize_tensor(q.data(), scales.data(), x.data(), rows, cols, 0, &spec, &random, 0);

    DeviceArray<uint16_t> dx(bits);
    DeviceArray<float> amax(1), dst(1), other(std::vector<float>(1, 0.37f)), alpha(std::vector<float>(1, 0.0f));
    DeviceArray<uint8_t> dcodes(std::vector<uint8_t>((size_t)(n / 2), 0xAA)), dscales(std::vector<uint8_t>((size_t)scale_count, 0xAA));
    DeviceArray<uint16_t> decoded(std::vector<uint16_t>((size_t)n, 0xAAAA));
    amax_launch(0, (const bf16 *)dx.p, n, amax);
    version_launch(v, rounding, (const bf16 *)dx.p, rows, cols, amax, dcodes, dscales, (bf16 *)decoded.p, dst, other, v == NAIVE ? NULL : alpha.p);
    CUDA_CHECK(cudaDeviceSynchronize());
    const float got_st = dst.host(1)[0];
    char what[160];
    snprintf(what, sizeof what, "%s %s, %s, %lld x %lld", VERSION_NAMES[v], rounding_name(rounding), DATA_NAMES[kind], (long long)rows, (long long)cols);
    ladder_check(l, same_or_both_nan(st, got_st), "%s: tensor scale %a, CPU %a", what, got_st, st);
    if (v != NAIVE) ladder_check(l, same_or_both_nan(alpha.host(1)[0], f32_mul(st, 0.37f)), "%s: alpha %a", what, alpha.host(1)[0]);
    if (isnan(st)) return;  // a non-finite tensor: the scale says so, and nothing else is promised

    std::vector<uint8_t> codes((size_t)(n / 2), 0), want_scales((size_t)scale_count, 0);
    std::vector<uint16_t> want((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        codes[(size_t)(i / 2)] |= (uint8_t)(e2m1_encode(q[(size_t)i]) << (i % 2 * 4));
        want[(size_t)i] = bf16_encode(f32_mul(q[(size_t)i], e4m3_decode(scales[(size_t)(i / 16)])));
    }
    for (int64_t b = 0; b < blocks; b++) want_scales[(size_t)(v == NATIVE ? tiled_scale_offset(b / (cols / 16), b % (cols / 16), cols / 16) : b)] = scales[(size_t)b];
    const int64_t bad_scales = count_differences(dscales.host(scale_count).data(), want_scales.data(), scale_count);
    const int64_t bad_codes = count_differences(dcodes.host(n / 2).data(), codes.data(), n / 2);
    ladder_check(l, bad_scales == 0, "%s: %lld of %lld scales differ", what, (long long)bad_scales, (long long)scale_count);
    ladder_check(l, bad_codes == 0, "%s: %lld of %lld code bytes differ", what, (long long)bad_codes, (long long)(n / 2));
    if (v == NATIVE) return;
    const int64_t bad = count_differences(decoded.host(n).data(), want.data(), n);
    ladder_check(l, bad == 0, "%s: %lld of %lld decoded values differ", what, (long long)bad, (long long)n);
}
static void check_amax(Ladder *l) {
    for (int64_t n = 1; n < 100000; n = n * 3 + 1) {
        std::vector<uint16_t> x = make_data(DATA_GAUSS, 1, n, 9);
        x[(size_t)(n - 1)] = bf16_encode(-77.0f);
        DeviceArray<uint16_t> d(x);
        DeviceArray<float> amax(1);
        amax_launch(0, (const bf16 *)d.p, n, amax);
        ladder_check(l, amax.host(1)[0] == 77.0f, "amax of %lld values: %g, not 77", (long long)n, amax.host(1)[0]);
    }
}
// More than 2^31 values: the last rows must be those that the same rows give alone, with the same amax.
static void check_large(Ladder *l) {
    const int64_t rows = (1 << 20) + 3, cols = 2064, n = rows * cols, tail_rows = 5, tail = tail_rows * cols, at = n - tail;
    DeviceArray<bf16> x(n), decoded(n), alone(tail);
    DeviceArray<uint8_t> codes(n / 2), scales(n / 16), codes1(tail / 2), scales1(tail / 16);
    DeviceArray<float> amax(1), st(1);
    fill_gauss(x, n, 5);
    amax_launch(0, x, n, amax);
    quantize_forward_launch(0, &FOUR_SIX, x, rows, cols, amax, codes, scales, decoded, st, NULL, NULL);
    quantize_forward_launch(0, &FOUR_SIX, x + at, tail_rows, cols, amax, codes1, scales1, alone, st, NULL, NULL);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint16_t> a = host_copy((const uint16_t *)decoded.p + at, tail), b = host_copy((const uint16_t *)alone.p, tail);
    const std::vector<uint8_t> c = host_copy(codes.p + at / 2, tail / 2), d = codes1.host(tail / 2);
    ladder_check(l, a == b && c == d, "%lld x %lld (over 2^31 values): the last rows differ from the same rows alone", (long long)rows, (long long)cols);
}

// ---------------------------------------------------------------------------------------------------------------------
// Times

// Instructions a value in the main loop of sm_90a code.
#define COUNT_RTN 18.0
#define COUNT_FOUR_SIX 32.0
#define COUNT_SEARCH 49.0
#define COUNT_TRUE 8.0

static void time_shape(const Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const int copies = rotation_copies(n * 4);
    std::vector<bf16 *> x, decoded;
    for (int i = 0; i < copies; i++) { x.push_back(device_new<bf16>(n)); decoded.push_back(device_new<bf16>(n)); fill_gauss(x.back(), n, 7); }
    DeviceArray<uint8_t> codes(n / 2), scales(tiled_scale_bytes(rows, cols));
    DeviceArray<float> amax(1), st(1);
    char title[96];
    snprintf(title, sizeof title, "forward quantizers, %lld x %lld", (long long)rows, (long long)cols);
    ladder_heading(title);
    ladder_row(l, "amax", ladder_time([&](int i) { amax_launch(0, x[i % copies], n, amax); }), (double)n, 2, 0);
    for (Rounding rounding : ROUNDINGS) for (int v = 0; v < VERSIONS; v++) {
        if (!version_has((Version)v, rounding)) continue;
        const double ms = ladder_time([&](int i) {
            version_launch((Version)v, rounding, x[i % copies], rows, cols, amax, codes, scales, decoded[i % copies], st, NULL, NULL); });
        char name[64];
        snprintf(name, sizeof name, "%s, %s", rounding_name(rounding), VERSION_NAMES[v]);
        ladder_row(l, name, ms, (double)n, v == NATIVE ? 2.5625 : 4.5625, v == NAIVE || v == NATIVE ? 0 : rounding == ROUND_RTN ? COUNT_RTN : rounding == ROUND_FOUR_SIX ? COUNT_FOUR_SIX : COUNT_SEARCH + (rounding == ROUND_SEARCH_TRUE ? COUNT_TRUE : 0));
    }
    for (int i = 0; i < copies; i++) { CUDA_CHECK(cudaFree(x[i])); CUDA_CHECK(cudaFree(decoded[i])); }
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) { check_large(&l); return ladder_finish(&l); }
    if (!l.small) check_formulations(&l);
    check_amax(&l);
    static const int64_t shapes[][2] = {{1, 16}, {3, 48}, {127, 640}, {128, 128}, {257, 1024}, {130, 80}};
    for (const int64_t *s : shapes)
        for (int v = 0; v < VERSIONS && !(l.small && s[1] > 128); v++) for (DataKind kind : ladder_kinds(&l))
            for (Rounding r : ROUNDINGS) if (version_has((Version)v, r)) check_tensor(&l, (Version)v, r, kind, s[0], s[1]);
    if (!l.quick) {
        ladder_ceilings(&l);
        static const int64_t sizes[][2] = {{65536, 640}, {65536, 1024}, {65536, 2816}, {16384, 2048}, {16384, 5632}, {65536, 5632}};
        for (const int64_t *s : sizes) time_shape(&l, s[0], s[1]);
    }
    return ladder_finish(&l);
}
