// llama.h: the model's shape (configuration, one table of named tensors, sizes) and the interface every backend implements.
//
// Llama: RMSNorm, rotary embedding in the rotate-half convention, causal attention with optional grouped KV heads, SwiGLU
// with fused gate+up, no biases, untied lm_head unless `tied`.
#ifndef LLMC_LLAMA_H
#define LLMC_LLAMA_H

#include <math.h>

#include "common.h"
#include "quant_stats.h"
#include "recipe.h"

typedef struct {
    int layers, width, heads, kv_heads, ffn, vocab, seq;
    int tied;                      // lm_head is the embedding
    float norm_eps, rope_theta;
} LlamaConfig;

FN int llama_head_dim(const LlamaConfig *c) { return c->width / c->heads; }
FN int llama_kv_width(const LlamaConfig *c) { return c->kv_heads * llama_head_dim(c); }
FN int llama_qkv_rows(const LlamaConfig *c) { return c->width + 2 * llama_kv_width(c); }
// FFN width: 8/3 of the width, rounded up to a multiple of 256.
FN int llama_default_ffn(int width) { return (8 * width / 3 + 255) / 256 * 256; }

// ---------------------------------------------------------------------------------------------------------------------
// The table of named tensors. Everything that touches a parameter goes through it.

typedef enum {
    PARAM_EMBED,                   // (vocab, width)
    PARAM_ATTN_NORM,               // (1, width)
    PARAM_QKV,                     // (width + 2 kv_width, width): rows q, k, v
    PARAM_ATTN_OUT,                // (width, width)
    PARAM_FFN_NORM,                // (1, width)
    PARAM_GATE_UP,                 // (2 ffn, width): rows gate, up
    PARAM_DOWN,                    // (width, ffn)
    PARAM_FINAL_NORM,              // (1, width)
    PARAM_LM_HEAD                  // (vocab, width); absent when tied
} ParamKind;
enum { LINEAR_QKV, LINEAR_ATTN_OUT, LINEAR_GATE_UP, LINEAR_DOWN, LINEARS_PER_LAYER };

typedef struct {
    char name[64];                 // e.g. "model.layers.3.qkv"; llama_hf_parts() gives Hugging Face's names
    ParamKind kind;
    int layer;                     // -1 outside the decoder layers
    int linear;                    // LINEAR_* for the weights the recipe quantizes, else -1
    int64_t rows, cols;            // row-major, rows = output features
    int64_t offset, count;         // in elements of the flat parameter buffer; offsets are multiples of 128
    float init_std;                // 0: filled with ones (norm gains)
    int decay;                     // weight decay applies
} Param;

typedef struct { Param *params; int count; int64_t total; } ParamTable;  // total: elements, padding included

FN void param_add(ParamTable *t, ParamKind kind, int layer, int linear, const char *suffix, int64_t rows, int64_t cols, float std) {
    Param *p = &t->params[t->count++];
    memset(p, 0, sizeof *p);
    if (layer >= 0) snprintf(p->name, sizeof p->name, "model.layers.%d.%s", layer, suffix);
    else snprintf(p->name, sizeof p->name, "%s", suffix);
    p->kind = kind; p->layer = layer; p->linear = linear;
    p->rows = rows; p->cols = cols; p->count = rows * cols;
    p->offset = t->total;
    p->init_std = std; p->decay = std > 0;
    t->total += (p->count + 127) / 128 * 128;
}

