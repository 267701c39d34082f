// test_quantize_rivals.c: the quantizers that only the rival recipes use, bit for bit: MXFP4 (QuEST and stochastic) against the golden
// vectors (numpy); FP8 with a scale a tensor, E2M1 with a scale a row and the clamp against definitions in this file; along
// columns and along rows, from any number of threads; edge cases; refusals. Everything here is exact.
#include "dev/test/expect.h"
#include "golden.h"
#include "grid.h"
#include "llmc/cpu/quantize.h"
#ifdef _OPENMP
#include <omp.h>
#endif

static Grid E2M1_GRID, E4M3_GRID, E5M2_GRID;

typedef struct { const char *name; OperandSpec spec; } Quantizer;
static const Quantizer QUANTIZERS[] = {
    {"mx_quest_32", MXFP4_QUEST}, {"mx_sr_32", MXFP4_SR(FROM_ORIGINAL)}, {"e4m3", FP8(FORMAT_E4M3, FROM_ORIGINAL)},
    {"e5m2", FP8(FORMAT_E5M2, FROM_ORIGINAL)}, {"rows", FP4_ROWS(0)}, {"rows, clamped", FP4_ROWS(1)}};
#define QUANTIZER_COUNT ((int)(sizeof QUANTIZERS / sizeof QUANTIZERS[0]))
static const QuantizeAddress ADDRESS = {11, 5, 2, 1, GEMM_WGRAD, OPERAND_A, 3, 1};

static float *floats(int64_t count) { return (float *)xcalloc((size_t)count, sizeof(float)); }
static float *transpose(const float *x, int64_t rows, int64_t cols) {  // -> (cols, rows)
    float *t = floats(rows * cols);
    for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}
