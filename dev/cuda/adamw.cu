// adamw.cu: ladder of the optimizer's end of a step: gradient norm with clip and finite flag, AdamW, amax of the new weights.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o adamw dev/cuda/adamw.cu     Run: ./adamw [--quick]
//
// 1. one thread a parameter, one Philox call each, its segment by binary search, amax by an atomic a warp
// 2. the trainer's (llmc/cuda/adamw.cuh): 16-byte vectors, one Philox call for 8 parameters, segments followed along the way
#include "ladder_compare.cuh"

#include "../../llmc/cuda/adamw.cuh"

static const uint64_t SEED = 42;

__global__ void adamw_naive(AdamWBuffers b, AdamWScalars k, RngStream random, const StepStats *stats) {
    const int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= b.count || !stats->finite) return;
    int low = 0, high = b.segment_count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (b.segments[middle].offset <= e) low = middle; else high = middle;
    }
    const float p = adamw_update(k, __bfloat162float(b.params[e]), f32_mul(((const float *)b.grads.base)[e], stats->scale), b.segments[low].decay, &b.m[e], &b.v[e]);
    const uint16_t bits = bf16_encode_sr(p, rng_word(random, (uint64_t)e / 2) >> 16 * (e % 2));
    ((uint16_t *)b.params)[e] = bits;
    const float largest = warp_max(f32_abs(bf16_decode(bits)));  // a warp lies in one segment: offsets are multiples of 128
    if (threadIdx.x % 32 == 0 && b.segments[low].amax_slot >= 0) atomic_max_nonneg(b.amax + b.segments[low].amax_slot, largest);
}
static RngStream master_stream(int64_t step) { return rng_stream(SEED, (uint32_t)step, rng_address(RNG_MASTER, 0, 0, 0, 0, 0)); }
static void adamw_version(int version, const AdamWBuffers &b, AdamWScalars k, int64_t step, const StepStats *stats) {
    if (version == 2) return adamw_launch(&b, k, SEED, step, stats, 0);
    CUDA_CHECK(cudaMemsetAsync(b.amax, 0, (size_t)b.amax_count * 4));
    adamw_naive<<<(unsigned)ceil_div(b.count, 256), 256>>>(b, k, master_stream(step), stats);
    CUDA_LAUNCHED();
}

// A flat buffer of segments of these sizes; every other one decays, every third has an amax slot.
static std::vector<AdamWSegment> make_segments(const std::vector<int64_t> &sizes, int64_t *count, int *slots) {
    std::vector<AdamWSegment> segments;
    *count = 0; *slots = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        const AdamWSegment s = {*count, (int32_t)(i % 2), i % 3 ? -1 : (*slots)++};
        segments.push_back(s);
        *count += sizes[i];
    }
    return segments;
}
struct Bf16Range { int64_t from, to; };                                      // elements whose gradients are BF16
struct Host { Bf16Host params; std::vector<float> masters, m, v, grads; };   // masters empty: BF16 masters
static Host host_values(int64_t count, bool masters, Bf16Range range) {
    Host h = {host_gauss_bf16(count, 1, 0.02f), {}, host_gauss(count, 2, 1e-3f), host_gauss(count, 3, 1e-3f), host_gauss(count, 4, 1e-2f)};
    for (float &v : h.v) v = v * v;
    for (int64_t i = range.from; i < range.to; i++) h.grads[i] = bf16_round(h.grads[i]);
    for (int64_t i = 0; masters && i < count; i++) h.masters.push_back(bf16_decode(h.params[i]) * 1.001f);
    return h;
}
// In the order of the elements, 4 bytes or 2 each.
static void *device_gradients(const std::vector<float> &x, Bf16Range range) {
    std::vector<uint16_t> words;
    for (int64_t i = 0; i < (int64_t)x.size(); i++) {
        const uint32_t bits = f32_bits(x[i]);
        if (i < range.from || i >= range.to) words.push_back((uint16_t)bits);
        words.push_back((uint16_t)(bits >> 16));
    }
    return device_copy(words);
}
static AdamWBuffers device_buffers(const Host &h, const std::vector<AdamWSegment> &segments, int slots, Bf16Range range) {
    AdamWBuffers b = {device_copy_bf16(h.params), h.masters.empty() ? NULL : device_copy(h.masters), device_copy(h.m), device_copy(h.v),
                      {device_gradients(h.grads, range), range.from, range.to}, (int64_t)h.params.size(),
                      device_copy(segments), (int)segments.size(), device_poisoned<float>(slots), slots};
    return b;
}
static void buffers_free(const AdamWBuffers &b) {
    device_free(b.params, b.masters, b.m, b.v, (char *)b.grads.base, (AdamWSegment *)b.segments, b.amax);
}

