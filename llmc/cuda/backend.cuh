// cuda/backend.cuh: the model on one GPU. It implements the interface of llama.h.
//
// BF16 parameters and activations; float32 statistics, optimizer state and (--grad-dtype) gradients. Everything runs on one stream; the host runs ahead of
// it: inside a step nothing is allocated and nothing waits. Loss and gradient norm come back through pinned memory one step late.
// A step: llama_step_begin -> llama_micro_step for each micro-batch (step.cuh) -> llama_step_end: norm, clip, AdamW.
// The same command gives the same bits: no sum depends on the order in which blocks finish.
//
// No CUDA graphs: they save launches, and a launch costs the GPU nothing while the host is ahead. dev/bench/bench_gpu.cu prints the
// host's time to enqueue a step beside the step's, and the same step replayed as one graph. Against a graph speaks that the step's
// number, learning rate and random addresses, kernel arguments now, would have to reach the kernels through device memory.
#ifndef LLMC_CUDA_BACKEND_CUH
#define LLMC_CUDA_BACKEND_CUH

#include "memory.cuh"
#include "step.cuh"

#define LLAMA_STEP_LAG 1           // steps that llama_step_result may be behind llama_step_end

// ---------------------------------------------------------------------------------------------------------------------
// The plan

FN void model_check(const LlamaOptions *o) {
    const LlamaConfig *c = &o->config;
    if (c->layers < 1 || c->width < 1 || c->heads < 1 || c->kv_heads < 1 || c->ffn < 1 || c->vocab < 1 || c->seq < 1 || o->batch < 1 ||
        o->micro_batches < 1 || c->width % c->heads || c->heads % c->kv_heads)
        fatal("a model of %d layers, width %d, heads %d, kv_heads %d, ffn %d, vocab %d, seq %d, batch %d x %d is impossible: all must be positive, "
              "heads divide width, kv_heads divide heads",
              c->layers, c->width, c->heads, c->kv_heads, c->ffn, c->vocab, c->seq, o->batch, o->micro_batches);
    if (c->width % 128 || c->ffn % 128 || llama_qkv_rows(c) % 128 || (int64_t)o->batch * c->seq % 128 || c->vocab % 8)
        fatal("width %d, ffn %d, q+k+v width %d and batch*seq %lld must be multiples of 128, vocab %d a multiple of 8: change the model's "
              "configuration or --batch", c->width, c->ffn, llama_qkv_rows(c), (long long)o->batch * c->seq, c->vocab);
    if (o->recompute < RECOMPUTE_NORM || o->recompute > RECOMPUTE_BLOCK) fatal("recompute %d is none of norm, none, mlp, block", o->recompute);
    if (o->nvfp4_gemm < NVFP4_GEMM_AUTO || o->nvfp4_gemm > NVFP4_GEMM_EMULATED) fatal("nvfp4_gemm %d is none of auto, native, emulated", o->nvfp4_gemm);
    if (o->attention < ATTENTION_AUTO || o->attention > ATTENTION_FLASH) fatal("attention %d is none of auto, cudnn, flash", o->attention);
}
// Which product NVFP4 operands meet, and the words for it (llama_products).
FN void model_choose(Llama *m) {
    char why[256];
    native_choose(&m->recipe_plan, (Nvfp4GemmMode)m->options.nvfp4_gemm, why, sizeof why);
    if (plan_has_nvfp4(&m->recipe_plan)) snprintf(m->products, sizeof m->products, "%s: %s", m->recipe_plan.native ? "native" : "emulated in BF16", why);
}
// Sizes and the memory plan; no device memory that stays. attention: its plan, or NULL where only bytes matter.
FN void model_shape(Llama *m, const LlamaOptions *o, AttentionPlan *attention) {
    memset(m, 0, sizeof *m);
    model_check(o);
    m->options = *o;
    m->table = llama_param_table(&o->config);
    m->M = (int64_t)o->batch * o->config.seq;
    m->layers = (LlamaLayer *)xcalloc((size_t)o->config.layers, sizeof(LlamaLayer));
    m->layer_end = (int64_t *)xcalloc((size_t)o->config.layers, sizeof(int64_t));
    m->recipe_plan = linear_plan(o->recipe, fp8_gemm_supported());
    m->plain_plan = linear_plan(recipe_find("bf16"), 0);
    model_choose(m);
    if (plan_bytes(&m->recipe_plan, GEMM_FORWARD, OPERAND_A) && o->config.seq % 16)
        fatal("--seq %d: FP8 products take multiples of 16 tokens; change --seq, or take another --recipe", o->config.seq);
    m->work.weights_kept = o->micro_batches > 1;
    m->work.kept_rows = m->M;
    m->work.seed = o->seed; m->work.rank = o->rank;
    m->attention = attention;
    m->plan[PLAN_ATTENTION] = attention ? attention->workspace_bytes : 0;
    memory_layout(m);                                      // counts
    memory_layout(m);                                      // and once more, now that the overlap is known
    adam_shard(m);
}
FN void model_shape_free(Llama *m) {
    free(m->layers); free(m->layer_end); free(m->table.params);
}
FN int64_t plan_total(const Llama *m) {
    int64_t total = 0;
    for (int i = 0; i < PLAN_COUNT; i++) total += m->plan[i];
    return total;
}
FN AttentionPlan *model_attention(const LlamaOptions *o) {
    const LlamaConfig *c = &o->config;
    return attention_create(o->batch, c->seq, c->heads, c->kv_heads, llama_head_dim(c), (AttentionBackend)o->attention, 0);
}
FN int llama_plan(const LlamaOptions *o, MemoryItem *items, int capacity) {
    Llama m;
    model_check(o);
    dist_device_select(o);
    device_open();
    AttentionPlan *attention = model_attention(o);
    model_shape(&m, o, attention);
    int n = 0;
    for (int i = 0; i < PLAN_COUNT && n < capacity; i++) {
        if (m.plan[i] == 0) continue;
        items[n].what = i == PLAN_GRADS && o->grad_bf16 ? "gradients (BF16, outside the layers float32)" : PLAN_NAMES[i];
        items[n++].bytes = m.plan[i];
    }
    if (dist_device_bytes(o, &m.table) && n < capacity) {
        items[n].what = "gradients on their way between ranks (BF16)";
        items[n++].bytes = dist_device_bytes(o, &m.table);
    }
    if (n < capacity) items[n].bytes = -1;
    model_shape_free(&m);
    attention_free(attention);
    return n;
}
// Bytes of the same model with other options; attention's workspace counted as it is now.
FN double plan_gib(const Llama *m, int batch, int recompute, int grad_bf16) {
    LlamaOptions o = m->options;
    Llama other;
    o.batch = batch; o.recompute = recompute; o.grad_bf16 = grad_bf16;
    if ((int64_t)batch * o.config.seq % 128) return 0;
    model_shape(&other, &o, NULL);
    const double gib = (double)(plan_total(&other) + dist_device_bytes(&o, &other.table) + m->plan[PLAN_ATTENTION]) / (1 << 30);
    model_shape_free(&other);
    return gib;
}
// Refuses what does not fit, before anything is allocated, and says what would.
FN void memory_check(const Llama *m) {
    const double need = (double)(plan_total(m) + dist_device_bytes(&m->options, &m->table)) / (1 << 30), have = (double)m->device.free_bytes / (1 << 30);
    if (need <= have) return;
    const LlamaOptions *o = &m->options;
    const int half = o->batch / 2 > 0 ? o->batch / 2 : 1;
    fatal("the model needs %.2f GiB on the GPU, %s has %.2f GiB free: %.2f GiB too little. --recompute block takes %.2f GiB, --batch %d takes %.2f GiB, "
          "--grad-dtype bf16 takes %.2f GiB%s",
          need, m->device.name, have, need - have, plan_gib(m, o->batch, RECOMPUTE_BLOCK, o->grad_bf16), half,
          plan_gib(m, half, o->recompute, o->grad_bf16), plan_gib(m, o->batch, o->recompute, 1),
          o->master_fp32 ? ", --master-weights bf16 saves 4 bytes a parameter" : "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Create and free

// Values of about N(0,1)'s size, for GEMMs to be timed on: the power that zeros draw would flatter them.
__global__ static void fill_random_kernel(uint4 *words, int64_t count) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t w[4];
        for (int j = 0; j < 4; j++) {
            const uint32_t h = ((uint32_t)i * 4 + (uint32_t)j) * 0x9E3779B1u, x = (h ^ (h >> 15)) * 0x85EBCA77u;
            w[j] = (x & 0x803F803Fu) | 0x3F003F00u | ((x >> 3) & 0x00800080u);  // +-[0.5, 2) as BF16; each byte as FP8 below 2
        }
        words[i] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
FN void fill_random(Llama *m, void *p, int64_t bytes) {
    fill_random_kernel<<<m->device.sms * 4, 256, 0, m->stream>>>((uint4 *)p, bytes / 16);
    CUDA_LAUNCHED();
}
// Times a linear's GEMMs on operands in the activations' memory, W in its place. A product that something is done to goes where the passes have it.
FN void tune_linear(Llama *m, const Linear *l, int64_t rows) {
    char *const x = m->arenas[ARENA_ACTIVATIONS].base + GEMM_WORKSPACE_BYTES + 4096, *const y = x + (rows * l->K * 2 + 255) / 256 * 256;
    const int *const apart = l->plan->float_product;
    void *const product = m->work.product;
    gemm_tune(&m->gemm, linear_shape(l, GEMM_FORWARD, rows), apart[GEMM_FORWARD] ? product : y, x, l->w, m->stream);
    gemm_tune(&m->gemm, linear_shape(l, GEMM_DGRAD, rows), apart[GEMM_DGRAD] ? product : x, y, l->w, m->stream);
    gemm_tune(&m->gemm, linear_shape(l, GEMM_WGRAD, rows), apart[GEMM_WGRAD] ? product : l->dw, y, x, m->stream);
}
// Each layer's GEMMs; native ones with the outputs where the passes have them.
FN void tune_layer(Llama *m, LlamaLayer *l) {
    void *const y[LINEARS_PER_LAYER] = {l->qkv, m->small, l->gate_up, m->small}, *const dx[LINEARS_PER_LAYER] = {m->small, m->small, m->small, m->big};
    for (int i = 0; i < LINEARS_PER_LAYER; i++) {
        if (l->linear[i].plan->native) native_tune(&l->linear[i], &m->work, m->M, y[i], dx[i]);
        else tune_linear(m, &l->linear[i], m->M);
    }
}
FN void model_tune(Llama *m) {
    fill_random(m, m->arenas[ARENA_PARAMS].base, m->plan[PLAN_PARAMS]);
    fill_random(m, m->arenas[ARENA_ACTIVATIONS].base + GEMM_WORKSPACE_BYTES + 4096, m->layers_end - (int64_t)GEMM_WORKSPACE_BYTES - 4096);
    const Linear head = head_linear(m);
    tune_layer(m, &m->layers[0]);
    tune_layer(m, &m->layers[m->options.config.layers - 1]);  // which may have another plan
    tune_linear(m, &head, m->head_rows);
    if (m->M % m->head_rows) tune_linear(m, &head, m->M % m->head_rows);
}
FN void arenas_allocate(Llama *m) {
    for (int i = 0; i < ARENA_COUNT; i++) {
        if (m->arenas[i].used == 0) continue;
        cudaError_t e = cudaMalloc((void **)&m->arenas[i].base, (size_t)m->arenas[i].used);
        if (e != cudaSuccess)
            fatal("the GPU would not give %.2f GiB (%s) although %.2f GiB were free at the start: use a smaller --batch or --recompute block",
                  (double)m->arenas[i].used / (1 << 30), cudaGetErrorString(e), (double)m->device.free_bytes / (1 << 30));
    }
    memory_layout(m);
    adam_shard(m);
    attention_allocate(m->attention);
}
// AdamW's table of parameters: amax of the weights that the recipe quantizes comes from it.
FN void adamw_prepare(Llama *m) {
    AdamWSegment *segments = (AdamWSegment *)xcalloc((size_t)m->table.count, sizeof *segments);
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        segments[i].offset = p->offset;
        segments[i].decay = p->decay;
        segments[i].amax_slot = p->linear >= 0 && layer_plan(m, p->layer)->amax_w ? p->layer * LINEARS_PER_LAYER + p->linear : -1;
    }
    CUDA_CHECK(cudaMemcpy(m->segments, segments, (size_t)m->table.count * sizeof *segments, cudaMemcpyHostToDevice));
    free(segments);
    AdamWBuffers *b = &m->adamw;
    memset(b, 0, sizeof *b);
    b->params = m->params; b->masters = m->masters; b->m = m->adam_m; b->v = m->adam_v; b->grads = m->grads;
    b->count = m->table.total; b->segments = m->segments; b->segment_count = m->table.count;
    b->amax = m->amax_w; b->amax_count = m->recipe_plan.amax_w ? m->options.config.layers * LINEARS_PER_LAYER : 0;
}
FN void rope_prepare(Llama *m) {
    const LlamaConfig *c = &m->options.config;
    const size_t bytes = (size_t)c->seq * (size_t)llama_head_dim(c) / 2 * sizeof(float2);
    float2 *table = (float2 *)xcalloc(1, bytes);
    rope_table_fill(table, c->seq, llama_head_dim(c), c->rope_theta);
    CUDA_CHECK(cudaMemcpy(m->rope, table, bytes, cudaMemcpyHostToDevice));
    free(table);
}
FN void host_prepare(Llama *m) {
    CUDA_CHECK(cudaMallocHost((void **)&m->host_tokens, (size_t)m->M * 2 * TOKEN_SLOTS * sizeof(int32_t)));
    CUDA_CHECK(cudaMallocHost((void **)&m->host_stats, RESULT_SLOTS * sizeof(StepStats)));
    CUDA_CHECK(cudaMallocHost((void **)&m->host_loss, sizeof(double)));
    for (int i = 0; i < TOKEN_SLOTS; i++) CUDA_CHECK(cudaEventCreateWithFlags(&m->tokens_sent[i], cudaEventDisableTiming));
    for (int i = 0; i < RESULT_SLOTS; i++) { CUDA_CHECK(cudaEventCreate(&m->step_begun[i])); CUDA_CHECK(cudaEventCreate(&m->result_ready[i])); }
}
// A model whose parameters are zero. verbose: the GEMMs chosen and attention's backend are printed.
FN Llama *llama_create_verbose(const LlamaOptions *o, int verbose) {
    Llama *m = (Llama *)xcalloc(1, sizeof *m);
    model_check(o);
    dist_device_select(o);
    const Device device = device_open();
    model_shape(m, o, model_attention(o));
    m->device = device;
    memory_check(m);
    arenas_allocate(m);
    CUDA_CHECK(cudaStreamCreate(&m->stream));  // ordered with the default stream, on which plain copies from and to the host run
    gemm_open(&m->gemm, m->gemm_workspace, m->gemm_scalars, verbose);
    m->work.gemm = &m->gemm; m->work.stream = m->stream;
    model_tune(m);
    // What no kernel has written is NaN: a read of it would show in the first loss.
    CUDA_CHECK(cudaMemsetAsync(m->arenas[ARENA_ACTIVATIONS].base + GEMM_WORKSPACE_BYTES + 4096, 0xFF,
                               (size_t)(m->arenas[ARENA_ACTIVATIONS].used - (int64_t)GEMM_WORKSPACE_BYTES - 4096), m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->arenas[ARENA_PARAMS].base, 0, (size_t)m->arenas[ARENA_PARAMS].used, m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->arenas[ARENA_ADAM].base, 0, (size_t)m->arenas[ARENA_ADAM].used, m->stream));
    CUDA_CHECK(cudaMemsetAsync(m->grads.base, 0, (size_t)gradient_bytes(&m->grads, m->table.total), m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    adamw_prepare(m);
    rope_prepare(m);
    host_prepare(m);
    dist_device_open(m);
    m->weights_changed = 1;
    m->loss_limit = m->norm_limit = INFINITY;
    if (verbose) printf("attention by %s\n", attention_plan_name(m->attention));
    return m;
}
FN Llama *llama_create(const LlamaOptions *o) { return llama_create_verbose(o, 0); }
FN void llama_free(Llama *m) {
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    dist_device_close(m);
    gemm_close(&m->gemm);
    attention_free(m->attention);
    for (int i = 0; i < ARENA_COUNT; i++) CUDA_CHECK(cudaFree(m->arenas[i].base));
    CUDA_CHECK(cudaFreeHost(m->host_tokens));
    CUDA_CHECK(cudaFreeHost(m->host_stats));
    CUDA_CHECK(cudaFreeHost(m->host_loss));
    for (int i = 0; i < TOKEN_SLOTS; i++) CUDA_CHECK(cudaEventDestroy(m->tokens_sent[i]));
    for (int i = 0; i < RESULT_SLOTS; i++) { CUDA_CHECK(cudaEventDestroy(m->step_begun[i])); CUDA_CHECK(cudaEventDestroy(m->result_ready[i])); }
    CUDA_CHECK(cudaStreamDestroy(m->stream));
    model_shape_free(m);
    free(m->stats);
    free(m);
}
FN const ParamTable *llama_params(const Llama *m) { return &m->table; }
FN const char *llama_device_name(const Llama *m) { return m->device.name; }
FN const char *llama_products(const Llama *m) { return m->products[0] ? m->products : NULL; }
FN double llama_peak_flops(const Llama *m) { return m->device.peak_flops; }

// ---------------------------------------------------------------------------------------------------------------------
// State

// Host values (count) -> BF16 on the device. rounded: (count), for the way.
FN void bf16_write(bf16 *to, int64_t count, const float *values, uint16_t *rounded) {
    for (int64_t i = 0; i < count; i++) rounded[i] = bf16_encode(values[i]);
    CUDA_CHECK(cudaMemcpy(to, rounded, (size_t)count * 2, cudaMemcpyHostToDevice));
}
// Host values (count) -> elements first .. of a parameter, in both of its forms.
FN void params_write(Llama *m, int64_t first, int64_t count, const float *values, uint16_t *rounded) {
    bf16_write(m->params + first, count, values, rounded);
    if (m->masters) CUDA_CHECK(cudaMemcpy(m->masters + first, values, (size_t)count * 4, cudaMemcpyHostToDevice));
}
// Where a parameter's state lies; *is_bf16: in BF16, else in float32.
FN void *state_of(Llama *m, enum LlamaState what, const Param *p, int *is_bf16) {
    *is_bf16 = what == LLAMA_PARAMS ? !m->masters : what == LLAMA_GRADS && gradient_is_bf16(&m->grads, p->offset);
    if (what == LLAMA_GRADS) return gradient_at(&m->grads, p->offset);
    if (what == LLAMA_PARAMS) return *is_bf16 ? (void *)(m->params + p->offset) : (void *)(m->masters + p->offset);
    return (what == LLAMA_ADAM_M ? m->adam_m : m->adam_v) + p->offset;
}
// Gradients hold from the step's last micro_step to the next forward (memory.cuh).
FN void llama_read(Llama *m, enum LlamaState what, const Param *p, float *values) {
    int is_bf16;
    const void *const state = state_of(m, what, p, &is_bf16);
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    if (state_is_sharded(&m->options, what)) { sharded_read(m, what, p, values); return; }
    if (!is_bf16) {
        CUDA_CHECK(cudaMemcpy(values, state, (size_t)p->count * 4, cudaMemcpyDeviceToHost));
        return;
    }
    // BF16 arrives in the upper half of the caller's buffer and spreads from its front: element i is read before it is overwritten.
    uint16_t *const stored = (uint16_t *)values + p->count;
    CUDA_CHECK(cudaMemcpy(stored, state, (size_t)p->count * 2, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < p->count; i++) {
        const uint32_t word = (uint32_t)stored[i] << 16;
        memcpy(&values[i], &word, sizeof word);
    }
}
FN void llama_write(Llama *m, enum LlamaState what, const Param *p, const float *values) {
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    if (state_is_sharded(&m->options, what)) { sharded_write(m, what, p, values); return; }
    int is_bf16;
    void *const state = state_of(m, what, p, &is_bf16);
    if (what != LLAMA_PARAMS && !is_bf16) {
        CUDA_CHECK(cudaMemcpy(state, values, (size_t)p->count * 4, cudaMemcpyHostToDevice));
        return;
    }
    const int64_t run = 1 << 20;
    uint16_t *rounded = (uint16_t *)xcalloc((size_t)run, sizeof *rounded);
    for (int64_t i = 0; i < p->count; i += run) {
        const int64_t count = p->count - i < run ? p->count - i : run;
        if (what == LLAMA_PARAMS) params_write(m, p->offset + i, count, values + i, rounded);
        else bf16_write((bf16 *)state + i, count, values + i, rounded);
    }
    free(rounded);
    if (what == LLAMA_PARAMS) m->weights_changed = 1;
}
// Runs of a million values, in parallel; each thread has one run's memory.
FN void llama_init(Llama *m) {
    const int64_t run = 1 << 20;
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
#pragma omp parallel
    {
        CUDA_CHECK(cudaSetDevice(m->device.index));
        float *values = (float *)xcalloc((size_t)run, sizeof *values);
        uint16_t *rounded = (uint16_t *)xcalloc((size_t)run, sizeof *rounded);
        for (int t = 0; t < m->table.count; t++) {
            const Param *p = &m->table.params[t];
#pragma omp for schedule(dynamic) nowait
            for (int64_t i = 0; i < p->count; i += run) {
                const int64_t count = p->count - i < run ? p->count - i : run;
                param_initial_run(p, t, m->options.seed, i, count, values);
                params_write(m, p->offset + i, count, values, rounded);
            }
        }
        free(values); free(rounded);
    }
    m->weights_changed = 1;
}

#endif
