// common.h: errors for the person at the shell, and checked memory and files. Every other file may use it.
//
// An error is one line: what, where (file, field, byte), and what to do. Exit status 1: bad input or a failed machine;
// 2: a command line that cannot be understood.
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__GNUC__) || defined(__clang__)
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a), unused))
#define MAYBE_UNUSED __attribute__((unused))
#else
#define PRINTF_LIKE(f, a)
#define MAYBE_UNUSED
#endif
// Every function of a header-only module is static: FN says so, and that a program need not use them all.
#define FN static MAYBE_UNUSED

// Names from files end up in messages: a control character among them (a newline, the escape that begins a terminal's commands,
// their eight-bit forms U+0080 to U+009F) becomes '?', so that a message is one line and only text.
FN void text_one_line(char *text) {
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        const int eight_bit = p[0] == 0xC2 && p[1] >= 0x80 && p[1] < 0xA0;
        if (eight_bit) p[1] = '?';
        if (eight_bit || *p < 0x20 || *p == 0x7F) *p = '?';
    }
}
// Which of several processes speaks, "rank 2 on host7: ", before every message; "" in a single one. dist.h sets it.
static MAYBE_UNUSED char message_origin[320];
// Another rank than the first: its warnings are those of the first.
static MAYBE_UNUSED int message_warnings_off;
// Called with an error's text before the process ends by it, so that the others of its group hear of it; NULL: no group.
static MAYBE_UNUSED void (*message_hook)(const char *text);

PRINTF_LIKE(3, 0)
static void message_v(char text[8192], const char *kind, const char *format, va_list args) {
    vsnprintf(text, 8192, format, args);
    text_one_line(text);
    fflush(stdout);
    fprintf(stderr, "%s: %s%s\n", kind, message_origin, text);
    fflush(stderr);
}
PRINTF_LIKE(3, 0)
static void die_v(int status, const char *kind, const char *format, va_list args) {
    char text[8192];
    message_v(text, kind, format, args);
    if (message_hook) message_hook(text);
    exit(status);
}
// Bad input or a failed machine: exit status 1.
PRINTF_LIKE(1, 2) __attribute__((noreturn))
static void fatal(const char *format, ...) {
    va_list args; va_start(args, format);
    die_v(1, "error", format, args);
    va_end(args);
    abort();
}
// A command line that cannot be understood: exit status 2.
PRINTF_LIKE(1, 2) __attribute__((noreturn))
static void fatal_usage(const char *format, ...) {
    va_list args; va_start(args, format);
    die_v(2, "usage error", format, args);
    va_end(args);
    abort();
}
PRINTF_LIKE(1, 2)
static void warn(const char *format, ...) {
    char text[8192];
    if (message_warnings_off) return;
    va_list args; va_start(args, format);
    message_v(text, "warning", format, args);
    va_end(args);
}

// Now, by a clock that nobody sets: for durations.
FN double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
// count*size bytes, aligned to 64 (a cache line, and any vector register), zeroed. Never returns NULL.
FN void *xcalloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 64)
        fatal("cannot allocate %zu x %zu bytes: the size overflows", count, size);
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0)
        fatal("out of memory: %zu bytes (%.1f MiB) were asked for; use a smaller --batch or --seq", bytes, bytes / 1048576.0);
    memset(p, 0, bytes ? bytes : 64);
    return p;
}
FN char *xstrdup(const char *s) {
    size_t n = strlen(s) + 1;
    char *copy = (char *)xcalloc(n, 1);
    memcpy(copy, s, n);
    return copy;
}
// printf into a fresh string, to be freed by the caller.
PRINTF_LIKE(1, 2)
static char *xasprintf(const char *format, ...) {
    va_list args, again;
    va_start(args, format); va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0) fatal("cannot format a message (%s)", format);
    char *s = (char *)xcalloc((size_t)n + 1, 1);
    vsnprintf(s, (size_t)n + 1, format, again);
    va_end(again);
    return s;
}

#endif
