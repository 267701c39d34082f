// cuda/memory.cuh: the model's state on the GPU and where each part of it lies.
//
// Four allocations: parameters, gradients, optimizer state, activations; every part is cut from one of them. memory_layout() runs
// twice: on empty arenas to count (the plan), and on allocated ones to set the pointers.
//
// Gradients in activations. With one micro-batch a step, a layer's gradients are written when its activations, and those of
// all later layers, have had their last use. The flat gradient buffer has the parameters' order, as the activations have the layers', so
// its head may lie in the tail of the activations: memory_overlap() says how far. Those gradients hold until the next forward.
//
// --grad-dtype bf16: the decoder layers' gradients (linears and norm gains) are BF16, rounded once a micro-batch; the embedding's,
// lm_head's and the final norm's, which sum up many parts (equal tokens, parts of the batch), stay float32.
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH

#include "../llama.h"
#include "adamw.cuh"
#include "attention.cuh"
#include "device.cuh"
#include "embedding.cuh"
#include "linear.cuh"
#include "rmsnorm.cuh"
#include "stats.cuh"

#define RESULT_SLOTS 4             // steps whose results may be unread
#define TOKEN_SLOTS 4              // micro-batches whose tokens may be on their way to the device
#define LOGITS_BYTES ((int64_t)512 << 20)  // of logits that exist at a time, at least; more where memory lies idle anyway

// What a layer keeps from its forward for its backward. M = B*T rows.
typedef struct {
    bf16 *residual_attn, *residual_ffn;    // (M,d) the residual stream as it enters attention, and the FFN
    float *rstd_attn, *rstd_ffn;           // (M)
    bf16 *qkv;                             // (M, d + 2 kv_width), rotary applied
    bf16 *attn;                            // (M,d) attention's output
    float *lse;                            // (B, heads, T)
    bf16 *gate_up;                         // (M, 2 ffn); in backward its gradient
    Linear linear[LINEARS_PER_LAYER];      // with their packed inputs
} LlamaLayer;

typedef struct { char *base; int64_t used; } Arena;
enum { ARENA_PARAMS, ARENA_GRADS, ARENA_ADAM, ARENA_ACTIVATIONS, ARENA_COUNT };

#define MEASURED_VALUES (6 * STATS_OPERAND_VALUES + 2 * STATS_GRADIENT_VALUES)  // of a linear: its operands, dX, dW

// Bytes, by what they hold. In the order of the plan.
enum { PLAN_PARAMS, PLAN_MASTERS, PLAN_GRADS, PLAN_ADAM, PLAN_KEPT, PLAN_WEIGHTS, PLAN_WORK, PLAN_GEMM, PLAN_ATTENTION, PLAN_STATS, PLAN_COUNT };
static const char *const PLAN_NAMES[PLAN_COUNT] = {
    "parameters (BF16)", "master weights (float32)", "gradients (float32)", "optimizer state (float32)", "activations kept for backward",
    "quantized weights", "work space shared by the layers", "cuBLASLt workspace", "attention workspace", "work space of --quant-stats"
};

struct Llama {
    LlamaOptions options;
    ParamTable table;
    Device device;
    Arena arenas[ARENA_COUNT];
    int64_t plan[PLAN_COUNT];
    int64_t M;                             // B*T
    int64_t layers_from, layers_end;       // of ARENA_ACTIVATIONS: where the layers' kept activations lie
    int64_t overlap;                       // bytes of gradients that lie before layers_end
    int64_t *layer_end;                    // (layers) where a layer's kept activations end
    cudaStream_t stream;
    Gemm gemm;
    AttentionPlan *attention;
    Profile *profile;                      // NULL: not profiling

    bf16 *params;                          // (total) masters, or the working copy of `masters`
    float *masters, *adam_m, *adam_v;      // (total)
    Gradients grads;                       // (total)
    AdamWBuffers adamw;
    LlamaLayer *layers;
    LinearPlan recipe_plan, plain_plan;    // of the layers' linears; of the last bf16_layers' and of lm_head
    char products[384];                    // llama_products
    LinearWork work;
    bf16 *residual_final;                  // (M,d)
    float *rstd_final;                     // (M)
    int32_t *tokens, *targets;             // (M)
    float *losses;                         // (M)
    double *loss_sum;                      // (2) of a step's tokens; culprit_mark(), with several ranks
    StepStats *step_stats;
    float2 *rope;                          // (T, head_dim/2)
    void *norm_work, *embed_work, *grad_norm_work, *gemm_scalars, *gemm_workspace;
    AdamWSegment *segments;
    float *amax_x, *amax_w, *factors;      // (layers x 4), (layers x 4), (layers x 4 x FACTOR_COUNT)

