// dev/cuda/quantize_rivals.cu: the ladder of the rival recipes' NVFP4 quantizers: nearest, four-over-six and stochastic after rotations of
// 0 to 128 (dY, X, a saved tensor again), 16x16 blocks of W, a saved tensor decoded.
//   nvcc -std=c++17 -O3 -arch=native -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/quantize_rivals.cu -o quantize_rivals && ./quantize_rivals
#include "ladder.cuh"
#include "ladder_address.cuh"

#include "../../llmc/cpu/quantize.h"
#include "../../llmc/cuda/quantize_nvfp4.cuh"

static OperandSpec spec_of(Rounding rounding, int rotation) {
    const OperandSpec s = {rounding, FORMAT_NVFP4, BLOCK_1X16, rotation, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0};
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The first rung: a thread a run (of the rotation, at least a block), the functions of quantize.h as they are, each direction by itself.

static __device__ void naive_run(const bf16 *x, int64_t stride, const EdenSide &side, int length, int rotation, float *y) {
    for (int i = 0; i < length; i++) {
        const uint32_t sign = rotation ? side.sign[i] ^ turned_sign(rotation, i) : 0u;
        y[i] = f32_from_bits(f32_bits(__bfloat162float(x[i * stride])) ^ sign);
    }
    hadamard(y, rotation ? rotation : 1);
}
static __global__ void naive_kernel(const __grid_constant__ Nvfp4Job job, int direction, Rounding rounding, bool find_amax) {
    const EdenSide &side = job.eden.side[direction];
    const Nvfp4Way &way = job.way[direction];
    const bool along_m = direction == ALONG_M;
    const int length = way.rotation > 16 ? way.rotation : 16;
    const int64_t inner = along_m ? job.eden.M : job.eden.N, outer = along_m ? job.eden.N : job.eden.M, stride = along_m ? job.eden.N : 1;
    const int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= outer * (inner / length)) return;
    const int64_t row = along_m ? k % outer : k / (inner / length), first = (along_m ? k / outer : k % (inner / length)) * length;
    const int64_t at = along_m ? first * job.eden.N + row : row * job.eden.N + first;
    float y[ROTATION_MAX];
    naive_run(job.eden.x + at, stride, side, length, way.rotation, y);
    if (find_amax) {
        uint32_t most = 0u;
        for (int i = 0; i < length; i++) most = u32_max(most, f32_bits(y[i]) & 0x7FFFFFFFu);
        atomicMax(job.most + direction, most);
        return;
    }
    const TensorScale ts = nvfp4_tensor_scale(*way.amax, way.override_, way.bound);
    if (k == 0) *way.factor = *way.amax < INFINITY ? ts.st : NAN;
    RngStream stream = rng_stream(0, side.step, side.address);
    stream.key0 = side.keys.k0[0]; stream.key1 = side.keys.k1[0];
    for (int b = 0; b < length; b += 16) {
        LaneBlock v, q;
        LaneBlockBits u;
        float most[1];
        uint32_t sb[1];
        for (int i = 0; i < 16; i++) {
            v[i][0] = y[b + i];
            u[i][0] = rounding == ROUND_SR ? rng_word(stream, 4 * side.first + (uint64_t)(row * inner + first + b + i)) : 0u;
        }
        block_amax(v, most);
        if (rounding == ROUND_SR) nvfp4_sr_block(v, most, ts, u, q, sb);
        else if (rounding == ROUND_FOUR_SIX) four_six_block(v, most, ts, q, sb);
        else nvfp4_rtn_block(v, most, ts, q, sb);
        for (int i = 0; i < 16; i++) side.decoded[at + (b + i) * stride] = __float2bfloat16_rn(f32_mul(q[i][0], e4m3_decode(sb[0])));
    }
}
static void naive_launch(const bf16 *x, int64_t M, int64_t N, const Nvfp4Side *along_n, const Nvfp4Side *along_m, const float *amax, void *workspace) {
    const Nvfp4Side *sides[2] = {along_n, along_m};
    Nvfp4Job job = nvfp4_job(M, N, workspace);
    job.eden.x = x;
    CUDA_CHECK(cudaMemsetAsync(job.most, 0, 2 * sizeof *job.most));
    for (int d = 0; d < 2; d++) {
        if (!sides[d]) continue;
        const OperandSpec *s = sides[d]->spec;
        const float *known = s->rotation ? NULL : amax;
        nvfp4_side(&job, d, sides[d], known);
        const unsigned ctas = (unsigned)ceil_div(M * N / std::max(16, s->rotation), 128);
        if (!known) naive_kernel<<<ctas, 128>>>(job, d, s->rounding, true);
        naive_kernel<<<ctas, 128>>>(job, d, s->rounding, false);
        CUDA_LAUNCHED();
    }
}
static void trainer_launch(const bf16 *x, int64_t M, int64_t N, const Nvfp4Side *along_n, const Nvfp4Side *along_m, const float *amax, void *workspace) {
    nvfp4_quantize_launch(0, x, M, N, along_n, along_m, amax, workspace);
}
typedef void Launch(const bf16 *, int64_t, int64_t, const Nvfp4Side *, const Nvfp4Side *, const float *, void *);

