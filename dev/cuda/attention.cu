// dev/cuda/attention.cu: causal attention, every version of it: checked, then timed.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -Xcompiler -fopenmp dev/cuda/attention.cu -o attention [-DUSE_CUDNN -lcudnn]
//   ./attention [--quick|--small]
//
// Checks: forward (out, lse) and backward against float64 on the CPU, grouped KV heads and lengths that fill no tile included;
// outputs are filled with NaN first; two runs must give the same bits. --quick: checks only; --small: only the own kernels, on small
// shapes. TFLOP/s count causal work: forward 2 B H T T D, backward 2.5 times that, whatever a version computes again.
#include "ladder.cuh"

#include "../../llmc/cuda/attention.cuh"

static Ladder ladder;
#define ROPE_THETA 10000.0f

// ---------------------------------------------------------------------------------------------------------------------
// Versions: a forward or a backward of a shape.

typedef struct {
    const AttentionShape *shape;
    AttentionPlan *plan;           // cuDNN's where it has one
    void *atomics, *atomics_space; // cuDNN's backward that is not repeatable: a CudnnGraph and its workspace
    bf16 *qkv, *out, *dout, *dqkv; // (B,T,...) on the device
    float *lse, *delta;
    float2 *table;                 // RoPE's
    const float2 *rope;            // the backward's: table, or NULL
} Run;
typedef struct { const char *name; int head_dim; void (*run)(const Run *r); } Version;

template <int D, int WGS, int BN, bool WG>
static void forward_flash(const Run *r) { flash_forward_launch<D, WGS, BN, WG>(r->shape, r->out, r->lse, r->qkv, 0); }
static void forward_trainer(const Run *r) { flash_forward(r->shape, r->out, r->lse, r->qkv, 0); }
#ifdef USE_CUDNN
static int plan_has_forward(const Run *r) { return r->plan->forward != NULL; }
static int plan_has_backward(const Run *r) { return r->plan->backward != NULL; }
static void backward_atomics(const Run *r) { cudnn_backward((CudnnGraph *)r->atomics, r->dqkv, r->dout, r->out, r->lse, r->qkv, r->atomics_space, 0); }
#else
static int plan_has_forward(const Run *) { return 0; }
static int plan_has_backward(const Run *) { return 0; }
static void backward_atomics(const Run *) {}
#endif
static void forward_plan(const Run *r) { attention_forward(r->plan, r->out, r->lse, r->qkv, 0); }

template <int D, int WGS_Q, int BN, int WGS_K, int BM, bool WG>
static void backward_flash(const Run *r) {
    flash_dq_launch<D, WGS_Q, BN, WG>(r->shape, r->dqkv, r->delta, r->dout, r->out, r->lse, r->qkv, r->rope, 0);
    flash_dkv_launch<D, WGS_K, BM, WG>(r->shape, r->dqkv, r->delta, r->dout, r->lse, r->qkv, r->rope, 0);
}
// A part of the backward alone, to be timed.
template <int D, int WGS, int BN, bool WG>
static void dq_alone(const Run *r) { flash_dq_launch<D, WGS, BN, WG>(r->shape, r->dqkv, r->delta, r->dout, r->out, r->lse, r->qkv, r->rope, 0); }
static void backward_trainer(const Run *r) { flash_backward(r->shape, r->dqkv, r->dout, r->out, r->lse, r->qkv, r->rope, r->delta, 0); }
static void backward_plan(const Run *r) { attention_backward(r->plan, r->dqkv, r->dout, r->out, r->lse, r->qkv, r->rope, 0); }
// RoPE's backward on the way, and after it.
static void backward_turned(const Run *r) { flash_backward(r->shape, r->dqkv, r->dout, r->out, r->lse, r->qkv, r->table, r->delta, 0); }
static void backward_turned_after(const Run *r) {
    const AttentionShape *s = r->shape;
    flash_backward(s, r->dqkv, r->dout, r->out, r->lse, r->qkv, NULL, r->delta, 0);
    rope_backward_launch(r->dqkv, r->table, (int64_t)s->B * s->T, s->T, s->heads, s->kv_heads, s->head_dim, 0);
}

