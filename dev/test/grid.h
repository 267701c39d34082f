// grid.h: the number formats by definition, for tests: a table of the values a format can hold, searched in float64. Shares no
// code with llmc/formats.h.
#ifndef TEST_GRID_H
#define TEST_GRID_H

#include <math.h>

#include "llmc/common.h"

// A grid of non-negative values in ascending order; its index is the code.
typedef struct { double value[128]; int count; } Grid;

FN Grid e2m1_grid(void) {
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    Grid g;
    g.count = 8;
    for (int i = 0; i < 8; i++) g.value[i] = values[i];
    return g;
}
FN Grid e4m3_grid(void) {
    Grid g;
    g.count = 127;
    for (int c = 0; c < 127; c++) g.value[c] = c < 8 ? ldexp(c, -9) : ldexp(1 + c % 8 / 8.0, c / 8 - 7);
    return g;
}
FN Grid e5m2_grid(void) {
    Grid g;
    g.count = 124;
    for (int c = 0; c < 124; c++) g.value[c] = c < 4 ? ldexp(c, -16) : ldexp(1 + c % 4 / 4.0, c / 4 - 15);
    return g;
}
// Largest index whose value is <= a, at most count-2.
FN int grid_below(const Grid *g, double a) {
    int k = 0;
    while (k < g->count - 2 && g->value[k + 1] <= a) k++;
    return k;
}
FN int grid_nearest(const Grid *g, double a) {  // ties to the even code, saturating; NaN saturates
    if (!(a < g->value[g->count - 1])) return g->count - 1;
    const int k = grid_below(g, a);
    const double below = a - g->value[k], above = g->value[k + 1] - a;
    return above < below || (above == below && k % 2 == 1) ? k + 1 : k;
}
FN int grid_stochastic(const Grid *g, double a, uint32_t u) {
    if (!(a < g->value[g->count - 1])) return g->count - 1;
    const int k = grid_below(g, a);
    return k + ((double)u < (a - g->value[k]) / (g->value[k + 1] - g->value[k]) * 0x1p32);
}

#endif
