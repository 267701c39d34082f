// test_rng.c: Philox against the known-answer vectors of Random123; that no two addresses share a stream; that words are
// evenly distributed, within a stream and from one address to the next.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "llmc/common.h"
#include "llmc/quantize.h"

// Random123, tests/kat_vectors, philox4x32 10: zeros, ones, and the digits of pi.
static void test_known_answers(void **state) {
    (void)state;
    static const uint32_t kat[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int k = 0; k < 3; k++) {
        const uint32_t *c = kat[k];
        Philox4 p = philox4x32(c[0], c[1], c[2], c[3], c[4], c[5]);
        for (int i = 0; i < 4; i++) assert_int_equal(p.w[i], c[6 + i]);
        // The same through a stream: counter = (index low, index high, step, address), key = (seed low, seed high).
        RngStream s = rng_stream((uint64_t)c[5] << 32 | c[4], c[2], c[3]);
        const uint64_t index = (uint64_t)c[1] << 32 | c[0];
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(rng_words4(s, index).w[i], c[6 + i]);
            if (index < 1ull << 62) assert_int_equal(rng_word(s, index * 4 + i), c[6 + i]);
        }
    }
}

// Every field of an address can be read back, at its ends and in the middle: then two different addresses differ.
static void test_address_fields(void **state) {
    (void)state;
    static const int layers[] = {0, 1, 511, 1023}, ranks[] = {0, 1, 2048, 4095};
    for (int purpose = 0; purpose < 16; purpose++)
        for (int l = 0; l < 4; l++) for (int linear = 0; linear < 4; linear++) for (int gemm = 0; gemm < 4; gemm++)
            for (int operand = 0; operand < 4; operand++) for (int r = 0; r < 4; r++) {
                const uint32_t a = rng_address(purpose, layers[l], linear, gemm, operand, ranks[r]);
                assert_int_equal(a / 0x10000000u, purpose);
                assert_int_equal(a / 0x40000u % 1024, layers[l]);
                assert_int_equal(a / 0x10000u % 4, linear);
                assert_int_equal(a / 0x4000u % 4, gemm);
                assert_int_equal(a / 0x1000u % 4, operand);
                assert_int_equal(a % 4096, ranks[r]);
            }
}
static int compare_words(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}
// First 64 bits of every stream of a model: 7 purposes, 12 layers, 4 linears, 3 GEMMs, 2 operands, 4 ranks, 4 steps, 2 seeds.
// 64512 random 64-bit words are all different but for a chance of 64512^2/2^65 = 1e-10.
static void test_streams_differ(void **state) {
    (void)state;
    const int count = 7 * 12 * 4 * 3 * 2 * 4 * 4 * 2;
    uint64_t *first = (uint64_t *)xcalloc((size_t)count, sizeof(uint64_t));
    int n = 0;
    for (int purpose = 1; purpose <= 7; purpose++) for (int layer = 0; layer < 12; layer++) for (int linear = 0; linear < 4; linear++)
        for (int gemm = 0; gemm < 3; gemm++) for (int operand = 0; operand < 2; operand++) for (int rank = 0; rank < 4; rank++)
            for (uint32_t step = 0; step < 4; step++) for (uint64_t seed = 1; seed <= 2; seed++) {
                Philox4 p = rng_words4(rng_stream(seed, step, rng_address(purpose, layer, linear, gemm, operand, rank)), 0);
                first[n++] = (uint64_t)p.w[1] << 32 | p.w[0];
            }
    assert_int_equal(n, count);
    qsort(first, (size_t)n, sizeof first[0], compare_words);
    for (int i = 1; i < n; i++) assert_true(first[i] != first[i - 1]);
    free(first);
}
// Word indices of an operand's blocks are 0, 1, 2 ... without a gap or a repeat, over micro-batches, rows and blocks.
static void test_block_words_do_not_repeat(void **state) {
    (void)state;
    uint64_t next = 0;
    for (int64_t micro = 0; micro < 3; micro++) for (int64_t row = 0; row < 33; row++) for (int64_t block = 0; block < 8; block++)
        assert_true(block_word_index(micro, 33, 8, row, block) == next++);
    // 64-bit: 4096 micro-batches of a million rows of 1024 blocks.
    assert_true(block_word_index(4095, 1 << 20, 1024, (1 << 20) - 1, 1023) == (1ull << 42) - 1);
}