    bf16 *normed;                          // (M,d) a norm's output that is not kept
    bf16 *small;                           // (M,d) forward: a linear's output on its way into the residual; backward: gradient of a linear's input
    bf16 *d_stream;                        // (M,d) gradient of the residual stream
    bf16 *big;                             // (M, max(ffn, qkv rows)) backward: gradient of h, and of qkv
    bf16 *h;                               // (M,ffn) SwiGLU's output that is not kept
    bf16 *logits;                          // (head_rows, vocab)
    int64_t head_rows;

    double *measured;                      // (layers x 4 x MEASURED_VALUES) of --quant-stats; NULL: it is off
    float *measure_exact;                  // a gradient, or a forward operand
    void *measure_work;
    int measuring;                         // this micro-batch is measured
    LinearStats *stats;                    // by hand: (layers x 4), on the host

    int weights_changed;                   // by hand: the amax of the weights must be found before the next forward
    int32_t *host_tokens;                  // pinned: (TOKEN_SLOTS, 2, M)
    StepStats *host_stats;                 // pinned: (RESULT_SLOTS)
    double *host_loss;                     // pinned
    cudaEvent_t tokens_sent[TOKEN_SLOTS], step_begun[RESULT_SLOTS], result_ready[RESULT_SLOTS];
    float step_ms;                         // of the step whose result was read last
    int64_t micro_steps, steps_ended, steps_read;
    float loss_limit, norm_limit;          // llama_step_limits
};

FN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Cuts count*size bytes, 256-aligned.
FN void *arena_take(Arena *a, int64_t count, int64_t size) {
    int64_t bytes;
    if (count < 0 || __builtin_mul_overflow(count, size, &bytes) || bytes > INT64_MAX - 255 ||
        __builtin_add_overflow(a->used, (bytes + 255) / 256 * 256, &a->used))
        fatal("the model's size overflows 64 bits; use a smaller model, --batch or --seq");
    return a->base ? a->base + a->used - (bytes + 255) / 256 * 256 : NULL;
}
FN bf16 *arena_bf16(Arena *a, int64_t rows, int64_t cols) { return (bf16 *)arena_take(a, rows, 2 * cols); }
FN float *arena_floats(Arena *a, int64_t count) { return (float *)arena_take(a, count, 4); }

FN const Param *layer_param(const Llama *m, ParamKind kind, int layer) { return param_get(&m->table, kind, layer); }

// lm_head as a linear that no recipe quantizes.
FN Linear head_linear(const Llama *m) {
    Linear l;
    const Param *p = layer_param(m, PARAM_LM_HEAD, -1);
    memset(&l, 0, sizeof l);
    l.plan = &m->plain_plan;
    l.N = p->rows; l.K = p->cols;
    l.w = m->params + p->offset; l.dw = gradient_at(&m->grads, p->offset);
    return l;
}

