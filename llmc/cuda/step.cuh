// cuda/step.cuh: the passes of a step: forward, loss, backward, update; evaluation and logits.
//
// Everything here enqueues work on one stream and returns. The head (lm_head, cross-entropy and their backward) takes some rows at a
// time, so that the logits of a whole batch never exist.
#ifndef LLMC_CUDA_STEP_CUH
#define LLMC_CUDA_STEP_CUH

#include "crossentropy.cuh"
#include "dist_nccl.cuh"
#include "measure.cuh"
#include "rope.cuh"
#include "swiglu.cuh"

FN const bf16 *weight_of(const Llama *m, ParamKind kind, int layer) { return m->params + layer_param(m, kind, layer)->offset; }

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// residual_out = residual_in + delta (delta NULL: residual_in is the stream), out = its norm; amax for the quantizer of out, NULL if none asks.
FN void norm_forward(Llama *m, bf16 *residual_out, bf16 *out, float *rstd, float *amax, const bf16 *residual_in, const bf16 *delta,
                         const bf16 *gain, int64_t M) {
    const int d = m->options.config.width;
    mark(m, FAMILY_NORM, (delta ? 8.0 : 4.0) * (double)(M * d));
    rmsnorm_forward_launch(residual_out, out, rstd, amax, residual_in, delta, gain, M, d, m->options.config.norm_eps, m->stream);
}
// Where the producer of a linear's input leaves its largest magnitude, NULL: nobody asks.
FN float *input_amax(const Linear *l) { return l->plan->amax_x ? l->amax_x : NULL; }
FN void attention_run(Llama *m, LlamaLayer *l, int B, int T) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = (int64_t)B * T;
    mark(m, FAMILY_ATTENTION_FORWARD, 0);
    if (B == m->attention->shape.B && T == m->attention->shape.T) attention_forward(m->attention, l->attn, l->lse, l->qkv, m->stream);
    else {                                                 // a single sequence of another length: no plan is made for it
        const AttentionShape shape = {B, T, c->heads, c->kv_heads, llama_head_dim(c)};
        flash_forward(&shape, l->attn, l->lse, l->qkv, m->stream);
    }
    if (!input_amax(&l->linear[LINEAR_ATTN_OUT])) return;
    // Attention's output is the one input whose producer does not know its amax: a pass of 2 bytes a value.
    mark(m, FAMILY_QUANTIZE_X, 2.0 * (double)(M * c->width));
    amax_launch(m->stream, l->attn, M * c->width, l->linear[LINEAR_ATTN_OUT].amax_x);
}
// One layer on B sequences of T tokens. In: residual_in and delta (the layer before it, its FFN's output), which residual_attn is
// made of; delta NULL: residual_attn is there already. Out: residual_ffn, and the FFN's output in m->small unless `again` (backward's
// second forward, which needs only what the layer keeps).
FN void layer_forward(Llama *m, int layer, const bf16 *residual_in, const bf16 *delta, int B, int T, int again) {
    const LlamaConfig *c = &m->options.config;
    LlamaLayer *l = &m->layers[layer];
    Linear *qkv = &l->linear[LINEAR_QKV], *attn_out = &l->linear[LINEAR_ATTN_OUT], *gate_up = &l->linear[LINEAR_GATE_UP], *down = &l->linear[LINEAR_DOWN];
    const int64_t M = (int64_t)B * T;

    norm_forward(m, l->residual_attn, qkv->x, l->rstd_attn, input_amax(qkv), delta ? residual_in : l->residual_attn, delta, weight_of(m, PARAM_ATTN_NORM, layer), M);
    linear_forward(qkv, &m->work, l->qkv, M);
    measure_forward(m, qkv, M);
    mark(m, FAMILY_ROPE, 4.0 * (double)(M * (c->width + llama_kv_width(c))));
    rope_forward_launch(l->qkv, m->rope, M, T, c->heads, c->kv_heads, llama_head_dim(c), m->stream);
    attention_run(m, l, B, T);
    linear_forward(attn_out, &m->work, m->small, M);
    measure_forward(m, attn_out, M);

    norm_forward(m, l->residual_ffn, gate_up->x, l->rstd_ffn, input_amax(gate_up), l->residual_attn, m->small, weight_of(m, PARAM_FFN_NORM, layer), M);
    linear_forward(gate_up, &m->work, l->gate_up, M);
    measure_forward(m, gate_up, M);
    mark(m, FAMILY_SWIGLU, 6.0 * (double)(M * c->ffn));
    swiglu_forward_launch(down->x, input_amax(down), l->gate_up, M, c->ffn, m->stream);
    if (!again) linear_forward(down, &m->work, m->small, M);
    else if (plan_keeps_operand_x(down->plan)) linear_make_input(down, &m->work, M);
    if (!again) measure_forward(m, down, M);
}
// Tokens on the device -> the final norm's output in m->normed.
FN void model_forward(Llama *m, int B, int T) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = (int64_t)B * T;
    if (m->weights_changed && m->recipe_plan.amax_w) weights_amax_launch(&m->adamw, m->stream);
    if (m->recipe_plan.amax_x) {
        mark(m, FAMILY_OTHER, 0);
        CUDA_CHECK(cudaMemsetAsync(m->amax_x, 0, (size_t)c->layers * LINEARS_PER_LAYER * sizeof(float), m->stream));
    }
    m->weights_changed = 0;
    mark(m, FAMILY_EMBEDDING, 4.0 * (double)(M * c->width));
    embedding_forward_launch(m->layers[0].residual_attn, weight_of(m, PARAM_EMBED, -1), m->tokens, M, c->width, m->stream);
    for (int i = 0; i < c->layers; i++) layer_forward(m, i, i ? m->layers[i - 1].residual_ffn : NULL, i ? m->small : NULL, B, T, 0);
    norm_forward(m, m->residual_final, m->normed, m->rstd_final, NULL, m->layers[c->layers - 1].residual_ffn, m->small, weight_of(m, PARAM_FINAL_NORM, -1), M);
}

