// config.h: what a run is: model, data, optimizer, intervals. One table of options is read by the command line, by
// --config run.json and by --help; presets and model files (model_file.h) fill in what was not said.
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "llama.h"
#include "model_file.h"
#include "options.h"
#include "schedule.h"

#define CONFIG_ROWS 64               // room for the table's rows
#define QUARTET_VERSION "0.1.0"
#ifndef GIT_REVISION
#define GIT_REVISION "unknown"       // the Makefile passes the commit
#endif

// Every field is final once config_parse() returned, but for what config_set_vocab() and config_set_ranks() settle. With `check`, only `out` counts.
typedef struct RunConfig {
    // model
    char model[OPTION_TEXT];         // a preset's name or a JSON file
    LlamaConfig llama;               // resolved: preset or file, then --seq and --tied
    int64_t tied;                    // 1: lm_head is the embedding
    char init_from[OPTION_TEXT];     // a folder of Hugging Face's layout with the initial weights, "": from the seed
    char recipe[OPTION_TEXT];        // a row of recipe.h
    int64_t bf16_layers;             // the last so many layers are not quantized
    int64_t master_fp32;             // master weights in float32, not in BF16 with stochastic rounding
    int64_t recompute;               // enum Recompute of llama.h, in its order
    int64_t grad_bf16;               // the layers' gradients in BF16, not in float32
    int64_t nvfp4_gemm;              // Nvfp4GemmMode of cuda/gemm_nvfp4.cuh, in its order
    int64_t attention;               // AttentionBackend of cuda/attention.cuh, in its order
    // data
    char train_data[OPTION_TEXT], val_data[OPTION_TEXT];  // file name patterns; val_data "": no evaluation
    int64_t batch, seq;              // a micro-batch is (batch, seq) tokens
    int64_t total_batch;             // tokens a step over all micro-batches and ranks
    // optimizer
    int64_t steps, tokens;           // optimizer steps of the run; tokens = steps * total_batch
    double lr, warmup, min_lr;       // peak; as given; last rate as a share of the peak
    int64_t warmup_steps;            // resolved from warmup
    int64_t schedule;                // ScheduleKind
    double beta1, beta2, adam_eps, weight_decay, clip;    // clip 0: no clipping
    int64_t seed;
    int64_t on_nan;                  // OnNan
    double outlier_z;                // deviations above the mean from which a step is skipped, 0: none is
    // several processes
    int64_t zero;                    // 1: the optimizer state is spread over the ranks
    int64_t reduce_bf16;             // gradients travel in BF16, not in float32
    int64_t comm_timeout;            // seconds
    int64_t host_staged;             // GPU: exchanges go through host memory
    // output; an interval of 0 means never
    char out[OPTION_TEXT];
    int64_t log_every, eval_every, eval_tokens, sample_every, sample_tokens, save_every, keep, keep_every;
    int64_t quant_stats;             // steps between measurements of what quantization does
    char resume[OPTION_TEXT];        // "none", "auto" or a checkpoint's folder
    char config_file[OPTION_TEXT];   // --config, "" without
    // bookkeeping
    int check;                       // --check: test the machine instead of training
    int model_is_file;
    int64_t asked_total_batch, asked_steps, asked_tokens; // as given, 0: not
    uint8_t from[CONFIG_ROWS];       // OptionSource of each row of the table
} RunConfig;

// ---------------------------------------------------------------------------------------------------------------------
// The table. The command line, --config and --help read these rows; the order is that of --help.

enum OnNan { ON_NAN_STOP, ON_NAN_SKIP };