// One update on the host. Bits: adamw.h's function and word e/2 of the stream give what the device must hold. Value: the formula in
// float64, from the gradient as clipped in float32.
static void check_update(const char *what, const Host &h, const AdamWBuffers &b, const std::vector<AdamWSegment> &segments, AdamWScalars k,
                         float weight_decay, int64_t step, float scale) {
    const Bf16Host params = host_copy_bf16(b.params, b.count);
    const std::vector<float> m = host_copy(b.m, b.count), v = host_copy(b.v, b.count), amax = host_copy(b.amax, b.amax_count);
    const std::vector<float> masters = b.masters ? host_copy(b.masters, b.count) : std::vector<float>();
    std::vector<float> largest(amax.size(), 0.0f);
    const double t = (double)step + 1;
    int64_t unequal = 0;
    Worst value;
    size_t s = 0;
    for (int64_t e = 0; e < b.count; e++) {
        while (s + 1 < segments.size() && e >= segments[s + 1].offset) s++;
        const float before = b.masters ? h.masters[e] : bf16_decode(h.params[e]), g = h.grads[e] * scale;
        float m1 = h.m[e], v1 = h.v[e];
        const float p = adamw_update(k, before, g, segments[s].decay, &m1, &v1);
        const uint32_t word = rng_word(master_stream(step), (uint64_t)e / 2);
        const uint16_t bits = b.masters ? bf16_encode(p) : bf16_encode_sr(p, e % 2 ? word >> 16 : word & 0xFFFF);
        unequal += bits != params[e] || f32_bits(m1) != f32_bits(m[e]) || f32_bits(v1) != f32_bits(v[e]) || (b.masters && p != masters[e]);
        // 10 operations in a row on the update, one on the weight; then stochastic rounding: one unit in the last place of BF16.
        const double md = (double)k.beta1 * h.m[e] + (1 - (double)k.beta1) * g, vd = (double)k.beta2 * h.v[e] + (1 - (double)k.beta2) * g * g;
        const double update = k.lr * (md / (1 - pow((double)k.beta1, t)) / (sqrt(vd / (1 - pow((double)k.beta2, t))) + k.eps));
        const double size = k.lr * (fabs((double)k.beta1 * h.m[e]) + fabs((1 - (double)k.beta1) * g)) / (1 - pow((double)k.beta1, t)) /
                            (sqrt(vd / (1 - pow((double)k.beta2, t))) + k.eps);   // without cancellation in m
        const double want = before - update - k.lr * (segments[s].decay ? weight_decay : 0.0) * before;
        value.add(b.masters ? masters[e] : bf16_decode(params[e]), want,
                  (b.masters ? 0.0 : 2 * BF16_UNIT * fabs(want)) + 32 * F32_UNIT * (fabs(before) + size) + 1e-30);
        if (segments[s].amax_slot >= 0) largest[segments[s].amax_slot] = std::max(largest[segments[s].amax_slot], f32_abs(bf16_decode(params[e])));
    }
    ladder_check(&ladder, unequal == 0, "%s: %lld of %lld parameters have other bits than on the host", what, (long long)unequal, (long long)b.count);
    value.report(what);
    ladder_check(&ladder, amax == largest, "%s: amax slots differ from the largest new weights", what);
}
static StepStats read_stats(const StepStats *stats) { return host_copy(stats, 1)[0]; }

static void check_shape(const std::vector<int64_t> &sizes, bool masters, Bf16Range range, float clip, int64_t step) {
    int64_t count; int slots;
    const std::vector<AdamWSegment> segments = make_segments(sizes, &count, &slots);
    const Host h = host_values(count, masters, range);
    const float decay = 0.1f;
    const AdamWScalars k = adamw_scalars(1e-3f, 0.9f, 0.95f, 1e-8f, decay, step);
    StepStats *stats = device_poisoned<StepStats>(1);
    char *scratch = device_poisoned<char>((int64_t)grad_norm_scratch_bytes());
    double squares = 0;
    for (float g : h.grads) squares += (double)g * g;
    for (int version = masters || range.to > range.from ? 2 : 1; version <= 2; version++) {
        AdamWBuffers b = device_buffers(h, segments, slots, range);
        char what[128];
        snprintf(what, sizeof what, "adamw version %d, %lld parameters, %s masters, %lld BF16 gradients, clip %g", version, (long long)count,
                 masters ? "float32" : "BF16", (long long)(range.to - range.from), clip);
        double *loss_sum = device_copy(std::vector<double>{12.0, culprit_mark(NAN, 7)});
        grad_norm_launch(stats, &b, clip, INFINITY, INFINITY, loss_sum, 0.25f, scratch, 0);
        const StepStats s = read_stats(stats);
        // Four squares are summed in float32 (2 units at most), halved by the root, and the root is rounded.
        ladder_check(&ladder, fabs(s.norm - sqrt(squares)) <= 4 * F32_UNIT * sqrt(squares), "%s: norm %.9g, should be %.9g", what, s.norm, sqrt(squares));
        const double scale = clip > 0 && sqrt(squares) > clip ? clip / sqrt(squares) : 1.0;
        ladder_check(&ladder, fabs(s.scale - scale) <= 4 * F32_UNIT * scale && s.finite == 1 && s.loss == 3.0f && s.culprit == 8, "%s: scale %g, finite %d, loss %g, culprit %d", what,
              s.scale, s.finite, s.loss, s.culprit);
        adamw_version(version, b, k, step, stats);
        check_update(what, h, b, segments, k, decay, step, s.scale);
        device_free(loss_sum);
        buffers_free(b);
    }
    device_free(stats, scratch);
}

