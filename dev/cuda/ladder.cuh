// dev/cuda/ladder.cuh: what the ladders share: counting checks, data, timing against measured ceilings.
//
// A ladder is a standalone program: it checks every version of one kernel family against the CPU's functions, then times them.
//   --quick   checks only
//   --small   checks only, on the smallest shapes and kinds of data that reach every path: for tools under which a program runs a hundred times slower
//   --large   only a check beyond 2^31 elements, where the ladder has one (needs about 20 GB of GPU memory)
// Last line: "N passed, N failed"; exit status 1 if any failed.
#ifndef LADDER_CUH
#define LADDER_CUH

#include <algorithm>
#include <math.h>
#include <vector>

#include "../../llmc/cuda/common.cuh"
#include "../../llmc/rng.h"

struct Ladder {
    int quick, small, large, passed, failed;
    double copy_rate;    // B/s of a device-to-device copy, read + write
    double issue_rate;   // lane instructions a second: 32 times the warp instructions that the card issues
};

FN Ladder ladder_create(int argc, char **argv) {
    Ladder l;
    memset(&l, 0, sizeof l);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) l.quick = 1;
        else if (strcmp(argv[i], "--small") == 0) l.quick = l.small = 1;
        else if (strcmp(argv[i], "--large") == 0) l.quick = l.large = 1;
        else fatal_usage("%s: the options are --quick (checks only), --small (the same, on small shapes) and --large (only what lies beyond 2^31 elements)", argv[i]);
    }
    int devices = 0;
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || devices == 0) fatal("no usable GPU (%s): ladders run on the card they measure", cudaGetErrorString(e));
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    printf("%s, sm_%d%d, %d SMs\n", p.name, p.major, p.minor, p.multiProcessorCount);
    return l;
}
FN void ladder_check(Ladder *l, int ok, const char *format, ...) __attribute__((format(printf, 3, 4)));
FN void ladder_check(Ladder *l, int ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (ok) l->passed++;
    else { l->failed++; printf("FAILED "); vprintf(format, args); putchar('\n'); fflush(stdout); }
    va_end(args);
}
FN int ladder_finish(const Ladder *l) {
    printf("%d passed, %d failed\n", l->passed, l->failed);
    return l->failed != 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory and data

template <typename T> static T *device_new(int64_t count) {
    void *p = NULL;
    CUDA_CHECK(cudaMalloc(&p, (size_t)std::max<int64_t>(count, 1) * sizeof(T)));
    return (T *)p;
}
template <typename T> static T *device_copy(const std::vector<T> &host) {
    T *p = device_new<T>((int64_t)host.size());
    CUDA_CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static std::vector<T> host_copy(const T *device, int64_t count) {
    std::vector<T> host((size_t)count);
    CUDA_CHECK(cudaMemcpy(host.data(), device, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}
// Device memory that dies with its scope.
template <typename T> struct DeviceArray {
    T *p;
    explicit DeviceArray(int64_t count) : p(device_new<T>(count)) {}
    explicit DeviceArray(const std::vector<T> &host) : p(device_copy(host)) {}
    ~DeviceArray() { cudaFree(p); }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    operator T *() const { return p; }
    std::vector<T> host(int64_t count) const { return host_copy(p, count); }
};

HD float gauss_value(uint64_t seed, uint64_t i) {  // N(0,1)
    const Philox4 w = rng_words4(rng_stream(seed, 0, 0), i);
    return sqrtf(-2.0f * logf(rng_uniform(w.w[0]))) * cosf(6.2831853f * (float)w.w[1] * 0x1p-32f);
}
static __global__ void fill_gauss_kernel(bf16 *x, int64_t count, uint64_t seed) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = __float2bfloat16_rn(gauss_value(seed, i));
}
FN void fill_gauss(bf16 *x, int64_t count, uint64_t seed) {
    fill_gauss_kernel<<<2048, 256>>>(x, count, seed);
    CUDA_LAUNCHED();
}

// Tensors (rows, cols) that have caught quantizers out before, as BF16 bits.
enum DataKind { DATA_GAUSS, DATA_CONSTANT, DATA_ZERO, DATA_OUTLIER, DATA_SUBNORMAL, DATA_ROW_SCALES, DATA_COLUMN_SCALES, DATA_HUGE, DATA_SPARSE, DATA_NAN, DATA_INF, DATA_KINDS };
static const char *const DATA_NAMES[] = {"gauss", "constant", "zero", "outlier 3e4", "subnormal", "row scales 2^-60..2^20",
                                         "column scales 2^-60..2^20", "huge 1e35", "sparse", "NaN", "infinity"};
// What a ladder goes through: everything, or with --small what takes the kernels' different ways: scales of all sizes, subnormal ones, none.
FN std::vector<DataKind> ladder_kinds(const Ladder *l) {
    if (l->small) return {DATA_GAUSS, DATA_SUBNORMAL, DATA_NAN};
    std::vector<DataKind> kinds;
    for (int kind = 0; kind < DATA_KINDS; kind++) kinds.push_back((DataKind)kind);
    return kinds;
}
FN std::vector<uint16_t> make_data(DataKind kind, int64_t rows, int64_t cols, uint64_t seed) {
    std::vector<uint16_t> x((size_t)(rows * cols));
    for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < cols; c++) {
        const int64_t i = r * cols + c;
        float v = gauss_value(seed, (uint64_t)i);
        const int row_power = (int)(rng_word(rng_stream(seed, 1, 0), (uint64_t)r) % 81) - 60, column_power = (int)(rng_word(rng_stream(seed, 2, 0), (uint64_t)c) % 81) - 60;
        if (kind == DATA_CONSTANT) v = -1.75f;
        if (kind == DATA_ZERO) v = 0.0f;
        if (kind == DATA_OUTLIER && i == rows * cols / 3) v = 3e4f;
        if (kind == DATA_SUBNORMAL) v *= 1e-39f;
        if (kind == DATA_ROW_SCALES) v = ldexpf(v, row_power);
        if (kind == DATA_COLUMN_SCALES) v = ldexpf(v, column_power);
        if (kind == DATA_HUGE) v *= 1e35f;
        if (kind == DATA_SPARSE && rng_word(rng_stream(seed, 3, 0), (uint64_t)i) % 97) v = 0.0f;
        if (kind == DATA_NAN && i == rows * cols / 2) v = NAN;
        if (kind == DATA_INF && i == rows * cols / 2) v = -INFINITY;
        x[(size_t)i] = bf16_encode(v);
    }
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Time

#define LADDER_L2_BYTES (128 << 20)  // more than any card's cache: buffers are rotated until a round is larger than this

FN int rotation_copies(int64_t bytes) { return (int)std::max<int64_t>(1, std::min<int64_t>(8, ceil_div(LADDER_L2_BYTES, bytes))); }

// Median milliseconds of launch(i), i = 0, 1, 2 ... for the caller to rotate buffers with.
template <typename F> static double ladder_time(F launch) {
    const int warm = 2, runs = 9;
    cudaEvent_t at[runs + 1];
    for (int i = 0; i <= runs; i++) CUDA_CHECK(cudaEventCreate(&at[i]));
    for (int i = 0; i < warm; i++) launch(i);
    CUDA_CHECK(cudaEventRecord(at[0]));
    for (int i = 0; i < runs; i++) { launch(i); CUDA_CHECK(cudaEventRecord(at[i + 1])); }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<float> ms(runs);
    for (int i = 0; i < runs; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[(size_t)i], at[i], at[i + 1]));
    for (int i = 0; i <= runs; i++) CUDA_CHECK(cudaEventDestroy(at[i]));
    std::sort(ms.begin(), ms.end());
    return ms[runs / 2];
}

// Eight independent chains of fused multiply-adds: nothing but issue slots.
static __global__ void issue_kernel(float *out, int rounds) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = (float)(threadIdx.x + i);
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int u = 0; u < 16; u++)
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = __fmaf_rn(a[i], 0.999f, 0.5f);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += a[i];
    if (sum == 12345.0f) *out = sum;
}
FN void ladder_ceilings(Ladder *l) {
    const int64_t bytes = 1ll << 30;
    DeviceArray<uint8_t> a(bytes), b(bytes);
    CUDA_CHECK(cudaMemset(a, 1, (size_t)bytes));
    l->copy_rate = 2.0 * (double)bytes / (1e-3 * ladder_time([&](int) { CUDA_CHECK(cudaMemcpyAsync(b, a, (size_t)bytes, cudaMemcpyDeviceToDevice)); }));
    int sms = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const int rounds = 2000, ctas = sms * 2, threads = 512;
    const double ms = ladder_time([&](int) { issue_kernel<<<ctas, threads>>>((float *)a.p, rounds); CUDA_LAUNCHED(); });
    l->issue_rate = (double)ctas * threads * rounds * 128.0 / (1e-3 * ms);
    printf("measured ceilings: copy %.3f TB/s, issue %.1f T lane instructions/s\n", 1e-12 * l->copy_rate, 1e-12 * l->issue_rate);
}
FN void ladder_heading(const char *title) {
    printf("\n%s\n%-34s %9s %9s %7s %9s %7s %7s\n", title, "version", "ms", "GB/s", "% copy", "instr/val", "% issue", "% bind");
}
// instructions: a value, counted in the disassembly (0: not counted). bytes: read and written a value. The last column is the
// share of the binding ceiling, whichever of the two takes longer.
FN void ladder_row(const Ladder *l, const char *name, double ms, double values, double bytes, double instructions) {
    const double rate = values * bytes / (1e-3 * ms), copy = rate / l->copy_rate, issue = values * instructions / (1e-3 * ms) / l->issue_rate;
    printf("%-34s %9.4f %9.0f %7.1f ", name, ms, 1e-9 * rate, 100 * copy);
    if (instructions > 0) printf("%9.1f %7.1f %7.1f\n", instructions, 100 * issue, 100 * std::max(copy, issue));
    else printf("%9s %7s %7s\n", "-", "-", "-");
    fflush(stdout);
}

#endif
