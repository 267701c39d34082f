// cuda/crossentropy.cuh: softmax cross-entropy of BF16 logits, forward and backward in one pass, in place.
//
//   loss = log(sum_j e^(x_j)) - x_target;   dlogit_j = (e^(x_j) / sum - [j = target]) * scale
//
// A block owns a row and keeps it in registers: one read and one write a logit. While it works on one row, its next row is on
// the way into shared memory, so that the memory system never waits for the block's barriers. Vocabularies whose row does not fit
// are read twice (the second time mostly from L2).
#ifndef LLMC_CUDA_CROSSENTROPY_CUH
#define LLMC_CUDA_CROSSENTROPY_CUH

#include <cuda_pipeline_primitives.h>

#include "elementwise.cuh"

// max: the largest logit so far; sum: of e^(x - max). Nothing yet: max = -inf, sum = 0.
struct SoftmaxSum { float max, sum; };

// The sum of both. A NaN reaches `sum` and so the loss.
__device__ __forceinline__ SoftmaxSum softmax_join(SoftmaxSum a, SoftmaxSum b) {
    const float m = fmaxf(a.max, b.max);
    SoftmaxSum r;
    r.max = m;
    r.sum = m == -INFINITY ? a.sum + b.sum  // both empty (or rows of -inf, which give NaN below)
                           : a.sum * exp2_fast((a.max - m) * LOG2_E) + b.sum * exp2_fast((b.max - m) * LOG2_E);
    return r;
}
// Over the warp, in a fixed order, the same in every lane.
__device__ __forceinline__ SoftmaxSum softmax_warp_join(SoftmaxSum s) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        SoftmaxSum other;
        other.max = __shfl_xor_sync(0xFFFFFFFFu, s.max, o);
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, s.sum, o);
        s = softmax_join(s, other);
    }
    return s;
}
// Over the block, likewise. Holds one barrier; `warps` must not be reused before the next.
template <int THREADS>
__device__ __forceinline__ SoftmaxSum softmax_block_join(SoftmaxSum s, SoftmaxSum warps[THREADS / 32]) {
    s = softmax_warp_join(s);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    s.max = -INFINITY; s.sum = 0.0f;
    if (threadIdx.x % 32 < THREADS / 32) s = warps[threadIdx.x % 32];
    return softmax_warp_join(s);
}
// One vector's values into a thread's running sum, which is rescaled once a vector.
__device__ __forceinline__ SoftmaxSum softmax_add8(SoftmaxSum s, Bf16x8 v) {
    float x[8];
    unpack8(v, x);
    const float m = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
    const float max = fmaxf(s.max, m), offset = -max * LOG2_E;
    float sum = max == -INFINITY ? s.sum : s.sum * exp2_fast((s.max - max) * LOG2_E);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += exp2_fast(fmaf(x[i], LOG2_E, offset));
    s.max = max; s.sum = sum;
    return s;
}
// e^(x - max) * factor for a vector.
__device__ __forceinline__ Bf16x8 softmax_gradient8(Bf16x8 v, float offset, float factor) {
    float x[8];
    unpack8(v, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = exp2_fast(fmaf(x[i], LOG2_E, offset)) * factor;
    return pack8(x);
}
// The thread that wrote the target's vector takes scale off the target's probability and notes the loss.
__device__ __forceinline__ void crossentropy_finish(bf16 *dlogit, float *loss, float x_target, SoftmaxSum s, float scale) {
    *loss = (s.max - x_target) + logf(s.sum);
    if (dlogit) *dlogit = __float2bfloat16_rn((exp2_fast(fmaf(x_target, LOG2_E, -s.max * LOG2_E)) / s.sum - 1.0f) * scale);
}

// Row in registers, next row prefetched. A thread owns vectors threadIdx.x + i*THREADS of the row, in memory and in shared memory: it
// reads back what it fetched itself, so the prefetch needs no barrier. Dynamic shared memory: vocab * 2 bytes.
// Floor: 4 bytes a logit (BACKWARD), 2 (forward).
template <int THREADS, int VECTORS, bool BACKWARD>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) crossentropy_kernel(bf16 *logits, float *losses, const int32_t *__restrict__ targets,
                                                                             int64_t rows, int vocab, float scale) {
    extern __shared__ uint4 next_row[];
    __shared__ SoftmaxSum warps[2][THREADS / 32];
    const int vectors = vocab / 8, own = threadIdx.x;
    auto prefetch = [=](int64_t row) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (row < rows && own + i * THREADS < vectors)
            __pipeline_memcpy_async(next_row + own + i * THREADS, logits + row * vocab + (int64_t)(own + i * THREADS) * 8, 16);
        __pipeline_commit();
    };
    int64_t row = blockIdx.x;
    prefetch(row);
    for (int turn = 0; row < rows; row += gridDim.x, turn ^= 1) {
        const int target = targets[row], target_vector = target / 8;
        bf16 *const x = logits + row * vocab;
        __pipeline_wait_prior(0);
        Bf16x8 v[VECTORS];
        SoftmaxSum s = {-INFINITY, 0.0f};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (own + i * THREADS < vectors) v[i].u = next_row[own + i * THREADS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) if (own + i * THREADS < vectors) s = softmax_add8(s, v[i]);
        float x_target = 0.0f;
        const bool owns_target = target_vector % THREADS == own;
        if (owns_target) x_target = __bfloat162float(((const bf16 *)next_row)[target]);
        s = softmax_block_join<THREADS>(s, warps[turn]);
        prefetch(row + gridDim.x);  // the row is in registers; its place is free
        if (BACKWARD) {
            const float offset = -s.max * LOG2_E, factor = scale / s.sum;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) if (own + i * THREADS < vectors)
                store8(x + (int64_t)(own + i * THREADS) * 8, softmax_gradient8(v[i], offset, factor));
        }
        if (owns_target) crossentropy_finish(BACKWARD ? x + target : NULL, losses + row, x_target, s, scale);
    }
}

