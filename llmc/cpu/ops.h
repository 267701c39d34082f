// cpu/ops.h: everything of the model that is not a matrix product or attention, forward and backward, and AdamW.
//
// Tensors are float32, row-major; a row is a token. Each op's loop runs over rows (or over fixed parts of the rows where a
// sum crosses them), so results do not depend on the number of threads. Backward functions say whether they add to or
// overwrite their output.
#ifndef LLMC_CPU_OPS_H
#define LLMC_CPU_OPS_H

#include "../adamw.h"
#include "../formats.h"
#include "../rng.h"

// ---------------------------------------------------------------------------------------------------------------------
// Elementary functions

// e^x with relative error below 2 units in the last place, in a form compilers turn into vector code: x = n ln2 + r,
// |r| <= ln2/2, Taylor series to r^7 (remainder 5e-9), times 2^n. Saturates at e^-87 and e^88; a NaN stays NaN.
HD float f32_exp(float x) {
    const float magic = 12582912.0f;                                   // 1.5 * 2^23: adding it rounds to an integer
    x = f32_max(-87.0f, f32_min(88.0f, x));                            // in this order a NaN in x passes
    const float t = x * 1.44269504f + magic, n = t - magic;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;      // ln2 in two parts, the first exact in 10 bits
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r;                                               // e^r - 1
    return (p + 1.0f) * f32_from_bits((f32_bits(t) - f32_bits(magic) + 127u) << 23);
}
HD float f32_sigmoid(float x) { return 1.0f / (1.0f + f32_exp(-x)); }

FN float row_dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding

// x (rows, width) = table[token] ; table (vocab, width).
FN void embedding_forward(float *x, const float *table, const int32_t *tokens, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) memcpy(x + i * width, table + tokens[i] * width, (size_t)width * sizeof(float));
}
// dtable[token] += dx. A token may stand in many rows: threads share the columns, each adds the rows in order.
FN void embedding_backward(float *dtable, const float *dx, const int32_t *tokens, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < width; part += 64) {
        const int64_t end = part + 64 < width ? part + 64 : width;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = part; j < end; j++) dtable[tokens[i] * width + j] += dx[i * width + j];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// RMSNorm: y = x r g, r = 1/sqrt(mean(x^2) + eps), g: gain (width)

FN void rmsnorm_forward(float *y, float *inv_rms, const float *x, const float *gain, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *xi = x + i * width;
        const float r = 1.0f / sqrtf(row_dot(xi, xi, width) / (float)width + eps);
        for (int64_t j = 0; j < width; j++) y[i * width + j] = xi[j] * r * gain[j];
        inv_rms[i] = r;
    }
}
// dx += r g dy - x r^3/width <g dy, x>;  dgain += sum over rows of dy x r. Rows are summed in NORM_PARTS fixed parts:
// parts (NORM_PARTS, width) is work space.
#define NORM_PARTS 32
FN void rmsnorm_backward(float *dx, float *dgain, float *parts, const float *dy, const float *x, const float *gain,
                         const float *inv_rms, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < NORM_PARTS; p++) {
        float *dg = parts + p * width;
        memset(dg, 0, (size_t)width * sizeof(float));
        for (int64_t i = p * rows / NORM_PARTS; i < (p + 1) * rows / NORM_PARTS; i++) {
            const float *xi = x + i * width, *dyi = dy + i * width, r = inv_rms[i];
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t j = 0; j < width; j++) dot += dyi[j] * gain[j] * xi[j];
            const float back = dot * r * r * r / (float)width;
            for (int64_t j = 0; j < width; j++) {
                dx[i * width + j] += r * gain[j] * dyi[j] - back * xi[j];
                dg[j] += dyi[j] * xi[j] * r;
            }
        }
    }
    for (int64_t p = 0; p < NORM_PARTS; p++)
        for (int64_t j = 0; j < width; j++) dgain[j] += parts[p * width + j];
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotary embedding, rotate-half convention: the pair (x_j, x_{j+h/2}) of a head turns by position * theta^(-2j/h)

