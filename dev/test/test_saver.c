// test_saver.c: the lock of a run's folder, checkpoints written in the background, which of them stay, room for them, and the
// window of --outlier-z.
#include <sys/resource.h>

// Every flush of a file takes a while and sees whether the run's lock is still there (test_lock_outlives_save).
#include <unistd.h>
static char watched_lock[4096];
static int slow_fsync(int fd) {
    if (watched_lock[0]) {
        usleep(20000);
        if (access(watched_lock, F_OK) != 0 && write(2, "the lock went before the save ended\n", 36) != 36) return -1;
    }
    return fsync(fd);
}
#define fsync slow_fsync

#include "dev/test/support.h"
#include "dev/test/fake_backend.h"
#include "llmc/lock.h"
#include "llmc/saver.h"
#include "dev/test/small_model.h"

static void make_saver_config(const char *extra) {
    make_config_of("{\"layers\": 1, \"width\": 128, \"heads\": 2, \"ffn\": 128, \"vocab\": 128, \"seq\": 64}", extra);
}

static CheckpointState state_of(int64_t step) {
    CheckpointState s;
    memset(&s, 0, sizeof s);
    s.step = step;
    s.val_loss = NAN;
    return s;
}
static int is_good(const char *out, int64_t step) {
    char path[PATH_TEXT], error[ERROR_TEXT];
    CheckpointState s;
    checkpoint_path(path, out, "", step);
    return checkpoint_verify(path, &s, error, sizeof error) == 0 && s.step == step;
}

// ---------------------------------------------------------------------------------------------------------------------

static void take(const void *folder) { lock_take((const char *)folder); }
static void take_and_die(const void *folder) {
    lock_take((const char *)folder);
    fflush(NULL);
    raise(SIGKILL);
}
static void test_lock(void **state) {
    (void)state;
    char text[4096], *folder = xstrdup(folder_path("locked")), *file = xstrdup(folder_path("locked/.lock")), *holder;
    assert_int_equal(lock_take_if_there(folder), 0);  // no folder: nothing to lock
    assert_int_equal(mkdir(folder, 0777), 0);
    assert_int_equal(lock_take_if_there(folder), 1);
    assert_int_equal(run_child(take, folder, text, sizeof text), 1);
    holder = xasprintf("locked: another run is writing there (process %ld on ", (long)getpid());
    assert_one_line(text, holder);
    free(holder);
    lock_release();
    assert_int_not_equal(access(file, F_OK), 0);
    // A holder that was killed leaves its file; the lock went with it.
    assert_int_equal(run_child(take_and_die, folder, text, sizeof text), -1);
    assert_int_equal(access(file, F_OK), 0);
    assert_int_equal(run_child(take, folder, text, sizeof text), 0);
    assert_string_equal(text, "");
    // Whatever the file holds does no harm, and a link is not followed.
    put_text(file, "\x1b[31mnonsense\n\n");
    assert_int_equal(run_child(take, folder, text, sizeof text), 0);
    unlink(file);
    put_text(folder_path("precious"), "keep");
    assert_int_equal(symlink("../precious", file), 0);
    assert_int_equal(run_child(take, folder, text, sizeof text), 1);
    assert_one_line(text, ".lock: cannot open for writing: Too many levels of symbolic links");
    char *precious = get_file(folder_path("precious"), NULL);
    assert_string_equal(precious, "keep");
    free(precious); free(folder); free(file);
}

