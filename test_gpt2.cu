// test_gpt2: the whole model against an independent float64 reference (dev/reference/llama_reference.py): logits, loss, every
// gradient, then AdamW steps, for the recipes without noise. Valid C11 (CPU backend) and valid CUDA (GPU backend).
//   test_gpt2 [FILE [ATTENTION]]   FILE: the stored reference, dev/test/llama_reference.bin if none is named; 0 auto, 1 cudnn, 2 flash (GPU only)
//   test_gpt2 --small              one step of recipe bf16 with own attention: for compute-sanitizer
// Prints a line a comparison: what, error relative to the reference's norm, tolerance. Exit status 1 if any is beyond it.
//
// Tolerances. The reference was also run with noise of BF16's size on every tensor that a program rounds; what that did to a
// result, over the noise, is the result's sensitivity, and the file holds it. Tolerance = SAFETY * sensitivity * unit; unit is
// the relative error of one rounded tensor: 1.48e-3 for BF16 (a uniform error of half of 2^-7 over a mantissa spread over
// 1..2), and for float32 sqrt(512) 2^-24, a sum of 512 terms, the longest here. SAFETY 4: results are single draws of a
// nearly normal error whose standard deviation is itself known to a third.
#ifdef __CUDACC__
#define GEMM_CANDIDATES 2              // algorithms to choose from: compute-sanitizer takes seconds for each of cuBLASLt's kernels
#include "llmc/cuda/backend.cuh"
#define OWN_ATTENTION 2                // of the kernels that are ours, compute-sanitizer knows what they mean
#define FP32_ROUNDING BF16_ROUNDING    // the GPU stores tensors in BF16 whatever the recipe
#else
#include "llmc/cpu/backend.h"
#define OWN_ATTENTION 0
#define FP32_ROUNDING 1.35e-6
#endif
#define BF16_ROUNDING 1.48e-3
#define SAFETY 4

// The stored reference; see llama_reference.py for its layout.
typedef struct {
    int32_t magic, version, layers, width, heads, kv_heads, ffn, vocab, seq, batch, micro_batches, steps, products, samples,
        logits_rows, tensors, unused[16];
} ReferenceHeader;
typedef struct {
    double norm_eps, rope_theta, seed, init_scale, lr, beta1, beta2, adam_eps, weight_decay, clip;
} ReferenceScalars;
typedef struct {
    ReferenceHeader h;
    ReferenceScalars s;
    char *bytes;                       // the whole file
    const int32_t *tokens, *targets;   // (micro_batches, B, T)
    const int32_t *logits_at;          // (logits_rows, 2): length, sequence
    const double *sensitivity;         // of each result: (logits_rows), (steps, 2), (tensors) gradients, (tensors) changes
    const double *logits;              // (logits_rows, vocab)
    const double *curve;               // (steps, 2): loss, gradient norm
    const double *summaries;           // gradient of each tensor, then its change over all steps
} Reference;

static int passed, failed, small;

static void report(const char *recipe, const char *what, double error, double tolerance) {
    const int good = error <= tolerance;                               // a NaN is not
    printf("%-6s %-52s %10.2e %10.2e  %s\n", recipe, what, error, tolerance, good ? "ok" : "FAILED");
    if (good) passed++;
    else failed++;
}

