// crossentropy.cu: ladder of the softmax cross-entropy, forward and backward in place.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o crossentropy dev/cuda/crossentropy.cu     Run: ./crossentropy [--quick]
//
// 1. one block a row, 2-byte loads, three reads: max, sum, gradient
// 2. 16-byte vectors, running max and sum, two reads (the trainer's for vocabularies that fit nowhere)
// 3. the trainer's (llmc/cuda/crossentropy.cuh): the row in registers, the next one on its way into shared memory: one read
#include "ladder_compare.cuh"

#include "../../llmc/cuda/crossentropy.cuh"

__global__ void crossentropy_naive(bf16 *logits, float *losses, const int32_t *targets, int vocab, float scale) {
    __shared__ float parts[8];
    bf16 *const x = logits + (int64_t)blockIdx.x * vocab;
    const int target = targets[blockIdx.x];
    const float x_target = __bfloat162float(x[target]);
    float max = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < vocab; i += 256) max = fmaxf(max, __bfloat162float(x[i]));
    max = warp_max(max);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = max;
    __syncthreads();
    for (int w = 0; w < 8; w++) max = fmaxf(max, parts[w]);
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += 256) sum += expf(__bfloat162float(x[i]) - max);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < 8; w++) sum += parts[w];
    if (threadIdx.x == 0) losses[blockIdx.x] = max - x_target + logf(sum);
    for (int i = threadIdx.x; i < vocab; i += 256)
        x[i] = __float2bfloat16_rn((expf(__bfloat162float(x[i]) - max) / sum - (i == target ? 1.0f : 0.0f)) * scale);
}
static void backward_version(int version, bf16 *logits, float *losses, const int32_t *targets, int64_t rows, int vocab, float scale) {
    if (version == 3) return crossentropy_backward_launch(logits, losses, targets, rows, vocab, scale, 0);
    if (version == 2) crossentropy_launch_two_reads<true>(logits, losses, targets, rows, vocab, scale, 0);
    else crossentropy_naive<<<(unsigned)rows, 256>>>(logits, losses, targets, vocab, scale);
    CUDA_LAUNCHED();
}
static std::vector<int32_t> random_targets(int64_t rows, int vocab) {
    std::vector<int32_t> targets((size_t)rows);
    for (int64_t i = 0; i < rows; i++) targets[i] = (int32_t)(philox4x32((uint32_t)i, 0, 9, 0, 1234, 5678).w[0] % (uint32_t)vocab);
    return targets;
}

