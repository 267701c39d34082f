// test_backend_gpu.cu: what the GPU backend promises beyond its numbers (test_gpt2.cu checks those): making activations again, or
// letting gradients lie in freed activations, changes no bit; a step is repeatable; a step that is not finite is not applied;
// results come in order, one step late; evaluation and logits leave training alone; a tied model's gradient is the sum of both uses;
// BF16 gradients are the float32 ones rounded; a vocabulary whose gradient is longer than the activations changes none of it; the own attention kernels train as cuDNN's do; measuring quantization changes no bit of what is
// trained; --bf16-layers of all layers is bf16.
//   test_backend_gpu [RECIPE ...]   only what is checked of those recipes
#include "llmc/cuda/backend.cuh"

#include "check.h"

enum { B = 2, T = 64, VOCAB = 256, MOST_VOCAB = 16384, STEPS = 3 };

typedef struct {
    ParamTable table;
    float *grads, *params;         // after the first and after the last step, (total)
    StepResult results[STEPS];
    float eval;
    float logits[MOST_VOCAB];
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

// The caller frees the outcome.
static Outcome check_same_bits(const char *recipe, int micro_batches, int grad_bf16) {
    static const char *const names[] = {"norm", "none", "mlp", "block"};
    char what[64];
    snprintf(what, sizeof what, "%s, %d micro-batches, %s gradients", recipe, micro_batches, grad_bf16 ? "BF16" : "float32");
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, micro_batches, 0);
    o.grad_bf16 = grad_bf16;
    Outcome base = run(&o, 0);
    check(all_finite(&base), "%s: all finite; losses %.6f %.6f %.6f", what, base.results[0].loss, base.results[1].loss, base.results[2].loss);
    Outcome again = run(&o, 1);
    check(same(&base, &again), "%s: a second run, with evaluations and logits between its steps, has the same bits", what);
    outcome_free(&again);
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        o.recompute = recompute;
        again = run(&o, 0);
        check(same(&base, &again), "%s: --recompute %s has the bits of norm", what, names[recompute]);
        outcome_free(&again);
    }
    // float64 norm of the gradients that were read, against the device's: GRAD_NORM's sum rounds each square and sum of four in float32.
    double squares = 0;
    for (int64_t i = 0; i < base.table.total; i++) squares += (double)base.grads[i] * base.grads[i];
    check(fabs(sqrt(squares) / base.results[0].grad_norm - 1) < 4 * 0x1p-24 + 0x1p-23, "%s: gradient norm %.6f is that of the gradients", what, base.results[0].grad_norm);
    return base;
}
// ||a - b|| / ||b|| of a parameter's gradients.
static double gradient_error(const Param *p, const Outcome *a, const Outcome *b) {
    double error = 0, square = 0;
    for (int64_t i = p->offset; i < p->offset + p->count; i++) {
        error += ((double)a->grads[i] - b->grads[i]) * ((double)a->grads[i] - b->grads[i]);
        square += (double)b->grads[i] * b->grads[i];
    }
    return square > 0 ? sqrt(error / square) : INFINITY;
}
// The first step's gradients in BF16 against float32, from the same weights. Each micro-batch rounds what there is so far, by 2^-8
// of its value at most. What there is so far is no larger than the result, but for chance: 2^-8 of the norm a micro-batch. The product
// itself may sum in another order: far below that. What stays float32 has the same bits, and the loss does not know of gradients.
static void check_bf16_gradients(const char *recipe, int micro_batches, const Outcome *exact, const Outcome *rounded) {
    double worst = 0;
    int64_t wide = 0, others = 0;
    for (int i = 0; i < exact->table.count; i++) {
        const Param *p = &exact->table.params[i];
        const double error = gradient_error(p, rounded, exact);
        if (p->layer < 0) { others += error != 0; continue; }
        if (!(error <= worst)) worst = error;
        for (int64_t e = p->offset; e < p->offset + p->count; e++) wide += rounded->grads[e] != bf16_round(rounded->grads[e]);
    }
    check(worst > 0x1p-12 && worst <= micro_batches * 0x1p-8 && wide == 0 && others == 0,
          "%s, %d micro-batches: BF16 gradients are the float32 ones rounded (largest relative error of a tensor %.5f, %lld wider values, %lld other tensors differ)",
          recipe, micro_batches, worst, (long long)wide, (long long)others);
    const StepResult *a = rounded->results, *b = exact->results;
    check(a[0].loss == b[0].loss && fabs(a[2].loss / b[2].loss - 1) < 0x1p-8,
          "%s, %d micro-batches: with BF16 gradients the losses are %.6f %.6f, with float32 ones %.6f %.6f (first and third step)", recipe, micro_batches,
          a[0].loss, a[2].loss, b[0].loss, b[2].loss);
}
// The own attention kernels against cuDNN's. Both round probabilities, their gradients and every result to BF16, each in its own
// order: some ten roundings of 1.5e-3 (rms) in a layer's attention, forward and backward, of either side, in three layers:
// sqrt(2 * 10 * 3) * 1.5e-3 = 1.2e-2 of a gradient's norm; times 2 for what they add up to in the sums that nearly cancel (softmax's).
// A wrong mask, scale or head is an error of the gradient's own size in q, k or v; losses of an untrained model hardly see one.
static void check_attention(void) {
#ifdef USE_CUDNN
    LlamaOptions o = options_of("bf16", RECOMPUTE_NORM, 1, 0);
    o.attention = ATTENTION_CUDNN;
    Outcome library = run(&o, 0);
    o.attention = ATTENTION_FLASH;
    Outcome own = run(&o, 0);
    double worst = 0;
    for (int i = 0; i < own.table.count; i++) {
        const double error = gradient_error(&own.table.params[i], &own, &library);
        if (!(error <= worst)) worst = error;
    }
    check(worst <= 2.4e-2, "attention: gradients by flash and by cudnn differ by %.4f of a tensor's norm at most", worst);
    double apart = 0;
    for (int s = 0; s < STEPS; s++) apart = fmax(apart, fabs(own.results[s].loss / library.results[s].loss - 1));
    check(apart < 0x1p-8, "attention: losses of %d steps by flash and by cudnn differ by %.5f %% at most", STEPS, 100 * apart);
    outcome_free(&library); outcome_free(&own);
#else
    printf("attention: built without cuDNN, nothing to compare the own kernels with\n");
#endif
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
static void check_plan(const Llama *m) {
    MemoryItem items[32];
    const int n = llama_plan(&m->options, items, 32);
    int64_t planned = 0, allocated = m->attention->workspace_bytes;
    for (int i = 0; i < n; i++) planned += items[i].bytes;
    for (int i = 0; i < ARENA_COUNT; i++) allocated += m->arenas[i].used;
    check(planned == allocated, "the plan's %lld bytes are what is allocated (%lld)", (long long)planned, (long long)allocated);
}
static void check_state(int grad_bf16) {
    LlamaOptions o = options_of("bf16", RECOMPUTE_NORM, 1, 0);
    o.grad_bf16 = grad_bf16;
    Llama *m = llama_create(&o);
    llama_init(m);
    const Param *p = param_get(llama_params(m), PARAM_DOWN, 1);
    float *want = (float *)xcalloc((size_t)p->count, sizeof *want), *got = (float *)xcalloc((size_t)p->count, sizeof *got);
    param_initial_values(p, (int)(p - llama_params(m)->params), o.seed, want);
    llama_read(m, LLAMA_PARAMS, p, got);
    int64_t wrong = 0;
    for (int64_t i = 0; i < p->count; i++) wrong += got[i] != bf16_round(want[i]);
    check(wrong == 0, "initial values are the host's, rounded to BF16");
    for (int what = LLAMA_GRADS; what <= LLAMA_ADAM_V; what++) {
        for (int64_t i = 0; i < p->count; i++) want[i] = (float)(i + what) * 0x1p-20f;
        llama_write(m, (enum LlamaState)what, p, want);
        llama_read(m, (enum LlamaState)what, p, got);
        for (int64_t i = 0; i < p->count && what == LLAMA_GRADS && grad_bf16; i++) want[i] = bf16_round(want[i]);
        check(memcmp(want, got, (size_t)p->count * sizeof *want) == 0, "state %d is read as it was written", what);
    }
    check_plan(m);
    free(want); free(got);
    llama_free(m);
}

// The relative error of a gradient that its operands' errors explain: independent ones add up in squares. A is dY; B comes from the forward's operand, with
// that one's error, or from the tensor.
static double explained_error(const Recipe *r, const LinearStats *s, int gemm) {
    const OperandStats *forward = &s->operand[GEMM_FORWARD][gemm == GEMM_WGRAD ? OPERAND_A : OPERAND_B];
    return sqrt(s->operand[gemm][OPERAND_A].error + s->operand[gemm][OPERAND_B].error + (r->gemm[gemm].b.source == FROM_FORWARD ? forward->error : 0));
}
// --quant-stats: the steps' bits do not change, and what is measured are errors of a quantizer's size. A gradient's error is what its operands' explain, within a
// factor of 2 either way (its sum cancels more, or less, than that of the errors), besides a rounding to BF16 and float32's order of sums. Of
// fp4-dge-occ's dW nothing is asked: it is the gradient of another function than the rounding.
static void check_stats(const char *recipe) {
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, 2, 0);  // of which the first is measured
    Outcome base = run(&o, 0);
    o.quant_stats = 1;
    Llama *m = llama_create(&o);
    llama_init(m);
    llama_step_begin(m, 0);
    llama_stats_begin(m);
    int32_t tokens[2 * B * T];
    for (int micro = 0; micro < 2; micro++) {
        tokens_of(tokens, 0, micro);
        llama_micro_step(m, micro, tokens, tokens + B * T);
    }
    float *grads = state_read(m, LLAMA_GRADS);
    const LinearStats *stats = llama_stats_end(m);
    check(memcmp(grads, base.grads, (size_t)base.table.total * sizeof(float)) == 0, "%s: a measured step has the same gradients", recipe);
    const LinearPlan plan = linear_plan(o.recipe, fp8_gemm_supported());
    int measured = 0, expected = 0, wrong = 0, strange = 0;
    double least = 1, largest = 0;
    for (int i = 0; i < o.config.layers * LINEARS_PER_LAYER; i++) {
        for (int k = 0; k < 6; k++) {
            const OperandStats *s = &stats[i].operand[k / 2][k % 2];
            expected += plan.kind[k / 2][k % 2] != KIND_PLAIN && plan.kind[k / 2][k % 2] != KIND_AGAIN;
            measured += s->measured;
            wrong += s->measured && !(s->error > 1e-5 && s->error < 0.1 && s->zeros >= 0 && s->zeros < 1 && s->amax > 0 && s->peak >= 1);
        }
        for (int gemm = GEMM_DGRAD; gemm <= GEMM_WGRAD; gemm++) {
            const GradientStats *s = gemm == GEMM_WGRAD ? &stats[i].dw : &stats[i].dx;
            const double explained = explained_error(o.recipe, &stats[i], gemm);
            if (o.recipe->gemm[gemm].product == PRODUCT_DGE) continue;
            strange += !(s->error <= 2 * explained + 0x1p-8 && s->error >= explained / 2 && s->cosine <= 1 && s->cosine >= 1 - 2 * explained * explained - 0x1p-8);
            least = fmin(least, s->cosine); largest = fmax(largest, s->error);
        }
    }
    check(measured == expected && wrong == 0, "%s: %d of %d operands measured, %d out of range", recipe, measured, expected, wrong);
    check(strange == 0, "%s: gradients have a cosine of at least %.4f, an error of at most %.4f; %d are not explained by their operands'", recipe, least, largest, strange);
    free(grads);
    outcome_free(&base);
    llama_free(m);
}
// What comes later is not seen: other tokens in the second half of every sequence leave the losses of the first half as they are, to the bit where nothing but a
// token's own values decides how it is rounded. Scales of a whole tensor (and a clamp's limits) do depend on later tokens; nothing else may, and a scale that
// moves changes a loss by the noise of rounding, not by what knowing the next token would.
static void check_causal(const char *recipe) {
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, 1, 0);
    int32_t tokens[2 * B * T];
    float before[B * T], after[B * T];
    Llama *m = llama_create(&o);
    llama_init(m);
    for (int s = 0; s < STEPS; s++) {                      // weights that are not the initial ones
        step_run(m, s);
        const AdamWOptions adamw = adamw_of(s);
        llama_step_end(m, &adamw);
        llama_step_result(m);
    }
    for (int late = 0; late < 2; late++) {
        tokens_of(tokens, 50, 0);
        for (int i = 0; i < B * T; i++) if (late && i % T >= T / 2) tokens[i] = (tokens[i] + 1 + i % 7) % VOCAB;
        llama_eval(m, tokens, tokens + B * T);
        CUDA_CHECK(cudaMemcpy(late ? after : before, m->losses, sizeof before, cudaMemcpyDeviceToHost));
    }
    double worst = 0, changed = 0;
    for (int i = 0; i < B * T; i++) {
        const double difference = fabs((double)after[i] - before[i]);
        if (i % T < T / 2) worst = fmax(worst, difference); else changed = fmax(changed, difference);
    }
    const OperandSpec *x = &o.recipe->gemm[GEMM_FORWARD].a;
    const int own = x->format == FORMAT_FLOAT || x->format == FORMAT_MXFP4;  // every scale is of one token
    check(worst <= (own ? 0 : 0.25 * changed) && changed > 0, "%s: later tokens change earlier losses by %.5f, their own by up to %.5f", recipe, worst, changed);
    llama_free(m);
}
static void check_bf16_layers(const char *recipe) {
    LlamaOptions o = options_of("bf16", RECOMPUTE_NORM, 1, 0);
    Outcome plain = run(&o, 0);
    o.recipe = recipe_find(recipe); o.bf16_layers = o.config.layers;
    Outcome all = run(&o, 0);
    o.bf16_layers = 1;
    Outcome one = run(&o, 0);
    check(same(&plain, &all), "%s: with --bf16-layers of all layers it has the bits of bf16", recipe);
    check(all_finite(&one) && memcmp(one.grads, all.grads, (size_t)one.table.total * sizeof(float)) != 0, "%s: --bf16-layers 1 trains, and is neither", recipe);
    outcome_free(&plain); outcome_free(&all); outcome_free(&one);
}

