// test_backend: what a whole training step on the CPU must keep to, whatever the model computes: same bits for the same command
// and any number of threads, averaging over micro-batches, tied embedding, clipping, BF16 masters, a step that is not finite,
// the memory plan, bad tokens. (What the model computes: test_gpt2.cu.)
#include "dev/test/expect.h"
#include "llmc/cpu/backend.h"

enum { B = 2, T = 64, VOCAB = 128 };

static LlamaOptions options(const char *recipe) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    const LlamaConfig c = {2, 128, 2, 1, 128, VOCAB, T, 0, 1e-5f, 1e4f};
    o.config = c;
    o.recipe = recipe_find(recipe);
    o.batch = B; o.micro_batches = 2; o.seed = 42;
    return o;
}
static AdamWOptions adamw(int64_t step) {
    const AdamWOptions a = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
    return a;
}
static int32_t stream[4 * B * T + 1];
static int tokens_make(void **state) {
    (void)state;
    const RngStream s = rng_stream(1, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int i = 0; i < 4 * B * T + 1; i++) stream[i] = (int32_t)(rng_word(s, (uint64_t)i) % VOCAB);
    return 0;
}
static void gradients(Llama *m, int64_t step) {
    llama_step_begin(m, step);
    for (int micro = 0; micro < m->options.micro_batches; micro++) {
        const int32_t *tokens = stream + micro * m->options.batch * T;
        llama_micro_step(m, micro, tokens, tokens + 1);
    }
}
static StepResult train(Llama *m, int64_t step) {
    const AdamWOptions a = adamw(step);
    gradients(m, step);
    llama_step_end(m, &a);
    return llama_step_result(m);
}
static float *all(Llama *m, enum LlamaState what) {
    const ParamTable *t = llama_params(m);
    float *x = (float *)xcalloc((size_t)t->total, sizeof(float));
    for (int i = 0; i < t->count; i++) llama_read(m, what, &t->params[i], x + t->params[i].offset);
    return x;
}
static double distance(const float *a, const float *b, int64_t n) {  // relative to b
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) { error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]); norm += (double)b[i] * b[i]; }
    return sqrt(error / norm);
}

// Two steps: parameters, m, v and losses are the same bits on a second run, and on one thread.
static void same_bits(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) {
        float *first[3] = {NULL, NULL, NULL};
        float losses[3] = {0, 0, 0};
        const int threads = thread_count();
        for (int run = 0; run < 3; run++) {
#ifdef _OPENMP
            omp_set_num_threads(run == 0 ? 2 : run == 1 ? 1 : 3);
#endif
            LlamaOptions o = options(RECIPES[r].name);
            Llama *m = llama_create(&o);
            llama_init(m);
            for (int step = 0; step < 2; step++) {
                const StepResult result = train(m, step);
                assert_true(result.finite);
                if (run == 0) losses[step] = result.loss;
                assert_true(result.loss == losses[step]);
            }
            for (int w = 0; w < 3; w++) {
                float *x = all(m, w == 0 ? LLAMA_PARAMS : w == 1 ? LLAMA_ADAM_M : LLAMA_ADAM_V);
                if (run == 0) first[w] = x;
                else {
                    if (memcmp(x, first[w], (size_t)m->table.total * sizeof(float)) != 0)
                        fail_msg("%s: state %d of run %d differs by %g", RECIPES[r].name, w, run, distance(x, first[w], m->table.total));
                    free(x);
                }
            }
            llama_free(m);
        }
#ifdef _OPENMP
        omp_set_num_threads(threads);
#endif
        (void)threads;
        for (int w = 0; w < 3; w++) free(first[w]);
    }
}