// Any vocabulary: the row is read twice. Floor: 6 bytes a logit, of which 4 from DRAM while the rows in work fit in L2.
template <bool BACKWARD>
__global__ void __launch_bounds__(1024) crossentropy_two_reads_kernel(bf16 *logits, float *losses, const int32_t *__restrict__ targets,
                                                                    int64_t rows, int vocab, float scale) {
    __shared__ SoftmaxSum warps[2][32];
    const int vectors = vocab / 8, own = threadIdx.x;
    int turn = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        bf16 *const x = logits + row * vocab;
        const int target = targets[row];
        const bool owns_target = target / 8 % 1024 == own;
        const float x_target = owns_target ? __bfloat162float(x[target]) : 0.0f;
        SoftmaxSum s = {-INFINITY, 0.0f};
#pragma unroll 4
        for (int i = own; i < vectors; i += 1024) s = softmax_add8(s, load8(x + (int64_t)i * 8));
        s = softmax_block_join<1024>(s, warps[turn]);
        if (BACKWARD) {
            const float offset = -s.max * LOG2_E, factor = scale / s.sum;
#pragma unroll 4
            for (int i = own; i < vectors; i += 1024) store8(x + (int64_t)i * 8, softmax_gradient8(load8_streaming(x + (int64_t)i * 8), offset, factor));
        }
        if (owns_target) crossentropy_finish(BACKWARD ? x + target : NULL, losses + row, x_target, s, scale);
    }
}

// *sum += losses in float64: a fixed partition over one block's threads, then a fixed tree.
__global__ void __launch_bounds__(1024) loss_sum_kernel(double *sum, const float *__restrict__ losses, int64_t rows) {
    __shared__ double parts[1024];
    double part = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < rows; i += 1024) part += (double)losses[i];
    parts[threadIdx.x] = part;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *sum += parts[0];
}

template <int THREADS, int VECTORS, bool BACKWARD>
static void crossentropy_launch_registers(bf16 *logits, float *losses, const int32_t *targets, int64_t rows, int vocab, float scale, cudaStream_t stream) {
    auto kernel = crossentropy_kernel<THREADS, VECTORS, BACKWARD>;
    const size_t shared = (size_t)vocab * sizeof(bf16);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    kernel<<<persistent_blocks(kernel, THREADS, shared, rows), THREADS, shared, stream>>>(logits, losses, targets, rows, vocab, scale);
}
template <bool BACKWARD>
static void crossentropy_launch_two_reads(bf16 *logits, float *losses, const int32_t *targets, int64_t rows, int vocab, float scale, cudaStream_t stream) {
    auto kernel = crossentropy_two_reads_kernel<BACKWARD>;
    kernel<<<persistent_blocks(kernel, 1024, 0, rows), 1024, 0, stream>>>(logits, losses, targets, rows, vocab, scale);
}
template <bool BACKWARD>
static void crossentropy_launch(bf16 *logits, float *losses, const int32_t *targets, int64_t rows, int vocab, float scale, cudaStream_t stream) {
    if (vocab < 8 || vocab % 8) fatal("cross-entropy over %d logits: the vocabulary must be a multiple of 8", vocab);
    if (rows == 0) return;
    int device, shared;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const int64_t fits = (shared - 1024) / 2;  // 1 KiB: the block's own sums
    if (vocab > 65536 || vocab > fits) crossentropy_launch_two_reads<BACKWARD>(logits, losses, targets, rows, vocab, scale, stream);
    else if (vocab > 32768) crossentropy_launch_registers<1024, 8, BACKWARD>(logits, losses, targets, rows, vocab, scale, stream);
    else if (vocab > 8192) crossentropy_launch_registers<512, 8, BACKWARD>(logits, losses, targets, rows, vocab, scale, stream);
    else if (vocab > 1024) crossentropy_launch_registers<256, 4, BACKWARD>(logits, losses, targets, rows, vocab, scale, stream);
    else crossentropy_launch_registers<64, 2, BACKWARD>(logits, losses, targets, rows, vocab, scale, stream);
    CUDA_LAUNCHED();
}

// logits (rows, vocab) bf16 become dlogits in place; losses (rows) float32. targets (rows) int32 on the device, each in
// [0, vocab): the loader's promise. vocab a multiple of 8. scale: 1 / (micro_batches * B * T). 2 B read, 2 written a logit.
FN void crossentropy_backward_launch(bf16 *logits, float *losses, const int32_t *targets, int64_t rows, int vocab, float scale, cudaStream_t stream) {
    crossentropy_launch<true>(logits, losses, targets, rows, vocab, scale, stream);
}
// Losses alone: the logits stay as they are. 2 B read a logit.
FN void crossentropy_forward_launch(float *losses, const bf16 *logits, const int32_t *targets, int64_t rows, int vocab, cudaStream_t stream) {
    crossentropy_launch<false>(const_cast<bf16 *>(logits), losses, targets, rows, vocab, 0.0f, stream);
}
// *sum (device, float64) += losses, in a fixed order. The caller zeroes it at the step's beginning.
FN void loss_sum_launch(double *sum, const float *losses, int64_t rows, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(sum, losses, rows);
    CUDA_LAUNCHED();
}

#endif
