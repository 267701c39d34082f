// quartet.c: pre-trains Llama-style language models with fully quantized NVFP4 linear layers, or any rival recipe.
//
// One file, two programs: valid C11 and valid CUDA.
//   nvcc builds train_gpt_nvfp4 (llmc/cuda/), cc -x c builds train_gpt_nvfp4_cpu (llmc/cpu/) from this same text.
// main() reads top to bottom: options, data, model, loop. A step flows
//   dataloader -> llama_micro_step (forward, loss, backward; each linear: quantize -> gemm) -> llama_step_end (clip, AdamW)
//   -> metrics -> maybe evaluation, sample, checkpoint.
#include <signal.h>
#ifdef __CUDACC__
#include "llmc/cuda/backend.cuh"
#else
#include "llmc/cpu/backend.h"
#endif
#include "llmc/checkpoint.h"
#include "llmc/config.h"
#include "llmc/dataloader.h"
#include "llmc/meta.h"
#include "llmc/metrics.h"
#include "llmc/tokenizer.h"

#define SAMPLE_TEMPERATURE 0.8f

// ---------------------------------------------------------------------------------------------------------------------
// Data

typedef struct {
    DataLoader train, val;
    int has_val, has_tokenizer;
    DataMeta meta;
    Tokenizer tokenizer;
    int32_t *tokens, *targets;     // (B,T), one micro-batch
} Data;

static void data_open(Data *d, RunConfig *c) {
    if (!c->train_data[0])
        fatal_usage("--train-data is needed: token shards, e.g. 'data/gcide-bytes/train_*.bin'; make them with: python3 data/prepare.py");
    d->meta = meta_read(c->train_data);
    if (d->meta.found) config_set_vocab(c, d->meta.vocab, d->meta.folder);
    const int vocab = d->meta.found ? (int)d->meta.vocab : c->llama.vocab;
    dataloader_open(&d->train, c->train_data, (int)c->seq, vocab, (uint64_t)c->seed, 1);
    d->has_val = c->val_data[0] != 0;
    if (d->has_val) dataloader_open(&d->val, c->val_data, (int)c->seq, vocab, 0, 0);
    if (d->train.num_samples < c->batch)
        fatal("%s: %lld tokens make %lld samples of %lld, less than one batch of %lld; bring more text or use a smaller --batch or --seq",
              c->train_data, (long long)d->train.num_tokens, (long long)d->train.num_samples, (long long)c->seq, (long long)c->batch);
    if (d->has_val && d->val.num_samples < c->batch)
        fatal("%s: %lld tokens make %lld samples of %lld, less than one batch of %lld; bring more text or use a smaller --batch or --seq",
              c->val_data, (long long)d->val.num_tokens, (long long)d->val.num_samples, (long long)c->seq, (long long)c->batch);
    char *path = xasprintf("%s/tokenizer.bin", d->meta.folder);
    d->has_tokenizer = d->meta.found && access(path, R_OK) == 0;
    if (d->has_tokenizer) tokenizer_open(&d->tokenizer, path);
    else if (c->sample_every > 0) fatal("--sample-every needs %s to turn tokens into text; make it with data/prepare.py, or use --sample-every 0", path);
    free(path);
    d->tokens = (int32_t *)xcalloc((size_t)(c->batch * c->seq), sizeof(int32_t));
    d->targets = (int32_t *)xcalloc((size_t)(c->batch * c->seq), sizeof(int32_t));
}
static void data_close(Data *d) {
    dataloader_close(&d->train);
    if (d->has_val) dataloader_close(&d->val);
    if (d->has_tokenizer) tokenizer_close(&d->tokenizer);
    free(d->tokens);
    free(d->targets);
}

// ---------------------------------------------------------------------------------------------------------------------
// Model

static void plan_print(const LlamaOptions *o) {
    MemoryItem items[32];
    const int n = llama_plan(o, items, 32);
    double total = 0;
    for (int i = 0; i < n; i++) total += (double)items[i].bytes;
    printf("memory plan: %.1f MiB\n", total / 1048576);
    for (int i = 0; i < n; i++) printf("  %-44s %10.1f MiB\n", items[i].what, (double)items[i].bytes / 1048576);
    fflush(stdout);
}
static Llama *model_create(const RunConfig *c) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    o.config = c->llama;
    o.recipe = recipe_find(c->recipe);
    o.bf16_layers = (int)c->bf16_layers;
    o.quant_stats = c->quant_stats > 0;
    o.batch = (int)c->batch;
    o.micro_batches = config_micro_batches(c, 1);
    o.master_fp32 = (int)c->master_fp32;
    o.recompute = (int)c->recompute;
    o.grad_bf16 = (int)c->grad_bf16;
    o.attention = (int)c->attention;
    o.seed = (uint64_t)c->seed;
    plan_print(&o);
    return llama_create(&o);
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation and samples