// Two micro-batches of B sequences are one of 2B, up to float32 rounding of sums.
static void micro_batches(void **state) {
    (void)state;
    LlamaOptions o = options("fp32");
    Llama *two = llama_create(&o);
    o.batch = 2 * B; o.micro_batches = 1;
    Llama *one = llama_create(&o);
    llama_init(two);
    llama_init(one);
    gradients(two, 0);
    gradients(one, 0);
    float *a = all(two, LLAMA_GRADS), *b = all(one, LLAMA_GRADS);
    assert_true(distance(a, b, one->table.total) < 1e-5);
    const float losses[2] = {train(two, 0).loss, train(one, 0).loss};
    assert_true(fabsf(losses[0] - losses[1]) < 1e-6f * losses[0]);
    free(a); free(b);
    llama_free(two);
    llama_free(one);
}

// The loss of a step is the mean of its micro-batches' evaluations; logits after a whole sequence do not depend on other
// sequences (fp32: no tensor scale couples them).
static void evaluation(void **state) {
    (void)state;
    LlamaOptions o = options("fp32");
    Llama *m = llama_create(&o);
    llama_init(m);
    const float mean = (llama_eval(m, stream, stream + 1) + llama_eval(m, stream + B * T, stream + B * T + 1)) / 2;
    double by_logits = 0;
    float logits[VOCAB];
    for (int t = 0; t < B * T; t++) {
        double sum = 0;
        llama_logits(m, stream + t / T * T, t % T + 1, logits);
        for (int v = 0; v < VOCAB; v++) sum += exp(logits[v]);
        by_logits += (log(sum) - logits[stream[t + 1]]) / (B * T);
    }
    assert_true(fabs(by_logits - llama_eval(m, stream, stream + 1)) < 1e-5);
    assert_true(fabsf(train(m, 0).loss - mean) < 1e-6f * mean);
    llama_free(m);
}

// A tied model's embedding gradient is the sum of embedding's and lm_head's of the untied model with the same values.
static void tied(void **state) {
    (void)state;
    LlamaOptions o = options("fp32");
    Llama *untied = llama_create(&o);
    o.config.tied = 1;
    Llama *m = llama_create(&o);
    const ParamTable *t = llama_params(m), *u = llama_params(untied);
    assert_int_equal(t->count + 1, u->count);
    llama_init(untied);
    const int64_t n = t->params[0].count;
    float *x = (float *)xcalloc((size_t)u->total, sizeof(float)), *g = (float *)xcalloc((size_t)n, sizeof(float));
    for (int i = 0; i < t->count; i++) {
        llama_read(untied, LLAMA_PARAMS, &u->params[i], x);
        llama_write(m, LLAMA_PARAMS, &t->params[i], x);
        if (i == 0) llama_write(untied, LLAMA_PARAMS, &u->params[u->count - 1], x);
    }
    gradients(untied, 0);
    gradients(m, 0);
    llama_read(untied, LLAMA_GRADS, &u->params[0], x);
    llama_read(untied, LLAMA_GRADS, &u->params[u->count - 1], g);
    for (int64_t i = 0; i < n; i++) x[i] += g[i];
    llama_read(m, LLAMA_GRADS, &t->params[0], g);
    assert_true(distance(g, x, n) < 1e-6);
    free(x); free(g);
    llama_free(untied);
    llama_free(m);
}

// The first update with clip c of a gradient of norm n > c is the one of the gradient times c/n. Seen in m, which is then
// (1 - beta1) c/n g. With clip 0, or one that is not reached, it is (1 - beta1) g.
static void clipping(void **state) {
    (void)state;
    LlamaOptions o = options("fp32");
    for (int k = 0; k < 3; k++) {
        Llama *m = llama_create(&o);
        llama_init(m);
        gradients(m, 0);
        float *g = all(m, LLAMA_GRADS);
        const double norm = sqrt(sum_of_squares(g, m->table.total));
        AdamWOptions a = adamw(0);
        a.clip = k == 0 ? (float)norm / 4 : k == 1 ? 0 : (float)norm * 1.01f;
        llama_step_end(m, &a);
        const StepResult result = llama_step_result(m);
        assert_true(fabs(result.grad_norm - norm) < 1e-6 * norm);      // before clipping
        float *moment = all(m, LLAMA_ADAM_M);
        for (int64_t i = 0; i < m->table.total; i++) g[i] *= (k == 0 ? 0.25f : 1) * (1 - 0.9f);
        assert_true(distance(moment, g, m->table.total) < 1e-6);
        free(g); free(moment);
        llama_free(m);
    }
}