// A NaN or an infinity in gradients or loss, or one of them above its limit: nothing is applied, and the amax slots hold the weights as they are.
static void check_nonfinite(float bad_gradient, double bad_loss, float loss_limit, float norm_limit) {
    int64_t count; int slots;
    const std::vector<AdamWSegment> segments = make_segments({128, 2560, 5120, 128}, &count, &slots);
    Host h = host_values(count, false, {0, 0});
    h.grads[count - 1] = bad_gradient;
    AdamWBuffers b = device_buffers(h, segments, slots, {0, 0});
    StepStats *stats = device_poisoned<StepStats>(1);
    char *scratch = device_poisoned<char>((int64_t)grad_norm_scratch_bytes());
    double *loss_sum = device_copy(std::vector<double>{bad_loss, culprit_mark(bad_loss, 0)});
    grad_norm_launch(stats, &b, 1.0f, loss_limit, norm_limit, loss_sum, 1.0f, scratch, 0);
    ladder_check(&ladder, read_stats(stats).finite == 0, "gradient %g, loss %g: the step counts as finite", bad_gradient, bad_loss);
    ladder_check(&ladder, read_stats(stats).culprit == !isfinite(bad_loss), "loss %g of rank 0: the culprit is %d", bad_loss, read_stats(stats).culprit);
    adamw_launch(&b, adamw_scalars(1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 3), SEED, 3, stats, 0);
    ladder_check(&ladder, host_copy_bf16(b.params, count) == h.params && host_copy(b.m, count) == h.m && host_copy(b.v, count) == h.v,
          "gradient %g, loss %g: the step was applied", bad_gradient, bad_loss);
    std::vector<float> largest((size_t)slots, 0.0f);
    for (size_t s = 0; s < segments.size(); s++)
        for (int64_t e = segments[s].offset; segments[s].amax_slot >= 0 && e < (s + 1 < segments.size() ? segments[s + 1].offset : count); e++)
            largest[segments[s].amax_slot] = std::max(largest[segments[s].amax_slot], f32_abs(bf16_decode(h.params[e])));
    ladder_check(&ladder, host_copy(b.amax, slots) == largest, "after a step not applied the amax slots are not the weights'");
    CUDA_CHECK(cudaMemset(b.amax, 0xFF, (size_t)slots * 4));
    weights_amax_launch(&b, 0);
    ladder_check(&ladder, host_copy(b.amax, slots) == largest, "weights_amax_launch: the slots are not the weights'");
    device_free(stats, scratch, loss_sum);
    buffers_free(b);
}

