// cpu/backend.h: the model on the CPU: float32 activations, readable first. It implements the interface of llama.h.
//
// The same command gives the same bits; the number of threads does not enter (gemm.h, ops.h).
//
// A step: llama_step_begin -> for each micro-batch llama_micro_step: model_forward -> head (lm_head, loss and their backward, some
// rows at a time, so that the logits of a whole batch never exist) -> model_backward -> llama_step_end: clip, AdamW.
#ifndef LLMC_CPU_BACKEND_H
#define LLMC_CPU_BACKEND_H

#include "../dist.h"
#include "../llama.h"
#include "../shard.h"
#include "attention.h"
#include "linear.h"
#include "overlap.h"
#include "ops.h"

#define LLAMA_STEP_LAG 0                // steps that llama_step_result may be behind llama_step_end
#define LOGITS_AT_ONCE (1 << 22)       // logits that exist at a time

// What one decoder layer keeps from forward for backward, and its weights.
typedef struct {
    float *x_attn, *x_ffn;              // (M,d) the residual stream as it enters attention, and the FFN
    float *rms_attn, *rms_ffn;          // (M) 1/rms of those rows
    float *qkv;                         // (M, d + 2 kv_width), rotary applied
    float *lse;                         // (B, heads, T) of the attention scores
    float *gate_up;                     // (M, 2 ffn)
    Linear linear[LINEARS_PER_LAYER];
    const float *attn_norm, *ffn_norm;  // (d) gains
    float *d_attn_norm, *d_ffn_norm;
} LlamaLayer;

// The five allocations of a model. Each is one block that named parts are cut from.
enum { BLOCK_PARAMS, BLOCK_GRADS, BLOCK_ADAM, BLOCK_OPERANDS, BLOCK_ACTIVATIONS, BLOCK_COUNT };
static const char *const BLOCK_NAMES[] = {"parameters", "gradients", "optimizer state", "quantized weights", "activations"};
typedef struct { char *base; int64_t used; } Arena;

struct Llama {
    LlamaOptions options;
    ParamTable table;
    Arena blocks[BLOCK_COUNT];
    int threads;
    char device[160];

    // With BF16 masters every value of params is a BF16 value held in a float32, so they are masters and working copy in one.
    float *params, *grads;              // (table.total) each
    float *adam_m, *adam_v;             // (state_count): all of it, or with zero this rank's pieces of the buckets, one after another
    int64_t state_count;
    LlamaLayer *layers;
    Linear head;                        // lm_head; its input is the final norm's output
    const float *embed, *final_norm;
    float *d_embed, *d_final_norm;
    float *x_final, *rms_final;         // (M,d) residual stream after the last layer; (M)
    float *cosines, *sines;             // (T, head_dim/2)

    float *logits;                      // (head_rows, vocab)
    int64_t head_rows;
    double *losses;                     // (M)
    float *d_stream;                    // (M,d) gradient of the residual stream
    float *d_small;                     // (M, max(d, ffn)) gradient of a linear's input
    float *d_big;                       // (M, max(2 ffn, d + 2 kv_width)) gradient of a linear's output
    float *norm_parts;                  // (NORM_PARTS, d)
    float *scores;                      // attention's work space
    LinearWork work;

    int weights_ready;                  // the linears' W operands belong to the parameters as they are
    LinearProbe *probes;                // (layers, LINEARS_PER_LAYER) while a micro-batch is measured
    LinearStats *stats;                 // what was measured last
    double loss_sum;                    // of the step so far, over tokens
    StepResult result;
    double step_began, step_seconds;    // clock_seconds() at the last llama_step_begin; to the end of llama_step_end
    float loss_limit, norm_limit;          // llama_step_limits
    Overlap overlap;                    // reduces gradients beside backward; without a thread in a single process
};

// ---------------------------------------------------------------------------------------------------------------------
// Memory. model_layout() runs twice: on empty arenas, to count, and on allocated ones, to set the pointers.

