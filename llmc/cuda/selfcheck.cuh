// cuda/selfcheck.cuh: --check of the GPU program: driver, card, NVFP4, attention, disk. Works on any machine: where there is no card it says so. Takes
// some seconds and less than a GiB of device memory.
#ifndef LLMC_CUDA_SELFCHECK_CUH
#define LLMC_CUDA_SELFCHECK_CUH

#include "attention.cuh"
#include "device.cuh"
#include "selfcheck_nvfp4.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The card

// Whether a card answers; a line on the driver.
FN int selfcheck_driver(SelfCheck *s) {
    int count = 0, driver = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    const int have_major = driver / 1000, have_minor = driver % 1000 / 10, need_major = CUDART_VERSION / 1000, need_minor = CUDART_VERSION % 1000 / 10;
    if (e == cudaErrorInsufficientDriver && driver > 0)
        selfcheck_line(s, 0, "driver: it supports CUDA %d.%d, this program was built with %d.%d: update it, or build with a toolkit no newer than it", have_major, have_minor,
                       need_major, need_minor);
    else if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || (e == cudaSuccess && count == 0))
        selfcheck_line(s, 0, "driver: no NVIDIA GPU was found (is the driver loaded? is CUDA_VISIBLE_DEVICES empty?): the CPU program trains without one");
    else if (e != cudaSuccess)
        selfcheck_line(s, 0, "driver: %s (%s): restart the machine's driver, or look into nvidia-smi", cudaGetErrorString(e), cudaGetErrorName(e));
    else {
        selfcheck_line(s, 1, "driver: supports CUDA %d.%d, this program was built with %d.%d; %d card%s", have_major, have_minor, need_major, need_minor, count, count > 1 ? "s" : "");
        return 1;
    }
    return 0;
}
// Whether this program runs on the current card. major: its compute capability's.
FN int selfcheck_card(SelfCheck *s, int *major) {
    cudaDeviceProp p;
    cudaFuncAttributes probe;
    int index = 0;
    size_t free_bytes = 0, total_bytes = 0;
    cudaError_t e = cudaGetDevice(&index);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, index);
    if (e == cudaSuccess) e = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (e != cudaSuccess) { selfcheck_line(s, 0, "card: %s (%s): is it in use by someone else, or broken? see nvidia-smi", cudaGetErrorString(e), cudaGetErrorName(e)); return 0; }
    *major = p.major;
    const cudaError_t code = cudaFuncGetAttributes(&probe, device_probe_kernel);
    (void)cudaGetLastError();
    const int enough = p.major >= 8, built = code == cudaSuccess;
    selfcheck_line(s, enough && built, "card %d: %s, sm_%d%d, %d SMs, %.1f of %.1f GiB free%s", index, p.name, p.major, p.minor, p.multiProcessorCount, (double)free_bytes / 1073741824.0,
                   (double)total_bytes / 1073741824.0, !enough ? ": it has no BF16 tensor cores; compute capability 8.0 is needed"
                   : built ? "" : ": this program holds no code for it; add its architecture to the Makefile's list and build again");
    return enough && built;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention: a small forward against float64 on the host, and a sum that its backward must keep

enum { CHECK_B = 2, CHECK_T = 64, CHECK_HEADS = 2, CHECK_D = 64, CHECK_ROW = (CHECK_HEADS + 2) * CHECK_D };  // one key/value head for both

