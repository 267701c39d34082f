// cuda/dist_nccl.cuh: what several GPUs do together: gradients reduced while backward goes on, the update, and ZeRO-1. One GPU a process.
//
// A bucket (llama_bucket) whose gradients are complete is reduced on a stream of its own, which waits for the compute stream by an event;
// the update waits for that stream. NCCL moves the data, in place; its sums are the same on every rank, and from run to run on the same
// machines. --dist-host-staged, for tests, moves it through pinned host memory and dist.h's own exchanges instead: the same calls at the
// same places, so that two processes can share one card (NCCL refuses that).
//
// --reduce-dtype bf16: float32 gradients are packed to BF16 for their way. Under --grad-dtype bf16 the layers' travel as they are.
#ifndef LLMC_CUDA_DIST_NCCL_CUH
#define LLMC_CUDA_DIST_NCCL_CUH

#ifdef USE_NCCL
#include <nccl.h>
#endif

#include "../shard.h"
#include "memory.cuh"

typedef struct {
    cudaStream_t stream;                   // of the exchanges
    cudaEvent_t ready, done;               // compute has got there; the exchanges have
    bf16 *packed;                          // (largest bucket) BF16 on its way, NULL: not needed
    float *host;                           // pinned, (largest bucket) or NULL
#ifdef USE_NCCL
    ncclComm_t comm;
#endif
} DistDevice;
static DistDevice dist_device;             // the process's: it has one model where ranks > 1

#ifdef USE_NCCL
#define NCCL_CHECK(call) nccl_check((call), #call)
FN void nccl_check(ncclResult_t e, const char *call) {
    if (e != ncclSuccess) fatal("%s failed: %s; NCCL_DEBUG=INFO says more", call, ncclGetErrorString(e));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Setting up

// The rank's card: the local rank's, or the only one that the launcher shows it. Before anything else touches a card.
FN void dist_device_select(const LlamaOptions *o) {
    int cards = 0;
    if (llama_ranks(o) == 1) return;
    device_check_driver();
    CUDA_CHECK(cudaGetDeviceCount(&cards));
    if (dist_local_rank() >= cards && cards > 1 && !o->host_staged)
        fatal("local rank %d has no GPU: its host has %d, local ranks count from 0; start at most one process a GPU", dist_local_rank(), cards);
    CUDA_CHECK(cudaSetDevice(dist_local_rank() % cards));
}
// No two ranks may have one card, but with host-staged exchange.
FN void dist_device_check(const LlamaOptions *o) {
    typedef struct { char host[DIST_HOST_TEXT], card[32]; } Place;
    Place mine, *all = (Place *)xcalloc((size_t)llama_ranks(o), sizeof(Place));
    int device;
    memset(&mine, 0, sizeof mine);
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.card, (int)sizeof mine.card, device));
    snprintf(mine.host, sizeof mine.host, "%s", dist_host(dist_rank()));
    dist_gather(&mine, sizeof mine, all);
    for (int r = 0; r < llama_ranks(o) && !o->host_staged; r++)
        for (int q = 0; q < r; q++)
            if (strcmp(all[q].host, all[r].host) == 0 && strcmp(all[q].card, all[r].card) == 0)
                dist_fatal_together("ranks %d and %d on %s have one GPU (%s); start one process a GPU", q, r, all[r].host, all[r].card);
    free(all);
}
FN int64_t largest_bucket(const LlamaOptions *o, const ParamTable *t) {
    int64_t most = 0;
    for (int i = 0; i < llama_bucket_count(&o->config); i++) most = larger(most, llama_bucket(&o->config, t, i).count);
    return most;
}
// Device memory that the exchanges take besides NCCL's own.
FN int64_t dist_device_bytes(const LlamaOptions *o, const ParamTable *t) {
    return llama_ranks(o) > 1 && o->reduce_bf16 && !o->host_staged ? 2 * largest_bucket(o, t) : 0;
}
FN void dist_device_open(Llama *m) {
    const LlamaOptions *o = &m->options;
    DistDevice *d = &dist_device;
    if (llama_ranks(o) == 1) return;
    dist_device_check(o);
    CUDA_CHECK(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&d->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&d->done, cudaEventDisableTiming));
    if (o->host_staged) {
        CUDA_CHECK(cudaMallocHost((void **)&d->host, (size_t)largest_bucket(o, &m->table) * sizeof(float)));
        return;
    }
    if (dist_device_bytes(o, &m->table)) CUDA_CHECK(cudaMalloc((void **)&d->packed, (size_t)dist_device_bytes(o, &m->table)));
