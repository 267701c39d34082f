// outlier.h: is a step's loss or gradient norm far above those of the steps before it? Such a step's update is not applied.
//
// A step is an outlier when its loss, or its gradient norm, lies more than z standard deviations above the mean of the last
// OUTLIER_WINDOW steps that were applied. Skipped steps stay out of the window: a spike must not widen the limits that the next
// spike is held against. The limits of a step come from steps at least 1 + lag before it (lag: how far the device runs ahead of
// the host), whatever the host has read by then, so that they are the same in a run that was stopped and went on.
#ifndef LLMC_OUTLIER_H
#define LLMC_OUTLIER_H

#include "json.h"

enum {
    OUTLIER_WINDOW = 128,            // steps that the mean and the deviation are taken over
    OUTLIER_LEAST = 64,              // fewer: no limits yet
    OUTLIER_LAG_MAX = 8,
    OUTLIER_ROOM = OUTLIER_WINDOW + OUTLIER_LAG_MAX,
    OUTLIER_IN_A_ROW = 10            // so many skipped steps one after the other are no spike: the run stops
};
// A window of equal values (a test, a constant) has no deviation: it counts as this share of the mean at least.
#define OUTLIER_LEAST_DEVIATION 1e-3

typedef struct {
    int count;                       // steps held, oldest first
    int skipped;                     // steps skipped since the last that was applied
    int64_t step[OUTLIER_ROOM];      // counted from 0
    float loss[OUTLIER_ROOM], norm[OUTLIER_ROOM];
} OutlierWindow;

typedef struct { float loss, norm; } OutlierLimits;  // infinite: none

// A step that ended. applied 0: it was skipped.
FN void outlier_add(OutlierWindow *w, int64_t step, float loss, float norm, int applied) {
    w->skipped = applied ? 0 : w->skipped + 1;
    if (!applied) return;
    if (w->count == OUTLIER_ROOM) {
        w->count--;
        memmove(w->step, w->step + 1, (size_t)w->count * sizeof w->step[0]);
        memmove(w->loss, w->loss + 1, (size_t)w->count * sizeof w->loss[0]);
        memmove(w->norm, w->norm + 1, (size_t)w->count * sizeof w->norm[0]);
    }
    w->step[w->count] = step; w->loss[w->count] = loss; w->norm[w->count] = norm;
    w->count++;
}
// mean + z x deviation (of the population) of n values.
FN float outlier_limit(const float *values, int n, double z) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += values[i];
    mean /= n;
    for (int i = 0; i < n; i++) square += (values[i] - mean) * (values[i] - mean);
    const double deviation = sqrt(square / n), least = OUTLIER_LEAST_DEVIATION * fabs(mean);
    return (float)(mean + z * (deviation > least ? deviation : least));
}
// The limits of step `step` (counted from 0). z = 0: none.
FN OutlierLimits outlier_limits(const OutlierWindow *w, int64_t step, int lag, double z) {
    OutlierLimits limits = {INFINITY, INFINITY};
    int n = w->count;
    while (n > 0 && w->step[n - 1] >= step - lag) n--;
    const int first = n > OUTLIER_WINDOW ? n - OUTLIER_WINDOW : 0;
    if (!(z > 0) || n - first < OUTLIER_LEAST) return limits;
    limits.loss = outlier_limit(w->loss + first, n - first, z);
    limits.norm = outlier_limit(w->norm + first, n - first, z);
    return limits;
}

// ---------------------------------------------------------------------------------------------------------------------
// In a checkpoint: {"skipped":0,"steps":[...],"loss":[...],"grad_norm":[...]}

FN cJSON *outlier_to_json(const OutlierWindow *w) {
    cJSON *j = json_new_object(), *steps = cJSON_CreateArray(), *loss = cJSON_CreateArray(), *norm = cJSON_CreateArray();
    json_add_number(j, "skipped", w->skipped);
    json_add(j, "steps", steps); json_add(j, "loss", loss); json_add(j, "grad_norm", norm);
    for (int i = 0; i < w->count; i++) {  // a float32 is exact as a float64, and json_number() reads back to the same
        cJSON_AddItemToArray(steps, json_number((double)w->step[i]));
        cJSON_AddItemToArray(loss, json_number((double)w->loss[i]));
        cJSON_AddItemToArray(norm, json_number((double)w->norm[i]));
    }
    return j;
}
// One list of the object: `count` numbers, as float64. 0 or -1.
FN int outlier_read_list(const cJSON *j, const char *where, const char *key, int count, double *values, char *error, size_t size) {
    const cJSON *list = json_get(j, key);
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != count)
        return set_error(error, size, "%s: key \"outliers.%s\" is not a list of %d numbers", where, key, count);
    int i = 0;
    for (const cJSON *v = list->child; v; v = v->next) {
        if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble) || fabs(v->valuedouble) > 3.4028234663852886e38)
            return set_error(error, size, "%s: key \"outliers.%s\" holds something else than float32 numbers", where, key);
        values[i++] = v->valuedouble;
    }
    return 0;
}
// j NULL: a checkpoint of before there was a window; it begins empty. 0, or -1 with the reason.
FN int outlier_from_json(const cJSON *j, const char *where, OutlierWindow *w, char *error, size_t size) {
    double step[OUTLIER_ROOM], loss[OUTLIER_ROOM], norm[OUTLIER_ROOM];
    int64_t skipped = 0;
    memset(w, 0, sizeof *w);
    if (!j) return 0;
    const int count = cJSON_GetArraySize(json_get(j, "steps"));
    if (count > OUTLIER_ROOM) return set_error(error, size, "%s: key \"outliers.steps\" holds %d numbers, more than %d", where, count, (int)OUTLIER_ROOM);
    if (json_integer(j, where, "skipped", 0, OUTLIER_IN_A_ROW, &skipped, error, size) != 0 ||
        outlier_read_list(j, where, "steps", count, step, error, size) != 0 || outlier_read_list(j, where, "loss", count, loss, error, size) != 0 ||
        outlier_read_list(j, where, "grad_norm", count, norm, error, size) != 0) return -1;
    for (int i = 0; i < count; i++) {
        if (!(step[i] >= 0 && step[i] <= JSON_INTEGER_MAX) || step[i] != floor(step[i]) || (i > 0 && step[i] <= step[i - 1]))
            return set_error(error, size, "%s: key \"outliers.steps\" is not a rising list of whole numbers", where);
        outlier_add(w, (int64_t)step[i], (float)loss[i], (float)norm[i], 1);
    }
    w->skipped = (int)skipped;
    return 0;
}

#endif
