// swiglu.cu: ladder of SwiGLU, forward and backward.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o swiglu dev/cuda/swiglu.cu     Run: ./swiglu [--quick]
//
// 1. one thread a value: 2-byte loads, and amax by one atomic a warp
// 2. the trainer's (llmc/cuda/swiglu.cuh): 16-byte vectors, persistent grid, one amax atomic a block
#include "ladder_compare.cuh"

#include "../../llmc/cuda/swiglu.cuh"

__global__ void swiglu_forward_naive(bf16 *h, float *amax, const bf16 *gate_up, int64_t rows, int ffn) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float a = 0.0f;
    if (i < rows * ffn) {
        const int64_t at = i / ffn * 2 * ffn + i % ffn;
        const float g = __bfloat162float(gate_up[at]), u = __bfloat162float(gate_up[at + ffn]);
        h[i] = __float2bfloat16_rn(g / (1.0f + expf(-g)) * u);
        a = fabsf(__bfloat162float(h[i]));
    }
    a = warp_max(a);
    if (threadIdx.x % 32 == 0) atomic_max_nonneg(amax, a);
}
__global__ void swiglu_backward_naive(bf16 *dgate_up, const bf16 *dh, const bf16 *gate_up, int64_t rows, int ffn) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * ffn) return;
    const int64_t at = i / ffn * 2 * ffn + i % ffn;
    const float g = __bfloat162float(gate_up[at]), u = __bfloat162float(gate_up[at + ffn]), d = __bfloat162float(dh[i]);
    const float s = 1.0f / (1.0f + expf(-g));
    dgate_up[at] = __float2bfloat16_rn(d * u * s * (1.0f + g * (1.0f - s)));
    dgate_up[at + ffn] = __float2bfloat16_rn(d * g * s);
}
static void swiglu_forward_version(int version, bf16 *h, float *amax, const bf16 *gate_up, int64_t rows, int ffn) {
    if (version == 2) return swiglu_forward_launch(h, amax, gate_up, rows, ffn, 0);
    swiglu_forward_naive<<<(unsigned)ceil_div(rows * ffn, 256), 256>>>(h, amax, gate_up, rows, ffn);
    CUDA_LAUNCHED();
}
static void swiglu_backward_version(int version, bf16 *dgate_up, bf16 *h, const bf16 *dh, const bf16 *gate_up, int64_t rows, int ffn) {
    if (version == 2) return swiglu_backward_launch(dgate_up, h, dh, gate_up, rows, ffn, 0);
    swiglu_backward_naive<<<(unsigned)ceil_div(rows * ffn, 256), 256>>>(dgate_up, dh, gate_up, rows, ffn);
    CUDA_LAUNCHED();
}

