// test_schedule.c: learning rates against closed forms, exact at the ends.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "llmc/schedule.h"

static const ScheduleKind KINDS[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD};
#define PEAK 1.2e-3
#define FLOOR 0.1

// The first, the peak and the last step hold exactly, for every shape and many lengths; no step leaves [floor, peak].
static void test_ends_are_exact(void **state) {
    (void)state;
    const int64_t steps_list[] = {1, 2, 3, 7, 10, 100, 1001};
    for (int k = 0; k < 4; k++) for (int i = 0; i < 7; i++) for (int64_t warmup = 0; warmup < steps_list[i]; warmup += 1 + warmup / 3) {
        const int64_t steps = steps_list[i];
        if (warmup > 0) assert_true(schedule_lr(KINDS[k], 0, steps, warmup, PEAK, FLOOR) == PEAK * 0.01);
        assert_true(schedule_lr(KINDS[k], warmup, steps, warmup, PEAK, FLOOR) == PEAK);
        const double last = KINDS[k] == SCHEDULE_CONSTANT || warmup == steps - 1 ? PEAK : PEAK * FLOOR;
        assert_true(schedule_lr(KINDS[k], steps - 1, steps, warmup, PEAK, FLOOR) == last);
        for (int64_t s = 0; s < steps; s++) {
            double lr = schedule_lr(KINDS[k], s, steps, warmup, PEAK, FLOOR);
            assert_true(lr <= PEAK && lr >= (s < warmup ? PEAK * 0.01 : PEAK * FLOOR));
            if (s > 0 && s <= warmup) assert_true(lr > schedule_lr(KINDS[k], s - 1, steps, warmup, PEAK, FLOOR));
            if (s > warmup) assert_true(lr <= schedule_lr(KINDS[k], s - 1, steps, warmup, PEAK, FLOOR));
        }
    }
}
// Values at known places. Each is a handful of float64 operations: 4 units of 2^-53, relative to the peak.
#define TOLERANCE (PEAK * 4 * 1.1102230246251565e-16)
static void near(double value, double expected) {
    if (!(fabs(value - expected) <= TOLERANCE)) fail_msg("%.17g is not %.17g", value, expected);
}
static void test_closed_forms(void **state) {
    (void)state;
    near(schedule_lr(SCHEDULE_COSINE, 5, 101, 10, PEAK, FLOOR), PEAK * 0.505);                    // halfway from 0.01 to 1
    near(schedule_lr(SCHEDULE_COSINE, 55, 101, 10, PEAK, FLOOR), PEAK * 0.55);                    // halfway down: cos = 0
    near(schedule_lr(SCHEDULE_COSINE, 40, 101, 10, PEAK, FLOOR), PEAK * (0.1 + 0.9 * 0.75));      // a third: cos 60 degrees = 1/2
    near(schedule_lr(SCHEDULE_LINEAR, 40, 101, 10, PEAK, FLOOR), PEAK * (0.1 + 0.9 * 2 / 3));
    near(schedule_lr(SCHEDULE_LINEAR, 99, 101, 10, PEAK, 0), PEAK / 90);
    near(schedule_lr(SCHEDULE_CONSTANT, 99, 101, 10, PEAK, FLOOR), PEAK);
    near(schedule_lr(SCHEDULE_WSD, 79, 100, 10, PEAK, FLOOR), PEAK);                              // the last stable step
    near(schedule_lr(SCHEDULE_WSD, 80, 100, 10, PEAK, FLOOR), PEAK * (0.1 + 0.9 * 19 / 20));      // 20 steps of decay
    near(schedule_lr(SCHEDULE_WSD, 89, 100, 10, PEAK, FLOOR), PEAK * 0.55);
    near(schedule_lr(SCHEDULE_WSD, 95, 100, 95, PEAK, FLOOR), PEAK);                              // warm-up reaches into the decay
    near(schedule_lr(SCHEDULE_WSD, 97, 100, 95, PEAK, FLOOR), PEAK * 0.55);
}
static void test_minimum_of_zero_and_one(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) {
        assert_true(schedule_lr(KINDS[k], 49, 50, 5, PEAK, 0) == (KINDS[k] == SCHEDULE_CONSTANT ? PEAK : 0));
        for (int64_t s = 5; s < 50; s++) assert_true(schedule_lr(KINDS[k], s, 50, 5, PEAK, 1) == PEAK);
    }
}
// Beyond 2^31 steps nothing overflows.
static void test_long_run(void **state) {
    (void)state;
    const int64_t steps = 4000000001, warmup = 400000000;
    near(schedule_lr(SCHEDULE_LINEAR, warmup + (steps - 1 - warmup) / 2, steps, warmup, PEAK, FLOOR), PEAK * 0.55);
    assert_true(schedule_lr(SCHEDULE_WSD, steps - 1, steps, warmup, PEAK, FLOOR) == PEAK * FLOOR);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ends_are_exact), cmocka_unit_test(test_closed_forms),
        cmocka_unit_test(test_minimum_of_zero_and_one), cmocka_unit_test(test_long_run)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