// Values of both signs whose sizes spread over 2^-spread .. 2^spread, some zero.
static float *values(int64_t count, int spread, uint64_t seed) {
    float *x = floats(count);
    const RngStream s = rng_stream(seed, 0, 0);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t w = rng_word(s, (uint64_t)i);
        const float m = (float)(w & 0xFFFFFF) * 0x1p-23f - 1.0f;
        x[i] = w >> 27 == 0 ? 0.0f : ldexpf(m, (int)(w >> 24) % (2 * spread + 1) - spread);
    }
    return x;
}
static void assert_same_bits(const char *what, const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (f32_bits(a[i]) != f32_bits(b[i])) fail_msg("%s: value %lld is %.9g, expected %.9g", what, (long long)i, (double)a[i], (double)b[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// MXFP4

static void check_golden(const char *file, const Quantizer *z, const cJSON *input, int along_rows) {
    const cJSON *expected = json_get(json_get(input, "quantizers"), z->name);
    int64_t n, m, one;
    uint32_t *bits = golden_hex(input, "x", 8, &n), *signs = golden_hex(input, "sign_bits", 1, &m), *words = golden_hex(input, "words_per_value", 8, &one);
    uint32_t *codes = golden_hex(expected, "codes", 1, &m);
    const int64_t rows = json_get(input, "rows")->valueint, cols = json_get(input, "cols")->valueint;
    assert_true(n == rows * cols && m == n);
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = f32_from_bits(bits[i]);
    QuantizeRandom random;
    memset(&random, 0, sizeof random);
    random.words = words;
    if (z->spec.signs == SIGNS_RANDOM) for (int i = 0; i < 32; i++) random.sign_bits[0] |= signs[i] << i;
    float *t = along_rows ? transpose(x, rows, cols) : x, *out = floats(n);
    uint8_t *scales = (uint8_t *)xcalloc((size_t)(n / 32), 1), *mask = (uint8_t *)xcalloc((size_t)n, 1);
    QuantizeJob j = quantize_job(along_rows ? cols : rows, along_rows ? rows : cols, along_rows, &z->spec);
    j.random = &random; j.out = out; j.scales = scales; j.mask = mask;
    const float factor = quantize_run(&j, t);
    assert_true(factor == (z->spec.rounding == ROUND_SR ? 4.0f / 3 : 1.0f));
    const cJSON *exponent = json_get(expected, "exponents")->child;
    for (int64_t b = 0; b < n / 32; b++, exponent = exponent->next)
        if (scales[b] != exponent->valueint + 127) fail_msg("%s, %s: scale %lld is 2^%d, expected 2^%d", file, z->name, (long long)b, scales[b] - 127, exponent->valueint);
    const char *clear = z->spec.rounding == ROUND_QUEST ? json_get(expected, "mask")->valuestring : NULL;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = along_rows ? i % cols * rows + i / cols : i;
        const uint32_t code = e2m1_encode(out[at]);
        if (code != codes[i] && (code | codes[i]) != 8) fail_msg("%s, %s: code %lld is %x, expected %x", file, z->name, (long long)i, code, codes[i]);
        if (clear && mask[at] != (clear[i] == '1')) fail_msg("%s, %s: mask %lld is %d", file, z->name, (long long)i, mask[at]);
    }
    j.decode = 1;                                                      // codes x 2^e
    float *decoded = floats(n);
    j.out = decoded;
    quantize_run(&j, t);
    for (int64_t i = 0; i < n; i++) {
        const int64_t block = along_rows ? i % rows * (cols / 32) + i / rows / 32 : i / 32;
        assert_true((double)decoded[i] == ldexp(out[i], scales[block] - 127) && bf16_round(decoded[i]) == decoded[i]);
    }
    if (along_rows) free(t);
    free(decoded); free(scales); free(mask); free(out); free(x); free(bits); free(signs); free(words); free(codes);
}
static void test_golden(void **state) {
    (void)state;
    static const char *const files[] = {"gauss", "edge", "zeros"};
    for (int f = 0; f < 3; f++) {
        cJSON *j = golden_open(files[f]);
        for (int z = 0; z < 2; z++) for (int along_rows = 0; along_rows < 2; along_rows++) check_golden(files[f], &QUANTIZERS[z], j, along_rows);
        cJSON_Delete(j);
    }
}
// The stochastic words are those of the address: operand by address = operand by words written out.
static void test_words_have_addresses(void **state) {
    (void)state;
    const int64_t rows = 40, cols = 96;
    const RngStream s = rng_stream(ADDRESS.seed, (uint32_t)ADDRESS.step, rng_address(RNG_VALUE, ADDRESS.layer, ADDRESS.linear, ADDRESS.gemm, ADDRESS.operand, ADDRESS.rank));
    uint32_t *words = (uint32_t *)xcalloc((size_t)(rows * cols), sizeof(uint32_t));
    for (int64_t r = 0; r < rows; r++) for (int64_t i = 0; i < cols; i++) words[r * cols + i] = rng_word(s, block_word_index(ADDRESS.micro, rows, cols, r, i));
    QuantizeRandom random = quantize_random(&ADDRESS, &QUANTIZERS[1].spec);
    random.words = words;
    float *x = values(rows * cols, 3, 1), *a = floats(rows * cols), *b = floats(rows * cols);
    quantize_operand(a, x, rows, cols, 0, &QUANTIZERS[1].spec, &ADDRESS);
    quantize_tensor(b, NULL, x, rows, cols, 0, &QUANTIZERS[1].spec, &random, 1);
    assert_same_bits("mx_sr_32", a, b, rows * cols);
    free(words); free(x); free(a); free(b);
}

// ---------------------------------------------------------------------------------------------------------------------
// A scale for a tensor, a scale for a row, and the clamp

static float grid_value(const Grid *g, float v) {
    const float a = (float)g->value[grid_nearest(g, fabs((double)v))];
    return signbit(v) ? -a : a;
}
static void test_fp8_by_definition(void **state) {
    (void)state;
    const int64_t rows = 24, cols = 50, n = rows * cols;
    for (int z = 2; z < 4; z++) for (int spread = 0; spread < 24; spread += 6) {
        const Grid *g = z == 2 ? &E4M3_GRID : &E5M2_GRID;
        const float largest = (float)g->value[g->count - 1];
        float *x = values(n, spread, (uint64_t)spread), *out = floats(n), amax = 0;
        for (int64_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
        assert_true(quantize_operand(out, x, rows, cols, 0, &QUANTIZERS[z].spec, &ADDRESS) == amax / largest);
        for (int64_t i = 0; i < n; i++) {
            assert_int_equal(f32_bits(out[i]), f32_bits(grid_value(g, x[i] * (largest / amax))));
            assert_true(bf16_round(out[i]) == out[i]);
        }
        float *again = floats(n);                                      // quantizing the quantized changes nothing: backward may use the forward's
        assert_true(quantize_operand(again, out, rows, cols, 1, &QUANTIZERS[z].spec, &ADDRESS) == 1);
        assert_same_bits("twice", again, out, n);
        free(x); free(out); free(again);
    }
}
static int compare_floats(const void *a, const void *b) { return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b); }
static void test_rows_by_definition(void **state) {
    (void)state;
    static const int64_t sizes[][2] = {{1, 1}, {7, 43}, {24, 50}, {3, 33}};
    for (int size = 0; size < 4; size++) for (int z = 4; z < 6; z++) {
        const int64_t rows = sizes[size][0], cols = sizes[size][1], n = rows * cols;
        float *x = values(n, 6, (uint64_t)size + 3), *out = floats(n), *sorted = floats(n);
        quantize_operand(out, x, rows, cols, 0, &QUANTIZERS[z].spec, &ADDRESS);
        if (z == 5) {                                                  // one per cent below, one above
            memcpy(sorted, x, (size_t)n * sizeof(float));
            qsort(sorted, (size_t)n, sizeof(float), compare_floats);
            const float low = sorted[n / 100], high = sorted[n - 1 - n / 100];
            float *rest = floats(n);
            clamp_residual(rest, x, n, 1);
            int64_t cut = 0;
            for (int64_t i = 0; i < n; i++) {
                const float kept = fminf(fmaxf(x[i], low), high);
                assert_true(rest[i] == bf16_round(x[i] - kept));
                cut += x[i] != kept;
                x[i] = kept;
            }
            assert_true(cut <= 2 * (n / 100));
            free(rest);
        }
        for (int64_t r = 0; r < rows; r++) {
            float amax = 0;
            for (int64_t i = 0; i < cols; i++) amax = fmaxf(amax, fabsf(x[r * cols + i]));
            for (int64_t i = 0; i < cols; i++) {
                const float want = amax > 0 ? grid_value(&E2M1_GRID, x[r * cols + i] * (6 / amax)) * (amax / 6) : 0;
                assert_true(out[r * cols + i] == want);
            }
        }
        free(x); free(out); free(sorted);
    }
}
// Every rank of a small tensor with equal values, zeros of both signs and both infinities of size.
static void test_value_of_rank(void **state) {
    (void)state;
    float x[300], sorted[300];
    for (int i = 0; i < 300; i++) x[i] = i % 7 == 0 ? -0.0f : ldexpf((float)(i * 37 % 50 - 25), i % 90 - 45);
    memcpy(sorted, x, sizeof x);
    qsort(sorted, 300, sizeof(float), compare_floats);
    for (int k = 0; k < 300; k++) assert_true(value_of_rank(x, 300, k) == sorted[k]);
}

// ---------------------------------------------------------------------------------------------------------------------
// All of them

static void test_along_rows_and_threads(void **state) {
    (void)state;
    static const int64_t outers[] = {1, 7, 8, 16, 33, 130};
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
#endif
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int o = 0; o < 6; o++) {
        const OperandSpec *spec = &QUANTIZERS[z].spec;
        const int64_t outer = outers[o], inner = o == 5 ? 512 : 96;
        float *x = values(outer * inner, 4, (uint64_t)o), *a = floats(outer * inner), *b = floats(outer * inner), *t = transpose(x, outer, inner);
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        const float fa = quantize_operand(a, x, outer, inner, 0, spec, &ADDRESS);
#ifdef _OPENMP
        omp_set_num_threads(3);
#endif
        const float fb = quantize_operand(b, t, inner, outer, 1, spec, &ADDRESS);
        float *back = transpose(b, inner, outer);
        assert_same_bits(QUANTIZERS[z].name, back, a, outer * inner);
        assert_true(fa == fb);
        quantize_operand(x, x, outer, inner, 0, spec, &ADDRESS);
        assert_same_bits("in place", x, a, outer * inner);
        free(x); free(a); free(b); free(t); free(back);
    }
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
}
static void test_edges(void **state) {
    (void)state;
    enum { R = 16, C = 128 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        float *x = floats(R * C), *out = floats(R * C);
        const OperandSpec *spec = &QUANTIZERS[z].spec;
        const float zero = quantize_operand(out, x, R, C, 0, spec, &ADDRESS);
        assert_true(isfinite(zero) && zero > 0);
        for (int i = 0; i < R * C; i++) assert_true(out[i] == 0);
        for (int i = 0; i < R * C; i++) x[i] = (float)(i % 100) * 1e-42f;  // subnormal
        assert_true(isfinite(quantize_operand(out, x, R, C, 0, spec, &ADDRESS)));
        for (int i = 0; i < R * C; i++) assert_true(out[i] == 0);
        for (int i = 0; i < R * C; i++) x[i] = i % 3 ? 1e30f : -1e30f;     // huge: finite, or not at all
        quantize_operand(out, x, R, C, 0, spec, &ADDRESS);
        for (int i = 0; i < R * C; i++) assert_true(isfinite(out[i]) || spec->rounding == ROUND_QUEST);
        for (int b = 0; b < 3; b++) for (int place = 0; place < 3; place++) {
            for (int i = 0; i < R * C; i++) x[i] = (float)(i % 13) - 6;
            x[place == 0 ? 0 : place == 1 ? 777 : R * C - 1] = bad[b];
            assert_true(isnan(quantize_operand(out, x, R, C, 0, spec, &ADDRESS)));
            for (int i = 0; i < R * C; i++) assert_true(isnan(out[i]));
        }
        free(x); free(out);
    }
}
typedef struct { int64_t rows, cols; OperandSpec spec; } Refusal;
static void act_quantize(const void *context) {
    const Refusal *r = (const Refusal *)context;
    float x[64 * 64], out[64 * 64];
    memset(x, 0, sizeof x);
    quantize_operand(out, x, r->rows, r->cols, 0, &r->spec, &ADDRESS);
}
static void test_refusals(void **state) {
    (void)state;
    Refusal r = {16, 48, MXFP4_QUEST};
    expect_fatal(act_quantize, &r, "16 x 48 along its columns|multiple of 32");
    r.cols = 64;
    r.spec.block = BLOCK_1X16;
    expect_fatal(act_quantize, &r, "no quantizer|the recipe's row");
    const OperandSpec square = NVFP4(ROUND_SR, BLOCK_16X16), rows = OPERAND(ROUND_SR, FORMAT_E2M1, BLOCK_ROW, 0, FROM_ORIGINAL);
    r.spec = square;
    expect_fatal(act_quantize, &r, "no quantizer|the recipe's row");
    r.spec = rows;
    expect_fatal(act_quantize, &r, "no quantizer|the recipe's row");
}

int main(void) {
    E2M1_GRID = e2m1_grid();
    E4M3_GRID = e4m3_grid();
    E5M2_GRID = e5m2_grid();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_golden), cmocka_unit_test(test_words_have_addresses), cmocka_unit_test(test_fp8_by_definition),
        cmocka_unit_test(test_rows_by_definition), cmocka_unit_test(test_value_of_rank), cmocka_unit_test(test_along_rows_and_threads),
        cmocka_unit_test(test_edges),
    };
    return cmocka_run_group_tests_name("quantizers of the rivals", tests, NULL, NULL);
}
