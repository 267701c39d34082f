// test_formats.c: every rounding of formats.h against a float64 definition that shares no code with it: a search in the table of
// the format's values. Exact: no tolerance anywhere.
//
// Inputs: every BF16 pattern; every float32 within 4096 units in the last place of every tie and every value of the grid, both
// signs; and every 4099th float32 pattern (a prime, so that all exponents meet all residues). Compiled as C++ with the CUDA
// toolkit's headers on the path, the toolkit's own host conversions are compared too.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#include <cmocka.h>
#ifdef __cplusplus
}
#endif

#include "golden.h"
#include "grid.h"
#include "llmc/formats.h"
#include "llmc/rng.h"

#if defined(__cplusplus) && __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#define HAVE_TOOLKIT 1
#else
#define HAVE_TOOLKIT 0
#endif

#define NEAR 4096       // units in the last place around every tie and value
#define STRIDE 4099u    // of the sweep over all float32 patterns

typedef void (*Check)(float v);

// Calls check on the inputs named above.
static void each_input(const Grid *g, Check check) {
    for (uint32_t b = 0; b < 65536; b++) check(bf16_decode((uint16_t)b));
    for (uint64_t b = 0; b < (1ull << 32); b += STRIDE) check(f32_from_bits((uint32_t)b));
    for (int k = 0; k < g->count; k++)
        for (int tie = 0; tie < 2; tie++) {
            if (tie && k + 1 == g->count) continue;
            const uint32_t centre = f32_bits((float)(tie ? (g->value[k] + g->value[k + 1]) / 2 : g->value[k]));
            const uint32_t first = centre > NEAR ? centre - NEAR : 0;
            for (uint32_t b = first; b <= centre + NEAR; b++) { check(f32_from_bits(b)); check(f32_from_bits(b | 0x80000000u)); }
        }
}
#define EXPECT_CODE(what, v, got, want) \
    do { if ((got) != (want)) fail_msg("%s of %.9g (bits %08x): code %u, expected %u", what, (double)(v), f32_bits(v), (unsigned)(got), (unsigned)(want)); } while (0)

static Grid E2M1_GRID, E4M3_GRID, E5M2_GRID;

static void check_e2m1(float v) {
    const uint32_t sign = f32_bits(v) >> 31 ? 8u : 0u, want = (uint32_t)grid_nearest(&E2M1_GRID, fabs((double)v)) | sign;
    EXPECT_CODE("e2m1_encode", v, e2m1_encode(v), want);
    const float q = e2m1_round(v), expected = (float)(sign ? -E2M1_GRID.value[want & 7] : E2M1_GRID.value[want & 7]);
    if (f32_bits(q) != f32_bits(expected)) fail_msg("e2m1_round of %.9g (bits %08x): %g, expected %g", (double)v, f32_bits(v), (double)q, (double)expected);
}
static void test_e2m1_nearest(void **state) {
    (void)state;
    each_input(&E2M1_GRID, check_e2m1);
}
static void check_e4m3(float v) { EXPECT_CODE("e4m3_encode", v, e4m3_encode(v), (uint32_t)grid_nearest(&E4M3_GRID, fabs((double)v))); }
static void test_e4m3_nearest(void **state) {
    (void)state;
    each_input(&E4M3_GRID, check_e4m3);
}
// FP8 tensors: code and rounded value of both formats.
static void check_fp8(const char *what, const Grid *g, float v, uint32_t code, float rounded) {
    const uint32_t sign = f32_bits(v) >> 31, want = (uint32_t)grid_nearest(g, fabs((double)v));
    EXPECT_CODE(what, v, code, want | sign << 7);
    const float expected = (float)(sign ? -g->value[want] : g->value[want]);
    if (f32_bits(rounded) != f32_bits(expected)) fail_msg("%s of %.9g (bits %08x): rounds to %g, expected %g", what, (double)v, f32_bits(v), (double)rounded, (double)expected);
}
static void check_e4m3_signed(float v) { check_fp8("signed E4M3", &E4M3_GRID, v, e4m3_encode_signed(v), e4m3_round(v)); }
static void check_e5m2(float v) { check_fp8("E5M2", &E5M2_GRID, v, e5m2_encode(v), e5m2_round(v)); }
static void test_fp8_nearest(void **state) {
    (void)state;
    each_input(&E4M3_GRID, check_e4m3_signed);
    each_input(&E5M2_GRID, check_e5m2);
    for (uint32_t c = 0; c < 256; c++) {
        if ((c & 127) < 127) {
            assert_true((double)e4m3_decode_signed(c) == (c & 128 ? -1 : 1) * E4M3_GRID.value[c & 127]);
            assert_int_equal(e4m3_encode_signed(e4m3_decode_signed(c)), c);
        }
        if ((c & 127) < 124) {
            assert_true((double)e5m2_decode(c) == (c & 128 ? -1 : 1) * E5M2_GRID.value[c & 127]);
            assert_int_equal(e5m2_encode(e5m2_decode(c)), c);
        }
    }
}
static void test_decode(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 16; c++) {
        const float want = (float)(c & 8 ? -E2M1_GRID.value[c & 7] : E2M1_GRID.value[c & 7]);
        assert_int_equal(f32_bits(e2m1_decode(c)), f32_bits(want));
        assert_int_equal(e2m1_encode(e2m1_decode(c)), c);
    }
    for (uint32_t c = 0; c < 127; c++) {
        assert_true((double)e4m3_decode(c) == E4M3_GRID.value[c]);
        assert_int_equal(e4m3_encode(e4m3_decode(c)), c);
    }
}
// Codes times block scales must be exact in BF16: the emulated GEMM rests on it.
static void test_products_are_exact_in_bf16(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 8; c++)
        for (uint32_t s = 0; s < 127; s++) {
            const double product = E2M1_GRID.value[c] * E4M3_GRID.value[s];
            assert_true((double)bf16_round(e2m1_decode(c) * e4m3_decode(s)) == product);
        }
}