// Masters: BF16 values always (initialized, written, updated), or float32 exactly as written.
static void masters(void **state) {
    (void)state;
    LlamaOptions o = options("bf16");
    for (o.master_fp32 = 0; o.master_fp32 < 2; o.master_fp32++) {
        Llama *m = llama_create(&o);
        llama_init(m);
        for (int k = 0; k < 2; k++) {
            float *x = all(m, LLAMA_PARAMS);
            int64_t others = 0;
            for (int64_t i = 0; i < m->table.total; i++) others += x[i] != bf16_round(x[i]);
            if (o.master_fp32) assert_true(others > m->table.total / 2);
            else assert_int_equal(others, 0);
            free(x);
            train(m, k);
        }
        const Param *p = param_get(&m->table, PARAM_FINAL_NORM, -1);
        float value[128], back[128];
        for (int i = 0; i < 128; i++) value[i] = 1 + (float)i * 0x1p-10f;
        llama_write(m, LLAMA_PARAMS, p, value);
        llama_read(m, LLAMA_PARAMS, p, back);
        for (int i = 0; i < 128; i++) assert_true(back[i] == (o.master_fp32 ? value[i] : bf16_round(value[i])));
        llama_free(m);
    }
}

// Training goes on from state that was read and written into a fresh model as if nothing had happened.
static void restored(void **state) {
    (void)state;
    LlamaOptions o = options("quartet2");
    Llama *m = llama_create(&o), *copy = llama_create(&o);
    llama_init(m);
    train(m, 0);
    float *x = (float *)xcalloc((size_t)m->table.total, sizeof(float));
    const enum LlamaState states[3] = {LLAMA_PARAMS, LLAMA_ADAM_M, LLAMA_ADAM_V};
    for (int s = 0; s < 3; s++)
        for (int i = 0; i < m->table.count; i++) {
            llama_read(m, states[s], &m->table.params[i], x);
            llama_write(copy, states[s], &copy->table.params[i], x);
        }
    assert_true(train(m, 1).loss == train(copy, 1).loss);
    float *a = all(m, LLAMA_PARAMS), *b = all(copy, LLAMA_PARAMS);
    assert_memory_equal(a, b, (size_t)m->table.total * sizeof(float));
    free(a); free(b); free(x);
    llama_free(m);
    llama_free(copy);
}

// A text is learnt by heart: from about log(VOCAB) = 4.85 to below 1 in 60 steps, the noise of 4 bits included. (How near every recipe
// comes to bf16: test_recipes.)
static void learns(void **state) {
    (void)state;
    static const char *const recipes[] = {"fp32", "bf16", "quartet2", "quartet"};
    for (int r = 0; r < 4; r++) {
        LlamaOptions o = options(recipes[r]);
        Llama *m = llama_create(&o);
        llama_init(m);
        const float first = train(m, 0).loss;
        float last = first;
        for (int step = 1; step < 60; step++) last = train(m, step).loss;
        print_message("%-14s loss %.3f -> %.3f\n", recipes[r], first, last);
        assert_true(fabs(first - log(VOCAB)) < 0.1 && last < 1);
        llama_free(m);
    }
}

