// quant_stats.h: what --quant-stats measures, for every backend.
#ifndef LLMC_QUANT_STATS_H
#define LLMC_QUANT_STATS_H

// What quantization did to a linear layer in one micro-batch (--quant-stats).
typedef struct {
    int measured;                  // 0: the operand is used as it is, or as the forward left it
    double error;                  // relative squared error, of the rotated operand where it is rotated
    double zeros;                  // share of values that became zero
    double clipped;                // share of blocks (rows, where a scale covers more) with a value beyond their largest code
    double amax;                   // largest magnitude, after the rotation (unnormalised, but MXFP4's)
    double peak;                   // largest max/rms of a run of 128 values, before the rotation
} OperandStats;
typedef struct { double cosine, error; } GradientStats;  // against the layer's gradient without rounding; error in the norm
typedef struct {
    OperandStats operand[3][2];    // by GEMM; A, B
    GradientStats dx, dw;
} LinearStats;

#endif
