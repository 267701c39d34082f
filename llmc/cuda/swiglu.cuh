// cuda/swiglu.cuh: SwiGLU from the fused gate+up product: h = silu(gate) * up, silu(g) = g * sigmoid(g); forward and backward.
// Source: Shazeer, "GLU variants improve transformer" (arXiv 2002.05202).
#ifndef LLMC_CUDA_SWIGLU_CUH
#define LLMC_CUDA_SWIGLU_CUH

#include "elementwise.cuh"

// 1/(1 + e^-x). e^-x overflows to infinity for x < -88, and the quotient is then 0 as it should be.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// A thread owns 8 values of h: two 16-byte loads, one store. Floor: 6 bytes a value of h.
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) swiglu_forward_kernel(bf16 *__restrict__ h, float *amax, const bf16 *__restrict__ gate_up,
                                                                            int64_t rows, int ffn) {
    const int64_t stride = (int64_t)gridDim.x * ELEMENTWISE_THREADS;
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, stride, ffn / 8);
    AmaxPairs largest;
    for (; at.row < rows; at.next()) {
        const bf16 *gate = gate_up + at.row * 2 * ffn + at.col * 8;
        float g[8], u[8];
        unpack8(load8(gate), g);  // backward reads gate and up again, much later
        unpack8(load8(gate + ffn), u);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
        const Bf16x8 out = pack8(g);
        largest.add(out);
        store8(h + at.row * ffn + at.col * 8, out);
    }
    if (amax) block_amax_flush(largest.value(), amax);
}

// d gate = dh * up * s * (1 + gate * (1 - s)), d up = dh * gate * s, s = sigmoid(gate). Pointers may alias as the launch
// function says, so none is __restrict__; a thread reads its values before it writes them. Floor: 10 bytes a value of h, 12 with h.
template <bool WRITE_H>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) swiglu_backward_kernel(bf16 *dgate_up, bf16 *h, const bf16 *dh, const bf16 *gate_up,
                                                                             int64_t rows, int ffn) {
    const int64_t stride = (int64_t)gridDim.x * ELEMENTWISE_THREADS;
    VectorCursor at((int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, stride, ffn / 8);
    for (; at.row < rows; at.next()) {
        const int64_t gate_at = at.row * 2 * ffn + at.col * 8, h_at = at.row * ffn + at.col * 8;
        float g[8], u[8], d[8], dg[8], du[8];
        const Bf16x8 gate = load8_streaming(gate_up + gate_at), up = load8_streaming(gate_up + gate_at + ffn), grad = load8_streaming(dh + h_at);
        unpack8(gate, g); unpack8(up, u); unpack8(grad, d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float s = sigmoid(g[i]), silu = g[i] * s;
            dg[i] = d[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
            du[i] = d[i] * silu;
            if (WRITE_H) g[i] = silu * u[i];
        }
        store8(dgate_up + gate_at, pack8(dg));
        store8(dgate_up + gate_at + ffn, pack8(du));
        if (WRITE_H) store8(h + h_at, pack8(g));
    }
}

static void swiglu_check(int64_t rows, int ffn) {
    if (rows < 0 || ffn < 8 || ffn % 8) fatal("SwiGLU of %lld rows, ffn %d: ffn must be a multiple of 8", (long long)rows, ffn);
}

// h (rows, ffn) bf16 = silu(gate) * up; gate_up (rows, 2 ffn) bf16: gate, then up. amax (device float, nullable): max with
// |h| as stored; the caller zeroes it first. ffn a multiple of 8. 4 B read, 2 written a value of h.
FN void swiglu_forward_launch(bf16 *h, float *amax, const bf16 *gate_up, int64_t rows, int ffn, cudaStream_t stream) {
    swiglu_check(rows, ffn);
    if (rows == 0) return;
    const int blocks = persistent_blocks(swiglu_forward_kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * (ffn / 8), ELEMENTWISE_THREADS), 8);
    swiglu_forward_kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(h, amax, gate_up, rows, ffn);
    CUDA_LAUNCHED();
}

// dgate_up (rows, 2 ffn) from dh (rows, ffn) and gate_up; dgate_up may be gate_up. h (nullable, may be dh): the forward's
// output once more, for the wgrad of the down projection. 6 B read, 4 (with h 6) written a value of h.
FN void swiglu_backward_launch(bf16 *dgate_up, bf16 *h, const bf16 *dh, const bf16 *gate_up, int64_t rows, int ffn, cudaStream_t stream) {
    swiglu_check(rows, ffn);
    if (rows == 0) return;
    auto kernel = h ? swiglu_backward_kernel<true> : swiglu_backward_kernel<false>;
    const int blocks = persistent_blocks(kernel, ELEMENTWISE_THREADS, 0, ceil_div(rows * (ffn / 8), ELEMENTWISE_THREADS), 8);
    kernel<<<blocks, ELEMENTWISE_THREADS, 0, stream>>>(dgate_up, h, dh, gate_up, rows, ffn);
    CUDA_LAUNCHED();
}

#endif