static char *file_read(const char *path, int64_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f) fatal("%s: cannot be opened (%s); make it with: python3 dev/reference/llama_reference.py", path, strerror(errno));
    if (fseek(f, 0, SEEK_END) != 0 || (*size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET) != 0) fatal("%s: cannot be measured (%s)", path, strerror(errno));
    char *bytes = (char *)xcalloc((size_t)*size, 1);
    if (fread(bytes, 1, (size_t)*size, f) != (size_t)*size) fatal("%s: cannot be read (%s)", path, strerror(errno));
    fclose(f);
    return bytes;
}
static int64_t summary_length(const ReferenceHeader *h, int64_t count) {
    return 1 + h->products + (count < h->samples ? count : h->samples);
}
static LlamaConfig reference_config(const Reference *r) {
    LlamaConfig c;
    memset(&c, 0, sizeof c);
    c.layers = r->h.layers; c.width = r->h.width; c.heads = r->h.heads; c.kv_heads = r->h.kv_heads; c.ffn = r->h.ffn;
    c.vocab = r->h.vocab; c.seq = r->h.seq;
    c.norm_eps = (float)r->s.norm_eps; c.rope_theta = (float)r->s.rope_theta;
    return c;
}
static Reference reference_open(const char *path) {
    Reference r;
    int64_t size, at = sizeof r.h;
    memset(&r, 0, sizeof r);
    r.bytes = file_read(path, &size);
    if (size < at) fatal("%s: %lld bytes are too few for its header; make it again with dev/reference/llama_reference.py", path, (long long)size);
    memcpy(&r.h, r.bytes, sizeof r.h);
    if (r.h.magic != 0x4C524546 || r.h.version != 1)
        fatal("%s: magic %08x, version %d at byte 0: not a reference of version 1; make it again with dev/reference/llama_reference.py", path,
              (unsigned)r.h.magic, r.h.version);
    const int64_t count = (int64_t)r.h.micro_batches * r.h.batch * r.h.seq, rows = r.h.logits_rows;
    const int64_t scalars = at + 4 * (2 * count + 2 * rows);
    if (scalars + (int64_t)sizeof r.s > size) fatal("%s: cut short at byte %lld; make it again with dev/reference/llama_reference.py", path, (long long)size);
    r.tokens = (const int32_t *)(r.bytes + at);
    r.targets = r.tokens + count;
    r.logits_at = r.targets + count;
    memcpy(&r.s, r.bytes + scalars, sizeof r.s);
    r.sensitivity = (const double *)(r.bytes + scalars + sizeof r.s);
    r.logits = r.sensitivity + rows + 2 * r.h.steps + 2 * r.h.tensors;
    r.curve = r.logits + rows * r.h.vocab;
    r.summaries = r.curve + 2 * r.h.steps;
    const LlamaConfig c = reference_config(&r);
    const ParamTable t = llama_param_table(&c);
    const double *end = r.summaries;
    for (int i = 0; i < t.count; i++) end += 2 * summary_length(&r.h, t.params[i].count);
    if (t.count != r.h.tensors || (const char *)end != r.bytes + size)
        fatal("%s: %lld bytes for %d tensors do not suit its header; make it again with dev/reference/llama_reference.py", path, (long long)size,
              r.h.tensors);
    free(t.params);
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons

// +-1 number e of random vector `product` of tensor `index`.
static double random_sign(int index, int product, int64_t count, int64_t e) {
    const RngStream s = rng_stream(77, (uint32_t)index, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    const uint32_t word = rng_word(s, (uint64_t)(product * ((count + 31) / 32) + e / 32));
    return word >> (e & 31) & 1 ? -1 : 1;
}
// Error of x against the reference's summary, relative to the reference's norm: the larger of two estimates of the error's
// norm, from products with random signs (the mean square of <sign, error> is |error|^2) and from the stored entries.
static double summary_error(const Reference *r, const double *summary, int index, int64_t count, const float *x) {
    const double *products = summary + 1, *samples = products + r->h.products;
    double by_products = 0, by_samples = 0;
    for (int k = 0; k < r->h.products; k++) {
        double sum = 0;
        for (int64_t e = 0; e < count; e++) sum += random_sign(index, k, count, e) * x[e];
        by_products += (sum - products[k]) * (sum - products[k]) / r->h.products;
    }
    const int64_t n = count < r->h.samples ? count : r->h.samples;
    for (int64_t k = 0; k < n; k++) {
        const double d = x[k * count / n] - samples[k];
        by_samples += d * d * (double)count / (double)n;
    }
    const double worse = by_products > by_samples ? by_products : by_samples;
    return by_products == by_products && by_samples == by_samples ? sqrt(worse) / summary[0] : NAN;
}
static double relative_error(const float *x, const double *reference, int64_t n) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    return sqrt(error / norm);
}

// ---------------------------------------------------------------------------------------------------------------------
// The test of one recipe

// The reference's parameters: initial values rounded to BF16 times init_scale; gains 1 + ((7 j + 5 index) mod 32 - 16)/64.
static void write_parameters(const Reference *r, Llama *m, float *values) {
    const ParamTable *t = llama_params(m);
    llama_init(m);
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        llama_read(m, LLAMA_PARAMS, p, values);
        for (int64_t j = 0; j < p->count; j++)
            values[j] = p->init_std > 0 ? bf16_round(values[j]) * (float)r->s.init_scale : 1 + (float)((7 * j + 5 * i) % 32 - 16) / 64;
        llama_write(m, LLAMA_PARAMS, p, values);
    }
}
static void check_logits(const Reference *r, Llama *m, const char *recipe, double unit, float *values) {
    for (int k = 0; k < (small ? 1 : r->h.logits_rows); k++) {
        const int length = r->logits_at[2 * k], sequence = r->logits_at[2 * k + 1];
        char name[64];
        snprintf(name, sizeof name, "logits after %d tokens of %d", length, sequence);
        llama_logits(m, r->tokens + (int64_t)sequence * r->h.seq, length, values);
        report(recipe, name, relative_error(values, r->logits + (int64_t)k * r->h.vocab, r->h.vocab), unit * r->sensitivity[k]);
    }
}
static void check_evaluation(const Reference *r, Llama *m, const char *recipe, double unit) {
    const int64_t tokens = (int64_t)r->h.batch * r->h.seq;
    double loss = 0;
    for (int micro = 0; micro < r->h.micro_batches; micro++)
        loss += llama_eval(m, r->tokens + micro * tokens, r->targets + micro * tokens) / r->h.micro_batches;
    report(recipe, "evaluation loss", fabs(loss - r->curve[0]) / r->curve[0], unit * r->sensitivity[r->h.logits_rows]);
}
// Of a change: each step rounds the new value to float32, by half of 2^-23 of it at most.
static double storage_error(const Reference *r, const float *x, int64_t count, double change) {
    double norm = 0;
    for (int64_t i = 0; i < count; i++) norm += x[i] * x[i];
    return 0x1p-24 * sqrt(norm * r->h.steps) / change;
}
// Every tensor: what is read from the model, less `minus` (NULL: nothing), against the summaries from number `first`.
static void check_tensors(const Reference *r, Llama *m, const char *recipe, const char *kind, enum LlamaState what, int first,
                          const float *minus, double unit, float *values) {
    const ParamTable *t = llama_params(m);
    const double *summary = r->summaries, *sensitivity = r->sensitivity + r->h.logits_rows + 2 * r->h.steps + first;
    for (int i = 0; i < first; i++) summary += summary_length(&r->h, t->params[i % t->count].count);
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        char name[96];
        llama_read(m, what, p, values);
        for (int64_t e = 0; minus && e < p->count; e++) values[e] -= minus[p->offset + e];
        snprintf(name, sizeof name, "%s %s", kind, p->name);
        const double tolerance = unit * sensitivity[i] + (minus ? storage_error(r, minus + p->offset, p->count, summary[0]) : 0);
        report(recipe, name, summary_error(r, summary, i, p->count, values), tolerance);
        summary += summary_length(&r->h, p->count);
    }
}
static void check_steps(const Reference *r, Llama *m, const char *recipe, double unit, float *values) {
    const int64_t tokens = (int64_t)r->h.batch * r->h.seq;
    for (int step = 0; step < (small ? 1 : r->h.steps); step++) {
        AdamWOptions o;
        memset(&o, 0, sizeof o);
        o.lr = (float)r->s.lr; o.beta1 = (float)r->s.beta1; o.beta2 = (float)r->s.beta2; o.eps = (float)r->s.adam_eps;
        o.weight_decay = (float)r->s.weight_decay; o.clip = (float)r->s.clip;
        o.step = step;
        llama_step_begin(m, step);
        for (int micro = 0; micro < r->h.micro_batches; micro++)
            llama_micro_step(m, micro, r->tokens + micro * tokens, r->targets + micro * tokens);
        if (step == 0) check_tensors(r, m, recipe, "gradient", LLAMA_GRADS, 0, NULL, unit, values);
        llama_step_end(m, &o);
        const StepResult result = llama_step_result(m);
        const double *exact = r->curve + 2 * step, *sensitivity = r->sensitivity + r->h.logits_rows + 2 * step;
        char name[64];
        snprintf(name, sizeof name, "loss of step %d (%.6f)", step, result.loss);
        report(recipe, name, result.finite ? fabs(result.loss - exact[0]) / exact[0] : NAN, unit * sensitivity[0]);
        snprintf(name, sizeof name, "gradient norm of step %d (%.4f)", step, result.grad_norm);
        report(recipe, name, fabs(result.grad_norm - exact[1]) / exact[1], unit * sensitivity[1]);
    }
}
static void check_recipe(const Reference *r, const char *recipe, double rounding, int attention) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    o.config = reference_config(r);
    o.recipe = recipe_find(recipe);
    o.batch = r->h.batch; o.micro_batches = r->h.micro_batches;
    o.master_fp32 = 1;
    o.attention = attention;
    o.seed = (uint64_t)r->s.seed;
    Llama *m = llama_create(&o);
    const ParamTable *t = llama_params(m);
    float *values = (float *)xcalloc((size_t)t->total, sizeof(float)), *start = (float *)xcalloc((size_t)t->total, sizeof(float));
    const double unit = SAFETY * rounding;

    write_parameters(r, m, values);
    for (int i = 0; i < t->count; i++) llama_read(m, LLAMA_PARAMS, &t->params[i], start + t->params[i].offset);
    check_logits(r, m, recipe, unit, values);
    check_evaluation(r, m, recipe, unit);
    check_steps(r, m, recipe, unit, values);
    if (!small) check_tensors(r, m, recipe, "change of", LLAMA_PARAMS, t->count, start, unit, values);

    free(values);
    free(start);
    llama_free(m);
}

int main(int argc, char **argv) {
    small = argc == 2 && strcmp(argv[1], "--small") == 0;
    const int attention = small ? OWN_ATTENTION : argc > 2 ? atoi(argv[2]) : 0;
    if (argc > 3 || attention < 0 || attention > 2)
        fatal_usage("test_gpt2 --small, or test_gpt2 [FILE [ATTENTION]]: a stored reference, dev/test/llama_reference.bin if none is named; 0 auto, 1 cudnn, 2 flash (GPU only)");
    Reference r = reference_open(argc > 1 && !small ? argv[1] : "dev/test/llama_reference.bin");
    printf("%-6s %-52s %10s %10s\n", "recipe", "what", "error", "tolerance");
    if (!small) check_recipe(&r, "fp32", FP32_ROUNDING, attention);
    check_recipe(&r, "bf16", BF16_ROUNDING, attention);
    free(r.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