// The thread writes what the model was when the save began, whatever becomes of it meanwhile; a second save waits for the first.
static void test_background_save(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("background")), error[ERROR_TEXT];
    make_saver_config("--keep 3");
    Llama *m = make_model(1), *then = make_model(1);
    Saver s;
    saver_init(&s, out, 0);
    CheckpointState one = state_of(1), two = state_of(2);
    saver_start(&s, m, &config, &one, -1);
    for (int k = 0; k < 4; k++) memset(m->state[k], 0, (size_t)m->table.total * sizeof(float));
    saver_start(&s, m, &config, &two, -1);
    assert_int_equal(s.saved, 1);
    saver_wait(&s);
    assert_int_equal(s.saved, 2);
    saver_wait(&s);  // nothing in flight: nothing to do
    saver_poll(&s);
    assert_true(is_good(out, 1) && is_good(out, 2));
    SafeFile f;
    assert_int_equal(safetensors_open(&f, folder_path("background/step_00000001/optimizer.safetensors"), error, sizeof error), 0);
    const Param *p = param_get(&m->table, PARAM_DOWN, 0);
    const SafeTensor *t = safetensors_find(&f, "exp_avg_sq.model.layers.0.mlp.down_proj.weight");
    float *values = (float *)xcalloc((size_t)p->count, sizeof(float));
    assert_non_null(t);
    assert_int_equal(safetensors_read(&f, t, 0, p->count, values, error, sizeof error), 0);
    assert_memory_equal(values, then->state[LLAMA_ADAM_V] + p->offset, (size_t)p->count * sizeof(float));
    safetensors_close(&f);
    saver_free(&s);
    free(values); free(out);
    llama_free(m);
    llama_free(then);
}
static void save_where_nothing_fits(const void *out) {
    struct rlimit limit = {50000, 50000};
    Saver s;
    CheckpointState one = state_of(1);
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    saver_init(&s, (const char *)out, 0);
    saver_start(&s, make_model(1), &config, &one, -1);
    while (!__atomic_load_n(&s.done, __ATOMIC_ACQUIRE)) usleep(1000);
    fputs("polled\n", stderr);  // the failure is told by main, not by the thread
    saver_poll(&s);
    fputs("not reached\n", stderr);
}
static void test_failed_save(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("failed"));
    make_saver_config("");
    assert_int_equal(run_child(save_where_nothing_fits, out, text, sizeof text), 1);
    assert_memory_equal(text, "polled\n", 7);
    assert_one_line(text + 7, "model.safetensors: cannot write: File too large; no checkpoint was written for step 1");
    CheckpointList list = checkpoint_list(out);
    assert_int_equal(list.count, 0);
    free(list.steps);
    free(out);
}

// An error elsewhere while a save is in flight: it ends first, then the lock goes, in a folder that was new as in one that was not.
static void die_while_saving(const void *out) {
    Saver s;
    CheckpointState one = state_of(1);
    memset(&s, 0, sizeof s);
    saver_init(&s, (const char *)out, 0);
    lock_take((const char *)out);
    snprintf(watched_lock, sizeof watched_lock, "%s", folder_lock.path);
    saver_start(&s, make_model(1), &config, &one, -1);
    fatal("an error elsewhere");
}
static void test_lock_outlives_save(void **state) {
    (void)state;
    char text[4096], *out = xstrdup(folder_path("outlives"));
    make_saver_config("");
    assert_int_equal(mkdir(out, 0777), 0);
    assert_int_equal(run_child(die_while_saving, out, text, sizeof text), 1);
    assert_one_line(text, "an error elsewhere");
    assert_true(is_good(out, 1));
    free(out);
}
// A checkpoint that is a link to somewhere else: when its time comes the link goes, and what it leads to stays.
static void test_pruning_follows_no_link(void **state) {
    (void)state;
    char *out = xstrdup(folder_path("linked")), *elsewhere = xstrdup(folder_path("elsewhere"));
    make_saver_config("--keep 1");
    assert_int_equal(mkdir(out, 0777) | mkdir(elsewhere, 0777), 0);
    put_text(folder_path("elsewhere/thesis.txt"), "keep");
    static const char *const links[] = {"linked/step_00000001", "linked/.tmp-step_00000002", "linked/.old-step_00000002", "linked/.tmp-step_00000009"};
    for (int i = 0; i < 4; i++) assert_int_equal(symlink(elsewhere, folder_path(links[i])), 0);
    Llama *m = make_model(1);
    CheckpointState two = state_of(2);
    checkpoint_save(out, m, &config, &two);
    checkpoint_tidy(out);
    struct stat st;
    for (int i = 0; i < 4; i++) assert_int_not_equal(lstat(folder_path(links[i]), &st), 0);
    char *kept = get_file(folder_path("elsewhere/thesis.txt"), NULL);
    assert_string_equal(kept, "keep");
    assert_true(is_good(out, 2));
    free(kept); free(out); free(elsewhere);
    llama_free(m);
}

// ---------------------------------------------------------------------------------------------------------------------

