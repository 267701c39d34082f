// test_dataloader.c: the loader against a brute-force reference that knows nothing of shards, its shuffle, and every shard it must
// refuse. Integers throughout: no tolerances.
#include "dev/test/expect.h"
#include "llmc/dataloader.h"

// Writes a shard of tokens (count) with 2 or 4 bytes each.
static void shard_put(const char *path, int token_bytes, const uint32_t *tokens, int64_t count) {
    const size_t size = 1024 + (size_t)(count * token_bytes);
    uint8_t *file = xcalloc(size, 1);
    const int32_t header[3] = {token_bytes == 2 ? 20240520 : 20240801, token_bytes == 2 ? 1 : 7, (int32_t)count};
    memcpy(file, header, sizeof header);
    for (int64_t i = 0; i < count; i++) {
        const uint16_t small = (uint16_t)tokens[i];
        memcpy(file + 1024 + i * token_bytes, token_bytes == 2 ? (const void *)&small : (const void *)&tokens[i], (size_t)token_bytes);
    }
    file_put(path, file, size);
    free(file);
}
static uint32_t token_at(int64_t i, int vocab) { return (uint32_t)((uint64_t)i * 2654435761u >> 7) % (uint32_t)vocab; }

// A stream of the tokens token_at(0 .. total-1) cut into shards of the given counts; widths cycles over 2 and 4.
static void stream_put(const int64_t *counts, int shards, int vocab, const int *widths) {
    int64_t at = 0;
    for (int s = 0; s < shards; s++) {
        uint32_t *tokens = xcalloc((size_t)counts[s], sizeof *tokens);
        for (int64_t i = 0; i < counts[s]; i++) tokens[i] = token_at(at + i, vocab);
        char name[32];
        snprintf(name, sizeof name, "t_%03d.bin", s);
        shard_put(folder_path(name), widths[s % 2], tokens, counts[s]);
        free(tokens);
        at += counts[s];
    }
}
static void stream_clear(void) {
    glob_t found;
    if (glob(folder_path("*"), 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) remove(found.gl_pathv[i]);
        globfree(&found);
    }
}