// Stochastic rounding: the words just below and at the threshold, the two ends, and one random word.
static uint32_t random_word_of_bits(uint32_t bits) { return rng_word(rng_stream(5, 0, 0), bits); }
static void check_stochastic(const Grid *g, float v, int is_e2m1) {
    const double a = fabs((double)v);
    double threshold = 0;
    if (a < g->value[g->count - 1]) {
        const int k = grid_below(g, a);
        threshold = ceil((a - g->value[k]) / (g->value[k + 1] - g->value[k]) * 0x1p32);
    }
    const uint32_t t = (uint32_t)(uint64_t)threshold;
    const uint32_t words[5] = {0, t - 1, t, 0xFFFFFFFFu, random_word_of_bits(f32_bits(v))};
    for (int i = 0; i < 5; i++) {
        uint32_t want = (uint32_t)grid_stochastic(g, a, words[i]);
        if (is_e2m1) want |= f32_bits(v) >> 31 ? 8u : 0u;
        const uint32_t got = is_e2m1 ? e2m1_encode_sr(v, words[i]) : e4m3_encode_sr(v, words[i]);
        if (got != want) fail_msg("stochastic %s of %.9g (bits %08x), word %08x: code %u, expected %u", is_e2m1 ? "E2M1" : "E4M3", (double)v, f32_bits(v), words[i], got, want);
    }
}
static void check_e2m1_sr(float v) { check_stochastic(&E2M1_GRID, v, 1); }
static void check_e4m3_sr(float v) { check_stochastic(&E4M3_GRID, v, 0); }
static void test_e2m1_stochastic(void **state) {
    (void)state;
    each_input(&E2M1_GRID, check_e2m1_sr);
}
static void test_e4m3_stochastic(void **state) {
    (void)state;
    each_input(&E4M3_GRID, check_e4m3_sr);
}
static void test_ceil(void **state) {
    (void)state;
    for (uint64_t b = 0; b < f32_bits(0x1p32f); b += 1021) {
        const float a = f32_from_bits((uint32_t)b);
        assert_true((double)f32_to_u32_ceil(a) == ceil((double)a));
    }
}

