// dev/cuda/quantize_fp8.cu: the ladder of the FP8 quantizers and of the kernels around row-scaled E2M1 operands (fp4-dge-occ): every value of
// float32 through the card's FP8 conversion, tensors as they are and transposed, exact order statistics, rows, products, the gradient estimator.
//   nvcc -std=c++17 -O3 -arch=native -I. -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/quantize_fp8.cu -o quantize_fp8 && ./quantize_fp8
#include "ladder.cuh"

#include "../../llmc/cpu/quantize.h"
#include "../../llmc/cuda/quantize.cuh"
#include "../../llmc/cuda/quantize_fp8.cuh"
#include "../../llmc/cuda/quantize_rows.cuh"

static OperandSpec fp8_spec(Format format) {
    const OperandSpec s = FP8(format, FROM_ORIGINAL);
    return s;
}
static OperandSpec rows_spec(int clamp_percent) {
    const OperandSpec s = FP4_ROWS(clamp_percent);
    return s;
}
static const QuantizeAddress NO_NOISE = {1, 1, 0, 0, 0, 0, 0, 0};

// ---------------------------------------------------------------------------------------------------------------------
// The first rung: a thread a value, both copies, the functions of formats.h as they are.

template <bool E5M2>
static __global__ void naive_fp8_kernel(const bf16 *x, int64_t rows, int64_t cols, const float *amax, uint8_t *out, uint8_t *out_t) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * cols) return;
    const float v = f32_mul(__bfloat162float(x[i]), plain_scale(*amax, E5M2 ? E5M2_MAX : E4M3_MAX).inv);
    const uint8_t code = (uint8_t)fp8_encode<E5M2>(v);
    out[i] = code;
    out_t[i % cols * rows + i / cols] = code;
}
static void naive_fp8_launch(const bf16 *x, int64_t rows, int64_t cols, const float *amax, uint8_t *out, uint8_t *out_t) {
    naive_fp8_kernel<true><<<(unsigned)ceil_div(rows * cols, 256), 256>>>(x, rows, cols, amax, out, out_t);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Conversions: all float32 (every `step`-th of them), in pairs with their negatives, against formats.h

static int is_nan_code(int e5m2, uint32_t code) { return (code & 0x7Fu) > (e5m2 ? 0x7Cu : 0x7Eu); }
template <bool E5M2> static __global__ void conversion_kernel(unsigned long long *bad, uint32_t step) {
    for (uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * step; i < 1ull << 31; i += (uint64_t)gridDim.x * blockDim.x * step) {
        const float v = f32_from_bits((uint32_t)i), minus = f32_from_bits((uint32_t)i | 0x80000000u);
        const uint32_t got = fp8_encode2<E5M2>(v, minus);
        if (v != v) {  // any NaN code will do
            const uint32_t least = E5M2 ? 0x7Du : 0x7Fu;
            if ((got & 0x7Fu) < least || (got >> 8 & 0x7Fu) < least) atomicAdd(bad, 1ull);
            continue;
        }
        const uint32_t want = E5M2 ? e5m2_encode(v) | e5m2_encode(minus) << 8 : e4m3_encode_signed(v) | e4m3_encode_signed(minus) << 8;
        const float value = E5M2 ? e5m2_decode(want & 0xFFu) : e4m3_decode_signed(want & 0xFFu);
        if (got != want || fp8_round<E5M2>(v) != value) atomicAdd(bad, 1ull);
    }
}
static void check_conversions(Ladder *l) {
    DeviceArray<unsigned long long> bad(2);
    CUDA_CHECK(cudaMemset(bad, 0, 16));
    const uint32_t step = l->small ? 65521 : 1;
    conversion_kernel<false><<<2048, 256>>>(bad.p, step);
    CUDA_LAUNCHED();
    conversion_kernel<true><<<2048, 256>>>(bad.p + 1, step);
    CUDA_LAUNCHED();
    const std::vector<unsigned long long> n = bad.host(2);
    ladder_check(l, n[0] == 0, "E4M3: %llu of the float32 values convert otherwise than by formats.h", n[0]);
    ladder_check(l, n[1] == 0, "E5M2: %llu of the float32 values convert otherwise than by formats.h", n[1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparing

static std::vector<float> as_floats(const std::vector<uint16_t> &bits) {
    std::vector<float> x(bits.size());
    for (size_t i = 0; i < bits.size(); i++) x[i] = bf16_decode(bits[i]);
    return x;
}
static int is_finite_kind(int kind) { return kind != DATA_NAN && kind != DATA_INF; }
static int same_float(float a, float b) { return f32_bits(a) == f32_bits(b) || (a != a && b != b); }
static int same_bf16(uint16_t got, float want) {  // up to the sign of a zero
    const uint16_t w = bf16_encode(want);
    return got == w || ((got | w) & 0x7FFFu) == 0u;
}
template <typename T, typename Same> static void check_all(Ladder *l, const char *what, const char *which, const std::vector<T> &got, Same same) {
    int64_t bad = 0, first = 0;
    for (int64_t i = (int64_t)got.size() - 1; i >= 0; i--) if (!same(i, got[(size_t)i])) { bad++; first = i; }
    ladder_check(l, bad == 0, "%s: %lld of %lld %s differ, the first is number %lld", what, (long long)bad, (long long)got.size(), which, (long long)first);
}
template <typename T> static void poison(T *p, int64_t count) { CUDA_CHECK(cudaMemset(p, 0xFF, (size_t)count * sizeof(T))); }

// ---------------------------------------------------------------------------------------------------------------------
// FP8 tensors

struct Fp8Want { std::vector<uint8_t> codes; float factor; };
static Fp8Want fp8_want(const std::vector<float> &x, int64_t rows, int64_t cols, Format format) {
    Fp8Want w;
    const OperandSpec spec = fp8_spec(format);
    std::vector<float> out(x.size());
    w.factor = quantize_operand(out.data(), x.data(), rows, cols, 0, &spec, &NO_NOISE);
    for (float v : out) w.codes.push_back((uint8_t)(v != v ? 0x7Fu : format == FORMAT_E5M2 ? e5m2_encode(v) : e4m3_encode_signed(v)));
    return w;
}
// Outputs of one call, in every combination that the layers ask for, against the CPU's codes.
template <typename Launch>
static void check_fp8_outputs(Ladder *l, const char *what, const Fp8Want &want, int64_t rows, int64_t cols, Format format, Launch launch) {
    const int64_t n = rows * cols;
    DeviceArray<uint8_t> out(n), out_t(n);
    DeviceArray<uint16_t> decoded(n);
    DeviceArray<float> factor(1);
    const int finite = fabsf(want.factor) < INFINITY;
    for (int wanted = 1; wanted < 8; wanted++) {
        poison(out.p, n); poison(out_t.p, n); poison(decoded.p, n); poison(factor.p, 1);
        launch(wanted & 1 ? out.p : NULL, wanted & 2 ? out_t.p : NULL, wanted & 4 ? (bf16 *)decoded.p : NULL, factor.p);
        CUDA_CHECK(cudaDeviceSynchronize());
        const float f = factor.host(1)[0];
        ladder_check(l, same_float(f, want.factor), "%s: factor %a, CPU %a", what, f, want.factor);
        if (!finite) continue;
        if (wanted & 1) check_all(l, what, "bytes", out.host(n), [&](int64_t i, uint8_t got) { return got == want.codes[(size_t)i]; });
        if (wanted & 2)
            check_all(l, what, "transposed bytes", out_t.host(n), [&](int64_t i, uint8_t got) { return got == want.codes[(size_t)(i % rows * cols + i / rows)]; });
        if (wanted & 4)
            check_all(l, what, "decoded values", decoded.host(n), [&](int64_t i, uint16_t got) {
                const uint32_t code = want.codes[(size_t)i];
                return same_bf16(got, format == FORMAT_E5M2 ? e5m2_decode(code) : e4m3_decode_signed(code));
            });
    }
}
static void check_fp8(Ladder *l, DataKind kind, Format format, int64_t rows, int64_t cols) {
    char what[128];
    snprintf(what, sizeof what, "fp8 %s, %s, %lld x %lld", format == FORMAT_E5M2 ? "e5m2" : "e4m3", DATA_NAMES[kind], (long long)rows, (long long)cols);
    const std::vector<uint16_t> data = make_data(kind, rows, cols, 11);
    const DeviceArray<uint16_t> x(data);
    DeviceArray<float> amax(1);
    amax_launch(0, (const bf16 *)x.p, rows * cols, amax);
    check_fp8_outputs(l, what, fp8_want(as_floats(data), rows, cols, format), rows, cols, format, [&](uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor) {
        fp8_quantize_launch(0, format, (const bf16 *)x.p, rows, cols, amax, out, out_t, decoded, factor);
    });
}
// A NaN that the producer's amax has skipped stays one, in all copies; the values around it are as without it.
static void check_fp8_nan(Ladder *l, Format format) {
    const int64_t rows = 144, cols = 272, at = rows * cols / 2, at_t = at % cols * rows + at / cols;
    std::vector<uint16_t> data = make_data(DATA_GAUSS, rows, cols, 12);
    data[(size_t)at] = 0;
    const Fp8Want want = fp8_want(as_floats(data), rows, cols, format);
    data[(size_t)at] = bf16_encode(3.0f);
    DeviceArray<float> amax(1), factor(1);
    const DeviceArray<uint16_t> finite(data);
    amax_launch(0, (const bf16 *)finite.p, rows * cols, amax);  // 3 is below the largest of these values
    data[(size_t)at] = bf16_encode(NAN);
    const DeviceArray<uint16_t> x(data);
    DeviceArray<uint8_t> out(rows * cols), out_t(rows * cols);
    DeviceArray<uint16_t> decoded(rows * cols);
    fp8_quantize_launch(0, format, (const bf16 *)x.p, rows, cols, amax, out, out_t, (bf16 *)decoded.p, factor);
    const int e5m2 = format == FORMAT_E5M2;
    const auto same = [&](int64_t i, int64_t nan_at, uint32_t got, uint32_t code) { return i == nan_at ? is_nan_code(e5m2, got) : got == code; };
    check_all(l, "fp8 of a NaN", "bytes", out.host(rows * cols), [&](int64_t i, uint8_t got) { return same(i, at, got, want.codes[(size_t)i]); });
    check_all(l, "fp8 of a NaN", "transposed bytes", out_t.host(rows * cols),
              [&](int64_t i, uint8_t got) { return same(i, at_t, got, want.codes[(size_t)(i % rows * cols + i / rows)]); });
    const uint16_t d = decoded.host(rows * cols)[(size_t)at];
    ladder_check(l, (d & 0x7FFFu) > 0x7F80u && factor.host(1)[0] == want.factor, "fp8 of a NaN: decoded to %04x, or its factor is not the one without it", d);
}
static void check_fp8_all(Ladder *l) {
    const int64_t shapes[][2] = {{16, 16}, {48, 144}, {272, 128}, {128, 400}, {144, 2048}};
    const int count = l->small ? 3 : 5;
    for (int format = FORMAT_E4M3; format <= FORMAT_E5M2; format++) {
        for (int s = 0; s < count; s++)
            for (DataKind kind : ladder_kinds(l)) check_fp8(l, kind, (Format)format, shapes[s][0], shapes[s][1]);
        check_fp8_nan(l, (Format)format);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Clamp, rows, and FP8 of row-scaled tensors

static void check_clamp(Ladder *l, DataKind kind, int64_t count, int percent) {
    const std::vector<uint16_t> data = make_data(kind, 1, count, 21);
    const DeviceArray<uint16_t> x(data);
    DeviceArray<float> limits(2);
    DeviceArray<char> work(clamp_workspace_bytes());
    clamp_limits_launch(0, (const bf16 *)x.p, count, percent, limits, work.p);
    const std::vector<float> got = limits.host(2);
    if (!is_finite_kind(kind)) return;                     // it returned, and compute-sanitizer has nothing to say
    const ClampLimits want = clamp_limits(as_floats(data).data(), count, percent);
    ladder_check(l, f32_bits(got[0]) == f32_bits(want.low) && f32_bits(got[1]) == f32_bits(want.high), "clamp of %s, %lld values, %d %%: %a %a, CPU %a %a",
                 DATA_NAMES[kind], (long long)count, percent, got[0], got[1], want.low, want.high);
}
static void check_clamps(Ladder *l) {
    const int64_t counts[] = {1, 7, 8, 100, 4097, 1 << 20 | 3};
    const int percents[] = {0, 1, 50};
    for (int c = 0; c < (l->small ? 5 : 6); c++)
        for (int percent : percents)
            for (DataKind kind : ladder_kinds(l)) check_clamp(l, kind, counts[c], percent);
}

static float row_factor_want(const float *x, int64_t cols, ClampLimits c) {
    float amax = 0.0f;
    for (int64_t k = 0; k < cols; k++) {
        if (!(fabsf(x[k]) < INFINITY)) return NAN;
        amax = fmaxf(fabsf(clamp_value(x[k], c)), amax);
    }
    return plain_scale(amax, E2M1_MAX).factor;
}
static void check_rows(Ladder *l, DataKind kind, int64_t rows, int64_t cols, int percent) {
    char what[128];
    snprintf(what, sizeof what, "rows of %s, %lld x %lld, clamped by %d %%", DATA_NAMES[kind], (long long)rows, (long long)cols, percent);
    const int64_t n = rows * cols;
    const std::vector<uint16_t> data = make_data(kind, rows, cols, 31);
    const std::vector<float> floats = as_floats(data);
    const DeviceArray<uint16_t> x(data);
    DeviceArray<uint16_t> values(n), residual(n);
    DeviceArray<float> limits(2), factors(rows);
    DeviceArray<char> work(clamp_workspace_bytes());
    poison(values.p, n); poison(residual.p, n); poison(factors.p, rows); poison(limits.p, 2);
    if (percent) clamp_limits_launch(0, (const bf16 *)x.p, n, percent, limits, work.p);
    rows_quantize_launch(0, (const bf16 *)x.p, rows, cols, percent ? limits.p : NULL, (bf16 *)values.p, factors, percent ? (bf16 *)residual.p : NULL);
    const std::vector<float> got = factors.host(rows), bounds = limits.host(2);
    const ClampLimits c = {percent ? bounds[0] : -INFINITY, percent ? bounds[1] : INFINITY};
    check_all(l, what, "row factors", got, [&](int64_t r, float f) { return same_float(f, row_factor_want(&floats[(size_t)(r * cols)], cols, c)); });
    if (!is_finite_kind(kind)) return;
    const OperandSpec spec = rows_spec(percent);
    const QuantizeRandom random = quantize_random(&NO_NOISE, &spec);
    std::vector<float> want((size_t)n);
    quantize_tensor(want.data(), NULL, floats.data(), rows, cols, 0, &spec, &random, 0);
    check_all(l, what, "values", values.host(n), [&](int64_t i, uint16_t v) { return same_bf16(v, want[(size_t)i]); });
    if (!percent) return;
    clamp_residual(want.data(), floats.data(), n, percent);
    check_all(l, what, "cut off values", residual.host(n), [&](int64_t i, uint16_t v) { return same_bf16(v, want[(size_t)i]); });
}
static void check_from_rows(Ladder *l, DataKind kind, Format format, int64_t rows, int64_t cols) {
    char what[128];
    snprintf(what, sizeof what, "fp8 %s from rows of %s, %lld x %lld", format == FORMAT_E5M2 ? "e5m2" : "e4m3", DATA_NAMES[kind], (long long)rows, (long long)cols);
    const std::vector<uint16_t> data = make_data(kind, rows, cols, 41);
    const DeviceArray<uint16_t> x(data);
    DeviceArray<uint16_t> values(rows * cols);
    DeviceArray<float> factors(rows), work(1);
    rows_quantize_launch(0, (const bf16 *)x.p, rows, cols, NULL, (bf16 *)values.p, factors, NULL);
    const OperandSpec spec = rows_spec(0);
    std::vector<float> w(data.size());
    quantize_operand(w.data(), as_floats(data).data(), rows, cols, 0, &spec, &NO_NOISE);
    // Zeros of values and w may differ in sign, so the CPU's codes are those of what the GPU quantizes.
    const std::vector<uint16_t> v = values.host(rows * cols);
    for (size_t i = 0; i < w.size(); i++) if (w[i] == 0.0f) w[i] = bf16_decode(v[i]);
    check_fp8_outputs(l, what, fp8_want(w, rows, cols, format), rows, cols, format, [&](uint8_t *out, uint8_t *out_t, bf16 *decoded, float *factor) {
        fp8_from_rows_launch(0, format, (const bf16 *)values.p, factors, rows, cols, out, out_t, decoded, factor, work.p);
    });
}
static void check_rows_all(Ladder *l) {
    const int64_t shapes[][2] = {{1, 16}, {3, 136}, {48, 1040}, {17, 2048}, {16, 5632}};
    for (int s = 0; s < (l->small ? 3 : 5); s++)
        for (DataKind kind : ladder_kinds(l)) {
            const int64_t rows = shapes[s][0], cols = shapes[s][1];
            check_rows(l, kind, rows, cols, 0);
            check_rows(l, kind, rows, cols, 1);
            if (rows % 16 == 0)
                for (int format = FORMAT_E4M3; format <= FORMAT_E5M2; format++) check_from_rows(l, kind, (Format)format, rows, cols);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

static std::vector<float> gauss_floats(int64_t count, uint64_t seed) {
    std::vector<float> x((size_t)count);
    for (int64_t i = 0; i < count; i++) x[(size_t)i] = gauss_value(seed, (uint64_t)i);
    return x;
}
static void check_product_scale(Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const std::vector<float> p = gauss_floats(n, 51), row = gauss_floats(rows, 52), col = gauss_floats(cols, 53);
    const DeviceArray<float> device_row(row), device_col(col);
    for (int which = 0; which < 8; which++) {
        const int by_row = which & 1, by_col = which & 2, rounded = which & 4;
        DeviceArray<float> q(p);
        DeviceArray<uint16_t> out(n);
        poison(out.p, n);
        product_scale_launch(0, q, rows, cols, by_row ? device_row.p : NULL, by_col ? device_col.p : NULL, rounded ? (bf16 *)out.p : NULL);
        const auto want = [&](int64_t i) {
            return f32_mul(f32_mul(p[(size_t)i], by_row ? row[(size_t)(i / cols)] : 1.0f), by_col ? col[(size_t)(i % cols)] : 1.0f);
        };
        if (rounded) check_all(l, "scaled product", "values", out.host(n), [&](int64_t i, uint16_t v) { return v == bf16_encode(want(i)); });
        check_all(l, "scaled product", "float32 values", q.host(n),
                  [&](int64_t i, float v) { return f32_bits(v) == f32_bits(rounded ? p[(size_t)i] : want(i)); });
    }
}
static void check_dge(Ladder *l, DataKind kind, int64_t rows, int64_t cols) {
    char what[128];
    snprintf(what, sizeof what, "gradient estimator, W %s, %lld x %lld", DATA_NAMES[kind], (long long)rows, (long long)cols);
    const int64_t n = rows * cols;
    const std::vector<uint16_t> data = make_data(kind, rows, cols, 61);
    const std::vector<float> p = gauss_floats(n, 62), before = gauss_floats(n, 63);
    std::vector<uint16_t> before16;
    for (float v : before) before16.push_back(bf16_encode(v));
    std::vector<float> slope((size_t)n);
    for (int64_t r = 0; r < rows; r++) {
        float amax = 0.0f;
        for (int64_t k = 0; k < cols; k++) amax = fmaxf(fabsf(bf16_decode(data[(size_t)(r * cols + k)])), amax);
        for (int64_t k = 0; k < cols; k++)
            slope[(size_t)(r * cols + k)] = dge_slope(f32_mul(bf16_decode(data[(size_t)(r * cols + k)]), plain_scale(amax, E2M1_MAX).inv));
    }
    const DeviceArray<uint16_t> w(data);
    const DeviceArray<float> device_p(p);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        DeviceArray<float> dw(before);
        DeviceArray<uint16_t> dw16(before16);
        if (!accumulate) { poison(dw.p, n); poison(dw16.p, n); }
        dge_finish_launch(0, device_p, (const bf16 *)w.p, rows, cols, dw.p, 0, accumulate);
        dge_finish_launch(0, device_p, (const bf16 *)w.p, rows, cols, dw16.p, 1, accumulate);
        const auto want = [&](int64_t i, float old) { return f32_add(accumulate ? old : 0.0f, f32_mul(p[(size_t)i], slope[(size_t)i])); };
        check_all(l, what, "float32 gradients", dw.host(n), [&](int64_t i, float v) { return v == want(i, before[(size_t)i]); });
        check_all(l, what, "BF16 gradients", dw16.host(n), [&](int64_t i, uint16_t v) { return same_bf16(v, want(i, bf16_decode(before16[(size_t)i]))); });
    }
}
static void check_products(Ladder *l) {
    check_product_scale(l, 3, 136);
    if (!l->small) check_product_scale(l, 300, 2048);
    for (DataKind kind : ladder_kinds(l))
        if (is_finite_kind(kind)) { check_dge(l, kind, 3, 136); check_dge(l, kind, 16, 1040); }
}

// ---------------------------------------------------------------------------------------------------------------------
// Beyond 2^31 values: the last tile, against the functions of formats.h

static void check_large(Ladder *l) {
    const int64_t rows = 131072 + 144, cols = 16384 + 16, n = rows * cols, tail_rows = 16, tail = tail_rows * cols;
    DeviceArray<bf16> x(n), values(n);
    DeviceArray<uint8_t> out(n), out_t(n);
    DeviceArray<float> amax(1), factor(1), factors(rows), limits(2);
    DeviceArray<char> work(clamp_workspace_bytes());
    fill_gauss(x, n, 71);
    amax_launch(0, x, n, amax);
    fp8_quantize_launch(0, FORMAT_E4M3, x, rows, cols, amax, out, out_t, NULL, factor);
    const std::vector<float> from = as_floats(host_copy((const uint16_t *)x.p + n - tail, tail));
    const float inv = plain_scale(amax.host(1)[0], E4M3_MAX).inv;
    const auto code = [&](int64_t i) { return (uint8_t)e4m3_encode_signed(f32_mul(from[(size_t)i], inv)); };
    check_all(l, "fp8, more than 2^31 values", "bytes", host_copy(out.p + n - tail, tail), [&](int64_t i, uint8_t v) { return v == code(i); });
    for (int64_t c : {(int64_t)0, cols / 2, cols - 1})
        check_all(l, "fp8, more than 2^31 values", "transposed bytes", host_copy(out_t.p + (c + 1) * rows - tail_rows, tail_rows),
                  [&](int64_t r, uint8_t v) { return v == code(r * cols + c); });
    rows_quantize_launch(0, x, rows, cols, NULL, values, factors, NULL);
    const OperandSpec spec = rows_spec(0);
    const QuantizeRandom random = quantize_random(&NO_NOISE, &spec);
    std::vector<float> want((size_t)tail);
    quantize_tensor(want.data(), NULL, from.data(), tail_rows, cols, 0, &spec, &random, 0);
    check_all(l, "rows, more than 2^31 values", "values", host_copy((const uint16_t *)values.p + n - tail, tail),
              [&](int64_t i, uint16_t v) { return same_bf16(v, want[(size_t)i]); });
    clamp_limits_launch(0, x, n, 1, limits, work.p);       // N(0,1) in BF16: the quantile is +-2.326, whose neighbours are 2^-6 apart
    const std::vector<float> got = limits.host(2);
    ladder_check(l, fabsf(got[0] + 2.326f) < 0.02f && fabsf(got[1] - 2.326f) < 0.02f, "clamp of more than 2^31 values: %g %g", got[0], got[1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Time

static void time_fp8(Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const double values = (double)n;
    char title[96];
    snprintf(title, sizeof title, "fp8, %lld x %lld", (long long)rows, (long long)cols);
    DeviceArray<bf16> x(n), decoded(n);
    DeviceArray<uint8_t> out(n), out_t(n);
    DeviceArray<float> amax(1), factor(1), row_factor(rows), work(1);
    fill_gauss(x, n, 81);
    amax_launch(0, x, n, amax);
    rows_quantize_launch(0, x, rows, cols, NULL, decoded, row_factor, NULL);
    const auto row = [&](const char *name, double bytes, Format f, uint8_t *o, uint8_t *t, bf16 *d) {
        ladder_row(l, name, ladder_time([&](int) { fp8_quantize_launch(0, f, x, rows, cols, amax, o, t, d, factor); }), values, bytes, 0);
    };
    ladder_heading(title);
    ladder_row(l, "a thread a value, both", ladder_time([&](int) { naive_fp8_launch(x, rows, cols, amax, out, out_t); }), values, 4, 0);
    row("e5m2, both", 4, FORMAT_E5M2, out, out_t, NULL);
    row("e4m3, both", 4, FORMAT_E4M3, out, out_t, NULL);
    row("e4m3, as it is", 3, FORMAT_E4M3, out, NULL, NULL);
    row("e4m3, transposed", 3, FORMAT_E4M3, NULL, out_t, NULL);
    ladder_row(l, "amax", ladder_time([&](int) { amax_launch(0, x, n, amax); }), values, 2, 0);
    ladder_row(l, "from rows, transposed", ladder_time([&](int) {
        fp8_from_rows_launch(0, FORMAT_E4M3, decoded, row_factor, rows, cols, NULL, out_t, NULL, factor, work.p);
    }), values, 5, 0);
    row("e4m3, decoded", 4, FORMAT_E4M3, NULL, NULL, decoded);
}
static void time_rows(Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    const double count = (double)n;
    char title[96];
    snprintf(title, sizeof title, "row-scaled E2M1, %lld x %lld", (long long)rows, (long long)cols);
    DeviceArray<bf16> x(n), values(n), residual(n);
    DeviceArray<float> limits(2), row_factor(rows), col(gauss_floats(cols, 91)), p(n), dw(n);
    DeviceArray<char> work(clamp_workspace_bytes());
    fill_gauss(x, n, 92);
    CUDA_CHECK(cudaMemset(p, 0, (size_t)n * 4));
    ladder_heading(title);
    ladder_row(l, "clamp limits", ladder_time([&](int) { clamp_limits_launch(0, x, n, 1, limits, work.p); }), count, 4, 0);
    ladder_row(l, "rows", ladder_time([&](int) { rows_quantize_launch(0, x, rows, cols, NULL, values, row_factor, NULL); }), count, 4, 0);
    ladder_row(l, "rows, clamped, with residual", ladder_time([&](int) { rows_quantize_launch(0, x, rows, cols, limits, values, row_factor, residual); }), count, 6, 0);
    ladder_row(l, "product by rows, in place", ladder_time([&](int) { product_scale_launch(0, p, rows, cols, row_factor, NULL, NULL); }), count, 8, 0);
    ladder_row(l, "product by columns -> BF16", ladder_time([&](int) { product_scale_launch(0, p, rows, cols, NULL, col, values); }), count, 6, 0);
    ladder_row(l, "gradient estimator", ladder_time([&](int) { dge_finish_launch(0, p, x, rows, cols, dw, 0, 0); }), count, 10, 0);
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) { check_large(&l); return ladder_finish(&l); }
    check_conversions(&l);
    check_fp8_all(&l);
    check_clamps(&l);
    check_rows_all(&l);
    check_products(&l);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!l.quick) {
        ladder_ceilings(&l);
        time_fp8(&l, 16384, 2048); time_fp8(&l, 16384, 6144); time_fp8(&l, 16384, 11264);
        time_rows(&l, 16384, 2048); time_rows(&l, 16384, 5632);
    }
    return ladder_finish(&l);
}
