// test_recipes: every recipe of the table trains a small model on real text (bytes of this program's sources) nearly as well as
// bf16 does from the same start on the same batches.
#include "dev/test/expect.h"
#include "llmc/cpu/backend.h"

// The result is the mean loss of the last LAST steps. Under a sanitizer, which looks for faults and takes its time, a few steps do and
// no gap is judged.
#ifdef __SANITIZE_ADDRESS__
enum { B = 4, T = 64, STEPS = 4, LAST = 2, JUDGED = 0 };
#else
enum { B = 4, T = 64, STEPS = 100, LAST = 20, JUDGED = 1 };
#endif

static uint8_t text[1 << 17];
static int64_t text_size;
static int text_read(void **state) {
    (void)state;
    static const char *const files[] = {"llmc/common.h", "llmc/rng.h", "llmc/llama.h", "llmc/cpu/ops.h", "llmc/cpu/attention.h",
                                        "llmc/cpu/backend.h"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        FILE *f = fopen(files[i], "rb");
        if (!f) { print_error("%s: cannot open; run the tests from the repository root\n", files[i]); return -1; }
        text_size += (int64_t)fread(text + text_size, 1, sizeof text - (size_t)text_size, f);
        fclose(f);
    }
    return text_size > 16 * B * T ? 0 : -1;
}
// The mean training loss of the last steps. Every batch is new: the text is longer than the run.
static double train(const char *recipe) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    const LlamaConfig c = {2, 128, 2, 2, 128, 256, T, 0, 1e-5f, 1e4f};
    o.config = c;
    o.recipe = recipe_find(recipe);
    o.batch = B; o.micro_batches = 1; o.seed = 42; o.master_fp32 = 1;
    Llama *m = llama_create(&o);
    llama_init(m);
    double mean = 0;
    for (int step = 0; step < STEPS; step++) {
        int32_t tokens[B * T], targets[B * T];
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                const int64_t at = ((int64_t)(step * B + b) * 7919 % (text_size / T - 1)) * T + t;  // a prime: far apart, no repeats
                tokens[b * T + t] = text[at]; targets[b * T + t] = text[at + 1];
            }
        const float lr = 1e-3f * (step < 10 ? (float)(step + 1) / 10 : 1 - 0.9f * (float)(step - 10) / (STEPS - 10));
        const AdamWOptions a = {lr, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
        llama_step_begin(m, step);
        llama_micro_step(m, 0, tokens, targets);
        llama_step_end(m, &a);
        const StepResult r = llama_step_result(m);
        assert_true(r.finite);
        if (step >= STEPS - LAST) mean += r.loss / LAST;
    }
    llama_free(m);
    return mean;
}
// How far behind bf16 a recipe may be, in nats. Measured: fp32 and FP8 within 0.01, the 4-bit recipes from -0.06 (noise is not bad for
// so short a run) to 0.03; other seeds and texts move that by 0.02. Broken on purpose: quartet with dX left in its rotated space 0.76,
// nvidia with the sign of dX wrong 2.8.
#define GAP_FP8 0.03
#define GAP_FP4 0.08
#define AHEAD -0.15
static void every_recipe_is_near_bf16(void **state) {
    (void)state;
    const double bf16 = train("bf16");
    print_message("%-22s loss %.4f\n", "bf16", bf16);
    if (JUDGED) assert_true(bf16 < 3.15);                              // the text is learnt: log(256) = 5.5, its byte frequencies 3.3
    for (int r = 0; r < RECIPE_COUNT; r++) {
        const char *name = RECIPES[r].name;
        if (strcmp(name, "bf16") == 0) continue;
        const double gap = train(name) - bf16, limit = strncmp(name, "fp8", 3) == 0 || strcmp(name, "fp32") == 0 ? GAP_FP8 : GAP_FP4;
        print_message("%-22s gap %+.4f\n", name, gap);
        if (JUDGED && !(gap < limit && gap > AHEAD)) fail_msg("%s is %+.4f from bf16, the limit is %.2f", name, gap, limit);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_recipe_is_near_bf16)};
    return cmocka_run_group_tests_name("recipes", tests, text_read, NULL);
}
