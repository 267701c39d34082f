// cuda/adamw.cuh: the optimizer's side of a step, without a word from the host: gradient norm, clip factor and finite flag, then
// AdamW over the whole flat parameter buffer in one launch. The update itself is adamw.h's, shared with the CPU.
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH

#include "../adamw.h"
#include "../rng.h"
#include "elementwise.cuh"

#define GRAD_NORM_BLOCKS 1024  // a constant, not the device's size: the same sum on every card

// What the step's end knows, on the device; the host copies it one step late for StepResult.
typedef struct {
    float loss;        // loss_sum[0] * loss_scale
    float norm;        // global gradient norm before clipping
    float scale;       // what AdamW multiplies gradients with: min(1, clip/norm), 1 when clip is 0
    int32_t finite;    // 0: loss or norm is NaN or infinite; adamw_launch then leaves parameters, m and v as they are
    int32_t culprit;   // 1 + the first rank whose own loss is not finite, 0: none
} StepStats;

// Which rank was the first whose loss is not finite, by a sum over ranks in any order: rank r adds 4^-r, and no sum of later ranks' marks
// reaches its exponent. Rank 537 and later have no mark.
HD double culprit_mark(double loss, int rank) { return isfinite(loss) ? 0.0 : ldexp(1.0, -2 * rank); }
HD int culprit_first(double marks) { return marks > 0.0 ? 1 - ilogb(marks) / 2 : 0; }

// A run of the flat parameter buffer. In the order of memory; offsets multiples of 128, as in ParamTable; a segment reaches to the
// next one's offset (a parameter's padding belongs to it).
typedef struct {
    int64_t offset;
    int32_t decay;         // weight decay applies
    int32_t amax_slot;     // index into AdamWBuffers.amax, -1: none
} AdamWSegment;

// Gradients of a flat parameter buffer, in its order: float32, but for elements bf16_from .. bf16_to - 1 (multiples of 128), which
// are BF16. Equal: all float32.
typedef struct {
    void *base;
    int64_t bf16_from, bf16_to;
} Gradients;

HD int gradient_is_bf16(const Gradients *g, int64_t element) { return element >= g->bf16_from && element < g->bf16_to; }
// Bytes before an element; with the element count, of the whole buffer.
HD int64_t gradient_bytes(const Gradients *g, int64_t element) {
    const int64_t past = element < g->bf16_to ? element : g->bf16_to, halved = past > g->bf16_from ? past - g->bf16_from : 0;
    return 4 * element - 2 * halved;
}
HD void *gradient_at(const Gradients *g, int64_t element) { return (char *)g->base + gradient_bytes(g, element); }

typedef struct {
    bf16 *params;                  // (count) the master weights, or, with masters, the BF16 working copy
    float *masters;                // NULL: params are the masters, rounded stochastically
    float *m, *v;                  // (count) float32
    Gradients grads;               // (count)
    int64_t count;                 // a multiple of 128
    const AdamWSegment *segments;  // (segment_count) on the device
    int segment_count;
    float *amax;                   // (amax_count) on the device: max |weight| as stored in params, of each slot
    int amax_count;
    int64_t first;                 // 0, or (ZeRO-1) a multiple of 128: only elements first .. first + count - 1 are updated, and m and v begin there
} AdamWBuffers;