FN const LinearPlan *layer_plan(const Llama *m, int layer) {
    return layer < m->options.config.layers - m->options.bf16_layers ? &m->recipe_plan : &m->plain_plan;
}
// The input X of a linear: kept as it is, kept packed with the plain tensor in shared memory, or made again in shared memory.
FN void linear_layout(Llama *m, Linear *l, ParamKind kind, int layer, bf16 *x) {
    const Param *p = layer_param(m, kind, layer);
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    const int64_t slot = layer * LINEARS_PER_LAYER + p->linear;
    l->plan = layer_plan(m, layer);
    l->layer = layer; l->linear = p->linear;
    l->N = p->rows; l->K = p->cols;
    l->w = m->params + p->offset;
    l->dw = gradient_at(&m->grads, p->offset); l->dw_bf16 = gradient_is_bf16(&m->grads, p->offset);
    l->x = x;
    l->amax_x = m->amax_x + slot; l->amax_w = m->amax_w + slot;
    l->factor = m->factors + slot * FACTOR_COUNT;
    linear_take_input(l, m->M, [&](int64_t bytes) { return arena_take(a, bytes, 1); });
}
// What layer `i` keeps besides the residual stream that enters it.
FN void layer_layout(Llama *m, int i) {
    const LlamaConfig *c = &m->options.config;
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    LlamaLayer *l = &m->layers[i];
    const int64_t M = m->M, d = c->width;
    const int plain = layer_plan(m, i)->keeps_x, recompute = m->options.recompute;
    l->residual_ffn = arena_bf16(a, M, d);
    l->rstd_attn = arena_floats(a, M);
    l->rstd_ffn = arena_floats(a, M);
    l->qkv = arena_bf16(a, M, llama_qkv_rows(c));
    l->attn = arena_bf16(a, M, d);
    l->lse = arena_floats(a, M * c->heads);
    l->gate_up = arena_bf16(a, M, 2 * c->ffn);
    const int keep_norm = plain && recompute == RECOMPUTE_NONE, keep_h = plain && recompute != RECOMPUTE_MLP && recompute != RECOMPUTE_BLOCK;
    linear_layout(m, &l->linear[LINEAR_QKV], PARAM_QKV, i, keep_norm ? arena_bf16(a, M, d) : m->normed);
    linear_layout(m, &l->linear[LINEAR_ATTN_OUT], PARAM_ATTN_OUT, i, l->attn);
    linear_layout(m, &l->linear[LINEAR_GATE_UP], PARAM_GATE_UP, i, keep_norm ? arena_bf16(a, M, d) : m->normed);
    linear_layout(m, &l->linear[LINEAR_DOWN], PARAM_DOWN, i, keep_h ? arena_bf16(a, M, c->ffn) : m->h);
}
// Under recompute block the layers share one set of activations, and each has only its residual stream to itself.
FN void layers_layout(Llama *m) {
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    const int64_t M = m->M, d = m->options.config.width;
    const int share = m->options.recompute == RECOMPUTE_BLOCK, layers = m->options.config.layers;
    m->layers_from = a->used;
    for (int i = 0; share && i < layers; i++) m->layers[i].residual_attn = arena_bf16(a, M, d);
    const int64_t shared_from = a->used;
    for (int i = 0; i < layers; i++) {
        if (share) a->used = shared_from;
        else m->layers[i].residual_attn = arena_bf16(a, M, d);
        layer_layout(m, i);
        m->layer_end[i] = a->used;
    }
    m->layers_end = a->used;
}
// What is kept of the quantized W of every layer; with several micro-batches also the operands, otherwise one pair for all (in the work space).
FN void weights_layout(Llama *m) {
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        if (p->linear < 0) continue;
        Linear *l = &m->layers[p->layer].linear[p->linear];
        l->plan = layer_plan(m, p->layer); l->N = p->rows; l->K = p->cols;
        linear_take_weight(l, m->work.weights_kept, [&](int64_t bytes) { return arena_take(a, bytes, 1); });
    }
}
FN void scalars_layout(Llama *m) {
    const LlamaConfig *c = &m->options.config;
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    const int64_t slots = (int64_t)c->layers * LINEARS_PER_LAYER;
    m->gemm_workspace = arena_take(a, 1, (int64_t)GEMM_WORKSPACE_BYTES);
    m->gemm_scalars = arena_take(a, 1, 256);
    m->tokens = (int32_t *)arena_take(a, m->M, 4);
    m->targets = (int32_t *)arena_take(a, m->M, 4);
    m->losses = arena_floats(a, m->M);
    m->loss_sum = (double *)arena_take(a, 2, sizeof(double));
    m->step_stats = (StepStats *)arena_take(a, 1, sizeof(StepStats));
    m->rope = (float2 *)arena_take(a, (int64_t)c->seq * llama_head_dim(c) / 2, sizeof(float2));
    m->norm_work = arena_take(a, 1, (int64_t)rmsnorm_backward_scratch_bytes(c->width));
    m->embed_work = arena_take(a, 1, (int64_t)embedding_backward_scratch_bytes(m->M, c->width, c->vocab));
    m->grad_norm_work = arena_take(a, 1, (int64_t)grad_norm_scratch_bytes());
    m->segments = (AdamWSegment *)arena_take(a, m->table.count, sizeof(AdamWSegment));
    m->amax_x = arena_floats(a, slots);
    m->amax_w = arena_floats(a, slots);
    m->factors = arena_floats(a, slots * FACTOR_COUNT);
    m->work.scalars = arena_floats(a, 4);
    m->rstd_final = arena_floats(a, m->M);
}
// Work space of the three phases of a micro-step (forward, loss, backward): the phases share one region, since none needs
// what another left in it.
FN void work_layout(Llama *m) {
    const LlamaConfig *c = &m->options.config;
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    LinearWork *w = &m->work;
    const int64_t M = m->M, d = c->width, qkv = llama_qkv_rows(c), wide = larger(2 * (int64_t)c->ffn, qkv), inner = larger(c->ffn, d);
    m->residual_final = arena_bf16(a, M, d);
    m->normed = arena_bf16(a, M, d);
    m->small = arena_bf16(a, M, d);
    m->d_stream = arena_bf16(a, M, d);
    Arena forward = *a, loss = *a, backward = *a;
    const LinearPlan *p = &m->recipe_plan;
    const int64_t rows = plan_quantizes(p) ? M : 0, weight = rows && !w->weights_kept ? larger(wide * d, d * inner) : 0;
    // A forward product that something is done to is as wide as any output; a backward one as wide as an input, or as large as a weight.
    const int64_t outputs = p->float_product[GEMM_FORWARD] ? M * wide : 0;
    const int64_t products = larger(p->float_product[GEMM_DGRAD] ? M * inner : 0, p->float_product[GEMM_WGRAD] ? larger(wide * d, d * inner) : 0);
    m->h = arena_bf16(&forward, M, c->ffn);
    const auto operand = [&](Arena *arena, int64_t values) { return arena_take(arena, plan_operand_bytes(p, values), 1); };
    w->x_forward = operand(&forward, rows * inner);
    void *const w_forward = operand(&forward, p->native ? 0 : weight);
    w->residual = arena_bf16(&forward, p->recipe->gemm[GEMM_FORWARD].product == PRODUCT_ADD_OUTLIERS ? M : 0, inner);
    w->x_rows = arena_floats(&forward, p->kind[GEMM_FORWARD][OPERAND_A] == KIND_ROWS ? M : 0);
    // Beside m->big lies dgrad's operand of dY, which has made way when wgrad's operand X comes. gate_up's is the widest, and m->big
    // is free then: it takes that place too.
    Arena wide_dy = backward;
    m->big = arena_bf16(&backward, M, larger(c->ffn, qkv));
    w->x_wgrad = operand(&backward, rows * larger(inner, qkv));
    void *const dy_gate_up = operand(&wide_dy, rows * 2 * c->ffn);
    backward.used = larger(backward.used, wide_dy.used);
    w->dy_wgrad = operand(&backward, rows * wide);
    void *const w_dgrad = operand(&backward, weight);
    // The same places in both phases: behind all else of either.
    forward.used = backward.used = larger(forward.used, backward.used);
    w->product = arena_floats(&backward, larger(outputs, products));
    const int64_t quantizer_bytes = larger(larger(linear_quantizer_bytes(p, M, wide, d), linear_quantizer_bytes(p, M, d, inner)), linear_quantizer_bytes(p, M, qkv, d));
    w->quantizer_work = arena_take(&backward, quantizer_bytes, 1);
    for (int i = 0; i < c->layers * LINEARS_PER_LAYER; i++) {
        Linear *l = &m->layers[i / LINEARS_PER_LAYER].linear[i % LINEARS_PER_LAYER];
        l->dy_dgrad = i % LINEARS_PER_LAYER == LINEAR_GATE_UP ? dy_gate_up : w->x_wgrad;
        if (weight) { l->w_forward = w_forward; l->w_dgrad = w_dgrad; }
    }
    const int64_t end = larger(forward.used, backward.used), room = larger(LOGITS_BYTES, end - a->used);
    const int64_t most = larger(room / (2 * (int64_t)c->vocab) / 128, 1) * 128, parts = ceil_div(M, most);
    m->head_rows = ceil_div(ceil_div(M, parts), 128) * 128;  // parts of about equal size
    m->logits = arena_bf16(&loss, m->head_rows, c->vocab);
    a->used = larger(end, loss.used);
}
// Room for one linear's measurement at a time.
FN void stats_layout(Llama *m) {
    const LlamaConfig *c = &m->options.config;
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    if (!m->options.quant_stats) return;
    const int64_t d = c->width, wide = larger(2 * (int64_t)c->ffn, llama_qkv_rows(c)), inner = larger(c->ffn, d), rows = larger(m->M, wide);
    m->measured = (double *)arena_take(a, (int64_t)c->layers * LINEARS_PER_LAYER, MEASURED_VALUES * sizeof(double));
    m->measure_exact = arena_floats(a, larger(m->M * inner, larger(wide * d, d * inner)));
    m->measure_work = arena_take(a, stats_workspace_bytes(larger(rows, inner), larger(rows, inner)), 1);
}
// How many bytes of the gradient buffer may lie before the end of the activations: a layer's gradients begin no earlier than its
// own activations end, lm_head's (and the final norm's) after all of them; the embedding's, written last, where the layers' activations
// begin, for what lies before those lives on. (A large vocabulary's gradient is longer than the activations of a small batch.)
FN int64_t memory_overlap(const Llama *m) {
    if (m->options.micro_batches != 1 || m->options.config.tied || m->options.recompute == RECOMPUTE_BLOCK) return 0;
    int64_t overlap = INT64_MAX;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        const int64_t free_from = p->kind == PARAM_EMBED ? m->layers_from : p->layer < 0 ? m->layers_end : m->layer_end[p->layer];
        const int64_t room = m->layers_end - free_from + gradient_bytes(&m->grads, p->offset);
        if (room < overlap) overlap = room;
    }
    return overlap / 256 * 256;
}

