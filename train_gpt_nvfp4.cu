// quartet.c: pre-trains Llama-style language models with fully quantized NVFP4 linear layers, or any rival recipe.
//
// One file, two programs: valid C11 and valid CUDA.
//   nvcc builds train_gpt_nvfp4 (llmc/cuda/), cc -x c builds train_gpt_nvfp4_cpu (llmc/cpu/) from this same text.
// main() reads top to bottom: options, data, model, loop. A step flows
//   dataloader -> llama_micro_step (forward, loss, backward; each linear: quantize -> gemm) -> llama_step_end (clip, AdamW)
//   -> metrics -> maybe evaluation, sample, checkpoint.
#ifdef __CUDACC__
#include "llmc/cuda/backend.cuh"
#include "llmc/cuda/selfcheck.cuh"
#else
#include "llmc/cpu/backend.h"
#include "llmc/selfcheck.h"
#endif
#include "llmc/config.h"
#include "llmc/dataloader.h"
#include "llmc/dist.h"
#include "llmc/init_from.h"
#include "llmc/lock.h"
#include "llmc/meta.h"
#include "llmc/metrics.h"
#include "llmc/saver.h"
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
    if (d->has_tokenizer) {
        tokenizer_open(&d->tokenizer, path);
        if (d->tokenizer.vocab != d->meta.vocab || d->tokenizer.eot != d->meta.eot_token)
            fatal("%s: holds %d tokens, end-of-text %d; meta.json beside it says %lld and %lld: they are of two tokenizers; make the data again with data/prepare.py",
                  path, d->tokenizer.vocab, d->tokenizer.eot, (long long)d->meta.vocab, (long long)d->meta.eot_token);
    }
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

static double plan_print(const LlamaOptions *o) {  // -> bytes
    MemoryItem items[32];
    const int n = llama_plan(o, items, 32);
    double total = 0;
    for (int i = 0; i < n; i++) total += (double)items[i].bytes;
    printf("memory plan: %.1f MiB\n", total / 1048576);
    for (int i = 0; i < n; i++) printf("  %-44s %10.1f MiB\n", items[i].what, (double)items[i].bytes / 1048576);
    fflush(stdout);
    return total;
}
static Llama *model_create(const RunConfig *c, double *memory_bytes) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    o.config = c->llama;
    o.recipe = recipe_find(c->recipe);
    o.bf16_layers = (int)c->bf16_layers;
    o.quant_stats = c->quant_stats > 0;
    o.batch = (int)c->batch;
    o.micro_batches = config_micro_batches(c, dist_size());
    o.rank = dist_rank();
    o.ranks = dist_size();
    o.zero = (int)c->zero;
    o.reduce_bf16 = (int)c->reduce_bf16;
    o.host_staged = (int)c->host_staged;
    o.master_fp32 = (int)c->master_fp32;
    o.recompute = (int)c->recompute;
    o.grad_bf16 = (int)c->grad_bf16;
    o.attention = (int)c->attention;
    o.nvfp4_gemm = (int)c->nvfp4_gemm;
    o.seed = (uint64_t)c->seed;
    *memory_bytes = plan_print(&o);
    Llama *model = llama_create(&o);
    if (llama_products(model)) printf("NVFP4 products: %s\n", llama_products(model));
    return model;
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation and samples

// Mean loss over the first --eval-tokens tokens of the validation data (rounded down to whole batches, at least one). Each rank takes
// every dist_size()-th batch; the sum is in the order of the batches, whatever the number of ranks.
static double evaluate(Llama *model, Data *d, const RunConfig *c) {
    int64_t batches = c->eval_tokens / (c->batch * c->seq), most = d->val.num_samples / c->batch;
    if (batches < 1) batches = 1;
    if (batches > most) batches = most;
    double sum = 0;
    float *losses = (float *)xcalloc((size_t)dist_size(), sizeof(float));
    for (int64_t i = 0; i < batches; i += dist_size()) {
        const int64_t own = i + dist_rank();
        float loss = 0;
        if (own < batches) {
            dataloader_batch(&d->val, own * c->batch, (int)c->batch, d->tokens, d->targets);
            loss = llama_eval(model, d->tokens, d->targets);
        }
        dist_gather(&loss, sizeof loss, losses);
        for (int r = 0; r < dist_size(); r++) sum += losses[r];
    }
    free(losses);
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

// SIGINT, SIGTERM, and SIGUSR1 (what SLURM's --signal sends ahead of the time limit): finish the step, save, end with status 0.
static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }
// Shards are mapped: one that is cut short, or whose disk fails, while the run reads it ends the run with this signal.
static void on_lost_data(int number) {
    static const char text[] = "error: a token shard was cut short, or its disk failed, while the run was reading it; check the data, then go on with --resume auto\n";
    (void)number;
    if (write(2, text, sizeof text - 1) < 0) _exit(1);  // nobody can be told
    _exit(1);
}
static void catch_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) (void)sigaction(numbers[i], &action, NULL);
    action.sa_handler = on_lost_data;
    (void)sigaction(SIGBUS, &action, NULL);
}

