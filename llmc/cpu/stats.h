// cpu/stats.h: what quantization does to a linear layer in one micro-batch, for --quant-stats: each operand against what it was
// rounded from, and both gradients against those of the layer without rounding.
#ifndef LLMC_CPU_STATS_H
#define LLMC_CPU_STATS_H

#include "../quant_stats.h"
#include "quantize.h"

#define STATS_RUN 128                  // values of a run whose largest is held against its root mean square

// Attached to a layer while it is measured.
typedef struct {
    LinearStats stats;
    float *x;                          // (M,K) the input itself, which backward's recipe may not keep
} LinearProbe;

// Largest max/rms of the runs of `run` inner values.
FN double run_peak(const float *x, const QuantizeJob *j, int64_t run) {
    double peak = 0;
    for (int64_t o = 0; o < j->outer; o++)
        for (int64_t first = 0; first < j->inner; first += run) {
            const int64_t n = j->inner - first < run ? j->inner - first : run;
            double square = 0, most = 0;
            for (int64_t i = first; i < first + n; i++) {
                const double v = fabs((double)x[o * j->outer_stride + i * j->inner_stride]);
                square += v * v;
                most = most > v ? most : v;
            }
            const double ratio = square > 0 ? most / sqrt(square / (double)n) : 0;
            peak = peak > ratio ? peak : ratio;
        }
    return peak;
}
// y: the rotated operand; codes: its codes; values = codes x block scales, times factor.
FN void stats_sum(OperandStats *s, const QuantizeJob *j, const float *y, const float *codes, const float *values, double factor, double norm) {
    const OperandSpec *spec = j->spec;
    const double top = spec->format == FORMAT_E4M3 ? E4M3_MAX : spec->format == FORMAT_E5M2 ? E5M2_MAX
                     : spec->format == FORMAT_FLOAT ? INFINITY : E2M1_MAX;
    const int64_t block = operand_block(spec) > 1 ? operand_block(spec) : j->inner;
    double error = 0, square = 0, most = 0;
    int64_t zeros = 0, nonzeros = 0, clipped = 0;
    for (int64_t o = 0; o < j->outer; o++)
        for (int64_t first = 0; first < j->inner; first += block) {
            int clips = 0;
            for (int64_t i = first; i < first + block; i++) {
                const int64_t at = o * j->outer_stride + i * j->inner_stride;
                const double v = y[at] * norm, q = values[at] * factor;
                error += (q - v) * (q - v);
                square += v * v;
                most = most > fabs(v) ? most : fabs(v);
                nonzeros += v != 0;
                zeros += v != 0 && q == 0;
                clips |= fabs((double)codes[at]) == top && fabs(v) > fabs(q);
            }
            clipped += clips;
        }
    s->error = square > 0 ? error / square : 0;
    s->zeros = nonzeros ? (double)zeros / (double)nonzeros : 0;
    s->clipped = (double)clipped / (double)(j->outer * (j->inner / block));
    s->amax = most;
}
// One operand: x (rows, cols), times x_factor, was quantized to out, times factor. The rounding is done once more, for its codes.
FN void stats_operand(OperandStats *s, const float *x, double x_factor, const float *out, double factor, int64_t rows, int64_t cols, int along_rows,
                      const OperandSpec *spec, const QuantizeAddress *at) {
    OperandSpec plain = *spec;
    plain.rounding = ROUND_NONE; plain.format = FORMAT_FLOAT; plain.block = BLOCK_NONE; plain.clamp_percent = 0;
    float *y = (float *)xcalloc((size_t)(rows * cols), sizeof(float)), *codes = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    const QuantizeRandom random = quantize_random(at, spec);
    quantize_operand(y, x, rows, cols, along_rows, &plain, at);
    quantize_tensor(codes, NULL, x, rows, cols, along_rows, spec, &random, 0);
    const QuantizeJob j = quantize_job(rows, cols, along_rows, spec);
    stats_sum(s, &j, y, codes, out, factor, rotation_is_normalised(spec) && spec->rotation ? rotation_norm(spec->rotation) : 1);
    s->amax *= x_factor;
    s->peak = run_peak(x, &j, STATS_RUN);
    s->measured = 1;
    free(y); free(codes);
}
// got (count) against exact: cosine, and relative error in the norm.
FN void stats_gradient(GradientStats *s, const float *got, const float *exact, int64_t count) {
    double gg = 0, ee = 0, ge = 0, dd = 0;
    for (int64_t i = 0; i < count; i++) {
        const double g = got[i], e = exact[i];
        gg += g * g; ee += e * e; ge += g * e; dd += (g - e) * (g - e);
    }
    s->cosine = gg > 0 && ee > 0 ? ge / sqrt(gg * ee) : 0;
    s->error = ee > 0 ? sqrt(dd / ee) : 0;
}

#endif
