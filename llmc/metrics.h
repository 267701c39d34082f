// metrics.h: what a run says: a console line a step, and OUT/log.jsonl, one JSON object a line.
//
// The log's first line is {"run":{"options":{...},"model":{...},...},"machine":{...}}; then come
//   {"step":N,"tokens":...,"loss":...,"grad_norm":...,"lr":...,"timing":{...}}             a step; "skipped":"not finite" or
//                                                                   "outlier" before "timing" when its update was not applied
//   {"eval":N,"tokens":...,"val_loss":...,"bits_per_byte":...,"timing":{...}}              an evaluation
//   {"quant":N,"layer":L,"linear":"qkv","forward":{"x":{...},"w":{...}},"dgrad":{...},"wgrad":{...}}   --quant-stats, a linear layer
//   {"sample":N,"text":"..."}                                                              a text sample
// N counts the optimizer steps done, so the first step's line says 1, and step_00001000 is the checkpoint after step 1000.
// Two runs of one command write the same bytes apart from the objects "machine" and "timing". A resumed run goes on with the
// same file: lines after the checkpoint's step are cut off first.
#ifndef LLMC_METRICS_H
#define LLMC_METRICS_H

#include <time.h>

#include "config.h"

typedef struct {
    const char *device;              // llama_device_name()
    double peak_flops;               // llama_peak_flops() x ranks, 0: not known (no MFU then)
    double flops_per_token;          // llama_flops_per_token()
    int64_t params;                  // llama_param_count()
    double memory_bytes;             // of the model's plan: what it holds on the device (CPU: in main memory), the most at any time
    double bytes_per_token;          // of the validation data, 0: not known (no bits per byte then)
    int ranks;
} MetricsInfo;

typedef struct Metrics {
    const RunConfig *c;
    MetricsInfo info;
    int quiet;                       // another rank than the first: writes nothing
    int fd;                          // of the log, -1: closed
    char path[PATH_TEXT];
    int64_t first, done;             // steps done at the start, and now
    double start;                    // clock_seconds() when this process began to train
    double trained;                  // seconds of all steps: evaluation, samples and checkpoints do not count
    double smooth, weight;           // running mean of the seconds a step, for the console
    double val_loss;                 // NaN: none yet
} Metrics;

// ---------------------------------------------------------------------------------------------------------------------
// The machine

// The processor's name as the system gives it, "unknown" where it does not.
FN void cpu_name(char *name, size_t size) {
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "unknown");
    while (f && fgets(line, sizeof line, f)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        snprintf(name, size, "%.*s", (int)strcspn(colon + 1, "\n"), colon + 1 + (colon[1] == ' '));
        break;
    }
    if (f) fclose(f);
    name[strcspn(name, "\n")] = '\0';
}
FN cJSON *machine_to_json(const MetricsInfo *info, const char *out) {
    cJSON *j = json_new_object();
    char text[256] = "unknown", now[64] = "";
    time_t t = time(NULL);
    struct tm utc;
    if (gethostname(text, sizeof text - 1) != 0) snprintf(text, sizeof text, "unknown");
    json_add_text(j, "host", text);
    json_add_text(j, "device", info->device ? info->device : "unknown");
    cpu_name(text, sizeof text);
    json_add_text(j, "cpu", text);
    json_add_number(j, "cpu_threads", (double)sysconf(_SC_NPROCESSORS_ONLN));
    json_add_number(j, "ranks", info->ranks);
#if defined(__CUDACC__)
    snprintf(text, sizeof text, "nvcc %d.%d, host %s", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __VERSION__);
#elif defined(__clang__)
    snprintf(text, sizeof text, "%s", __VERSION__);
#else
    snprintf(text, sizeof text, "gcc %s", __VERSION__);
#endif
    json_add_text(j, "compiler", text);
    json_add_text(j, "revision", GIT_REVISION);
    if (gmtime_r(&t, &utc)) strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", &utc);
    json_add_text(j, "started", now);
    json_add_text(j, "out", out);
    return j;
}

// ---------------------------------------------------------------------------------------------------------------------
// The log

