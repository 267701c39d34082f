// test_checkpoint.c: a checkpoint comes back bit for bit, or is refused and an older one taken; nothing good is ever lost.
#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include "dev/test/support.h"
#include "dev/test/fake_backend.h"
#include "llmc/checkpoint.h"
#include "dev/test/small_model.h"

#define FINGERPRINT 0xFEDCBA9876543210u

static CheckpointState state_of_step(int64_t step) {
    CheckpointState s;
    memset(&s, 0, sizeof s);
    s.step = step; s.next_sample = step * 2 + 1; s.data_fingerprint = FINGERPRINT; s.val_loss = 2.5 / (double)step;
    // Values with long binary fractions: the window must come back bit for bit.
    for (int i = 0; i < (int)(step * 40); i++) outlier_add(&s.window, i, 1.0f / (float)(i + 3), 7.0f / (float)(i + 11), i % 5 != 4);
    return s;
}
static CheckpointState state_of_data(uint64_t fingerprint) {
    CheckpointState s;
    memset(&s, 0, sizeof s);
    s.data_fingerprint = fingerprint;
    return s;
}
// A checkpoint of that step, its values drawn from the step.
static void save(const char *out, int64_t step) {
    Llama *m = make_model(step);
    CheckpointState s = state_of_step(step);
    checkpoint_save(out, m, &config, &s);
    llama_free(m);
}
// Whether the model holds what save() of that step stored.
static void assert_model_of_step(const Llama *m, int64_t step) {
    Llama *want = make_model(step);
    for (int i = 0; i < want->table.count; i++) {
        const Param *p = &want->table.params[i];
        const int states[] = {LLAMA_PARAMS, LLAMA_ADAM_M, LLAMA_ADAM_V};
        for (int k = 0; k < 3; k++)
            assert_memory_equal(m->state[states[k]] + p->offset, want->state[states[k]] + p->offset, (size_t)p->count * sizeof(float));
    }
    llama_free(want);
}
static void load_and_check(const char *path, int64_t step) {
    Llama *m = make_model(12345);
    CheckpointState s = state_of_data(FINGERPRINT), want = state_of_step(step);
    checkpoint_load(path, m, &config, &s);
    assert_model_of_step(m, step);
    assert_int_equal(s.step, step);
    assert_int_equal(s.next_sample, step * 2 + 1);
    assert_true(s.val_loss == 2.5 / (double)step);
    assert_memory_equal(&s.window, &want.window, sizeof s.window);
    llama_free(m);
}
// checkpoint_find in a child, so that what it says can be read. -> the step it found, 0: none, or minus the exit status.
typedef struct { const char *resume, *out; } Search;
static void search(const void *context) {
    const Search *s = (const Search *)context;
    char path[PATH_TEXT];
    if (checkpoint_find(s->resume, s->out, path, sizeof path)) {
        CheckpointState state;
        char error[ERROR_TEXT];
        assert_int_equal(checkpoint_verify(path, &state, error, sizeof error), 0);
        fflush(NULL);
        _exit(100 + (int)state.step);
    }
}
static int found(const char *resume, const char *out, char *text, size_t size) {
    Search s = {resume, out};
    int status = run_child(search, &s, text, size);
    return status > 100 ? status - 100 : -status;
}