// In place of a head size: 0, any; below 0, cuDNN where it has a plan.
enum { CUDNN_FORWARD_VERSION = -1, CUDNN_BACKWARD_VERSION = -2, CUDNN_ATOMICS_VERSION = -3 };
// Names: warp groups (64 rows each) x tile of the other side.
static const Version forward_versions[] = {
    {"flash (trainer)", 0, forward_trainer},
    {"mma.sync 1x64", 64, forward_flash<64, 1, 64, false>},   {"mma.sync 1x64", 128, forward_flash<128, 1, 64, false>},
    {"mma.sync 2x64", 64, forward_flash<64, 2, 64, false>},   {"mma.sync 2x64", 128, forward_flash<128, 2, 64, false>},
    {"wgmma 1x64", 64, forward_flash<64, 1, 64, true>},       {"wgmma 1x64", 128, forward_flash<128, 1, 64, true>},
    {"wgmma 2x64", 64, forward_flash<64, 2, 64, true>},       {"wgmma 2x64", 128, forward_flash<128, 2, 64, true>},
    {"wgmma 1x128", 64, forward_flash<64, 1, 128, true>},
    {"wgmma 2x128", 64, forward_flash<64, 2, 128, true>},     {"wgmma 2x128", 128, forward_flash<128, 2, 128, true>},
    {"cudnn", CUDNN_FORWARD_VERSION, forward_plan},
};
static const Version backward_versions[] = {
    {"flash (trainer)", 0, backward_trainer},
    {"mma.sync 1x64+1x64", 64, backward_flash<64, 1, 64, 1, 64, false>}, {"mma.sync 1x64+1x64", 128, backward_flash<128, 1, 64, 1, 64, false>},
    {"mma.sync 2x64+2x64", 64, backward_flash<64, 2, 64, 2, 64, false>}, {"mma.sync 2x64+2x64", 128, backward_flash<128, 2, 64, 2, 64, false>},
    {"wgmma 1x64+1x64", 64, backward_flash<64, 1, 64, 1, 64, true>},     {"wgmma 1x64+1x64", 128, backward_flash<128, 1, 64, 1, 64, true>},
    {"wgmma 2x64+2x64", 64, backward_flash<64, 2, 64, 2, 64, true>},     {"wgmma 2x64+2x64", 128, backward_flash<128, 2, 64, 2, 64, true>},
    {"wgmma 2x128+2x64", 64, backward_flash<64, 2, 128, 2, 64, true>},   {"wgmma 2x128+2x64", 128, backward_flash<128, 2, 128, 2, 64, true>},
    {"  dq wgmma 1x64", 64, dq_alone<64, 1, 64, true>},                        {"  dq wgmma 1x64", 128, dq_alone<128, 1, 64, true>},
    {"  dq wgmma 2x64", 64, dq_alone<64, 2, 64, true>},                        {"  dq wgmma 2x64", 128, dq_alone<128, 2, 64, true>},
    {"  dq wgmma 2x128", 64, dq_alone<64, 2, 128, true>},                      {"  dq wgmma 2x128", 128, dq_alone<128, 2, 128, true>},
    {"  flash, RoPE within", 0, backward_turned},                           {"  flash, RoPE after", 0, backward_turned_after},
    {"cudnn atomics", CUDNN_ATOMICS_VERSION, backward_atomics},
    {"cudnn repeatable", CUDNN_BACKWARD_VERSION, backward_plan},
};
enum { FORWARDS = sizeof forward_versions / sizeof *forward_versions, BACKWARDS = sizeof backward_versions / sizeof *backward_versions };

static int shared_memory_kib(void) {
    int device, most;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return most / 1024;
}
static int version_runs(const Version *v, const Run *r) {
    if (v->head_dim == CUDNN_FORWARD_VERSION) return plan_has_forward(r);
    if (v->head_dim == CUDNN_BACKWARD_VERSION) return plan_has_backward(r);
    if (v->head_dim == CUDNN_ATOMICS_VERSION) return r->atomics != NULL;
    if (v->head_dim == 0) return 1;
    if (strstr(v->name, "wgmma") && !flash_on_hopper()) return 0;
    if (strstr(v->name, "2x") && shared_memory_kib() < 160) return 0;
    return v->head_dim == r->shape->head_dim;
}

