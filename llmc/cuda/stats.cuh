// cuda/stats.cuh: --quant-stats on the GPU: what quantization does to a linear layer in one micro-batch, by the definitions of
// cpu/stats.h.
//
// It runs every so many steps, so it is plain rather than fast: an operand is rotated and rounded once more from its source with the
// block functions of quantize.h, and held against what it was rounded from. What it needs is its workspace; nothing is allocated,
// nothing synchronizes, everything runs on `stream`. Sums are float64 in a fixed order: the same bits every time.
#ifndef LLMC_CUDA_STATS_CUH
#define LLMC_CUDA_STATS_CUH

#include "../quant_stats.h"
#include "quantize.cuh"
#include "quantize_rows.cuh"

#define STATS_OPERAND_VALUES 5   // of float64 (device): error, zeros, clipped, amax, peak, as OperandStats has them
#define STATS_GRADIENT_VALUES 2  // cosine, error

// Scratch for a tensor of (rows, cols), either function below. Calls on one stream may share it.
FN int64_t stats_workspace_bytes(int64_t rows, int64_t cols);

// The operand that spec makes of x (rows, cols), along its columns or (along_rows) along its rows; at: as the quantizer had it.
//   x           what was quantized: the BF16 tensor, or (FROM_FORWARD) the forward's operand as it was multiplied, decoded
//   row_factor  (rows), device: x is value x its row's factor (a FORMAT_E2M1 operand); NULL: x is the values
//   x_factor    device, the tensor scale of x; NULL: 1. Only amax depends on it
//   out         (STATS_OPERAND_VALUES) float64, device
// Errors: fatal, a shape that blocks or rotation do not divide, or a quantizer that there is not.
FN void stats_operand_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const bf16 *x, const float *row_factor,
                             const float *x_factor, int64_t rows, int64_t cols, int along_rows, void *workspace, double *out);
// got (minus before, unless NULL, in float32) against exact, `count` values each, float32 or BF16 as *_bf16 says.
//   out         (STATS_GRADIENT_VALUES) float64, device
FN void stats_gradient_launch(cudaStream_t stream, const void *got, int got_bf16, const void *exact, int exact_bf16, const void *before,
                              int before_bf16, int64_t count, void *workspace, double *out);
// out, copied to the host -> the record.
FN void stats_operand_read(OperandStats *s, const double *out) {
    s->error = out[0]; s->zeros = out[1]; s->clipped = out[2]; s->amax = out[3]; s->peak = out[4];
    s->measured = 1;
}
FN void stats_gradient_read(GradientStats *s, const double *out) { s->cosine = out[0]; s->error = out[1]; }

// ---------------------------------------------------------------------------------------------------------------------
// An operand, as runs of up to 128 inner values (a multiple of its blocks and rotation, and what a peak is found in), a thread each.
// A thread's runs lie in shared memory: local memory for them would be reserved for every thread that the card can hold.

#define STATS_CTAS 512
#define STATS_THREADS 64
#define STATS_RUN_VALUES ROTATION_MAX
#define STATS_RUN_STRIDE (STATS_RUN_VALUES + 1)  // of two threads' runs: odd, so that a warp's accesses fall on all banks
enum { SUM_ERROR, SUM_SQUARE, SUM_ZEROS, SUM_NONZEROS, SUM_CLIPPED, SUM_AMAX, SUM_PEAK, STATS_SUMS };
enum { SUM_GG, SUM_EE, SUM_GE, SUM_DD, GRADIENT_SUMS };

struct StatsJob {
    OperandSpec spec;
    const bf16 *x;
    const float *row_factor, *x_factor;
    int64_t outer, inner, outer_stride, inner_stride;
    uint32_t sign_bits[4];
    RngStream words;
    int64_t micro;
    int block;                         // values of a block; 1: a scale covers a row or more, and clipped rows are counted
    float norm;                        // that the rotated operand is multiplied by; else 1
    float override_, bound;            // NVFP4, tensor scale from amax
    double *partial;                   // (STATS_CTAS, STATS_SUMS)
    uint32_t *most;                    // bits of the largest magnitude, and of MS-EDEN's largest c
    float *limits;                     // of the clamp
    uint32_t *row_most, *row_clips;    // (outer) where a scale covers a row or more: bits of its largest magnitude, whether it clipped
};
struct StatsRun { int64_t o, first; int n; };

