// rmsnorm.cu: ladder of the fused residual addition and RMSNorm, forward and backward.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o rmsnorm dev/cuda/rmsnorm.cu     Run: ./rmsnorm [--quick]
//
// 1. one block a row, 2-byte loads, the row read twice, gain gradient by a second pass over all rows
// 2. the trainer's (llmc/cuda/rmsnorm.cuh): the row in registers, 16-byte vectors, gain gradient kept in registers on the way
#include "ladder_compare.cuh"

#include "../../llmc/cuda/rmsnorm.cuh"

static const float EPS = 1e-5f;

__device__ float block_sum_naive(float x) {
    __shared__ float sums[8];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < 8; w++) x += sums[w];
    return x;
}
__global__ void rmsnorm_forward_naive(bf16 *residual_out, bf16 *normed, float *rstd, float *amax, const bf16 *residual_in, const bf16 *delta,
                                      const bf16 *gain, int width, float eps) {
    const int64_t base = (int64_t)blockIdx.x * width;
    float squares = 0.0f, largest = 0.0f;
    for (int c = threadIdx.x; c < width; c += 256) {
        const bf16 v = __float2bfloat16_rn(__bfloat162float(residual_in[base + c]) + __bfloat162float(delta[base + c]));
        residual_out[base + c] = v;
        squares += __bfloat162float(v) * __bfloat162float(v);
    }
    const float r = rsqrtf(block_sum_naive(squares) / (float)width + eps);
    for (int c = threadIdx.x; c < width; c += 256) {
        normed[base + c] = __float2bfloat16_rn(__bfloat162float(residual_out[base + c]) * r * __bfloat162float(gain[c]));
        largest = fmaxf(largest, fabsf(__bfloat162float(normed[base + c])));
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) atomic_max_nonneg(amax, largest);
}
__global__ void rmsnorm_backward_naive(bf16 *d_out, const bf16 *d_in, const bf16 *d_normed, const bf16 *residual, const float *rstd,
                                       const bf16 *gain, int width) {
    const int64_t base = (int64_t)blockIdx.x * width;
    const float r = rstd[blockIdx.x];
    float dot = 0.0f;
    for (int c = threadIdx.x; c < width; c += 256)
        dot += __bfloat162float(gain[c]) * __bfloat162float(d_normed[base + c]) * __bfloat162float(residual[base + c]) * r;
    const float s = block_sum_naive(dot) / (float)width;
    for (int c = threadIdx.x; c < width; c += 256)
        d_out[base + c] = __float2bfloat16_rn(__bfloat162float(d_in[base + c]) +
            r * (__bfloat162float(gain[c]) * __bfloat162float(d_normed[base + c]) - __bfloat162float(residual[base + c]) * r * s));
}
__global__ void rmsnorm_dgain_naive(float *dgain, const bf16 *d_normed, const bf16 *residual, const float *rstd, int64_t rows, int width) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    float sum = 0.0f;
    for (int64_t row = 0; row < rows; row++) sum += __bfloat162float(d_normed[row * width + c]) * __bfloat162float(residual[row * width + c]) * rstd[row];
    dgain[c] += sum;
}