static int64_t qkv_count(const AttentionShape *s) { return (int64_t)s->B * s->T * (s->heads + 2 * s->kv_heads) * s->head_dim; }
static int64_t out_count(const AttentionShape *s) { return (int64_t)s->B * s->T * s->heads * s->head_dim; }
static int64_t lse_count(const AttentionShape *s) { return (int64_t)s->B * s->T * s->heads; }

static void *device_alloc(int64_t bytes) {
    void *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)bytes));
    return p;
}
#ifdef USE_CUDNN
static const char *cudnn_word(const CudnnGraph *g) { return !g ? "no plan" : g->nondeterministic ? "no" : "yes"; }
#endif
// atomics: also cuDNN's backward that is not repeatable.
static Run run_create(const AttentionShape *s, AttentionBackend backend, bool atomics_too) {
    Run r;
    memset(&r, 0, sizeof r);
    r.plan = attention_create(s->B, s->T, s->heads, s->kv_heads, s->head_dim, backend, 1);
    r.shape = s;
#ifdef USE_CUDNN
    CudnnGraph *atomics = atomics_too ? attention_cudnn_pass(s, CUDNN_BACKWARD, 0) : NULL;
    if (atomics) {
        r.atomics = atomics;
        r.atomics_space = device_alloc(atomics->workspace_bytes);
        printf("  cudnn: repeatable by its own word: forward %s, backward with atomics %s, without %s; workspace with atomics %.1f MiB\n", cudnn_word(r.plan->forward),
               cudnn_word(atomics), cudnn_word(r.plan->backward), (double)atomics->workspace_bytes / 1048576.0);
    }
#endif
    r.qkv = (bf16 *)device_alloc(qkv_count(s) * 2); r.dqkv = (bf16 *)device_alloc(qkv_count(s) * 2);
    r.out = (bf16 *)device_alloc(out_count(s) * 2); r.dout = (bf16 *)device_alloc(out_count(s) * 2);
    r.lse = (float *)device_alloc(lse_count(s) * 4); r.delta = (float *)device_alloc(flash_workspace_bytes(s));
    std::vector<float2> table((size_t)s->T * s->head_dim / 2);
    rope_table_fill(table.data(), s->T, s->head_dim, ROPE_THETA);
    r.table = device_copy(table);
    return r;
}
static void run_free(Run *r) {
    void *const all[] = {r->qkv, r->dqkv, r->out, r->dout, r->lse, r->delta, r->table};
    for (void *p : all) CUDA_CHECK(cudaFree(p));
#ifdef USE_CUDNN
    if (r->atomics) CUDA_CHECK(cudaFree(r->atomics_space));
    cudnn_graph_free((CudnnGraph *)r->atomics);
#endif
    attention_free(r->plan);
}

// ---------------------------------------------------------------------------------------------------------------------
// The float64 reference, with a bound on each element's error: what rounding P and dS (the only intermediate values in BF16)
// and the result to BF16 can do, half an ulp = 2^-8 relative at most each, and SLACK for float32 sums, exp2.approx and the like.

static const double HALF_ULP = 1.0 / 256, SLACK = 1e-4;

typedef struct { double *out, *out_bound, *lse, *dqkv, *dqkv_bound; } Reference;

static float *widen(const uint16_t *x, int64_t n) {
    float *y = (float *)xcalloc((size_t)n, 4);
    for (int64_t i = 0; i < n; i++) y[i] = bf16_decode(x[i]);
    return y;
}

// One query head of one sequence. q, k, v, dq...: first row, `stride` elements apart; o, g (= dO): likewise, `os` apart.
typedef struct { const float *q, *k, *v, *o, *g; int64_t stride, os; int T, D; } Head;

