// test_tokenizer.c: ids to bytes, every tokenizer.bin it must refuse, and text that is safe to show. Exact throughout.
#include "dev/test/expect.h"
#include "llmc/tokenizer.h"

// A tokenizer.bin of 5 tokens: "a", "" (an id that stands for nothing), a token of 255 bytes, and the two halves of U+00E9.
static uint8_t good[1024 + 5 + 1 + 0 + 255 + 1 + 1];
static void good_make(void) {
    const int32_t header[4] = {20240328, 2, 5, 1};
    memset(good, 0, sizeof good);
    memcpy(good, header, sizeof header);
    uint8_t *p = good + 1024;
    *p++ = 1; *p++ = 'a';
    *p++ = 0;
    *p++ = 255; for (int i = 0; i < 255; i++) *p++ = (uint8_t)(i + 1);
    *p++ = 1; *p++ = 0xC3;
    *p++ = 1; *p++ = 0xA9;
    assert_true(p == good + sizeof good);
}
static void test_decode(void **state) {
    (void)state;
    good_make();
    file_put(folder_path("tokenizer.bin"), good, sizeof good);
    Tokenizer t;
    int n;
    tokenizer_open(&t, folder_path("tokenizer.bin"));
    assert_int_equal(t.vocab, 5);
    assert_int_equal(t.eot, 1);
    assert_memory_equal(tokenizer_decode(&t, 0, &n), "a", 1);
    assert_int_equal(n, 1);
    tokenizer_decode(&t, 1, &n);
    assert_int_equal(n, 0);
    const uint8_t *p = tokenizer_decode(&t, 2, &n);
    assert_int_equal(n, 255);
    for (int i = 0; i < 255; i++) assert_int_equal(p[i], i + 1);
    const int ids[] = {3, 4};                                             // a character over two tokens
    for (int i = 0; i < 2; i++) {
        p = tokenizer_decode(&t, ids[i], &n);
        assert_int_equal(n, 1);
        assert_int_equal(p[0], i ? 0xA9 : 0xC3);
    }
    tokenizer_close(&t);
}

