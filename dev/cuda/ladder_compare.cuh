// dev/cuda/ladder_compare.cuh: what the element-wise ladders add to ladder.cuh: errors in units of a tolerance, BF16 tensors on the host.
#ifndef LADDER_COMPARE_CUH
#define LADDER_COMPARE_CUH

#include <string>

#include "ladder.cuh"

#define BF16_UNIT 0x1p-8   // largest relative error of rounding to BF16 (8 significant bits, nearest)
#define F32_UNIT 0x1p-24   // of a float32 operation

static Ladder ladder;

// Options and, unless --quick, the card's ceilings. Returns whether rows are to be timed after the checks.
FN bool ladder_begin(int argc, char **argv) {
    ladder = ladder_create(argc, argv);
    if (ladder.large) fatal_usage("%s: --large is for the quantizers' ladders; this one takes --quick, --small or nothing", argv[0]);
    if (!ladder.quick) ladder_ceilings(&ladder);
    return !ladder.quick;
}
FN int ladder_end(void) {
    CUDA_CHECK(cudaDeviceSynchronize());
    return ladder_finish(&ladder);
}
// Times `call` and prints its row: bytes are those the floor counts, so the last column is the share of what the card can do.
template <typename Call> static void ladder_time_row(const char *name, double bytes, Call call) {
    ladder_row(&ladder, name, ladder_time([=](int) { call(); }), 1.0, bytes, 0.0);
}

// The largest error of many values, in units of each value's own tolerance. A NaN where none belongs is an infinite error.
struct Worst {
    double error = 0;
    int64_t at = -1, count = 0;
    void add(double got, double want, double tolerance) {
        double e = got == want ? 0 : fabs(got - want) / tolerance;
        if (!(e <= INFINITY)) e = INFINITY;
        if (e > error) { error = e; at = count; }
        count++;
    }
    void report(const std::string &what) const {
        ladder_check(&ladder, error <= 1 && count > 0, "%s: value %lld of %lld is off by %.3g tolerances", what.c_str(), (long long)at, (long long)count, error);
    }
};

// Outputs start as NaN (in BF16 and in float32), so that a value not written is found.
template <typename T> static T *device_poisoned(int64_t count) {
    T *p = device_new<T>(count);
    CUDA_CHECK(cudaMemset(p, 0xFF, (size_t)count * sizeof(T)));
    return p;
}
FN void device_free() {}
template <typename T, typename... Rest> static void device_free(T *p, Rest... rest) { CUDA_CHECK(cudaFree(p)); device_free(rest...); }

typedef std::vector<uint16_t> Bf16Host;   // BF16 bits on the host
FN bf16 *device_copy_bf16(const Bf16Host &host) { return (bf16 *)device_copy(host); }
FN Bf16Host host_copy_bf16(const bf16 *device, int64_t count) { return host_copy((const uint16_t *)device, count); }

FN std::vector<float> host_gauss(int64_t count, uint64_t seed, float std) {
    std::vector<float> x((size_t)count);
    for (int64_t i = 0; i < count; i++) x[(size_t)i] = std * gauss_value(seed, (uint64_t)i);
    return x;
}
FN Bf16Host host_gauss_bf16(int64_t count, uint64_t seed, float std) {
    Bf16Host x;
    for (float v : host_gauss(count, seed, std)) x.push_back(bf16_encode(v));
    return x;
}
FN bf16 *device_gauss_bf16(int64_t count, uint64_t seed) {
    bf16 *p = device_new<bf16>(count);
    fill_gauss(p, count, seed);
    return p;
}
static __global__ void fill_gauss_f32_kernel(float *x, int64_t count, uint64_t seed, float std) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) x[i] = std * gauss_value(seed, (uint64_t)i);
}
FN float *device_gauss(int64_t count, uint64_t seed, float std) {
    float *p = device_new<float>(count);
    fill_gauss_f32_kernel<<<2048, 256>>>(p, count, seed, std);
    CUDA_LAUNCHED();
    return p;
}

#endif