// Every sample of two epochs, shuffled and not, equals the stream at some i*T, whole and shifted; each i once an epoch.
static void check_stream(const int64_t *counts, int shards, int seq, int vocab, const int *widths) {
    int64_t total = 0;
    for (int s = 0; s < shards; s++) total += counts[s];
    stream_put(counts, shards, vocab, widths);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        DataLoader d;
        dataloader_open(&d, folder_path("t_*.bin"), seq, vocab, 11, shuffle);
        assert_int_equal(d.num_shards, shards);
        assert_int_equal(d.num_tokens, total);
        assert_int_equal(d.num_samples, (total - 1) / seq);
        int32_t *tokens = xcalloc((size_t)seq, 4), *targets = xcalloc((size_t)seq, 4);
        uint8_t *seen = xcalloc((size_t)d.num_samples, 1);
        for (int64_t k = 0; k < 2 * d.num_samples; k++) {
            dataloader_sample(&d, k, tokens, targets);
            int64_t i = k % d.num_samples;
            if (shuffle) {                                       // find it: token_at is injective enough over a whole window
                for (i = 0; i < d.num_samples; i++) {
                    int t = 0;
                    while (t < seq && (uint32_t)tokens[t] == token_at(i * seq + t, vocab) && (uint32_t)targets[t] == token_at(i * seq + t + 1, vocab)) t++;
                    if (t == seq && seen[i] == k / d.num_samples) break;
                }
                assert_true(i < d.num_samples);
            }
            for (int t = 0; t < seq; t++) {
                assert_int_equal(tokens[t], token_at(i * seq + t, vocab));
                assert_int_equal(targets[t], token_at(i * seq + t + 1, vocab));
            }
            seen[i]++;
        }
        for (int64_t i = 0; i < d.num_samples; i++) assert_int_equal(seen[i], 2);
        free(tokens); free(targets); free(seen);
        dataloader_close(&d);
    }
    stream_clear();
}
static void test_reference(void **state) {
    (void)state;
    const int u16[] = {2, 2}, u32[] = {4, 4}, mixed[] = {2, 4};
    const int64_t one[] = {1000}, three[] = {7, 1, 400}, tiny[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, exact[] = {64, 65};
    check_stream(one, 1, 16, 256, u16);
    check_stream(one, 1, 16, 100000, u32);
    check_stream(three, 3, 5, 65536, u16);
    check_stream(three, 3, 407, 65536, u16);             // one sample that crosses every shard: 408 tokens, T + 1 = 408
    check_stream(tiny, 13, 3, 30000, mixed);             // a sample of four tokens lies in four shards
    check_stream(tiny, 13, 1, 30000, mixed);
    check_stream(exact, 2, 64, 50257, mixed);            // 129 = 2 * 64 + 1 tokens: none left over
}
// A batch is its samples in turn, at any first sample: this is what makes the rank count and resuming free.
static void test_batch(void **state) {
    (void)state;
    const int64_t counts[] = {333, 500};
    const int widths[] = {2, 2};
    stream_put(counts, 2, 1000, widths);
    DataLoader d;
    dataloader_open(&d, folder_path("t_*.bin"), 8, 1000, 5, 1);
    int32_t a[6 * 8], b[6 * 8], x[8], y[8], again = 0;
    for (int64_t first = 0; first < 3 * d.num_samples; first += 7) {      // batches straddle the ends of epochs
        dataloader_batch(&d, first, 6, a, b);
        for (int i = 0; i < 6; i++) {
            dataloader_sample(&d, first + i, x, y);
            assert_memory_equal(x, a + i * 8, sizeof x);
            assert_memory_equal(y, b + i * 8, sizeof y);
        }
    }
    for (int64_t i = 0; i < d.num_samples; i++) {                         // the next epoch has another order: of 104 samples
        dataloader_sample(&d, i, x, y);                                   // about one keeps its place (Poisson: above 8 is 1e-6)
        dataloader_sample(&d, i + d.num_samples, a, b);
        again += memcmp(x, a, sizeof x) == 0;
    }
    assert_true(again <= 8);
    dataloader_close(&d);
    stream_clear();
}

// shuffle_index is a bijection of 0 .. n-1 for every n, seed and epoch.
static void test_shuffle_bijection(void **state) {
    (void)state;
    const uint64_t seeds[] = {0, 1, 0xFFFFFFFFFFFFFFFFull, 1234567890123ull};
    const int64_t large[] = {257, 1023, 1024, 1025, 7919, 65537, 100003};
    uint8_t *seen = xcalloc(200000, 1);
    for (int k = 0; k < 130 + 7; k++) {
        const int64_t n = k < 130 ? k + 1 : large[k - 130];
        for (int s = 0; s < 4; s++)
            for (int64_t epoch = 0; epoch < (n < 2000 ? 3 : 1); epoch++) {
                memset(seen, 0, (size_t)n);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t j = shuffle_index(i, n, seeds[s], epoch);
                    assert_true(j >= 0 && j < n);
                    assert_int_equal(seen[j]++, 0);
                }
            }
    }
    free(seen);
    for (int64_t i = 0; i < 1000; i++) {                                  // 64-bit positions: far beyond 2^32 samples
        const int64_t n = (int64_t)3 << 40, j = shuffle_index(n - 1 - i, n, 7, 0);
        assert_true(j >= 0 && j < n);
    }
}
// The shuffle looks random. Over 6000 (seed, epoch) pairs the place of each of 6 items is uniform: chi-square with 5 degrees
// of freedom is above 27.9 with probability 4e-5, and there are 6. Of 4096 items about one stays where it was (Poisson of mean
// 1: above 9 with probability 1e-7), about one keeps its successor, and displacement averages n/3 (standard deviation
// about 0.24 n / sqrt(4096) = 0.004 n; 0.02 n is five of them).
static void test_shuffle_random(void **state) {
    (void)state;
    int64_t places[6][6] = {{0}};
    for (uint64_t seed = 0; seed < 1000; seed++)
        for (int64_t epoch = 0; epoch < 6; epoch++)
            for (int64_t i = 0; i < 6; i++) places[i][shuffle_index(i, 6, seed, epoch)]++;
    for (int i = 0; i < 6; i++) {
        double chi = 0;
        for (int j = 0; j < 6; j++) chi += (double)((places[i][j] - 1000) * (places[i][j] - 1000)) / 1000;
        assert_true(chi < 27.9);
    }
    const int64_t n = 4096;
    for (int64_t epoch = 0; epoch < 4; epoch++) {
        int64_t fixed = 0, successors = 0, agree = 0;
        double moved = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t j = shuffle_index(i, n, 42, epoch);
            fixed += j == i;
            successors += i + 1 < n && shuffle_index(i + 1, n, 42, epoch) == j + 1;
            agree += shuffle_index(i, n, 42, epoch + 1) == j;
            moved += fabs((double)(j - i)) / (double)n;
        }
        assert_true(fixed <= 9 && successors <= 9 && agree <= 9);
        assert_true(fabs(moved / (double)n - 1.0 / 3.0) < 0.02);
    }
}

