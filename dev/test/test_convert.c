// test_convert.c: e2m1_encode() and e4m3_encode() against the hardware's conversions as the CUDA toolkit's own host functions give them
// (cuda_fp4.h, cuda_fp8.h: cvt.rn.satfinite.e2m1x2.f32 and .e4m3x2.f32): where they differ, and that what cuda/convert.cuh mends is all there is.
//
//   build/test_convert            every float near a place where a code changes, and a sample of the others
//   build/test_convert --all      every float there is (half a minute on two cores)
//
// Near: 64 units in the last place to each side of every midpoint and value of the grid, of zero, of the largest, of infinity and of both ends of the
// NaNs. Between those both functions are constant if each is monotonic, which the sample (2^22 floats, evenly spaced in their bits) looks at and
// --all proves. Where the toolkit's headers are not found, a second definition written here stands in for them: the nearest value
// in a table of float64, which is also what the toolkit is held against. Results must be equal: no tolerance.
#include "dev/test/expect.h"
#include "llmc/formats.h"

#if defined(__has_include)
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#define HAVE_TOOLKIT 1
#endif
#endif

static int all_floats;

// ---------------------------------------------------------------------------------------------------------------------
// Nearest value of a table, by float64 distances (exact: a float32 less a grid value has few enough bits, and ties are exactly equal).
// A tie goes to the even code, what lies beyond the last value to the last. value[c] is the magnitude of code c.

static double e2m1_value[8], e4m3_value[127];
static int tables_make(void **state) {
    (void)state;
    for (int c = 0; c < 8; c++) e2m1_value[c] = c < 2 ? 0.5 * c : ldexp(2 + (c & 1), (c >> 1) - 2);
    for (int c = 0; c < 127; c++) e4m3_value[c] = c < 8 ? ldexp(c, -9) : ldexp(8 + (c & 7), (c >> 3) - 10);
    return 0;
}
static unsigned table_nearest(const double *value, int count, double a) {
    int low = 0, high = count - 1;
    if (a >= value[high]) return (unsigned)high;
    while (high - low > 1) { const int middle = (low + high) / 2; if (value[middle] <= a) low = middle; else high = middle; }
    const double down = a - value[low], up = value[high] - a;
    return (unsigned)(down < up || (down == up && low % 2 == 0) ? low : high);
}

// What the instructions give, by the toolkit or by the table; NaNs as the toolkit's host functions treat them.
static int is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
static unsigned hardware_e2m1(uint32_t bits) {
#ifdef HAVE_TOOLKIT
    return __nv_cvt_float_to_fp4(f32_from_bits(bits), __NV_E2M1, cudaRoundNearest);
#else
    return is_nan(bits) ? 7u : table_nearest(e2m1_value, 8, fabs((double)f32_from_bits(bits))) | (bits >> 28 & 8u);
#endif
}
static unsigned hardware_e4m3(uint32_t bits) {
#ifdef HAVE_TOOLKIT
    return __nv_cvt_float_to_fp8(f32_from_bits(bits), __NV_SATFINITE, __NV_E4M3);
#else
    return (is_nan(bits) ? 0x7Fu : table_nearest(e4m3_value, 127, fabs((double)f32_from_bits(bits)))) | (bits >> 24 & 0x80u);
#endif
}
// What cuda/convert.cuh makes of them.
static unsigned mended_e2m1(uint32_t bits) { return (hardware_e2m1(bits) & 7u) | (bits >> 28 & 8u); }
static unsigned mended_e4m3(uint32_t bits) { return hardware_e4m3(f32_bits(f32_abs_min(f32_from_bits(bits), E4M3_MAX))); }

// ---------------------------------------------------------------------------------------------------------------------
// A float is wrong if: mended, the hardware's code is not ours; or, not mended, they differ where convert.cuh says they do not (E2M1: any number;
// E4M3: any number that is not negative); or, where asked, the table says otherwise.

static int wrong_e2m1(uint32_t bits, int table) {
    const unsigned ours = e2m1_encode(f32_from_bits(bits));
    if (mended_e2m1(bits) != ours || (!is_nan(bits) && hardware_e2m1(bits) != ours)) return 1;
    return table && !is_nan(bits) && (table_nearest(e2m1_value, 8, fabs((double)f32_from_bits(bits))) | (bits >> 28 & 8u)) != ours;
}
static int wrong_e4m3(uint32_t bits, int table) {
    const unsigned ours = e4m3_encode(f32_from_bits(bits));
    if (mended_e4m3(bits) != ours || (bits <= 0x7F800000u && hardware_e4m3(bits) != ours)) return 1;
    return table && !is_nan(bits) && table_nearest(e4m3_value, 127, fabs((double)f32_from_bits(bits))) != ours;
}
typedef int (*Wrong)(uint32_t bits, int table);

