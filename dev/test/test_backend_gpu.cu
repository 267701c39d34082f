// test_backend_gpu.cu: what the GPU backend promises beyond its numbers (test_gpt2.cu checks those): making activations again, or
// letting gradients lie in freed activations, changes no bit; a step is repeatable; a step that is not finite is not applied;
// results come in order, one step late; evaluation and logits leave training alone; a tied model's gradient is the sum of both uses.
#include "llmc/cuda/backend.cuh"

static int passed, failed;

PRINTF_LIKE(2, 3)
static void check(int ok, const char *format, ...) {
    va_list args; va_start(args, format);
    printf("%s  ", ok ? "ok    " : "FAILED");
    vprintf(format, args); putchar('\n');
    va_end(args);
    ok ? passed++ : failed++;
}

enum { B = 2, T = 64, VOCAB = 256, STEPS = 3 };

typedef struct {
    ParamTable table;
    float *grads, *params;         // after the first and after the last step, (total)
    StepResult results[STEPS];
    float eval;
    float logits[VOCAB];
} Outcome;

static LlamaOptions options_of(const char *recipe, int recompute, int micro_batches, int tied) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    const LlamaConfig c = {3, 128, 2, 1, 256, VOCAB, T, tied, 1e-5f, 1e4f};
    o.config = c; o.recipe = recipe_find(recipe); o.batch = B; o.micro_batches = micro_batches;
    o.seed = 11; o.recompute = recompute;
    return o;
}
static void tokens_of(int32_t *tokens, int step, int micro) {
    const RngStream s = rng_stream(5, (uint32_t)step, rng_address(RNG_SAMPLE, micro, 0, 0, 0, 0));
    for (int i = 0; i < 2 * B * T; i++) tokens[i] = (int32_t)(rng_word(s, (uint64_t)i) % VOCAB);
}
static AdamWOptions adamw_of(int64_t step) {
    const AdamWOptions o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
    return o;
}
static float *state_read(Llama *m, enum LlamaState what) {
    const ParamTable *t = llama_params(m);
    float *x = (float *)xcalloc((size_t)t->total, sizeof *x);
    for (int i = 0; i < t->count; i++) llama_read(m, what, &t->params[i], x + t->params[i].offset);
    return x;
}
static void step_run(Llama *m, int step) {
    int32_t tokens[2 * B * T];
    llama_step_begin(m, step);
    for (int micro = 0; micro < m->options.micro_batches; micro++) {
        tokens_of(tokens, step, micro);
        llama_micro_step(m, micro, tokens, tokens + B * T);
    }
}
// between: evaluations and logits between the steps.
static Outcome run(const LlamaOptions *o, int between) {
    Outcome r;
    int32_t tokens[2 * B * T];
    memset(&r, 0, sizeof r);
    Llama *m = llama_create(o);
    llama_init(m);
    tokens_of(tokens, 100, 0);
    for (int s = 0; s < STEPS; s++) {
        if (between) { llama_eval(m, tokens, tokens + B * T); llama_logits(m, tokens, 1 + 20 * s, r.logits); }
        step_run(m, s);
        if (s == 0) r.grads = state_read(m, LLAMA_GRADS);
        const AdamWOptions adamw = adamw_of(s);
        llama_step_end(m, &adamw);
        if (s > 0) r.results[s - 1] = llama_step_result(m);
    }
    r.results[STEPS - 1] = llama_step_result(m);
    r.params = state_read(m, LLAMA_PARAMS);
    r.eval = llama_eval(m, tokens, tokens + B * T);
    llama_logits(m, tokens, T / 2 + 1, r.logits);
    llama_free(m);
    r.table = llama_param_table(&o->config);
    return r;
}
static void outcome_free(Outcome *r) { free(r->grads); free(r->params); free(r->table.params); }
static int same(const Outcome *a, const Outcome *b) {
    const size_t bytes = (size_t)a->table.total * sizeof(float);
    return memcmp(a->grads, b->grads, bytes) == 0 && memcmp(a->params, b->params, bytes) == 0 && memcmp(a->results, b->results, sizeof a->results) == 0 &&
           memcmp(&a->eval, &b->eval, sizeof a->eval) == 0 && memcmp(a->logits, b->logits, sizeof a->logits) == 0;
}
static int all_finite(const Outcome *r) {
    int ok = isfinite(r->eval) != 0;
    for (int64_t i = 0; i < r->table.total; i++) ok &= isfinite(r->grads[i]) && isfinite(r->params[i]);
    for (int s = 0; s < STEPS; s++) ok &= r->results[s].finite && isfinite(r->results[s].loss) && r->results[s].grad_norm > 0;
    return ok;
}

