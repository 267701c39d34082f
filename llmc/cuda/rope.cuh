// cuda/rope.cuh: rotary position embedding in the rotate-half convention (Su et al., arXiv 2104.09864; pairs (i, i + D/2) as in
// Hugging Face's Llama), in place on q and k. Backward turns by the opposite angle.
#ifndef LLMC_CUDA_ROPE_CUH
#define LLMC_CUDA_ROPE_CUH

#include <math.h>

#include "elementwise.cuh"

#define ROPE_HEADS 4  // in flight at a time

// A thread owns 8 pairs of one row and keeps their angles for all q and k heads: the table is read once a row, not once a head.
// DIRECTION: +1 forward, -1 backward. HEADS: loaded before any is stored. Floor: 4 bytes a value of q and k.
template <int DIRECTION, int HEADS>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS) rope_kernel(bf16 *qkv, const float2 *__restrict__ table, int64_t rows, int seq,
                                                                  int turned_heads, int row_width, int head_dim) {
    const int chunks = head_dim / 16;  // of 8 pairs
    const int64_t index = (int64_t)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x, row = index / chunks;
    if (row >= rows) return;
    const int chunk = (int)(index - row * chunks), t = (int)(row % seq);
    float c[8], s[8];
    const float4 *angles = (const float4 *)(table + (int64_t)t * (head_dim / 2) + chunk * 8);  // two (cos, sin) a load
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 a = __ldg(angles + i);
        c[2 * i] = a.x; s[2 * i] = DIRECTION * a.y; c[2 * i + 1] = a.z; s[2 * i + 1] = DIRECTION * a.w;
    }
    bf16 *x = qkv + row * row_width + chunk * 8;
    for (int head = 0; head < turned_heads; head += HEADS) {
        Bf16x8 lo[HEADS], hi[HEADS];
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (head + k < turned_heads) {
            lo[k] = load8(x + (head + k) * head_dim);
            hi[k] = load8(x + (head + k) * head_dim + head_dim / 2);
        }
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (head + k < turned_heads) {
            float a[8], b[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float p = lo[k].get(i), q = hi[k].get(i);
                a[i] = p * c[i] - q * s[i];
                b[i] = q * c[i] + p * s[i];
            }
            store8(x + (head + k) * head_dim, pack8(a));
            store8(x + (head + k) * head_dim + head_dim / 2, pack8(b));
        }
    }
}

// On the host: table (seq, head_dim/2) of (cos, sin) of t * theta^(-2i/head_dim), in float64, rounded to float32. The caller
// copies it to the device.
FN void rope_table_fill(float2 *table, int seq, int head_dim, float theta) {
    for (int i = 0; i < head_dim / 2; i++) {
        const double frequency = pow((double)theta, -2.0 * i / head_dim);
        for (int t = 0; t < seq; t++) table[(int64_t)t * (head_dim / 2) + i] = make_float2((float)cos(t * frequency), (float)sin(t * frequency));
    }
}

template <int DIRECTION, int HEADS = ROPE_HEADS>
static void rope_launch(bf16 *qkv, const float2 *table, int64_t rows, int seq, int heads, int kv_heads, int head_dim, cudaStream_t stream) {
    if (head_dim < 16 || head_dim % 16) fatal("RoPE: head size %d must be a multiple of 16", head_dim);
    if (rows == 0) return;
    const int64_t threads = rows * (head_dim / 16);
    rope_kernel<DIRECTION, HEADS><<<(unsigned)ceil_div(threads, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, 0, stream>>>(
        qkv, table, rows, seq, heads + kv_heads, (heads + 2 * kv_heads) * head_dim, head_dim);
    CUDA_LAUNCHED();
}
// In place on the q and k heads of qkv (rows, (heads + 2 kv_heads) * head_dim) bf16: q heads, k heads, v heads (not touched).
// Row = b * seq + t. table: rope_table_fill()'s, on the device. 2 B read, 2 written a value of q and k.
FN void rope_forward_launch(bf16 *qkv, const float2 *table, int64_t rows, int seq, int heads, int kv_heads, int head_dim, cudaStream_t stream) {
    rope_launch<1>(qkv, table, rows, seq, heads, kv_heads, head_dim, stream);
}
// The same shapes; dqkv becomes the gradient before the rotation.
FN void rope_backward_launch(bf16 *dqkv, const float2 *table, int64_t rows, int seq, int heads, int kv_heads, int head_dim, cudaStream_t stream) {
    rope_launch<-1>(dqkv, table, rows, seq, heads, kv_heads, head_dim, stream);
}

#endif