// Mean loss over the first --eval-tokens tokens of the validation data (rounded down to whole batches, at least one).
static double evaluate(Llama *model, Data *d, const RunConfig *c) {
    int64_t batches = c->eval_tokens / (c->batch * c->seq), most = d->val.num_samples / c->batch;
    if (batches < 1) batches = 1;
    if (batches > most) batches = most;
    double sum = 0;
    for (int64_t i = 0; i < batches; i++) {
        dataloader_batch(&d->val, i * c->batch, (int)c->batch, d->tokens, d->targets);
        sum += llama_eval(model, d->tokens, d->targets);
    }
    return sum / (double)batches;
}

// Draws a token from softmax(logits / temperature) with a uniform number of (0, 1].
static int sample_token(float *logits, int vocab, float uniform) {
    float top = logits[0];
    for (int i = 1; i < vocab; i++) top = logits[i] > top ? logits[i] : top;
    double sum = 0, reached = 0;
    for (int i = 0; i < vocab; i++) { logits[i] = expf((logits[i] - top) / SAMPLE_TEMPERATURE); sum += logits[i]; }
    for (int i = 0; i < vocab; i++) {
        reached += logits[i];
        if (reached >= uniform * sum) return i;
    }
    return vocab - 1;
}
// Text that the model writes after an end-of-text token; the same for the same model, seed and step.
static void sample_text(Llama *model, Data *d, const RunConfig *c, Metrics *log, int64_t done) {
    const int vocab = (int)d->meta.vocab;
    const int64_t length = c->sample_tokens < c->seq ? c->sample_tokens : c->seq - 1;
    RngStream random = rng_stream((uint64_t)c->seed, (uint32_t)done, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    float *logits = (float *)xcalloc((size_t)c->llama.vocab, sizeof(float));
    int32_t *tokens = (int32_t *)xcalloc((size_t)c->seq, sizeof(int32_t));
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) fatal("out of memory while sampling text");
    tokens[0] = (int32_t)d->meta.eot_token;
    for (int64_t i = 0; i < length; i++) {
        llama_logits(model, tokens, (int)i + 1, logits);
        tokens[i + 1] = sample_token(logits, vocab, rng_uniform(rng_word(random, (uint64_t)i)));
        if (tokens[i + 1] == d->meta.eot_token) break;
        int bytes;
        const char *piece = (const char *)tokenizer_decode(&d->tokenizer, tokens[i + 1], &bytes);
        fwrite(piece, 1, (size_t)bytes, out);
    }
    if (fclose(out) != 0) fatal("out of memory while sampling text");
    char *safe = text_escape((const uint8_t *)text, size);
    metrics_sample(log, done, safe, strlen(safe));
    free(safe);
    free(text); free(tokens); free(logits);
}

// ---------------------------------------------------------------------------------------------------------------------
// The loop

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

typedef struct {
    const RunConfig *c;
    Llama *model;
    Data *data;
    Metrics log;
    CheckpointState at;            // at.step: optimizer steps done
    int64_t saved;                 // step of the newest checkpoint, 0: none
} Run;