// The parameters in the order they lie in memory. Initial standard deviation 0.02; residual projections 0.02/sqrt(2L).
FN ParamTable llama_param_table(const LlamaConfig *c) {
    ParamTable t;
    t.count = 0; t.total = 0;
    t.params = (Param *)xcalloc((size_t)c->layers * 6 + 3, sizeof(Param));
    const int d = c->width;
    const float std = 0.02f, residual_std = 0.02f / sqrtf(2.0f * (float)c->layers);
    param_add(&t, PARAM_EMBED, -1, -1, "model.embed_tokens", c->vocab, d, std);
    for (int l = 0; l < c->layers; l++) {
        param_add(&t, PARAM_ATTN_NORM, l, -1, "input_layernorm", 1, d, 0);
        param_add(&t, PARAM_QKV, l, LINEAR_QKV, "qkv", llama_qkv_rows(c), d, std);
        param_add(&t, PARAM_ATTN_OUT, l, LINEAR_ATTN_OUT, "o_proj", d, d, residual_std);
        param_add(&t, PARAM_FFN_NORM, l, -1, "post_attention_layernorm", 1, d, 0);
        param_add(&t, PARAM_GATE_UP, l, LINEAR_GATE_UP, "gate_up", 2 * (int64_t)c->ffn, d, std);
        param_add(&t, PARAM_DOWN, l, LINEAR_DOWN, "down_proj", d, c->ffn, residual_std);
    }
    param_add(&t, PARAM_FINAL_NORM, -1, -1, "model.norm", 1, d, 0);
    if (!c->tied) param_add(&t, PARAM_LM_HEAD, -1, -1, "lm_head", c->vocab, d, std);
    return t;
}
// The tensor of that kind and layer (layer -1: outside the layers). lm_head of a tied model is the embedding.
FN const Param *param_get(const ParamTable *t, ParamKind kind, int layer) {
    for (int i = 0; i < t->count; i++)
        if (t->params[i].kind == kind && t->params[i].layer == layer) return &t->params[i];
    if (kind == PARAM_LM_HEAD) return &t->params[0];
    fatal("no parameter of kind %d in layer %d: this is a bug", (int)kind, layer);
}

// The parameters in the buckets in which backward finishes their gradients: 0 the embedding, 1 + l layer l, the last one what
// comes after the layers. first, count: elements of the flat buffer, multiples of 128. The last to come is bucket 0.
typedef struct { int64_t first, count; } ParamBucket;
FN int llama_bucket_count(const LlamaConfig *c) { return c->layers + 2; }
FN ParamBucket llama_bucket(const LlamaConfig *c, const ParamTable *t, int index) {
    const int first = index == 0 ? 0 : 1 + 6 * (index - 1), next = index == 0 ? 1 : index <= c->layers ? first + 6 : t->count;
    const int64_t from = t->params[first].offset, to = next < t->count ? t->params[next].offset : t->total;
    const ParamBucket b = {from, to - from};
    return b;
}
FN int llama_bucket_of(const LlamaConfig *c, const Param *p) {
    return p->kind == PARAM_EMBED ? 0 : p->layer >= 0 ? 1 + p->layer : c->layers + 1;
}