static void test_round_trip(void **state) {
    (void)state;
    static const char *const variants[] = {"", "--master-weights fp32", "--tied true", "--tied true --master-weights fp32"};
    for (int v = 0; v < 4; v++) {
        char *out = xasprintf("%s/trip%d", test_folder, v), path[PATH_TEXT];
        make_config(variants[v]);
        save(out, 7);
        assert_int_equal(checkpoint_find("auto", out, path, sizeof path), 1);
        assert_string_equal(strrchr(path, '/'), "/step_00000007");
        load_and_check(path, 7);
        free(out);
    }
}
// What Hugging Face reads: names, shapes, dtype; q, k, v, gate and up are runs of our rows; config.json describes the model.
static void test_hugging_face_layout(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("hf")), error[ERROR_TEXT];
    static const struct { const char *name; ParamKind kind; int layer, first_row; int64_t rows, cols; } want[] = {
        {"model.embed_tokens.weight", PARAM_EMBED, -1, 0, 128, 128}, {"lm_head.weight", PARAM_LM_HEAD, -1, 0, 128, 128},
        {"model.norm.weight", PARAM_FINAL_NORM, -1, 0, 128, 0}, {"model.layers.1.input_layernorm.weight", PARAM_ATTN_NORM, 1, 0, 128, 0},
        {"model.layers.1.post_attention_layernorm.weight", PARAM_FFN_NORM, 1, 0, 128, 0},
        {"model.layers.1.self_attn.q_proj.weight", PARAM_QKV, 1, 0, 128, 128}, {"model.layers.1.self_attn.k_proj.weight", PARAM_QKV, 1, 128, 64, 128},
        {"model.layers.1.self_attn.v_proj.weight", PARAM_QKV, 1, 192, 64, 128}, {"model.layers.1.self_attn.o_proj.weight", PARAM_ATTN_OUT, 1, 0, 128, 128},
        {"model.layers.0.mlp.gate_proj.weight", PARAM_GATE_UP, 0, 0, 256, 128}, {"model.layers.0.mlp.up_proj.weight", PARAM_GATE_UP, 0, 256, 256, 128},
        {"model.layers.0.mlp.down_proj.weight", PARAM_DOWN, 0, 0, 128, 256}};
    make_config("");
    save(out, 3);
    Llama *m = make_model(3);
    SafeFile model, optimizer;
    assert_int_equal(safetensors_open(&model, folder_path("hf/step_00000003/model.safetensors"), error, sizeof error), 0);
    assert_int_equal(safetensors_open(&optimizer, folder_path("hf/step_00000003/optimizer.safetensors"), error, sizeof error), 0);
    assert_int_equal(model.count, 3 + 2 * 9);
    assert_int_equal(optimizer.count, 2 * model.count);
    float *values = (float *)xcalloc(256 * 128, sizeof(float));
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        const Param *p = param_get(&m->table, want[i].kind, want[i].layer);
        const int64_t at = p->offset + want[i].first_row * p->cols, n = want[i].rows * (want[i].cols ? want[i].cols : 1);
        char name[SAFETENSORS_NAME];
        const SafeTensor *t = safetensors_expect(&model, want[i].name, SAFE_BF16, want[i].rows, want[i].cols, error, sizeof error);
        if (!t) fail_msg("%s", error);
        assert_int_equal(safetensors_read(&model, t, 0, n, values, error, sizeof error), 0);
        assert_memory_equal(values, m->state[LLAMA_PARAMS] + at, (size_t)n * sizeof(float));
        snprintf(name, sizeof name, "exp_avg_sq.%s", want[i].name);
        t = safetensors_expect(&optimizer, name, SAFE_F32, want[i].rows, want[i].cols, error, sizeof error);
        if (!t) fail_msg("%s", error);
        assert_int_equal(safetensors_read(&optimizer, t, 0, n, values, error, sizeof error), 0);
        assert_memory_equal(values, m->state[LLAMA_ADAM_V] + at, (size_t)n * sizeof(float));
    }
    safetensors_close(&model);
    safetensors_close(&optimizer);
    LlamaConfig shape;
    memset(&shape, 0, sizeof shape);
    assert_int_equal(model_file_read(folder_path("hf/step_00000003/config.json"), &shape, error, sizeof error), 0);
    assert_memory_equal(&shape, &config.llama, sizeof shape);
    char *text = get_file(folder_path("hf/step_00000003/config.json"), NULL);
    assert_non_null(strstr(text, "\"LlamaForCausalLM\""));
    assert_non_null(strstr(text, "bfloat16"));
    free(text); free(values); free(out);
    llama_free(m);
}
static void test_find(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("find")), *path = xstrdup(folder_path("find/step_00000002/"));
    make_config("--keep 10");
    assert_int_equal(found("auto", out, text, sizeof text), 0);  // nothing there: a fresh start, and no words
    assert_string_equal(text, "");
    assert_int_equal(found("none", out, text, sizeof text), 0);
    assert_int_equal(found(path, out, text, sizeof text), -1);   // a named one that is missing is never a fresh start
    assert_one_line(text, "trainer.json: cannot open: No such file");
    for (int step = 1; step <= 3; step++) save(out, step);
    assert_int_equal(found("auto", out, text, sizeof text), 3);
    assert_string_equal(text, "");
    assert_int_equal(found(path, out, text, sizeof text), 2);
    assert_one_line(text, "holds checkpoints after step 2");
    assert_int_equal(found(path, folder_path("elsewhere"), text, sizeof text), 2);
    assert_string_equal(text, "");
    assert_int_equal(found("none", out, text, sizeof text), -1);
    assert_one_line(text, "holds checkpoints of an earlier run (the newest: step_00000003)");
    // What is not a checkpoint's name is no checkpoint; a folder of the right name that is of another step is passed over.
    assert_int_equal(mkdir(folder_path("find/step_9"), 0777), 0);
    assert_int_equal(mkdir(folder_path("find/.tmp-step_00000009"), 0777), 0);
    assert_int_equal(found("auto", out, text, sizeof text), 3);
    assert_string_equal(text, "");
    assert_int_equal(rename(folder_path("find/step_00000003"), folder_path("find/step_00000009")), 0);
    assert_int_equal(found("auto", out, text, sizeof text), 2);
    assert_one_line(text, "step_00000009: is of step 3; passing over");
    free(out);
    free(path);
}