FN float *arena_floats(Arena *a, int64_t count) {
    int64_t bytes;
    if (count < 0 || __builtin_mul_overflow((count + 15) / 16 * 16, (int64_t)sizeof(float), &bytes) ||
        __builtin_add_overflow(a->used, bytes, &a->used))
        fatal("the model's size overflows 64 bits; use a smaller model, --batch or --seq");
    return a->base ? (float *)(a->base + a->used - bytes) : NULL;
}
FN uint8_t *arena_bytes(Arena *a, int64_t count) { return (uint8_t *)arena_floats(a, (count + 3) / 4); }
FN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

FN int recipe_rounds(const Recipe *r) {
    for (int g = 0; g < 3; g++)
        if (!operand_is_plain(&r->gemm[g].a) || !operand_is_plain(&r->gemm[g].b)) return 1;
    return 0;
}
FN void linear_layout(Llama *m, Linear *l, const Param *p, const Recipe *recipe, int64_t M, float *shared_x) {
    l->recipe = recipe;
    l->layer = p->layer < 0 ? 0 : p->layer;
    l->linear = p->linear < 0 ? 0 : p->linear;
    l->N = p->rows; l->K = p->cols;
    l->w = m->params ? m->params + p->offset : NULL;
    l->dw = m->grads ? m->grads + p->offset : NULL;
    Arena *act = &m->blocks[BLOCK_ACTIVATIONS];
    const int keeps = linear_keeps_x_operand(recipe);
    l->x = keeps ? shared_x : arena_floats(act, M * l->K);
    l->x_operand = keeps ? arena_floats(act, M * l->K) : NULL;
    l->w_operand = linear_rounds_w(recipe) ? arena_floats(&m->blocks[BLOCK_OPERANDS], p->count) : (float *)l->w;
    l->x_mask = linear_masks(recipe, GEMM_DGRAD) ? arena_bytes(act, M * l->K) : NULL;
    l->w_mask = linear_masks(recipe, GEMM_WGRAD) ? arena_bytes(&m->blocks[BLOCK_OPERANDS], p->count) : NULL;
    l->w_factor = l->x_factor = 1;
}
// The recipe of a layer's linears: BF16 in the last bf16_layers (float32 where the recipe's forward is so), as in lm_head.
FN const Recipe *plain_recipe(const Recipe *r) { return recipe_find(linear_rounds_w(r) ? "bf16" : "fp32"); }
FN const Recipe *layer_recipe(const LlamaOptions *o, int layer) {
    return layer < o->config.layers - o->bf16_layers ? o->recipe : plain_recipe(o->recipe);
}
FN void layer_layout(Llama *m, int index, int64_t M, float *shared_x) {
    const LlamaConfig *c = &m->options.config;
    static const ParamKind kinds[LINEARS_PER_LAYER] = {PARAM_QKV, PARAM_ATTN_OUT, PARAM_GATE_UP, PARAM_DOWN};
    LlamaLayer *l = &m->layers[index];
    Arena *act = &m->blocks[BLOCK_ACTIVATIONS];
    l->x_attn = arena_floats(act, M * c->width);
    l->x_ffn = arena_floats(act, M * c->width);
    l->rms_attn = arena_floats(act, M);
    l->rms_ffn = arena_floats(act, M);
    l->qkv = arena_floats(act, M * llama_qkv_rows(c));
    l->lse = arena_floats(act, M * c->heads);
    l->gate_up = arena_floats(act, M * 2 * c->ffn);
    for (int i = 0; i < LINEARS_PER_LAYER; i++)
        linear_layout(m, &l->linear[i], param_get(&m->table, kinds[i], index), layer_recipe(&m->options, index), M, shared_x);
    if (!m->params) return;
    const Param *attn = param_get(&m->table, PARAM_ATTN_NORM, index), *ffn = param_get(&m->table, PARAM_FFN_NORM, index);
    l->attn_norm = m->params + attn->offset; l->d_attn_norm = m->grads + attn->offset;
    l->ffn_norm = m->params + ffn->offset; l->d_ffn_norm = m->grads + ffn->offset;
}
// Work space that layers share.
FN void work_layout(Llama *m, int64_t M) {
    const LlamaConfig *c = &m->options.config;
    Arena *act = &m->blocks[BLOCK_ACTIVATIONS];
    const int64_t d = c->width, small = larger(d, c->ffn), big = larger(2 * c->ffn, llama_qkv_rows(c));
    const int64_t rows = LOGITS_AT_ONCE / c->vocab / 64 * 64;
    m->head_rows = rows < 64 ? 64 : rows;
    if (m->head_rows > M) m->head_rows = M;
    m->logits = arena_floats(act, m->head_rows * c->vocab);
    m->losses = (double *)arena_floats(act, 2 * M);
    m->d_stream = arena_floats(act, M * d);
    m->d_small = arena_floats(act, M * small);
    m->d_big = arena_floats(act, M * big);
    m->norm_parts = arena_floats(act, NORM_PARTS * d);
    m->scores = arena_floats(act, attention_work(c->seq, m->threads));
    m->cosines = arena_floats(act, (int64_t)c->seq * llama_head_dim(c) / 2);
    m->sines = arena_floats(act, (int64_t)c->seq * llama_head_dim(c) / 2);
    int64_t operand = linear_work(m->head_rows, c->vocab, d), product = 0;
    for (int i = 0; i < m->table.count; i++)
        if (m->table.params[i].linear >= 0) {
            operand = larger(operand, linear_work(M, m->table.params[i].rows, m->table.params[i].cols));
            product = larger(product, m->table.params[i].count);
        }
    if (!recipe_rounds(m->options.recipe)) operand = 0;
    m->work.a = arena_floats(act, operand);
    m->work.b = arena_floats(act, operand);
    m->work.product = linear_works_on_dw(m->options.recipe) ? arena_floats(act, product) : NULL;
}
FN void model_layout(Llama *m) {
    const LlamaOptions *o = &m->options;
    const LlamaConfig *c = &o->config;
    const int64_t M = (int64_t)o->batch * c->seq, total = m->table.total;
    Arena *act = &m->blocks[BLOCK_ACTIVATIONS];
    m->params = arena_floats(&m->blocks[BLOCK_PARAMS], total);
    m->grads = arena_floats(&m->blocks[BLOCK_GRADS], total);
    m->adam_m = arena_floats(&m->blocks[BLOCK_ADAM], m->state_count);
    m->adam_v = arena_floats(&m->blocks[BLOCK_ADAM], m->state_count);
    float *shared_x = linear_keeps_x_operand(o->recipe) ? arena_floats(act, M * larger(c->width, c->ffn)) : NULL;
    for (int l = 0; l < c->layers; l++) layer_layout(m, l, M, shared_x);
    m->x_final = arena_floats(act, M * c->width);
    m->rms_final = arena_floats(act, M);
    // lm_head is not quantized: BF16 operands, or float32 where the recipe's forward leaves its operands so.
    linear_layout(m, &m->head, param_get(&m->table, PARAM_LM_HEAD, -1), plain_recipe(o->recipe), M, NULL);
    work_layout(m, M);
    if (!m->params) return;
    const Param *embed = param_get(&m->table, PARAM_EMBED, -1), *norm = param_get(&m->table, PARAM_FINAL_NORM, -1);
    m->embed = m->params + embed->offset; m->d_embed = m->grads + embed->offset;
    m->final_norm = m->params + norm->offset; m->d_final_norm = m->grads + norm->offset;
}