static void open_path(const void *path) {
    Tokenizer t;
    tokenizer_open(&t, (const char *)path);
}
static void decode_id(const void *id) {
    Tokenizer t;
    int n;
    tokenizer_open(&t, folder_path("tokenizer.bin"));
    tokenizer_decode(&t, *(const int *)id, &n);
}
static void test_bad_ids(void **state) {
    (void)state;
    good_make();
    file_put(folder_path("tokenizer.bin"), good, sizeof good);
    const int ids[] = {-1, 5, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) expect_fatal(decode_id, &ids[i], "outside the tokenizer's vocabulary of 5");
}
static void test_bad_files(void **state) {
    (void)state;
    const char *path = folder_path("bad.bin");
    expect_fatal(open_path, folder_path("missing.bin"), "missing.bin|data/prepare.py");
    expect_fatal(open_path, test_folder, "not a regular file");
    static const struct { int field; int32_t value; const char *words; } cases[] = {
        {0, 0, "bad.bin|magic at byte 0"}, {0, 20240520, "bad.bin|magic at byte 0"}, {1, 1, "bad.bin|version at byte 4"},
        {1, -2, "bad.bin|version at byte 4"}, {2, 0, "bad.bin|vocabulary at byte 8"}, {2, -5, "bad.bin|vocabulary at byte 8"},
        {2, INT32_MIN, "bad.bin|vocabulary at byte 8"}, {2, INT32_MAX, "bad.bin|vocabulary at byte 8"}, {2, 1, "bad.bin|vocabulary at byte 8"},
        {2, 4, "bad.bin|2 bytes follow the last token"}, {2, 6, "bad.bin|ends inside token 5 of 6"}, {3, -1, "bad.bin|end-of-text id at byte 12"},
        {3, 5, "bad.bin|end-of-text id at byte 12"}, {3, INT32_MAX, "bad.bin|end-of-text id at byte 12"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        good_make();
        memcpy(good + 4 * cases[i].field, &cases[i].value, 4);
        file_put(path, good, sizeof good);
        expect_fatal(open_path, path, cases[i].words);
    }
    good_make();
    for (size_t size = 0; size < sizeof good; size += size < 20 || size > 1015 ? 1 : 41) {    // cut anywhere
        file_put(path, good, size);
        expect_fatal(open_path, path, size < 1024 ? "bad.bin|header" : size < 1029 ? "bad.bin|vocabulary" : "bad.bin|the file ends inside token");
    }
    good[1024] = 0;                                                       // one length wrong: the last token is left over
    file_put(path, good, sizeof good);
    expect_fatal(open_path, path, "bad.bin");
}

static void check_escape(const char *bytes, size_t count, const char *want) {
    char *text = text_escape((const uint8_t *)bytes, count);
    assert_string_equal(text, want);
    free(text);
}
static void test_escape(void **state) {
    (void)state;
    check_escape("", 0, "");
    check_escape("plain\n\ttext", 11, "plain\n\ttext");
    check_escape("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 9, "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    check_escape("\x1b[2J\r\0\x7f", 7, "\\x1b[2J\\x0d\\x00\\x7f");
    check_escape("\xC2\x9B" "31m", 5, "\\xc2\\x9b31m");                    // U+009B is a terminal's ESC [
    check_escape("\xC2\xA0", 2, "\xC2\xA0");
    check_escape("\xFF\xC3", 2, "\\xff\\xc3");
    check_escape("\xC0\xAF", 2, "\\xc0\\xaf");                            // overlong
    check_escape("\xE0\x9F\xBF", 3, "\\xe0\\x9f\\xbf");
    check_escape("\xED\xA0\x80", 3, "\\xed\\xa0\\x80");                   // surrogate
    check_escape("\xF4\x90\x80\x80", 4, "\\xf4\\x90\\x80\\x80");          // above U+10FFFF
    check_escape("\xF0\x9F\x98", 3, "\\xf0\\x9f\\x98");                   // cut short
    check_escape("\xE2\x82z", 3, "\\xe2\\x82z");
}
// utf8_length against a decoder written the other way round: every code point encoded, and every byte sequence of up to
// three bytes accepted if and only if it is among those.
static int utf8_encode(uint32_t c, uint8_t *p) {
    if (c < 0x80) { p[0] = (uint8_t)c; return 1; }
    if (c < 0x800) { p[0] = (uint8_t)(0xC0 | c >> 6); p[1] = (uint8_t)(0x80 | (c & 63)); return 2; }
    if (c < 0x10000) { p[0] = (uint8_t)(0xE0 | c >> 12); p[1] = (uint8_t)(0x80 | (c >> 6 & 63)); p[2] = (uint8_t)(0x80 | (c & 63)); return 3; }
    p[0] = (uint8_t)(0xF0 | c >> 18); p[1] = (uint8_t)(0x80 | (c >> 12 & 63)); p[2] = (uint8_t)(0x80 | (c >> 6 & 63)); p[3] = (uint8_t)(0x80 | (c & 63));
    return 4;
}
static void test_utf8(void **state) {
    (void)state;
    int64_t valid = 0, accepted = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t p[4];
        const int n = utf8_encode(c, p), is_surrogate = c >= 0xD800 && c < 0xE000;
        assert_int_equal(utf8_length(p, (size_t)n), is_surrogate ? 0 : n);
        if (n > 1) assert_int_equal(utf8_length(p, (size_t)n - 1), 0);
        valid += n == 3 && !is_surrogate;
    }
    for (uint32_t w = 0; w < 1 << 24; w++) {
        const uint8_t p[3] = {(uint8_t)(w >> 16), (uint8_t)(w >> 8), (uint8_t)w};
        accepted += utf8_length(p, 3) == 3;
    }
    assert_int_equal(accepted, valid);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode), cmocka_unit_test(test_bad_ids), cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_escape), cmocka_unit_test(test_utf8),
    };
    return cmocka_run_group_tests(tests, test_folder_make, test_folder_remove);
}