// Puts `size` bytes in the place of a file of the newer of two checkpoints: that one is not good, in one line that names the
// file; and (asked through --resume auto) the older one is taken.
static void expect_refused(const char *file, const char *bytes, size_t size, int through_auto) {
    char error[ERROR_TEXT] = "", text[4096];
    CheckpointState s;
    file_put(file, bytes, size);
    if (checkpoint_verify(folder_path("broken/step_00000002"), &s, error, sizeof error) == 0) fail_msg("%s: %zu bytes were accepted", file, size);
    if (!strstr(error, strrchr(file, '/')) || strchr(error, '\n')) fail_msg("\"%s\" does not name %s", error, file);
    if (!through_auto) return;
    assert_int_equal(found("auto", folder_path("broken"), text, sizeof text), 1);
    assert_one_line(text, "passing over this checkpoint");
}
static void test_broken_ones_are_passed_over(void **state) {
    (void)state;
    static const char *const files[] = {"model.safetensors", "config.json", "optimizer.safetensors", "trainer.json"};
    char *out = xstrdup(folder_path("broken")), text[4096];
    RngStream r = rng_stream(77, 0, 0);
    uint64_t word = 0;
    make_config("--keep 10");
    save(out, 1);
    save(out, 2);
    for (int i = 0; i < 4; i++) {
        char *path = xasprintf("%s/step_00000002/%s", out, files[i]);
        size_t size;
        char *bytes = get_file(path, &size);
        for (int k = 0; k < 66; k++) {  // cut to nothing, by one byte, and at 64 places between
            size_t n = k == 0 ? 0 : k == 1 ? size - 1 : rng_word(r, word++) % size;
            expect_refused(path, bytes, n, k < 3);
        }
        for (int k = 0; k < 64; k++) {  // one bit changed
            size_t at = rng_word(r, word++) % size;
            bytes[at] ^= (char)(1 << k % 8);
            expect_refused(path, bytes, size, k < 2);
            bytes[at] ^= (char)(1 << k % 8);
        }
        char *longer = (char *)xcalloc(size + 1, 1);
        memcpy(longer, bytes, size);
        expect_refused(path, longer, size + 1, 0);
        unlink(path);
        assert_int_equal(found("auto", out, text, sizeof text), 1);
        assert_one_line(text, "cannot open: No such file");
        file_put(path, bytes, size);
        assert_int_equal(found("auto", out, text, sizeof text), 2);
        assert_string_equal(text, "");
        free(longer); free(bytes); free(path);
    }
    // All of them broken: named, it is fatal; under auto, a start from step 0 that says so.
    unlink(folder_path("broken/step_00000001/config.json"));
    unlink(folder_path("broken/step_00000002/trainer.json"));
    assert_int_equal(found(folder_path("broken/step_00000001"), out, text, sizeof text), -1);
    assert_one_line(text, "not a good checkpoint: ");
    assert_int_equal(found("auto", out, text, sizeof text), 0);
    assert_non_null(strstr(text, "none of the 2 checkpoints is good; starting from step 0"));
    // The next save of that step replaces the broken folder.
    save(out, 2);
    assert_int_equal(found("auto", out, text, sizeof text), 2);
    free(out);
}

