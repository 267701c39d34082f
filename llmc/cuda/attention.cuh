// cuda/attention.cuh: causal attention of a whole micro-batch, forward and backward. Two runs give the same bits.
//
// Two implementations behind one interface: cuDNN's graph API (attention_cudnn.cuh, compiled with -DUSE_CUDNN) and the own
// FlashAttention kernels (attention_flash.cuh). Whatever cuDNN has no execution plan for runs on the own kernels.
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH

#include "attention_flash.cuh"
#include "rope.cuh"
#ifdef USE_CUDNN
#include "attention_cudnn.cuh"
#endif

typedef enum {
    ATTENTION_AUTO,                // cuDNN where it has a plan and is the faster, the own kernels elsewhere
    ATTENTION_CUDNN,               // cuDNN: fatal where it has no plan, or this program was built without it
    ATTENTION_FLASH                // the own kernels: no T x T buffer anywhere
} AttentionBackend;

// cuDNN's repeatable backward keeps B*heads*T*T BF16 values in its workspace: it gets as many sequences at a time as this
// holds. Its other backward adds dQ with atomics.
#define ATTENTION_WORKSPACE ((int64_t)544 << 20)
// On Hopper the own backward takes over from this length on: those scores cost traffic that grows with T. Measured on one H200, own
// against cuDNN (dev/cuda/attention.cu): B 128, H 8, T 512 0.79 ms against 0.70; B 8, H 16, T 2048 0.92 against 1.01; B 16, H 10, T 2048 1.14 against
// 1.38; head size 64, B 4, H 32, T 2048 0.56 against 0.76. A rule, not a race at every start: the two differ in bits.
#define OWN_BACKWARD_FROM 1024

// One shape's plan: made once, used by every layer.
typedef struct AttentionPlan {
    AttentionShape shape;
    int64_t workspace_bytes;       // one buffer for forward and backward
    void *workspace;               // NULL until first used
#ifdef USE_CUDNN
    CudnnGraph *forward, *backward; // NULL: the own kernels
    int backward_parts;            // of the batch, one after the other
#endif
} AttentionPlan;

// What the plan runs on.
FN const char *attention_plan_name(const AttentionPlan *p) {
#ifdef USE_CUDNN
    if (p->forward) return p->backward ? "cudnn" : "cudnn forward, flash backward";
    if (p->backward) return "flash forward, cudnn backward";
#endif
    (void)p;
    return "flash";
}

#ifdef USE_CUDNN
// A pass by cuDNN, or NULL when it cannot: its message is shown the first time that happens to that pass. required: fatal then.
FN CudnnGraph *attention_cudnn_pass(const AttentionShape *s, CudnnPass pass, int required) {
    static int said[3];  // a pass
    const char *why;
    cudnnHandle_t handle = cudnn_handle(&why);
    CudnnGraph *g = handle ? cudnn_graph_create(s, pass, handle) : NULL;
    if (g && g->plan) return g;
    if (required) fatal("--attention cudnn: cuDNN %zu has no attention plan for B %d, T %d, heads %d/%d of %d (use auto or flash). cuDNN says: %s",
                        cudnnGetVersion(), s->B, s->T, s->heads, s->kv_heads, s->head_dim, g ? g->message : why);
    if (!said[pass]++) warn("cuDNN %zu has no attention plan for B %d, T %d, heads %d/%d of %d; the program's own kernels take over. cuDNN says: %s",
                      cudnnGetVersion(), s->B, s->T, s->heads, s->kv_heads, s->head_dim, g ? g->message : why);
    cudnn_graph_free(g);
    return NULL;
}
// The backward of as many sequences as fit ATTENTION_WORKSPACE (at least one).
FN void attention_cudnn_backward(AttentionPlan *p, int required) {
    for (int parts = 1; parts <= p->shape.B; parts++) {
        if (p->shape.B % parts) continue;
        AttentionShape part = p->shape;
        part.B /= parts;
        const int64_t scores = (int64_t)part.B * part.heads * part.T * part.T * (int64_t)sizeof(bf16);
        if (scores > ATTENTION_WORKSPACE && parts < p->shape.B) continue;
        p->backward = attention_cudnn_pass(&part, CUDNN_BACKWARD_DETERMINISTIC, required);
        p->backward_parts = parts;
        return;
    }
}
#endif