typedef struct {
    const RunConfig *c;
    Llama *model;
    Data *data;
    Metrics log;
    CheckpointState at;            // at.step: optimizer steps done
    Saver saver;
    char begun_from[4096];         // the checkpoint that the run goes on from, "": none
    int64_t saved;                 // its step, where it is one of OUT's own; else 0: OUT has none yet
    int stop;                      // the signal by which the run ends, on every rank after the same step; 0: none yet
} Run;

static double printable(double x) { return isnan(x) ? (double)NAN : x; }   // printf shows a NaN's sign, which means nothing
// A step whose update was not applied: after NaN or infinity the run ends unless --on-nan skip; an outlier is left out. Many in a
// row are no spike. Weights and moments are as before the step either way, and the last checkpoint stands.
static void step_skipped(Run *r, int64_t step, const StepResult *result) {
    const int stray = step_is_finite(result), many = r->at.window.skipped >= OUTLIER_IN_A_ROW;
    if (!many && (stray || r->c->on_nan == ON_NAN_SKIP)) {
        warn("step %lld: loss is %g, gradient norm %g: %s; the update was not applied, the run goes on with the next samples", (long long)step,
             printable(result->loss), printable(result->grad_norm), stray ? "an outlier" : "not finite");
        return;
    }
    dist_alone(1);
    saver_wait(&r->saver);
    metrics_close(&r->log);
    char *who = result->culprit ? xasprintf(", the loss first on rank %d (%s)", result->culprit - 1, dist_host(result->culprit - 1)) : xstrdup("");
    char *where = r->saver.saved ? xasprintf("the last good checkpoint is %s/" CHECKPOINT_NAME, r->c->out, (long long)r->saver.saved)
                : r->begun_from[0] ? xasprintf("the last good checkpoint is %s, that it began with", r->begun_from) : xstrdup("there is no checkpoint yet");
    dist_fatal_together("step %lld: loss is %g, gradient norm %g%s: training stops%s, the update was not applied; %s (try a lower --lr%s)", (long long)step,
          printable(result->loss), printable(result->grad_norm), dist_size() > 1 ? who : "", many ? " after too many skipped steps in a row" : "", where, r->saver.saved || r->begun_from[0] ? ", then --resume it" : " or a longer --warmup");
}
// Reads the results of the steps that ended and were not reported yet, up to `done` steps done.
static void report_steps(Run *r, int64_t *reported, int64_t done) {
    for (; *reported < done; (*reported)++) {
        StepResult result = llama_step_result(r->model);
        outlier_add(&r->at.window, *reported, result.loss, result.grad_norm, result.finite);
        metrics_step(&r->log, *reported + 1, &result, schedule_lr((ScheduleKind)r->c->schedule, *reported, r->c->steps, r->c->warmup_steps, r->c->lr, r->c->min_lr),
                     llama_step_seconds(r->model));
        if (!result.finite) step_skipped(r, *reported + 1, &result);
    }
}
static void save(Run *r) {
    if (r->saver.saved == r->at.step || (r->saver.busy && r->saver.copy.state.step == r->at.step)) return;
    if (dist_rank() != 0) {
        if (r->c->zero) checkpoint_copy_serve(r->model);
        r->saver.saved = r->at.step;
        return;
    }
    dist_alone(1);
    saver_wait(&r->saver);
    dist_alone(0);
    saver_start(&r->saver, r->model, r->c, &r->at, r->log.fd);
}
static int due(int64_t interval, int64_t done) { return interval > 0 && done % interval == 0; }