// Refuses what no model can be, and what BLAS's 32-bit sizes and the 10 bits of a layer's random address cannot count.
FN void shape_check(const LlamaOptions *o) {
    const LlamaConfig *c = &o->config;
    const int big = 1 << 28;
    if (c->layers < 1 || c->width < 1 || c->heads < 1 || c->kv_heads < 1 || c->ffn < 1 || c->vocab < 1 || c->seq < 1 || o->batch < 1 ||
        o->micro_batches < 1 || c->width % c->heads || c->heads % c->kv_heads || llama_head_dim(c) % 2)
        fatal("a model of %d layers, width %d, heads %d, kv_heads %d, ffn %d, vocab %d, seq %d, batch %d x %d is impossible: all must be positive, "
              "heads divide width into even sizes, kv_heads divide heads",
              c->layers, c->width, c->heads, c->kv_heads, c->ffn, c->vocab, c->seq, o->batch, o->micro_batches);
    if (c->layers > 1024 || c->width > big || c->ffn > big || c->vocab > big || (int64_t)o->batch * c->seq > INT32_MAX)
        fatal("a model of %d layers, width %d, ffn %d, vocab %d, batch %d of %d tokens is too large: at most 1024 layers, %d wide, %d tokens a "
              "micro-batch; use a smaller --batch or --seq", c->layers, c->width, c->ffn, c->vocab, o->batch, c->seq, big, INT32_MAX);
}
// A model without memory: table, threads, and how much each block will take.
FN void model_shape(Llama *m, const LlamaOptions *o) {
    const LlamaConfig *c = &o->config;
    memset(m, 0, sizeof *m);
    shape_check(o);
    if (o->recompute != RECOMPUTE_NORM && o->recompute != RECOMPUTE_NONE)
        fatal("--recompute: the CPU backend keeps every activation and takes only none and norm");
    if (o->grad_bf16) fatal("--grad-dtype bf16: the CPU backend keeps gradients in float32; leave it out, or train with the GPU program");
    if (o->nvfp4_gemm == 1)
        fatal("--nvfp4-gemm native: the CPU backend multiplies decoded operands, exactly; use auto or emulated, or the GPU program on a Blackwell card");
    if (o->host_staged) fatal("--dist-host-staged: the CPU backend's exchanges go through host memory anyway; leave it out");
    if (o->attention) fatal("--attention: the CPU backend has one kind of attention and takes only auto");
    if (o->bf16_layers < 0 || o->bf16_layers > c->layers)
        fatal("--bf16-layers %d: the model has %d layers", o->bf16_layers, c->layers);
    recipe_check(o->recipe);
    m->options = *o;
    m->table = llama_param_table(c);
    m->layers = (LlamaLayer *)xcalloc((size_t)c->layers, sizeof(LlamaLayer));
    m->threads = thread_count();
    m->state_count = owned_count(o, &m->table);
    model_layout(m);
}
FN int llama_plan(const LlamaOptions *o, MemoryItem *items, int capacity) {
    Llama m;
    model_shape(&m, o);
    int n = 0;
    for (int i = 0; i < BLOCK_COUNT && n < capacity; i++) {
        if (m.blocks[i].used == 0) continue;
        items[n].what = BLOCK_NAMES[i];
        items[n++].bytes = m.blocks[i].used;
    }
    if (n < capacity) items[n].bytes = -1;
    free(m.layers);
    free(m.table.params);
    return n;
}

