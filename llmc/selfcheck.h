// selfcheck.h: `--check`: looks in seconds at what a training run stands on, prints a line for each, and says whether all of it is right. This
// file has what every machine is asked (arithmetic, random numbers, the disk); cuda/selfcheck.cuh asks the card.
//
//   ok      what was checked
//   not ok  what is wrong, and what to do about it
//   note    what need not be right or wrong: a version, a choice
//
// Nothing here is fatal: one finding does not hide the next.
#ifndef LLMC_SELFCHECK_H
#define LLMC_SELFCHECK_H

#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <time.h>

#include "file.h"
#include "quantize.h"

typedef struct { int right, wrong; } SelfCheck;

PRINTF_LIKE(3, 4)
static void selfcheck_line(SelfCheck *s, int ok, const char *format, ...) {
    char text[2048];
    va_list args; va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    text_one_line(text);
    printf("%-8s%s\n", ok ? "ok" : "not ok", text);
    fflush(stdout);
    if (ok) s->right++; else s->wrong++;
}
PRINTF_LIKE(1, 2)
static void selfcheck_note(const char *format, ...) {
    char text[2048];
    va_list args; va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    text_one_line(text);
    printf("%-8s%s\n", "note", text);
    fflush(stdout);
}
// The last line. -> the program's exit status.
FN int selfcheck_finish(const SelfCheck *s) {
    if (s->wrong) printf("self-check: %d of %d checks failed: a run here would not be right\n", s->wrong, s->right + s->wrong);
    else printf("self-check: all %d checks are right\n", s->right);
    return s->wrong != 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic: what the number formats need of the compiler and the processor

// A product and a sum, each rounded. Contracted into one rounding, (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 instead of 0.
FN int arithmetic_is_not_contracted(void) {
    volatile float a = 1 + 0x1p-12f, b = 1 + 0x1p-11f;
    return f32_sub(f32_mul(a, a), b) == 0.0f;
}
FN int arithmetic_keeps_subnormals(void) {
    volatile float small = 0x1p-126f, half = 0.5f;
    return f32_mul(f32_mul(small, half), 2.0f) == 0x1p-126f;
}
// e2m1_round() adds a large number and takes it away again: "fast" mathematics takes both away. Every value of the grid, and its ties.
FN int arithmetic_rounds_to_even(void) {
    static const float value[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 7.0f}, nearest[] = {0, 1, 1, 2, 2, 4, 4, 6};
    static const uint32_t code[] = {0, 2, 2, 4, 4, 6, 6, 7};
    int right = 1;
    for (int i = 0; i < 8; i++) {
        volatile float v = value[i];
        right &= e2m1_round(v) == nearest[i] && e2m1_encode(v) == code[i] && e2m1_encode(-v) == (code[i] | 8u) && e2m1_decode(code[i]) == nearest[i];
    }
    for (uint32_t c = 0; c < 0x7Fu; c++) right &= e4m3_encode(e4m3_decode(c)) == c;
    return right;
}
// Random123's known answers of philox4x32-10: zeros, and ones.
FN int philox_is_right(void) {
    static const uint32_t zeros[] = {0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u}, ones[] = {0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu};
    const uint32_t f = 0xFFFFFFFFu;
    const Philox4 a = philox4x32(0, 0, 0, 0, 0, 0), b = philox4x32(f, f, f, f, f, f);
    return memcmp(a.w, zeros, sizeof zeros) == 0 && memcmp(b.w, ones, sizeof ones) == 0;
}
FN void selfcheck_arithmetic(SelfCheck *s) {
    const int contracted = !arithmetic_is_not_contracted(), flushed = !arithmetic_keeps_subnormals(), rounds = arithmetic_rounds_to_even();
    selfcheck_line(s, !contracted && !flushed && rounds, "arithmetic on the host: %s%s%s", contracted ? "products and sums are contracted into one rounding (build with -ffp-contract=off); " : "",
                   flushed ? "subnormal numbers are flushed to zero (build without -ffast-math); " : "",
                   rounds ? "E2M1 and E4M3 round to nearest even" : "E2M1 or E4M3 does not round to nearest even (build without -ffast-math)");
    selfcheck_line(s, philox_is_right(), "random numbers: Philox4x32-10 %s Random123's known answers", philox_is_right() ? "gives" : "does not give");
}

// ---------------------------------------------------------------------------------------------------------------------
// The disk under --out

#define SELFCHECK_DISK_BYTES ((size_t)64 << 20)

// The nearest folder at or above `path` that exists: a check makes no folder.
FN void folder_nearest(char nearest[PATH_TEXT], const char *path) {
    struct stat st;
    snprintf(nearest, PATH_TEXT, "%s", path[0] ? path : ".");
    while (stat(nearest, &st) != 0) {
        char *slash = strrchr(nearest, '/');
        if (!slash) { snprintf(nearest, PATH_TEXT, "."); return; }
        slash[slash == nearest ? 1 : 0] = 0;
        if (slash == nearest && stat(nearest, &st) != 0) return;
    }
}
// Writes and flushes a file of 64 MiB without a name that lasts. 0, or -1 with a line in error.
FN int disk_write(const char *folder, double *seconds, char *error, size_t error_size) {
    char path[PATH_TEXT];
    if (snprintf(path, sizeof path, "%s/.selfcheck-XXXXXX", folder) >= (int)sizeof path) return set_error(error, error_size, "%s: the path is too long", folder);
    const int fd = mkstemp(path);
    if (fd < 0) return set_error(error, error_size, "%s: cannot write here: %s; choose another --out", folder, strerror(errno));
    unlink(path);
    const size_t piece = (size_t)1 << 20;
    uint32_t *words = (uint32_t *)xcalloc(piece, 1);
    for (size_t i = 0; i < piece / 4; i++) words[i] = (uint32_t)i * PHILOX_KEY0;  // not what a file system stores for nothing
    int rc = 0;
    const double start = clock_seconds();
    for (size_t done = 0; rc == 0 && done < SELFCHECK_DISK_BYTES;) {
        const ssize_t n = write(fd, (const char *)words + done % piece, piece - done % piece);
        if (n > 0) done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            rc = set_error(error, error_size, "%s: writing stopped after %zu bytes: %s; free some space, or choose another --out", folder, done, n == 0 ? "nothing was taken" : strerror(errno));
    }
    if (rc == 0 && fsync(fd) != 0) rc = set_error(error, error_size, "%s: cannot flush a file to the disk: %s; choose another --out", folder, strerror(errno));
    *seconds = clock_seconds() - start;
    close(fd);
    free(words);
    return rc;
}
// out: the folder of --out, which need not exist yet.
FN void selfcheck_disk(SelfCheck *s, const char *out) {
    char folder[PATH_TEXT], error[ERROR_TEXT];
    struct statvfs v;
    double seconds = 0;
    folder_nearest(folder, out);
    if (statvfs(folder, &v) != 0) { selfcheck_line(s, 0, "disk: %s: cannot be asked for its free space: %s; choose another --out", folder, strerror(errno)); return; }
    const double gib = (double)v.f_bavail * (double)v.f_frsize / 1073741824.0;
    if (disk_write(folder, &seconds, error, sizeof error) != 0) { selfcheck_line(s, 0, "disk: %s (%.1f GiB free)", error, gib); return; }
    selfcheck_line(s, 1, "disk: %s writes %.0f MB/s (64 MiB, flushed), %.1f GiB free; a checkpoint is 10 to 12 bytes a parameter", folder,
                   seconds > 0 ? (double)SELFCHECK_DISK_BYTES / seconds / 1e6 : 0.0, gib);
}

// ---------------------------------------------------------------------------------------------------------------------

FN void selfcheck_machine(void) {
    struct utsname u;
    const long processors = sysconf(_SC_NPROCESSORS_ONLN), pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (uname(&u) != 0) memset(&u, 0, sizeof u);
    selfcheck_note("machine: %s %s, %ld processors, %.1f GiB of memory", u.sysname, u.machine, processors, (double)pages * (double)page / 1073741824.0);
}
// The CPU program's --check. -> exit status, 0 if everything that training needs is right.
FN int selfcheck_run_cpu(const char *out) {
    SelfCheck s;
    s.right = s.wrong = 0;
    selfcheck_machine();
    selfcheck_arithmetic(&s);
    selfcheck_note("this is the CPU program: it asks no GPU");
    selfcheck_disk(&s, out);
    return selfcheck_finish(&s);
}

#endif