// Every tensor of one forward and backward, on the device.
struct Tensors {
    bf16 *in, *delta, *gain, *residual, *normed, *d_in, *d_normed, *d_out, *again;
    float *rstd, *amax, *dgain;
    void *scratch;
};
static void forward_version(int version, const Tensors &t, int64_t rows, int width) {
    if (version == 2) return rmsnorm_forward_launch(t.residual, t.normed, t.rstd, t.amax, t.in, t.delta, t.gain, rows, width, EPS, 0);
    rmsnorm_forward_naive<<<(unsigned)rows, 256>>>(t.residual, t.normed, t.rstd, t.amax, t.in, t.delta, t.gain, width, EPS);
    CUDA_LAUNCHED();
}
static void backward_version(int version, const Tensors &t, int64_t rows, int width) {
    if (version == 2) return rmsnorm_backward_launch(t.d_out, t.dgain, t.again, t.d_in, t.d_normed, t.residual, t.rstd, t.gain, t.scratch, rows, width, 0);
    rmsnorm_backward_naive<<<(unsigned)rows, 256>>>(t.d_out, t.d_in, t.d_normed, t.residual, t.rstd, t.gain, width);
    rmsnorm_dgain_naive<<<(unsigned)ceil_div(width, 64), 64>>>(t.dgain, t.d_normed, t.residual, t.rstd, rows, width);
    CUDA_LAUNCHED();
}
static void tensors_free(const Tensors &t) {
    device_free(t.in, t.delta, t.gain, t.residual, t.normed, t.d_in, t.d_normed, t.d_out, t.again, t.rstd, t.amax, t.dgain, (char *)t.scratch);
}