// A vocabulary that outweighs the activations: the embedding's gradient, which lies in those of the layers where it can, must leave what is before
// them alone. --recompute block lets no gradient lie there.
static void check_large_vocabulary(const char *recipe) {
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, 1, 0);
    o.config.vocab = MOST_VOCAB;
    Llama *m = llama_create(&o);
    const int64_t gradient = 4 * param_get(llama_params(m), PARAM_EMBED, -1)->count, freed = m->layers_end - m->layers_from;
    llama_free(m);
    Outcome base = run(&o, 0);
    check(all_finite(&base) && gradient > freed, "%s, vocabulary %d: all finite; the embedding's gradient is longer (%lld bytes) than the layers' activations (%lld)",
          recipe, o.config.vocab, (long long)gradient, (long long)freed);
    o.recompute = RECOMPUTE_BLOCK;
    Outcome apart = run(&o, 0);
    check(same(&base, &apart), "%s, vocabulary %d: gradients that lie in activations have the bits of those that do not", recipe, o.config.vocab);
    outcome_free(&base); outcome_free(&apart);
}

// Few tokens and wide outputs: GEMMs are timed, products finished and operands made in little memory.
static void check_few_tokens(const char *recipe) {
    LlamaOptions o = options_of(recipe, RECOMPUTE_NORM, 1, 0);
    o.config.layers = 1; o.config.ffn = 2048;
    Outcome r = run(&o, 0);
    check(all_finite(&r), "%s, %d tokens, ffn %d: all values are finite", recipe, B * T, o.config.ffn);
    outcome_free(&r);
}

