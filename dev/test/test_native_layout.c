// test_native_layout.c: packed operands, read as Blackwell's tensor cores read them, give the emulated product.
//
// The reader below is written from the documentation of cuBLAS alone (section "1D Block Scaling Factors Layout": tiles of 128 x 4
// scales, 512 bytes; a tile's byte 16*r + 4*g + c is the scale of row r + 32*g, column c; tiles lie row by row, columns first) and of the
// formats (E2M1: s eem, bias 1; UE4M3: eeee mmm, bias 7). It shares nothing with quantize.h: it walks the bytes in the order of
// memory and asks which row and column each belongs to, where quantize.h asks where a row and column lie.
#include "dev/test/expect.h"
#include "llmc/cpu/pack.h"

// ---------------------------------------------------------------------------------------------------------------------
// The reader

static double read_e2m1(unsigned code) {
    const unsigned exponent = code >> 1 & 3, mantissa = code & 1;
    const double magnitude = exponent == 0 ? 0.5 * mantissa : ldexp(1 + 0.5 * mantissa, (int)exponent - 1);
    return code & 8 ? -magnitude : magnitude;
}
static double read_ue4m3(unsigned code) {
    const unsigned exponent = code >> 3, mantissa = code & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);
}
// rows x inner values of an operand, tensor scale left out. Rows beyond `rows`, to the next multiple of 128, must be zero.
static double *native_read(const PackedTensor *p, int64_t rows, int64_t inner) {
    const int64_t padded = (rows + 127) / 128 * 128, columns = inner / 16, tiles_across = (columns + 3) / 4;
    double *scale = (double *)xcalloc((size_t)(padded * tiles_across * 4), sizeof(double)), *value = (double *)xcalloc((size_t)(rows * inner), sizeof(double));
    assert_int_equal(p->scale_bytes, padded * tiles_across * 4);
    assert_int_equal(p->code_bytes, padded * inner / 2);
    for (int64_t at = 0; at < p->scale_bytes; at++) {
        const int64_t tile = at / 512, byte = at % 512;
        const int64_t row = tile / tiles_across * 128 + byte / 16 + byte % 16 / 4 * 32, column = tile % tiles_across * 4 + byte % 4;
        assert_true(p->scales[at] < 0x7F);                                 // no sign, no NaN
        if (row >= rows || column >= columns) assert_int_equal(p->scales[at], 0);
        else scale[row * tiles_across * 4 + column] = read_ue4m3(p->scales[at]);
    }
    for (int64_t at = 0; at < p->code_bytes; at++) {
        const int64_t row = at / (inner / 2), first = at % (inner / 2) * 2;
        if (row >= rows) { assert_int_equal(p->codes[at], 0); continue; }
        for (int half = 0; half < 2; half++)
            value[row * inner + first + half] = read_e2m1(p->codes[at] >> 4 * half & 15u) * scale[row * tiles_across * 4 + (first + half) / 16];
    }
    free(scale);
    return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// The emulated operand

static float *normal_values(int64_t count, uint32_t stream) {
    float *x = (float *)xcalloc((size_t)count, sizeof *x);
    const RngStream s = rng_stream(2024, stream, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < count; i++) {
        const Philox4 w = rng_words4(s, (uint64_t)i);
        const double r = sqrt(-2 * log((double)rng_uniform(w.w[0]))) * cos(6.283185307179586 * w.w[1] * 0x1p-32);
        x[i] = bf16_round((float)(r * (w.w[2] % 300 == 0 ? 40 : 1)));
    }
    return x;
}
// One operand both ways: outer x inner values, tensor scales apart, which must be equal.
typedef struct { double *native, *emulated; double factor; } BothWays;
static BothWays operand_both_ways(const OperandSpec *spec, int gemm, int operand, int64_t outer, int64_t inner, uint32_t stream) {
    const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
    const int64_t rows = along_rows ? inner : outer, cols = along_rows ? outer : inner;
    const QuantizeAddress at = {7, 11, 2, 1, gemm, operand, 0, 0};
    const QuantizeRandom random = quantize_random(&at, spec);
    float *x = normal_values(rows * cols, stream), *decoded = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    BothWays b;
    b.factor = quantize_operand(decoded, x, rows, cols, along_rows, spec, &at);
    PackedTensor p = quantize_pack(x, rows, cols, along_rows, spec, &random);
    assert_true((double)p.st == b.factor);
    b.native = native_read(&p, outer, inner);
    b.emulated = (double *)xcalloc((size_t)(outer * inner), sizeof(double));
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++) b.emulated[o * inner + i] = along_rows ? decoded[i * cols + o] : decoded[o * cols + i];
    packed_free(&p);
    free(x); free(decoded);
    return b;
}
static double product_at(const double *a, const double *b, int64_t inner) {
    double sum = 0;
    for (int64_t i = 0; i < inner; i++) sum += a[i] * b[i];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Every GEMM of every recipe whose two operands are NVFP4, on shapes whose rows are no multiples of 128 (or of 16) and whose scale
// columns are no multiples of 4. Equal operands summed in one order: the products are equal to the last bit.
static void test_packed_operands_give_the_emulated_product(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{200, 72, 128}, {128, 128, 256}, {1, 17, 384}, {131, 257, 128}, {33, 40, 80}, {5, 300, 16}};
    int products = 0;
    for (int r = 0; r < RECIPE_COUNT; r++) for (int gemm = 0; gemm < 3; gemm++) {
        const GemmSpec *g = &RECIPES[r].gemm[gemm];
        if (g->a.format != FORMAT_NVFP4 || g->b.format != FORMAT_NVFP4) continue;
        for (int s = 0; s < (int)(sizeof shapes / sizeof shapes[0]); s++) {
            const int64_t m = shapes[s][0], n = shapes[s][1], inner = shapes[s][2];
            if (g->a.rotation && inner % g->a.rotation) continue;
            BothWays a = operand_both_ways(&g->a, gemm, OPERAND_A, m, inner, (uint32_t)(2 * s)), b = operand_both_ways(&g->b, gemm, OPERAND_B, n, inner, (uint32_t)(2 * s + 1));
            for (int64_t i = 0; i < m * inner; i++) assert_true(a.native[i] == a.emulated[i]);
            for (int64_t i = 0; i < n * inner; i++) assert_true(b.native[i] == b.emulated[i]);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++) {
                    const double native = product_at(a.native + i * inner, b.native + j * inner, inner), emulated = product_at(a.emulated + i * inner, b.emulated + j * inner, inner);
                    assert_true(native == emulated);
                }
            free(a.native); free(a.emulated); free(b.native); free(b.emulated);
            products++;
        }
    }
    assert_true(products > 50);
}
// The reader reads: a byte moved within the tile, or a code changed, changes what it sees.
static void test_the_reader_notices_misplaced_bytes(void **state) {
    (void)state;
    const OperandSpec *spec = &recipe_find("quartet2")->gemm[GEMM_FORWARD].a;
    const QuantizeAddress at = {7, 11, 2, 1, GEMM_FORWARD, OPERAND_A, 0, 0};
    const QuantizeRandom random = quantize_random(&at, spec);
    float *x = normal_values(160 * 128, 5);
    PackedTensor p = quantize_pack(x, 160, 128, 0, spec, &random);
    double *right = native_read(&p, 160, 128);
    const int64_t distances[] = {1, 4, 16, 512};                           // next column, row + 32, row + 1, column + 4
    for (int k = 0; k < 4; k++) {
        uint8_t *one = p.scales, *other = p.scales + distances[k];
        while (*one == *other) { one++; other++; }
        const uint8_t was = *one;
        *one = *other; *other = was;
        double *wrong = native_read(&p, 160, 128);
        assert_true(memcmp(right, wrong, 160 * 128 * sizeof(double)) != 0);
        free(wrong);
        *other = *one; *one = was;
    }
    p.codes[777] ^= 0x10;
    double *wrong = native_read(&p, 160, 128);
    assert_true(memcmp(right, wrong, 160 * 128 * sizeof(double)) != 0);
    free(wrong); free(right); free(x);
    packed_free(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_packed_operands_give_the_emulated_product), cmocka_unit_test(test_the_reader_notices_misplaced_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
