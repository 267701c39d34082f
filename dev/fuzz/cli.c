// The command line: words, one a line of the input.
#include "fuzz.h"
#include "dev/test/fake_backend.h"
#include "llmc/config.h"

static void read_words(const char *path) {
    static RunConfig c;
    enum { MOST = 64 };
    char error[ERROR_TEXT], *argv[MOST + 2], *rest;
    int64_t size = 0;
    int n = 0;
    char *text = file_read_text(path, 1 << 16, &size, error, sizeof error);
    if (!text) return;
    argv[n++] = (char *)"train";
    for (char *word = strtok_r(text, "\n", &rest); word && n <= MOST; word = strtok_r(NULL, "\n", &rest)) argv[n++] = word;
    argv[n] = NULL;
    config_parse(&c, n, argv);
    if (c.check) { free(text); return; }                   // no run is described
    fuzz_check(c.steps >= 1 && c.batch * c.seq % 128 == 0 && c.lr > 0 && c.warmup_steps < c.steps, "a run's numbers fit");
    for (int64_t step = 0; step < c.steps && step < 3; step++) {
        const AdamWOptions a = config_adamw(&c, step);
        fuzz_check(isfinite(a.lr) && a.lr >= 0, "the learning rate is finite");
    }
    config_print(&c, stdout);
    free(text);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_words, data, size);
    return 0;
}