__device__ __forceinline__ float4 widen4(uint2 u) {
    return make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xFFFF0000u), __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xFFFF0000u));
}
// Four gradients from element e (a multiple of 4) on, read once.
template <bool MIXED>
__device__ __forceinline__ float4 gradient4(const Gradients &g, int64_t e) {
    if (!MIXED) return __ldcs((const float4 *)g.base + e / 4);
    const void *const at = gradient_at(&g, e);
    return gradient_is_bf16(&g, e) ? widen4(__ldcs((const uint2 *)at)) : __ldcs((const float4 *)at);
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradient norm

__device__ __forceinline__ double squares4(float4 g) {
    return (double)(g.x * g.x + g.y * g.y + (g.z * g.z + g.w * g.w));
}
// Sum of a double over the block (blockDim.x a power of two, at most 1024), in a fixed tree; the result is thread 0's alone, which
// holds it in a register: nothing makes the others wait for what lies in shared memory. Once a kernel.
__device__ __forceinline__ double block_sum_f64(double x) {
    __shared__ double parts[1024];
    parts[threadIdx.x] = x;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] = x += parts[threadIdx.x + half];
    }
    return x;
}
// partials (GRAD_NORM_BLOCKS), added to or not: of elements first .. first + count - 1, sums of squares, four at a time in float32, those in float64. MIXED: some gradients are BF16.
// A square above float32's range makes the norm infinite. Floor: 4 bytes a value (BF16: 2).
template <bool MIXED>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) grad_norm_partial_kernel(double *partials, Gradients grads, int64_t first, int64_t count, int add) {
    double sum = 0.0;
    const int64_t stride = (int64_t)GRAD_NORM_BLOCKS * ELEMENTWISE_THREADS, vectors = count / 4;
#pragma unroll 4
    for (int64_t i = (int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x; i < vectors; i += stride) sum += squares4(gradient4<MIXED>(grads, first + i * 4));
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = add ? partials[blockIdx.x] + sum : sum;
}
__global__ void __launch_bounds__(GRAD_NORM_BLOCKS) grad_norm_finish_kernel(StepStats *stats, const double *partials, float clip, float loss_limit,
                                                                           float norm_limit, const double *loss_sum, float loss_scale) {
    const double norm = sqrt(block_sum_f64(partials[threadIdx.x]));
    if (threadIdx.x > 0) return;
    StepStats s;
    s.loss = loss_sum ? (float)(loss_sum[0] * (double)loss_scale) : 0.0f;
    s.culprit = loss_sum ? culprit_first(loss_sum[1]) : 0;
    s.norm = (float)norm;
    s.scale = clip > 0.0f && norm > clip ? (float)(clip / norm) : 1.0f;
    s.finite = isfinite(s.norm) && isfinite(s.loss) && s.loss <= loss_limit && s.norm <= norm_limit;
    *stats = s;
}

FN int gradients_mixed(const AdamWBuffers *b) { return b->grads.bf16_from < b->grads.bf16_to; }
FN size_t grad_norm_scratch_bytes(void) { return GRAD_NORM_BLOCKS * sizeof(double); }

// The two halves of grad_norm_launch: squares of some elements into scratch (add: to what is there), and stats from scratch.
FN void grad_norm_partial_launch(const AdamWBuffers *b, int64_t first, int64_t count, int add, void *scratch, cudaStream_t stream) {
    auto kernel = gradients_mixed(b) ? grad_norm_partial_kernel<true> : grad_norm_partial_kernel<false>;
    kernel<<<GRAD_NORM_BLOCKS, ELEMENTWISE_THREADS, 0, stream>>>((double *)scratch, b->grads, first, count, add);
    CUDA_LAUNCHED();
}
FN void grad_norm_finish_launch(StepStats *stats, float clip, float loss_limit, float norm_limit, const double *loss_sum, float loss_scale,
                                const void *scratch, cudaStream_t stream) {
    grad_norm_finish_kernel<<<1, GRAD_NORM_BLOCKS, 0, stream>>>(stats, (const double *)scratch, clip, loss_limit, norm_limit, loss_sum, loss_scale);
    CUDA_LAUNCHED();
}
// stats (device) from all gradients, padding included (which is zero). clip: largest norm, 0: no clipping.
// loss_sum (device: 2 float64, the sum of losses and of culprit_mark(); nullable: loss 0) times loss_scale is the step's loss. scratch: grad_norm_scratch_bytes().
// A loss or norm above its limit (INFINITY: none) counts as not finite: no update. Sums in a fixed order. 4 B read a gradient (BF16: 2).
FN void grad_norm_launch(StepStats *stats, const AdamWBuffers *b, float clip, float loss_limit, float norm_limit, const double *loss_sum,
                         float loss_scale, void *scratch, cudaStream_t stream) {
    grad_norm_partial_launch(b, 0, b->count, 0, scratch, stream);
    grad_norm_finish_launch(stats, clip, loss_limit, norm_limit, loss_sum, loss_scale, scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW

// A warp's place in the segment table, and the largest weight it has seen of its segment. A warp works on 128 elements at a
// time, which lie in one segment.
struct SegmentCursor {
    const AdamWSegment *segments;
    float *amax;
    int count, index;
    AdamWSegment at;
    AmaxPairs largest;
    __device__ SegmentCursor(const AdamWBuffers &b) : segments(b.segments), amax(b.amax), count(b.segment_count), index(0), at(b.segments[0]) {}
    // One atomic a warp and segment, and none when the slot already holds more.
    __device__ __forceinline__ void flush() {
        if (at.amax_slot >= 0) {
            const float x = warp_max(largest.value());
            float *slot = amax + at.amax_slot;
            if (threadIdx.x % 32 == 0 && x > *(volatile float *)slot) atomic_max_nonneg(slot, x);
        }
        largest = AmaxPairs();
    }
    // Elements come in ascending order.
    __device__ __forceinline__ void enter(int64_t element) {
        if (index + 1 < count && element >= segments[index + 1].offset) {
            flush();
            while (index + 1 < count && element >= segments[index + 1].offset) index++;
            at = segments[index];
        }
    }
};

#define ADAMW_TILE (ELEMENTWISE_THREADS * 8)  // elements a block works on at a time: 256 a warp, two runs of 128

// First element of this thread's first run of 4; the second run is 128 further, the next tile gridDim.x tiles.
__device__ __forceinline__ int64_t adamw_first_element(void) {
    return (int64_t)blockIdx.x * ADAMW_TILE + threadIdx.x / 32 * 256 + threadIdx.x % 32 * 4;
}
__device__ __forceinline__ void weights_amax_pass(const AdamWBuffers &b) {
    SegmentCursor segment(b);
    for (int64_t first = adamw_first_element(); first - threadIdx.x % 32 * 4 < b.count; first += (int64_t)gridDim.x * ADAMW_TILE)
#pragma unroll
        for (int run = 0; run < 2; run++) {
            const int64_t e = first + run * 128;
            if (e - threadIdx.x % 32 * 4 >= b.count) break;
            segment.enter(e);
            const uint2 p = *(const uint2 *)(b.params + e);
            segment.largest.add(p.x); segment.largest.add(p.y);
        }
    segment.flush();
}

// The random words of a thread's two runs of four elements. Word w of the stream holds 16 bits of element 2w, then of 2w + 1. One
// Philox call gives 8 elements their bits, those of two neighbouring lanes: the even lane makes the call of the first run, the
// odd lane that of the second, and they swap halves. words[run][0..1].
__device__ __forceinline__ void master_words(RngStream random, int64_t element, uint32_t words[2][2]) {
    const bool odd = threadIdx.x & 1;
    const Philox4 p = rng_words4(random, (uint64_t)(element + (odd ? 128 : 0)) / 8);
    const uint32_t a = __shfl_xor_sync(0xFFFFFFFFu, odd ? p.w[0] : p.w[2], 1), b = __shfl_xor_sync(0xFFFFFFFFu, odd ? p.w[1] : p.w[3], 1);
    words[0][0] = odd ? a : p.w[0]; words[0][1] = odd ? b : p.w[1];
    words[1][0] = odd ? p.w[2] : a; words[1][1] = odd ? p.w[3] : b;
}

// MASTERS: float32 masters beside the BF16 params. MIXED: some gradients are BF16 (a warp's run of 128 is of one kind). Floor, bytes a
// parameter: params 2+2, m 4+4, v 4+4, gradient 4 = 24 (masters 4+4 instead of reading params: 30; BF16 gradients 2 less).
template <bool MASTERS, bool MIXED>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) adamw_kernel(AdamWBuffers b, AdamWScalars k, RngStream random, const StepStats *stats) {
    if (!stats->finite) {
        if (b.amax_count) weights_amax_pass(b);
        return;
    }
    const int64_t end = b.first + b.count;
    const float scale = stats->scale;
    const int lane4 = threadIdx.x % 32 * 4;
    SegmentCursor segment(b);
    for (int64_t first = b.first + adamw_first_element(); first - lane4 < end; first += (int64_t)gridDim.x * ADAMW_TILE) {
        uint2 p[2];
        float4 w[2], m[2], v[2], g[2];
#pragma unroll
        for (int run = 0; run < 2; run++) {
            const int64_t e = first + run * 128;
            if (e - lane4 >= end) continue;
            if (MASTERS) w[run] = __ldcs((const float4 *)(b.masters + e));
            else {
                p[run] = __ldcs((const uint2 *)(b.params + e));
                w[run] = widen4(p[run]);
            }
            m[run] = __ldcs((const float4 *)(b.m + (e - b.first)));
            v[run] = __ldcs((const float4 *)(b.v + (e - b.first)));
            g[run] = gradient4<MIXED>(b.grads, e);
        }
        uint32_t words[2][2];
        if (!MASTERS) master_words(random, first, words);
#pragma unroll
        for (int run = 0; run < 2; run++) {
            const int64_t e = first + run * 128;
            if (e - lane4 >= end) continue;
            segment.enter(e);
            float *const W = &w[run].x, *const M = &m[run].x, *const V = &v[run].x, *const G = &g[run].x;
#pragma unroll
            for (int i = 0; i < 4; i++) W[i] = adamw_update(k, W[i], f32_mul(G[i], scale), segment.at.decay, &M[i], &V[i]);
            if (MASTERS) p[run] = make_uint2(pack_bf16x2(W[0], W[1]), pack_bf16x2(W[2], W[3]));
            else {
                p[run].x = (uint32_t)bf16_encode_sr(W[0], words[run][0]) | (uint32_t)bf16_encode_sr(W[1], words[run][0] >> 16) << 16;
                p[run].y = (uint32_t)bf16_encode_sr(W[2], words[run][1]) | (uint32_t)bf16_encode_sr(W[3], words[run][1] >> 16) << 16;
            }
            segment.largest.add(p[run].x); segment.largest.add(p[run].y);
            __stcg((uint2 *)(b.params + e), p[run]);  // one 8-byte store, left in L2 for the quantizer
            if (MASTERS) __stcs((float4 *)(b.masters + e), w[run]);
            __stcs((float4 *)(b.m + (e - b.first)), m[run]);
            __stcs((float4 *)(b.v + (e - b.first)), v[run]);
        }
    }
    segment.flush();
}
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) weights_amax_kernel(AdamWBuffers b) { weights_amax_pass(b); }

FN void adamw_check(const AdamWBuffers *b) {
    if (b->count < 128 || b->count % 128 || b->segment_count < 1)
        fatal("AdamW over %lld parameters in %d segments: the count must be a positive multiple of 128", (long long)b->count, b->segment_count);
    if (b->grads.bf16_from % 128 || b->grads.bf16_to % 128)
        fatal("BF16 gradients of parameters %lld to %lld: both must be multiples of 128", (long long)b->grads.bf16_from, (long long)b->grads.bf16_to);
}

// One AdamW step over the whole buffer with gradients times stats->scale. k: adamw_scalars() of the step. seed, step: the stream of the
// stochastic rounding. Fills the amax slots with the new weights'. When !stats->finite only they are written.
FN void adamw_launch(const AdamWBuffers *b, AdamWScalars k, uint64_t seed, int64_t step, const StepStats *stats, cudaStream_t stream) {
    adamw_check(b);
    const RngStream words = rng_stream(seed, (uint32_t)step, rng_address(RNG_MASTER, 0, 0, 0, 0, 0));
    if (b->amax_count) CUDA_CHECK(cudaMemsetAsync(b->amax, 0, (size_t)b->amax_count * sizeof(float), stream));
    auto kernel = b->masters ? (gradients_mixed(b) ? adamw_kernel<true, true> : adamw_kernel<true, false>)
                             : (gradients_mixed(b) ? adamw_kernel<false, true> : adamw_kernel<false, false>);
    const int blocks = persistent_blocks(kernel, ELEMENTWISE_THREADS, 0, ceil_div(b->count, ADAMW_TILE));
    kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(*b, k, words, stats);
    CUDA_LAUNCHED();
}
// The amax slots of the weights as they are: after initial values, after loading a checkpoint. 2 B read a parameter.
FN void weights_amax_launch(const AdamWBuffers *b, cudaStream_t stream) {
    adamw_check(b);
    if (b->amax_count) CUDA_CHECK(cudaMemsetAsync(b->amax, 0, (size_t)b->amax_count * sizeof(float), stream));
    const int blocks = persistent_blocks(weights_amax_kernel, ELEMENTWISE_THREADS, 0, ceil_div(b->count, ADAMW_TILE));
    weights_amax_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(*b);
    CUDA_LAUNCHED();
}

#endif