// A Hugging Face tensor (LlamaForCausalLM's name and shape) is a run of rows of one of ours.
typedef struct { char name[96]; int64_t row, rows, cols; int is_vector; } HfPart;
FN int llama_hf_parts(const LlamaConfig *c, const Param *p, HfPart parts[3]) {
    const int64_t d = c->width, kv = llama_kv_width(c), f = c->ffn;
    static const char *const qkv[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
    static const char *const gate_up[] = {"mlp.gate_proj", "mlp.up_proj"};
    int64_t rows[3] = {p->rows, 0, 0};
    int n = 1;
    if (p->kind == PARAM_QKV) { n = 3; rows[0] = d; rows[1] = rows[2] = kv; }
    if (p->kind == PARAM_GATE_UP) { n = 2; rows[0] = rows[1] = f; }
    int64_t row = 0;
    for (int i = 0; i < n; i++) {
        HfPart *h = &parts[i];
        const char *sub = p->kind == PARAM_QKV ? qkv[i] : p->kind == PARAM_GATE_UP ? gate_up[i]
                        : p->kind == PARAM_ATTN_OUT ? "self_attn.o_proj" : p->kind == PARAM_DOWN ? "mlp.down_proj"
                        : p->kind == PARAM_ATTN_NORM ? "input_layernorm" : p->kind == PARAM_FFN_NORM ? "post_attention_layernorm" : NULL;
        if (sub) snprintf(h->name, sizeof h->name, "model.layers.%d.%s.weight", p->layer, sub);
        else snprintf(h->name, sizeof h->name, "%s.weight", p->name);
        h->row = row; h->rows = rows[i]; h->cols = p->cols; h->is_vector = p->rows == 1;
        row += rows[i];
    }
    return n;
}

// Number of parameters, and those in matrix products (linears and lm_head): FLOPs a token = 6 * matmul parameters
// + 6 * layers * width * T (causal attention, forward and backward).
FN int64_t llama_param_count(const ParamTable *t) {
    int64_t n = 0;
    for (int i = 0; i < t->count; i++) n += t->params[i].count;
    return n;
}
FN double llama_flops_per_token(const LlamaConfig *c, const ParamTable *t) {
    double n = (double)param_get(t, PARAM_LM_HEAD, -1)->count;
    for (int i = 0; i < t->count; i++) if (t->params[i].linear >= 0) n += (double)t->params[i].count;
    return 6 * n + 6.0 * c->layers * c->width * c->seq;
}

// ---------------------------------------------------------------------------------------------------------------------
// The backend's interface. A backend (cpu/backend.h, cuda/backend.cuh) defines struct Llama and these functions; the trainer
// and the tests know nothing else of it. B: sequences a micro-batch, T: tokens a sequence.

// What backward makes again instead of keeping it, on the GPU. NVFP4 recipes keep the linears' inputs in 4.5 bits whatever
// this says, so RECOMPUTE_NONE, _NORM and _MLP are the same to them.
enum Recompute {
    RECOMPUTE_NORM,                // the norms' outputs (costs next to nothing: the default)
    RECOMPUTE_NONE,                // nothing
    RECOMPUTE_MLP,                 // the norms' and SwiGLU's outputs
    RECOMPUTE_BLOCK                // everything but the residual stream that enters a layer: a second forward
};

typedef struct {
    LlamaConfig config;
    const Recipe *recipe;
    int batch;                     // B
    int micro_batches;             // micro-batches a step: the loss is averaged over all of them
    int master_fp32;               // master weights in float32 instead of BF16 with stochastic rounding
    uint64_t seed;
    int rank;                      // address of this rank's noise, 0 in a single process
    int ranks;                     // processes that share a step (dist.h), each with micro_batches of its own; 0 and 1: this one alone
    int zero;                      // ZeRO-1: each rank keeps and updates its part of the optimizer state only
    int reduce_bf16;               // gradients travel between ranks in BF16 instead of float32
    int host_staged;               // GPU: they travel through host memory and dist.h, not by NCCL
    int recompute;                 // enum Recompute; the CPU backend keeps everything and refuses RECOMPUTE_MLP and _BLOCK
    int quant_stats;               // llama_stats_begin will be called
    int bf16_layers;               // the linears of the last so many layers are not quantized
    int grad_bf16;                 // GPU: the layers' gradients in BF16 instead of float32
    int attention;                 // GPU: 0 auto, 1 cudnn, 2 flash (cuda/attention.cuh)
    int nvfp4_gemm;                // GPU: 0 auto, 1 native, 2 emulated (cuda/gemm_nvfp4.cuh); the CPU backend refuses native
} LlamaOptions;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float clip;                    // largest global gradient norm, 0: no clipping
    int64_t step;                  // counted from 0: bias corrections use step + 1
} AdamWOptions;

typedef struct {
    float loss;                    // mean over the step's tokens, natural logarithm
    float grad_norm;               // before clipping
    int finite;                    // 0: loss or gradient norm was NaN, infinite, or above llama_step_limits; the update was NOT applied
    int culprit;                   // 1 + the first rank whose own loss is not finite, 0: none, or not known
} StepResult;

enum LlamaState { LLAMA_PARAMS, LLAMA_GRADS, LLAMA_ADAM_M, LLAMA_ADAM_V };

typedef struct Llama Llama;

// One line of the memory plan; a plan ends with bytes < 0. Printed before anything is allocated.
typedef struct { const char *what; int64_t bytes; } MemoryItem;
FN int llama_plan(const LlamaOptions *o, MemoryItem *items, int capacity);  // -> number of items