// --bf16-layers: of all layers, the gradients are the bf16 recipe's, bit for bit; of the last one, something between.
static void bf16_layers(void **state) {
    (void)state;
    static const struct { const char *recipe; int kept; } runs[] = {{"bf16", 0}, {"quartet2", 2}, {"quartet", 2}, {"quartet2", 1}, {"quartet2", 0}};
    float *g[5] = {NULL, NULL, NULL, NULL, NULL};
    int64_t total = 0;
    for (int i = 0; i < 5; i++) {
        LlamaOptions o = options(runs[i].recipe);
        o.bf16_layers = runs[i].kept;
        Llama *m = llama_create(&o);
        llama_init(m);
        gradients(m, 0);
        g[i] = all(m, LLAMA_GRADS);
        total = m->table.total;
        assert_string_equal(m->layers[0].linear[LINEAR_DOWN].recipe->name, runs[i].kept == 2 ? "bf16" : runs[i].recipe);
        assert_string_equal(m->layers[1].linear[LINEAR_QKV].recipe->name, runs[i].kept ? "bf16" : runs[i].recipe);
        llama_free(m);
    }
    assert_memory_equal(g[1], g[0], (size_t)total * sizeof(float));
    assert_memory_equal(g[2], g[0], (size_t)total * sizeof(float));
    const double one = distance(g[3], g[0], total), none = distance(g[4], g[0], total);
    print_message("distance of quartet2's gradients from bf16's: %.4f with the last layer in BF16, %.4f without\n", one, none);
    assert_true(one > 0 && one < none);
    for (int i = 0; i < 5; i++) free(g[i]);
}

// --quant-stats: measuring changes no bit of the step, measures the first micro-batch alone, and says what is known otherwise: that
// fp32 rounds nothing, and how large NVFP4's errors are.
static void quant_stats(void **state) {
    (void)state;
    static const char *const recipes[] = {"fp32", "bf16", "quartet2", "nvidia", "quartet", "fp4-dge-occ"};
    for (int r = 0; r < 6; r++) {
        float *g[2];
        int64_t total = 0;
        for (int measure = 0; measure < 2; measure++) {
            LlamaOptions o = options(recipes[r]);
            o.quant_stats = measure;
            Llama *m = llama_create(&o);
            llama_init(m);
            llama_step_begin(m, 0);
            if (measure) llama_stats_begin(m);
            for (int micro = 0; micro < 2; micro++) llama_micro_step(m, micro, stream + micro * B * T, stream + micro * B * T + 1);
            g[measure] = all(m, LLAMA_GRADS);
            total = m->table.total;
            const LinearStats *s = measure ? llama_stats_end(m) : NULL;
            for (int i = 0; measure && i < o.config.layers * LINEARS_PER_LAYER; i++)
                for (int gemm = 0; gemm < 3; gemm++) {
                    const GradientStats *gradient = gemm == GEMM_DGRAD ? &s[i].dx : &s[i].dw;
                    if (gemm && r == 0) assert_true(fabs(gradient->cosine - 1) < 1e-9 && gradient->error < 1e-6);
                    // The slopes of the differentiable estimator, 0.2 to 3, turn dW aside by design, and its clamped X lacks the outliers.
                    const int turned = r == 5 && gemm == GEMM_WGRAD;
                    if (gemm && r > 0)
                        assert_true(gradient->cosine < 1 && gradient->cosine > (turned ? 0.6 : 0.8) && gradient->error > 1e-4 && gradient->error < (turned ? 0.85 : 0.7));
                    for (int operand = 0; operand < 2; operand++) {
                        const OperandStats *q = &s[i].operand[gemm][operand];
                        const OperandSpec *spec = operand ? &o.recipe->gemm[gemm].b : &o.recipe->gemm[gemm].a;
                        assert_int_equal(q->measured, !operand_is_plain(spec));
                        if (!q->measured) continue;
                        assert_true(q->zeros >= 0 && q->zeros < 0.5 && q->clipped >= 0 && q->clipped <= 1 && q->amax > 0 && q->peak > 1 && q->peak <= sqrt(128) + 1e-6);
                        // BF16 masters are BF16 already; the others have about the errors of test_unbiased's table.
                        if (r == 1) assert_true(operand == OPERAND_B && gemm < 2 ? q->error == 0 : q->error > 1e-7 && q->error < 1e-5);
                        else if (q->error < 1e-4 || q->error > (spec->clamp_percent ? 0.15 : 0.06)) fail_msg("%s, linear %d, GEMM %d, operand %d: error %g", recipes[r], i, gemm, operand, q->error);
                        if (spec->rounding == ROUND_SR) assert_true(q->clipped == 0);
                    }
                }
            llama_free(m);
        }
        assert_memory_equal(g[0], g[1], (size_t)total * sizeof(float));
        free(g[0]); free(g[1]);
    }
}
// The measures themselves on a tensor made so that they are known: 16 values a block, all +-1 but as said.
static void quant_stats_by_hand(void **state) {
    (void)state;
    enum { R = 16, C = 128 };
    float x[R * C], out[R * C];
    for (int i = 0; i < R * C; i++) x[i] = i % 2 ? 1 : -1;
    x[0] = 448;                                                        // s_b = 448, d = 448/6: its 15 neighbours of size 1 become 0
    x[C] = 0; x[2 * C + 16] = 6;
    const OperandSpec spec = NVFP4(ROUND_RTN, BLOCK_1X16);
    const QuantizeAddress at = {1, 0, 0, 0, GEMM_FORWARD, OPERAND_A, 0, 0};
    const float factor = quantize_operand(out, x, R, C, 0, &spec, &at);
    OperandStats s;
    stats_operand(&s, x, 2, out, factor, R, C, 0, &spec, &at);
    assert_true(s.amax == 2 * 448 && fabs(s.zeros - 15.0 / (R * C - 1)) < 1e-12);
    // Blocks of +-1: s_b = 1 exactly (448/448), so codes are 6 and nothing is clipped; nor in the others.
    assert_true(s.clipped == 0);
    assert_true(fabs(s.peak - 448 / sqrt((448.0 * 448 + 127) / 128)) < 1e-9);
    double error = 0, square = 0;
    for (int i = 0; i < R * C; i++) { error += pow((double)out[i] * factor - x[i], 2); square += (double)x[i] * x[i]; }
    assert_true(fabs(s.error - error / square) < 1e-12 && s.error > 15 / square * 0.99);
    const OperandSpec fp8 = FP8(FORMAT_E4M3, FROM_ORIGINAL);
    stats_operand(&s, x, 1, out, quantize_operand(out, x, R, C, 0, &fp8, &at), R, C, 0, &fp8, &at);
    assert_true(s.clipped == 0 && s.zeros == 0 && s.error == 0);       // all of these are E4M3 values
    const OperandSpec quest = MXFP4_QUEST;
    stats_operand(&s, x, 1, out, quantize_operand(out, x, R, C, 0, &quest, &at), R, C, 0, &quest, &at);
    assert_true(s.clipped > 0);                                        // a run of equal sizes is one large value after the rotation
    const float a[2] = {3, 4}, b[2] = {3, 0};
    GradientStats cosine;
    stats_gradient(&cosine, a, b, 2);
    assert_true(fabs(cosine.cosine - 0.6) < 1e-12 && fabs(cosine.error - 4.0 / 3) < 1e-12);
}