// A plan for B sequences of T tokens, `heads` query heads in groups that share one of `kv_heads` key/value heads; head_dim 64
// or 128. Allocates no device memory of its own before first use, so that a memory plan can ask for workspace_bytes.
FN AttentionPlan *attention_create(int B, int T, int heads, int kv_heads, int head_dim, AttentionBackend backend, int verbose) {
    if (B < 1 || T < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads)
        fatal("attention of B=%d T=%d heads=%d kv_heads=%d: sizes must be positive and kv_heads must divide heads", B, T, heads, kv_heads);
    if (head_dim != 64 && head_dim != 128)
        fatal("attention with a head size of %d: 64 and 128 are supported; choose heads so that width / heads is one of them", head_dim);
    AttentionPlan *p = (AttentionPlan *)xcalloc(1, sizeof *p);
    AttentionShape s = {B, T, heads, kv_heads, head_dim};
    p->shape = s;
    p->workspace_bytes = flash_workspace_bytes(&s);
#ifdef USE_CUDNN
    if (backend != ATTENTION_FLASH) p->forward = attention_cudnn_pass(&s, CUDNN_FORWARD, backend == ATTENTION_CUDNN);
    const int own_backward = backend == ATTENTION_FLASH || (backend == ATTENTION_AUTO && T >= OWN_BACKWARD_FROM && flash_on_hopper());
    if (!own_backward) attention_cudnn_backward(p, backend == ATTENTION_CUDNN);
    if (p->backward) p->workspace_bytes = p->backward->workspace_bytes;
    if (p->forward && p->forward->workspace_bytes > p->workspace_bytes) p->workspace_bytes = p->forward->workspace_bytes;
#else
    if (backend == ATTENTION_CUDNN) fatal("--attention cudnn: this program was built without cuDNN; use auto or flash, or build it again with CUDNN_HOME set");
#endif
    if (verbose) printf("attention: B %d, T %d, heads %d/%d of %d: %s, workspace %.1f MiB\n", B, T, heads, kv_heads, head_dim,
                        attention_plan_name(p), (double)p->workspace_bytes / 1048576.0);
    return p;
}
FN void attention_allocate(AttentionPlan *p) {
    if (!p->workspace && p->workspace_bytes) CUDA_CHECK(cudaMalloc(&p->workspace, (size_t)p->workspace_bytes));
}
FN void attention_free(AttentionPlan *p) {
    if (!p) return;
#ifdef USE_CUDNN
    cudnn_graph_free(p->forward); cudnn_graph_free(p->backward);
#endif
    if (p->workspace) CUDA_CHECK(cudaFree(p->workspace));
    free(p);
}

// out (B,T,heads*D) bf16, lse (B,heads,T) float32 = ln sum exp of the scaled scores, from qkv (B,T,(heads+2 kv_heads)*D) bf16:
// each row q heads | k heads | v heads, RoPE already applied. Scores are scaled by 1/sqrt(D) and causal.
FN void attention_forward(AttentionPlan *p, bf16 *out, float *lse, const bf16 *qkv, cudaStream_t stream) {
    attention_allocate(p);
#ifdef USE_CUDNN
    if (p->forward) { cudnn_forward(p->forward, out, lse, qkv, p->workspace, stream); return; }
#endif
    flash_forward(&p->shape, out, lse, qkv, stream);
}
// dqkv, laid out as qkv and written in full, from dout and the forward's out, lse and qkv. dqkv must not overlap its inputs. rope (T, head_dim/2, device;
// rope_table_fill()'s): the gradients of q and k are those before the rotation; NULL: after it. The own kernels turn them before they round them.
FN void attention_backward(AttentionPlan *p, bf16 *dqkv, const bf16 *dout, const bf16 *out, const float *lse, const bf16 *qkv,
                           const float2 *rope, cudaStream_t stream) {
    attention_allocate(p);
#ifdef USE_CUDNN
    const AttentionShape *s = &p->shape;
    const int64_t tokens = p->backward ? (int64_t)p->backward->shape.B * s->T : 0, qkv_row = cudnn_qkv_row(s), out_row = cudnn_out_row(s);
    for (int64_t i = 0, part = 0; p->backward && part < p->backward_parts; part++, i += tokens)
        cudnn_backward(p->backward, dqkv + i * qkv_row, dout + i * out_row, out + i * out_row, lse + i * s->heads, qkv + i * qkv_row, p->workspace, stream);
    if (p->backward) {
        if (rope) rope_backward_launch(dqkv, rope, (int64_t)s->B * s->T, s->T, s->heads, s->kv_heads, s->head_dim, stream);
        return;
    }
#endif
    flash_backward(&p->shape, dqkv, dout, out, lse, qkv, rope, p->workspace, stream);
}

#endif