__device__ __forceinline__ int64_t stats_runs(const StatsJob &job) { return job.outer * ((job.inner + STATS_RUN_VALUES - 1) / STATS_RUN_VALUES); }
__device__ __forceinline__ StatsRun stats_run(const StatsJob &job, int64_t k) {  // neighbours in memory to neighbouring threads
    const int64_t runs = (job.inner + STATS_RUN_VALUES - 1) / STATS_RUN_VALUES, r = job.inner_stride == 1 ? k % runs : k / job.outer;
    StatsRun run;
    run.o = job.inner_stride == 1 ? k / runs : k % job.outer;
    run.first = r * STATS_RUN_VALUES;
    run.n = job.inner - run.first < STATS_RUN_VALUES ? (int)(job.inner - run.first) : STATS_RUN_VALUES;
    return run;
}
__device__ __forceinline__ float stats_value(const StatsJob &job, int64_t o, int64_t i) {
    const float v = __bfloat162float(job.x[o * job.outer_stride + i * job.inner_stride]);
    return job.row_factor ? f32_mul(v, job.row_factor[job.inner_stride == 1 ? o : i]) : v;
}
// The run, clamped or not, rotated: y[0..n-1]. It is not normalised.
__device__ __forceinline__ void stats_load(const StatsJob &job, StatsRun run, bool clamped, float *y) {
    const int d = job.spec.rotation;
    for (int i = 0; i < run.n; i++) {
        float v = stats_value(job, run.o, run.first + i);
        if (clamped) v = v < job.limits[0] ? job.limits[0] : v > job.limits[1] ? job.limits[1] : v;
        y[i] = d ? f32_from_bits(f32_bits(v) ^ rotation_sign(job.sign_bits, i & (d - 1))) : v;
    }
    for (int i = 0; d && i < run.n; i += d) hadamard(y + i, d);
}
// What is rounded: the clamped run where there is a clamp.
__device__ __forceinline__ const float *stats_rounded(const StatsJob &job, StatsRun run, float *y) {
    if (!job.spec.clamp_percent) return y;
    float *z = y + STATS_THREADS * STATS_RUN_STRIDE;
    stats_load(job, run, true, z);
    return z;
}
__device__ __forceinline__ float stats_block16(const StatsJob &job, const float *z, LaneBlock v) {  // -> amax
    float most[1];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i][0] = f32_mul(z[i], job.norm);
    block_amax(v, most);
    return most[0];
}
__device__ __forceinline__ void stats_eden_codes(const StatsJob &job, LaneBlock v, float amax, LaneBlock q, float *c) {
    float most[1] = {amax}, cs[1];
    if (job.spec.rounding == ROUND_MS_EDEN_SEARCH) ms_eden_search_block(v, most, job.spec.search == SEARCH_ALL, q, cs);
    else ms_eden_posthoc_block(v, most, q, cs);
    *c = cs[0];
}
__device__ __forceinline__ bool stats_is_posthoc(const OperandSpec &s) {
    return s.rounding == ROUND_MS_EDEN_POSTHOC || s.rounding == ROUND_MS_EDEN_SEARCH;
}

// What scales depend on beyond their block: the largest magnitude of the operand or of a row, the largest c.
static __global__ void __launch_bounds__(STATS_THREADS) stats_most_kernel(const __grid_constant__ StatsJob job) {
    extern __shared__ float stats_shared[];
    float *y = stats_shared + threadIdx.x * STATS_RUN_STRIDE;
    uint32_t all = 0u, largest_c = 0u;
    for (int64_t k = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x; k < stats_runs(job); k += (int64_t)STATS_CTAS * STATS_THREADS) {
        const StatsRun run = stats_run(job, k);
        uint32_t most = 0u;
        stats_load(job, run, job.spec.clamp_percent != 0, y);
        for (int i = 0; i < run.n; i++) most = u32_max(most, f32_bits(y[i]) & 0x7FFFFFFFu);
        all = u32_max(all, most);
        if (job.spec.format == FORMAT_E2M1) atomicMax(job.row_most + run.o, most);
        for (int i = 0; stats_is_posthoc(job.spec) && i < run.n; i += 16) {
            LaneBlock v, q;
            float c;
            const float amax = stats_block16(job, y + i, v);
            stats_eden_codes(job, v, amax, q, &c);
            largest_c = u32_max(largest_c, f32_bits(c));
        }
    }
    atomicMax(job.most, all);
    atomicMax(job.most + 1, largest_c);
}

