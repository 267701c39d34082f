// block_reference.h: NVFP4's quantizers of one block, one value after the other, on grids made by counting (grid.h): what test_quantize holds the block
// functions of quantize.h against.
#ifndef TEST_BLOCK_REFERENCE_H
#define TEST_BLOCK_REFERENCE_H

#include "grid.h"
#include "llmc/recipe.h"
#include "llmc/quantize.h"

static Grid E2M1_GRID, E4M3_GRID;      // the program makes them first

typedef struct { float q[16]; int sb; float c; } RefBlock;

static float ref_e2m1(float v) {
    const float a = (float)E2M1_GRID.value[grid_nearest(&E2M1_GRID, fabs((double)v))];
    return signbit(v) ? -a : a;
}
static int ref_e4m3(float v) { return grid_nearest(&E4M3_GRID, (double)v); }
static float ref_sum(const float p[16]) {
    float a = p[0], b = p[8];
    for (int i = 1; i < 8; i++) { a += p[i]; b += p[8 + i]; }
    return a + b;
}
static int ref_scale(float amax, float t) {
    const int code = ref_e4m3(t);
    return amax > 0 ? (code > 1 ? code : 1) : 0;
}
static float ref_codes(const float *x, int sb, float st, float q[16]) {  // -> the squared error
    const float d = (float)E4M3_GRID.value[sb] * st, e = d > 0 ? 1 / d : 0;
    float r2[16];
    for (int i = 0; i < 16; i++) {
        q[i] = ref_e2m1(x[i] * e);
        const float r = x[i] - q[i] * d;
        r2[i] = r * r;
    }
    return ref_sum(r2);
}
// S = <y,y> over <y,qd>; 1 where there is nothing to divide by.
static float ref_correction(const float *y, const float *qd) {
    float n[16], p[16];
    for (int i = 0; i < 16; i++) { n[i] = y[i] * y[i]; p[i] = y[i] * qd[i]; }
    const float D = ref_sum(p);
    return D > 0 ? ref_sum(n) / D : 1;
}
// The squared error, each difference and each sum rounded once.
static float ref_fused_error(const float *x, const float *q, float d) {
    float sum[2] = {0, 0};
    for (int i = 0; i < 16; i++) {
        const float r = fmaf(-q[i], d, x[i]);
        sum[i / 8] = fmaf(r, r, sum[i / 8]);
    }
    return sum[0] + sum[1];
}
// The scale search: every candidate by the comments of quantize.h, one after the other.
static RefBlock ref_search(const float *x, TensorScale ts, int all, int is_true) {
    static const int few[4] = {0, 1, 5, 6};
    RefBlock b;
    memset(&b, 0, sizeof b);
    float amax = 0, q[16], least = INFINITY;
    for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(x[i]));
    const float t = amax * ts.inv * (all ? 6.0f / 7.0f : 1.0f);
    int first = ref_scale(amax, t) - !all;
    if (first < 1) first = 1;
    for (int k = 0; k < (all ? 9 : 4); k++) {
        int sb = first + (all ? k : few[k]);
        if (sb > 126) sb = 126;
        if (amax == 0) sb = 0;
        ref_codes(x, sb, ts.st, q);
        const float error = ref_fused_error(x, q, (float)E4M3_GRID.value[sb] * ts.st);
        if (error < least) { least = error; b.sb = sb; memcpy(b.q, q, sizeof q); }
    }
    if (is_true && b.sb) {
        for (int i = 0; i < 16; i++) q[i] = b.q[i] * ((float)E4M3_GRID.value[b.sb] * ts.st);
        b.sb = ref_e4m3((float)E4M3_GRID.value[b.sb] * ref_correction(x, q));
        if (b.sb < 1) b.sb = 1;
    }
    return b;
}
// A positive float32 cut to `bits` significant bits.
static float ref_cut(float m, int bits) {
    int exponent;
    const double fraction = frexp((double)m, &exponent);
    const float cut = (float)ldexp(floor(ldexp(fraction, bits)), exponent - bits);
    return cut < 0x1p-100f ? 0 : cut;
}
// Codes of y in units of m. -> c = m*S, rounded to BF16; *error: squared, in units of m.
static float ref_eden(const float *y, float m, float q[16], float *error) {
    float v[16], r2[16];
    const float e = m > 0 ? 1 / m : 0;
    for (int i = 0; i < 16; i++) {
        v[i] = y[i] * e;
        q[i] = ref_e2m1(v[i]);
        r2[i] = (v[i] - q[i]) * (v[i] - q[i]);
    }
    *error = ref_sum(r2);
    float n[2] = {0, 0}, p[2] = {0, 0};                                // by eights, each product and sum rounded once
    for (int i = 0; i < 16; i++) { n[i / 8] = fmaf(v[i], v[i], n[i / 8]); p[i / 8] = fmaf(v[i], q[i], p[i / 8]); }
    const float D = p[0] + p[1];
    return bf16_round(m * ((n[0] + n[1]) / (D > 0 ? D : 1)));
}
// Two candidates; the expected error of each from its own c's place in its binade, in float64. Float32 decides otherwise where the two are all but
// equal: *tie then, and either will do.
static RefBlock ref_eden_pair(const float *y, RefBlock *other, int *tie) {
    float top[4] = {0, 0, 0, 0}, amax = 0, second = 0;
    RefBlock b[2];
    double cost[2];
    memset(b, 0, sizeof b);
    for (int i = 0; i < 16; i++) { top[i % 4] = fmaxf(top[i % 4], fabsf(y[i])); amax = fmaxf(amax, fabsf(y[i])); }
    for (int j = 0, seen = 0; j < 4; j++) { if (top[j] == amax && !seen) { seen = 1; continue; } second = fmaxf(second, top[j]); }
    const int near_ = second >= amax * 0.8f;
    const float m0 = amax * (near_ ? 1 / 6.4f : 1.0f / 6), e0 = 1 / m0, m[2] = {m0, amax * 0.25f}, e[2] = {e0, e0 * (near_ ? 0.625f : 4.0f / 6)};
    memset(other, 0, sizeof *other);
    if (m0 < 0x1p-100f) return *other;                                 // its inverse would leave float32's range: zero
    const double ratio = near_ ? 0.390625 : (double)(4.0f / 9);
    float n[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        float p[2] = {0, 0}, qq = 0;
        for (int i = 0; i < 16; i++) {
            const float v = y[i] * e[k];
            b[k].q[i] = ref_e2m1(v);
            if (k == 0) n[i / 8] = fmaf(v, v, n[i / 8]);
            p[i / 8] = fmaf(v, b[k].q[i], p[i / 8]);
            qq += b[k].q[i] * b[k].q[i];                               // exact
        }
        const float V = k ? (n[0] + n[1]) * (float)ratio : n[0] + n[1], r = 1 / (p[0] + p[1]);
        b[k].c = bf16_round(m[k] * (V * r));
        int exponent;
        const double t = 2 * frexp((double)b[k].c, &exponent), place = t * 8 - floor(t * 8), step = 0.125 / t;
        cost[k] = (double)V * qq / ((double)(p[0] + p[1]) * (p[0] + p[1])) * (1 + place * (1 - place) * step * step);
    }
    const int second_is_better = cost[1] < cost[0];
    *tie = fabs(cost[1] - cost[0]) < 1e-6;
    *other = b[!second_is_better];
    return b[second_is_better];
}
static RefBlock ref_eden_search(const float *y) {
    RefBlock b;
    memset(&b, 0, sizeof b);
    float amax = 0, q[16], least = INFINITY;
    for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(y[i]));
    const float first = ref_cut(amax * (1.0f / 7), 4), inverse = first > 0 ? 1 / first : 0;
    for (int k = 0; k < 9; k++) {
        float m = first, error;
        for (int up = 0; up < k; up++) m += ldexpf(1, first > 0 ? ilogbf(m) - 3 : 0);  // the next of four bits
        if (first == 0) m = 0;
        const float c = ref_eden(y, m, q, &error), steps = m * inverse;
        error *= steps * steps;
        if (error < least) { least = error; b.c = c; memcpy(b.q, q, sizeof q); }
    }
    return b;
}
static RefBlock ref_block(Rounding rounding, const float *x, TensorScale ts, const uint32_t *u) {
    RefBlock b;
    memset(&b, 0, sizeof b);
    float amax = 0;
    for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(x[i]));
    if (rounding == ROUND_RTN || rounding == ROUND_FOUR_SIX) {
        float q4[16];
        const float t = amax * ts.inv, error = (b.sb = ref_scale(amax, t), ref_codes(x, b.sb, ts.st, b.q));
        const int s4 = ref_scale(amax, t * 1.5f);
        if (rounding == ROUND_FOUR_SIX && ref_codes(x, s4, ts.st, q4) < error) { b.sb = s4; memcpy(b.q, q4, sizeof q4); }
    } else if (rounding == ROUND_SR) {
        b.sb = ref_scale(amax, amax * (17.0f / 16) * ts.inv);
        const float d = (float)E4M3_GRID.value[b.sb] * ts.st, e = d > 0 ? 1 / d : 0;
        for (int i = 0; i < 16; i++) {
            const float v = x[i] * e, a = (float)E2M1_GRID.value[grid_stochastic(&E2M1_GRID, fabs((double)v), u[i])];
            b.q[i] = signbit(v) ? -a : a;
        }
    } else if (rounding == ROUND_MS_EDEN) {
        const int s = ref_scale(amax, amax * (float)(17.0 / 16 * 0.93) * ts.inv);
        const float d = (float)E4M3_GRID.value[s] * ts.st;
        ref_codes(x, s, ts.st, b.q);
        float qd[16];
        for (int i = 0; i < 16; i++) qd[i] = b.q[i] * d;
        b.sb = grid_stochastic(&E4M3_GRID, (double)((float)E4M3_GRID.value[s] * ref_correction(x, qd)), u[0]);
    } else {
        float error;
        b.c = ref_eden(x, ref_cut(amax * (1.0f / 6), 5), b.q, &error);
    }
    return b;
}

#endif