// Reads the results of the steps that ended and were not reported yet, up to `done` steps done. A loss that is not finite
// ends the run: its update was not applied, and the last checkpoint stands.
static void report_steps(Run *r, int64_t *reported, int64_t done) {
    for (; *reported < done; (*reported)++) {
        StepResult result = llama_step_result(r->model);
        metrics_step(&r->log, *reported + 1, &result, schedule_lr((ScheduleKind)r->c->schedule, *reported, r->c->steps, r->c->warmup_steps, r->c->lr, r->c->min_lr));
        if (!result.finite) {
            metrics_close(&r->log);
            if (r->saved) fatal("step %lld: loss is %g, gradient norm %g: training stops, the update was not applied; the last good checkpoint is %s/step_%08lld (try a lower --lr, then --resume it)",
                                (long long)*reported + 1, result.loss, result.grad_norm, r->c->out, (long long)r->saved);
            fatal("step %lld: loss is %g, gradient norm %g: training stops, the update was not applied; there is no checkpoint yet (try a lower --lr or a longer --warmup)",
                  (long long)*reported + 1, result.loss, result.grad_norm);
        }
    }
}
static void save(Run *r) {
    if (r->saved == r->at.step) return;
    checkpoint_save(r->c->out, r->model, r->c, &r->at);
    r->saved = r->at.step;
}
static int due(int64_t interval, int64_t done) { return interval > 0 && done % interval == 0; }

// What happens between steps: evaluation, samples, checkpoints. Training time stands still meanwhile.
static void between_steps(Run *r) {
    const RunConfig *c = r->c;
    const int64_t done = r->at.step, last = done == c->steps;
    metrics_pause(&r->log);
    if (r->data->has_val && (due(c->eval_every, done) || (last && c->eval_every > 0))) {
        r->at.val_loss = evaluate(r->model, r->data, c);
        metrics_eval(&r->log, done, r->at.val_loss);
    }
    if (due(c->sample_every, done)) sample_text(r->model, r->data, c, &r->log, done);
    if (due(c->save_every, done) || (last && c->save_every > 0) || stop_signal) save(r);
    metrics_go(&r->log);
}

static void train(Run *r) {
    const RunConfig *c = r->c;
    const int micro_batches = config_micro_batches(c, 1);
    int64_t reported = r->at.step;
    while (r->at.step < c->steps && !stop_signal) {
        const int64_t step = r->at.step;
        llama_step_begin(r->model, step);
        const int measure = due(c->quant_stats, step + 1);
        if (measure) llama_stats_begin(r->model);
        for (int micro = 0; micro < micro_batches; micro++) {
            dataloader_batch(&r->data->train, r->at.next_sample, (int)c->batch, r->data->tokens, r->data->targets);
            llama_micro_step(r->model, micro, r->data->tokens, r->data->targets);
            r->at.next_sample += c->batch;
        }
        const AdamWOptions adamw = config_adamw(c, step);
        llama_step_end(r->model, &adamw);
        const int64_t done = r->at.step = step + 1;
        const int pause = due(c->eval_every, done) || due(c->sample_every, done) || due(c->save_every, done) || done == c->steps || stop_signal;
        report_steps(r, &reported, pause ? done : done - LLAMA_STEP_LAG);
        if (measure) metrics_quant(&r->log, done, llama_stats_end(r->model));
        if (pause) between_steps(r);
    }
    report_steps(r, &reported, r->at.step);
}

int main(int argc, char **argv) {
    static RunConfig c;
    static Data data;
    static Run run;
    config_parse(&c, argc, argv);
    data_open(&data, &c);
    config_print(&c, stdout);

    Llama *model = model_create(&c);
    run.c = &c; run.model = model; run.data = &data;
    run.at.data_fingerprint = dataloader_fingerprint(&data.train);
    run.at.val_loss = NAN;
    char checkpoint[4096];
    if (checkpoint_find(c.resume, c.out, checkpoint, sizeof checkpoint)) {
        checkpoint_load(checkpoint, model, &c, &run.at);
        run.saved = run.at.step;
        printf("resumed from %s: step %lld of %lld\n", checkpoint, (long long)run.at.step, (long long)c.steps);
    } else llama_init(model);

    const ParamTable *params = llama_params(model);
    MetricsInfo info;
    memset(&info, 0, sizeof info);
    info.device = llama_device_name(model);
    info.peak_flops = llama_peak_flops(model);
    info.flops_per_token = llama_flops_per_token(&c.llama, params);
    info.params = llama_param_count(params);
    info.bytes_per_token = data.meta.val_bytes_per_token;
    info.ranks = 1;
    metrics_open(&run.log, &c, &info, run.at.step, 0);

    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    train(&run);
    if (stop_signal) {
        save(&run);
        printf("stopped by signal %d after step %lld; go on with the same command and --resume auto\n", (int)stop_signal, (long long)run.at.step);
    }
    metrics_close(&run.log);
    llama_free(model);
    data_close(&data);
    return 0;
}
