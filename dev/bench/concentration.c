// concentration.c: how the mean of a layer's gradients over B draws of the rounding noise nears the exact gradient, for every recipe.
// Where both operands of a GEMM are unbiased the squared error falls as 1/B; where one is not, it levels off at the bias
// (Quartet II, arXiv 2601.22813, its figure on the concentration of gradients).
//
//   concentration [DRAWS]      default 1024; run from the repository root
//
// The layer is real: the down projection of the last layer of a small model trained on the bytes of this program's sources, with its
// input and its output's gradient of one batch. Exact is what the row's backward gives without rounding, from the same forward's
// operands: the gradient of the forward that ran.
#include "dev/bench/layer.h"
#include "llmc/cpu/backend.h"
#include "llmc/file.h"

enum { B = 2, T = 128, STEPS = 60, POINTS = 16 };

typedef struct { int64_t M, N, K; float *w, *x, *dy; } Sample;

static float *copy_of(const float *x, int64_t count) {
    float *y = (float *)xcalloc((size_t)count, sizeof(float));
    memcpy(y, x, (size_t)count * sizeof(float));
    return y;
}
static void batch(const char *text, int64_t size, int step, int32_t *tokens, int32_t *targets) {
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            const int64_t at = (int64_t)(step * B + b) * 7919 % (size - T - 1) + t;  // a prime: far apart
            tokens[b * T + t] = (uint8_t)text[at]; targets[b * T + t] = (uint8_t)text[at + 1];
        }
}
// Trains, then runs one more batch as far back as the last layer's down projection.
static Sample sample_take(const char *path) {
    char error[ERROR_TEXT];
    int64_t size = 0;
    char *text = file_read_text(path, 1 << 24, &size, error, sizeof error);
    if (!text) fatal("%s; run this from the repository root", error);
    if (size < 16 * T) fatal("%s: %lld bytes are too few to train on", path, (long long)size);
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    const LlamaConfig c = {2, 128, 2, 2, 256, 256, T, 0, 1e-5f, 1e4f};
    o.config = c; o.recipe = recipe_find("fp32"); o.batch = B; o.micro_batches = 1; o.seed = 1; o.master_fp32 = 1;
    Llama *m = llama_create(&o);
    llama_init(m);
    int32_t tokens[B * T], targets[B * T];
    for (int step = 0; step < STEPS; step++) {
        const AdamWOptions a = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
        batch(text, size, step, tokens, targets);
        llama_step_begin(m, step);
        llama_micro_step(m, 0, tokens, targets);
        llama_step_end(m, &a);
    }
    printf("%s, %d steps: loss %.3f\n", path, STEPS, llama_step_result(m).loss);
    batch(text, size, STEPS, tokens, targets);
    const int64_t M = B * T;
    model_forward(m, tokens, B, T);
    model_head(m, targets, M, 1.0f / (float)M);
    memset(m->d_stream, 0, (size_t)(M * c.width) * sizeof(float));
    rmsnorm_backward(m->d_stream, m->d_final_norm, m->norm_parts, m->d_small, m->x_final, m->final_norm, m->rms_final, M, c.width);
    const Linear *down = &m->layers[c.layers - 1].linear[LINEAR_DOWN];
    Sample s;
    s.M = M; s.N = down->N; s.K = down->K;
    s.w = copy_of(down->w, s.N * s.K); s.x = copy_of(down->x, M * s.K); s.dy = copy_of(m->d_stream, M * s.N);
    llama_free(m);
    free(text);
    return s;
}

typedef struct { Linear l; LinearWork work; float *y, *dx; } Layer;
static Layer layer_make(const Recipe *r, const Sample *s) {
    Layer t;
    memset(&t, 0, sizeof t);
    t.l.recipe = r; t.l.N = s->N; t.l.K = s->K; t.l.w = s->w; t.l.x = s->x;
    t.l.dw = (float *)xcalloc((size_t)(s->N * s->K), sizeof(float));
    t.y = (float *)xcalloc((size_t)(s->M * s->N), sizeof(float));
    t.dx = (float *)xcalloc((size_t)(s->M * s->K), sizeof(float));
    t.work.seed = 1;
    layer_buffers(&t.l, &t.work, s->M);
    linear_quantize_weight(&t.l, &t.work);
    linear_forward(&t.l, t.y, s->M, 0, &t.work);
    return t;
}
static void layer_free(Layer *t) {
    layer_buffers_free(&t->l, &t->work);
    free(t->l.dw); free(t->y); free(t->dx);
}
static double squared_error(const double *sum, double draws, const float *exact, int64_t count) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) { error += (sum[i] / draws - exact[i]) * (sum[i] / draws - exact[i]); norm += (double)exact[i] * exact[i]; }
    return error / norm;
}
// error[g][k]: of the mean of 4^k draws; g = 0 dgrad, 1 wgrad.
static int measure(const Recipe *r, const Sample *s, int draws, double error[2][POINTS]) {
    const Recipe exact = recipe_exact_backward(r);
    Layer t = layer_make(r, s), e = layer_make(&exact, s);
    linear_backward(&e.l, e.dx, s->dy, s->M, &e.work);
    const int64_t count[2] = {s->M * s->K, s->N * s->K};
    double *sum[2] = {(double *)xcalloc((size_t)count[0], sizeof(double)), (double *)xcalloc((size_t)count[1], sizeof(double))};
    int points = 0;
    for (int b = 1, next = 1; b <= draws; b++) {
        memset(t.l.dw, 0, (size_t)count[1] * sizeof(float));
        t.work.step = b;
        linear_backward(&t.l, t.dx, s->dy, s->M, &t.work);
        for (int64_t i = 0; i < count[0]; i++) sum[0][i] += t.dx[i];
        for (int64_t i = 0; i < count[1]; i++) sum[1][i] += t.l.dw[i];
        if (b < next) continue;
        error[0][points] = squared_error(sum[0], b, e.dx, count[0]);
        error[1][points++] = squared_error(sum[1], b, e.l.dw, count[1]);
        next *= 4;
    }
    free(sum[0]); free(sum[1]);
    layer_free(&t);
    layer_free(&e);
    return points;
}

int main(int argc, char **argv) {
    char *end = NULL;
    const long draws = argc > 1 ? strtol(argv[1], &end, 10) : 1024;
    if (argc > 2 || (end && *end) || draws < 1 || draws > 1 << 24) fatal_usage("usage: concentration [DRAWS], 1 to %d", 1 << 24);
    const Sample s = sample_take("llmc/cpu/backend.h");
    printf("down projection, %lld x %lld x %lld; squared error of the mean of B draws, relative\n%-21s %-5s", (long long)s.M, (long long)s.N, (long long)s.K, "recipe", "");
    for (long b = 1; b <= draws; b *= 4) printf(" %9ld", b);
    printf("   B err(B)/err(1)\n");
    for (int i = 0; i < RECIPE_COUNT; i++) {
        double error[2][POINTS];
        const int points = measure(&RECIPES[i], &s, recipe_is_stochastic(&RECIPES[i]) ? (int)draws : 1, error);
        for (int g = 0; g < 2; g++) {
            printf("%-21s %-5s", g ? "" : RECIPES[i].name, g ? "wgrad" : "dgrad");
            for (int p = 0; p < points; p++) printf(" %9.2e", error[g][p]);
            if (points == 1) printf("   the same in every draw");
            else printf("   %.2f", error[g][points - 1] / error[g][0] * pow(4, points - 1));
            printf("\n");
            fflush(stdout);
        }
    }
    free(s.w); free(s.x); free(s.dy);
    return 0;
}