// ---------------------------------------------------------------------------------------------------------------------
// Checks

static int same_or_both_nan(float a, float b) { return f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b)); }
static std::vector<float> as_floats(const std::vector<uint16_t> &bits) {
    std::vector<float> x(bits.size());
    for (size_t i = 0; i < bits.size(); i++) x[i] = bf16_decode(bits[i]);
    return x;
}
static uint16_t unsigned_zero(uint16_t x) { return x == 0x8000u ? 0 : x; }
// Decoded values and factor against the CPU's: bits, but for the sign of a zero. A non-finite input: the factor says so, and nothing
// else is promised.
static void check_values(Ladder *l, const char *what, const std::vector<uint16_t> &got, float factor, const std::vector<float> &want, float want_factor,
                         int64_t cols) {
    ladder_check(l, same_or_both_nan(factor, want_factor), "%s: factor %a, CPU %a", what, factor, want_factor);
    if (!(want_factor < INFINITY)) return;
    int64_t bad = 0, first = 0;
    for (int64_t i = (int64_t)want.size() - 1; i >= 0; i--)
        if (unsigned_zero(bf16_encode(want[(size_t)i])) != unsigned_zero(got[(size_t)i])) { bad++; first = i; }
    ladder_check(l, bad == 0, "%s: %lld of %lld values differ, the first at row %lld, column %lld: %a, CPU %a", what, (long long)bad, (long long)want.size(),
                 (long long)(first / cols), (long long)(first % cols), bf16_decode(got[(size_t)first]), want[(size_t)first]);
}
static const char *rounding_name(Rounding r) { return r == ROUND_SR ? "sr" : r == ROUND_FOUR_SIX ? "four_six" : "rtn"; }