static void assert_steps(const char *out, const int *steps, int count) {
    CheckpointList list = checkpoint_list(out);
    assert_int_equal(list.count, count);
    for (int i = 0; i < count; i++) assert_int_equal(list.steps[i], steps[i]);
    free(list.steps);
}
static void test_keep_every(void **state) {
    (void)state;
    static const int after_12[] = {12, 11, 8, 4}, after_13[] = {13, 12, 8, 4};
    char *out = xstrdup(folder_path("every"));
    make_saver_config("--keep 2 --keep-every 4");
    Llama *m = make_model(1);
    for (int step = 1; step <= 13; step++) {
        CheckpointState s = state_of(step);
        checkpoint_save(out, m, &config, &s);
        if (step == 12) assert_steps(out, after_12, 4);
    }
    assert_steps(out, after_13, 4);
    llama_free(m);
    free(out);
}
// How many checkpoints stand at once, at most: counted by hand.
static void test_room(void **state) {
    (void)state;
    static const struct { const char *options; int64_t first, most; } cases[] = {
        {"--save-every 0", 0, 0},
        {"--save-every 10", 0, 3},                                 // the two newest and the one being written
        {"--save-every 10 --keep 5", 0, 6}, {"--save-every 10 --keep 50", 0, 10},
        {"--save-every 40", 0, 3}, {"--save-every 60", 0, 2},      // 40, 80, 100; 60, 100
        {"--save-every 60", 70, 1}, {"--save-every 10", 95, 1},
        {"--save-every 10 --keep 1 --keep-every 20", 0, 7},        // 20 40 60 80 100, one more, one being written
        {"--save-every 10 --keep 1 --keep-every 15", 0, 5},        // 30 60 90
        {"--save-every 10 --keep 1 --keep-every 20", 60, 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_saver_config(cases[i].options);
        if (checkpoint_most(&config, cases[i].first) != cases[i].most)
            fail_msg("%s after step %d: %d", cases[i].options, (int)cases[i].first, (int)checkpoint_most(&config, cases[i].first));
    }
    // Against the file system: a model of 2^50 parameters fits nowhere; this one does; a folder that is not there is its parent.
    make_saver_config("--save-every 10");
    ParamTable t = llama_param_table(&config.llama);
    assert_int_equal(checkpoint_bytes(&t, &config), 10 * llama_param_count(&t));
    checkpoint_check_space(folder_path("not/yet/there"), &config, &t, 0);
    checkpoint_check_space("relative/not/there", &config, &t, 0);
    free(t.params);
}
static void check_space_of_giant(const void *out) {
    ParamTable t = llama_param_table(&config.llama);
    t.params[0].count = 1LL << 50;
    checkpoint_check_space((const char *)out, &config, &t, 0);
}
static void test_no_room(void **state) {
    (void)state;
    char text[4096];
    make_saver_config("--save-every 10");
    assert_int_equal(run_child(check_space_of_giant, folder_path("not/yet/there"), text, sizeof text), 1);
    assert_one_line(text, "the run will write up to 3 checkpoints of 10737418");
    assert_one_line(text, "MiB free; free some space, lower --keep");
}
// What a run that was killed within a save leaves: half a folder goes; one that had made room comes back unless its successor stands.
static void test_tidy(void **state) {
    (void)state;
    static const int left[] = {5, 3, 2, 1};
    char *out = xstrdup(folder_path("tidy"));
    make_saver_config("--keep 9");
    Llama *m = make_model(1);
    for (int step = 1; step <= 5; step++) {
        CheckpointState s = state_of(step);
        checkpoint_save(out, m, &config, &s);
    }
    assert_int_equal(rename(folder_path("tidy/step_00000004"), folder_path("tidy/.tmp-step_00000004")), 0);
    assert_int_equal(rename(folder_path("tidy/step_00000003"), folder_path("tidy/.old-step_00000003")), 0);
    assert_int_equal(mkdir(folder_path("tidy/.old-step_00000005"), 0777), 0);
    assert_int_equal(mkdir(folder_path("tidy/.tmp-step_5"), 0777), 0);  // not a name of ours
    checkpoint_tidy(out);
    assert_steps(out, left, 4);
    assert_true(is_good(out, 3) && is_good(out, 5));
    assert_int_not_equal(access(folder_path("tidy/.tmp-step_00000004"), F_OK), 0);
    assert_int_not_equal(access(folder_path("tidy/.old-step_00000005"), F_OK), 0);
    assert_int_equal(access(folder_path("tidy/.tmp-step_5"), F_OK), 0);
    llama_free(m);
    free(out);
}

// ---------------------------------------------------------------------------------------------------------------------

// Values 1, 3, 1, 3, ...: mean 2 and deviation 1, so the limit is 2 + z, exactly.
static void test_outlier_limits(void **state) {
    (void)state;
    OutlierWindow w;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < OUTLIER_LEAST; i++) {
        assert_true(isinf(outlier_limits(&w, i, 0, 4).loss));
        outlier_add(&w, i, i % 2 ? 3.0f : 1.0f, i % 2 ? 30.0f : 10.0f, 1);
    }
    OutlierLimits limits = outlier_limits(&w, OUTLIER_LEAST, 0, 4);
    assert_true(limits.loss == 6.0f && limits.norm == 60.0f);
    assert_true(isinf(outlier_limits(&w, OUTLIER_LEAST, 0, 0).norm));
    // A device one step ahead: the last step's result does not count yet.
    assert_true(isinf(outlier_limits(&w, OUTLIER_LEAST, 1, 4).loss));
    assert_true(outlier_limits(&w, OUTLIER_LEAST + 1, 1, 4).loss == 6.0f);
    // Skipped steps leave no trace but in the count of those in a row; NaN is one of them.
    outlier_add(&w, 64, 1e9f, 1e9f, 0);
    outlier_add(&w, 65, NAN, NAN, 0);
    assert_int_equal(w.skipped, 2);
    limits = outlier_limits(&w, 66, 0, 4);
    assert_true(limits.loss == 6.0f && limits.norm == 60.0f);
    outlier_add(&w, 66, 1.0f, 10.0f, 1);
    assert_int_equal(w.skipped, 0);
    // The window is the last 128: after so many values of 5, it holds nothing else, and the least deviation of 0.005 counts.
    for (int i = 0; i < OUTLIER_WINDOW; i++) outlier_add(&w, 67 + i, 5.0f, 5.0f, 1);
    limits = outlier_limits(&w, 67 + OUTLIER_WINDOW, 0, 4);
    assert_float_equal(limits.loss, 5.02f, 1e-6f);
    // Whatever the host has read beyond the lag, the limits are the same.
    OutlierWindow more = w;
    outlier_add(&more, 67 + OUTLIER_WINDOW, 500.0f, 500.0f, 1);
    assert_true(outlier_limits(&more, 68 + OUTLIER_WINDOW, 1, 4).loss == outlier_limits(&w, 68 + OUTLIER_WINDOW, 1, 4).loss);
    assert_true(outlier_limits(&more, 69 + OUTLIER_WINDOW, 1, 4).loss > limits.loss);
}
static void test_outlier_json(void **state) {
    (void)state;
    static const char *const bad[] = {
        "{}", "{\"skipped\":0,\"steps\":[0],\"loss\":[1],\"grad_norm\":[]}", "{\"skipped\":-1,\"steps\":[],\"loss\":[],\"grad_norm\":[]}",
        "{\"skipped\":0,\"steps\":[1,1],\"loss\":[1,1],\"grad_norm\":[1,1]}", "{\"skipped\":0,\"steps\":[1.5],\"loss\":[1],\"grad_norm\":[1]}",
        "{\"skipped\":0,\"steps\":[1],\"loss\":[1e99],\"grad_norm\":[1]}", "{\"skipped\":0,\"steps\":[1],\"loss\":[\"x\"],\"grad_norm\":[1]}",
        "{\"skipped\":0,\"steps\":7,\"loss\":[],\"grad_norm\":[]}"};
    char error[ERROR_TEXT];
    OutlierWindow w;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cJSON *j = json_parse_object(bad[i], strlen(bad[i]), "here", error, sizeof error);
        assert_non_null(j);
        if (outlier_from_json(j, "here", &w, error, sizeof error) == 0) fail_msg("%s was accepted", bad[i]);
        cJSON_Delete(j);
    }
    assert_int_equal(outlier_from_json(NULL, "here", &w, error, sizeof error), 0);  // an older checkpoint
    assert_int_equal(w.count, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lock), cmocka_unit_test(test_background_save), cmocka_unit_test(test_failed_save), cmocka_unit_test(test_lock_outlives_save), cmocka_unit_test(test_pruning_follows_no_link), cmocka_unit_test(test_keep_every),
        cmocka_unit_test(test_room), cmocka_unit_test(test_no_room), cmocka_unit_test(test_tidy), cmocka_unit_test(test_outlier_limits),
        cmocka_unit_test(test_outlier_json)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