#ifdef USE_NCCL
    ncclUniqueId id;
    if (dist_rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    dist_broadcast(&id, sizeof id, 0);
    watch_enter();
    const ncclResult_t opened = ncclCommInitRank(&d->comm, llama_ranks(o), id, dist_rank());
    if (opened == ncclUnhandledCudaError || opened == ncclSystemError) {
        size_t available = 0, all = 0;
        (void)cudaMemGetInfo(&available, &all);
        fatal("NCCL cannot connect the GPUs: %s (%s); %.2f GiB are free on this GPU: where memory is what lacks, a smaller --batch leaves more; NCCL_DEBUG=INFO says more",
              ncclGetErrorString(opened), ncclGetLastError(NULL), (double)available / (1 << 30));
    }
    NCCL_CHECK(opened);
    watch_leave();
#else
    fatal("this program was built without NCCL: it trains on one GPU; install NCCL or set NCCL_HOME, 'make probe' and 'make' again");
#endif
}
FN void dist_device_close(Llama *m) {
    DistDevice *d = &dist_device;
    if (llama_ranks(&m->options) == 1) return;
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
#ifdef USE_NCCL
    if (d->comm) NCCL_CHECK(ncclCommDestroy(d->comm));
#endif
    CUDA_CHECK(cudaFree(d->packed));
    CUDA_CHECK(cudaFreeHost(d->host));
    CUDA_CHECK(cudaEventDestroy(d->ready));
    CUDA_CHECK(cudaEventDestroy(d->done));
    CUDA_CHECK(cudaStreamDestroy(d->stream));
    memset(d, 0, sizeof *d);
}
// ZeRO-1: the optimizer state's arena holds this rank's part only. After every memory_layout(), which lays out all of it.
FN void adam_shard(Llama *m) {
    Arena *a = &m->arenas[ARENA_ADAM];
    if (!state_is_sharded(&m->options, LLAMA_ADAM_M)) return;
    a->used = 0;
    m->adam_m = arena_floats(a, owned_count(&m->options, &m->table));
    m->adam_v = arena_floats(a, owned_count(&m->options, &m->table));
    m->plan[PLAN_ADAM] = a->used;
}
// Waits for an event that may hang on another rank's exchange: the watching threads see the wait and mind its length.
FN void dist_event_wait(const LlamaOptions *o, cudaEvent_t event) {
    cudaError_t e;
    if (llama_ranks(o) == 1) { CUDA_CHECK(cudaEventSynchronize(event)); return; }
    watch_wait();
    while ((e = cudaEventQuery(event)) == cudaErrorNotReady) {
        (void)cudaGetLastError();                          // "not ready" would be found by the next launch's check
#ifdef USE_NCCL
        ncclResult_t failed = ncclSuccess;
        if (dist_device.comm) NCCL_CHECK(ncclCommGetAsyncError(dist_device.comm, &failed));
        if (failed != ncclSuccess && failed != ncclInProgress) {
            net_sleep(2);                                  // where a rank died, the watching threads know which, and end this process
            fatal("an exchange between the GPUs failed: %s (%s); the last checkpoint stands, go on with --resume auto; NCCL_DEBUG=INFO says more",
                  ncclGetErrorString(failed), ncclGetLastError(dist_device.comm));
        }
#endif
        net_sleep(2e-5);
    }
    CUDA_CHECK(e);
    watch_leave();
}

// ---------------------------------------------------------------------------------------------------------------------
// Moving

