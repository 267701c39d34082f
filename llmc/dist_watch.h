// dist_watch.h: what makes a group of processes end together. A thread of each rank holds its connection to rank 0 (dist_net.h) and
//   - says every quarter of a second how many exchanges its process has entered and how long it has waited in the present one (rank 0 says
//     so to all: that it is alive);
//   - ends its process within that time when rank 0 says that the run is over, or when rank 0 is gone.
// Rank 0's thread hears all of them, and ends the run, naming rank, host and reason, when one says so, when a connection breaks (the
// process died), or when some wait longer than --comm-timeout for others who have not come.
#ifndef LLMC_DIST_WATCH_H
#define LLMC_DIST_WATCH_H

#include <pthread.h>
#include <signal.h>

#include "dist_net.h"

enum { FRAME_BEAT = 1, FRAME_END };
typedef struct {
    int32_t kind;
    float waiting;                   // seconds in the present exchange, 0: in none
    uint64_t exchange;               // exchanges entered so far
    char text[496];                  // FRAME_END: why
} WatchFrame;

typedef struct {
    int rank, size;
    DistMember *members;             // (size)
    int *control;                    // (size) rank 0: the others' connections; else [0]: that to rank 0; -1: none
    double timeout;                  // --comm-timeout
    pthread_t thread;
    pthread_mutex_t lock;            // one frame at a time on a connection
    int ending;                      // atomic: this process ends in order, or by its own error: the thread says nothing more
    int alone;                       // atomic: rank 0 is at work for all, and may keep them waiting
    uint64_t exchange;               // atomic: exchanges entered
    double since;                    // atomic by `exchange`'s order: when the present one was entered, 0: in none
    double alone_until;              // the watching thread's
    WatchFrame *heard;               // (size) the last beat of each that is heard
    double *heard_at;
} Watch;
static Watch dist_watch;

FN void watch_send(int r, const WatchFrame *f) {
    Watch *w = &dist_watch;
    if (w->control[r] < 0) return;
    pthread_mutex_lock(&w->lock);
    // Who is gone is found by reading. A beat to one that does not read is left out, whole, so that frames stay frames.
    if (f->kind != FRAME_BEAT || net_wait(w->control[r], POLLOUT, 0)) (void)net_send(w->control[r], f, sizeof *f, clock_seconds() + 1);
    pthread_mutex_unlock(&w->lock);
}
FN void watch_say(int kind, const char *text) {
    Watch *w = &dist_watch;
    WatchFrame f;
    memset(&f, 0, sizeof f);
    f.kind = kind;
    snprintf(f.text, sizeof f.text, "%s", text);
    if (w->rank == 0) for (int r = 1; r < w->size; r++) watch_send(r, &f);
    else watch_send(0, &f);
}
// This process ends by an error that it has told at its own shell: the others are told who, where and why.
FN void watch_error_hook(const char *text) {
    Watch *w = &dist_watch;
    char told[496];
    if (__atomic_exchange_n(&w->ending, 1, __ATOMIC_ACQ_REL)) return;
    if (w->rank == 0) snprintf(told, sizeof told, "%.480s", text);
    else snprintf(told, sizeof told, "rank %d on %.100s: %.360s", w->rank, w->members[w->rank].host, text);
    watch_say(FRAME_END, told);
}
// Ends this process at once, from the watching thread: main may be waiting where nothing reaches it. The folder's lock goes with the
// process, and a checkpoint that was being written is no checkpoint yet.
FN void watch_end(const char *text, int tell) {
    if (__atomic_exchange_n(&dist_watch.ending, 1, __ATOMIC_ACQ_REL)) return;
    if (tell) {
        fflush(stdout);
        fprintf(stderr, "error: %s%s\n", message_origin, text);
        fflush(stderr);
    }
    if (dist_watch.rank == 0) watch_say(FRAME_END, text);
    _exit(1);
}
// A wait that is no exchange, and that not every rank may come to (a GPU's evaluation on rank 0 alone): seen, but not counted. Ends by watch_leave.
FN void watch_wait(void) {
    double now = clock_seconds();
    __atomic_store(&dist_watch.since, &now, __ATOMIC_RELEASE);
}
FN void watch_enter(void) {
    watch_wait();
    __atomic_add_fetch(&dist_watch.exchange, 1, __ATOMIC_ACQ_REL);
}
FN void watch_leave(void) {
    double none = 0;
    __atomic_store(&dist_watch.since, &none, __ATOMIC_RELEASE);
}
FN WatchFrame watch_beat(void) {
    WatchFrame f;
    double since;
    memset(&f, 0, sizeof f);
    f.kind = FRAME_BEAT;
    __atomic_load(&dist_watch.since, &since, __ATOMIC_ACQUIRE);
    f.exchange = __atomic_load_n(&dist_watch.exchange, __ATOMIC_ACQUIRE);
    f.waiting = since > 0 ? (float)(clock_seconds() - since) : 0;
    return f;
}