int main(int argc, char **argv) {
    for (int i = 0; i < RECIPE_COUNT; i++) {
        int asked = argc == 1;
        for (int k = 1; k < argc; k++) asked |= strcmp(argv[k], RECIPES[i].name) == 0;
        if (!asked) continue;
        Outcome r = check_same_bits(RECIPES[i].name, 1 + i % 2, 0);
        outcome_free(&r);
        check_stats(RECIPES[i].name);
        check_causal(RECIPES[i].name);
        check_few_tokens(RECIPES[i].name);
        check_large_vocabulary(RECIPES[i].name);
        if (recipe_is_quantized(&RECIPES[i])) check_bf16_layers(RECIPES[i].name);
    }
    check_state(0);
    check_state(1);
    // Gradients lie in activations when there is one micro-batch, and are added up when there are two.
    static const char *const recipes[] = {"bf16", "quartet2"};
    for (int i = 0; i < 4; i++) {
        const char *recipe = recipes[i / 2];
        const int micro_batches = 1 + i % 2;
        Outcome exact = check_same_bits(recipe, micro_batches, 0);
        if (i == 0 || i == 3) {
            Outcome rounded = check_same_bits(recipe, micro_batches, 1);
            check_bf16_gradients(recipe, micro_batches, &exact, &rounded);
            outcome_free(&rounded);
        }
        outcome_free(&exact);
    }
    check_attention();
    check_not_finite("bf16");
    check_not_finite("quartet2");
    check_tied();
    return checks_finish();
}
