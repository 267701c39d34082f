// fuzz.h: what every fuzz target begins with. A target is dev/fuzz/NAME.c with one function, LLVMFuzzerTestOneInput(data, size), that
// hands the bytes to a reader as a file. dev/fuzz/fuzz.sh builds it for libFuzzer; dev/test/test_fuzz_corpus.c replays the stored
// inputs, and mutations of them, with any compiler.
//
// The readers end the process on bad input: here exit() comes back to the target instead, and what the reader had taken by then
// (memory, files, mappings) is returned. One allocation above FUZZ_MOST_BYTES is a finding: no input of a few KiB justifies it.
#ifndef DEV_FUZZ_H
#define DEV_FUZZ_H

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FUZZ_MOST_BYTES (64u << 20)
enum { FUZZ_LIVE = 1 << 16 };

typedef struct { void *p; size_t mapped; } FuzzBlock;  // mapped: bytes of a mapping, 0: of malloc
static FuzzBlock fuzz_live[FUZZ_LIVE];
static int fuzz_count;
static jmp_buf fuzz_return;

static void fuzz_take(void *p, size_t mapped) {
    if (fuzz_count == FUZZ_LIVE) { fprintf(stderr, "fuzz: more than %d blocks are live\n", FUZZ_LIVE); abort(); }
    fuzz_live[fuzz_count].p = p;
    fuzz_live[fuzz_count++].mapped = mapped;
}
static void fuzz_drop(void *p) {
    for (int i = fuzz_count - 1; i >= 0; i--)
        if (fuzz_live[i].p == p) { fuzz_live[i] = fuzz_live[--fuzz_count]; return; }
}
static int fuzz_memalign(void **p, size_t alignment, size_t size) {
    if (size > FUZZ_MOST_BYTES) { fprintf(stderr, "fuzz: %zu bytes were asked for\n", size); abort(); }
    const int rc = posix_memalign(p, alignment, size);
    if (rc == 0) fuzz_take(*p, 0);
    return rc;
}
static void fuzz_free(void *p) {
    if (p) fuzz_drop(p);
    free(p);
}
static void *fuzz_malloc(size_t size) {
    void *p = NULL;
    return fuzz_memalign(&p, 16, size ? size : 1) == 0 ? p : NULL;
}
static void *fuzz_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    void *p = mmap(at, size, protection, flags, fd, offset);
    if (p != MAP_FAILED) fuzz_take(p, size);
    return p;
}
static int fuzz_munmap(void *p, size_t size) {
    fuzz_drop(p);
    return munmap(p, size);
}
static void fuzz_exit(int status) __attribute__((noreturn));
static void fuzz_exit(int status) { longjmp(fuzz_return, 1 + status); }

#define exit(status) fuzz_exit(status)
#define free(p) fuzz_free(p)
#define posix_memalign(p, alignment, size) fuzz_memalign(p, alignment, size)
#define mmap(at, size, protection, flags, fd, offset) fuzz_mmap(at, size, protection, flags, fd, offset)
#define munmap(p, size) fuzz_munmap(p, size)

#include "llmc/json.h"

// The bytes as a file that has a name; -> its descriptor.
static int fuzz_file(const uint8_t *data, size_t size, char path[64]) {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0) { perror("memfd_create"); abort(); }
    for (size_t done = 0; done < size;) {
        const ssize_t n = write(fd, data + done, size - done);
        if (n < 0) { perror("write"); abort(); }
        done += (size_t)n;
    }
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}
// What must hold of what a reader accepted.
static void fuzz_check(int holds, const char *what) {
    if (!holds) { fprintf(stderr, "fuzz: %s does not hold\n", what); abort(); }
}
// Runs the reader on the bytes as a file. -> 0, or 1 + the exit status that it ended the process with.
static int fuzz_run(void (*read_file)(const char *path), const uint8_t *data, size_t size) {
    cJSON_Hooks hooks = {fuzz_malloc, fuzz_free};
    char path[64];
    cJSON_InitHooks(&hooks);
    const int fd = fuzz_file(data, size, path), status = setjmp(fuzz_return);
    if (status == 0) read_file(path);
    while (fuzz_count > 0) {
        const FuzzBlock *b = &fuzz_live[--fuzz_count];
        if (b->mapped) (munmap)(b->p, b->mapped);
        else (free)(b->p);
    }
    for (int open = fd; open < fd + 8; open++) close(open);  // the file and what a reader left open above it
    cJSON_InitHooks(NULL);
    return status;
}

#endif