// Both directions, one, sides that round differently; amax known or not.
struct Pair { int n, m; Rounding round_n, round_m; int rotation_n, rotation_m, amax_known; const char *name; };
static const Pair PAIRS[] = {
    {1, 1, ROUND_SR, ROUND_SR, 0, 16, 1, "nvidia dY"},
    {1, 1, ROUND_SR, ROUND_SR, 0, 16, 0, "nvidia dY, amax unknown"},
    {0, 1, ROUND_RTN, ROUND_RTN, 0, 16, 1, "nvidia X"},
    {1, 1, ROUND_SR, ROUND_SR, 32, 32, 1, "tetrajet2 dY"},
    {1, 1, ROUND_SR, ROUND_SR, 128, 128, 0, "rotation of 128"},
    {1, 1, ROUND_SR, ROUND_RTN, 64, 64, 0, "one side stochastic"},
    {1, 1, ROUND_FOUR_SIX, ROUND_FOUR_SIX, 0, 32, 1, "four_six"},
    {1, 1, ROUND_RTN, ROUND_FOUR_SIX, 16, 128, 1, "nearest both"},
    {1, 0, ROUND_SR, ROUND_SR, 64, 0, 1, "along N only"},
    {1, 1, ROUND_RTN, ROUND_SR, 32, 64, 1, "the other side stochastic"},
};
static void check_pair(Ladder *l, const Pair &p, DataKind kind, int64_t M, int64_t N) {
    const int64_t n = M * N;
    const std::vector<uint16_t> bits = make_data(kind, M, N, (uint64_t)(M * 131 + N));
    const std::vector<float> x = as_floats(bits);
    DeviceArray<uint16_t> dx(bits);
    DeviceArray<uint8_t> workspace(nvfp4_workspace_bytes(M, N));
    DeviceArray<float> amax(1), factor(std::vector<float>(2, NAN));
    amax_launch(0, (const bf16 *)dx.p, n, amax);
    const OperandSpec specs[2] = {spec_of(p.round_n, p.rotation_n), spec_of(p.round_m, p.rotation_m)};
    const EdenAddress at[2] = {an_address(GEMM_DGRAD, OPERAND_A), an_address(GEMM_WGRAD, OPERAND_A)};
    std::vector<float> want[2];
    float want_factor[2] = {0, 0};
    for (int d = 0; d < 2; d++) {
        if (!(d ? p.m : p.n)) continue;
        const QuantizeAddress a = cpu_address(at[d]);
        want[d].resize((size_t)n);
        want_factor[d] = quantize_operand(want[d].data(), x.data(), M, N, d, &specs[d], &a);
    }
    static Launch *const launches[] = {naive_launch, trainer_launch};
    for (int v = 0; v < 2; v++) {
        DeviceArray<uint16_t> out_n(std::vector<uint16_t>((size_t)n, 0xAAAA)), out_m(std::vector<uint16_t>((size_t)n, 0xAAAA));
        const Nvfp4Side sides[2] = {{&specs[0], at[0], (bf16 *)out_n.p, factor}, {&specs[1], at[1], (bf16 *)out_m.p, factor + 1}};
        launches[v]((const bf16 *)dx.p, M, N, p.n ? &sides[0] : NULL, p.m ? &sides[1] : NULL, p.amax_known ? amax.p : NULL, workspace);
        CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<float> f = factor.host(2);
        for (int d = 0; d < 2; d++) {
            if (!(d ? p.m : p.n)) continue;
            char what[200];
            snprintf(what, sizeof what, "%s, %s, along %c (%s, rotation %d), %s, %lld x %lld", v ? "trainer" : "naive", p.name, d ? 'M' : 'N',
                     rounding_name(specs[d].rounding), specs[d].rotation, DATA_NAMES[kind], (long long)M, (long long)N);
            check_values(l, what, (d ? out_m : out_n).host(n), f[(size_t)d], want[d], want_factor[d], N);
        }
    }
}
// A saved tensor: quantized forward on the GPU (dev/cuda/quantize.cu checks that); decoded, and re-quantized along its rows.
static void check_saved(Ladder *l, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols, C = cols / 16;
    DeviceArray<uint16_t> x(make_data(kind, rows, cols, (uint64_t)(rows * 137 + cols))), out(std::vector<uint16_t>((size_t)n, 0xAAAA));
    DeviceArray<uint8_t> codes(n / 2), scales(n / 16), workspace(nvfp4_workspace_bytes(rows, cols));
    DeviceArray<float> amax(1), saved(1), factor(1);
    const OperandSpec forward = spec_of(ROUND_FOUR_SIX, 0);
    amax_launch(0, (const bf16 *)x.p, n, amax);
    quantize_forward_launch(0, &forward, (const bf16 *)x.p, rows, cols, amax, codes, scales, NULL, saved, NULL, NULL);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> c = codes.host(n / 2), s = scales.host(n / 16);
    std::vector<float> values((size_t)n);
    for (int64_t i = 0; i < n; i++)
        values[(size_t)i] = f32_mul(e2m1_decode((uint32_t)c[(size_t)(i / 2)] >> (i % 2 * 4) & 15u), e4m3_decode(s[(size_t)(i / cols * C + i % cols / 16)]));
    char what[200];
    snprintf(what, sizeof what, "decode, %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    nvfp4_decode_launch(0, codes, scales, rows, cols, (bf16 *)out.p);
    CUDA_CHECK(cudaDeviceSynchronize());
    check_values(l, what, out.host(n), 1, values, 1, cols);
    if (rows % 128 || cols % 128) return;

    static const OperandSpec again[] = {spec_of(ROUND_SR, 32), spec_of(ROUND_SR, 128), spec_of(ROUND_RTN, 16), spec_of(ROUND_FOUR_SIX, 64), spec_of(ROUND_SR, 0)};
    for (const OperandSpec &spec : again) {
        const EdenAddress a = an_address(GEMM_WGRAD, OPERAND_B);
        const QuantizeAddress cpu = cpu_address(a);
        std::vector<float> want((size_t)n);
        const float want_factor = quantize_operand(want.data(), values.data(), rows, cols, 1, &spec, &cpu);
        const Nvfp4Side side = {&spec, a, (bf16 *)out.p, factor};
        nvfp4_requantize_launch(0, codes, scales, rows, cols, &side, workspace);
        CUDA_CHECK(cudaDeviceSynchronize());
        snprintf(what, sizeof what, "again (%s, rotation %d), %s, %lld x %lld", rounding_name(spec.rounding), spec.rotation, DATA_NAMES[kind],
                 (long long)rows, (long long)cols);
        check_values(l, what, out.host(n), factor.host(1)[0], want, want_factor, cols);
    }
}
static void check_square(Ladder *l, Rounding rounding, DataKind kind, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols, scale_count = ceil_div(rows, 16) * (cols / 16);
    const std::vector<uint16_t> bits = make_data(kind, rows, cols, (uint64_t)(rows * 139 + cols));
    const std::vector<float> x = as_floats(bits);
    const OperandSpec spec = {rounding, FORMAT_NVFP4, BLOCK_16X16, 0, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0};
    QuantizeRandom random;
    memset(&random, 0, sizeof random);
    std::vector<float> q((size_t)n), want((size_t)n);
    std::vector<uint8_t> want_scales((size_t)scale_count), want_codes((size_t)(n / 2), 0);
    const float want_factor = quantize_tensor(q.data(), want_scales.data(), x.data(), rows, cols, 0, &spec, &random, 0);
    if (want_factor < INFINITY)
        for (int64_t i = 0; i < n; i++) {
            want[(size_t)i] = f32_mul(q[(size_t)i], e4m3_decode(want_scales[(size_t)(i / cols / 16 * (cols / 16) + i % cols / 16)]));
            want_codes[(size_t)(i / 2)] |= (uint8_t)(e2m1_encode(q[(size_t)i]) << (i % 2 * 4));
        }
    DeviceArray<uint16_t> w(bits), decoded(std::vector<uint16_t>((size_t)n, 0xAAAA)), alone(std::vector<uint16_t>((size_t)n, 0xAAAA));
    DeviceArray<uint8_t> codes(std::vector<uint8_t>((size_t)(n / 2), 0xAA)), scales(std::vector<uint8_t>((size_t)scale_count, 0xAA));
    DeviceArray<float> amax(1), factor(1);
    amax_launch(0, (const bf16 *)w.p, n, amax);
    nvfp4_square_launch(0, rounding, (const bf16 *)w.p, rows, cols, amax, codes, scales, (bf16 *)decoded.p, factor);
    nvfp4_square_launch(0, rounding, (const bf16 *)w.p, rows, cols, amax, NULL, NULL, (bf16 *)alone.p, factor);
    CUDA_CHECK(cudaDeviceSynchronize());
    char what[160];
    snprintf(what, sizeof what, "16x16 %s, %s, %lld x %lld", rounding_name(rounding), DATA_NAMES[kind], (long long)rows, (long long)cols);
    check_values(l, what, decoded.host(n), factor.host(1)[0], want, want_factor, cols);
    if (!(want_factor < INFINITY)) return;
    ladder_check(l, decoded.host(n) == alone.host(n), "%s: values differ where no codes are kept", what);
    ladder_check(l, scales.host(scale_count) == want_scales, "%s: scales differ", what);
    ladder_check(l, codes.host(n / 2) == want_codes, "%s: codes differ", what);
}

// Device formulations against their definitions: every magnitude up to 6, with the words around the limit, and others.
static __global__ void formulations_kernel(unsigned long long *wrong) {
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = thread; i <= f32_bits(E2M1_MAX); i += threads) {
        const float a = f32_from_bits((uint32_t)i);
        const float steps = f32_mul(a, f32_from_bits((255u << 23) - e2m1_exponent(a))), frac = f32_sub(steps, (float)(int32_t)steps);
        const uint32_t limit = f32_to_u32_ceil(f32_mul(frac, 4294967296.0f));
        const uint32_t words[6] = {limit, limit - 1u, limit + 1u, 0u, 0xFFFFFFFFu, (uint32_t)i * 0x9E3779B1u};
        for (int k = 0; k < 6; k++)
            if (e2m1_round_stochastic(a, words[k]) != e2m1_decode(e2m1_encode_sr(a, words[k]))) atomicAdd(&wrong[0], 1ull);
    }
    for (uint64_t i = thread; i < 1u << 24; i += threads)  // beyond 6: at least 6, to be cut to it
        if (!(e2m1_round_stochastic(6.0f + (float)i * 0x1p-21f, (uint32_t)i * 0x9E3779B1u) >= E2M1_MAX)) atomicAdd(&wrong[0], 1ull);
    if (thread < 5) {  // every block of a run once, whatever the rotation
        const int rotation = thread ? 8 << thread : 0;
        int owners = 0;
        for (int part = 0; part < 4; part++) for (int half = 0; half < 2; half++) owners += 1 << 2 * turned_block(rotation, part, half);
        if (owners != 0x5555) atomicAdd(&wrong[1], 1ull);
    }
}
static void check_formulations(Ladder *l) {
    static const char *const names[] = {"e2m1_round_stochastic", "turned_block: owners of a block"};
    DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>(2, 0ull));
    formulations_kernel<<<2048, 256>>>(wrong);
    CUDA_LAUNCHED();
    const std::vector<unsigned long long> w = wrong.host(2);
    for (int i = 0; i < 2; i++) ladder_check(l, w[(size_t)i] == 0, "%s: %llu inputs differ from the definition", names[i], w[(size_t)i]);
}