__global__ static void pack_kernel(bf16 *to, const float *from, int64_t count) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) to[i] = __float2bfloat16_rn(from[i]);
}
__global__ static void unpack_kernel(float *to, const bf16 *from, int64_t count) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) to[i] = __bfloat162float(from[i]);
}
FN void exchange_begin(Llama *m) {                         // what compute has enqueued so far comes first
    CUDA_CHECK(cudaEventRecord(dist_device.ready, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(dist_device.stream, dist_device.ready, 0));
}
FN void exchange_end(Llama *m) {                           // compute goes on only after what was exchanged so far
    CUDA_CHECK(cudaEventRecord(dist_device.done, dist_device.stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, dist_device.done, 0));
}
enum { EXCHANGE_REDUCE, EXCHANGE_SCATTER, EXCHANGE_GATHER };  // all-reduce; reduce-scatter, all-gather of the pieces of dist_piece
#ifdef USE_NCCL
// In place. The last rank's piece is longer than the others' by `rest`.
FN void nccl_exchange(const LlamaOptions *o, int what, void *x, int64_t count, int is_bf16) {
    const ncclDataType_t type = is_bf16 ? ncclBfloat16 : ncclFloat32;
    const size_t size = is_bf16 ? 2 : 4, each = (size_t)(count / DIST_UNIT / llama_ranks(o) * DIST_UNIT), rest = (size_t)count - each * (size_t)llama_ranks(o);
    char *const own = (char *)x + (size_t)o->rank * each * size, *const tail = (char *)x + (size_t)llama_ranks(o) * each * size;
    const int last = llama_ranks(o) - 1;
    DistDevice *d = &dist_device;
    if (what == EXCHANGE_REDUCE) { NCCL_CHECK(ncclAllReduce(x, x, (size_t)count, type, ncclSum, d->comm, d->stream)); return; }
    NCCL_CHECK(ncclGroupStart());
    if (what == EXCHANGE_SCATTER) {
        if (each) NCCL_CHECK(ncclReduceScatter(x, own, each, type, ncclSum, d->comm, d->stream));
        if (rest) NCCL_CHECK(ncclReduce(tail, tail, rest, type, ncclSum, last, d->comm, d->stream));
    } else {
        if (each) NCCL_CHECK(ncclAllGather(own, x, each, type, d->comm, d->stream));
        if (rest) NCCL_CHECK(ncclBroadcast(tail, tail, rest, type, last, d->comm, d->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}
#endif
// The same through the host. as_bf16: float32 values travel in BF16.
FN void staged_exchange(int what, void *x, int64_t count, int is_bf16, int as_bf16) {
    DistDevice *d = &dist_device;
    uint16_t *const stored = (uint16_t *)d->host + count;  // the upper half: element i is read before it is overwritten
    const size_t bytes = (size_t)count * (is_bf16 ? 2 : 4);
    CUDA_CHECK(cudaMemcpyAsync(is_bf16 ? (void *)stored : (void *)d->host, x, bytes, cudaMemcpyDeviceToHost, d->stream));
    CUDA_CHECK(cudaStreamSynchronize(d->stream));
    for (int64_t i = 0; is_bf16 && i < count; i++) d->host[i] = bf16_decode(stored[i]);
    const DistType type = is_bf16 || as_bf16 ? DIST_BF16 : DIST_F32;
    if (what == EXCHANGE_REDUCE) dist_allreduce(d->host, count, type);
    else if (what == EXCHANGE_SCATTER) dist_reduce_scatter(d->host, count, type);
    else dist_allgather(d->host, count, type);
    uint16_t *const back = (uint16_t *)d->host;            // the lower half: element i was read before
    for (int64_t i = 0; is_bf16 && i < count; i++) back[i] = bf16_encode(d->host[i]);
    CUDA_CHECK(cudaMemcpyAsync(x, d->host, bytes, cudaMemcpyHostToDevice, d->stream));
    CUDA_CHECK(cudaStreamSynchronize(d->stream));          // the buffer is the next bucket's too
}
FN void device_exchange(Llama *m, int what, void *x, int64_t count, int is_bf16, int as_bf16) {
    if (m->options.host_staged) { staged_exchange(what, x, count, is_bf16, as_bf16); return; }
#ifdef USE_NCCL
    DistDevice *d = &dist_device;
    const int packs = as_bf16 && !is_bf16, blocks = 4 * m->device.sms;
    if (packs) pack_kernel<<<blocks, 256, 0, d->stream>>>(d->packed, (const float *)x, count);
    nccl_exchange(&m->options, what, packs ? (void *)d->packed : x, count, is_bf16 || packs);
    if (packs) unpack_kernel<<<blocks, 256, 0, d->stream>>>((float *)x, d->packed, count);
    CUDA_LAUNCHED();
#else
    (void)as_bf16; (void)is_bf16; (void)count; (void)x; (void)what;
    fatal("an exchange between GPUs in a program without NCCL: this is a bug");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// A step

// The bucket's gradients are complete, or will be when the stream gets here: they become the sum over ranks, with ZeRO-1 in this
// rank's piece only. At the end of the step's last micro-batch alone.
FN void bucket_reduce(Llama *m, int bucket) {
    if (llama_ranks(&m->options) == 1 || m->work.micro != m->options.micro_batches - 1) return;
    const ParamBucket b = llama_bucket(&m->options.config, &m->table, bucket);
    exchange_begin(m);
    device_exchange(m, m->options.zero ? EXCHANGE_SCATTER : EXCHANGE_REDUCE, gradient_at(&m->grads, b.first), b.count, gradient_is_bf16(&m->grads, b.first),
                    m->options.reduce_bf16);
}
// x (count) float64 becomes the sum over ranks.
FN void sums_reduce(Llama *m, double *x, int count) {
#ifdef USE_NCCL
    if (!m->options.host_staged) {
        NCCL_CHECK(ncclAllReduce(x, x, (size_t)count, ncclFloat64, ncclSum, dist_device.comm, dist_device.stream));
        return;
    }
#endif
    const size_t bytes = (size_t)count * sizeof(double);
    double *own = (double *)xcalloc((size_t)count, sizeof(double)), *all = (double *)xcalloc((size_t)count * (size_t)dist_size(), sizeof(double));
    CUDA_CHECK(cudaMemcpyAsync(own, x, bytes, cudaMemcpyDeviceToHost, dist_device.stream));
    CUDA_CHECK(cudaStreamSynchronize(dist_device.stream));
    dist_gather(own, bytes, all);
    memset(own, 0, bytes);
    for (int r = 0; r < dist_size(); r++)
        for (int i = 0; i < count; i++) own[i] += all[r * count + i];
    CUDA_CHECK(cudaMemcpyAsync(x, own, bytes, cudaMemcpyHostToDevice, dist_device.stream));
    CUDA_CHECK(cudaStreamSynchronize(dist_device.stream));
    free(own); free(all);
}
static __global__ void culprit_mark_kernel(double *loss_sum, int rank) { loss_sum[1] = culprit_mark(loss_sum[0], rank); }
// The update of a step that several ranks share. Loss and squared gradients are summed over ranks, each giving the squares of its
// pieces, whether it owns those or all: ZeRO-1 clips by the same bits.
FN void dist_update(Llama *m, const AdamWOptions *o, AdamWScalars k, float loss_scale) {
    const int buckets = llama_bucket_count(&m->options.config);
    exchange_end(m);
    for (int i = 0; i < buckets; i++) {
        const ParamBucket b = llama_bucket(&m->options.config, &m->table, i);
        const DistPiece p = dist_piece(b.count, m->options.rank, llama_ranks(&m->options));
        grad_norm_partial_launch(&m->adamw, b.first + p.first, p.count, i > 0, m->grad_norm_work, m->stream);
    }
    culprit_mark_kernel<<<1, 1, 0, m->stream>>>(m->loss_sum, m->options.rank);
    CUDA_LAUNCHED();
    exchange_begin(m);
    sums_reduce(m, (double *)m->grad_norm_work, GRAD_NORM_BLOCKS);
    sums_reduce(m, m->loss_sum, 2);
    exchange_end(m);
    grad_norm_finish_launch(m->step_stats, o->clip, m->loss_limit, m->norm_limit, m->loss_sum, loss_scale, m->grad_norm_work, m->stream);
    if (!m->options.zero) { adamw_launch(&m->adamw, k, m->options.seed, o->step, m->step_stats, m->stream); return; }
    for (int i = 0; i < buckets; i++) {
        const OwnedRun run = owned_run(&m->options, &m->table, i, m->options.rank);
        AdamWBuffers part = m->adamw;
        part.first = run.first; part.count = run.count;
        part.m = m->adam_m + run.state; part.v = m->adam_v + run.state;
        part.amax_count = 0;                               // the whole weights' amax is found by the next forward
        if (run.count) adamw_launch(&part, k, m->options.seed, o->step, m->step_stats, m->stream);
    }
    exchange_begin(m);
    for (int i = 0; i < buckets; i++) {
        const ParamBucket b = llama_bucket(&m->options.config, &m->table, i);
        device_exchange(m, EXCHANGE_GATHER, m->params + b.first, b.count, 1, 0);
        if (m->masters) device_exchange(m, EXCHANGE_GATHER, m->masters + b.first, b.count, 0, 0);
    }
    exchange_end(m);
    m->weights_changed = 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// State that is spread over ranks

FN void sharded_read(Llama *m, enum LlamaState what, const Param *p, float *values) {
    const OwnedRun run = owned_part(&m->options, &m->table, p, p->count, m->options.rank);
    float *own = (float *)xcalloc((size_t)run.count, sizeof(float));
    CUDA_CHECK(cudaMemcpy(own, (what == LLAMA_ADAM_M ? m->adam_m : m->adam_v) + run.state, (size_t)run.count * sizeof(float), cudaMemcpyDeviceToHost));
    owned_gather(&m->options, &m->table, p, own, values);
    free(own);
}
FN void sharded_write(Llama *m, enum LlamaState what, const Param *p, const float *values) {
    const OwnedRun run = owned_part(&m->options, &m->table, p, p->count, m->options.rank);
    if (run.count == 0) return;
    CUDA_CHECK(cudaMemcpy((what == LLAMA_ADAM_M ? m->adam_m : m->adam_v) + run.state, values + (run.first - p->offset), (size_t)run.count * sizeof(float),
                          cudaMemcpyHostToDevice));
}

#endif