// 16x16: the block scale of the block that holds (o, i ...), as cpu/quantize.h's square_quantize chooses it.
__device__ __forceinline__ uint32_t stats_square_scale(const StatsJob &job, int64_t o, int64_t i, TensorScale ts) {
    const int64_t first = o / 16 * 16, last = first + 16 < job.outer ? first + 16 : job.outer;
    float amax = 0.0f, sums[2];
    for (int64_t r = first; r < last; r++) for (int k = 0; k < 16; k++) amax = f32_max(f32_abs(stats_value(job, r, i + k)), amax);
    for (int candidate = 0; candidate < 2; candidate++) {
        uint32_t code[1] = {four_six_scale(amax, ts, candidate)};
        float sum = 0.0f;
        for (int64_t r = first; r < last; r++) {
            LaneBlock v, q;
            float error[2][1];
#pragma unroll
            for (int k = 0; k < 16; k++) v[k][0] = stats_value(job, r, i + k);
            four_six_try(v, code, ts, q, error);
            sum = f32_add(f32_add(sum, error[0][0]), error[1][0]);
        }
        sums[candidate] = sum;
    }
    return four_six_scale(amax, ts, job.spec.rounding == ROUND_FOUR_SIX && sums[1] < sums[0]);
}
// A block of 16 at inner value i of row o: z -> codes q and block scale.
__device__ __forceinline__ float stats_round_nvfp4(const StatsJob &job, int64_t o, int64_t i, const float *z, TensorScale ts, LaneBlock q) {
    const OperandSpec &s = job.spec;
    LaneBlock v;
    float most[1] = {stats_block16(job, z, v)}, c, unused[2][1];
    uint32_t sb[1] = {0u};
    const uint64_t block = block_word_index(job.micro, job.outer, job.inner / 16, o, i / 16);
    if (s.block == BLOCK_16X16) {
        sb[0] = stats_square_scale(job, o, i, ts);
        four_six_try(v, sb, ts, q, unused);
    } else if (s.rounding == ROUND_RTN) nvfp4_rtn_block(v, most, ts, q, sb);
    else if (s.rounding == ROUND_FOUR_SIX) four_six_block(v, most, ts, q, sb);
    else if (s.rounding == ROUND_SEARCH || s.rounding == ROUND_SEARCH_TRUE)
        search_block(v, most, ts, s.search == SEARCH_ALL, s.rounding == ROUND_SEARCH_TRUE, q, sb);
    else if (s.rounding == ROUND_SR) {
        LaneBlockBits u;
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
            const Philox4 p = rng_words4(job.words, block_word_index(job.micro, job.outer, job.inner, o, i + k) / 4);
            for (int j = 0; j < 4; j++) u[k + j][0] = p.w[j];
        }
        nvfp4_sr_block(v, most, ts, u, q, sb);
    } else if (s.rounding == ROUND_MS_EDEN) {
        uint32_t u[1] = {rng_word(job.words, block)};
        ms_eden_block(v, most, ts, u, q, sb);
    } else {
        stats_eden_codes(job, v, most[0], q, &c);
        sb[0] = ms_eden_posthoc_scale(c, ts.st, rng_word(job.words, block));
    }
    return e4m3_decode(sb[0]);
}
// A block of 32.
__device__ __forceinline__ float stats_round_mx(const StatsJob &job, int64_t o, int64_t i, const float *z, LaneBlock32 q) {
    LaneBlock32 v;
    LaneBlock32Bits u;                                                 // random words, or QuEST's mask
    uint32_t scale[1];
#pragma unroll
    for (int k = 0; k < 32; k++) v[k][0] = f32_mul(z[k], job.norm);
    if (job.spec.rounding == ROUND_QUEST) mx_quest_block(v, q, scale, u);
    else {
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
            const Philox4 p = rng_words4(job.words, block_word_index(job.micro, job.outer, job.inner, o, i + k) / 4);
            for (int j = 0; j < 4; j++) u[k + j][0] = p.w[j];
        }
        mx_sr_block(v, u, q, scale);
    }
    return e8m0_decode(scale[0]);
}
// A value of a format whose scale covers a row or a tensor: its code; *value: code x row scale; s: the scale.
__device__ __forceinline__ float stats_round_plain(const OperandSpec &spec, float z, PlainScale s, float *value) {
    if (spec.format == FORMAT_FLOAT) return *value = spec.rounding == ROUND_BF16 ? bf16_round(z) : z;
    const float scaled = f32_mul(z, s.inv);
    const float code = spec.format == FORMAT_E2M1 ? e2m1_round(scaled) : spec.format == FORMAT_E4M3 ? e4m3_round(scaled) : e5m2_round(scaled);
    *value = spec.format == FORMAT_E2M1 ? f32_mul(code, s.factor) : code;
    return code;
}
// v became q; -> whether it was clipped: its code is the format's largest, and q is smaller.
__device__ __forceinline__ bool stats_add(double *sum, double v, double q, float code, double top) {
    sum[SUM_ERROR] += (q - v) * (q - v);
    sum[SUM_SQUARE] += v * v;
    sum[SUM_NONZEROS] += v != 0;
    sum[SUM_ZEROS] += v != 0 && q == 0;
    sum[SUM_AMAX] = fmax(sum[SUM_AMAX], fabs(v));
    return fabs((double)code) == top && fabs(v) > fabs(q);
}
__device__ __forceinline__ double stats_peak(const StatsJob &job, StatsRun run) {
    double square = 0, most = 0;
    for (int i = 0; i < run.n; i++) {
        const double v = fabs((double)stats_value(job, run.o, run.first + i));
        square += v * v;
        most = fmax(most, v);
    }
    return square > 0 ? most / sqrt(square / run.n) : 0;
}
// Sums (the last MAXIMA: largest) of all threads' v, the same in all of them. Every thread takes part.
template <int COUNT, int MAXIMA> __device__ __forceinline__ void stats_reduce(double *v) {
    __shared__ double all[COUNT][STATS_THREADS];
#pragma unroll
    for (int s = 0; s < COUNT; s++) all[s][threadIdx.x] = v[s];
    for (int half = STATS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
#pragma unroll
        for (int s = 0; s < COUNT; s++) {
            const double a = all[s][threadIdx.x], b = all[s][threadIdx.x + half];
            all[s][threadIdx.x] = s < COUNT - MAXIMA ? a + b : fmax(a, b);
        }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < COUNT; s++) v[s] = all[s][0];
}
enum StatsFamily { STATS_NVFP4, STATS_MX, STATS_PLAIN };
template <StatsFamily FAMILY> static __global__ void __launch_bounds__(STATS_THREADS) stats_sum_kernel(const __grid_constant__ StatsJob job) {
    extern __shared__ float stats_shared[];
    const OperandSpec &spec = job.spec;
    const float amax = f32_from_bits(job.most[0]);
    TensorScale ts = nvfp4_tensor_scale(amax, job.override_, job.bound);
    if (stats_is_posthoc(spec)) ts.st = ms_eden_posthoc_tensor_scale(f32_from_bits(job.most[1]));
    const float largest = spec.format == FORMAT_E4M3 ? E4M3_MAX : spec.format == FORMAT_E5M2 ? E5M2_MAX : E2M1_MAX;
    PlainScale plain = plain_scale(amax, largest);
    float factor = FAMILY == STATS_NVFP4 ? ts.st : FAMILY == STATS_MX && spec.rounding == ROUND_SR ? MX_SR_FACTOR : 1.0f;
    if (spec.format == FORMAT_E4M3 || spec.format == FORMAT_E5M2) factor = plain.factor;
    if (spec.format != FORMAT_FLOAT && !(amax < INFINITY)) factor = f32_from_bits(0x7FC00000u);  // as the quantizers have it: all NaN
    const double top = spec.format == FORMAT_FLOAT ? (double)INFINITY : (double)largest;
    float *y = stats_shared + threadIdx.x * STATS_RUN_STRIDE;
    double sum[STATS_SUMS] = {0, 0, 0, 0, 0, 0, 0};
    for (int64_t k = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x; k < stats_runs(job); k += (int64_t)STATS_CTAS * STATS_THREADS) {
        const StatsRun run = stats_run(job, k);
        stats_load(job, run, false, y);
        const float *z = stats_rounded(job, run, y);
        sum[SUM_PEAK] = fmax(sum[SUM_PEAK], stats_peak(job, run));
        if (FAMILY == STATS_NVFP4)
            for (int b = 0; b < run.n; b += 16) {
                LaneBlock q;
                const float s = stats_round_nvfp4(job, run.o, run.first + b, z + b, ts, q);
                bool clips = false;
#pragma unroll
                for (int i = 0; i < 16; i++)
                    clips |= stats_add(sum, (double)y[b + i] * job.norm, (double)f32_mul(q[i][0], s) * factor, q[i][0], top);
                sum[SUM_CLIPPED] += clips;
            }
        else if (FAMILY == STATS_MX)
            for (int b = 0; b < run.n; b += 32) {
                LaneBlock32 q;
                const float s = stats_round_mx(job, run.o, run.first + b, z + b, q);
                bool clips = false;
#pragma unroll
                for (int i = 0; i < 32; i++)
                    clips |= stats_add(sum, (double)y[b + i] * job.norm, (double)f32_mul(q[i][0], s) * factor, q[i][0], top);
                sum[SUM_CLIPPED] += clips;
            }
        else {
            const PlainScale row = spec.format == FORMAT_E2M1 ? plain_scale(f32_from_bits(job.row_most[run.o]), largest) : plain;
            bool clips = false;
            for (int i = 0; i < run.n; i++) {
                float value;
                const float code = stats_round_plain(spec, f32_mul(z[i], job.norm), row, &value);
                clips |= stats_add(sum, (double)y[i] * job.norm, (double)value * factor, code, top);
            }
            if (clips) job.row_clips[run.o] = 1u;                      // from any of the row's runs
        }
    }
    stats_reduce<STATS_SUMS, 2>(sum);
    if (threadIdx.x == 0) for (int s = 0; s < STATS_SUMS; s++) job.partial[(int64_t)blockIdx.x * STATS_SUMS + s] = sum[s];
}
// One CTA: the CTAs' sums and the rows' clips -> out.
static __global__ void __launch_bounds__(STATS_THREADS) stats_finish_kernel(const __grid_constant__ StatsJob job, double *out) {
    double sum[STATS_SUMS] = {0, 0, 0, 0, 0, 0, 0};
    for (int c = threadIdx.x; c < STATS_CTAS; c += STATS_THREADS)
        for (int s = 0; s < STATS_SUMS; s++) {
            const double v = job.partial[(int64_t)c * STATS_SUMS + s];
            sum[s] = s < SUM_AMAX ? sum[s] + v : fmax(sum[s], v);
        }
    for (int64_t o = threadIdx.x; job.block == 1 && o < job.outer; o += STATS_THREADS) sum[SUM_CLIPPED] += job.row_clips[o];
    stats_reduce<STATS_SUMS, 2>(sum);
    if (threadIdx.x != 0) return;
    out[0] = sum[SUM_SQUARE] > 0 ? sum[SUM_ERROR] / sum[SUM_SQUARE] : 0;
    out[1] = sum[SUM_NONZEROS] > 0 ? sum[SUM_ZEROS] / sum[SUM_NONZEROS] : 0;
    out[2] = sum[SUM_CLIPPED] / (double)(job.outer * (job.block > 1 ? job.inner / job.block : 1));
    out[3] = sum[SUM_AMAX] * (job.x_factor ? *job.x_factor : 1.0f);
    out[4] = sum[SUM_PEAK];
}