// cosines, sines: (seq, head_dim/2).
FN void rope_tables(float *cosines, float *sines, int seq, int head_dim, float theta) {
    const int half = head_dim / 2;
    for (int64_t t = 0; t < seq; t++)
        for (int j = 0; j < half; j++) {
            const double angle = (double)t * pow((double)theta, -2.0 * j / head_dim);
            cosines[t * half + j] = (float)cos(angle);
            sines[t * half + j] = (float)sin(angle);
        }
}
// In place on the first `heads` heads of every row of x (B*T, stride). direction +1: forward, -1: backward (the inverse turn).
FN void rope_apply(float *x, const float *cosines, const float *sines, int64_t rows, int64_t T, int64_t stride, int heads,
                   int head_dim, float direction) {
    const int half = head_dim / 2;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *c = cosines + i % T * half, *s = sines + i % T * half;
        for (int h = 0; h < heads; h++) {
            float *lo = x + i * stride + h * head_dim, *hi = lo + half;
#pragma omp simd
            for (int j = 0; j < half; j++) {
                const float a = lo[j], b = hi[j], turn = direction * s[j];
                lo[j] = a * c[j] - b * turn;
                hi[j] = b * c[j] + a * turn;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// SwiGLU: y = silu(gate) up, silu(g) = g sigmoid(g). gate_up (rows, 2 ffn): a row holds gate, then up. y (rows, ffn).

FN void swiglu_forward(float *y, const float *gate_up, int64_t rows, int64_t ffn) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = gate_up + i * 2 * ffn, *up = gate + ffn;
        float *yi = y + i * ffn;
#pragma omp simd
        for (int64_t j = 0; j < ffn; j++) yi[j] = gate[j] * f32_sigmoid(gate[j]) * up[j];
    }
}
// Overwrites dgate_up.
FN void swiglu_backward(float *dgate_up, const float *dy, const float *gate_up, int64_t rows, int64_t ffn) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = gate_up + i * 2 * ffn, *up = gate + ffn, *dyi = dy + i * ffn;
        float *dgate = dgate_up + i * 2 * ffn, *dup = dgate + ffn;
#pragma omp simd
        for (int64_t j = 0; j < ffn; j++) {
            const float s = f32_sigmoid(gate[j]), silu = gate[j] * s;
            dgate[j] = dyi[j] * up[j] * (s + silu * (1.0f - s));
            dup[j] = dyi[j] * silu;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Cross-entropy: loss of a row = log(sum exp logits) - logits[target]

// losses (rows): natural logarithm. With scale != 0 the logits (rows, vocab) are replaced by scale * d(loss)/d(logits).
FN void cross_entropy(double *losses, float *logits, const int32_t *targets, int64_t rows, int64_t vocab, float scale) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *x = logits + i * vocab, max = x[0], sum = 0;
        const float target = x[targets[i]];
#pragma omp simd reduction(max : max)
        for (int64_t j = 0; j < vocab; j++) max = x[j] > max ? x[j] : max;
        if (scale == 0) {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < vocab; j++) sum += f32_exp(x[j] - max);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < vocab; j++) { x[j] = f32_exp(x[j] - max); sum += x[j]; }
            const float factor = scale / sum;
            for (int64_t j = 0; j < vocab; j++) x[j] *= factor;
            x[targets[i]] -= scale;
        }
        losses[i] = log((double)sum) + ((double)max - (double)target);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// Sum of squares in float64, in fixed parts that are added in order.
#define SUM_PARTS 256
FN double sum_of_squares(const float *x, int64_t n) {
    double parts[SUM_PARTS], total = 0;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < SUM_PARTS; p++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = p * n / SUM_PARTS; i < (p + 1) * n / SUM_PARTS; i++) sum += (double)x[i] * x[i];
        parts[p] = sum;
    }
    for (int64_t p = 0; p < SUM_PARTS; p++) total += parts[p];
    return total;
}

// One tensor: elements offset .. offset + count of the flat buffers, both multiples of 8; m and v begin with element `offset` (a
// rank may hold a part of them only). Gradients are multiplied by grad_scale (clipping). With `master` the new weight is rounded stochastically to BF16: element e takes the low (even e) or
// high half of word e/2 of that stream.
FN void adamw_tensor(float *w, float *m, float *v, const float *g, int64_t offset, int64_t count, const AdamWScalars *k, int decay,
                     float grad_scale, const RngStream *master) {
    const AdamWScalars scalars = *k;
#pragma omp parallel for schedule(static)
    for (int64_t e = offset; e < offset + count; e += 8) {
        float *we = w + e, *me = m + (e - offset), *ve = v + (e - offset);
        const float *ge = g + e;
        for (int i = 0; i < 8; i++) we[i] = adamw_update(scalars, we[i], f32_mul(ge[i], grad_scale), decay, &me[i], &ve[i]);
        if (!master) continue;
        const Philox4 random = rng_words4(*master, (uint64_t)e / 8);
        for (int i = 0; i < 8; i++) we[i] = bf16_decode(bf16_encode_sr(we[i], random.w[i / 2] >> 16 * (i % 2)));
    }
}

#endif