// One line, in one write where the system allows. A full disk ends the run: steps that no log tells of are not wanted.
FN void log_write(Metrics *x, cJSON *line) {
    char *text = json_print(line, 0);
    size_t length = strlen(text);
    text[length] = '\n';  // json_print's zero byte: the line is written by length
    for (size_t at = 0; at <= length;) {
        ssize_t n = write(x->fd, text + at, length + 1 - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            fatal("%s: cannot write: %s; free some space or use another --out, then go on with --resume auto", x->path, strerror(errno));
        at += (size_t)n;
    }
    free(text);
    cJSON_Delete(line);
}
FN void log_write_header(Metrics *x) {
    const RunConfig *c = x->c;
    cJSON *line = json_new_object(), *run = json_new_object();
    json_add_text(run, "version", QUARTET_VERSION);
    json_add(run, "options", config_to_json(c));
    json_add(run, "model", config_model_to_json(&c->llama));
    json_add_number(run, "params", (double)x->info.params);
    json_add_number(run, "flops_per_token", x->info.flops_per_token);
    json_add_number(run, "memory_bytes", x->info.memory_bytes);
    json_add_number(run, "tokens", (double)c->tokens);
    json_add(line, "run", run);
    json_add(line, "machine", machine_to_json(&x->info, c->out));
    log_write(x, line);
}
FN void log_open(Metrics *x, int flags) {
    x->fd = open(x->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | flags, 0666);
    if (x->fd < 0) fatal("%s: cannot open for writing: %s; use another --out", x->path, strerror(errno));
}
// The step that a line is about, 0 for the header, -1 for what is no line of a log.
FN int64_t log_line_step(const char *text, size_t length) {
    static const char *const keys[] = {"step", "eval", "sample", "quant"};
    char error[ERROR_TEXT];
    int64_t step = -1;
    cJSON *j = json_parse_object(text, length, "log", error, sizeof error);
    if (!j) return -1;
    for (int i = 0; i < 4 && step < 0; i++)
        if (json_get(j, keys[i]) && json_integer(j, "log", keys[i], 0, INT64_MAX, &step, error, sizeof error) != 0) step = -1;
    if (cJSON_IsObject(json_get(j, "run"))) step = 0;
    cJSON_Delete(j);
    return step;
}
// Copies the log's lines up to `step`, in a new file that then takes the log's name. 0: done; 1: there is no log to go on with.
FN int log_cut(const char *folder, const char *path, int64_t step) {
    char copy[PATH_TEXT], error[ERROR_TEXT], *line = NULL;
    size_t room = 0;
    ssize_t length;
    int64_t number = 0, kept = 0;
    FileWriter w;
    FILE *f = fopen(path, "r");
    if (!f && errno == ENOENT) return 1;
    if (!f) fatal("%s: cannot open: %s", path, strerror(errno));
    path_join(copy, folder, ".tmp-log.jsonl");
    (void)unlink(copy);  // left behind by a run that died here
    writer_open(&w, copy, error, sizeof error);
    while ((length = getline(&line, &room, f)) > 0) {
        int64_t of = log_line_step(line, (size_t)length);
        number++;
        if (of < 0 || line[length - 1] != '\n') { warn("%s: line %lld is not a whole log line; it is left out", path, (long long)number); continue; }
        if (of > step) continue;
        writer_put(&w, line, (size_t)length);
        kept++;
    }
    int failed = ferror(f);
    fclose(f);
    free(line);
    if (failed) fatal("%s: cannot read: %s", path, strerror(errno));
    if (writer_close(&w) != 0 || (kept && rename(copy, path) != 0))
        fatal("%s", w.failed ? error : xasprintf("%s: cannot rename to %s: %s", copy, path, strerror(errno)));
    if (folder_sync(folder, error, sizeof error) != 0) fatal("%s", error);
    if (!kept) (void)unlink(copy);
    return kept == 0;
}
// A log of an earlier run is moved out of the way, never written over.
FN void log_set_aside(const char *folder, const char *path) {
    struct stat st;
    char old[PATH_TEXT], name[64];
    if (stat(path, &st) != 0) return;
    for (int i = 1;; i++) {
        snprintf(name, sizeof name, "log.%d.jsonl", i);
        path_join(old, folder, name);
        if (stat(old, &st) != 0) break;
    }
    if (rename(path, old) != 0) fatal("%s: cannot rename to %s: %s", path, old, strerror(errno));
    warn("%s: the log of an earlier run is now %s", path, old);
}

// ---------------------------------------------------------------------------------------------------------------------
// The interface

// Creates OUT and starts a log, or goes on with the log of the run that was resumed after `resumed_step` steps (0: a fresh
// start). The caller holds OUT's lock (lock.h). quiet: another rank than the first, which writes nothing. c must live as long as x.
FN void metrics_open(Metrics *x, const RunConfig *c, const MetricsInfo *info, int64_t resumed_step, int quiet) {
    char error[ERROR_TEXT];
    memset(x, 0, sizeof *x);
    x->c = c; x->info = *info; x->quiet = quiet;
    x->first = x->done = resumed_step;
    x->val_loss = NAN;
    x->fd = -1;
    if (!quiet) {
        if (folder_create(c->out, error, sizeof error) != 0) fatal("%s; use another --out", error);
        path_join(x->path, c->out, "log.jsonl");
        int fresh = resumed_step == 0 || log_cut(c->out, x->path, resumed_step) != 0;
        if (fresh) log_set_aside(c->out, x->path);
        log_open(x, fresh ? O_EXCL : 0);
        if (fresh) log_write_header(x);
    }
    x->start = clock_seconds();
}
FN void format_duration(double seconds, char text[32]) {
    long long s = seconds < 0 || !(seconds < 1e9) ? 0 : (long long)(seconds + 0.5);
    if (s >= 86400) snprintf(text, 32, "%lldd %02lldh", s / 86400, s / 3600 % 24);
    else if (s >= 3600) snprintf(text, 32, "%lldh %02lldm", s / 3600, s / 60 % 60);
    else snprintf(text, 32, "%lldm %02llds", s / 60, s % 60);
}
FN double metrics_mfu(const Metrics *x, double tokens_per_s) {
    return x->info.peak_flops > 0 ? tokens_per_s * x->info.flops_per_token / x->info.peak_flops : NAN;
}
FN void metrics_print_step(const Metrics *x, const StepResult *r, double lr) {
    char mfu[32] = "", eta[32];
    const double seconds = x->smooth / x->weight, rate = (double)x->c->total_batch / seconds;
    if (x->info.peak_flops > 0) snprintf(mfu, sizeof mfu, " | MFU %4.1f %%", 100 * metrics_mfu(x, rate));
    format_duration(seconds * (double)(x->c->steps - x->done), eta);
    printf("step %6lld/%lld | loss %8.5f | norm %8.4f | lr %.3e | %8.0f tok/s%s | ETA %s\n", (long long)x->done, (long long)x->c->steps,
           (double)r->loss, (double)r->grad_norm, lr, rate, mfu, eta);
    fflush(stdout);
}
// Whether what kept a step's update back was a limit of --outlier-z, not NaN or infinity.
FN int step_is_finite(const StepResult *r) { return isfinite(r->loss) && isfinite(r->grad_norm); }
// Step number `done` (the first is 1) ended, and took so many seconds: its log line, and its console line every --log-every steps and after the last.
FN void metrics_step(Metrics *x, int64_t done, const StepResult *r, double lr, double seconds) {
    seconds = seconds > 1e-9 ? seconds : 1e-9;
    const double rate = (double)x->c->total_batch / seconds;
    x->done = done;
    x->trained += seconds;
    x->smooth = 0.9 * x->smooth + 0.1 * seconds;
    x->weight = 0.9 * x->weight + 0.1;
    if (x->quiet) return;
    cJSON *line = json_new_object(), *timing = json_new_object();
    json_add_number(line, "step", (double)done);
    json_add_number(line, "tokens", (double)(done * x->c->total_batch));
    json_add_float(line, "loss", r->loss);
    json_add_float(line, "grad_norm", r->grad_norm);
    json_add_float(line, "lr", (float)lr);
    if (!r->finite) json_add_text(line, "skipped", step_is_finite(r) ? "outlier" : "not finite");
    json_add_float(timing, "time_s", (float)(clock_seconds() - x->start));
    json_add_float(timing, "step_s", (float)seconds);
    json_add_float(timing, "tokens_per_s", (float)rate);
    if (x->info.peak_flops > 0) json_add_float(timing, "mfu", (float)metrics_mfu(x, rate));
    json_add(line, "timing", timing);
    log_write(x, line);
    if (x->c->log_every > 0 && (done % x->c->log_every == 0 || done == x->c->steps || !r->finite)) metrics_print_step(x, r, lr);
}
// Mean loss of a token in bits per byte of text, NaN where the bytes a token are not known.
FN double metrics_bits_per_byte(const Metrics *x, double loss) {
    return x->info.bytes_per_token > 0 ? loss / 0.69314718055994530942 / x->info.bytes_per_token : NAN;
}
FN void metrics_eval(Metrics *x, int64_t done, double val_loss) {
    const double bits = metrics_bits_per_byte(x, val_loss);
    char text[48] = "";
    x->val_loss = val_loss;
    if (x->quiet) return;
    cJSON *line = json_new_object(), *timing = json_new_object();
    json_add_number(line, "eval", (double)done);
    json_add_number(line, "tokens", (double)(done * x->c->total_batch));
    json_add_float(line, "val_loss", (float)val_loss);
    if (x->info.bytes_per_token > 0) json_add_float(line, "bits_per_byte", (float)bits);
    json_add_float(timing, "time_s", (float)(clock_seconds() - x->start));
    json_add(line, "timing", timing);
    log_write(x, line);
    if (x->info.bytes_per_token > 0) snprintf(text, sizeof text, " | %.4f bits/byte", bits);
    printf("eval %6lld/%lld | val loss %.5f%s\n", (long long)done, (long long)x->c->steps, val_loss, text);
    fflush(stdout);
}
FN void metrics_add_operand(cJSON *gemm, const char *name, const OperandStats *s) {
    if (!s->measured) return;
    cJSON *j = json_new_object();
    json_add_float(j, "error", (float)s->error);
    json_add_float(j, "zeros", (float)s->zeros);
    json_add_float(j, "clipped", (float)s->clipped);
    json_add_float(j, "amax", (float)s->amax);
    json_add_float(j, "peak", (float)s->peak);
    json_add(gemm, name, j);
}
// What quantization did in step `done` to each linear layer, stats (layers, LINEARS_PER_LAYER): a line a layer. See OperandStats for units.
FN void metrics_quant(Metrics *x, int64_t done, const LinearStats *stats) {
    static const char *const linears[LINEARS_PER_LAYER] = {"qkv", "attn_out", "gate_up", "down"}, *const gemms[3] = {"forward", "dgrad", "wgrad"};
    static const char *const operands[3][2] = {{"x", "w"}, {"dy", "w"}, {"dy", "x"}};
    for (int i = 0; !x->quiet && i < x->c->llama.layers * LINEARS_PER_LAYER; i++) {
        cJSON *line = json_new_object();
        json_add_number(line, "quant", (double)done);
        json_add_number(line, "layer", i / LINEARS_PER_LAYER);
        json_add_text(line, "linear", linears[i % LINEARS_PER_LAYER]);
        for (int g = 0; g < 3; g++) {
            cJSON *gemm = json_new_object();
            for (int o = 0; o < 2; o++) metrics_add_operand(gemm, operands[g][o], &stats[i].operand[g][o]);
            const GradientStats *gradient = g == GEMM_DGRAD ? &stats[i].dx : &stats[i].dw;
            if (g != GEMM_FORWARD) {
                json_add_float(gemm, "cosine", (float)gradient->cosine);
                json_add_float(gemm, "error", (float)gradient->error);
            }
            json_add(line, gemms[g], gemm);
        }
        log_write(x, line);
    }
}
// `text` may hold any bytes; what is not UTF-8 is shown as U+FFFD.
FN void metrics_sample(Metrics *x, int64_t done, const char *text, size_t length) {
    if (x->quiet) return;
    char *clean = utf8_clean(text, length);
    cJSON *line = json_new_object();
    json_add_number(line, "sample", (double)done);
    json_add_text(line, "text", clean);
    log_write(x, line);
    printf("sample after step %lld: %s\n", (long long)done, clean);
    fflush(stdout);
    free(clean);
}
// Last summary line; closes the log.
FN void metrics_close(Metrics *x) {
    char trained[32], val[48] = "";
    const int64_t steps = x->done - x->first;
    const double tokens = (double)(steps * x->c->total_batch);
    if (x->quiet) return;
    format_duration(x->trained, trained);
    if (isfinite(x->val_loss)) snprintf(val, sizeof val, "; validation loss %.5f", x->val_loss);
    printf("%lld steps, %.4g M tokens in %s (%.0f tok/s)%s; log: %s\n", (long long)steps, tokens / 1e6, trained,
           x->trained > 0 ? tokens / x->trained : 0.0, val, x->path);
    fflush(stdout);
    if (x->fd >= 0 && close(x->fd) != 0) fatal("%s: cannot close: %s", x->path, strerror(errno));
    x->fd = -1;
}

#endif