// Against float64 from the stored BF16 residual. Tolerances: one rounding to BF16 of each BF16 result; in float32, a row's sum of
// n terms errs by at most (n/lanes + 8) units of the sum of magnitudes (n/lanes <= 32 here, or 8 in version 1): 48 units with the
// products around it; a gain gradient is a sum of `rows` terms, at most rows units of the sum of magnitudes.
static void check_forward(const char *what, const Tensors &t, const Bf16Host &in, const Bf16Host &delta, const Bf16Host &gain, int64_t rows, int width) {
    const Bf16Host residual = host_copy_bf16(t.residual, rows * width), normed = host_copy_bf16(t.normed, rows * width);
    const std::vector<float> rstd = host_copy(t.rstd, rows);
    int64_t unequal = 0;
    float largest = 0.0f;
    Worst norm, inverse;
    for (int64_t row = 0; row < rows; row++) {
        double squares = 0;
        for (int64_t i = row * width; i < (row + 1) * width; i++) {
            unequal += residual[i] != bf16_encode(bf16_decode(in[i]) + bf16_decode(delta[i]));
            squares += (double)bf16_decode(residual[i]) * bf16_decode(residual[i]);
        }
        const double r = 1 / sqrt(squares / width + EPS);
        inverse.add(rstd[row], r, 48 * F32_UNIT * r);
        for (int c = 0; c < width; c++) {
            const double want = bf16_decode(residual[row * width + c]) * r * bf16_decode(gain[c]);
            norm.add(bf16_decode(normed[row * width + c]), want, (BF16_UNIT + 48 * F32_UNIT) * fabs(want));
            largest = std::max(largest, f32_abs(bf16_decode(normed[row * width + c])));
        }
    }
    const float amax = host_copy(t.amax, 1)[0];
    ladder_check(&ladder, unequal == 0, "%s: %lld residuals differ from the rounded sum", what, (long long)unequal);
    inverse.report(std::string(what) + "rstd");
    norm.report(std::string(what) + "normed");
    ladder_check(&ladder, amax == largest, "%samax is %g, the largest |normed| %g", what, amax, largest);
}
static void check_backward(const char *what, const Tensors &t, const Bf16Host &d_in, const Bf16Host &d_normed, const Bf16Host &gain,
                           const std::vector<float> &dgain_before, int64_t rows, int width) {
    const Bf16Host residual = host_copy_bf16(t.residual, rows * width), d_out = host_copy_bf16(t.d_out, rows * width);
    const std::vector<float> rstd = host_copy(t.rstd, rows), dgain = host_copy(t.dgain, width);
    std::vector<double> sum(dgain_before.begin(), dgain_before.end()), magnitude(width, 0.0);
    Worst d;
    for (int64_t row = 0; row < rows; row++) {
        const double r = rstd[row];
        double dot = 0, dot_magnitude = 0;
        for (int c = 0; c < width; c++) {
            const double n = bf16_decode(residual[row * width + c]) * r, dn = bf16_decode(d_normed[row * width + c]), g = bf16_decode(gain[c]);
            dot += g * dn * n / width; dot_magnitude += fabs(g * dn * n) / width;
            sum[c] += dn * n; magnitude[c] += fabs(dn * n);
        }
        for (int c = 0; c < width; c++) {
            const double n = bf16_decode(residual[row * width + c]) * r, gdn = bf16_decode(gain[c]) * bf16_decode(d_normed[row * width + c]);
            const double before = bf16_decode(d_in[row * width + c]), want = before + r * (gdn - n * dot);
            d.add(bf16_decode(d_out[row * width + c]), want,
                  BF16_UNIT * fabs(want) + 48 * F32_UNIT * (fabs(before) + r * (fabs(gdn) + fabs(n) * dot_magnitude)));
        }
    }
    Worst gains;
    for (int c = 0; c < width; c++) gains.add(dgain[c], sum[c], ((double)rows + 8) * F32_UNIT * (magnitude[c] + fabs(dgain_before[c])));
    d.report(std::string(what) + "d residual");
    gains.report(std::string(what) + "d gain");
}
// What only the trainer's has: forward without a delta, normed again twice, no incoming gradient, in place, the same bits twice.
static void check_variants(const char *what, const Tensors &t, const std::vector<float> &dgain_before, int64_t rows, int width) {
    const Bf16Host normed = host_copy_bf16(t.normed, rows * width), d_out = host_copy_bf16(t.d_out, rows * width);
    const std::vector<float> rstd = host_copy(t.rstd, rows), dgain = host_copy(t.dgain, width);
    ladder_check(&ladder, host_copy_bf16(t.again, rows * width) == normed, "%sbackward's normed differs from forward's", what);
    CUDA_CHECK(cudaMemset(t.again, 0xFF, (size_t)(rows * width) * 2));
    rmsnorm_recompute_launch(t.again, t.residual, t.rstd, t.gain, rows, width, 0);
    ladder_check(&ladder, host_copy_bf16(t.again, rows * width) == normed, "%srecomputed normed differs from forward's", what);
    CUDA_CHECK(cudaMemset(t.normed, 0xFF, (size_t)(rows * width) * 2));
    rmsnorm_forward_launch(NULL, t.normed, t.rstd, NULL, t.residual, NULL, t.gain, rows, width, EPS, 0);
    ladder_check(&ladder, host_copy_bf16(t.normed, rows * width) == normed && host_copy(t.rstd, rows) == rstd, "%sforward without delta differs", what);
    // No incoming gradient is a gradient of zero; then in place of d_normed.
    CUDA_CHECK(cudaMemset(t.delta, 0, (size_t)(rows * width) * 2));
    rmsnorm_backward_launch(t.again, t.dgain, NULL, t.delta, t.d_normed, t.residual, t.rstd, t.gain, t.scratch, rows, width, 0);
    const Bf16Host with_zero = host_copy_bf16(t.again, rows * width);
    rmsnorm_backward_launch(t.again, t.dgain, NULL, NULL, t.d_normed, t.residual, t.rstd, t.gain, t.scratch, rows, width, 0);
    ladder_check(&ladder, host_copy_bf16(t.again, rows * width) == with_zero, "%sbackward without an incoming gradient differs from one of zero", what);
    CUDA_CHECK(cudaMemcpy(t.dgain, dgain_before.data(), (size_t)width * 4, cudaMemcpyHostToDevice));
    rmsnorm_backward_launch(t.d_in, t.dgain, NULL, t.d_in, t.d_normed, t.residual, t.rstd, t.gain, t.scratch, rows, width, 0);
    ladder_check(&ladder, host_copy_bf16(t.d_in, rows * width) == d_out && host_copy(t.dgain, width) == dgain, "%sa second backward, in place, gives other bits", what);
}
static void check_shape(int64_t rows, int width, float std) {
    const Bf16Host in = host_gauss_bf16(rows * width, 1, std), delta = host_gauss_bf16(rows * width, 2, std);
    const Bf16Host d_in = host_gauss_bf16(rows * width, 3, 1.0f), d_normed = host_gauss_bf16(rows * width, 4, 1.0f), gain = host_gauss_bf16(width, 5, 1.0f);
    const std::vector<float> dgain = host_gauss(width, 6, 1.0f);
    for (int version = 1; version <= 2; version++) {
        const int64_t n = rows * width;
        Tensors t = {device_copy_bf16(in), device_copy_bf16(delta), device_copy_bf16(gain), device_poisoned<bf16>(n), device_poisoned<bf16>(n),
                     device_copy_bf16(d_in), device_copy_bf16(d_normed), device_poisoned<bf16>(n), device_poisoned<bf16>(n),
                     device_poisoned<float>(rows), device_poisoned<float>(1), device_copy(dgain), device_poisoned<char>((int64_t)rmsnorm_backward_scratch_bytes(width))};
        CUDA_CHECK(cudaMemset(t.amax, 0, sizeof(float)));
        char what[96];
        snprintf(what, sizeof what, "rmsnorm version %d, %lld x %d: ", version, (long long)rows, width);
        forward_version(version, t, rows, width);
        check_forward(what, t, in, delta, gain, rows, width);
        backward_version(version, t, rows, width);
        check_backward(what, t, d_in, d_normed, gain, dgain, rows, width);
        if (version == 2) check_variants(what, t, dgain, rows, width);
        tensors_free(t);
    }
}

