// bench_quantize.c: how fast the CPU quantizes, in million values a second of one core.
//
// A 1024 x 1024 matrix of N(0,1) is quantized along its columns and along its rows, as a GEMM operand (quantize_operand). The
// figure is the best of several calls, by the thread's own processor time, so that a busy machine does not spoil it.
// Usage: OMP_NUM_THREADS=1 bench_quantize [name]
#include <math.h>
#include <time.h>

#include "llmc/cpu/quantize.h"

#define ROWS 1024
#define COLS 1024
#define CALLS 12

typedef struct { const char *name; double floor; OperandSpec spec; } Entry;  // floor: what it must reach, 0: nothing asked

static const Entry ENTRIES[] = {
    {"rtn 1x16", 0, OPERAND(ROUND_RTN, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"rtn 16x16", 0, OPERAND(ROUND_RTN, FORMAT_NVFP4, BLOCK_16X16, 0, FROM_ORIGINAL)},
    {"four_six 1x16", 150, OPERAND(ROUND_FOUR_SIX, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"four_six 16x16", 0, OPERAND(ROUND_FOUR_SIX, FORMAT_NVFP4, BLOCK_16X16, 0, FROM_ORIGINAL)},
    {"sr 1x16", 0, OPERAND(ROUND_SR, FORMAT_NVFP4, BLOCK_1X16, 0, FROM_ORIGINAL)},
    {"ms_eden 128", 100, OPERAND(ROUND_MS_EDEN, FORMAT_NVFP4, BLOCK_1X16, 128, FROM_ORIGINAL)},
    {"ms_eden_posthoc 128", 100, OPERAND(ROUND_MS_EDEN_POSTHOC, FORMAT_NVFP4, BLOCK_1X16, 128, FROM_ORIGINAL)},
    {"bf16", 0, OPERAND(ROUND_BF16, FORMAT_FLOAT, BLOCK_NONE, 0, FROM_ORIGINAL)},
};

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Best rate of CALLS calls, million values a second.
static double bench(const OperandSpec *spec, int along_rows, const float *x, float *out) {
    double best = 1e30;
    for (int call = 0; call < CALLS; call++) {
        QuantizeAddress at = {1234, call, 0, 0, GEMM_DGRAD, OPERAND_A, 0, 0};
        double start = thread_seconds();
        quantize_operand(out, x, ROWS, COLS, along_rows, spec, &at);
        double seconds = thread_seconds() - start;
        if (seconds < best) best = seconds;
    }
    return (double)ROWS * COLS / best * 1e-6;
}

int main(int argc, char **argv) {
    float *x = (float *)xcalloc(ROWS * COLS, sizeof(float)), *out = (float *)xcalloc(ROWS * COLS, sizeof(float));
    RngStream s = rng_stream(1, 0, rng_address(RNG_INIT, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < ROWS * COLS; i += 2) {
        double r = sqrt(-2 * log((double)rng_uniform(rng_word(s, (uint64_t)i)))), a = 6.283185307179586 * (rng_word(s, (uint64_t)i + 1) * 0x1p-32);
        x[i] = (float)(r * cos(a)); x[i + 1] = (float)(r * sin(a));
    }
    int shown = 0;
    printf("%-20s %14s %14s   M values/s, one core\n", "quantizer", "along columns", "along rows");
    for (size_t e = 0; e < sizeof ENTRIES / sizeof ENTRIES[0]; e++) {
        if (argc > 1 && strcmp(argv[1], ENTRIES[e].name) != 0) continue;
        double cols = bench(&ENTRIES[e].spec, 0, x, out), rows = bench(&ENTRIES[e].spec, 1, x, out);
        printf("%-20s %14.0f %14.0f", ENTRIES[e].name, cols, rows);
        if (ENTRIES[e].floor > 0) printf("   asked: %.0f", ENTRIES[e].floor);
        printf("\n");
        shown++;
    }
    if (!shown) fatal_usage("%s is not a quantizer of this benchmark; run it without an argument to see them", argv[1]);
    free(x); free(out);
    return 0;
}