static void check_same_bits(const char *recipe, int micro_batches) {
    static const char *const names[] = {"norm", "none", "mlp", "block"};
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, micro_batches, 0);
    Outcome base = run(&o, 0);
    check(all_finite(&base), "%s, %d micro-batches: all finite; losses %.6f %.6f %.6f", recipe, micro_batches, base.results[0].loss, base.results[1].loss, base.results[2].loss);
    Outcome again = run(&o, 1);
    check(same(&base, &again), "%s, %d micro-batches: a second run, with evaluations and logits between its steps, has the same bits", recipe, micro_batches);
    outcome_free(&again);
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        o.recompute = recompute;
        again = run(&o, 0);
        check(same(&base, &again), "%s, %d micro-batches: --recompute %s has the bits of norm", recipe, micro_batches, names[recompute]);
        outcome_free(&again);
    }
    // float64 norm of the gradients that were read, against the device's: GRAD_NORM's sum rounds each square and sum of four in float32.
    double squares = 0;
    for (int64_t i = 0; i < base.table.total; i++) squares += (double)base.grads[i] * base.grads[i];
    check(fabs(sqrt(squares) / base.results[0].grad_norm - 1) < 4 * 0x1p-24 + 0x1p-23, "%s: gradient norm %.6f is that of the gradients", recipe, base.results[0].grad_norm);
    outcome_free(&base);
}
// A weight becomes NaN: the step reports it, and changes neither parameters nor the optimizer's state.
static void check_not_finite(const char *recipe) {
    const LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, 1, 0);
    Llama *m = llama_create(&o);
    llama_init(m);
    const Param *p = param_get(llama_params(m), PARAM_FINAL_NORM, -1);
    float gain[128];
    llama_read(m, LLAMA_PARAMS, p, gain);
    gain[5] = NAN;
    llama_write(m, LLAMA_PARAMS, p, gain);
    float *params = state_read(m, LLAMA_PARAMS), *moments = state_read(m, LLAMA_ADAM_M), *squares = state_read(m, LLAMA_ADAM_V);
    step_run(m, 0);
    const AdamWOptions adamw = adamw_of(0);
    llama_step_end(m, &adamw);
    const StepResult r = llama_step_result(m);
    float *params2 = state_read(m, LLAMA_PARAMS), *moments2 = state_read(m, LLAMA_ADAM_M), *squares2 = state_read(m, LLAMA_ADAM_V);
    const size_t bytes = (size_t)llama_params(m)->total * sizeof(float);
    check(!r.finite, "%s: a NaN weight makes the step not finite", recipe);
    check(!memcmp(params, params2, bytes) && !memcmp(moments, moments2, bytes) && !memcmp(squares, squares2, bytes), "%s: that step was not applied", recipe);
    gain[5] = 1;
    llama_write(m, LLAMA_PARAMS, p, gain);
    step_run(m, 1);
    llama_step_end(m, &adamw);
    const StepResult good = llama_step_result(m);
    check(good.finite && good.loss > 4 && good.loss < 7, "%s: the next step, with a whole weight, is finite (loss %.4f, ln %d = %.4f)", recipe, good.loss, VOCAB, log((double)VOCAB));
    free(params); free(params2); free(moments); free(moments2); free(squares); free(squares2);
    llama_free(m);
}
// Same weights in embedding and lm_head: the tied gradient is the sum of the untied two. Both sums end in float32 roundings of values
// about as large as the result's terms: relative to their largest, 2^-22 is ample.
static void check_tied(void) {
    const LlamaOptions tied_options = options_of("bf16", RECOMPUTE_NORM, 1, 1), untied_options = options_of("bf16", RECOMPUTE_NORM, 1, 0);
    Llama *tied = llama_create(&tied_options), *untied = llama_create(&untied_options);
    llama_init(tied); llama_init(untied);
    const Param *embed = param_get(llama_params(untied), PARAM_EMBED, -1), *head = param_get(llama_params(untied), PARAM_LM_HEAD, -1);
    float *x = (float *)xcalloc((size_t)embed->count, sizeof *x), *a = (float *)xcalloc((size_t)embed->count, sizeof *a), *b = (float *)xcalloc((size_t)embed->count, sizeof *b);
    llama_read(untied, LLAMA_PARAMS, embed, x);
    llama_write(untied, LLAMA_PARAMS, head, x);
    step_run(tied, 0); step_run(untied, 0);
    llama_read(tied, LLAMA_GRADS, param_get(llama_params(tied), PARAM_EMBED, -1), x);
    llama_read(untied, LLAMA_GRADS, embed, a);
    llama_read(untied, LLAMA_GRADS, head, b);
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < embed->count; i++) {
        worst = fmax(worst, fabs((double)x[i] - ((double)a[i] + b[i])));
        largest = fmax(largest, fmax(fabs(a[i]), fabs(b[i])));
    }
    check(largest > 0 && worst <= 0x1p-22 * largest, "tied: the embedding's gradient is the sum of both uses (off by %.2g of the largest %.2g)", worst, largest);
    free(x); free(a); free(b);
    llama_free(tied); llama_free(untied);
}
static void check_state(void) {
    const LlamaOptions o = options_of("bf16", RECOMPUTE_NORM, 1, 0);
    Llama *m = llama_create(&o);
    llama_init(m);
    const Param *p = param_get(llama_params(m), PARAM_DOWN, 1);
    float *want = (float *)xcalloc((size_t)p->count, sizeof *want), *got = (float *)xcalloc((size_t)p->count, sizeof *got);
    param_initial_values(p, (int)(p - llama_params(m)->params), o.seed, want);
    llama_read(m, LLAMA_PARAMS, p, got);
    int64_t wrong = 0;
    for (int64_t i = 0; i < p->count; i++) wrong += got[i] != bf16_round(want[i]);
    check(wrong == 0, "initial values are the host's, rounded to BF16");
    for (int64_t i = 0; i < p->count; i++) want[i] = (float)i * 0x1p-20f;
    for (int what = LLAMA_GRADS; what <= LLAMA_ADAM_V; what++) {
        llama_write(m, (enum LlamaState)what, p, want);
        llama_read(m, (enum LlamaState)what, p, got);
        check(memcmp(want, got, (size_t)p->count * sizeof *want) == 0, "state %d is read as it was written", what);
    }
    MemoryItem items[32];
    const int n = llama_plan(&o, items, 32);
    int64_t planned = 0, allocated = m->attention->workspace_bytes;
    for (int i = 0; i < n; i++) planned += items[i].bytes;
    for (int i = 0; i < ARENA_COUNT; i++) allocated += m->arenas[i].used;
    check(planned == allocated, "the plan's %lld bytes are what is allocated (%lld)", (long long)planned, (long long)allocated);
    free(want); free(got);
    llama_free(m);
}

int main(void) {
    check_state();
    for (int micro_batches = 1; micro_batches <= 2; micro_batches++) {
        check_same_bits("bf16", micro_batches);
        check_same_bits("quartet2", micro_batches);
    }
    check_not_finite("bf16");
    check_not_finite("quartet2");
    check_tied();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
