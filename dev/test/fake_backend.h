// fake_backend.h: a backend (llama.h's interface) that holds tensors and computes nothing, for tests of what only moves them.
#ifndef TEST_FAKE_BACKEND_H
#define TEST_FAKE_BACKEND_H

#include "llmc/llama.h"

struct Llama { LlamaOptions options; ParamTable table; float *state[4]; };

FN int llama_plan(const LlamaOptions *o, MemoryItem *items, int capacity) { (void)o; (void)items; (void)capacity; return 0; }
FN Llama *llama_create(const LlamaOptions *o) {
    Llama *m = (Llama *)xcalloc(1, sizeof(Llama));
    m->options = *o;
    m->table = llama_param_table(&o->config);
    for (int s = 0; s < 4; s++) m->state[s] = (float *)xcalloc((size_t)m->table.total, sizeof(float));
    return m;
}
FN void llama_free(Llama *m) {
    for (int s = 0; s < 4; s++) free(m->state[s]);
    free(m->table.params);
    free(m);
}
FN const ParamTable *llama_params(const Llama *m) { return &m->table; }
// Every value another, from the seed; the parameters are BF16 values unless masters are float32.
FN void llama_init(Llama *m) {
    for (int s = 0; s < 4; s++) {
        RngStream r = rng_stream(m->options.seed, (uint32_t)s, 0);
        for (int64_t i = 0; i < m->table.total; i++) {
            float v = rng_uniform(rng_word(r, (uint64_t)i)) - 0.5f;
            m->state[s][i] = s == LLAMA_PARAMS && !m->options.master_fp32 ? bf16_round(v) : v;
        }
    }
}
FN void llama_read(Llama *m, enum LlamaState what, const Param *p, float *values) {
    memcpy(values, m->state[what] + p->offset, (size_t)p->count * sizeof(float));
}
FN void llama_write(Llama *m, enum LlamaState what, const Param *p, const float *values) {
    memcpy(m->state[what] + p->offset, values, (size_t)p->count * sizeof(float));
}
FN const char *llama_device_name(const Llama *m) { (void)m; return "none"; }
FN const char *llama_products(const Llama *m) { (void)m; return NULL; }
FN double llama_peak_flops(const Llama *m) { (void)m; return 0; }

FN void fake_computes_nothing(void) { fatal("the fake backend computes nothing"); }
FN void llama_step_begin(Llama *m, int64_t step) { (void)m; (void)step; fake_computes_nothing(); }
FN void llama_micro_step(Llama *m, int micro, const int32_t *tokens, const int32_t *targets) {
    (void)m; (void)micro; (void)tokens; (void)targets; fake_computes_nothing();
}
FN void llama_step_end(Llama *m, const AdamWOptions *adamw) { (void)m; (void)adamw; fake_computes_nothing(); }
FN void llama_step_limits(Llama *m, float loss, float grad_norm) { (void)m; (void)loss; (void)grad_norm; }
FN StepResult llama_step_result(Llama *m) { StepResult r = {0, 0, 0, 0}; (void)m; fake_computes_nothing(); return r; }
FN double llama_step_seconds(const Llama *m) { (void)m; fake_computes_nothing(); return 0; }
FN void llama_stats_begin(Llama *m) { (void)m; fake_computes_nothing(); }
FN const LinearStats *llama_stats_end(Llama *m) { (void)m; fake_computes_nothing(); return NULL; }
FN float llama_eval(Llama *m, const int32_t *tokens, const int32_t *targets) { (void)m; (void)tokens; (void)targets; fake_computes_nothing(); return 0; }
FN void llama_logits_from(Llama *m, const int32_t *tokens, int length, int first, float *logits) { (void)m; (void)tokens; (void)length; (void)first; (void)logits; fake_computes_nothing(); }

#endif
