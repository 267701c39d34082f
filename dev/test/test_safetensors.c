// test_safetensors.c: the safetensors format, against an independent reader, and against files that lie.
#include "dev/test/support.h"
#include "llmc/rng.h"
#include "llmc/safetensors.h"

static float value_of(int i) { return (rng_uniform(rng_word(rng_stream(7, 0, 0), (uint64_t)i)) - 0.5f) * 8; }

enum { TENSORS = 4 };
static void describe(SafeTensor t[TENSORS]) {
    safe_describe(&t[0], "model.embed", SAFE_F32, 5, 3);
    safe_describe(&t[1], "model.norm", SAFE_BF16, 7, 0);  // 14 bytes: what follows is not aligned to 4
    safe_describe(&t[2], "a.weight", SAFE_F32, 1, 1);
    safe_describe(&t[3], "z \"quoted\"", SAFE_BF16, 100, 99);
}
// Writes the four tensors, each in pieces of another size.
static void write_example(const char *path) {
    SafeTensor t[TENSORS];
    SafeWriter w;
    char error[ERROR_TEXT];
    int next = 0;
    describe(t);
    unlink(path);
    assert_int_equal(safetensors_begin(&w, path, t, TENSORS, error, sizeof error), 0);
    for (int i = 0; i < TENSORS; i++)
        for (int64_t done = 0; done < t[i].count;) {
            float piece[5001];
            int64_t n = t[i].count - done < 1 + 5000 * (i == 3) ? t[i].count - done : 1 + 5000 * (i == 3);
            for (int64_t j = 0; j < n; j++) piece[j] = value_of(next++);
            assert_int_equal(safetensors_append(&w, piece, n), 0);
            done += n;
        }
    assert_int_equal(safetensors_end(&w), 0);
}
static void test_round_trip(void **state) {
    (void)state;
    char *path = xstrdup(folder_path("a.safetensors")), error[ERROR_TEXT];
    SafeTensor want[TENSORS];
    SafeFile f;
    int next = 0;
    write_example(path);
    describe(want);
    assert_int_equal(safetensors_open(&f, path, error, sizeof error), 0);
    assert_int_equal(f.count, TENSORS);
    assert_int_equal(f.data_start % 8, 0);
    for (int i = 0; i < TENSORS; i++) {
        const SafeTensor *t = safetensors_expect(&f, want[i].name, want[i].dtype, want[i].shape[0], want[i].dims == 2 ? want[i].shape[1] : 0, error, sizeof error);
        assert_non_null(t);
        float *values = (float *)xcalloc((size_t)t->count, sizeof(float));
        assert_int_equal(safetensors_read(&f, t, 0, t->count, values, error, sizeof error), 0);
        for (int64_t j = 0; j < t->count; j++, next++) {
            float v = t->dtype == SAFE_BF16 ? bf16_round(value_of(next)) : value_of(next);
            assert_true(values[j] == v);
        }
        float one;  // any run of values can be read alone
        assert_int_equal(safetensors_read(&f, t, t->count - 1, 1, &one, error, sizeof error), 0);
        assert_true(one == values[t->count - 1]);
        assert_int_equal(safetensors_read(&f, t, 1, t->count, values, error, sizeof error), -1);
        assert_int_equal(safetensors_read(&f, t, -1, 1, values, error, sizeof error), -1);
        free(values);
    }
    assert_null(safetensors_find(&f, "absent"));
    assert_null(safetensors_expect(&f, "absent", SAFE_F32, 5, 3, error, sizeof error));
    assert_non_null(strstr(error, "a.safetensors: tensor \"absent\" is missing"));
    assert_null(safetensors_expect(&f, "model.embed", SAFE_BF16, 5, 3, error, sizeof error));
    assert_non_null(strstr(error, "is F32; BF16 is expected"));
    assert_null(safetensors_expect(&f, "model.embed", SAFE_F32, 3, 5, error, sizeof error));
    assert_non_null(strstr(error, "has another shape than (3, 5)"));
    safetensors_close(&f);
    free(path);
}
// The same file by a reader that shares no code: same names, order, shapes and bits.
static void test_independent_reader(void **state) {
    (void)state;
    SafeTensor t[TENSORS];
    char *path = xstrdup(folder_path("b.safetensors")), *command = xasprintf("python3 dev/test/read_safetensors.py %s", path);
    int next = 0;
    write_example(path);
    describe(t);
    FILE *reader = popen(command, "r");
    assert_non_null(reader);
    for (int i = 0; i < TENSORS; i++) {
        char expected[256], *got = (char *)xcalloc(strlen(t[i].name) + 64, 1);
        int n = snprintf(expected, sizeof expected, "%s %s %lld", t[i].name, SAFE_DTYPES[t[i].dtype].name, (long long)t[i].shape[0]);
        if (t[i].dims == 2) n += snprintf(expected + n, sizeof expected - (size_t)n, " %lld", (long long)t[i].shape[1]);
        n += snprintf(expected + n, sizeof expected - (size_t)n, " :");
        assert_int_equal(fread(got, 1, (size_t)n, reader), n);
        assert_string_equal(got, expected);
        for (int64_t j = 0; j < t[i].count; j++, next++) {
            unsigned bits = 0;
            assert_int_equal(fscanf(reader, "%x", &bits), 1);
            assert_int_equal(bits, f32_bits(t[i].dtype == SAFE_BF16 ? bf16_round(value_of(next)) : value_of(next)));
        }
        assert_int_equal(fgetc(reader), '\n');
        free(got);
    }
    assert_int_equal(fgetc(reader), EOF);
    assert_int_equal(pclose(reader), 0);
    free(command);
    free(path);
}