static double dot(const float *a, const float *b, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += (double)a[i] * b[i];
    return s;
}
// Probabilities of query t into p; returns ln sum exp.
static double head_probabilities(const Head *h, int t, double *p) {
    const double scale = 1 / sqrt((double)h->D);
    double largest = -INFINITY, sum = 0;
    for (int j = 0; j <= t; j++) {
        p[j] = dot(h->q + t * h->stride, h->k + j * h->stride, h->D) * scale;
        if (p[j] > largest) largest = p[j];
    }
    for (int j = 0; j <= t; j++) sum += p[j] = exp(p[j] - largest);
    for (int j = 0; j <= t; j++) p[j] /= sum;
    return largest + log(sum);
}
static void head_forward(const Head *h, double *out, double *bound, double *lse) {
    double *p = (double *)xcalloc((size_t)h->T, sizeof *p);
    for (int t = 0; t < h->T; t++) {
        lse[t] = head_probabilities(h, t, p);
        for (int d = 0; d < h->D; d++) {
            double sum = 0, size = 0;
            for (int j = 0; j <= t; j++) { const double x = p[j] * h->v[j * h->stride + d]; sum += x; size += fabs(x); }
            out[t * h->os + d] = sum;
            bound[t * h->os + d] = (HALF_ULP + SLACK) * size + HALF_ULP * (fabs(sum) + HALF_ULP * size);
        }
    }
    free(p);
}
// Adds this head's part to dq, dk, dv (first rows, `stride` apart) and to their bounds.
static void head_backward(const Head *h, double *dq, double *dk, double *dv, double *bq, double *bk, double *bv) {
    double *p = (double *)xcalloc((size_t)h->T, sizeof *p);
    const double scale = 1 / sqrt((double)h->D);
    for (int t = 0; t < h->T; t++) {
        head_probabilities(h, t, p);
        const float *g = h->g + t * h->os, *q = h->q + t * h->stride;
        const double delta = dot(g, h->o + t * h->os, h->D);
        for (int j = 0; j <= t; j++) {
            const double dp = dot(g, h->v + j * h->stride, h->D), ds = p[j] * (dp - delta) * scale;
            const double error = HALF_ULP * fabs(ds) + SLACK * p[j] * (fabs(dp) + fabs(delta)) * scale;
            const float *k = h->k + j * h->stride;
            for (int d = 0; d < h->D; d++) {
                const int64_t at_q = t * h->stride + d, at_k = j * h->stride + d;
                dq[at_q] += ds * k[d];   bq[at_q] += error * fabs(k[d]);
                dk[at_k] += ds * q[d];   bk[at_k] += error * fabs(q[d]);
                dv[at_k] += p[j] * g[d]; bv[at_k] += (HALF_ULP + SLACK) * p[j] * fabs(g[d]);
            }
        }
    }
    free(p);
}
// The forward rounds its out to BF16 into `out`, which the backward reads, as the kernels do.
static Reference reference_create(const AttentionShape *s, const uint16_t *qkv, const uint16_t *dout, uint16_t *out) {
    const int64_t n = qkv_count(s), m = out_count(s), stride = n / s->B / s->T, os = m / s->B / s->T;
    Reference r;
    r.out = (double *)xcalloc((size_t)m, 8); r.out_bound = (double *)xcalloc((size_t)m, 8);
    r.lse = (double *)xcalloc((size_t)lse_count(s), 8);
    r.dqkv = (double *)xcalloc((size_t)n, 8); r.dqkv_bound = (double *)xcalloc((size_t)n, 8);
    float *x = widen(qkv, n), *g = widen(dout, m), *o = (float *)xcalloc((size_t)m, 4);
    const int in_group = s->heads / s->kv_heads;
#pragma omp parallel for
    for (int group = 0; group < s->B * s->kv_heads; group++)  // whose heads add to one dk and dv
        for (int i = group % s->kv_heads * in_group; i < (group % s->kv_heads + 1) * in_group; i++) {
            const int b = group / s->kv_heads;
            const int64_t q = b * s->T * stride + i * s->head_dim, k = b * s->T * stride + (s->heads + i / in_group) * s->head_dim;
            const int64_t v = k + s->kv_heads * s->head_dim, at = b * s->T * os + i * s->head_dim;
            const Head h = {x + q, x + k, x + v, o + at, g + at, stride, os, s->T, s->head_dim};
            head_forward(&h, r.out + at, r.out_bound + at, r.lse + ((int64_t)b * s->heads + i) * s->T);
            for (int t = 0; t < s->T; t++)
                for (int d = 0; d < s->head_dim; d++) {
                    const int64_t e = at + t * os + d;
                    out[e] = bf16_encode((float)r.out[e]);
                    o[e] = bf16_decode(out[e]);
                }
            head_backward(&h, r.dqkv + q, r.dqkv + k, r.dqkv + v, r.dqkv_bound + q, r.dqkv_bound + k, r.dqkv_bound + v);
        }
    for (int64_t i = 0; i < n; i++) r.dqkv_bound[i] += HALF_ULP * (fabs(r.dqkv[i]) + r.dqkv_bound[i]);
    free(x); free(g); free(o);
    return r;
}
// The gradients of q and k before the rotation, from those after it, and their bounds: rounded after they were turned, and perhaps before.
static void reference_turn_back(Reference *r, const AttentionShape *s) {
    const int half = s->head_dim / 2, turned = s->heads + s->kv_heads;
    const int64_t stride = (int64_t)(turned + s->kv_heads) * s->head_dim;
    for (int64_t row = 0; row < (int64_t)s->B * s->T; row++)
        for (int head = 0; head < turned; head++)
            for (int i = 0; i < half; i++) {
                const int64_t low = row * stride + head * s->head_dim + i, high = low + half;
                const double angle = (double)(row % s->T) * pow(ROPE_THETA, -2.0 * i / s->head_dim), c = cos(angle), n = sin(angle);
                double *x = r->dqkv, *b = r->dqkv_bound;
                const double p = x[low], q = x[high], bp = b[low], bq = b[high];
                x[low] = p * c + q * n; x[high] = q * c - p * n;
                b[low] = fabs(c) * bp + fabs(n) * bq; b[high] = fabs(c) * bq + fabs(n) * bp;
                b[low] += HALF_ULP * (fabs(x[low]) + b[low]); b[high] += HALF_ULP * (fabs(x[high]) + b[high]);
            }
}
static void reference_free(Reference *r) { free(r->out); free(r->out_bound); free(r->lse); free(r->dqkv); free(r->dqkv_bound); }