// Chi-square of `bins` equally likely bins has mean bins-1 and variance 2(bins-1); six standard deviations either way (for 255
// and more degrees of freedom it is close to normal: a chance below 1e-8).
static void assert_even(const uint32_t *histogram, int bins, double total) {
    double chi2 = 0;
    const double expected = total / bins, freedom = bins - 1;
    for (int i = 0; i < bins; i++) chi2 += (histogram[i] - expected) * (histogram[i] - expected) / expected;
    if (fabs(chi2 - freedom) > 6 * sqrt(2 * freedom)) fail_msg("chi-square %g with %g degrees of freedom", chi2, freedom);
}
// How words walk from one to the next: along a stream, or across one field of the address.
enum Walk { ALONG_INDEX, ACROSS_STEPS, ACROSS_LAYERS, ACROSS_RANKS, ACROSS_SEEDS, WALKS };
static uint32_t walk_word(int walk, uint32_t i) {
    const uint32_t layer = walk == ACROSS_LAYERS ? i % 1024 : 0, rank = walk == ACROSS_RANKS ? i % 4096 : 0;
    const uint32_t step = walk == ACROSS_STEPS ? i : walk == ACROSS_LAYERS ? i / 1024 : walk == ACROSS_RANKS ? i / 4096 : 0;
    return rng_word(rng_stream(walk == ACROSS_SEEDS ? i : 42, step, rng_address(RNG_SCALE, (int)layer, 0, 1, 0, (int)rank)), walk == ALONG_INDEX ? i : 0);
}
static void test_equidistribution(void **state) {
    (void)state;
    const uint32_t count = 1 << 18;
    for (int walk = 0; walk < WALKS; walk++) {
        uint32_t bytes[4][256], *pairs = (uint32_t *)xcalloc(4096, sizeof(uint32_t));
        memset(bytes, 0, sizeof bytes);
        uint32_t last = walk_word(walk, count);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t w = walk_word(walk, i);
            for (int b = 0; b < 4; b++) bytes[b][w >> 8 * b & 255]++;
            pairs[(last >> 26) << 6 | w >> 26]++;  // the top six bits of neighbours
            last = w;
        }
        for (int b = 0; b < 4; b++) assert_even(bytes[b], 256, count);
        assert_even(pairs, 4096, count);
        free(pairs);
    }
}
// Neighbouring words share half their bits: the number of equal bits in n words is binomial(32 n, 1/2).
static void test_neighbours_are_independent(void **state) {
    (void)state;
    const int n = 1 << 16;
    for (int walk = 0; walk < WALKS; walk++) {
        double equal = 0;
        for (int i = 0; i < n; i++) equal += 32 - __builtin_popcount(walk_word(walk, (uint32_t)i) ^ walk_word(walk, (uint32_t)i + 1));
        assert_true(fabs(equal - 16.0 * n) < 6 * sqrt(32.0 * n / 4));
    }
}
static void test_uniform(void **state) {
    (void)state;
    assert_true(rng_uniform(0) == 0x1p-24f);
    assert_true(rng_uniform(0xFFFFFFFFu) == 1.0f);
    double sum = 0, squares = 0;
    const int n = 1 << 18;
    for (int i = 0; i < n; i++) {
        const double u = rng_uniform(rng_word(rng_stream(3, 0, 0), (uint64_t)i));
        assert_true(u > 0 && u <= 1);
        sum += u; squares += u * u;
    }
    assert_true(fabs(sum / n - 0.5) < 6 * sqrt(1.0 / 12 / n));           // variance of u: 1/12
    assert_true(fabs(squares / n - 1.0 / 3) < 6 * sqrt(4.0 / 45 / n));   // variance of u^2: 1/5 - 1/9
}

// Signs: a position of a run is minus half the time, over steps, layers, linears and GEMMs; no two of them share their signs.
static void test_rotation_bits(void **state) {
    (void)state;
    enum { STEPS = 64, LAYERS = 8, DRAWS = STEPS * LAYERS * 4 * 3 };
    static uint64_t seen[DRAWS];
    int minus[128] = {0}, n = 0;
    for (uint32_t step = 0; step < STEPS; step++) for (int layer = 0; layer < LAYERS; layer++)
        for (int linear = 0; linear < 4; linear++) for (int gemm = 0; gemm < 3; gemm++) {
            uint32_t bits[4];
            rotation_bits(7, step, layer, linear, gemm, bits);
            seen[n++] = (uint64_t)bits[1] << 32 | bits[0];
            for (int i = 0; i < 128; i++) minus[i] += rotation_sign(bits, i) == 0x80000000u;
            for (int i = 0; i < 128; i++) assert_true(rotation_sign(bits, i) == 0 || rotation_sign(bits, i) == 0x80000000u);
        }
    for (int i = 0; i < 128; i++) assert_true(fabs(minus[i] - DRAWS / 2.0) < 6 * sqrt(DRAWS / 4.0));
    qsort(seen, DRAWS, sizeof seen[0], compare_words);
    for (int i = 1; i < DRAWS; i++) assert_true(seen[i] != seen[i - 1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers), cmocka_unit_test(test_address_fields), cmocka_unit_test(test_streams_differ),
        cmocka_unit_test(test_block_words_do_not_repeat), cmocka_unit_test(test_equidistribution),
        cmocka_unit_test(test_neighbours_are_independent), cmocka_unit_test(test_uniform), cmocka_unit_test(test_rotation_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