static uint64_t fingerprint_of(const char *pattern) {
    DataLoader d;
    dataloader_open(&d, pattern, 4, 65536, 0, 1);
    const uint64_t f = dataloader_fingerprint(&d);
    dataloader_close(&d);
    return f;
}
// Sparse shards of 2.5 GB: positions past 2^31 bytes and past 2^31 tokens. Skipped where the file system has no sparse files.
static void test_large(void **state) {
    (void)state;
    const int32_t count = 1250000000;
    for (int s = 0; s < 3; s++) {
        char name[32];
        snprintf(name, sizeof name, "big_%d.bin", s);
        const char *path = folder_path(name);
        const int32_t header[3] = {20240520, 1, count};
        file_put(path, header, sizeof header);
        if (truncate(path, 1024 + (off_t)count * 2) != 0) { stream_clear(); skip(); }
    }
    int fd = open(folder_path("big_2.bin"), O_WRONLY);
    const uint16_t marks[4] = {11, 22, 33, 44};
    assert_int_equal(pwrite(fd, marks, sizeof marks, 1024 + (off_t)(count - 5) * 2), sizeof marks);  // stream: 3 749 999 995 on
    close(fd);
    DataLoader d;
    dataloader_open(&d, folder_path("big_*.bin"), 4, 50257, 0, 0);
    assert_int_equal(d.num_tokens, 3750000000LL);
    assert_int_equal(d.num_samples, 937499999LL);
    int32_t x[4], y[4];
    dataloader_sample(&d, 937499998LL, x, y);                             // tokens 3 749 999 992 .. 996
    const int32_t want_x[4] = {0, 0, 0, 11}, want_y[4] = {0, 0, 11, 22};
    assert_memory_equal(x, want_x, sizeof x);
    assert_memory_equal(y, want_y, sizeof y);
    dataloader_sample(&d, 937499998LL - 1 + d.num_samples, x, y);         // the next epoch
    assert_int_equal(y[3], 0);
    const uint64_t f = dataloader_fingerprint(&d);                        // the last run of a shard ends at its last token
    dataloader_close(&d);
    fd = open(folder_path("big_2.bin"), O_WRONLY);
    assert_int_equal(pwrite(fd, marks, 2, 1024 + (off_t)(count - 1) * 2), 2);
    close(fd);
    assert_true(f != fingerprint_of(folder_path("big_*.bin")));
    stream_clear();
}