// Largest error of out, in units of its bound: weights are rounded to BF16 (2^-9 each) before they meet v, and so is the result; twice that.
FN double attention_error(const float *out, const float *qkv) {
    double worst = 0;
    for (int b = 0; b < CHECK_B; b++) for (int h = 0; h < CHECK_HEADS; h++) for (int t = 0; t < CHECK_T; t++) {
        double weight[CHECK_T], sum = 0, most = -INFINITY;
        const float *q = qkv + (int64_t)(b * CHECK_T + t) * CHECK_ROW + h * CHECK_D;
        for (int j = 0; j <= t; j++) {
            const float *k = qkv + (int64_t)(b * CHECK_T + j) * CHECK_ROW + CHECK_HEADS * CHECK_D;
            double dot = 0;
            for (int d = 0; d < CHECK_D; d++) dot += (double)q[d] * k[d];
            weight[j] = dot / sqrt((double)CHECK_D);
            if (weight[j] > most) most = weight[j];
        }
        for (int j = 0; j <= t; j++) sum += weight[j] = exp(weight[j] - most);
        for (int d = 0; d < CHECK_D; d++) {
            double value = 0, size = 0;
            for (int j = 0; j <= t; j++) {
                const double v = qkv[(int64_t)(b * CHECK_T + j) * CHECK_ROW + (CHECK_HEADS + 1) * CHECK_D + d] * weight[j] / sum;
                value += v; size += fabs(v);
            }
            const double error = fabs(out[((int64_t)(b * CHECK_T + t) * CHECK_HEADS + h) * CHECK_D + d] - value) / (size * 0x1p-7 + 1e-30);
            if (!(error <= worst)) worst = error == error ? error : INFINITY;
        }
    }
    return worst;
}
// A row of weights sums to 1, so the sum of dV over a sequence is that of dout over it and both heads. Largest error in units of its bound (as above).
FN double attention_backward_error(const float *dqkv, const float *dout) {
    double worst = 0;
    for (int b = 0; b < CHECK_B; b++) for (int d = 0; d < CHECK_D; d++) {
        double difference = 0, size = 0;
        for (int t = 0; t < CHECK_T; t++) {
            difference += dqkv[(int64_t)(b * CHECK_T + t) * CHECK_ROW + (CHECK_HEADS + 1) * CHECK_D + d];
            for (int h = 0; h < CHECK_HEADS; h++) {
                const double g = dout[((int64_t)(b * CHECK_T + t) * CHECK_HEADS + h) * CHECK_D + d];
                difference -= g; size += fabs(g);
            }
        }
        const double error = fabs(difference) / (size * 0x1p-7 + 1e-30);
        if (!(error <= worst)) worst = error == error ? error : INFINITY;
    }
    return worst;
}
FN void selfcheck_attention(SelfCheck *s) {
    DeviceArena arena;
    arena.count = 0;
    const int64_t n_qkv = (int64_t)CHECK_B * CHECK_T * CHECK_ROW, n_out = (int64_t)CHECK_B * CHECK_T * CHECK_HEADS * CHECK_D;
    bf16 *qkv = arena_normal(&arena, n_qkv, 4), *dout = arena_normal(&arena, n_out, 5), *out = (bf16 *)arena_take(&arena, n_out * 2);
    bf16 *dqkv[2] = {(bf16 *)arena_take(&arena, n_qkv * 2), (bf16 *)arena_take(&arena, n_qkv * 2)};
    float *lse = (float *)arena_take(&arena, (int64_t)CHECK_B * CHECK_HEADS * CHECK_T * 4);
    AttentionPlan *p = attention_create(CHECK_B, CHECK_T, CHECK_HEADS, 1, CHECK_D, ATTENTION_AUTO, 0);
    attention_forward(p, out, lse, qkv, 0);
    for (int i = 0; i < 2; i++) attention_backward(p, dqkv[i], dout, out, lse, qkv, NULL, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    float *values = emulated_values(qkv, 1, n_qkv, 0), *result = emulated_values(out, 1, n_out, 0), *d = emulated_values(dout, 1, n_out, 0);
    float *gradient = emulated_values(dqkv[0], 1, n_qkv, 0), *again = emulated_values(dqkv[1], 1, n_qkv, 0);
    const double forward = attention_error(result, values), backward = attention_backward_error(gradient, d);
    const int same = memcmp(gradient, again, (size_t)n_qkv * sizeof(float)) == 0;
    selfcheck_line(s, forward <= 1 && backward <= 1 && same, "attention by %s: error %.3f of its bound forward, %.3f backward%s", attention_plan_name(p), forward, backward,
                   same ? ", the same bits twice" : ", and two runs differ: try --attention flash");
    free(values); free(result); free(d); free(gradient); free(again);
    attention_free(p);
    arena_free(&arena);
}

// NCCL starts on this card, and a sum over one rank is what went in. (Several cards are what only a run on them can tell.)
FN void selfcheck_nccl(SelfCheck *s) {
#ifdef USE_NCCL
    enum { COUNT = 4096 };
    DeviceArena arena;
    ncclComm_t comm;
    int version = 0, device = 0, wrong = 0;
    arena.count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    bf16 *in = arena_normal(&arena, COUNT, 6), *out = (bf16 *)arena_take(&arena, COUNT * 2);
    ncclResult_t e = ncclGetVersion(&version);
    if (e == ncclSuccess) e = ncclCommInitAll(&comm, 1, &device);
    if (e == ncclSuccess) {
        e = ncclAllReduce(in, out, COUNT, ncclBfloat16, ncclSum, comm, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
        ncclCommDestroy(comm);
        float *a = emulated_values(in, 1, COUNT, 0), *b = emulated_values(out, 1, COUNT, 0);
        wrong = memcmp(a, b, COUNT * sizeof(float)) != 0;
        free(a); free(b);
    }
    arena_free(&arena);
    if (e != ncclSuccess) selfcheck_line(s, 0, "NCCL %d.%d.%d: %s; one card trains without it; NCCL_DEBUG=INFO says more", version / 10000, version / 100 % 100, version % 100, ncclGetErrorString(e));
    else selfcheck_line(s, !wrong, "NCCL %d.%d.%d: a sum over one rank %s", version / 10000, version / 100 % 100, version % 100, wrong ? "is not what went in" : "is what went in");
#else
    (void)s;
    selfcheck_note("NCCL: this program was built without it, and trains on one card");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------

// The GPU program's --check; out: the folder of --out. -> exit status, 0 if everything that training needs is right.
FN int selfcheck_run_gpu(const char *out) {
    SelfCheck s;
    int major = 0;
    s.right = s.wrong = 0;
    selfcheck_machine();
    selfcheck_arithmetic(&s);
    if (selfcheck_driver(&s) && selfcheck_card(&s, &major)) {
        const double start = clock_seconds();
        selfcheck_nvfp4(&s, major);
        selfcheck_attention(&s);
        selfcheck_nccl(&s);
        selfcheck_note("the card's checks took %.1f s", clock_seconds() - start);
    } else selfcheck_note("NVFP4, attention and NCCL were not checked: no card that this program can use");
    selfcheck_disk(&s, out);
    return selfcheck_finish(&s);
}

#endif