// A NaN or an infinity in a weight, of any layer and recipe: reported, and nothing is updated.
static void not_finite(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) {
        LlamaOptions o = options(RECIPES[r].name);
        Llama *m = llama_create(&o);
        llama_init(m);
        assert_true(train(m, 0).finite);
        const Param *p = param_get(&m->table, PARAM_GATE_UP, 1);
        float *w = (float *)xcalloc((size_t)p->count, sizeof(float));
        llama_read(m, LLAMA_PARAMS, p, w);
        w[1000] = r % 2 ? INFINITY : NAN;
        llama_write(m, LLAMA_PARAMS, p, w);
        float *before[3], *after[3];
        for (int s = 0; s < 3; s++) before[s] = all(m, s == 0 ? LLAMA_PARAMS : s == 1 ? LLAMA_ADAM_M : LLAMA_ADAM_V);
        assert_false(train(m, 1).finite);
        for (int s = 0; s < 3; s++) {
            after[s] = all(m, s == 0 ? LLAMA_PARAMS : s == 1 ? LLAMA_ADAM_M : LLAMA_ADAM_V);
            assert_memory_equal(before[s], after[s], (size_t)m->table.total * sizeof(float));
            free(before[s]); free(after[s]);
        }
        free(w);
        llama_free(m);
    }
}

