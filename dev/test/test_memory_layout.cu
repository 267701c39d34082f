// test_memory_layout.cu: on the GPU, parts of the model share memory in turn. No two parts that hold something at the same moment may
// overlap, whatever the shape: checked for many models, batches, recipes and options, from a table of who holds what when, written here
// from the order of a step (step.cuh) and apart from the layout. Looks at addresses only, so it needs no card: the few questions that
// the layout has for one are answered by no_card.c.
#include "llmc/cuda/backend.cuh"

#include "check.h"

// A part holds something from moment `first` to moment `last`, both included.
typedef struct { const char *what; int layer; const char *from; int64_t bytes; int first, last; } Part;
typedef struct { Part parts[4096]; int count; } Parts;

// Moments of a step: 0 before it, forward of layer i, loss, backward of layer i, embedding's gradient, update.
static int at_forward(int i) { return 1 + i; }
static int at_loss(int layers) { return 1 + layers; }
static int at_backward(int layers, int i) { return 2 * layers + 1 - i; }
static int at_embedding(int layers) { return 2 * layers + 2; }
static int at_update(int layers) { return 2 * layers + 3; }

static void hold(Parts *p, const char *what, int layer, const void *from, int64_t bytes, int first, int last) {
    if (!from || bytes == 0) return;
    if (p->count == (int)(sizeof p->parts / sizeof p->parts[0])) fatal("test: more parts than expected");
    const Part part = {what, layer, (const char *)from, bytes, first, last};
    p->parts[p->count++] = part;
}
// What outlives the micro-batch, and what every phase may use.
static void hold_common(Parts *p, const Llama *m) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = m->M, d = c->width, linears = (int64_t)c->layers * LINEARS_PER_LAYER;
    const int end = at_update(c->layers), embedding = at_embedding(c->layers), loss = at_loss(c->layers);
    hold(p, "cuBLASLt workspace", -1, m->gemm_workspace, GEMM_WORKSPACE_BYTES, 0, end);
    hold(p, "tokens", -1, m->tokens, M * 4, 0, embedding);
    hold(p, "targets", -1, m->targets, M * 4, 0, loss);
    hold(p, "losses", -1, m->losses, M * 4, loss, end);
    hold(p, "loss sum", -1, m->loss_sum, 16, 0, end);
    hold(p, "step stats", -1, m->step_stats, sizeof(StepStats), 0, end);
    hold(p, "rotary table", -1, m->rope, (int64_t)c->seq * llama_head_dim(c) / 2 * 8, 0, end);
    hold(p, "embedding's scratch", -1, m->embed_work, (int64_t)embedding_backward_scratch_bytes(M, c->width, c->vocab), embedding, embedding);
    hold(p, "norm's scratch", -1, m->norm_work, (int64_t)rmsnorm_backward_scratch_bytes(c->width), loss, embedding);
    hold(p, "gradient norm's scratch", -1, m->grad_norm_work, (int64_t)grad_norm_scratch_bytes(), end, end);
    hold(p, "AdamW's segments", -1, m->segments, (int64_t)m->table.count * (int64_t)sizeof(AdamWSegment), 0, end);
    hold(p, "amax of X", -1, m->amax_x, linears * 4, 0, end);
    hold(p, "amax of W", -1, m->amax_w, linears * 4, 0, end);
    hold(p, "scales of products", -1, m->factors, linears * FACTOR_COUNT * 4, 0, end);
    hold(p, "rstd of the final norm", -1, m->rstd_final, M * 4, at_forward(0), loss + 1);
    hold(p, "last residual", -1, m->residual_final, M * d * 2, at_forward(0), loss + 1);
    hold(p, "norm's output", -1, m->normed, M * d * 2, 0, embedding);
    hold(p, "small", -1, m->small, M * d * 2, 0, embedding);
    hold(p, "gradient of the residual stream", -1, m->d_stream, M * d * 2, 0, embedding);
    hold(p, "h", -1, m->h, M * c->ffn * 2, at_forward(0), at_forward(c->layers - 1));
    hold(p, "logits", -1, m->logits, m->head_rows * c->vocab * 2, loss, loss);
    hold(p, "big", -1, m->big, M * larger(c->ffn, llama_qkv_rows(c)) * 2, at_backward(c->layers, c->layers - 1), at_backward(c->layers, 0));
    hold(p, "measurements", -1, m->measured, linears * MEASURED_VALUES * 8, 0, end);
}
static void hold_layer(Parts *p, const Llama *m, int i, int first, int last) {
    const LlamaConfig *c = &m->options.config;
    const LlamaLayer *l = &m->layers[i];
    const int64_t M = m->M, d = c->width;
    hold(p, "residual before the FFN", i, l->residual_ffn, M * d * 2, first, last);
    hold(p, "rstd before attention", i, l->rstd_attn, M * 4, first, last);
    hold(p, "rstd before the FFN", i, l->rstd_ffn, M * 4, first, last);
    hold(p, "qkv", i, l->qkv, M * llama_qkv_rows(c) * 2, first, last);
    hold(p, "attention's output", i, l->attn, M * d * 2, first, last);
    hold(p, "lse", i, l->lse, M * c->heads * 4, first, last);
    hold(p, "gate and up", i, l->gate_up, M * 2 * c->ffn * 2, first, last);
    for (int k = 0; k < LINEARS_PER_LAYER; k++) {
        const Linear *linear = &l->linear[k];
        const LinearPlan *plan = linear->plan;
        const int64_t values = M * linear->K;
        hold(p, "codes of X", i, linear->x_codes, plan->packed_x ? values / 2 : values * (plan->fp8 ? 1 : 2), first, last);
        hold(p, "block scales of X", i, linear->x_scales, plan->packed_x ? values / plan->packed_x : 0, first, last);
        hold(p, "mask of X", i, linear->x_mask, values / 8, first, last);
        if (linear->x != l->attn && linear->x != m->normed && linear->x != m->h) hold(p, "X", i, linear->x, values * 2, first, last);
    }
}
// The quantized W of every layer holds for the whole step; with several micro-batches its operands too.
static void hold_weights(Parts *p, const Llama *m, int i) {
    const int end = at_update(m->options.config.layers);
    for (int k = 0; k < LINEARS_PER_LAYER; k++) {
        const Linear *l = &m->layers[i].linear[k];
        const int64_t values = l->N * l->K;
        hold(p, "codes of W", i, l->w_codes, values / 2, 0, end);
        hold(p, "block scales of W", i, l->w_scales, l->plan->packed_w ? values / l->plan->packed_w : 0, 0, end);
        hold(p, "mask of W", i, l->w_mask, values / 8, 0, end);
        if (m->work.weights_kept) hold(p, "operand of W", i, l->w_forward, values * 2, 0, end);
    }
}
// A gradient holds from the backward that writes it; of several micro-batches, all the time.
static void hold_gradients(Parts *p, const Llama *m) {
    const int layers = m->options.config.layers;
    for (int i = 0; i < m->table.count; i++) {
        const Param *q = &m->table.params[i];
        const int64_t bytes = gradient_bytes(&m->grads, q->offset + q->count) - gradient_bytes(&m->grads, q->offset);
        const int written = q->kind == PARAM_EMBED && !m->options.config.tied ? at_embedding(layers) : q->layer < 0 ? at_loss(layers) : at_backward(layers, q->layer);
        hold(p, q->kind == PARAM_EMBED ? "embedding's gradient" : q->layer < 0 ? "gradient beside the layers" : "gradient", q->layer,
             gradient_at(&m->grads, q->offset), bytes, m->options.micro_batches > 1 ? 0 : written, at_update(layers));
    }
}
static int by_address(const void *a, const void *b) {
    const char *x = ((const Part *)a)->from, *y = ((const Part *)b)->from;
    return (x > y) - (x < y);
}
// -> 1, or 0 with the first fault in `why`.
static int parts_sound(Parts *p, const Llama *m, char *why, size_t size) {
    qsort(p->parts, (size_t)p->count, sizeof p->parts[0], by_address);
    for (int i = 0; i < p->count; i++) {
        const Part *a = &p->parts[i];
        int inside = 0;
        for (int k = 0; k < ARENA_COUNT; k++) inside |= a->from >= m->arenas[k].base && a->from + a->bytes <= m->arenas[k].base + m->arenas[k].used;
        if (!inside) { snprintf(why, size, "%s of layer %d lies outside what is allocated", a->what, a->layer); return 0; }
        for (int j = i + 1; j < p->count && p->parts[j].from < a->from + a->bytes; j++) {
            const Part *b = &p->parts[j];
            if (a->first > b->last || b->first > a->last) continue;
            snprintf(why, size, "%s of layer %d and %s of layer %d overlap by %lld bytes", a->what, a->layer, b->what, b->layer, (long long)(a->from + a->bytes - b->from));
            return 0;
        }
    }
    return 1;
}
// The layout for options; native: as on a card whose FP4 tensor cores take the products.
static int layout_sound(const LlamaOptions *o, int native, char *why, size_t size) {
    static Parts p;
    Llama m;
    const int layers = o->config.layers;
    model_shape(&m, o, NULL);
    m.recipe_plan.native = native;
    for (int i = 0; i < ARENA_COUNT; i++) m.arenas[i].base = (char *)((uintptr_t)(i + 1) << 44);
    m.layers_end = 0;
    memory_layout(&m);
    memory_layout(&m);
    p.count = 0;
    hold_common(&p, &m);
    for (int i = 0; i < layers; i++) {
        // Under --recompute block the layers' activations are made again; what enters a layer stays.
        hold(&p, "residual before attention", i, m.layers[i].residual_attn, m.M * o->config.width * 2, at_forward(i), at_backward(layers, i));
        if (o->recompute == RECOMPUTE_BLOCK) {
            hold_layer(&p, &m, i, at_forward(i), at_forward(i));
            hold_layer(&p, &m, i, at_backward(layers, i), at_backward(layers, i));
        } else hold_layer(&p, &m, i, at_forward(i), at_backward(layers, i));
        hold_weights(&p, &m, i);
    }
    hold_gradients(&p, &m);
    const int ok = parts_sound(&p, &m, why, size);
    model_shape_free(&m);
    return ok;
}
// Every recipe and option of one model and batch.
static void check_model(const char *name, const LlamaConfig *c, int batch) {
    char why[320] = "";
    int layouts = 0, faults = 0;
    for (int bits = 0; bits < 1 << 5; bits++)
        for (int recompute = RECOMPUTE_NORM; recompute <= RECOMPUTE_BLOCK; recompute++)
            for (int r = 0; r < RECIPE_COUNT; r++)
                for (int native = 0; native <= (strcmp(RECIPES[r].name, "quartet2") == 0); native++) {
                    LlamaOptions o;
                    memset(&o, 0, sizeof o);
                    o.config = *c; o.recipe = &RECIPES[r]; o.batch = batch; o.seed = 1; o.nvfp4_gemm = NVFP4_GEMM_EMULATED; o.recompute = recompute;
                    o.config.tied = bits & 1; o.grad_bf16 = bits >> 1 & 1; o.quant_stats = bits >> 2 & 1; o.micro_batches = 1 + (bits >> 3 & 1); o.master_fp32 = bits >> 4 & 1;
                    char fault[200];
                    layouts++;
                    if (layout_sound(&o, native, fault, sizeof fault)) continue;
                    if (!faults++) snprintf(why, sizeof why, "; first: --recipe %s --recompute %d, option bits %d, native %d: %s", o.recipe->name, recompute, bits, native, fault);
                }
    check(faults == 0, "%s, vocabulary %d, %d x %d: %d layouts, %d with parts that overlap or lie outside%s", name, c->vocab, batch, c->seq, layouts, faults, why);
}

int main(void) {
    static const LlamaConfig models[] = {
        {3, 128, 2, 1, 256, 256, 64, 0, 1e-5f, 1e4f},      // test_backend_gpu's
        {1, 128, 2, 2, 2048, 50304, 64, 0, 1e-5f, 1e4f},   // one layer, nearly all vocabulary
        {6, 640, 5, 5, 2560, 32000, 512, 0, 1e-5f, 1e4f},
        {8, 1024, 8, 4, 4096, 32000, 512, 0, 1e-5f, 1e4f},
        {20, 1280, 10, 10, 5120, 65536, 2048, 0, 1e-5f, 1e4f},
        {16, 2048, 32, 8, 8192, 128256, 512, 0, 1e-5f, 5e5f},
        {32, 2048, 16, 16, 8192, 65536, 2048, 0, 1e-5f, 1e4f}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const LlamaConfig *c = &models[i];
        char name[64];
        snprintf(name, sizeof name, "%d layers, width %d", c->layers, c->width);
        for (int batch = c->seq < 128 ? 2 : 1; batch <= 128; batch *= 2) check_model(name, c, batch);
    }
    return checks_finish();
}
