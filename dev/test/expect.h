// expect.h: for tests. A folder to write in, and a check that a call ends the program as fatal() does: one line on stderr that
// holds certain words, exit status 1.
#ifndef DEV_TEST_EXPECT_H
#define DEV_TEST_EXPECT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/wait.h>

#include "llmc/file.h"

static char test_folder[64];

FN int test_folder_make(void **state) {
    (void)state;
    strcpy(test_folder, "/tmp/quartet-test-XXXXXX");
    return mkdtemp(test_folder) ? 0 : -1;
}
FN int test_folder_remove(void **state) {
    (void)state;
    char error[ERROR_TEXT];
    return folder_remove(test_folder, error, sizeof error);
}
// A path inside the folder; good until the call after the next seven.
FN const char *folder_path(const char *name) {
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", test_folder, name);
    return path;
}
FN void file_put(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

// Calls act(context) in a child process. It must print one line that starts with "error: " and holds every word of `words`
// (each ends at a '|'), and exit with status 1: not return, not crash.
FN void expect_fatal(void (*act)(const void *), const void *context, const char *words) {
    int ends[2], status;
    char text[4096];
    size_t used = 0;
    ssize_t n;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]); close(ends[1]);
        act(context);
        _exit(0);
    }
    close(ends[1]);
    while ((n = read(ends[0], text + used, sizeof text - 1 - used)) > 0) used += (size_t)n;
    text[used] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1) fail_msg("status %d, not exit 1, for '%s': %s", status, words, text);
    if (strncmp(text, "error: ", 7) != 0 || used < 8 || strchr(text, '\n') != text + used - 1) fail_msg("not one error line: '%s'", text);
    char *list = xstrdup(words), *rest = list, *word;
    while ((word = strsep(&rest, "|")) != NULL)
        if (!strstr(text, word)) fail_msg("'%s' is not in: %s", word, text);
    free(list);
}

#endif