// Rank 0: if somebody has waited too long, who is it that has not come? Those who are behind in exchanges, or in none.
FN void watch_find_hang(void) {
    Watch *w = &dist_watch;
    char late[256] = "", text[480];
    size_t used = 0;
    int waits = -1;
    w->heard[0] = watch_beat();
    w->heard_at[0] = clock_seconds();
    if (__atomic_load_n(&w->alone, __ATOMIC_ACQUIRE)) w->alone_until = clock_seconds() + 2;
    if (clock_seconds() < w->alone_until) return;              // what the others last said of their waiting may be of before
    for (int r = 0; r < w->size; r++)
        if (w->heard[r].waiting > w->timeout && (waits < 0 || w->heard[r].exchange > w->heard[waits].exchange)) waits = r;
    if (waits < 0) return;
    for (int r = 0; r < w->size; r++) {
        const int behind = w->heard[r].exchange < w->heard[waits].exchange || w->heard[r].waiting == 0 || clock_seconds() - w->heard_at[r] > w->timeout;
        if (behind && used + 64 < sizeof late)
            used += (size_t)snprintf(late + used, sizeof late - used, "%srank %d on %.100s", used ? ", " : "", r, w->members[r].host);
    }
    if (used) snprintf(text, sizeof text, "%s hangs: rank %d has waited %.0f s for it (--comm-timeout); the last checkpoint stands, go on with --resume auto",
                       late, waits, (double)w->heard[waits].waiting);
    else snprintf(text, sizeof text, "all ranks are in one exchange for %.0f s (--comm-timeout): the network between them does not move", (double)w->heard[waits].waiting);
    watch_end(text, 1);
}
FN void watch_hear(int r) {
    Watch *w = &dist_watch;
    WatchFrame f;
    char text[480];
    if (net_receive(w->control[r], &f, sizeof f, clock_seconds() + 5) != 0) {
        snprintf(text, sizeof text, "rank %d on %s died: its connection broke; its own output may say why, the last checkpoint stands, go on with --resume auto",
                 r, w->members[r].host);
        watch_end(text, 1);
        w->control[r] = -1;                                            // this process is ending by itself
    } else if (f.kind == FRAME_END) { f.text[sizeof f.text - 1] = '\0'; watch_end(f.text, w->rank == 0); }
    else { w->heard[r] = f; w->heard_at[r] = clock_seconds(); }
}
FN void *watch_thread(void *unused) {
    Watch *w = &dist_watch;
    struct pollfd *p = (struct pollfd *)xcalloc((size_t)w->size, sizeof *p);
    double last = 0;
    (void)unused;
    while (!__atomic_load_n(&w->ending, __ATOMIC_ACQUIRE)) {
        for (int r = 0; r < w->size; r++) { p[r].fd = w->control[r]; p[r].events = POLLIN; p[r].revents = 0; }
        (void)poll(p, (nfds_t)w->size, 100);
        for (int r = 0; r < w->size; r++) if (p[r].revents && !__atomic_load_n(&w->ending, __ATOMIC_ACQUIRE)) watch_hear(r);
        if (clock_seconds() - last < 0.25 + w->size / 1024.0 || __atomic_load_n(&w->ending, __ATOMIC_ACQUIRE)) continue;
        last = clock_seconds();
        const WatchFrame beat = watch_beat();
        for (int r = 0; r < w->size; r++) watch_send(r, &beat);
        if (w->rank == 0) { watch_find_hang(); continue; }
        // Rank 0 would have said who hangs, if it were alive.
        if (beat.waiting > w->timeout && clock_seconds() - w->heard_at[0] > w->timeout + 5) {
            char text[256];
            snprintf(text, sizeof text, "rank 0 on %s hangs: nothing was heard from it for %.0f s", w->members[0].host, clock_seconds() - w->heard_at[0]);
            watch_end(text, 1);
        }
    }
    free(p);
    return NULL;
}
FN void watch_start(void) {
    Watch *w = &dist_watch;
    sigset_t all, before;
    w->heard = (WatchFrame *)xcalloc((size_t)w->size, sizeof *w->heard);
    w->heard_at = (double *)xcalloc((size_t)w->size, sizeof *w->heard_at);
    for (int r = 0; r < w->size; r++) w->heard_at[r] = clock_seconds();
    if (pthread_mutex_init(&w->lock, NULL) != 0) fatal("out of memory while the group of processes was set up");
    // Signals are main's: the thread is born with all of them blocked.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&w->thread, NULL, watch_thread, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) fatal("cannot start the thread that watches the other ranks: %s; raise the limit of processes (ulimit -u)", strerror(rc));
    message_hook = watch_error_hook;
}
// The run ended in order on every rank (a barrier lies behind): the thread ends; watch_close() only after another barrier, for a
// connection that closes is a death to those who still watch it.
FN void watch_stop(void) {
    message_hook = NULL;
    __atomic_store_n(&dist_watch.ending, 1, __ATOMIC_RELEASE);
    (void)pthread_join(dist_watch.thread, NULL);
}
FN void watch_close(void) {
    Watch *w = &dist_watch;
    for (int r = 0; r < w->size; r++) if (w->control[r] >= 0) close(w->control[r]);
    free(w->heard); free(w->heard_at);
}

#endif