// What happens between steps: evaluation, samples, checkpoints.
static void between_steps(Run *r) {
    const RunConfig *c = r->c;
    const int64_t done = r->at.step, last = done == c->steps;
    if (r->data->has_val && (due(c->eval_every, done) || (last && c->eval_every > 0))) {
        r->at.val_loss = evaluate(r->model, r->data, c);
        metrics_eval(&r->log, done, r->at.val_loss);
    }
    if (due(c->sample_every, done) && dist_rank() == 0) sample_text(r->model, r->data, c, &r->log, done);
    if (due(c->save_every, done) || (last && c->save_every > 0) || r->stop) save(r);
}

static void train(Run *r) {
    const RunConfig *c = r->c;
    const int micro_batches = config_micro_batches(c, dist_size());
    int64_t reported = r->at.step;
    r->stop = dist_any(stop_signal);
    while (r->at.step < c->steps && !r->stop) {
        const int64_t step = r->at.step;
        llama_step_begin(r->model, step);
        const int measure = due(c->quant_stats, step + 1) && dist_rank() == 0;
        if (measure) llama_stats_begin(r->model);
        for (int micro = 0; micro < micro_batches; micro++) {
            // The ranks' micro-batches stand side by side in the global order, so that a step has the same samples on any number of ranks.
            dataloader_batch(&r->data->train, r->at.next_sample + dist_rank() * c->batch, (int)c->batch, r->data->tokens, r->data->targets);
            llama_micro_step(r->model, micro, r->data->tokens, r->data->targets);
            r->at.next_sample += c->batch * dist_size();
        }
        const OutlierLimits limits = outlier_limits(&r->at.window, step, LLAMA_STEP_LAG, c->outlier_z);
        llama_step_limits(r->model, limits.loss, limits.norm);
        const AdamWOptions adamw = config_adamw(c, step);
        llama_step_end(r->model, &adamw);
        saver_poll(&r->saver);
        const int64_t done = r->at.step = step + 1;
        r->stop = dist_any(stop_signal);
        const int pause = due(c->eval_every, done) || due(c->sample_every, done) || due(c->save_every, done) || done == c->steps || r->stop;
        report_steps(r, &reported, pause ? done : done - LLAMA_STEP_LAG);
        if (measure) metrics_quant(&r->log, done, llama_stats_end(r->model));
        if (pause) between_steps(r);
    }
    report_steps(r, &reported, r->at.step);
}

// Rank 0: the run's folder, locked, with room for its checkpoints. One that is not there yet is made only now that all else was found good.
static void output_claim(Run *r, int locked) {
    const RunConfig *c = r->c;
    const ParamTable *params = llama_params(r->model);
    char error[ERROR_TEXT];
    checkpoint_check_space(c->out, c, params, r->at.step);
    if (!locked) {
        if (folder_create(c->out, error, sizeof error) != 0) fatal("%s; use another --out", error);
        lock_take(c->out);
        CheckpointList list = checkpoint_list(c->out);
        if (list.count) fatal("%s: another run began there at the same moment; use another --out", c->out);
    }
    if (c->save_every == 0) return;
    checkpoint_copy_reserve(&r->saver.copy, params, c);
    printf("checkpoints of %.1f MiB every %lld steps, up to %lld at a time; as much host memory to write them from\n",
           (double)checkpoint_bytes(params, c) / 1048576, (long long)c->save_every, (long long)checkpoint_most(c, r->at.step));
}