// Against float64. Tolerance: one rounding of a gradient to BF16; in float32 a power of two of x*log2(e) - max*log2(e) errs by
// two units plus the rounding of its argument, at most 2 units of |x| + |max|, and the sum likewise: (32 + 8 largest |x|) units
// of the probability; values below 2^-126 may become zero. The loss adds the roundings of max, x_target and the logarithm.
static void check_shape(int64_t rows, int vocab, float std, bool large_rows_only = false) {
    const Bf16Host x = host_gauss_bf16(rows * vocab, 1, std);
    const std::vector<int32_t> targets = random_targets(rows, vocab);
    int32_t *d_targets = device_copy(targets);
    const float scale = 1.0f / 1536;
    std::vector<float> losses_backward;
    for (int version = large_rows_only ? 3 : 1; version <= 3; version++) {
        bf16 *logits = device_copy_bf16(x);
        float *losses = device_poisoned<float>(rows);
        backward_version(version, logits, losses, d_targets, rows, vocab, scale);
        const Bf16Host got = host_copy_bf16(logits, rows * vocab);
        const std::vector<float> got_losses = host_copy(losses, rows);
        Worst gradient, loss;
        for (int64_t row = 0; row < rows; row++) {
            const uint16_t *v = x.data() + row * vocab;
            double max = -INFINITY, largest = 0, sum = 0;
            for (int i = 0; i < vocab; i++) { max = std::max(max, (double)bf16_decode(v[i])); largest = std::max(largest, (double)f32_abs(bf16_decode(v[i]))); }
            for (int i = 0; i < vocab; i++) sum += exp(bf16_decode(v[i]) - max);
            const double f32 = (32 + 8 * largest) * F32_UNIT, x_target = bf16_decode(v[targets[row]]);
            for (int i = 0; i < vocab; i++) {
                const double p = exp(bf16_decode(v[i]) - max) / sum, want = (p - (i == targets[row])) * scale;
                gradient.add(bf16_decode(got[row * vocab + i]), want,
                             BF16_UNIT * fabs(want) + (f32 * p + (i == targets[row]) * F32_UNIT) * scale + 0x1p-125);
            }
            loss.add(got_losses[row], max - x_target + log(sum), f32 + 2 * F32_UNIT * (fabs(max) + fabs(x_target) + log(sum)));
        }
        char what[96];
        snprintf(what, sizeof what, "crossentropy version %d, %lld x %d: ", version, (long long)rows, vocab);
        gradient.report(std::string(what) + "gradient");
        loss.report(std::string(what) + "loss");
        if (version == 3) {
            bf16 *kept = device_copy_bf16(x);
            float *eval = device_poisoned<float>(rows);
            crossentropy_forward_launch(eval, kept, d_targets, rows, vocab, 0);
            ladder_check(&ladder, host_copy(eval, rows) == got_losses && host_copy_bf16(kept, rows * vocab) == x, "%sforward alone gives other losses, or touches logits", what);
            std::vector<double> total(1, 1.5);
            double *d_total = device_copy(total);
            loss_sum_launch(d_total, losses, rows, 0);
            double want = 1.5;
            for (float l : got_losses) want += (double)l;
            total = host_copy(d_total, 1);
            ladder_check(&ladder, fabs(total[0] - want) <= 1e-12 * fabs(want), "%sloss sum is %.17g, should be %.17g", what, total[0], want);
            device_free(kept, eval, d_total);
        }
        device_free(logits, losses);
    }
    device_free(d_targets);
}
// A NaN or an infinite logit must show in the row's loss, and in no other row's.
static void check_nonfinite(int vocab) {
    const int64_t rows = 6;
    Bf16Host x = host_gauss_bf16(rows * vocab, 1, 1.0f);
    x[1 * vocab + vocab / 3] = 0x7FC0; x[3 * vocab + 5] = 0x7F80; x[4 * vocab + vocab - 1] = 0xFFC0;
    int32_t *targets = device_copy(random_targets(rows, vocab));
    bf16 *logits = device_copy_bf16(x);
    float *losses = device_poisoned<float>(rows);
    crossentropy_backward_launch(logits, losses, targets, rows, vocab, 1.0f, 0);
    const std::vector<float> got = host_copy(losses, rows);
    for (int row = 0; row < rows; row++)
        ladder_check(&ladder, (bool)std::isfinite(got[row]) == (row != 1 && row != 3 && row != 4), "crossentropy of %d logits, non-finite rows 1, 3, 4: the loss of row %d is %g", vocab, row, got[row]);
    device_free(targets, logits, losses);
}

static void time_shape(int64_t rows, int vocab) {
    char shape[64];
    snprintf(shape, sizeof shape, "crossentropy, %lld rows, vocabulary %d", (long long)rows, vocab);
    ladder_heading(shape);
    const double values = (double)rows * vocab;
    bf16 *logits = device_gauss_bf16(rows * vocab, 1);
    int32_t *targets = device_copy(random_targets(rows, vocab));
    float *losses = device_poisoned<float>(rows);
    double *total = device_poisoned<double>(1);
    static const char *const names[] = {"1 three reads", "2 two reads, running sums", "3 one read, prefetch (trainer)"};
    for (int version = 1; version <= 3; version++)
        ladder_time_row(names[version - 1], 4 * values, [=] { backward_version(version, logits, losses, targets, rows, vocab, 1.0f); });
    ladder_time_row("2 forward alone, two-reads kernel", 2 * values, [=] { crossentropy_launch_two_reads<false>(logits, losses, targets, rows, vocab, 0.0f, 0); });
    ladder_time_row("3 forward alone (trainer)", 2 * values, [=] { crossentropy_forward_launch(losses, logits, targets, rows, vocab, 0); });
    ladder_time_row("  loss sum (trainer)", 4.0 * (double)rows, [=] { loss_sum_launch(total, losses, rows, 0); });
    device_free(logits, targets, losses, total);
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    check_shape(5, 8, 1.0f);
    check_shape(300, 256, 1.0f);
    check_shape(65, 1032, 4.0f);
    check_shape(50, 8192, 30.0f);
    check_shape(300, 4096, 1.0f);      // blocks go round more than once
    check_shape(9, 32000, 2.0f);
    check_shape(7, 65536, 2.0f, true);
    check_shape(3, 128256, 2.0f, true);
    for (int vocab : {256, 4096, 32000, 65536, 128256}) check_nonfinite(vocab);
    if (timed) {
        time_shape(8192, 32000);
        time_shape(1024, 32000);
        time_shape(4096, 65536);
        time_shape(1024, 65536);
        time_shape(65536, 256);
    }
    return ladder_end();
}