static void time_shape(int64_t rows, int width) {
    char shape[64];
    snprintf(shape, sizeof shape, "rmsnorm, %lld x %d", (long long)rows, width);
    const int64_t n = rows * width;
    ladder_heading(shape);
    const double values = (double)n;
    Tensors t = {device_gauss_bf16(n, 1), device_gauss_bf16(n, 2), device_gauss_bf16(width, 3), device_poisoned<bf16>(n),
                 device_poisoned<bf16>(n), device_gauss_bf16(n, 4), device_gauss_bf16(n, 5), device_poisoned<bf16>(n), NULL,
                 device_poisoned<float>(rows), device_poisoned<float>(1), device_gauss(width, 6, 1.0f), device_poisoned<char>((int64_t)rmsnorm_backward_scratch_bytes(width))};
    ladder_time_row("1 forward", 8 * values, [=] { forward_version(1, t, rows, width); });
    ladder_time_row("2 forward (trainer)", 8 * values, [=] { forward_version(2, t, rows, width); });
    ladder_time_row("2 normed again (trainer)", 4 * values, [=] { rmsnorm_recompute_launch(t.normed, t.residual, t.rstd, t.gain, rows, width, 0); });
    ladder_time_row("1 backward", 8 * values, [=] { backward_version(1, t, rows, width); });
    ladder_time_row("2 backward (trainer)", 8 * values, [=] { backward_version(2, t, rows, width); });
    t.again = device_poisoned<bf16>(n);
    ladder_time_row("2 backward, normed again (trainer)", 10 * values, [=] { backward_version(2, t, rows, width); });
    tensors_free(t);
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    check_shape(1, 128, 1.0f);
    check_shape(67, 640, 1.0f);
    check_shape(300, 1024, 30.0f);
    check_shape(37, 1280, 1e-3f);   // eps weighs
    check_shape(129, 2048, 1.0f);
    check_shape(5, 4096, 1.0f);
    check_shape(3, 5120, 1.0f);
    check_shape(9, 8192, 1.0f);
    check_shape(4096, 128, 1.0f);   // blocks go round more than once
    if (timed) {
        time_shape(65536, 640);
        time_shape(65536, 1024);
        time_shape(32768, 1280);
        time_shape(16384, 2048);
    }
    return ladder_end();
}