FN Llama *llama_create(const LlamaOptions *o);     // allocates; parameters are zero until initialized or written
FN void llama_free(Llama *m);
FN const ParamTable *llama_params(const Llama *m);
FN void llama_init(Llama *m);                      // initial values from the seed, the same on every backend

// A training step: begin; micro_step for each micro-batch; end. Tokens and targets are (B,T) on the host.
FN void llama_step_begin(Llama *m, int64_t step);
FN void llama_micro_step(Llama *m, int micro, const int32_t *tokens, const int32_t *targets);
FN void llama_step_end(Llama *m, const AdamWOptions *adamw);
// From now on a step whose loss or gradient norm lies above these is not applied. At first, and by INFINITY: no limits.
FN void llama_step_limits(Llama *m, float loss, float grad_norm);
// The result of the last step ended, in order; waits for it. On the GPU steps run ahead of the host: call it one step late.
FN StepResult llama_step_result(Llama *m);
// How long the step took whose result was read last: seconds from llama_step_begin to the end of llama_step_end, where they were computed.
FN double llama_step_seconds(const Llama *m);

// Between llama_step_begin and the first micro-batch, which is then measured; costs that micro-batch a few times its time.
FN void llama_stats_begin(Llama *m);
// After the step's first micro-batch: (layers, LINEARS_PER_LAYER), good until the next begin; measuring has ended.
FN const LinearStats *llama_stats_end(Llama *m);

FN float llama_eval(Llama *m, const int32_t *tokens, const int32_t *targets);  // mean loss of a (B,T) batch, no gradients
// Logits (length - first, vocab) after positions first .. length - 1 of one sequence of length <= T.
FN void llama_logits_from(Llama *m, const int32_t *tokens, int length, int first, float *logits);
// Logits (vocab) after the last position.
FN void llama_logits(Llama *m, const int32_t *tokens, int length, float *logits) { llama_logits_from(m, tokens, length, length - 1, logits); }

// Copies one tensor's state to or from the host as float32 (BF16 converts exactly both ways).
// With LlamaOptions.zero every rank must read the same optimizer states in the same order: they are gathered, and only rank 0
// gets the values (the others may pass NULL). Each rank writes from the whole tensor, and keeps its part.
FN void llama_read(Llama *m, enum LlamaState what, const Param *p, float *values);
FN void llama_write(Llama *m, enum LlamaState what, const Param *p, const float *values);
FN const char *llama_device_name(const Llama *m);
FN const char *llama_products(const Llama *m);     // how NVFP4 products are taken, and why; NULL: there is no choice
FN double llama_peak_flops(const Llama *m);        // dense BF16 FLOP/s of the device, 0: not known

// Initial values of elements first .. first+count-1 (first a multiple of 4) of tensor number `index` of the table: Box-Muller on two
// Philox words, computed on the host in float64 so that every backend starts from the same bits.
FN void param_initial_run(const Param *p, int index, uint64_t seed, int64_t first, int64_t count, float *values) {
    RngStream s = rng_stream(seed, (uint32_t)index, rng_address(RNG_INIT, 0, 0, 0, 0, 0));
    for (int64_t i = 0; i < count; i += 4) {
        Philox4 w = rng_words4(s, (uint64_t)(first + i) / 4);
        for (int64_t j = i; j < i + 4 && j < count; j++) {
            int pair = (int)(j - i) / 2 * 2;
            double r = sqrt(-2.0 * log((double)rng_uniform(w.w[pair]))), a = 6.283185307179586 * (w.w[pair + 1] * 0x1p-32);
            values[j] = p->init_std > 0 ? (float)(p->init_std * r * ((j - i) % 2 ? sin(a) : cos(a))) : 1.0f;
        }
    }
}
FN void param_initial_values(const Param *p, int index, uint64_t seed, float *values) {
    param_initial_run(p, index, seed, 0, p->count, values);
}

#endif
