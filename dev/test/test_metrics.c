// test_metrics.c: the log is valid JSON that says what happened, the same bytes for the same run, and goes on after a resume.
#include <signal.h>
#include <sys/resource.h>

#include "dev/test/support.h"
#include "dev/test/fake_backend.h"
#include "llmc/metrics.h"

static RunConfig config;
static const MetricsInfo INFO = {"a \"device\"", 0, 1e6, 1000, 2e6, 4.5, 1};

static void make_config(const char *out) {
    const char *argv[] = {"train", "--train-data", "t", "--val-data", "v", "--steps", "20", "--eval-every", "5", "--log-every", "4", "--out", out, NULL};
    config_parse(&config, 13, (char **)argv);
}
static StepResult result_of(int64_t done) {
    StepResult r = {5.5f / (float)done + 0.1f, 1.0f / 3.0f * (float)done, 1, 0};
    return r;
}
// Steps first+1 .. last as a trainer would tell of them.
static void play(Metrics *x, int64_t first, int64_t last) {
    for (int64_t done = first + 1; done <= last; done++) {
        StepResult r = result_of(done);
        metrics_step(x, done, &r, 1e-3 / (double)done, 0.25);
        if (done % 5 == 0) { metrics_eval(x, done, 4.0 / (double)done); metrics_sample(x, done, "text\xC3\xA9\xFF\0\"\n", 10); }
    }
}
static void run(const char *out, int64_t resumed, int64_t last) {
    Metrics x;
    make_config(out);
    metrics_open(&x, &config, &INFO, resumed, 0);
    play(&x, resumed, last);
    metrics_close(&x);
}
// stdout of what happens between the two calls, to be freed.
static int saved_stdout;
static void capture_begin(void) {
    fflush(stdout);
    saved_stdout = dup(1);
    int fd = open(folder_path("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(fd, 1);
    close(fd);
}
static char *capture_end(void) {
    fflush(stdout);
    dup2(saved_stdout, 1);
    close(saved_stdout);
    return get_file(folder_path("stdout"), NULL);
}
static char *run_quietly(const char *out, int64_t resumed, int64_t last) {
    capture_begin();
    run(out, resumed, last);
    return capture_end();
}
// The log's lines, parsed, without what may differ between two runs; one text, to be freed.
static char *log_text(const char *out) {
    char *path = xasprintf("%s/log.jsonl", out), error[ERROR_TEXT], *text = NULL;
    size_t size = 0;
    char *log = get_file(path, NULL);
    FILE *f = open_memstream(&text, &size);
    for (char *line = strtok(log, "\n"); line; line = strtok(NULL, "\n")) {
        cJSON *j = json_parse_object(line, strlen(line), path, error, sizeof error);
        if (!j) fail_msg("%s in: %s", error, line);
        assert_true((json_get(j, "run") != NULL) == (json_get(j, "machine") != NULL));
        assert_true(json_get(j, "run") || json_get(j, "sample") || json_get(j, "timing"));
        cJSON_DeleteItemFromObject(j, "timing");
        cJSON_DeleteItemFromObject(j, "machine");
        char *printed = json_print(j, 0);
        fprintf(f, "%s\n", printed);
        free(printed);
        cJSON_Delete(j);
    }
    fclose(f);
    free(log);
    free(path);
    return text;
}
static cJSON *line_of(const char *out, const char *key, int64_t number) {
    char *path = xasprintf("%s/log.jsonl", out), error[ERROR_TEXT];
    char *log = get_file(path, NULL);
    cJSON *found = NULL;
    for (char *line = strtok(log, "\n"); line && !found; line = strtok(NULL, "\n")) {
        cJSON *j = json_parse_object(line, strlen(line), path, error, sizeof error);
        const cJSON *value = json_get(j, key);
        if (value && (cJSON_IsObject(value) || value->valuedouble == (double)number)) found = j;
        else cJSON_Delete(j);
    }
    if (!found) fail_msg("no line \"%s\":%lld", key, (long long)number);
    free(log);
    free(path);
    return found;
}
static double number(const cJSON *j, const char *key) {
    const cJSON *value = json_get(j, key);
    if (!cJSON_IsNumber(value)) fail_msg("\"%s\" is not a number", key);
    return value->valuedouble;
}

static void test_log_says_what_happened(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("runs/a"));  // folders are made, parents too
    free(run_quietly(out, 0, 20));
    cJSON *j = line_of(out, "run", 0);
    assert_string_equal(json_get(json_get(json_get(j, "run"), "options"), "recipe")->valuestring, "quartet2");
    assert_int_equal(number(json_get(json_get(j, "run"), "model"), "width"), 128);
    assert_int_equal(number(json_get(j, "run"), "params"), 1000);
    assert_int_equal(number(json_get(j, "run"), "memory_bytes"), 2000000);
    assert_string_equal(json_get(json_get(j, "machine"), "device")->valuestring, "a \"device\"");
    cJSON_Delete(j);
    for (int64_t done = 1; done <= 20; done++) {
        j = line_of(out, "step", done);
        StepResult r = result_of(done);
        assert_int_equal(number(j, "tokens"), done * 2048);
        assert_true((float)number(j, "loss") == r.loss);  // every float32 comes back
        assert_true((float)number(j, "grad_norm") == r.grad_norm);
        assert_true((float)number(j, "lr") == (float)(1e-3 / (double)done));
        assert_true(number(json_get(j, "timing"), "tokens_per_s") > 0);
        cJSON_Delete(j);
    }
    j = line_of(out, "eval", 10);
    assert_true((float)number(j, "val_loss") == 0.4f);
    assert_true(fabs(number(j, "bits_per_byte") - 0.4 / log(2.0) / 4.5) < 1e-8);  // float32 of 0.128
    cJSON_Delete(j);
    j = line_of(out, "sample", 10);
    assert_string_equal(json_get(j, "text")->valuestring, "text\xC3\xA9\xEF\xBF\xBD\xEF\xBF\xBD\"\n");
    cJSON_Delete(j);
    free(out);
}
static void test_console(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("console")), *text = run_quietly(out, 0, 20);
    static const char *const parts[] = {"step      4/20 | loss", "step     20/20 | loss", "| norm", "| lr 2.500e-04 |", "tok/s", "ETA", "eval     10/20 | val loss 0.40000 | 0.1282 bits/byte",
        "20 steps, 0.04096 M tokens in", "validation loss 0.20000; log: "};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (!strstr(text, parts[i])) fail_msg("\"%s\" is not in: %s", parts[i], text);
    assert_null(strstr(text, "step      5/20"));  // --log-every 4
    assert_null(strstr(text, "MFU"));             // no peak, no figure
    free(text);
    free(out);
}
static void test_same_bytes_and_resume(void **state) {
    (void)state;
    char *a = xstrdup(folder_path("a")), *b = xstrdup(folder_path("b")), *path = xstrdup(folder_path("b/log.jsonl"));
    free(run_quietly(a, 0, 20));
    free(run_quietly(b, 0, 20));
    char *whole = log_text(a), *again = log_text(b);
    assert_string_equal(whole, again);
    free(again);
    // Steps 11 to 20 are thrown away and done again; also from a log cut in the middle of a line; also of a run that died late.
    for (int cut = 0; cut < 3; cut++) {
        if (cut == 1) {
            again = get_file(path, NULL);
            assert_int_equal(truncate(path, strstr(again, "\"step\":11,") - again + 20), 0);
            free(again);
        }
        if (cut == 2) { FILE *f = fopen(path, "a"); assert_non_null(f); fputs("{\"step\":21,\"los", f); fclose(f); }
        char *said = run_quietly(b, 10, 20);
        again = log_text(b);
        assert_string_equal(whole, again);
        free(said);
        free(again);
    }
    // Resumed in a folder without a log: a new one, which begins there.
    char *c = xstrdup(folder_path("c"));
    free(run_quietly(c, 10, 12));
    char *part = log_text(c);
    assert_non_null(strstr(part, "{\"run\":"));
    assert_null(strstr(part, "\"step\":10,"));
    assert_non_null(strstr(part, "\"step\":11,"));
    free(part); free(whole); free(a); free(b); free(c); free(path);
}
static void test_earlier_log_is_kept(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("kept"));
    free(run_quietly(out, 0, 3));
    char *first = get_file(folder_path("kept/log.jsonl"), NULL);
    free(run_quietly(out, 0, 2));
    free(run_quietly(out, 0, 1));
    char *old = get_file(folder_path("kept/log.1.jsonl"), NULL);
    assert_string_equal(first, old);
    assert_int_equal(access(folder_path("kept/log.2.jsonl"), R_OK), 0);
    free(first); free(old); free(out);
}
static void test_not_finite(void **state) {
    (void)state;
    static const float values[] = {NAN, INFINITY, -INFINITY};
    static const char *const names[] = {"nan", "inf", "-inf"};
    Metrics x;
    char *out = xstrdup(folder_path("nan"));
    make_config(out);
    capture_begin();
    metrics_open(&x, &config, &INFO, 0, 0);
    for (int i = 0; i < 3; i++) {
        StepResult r = {values[i], values[i], 0, 0};
        metrics_step(&x, i + 1, &r, 1e-3, 0.25);
    }
    metrics_eval(&x, 3, NAN);
    metrics_close(&x);
    char *said = capture_end();
    assert_non_null(strstr(said, "step      1/20 | loss      nan"));  // whatever --log-every is
    free(said);
    for (int i = 0; i < 3; i++) {
        cJSON *j = line_of(out, "step", i + 1);
        assert_true(cJSON_IsNull(json_get(j, "loss")) && cJSON_IsNull(json_get(j, "grad_norm")));
        assert_string_equal(json_get(j, "loss_text")->valuestring, names[i]);
        cJSON_Delete(j);
    }
    free(out);
}
// Every float32 in the log reads back as itself.
static void test_floats_round_trip(void **state) {
    (void)state;
    RngStream r = rng_stream(5, 0, 0);
    for (uint64_t i = 0; i < 20000; i++) {
        float x = f32_from_bits(rng_word(r, i));
        if (!isfinite(x)) continue;
        cJSON *j = json_new_object();
        json_add_float(j, "x", x);
        const char *text = json_get(j, "x")->valuestring;
        if (f32_bits(strtof(text, NULL)) != f32_bits(x)) fail_msg("%s is not %.9g", text, (double)x);
        cJSON_Delete(j);
    }
}
// A step's speed is its own seconds', whatever went before it and whenever it is reported.
static void test_speed(void **state) {
    (void)state;
    MetricsInfo info = INFO;
    Metrics x;
    StepResult r = result_of(1);
    const double seconds[] = {0.5, 0.25, 0, 2};
    make_config(folder_path("mfu"));
    info.peak_flops = 1e12;
    capture_begin();
    metrics_open(&x, &config, &info, 0, 0);
    for (int i = 0; i < 4; i++) metrics_step(&x, i + 1, &r, 1e-3, seconds[i]);
    metrics_close(&x);
    free(capture_end());
    for (int i = 0; i < 4; i++) {
        cJSON *j = line_of(config.out, "step", i + 1);
        const cJSON *timing = json_get(j, "timing");
        const double s = number(timing, "step_s"), rate = number(timing, "tokens_per_s");
        assert_true(fabs(s / (seconds[i] > 0 ? seconds[i] : 1e-9) - 1) < 1e-6);
        assert_true(fabs(rate * s / 2048 - 1) < 1e-6);                     // three values rounded to float32
        assert_true(fabs(number(timing, "mfu") / (rate * 1e6 / 1e12) - 1) < 1e-6);
        cJSON_Delete(j);
    }
}