static void load_only(const void *path) {
    Llama *m = make_model(1);
    CheckpointState s = state_of_data(FINGERPRINT);
    checkpoint_load((const char *)path, m, &config, &s);
}
static void load_other_data(const void *path) {
    Llama *m = make_model(1);
    CheckpointState s = state_of_data(FINGERPRINT + 1);
    checkpoint_load((const char *)path, m, &config, &s);
}
// Options that differ: some make it another run, of some the run speaks, some do not matter.
static void test_changed_options(void **state) {
    (void)state;
    static const struct { const char *extra; int status; const char *part; } cases[] = {
        {"", 0, NULL},
        {"--keep 5 --log-every 7 --out x --save-every 9 --train-data other", 0, NULL},
        {"--seed 2", 1, "seed was 1 there and is 2 here; it cannot change within a run"},
        {"--total-batch 256", 1, "total-batch was 128 there and is 256 here"},
        {"--master-weights fp32", 1, "master-weights was \"bf16\" there and is \"fp32\" here"},
        {"--seq 128", 1, "seq was 64 there and is 128 here"},
        {"--tied true", 1, "tied was false there and is true here"},
        {"--lr 2e-3", 0, "--lr was 0.001 there and is 0.002 here; the run goes on with the new value"},
        {"--recipe bf16", 0, "--recipe was \"quartet2\" there and is \"bf16\" here"},
        {"--schedule wsd", 0, "--schedule was \"cosine\""},
        {"--steps 200", 0, "--steps was 100 there and is 200 here"},
        {"--steps 4 --warmup 0", 1, "it is after step 5, but the run is of 4 steps; raise --steps"},
    };
    char text[4096], *path = xstrdup(folder_path("options/step_00000005"));
    make_config("");
    save(folder_path("options"), 5);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_config(cases[i].extra);
        int status = run_child(load_only, path, text, sizeof text);
        if (status != cases[i].status) fail_msg("%s: exit status %d: %s", cases[i].extra, status, text);
        if (!cases[i].part) assert_string_equal(text, "");
        else if (!strstr(text, cases[i].part)) fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].extra, text, cases[i].part);
    }
    make_config("");
    assert_int_equal(run_child(load_other_data, path, text, sizeof text), 1);
    assert_one_line(text, "the training data is not what the run was begun with (fingerprint fedcba9876543210 there, fedcba9876543211 here)");
    free(path);
}
static int has_step(const char *out, int64_t step) {
    char path[PATH_TEXT];
    checkpoint_path(path, out, "", step);
    return access(path, F_OK) == 0;
}
static int count_entries(const char *out) {
    int n = 0;
    DIR *d = opendir(out);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}
