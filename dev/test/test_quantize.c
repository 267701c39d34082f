// test_quantize.c: the quantizers bit for bit: against the golden vectors (numpy), against a plain scalar reference in this file,
// along columns and along rows, from any number of threads; packing; the edge cases of the numerics; refusal of bad shapes.
// Everything here is exact: no tolerance, except where a comment derives one. Statistics are in test_unbiased.c.
#include "dev/test/expect.h"
#include "block_reference.h"
#include "golden.h"
#include "llmc/cpu/pack.h"
#ifdef _OPENMP
#include <omp.h>
#endif


typedef struct { const char *name; OperandSpec spec; } Quantizer;
static const Quantizer QUANTIZERS[] = {
    {"rtn_1x16", OPERAND(ROUND_RTN, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"rtn_16x16", OPERAND(ROUND_RTN, FORMAT_NVFP4, BLOCK_16X16, 0, FROM_ORIGINAL)},
    {"four_six_1x16", OPERAND(ROUND_FOUR_SIX, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"four_six_16x16", OPERAND(ROUND_FOUR_SIX, FORMAT_NVFP4, BLOCK_16X16, 0, FROM_ORIGINAL)},
    {"sr_1x16", OPERAND(ROUND_SR, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"ms_eden_128", OPERAND(ROUND_MS_EDEN, FORMAT_NVFP4, BLOCK_1X16, 128, FROM_ORIGINAL)},
    {"ms_eden_posthoc_128", OPERAND(ROUND_MS_EDEN_POSTHOC, FORMAT_NVFP4, BLOCK_1X16, 128, FROM_ORIGINAL)},
    {"search_few", NVFP4_SEARCH(ROUND_SEARCH, 0, FROM_ORIGINAL, SEARCH_FEW)},
    {"search_all", NVFP4_SEARCH(ROUND_SEARCH, 0, FROM_ORIGINAL, SEARCH_ALL)},
    {"search_true_few", NVFP4_SEARCH(ROUND_SEARCH_TRUE, 0, FROM_ORIGINAL, SEARCH_FEW)},
    {"search_true_all", NVFP4_SEARCH(ROUND_SEARCH_TRUE, 0, FROM_ORIGINAL, SEARCH_ALL)},
    {"ms_eden_search_few", NVFP4_SEARCH(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL, SEARCH_FEW)},
    {"ms_eden_search_all", NVFP4_SEARCH(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL, SEARCH_ALL)},
};
#define QUANTIZER_COUNT ((int)(sizeof QUANTIZERS / sizeof QUANTIZERS[0]))
static const QuantizeAddress ADDRESS = {11, 5, 2, 1, GEMM_WGRAD, OPERAND_A, 3, 1};

static float *floats(int64_t count) { return (float *)xcalloc((size_t)count, sizeof(float)); }
static float *transpose(const float *x, int64_t rows, int64_t cols) {  // -> (cols, rows)
    float *t = floats(rows * cols);
    for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}
// Values of both signs whose sizes spread over 2^-spread .. 2^spread, some zero.
static void fill(float *x, int64_t count, int spread, uint64_t seed) {
    RngStream s = rng_stream(seed, 0, 0);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t w = rng_word(s, (uint64_t)i);
        const float m = (float)(w & 0xFFFFFF) * 0x1p-23f - 1.0f;
        x[i] = bf16_round(w >> 27 == 0 ? 0.0f : ldexpf(m, spread ? (int)(w >> 24) % (2 * spread + 1) - spread : 0));
    }
}
static void assert_same_bits(const char *what, const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (f32_bits(a[i]) != f32_bits(b[i])) fail_msg("%s: value %lld is %.9g, expected %.9g", what, (long long)i, (double)a[i], (double)b[i]);
}
// A tensor's worth of codes, scales and tensor scale, along columns.
typedef struct { float *q; uint8_t *scales; float st; int64_t count, scale_count; } Quantized;
static Quantized quantized(const float *x, int64_t rows, int64_t cols, int along_rows, const OperandSpec *spec, const QuantizeRandom *random) {
    const int64_t outer = along_rows ? cols : rows, inner = along_rows ? rows : cols;
    Quantized t;
    t.count = rows * cols;
    t.scale_count = (spec->block == BLOCK_16X16 ? (outer + 15) / 16 : outer) * (inner / 16);
    t.q = floats(t.count);
    t.scales = (uint8_t *)xcalloc((size_t)t.scale_count, 1);
    t.st = quantize_tensor(t.q, t.scales, x, rows, cols, along_rows, spec, random, 0);
    return t;
}
static void quantized_free(Quantized *t) { free(t->q); free(t->scales); }

// ---------------------------------------------------------------------------------------------------------------------
// Golden vectors

static void check_golden(const char *file, const Quantizer *z, const cJSON *input, const cJSON *expected, int along_rows) {
    int64_t n, m, scales, one;
    uint32_t *bits = golden_hex(input, "x", 8, &n), *signs = golden_hex(input, "sign_bits", 1, &m);
    uint32_t *words = golden_hex(input, z->spec.rounding == ROUND_SR ? "words_per_value" : "words_per_block", 8, &one);
    uint32_t *codes = golden_hex(expected, "codes", 1, &m), *sb = golden_hex(expected, "scales", 2, &scales), *st = golden_hex(expected, "tensor_scale", 8, &one);
    const int64_t rows = json_get(input, "rows")->valueint, cols = json_get(input, "cols")->valueint;
    assert_true(n == rows * cols && m == n && one == 1);
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = f32_from_bits(bits[i]);
    QuantizeRandom random;
    memset(&random, 0, sizeof random);
    random.words = words;
    for (int i = 0; i < 128; i++) random.sign_bits[i / 32] |= signs[i] << (i % 32);
    float *t = along_rows ? transpose(x, rows, cols) : x;
    Quantized got = along_rows ? quantized(t, cols, rows, 1, &z->spec, &random) : quantized(t, rows, cols, 0, &z->spec, &random);
    float *q = along_rows ? transpose(got.q, cols, rows) : got.q;
    if (f32_bits(got.st) != st[0]) fail_msg("%s, %s: tensor scale %.9g, expected %.9g", file, z->name, (double)got.st, (double)f32_from_bits(st[0]));
    assert_int_equal(got.scale_count, scales);
    for (int64_t i = 0; i < scales; i++)
        if (got.scales[i] != sb[i]) fail_msg("%s, %s: scale %lld is %02x, expected %02x", file, z->name, (long long)i, got.scales[i], sb[i]);
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = e2m1_encode(q[i]);
        if (code != codes[i] && (code | codes[i]) != 8) fail_msg("%s, %s: code %lld is %x, expected %x", file, z->name, (long long)i, code, codes[i]);
    }
    if (along_rows) { free(t); free(q); }
    quantized_free(&got);
    free(x); free(bits); free(signs); free(words); free(codes); free(sb); free(st);
}
static void test_golden(void **state) {
    (void)state;
    static const char *const files[] = {"gauss", "edge", "zeros"};
    cJSON *posthoc = golden_open("posthoc"), *search = golden_open("search");
    for (int f = 0; f < 3; f++) {
        cJSON *j = golden_open(files[f]);
        for (int z = 0; z < QUANTIZER_COUNT; z++) for (int along_rows = 0; along_rows < 2; along_rows++) {
            const cJSON *expected = json_get(json_get(j, "quantizers"), QUANTIZERS[z].name);
            if (!expected) expected = json_get(json_get(search, files[f]), QUANTIZERS[z].name);
            if (!expected) expected = json_get(posthoc, files[f]);
            check_golden(files[f], &QUANTIZERS[z], j, expected, along_rows);
        }
        cJSON_Delete(j);
    }
    cJSON_Delete(posthoc);
    cJSON_Delete(search);
}

// ---------------------------------------------------------------------------------------------------------------------
// Every block quantizer against a plain scalar reference (block_reference.h): one block, tables of values, float32 in the stated order

static void check_lanes(Rounding rounding, int all, LaneBlock x, TensorScale ts, LaneBlockBits u) {
    LaneBlock q;
    uint32_t sb[LANES], first[LANES];
    float amax[LANES], c[LANES];
    memset(c, 0, sizeof c); memset(sb, 0, sizeof sb);
    block_amax(x, amax);
    for (int l = 0; l < LANES; l++) first[l] = u[0][l];
    if (rounding == ROUND_RTN) nvfp4_rtn_block(x, amax, ts, q, sb);
    else if (rounding == ROUND_FOUR_SIX) four_six_block(x, amax, ts, q, sb);
    else if (rounding == ROUND_SR) nvfp4_sr_block(x, amax, ts, u, q, sb);
    else if (rounding == ROUND_MS_EDEN) ms_eden_block(x, amax, ts, first, q, sb);
    else if (rounding == ROUND_MS_EDEN_POSTHOC) ms_eden_posthoc_block(x, amax, q, c);
    else if (rounding == ROUND_MS_EDEN_SEARCH && all) ms_eden_search_all_block(x, amax, q, c);
    else if (rounding == ROUND_MS_EDEN_SEARCH) ms_eden_search_block(x, q, c);
    else search_block(x, amax, ts, all, rounding == ROUND_SEARCH_TRUE, q, sb);
    for (int l = 0; l < LANES; l++) {
        float column[16];
        uint32_t words[16];
        for (int i = 0; i < 16; i++) { column[i] = x[i][l]; words[i] = u[i][l]; }
        int tie = 0;
        RefBlock other, b = rounding == ROUND_MS_EDEN_SEARCH ? (all ? ref_eden_search(column) : ref_eden_pair(column, &other, &tie))
                   : rounding == ROUND_SEARCH || rounding == ROUND_SEARCH_TRUE ? ref_search(column, ts, all, rounding == ROUND_SEARCH_TRUE)
                   : ref_block(rounding, column, ts, words);
        if (tie && f32_bits(b.c) != f32_bits(c[l])) b = other;
        if (b.sb != (int)sb[l] || f32_bits(b.c) != f32_bits(c[l])) fail_msg("rounding %d: scale %u, c %.9g; expected %d, %.9g", (int)rounding, sb[l], (double)c[l], b.sb, (double)b.c);
        for (int i = 0; i < 16; i++)
            if (q[i][l] != b.q[i]) fail_msg("rounding %d: value %.9g gives %g, expected %g", (int)rounding, (double)column[i], (double)q[i][l], (double)b.q[i]);
    }
}
static void test_lanes_match_scalar(void **state) {
    (void)state;
    for (int round = 0; round < 1500; round++) {
        LaneBlock x;
        LaneBlockBits u;
        RngStream s = rng_stream(99, (uint32_t)round, 0);
        fill(&x[0][0], 16 * LANES, round % 24, (uint64_t)round);
        for (int i = 0; i < 16; i++) for (int l = 0; l < LANES; l++) {
            u[i][l] = rng_word(s, (uint64_t)(i * LANES + l));
            if (l == 0 && round % 7 == 0) x[i][l] = 0;                                 // an all-zero block
            if (l == 1 && round % 5 == 0 && i != round % 16) x[i][l] = 0;              // one nonzero
            if (l == 2 % LANES && round % 3 == 0) x[i][l] = i % 2 ? -1.5f : 1.5f;      // equal magnitudes
            if (l == 3 % LANES && round % 3 == 0) x[i][l] = ldexpf(x[i][l], -100);     // far below the tensor
        }
        for (int rounding = ROUND_RTN; rounding <= ROUND_MS_EDEN_SEARCH; rounding++) {
            const float bound = rounding == ROUND_RTN || rounding == ROUND_SR ? 448 : 256;
            const float override_ = rounding == ROUND_SR ? SR_OVERRIDE : rounding == ROUND_MS_EDEN ? EDEN_OVERRIDE : 1;
            check_lanes((Rounding)rounding, round & 1, x, nvfp4_tensor_scale(ldexpf(1.0f + (float)(round % 8) / 8, round % 24), override_, bound), u);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

// Along rows is along columns of the transpose, at any outer length, also when output overwrites input.
static void test_along_rows_is_along_columns_of_the_transpose(void **state) {
    (void)state;
    static const int64_t outers[] = {1, 7, 8, 16, 33, 130};
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int o = 0; o < 6; o++) for (int k = 0; k < 3; k++) {
        const OperandSpec *spec = &QUANTIZERS[z].spec;
        const int64_t outer = outers[o], inner = spec->rotation ? 128 * (k + 1) : k == 0 ? 16 : 112 + 64 * k;
        float *x = floats(outer * inner), *a = floats(outer * inner), *b = floats(outer * inner);
        fill(x, outer * inner, 4, (uint64_t)(o * 10 + k));
        float *t = transpose(x, outer, inner);
        const float fa = quantize_operand(a, x, outer, inner, 0, spec, &ADDRESS), fb = quantize_operand(b, t, inner, outer, 1, spec, &ADDRESS);
        float *back = transpose(b, inner, outer);
        assert_same_bits(QUANTIZERS[z].name, back, a, outer * inner);
        assert_true(fa == fb);
        quantize_operand(x, x, outer, inner, 0, spec, &ADDRESS);
        assert_same_bits("in place", x, a, outer * inner);
        for (int64_t i = 0; i < outer * inner; i++) assert_true(bf16_round(a[i]) == a[i]);
        free(x); free(a); free(b); free(t); free(back);
    }
}
// The words of quantize_operand are those of the address: block (row, block) takes word block_word_index() of its stream, an SR
// value word row*inner + i. Checked by handing the same words over as an array.
static void test_words_have_addresses(void **state) {
    (void)state;
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int k = 0; k < 2; k++) {
        const OperandSpec *spec = &QUANTIZERS[z].spec;
        const int64_t rows = 13, cols = spec->rotation ? 256 : k ? 256 : 48, per_row = spec->rounding == ROUND_SR ? cols : cols / 16;
        uint32_t *words = (uint32_t *)xcalloc((size_t)(rows * per_row), sizeof(uint32_t));
        const QuantizeAddress *at = &ADDRESS;
        const int purpose = spec->rounding == ROUND_SR ? RNG_VALUE : RNG_SCALE;
        RngStream s = rng_stream(at->seed, (uint32_t)at->step, rng_address(purpose, at->layer, at->linear, at->gemm, at->operand, at->rank));
        for (int64_t r = 0; r < rows; r++) for (int64_t b = 0; b < per_row; b++) words[r * per_row + b] = rng_word(s, block_word_index(at->micro, rows, per_row, r, b));
        QuantizeRandom random = quantize_random(at, spec);
        random.words = words;
        float *x = floats(rows * cols), *a = floats(rows * cols), *b = floats(rows * cols);
        fill(x, rows * cols, 2, 3);
        const float fa = quantize_operand(a, x, rows, cols, 0, spec, at), fb = quantize_tensor(b, NULL, x, rows, cols, 0, spec, &random, 1);
        assert_true(fa == fb);
        assert_same_bits(QUANTIZERS[z].name, a, b, rows * cols);
        free(words); free(x); free(a); free(b);
    }
}
static void test_threads_do_not_matter(void **state) {
    (void)state;
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    const int64_t rows = 256, cols = 384;
    float *x = floats(rows * cols), *one = floats(rows * cols), *many = floats(rows * cols);
    fill(x, rows * cols, 3, 8);
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int along_rows = 0; along_rows < 2; along_rows++) {
        omp_set_num_threads(1);
        const float a = quantize_operand(one, x, rows, cols, along_rows, &QUANTIZERS[z].spec, &ADDRESS);
        omp_set_num_threads(3);
        const float b = quantize_operand(many, x, rows, cols, along_rows, &QUANTIZERS[z].spec, &ADDRESS);
        assert_true(a == b);
        assert_same_bits(QUANTIZERS[z].name, many, one, rows * cols);
    }
    omp_set_num_threads(threads);
    free(x); free(one); free(many);
#else
    skip();
#endif
}
// The plain roundings: as it is, and to BF16, with and without the rotation.
static void test_plain_roundings(void **state) {
    (void)state;
    const int64_t rows = 9, cols = 256;
    float *x = floats(rows * cols), *out = floats(rows * cols);
    fill(x, rows * cols, 3, 4);
    for (int64_t i = 0; i < rows * cols; i++) x[i] *= 1.0009765625f;  // not BF16
    OperandSpec spec = OPERAND(ROUND_NONE, FORMAT_FLOAT, BLOCK_NONE, 0, FROM_ORIGINAL);
    assert_true(quantize_operand(out, x, rows, cols, 0, &spec, &ADDRESS) == 1);
    assert_same_bits("none", out, x, rows * cols);
    spec.rounding = ROUND_BF16;
    assert_true(quantize_operand(out, x, rows, cols, 1, &spec, &ADDRESS) == 1);
    for (int64_t i = 0; i < rows * cols; i++) assert_true(out[i] == bf16_round(x[i]));
    free(x); free(out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing

// Unpacked codes and scales are the operand; what lies beyond the operand's rows and scale columns is zero.
static void test_packing(void **state) {
    (void)state;
    static const int64_t outers[] = {1, 33, 128, 130};
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int o = 0; o < 4; o++) for (int along_rows = 0; along_rows < 2; along_rows++) {
        const int64_t outer = outers[o], inner = QUANTIZERS[z].spec.rotation ? 128 : 16 * (o + 1), rows = along_rows ? inner : outer, cols = along_rows ? outer : inner;
        float *x = floats(outer * inner), *want = floats(outer * inner), *got = floats(outer * inner);
        fill(x, outer * inner, 3, (uint64_t)o);
        QuantizeRandom random = quantize_random(&ADDRESS, &QUANTIZERS[z].spec);
        PackedTensor p = quantize_pack(x, rows, cols, along_rows, &QUANTIZERS[z].spec, &random);
        assert_true(packed_unpack(&p, got) == quantize_operand(want, x, rows, cols, along_rows, &QUANTIZERS[z].spec, &ADDRESS));
        float *ordered = along_rows ? transpose(want, rows, cols) : want;
        for (int64_t i = 0; i < outer * inner; i++) assert_true(got[i] == ordered[i]);
        // The layout by its definition: the even index in the low nibble. 4 bits a value.
        Quantized t = quantized(x, rows, cols, along_rows, &QUANTIZERS[z].spec, &random);
        for (int64_t r = 0; r < outer; r++) for (int64_t i = 0; i < inner; i++) {
            const uint32_t byte = p.codes[(r * inner + i) / 2], code = e2m1_encode(along_rows ? t.q[i * outer + r] : t.q[r * inner + i]);
            assert_int_equal(i % 2 ? byte / 16 : byte % 16, code);
        }
        quantized_free(&t);
        int64_t code_sum = 0, scale_sum = 0;
        for (int64_t i = outer * (inner / 2); i < p.code_bytes; i++) code_sum += p.codes[i];
        for (int64_t i = 0; i < p.scale_bytes; i++) scale_sum += p.scales[i];
        for (int64_t r = 0; r < outer; r++) for (int64_t c = 0; c < inner / 16; c++) scale_sum -= p.scales[tiled_scale_offset(r, c, inner / 16)];
        assert_true(code_sum == 0 && scale_sum == 0 && p.padded % 128 == 0 && p.padded - outer < 128);
        if (along_rows) free(ordered);
        packed_free(&p);
        free(x); free(want); free(got);
    }
}
// Offsets of the 128x4 tiles are a permutation of the padded scales. The corner values are worked out by hand from the layout.
static void test_tiled_scale_layout(void **state) {
    (void)state;
    const int64_t C = 10, padded_columns = 12;
    uint8_t seen[256 * 12];
    memset(seen, 0, sizeof seen);
    for (int64_t r = 0; r < 256; r++) for (int64_t c = 0; c < padded_columns; c++) {
        const int64_t offset = tiled_scale_offset(r, c, C);
        assert_true(offset >= 0 && offset < 256 * padded_columns && !seen[offset]);
        seen[offset] = 1;
    }
    assert_int_equal(tiled_scale_offset(0, 3, C), 3);
    assert_int_equal(tiled_scale_offset(1, 0, C), 16);
    assert_int_equal(tiled_scale_offset(32, 0, C), 4);
    assert_int_equal(tiled_scale_offset(0, 4, C), 512);
    assert_int_equal(tiled_scale_offset(128, 0, C), 3 * 512);
}

// ---------------------------------------------------------------------------------------------------------------------
// Edge cases

#define EDGE_ROWS 32
#define EDGE_COLS 256
static float edge_x[EDGE_ROWS * EDGE_COLS], edge_out[EDGE_ROWS * EDGE_COLS];
static float edge_operand(int z) { return quantize_operand(edge_out, edge_x, EDGE_ROWS, EDGE_COLS, 0, &QUANTIZERS[z].spec, &ADDRESS); }
static void edge_fill(void) { fill(edge_x, EDGE_ROWS * EDGE_COLS, 0, 21); }

static void test_all_zero_tensor(void **state) {
    (void)state;
    memset(edge_x, 0, sizeof edge_x);
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        assert_true(edge_operand(z) == 1);
        for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) assert_true(edge_out[i] == 0);
    }
}
static void test_all_zero_block_and_run(void **state) {
    (void)state;
    edge_fill();
    for (int r = 16; r < 32; r++) memset(edge_x + r * EDGE_COLS, 0, 128 * sizeof(float));  // a run, and the 16x16 tiles in it
    memset(edge_x, 0, 16 * sizeof(float));                                                 // a block
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        QuantizeRandom random = quantize_random(&ADDRESS, &QUANTIZERS[z].spec);
        Quantized t = quantized(edge_x, EDGE_ROWS, EDGE_COLS, 0, &QUANTIZERS[z].spec, &random);
        for (int r = 16; r < 32; r++) for (int c = 0; c < 128; c++) assert_true(t.q[r * EDGE_COLS + c] == 0);
        const int square = QUANTIZERS[z].spec.block == BLOCK_16X16;
        for (int b = 0; b < 8; b++) assert_int_equal(t.scales[(square ? 1 : 16) * (EDGE_COLS / 16) + b], 0);
        if (!QUANTIZERS[z].spec.rotation && !square) assert_int_equal(t.scales[0], 0);
        if (!QUANTIZERS[z].spec.rotation) for (int c = 0; c < 16; c++) assert_true(t.q[c] == 0);
        quantized_free(&t);
    }
}
// A block 2^-40 below the tensor's largest value keeps the smallest scale, and everything stays finite.
static void test_block_far_below_the_tensor(void **state) {
    (void)state;
    edge_fill();
    for (int r = 16; r < 32; r++) for (int c = 0; c < 128; c++) edge_x[r * EDGE_COLS + c] = c % 2 ? 0x1p-40f : -0x1p-40f;
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        QuantizeRandom random = quantize_random(&ADDRESS, &QUANTIZERS[z].spec);
        Quantized t = quantized(edge_x, EDGE_ROWS, EDGE_COLS, 0, &QUANTIZERS[z].spec, &random);
        const int first = (QUANTIZERS[z].spec.block == BLOCK_16X16 ? 1 : 16) * (EDGE_COLS / 16);
        for (int b = 0; b < 8; b++)
            if (QUANTIZERS[z].spec.rounding == ROUND_MS_EDEN || QUANTIZERS[z].spec.rounding == ROUND_MS_EDEN_POSTHOC ||
                QUANTIZERS[z].spec.rounding == ROUND_MS_EDEN_SEARCH) assert_in_range(t.scales[first + b], 0, 1);  // 0: stochastically
            else assert_int_equal(t.scales[first + b], 1);
        for (int64_t i = 0; i < t.count; i++) assert_true(isfinite(t.q[i]));
        assert_true(isfinite(t.st) && t.st > 0);
        quantized_free(&t);
    }
}
// One value of 3e4 among values below 1. Where blocks are not rotated and o = 1 it decodes to itself: its block scale is F exactly, and 6*F*s_t
// = amax up to the three roundings of s_t and the product (1.8e-7). Stochastically (o = 17/16) it lands on a neighbour, 4 or 6 of 6*16/17.
static void test_one_outlier(void **state) {
    (void)state;
    edge_fill();
    edge_x[5 * EDGE_COLS + 77] = 3e4f;
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        const double st = edge_operand(z);
        for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) assert_true(isfinite(edge_out[i]));
        if (QUANTIZERS[z].spec.rotation) continue;
        const double got = st * edge_out[5 * EDGE_COLS + 77] / 3e4;
        if (QUANTIZERS[z].spec.rounding == ROUND_SR) assert_true(got > 0.66 && got < 1.07);
        else assert_true(fabs(got - 1) < 2e-7);
    }
}
static void test_subnormal_inputs(void **state) {
    (void)state;
    edge_fill();
    for (int mixed = 0; mixed < 2; mixed++) {
        for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) if (!mixed || i % 2) edge_x[i] = (float)(i % 100) * 1e-42f;
        if (mixed) for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i += 2) edge_x[i] = 1.0f;
        for (int z = 0; z < QUANTIZER_COUNT; z++) {
            const float st = edge_operand(z);
            assert_true(isfinite(st) && st > 0);
            for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) assert_true(isfinite(edge_out[i]) && (mixed || edge_out[i] == 0));
        }
    }
}
// The largest magnitudes float32 holds: quantized where they are finite, and refused (NaN) where the rotation overflows.
static void test_huge_inputs(void **state) {
    (void)state;
    for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) edge_x[i] = i % 3 ? 3e38f : -3e38f;
    for (int z = 0; z < QUANTIZER_COUNT; z++) {
        const float st = edge_operand(z);
        if (QUANTIZERS[z].spec.rotation) { assert_true(isnan(st)); continue; }
        for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) assert_true(isfinite(edge_out[i]));
    }
}
// A NaN or an infinity anywhere must not be trained on: the factor that turns the operand into values is NaN, and so is the loss.
static void test_non_finite_inputs(void **state) {
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int z = 0; z < QUANTIZER_COUNT; z++) for (int b = 0; b < 3; b++) for (int place = 0; place < 3; place++) for (int along_rows = 0; along_rows < 2; along_rows++) {
        const int64_t rows = along_rows ? EDGE_COLS : EDGE_ROWS, cols = along_rows ? EDGE_ROWS : EDGE_COLS;
        edge_fill();
        edge_x[place == 0 ? 0 : place == 1 ? 4711 : EDGE_ROWS * EDGE_COLS - 1] = bad[b];
        assert_true(isnan(quantize_operand(edge_out, edge_x, rows, cols, along_rows, &QUANTIZERS[z].spec, &ADDRESS)));
        for (int i = 0; i < EDGE_ROWS * EDGE_COLS; i++) assert_true(isnan(edge_out[i]));
    }
}
// Post hoc alignment: while the block scale is not subnormal, s_b*s_t is c rounded to four bits, whatever s_t is.
static void test_posthoc_extended_scale(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 20000; i++) {
        const uint32_t w = rng_word(rng_stream(17, 0, 0), 2 * i), u = rng_word(rng_stream(17, 0, 0), 2 * i + 1);
        const float c = bf16_round(ldexpf(1.0f + (float)(w & 0xFFFF) * 0x1p-16f, (int)(w >> 24) % 60 - 30));
        const float largest = bf16_round(c * (1.0f + (float)(w >> 16 & 0xFF) * 40.0f));
        const float st = ms_eden_posthoc_tensor_scale(largest);
        assert_true(largest / st <= 256 && largest / st > 128);
        if (c / st < 0x1p-6f) continue;
        assert_true(e4m3_decode(ms_eden_posthoc_scale(c, st, u)) * st == ms_eden_posthoc_extended(c, u));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Refusals

typedef struct { int64_t rows, cols; int along_rows; OperandSpec spec; } Refusal;
static void quantize_refused(const void *context) {
    const Refusal *r = (const Refusal *)context;
    quantize_operand(edge_out, edge_x, r->rows, r->cols, r->along_rows, &r->spec, &ADDRESS);
}
static void pack_refused(const void *context) {
    const Refusal *r = (const Refusal *)context;
    QuantizeRandom random = quantize_random(&ADDRESS, &r->spec);
    PackedTensor p = quantize_pack(edge_x, r->rows, r->cols, r->along_rows, &r->spec, &random);
    packed_free(&p);
}
static void test_bad_shapes_are_refused(void **state) {
    (void)state;
    Refusal r = {16, 40, 0, QUANTIZERS[0].spec};
    expect_fatal(quantize_refused, &r, "16 x 40 along its columns|multiple of 16");
    expect_fatal(pack_refused, &r, "16 x 40 along its columns|multiple of 16");
    r.rows = 40; r.cols = 16; r.along_rows = 1; r.spec = QUANTIZERS[2].spec;
    expect_fatal(quantize_refused, &r, "40 x 16 along its rows|multiple of 16");
    r.spec = QUANTIZERS[6].spec;
    r.rows = 64;
    expect_fatal(quantize_refused, &r, "64 x 16 along its rows|multiple of 128");
    r.rows = 0;
    expect_fatal(quantize_refused, &r, "0 x 16");
    r.rows = 48; r.spec.rotation = 48;
    expect_fatal(quantize_refused, &r, "rotation of 48|power of two");
    r.spec.rotation = 0; r.spec.rounding = ROUND_BF16; r.spec.format = FORMAT_FLOAT;
    expect_fatal(pack_refused, &r, "NVFP4|packed");
}

int main(void) {
    E2M1_GRID = e2m1_grid();
    E4M3_GRID = e4m3_grid();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden), cmocka_unit_test(test_lanes_match_scalar),
        cmocka_unit_test(test_along_rows_is_along_columns_of_the_transpose), cmocka_unit_test(test_words_have_addresses),
        cmocka_unit_test(test_threads_do_not_matter), cmocka_unit_test(test_plain_roundings), cmocka_unit_test(test_packing),
        cmocka_unit_test(test_tiled_scale_layout), cmocka_unit_test(test_all_zero_tensor), cmocka_unit_test(test_all_zero_block_and_run),
        cmocka_unit_test(test_block_far_below_the_tensor), cmocka_unit_test(test_one_outlier), cmocka_unit_test(test_subnormal_inputs),
        cmocka_unit_test(test_huge_inputs), cmocka_unit_test(test_non_finite_inputs), cmocka_unit_test(test_posthoc_extended_scale),
        cmocka_unit_test(test_bad_shapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