// "AMD EPYC, 2 threads"
FN void device_name(char *name, size_t size, int threads) {
    char model[96] = "CPU", line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");                             // absent outside Linux: then just "CPU"
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            snprintf(model, sizeof model, "%s", strchr(line, ':') + 2);
            model[strcspn(model, "\n")] = 0;
            break;
        }
    if (f) fclose(f);
    snprintf(name, size, "%s, %d thread%s", model, threads, threads == 1 ? "" : "s");
}
FN void bucket_reduce(void *context, int bucket);
FN Llama *llama_create(const LlamaOptions *o) {
    Llama *m = (Llama *)xcalloc(1, sizeof *m);
    model_shape(m, o);
    for (int i = 0; i < BLOCK_COUNT; i++) {
        m->blocks[i].base = (char *)xcalloc((size_t)m->blocks[i].used, 1);
        m->blocks[i].used = 0;
    }
    model_layout(m);
    rope_tables(m->cosines, m->sines, o->config.seq, llama_head_dim(&o->config), o->config.rope_theta);
    device_name(m->device, sizeof m->device, m->threads);
    m->work.seed = o->seed;
    m->work.rank = o->rank;
    llama_step_limits(m, INFINITY, INFINITY);
    if (llama_ranks(o) > 1 && !dist_main_only()) overlap_start(&m->overlap, llama_bucket_count(&o->config), bucket_reduce, m);
    return m;
}
FN void llama_free(Llama *m) {
    overlap_stop(&m->overlap);
    for (int i = 0; i < BLOCK_COUNT; i++) free(m->blocks[i].base);
    llama_stats_end(m);
    free(m->stats);
    free(m->layers);
    free(m->table.params);
    free(m);
}
FN const ParamTable *llama_params(const Llama *m) { return &m->table; }
FN const char *llama_device_name(const Llama *m) { return m->device; }
FN const char *llama_products(const Llama *m) { (void)m; return NULL; }
FN double llama_peak_flops(const Llama *m) { (void)m; return 0; }

