// quantizer_table.h: relative MSE and misalignment of every quantizer on N(0,1), beside what the numerics ask for. Shared by the
// program that prints the table and by the test that holds it.
#ifndef QUANTIZER_TABLE_H
#define QUANTIZER_TABLE_H

#include <math.h>

#include "llmc/cpu/quantize.h"

#define TABLE_COLS 1024
#define TABLE_VALUES ((int64_t)1 << 22)
// Largest sample. The tensor's largest value decides where E4M3's grid lies under every other block, and the misalignment of the
// nearest roundings moves with it (rtn 1x16: 3.6e-3 to 4.8e-3 for largest values from 4.9 to 5.9), so it is pinned to that of the
// sample from which the expected values were taken (dev/reference/quantize_reference.py table).
#define TABLE_AMAX 5.625f
// Relative tolerance of the MSE, and absolute tolerance of the misalignment 1 - <x,q>/<x,x>. The misalignment is a mean of
// (x^2 - x q)/E[x^2]; its standard deviation over 2^22 values is at most sqrt(E[x^2 (x-q)^2])/2^11, about sqrt(0.07)/2048 =
// 1.3e-4 for sr, whose error grows with x, and less for the others: 3e-4 is more than two of them.
#define TABLE_MSE_TOLERANCE 0.01
#define TABLE_MISALIGNMENT_TOLERANCE 3e-4

typedef struct { const char *name; double mse, misalignment; int unbiased; OperandSpec spec; } TableEntry;

// MXFP4's power-of-two scales make its MSE depend on where sigma lies between powers of two: sigma = 1 here.
static const TableEntry TABLE[] = {
    {"rtn 1x16", 9.05e-3, 3.6e-3, 0, NVFP4(ROUND_RTN, BLOCK_1X16)},
    {"rtn 16x16", 1.238e-2, 7.7e-3, 0, NVFP4(ROUND_RTN, BLOCK_16X16)},
    {"four_six 1x16", 7.56e-3, 3.3e-3, 0, NVFP4(ROUND_FOUR_SIX, BLOCK_1X16)},
    {"four_six 16x16", 1.236e-2, 8.2e-3, 0, NVFP4(ROUND_FOUR_SIX, BLOCK_16X16)},
    {"search, four 1x16", 6.81e-3, 9.1e-3, 0, NVFP4_SEARCH(ROUND_SEARCH, 0, FROM_ORIGINAL, SEARCH_FEW)},
    {"search, all 1x16", 6.59e-3, 6.6e-3, 0, NVFP4_SEARCH(ROUND_SEARCH, 0, FROM_ORIGINAL, SEARCH_ALL)},
    {"search true, four", 6.80e-3, 6.0e-3, 0, NVFP4_SEARCH(ROUND_SEARCH_TRUE, 0, FROM_ORIGINAL, SEARCH_FEW)},
    {"search true, all", 6.60e-3, 5.4e-3, 0, NVFP4_SEARCH(ROUND_SEARCH_TRUE, 0, FROM_ORIGINAL, SEARCH_ALL)},
    {"sr 1x16", 2.355e-2, 0, 1, NVFP4(ROUND_SR, BLOCK_1X16)},
    {"sr 1x16, rotated 32", 2.355e-2, 0, 1, NVFP4_ROTATED(ROUND_SR, 32, FROM_ORIGINAL)},
    {"ms_eden 128", 9.33e-3, 0, 1, NVFP4_ROTATED(ROUND_MS_EDEN, 128, FROM_ORIGINAL)},
    {"ms_eden_posthoc 128", 9.35e-3, 0, 1, NVFP4_ROTATED(ROUND_MS_EDEN_POSTHOC, 128, FROM_ORIGINAL)},
    {"ms_eden search, two", 7.86e-3, 0, 1, NVFP4_SEARCH(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL, SEARCH_FEW)},
    {"ms_eden search, all", 7.40e-3, 0, 1, NVFP4_SEARCH(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL, SEARCH_ALL)},
    {"mx_quest 32", 2.71e-2, 6.47e-2, 0, MXFP4_QUEST},
    {"mx_sr 32", 2.82e-2, 0, 1, MXFP4_SR(FROM_ORIGINAL)},
    {"e4m3, tensor", 7.03e-4, 8.9e-4, 0, FP8(FORMAT_E4M3, FROM_ORIGINAL)},
    {"e5m2, tensor", 2.79e-3, 3.1e-3, 0, FP8(FORMAT_E5M2, FROM_ORIGINAL)},
    {"e2m1, row", 1.324e-2, 9.3e-3, 0, FP4_ROWS(0)},
};
#define TABLE_COUNT ((int)(sizeof TABLE / sizeof TABLE[0]))