// ---------------------------------------------------------------------------------------------------------------------
// The head

FN void head_product(Llama *m, const Linear *head, int gemm, int64_t rows, void *d, const bf16 *a, const bf16 *b, int accumulate) {
    const GemmPlan *p = gemm_plan(&m->gemm, linear_shape(head, gemm, rows));
    profile_mark(m->profile, FAMILY_LM_HEAD, 0, p->ms, m->stream);
    gemm_run(&m->gemm, p, d, a, b, NULL, accumulate, m->stream);
}
// Losses of all rows, added to *loss_sum. scale != 0: also the gradient of scale * loss, of lm_head (into the gradients) and of the
// final norm's output (into m->small).
FN void model_head(Llama *m, float scale) {
    const LlamaConfig *c = &m->options.config;
    const Linear head = head_linear(m);
    const int64_t d = c->width;
    for (int64_t first = 0; first < m->M; first += m->head_rows) {
        const int64_t rows = m->M - first < m->head_rows ? m->M - first : m->head_rows;
        const bf16 *x = m->normed + first * d;
        head_product(m, &head, GEMM_FORWARD, rows, m->logits, x, head.w, 0);
        mark(m, FAMILY_CROSS_ENTROPY, (scale != 0 ? 4.0 : 2.0) * (double)(rows * c->vocab));
        if (scale == 0) { crossentropy_forward_launch(m->losses + first, m->logits, m->targets + first, rows, c->vocab, m->stream); continue; }
        crossentropy_backward_launch(m->logits, m->losses + first, m->targets + first, rows, c->vocab, scale, m->stream);
        head_product(m, &head, GEMM_DGRAD, rows, m->small + first * d, m->logits, head.w, 0);
        head_product(m, &head, GEMM_WGRAD, rows, head.dw, m->logits, x, m->work.micro > 0 || first > 0);
    }
    mark(m, FAMILY_OTHER, 0);
    loss_sum_launch(m->loss_sum, m->losses, m->M, m->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// m->d_stream += the gradient through a norm of d_normed; its gain's gradient. normed_again: where the norm's output is written
// once more for a wgrad, NULL where it was kept. first: there is no gradient of the stream yet.
FN void norm_backward(Llama *m, ParamKind gain, int layer, bf16 *normed_again, const bf16 *d_normed, const bf16 *residual, const float *rstd, int first) {
    const int d = m->options.config.width;
    const int64_t at = layer_param(m, gain, layer)->offset;
    void *const dgain = gradient_at(&m->grads, at);
    mark(m, FAMILY_NORM, (6.0 + (first ? 0 : 2) + (normed_again ? 2 : 0)) * (double)(m->M * d));
    if (m->work.micro == 0) CUDA_CHECK(cudaMemsetAsync(dgain, 0, (size_t)(gradient_bytes(&m->grads, at + d) - gradient_bytes(&m->grads, at)), m->stream));
    const auto launch = [&](auto *dgain_typed) {
        rmsnorm_backward_launch(m->d_stream, dgain_typed, normed_again, first ? NULL : m->d_stream, d_normed, residual, rstd,
                                weight_of(m, gain, layer), m->norm_work, m->M, d, m->stream);
    };
    if (gradient_is_bf16(&m->grads, at)) launch((bf16 *)dgain);
    else launch((float *)dgain);
}
// m->d_stream: gradient of the stream after the layer -> gradient of the stream before it.
FN void layer_backward(Llama *m, int layer) {
    const LlamaConfig *c = &m->options.config;
    const int64_t M = m->M;
    LlamaLayer *l = &m->layers[layer];
    Linear *qkv = &l->linear[LINEAR_QKV], *attn_out = &l->linear[LINEAR_ATTN_OUT], *gate_up = &l->linear[LINEAR_GATE_UP], *down = &l->linear[LINEAR_DOWN];
    // Where wgrad starts from X itself, or is measured, X is needed again: h appears where its gradient was, a norm's output in m->normed.
    const int plain = qkv->plan->keeps_x || m->measuring;
    bf16 *const h_again = plain && down->x == m->h ? m->big : NULL, *const normed_again = plain && qkv->x == m->normed ? m->normed : NULL;
    if (m->options.recompute == RECOMPUTE_BLOCK && layer + 1 < c->layers) layer_forward(m, layer, NULL, NULL, m->options.batch, c->seq, 1);

    linear_dgrad(down, &m->work, m->big, m->d_stream, M);
    measure_dgrad(m, down, m->big, m->d_stream, M);
    mark(m, FAMILY_SWIGLU, (h_again ? 12.0 : 10.0) * (double)(M * c->ffn));
    swiglu_backward_launch(l->gate_up, h_again, m->big, l->gate_up, M, c->ffn, m->stream);
    const bf16 *const h = h_again ? m->big : down->x;
    linear_wgrad(down, &m->work, m->d_stream, h, M);
    measure_wgrad(m, down, m->d_stream, h, M);
    linear_dgrad(gate_up, &m->work, m->small, l->gate_up, M);
    measure_dgrad(m, gate_up, m->small, l->gate_up, M);
    norm_backward(m, PARAM_FFN_NORM, layer, normed_again, m->small, l->residual_ffn, l->rstd_ffn, 0);
    linear_wgrad(gate_up, &m->work, l->gate_up, gate_up->x, M);
    measure_wgrad(m, gate_up, l->gate_up, gate_up->x, M);

    linear_dgrad(attn_out, &m->work, m->small, m->d_stream, M);
    measure_dgrad(m, attn_out, m->small, m->d_stream, M);
    linear_wgrad(attn_out, &m->work, m->d_stream, l->attn, M);
    measure_wgrad(m, attn_out, m->d_stream, l->attn, M);
    mark(m, FAMILY_ATTENTION_BACKWARD, 0);                             // and RoPE's, which the own kernels do on their way
    attention_backward(m->attention, m->big, m->small, l->attn, l->lse, l->qkv, m->rope, m->stream);
    linear_dgrad(qkv, &m->work, m->small, m->big, M);
    measure_dgrad(m, qkv, m->small, m->big, M);
    norm_backward(m, PARAM_ATTN_NORM, layer, normed_again, m->small, l->residual_attn, l->rstd_attn, 0);
    linear_wgrad(qkv, &m->work, m->big, qkv->x, M);
    measure_wgrad(m, qkv, m->big, qkv->x, M);
}
// From the gradient of the final norm's output, in m->small, to every parameter's.
FN void model_backward(Llama *m) {
    const LlamaConfig *c = &m->options.config;
    norm_backward(m, PARAM_FINAL_NORM, -1, NULL, m->small, m->residual_final, m->rstd_final, 1);
    bucket_reduce(m, c->layers + 1);
    for (int i = c->layers - 1; i >= 0; i--) {
        layer_backward(m, i);
        bucket_reduce(m, i + 1);
    }
    float *const d_embed = (float *)gradient_at(&m->grads, layer_param(m, PARAM_EMBED, -1)->offset);
    mark(m, FAMILY_EMBEDDING, 2.0 * (double)(m->M * c->width) + 4.0 * c->vocab * c->width);
    if (m->work.micro == 0 && !c->tied) CUDA_CHECK(cudaMemsetAsync(d_embed, 0, (size_t)c->vocab * (size_t)c->width * sizeof(float), m->stream));
    embedding_backward_launch(d_embed, m->d_stream, m->tokens, m->embed_work, m->M, c->width, c->vocab, m->stream);
    bucket_reduce(m, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// A training step

FN void check_tokens(const int32_t *tokens, int64_t count, int vocab, const char *what) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            fatal("%s %d at position %lld of the batch is outside the vocabulary of %d; use data prepared for this vocabulary", what,
                  (int)tokens[i], (long long)i, vocab);
}
// Copies `count` tokens, and targets unless NULL, to the device, through a slot of pinned memory whose last copy is done.
FN void tokens_send(Llama *m, const int32_t *tokens, const int32_t *targets, int64_t count) {
    const int slot = (int)(m->micro_steps++ % TOKEN_SLOTS);
    int32_t *pinned = m->host_tokens + (int64_t)slot * 2 * m->M;
    check_tokens(tokens, count, m->options.config.vocab, "token");
    if (targets) check_tokens(targets, count, m->options.config.vocab, "target");
    dist_event_wait(&m->options, m->tokens_sent[slot]);
    memcpy(pinned, tokens, (size_t)count * sizeof(int32_t));
    mark(m, FAMILY_OTHER, 0);
    CUDA_CHECK(cudaMemcpyAsync(m->tokens, pinned, (size_t)count * sizeof(int32_t), cudaMemcpyHostToDevice, m->stream));
    if (targets) {
        memcpy(pinned + m->M, targets, (size_t)count * sizeof(int32_t));
        CUDA_CHECK(cudaMemcpyAsync(m->targets, pinned + m->M, (size_t)count * sizeof(int32_t), cudaMemcpyHostToDevice, m->stream));
    }
    CUDA_CHECK(cudaEventRecord(m->tokens_sent[slot], m->stream));
}
// The operands of W made before no longer hold: of new weights none, of new signs dgrad's.
FN void weights_forget(Llama *m, int forward) {
    for (int i = 0; i < m->options.config.layers * LINEARS_PER_LAYER; i++) {
        Linear *l = &m->layers[i / LINEARS_PER_LAYER].linear[i % LINEARS_PER_LAYER];
        if (forward) l->forward_ready = 0;
        l->dgrad_ready = 0;
    }
}
FN void llama_step_begin(Llama *m, int64_t step) {
    CUDA_CHECK(cudaEventRecord(m->step_begun[m->steps_ended % RESULT_SLOTS], m->stream));
    m->work.step = (uint32_t)step;
    weights_forget(m, m->weights_changed);
    CUDA_CHECK(cudaMemsetAsync(m->loss_sum, 0, 2 * sizeof(double), m->stream));
}
// Of a token's loss in the step's mean, over all ranks.
FN float loss_scale(const Llama *m) { return (float)(1.0 / ((double)m->M * m->options.micro_batches * llama_ranks(&m->options))); }
FN void llama_micro_step(Llama *m, int micro, const int32_t *tokens, const int32_t *targets) {
    m->work.micro = micro;
    tokens_send(m, tokens, targets, m->M);
    model_forward(m, m->options.batch, m->options.config.seq);
    model_head(m, loss_scale(m));
    model_backward(m);
    m->measuring = 0;                                      // one micro-batch is measured
}
FN void llama_step_limits(Llama *m, float loss, float grad_norm) { m->loss_limit = loss; m->norm_limit = grad_norm; }
FN void llama_step_end(Llama *m, const AdamWOptions *o) {
    const int slot = (int)(m->steps_ended % RESULT_SLOTS);
    if (m->steps_ended - m->steps_read == RESULT_SLOTS) fatal("%d steps ended and no llama_step_result was asked for: this is a bug", RESULT_SLOTS);
    mark(m, FAMILY_OPTIMIZER, (20.0 + (m->masters ? 6.0 : 0.0)) * (double)m->table.total + 2.0 * (double)gradient_bytes(&m->grads, m->table.total));
    const AdamWScalars k = adamw_scalars(o->lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->step);
    if (llama_ranks(&m->options) > 1) dist_update(m, o, k, loss_scale(m));
    else {
        grad_norm_launch(m->step_stats, &m->adamw, o->clip, m->loss_limit, m->norm_limit, m->loss_sum, loss_scale(m), m->grad_norm_work, m->stream);
        adamw_launch(&m->adamw, k, m->options.seed, o->step, m->step_stats, m->stream);
    }
    CUDA_CHECK(cudaMemcpyAsync(&m->host_stats[slot], m->step_stats, sizeof(StepStats), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaEventRecord(m->result_ready[slot], m->stream));
    m->steps_ended++;
    weights_forget(m, 1);
}
FN StepResult llama_step_result(Llama *m) {
    if (m->steps_read == m->steps_ended) fatal("a step's result was asked for before a step ended: this is a bug");
    const int slot = (int)(m->steps_read++ % RESULT_SLOTS);
    dist_event_wait(&m->options, m->result_ready[slot]);
    CUDA_CHECK(cudaEventElapsedTime(&m->step_ms, m->step_begun[slot], m->result_ready[slot]));
    const StepStats *s = &m->host_stats[slot];
    const StepResult result = {s->loss, s->norm, s->finite, s->culprit};
    return result;
}
FN double llama_step_seconds(const Llama *m) { return 1e-3 * (double)m->step_ms; }

// ---------------------------------------------------------------------------------------------------------------------
// Without gradients

FN float llama_eval(Llama *m, const int32_t *tokens, const int32_t *targets) {
    m->work.micro = 0;
    if (m->weights_changed) weights_forget(m, 1);
    tokens_send(m, tokens, targets, m->M);
    CUDA_CHECK(cudaMemsetAsync(m->loss_sum, 0, 2 * sizeof(double), m->stream));
    model_forward(m, m->options.batch, m->options.config.seq);
    model_head(m, 0);
    CUDA_CHECK(cudaMemcpyAsync(m->host_loss, m->loss_sum, sizeof(double), cudaMemcpyDeviceToHost, m->stream));
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    return (float)(*m->host_loss / (double)m->M);
}
// The plans of this length's GEMMs are not tuned, and not kept. FP8 products take multiples of 16 rows: the last token is repeated up to
// there, which what comes before does not see.
FN void llama_logits_from(Llama *m, const int32_t *tokens, int length, int first, float *logits) {
    const LlamaConfig *c = &m->options.config;
    const int rows = plan_bytes(&m->recipe_plan, GEMM_FORWARD, OPERAND_A) ? (length + 15) / 16 * 16 : length;
    if (length < 1 || length > c->seq) fatal("logits after %d tokens: the model takes 1 to %d", length, c->seq);
    const int plans = m->gemm.count;
    const Linear head = head_linear(m);
    m->work.micro = 0;
    if (m->weights_changed) weights_forget(m, 1);
    tokens_send(m, tokens, NULL, length);
    for (int i = length; i < rows; i++)
        CUDA_CHECK(cudaMemcpyAsync(m->tokens + i, m->tokens + length - 1, sizeof(int32_t), cudaMemcpyDeviceToDevice, m->stream));
    model_forward(m, 1, rows);
    uint16_t *stored = (uint16_t *)xcalloc((size_t)c->vocab, sizeof *stored);
    for (int t = first; t < length; t++, logits += c->vocab) {         // one row fits whatever the head's chunk is
        head_product(m, &head, GEMM_FORWARD, 1, m->logits, m->normed + (int64_t)t * c->width, head.w, 0);
        CUDA_CHECK(cudaMemcpyAsync(stored, m->logits, (size_t)c->vocab * 2, cudaMemcpyDeviceToHost, m->stream));
        CUDA_CHECK(cudaStreamSynchronize(m->stream));
        for (int i = 0; i < c->vocab; i++) logits[i] = bf16_decode(stored[i]);
    }
    free(stored);
    gemm_trim(&m->gemm, plans);
}

#endif