// Looks at every float, its bits first + step*i; stops at nothing, reports the first found wrong.
static void look_at(Wrong wrong, int64_t first, int64_t count, int64_t step, int table) {
    int64_t bad = 0, where = INT64_MAX;
#pragma omp parallel for schedule(static) reduction(+ : bad) reduction(min : where)
    for (int64_t i = 0; i < count; i++) {
        const int64_t bits = first + step * i;
        if (bits < 0 || bits > UINT32_MAX || !wrong((uint32_t)bits, table)) continue;
        bad++;
        if (bits < where) where = bits;
    }
    if (bad) fail_msg("%lld floats are wrong, the first has the bits 0x%08llX", (long long)bad, (long long)where);
}
static void look_near(Wrong wrong, double a) {
    const int64_t bits = f32_bits((float)a);
    look_at(wrong, bits - 64, 129, 1, 1);
    look_at(wrong, bits + 0x80000000ll - 64, 129, 1, 1);
}
static void look_everywhere(Wrong wrong, const double *value, int count) {
    for (int c = 0; c < count; c++) {
        look_near(wrong, value[c]);
        if (c) look_near(wrong, (value[c] + value[c - 1]) / 2);
    }
    look_near(wrong, value[count - 1] + (value[count - 1] - value[count - 2]) / 2);
    look_near(wrong, INFINITY);
    look_at(wrong, 0x7FFFFFFFll - 64, 129, 1, 1);
    look_at(wrong, 0xFFFFFFFFll - 64, 65, 1, 1);
    look_at(wrong, 0, 1 << 22, 1 << 10, 1);
    if (all_floats) look_at(wrong, 0, 1ll << 32, 1, 0);
}
static void test_e2m1_is_the_hardwares(void **state) { (void)state; look_everywhere(wrong_e2m1, e2m1_value, 8); }
static void test_e4m3_is_the_hardwares(void **state) { (void)state; look_everywhere(wrong_e4m3, e4m3_value, 127); }

// The differences that convert.cuh mends are there: without mending these would be wrong.
static void test_the_differences_are_as_stated(void **state) {
    (void)state;
    const uint32_t nan = 0x7FC00000u, minus_nan = 0xFFC00000u;
    assert_int_equal(hardware_e2m1(nan), 7);
    assert_int_equal(hardware_e2m1(minus_nan), 7);
    assert_int_equal(e2m1_encode(f32_from_bits(minus_nan)), 15);
    assert_int_equal(hardware_e4m3(nan) & 0x7Fu, 0x7F);
    assert_int_equal(e4m3_encode(f32_from_bits(nan)), 0x7E);
    assert_int_equal(hardware_e4m3(f32_bits(-1.0f)), 0x80 | e4m3_encode(1.0f));
    assert_int_equal(hardware_e2m1(f32_bits(-0.0f)), 8);
    assert_int_equal(hardware_e2m1(f32_bits(-0.1f)), e2m1_encode(-0.1f));
}
// The look can fail: ties away from zero, the rounding of the official emulation, is found wrong.
static unsigned ties_away(float v) {
    const double a = fabs((double)v);
    unsigned c = 0;
    while (c < 7 && a >= (e2m1_value[c] + e2m1_value[c + 1]) / 2) c++;
    return c | (f32_bits(v) >> 28 & 8u);
}
static void test_ties_away_would_be_noticed(void **state) {
    (void)state;
    int differ = 0;
    for (int c = 1; c < 8; c++) {
        const float tie = (float)((e2m1_value[c] + e2m1_value[c - 1]) / 2);
        differ += ties_away(tie) != hardware_e2m1(f32_bits(tie));
        for (int side = -1; side <= 1; side += 2)
            assert_int_equal(ties_away(f32_from_bits(f32_bits(tie) + (uint32_t)side)), hardware_e2m1(f32_bits(tie) + (uint32_t)side));
    }
    assert_int_equal(differ, 4);  // 0.25, 1.25, 2.5 and 5: their even neighbour is the lower
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_e2m1_is_the_hardwares), cmocka_unit_test(test_e4m3_is_the_hardwares),
                                       cmocka_unit_test(test_the_differences_are_as_stated), cmocka_unit_test(test_ties_away_would_be_noticed)};
    all_floats = argc == 2 && strcmp(argv[1], "--all") == 0;
    if (argc > 2 || (argc == 2 && !all_floats)) fatal_usage("test_convert takes --all or nothing");
#ifdef HAVE_TOOLKIT
    printf("against the CUDA toolkit's conversions, %s\n", all_floats ? "all 2^32 floats" : "boundaries and a sample (--all: all 2^32 floats)");
#else
    printf("the CUDA toolkit's headers were not found: against a second definition\n");
#endif
    return cmocka_run_group_tests(tests, tables_make, NULL);
}