FN int64_t stats_rows_bytes(int64_t outer) { return (outer * 8 + 255) / 256 * 256; }
#define STATS_HEAD_BYTES (STATS_CTAS * STATS_SUMS * 8 + 256)           // partial sums; most, limits
FN int64_t stats_workspace_bytes(int64_t rows, int64_t cols) {
    return STATS_HEAD_BYTES + stats_rows_bytes(rows > cols ? rows : cols) + clamp_workspace_bytes();
}
// Whether stats_sum_kernel rounds as spec says.
FN int stats_knows(const OperandSpec *s) {
    const int nearest = s->rounding == ROUND_RTN || s->rounding == ROUND_FOUR_SIX;
    if (s->format == FORMAT_NVFP4 && s->block == BLOCK_16X16) return nearest && !s->rotation;
    if (s->format == FORMAT_NVFP4) return s->block == BLOCK_1X16 && s->rounding >= ROUND_RTN && s->rounding <= ROUND_MS_EDEN_SEARCH;
    if (s->format == FORMAT_MXFP4) return s->block == BLOCK_1X32 && (s->rounding == ROUND_QUEST || s->rounding == ROUND_SR);
    if (s->format == FORMAT_FLOAT) return s->block == BLOCK_NONE && (s->rounding == ROUND_NONE || s->rounding == ROUND_BF16);
    return s->rounding == ROUND_RTN && s->block == (s->format == FORMAT_E2M1 ? BLOCK_ROW : BLOCK_TENSOR);
}
FN StatsJob stats_job(const OperandSpec *spec, EdenAddress at, int64_t rows, int64_t cols, int along_rows, void *workspace) {
    StatsJob j;
    memset(&j, 0, sizeof j);
    const int d = spec->rotation, unit = d > operand_block(spec) ? d : operand_block(spec);
    j.spec = *spec;
    j.block = operand_block(spec);
    j.outer = along_rows ? cols : rows; j.inner = along_rows ? rows : cols;
    j.outer_stride = along_rows ? 1 : cols; j.inner_stride = along_rows ? cols : 1;
    if (!stats_knows(spec))
        fatal("--quant-stats on the GPU knows no quantizer that rounds by %d to format %d in blocks of kind %d after a rotation of %d: measure with "
              "the CPU program", (int)spec->rounding, (int)spec->format, (int)spec->block, d);
    if (rows < 1 || cols < 1 || (d && (d < 2 || d > ROTATION_MAX || (d & (d - 1)))) || j.inner % unit)
        fatal("cannot measure a tensor of %lld x %lld along its %s: the length along the blocks must be a multiple of %d", (long long)rows,
              (long long)cols, along_rows ? "rows" : "columns", unit);
    const int purpose = spec->rounding == ROUND_SR ? RNG_VALUE : RNG_SCALE;
    j.words = rng_stream(at.seed, at.step, rng_address(purpose, at.layer, at.linear, at.gemm, at.operand, at.rank));
    j.micro = at.micro;
    if (d && spec->signs == SIGNS_RANDOM) rotation_bits(at.seed, at.step, at.layer, at.linear, at.gemm, j.sign_bits);
    j.norm = d && rotation_is_normalised(spec) ? rotation_norm(d) : 1.0f;
    j.override_ = spec->rounding == ROUND_SR ? SR_OVERRIDE : spec->rounding == ROUND_MS_EDEN ? EDEN_OVERRIDE : 1.0f;
    j.bound = spec->rounding == ROUND_RTN || spec->rounding == ROUND_SR ? RTN_BOUND : spec->rounding == ROUND_MS_EDEN ? EDEN_BOUND : FOUR_SIX_BOUND;
    j.partial = (double *)workspace;
    j.most = (uint32_t *)(j.partial + STATS_CTAS * STATS_SUMS);
    j.limits = (float *)(j.most + 2);
    j.row_most = (uint32_t *)((char *)workspace + STATS_HEAD_BYTES);
    j.row_clips = j.row_most + j.outer;
    return j;
}
FN void stats_operand_launch(cudaStream_t stream, const OperandSpec *spec, EdenAddress at, const bf16 *x, const float *row_factor,
                             const float *x_factor, int64_t rows, int64_t cols, int along_rows, void *workspace, double *out) {
    StatsJob job = stats_job(spec, at, rows, cols, along_rows, workspace);
    job.x = x; job.row_factor = row_factor; job.x_factor = x_factor;
    const int64_t row_bytes = stats_rows_bytes(job.outer);
    if (spec->clamp_percent && (row_factor || job.block > 1))
        fatal("--quant-stats on the GPU measures no clamp before blocks or of a row-scaled tensor: measure with the CPU program");
    CUDA_CHECK(cudaMemsetAsync(job.most, 0, 256 + (size_t)row_bytes, stream));
    if (spec->clamp_percent) clamp_limits_launch(stream, x, rows * cols, spec->clamp_percent, job.limits, (char *)job.row_most + row_bytes);
    const int run_bytes = STATS_THREADS * STATS_RUN_STRIDE * (int)sizeof(float), bytes = spec->clamp_percent ? 2 * run_bytes : run_bytes;
    stats_most_kernel<<<STATS_CTAS, STATS_THREADS, run_bytes, stream>>>(job);
    if (spec->format == FORMAT_NVFP4) stats_sum_kernel<STATS_NVFP4><<<STATS_CTAS, STATS_THREADS, bytes, stream>>>(job);
    else if (spec->format == FORMAT_MXFP4) stats_sum_kernel<STATS_MX><<<STATS_CTAS, STATS_THREADS, bytes, stream>>>(job);
    else {
        CUDA_CHECK(cudaFuncSetAttribute(stats_sum_kernel<STATS_PLAIN>, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * run_bytes));
        stats_sum_kernel<STATS_PLAIN><<<STATS_CTAS, STATS_THREADS, bytes, stream>>>(job);
    }
    stats_finish_kernel<<<1, STATS_THREADS, 0, stream>>>(job, out);
    CUDA_LAUNCHED();
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

struct StatsTensor { const void *p; int is_bf16; };
__device__ __forceinline__ float stats_element(StatsTensor t, int64_t i) {
    return t.is_bf16 ? __bfloat162float(((const bf16 *)t.p)[i]) : ((const float *)t.p)[i];
}
static __global__ void __launch_bounds__(STATS_THREADS) stats_gradient_kernel(StatsTensor got, StatsTensor exact, StatsTensor before, int64_t count,
                                                                                      double *partial) {
    double sum[GRADIENT_SUMS] = {0, 0, 0, 0};
    for (int64_t i = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x; i < count; i += (int64_t)STATS_CTAS * STATS_THREADS) {
        const float all = stats_element(got, i);
        const double g = before.p ? f32_sub(all, stats_element(before, i)) : all, e = stats_element(exact, i);
        sum[SUM_GG] += g * g;
        sum[SUM_EE] += e * e;
        sum[SUM_GE] += g * e;
        sum[SUM_DD] += (g - e) * (g - e);
    }
    stats_reduce<GRADIENT_SUMS, 0>(sum);
    if (threadIdx.x == 0) for (int s = 0; s < GRADIENT_SUMS; s++) partial[blockIdx.x * GRADIENT_SUMS + s] = sum[s];
}
static __global__ void __launch_bounds__(STATS_THREADS) stats_gradient_finish_kernel(const double *partial, double *out) {
    double sum[GRADIENT_SUMS] = {0, 0, 0, 0};
    for (int c = threadIdx.x; c < STATS_CTAS; c += STATS_THREADS)
        for (int s = 0; s < GRADIENT_SUMS; s++) sum[s] += partial[c * GRADIENT_SUMS + s];
    stats_reduce<GRADIENT_SUMS, 0>(sum);
    if (threadIdx.x != 0) return;
    out[0] = sum[SUM_GG] > 0 && sum[SUM_EE] > 0 ? sum[SUM_GE] / sqrt(sum[SUM_GG] * sum[SUM_EE]) : 0;
    out[1] = sum[SUM_EE] > 0 ? sqrt(sum[SUM_DD] / sum[SUM_EE]) : 0;
}
FN void stats_gradient_launch(cudaStream_t stream, const void *got, int got_bf16, const void *exact, int exact_bf16, const void *before,
                              int before_bf16, int64_t count, void *workspace, double *out) {
    const StatsTensor g = {got, got_bf16}, e = {exact, exact_bf16}, b = {before, before_bf16};
    stats_gradient_kernel<<<STATS_CTAS, STATS_THREADS, 0, stream>>>(g, e, b, count, (double *)workspace);
    stats_gradient_finish_kernel<<<1, STATS_THREADS, 0, stream>>>((const double *)workspace, out);
    CUDA_LAUNCHED();
}

#endif
