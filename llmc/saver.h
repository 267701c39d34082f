// saver.h: checkpoints written in the background. Training stands still only while its state is copied to host memory; one
// thread then writes, flushes and renames (checkpoint_write) while the next steps run.
//
// At most one save is in flight: one that comes due earlier waits for the one before it. What goes wrong is told on the main
// thread, at the next call of any function here, and ends the run; checkpoints that stand are untouched. Nothing else is
// shared with the thread: it reads the copy, which main leaves alone until the thread was joined.
#ifndef LLMC_SAVER_H
#define LLMC_SAVER_H

#include <pthread.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <time.h>

#include "checkpoint.h"
#include "lock.h"

// ---------------------------------------------------------------------------------------------------------------------
// Room

// Bytes of one checkpoint, without the few thousand of its JSON and headers.
FN int64_t checkpoint_bytes(const ParamTable *t, const RunConfig *c) {
    return llama_param_count(t) * (SAFE_DTYPES[checkpoint_model_dtype(c)].bytes + 2 * 4);
}
// Checkpoints that stand at once, at most, after step `first`: those of --keep-every, --keep, and the one being written. None is
// planned without --save-every, though a signal saves one.
FN int64_t checkpoint_most(const RunConfig *c, int64_t first) {
    if (c->save_every == 0) return 0;
    const int64_t saves = (c->steps + c->save_every - 1) / c->save_every - first / c->save_every;
    int64_t stay = 0;
    if (c->keep_every > 0) {
        const int64_t unit = c->save_every / greatest_common_divisor(c->save_every, c->keep_every) * c->keep_every;
        stay = c->steps / unit - first / unit;
    }
    const int64_t most = c->keep + 1 + stay;
    return most < saves ? most : saves;
}
// Refuses a run whose checkpoints OUT's file system cannot hold. Those of OUT that pruning will remove count as room. out need not be there yet.
FN void checkpoint_check_space(const char *out, const RunConfig *c, const ParamTable *t, int64_t first) {
    char folder[PATH_TEXT];
    struct statvfs fs;
    snprintf(folder, sizeof folder, "%s", out);
    while (statvfs(folder, &fs) != 0) {  // the nearest parent that exists
        char *slash = strrchr(folder, '/');
        if (errno != ENOENT) return;     // creating the folder will say what is wrong
        if (slash == folder) slash++;
        if (slash) *slash = '\0'; else snprintf(folder, sizeof folder, ".");
    }
    CheckpointList list = checkpoint_list(out);
    int64_t goes = 0;
    for (int i = 0; i < list.count; i++) goes += list.steps[i] <= first && (c->keep_every == 0 || list.steps[i] % c->keep_every != 0);
    free(list.steps);
    const int64_t LOG_LINE = 400;  // bytes of log.jsonl a step, generously
    const double each = (double)checkpoint_bytes(t, c), most = (double)checkpoint_most(c, first), free_bytes = (double)fs.f_bavail * (double)fs.f_frsize;
    const double more = most > (double)goes ? most - (double)goes : most > 0;  // at least the one being written
    const double needed = each * more + (double)((c->steps - first) * LOG_LINE);
    if (needed > free_bytes)
        fatal("%s: the run will write up to %.0f checkpoints of %.1f MiB each at a time, %.1f MiB more than now, but its file system has %.1f MiB free; "
              "free some space, lower --keep, raise --keep-every, or use another --out", out, most, each / 1048576, needed / 1048576, free_bytes / 1048576);
}

// ---------------------------------------------------------------------------------------------------------------------
// Saving

typedef struct {
    const char *out;                 // the run's folder
    CheckpointCopy copy;
    int64_t saved;                   // step of the newest whole checkpoint, 0: none
    int busy;                        // a thread was started and not joined yet
    pthread_t thread;
    int done;                        // set by the thread at its end; read and written atomically
    int failed;                      // the rest is the thread's until it was joined
    char error[ERROR_TEXT];
    int log_fd;                      // flushed before the checkpoint takes its name: a log is never behind one; -1: none
    double copied_s, written_s;      // how long copying and writing took
} Saver;

static Saver *saver_of_process;      // NULL: none
// A run that ends by an error elsewhere finishes the save in flight first: its folder's lock (lock.h) goes only after that.
FN void saver_at_exit(void) {
    Saver *s = saver_of_process;
    saver_of_process = NULL;
    if (s && s->busy && pthread_join(s->thread, NULL) == 0 && s->failed) warn("%s", s->error);
}
// out must live as long as s; saved: step of the checkpoint that the run begins with, 0: none.
FN void saver_init(Saver *s, const char *out, int64_t saved) {
    memset(s, 0, sizeof *s);
    s->out = out; s->saved = saved; s->log_fd = -1;
    crc32c_init();  // a table that both threads read
    saver_of_process = s;
    lock_before_release = saver_at_exit;
    if (atexit(saver_at_exit) != 0) fatal("out of memory while preparing to save checkpoints");
}
FN void *saver_thread(void *context) {
    Saver *s = (Saver *)context;
    const double start = clock_seconds();
    // EINVAL: what the log is written to cannot be flushed (a pipe).
    if (s->log_fd >= 0 && fsync(s->log_fd) != 0 && errno != EINVAL)
        s->failed = set_error(s->error, sizeof s->error, "%s/log.jsonl: cannot write to the disk: %s; free some space, then go on with --resume auto",
                              s->out, strerror(errno));
    else s->failed = checkpoint_write(s->out, &s->copy, s->error, sizeof s->error);
    s->written_s = clock_seconds() - start;
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
    return NULL;
}
// Waits for the save in flight, if any. -> 0, or -1 with the reason in s->error.
FN int saver_join(Saver *s) {
    if (!s->busy) return 0;
    const int rc = pthread_join(s->thread, NULL);
    if (rc != 0) fatal("cannot wait for the thread that writes checkpoints: %s: this is a bug", strerror(rc));
    s->busy = 0;
    if (s->failed) return -1;
    s->saved = s->copy.state.step;
    printf("checkpoint %s/" CHECKPOINT_NAME ": training stood still for %.3f s, written in %.2f s\n", s->out, (long long)s->saved, s->copied_s, s->written_s);
    fflush(stdout);
    return 0;
}
// Waits for the save in flight; one that failed is fatal.
FN void saver_wait(Saver *s) {
    if (saver_join(s) != 0) fatal("%s", s->error);
}
// The same without waiting: to be called now and then, so that a failure ends the run soon.
FN void saver_poll(Saver *s) {
    if (s->busy && __atomic_load_n(&s->done, __ATOMIC_ACQUIRE)) saver_wait(s);
}
// Begins a save of the model as it is. Returns when the copy is made.
FN void saver_start(Saver *s, Llama *m, const RunConfig *c, const CheckpointState *state, int log_fd) {
    sigset_t all, before;
    saver_wait(s);
    const double start = clock_seconds();
    checkpoint_copy(&s->copy, m, c, state);
    s->copied_s = clock_seconds() - start;
    s->done = s->failed = 0;
    s->log_fd = log_fd;
    // Signals are main's: the thread is born with all of them blocked.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&s->thread, NULL, saver_thread, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) fatal("cannot start the thread that writes checkpoints: %s; raise the limit of processes (ulimit -u)", strerror(rc));
    s->busy = 1;
}
FN void saver_free(Saver *s) {
    saver_wait(s);
    checkpoint_copy_free(&s->copy);
    saver_of_process = NULL;
}

#endif