// The plan is what is then allocated, and ends where it says.
static void plan(void **state) {
    (void)state;
    for (int r = 0; r < RECIPE_COUNT; r++) {
        LlamaOptions o = options(RECIPES[r].name);
        MemoryItem items[16];
        const int n = llama_plan(&o, items, 16);
        int64_t planned = 0, allocated = 0;
        for (int i = 0; i < n; i++) { assert_true(items[i].bytes > 0); planned += items[i].bytes; }
        assert_true(items[n].bytes < 0);
        Llama *m = llama_create(&o);
        for (int i = 0; i < BLOCK_COUNT; i++) allocated += m->blocks[i].used;
        assert_true(planned == allocated);
        llama_free(m);
    }
}

static void act_token(const void *context) {
    LlamaOptions o = options("fp32");
    Llama *m = llama_create(&o);
    stream[5] = *(const int *)context;
    llama_step_begin(m, 0);
    llama_micro_step(m, 0, stream, stream + 1);
}
static void act_target(const void *context) {
    LlamaOptions o = options("fp32");
    Llama *m = llama_create(&o);
    stream[B * T] = *(const int *)context;                             // the last target, and no token of the batch
    llama_eval(m, stream, stream + 1);
}
static void act_create(const void *context) { llama_create((const LlamaOptions *)context); }
static void bad_input(void **state) {
    (void)state;
    const int high = VOCAB, low = -1;
    expect_fatal(act_token, &high, "128|position 4|vocabulary");       // as a target first
    expect_fatal(act_token, &low, "-1|vocabulary");
    expect_fatal(act_target, &high, "target 128|position 127|vocabulary");
    LlamaOptions o = options("fp32");
    o.recompute = RECOMPUTE_BLOCK;
    expect_fatal(act_create, &o, "--recompute|CPU");
    o = options("fp32");
    o.grad_bf16 = 1;
    expect_fatal(act_create, &o, "--grad-dtype bf16|CPU");
    o = options("fp32");
    o.attention = 2;
    expect_fatal(act_create, &o, "--attention|CPU|auto");
    o = options("quartet2");
    o.nvfp4_gemm = 1;
    expect_fatal(act_create, &o, "--nvfp4-gemm native|CPU|auto or emulated");
    o.nvfp4_gemm = 2;                                                  // what it does anyway
    llama_free(llama_create(&o));
    o = options("fp32");
    o.config.heads = 3;
    expect_fatal(act_create, &o, "heads 3|divide width");
    o = options("quartet2");
    o.bf16_layers = 3;
    expect_fatal(act_create, &o, "--bf16-layers 3|2 layers");
    o = options("fp32");
    o.config.vocab = 0;
    expect_fatal(act_create, &o, "vocab 0|positive");
    o = options("fp32");
    o.config.seq = 2000000000; o.batch = 2000000000;                   // 4e18 rows: no size of this fits 64 bits
    expect_fatal(act_create, &o, "too large|--batch");
    o = options("fp32");
    o.config.layers = 1025;                                            // layers 0 and 1024 would share their noise
    expect_fatal(act_create, &o, "1025 layers|at most 1024");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_input),                                   // first: forks before OpenMP has threads
        cmocka_unit_test(same_bits), cmocka_unit_test(micro_batches), cmocka_unit_test(evaluation), cmocka_unit_test(tied),
        cmocka_unit_test(clipping), cmocka_unit_test(masters), cmocka_unit_test(restored), cmocka_unit_test(learns), cmocka_unit_test(bf16_layers), cmocka_unit_test(quant_stats), cmocka_unit_test(quant_stats_by_hand), cmocka_unit_test(not_finite),
        cmocka_unit_test(plan)};
    return cmocka_run_group_tests_name("CPU backend", tests, tokens_make, NULL);
}