// ---------------------------------------------------------------------------------------------------------------------
// State

FN float *state_of(Llama *m, enum LlamaState what, const Param *p) {
    float *base = what == LLAMA_PARAMS ? m->params : what == LLAMA_GRADS ? m->grads : what == LLAMA_ADAM_M ? m->adam_m : m->adam_v;
    return base + p->offset;
}
FN void llama_read(Llama *m, enum LlamaState what, const Param *p, float *values) {
    if (!state_is_sharded(&m->options, what)) {
        if (values) memcpy(values, state_of(m, what, p), (size_t)p->count * sizeof(float));
        return;
    }
    const float *state = what == LLAMA_ADAM_M ? m->adam_m : m->adam_v;
    const OwnedRun own = owned_part(&m->options, &m->table, p, p->count, m->options.rank);
    owned_gather(&m->options, &m->table, p, state + own.state, values);
}
// With BF16 masters, parameters are rounded to the nearest BF16 value.
FN void llama_write(Llama *m, enum LlamaState what, const Param *p, const float *values) {
    if (state_is_sharded(&m->options, what)) {
        const OwnedRun run = owned_part(&m->options, &m->table, p, p->count, m->options.rank);
        memcpy((what == LLAMA_ADAM_M ? m->adam_m : m->adam_v) + run.state, values + (run.first - p->offset), (size_t)run.count * sizeof(float));
        return;
    }
    float *to = state_of(m, what, p);
    memcpy(to, values, (size_t)p->count * sizeof(float));
    if (what != LLAMA_PARAMS) return;
    if (!m->options.master_fp32)
        for (int64_t i = 0; i < p->count; i++) to[i] = bf16_round(to[i]);
    m->weights_ready = 0;
}
FN void llama_init(Llama *m) {
    const int64_t run = 1 << 14;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < p->count; first += run) {
            const int64_t count = p->count - first < run ? p->count - first : run;
            float *to = m->params + p->offset + first;
            param_initial_run(p, i, m->options.seed, first, count, to);
            for (int64_t e = 0; e < count && !m->options.master_fp32; e++) to[e] = bf16_round(to[e]);
        }
    }
    m->weights_ready = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

FN void check_tokens(const int32_t *tokens, int64_t count, int vocab, const char *what) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            fatal("%s %d at position %lld of the batch is outside the vocabulary of %d; use data prepared for this vocabulary", what,
                  (int)tokens[i], (long long)i, vocab);
}
FN void weights_prepare(Llama *m) {
    if (m->weights_ready) return;
    for (int l = 0; l < m->options.config.layers; l++)
        for (int i = 0; i < LINEARS_PER_LAYER; i++) linear_quantize_weight(&m->layers[l].linear[i], &m->work);
    linear_quantize_weight(&m->head, &m->work);
    m->weights_ready = 1;
}
FN AttentionShape attention_shape(const Llama *m, int64_t B, int64_t T) {
    const LlamaConfig *c = &m->options.config;
    AttentionShape s;
    s.B = B; s.T = T; s.heads = c->heads; s.kv_heads = c->kv_heads; s.head_dim = llama_head_dim(c);
    return s;
}