// More than 2^31 values, stochastic and without rotation, all by one amax. The last 128 rows along N are what they give alone at the
// micro-batch that has the same words; the last 128 x 128 along M are what the CPU gives with their words.
static void check_large_sides(Ladder *l, bf16 *x, bf16 *out, int64_t M, int64_t N, const float *amax, const std::vector<float> &corner) {
    const int64_t T = EDEN_TILE;
    DeviceArray<uint8_t> workspace(16);
    DeviceArray<bf16> alone(T * N);
    DeviceArray<float> factor(1);
    const OperandSpec sr = spec_of(ROUND_SR, 0);
    EdenAddress a = an_address(GEMM_DGRAD, OPERAND_A);
    a.micro = 0;
    const Nvfp4Side n = {&sr, a, out, factor};
    nvfp4_quantize_launch(0, x, M, N, &n, NULL, amax, workspace);
    a.micro = (M - T) / T;
    const Nvfp4Side tail = {&sr, a, alone, factor};
    nvfp4_quantize_launch(0, x + (M - T) * N, T, N, &tail, NULL, amax, workspace);
    CUDA_CHECK(cudaDeviceSynchronize());
    ladder_check(l, host_copy((const uint16_t *)out + (M - T) * N, T * N) == host_copy((const uint16_t *)alone.p, T * N),
                 "%lld x %lld (over 2^31 values), along N: the last rows differ from the same rows alone", (long long)M, (long long)N);
    a.micro = 0;
    const Nvfp4Side m = {&sr, a, out, factor};
    nvfp4_quantize_launch(0, x, M, N, NULL, &m, amax, workspace);
    std::vector<uint16_t> got((size_t)(T * T));
    CUDA_CHECK(cudaMemcpy2D(got.data(), T * 2, out + (M - T) * N + N - T, (size_t)N * 2, T * 2, T, cudaMemcpyDeviceToHost));
    const QuantizeAddress cpu = cpu_address(a);
    QuantizeRandom random = quantize_random(&cpu, &sr);
    std::vector<uint32_t> words((size_t)(T * T));
    for (int64_t r = 0; r < T; r++) for (int64_t i = 0; i < T; i++)
        words[(size_t)(r * T + i)] = rng_word(random.stream, block_word_index(0, N, M, N - T + r, M - T + i));
    random.words = words.data();
    std::vector<float> want((size_t)(T * T));
    const float st = quantize_tensor(want.data(), NULL, corner.data(), T, T, 1, &sr, &random, 1);
    check_values(l, "over 2^31 values, along M, the last corner", got, factor.host(1)[0], want, st, T);
}
static void check_large(Ladder *l) {
    const int64_t M = 1 << 20, N = 2176, n = M * N, T = EDEN_TILE;
    DeviceArray<bf16> x(n), out(n), alone(16 * N);
    DeviceArray<float> factor(1);
    fill_gauss(x, n, 5);
    std::vector<uint16_t> bits((size_t)(T * T));
    CUDA_CHECK(cudaMemcpy2D(bits.data(), T * 2, x + (M - T) * N + N - T, (size_t)N * 2, T * 2, T, cudaMemcpyDeviceToHost));
    const std::vector<float> corner = as_floats(bits);
    float most = 0;
    for (float v : corner) most = std::max(most, fabsf(v));
    DeviceArray<float> amax(std::vector<float>(1, most));  // the corner's: larger values elsewhere are no concern of this check
    check_large_sides(l, x, out, M, N, amax, corner);
    nvfp4_square_launch(0, ROUND_FOUR_SIX, x, M - 5, N, amax, NULL, NULL, out, factor);
    nvfp4_square_launch(0, ROUND_FOUR_SIX, x + (M - 16) * N, 11, N, amax, NULL, NULL, alone, factor);
    CUDA_CHECK(cudaDeviceSynchronize());
    ladder_check(l, host_copy((const uint16_t *)out.p + (M - 16) * N, 11 * N) == host_copy((const uint16_t *)alone.p, 11 * N),
                 "%lld x %lld (over 2^31 values), 16x16: the last rows differ from the same rows alone", (long long)(M - 5), (long long)N);
    DeviceArray<uint8_t> codes(n / 2), scales(n / 16);
    CUDA_CHECK(cudaMemset(codes, 0x77, (size_t)(n / 2)));
    CUDA_CHECK(cudaMemset(scales, 0x38, (size_t)(n / 16)));
    CUDA_CHECK(cudaMemset(out, 0, (size_t)n * 2));
    nvfp4_decode_launch(0, codes, scales, M, N, out);
    CUDA_CHECK(cudaDeviceSynchronize());
    ladder_check(l, host_copy((const uint16_t *)out.p + n - 4096, 4096) == std::vector<uint16_t>(4096, bf16_encode(6.0f)),
                 "%lld x %lld (over 2^31 values), decode: the last values are not 6", (long long)M, (long long)N);
}

