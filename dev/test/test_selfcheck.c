// test_selfcheck.c: what --check says on a machine that is right, and that it notices what is not: a folder that cannot be written, a full disk (a file-size
// limit stands in for it), a path that does not exist yet.
#include <signal.h>
#include <sys/resource.h>

#include "dev/test/support.h"
#include "llmc/selfcheck.h"

static void test_a_good_machine(void **state) {
    (void)state;
    SelfCheck s = {0, 0};
    assert_true(arithmetic_is_not_contracted());
    assert_true(arithmetic_keeps_subnormals());
    assert_true(arithmetic_rounds_to_even());
    assert_true(philox_is_right());
    selfcheck_arithmetic(&s);
    selfcheck_disk(&s, test_folder);
    assert_int_equal(s.right, 3);
    assert_int_equal(s.wrong, 0);
    assert_int_equal(selfcheck_finish(&s), 0);
    assert_int_equal(selfcheck_run_cpu(test_folder), 0);
    s.wrong = 1;
    assert_int_equal(selfcheck_finish(&s), 1);
}
// Nothing is left behind, neither file nor folder.
static void test_leaves_nothing(void **state) {
    (void)state;
    SelfCheck s = {0, 0};
    struct stat st;
    selfcheck_disk(&s, folder_path("not/yet/there"));
    assert_int_equal(s.right, 1);
    assert_int_not_equal(stat(folder_path("not"), &st), 0);
    DIR *d = opendir(test_folder);
    int entries = 0;
    while (readdir(d)) entries++;
    closedir(d);
    assert_int_equal(entries, 2);                                          // . and ..
}
static void test_nearest_folder(void **state) {
    (void)state;
    char nearest[PATH_TEXT];
    folder_nearest(nearest, folder_path("a/b/c"));
    assert_string_equal(nearest, test_folder);
    folder_nearest(nearest, test_folder);
    assert_string_equal(nearest, test_folder);
    folder_nearest(nearest, "surely-not-here/x");
    assert_string_equal(nearest, ".");
    folder_nearest(nearest, "");
    assert_string_equal(nearest, ".");
    folder_nearest(nearest, "/surely-not-here/x");
    assert_string_equal(nearest, "/");
}
static void test_what_cannot_be_written(void **state) {
    (void)state;
    SelfCheck s = {0, 0};
    char error[ERROR_TEXT] = "";
    double seconds;
    file_put(folder_path("file"), "x", 1);
    selfcheck_disk(&s, folder_path("file"));                               // no folder
    assert_int_equal(s.wrong, 1);
    assert_int_equal(disk_write(folder_path("file"), &seconds, error, sizeof error), -1);
    assert_non_null(strstr(error, "--out"));
    assert_null(strchr(error, '\n'));
    assert_int_equal(selfcheck_run_cpu(folder_path("file")), 1);           // --check's exit status
}
static void test_a_full_disk(void **state) {
    (void)state;
    char error[ERROR_TEXT] = "";
    double seconds;
    struct rlimit was, less = {5 << 20, 0};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    less.rlim_max = was.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
    const int rc = disk_write(test_folder, &seconds, error, sizeof error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(rc, -1);
    assert_non_null(strstr(error, "writing stopped after 5242880 bytes"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_good_machine), cmocka_unit_test(test_leaves_nothing), cmocka_unit_test(test_nearest_folder),
                                       cmocka_unit_test(test_what_cannot_be_written), cmocka_unit_test(test_a_full_disk)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