static void run_20(const void *out) { run((const char *)out, 0, 20); }
static void run_in_2000_bytes(const void *out) {
    struct rlimit limit = {2000, 2000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    run((const char *)out, 0, 20);
}
static void test_folders_that_do_not_work(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("full"));
    assert_int_equal(run_child(run_in_2000_bytes, out, text, sizeof text), 1);
    assert_one_line(text, "log.jsonl: cannot write: File too large; free some space or use another --out");
    put_text(folder_path("file"), "");
    assert_int_equal(run_child(run_20, folder_path("file/out"), text, sizeof text), 1);
    assert_one_line(text, "file: cannot create the folder: File exists; use another --out");
    assert_int_equal(run_child(run_20, "/proc/out", text, sizeof text), 1);
    assert_one_line(text, "/proc/out: cannot create the folder");
    free(out);
}

// Measurements of quantization: a line a linear layer; operands that were not measured are left out; cut off on a resume like the rest.
static void test_quant_stats(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("quant"));
    LinearStats stats[4 * LINEARS_PER_LAYER];
    memset(stats, 0, sizeof stats);
    const OperandStats x = {1, 0.0095, 0.25, 0.5, 3, 4};
    stats[6].operand[GEMM_FORWARD][OPERAND_A] = stats[6].operand[GEMM_WGRAD][OPERAND_A] = x;  // layer 1, gate_up
    stats[6].dx.cosine = 0.75; stats[6].dw.error = 0.125;
    capture_begin();
    for (int64_t first = 0; first < 4; first += 3) {                   // steps 1 to 4, then again from 3
        Metrics m;
        make_config(out);
        assert_int_equal(config.llama.layers, 4);
        metrics_open(&m, &config, &INFO, first, 0);
        for (int64_t done = first + 1; done <= 4; done++) {
            StepResult r = result_of(done);
            metrics_step(&m, done, &r, 1e-3, 0.25);
            if (done % 2 == 0) metrics_quant(&m, done, stats);
        }
        metrics_close(&m);
    }
    free(capture_end());
    char *path = xasprintf("%s/log.jsonl", out), *log = get_file(path, NULL), error[ERROR_TEXT];
    int lines = 0;
    for (char *line = strtok(log, "\n"); line; line = strtok(NULL, "\n")) {
        cJSON *j = json_parse_object(line, strlen(line), path, error, sizeof error);
        assert_non_null(j);
        if (json_get(j, "quant")) {
            const int i = lines++ % 16;
            assert_int_equal(json_get(j, "quant")->valueint, lines <= 16 ? 2 : 4);
            assert_int_equal(json_get(j, "layer")->valueint, i / 4);
            const cJSON *forward = json_get(j, "forward"), *dgrad = json_get(j, "dgrad"), *wgrad = json_get(j, "wgrad");
            assert_null(json_get(forward, "w"));
            assert_int_equal(json_get(forward, "x") != NULL, i == 6);
            assert_int_equal(json_get(wgrad, "dy") != NULL, i == 6);
            assert_true(json_get(dgrad, "cosine")->valuedouble == (i == 6 ? 0.75 : 0) && json_get(wgrad, "error")->valuedouble == (i == 6 ? 0.125 : 0));
            if (i == 6) {
                assert_string_equal(json_get(j, "linear")->valuestring, "gate_up");
                assert_true(fabs(json_get(json_get(forward, "x"), "error")->valuedouble - 0.0095) < 1e-8);
                assert_true(json_get(json_get(forward, "x"), "clipped")->valuedouble == 0.5);
            }
        }
        cJSON_Delete(j);
    }
    assert_int_equal(lines, 32);                                       // step 2's and, once, step 4's
    free(log); free(path); free(out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_says_what_happened), cmocka_unit_test(test_console), cmocka_unit_test(test_same_bytes_and_resume),
        cmocka_unit_test(test_earlier_log_is_kept), cmocka_unit_test(test_not_finite), cmocka_unit_test(test_floats_round_trip),
        cmocka_unit_test(test_speed), cmocka_unit_test(test_quant_stats), cmocka_unit_test(test_folders_that_do_not_work)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
