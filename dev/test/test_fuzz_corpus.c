// test_fuzz_corpus.c: every stored input of dev/fuzz/corpus, and mutations of each, through the fuzz targets: no crash, no broken
// promise (fuzz_check), no allocation beyond reason. Under sanitizers this is where they see bytes from strangers.
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#define LLVMFuzzerTestOneInput fuzz_shard
#include "dev/fuzz/shard.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_safetensors
#include "dev/fuzz/safetensors.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_tokenizer
#include "dev/fuzz/tokenizer.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_json
#include "dev/fuzz/json.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_cli
#include "dev/fuzz/cli.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_index
#include "dev/fuzz/index.c"
#undef LLVMFuzzerTestOneInput
#undef exit
#undef free
#undef posix_memalign
#undef mmap
#undef munmap

enum { MUTATIONS = 1000, LONGEST = 1 << 16, HASH_NAME = 40 };

typedef struct { const char *name; int (*target)(const uint8_t *data, size_t size); } Target;

// One to four small changes: a bit, a byte of note, a byte gone, a run copied elsewhere, the end cut off.
static size_t mutate(uint8_t *data, size_t size, RngStream r, uint64_t *word) {
    static const uint8_t notable[] = {0, 1, 9, 10, 34, 44, 45, 46, 48, 57, 58, 91, 93, 101, 123, 125, 127, 128, 254, 255};
    for (int k = 0, n = 1 + (int)(rng_word(r, (*word)++) % 4); k < n && size > 0; k++) {
        const uint32_t kind = rng_word(r, (*word)++) % 6;
        const size_t at = rng_word(r, (*word)++) % size, from = rng_word(r, (*word)++) % size, length = 1 + rng_word(r, (*word)++) % 16;
        if (kind == 0) data[at] ^= (uint8_t)(1 << length % 8);
        else if (kind == 1) data[at] = notable[from % sizeof notable];
        else if (kind == 2) { memmove(data + at, data + at + 1, size - at - 1); size--; }
        else if (kind == 3) memmove(data + at, data + from, length < size - (at > from ? at : from) ? length : size - (at > from ? at : from));
        else if (kind == 4) size = at;
        else if (size + length <= LONGEST) { memmove(data + at + length, data + at, size - at); size += length; }
    }
    return size;
}
static void replay(const Target *t) {
    static uint8_t data[LONGEST], changed[LONGEST];  // not from xcalloc(), which is the harness's here
    char folder[PATH_TEXT], path[PATH_TEXT], error[ERROR_TEXT];
    int files = 0;
    uint64_t word = 0;
    snprintf(folder, sizeof folder, "dev/fuzz/corpus/%s", t->name);
    DIR *d = opendir(folder);
    if (!d) fail_msg("%s: cannot open; run this from the repository root", folder);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        int64_t size = 0;
        path_join(path, folder, e->d_name);
        const int fd = file_open(path, &size, error, sizeof error);
        if (fd < 0 || size > LONGEST || file_read_at(fd, path, data, size, 0, error, sizeof error) != 0) fail_msg("%s: cannot be read here", path);
        close(fd);
        (void)t->target(data, (size_t)size);
        // The mutations of a file do not depend on the order in which the folder lists it.
        const RngStream r = rng_stream(crc32c(0, e->d_name, strlen(e->d_name)), 0, 0);
        word = 0;
        // Inputs with a hash for a name are what libFuzzer found of interest among mutations: they stand for themselves.
        const int mutations = strlen(e->d_name) == HASH_NAME ? 0 : MUTATIONS;
        for (int i = 0; i < mutations; i++) {
            memcpy(changed, data, (size_t)size);
            (void)t->target(changed, mutate(changed, (size_t)size, r, &word));
        }
        files++;
    }
    closedir(d);
    assert_true(files >= 5);
}
// The readers tell what is wrong on stderr, thousands of times here.
static void quietly(const Target *t) {
    fflush(NULL);
    const int out = dup(1), err = dup(2), none = open("/dev/null", O_WRONLY);
    assert_true(out >= 0 && err >= 0 && none >= 0);
    dup2(none, 1);
    dup2(none, 2);
    replay(t);
    fflush(NULL);
    dup2(out, 1);
    dup2(err, 2);
    close(none); close(out); close(err);
}
static void test_shard(void **state) { const Target t = {"shard", fuzz_shard}; (void)state; quietly(&t); }
static void test_safetensors(void **state) { const Target t = {"safetensors", fuzz_safetensors}; (void)state; quietly(&t); }
static void test_tokenizer(void **state) { const Target t = {"tokenizer", fuzz_tokenizer}; (void)state; quietly(&t); }
static void test_json(void **state) { const Target t = {"json", fuzz_json}; (void)state; quietly(&t); }
static void test_cli(void **state) { const Target t = {"cli", fuzz_cli}; (void)state; quietly(&t); }
static void test_index(void **state) { const Target t = {"index", fuzz_index}; (void)state; quietly(&t); }

// The harness sees what it is there for: an exit comes back with its status, memory that a reader left is counted and returned.
static void leave(const char *path) {
    (void)path;
    (void)xcalloc(100, 1);
    fatal_usage("on purpose");
}
static void give_up(const char *path) {
    fuzz_take((malloc)(10), 0);
    assert_int_equal(access(path, R_OK), 0);
    fuzz_exit(1);
}
static void test_harness(void **state) {
    (void)state;
    assert_int_equal(fuzz_run(give_up, (const uint8_t *)"abc", 3), 2);
    assert_int_equal(fuzz_count, 0);
    fflush(NULL);
    const int err = dup(2), none = open("/dev/null", O_WRONLY);
    dup2(none, 2);
    const int status = fuzz_run(leave, (const uint8_t *)"abc", 3);
    dup2(err, 2);
    close(none); close(err);
    assert_int_equal(status, 3);
    assert_int_equal(fuzz_count, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_harness), cmocka_unit_test(test_shard), cmocka_unit_test(test_safetensors),
                                       cmocka_unit_test(test_tokenizer), cmocka_unit_test(test_json), cmocka_unit_test(test_cli), cmocka_unit_test(test_index)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