#define FIELD(f) offsetof(RunConfig, f)
#define MANY 4e9                     // steps are 32-bit in the random words' addresses
static const Option CONFIG_TABLE[] = {
    {"Model", "model", OPTION_STRING, FIELD(model), "tiny", 0, 0, NULL, "NAME|FILE", "tiny 30M 50M 100M 200M 560M 1.9B, or a JSON file (own keys or Hugging Face's)"},
    {"Model", "tied", OPTION_BOOL, FIELD(tied), NULL, 0, 0, NULL, NULL, "lm_head is the embedding [the model's]"},
    {"Model", "recipe", OPTION_STRING, FIELD(recipe), "quartet2", 0, 0, NULL, "NAME", "how linear layers compute; listed below"},
    {"Model", "init-from", OPTION_STRING, FIELD(init_from), "", 0, 0, NULL, "FOLDER", "initial weights: a Hugging Face Llama checkpoint of the model's shape [the seed]"},
    {"Model", "bf16-layers", OPTION_INTEGER, FIELD(bf16_layers), "0", 0, 1024, NULL, "N", "the last N layers keep BF16 linears, whatever the recipe"},
    {"Model", "recompute", OPTION_CHOICE, FIELD(recompute), "norm", 0, 0, "norm|none|mlp|block", NULL, "GPU: what backward makes again to save memory"},
    {"Model", "master-weights", OPTION_CHOICE, FIELD(master_fp32), "bf16", 0, 0, "bf16|fp32", NULL, "bf16: stochastic rounding in AdamW"},
    {"Model", "grad-dtype", OPTION_CHOICE, FIELD(grad_bf16), "fp32", 0, 0, "fp32|bf16", NULL, "GPU: gradients of the layers; bf16 saves 2 bytes a parameter"},
    {"Model", "nvfp4-gemm", OPTION_CHOICE, FIELD(nvfp4_gemm), "auto", 0, 0, "auto|native|emulated", NULL, "GPU: NVFP4 products by FP4 tensor cores (Blackwell), or exactly in BF16; auto: native where it can be"},
    {"Model", "attention", OPTION_CHOICE, FIELD(attention), "auto", 0, 0, "auto|cudnn|flash", NULL, "GPU: cuDNN's kernels, or this program's own"},
    {"Data", "train-data", OPTION_STRING, FIELD(train_data), "", 0, 0, NULL, "PATTERN", "token shards to train on, e.g. 'data/*/train_*.bin' (needed)"},
    {"Data", "val-data", OPTION_STRING, FIELD(val_data), "", 0, 0, NULL, "PATTERN", "token shards to evaluate on [none]"},
    {"Data", "batch", OPTION_INTEGER, FIELD(batch), NULL, 1, 65536, NULL, "N", "sequences a micro-batch on each device [the model's]"},
    {"Data", "seq", OPTION_INTEGER, FIELD(seq), NULL, 1, 1 << 20, NULL, "N", "tokens a sequence [the model's]"},
    {"Data", "total-batch", OPTION_INTEGER, FIELD(total_batch), NULL, 0, 1LL << 40, NULL, "N", "tokens a step; gradients accumulate up to it [the model's; 0: one micro-batch]"},
    {"Optimizer", "steps", OPTION_INTEGER, FIELD(steps), NULL, 1, MANY, NULL, "N", "length of the run in optimizer steps (this or --tokens)"},
    {"Optimizer", "tokens", OPTION_INTEGER, FIELD(tokens), NULL, 1, JSON_INTEGER_MAX, NULL, "N", "length of the run in tokens, rounded up to whole steps; 3B, 500M"},
    {"Optimizer", "lr", OPTION_REAL, FIELD(lr), NULL, 0, 10, NULL, "X", "peak learning rate [the model's]"},
    {"Optimizer", "warmup", OPTION_REAL, FIELD(warmup), "0.1", 0, MANY, NULL, "X", "linear from lr/100; below 1 a share of all steps, else steps"},
    {"Optimizer", "schedule", OPTION_CHOICE, FIELD(schedule), "cosine", 0, 0, SCHEDULE_NAMES, NULL, "shape after the warm-up"},
    {"Optimizer", "min-lr", OPTION_REAL, FIELD(min_lr), "0.1", 0, 1, NULL, "X", "last learning rate, as a share of the peak"},
    {"Optimizer", "weight-decay", OPTION_REAL, FIELD(weight_decay), "0.1", 0, 10, NULL, "X", "of matrices"},
    {"Optimizer", "beta1", OPTION_REAL, FIELD(beta1), "0.9", 0, 0.999999, NULL, "X", "AdamW's decay of the mean gradient"},
    {"Optimizer", "beta2", OPTION_REAL, FIELD(beta2), "0.95", 0, 0.999999, NULL, "X", "AdamW's decay of the squared gradient"},
    {"Optimizer", "adam-eps", OPTION_REAL, FIELD(adam_eps), "1e-8", 1e-30, 1, NULL, "X", "AdamW's epsilon"},
    {"Optimizer", "clip", OPTION_REAL, FIELD(clip), "1", 0, 1e9, NULL, "X", "largest gradient norm; 0: no clipping"},
    {"Optimizer", "seed", OPTION_INTEGER, FIELD(seed), "1", 0, JSON_INTEGER_MAX, NULL, "N", "of initial values, order of data, and rounding"},
    {"Optimizer", "on-nan", OPTION_CHOICE, FIELD(on_nan), "stop", 0, 0, "stop|skip", NULL, "loss or gradient norm NaN or infinite: end the run, or go on without that step"},
    {"Optimizer", "outlier-z", OPTION_REAL, FIELD(outlier_z), "0", 0, 1e6, NULL, "X", "skip steps so many deviations above the last 128 in loss or gradient norm; 0: none"},
    {"Output (an interval of 0 means never)", "out", OPTION_STRING, FIELD(out), "runs/default", 0, 0, NULL, "FOLDER", "log.jsonl and checkpoints"},
    {"Output (an interval of 0 means never)", "log-every", OPTION_INTEGER, FIELD(log_every), "1", 0, MANY, NULL, "N", "steps between console lines (log.jsonl has every step)"},
    {"Output (an interval of 0 means never)", "eval-every", OPTION_INTEGER, FIELD(eval_every), "100", 0, MANY, NULL, "N", "steps between evaluations; one more after the last step"},
    {"Output (an interval of 0 means never)", "eval-tokens", OPTION_INTEGER, FIELD(eval_tokens), "65536", 1, JSON_INTEGER_MAX, NULL, "N", "tokens of an evaluation, at most what --val-data holds"},
    {"Output (an interval of 0 means never)", "sample-every", OPTION_INTEGER, FIELD(sample_every), "0", 0, MANY, NULL, "N", "steps between text samples"},
    {"Output (an interval of 0 means never)", "sample-tokens", OPTION_INTEGER, FIELD(sample_tokens), "96", 1, 1 << 20, NULL, "N", "tokens of a sample"},
    {"Output (an interval of 0 means never)", "quant-stats", OPTION_INTEGER, FIELD(quant_stats), "0", 0, MANY, NULL, "N", "steps between measurements of quantization errors, into log.jsonl"},
    {"Output (an interval of 0 means never)", "save-every", OPTION_INTEGER, FIELD(save_every), "0", 0, MANY, NULL, "N", "steps between checkpoints; one more after the last step"},
    {"Output (an interval of 0 means never)", "keep", OPTION_INTEGER, FIELD(keep), "2", 1, MANY, NULL, "N", "newest checkpoints to keep"},
    {"Output (an interval of 0 means never)", "keep-every", OPTION_INTEGER, FIELD(keep_every), "0", 0, MANY, NULL, "N", "keep those of every N-th step for good"},
    {"Output (an interval of 0 means never)", "resume", OPTION_STRING, FIELD(resume), "none", 0, 0, NULL, "none|auto|PATH", "auto: from OUT's newest good checkpoint, if any; PATH: from that one"},
    {"Several processes", "zero", OPTION_CHOICE, FIELD(zero), "0", 0, 0, "0|1", NULL, "1: each rank keeps its part of the optimizer state"},
    {"Several processes", "reduce-dtype", OPTION_CHOICE, FIELD(reduce_bf16), "float32", 0, 0, "float32|bf16", NULL, "gradients on their way between ranks"},
    {"Several processes", "comm-timeout", OPTION_INTEGER, FIELD(comm_timeout), "600", 1, 86400, NULL, "SECONDS", "end the run when a rank keeps others waiting so long"},
    {"Several processes", "dist-host-staged", OPTION_BOOL, FIELD(host_staged), "false", 0, 0, NULL, NULL, "GPU, for tests: exchange through host memory, not by NCCL"},
    {"Other", "config", OPTION_STRING, FIELD(config_file), "", 0, 0, NULL, "FILE", "JSON with these names as keys; the command line wins"},
    {"Other", "check", OPTION_ACTION, 0, NULL, 0, 0, NULL, NULL, "test this machine, its card and the disk under --out, instead of training"},
    {"Other", "help", OPTION_ACTION, 0, NULL, 0, 0, NULL, NULL, "this text"},
    {"Other", "version", OPTION_ACTION, 0, NULL, 0, 0, NULL, NULL, "version and build"},
};
#define CONFIG_COUNT ((int)(sizeof CONFIG_TABLE / sizeof CONFIG_TABLE[0]))