// N(0,1) by Box-Muller on the words of a stream, rounded to BF16; the first is TABLE_AMAX, none is larger.
FN void table_samples(float *x, int64_t count, uint64_t seed) {
    RngStream s = rng_stream(seed, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < count; i += 4) {
        Philox4 w = rng_words4(s, (uint64_t)i / 4);
        for (int64_t k = i; k < i + 4 && k < count; k++) {
            const int pair = (int)(k - i) / 2 * 2;
            const double r = sqrt(-2 * log((double)rng_uniform(w.w[pair]))), a = 6.283185307179586 * (w.w[pair + 1] * 0x1p-32);
            x[k] = bf16_round((float)(r * ((k - i) % 2 ? sin(a) : cos(a))));
            x[k] = fminf(fmaxf(x[k], -TABLE_AMAX), TABLE_AMAX);
        }
    }
    x[0] = TABLE_AMAX;
}
// Error of one quantizer on x (count/TABLE_COLS, TABLE_COLS), relative to x (the rotated x where it rotates). y, q: work space.
FN void table_measure(const OperandSpec *spec, const float *x, int64_t count, uint64_t seed, float *y, float *q, double *mse, double *misalignment) {
    const QuantizeAddress at = {seed, 0, 0, 0, GEMM_DGRAD, OPERAND_A, 0, 0};
    OperandSpec plain = *spec;
    plain.rounding = ROUND_NONE; plain.format = FORMAT_FLOAT; plain.block = BLOCK_NONE;  // the same signs, no rounding
    const int64_t rows = count / TABLE_COLS;
    quantize_operand(y, x, rows, TABLE_COLS, 0, &plain, &at);
    if (rotation_is_normalised(spec)) for (int64_t k = 0; k < count; k++) y[k] *= rotation_norm(spec->rotation);
    const double st = quantize_operand(q, x, rows, TABLE_COLS, 0, spec, &at);
    double error = 0, yy = 0, yq = 0;
    for (int64_t k = 0; k < count; k++) {
        const double v = st * q[k];
        error += (v - y[k]) * (v - y[k]); yy += (double)y[k] * y[k]; yq += v * y[k];
    }
    *mse = error / yy; *misalignment = 1 - yq / yy;
}
// Measures every quantizer; prints a line each if print. -> number of quantizers outside the tolerances.
FN int table_run(int print) {
    float *x = (float *)xcalloc(TABLE_VALUES, sizeof(float)), *y = (float *)xcalloc(TABLE_VALUES, sizeof(float)), *q = (float *)xcalloc(TABLE_VALUES, sizeof(float));
    int outside = 0;
    table_samples(x, TABLE_VALUES, 1);
    if (print) printf("%-22s %12s %12s %14s %14s   %s\n", "quantizer", "MSE", "expected", "misalignment", "expected", "unbiased");
    for (int e = 0; e < TABLE_COUNT; e++) {
        const TableEntry *t = &TABLE[e];
        double mse, misalignment;
        table_measure(&t->spec, x, TABLE_VALUES, 1, y, q, &mse, &misalignment);
        const int good = fabs(mse / t->mse - 1) < TABLE_MSE_TOLERANCE && fabs(misalignment - t->misalignment) < TABLE_MISALIGNMENT_TOLERANCE;
        if (print) printf("%-22s %12.4e %12.4e %+14.2e %+14.2e   %-8s%s\n", t->name, mse, t->mse, misalignment, t->misalignment,
                          t->unbiased ? "yes" : "no", good ? "" : "   OUTSIDE");
        outside += !good;
    }
    free(x); free(y); free(q);
    return outside;
}

#endif