static void test_pruning(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("prune"));
    make_config("--keep 2");
    for (int step = 1; step <= 5; step++) {
        save(out, step);
        for (int s = 1; s <= 5; s++) assert_int_equal(has_step(out, s), s <= step && s > step - 2);
    }
    // A run that went back to step 2: later ones are not its business, and the one just written is never pruned.
    save(out, 3);
    assert_true(has_step(out, 3) && has_step(out, 4) && has_step(out, 5));
    save(out, 4);
    assert_true(has_step(out, 3) && has_step(out, 4) && has_step(out, 5));
    assert_int_equal(count_entries(out), 3);
    load_and_check(folder_path("prune/step_00000004"), 4);
    free(out);
}

static rlim_t file_limit;
static void save_on_full_disk(const void *out) {
    struct rlimit limit = {file_limit, file_limit};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    save((const char *)out, 2);
}
static void save_2(const void *out) { save((const char *)out, 2); }
// No room, at any place of any file: one line, the older checkpoint stands, and what was half written is gone.
static void test_full_disk(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("disk"));
    size_t size;
    make_config("--keep 1");
    save(out, 1);
    free(get_file(folder_path("disk/step_00000001/optimizer.safetensors"), &size));
    const rlim_t limits[] = {0, 100, 500, 5000, 100000, size / 2, size - 1};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        file_limit = limits[i];
        // Standard error lies in a file here: a limit of its length or less would silence it.
        int status = run_child(save_on_full_disk, out, text, sizeof text);
        assert_int_equal(status, 1);
        if (file_limit >= 500) assert_one_line(text, "no checkpoint was written for step 2, those before it are untouched");
        if (file_limit >= 500) assert_one_line(text, "cannot write: File too large");
        assert_int_equal(count_entries(out), 1);
        assert_int_equal(found("auto", out, text, sizeof text), 1);
        assert_string_equal(text, "");
    }
    file_limit = size;
    assert_int_equal(run_child(save_on_full_disk, out, text, sizeof text), 0);
    assert_int_equal(found("auto", out, text, sizeof text), 2);
    put_text(folder_path("plain"), "");
    assert_int_equal(run_child(save_2, folder_path("plain"), text, sizeof text), 1);
    assert_one_line(text, "plain: cannot create the folder: File exists; use another --out");
    assert_int_equal(run_child(save_2, "/proc/self", text, sizeof text), 1);
    assert_one_line(text, "cannot create the folder");
    free(out);
}
// Killed at any moment of any save, without warning: whatever has a checkpoint's name is a whole one.
static void test_killed_while_saving(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("killed"));
    make_config("--keep 2");
    save(out, 1);
    for (int trial = 0; trial < 12; trial++) {
        struct timespec wait = {0, 3000000L + 25000000L * trial};
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) for (int64_t step = 1;; step = step % 100 + 1) save(out, step);
        nanosleep(&wait, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        int step = found("auto", out, text, sizeof text);
        assert_true(step >= 1);
        assert_string_equal(text, "");
        char path[PATH_TEXT];
        checkpoint_path(path, out, "", step);
        load_and_check(path, step);
    }
    save(out, 100);
    free(out);
}
// A value that BF16 cannot hold is a backend's bug: it must not be rounded in silence.
static void save_unrounded(const void *out) {
    Llama *m = make_model(1);
    CheckpointState s = state_of_step(1);
    m->state[LLAMA_PARAMS][m->table.params[2].offset + 5] = 1.0f + 0x1p-20f;
    checkpoint_save((const char *)out, m, &config, &s);
}
static void test_inexact_values(void **state) {
    (void)state;
    char text[4096];
    make_config("");
    assert_int_equal(run_child(save_unrounded, folder_path("inexact"), text, sizeof text), 1);
    assert_one_line(text, "model.layers.0.qkv: value 5 is 1.00000095, which BF16 cannot hold");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_hugging_face_layout), cmocka_unit_test(test_find),
        cmocka_unit_test(test_broken_ones_are_passed_over), cmocka_unit_test(test_changed_options), cmocka_unit_test(test_pruning),
        cmocka_unit_test(test_full_disk), cmocka_unit_test(test_killed_while_saving), cmocka_unit_test(test_inexact_values)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