// A file of that header and that many bytes of data, opened. It must be refused in one line that names the file and `part`.
static void refuse_header(const char *header, int64_t length, int data_bytes, const char *part) {
    char *path = xstrdup(folder_path("bad.safetensors")), error[ERROR_TEXT] = "";
    size_t n = strlen(header);
    uint64_t said = length < 0 ? (uint64_t)n : (uint64_t)length;
    char *bytes = (char *)xcalloc(8 + n + (size_t)data_bytes, 1);
    SafeFile f;
    memcpy(bytes, &said, 8);
    memcpy(bytes + 8, header, n);
    file_put(path, bytes, 8 + n + (size_t)data_bytes);
    if (safetensors_open(&f, path, error, sizeof error) == 0) fail_msg("%s was accepted", header);
    if (!strstr(error, part) || !strstr(error, "bad.safetensors") || strchr(error, '\n')) fail_msg("\"%s\" does not say \"%s\"", error, part);
    free(bytes);
    free(path);
}
static void test_lying_headers(void **state) {
    (void)state;
#define ONE(dtype, shape, offsets) "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    static const struct { const char *header; int data; const char *part; } cases[] = {
        {"", 0, "is not valid JSON"},
        {"{\"t\":", 8, "is not valid JSON at line 1"},
        {"[]", 0, "a JSON object {...} was expected"},
        {"{\"t\":5}", 0, "tensor \"t\": an object was expected"},
        {"{\"t\":{}}", 0, "tensor \"t\": \"dtype\" is not text"},
        {ONE("\"F33\"", "[1]", "[0,4]"), 4, "dtype \"F33\" is not known"},
        {ONE("32", "[1]", "[0,4]"), 4, "\"dtype\" is not text"},
        {ONE("\"F32\"", "4", "[0,4]"), 4, "\"shape\" is not a list"},
        {ONE("\"F32\"", "[-1]", "[0,4]"), 4, "something else than whole numbers"},
        {ONE("\"F32\"", "[1.5]", "[0,4]"), 4, "something else than whole numbers"},
        {ONE("\"F32\"", "[1e300]", "[0,4]"), 4, "something else than whole numbers"},
        {ONE("\"F32\"", "[null]", "[0,4]"), 4, "something else than whole numbers"},
        {ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions"},
        {ONE("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4, "the product of \"shape\" overflows"},
        {ONE("\"F64\"", "[4611686018427387904]", "[0,4]"), 4, "something else than whole numbers"},
        {ONE("\"F64\"", "[4503599627370496,1024]", "[0,0]"), 0, "not what dtype and shape make"},
        {ONE("\"F32\"", "[1]", "[0]"), 4, "\"data_offsets\" is not two whole numbers"},
        {ONE("\"F32\"", "[1]", "[0,4,8]"), 4, "\"data_offsets\" is not two whole numbers"},
        {ONE("\"F32\"", "[1]", "[-4,0]"), 4, "\"data_offsets\" is not two whole numbers"},
        {ONE("\"F32\"", "[1]", "\"04\""), 4, "\"data_offsets\" is not two whole numbers"},
        {ONE("\"F32\"", "[1]", "[4,0]"), 4, "lie outside the file's 4 bytes of data"},
        {ONE("\"F32\"", "[1]", "[0,4]"), 3, "lie outside the file's 3 bytes of data"},
        {ONE("\"F32\"", "[2]", "[0,4]"), 4, "span 4 bytes, which is not what dtype and shape make"},
        {ONE("\"F32\"", "[1]", "[0,4]"), 5, "1 bytes after the last tensor belong to none"},
        {ONE("\"F32\"", "[1]", "[4,8]"), 8, "begin at 4, behind a gap after the tensor before, which ends at 0"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, "begin at 2, within the tensor before, which ends at 4"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 8, "tensor \"a\" is listed twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) refuse_header(cases[i].header, -1, cases[i].data, cases[i].part);
    refuse_header("{}", 3, 0, "byte 0: a header of 3 bytes does not fit the file of 10 bytes");
    refuse_header("{}", INT64_MAX, 0, "does not fit the file");
    refuse_header("{}", SAFETENSORS_HEADER_MAX + 1, 0, "does not fit the file");
    char *deep = (char *)xcalloc(100002, 1), *named = xasprintf("{\"%0200d\":{}}", 0);
    memset(deep, '[', 100000);
    refuse_header(deep, -1, 0, "is not valid JSON");
    refuse_header(named, -1, 0, "is longer than 127 bytes");
    free(deep);
    free(named);
}
// A file cut anywhere, or with anything behind it, is refused; one with any byte changed is refused or read without harm.
static void test_cut_and_changed_files(void **state) {
    (void)state;
    char *path = xstrdup(folder_path("c.safetensors")), *cut = xstrdup(folder_path("cut.safetensors")), error[ERROR_TEXT];
    size_t size;
    SafeFile f;
    write_example(path);
    char *bytes = get_file(path, &size);
    for (size_t n = 0; n < size; n += n < 700 ? 1 : 97) {
        file_put(cut, bytes, n);
        if (safetensors_open(&f, cut, error, sizeof error) == 0) fail_msg("cut to %zu bytes, it was accepted", n);
    }
    char *longer = (char *)xcalloc(size + 1, 1);
    memcpy(longer, bytes, size);
    file_put(cut, longer, size + 1);
    assert_int_equal(safetensors_open(&f, cut, error, sizeof error), -1);
    RngStream r = rng_stream(11, 0, 0);
    for (int i = 0; i < 2000; i++) {
        uint32_t w = rng_word(r, (uint64_t)i), at = w % 600;
        longer[at] ^= (char)(1 << (w >> 29));
        file_put(cut, longer, size);
        longer[at] = bytes[at];
        if (safetensors_open(&f, cut, error, sizeof error) != 0) continue;
        for (int t = 0; t < f.count; t++) {
            float *values = (float *)xcalloc((size_t)f.tensors[t].count, sizeof(float));
            (void)safetensors_read(&f, &f.tensors[t], 0, f.tensors[t].count, values, error, sizeof error);
            free(values);
        }
        safetensors_close(&f);
    }
    free(bytes);
    free(longer);
    free(path);
    free(cut);
}
// CRC-32C: the published check value, and the definition bit by bit, over every length and split.
static uint32_t crc_by_bits(const uint8_t *p, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            uint32_t carry = (crc ^ (uint32_t)(p[i] >> bit)) & 1u;
            crc = (crc >> 1) ^ (carry ? 0x82F63B78u : 0u);
        }
    return ~crc;
}
static void test_crc32c(void **state) {
    (void)state;
    uint8_t data[100];
    assert_int_equal(crc32c(0, "123456789", 9), 0xE3069283u);
    for (int i = 0; i < 100; i++) data[i] = (uint8_t)rng_word(rng_stream(3, 0, 0), (uint64_t)i);
    for (size_t n = 0; n <= 100; n++) {
        assert_int_equal(crc32c(0, data, n), crc_by_bits(data, n));
        assert_int_equal(crc32c(crc32c(0, data, n), data + n, 100 - n), crc_by_bits(data, 100));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_independent_reader), cmocka_unit_test(test_lying_headers),
        cmocka_unit_test(test_cut_and_changed_files), cmocka_unit_test(test_crc32c)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