// ---------------------------------------------------------------------------------------------------------------------
// Checks.

static uint64_t random_state = 1;
static float random_normal(void) {  // sum of twelve uniforms: near enough to normal, and bounded
    float x = -6;
    for (int i = 0; i < 12; i++) {
        random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
        x += (float)(random_state >> 40) / 16777216.0f;
    }
    return x;
}
// Largest error as a fraction of its bound; a NaN counts as infinite.
static double worst_ratio(const uint16_t *x, const double *right, const double *bound, int64_t n) {
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        const double ratio = fabs(bf16_decode(x[i]) - right[i]) / (bound[i] + 1e-30);
        if (!(ratio <= worst)) worst = ratio == ratio ? ratio : INFINITY;
    }
    return worst;
}
static void poison(void *p, int64_t bytes) { CUDA_CHECK(cudaMemset(p, 0xFF, (size_t)bytes)); }

static void check_forward(const Version *v, const Run *r, const Reference *right, double allowed) {
    const AttentionShape *s = r->shape;
    const int64_t n = out_count(s), m = lse_count(s);
    uint16_t *out = (uint16_t *)xcalloc((size_t)n, 2);
    float *lse = (float *)xcalloc((size_t)m, 4);
    poison(r->out, n * 2); poison(r->lse, m * 4);
    v->run(r);
    CUDA_CHECK(cudaMemcpy(out, r->out, (size_t)n * 2, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(lse, r->lse, (size_t)m * 4, cudaMemcpyDeviceToHost));
    double error = 0;
    for (int64_t i = 0; i < m; i++) {
        const double e = fabs(lse[i] - right->lse[i]);
        if (!(e <= error)) error = e == e ? e : INFINITY;
    }
    const double ratio = worst_ratio(out, right->out, right->out_bound, n);
    ladder_check(&ladder, ratio <= allowed && error < SLACK, "forward  %-20s out error/bound %.3f, lse error %.1e", v->name, ratio, error);
    free(out); free(lse);
}
static void check_backward(const Version *v, const Run *r, const Reference *right, double allowed) {
    const int64_t n = qkv_count(r->shape);
    uint16_t *x = (uint16_t *)xcalloc((size_t)n, 2);
    poison(r->dqkv, n * 2); poison(r->delta, flash_workspace_bytes(r->shape));
    v->run(r);
    CUDA_CHECK(cudaMemcpy(x, r->dqkv, (size_t)n * 2, cudaMemcpyDeviceToHost));
    const double ratio = worst_ratio(x, right->dqkv, right->dqkv_bound, n);
    ladder_check(&ladder, ratio <= allowed, "backward %-20s %sdqkv error/bound %.3f", v->name, r->rope ? "turned back, " : "", ratio);
    free(x);
}
// cuDNN's order of operations is its own: twice the bound.
static double allowed_of(const Version *v) { return v->head_dim < 0 ? 2 : 1; }

static void check_shape(AttentionShape s, AttentionBackend backend) {
    Run r = run_create(&s, backend, false);
    const int64_t n = qkv_count(&s), m = out_count(&s);
    uint16_t *qkv = (uint16_t *)xcalloc((size_t)n, 2), *dout = (uint16_t *)xcalloc((size_t)m, 2), *out = (uint16_t *)xcalloc((size_t)m, 2);
    for (int64_t i = 0; i < n; i++) qkv[i] = bf16_encode(random_normal());
    for (int64_t i = 0; i < m; i++) dout[i] = bf16_encode(random_normal());
    Reference right = reference_create(&s, qkv, dout, out);
    CUDA_CHECK(cudaMemcpy(r.qkv, qkv, (size_t)n * 2, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(r.dout, dout, (size_t)m * 2, cudaMemcpyHostToDevice));
    for (int i = 0; i < FORWARDS; i++)
        if (version_runs(&forward_versions[i], &r)) check_forward(&forward_versions[i], &r, &right, allowed_of(&forward_versions[i]));
    float *lse = (float *)xcalloc((size_t)lse_count(&s), 4);
    for (int64_t i = 0; i < lse_count(&s); i++) lse[i] = (float)right.lse[i];
    CUDA_CHECK(cudaMemcpy(r.out, out, (size_t)m * 2, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(r.lse, lse, (size_t)lse_count(&s) * 4, cudaMemcpyHostToDevice));
    for (int turned = 0; turned < 2; turned++) {
        if (turned) { reference_turn_back(&right, &s); r.rope = r.table; }
        for (int i = 0; i < BACKWARDS; i++)
            if (backward_versions[i].name[0] != ' ' && version_runs(&backward_versions[i], &r) && !(turned && backward_versions[i].run == backward_atomics))
                check_backward(&backward_versions[i], &r, &right, allowed_of(&backward_versions[i]));
    }
    reference_free(&right);
    free(qkv); free(dout); free(out); free(lse);
    run_free(&r);
}

// ---------------------------------------------------------------------------------------------------------------------
// Repeatability and time, at the models' shapes.

static double time_ms(const Version *v, const Run *r) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start)); CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = 0; i < 3; i++) v->run(r);
    double best = INFINITY;
    for (int i = 0; i < 5; i++) {
        const int runs = 4;
        CUDA_CHECK(cudaEventRecord(start));
        for (int j = 0; j < runs; j++) v->run(r);
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (ms / runs < best) best = ms / runs;
    }
    CUDA_CHECK(cudaEventDestroy(start)); CUDA_CHECK(cudaEventDestroy(stop));
    return best;
}
static void check_repeats(const Version *v, const Run *r, void *result, int64_t bytes) {
    unsigned char *first = (unsigned char *)xcalloc((size_t)bytes, 1), *second = (unsigned char *)xcalloc((size_t)bytes, 1);
    unsigned char *const copies[] = {first, second};
    for (unsigned char *copy : copies) {
        poison(result, bytes);
        v->run(r);
        CUDA_CHECK(cudaMemcpy(copy, result, (size_t)bytes, cudaMemcpyDeviceToHost));
    }
    int64_t different = 0;
    for (int64_t i = 0; i < bytes; i++) different += first[i] != second[i];
    ladder_check(&ladder, different == 0, "%s: two runs, %lld of %lld bytes differ", v->name, (long long)different, (long long)bytes);
    free(first); free(second);
}
static void fill_run(Run *r) {
    fill_gauss(r->qkv, qkv_count(r->shape), 1);
    fill_gauss(r->dout, out_count(r->shape), 2);
    flash_forward(r->shape, r->out, r->lse, r->qkv, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
}
static void check_repeatability(AttentionShape s, AttentionBackend backend) {
    Run r = run_create(&s, backend, false);
    fill_run(&r);
    for (int i = 0; i < FORWARDS; i++)
        if ((i == 0 || i == FORWARDS - 1) && version_runs(&forward_versions[i], &r)) check_repeats(&forward_versions[i], &r, r.out, out_count(&s) * 2);
    for (int i = 0; i < BACKWARDS; i++)
        if ((i == 0 || i == BACKWARDS - 1) && version_runs(&backward_versions[i], &r)) check_repeats(&backward_versions[i], &r, r.dqkv, qkv_count(&s) * 2);
    run_free(&r);
}

// Measured on an H200 by others' code (FlashAttention-2, cuDNN through PyTorch 2.11): TFLOP/s, 0 where there is no figure.
typedef struct { AttentionShape shape; double fa2[2], cudnn[2]; } Timed;
static const Timed timed[] = {
    {{128, 512, 8, 8, 128}, {182, 161}, {332, 215}},
    {{128, 512, 5, 5, 128}, {0, 0}, {0, 0}},
    {{8, 2048, 16, 16, 128}, {271, 242}, {492, 388}},
    {{16, 2048, 10, 10, 128}, {278, 240}, {437, 405}},
    {{4, 2048, 32, 32, 64}, {0, 0}, {0, 0}},
};
static void time_versions(const char *pass, const Version *versions, int count, const Run *r, double flops, double fa2, double cudnn) {
    for (int i = 0; i < count; i++) {
        if (!version_runs(&versions[i], r)) continue;
        const double ms = time_ms(&versions[i], r), rate = flops / ms * 1e-9;
        if (versions[i].name[0] == ' ') { printf("  %-8s %-20s %8.3f ms\n", pass, versions[i].name, ms); continue; }
        printf("  %-8s %-20s %8.3f ms %7.1f TFLOP/s", pass, versions[i].name, ms, rate);
        if (fa2 > 0) printf("   %.2f of FlashAttention-2's %.0f, %.2f of cuDNN's %.0f", rate / fa2, fa2, rate / cudnn, cudnn);
        printf("\n");
    }
}
static void time_shape(const Timed *t) {
    const AttentionShape *s = &t->shape;
    Run r = run_create(s, ATTENTION_AUTO, true);
    fill_run(&r);
    const double flops = 2.0 * s->B * s->heads * (double)s->T * s->T * s->head_dim;
    time_versions("forward", forward_versions, FORWARDS, &r, flops, t->fa2[0], t->cudnn[0]);
    time_versions("backward", backward_versions, BACKWARDS, &r, 2.5 * flops, t->fa2[1], t->cudnn[1]);
    run_free(&r);
}

int main(int argc, char **argv) {
    ladder = ladder_create(argc, argv);
    if (ladder.large) fatal_usage("%s: --large is for the quantizers' ladders", argv[0]);
    // cuDNN takes seconds to plan a shape: it is checked on some.
    const AttentionShape own[] = {{1, 1, 1, 1, 64}, {1, 129, 2, 2, 128}, {3, 77, 6, 2, 128}, {2, 200, 4, 2, 64}};
    const AttentionShape both[] = {{2, 64, 2, 1, 128}, {1, 333, 3, 1, 128}, {2, 256, 2, 2, 64}, {1, 512, 1, 1, 128}};
    for (const AttentionShape &s : own) check_shape(s, ATTENTION_FLASH);
    if (!ladder.small) {
        for (const AttentionShape &s : both) check_shape(s, ATTENTION_AUTO);
        check_repeatability({4, 1000, 8, 4, 128}, ATTENTION_AUTO);
        check_repeatability({8, 512, 8, 8, 128}, ATTENTION_AUTO);
        check_repeatability({4, 1024, 8, 8, 64}, ATTENTION_FLASH);
    }
    if (!ladder.quick) for (const Timed &t : timed) time_shape(&t);
    return ladder_finish(&ladder);
}
