// cuda/profile.cuh: where a step's time goes, by kernel family, beside the floor of the same work: the bytes that it must move and
// the matrix products at the rate that each reaches alone. Costs nothing when off (a NULL profile).
#ifndef LLMC_CUDA_PROFILE_CUH
#define LLMC_CUDA_PROFILE_CUH

#include "common.cuh"

typedef enum {
    FAMILY_EMBEDDING, FAMILY_NORM, FAMILY_ROPE, FAMILY_ATTENTION_FORWARD, FAMILY_ATTENTION_BACKWARD, FAMILY_SWIGLU,
    FAMILY_QUANTIZE_X, FAMILY_QUANTIZE_W, FAMILY_EDEN_DY, FAMILY_EDEN_X, FAMILY_EDEN_W,
    FAMILY_GEMM_FORWARD, FAMILY_GEMM_DGRAD, FAMILY_GEMM_WGRAD, FAMILY_LM_HEAD, FAMILY_CROSS_ENTROPY, FAMILY_OPTIMIZER, FAMILY_OTHER,
    FAMILY_COUNT
} Family;
static const char *const FAMILY_NAMES[FAMILY_COUNT] = {
    "embedding", "rmsnorm", "rope", "attention forward", "attention backward", "swiglu",
    "quantize X", "quantize W", "rotate + eden dY", "re-quantize X", "re-quantize W",
    "gemm forward", "gemm dgrad", "gemm wgrad", "gemm lm_head", "cross-entropy", "norm + adamw", "other"
};

typedef struct {
    cudaEvent_t *events;           // (capacity + 1)
    int *family;
    int count, capacity;
    double ms[FAMILY_COUNT];       // measured, since profile_reset
    double bytes[FAMILY_COUNT];    // that the family must read and write
    double product_ms[FAMILY_COUNT];  // of its matrix products alone, as tuned
    int launches[FAMILY_COUNT];
} Profile;

FN Profile *profile_create(int capacity) {
    Profile *p = (Profile *)xcalloc(1, sizeof *p);
    p->capacity = capacity;
    p->events = (cudaEvent_t *)xcalloc((size_t)capacity + 1, sizeof *p->events);
    p->family = (int *)xcalloc((size_t)capacity, sizeof *p->family);
    for (int i = 0; i <= capacity; i++) CUDA_CHECK(cudaEventCreate(&p->events[i]));
    return p;
}
FN void profile_free(Profile *p) {
    if (!p) return;
    for (int i = 0; i <= p->capacity; i++) CUDA_CHECK(cudaEventDestroy(p->events[i]));
    free(p->events); free(p->family); free(p);
}
// What is launched from here to the next mark belongs to `family`. bytes: its least traffic; product_ms: of a matrix product.
FN void profile_mark(Profile *p, Family family, double bytes, double product_ms, cudaStream_t stream) {
    if (!p) return;
    if (p->count == p->capacity) fatal("a profile of more than %d marks: take fewer layers or micro-batches a profiled step", p->capacity);
    CUDA_CHECK(cudaEventRecord(p->events[p->count], stream));
    p->family[p->count++] = family;
    p->bytes[family] += bytes;
    p->product_ms[family] += product_ms;
    p->launches[family]++;
}
// Waits for the stream and adds the marks since the last call to the sums.
FN void profile_collect(Profile *p, cudaStream_t stream) {
    CUDA_CHECK(cudaEventRecord(p->events[p->count], stream));
    CUDA_CHECK(cudaEventSynchronize(p->events[p->count]));
    for (int i = 0; i < p->count; i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, p->events[i], p->events[i + 1]));
        p->ms[p->family[i]] += ms;
    }
    p->count = 0;
}
FN void profile_reset(Profile *p) {
    p->count = 0;
    memset(p->ms, 0, sizeof p->ms); memset(p->bytes, 0, sizeof p->bytes);
    memset(p->product_ms, 0, sizeof p->product_ms); memset(p->launches, 0, sizeof p->launches);
}

#endif
