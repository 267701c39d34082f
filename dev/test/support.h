// support.h: more for tests of files and errors, on top of expect.h: folders within the test's folder, whole files, and code
// run in a child whose exit status and messages come back.
#ifndef DEV_TEST_SUPPORT_H
#define DEV_TEST_SUPPORT_H

#include "dev/test/expect.h"

FN void tree_remove(const char *folder) {
    DIR *d = opendir(folder);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[PATH_TEXT];
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        path_join(path, folder, e->d_name);
        if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) tree_remove(path);
        else unlink(path);
    }
    closedir(d);
    rmdir(folder);
}
FN int test_tree_remove(void **state) {
    (void)state;
    tree_remove(test_folder);
    return 0;
}
FN void put_text(const char *path, const char *text) { file_put(path, text, strlen(text)); }
// The whole file, zero-terminated, to be freed.
FN char *get_file(const char *path, size_t *size) {
    char error[ERROR_TEXT];
    int64_t n = 0;
    char *data = file_read_text(path, 1 << 28, &n, error, sizeof error);
    if (!data) fail_msg("%s", error);
    if (size) *size = (size_t)n;
    return data;
}
// Runs act(context) in a child, its stdout thrown away. -> exit status (-1: a signal ended it); `text` receives its stderr.
FN int run_child(void (*act)(const void *), const void *context, char *text, size_t size) {
    int status = 0;
    size_t fill = 0;
    char *path = xstrdup(folder_path("stderr"));
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (!freopen("/dev/null", "w", stdout) || !freopen(path, "w", stderr)) _exit(99);
        act(context);
        fflush(NULL);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    char *said = get_file(path, &fill);
    snprintf(text, size, "%s", said);
    unlink(path);
    free(said);
    free(path);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
// An error for a person: one line that says `part`.
FN void assert_one_line(const char *text, const char *part) {
    const char *newline = strchr(text, '\n');
    if (!newline || newline[1] != '\0') fail_msg("not one line: \"%s\"", text);
    if (!strstr(text, part)) fail_msg("\"%s\" does not say \"%s\"", text, part);
}

#endif