// ---------------------------------------------------------------------------------------------------------------------
// Times

// Instructions a value that a warp executes, counted in sm_90a code.
#define COUNT_AMAX_32 8.0         // the amax pass, a direction of two, rotation of 32
#define COUNT_AMAX_ALONE_16 7.9   // the only direction
#define COUNT_AMAX_ALONE_32 9.0
#define COUNT_AMAX_0 4.0          // no rotation
#define COUNT_STOCHASTIC_32 34.2  // a direction
#define COUNT_STOCHASTIC_16 33.0
#define COUNT_STOCHASTIC_0 29.1
#define COUNT_NEAREST_16 20.2
#define COUNT_AGAIN 53.3          // a packed tensor, both passes, rotation of 32

static void time_sides(const Ladder *l, int64_t M, int64_t N) {
    const int64_t n = M * N;
    const double values = (double)n;
    const int copies = rotation_copies(n * 6);
    std::vector<bf16 *> x, along_n, along_m;
    for (int i = 0; i < copies; i++) {
        x.push_back(device_new<bf16>(n)); along_n.push_back(device_new<bf16>(n)); along_m.push_back(device_new<bf16>(n));
        fill_gauss(x.back(), n, 7);
    }
    DeviceArray<uint8_t> workspace(nvfp4_workspace_bytes(M, N)), codes(n / 2), scales(n / 16);
    DeviceArray<float> amax(1), factor(2), saved(1);
    amax_launch(0, x[0], n, amax);
    const OperandSpec sr0 = spec_of(ROUND_SR, 0), sr16 = spec_of(ROUND_SR, 16), sr32 = spec_of(ROUND_SR, 32), sr128 = spec_of(ROUND_SR, 128);
    const OperandSpec rtn0 = spec_of(ROUND_RTN, 0), rtn16 = spec_of(ROUND_RTN, 16);
    const EdenAddress a = an_address(GEMM_DGRAD, OPERAND_A), m = an_address(GEMM_WGRAD, OPERAND_A), b = an_address(GEMM_WGRAD, OPERAND_B);
    char title[96];
    snprintf(title, sizeof title, "sides of a tensor, %lld x %lld", (long long)M, (long long)N);
    ladder_heading(title);
    const auto row = [&](const char *name, Launch *launch, const OperandSpec *n_spec, const OperandSpec *m_spec, const float *known, double bytes,
                         double instructions) {
        ladder_row(l, name, ladder_time([&](int i) {
            const Nvfp4Side sn = {n_spec, a, along_n[i % copies], factor}, sm = {m_spec, m, along_m[i % copies], factor + 1};
            launch(x[i % copies], M, N, n_spec ? &sn : NULL, m_spec ? &sm : NULL, known, workspace); }), values, bytes, instructions);
    };
    if (n <= 1 << 25) row("tetrajet2 dY, naive", naive_launch, &sr32, &sr32, NULL, 12, 0);
    row("tetrajet2 dY", trainer_launch, &sr32, &sr32, NULL, 8, 2 * (COUNT_AMAX_32 + COUNT_STOCHASTIC_32));
    row("  a direction a launch", [](const bf16 *p, int64_t rows, int64_t cols, const Nvfp4Side *sn, const Nvfp4Side *sm, const float *k, void *w) {
        trainer_launch(p, rows, cols, sn, NULL, k, w); trainer_launch(p, rows, cols, NULL, sm, k, w); }, &sr32, &sr32, NULL, 12, 2 * (COUNT_AMAX_32 + COUNT_STOCHASTIC_32));
    row("  by rotation of 128", trainer_launch, &sr128, &sr128, NULL, 8, 0);
    row("nvidia dY, amax known", trainer_launch, &sr0, &sr16, amax, 8, COUNT_AMAX_ALONE_16 + COUNT_STOCHASTIC_0 + COUNT_STOCHASTIC_16);
    row("nvidia dY, amax unknown", trainer_launch, &sr0, &sr16, NULL, 8, COUNT_AMAX_ALONE_16 + COUNT_AMAX_0 + COUNT_STOCHASTIC_0 + COUNT_STOCHASTIC_16);
    row("nvidia X", trainer_launch, NULL, &rtn16, amax, 6, COUNT_AMAX_ALONE_16 + COUNT_NEAREST_16);
    quantize_forward_launch(0, &rtn0, x[0], M, N, amax, codes, scales, NULL, saved, NULL, NULL);
    ladder_row(l, "tetrajet2 X again", ladder_time([&](int i) {
        const Nvfp4Side side = {&sr32, b, along_m[i % copies], factor};
        nvfp4_requantize_launch(0, codes, scales, M, N, &side, workspace); }), values, 3.125, COUNT_AGAIN);
    ladder_row(l, "decode", ladder_time([&](int i) { nvfp4_decode_launch(0, codes, scales, M, N, along_m[i % copies]); }), values, 2.5625, 0);
    // The amax pass by itself.
    Nvfp4Job job = nvfp4_job(M, N, workspace);
    const Nvfp4Side sn = {&sr32, a, along_n[0], factor}, sm = {&sr32, m, along_m[0], factor + 1};
    nvfp4_side(&job, ALONG_N, &sn, NULL);
    nvfp4_side(&job, ALONG_M, &sm, NULL);
    const auto amax_ms = [&](int directions) {
        return ladder_time([&](int i) { job.eden.x = x[i % copies]; nvfp4_start_bf16<WORK_AMAX>(0, job, directions); });
    };
    ladder_row(l, "amax, both by rotation of 32", amax_ms(DO_N | DO_M), values, 2, 2 * COUNT_AMAX_32);
    ladder_row(l, "amax, along M by rotation of 32", amax_ms(DO_M), values, 2, COUNT_AMAX_ALONE_32);
    for (int i = 0; i < copies; i++) { CUDA_CHECK(cudaFree(x[i])); CUDA_CHECK(cudaFree(along_n[i])); CUDA_CHECK(cudaFree(along_m[i])); }
}
static void time_square(const Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    DeviceArray<bf16> w(n), decoded(n);
    DeviceArray<uint8_t> codes(n / 2), scales(n / 256);
    DeviceArray<float> amax(1), factor(1);
    fill_gauss(w, n, 7);
    amax_launch(0, w, n, amax);
    char title[96];
    snprintf(title, sizeof title, "W in 16x16 blocks, %lld x %lld", (long long)rows, (long long)cols);
    ladder_heading(title);
    for (Rounding r : {ROUND_RTN, ROUND_FOUR_SIX}) {
        const double ms = ladder_time([&](int) { nvfp4_square_launch(0, r, w, rows, cols, amax, codes, scales, decoded, factor); });
        ladder_row(l, rounding_name(r), ms, (double)n, 4.504, 0);
    }
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) { check_large(&l); return ladder_finish(&l); }
    if (!l.small) check_formulations(&l);
    static const int64_t tiled[][2] = {{128, 128}, {256, 384}, {384, 256}, {1024, 640}};
    for (const int64_t *s : tiled) for (DataKind kind : ladder_kinds(&l)) {
        if (l.small && s[0] > 256) continue;
        for (const Pair &p : PAIRS) check_pair(&l, p, kind, s[0], s[1]);
        check_saved(&l, kind, s[0], s[1]);
    }
    static const int64_t odd[][2] = {{1, 16}, {3, 48}, {127, 640}, {128, 128}, {257, 1024}, {130, 80}};
    for (const int64_t *s : odd) for (DataKind kind : ladder_kinds(&l)) {
        if (l.small && s[1] > 128) continue;
        check_square(&l, ROUND_RTN, kind, s[0], s[1]);
        check_square(&l, ROUND_FOUR_SIX, kind, s[0], s[1]);
        check_saved(&l, kind, s[0], s[1]);
    }
    if (!l.quick) {
        ladder_ceilings(&l);
        static const int64_t sizes[][2] = {{65536, 640}, {16384, 2048}, {16384, 5632}, {16384, 6144}, {16384, 11264}};
        for (const int64_t *s : sizes) time_sides(&l, s[0], s[1]);
        time_square(&l, 11264, 2048);
        time_square(&l, 2048, 5632);
    }
    return ladder_finish(&l);
}
