// cuda/device.cuh: finding a usable card, and its peak FLOP/s.
#ifndef LLMC_CUDA_DEVICE_CUH
#define LLMC_CUDA_DEVICE_CUH

#include "common.cuh"

typedef struct {
    int index, major, minor, sms;
    int clock_khz;                 // highest SM clock
    size_t free_bytes, total_bytes;
    double peak_flops;             // dense BF16 with float32 accumulation, 0: not known
    char name[256];
} Device;

// A card's data sheet, where NVIDIA's figure is the convention of MFU tables. Matched in order by a part of the name.
typedef struct { const char *name; double flops; } KnownPeak;
static const KnownPeak KNOWN_PEAKS[] = {
    {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 835e12}, {"H100", 989e12}, {"H200", 989e12}, {"GH200", 989e12},
    {"A100", 312e12}, {"A800", 312e12}, {"L40S", 362e12}, {"L4 ", 121e12}, {"A10G", 70e12},
};

// Dense BF16 FLOP a clock and SM with float32 accumulation (a fused multiply-add counts two), 0: not known.
// GeForce cards of these generations run float32 accumulation at half the rate of the workstation cards.
FN int device_flops_per_clock(int major, int minor, const char *name) {
    const int consumer = strstr(name, "GeForce") || strstr(name, "TITAN") ? 2 : 1;
    if (major == 8 && minor == 0) return 2048;
    if (major == 8) return 1024 / consumer;
    if (major == 9) return 4096;
    if (major == 10) return 8192;
    if (major == 12) return 1024 / consumer;
    return 0;
}
// FLOP/s of the data sheet for the cards named above, else SMs x clock x FLOP a clock.
FN double device_peak_flops(const Device *d) {
    for (size_t i = 0; i < sizeof KNOWN_PEAKS / sizeof KNOWN_PEAKS[0]; i++)
        if (strstr(d->name, KNOWN_PEAKS[i].name)) return KNOWN_PEAKS[i].flops;
    return (double)d->sms * d->clock_khz * 1e3 * device_flops_per_clock(d->major, d->minor, d->name);
}

// Launched never: its attributes say whether the program holds code for this card.
__global__ static void device_probe_kernel() {}

FN void device_check_driver() {
    int count = 0, driver = 0, toolkit = CUDART_VERSION;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (e == cudaErrorInsufficientDriver && driver > 0)
        fatal("the NVIDIA driver supports CUDA %d.%d, this program was built with CUDA %d.%d: update the driver, or rebuild with a toolkit no newer than it",
              driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10);
    if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || (e == cudaSuccess && count == 0))
        fatal("no NVIDIA GPU was found (is the driver loaded? is CUDA_VISIBLE_DEVICES empty?): the CPU program trains without one");
    CUDA_CHECK(e);
}

// The current CUDA device, opened and checked. One line says why a card cannot be used.
FN Device device_open() {
    Device d;
    memset(&d, 0, sizeof d);
    device_check_driver();
    CUDA_CHECK(cudaGetDevice(&d.index));
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, d.index));
    snprintf(d.name, sizeof d.name, "%s", p.name);
    d.major = p.major; d.minor = p.minor; d.sms = p.multiProcessorCount;
    CUDA_CHECK(cudaDeviceGetAttribute(&d.clock_khz, cudaDevAttrClockRate, d.index));
    if (d.major < 8)
        fatal("%s (sm_%d%d) has no BF16 tensor cores: a card of compute capability 8.0 or newer is needed", d.name, d.major, d.minor);
    cudaFuncAttributes probe;
    cudaError_t e = cudaFuncGetAttributes(&probe, device_probe_kernel);
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction)
        fatal("this program holds no code for %s (sm_%d%d): rebuild it with that architecture in the Makefile's list", d.name, d.major, d.minor);
    CUDA_CHECK(e);
    CUDA_CHECK(cudaMemGetInfo(&d.free_bytes, &d.total_bytes));
    d.peak_flops = device_peak_flops(&d);
    return d;
}

#endif
