// schedule.h: the learning rate of a step. Linear warm-up from a hundredth of the peak, then one of four shapes.
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include <math.h>
#include <stdint.h>

#include "common.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;
#define SCHEDULE_NAMES "cosine|linear|constant|wsd"  // in the order of ScheduleKind
#define SCHEDULE_WARMUP_START 0.01                   // share of the peak at step 0 of a warm-up
#define SCHEDULE_WSD_DECAY 0.2                       // share of all steps in which warm-up-stable-decay decays

// First step at which the rate may be below the peak again: the step whose rate is exactly the peak.
FN int64_t schedule_decay_start(ScheduleKind kind, int64_t steps, int64_t warmup) {
    if (kind != SCHEDULE_WSD) return warmup;
    int64_t start = steps - 1 - (int64_t)ceil(SCHEDULE_WSD_DECAY * (double)steps);
    return start > warmup ? start : warmup;
}

// Learning rate of `step`, 0 <= step < steps; `warmup` < steps steps of warm-up; `floor_share`: the last rate as a share of
// the peak. Exact at the ends: step 0 of a warm-up is peak/100, step `warmup` the peak, and the last step (steps - 1) the
// floor (constant: the peak). A run of one step trains at the peak. Computed in float64, a pure function of its arguments.
FN double schedule_lr(ScheduleKind kind, int64_t step, int64_t steps, int64_t warmup, double peak, double floor_share) {
    if (step < warmup)
        return peak * (SCHEDULE_WARMUP_START + (1.0 - SCHEDULE_WARMUP_START) * (double)step / (double)warmup);
    const int64_t start = schedule_decay_start(kind, steps, warmup), last = steps - 1;
    if (kind == SCHEDULE_CONSTANT || step <= start) return peak;
    const double lowest = peak * floor_share;
    if (step >= last) return lowest;
    const double done = (double)(step - start) / (double)(last - start);  // in (0, 1)
    const double left = kind == SCHEDULE_COSINE ? 0.5 * (1.0 + cos(3.14159265358979323846 * done)) : 1.0 - done;
    return lowest + (peak - lowest) * left;
}

#endif
