// bench_cpu: milliseconds a training step of preset tiny on the CPU, each recipe, and the ratios that matter.
//   make bench-cpu        or: build/bench_cpu [batch [rounds]]
// Recipes take turns, and the least time of each is reported, so that another program on the machine disturbs all alike.
#include <time.h>

#include "llmc/cpu/backend.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static LlamaOptions tiny_options(const char *recipe, int batch) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    LlamaConfig c = {4, 128, 2, 2, 512, 256, 128, 0, 1e-5f, 1e4f};
    o.config = c;
    o.recipe = recipe_find(recipe);
    o.batch = batch; o.micro_batches = 1; o.seed = 1;
    return o;
}
static double step_time(Llama *m, int64_t step, const int32_t *tokens) {
    AdamWOptions adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
    const double start = now();
    llama_step_begin(m, step);
    llama_micro_step(m, 0, tokens, tokens + 1);
    llama_step_end(m, &adamw);
    if (!llama_step_result(m).finite) fatal("step %lld: the loss is not finite", (long long)step);
    return now() - start;
}

int main(int argc, char **argv) {
    const int batch = argc > 1 ? atoi(argv[1]) : 16, rounds = argc > 2 ? atoi(argv[2]) : 8;
    if (batch < 1 || rounds < 1 || argc > 3) fatal_usage("bench_cpu [batch [rounds]]: both are positive");
    static const char *const names[] = {"fp32", "bf16", "quartet2", "quartet2-no46"};
    enum { RECIPE_RUNS = sizeof names / sizeof names[0] };
    Llama *models[RECIPE_RUNS];
    double best[RECIPE_RUNS];
    for (int r = 0; r < RECIPE_RUNS; r++) {
        LlamaOptions o = tiny_options(names[r], batch);
        models[r] = llama_create(&o);
        llama_init(models[r]);
        best[r] = 1e30;
    }
    const int64_t count = (int64_t)batch * models[0]->options.config.seq;
    int32_t *tokens = (int32_t *)xcalloc((size_t)count + 1, sizeof(int32_t));
    const RngStream random = rng_stream(1, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i <= count; i++) tokens[i] = (int32_t)(rng_word(random, (uint64_t)i) & 255);

    for (int round = 0; round < rounds; round++)
        for (int r = 0; r < RECIPE_RUNS; r++) {
            const double t = step_time(models[r], round, tokens);
            if (t < best[r]) best[r] = t;
        }
    printf("tiny, batch %d x %d tokens, %s; least of %d steps\n", batch, models[0]->options.config.seq, llama_device_name(models[0]), rounds);
    printf("%-14s %9s %12s %9s %9s\n", "recipe", "ms/step", "tokens/s", "/ fp32", "/ bf16");
    for (int r = 0; r < RECIPE_RUNS; r++) {
        printf("%-14s %9.2f %12.0f %9.2f %9.2f\n", names[r], 1e3 * best[r], (double)count / best[r], best[r] / best[0], best[r] / best[1]);
        llama_free(models[r]);
    }
    free(tokens);
    return 0;
}