// x_next (M,d) = the residual stream after layer l; l->x_attn holds it before.
FN void layer_forward(Llama *m, LlamaLayer *l, float *x_next, int64_t B, int64_t T) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = B * T, d = c->width;
    const AttentionShape shape = attention_shape(m, B, T);
    Linear *qkv = &l->linear[LINEAR_QKV], *attn_out = &l->linear[LINEAR_ATTN_OUT];
    Linear *gate_up = &l->linear[LINEAR_GATE_UP], *down = &l->linear[LINEAR_DOWN];

    rmsnorm_forward(qkv->x, l->rms_attn, l->x_attn, l->attn_norm, M, d, c->norm_eps);
    linear_forward(qkv, l->qkv, M, 0, &m->work);
    rope_apply(l->qkv, m->cosines, m->sines, M, T, qkv->N, c->heads + c->kv_heads, shape.head_dim, +1);
    attention_forward(attn_out->x, l->lse, l->qkv, &shape, m->scores, m->threads);
    memcpy(l->x_ffn, l->x_attn, (size_t)(M * d) * sizeof(float));
    linear_forward(attn_out, l->x_ffn, M, 1, &m->work);                // x_ffn = x_attn + attention

    rmsnorm_forward(gate_up->x, l->rms_ffn, l->x_ffn, l->ffn_norm, M, d, c->norm_eps);
    linear_forward(gate_up, l->gate_up, M, 0, &m->work);
    swiglu_forward(down->x, l->gate_up, M, c->ffn);
    memcpy(x_next, l->x_ffn, (size_t)(M * d) * sizeof(float));
    linear_forward(down, x_next, M, 1, &m->work);                      // x_next = x_ffn + FFN
}
// Tokens (B,T) -> the final norm's output, in m->head.x.
FN void model_forward(Llama *m, const int32_t *tokens, int64_t B, int64_t T) {
    const LlamaConfig *c = &m->options.config;
    check_tokens(tokens, B * T, c->vocab, "token");
    weights_prepare(m);
    embedding_forward(m->layers[0].x_attn, m->embed, tokens, B * T, c->width);
    for (int l = 0; l < c->layers; l++)
        layer_forward(m, &m->layers[l], l + 1 < c->layers ? m->layers[l + 1].x_attn : m->x_final, B, T);
    rmsnorm_forward(m->head.x, m->rms_final, m->x_final, m->final_norm, B * T, c->width, c->norm_eps);
}
// lm_head and loss of M rows. -> sum of the rows' losses. With scale != 0 also their backward, of scale * loss: the gradient
// of lm_head's input goes to m->d_small.
FN double model_head(Llama *m, const int32_t *targets, int64_t M, float scale) {
    const int64_t d = m->options.config.width, vocab = m->options.config.vocab;
    for (int64_t first = 0; first < M; first += m->head_rows) {
        const int64_t rows = M - first < m->head_rows ? M - first : m->head_rows;
        Linear part = m->head;                                         // the same layer on these rows
        part.x += first * d;
        linear_forward(&part, m->logits, rows, 0, &m->work);
        cross_entropy(m->losses + first, m->logits, targets + first, rows, vocab, scale);
        if (scale != 0) linear_backward(&part, m->d_small + first * d, m->logits, rows, &m->work);
    }
    double sum = 0;
    for (int64_t i = 0; i < M; i++) sum += m->losses[i];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// m->d_stream: gradient of the stream after layer l -> gradient of the stream before it.
FN void layer_backward(Llama *m, LlamaLayer *l, int64_t B, int64_t T) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = B * T, d = c->width;
    const AttentionShape shape = attention_shape(m, B, T);
    Linear *qkv = &l->linear[LINEAR_QKV];

    linear_backward(&l->linear[LINEAR_DOWN], m->d_small, m->d_stream, M, &m->work);
    swiglu_backward(m->d_big, m->d_small, l->gate_up, M, c->ffn);
    linear_backward(&l->linear[LINEAR_GATE_UP], m->d_small, m->d_big, M, &m->work);
    rmsnorm_backward(m->d_stream, l->d_ffn_norm, m->norm_parts, m->d_small, l->x_ffn, l->ffn_norm, l->rms_ffn, M, d);

    linear_backward(&l->linear[LINEAR_ATTN_OUT], m->d_small, m->d_stream, M, &m->work);
    attention_backward(m->d_big, m->d_small, l->qkv, l->lse, &shape, m->scores, m->threads);
    rope_apply(m->d_big, m->cosines, m->sines, M, T, qkv->N, c->heads + c->kv_heads, shape.head_dim, -1);
    linear_backward(qkv, m->d_small, m->d_big, M, &m->work);
    rmsnorm_backward(m->d_stream, l->d_attn_norm, m->norm_parts, m->d_small, l->x_attn, l->attn_norm, l->rms_attn, M, d);
}
// A bucket's gradients are complete: they become the sum over ranks; with ZeRO-1 only in the part that this rank owns.
FN void bucket_reduce(void *context, int bucket) {
    Llama *m = (Llama *)context;
    const ParamBucket b = llama_bucket(&m->options.config, &m->table, bucket);
    const DistType type = m->options.reduce_bf16 ? DIST_BF16 : DIST_F32;
    if (m->options.zero) dist_reduce_scatter(m->grads + b.first, b.count, type);
    else dist_allreduce(m->grads + b.first, b.count, type);
}
FN void bucket_complete(Llama *m, int bucket) {
    if (m->overlap.work) overlap_push(&m->overlap, bucket);
    else if (llama_ranks(&m->options) > 1) bucket_reduce(m, bucket);
}
// From the gradient of the final norm's output, in m->d_small, to every parameter's. last: of the step, so that each bucket is reduced
// from when it is complete.
FN void model_backward(Llama *m, const int32_t *tokens, int64_t B, int64_t T, int last) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = B * T, d = c->width;
    memset(m->d_stream, 0, (size_t)(M * d) * sizeof(float));
    rmsnorm_backward(m->d_stream, m->d_final_norm, m->norm_parts, m->d_small, m->x_final, m->final_norm, m->rms_final, M, d);
    if (last) bucket_complete(m, c->layers + 1);
    for (int l = c->layers - 1; l >= 0; l--) {
        layer_backward(m, &m->layers[l], B, T);
        if (last) bucket_complete(m, l + 1);
    }
    embedding_backward(m->d_embed, m->d_stream, tokens, M, d);
    if (last) bucket_complete(m, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// A training step

FN void llama_step_begin(Llama *m, int64_t step) {
    m->step_began = clock_seconds();
    memset(m->grads, 0, (size_t)m->table.total * sizeof(float));
    m->work.step = step;
    m->weights_ready = 0;                                              // a stochastic forward draws anew each step
    m->loss_sum = 0;
}
FN Linear *model_linear(Llama *m, int64_t i) { return &m->layers[i / LINEARS_PER_LAYER].linear[i % LINEARS_PER_LAYER]; }
FN void llama_stats_begin(Llama *m) {
    const int64_t linears = (int64_t)m->options.config.layers * LINEARS_PER_LAYER, M = (int64_t)m->options.batch * m->options.config.seq;
    if (!m->stats) m->stats = (LinearStats *)xcalloc((size_t)linears, sizeof(LinearStats));
    m->probes = (LinearProbe *)xcalloc((size_t)linears, sizeof(LinearProbe));
    for (int64_t i = 0; i < linears; i++) {
        Linear *l = model_linear(m, i);
        m->probes[i].x = (float *)xcalloc((size_t)(M * l->K), sizeof(float));
        l->probe = &m->probes[i];
    }
}
FN const LinearStats *llama_stats_end(Llama *m) {
    const int64_t linears = (int64_t)m->options.config.layers * LINEARS_PER_LAYER;
    for (int64_t i = 0; m->probes && i < linears; i++) {
        m->stats[i] = m->probes[i].stats;
        free(m->probes[i].x);
        model_linear(m, i)->probe = NULL;
    }
    free(m->probes);
    m->probes = NULL;
    return m->stats;
}
FN void llama_micro_step(Llama *m, int micro, const int32_t *tokens, const int32_t *targets) {
    const int64_t B = m->options.batch, T = m->options.config.seq;
    check_tokens(targets, B * T, m->options.config.vocab, "target");
    m->work.micro = micro;
    model_forward(m, tokens, B, T);
    m->loss_sum += model_head(m, targets, B * T, (float)(1.0 / ((double)B * (double)T * m->options.micro_batches * llama_ranks(&m->options))));
    model_backward(m, tokens, B, T, micro == m->options.micro_batches - 1);
    llama_stats_end(m);                                                // one micro-batch is measured
}
FN void llama_step_limits(Llama *m, float loss, float grad_norm) { m->loss_limit = loss; m->norm_limit = grad_norm; }
// Sums over ranks, in their order, of the loss and of squared gradients, each rank giving the squares of a part of its own whether
// it owns that or all: ZeRO-1 clips by the same bits. -> squared norm; the loss goes to m->loss_sum.
FN double step_sums(Llama *m) {
    if (llama_ranks(&m->options) == 1) return sum_of_squares(m->grads, m->table.total);
    typedef struct { double loss, squares; } Sums;
    Sums own = {m->loss_sum, 0}, *all = (Sums *)xcalloc((size_t)llama_ranks(&m->options), sizeof(Sums));
    double squares = 0;
    for (int i = 0; i < llama_bucket_count(&m->options.config); i++) {
        const ParamBucket b = llama_bucket(&m->options.config, &m->table, i);
        const DistPiece p = dist_piece(b.count, m->options.rank, llama_ranks(&m->options));
        own.squares += sum_of_squares(m->grads + b.first + p.first, p.count);
    }
    dist_gather(&own, sizeof own, all);
    m->loss_sum = 0;
    for (int r = 0; r < llama_ranks(&m->options); r++) {
        m->loss_sum += all[r].loss;
        squares += all[r].squares;
        if (!isfinite(all[r].loss) && !m->result.culprit) m->result.culprit = r + 1;
    }
    free(all);
    return squares;
}
// The parameters that this rank owns; then, with ZeRO-1, everybody gets everybody's.
FN void params_update(Llama *m, const AdamWScalars *k, float scale, const RngStream *random) {
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        const OwnedRun run = owned_part(&m->options, &m->table, p, (p->count + 7) / 8 * 8, m->options.rank);
        if (run.count) adamw_tensor(m->params, m->adam_m + run.state, m->adam_v + run.state, m->grads, run.first, run.count, k, p->decay, scale, random);
    }
    for (int i = 0; m->options.zero && i < llama_bucket_count(&m->options.config); i++) {
        const ParamBucket b = llama_bucket(&m->options.config, &m->table, i);
        dist_allgather(m->params + b.first, b.count, m->options.master_fp32 ? DIST_F32 : DIST_BF16);
    }
}
FN void llama_step_end(Llama *m, const AdamWOptions *o) {
    const double tokens = (double)m->options.batch * m->options.config.seq * m->options.micro_batches * llama_ranks(&m->options);
    m->result.culprit = 0;
    overlap_wait(&m->overlap);
    const double norm = sqrt(step_sums(m));
    m->result.loss = (float)(m->loss_sum / tokens);
    m->result.grad_norm = (float)norm;
    m->result.finite = isfinite(m->result.loss) && isfinite(m->result.grad_norm) &&
                       m->result.loss <= m->loss_limit && m->result.grad_norm <= m->norm_limit;
    if (m->result.finite) {
        const AdamWScalars k = adamw_scalars(o->lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->step);
        const float scale = o->clip > 0 && norm > o->clip ? (float)(o->clip / norm) : 1.0f;
        const RngStream random = rng_stream(m->options.seed, (uint32_t)o->step, rng_address(RNG_MASTER, 0, 0, 0, 0, 0));
        params_update(m, &k, scale, m->options.master_fp32 ? NULL : &random);
        m->weights_ready = 0;
    }
    m->step_seconds = clock_seconds() - m->step_began;
}
FN StepResult llama_step_result(Llama *m) { return m->result; }
FN double llama_step_seconds(const Llama *m) { return m->step_seconds; }

// ---------------------------------------------------------------------------------------------------------------------
// Without gradients

FN float llama_eval(Llama *m, const int32_t *tokens, const int32_t *targets) {
    const int64_t B = m->options.batch, T = m->options.config.seq;
    check_tokens(targets, B * T, m->options.config.vocab, "target");
    m->work.micro = 0;
    model_forward(m, tokens, B, T);
    return (float)(model_head(m, targets, B * T, 0) / (double)(B * T));
}
FN void llama_logits_from(Llama *m, const int32_t *tokens, int length, int first, float *logits) {
    const LlamaConfig *c = &m->options.config;
    if (length < 1 || length > c->seq) fatal("logits after %d tokens: the model takes 1 to %d", length, c->seq);
    m->work.micro = 0;
    model_forward(m, tokens, 1, length);
    Linear last = m->head;
    last.x += (int64_t)first * c->width;
    linear_forward(&last, logits, length - first, 0, &m->work);
}

#endif
