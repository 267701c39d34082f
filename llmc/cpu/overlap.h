// cpu/overlap.h: a thread that exchanges gradients between ranks while main computes the next ones.
//
// Main hands it buckets in the order in which they are complete and touches none of them until overlap_wait(), which comes before any
// other exchange: at any time one thread of the process exchanges, as dist.h asks, and every rank does so in the same order.
#ifndef LLMC_CPU_OVERLAP_H
#define LLMC_CPU_OVERLAP_H

#include <pthread.h>
#include <signal.h>

#include "../common.h"

typedef void OverlapWork(void *context, int bucket);
typedef struct {
    OverlapWork *work;                  // NULL: there is no thread
    void *context;
    int *queue;                         // buckets handed over since the last wait
    int queued, done, stop;             // under the lock
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
} Overlap;

FN void *overlap_thread(void *context) {
    Overlap *o = (Overlap *)context;
    pthread_mutex_lock(&o->lock);
    for (;;) {
        while (o->done == o->queued && !o->stop) pthread_cond_wait(&o->changed, &o->lock);
        if (o->done == o->queued) break;
        const int bucket = o->queue[o->done];
        pthread_mutex_unlock(&o->lock);
        o->work(o->context, bucket);
        pthread_mutex_lock(&o->lock);
        o->done++;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}
// capacity: the most buckets between two waits.
FN void overlap_start(Overlap *o, int capacity, OverlapWork *work, void *context) {
    sigset_t all, before;
    o->work = work; o->context = context;
    o->queue = (int *)xcalloc((size_t)capacity, sizeof(int));
    if (pthread_mutex_init(&o->lock, NULL) != 0 || pthread_cond_init(&o->changed, NULL) != 0) fatal("out of memory while the exchange between ranks was set up");
    // Signals are main's: the thread is born with all of them blocked.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&o->thread, NULL, overlap_thread, o);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) fatal("cannot start the thread that exchanges gradients: %s; raise the limit of processes (ulimit -u)", strerror(rc));
}
FN void overlap_push(Overlap *o, int bucket) {
    pthread_mutex_lock(&o->lock);
    o->queue[o->queued++] = bucket;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
}
// Returns when all that was handed over is done.
FN void overlap_wait(Overlap *o) {
    if (!o->work) return;
    pthread_mutex_lock(&o->lock);
    while (o->done < o->queued) pthread_cond_wait(&o->changed, &o->lock);
    o->done = o->queued = 0;
    pthread_mutex_unlock(&o->lock);
}
FN void overlap_stop(Overlap *o) {
    if (!o->work) return;
    overlap_wait(o);
    pthread_mutex_lock(&o->lock);
    o->stop = 1;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    (void)pthread_join(o->thread, NULL);
    (void)pthread_cond_destroy(&o->changed);
    (void)pthread_mutex_destroy(&o->lock);
    free(o->queue);
}

#endif
