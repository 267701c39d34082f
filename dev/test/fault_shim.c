// fault_shim.c: damage from below, preloaded (LD_PRELOAD) into a run by dev/test/faults.py. What it does comes from the environment:
//   FAULT_CLOCK=1           every reading of a clock is off by up to +-10 years, anew each time
//   FAULT_FSYNC_MS=N        fsync takes N milliseconds longer (a slow disk)
//   FAULT_WRITE_BYTES=N     after N bytes written to files the disk is full: write takes what still fits, then says ENOSPC
//   FAULT_FSYNC_FAILS=N     the N-th fsync (from 1) says EIO
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long setting(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : -1;
}
// Seconds in +-10 years (xorshift; a race between threads does no harm here).
static long jump(void) {
    static uint64_t state = 0x9E3779B97F4A7C15u;
    if (setting("FAULT_CLOCK") != 1) return 0;
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (long)(state % 630720000u) - 315360000;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const int rc = real(id, t);
    if (rc == 0) t->tv_sec += jump();
    return rc;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    (void)zone;
    const int rc = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000;
    return rc;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    static long written;
    const long most = setting("FAULT_WRITE_BYTES");
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (most < 0 || fd <= 2) return real(fd, data, size);
    const long before = __atomic_fetch_add(&written, (long)size, __ATOMIC_RELAXED), room = most - before;
    if (room <= 0) { errno = ENOSPC; return -1; }
    return real(fd, data, (long)size < room ? size : (size_t)room);
}
int fsync(int fd) {
    static int (*real)(int);
    static long calls;
    const long ms = setting("FAULT_FSYNC_MS"), fails = setting("FAULT_FSYNC_FAILS");
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (ms > 0) {
        struct timespec wait = {ms / 1000, ms % 1000 * 1000000};
        nanosleep(&wait, NULL);
    }
    if (fails > 0 && __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == fails) { errno = EIO; return -1; }
    return real(fd);
}