// BF16, nearest: the float64 distance to both neighbours, ties to the even one.
static void check_bf16(float v) {
    const uint32_t u = f32_bits(v), low = u & 0xFFFF0000u;
    const uint16_t got = bf16_encode(v);
    if (v != v) { if (bf16_decode(got) == bf16_decode(got)) fail_msg("bf16 of a NaN (bits %08x) is not a NaN", u); return; }
    if (u == low) { assert_int_equal(got, low >> 16); return; }
    // The neighbour above the largest finite value is where 2^128 would be.
    const double below = fabs((double)f32_from_bits(low));
    const double above = (low & 0x7FFF0000u) == 0x7F7F0000u ? 0x1p128 : fabs((double)f32_from_bits(low + 0x10000u));
    const double a = fabs((double)v), down = a - below, up = above - a;
    const int odd = low >> 16 & 1;
    EXPECT_CODE("bf16_encode", v, got, (low >> 16) + (up < down || (up == down && odd) ? 1u : 0u));
}
static void test_bf16_nearest(void **state) {
    (void)state;
    for (uint64_t b = 0; b < (1ull << 32); b += STRIDE) check_bf16(f32_from_bits((uint32_t)b));
    for (uint32_t b = 0; b < 65536; b++)
        for (int near = -2; near <= 2; near++) {
            check_bf16(f32_from_bits((b << 16 | 0x8000u) + (uint32_t)near));
            check_bf16(f32_from_bits((b << 16) + (uint32_t)near));
        }
}
// Over all 65536 words a value goes up exactly as often as its position between its neighbours asks: no bias at all.
static void test_bf16_stochastic(void **state) {
    (void)state;
    static const float values[] = {1.0f, 1.00001f, -3.1415927f, 1e-20f, 3e38f, 1e-40f, -65504.1f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const uint32_t u = f32_bits(values[i]);
        uint32_t ups = 0;
        for (uint32_t word = 0; word < 65536; word++) {
            const uint32_t got = bf16_encode_sr(values[i], word | 0xABCD0000u);
            assert_in_range(got - (u >> 16), 0, 1);
            ups += got - (u >> 16);
        }
        assert_int_equal(ups, u & 0xFFFFu);
    }
    assert_int_equal(bf16_encode_sr(INFINITY, 0xFFFF), 0x7F80);
    assert_int_equal(bf16_encode_sr(-INFINITY, 0xFFFF), 0xFF80);
    for (uint32_t word = 0; word < 65536; word += 255) {
        const float q = bf16_decode(bf16_encode_sr(f32_from_bits(0x7F800001u), word));
        assert_true(q != q);
    }
}
static void test_e8m0(void **state) {
    (void)state;
    for (int byte = 0; byte < 255; byte++) {
        assert_true((double)e8m0_decode((uint32_t)byte) == ldexp(1, byte - 127));
        assert_int_equal(e8m0_from_exponent(byte - 127), byte);
    }
    for (uint64_t b = 0x00800000u; b < 0x7F800000u; b += STRIDE) {
        int exponent;
        frexp((double)f32_from_bits((uint32_t)b), &exponent);
        assert_int_equal(f32_floor_log2(f32_from_bits((uint32_t)b)), exponent - 1);
    }
}

static void test_golden_formats(void **state) {
    (void)state;
    cJSON *j = golden_open("formats");
    int64_t n, m;
    uint32_t *in = golden_hex(j, "e2m1_in", 8, &n), *codes = golden_hex(j, "e2m1_codes", 1, &m);
    assert_true(n == m && n > 400);
    for (int64_t i = 0; i < n; i++) EXPECT_CODE("golden e2m1", f32_from_bits(in[i]), e2m1_encode(f32_from_bits(in[i])), codes[i]);
    free(in); free(codes);
    in = golden_hex(j, "e4m3_in", 8, &n); codes = golden_hex(j, "e4m3_codes", 2, &m);
    assert_true(n == m && n > 600);
    for (int64_t i = 0; i < n; i++) EXPECT_CODE("golden e4m3", f32_from_bits(in[i]), e4m3_encode(f32_from_bits(in[i])), codes[i]);
    free(in); free(codes);
    in = golden_hex(j, "e4m3_values", 8, &n);
    assert_int_equal(n, 127);
    for (uint32_t i = 0; i < 127; i++) assert_int_equal(f32_bits(e4m3_decode(i)), in[i]);
    free(in);
    cJSON_Delete(j);
}

#if HAVE_TOOLKIT
static void check_toolkit(float v) {
    if (v != v) return;  // the toolkit keeps a NaN, block scales cannot
    EXPECT_CODE("toolkit E2M1", v, e2m1_encode(v), (uint32_t)__nv_cvt_float_to_fp4(v, __NV_E2M1, cudaRoundNearest) & 15u);
    const float a = fabsf(v);
    EXPECT_CODE("toolkit E5M2", v, e5m2_encode(v), (uint32_t)__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E5M2));
    EXPECT_CODE("toolkit E4M3", a, e4m3_encode(a), (uint32_t)__nv_cvt_float_to_fp8(a, __NV_SATFINITE, __NV_E4M3));
}
static void test_toolkit_agrees(void **state) {
    (void)state;
    each_input(&E2M1_GRID, check_toolkit);
    each_input(&E4M3_GRID, check_toolkit);
}
#endif

int main(void) {
    E2M1_GRID = e2m1_grid();
    E4M3_GRID = e4m3_grid();
    E5M2_GRID = e5m2_grid();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e2m1_nearest), cmocka_unit_test(test_e4m3_nearest), cmocka_unit_test(test_fp8_nearest), cmocka_unit_test(test_decode),
        cmocka_unit_test(test_products_are_exact_in_bf16), cmocka_unit_test(test_e2m1_stochastic),
        cmocka_unit_test(test_e4m3_stochastic), cmocka_unit_test(test_ceil), cmocka_unit_test(test_bf16_nearest),
        cmocka_unit_test(test_bf16_stochastic), cmocka_unit_test(test_e8m0), cmocka_unit_test(test_golden_formats),
#if HAVE_TOOLKIT
        cmocka_unit_test(test_toolkit_agrees),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