// What must be the same on every rank is compared before anything is computed.
static void ranks_check(const RunConfig *c, const Data *d) {
    static const char *const where[] = {"train-data", "val-data", "init-from"};  // hosts may keep them elsewhere: what is in them is compared
    cJSON *options = config_to_json(c), *model = config_model_to_json(&c->llama);
    for (int i = 0; i < 3; i++) cJSON_DeleteItemFromObjectCaseSensitive(options, where[i]);
    char *told = json_print(options, 0), *shape = json_print(model, 0), *text;
    dist_check_same("build", "revision " GIT_REVISION " by compiler " __VERSION__, "start the same program everywhere");
    text = xasprintf("%s,%s,\"zero\":%d,\"dist-host-staged\":%d", told, shape, (int)c->zero, (int)c->host_staged);
    dist_check_same("configuration", text, "give every process the same command line");
    free(text);
    text = xasprintf("training data %016llx in %lld tokens, validation data %016llx", (unsigned long long)dataloader_fingerprint(&d->train),
                     (long long)d->train.num_tokens, d->has_val ? (unsigned long long)dataloader_fingerprint(&d->val) : 0ull);
    dist_check_same("text to train on", text, "put the same shards on every host");
    free(text); free(told); free(shape);
    cJSON_Delete(options);
    cJSON_Delete(model);
}
// Every rank reads the checkpoint that rank 0 found, or begins from the same seed; that all came to the same weights is checked.
static void model_begin(Run *r) {
    const RunConfig *c = r->c;
    char *const checkpoint = r->begun_from, own[PATH_TEXT];
    struct stat a, b;
    dist_alone(1);                                         // all of a checkpoint is read to see whether it is good
    int found = dist_rank() == 0 && checkpoint_find(c->resume, c->out, checkpoint, sizeof r->begun_from);
    dist_alone(0);
    dist_broadcast(&found, sizeof found, 0);
    dist_broadcast(checkpoint, sizeof r->begun_from, 0);
    if (found) {
        checkpoint_load(checkpoint, r->model, c, &r->at);
        printf("resumed from %s: step %lld of %lld\n", checkpoint, (long long)r->at.step, (long long)c->steps);
        checkpoint_path(own, c->out, "", r->at.step);
        if (stat(checkpoint, &a) == 0 && stat(own, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino) r->saved = r->at.step;
    } else {
        llama_init(r->model);
        if (c->init_from[0]) init_from(c->init_from, r->model, c);
    }
    if (dist_size() == 1) return;
    const ParamTable *t = llama_params(r->model);
    float *values = checkpoint_buffer(t);
    uint32_t crc = 0;
    for (int i = 0; i < t->count; i++) {
        llama_read(r->model, LLAMA_PARAMS, &t->params[i], values);
        crc = crc32c(crc, values, (size_t)t->params[i].count * sizeof(float));
    }
    char *text = xasprintf("step %lld, checksum %08x", (long long)r->at.step, crc);
    dist_check_same("model to begin with", text, "--out, --resume and --init-from must name folders that all hosts share");
    free(text);
    free(values);
}

int main(int argc, char **argv) {
    static RunConfig c;
    static Data data;
    static Run run;
    config_parse(&c, argc, argv);
#ifdef __CUDACC__
    if (c.check) return selfcheck_run_gpu(c.out);
#else
    if (c.check) return selfcheck_run_cpu(c.out);
#endif
    dist_init((double)c.comm_timeout);
    config_set_ranks(&c, dist_size());
    catch_signals();
    data_open(&data, &c);
    ranks_check(&c, &data);
    config_print(&c, stdout);
    if (dist_size() > 1) printf("ranks     %d%s\n", dist_size(), c.zero ? ", the optimizer state spread over them" : "");

    MetricsInfo info;
    memset(&info, 0, sizeof info);
    Llama *model = model_create(&c, &info.memory_bytes);
    run.c = &c; run.model = model; run.data = &data;
    run.at.data_fingerprint = dataloader_fingerprint(&data.train);
    run.at.val_loss = NAN;
    const int first = dist_rank() == 0, locked = first && lock_take_if_there(c.out);
    if (locked) checkpoint_tidy(c.out);
    model_begin(&run);

    saver_init(&run.saver, c.out, run.saved);
    if (first) output_claim(&run, locked);
    const ParamTable *params = llama_params(model);
    info.device = llama_device_name(model);
    info.peak_flops = llama_peak_flops(model) * dist_size();
    info.flops_per_token = llama_flops_per_token(&c.llama, params);
    info.params = llama_param_count(params);
    info.bytes_per_token = data.meta.val_bytes_per_token;
    info.ranks = dist_size();
    metrics_open(&run.log, &c, &info, run.at.step, !first);

    train(&run);
    if (run.stop) save(&run);
    dist_alone(1);
    saver_free(&run.saver);
    dist_alone(0);
    metrics_close(&run.log);
    if (run.at.step == c.steps) printf("run complete: %lld of %lld steps\n", (long long)run.at.step, (long long)c.steps);
    else printf("stopped by signal %d after step %lld; go on with the same command and --resume auto\n", run.stop, (long long)run.at.step);
    llama_free(model);
    data_close(&data);
    dist_finish();
    return 0;
}