// A model-like buffer: embedding, then layers of a gain, a matrix, a gain, a matrix.
static void time_shape(const char *model, int64_t embedding, int64_t matrix, int width, int layers) {
    std::vector<int64_t> sizes(1, embedding);
    for (int l = 0; l < 2 * layers; l++) { sizes.push_back(width); sizes.push_back(matrix / 2); }
    sizes.push_back(width); sizes.push_back(embedding);
    int64_t count; int slots;
    const std::vector<AdamWSegment> segments = make_segments(sizes, &count, &slots);
    AdamWBuffers b = {device_gauss_bf16(count, 1), NULL, device_gauss(count, 2, 1e-3f), device_poisoned<float>(count),
                      {device_gauss(count, 3, 1e-3f), 0, 0}, count, device_copy(segments), (int)segments.size(), device_poisoned<float>(slots), slots};
    CUDA_CHECK(cudaMemset(b.v, 0, (size_t)count * 4));
    StepStats *stats = device_poisoned<StepStats>(1);
    char *scratch = device_poisoned<char>((int64_t)grad_norm_scratch_bytes());
    char shape[96];
    snprintf(shape, sizeof shape, "optimizer, model %s, %.1f M parameters", model, (double)count * 1e-6);
    ladder_heading(shape);
    const AdamWScalars k = adamw_scalars(1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0);
    ladder_time_row("  gradient norm (trainer)", 4.0 * (double)count, [=] { grad_norm_launch(stats, &b, 1.0f, INFINITY, INFINITY, NULL, 1.0f, scratch, 0); });
    for (int version = 1; version <= 2; version++)
        ladder_time_row(version == 1 ? "1 AdamW, one thread a parameter" : "2 AdamW (trainer)", 24.0 * (double)count, [=] { adamw_version(version, b, k, 0, stats); });
    AdamWBuffers half = b;
    half.grads.bf16_from = embedding; half.grads.bf16_to = count - embedding - width;  // as under --grad-dtype bf16
    ladder_time_row("2 AdamW, BF16 gradients (trainer)", 20.0 * (double)count + (double)gradient_bytes(&half.grads, count),
                    [=] { adamw_launch(&half, k, SEED, 0, stats, 0); });
    b.masters = device_gauss(count, 4, 0.02f);
    ladder_time_row("2 AdamW, float32 masters (trainer)", 30.0 * (double)count, [=] { adamw_launch(&b, k, SEED, 0, stats, 0); });
    ladder_time_row("  amax of weights (trainer)", 2.0 * (double)count, [=] { weights_amax_launch(&b, 0); });
    device_free(stats, scratch);
    buffers_free(b);
}

// Any ranks may be those whose loss is not finite, and their marks may be added in any order: up to all of 512.
static void check_culprit() {
    const RngStream random = rng_stream(SEED, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0));
    for (int kind = 0; kind < 200; kind++) {
        std::vector<std::pair<uint32_t, int>> bad;             // in a random order
        int first = 512;
        for (int rank = 0; rank < 512; rank++) {
            const Philox4 w = rng_words4(random, (uint64_t)kind * 512 + rank);
            // one in 1, 8, 64, 512 or 4096 of the ranks, from rank 0 on or from a later one
            if (w.w[0] & ((1u << 3 * (kind % 5)) - 1u) || rank < kind / 5 % 2 * kind) continue;
            bad.push_back({w.w[1], rank});
            first = std::min(first, rank);
        }
        std::sort(bad.begin(), bad.end());
        double marks = 0;
        for (const auto &b : bad) marks += culprit_mark(kind % 2 ? NAN : -INFINITY, b.second);
        ladder_check(&ladder, culprit_first(marks) == (bad.empty() ? 0 : first + 1), "%d ranks without a finite loss, the first %d: the culprit is %d", (int)bad.size(),
                     first, culprit_first(marks) - 1);
    }
    ladder_check(&ladder, culprit_mark(0.5, 3) == 0.0 && culprit_first(0.0) == 0, "a finite loss has a culprit");
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    check_shape({128}, false, {0, 0}, 1.0f, 0);
    check_shape({128, 640, 2560, 128, 128, 2432}, false, {0, 0}, 0.1f, 7);
    check_shape({256000, 640, 128, ladder.small ? 40960 : 819200, 640, 128, 128, 40960, 1920, 384}, false, {0, 0}, 1.0f, 1000);
    check_shape({256000, 640, 128, 40960}, true, {0, 0}, 0.5f, 0);
    check_shape({640, 128, 40960, 384}, false, {0, 42112}, 0.0f, 1);
    check_shape({640, 128, 40960, 384, 2560}, false, {640, 41728}, 1.0f, 5);
    check_shape({640, 128, 40960, 384}, true, {128, 41728}, 1.0f, 100000);
    check_nonfinite(NAN, 1.0, INFINITY, INFINITY);
    check_nonfinite(INFINITY, 1.0, INFINITY, INFINITY);
    check_nonfinite(1e30f, 1.0, INFINITY, INFINITY);   // its square is infinite
    check_nonfinite(0.0f, NAN, INFINITY, INFINITY);
    check_nonfinite(0.0f, INFINITY, INFINITY, INFINITY);
    check_nonfinite(0.0f, 2.0, 1.999f, INFINITY);  // above a limit of llama_step_limits
    check_nonfinite(100.0f, 2.0, INFINITY, 99.0f);
    check_culprit();
    if (timed) {
        time_shape("30M", 32000 * 640, 640 * 640 * 4 + 3 * 640 * 1792, 640, 6);
        time_shape("100M", 32000 * 1024, 1024 * 1024 * 4 + 3 * 1024 * 2816, 1024, 8);
        time_shape("1.9B", 65536 * 2048, 2048 * 2048 * 4 + 3 * 2048 * 5632, 2048, 32);
    }
    return ladder_end();
}