// Other text, another order or another cut: another fingerprint. Another name or folder: the same.
static void test_fingerprint(void **state) {
    (void)state;
    uint32_t a[600], b[600];
    for (int i = 0; i < 600; i++) a[i] = b[i] = token_at(i, 65536);
    b[300] ^= 1;
    shard_put(folder_path("a_0.bin"), 2, a, 600); shard_put(folder_path("a_1.bin"), 2, b, 600);
    shard_put(folder_path("b_0.bin"), 2, b, 600); shard_put(folder_path("b_1.bin"), 2, a, 600);
    shard_put(folder_path("c_0.bin"), 2, a, 600); shard_put(folder_path("c_1.bin"), 2, b, 600);
    shard_put(folder_path("d_0.bin"), 2, a, 600); shard_put(folder_path("d_1.bin"), 2, b, 599);
    shard_put(folder_path("e_0.bin"), 4, a, 600); shard_put(folder_path("e_1.bin"), 4, b, 600);
    const uint64_t f = fingerprint_of(folder_path("a_*"));
    assert_true(f == fingerprint_of(folder_path("c_*")));
    assert_true(f != fingerprint_of(folder_path("b_*")));
    assert_true(f != fingerprint_of(folder_path("d_*")));
    assert_true(f != fingerprint_of(folder_path("e_*")));
    assert_true(fingerprint_of(folder_path("a_0*")) != fingerprint_of(folder_path("b_0*")));
    assert_true(f != fingerprint_of(folder_path("a_0*")));
    stream_clear();
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad input

static void open_path(const void *pattern) {
    static DataLoader d;                                                  // static: what fatal() leaves behind is no leak
    dataloader_open(&d, (const char *)pattern, 8, 256, 0, 0);
}
static void read_all(const void *pattern) {
    static DataLoader d;
    int32_t x[8], y[8];
    dataloader_open(&d, (const char *)pattern, 8, 256, 0, 0);
    for (int64_t i = 0; i < d.num_samples; i++) dataloader_sample(&d, i, x, y);
    dataloader_close(&d);
}
static void read_negative(const void *pattern) {
    static DataLoader d;
    int32_t x[8], y[8];
    dataloader_open(&d, (const char *)pattern, 8, 256, 0, 0);
    dataloader_sample(&d, -1, x, y);
}
// A good uint16 shard of 100 tokens with one int32 of the header replaced, or its size changed.
static void header_put(int field, int32_t value, int64_t size) {
    uint8_t file[2048] = {0};
    int32_t header[3] = {20240520, 1, 100};
    if (field >= 0) header[field] = value;
    memcpy(file, header, sizeof header);
    file_put(folder_path("x.bin"), file, (size_t)size);
}
static void test_bad_shards(void **state) {
    (void)state;
    const char *x = folder_path("x.bin");
    expect_fatal(open_path, folder_path("none_*.bin"), "none_*.bin|no file matches|data/prepare.py");
    expect_fatal(open_path, test_folder, "not a regular file");
    header_put(-1, 0, 1224);
    read_all(x);                                                          // the good one is good
    const int32_t magics[] = {0, 1, -1, 20240519, 20240521, 20240801, INT32_MIN, INT32_MAX};
    for (int i = 0; i < 8; i++) {
        header_put(0, magics[i], 1224);                                   // 20240801 goes with version 7
        expect_fatal(open_path, x, magics[i] == 20240801 ? "x.bin|version at byte 4 is 1" : "x.bin|magic at byte 0|data/prepare.py");
    }
    const int32_t versions[] = {0, 2, 7, -1, INT32_MIN, INT32_MAX};
    for (int i = 0; i < 6; i++) { header_put(1, versions[i], 1224); expect_fatal(open_path, x, "x.bin|version at byte 4"); }
    const int32_t counts[] = {0, -1, INT32_MIN};
    for (int i = 0; i < 3; i++) { header_put(2, counts[i], 1224); expect_fatal(open_path, x, "x.bin|token count at byte 8|empty"); }
    header_put(2, 0, 1024); expect_fatal(open_path, x, "x.bin|token count at byte 8 is 0");
    const int32_t long_counts[] = {101, 1000000, INT32_MAX};
    for (int i = 0; i < 3; i++) { header_put(2, long_counts[i], 1224); expect_fatal(open_path, x, "x.bin|1224 bytes|cut short"); }
    header_put(2, 99, 1224); expect_fatal(open_path, x, "x.bin|too long");
    for (int64_t size = 0; size < 1224; size += size < 16 || size > 1015 ? 1 : 37) {   // cut anywhere
        header_put(-1, 0, size);
        expect_fatal(open_path, x, size < 1024 ? "x.bin|header" : "x.bin|cut short");
    }
    header_put(-1, 0, 1225); expect_fatal(open_path, x, "x.bin|1225 bytes|too long");
    stream_clear();
}
static void test_short_text(void **state) {
    (void)state;
    const uint32_t tokens[9] = {0};
    shard_put(folder_path("x.bin"), 2, tokens, 8);                        // T = 8 takes nine
    expect_fatal(open_path, folder_path("x.bin"), "x.bin|8 tokens|needs 9|--seq");
    shard_put(folder_path("x.bin"), 2, tokens, 1);
    expect_fatal(open_path, folder_path("x.bin"), "x.bin|1 tokens|needs 9");
    shard_put(folder_path("x.bin"), 2, tokens, 9);
    read_all(folder_path("x.bin"));
    expect_fatal(read_negative, folder_path("x.bin"), "sample -1");
    stream_clear();
}
static void test_bad_tokens(void **state) {
    (void)state;
    uint32_t tokens[100] = {0};
    const int places[] = {0, 7, 8, 50, 96};                               // the last of the 12 samples' 97 tokens is 96
    const uint32_t ids16[] = {256, 65535}, ids32[] = {256, 65536, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu};
    char words[128];
    for (int p = 0; p < 5; p++)
        for (int k = 0; k < 7; k++) {
            const uint32_t id = k < 2 ? ids16[k] : ids32[k - 2];
            tokens[places[p]] = id;
            shard_put(folder_path("x.bin"), k < 2 ? 2 : 4, tokens, 100);
            snprintf(words, sizeof words, "x.bin|token %d (byte %d) is id %u|vocabulary has 256", places[p], 1024 + places[p] * (k < 2 ? 2 : 4), id);
            expect_fatal(read_all, folder_path("x.bin"), words);
            tokens[places[p]] = 0;
        }
    tokens[96] = tokens[50] = tokens[8] = tokens[7] = tokens[0] = 255;    // the largest that is allowed
    shard_put(folder_path("x.bin"), 4, tokens, 100);
    read_all(folder_path("x.bin"));
    shard_put(folder_path("w.bin"), 2, tokens, 100);                      // the second shard is the one that is named
    tokens[3] = 999;
    shard_put(folder_path("x.bin"), 4, tokens, 100);
    expect_fatal(read_all, folder_path("?.bin"), "x.bin|token 3 (byte 1036) is id 999");
    stream_clear();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference), cmocka_unit_test(test_batch), cmocka_unit_test(test_shuffle_bijection),
        cmocka_unit_test(test_shuffle_random), cmocka_unit_test(test_large), cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_bad_shards), cmocka_unit_test(test_short_text), cmocka_unit_test(test_bad_tokens),
    };
    return cmocka_run_group_tests(tests, test_folder_make, test_folder_remove);
}