FN void memory_layout(Llama *m) {
    const int64_t total = m->table.total;
    Arena *a = &m->arenas[ARENA_ACTIVATIONS];
    for (int i = 0; i < ARENA_COUNT; i++) m->arenas[i].used = 0;
    m->params = arena_bf16(&m->arenas[ARENA_PARAMS], total, 1);
    m->plan[PLAN_PARAMS] = m->arenas[ARENA_PARAMS].used;
    m->masters = m->options.master_fp32 ? arena_floats(&m->arenas[ARENA_PARAMS], total) : NULL;
    m->plan[PLAN_MASTERS] = m->arenas[ARENA_PARAMS].used - m->plan[PLAN_PARAMS];
    m->adam_m = arena_floats(&m->arenas[ARENA_ADAM], total);
    m->adam_v = arena_floats(&m->arenas[ARENA_ADAM], total);
    m->plan[PLAN_ADAM] = m->arenas[ARENA_ADAM].used;
    m->grads.bf16_from = m->options.grad_bf16 ? layer_param(m, PARAM_ATTN_NORM, 0)->offset : 0;
    m->grads.bf16_to = m->options.grad_bf16 ? layer_param(m, PARAM_FINAL_NORM, -1)->offset : 0;
    const int64_t grad_bytes = gradient_bytes(&m->grads, total);
    m->overlap = m->layers_end ? memory_overlap(m) : 0;    // known from the first run on
    char *const base = m->arenas[ARENA_ACTIVATIONS].base;
    if (!m->overlap) m->grads.base = arena_take(&m->arenas[ARENA_GRADS], grad_bytes, 1);
    else m->grads.base = base ? base + m->layers_end - m->overlap : NULL;
    scalars_layout(m);
    work_layout(m);
    const int64_t work_end = a->used;
    stats_layout(m);
    m->plan[PLAN_STATS] = a->used - work_end;
    const int64_t weights_from = a->used;
    m->plan[PLAN_GEMM] = (int64_t)GEMM_WORKSPACE_BYTES;
    weights_layout(m);
    m->plan[PLAN_WEIGHTS] = a->used - weights_from;
    const int64_t kept_from = a->used;
    layers_layout(m);
    m->plan[PLAN_KEPT] = a->used - kept_from;
    m->plan[PLAN_GRADS] = grad_bytes - m->overlap;
    if (m->overlap) arena_take(a, m->plan[PLAN_GRADS], 1);
    m->plan[PLAN_WORK] = work_end - (int64_t)GEMM_WORKSPACE_BYTES;
}

#endif