FN OptionSource config_source(const RunConfig *c, const char *name) {
    int row = option_find(CONFIG_TABLE, CONFIG_COUNT, name);
    if (row < 0) fatal("no option is called %s: this is a bug", name);
    return (OptionSource)c->from[row];
}

// ---------------------------------------------------------------------------------------------------------------------
// Legal values near an illegal one

FN int64_t nearest_multiple(int64_t n, int64_t of) {
    int64_t below = n / of * of;
    return below == 0 || n - below > of - (n - below) ? below + of : below;
}
FN int64_t greatest_common_divisor(int64_t a, int64_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

// A head is a whole, even number of values (rotary embedding turns pairs), and q, k, v together a multiple of 128 rows.
FN int heads_fit(int width, int heads) { return heads >= 1 && width % heads == 0 && width / heads % 2 == 0; }
FN int kv_heads_fit(int width, int heads, int kv) { return kv >= 1 && heads % kv == 0 && (2 * kv * (width / heads)) % 128 == 0; }

// Refuses a shape that the kernels or the quantizers cannot take, naming the nearest that they can.
FN void config_check_shape(const LlamaConfig *m, const char *where) {
    if (m->width % 128 != 0)
        fatal("%s: width %d is not a multiple of 128 (rotations are 128 long); the nearest is %lld",
              where, m->width, (long long)nearest_multiple(m->width, 128));
    if (m->ffn % 128 != 0)
        fatal("%s: ffn %d is not a multiple of 128 (rotations are 128 long); the nearest is %lld",
              where, m->ffn, (long long)nearest_multiple(m->ffn, 128));
    for (int away = 1; !heads_fit(m->width, m->heads); away++) {
        int fewer = heads_fit(m->width, m->heads - away), more = heads_fit(m->width, m->heads + away);
        if (fewer || more)
            fatal("%s: %d heads do not divide width %d into heads of even size; the nearest number is %d",
                  where, m->heads, m->width, m->heads + (fewer ? -away : away));
    }
    for (int away = 1; !kv_heads_fit(m->width, m->heads, m->kv_heads); away++) {
        int fewer = kv_heads_fit(m->width, m->heads, m->kv_heads - away), more = kv_heads_fit(m->width, m->heads, m->kv_heads + away);
        if (fewer || more)
            fatal("%s: kv_heads %d must divide heads %d, and 2 x kv_heads x head size must be a multiple of 128; the nearest is %d",
                  where, m->kv_heads, m->heads, m->kv_heads + (fewer ? -away : away));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Resolving

FN void config_resolve_model(RunConfig *c) {
    // The folder of --init-from says what model it is.
    if (c->init_from[0] && config_source(c, "model") == BY_DEFAULT &&
        snprintf(c->model, sizeof c->model, "%.900s/config.json", c->init_from) != (int)(strlen(c->init_from) + strlen("/config.json")))
        fatal_usage("--init-from: the folder's name is too long; name the model's config.json by --model");
    const Preset *p = preset_find(c->model);
    c->model_is_file = p == NULL;
    if (p) {
        preset_shape(p, &c->llama);
        if (c->batch == 0) c->batch = p->batch;
        if (config_source(c, "total-batch") == BY_DEFAULT) c->asked_total_batch = p->total_batch;
        if (config_source(c, "lr") == BY_DEFAULT) c->lr = p->lr;
    } else {
        char error[ERROR_TEXT];
        if (!strchr(c->model, '/') && !strstr(c->model, ".json")) {
            preset_names(error, sizeof error);
            fatal_usage("--model %s: there is no such preset; the presets are %s; a model file's name ends in .json", c->model, error);
        }
        if (model_file_read(c->model, &c->llama, error, sizeof error) != 0) fatal("%s", error);
        if (c->batch == 0) c->batch = 8;
        if (config_source(c, "lr") == BY_DEFAULT) fatal_usage("--lr is needed with --model %s (only presets bring one along)", c->model);
    }
    if (config_source(c, "tied") == BY_DEFAULT) c->tied = c->llama.tied;
    if (c->seq == 0) c->seq = c->llama.seq;
    c->llama.tied = (int)c->tied;
    c->llama.seq = (int)c->seq;
    c->llama.vocab = (c->llama.vocab + 127) / 128 * 128;
    config_check_shape(&c->llama, c->model);
}
// Which of --steps and --tokens counts: the command line's over the file's; both from one place contradict each other.
FN void config_resolve_length(RunConfig *c) {
    OptionSource steps = config_source(c, "steps"), tokens = config_source(c, "tokens");
    if (steps == BY_DEFAULT && tokens == BY_DEFAULT) fatal_usage("--steps or --tokens is needed: how long to train");
    if (steps == tokens)
        fatal_usage("--steps %lld and --tokens %lld are both given; leave one out", (long long)c->steps, (long long)c->tokens);
    c->asked_steps = steps > tokens ? c->steps : 0;
    c->asked_tokens = steps > tokens ? 0 : c->tokens;
}
// Micro-batches a step on each of `ranks`; a total batch that does not divide by ranks x batch x seq is refused.
FN int config_micro_batches(const RunConfig *c, int ranks) {
    const int64_t micro = c->batch * c->seq * ranks;  // tokens of one micro-batch on every rank
    if (c->total_batch % micro != 0)
        fatal_usage("--total-batch %lld is not a multiple of batch x seq%s = %lld tokens; the nearest is %lld", (long long)c->total_batch,
                    ranks > 1 ? " x ranks" : "", (long long)micro, (long long)nearest_multiple(c->total_batch, micro));
    if (c->total_batch / micro > 1 << 20)
        fatal_usage("--total-batch %lld would take %lld micro-batches a step; raise --batch",
                    (long long)c->total_batch, (long long)(c->total_batch / micro));
    return (int)(c->total_batch / micro);
}
// Settles total_batch, steps and warm-up for that many ranks. config_parse() has done so for one.
FN void config_set_ranks(RunConfig *c, int ranks) {
    c->total_batch = c->asked_total_batch ? c->asked_total_batch : c->batch * c->seq * ranks;
    (void)config_micro_batches(c, ranks);
    c->steps = c->asked_steps ? c->asked_steps : c->asked_tokens / c->total_batch + (c->asked_tokens % c->total_batch != 0);
    if ((double)c->steps > MANY || (double)c->steps * (double)c->total_batch > JSON_INTEGER_MAX)
        fatal_usage("%lld steps of %lld tokens are beyond what a run can count; lower --steps or --tokens",
                    (long long)c->steps, (long long)c->total_batch);
    c->tokens = c->steps * c->total_batch;
    if (c->warmup >= 1 && c->warmup != floor(c->warmup)) fatal_usage("--warmup %g: from 1 on it counts steps and must be whole", c->warmup);
    // A share is rounded down, but for what float64 lost: 0.29 of 100 steps are 29.
    c->warmup_steps = c->warmup < 1 ? (int64_t)floor(c->warmup * (double)c->steps + 1e-9) : (int64_t)c->warmup;
    if (c->warmup_steps >= c->steps)
        fatal_usage("--warmup of %lld steps does not end within the run's %lld steps; the most is %lld",
                    (long long)c->warmup_steps, (long long)c->steps, (long long)c->steps - 1);
}
FN void config_resolve(RunConfig *c) {
    c->asked_total_batch = c->total_batch;
    config_resolve_model(c);
    (void)recipe_find(c->recipe);
    if (c->bf16_layers > c->llama.layers)
        fatal_usage("--bf16-layers %lld: %s has %d layers", (long long)c->bf16_layers, c->model, c->llama.layers);
    if (!c->train_data[0]) fatal_usage("--train-data is needed: token shards, for example --train-data 'data/text/train_*.bin'");
    if (!c->val_data[0] && c->eval_every > 0) {
        if (config_source(c, "eval-every") != BY_DEFAULT) fatal_usage("--eval-every %lld needs --val-data", (long long)c->eval_every);
        c->eval_every = 0;
    }
    if (c->batch * c->seq % 128 != 0) {
        int64_t unit = 128 / greatest_common_divisor(c->seq, 128);
        fatal_usage("--batch %lld x --seq %lld: tokens a micro-batch must be a multiple of 128 (rotations are 128 long); the nearest is --batch %lld",
                    (long long)c->batch, (long long)c->seq, (long long)nearest_multiple(c->batch, unit));
    }
    if (c->batch * c->seq > INT32_MAX)
        fatal_usage("--batch %lld x --seq %lld is too many tokens for one micro-batch; use gradient accumulation (--total-batch)",
                    (long long)c->batch, (long long)c->seq);
    if (!(c->lr > 0)) fatal_usage("--lr must be above 0");
    if (!c->out[0] || !c->resume[0]) fatal_usage("--%s may not be empty", c->out[0] ? "resume" : "out");
    config_resolve_length(c);
    config_set_ranks(c, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

FN void config_help(FILE *f) {
    fprintf(f, "Trains a Llama-style language model with NVFP4 linear layers.\n"
               "Numbers may end in k, M, B (thousand, million, billion) or Ki, Mi, Gi (powers of 1024). Defaults in brackets.\n");
    options_help(CONFIG_TABLE, CONFIG_COUNT, f);
    fprintf(f, "\nRecipes\n");
    for (int i = 0; i < RECIPE_COUNT; i++) fprintf(f, "  %-21s %s\n", RECIPES[i].name, RECIPES[i].summary);
    fprintf(f, "\nModels\n");
    presets_help(f);
}
// First pass: --config, --check, --help and --version.
FN void config_visit_first(void *context, int row, const char *value) {
    RunConfig *c = (RunConfig *)context;
    const char *name = CONFIG_TABLE[row].name;
    if (strcmp(name, "config") == 0 && option_set_text(&CONFIG_TABLE[row], c, value) != 0)
        fatal_usage("--config: the file's name is too long");
    if (strcmp(name, "check") == 0) c->check = 1;
    if (strcmp(name, "help") == 0) { config_help(stdout); exit(0); }
    if (strcmp(name, "version") == 0) { printf("quartet.c %s (%s)\n", QUARTET_VERSION, GIT_REVISION); exit(0); }
}
// Second pass: every value.
FN void config_visit_value(void *context, int row, const char *value) {
    RunConfig *c = (RunConfig *)context;
    const Option *o = &CONFIG_TABLE[row];
    if (o->kind == OPTION_ACTION) return;
    if (option_set_text(o, c, value) != 0) {
        char expected[256];
        option_expected(o, expected, sizeof expected);
        fatal_usage("--%s %s: %s is expected", o->name, value, expected);
    }
    c->from[row] = BY_COMMAND_LINE;
}
// Reads the command line and --config, resolves the model and all defaults, validates. Answers --help and --version itself
// (exit 0); with --check, no run is described and nothing is resolved. An error is one line naming the option, or file and key; exit 2 (command line) or 1 (files).
FN void config_parse(RunConfig *c, int argc, char **argv) {
    char error[ERROR_TEXT];
    memset(c, 0, sizeof *c);
    options_defaults(CONFIG_TABLE, CONFIG_COUNT, c);
    options_walk(CONFIG_TABLE, CONFIG_COUNT, argc, argv, config_visit_first, c);
    if (c->config_file[0] && options_read_json(CONFIG_TABLE, CONFIG_COUNT, c, c->from, c->config_file, error, sizeof error) != 0)
        fatal("%s", error);
    options_walk(CONFIG_TABLE, CONFIG_COUNT, argc, argv, config_visit_value, c);
    if (!c->check) config_resolve(c);
}
// The data's vocabulary size becomes the model's, rounded up to a multiple of 128. A model file's own vocabulary stays, and
// data that needs more is refused. `where` names the data (its meta.json) in the message.
FN void config_set_vocab(RunConfig *c, int64_t vocab, const char *where) {
    if (vocab < 1 || vocab > MODEL_VOCAB_MAX)
        fatal("%s: a vocabulary of %lld tokens is outside 1 to %d", where, (long long)vocab, MODEL_VOCAB_MAX);
    if (!c->model_is_file) c->llama.vocab = (int)((vocab + 127) / 128 * 128);
    else if (vocab > c->llama.vocab)
        fatal("%s: the data has %lld tokens, but %s has a vocabulary of %d; raise it to at least %lld",
              where, (long long)vocab, c->model, c->llama.vocab, (long long)vocab);
}

// ---------------------------------------------------------------------------------------------------------------------
// Telling

// --out, --resume, --config, --zero and the like say where and how this process runs, not what the run computes; --tokens follows
// from --steps.
FN int config_is_told(const Option *o) {
    static const char *const untold[] = {"out", "resume", "config", "tokens", "zero", "comm-timeout", "dist-host-staged"};
    for (size_t i = 0; i < sizeof untold / sizeof untold[0]; i++)
        if (strcmp(o->name, untold[i]) == 0) return 0;
    return o->kind != OPTION_ACTION;
}
// What was decided: a JSON object with the options' names as keys, readable by --config. The caller deletes it.
FN cJSON *config_to_json(const RunConfig *c) {
    cJSON *object = json_new_object();
    for (int i = 0; i < CONFIG_COUNT; i++)
        if (config_is_told(&CONFIG_TABLE[i])) option_add_json(&CONFIG_TABLE[i], c, object);
    return object;
}
// The model's shape as a JSON object that --model FILE.json reads. The caller deletes it.
FN cJSON *config_model_to_json(const LlamaConfig *m) { return model_to_json(m); }

// Optimizer options of a step, counted from 0, the scheduled learning rate among them.
FN AdamWOptions config_adamw(const RunConfig *c, int64_t step) {
    AdamWOptions a;
    a.lr = (float)schedule_lr((ScheduleKind)c->schedule, step, c->steps, c->warmup_steps, c->lr, c->min_lr);
    a.beta1 = (float)c->beta1; a.beta2 = (float)c->beta2; a.eps = (float)c->adam_eps;
    a.weight_decay = (float)c->weight_decay; a.clip = (float)c->clip;
    a.step = step;
    return a;
}
// A human summary of a few lines.
FN void config_print(const RunConfig *c, FILE *f) {
    const LlamaConfig *m = &c->llama;
    ParamTable t = llama_param_table(m);
    char schedule[64];
    choice_name(SCHEDULE_NAMES, c->schedule, schedule);
    fprintf(f, "model     %s: %d layers, width %d, %d heads (%d KV), FFN %d, vocabulary %d%s: %.4g M parameters\n", c->model, m->layers, m->width,
            m->heads, m->kv_heads, m->ffn, m->vocab, m->tied ? ", tied" : "", (double)llama_param_count(&t) / 1e6);
    fprintf(f, "recipe    %s (%s), master weights %s\n", c->recipe, recipe_find(c->recipe)->summary, c->master_fp32 ? "fp32" : "bf16");
    fprintf(f, "batch     %lld x %lld tokens a micro-batch, %lld tokens a step\n", (long long)c->batch, (long long)c->seq, (long long)c->total_batch);
    fprintf(f, "run       %lld steps, %.4g M tokens (%.3g a parameter), seed %lld\n", (long long)c->steps, (double)c->tokens / 1e6,
            (double)c->tokens / (double)llama_param_count(&t), (long long)c->seed);
    fprintf(f, "optimizer AdamW %g/%g, decay %g, clip %g; lr %g, warm-up %lld steps, %s to %g\n", c->beta1, c->beta2, c->weight_decay, c->clip, c->lr,
            (long long)c->warmup_steps, schedule, schedule_lr((ScheduleKind)c->schedule, c->steps - 1, c->steps, c->warmup_steps, c->lr, c->min_lr));
    fprintf(f, "output    %s\n", c->out);
    free(t.params);
}

#endif