// Against float64 on the host. Tolerance: one rounding of the result to BF16; in float32, 16 units for the quotient and the products,
// 3 |g| for e^-g (__expf: 2 + 1.16 |g| ulp), and what a quotient below 2^-126 loses when it becomes zero.
static void check_shape(int64_t rows, int ffn, float std) {
    const Bf16Host gate_up = host_gauss_bf16(rows * 2 * ffn, 1, std), grad = host_gauss_bf16(rows * ffn, 2, 1.0f);
    bf16 *d_gate_up = device_copy_bf16(gate_up), *d_grad = device_copy_bf16(grad);
    Bf16Host first_h;
    for (int version = 1; version <= 2; version++) {
        bf16 *h = device_poisoned<bf16>(rows * ffn), *dgate_up = device_poisoned<bf16>(rows * 2 * ffn), *again = device_poisoned<bf16>(rows * ffn);
        float *amax = device_poisoned<float>(1);
        CUDA_CHECK(cudaMemset(amax, 0, sizeof(float)));
        swiglu_forward_version(version, h, amax, d_gate_up, rows, ffn);
        swiglu_backward_version(version, dgate_up, again, d_grad, d_gate_up, rows, ffn);
        const Bf16Host got = host_copy_bf16(h, rows * ffn), got_d = host_copy_bf16(dgate_up, rows * 2 * ffn);
        Worst forward, gate, up;
        float largest = 0.0f;
        for (int64_t i = 0; i < rows * ffn; i++) {
            const int64_t at = i / ffn * 2 * ffn + i % ffn;
            const double g = bf16_decode(gate_up[at]), u = bf16_decode(gate_up[at + ffn]), d = bf16_decode(grad[i]), s = 1 / (1 + exp(-g));
            const double f32 = (16 + 3 * fabs(g)) * F32_UNIT, unit = BF16_UNIT + f32, lost = 0x1p-125 * (1 + fabs(g));
            forward.add(bf16_decode(got[i]), g * s * u, unit * fabs(g * s * u) + lost * fabs(u));
            const double slope = s * (1 + g * (1 - s));
            gate.add(bf16_decode(got_d[at]), d * u * slope, BF16_UNIT * fabs(d * u * slope) + f32 * fabs(d * u) * s * (1 + fabs(g)) + lost * fabs(d * u));
            up.add(bf16_decode(got_d[at + ffn]), d * g * s, unit * fabs(d * g * s) + lost * fabs(d));
            largest = std::max(largest, f32_abs(bf16_decode(got[i])));
        }
        char what[96];
        snprintf(what, sizeof what, "swiglu version %d, %lld x %d: ", version, (long long)rows, ffn);
        forward.report(std::string(what) + "h");
        gate.report(std::string(what) + "d gate");
        up.report(std::string(what) + "d up");
        const float got_amax = host_copy(amax, 1)[0];
        ladder_check(&ladder, got_amax == largest, "%samax is %g, the largest |h| %g", what, got_amax, largest);
        if (version == 2) {
            ladder_check(&ladder, host_copy_bf16(again, rows * ffn) == got, "%sbackward's h differs from forward's", what);
            swiglu_backward_launch(d_gate_up, d_grad, d_grad, d_gate_up, rows, ffn, 0);  // in place, both
            ladder_check(&ladder, host_copy_bf16(d_gate_up, rows * 2 * ffn) == got_d && host_copy_bf16(d_grad, rows * ffn) == got, "%sin place differs", what);
        }
        device_free(h, dgate_up, again, amax);
    }
    device_free(d_gate_up, d_grad);
}

static void time_shape(int64_t rows, int ffn) {
    char shape[64];
    snprintf(shape, sizeof shape, "swiglu, %lld rows, ffn %d", (long long)rows, ffn);
    ladder_heading(shape);
    const double values = (double)rows * ffn;
    bf16 *gate_up = device_gauss_bf16(rows * 2 * ffn, 1), *grad = device_gauss_bf16(rows * ffn, 2);
    bf16 *h = device_poisoned<bf16>(rows * ffn), *out = device_poisoned<bf16>(rows * 2 * ffn);
    float *amax = device_poisoned<float>(1);
    for (int version = 1; version <= 2; version++) {
        char name[64];
        snprintf(name, sizeof name, "%d forward%s", version, version == 2 ? " (trainer)" : "");
        ladder_time_row(name, 6 * values, [=] { swiglu_forward_version(version, h, amax, gate_up, rows, ffn); });
        snprintf(name, sizeof name, "%d backward%s", version, version == 2 ? " (trainer)" : "");
        ladder_time_row(name, 10 * values, [=] { swiglu_backward_version(version, out, NULL, grad, gate_up, rows, ffn); });
    }
    ladder_time_row("2 backward, h once more (trainer)", 12 * values, [=] { swiglu_backward_launch(out, h, grad, gate_up, rows, ffn, 0); });
    device_free(gate_up, grad, h, out, amax);
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    check_shape(1, 8, 1.0f);
    check_shape(37, 1792, 1.0f);
    check_shape(130, 264, 4.0f);
    check_shape(257, 512, 100.0f);  // e^-x overflows for many
    if (timed) {
        time_shape(65536, 1792);
        time_shape(65536, 2816);
        time_shape(16384, 5632);
    }
    return ladder_end();
}
