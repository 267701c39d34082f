// check.h: what the GPU test programs share: one line a check, and at the end "N passed, N failed".
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include "llmc/common.h"

static int checks_passed, checks_failed;

PRINTF_LIKE(2, 3)
static void check(int ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s  ", ok ? "ok    " : "FAILED");
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    if (ok) checks_passed++; else checks_failed++;
}
// The program's exit status.
static int checks_finish(void) {
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0;
}

#endif
