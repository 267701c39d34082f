// bench_gpu.cu: training speed and memory of the reference models on this card, beside the peers' figures on one H200 and the limit of each step.
//
//   bench_gpu [--profile] [--model 30M|100M|560M|1.9B] [--recipe NAME] [--gemm] [--steps N] [--no-graph]
//
// Random tokens; 5 steps to warm up, then the median of N = 10. Limit: what the step would take if its matrix products ran at the rates measured
// alone in this run, everything else moved its least bytes at the copy bandwidth measured in this run, and attention took the
// time it takes here. Memory: what the model took of the card's free memory, CUDA's context (printed once) not counted.
//
// Below each row: what the host needs to enqueue a step (a step of more than about a thousand launches waits in it for the GPU: the
// queue is that long), the launches, the same step replayed as one CUDA graph, and the SM clock and power while steps run. A graph
// could pay where the host's time nears the step's, or where the replay is faster: both would mean that the GPU waits between
// kernels. A card at its power limit shows as a clock below the highest.
#include <getopt.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "llmc/cuda/backend.cuh"

enum { WARM_UP = 5, PROFILED_STEPS = 2, MAX_STEPS = 200, HOST_STEPS = 3, POWER_SAMPLES = 6 };

typedef struct {
    const char *name;
    int layers, width, heads, vocab, batch, seq;
    double peer_bf16, floor_bf16, peer_quartet2, floor_quartet2, floor_gib;  // tokens/s; 0: no figure
} Row;
static const Row ROWS[] = {
    {"30M", 6, 640, 5, 32000, 128, 512, 1326000, 1380000, 372000, 1000000, 10},
    {"100M", 8, 1024, 8, 32000, 128, 512, 584000, 600000, 196000, 470000, 18},
    {"560M", 20, 1280, 10, 65536, 16, 2048, 151500, 157000, 0, 128000, 30},
    {"1.9B", 32, 2048, 16, 65536, 8, 2048, 45750, 48000, 20100, 40000, 50},
};
enum { ROW_COUNT = sizeof ROWS / sizeof ROWS[0] };
// The other recipes, on the largest model: at least so many tokens/s, or so many times what another recipe reached in this run.
typedef struct { const char *recipe, *than; double floor; } RecipeRow;
static const RecipeRow RECIPE_ROWS[] = {{"fp8", "bf16", 1.25}, {"nvidia", NULL, 38000}, {"tetrajet2", NULL, 38000}, {"quartet2-search", "quartet2", 1 / 1.10}};

typedef struct { const char *model, *recipe; int profile, gemm, steps, graph; } Options;

static Options options_parse(int argc, char **argv) {
    static const struct option known[] = {{"profile", no_argument, NULL, 'p'}, {"model", required_argument, NULL, 'm'}, {"recipe", required_argument, NULL, 'r'},
                                          {"gemm", no_argument, NULL, 'g'}, {"steps", required_argument, NULL, 's'}, {"no-graph", no_argument, NULL, 'n'},
                                          {NULL, 0, NULL, 0}};
    Options o = {NULL, NULL, 0, 0, 10, 1};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        if (c == 'p') o.profile = 1;
        else if (c == 'g') o.gemm = 1;
        else if (c == 'n') o.graph = 0;
        else if (c == 'm') o.model = optarg;
        else if (c == 'r') o.recipe = optarg;
        else if (c == 's') o.steps = atoi(optarg);
        else fatal_usage("bench_gpu [--profile] [--gemm] [--model 30M|100M|560M|1.9B] [--recipe NAME] [--steps N] [--no-graph]");
    }
    if (optind < argc) fatal_usage("bench_gpu: unknown argument %s", argv[optind]);
    if (o.steps < 1 || o.steps > MAX_STEPS) fatal_usage("bench_gpu --steps: 1 to %d", MAX_STEPS);
    if (o.recipe) recipe_find(o.recipe);
    int found = !o.model;
    for (int i = 0; o.model && i < ROW_COUNT; i++) found |= strcmp(o.model, ROWS[i].name) == 0;
    if (!found) fatal_usage("bench_gpu --model %s: the models are 30M, 100M, 560M, 1.9B", o.model);
    return o;
}

// Bytes/s, read and written, of a device copy of 2 GiB; the best of five.
static double measure_copy() {
    const size_t bytes = (size_t)1 << 30;
    char *a, *b;
    cudaEvent_t start, stop;
    float best = 0;
    CUDA_CHECK(cudaMalloc(&a, bytes)); CUDA_CHECK(cudaMalloc(&b, bytes));
    CUDA_CHECK(cudaMemset(a, 1, bytes));
    CUDA_CHECK(cudaEventCreate(&start)); CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = 0; i < 6; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(start));
        CUDA_CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice));
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (best == 0 || ms < best) best = ms;
    }
    CUDA_CHECK(cudaEventDestroy(start)); CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaFree(a)); CUDA_CHECK(cudaFree(b));
    return 2.0 * (double)bytes / (best * 1e-3);
}
// Weights uniform with standard deviation `std`; ones where std is 0. On the device: 1.9 B normal values would take the host seconds.
__global__ static void weights_fill_kernel(bf16 *w, int64_t count, float std, uint32_t salt) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9E3779B1u + salt;
        h ^= h >> 15; h *= 0x85EBCA77u; h ^= h >> 13; h *= 0xC2B2AE3Du; h ^= h >> 16;
        w[i] = __float2bfloat16(std > 0 ? std * 3.4641016f * ((float)h * 0x1p-32f - 0.5f) : 1.0f);
    }
}
static void weights_fill(Llama *m) {
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        weights_fill_kernel<<<1024, 256, 0, m->stream>>>(m->params + p->offset, p->count, p->init_std, (uint32_t)i * 7919u);
        CUDA_LAUNCHED();
    }
}
static void bench_step(Llama *m, int64_t step, const int32_t *tokens) {
    const AdamWOptions adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
    llama_step_begin(m, step);
    llama_micro_step(m, 0, tokens, tokens + m->M);
    llama_step_end(m, &adamw);
}
static int float_order(const void *a, const void *b) { return *(const float *)a < *(const float *)b ? -1 : *(const float *)a > *(const float *)b; }
// 0 when there is none. Sorts x.
static float median(float *x, int count) {
    if (count == 0) return 0;
    qsort(x, (size_t)count, sizeof *x, float_order);
    return count % 2 ? x[count / 2] : 0.5f * (x[count / 2 - 1] + x[count / 2]);
}
static double now_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Median milliseconds of a step. The host runs one step ahead, as in training.
static float bench_time(Llama *m, const int32_t *tokens, int steps, StepResult *last) {
    cudaEvent_t events[MAX_STEPS + 1];
    float ms[MAX_STEPS];
    for (int i = 0; i <= steps; i++) CUDA_CHECK(cudaEventCreate(&events[i]));
    for (int s = 0; s < WARM_UP + steps; s++) {
        if (s >= WARM_UP) CUDA_CHECK(cudaEventRecord(events[s - WARM_UP], m->stream));
        bench_step(m, s, tokens);
        if (s > 0) *last = llama_step_result(m);
    }
    CUDA_CHECK(cudaEventRecord(events[steps], m->stream));
    *last = llama_step_result(m);
    CUDA_CHECK(cudaEventSynchronize(events[steps]));
    for (int i = 0; i < steps; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    for (int i = 0; i <= steps; i++) CUDA_CHECK(cudaEventDestroy(events[i]));
    return median(ms, steps);
}
// Milliseconds of the host from llama_step_begin to the return of llama_step_end, the queue being empty.
static float bench_host(Llama *m, const int32_t *tokens) {
    float ms[HOST_STEPS];
    for (int i = 0; i < HOST_STEPS; i++) {
        CUDA_CHECK(cudaStreamSynchronize(m->stream));
        const double start = now_ms();
        bench_step(m, i, tokens);
        ms[i] = (float)(now_ms() - start);
        llama_step_result(m);
    }
    return median(ms, HOST_STEPS);
}
// Medians of SM clock (MHz) and power (W) by nvidia-smi while steps run; 0 where it does not answer.
static void bench_power(Llama *m, const int32_t *tokens, float *mhz, float *watts) {
    char bus[32], command[256], text[4096] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, m->device.index));
    snprintf(command, sizeof command, "for i in $(seq 0 %d); do nvidia-smi -i %s --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits || exit; done 2>/dev/null",
             POWER_SAMPLES, bus);
    FILE *f = popen(command, "r");
    if (!f) fatal("starting nvidia-smi failed: %s", strerror(errno));
    struct pollfd ready = {fileno(f), POLLIN, 0};
    size_t length = 0;
    for (ssize_t got = 1; got > 0;) {
        bench_step(m, 0, tokens);
        llama_step_result(m);
        while (got > 0 && poll(&ready, 1, 0) > 0) {
            got = read(ready.fd, text + length, sizeof text - 1 - length);
            if (got > 0) length += (size_t)got;
        }
    }
    pclose(f);
    float clocks[POWER_SAMPLES], powers[POWER_SAMPLES], c, p;
    int lines = 0, count = 0;
    for (char *line = strtok(text, "\n"); line && count < POWER_SAMPLES; line = strtok(NULL, "\n"))
        if (lines++ > 0 && sscanf(line, "%f , %f", &c, &p) == 2) { clocks[count] = c; powers[count++] = p; }  // the first saw the card ramp up
    *mhz = median(clocks, count); *watts = median(powers, count);
}
// The step as a CUDA graph: its kernels, its other nodes (copies, sets), milliseconds of a replay. The last thing that is done with a
// model: its events belong to the capture then. Every replay has the captured step's number, which costs the same.
typedef struct { int kernels, others; float ms; } GraphTime;
static GraphTime bench_graph(Llama *m, const int32_t *tokens, int steps) {
    GraphTime t = {0, 0, 0};
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    size_t count = 0;
    CUDA_CHECK(cudaStreamSynchronize(m->stream));
    CUDA_CHECK(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeRelaxed));
    bench_step(m, 0, tokens);
    CUDA_CHECK(cudaStreamEndCapture(m->stream, &graph));
    CUDA_CHECK(cudaGraphGetNodes(graph, NULL, &count));
    cudaGraphNode_t *nodes = (cudaGraphNode_t *)xcalloc(count, sizeof *nodes);
    CUDA_CHECK(cudaGraphGetNodes(graph, nodes, &count));
    for (size_t i = 0; i < count; i++) {
        cudaGraphNodeType type;
        CUDA_CHECK(cudaGraphNodeGetType(nodes[i], &type));
        if (type == cudaGraphNodeTypeKernel) t.kernels++; else t.others++;
    }
    free(nodes);
    CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
    cudaEvent_t events[MAX_STEPS + 1];
    float ms[MAX_STEPS];
    for (int i = 0; i <= steps; i++) CUDA_CHECK(cudaEventCreate(&events[i]));
    for (int i = 0; i < WARM_UP; i++) CUDA_CHECK(cudaGraphLaunch(replay, m->stream));
    for (int i = 0; i <= steps; i++) {
        CUDA_CHECK(cudaEventRecord(events[i], m->stream));
        if (i < steps) CUDA_CHECK(cudaGraphLaunch(replay, m->stream));
    }
    CUDA_CHECK(cudaEventSynchronize(events[steps]));
    for (int i = 0; i < steps; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    for (int i = 0; i <= steps; i++) CUDA_CHECK(cudaEventDestroy(events[i]));
    CUDA_CHECK(cudaGraphExecDestroy(replay));
    CUDA_CHECK(cudaGraphDestroy(graph));
    t.ms = median(ms, steps);
    return t;
}
// Limit of the step in ms; the family table when asked for.
static double bench_profile(Llama *m, const int32_t *tokens, double copy, int print) {
    Profile *p = profile_create(PROFILED_STEPS * (m->options.config.layers * 64 + 64 + 4 * (int)(m->M / m->head_rows + 1)));
    m->profile = m->work.profile = p;
    for (int s = 0; s < PROFILED_STEPS; s++) bench_step(m, WARM_UP + MAX_STEPS + s, tokens);
    profile_collect(p, m->stream);
    m->profile = m->work.profile = NULL;
    for (int s = 0; s < PROFILED_STEPS; s++) llama_step_result(m);
    double limit = 0, sum = 0;
    if (print) printf("    %-20s %9s %9s %7s %9s\n", "family", "ms", "floor ms", "ratio", "launches");
    for (int f = 0; f < FAMILY_COUNT; f++) {
        const double ms = p->ms[f] / PROFILED_STEPS;
        const int attention = f == FAMILY_ATTENTION_FORWARD || f == FAMILY_ATTENTION_BACKWARD;
        const double floor = attention ? ms : (p->product_ms[f] + p->bytes[f] / copy * 1e3) / PROFILED_STEPS;
        limit += floor; sum += ms;
        if (print && p->launches[f])
            printf("    %-20s %9.3f %9.3f %7.2f %9d\n", FAMILY_NAMES[f], ms, floor, floor > 0 ? ms / floor : 0.0, p->launches[f] / PROFILED_STEPS);
    }
    if (print) printf("    %-20s %9.3f %9.3f %7.2f\n", "sum", sum, limit, sum / limit);
    profile_free(p);
    return limit;
}
static void gemm_table(const Gemm *g) {
    for (int i = 0; i < g->count; i++) {
        const GemmPlan *p = &g->plans[i];
        char text[96];
        printf("    %-36s %8.3f ms %6.1f TFLOP/s   %d of %d proposals give the same bits, the fastest of all takes %.3f ms\n",
               gemm_describe(&p->shape, text, sizeof text), p->ms, 2e-9 * (double)p->shape.m * (double)p->shape.n * (double)p->shape.k / p->ms,
               p->same_bits, p->proposals, p->best_ms);
    }
}
static LlamaOptions row_options(const Row *r, const char *recipe) {
    LlamaOptions options;
    memset(&options, 0, sizeof options);
    const LlamaConfig config = {r->layers, r->width, r->heads, r->heads, llama_default_ffn(r->width), r->vocab, r->seq, 0, 1e-5f, 1e4f};
    options.config = config; options.recipe = recipe_find(recipe);
    options.batch = r->batch; options.micro_batches = 1; options.seed = 1;
    return options;
}
// What lies behind a row's milliseconds: see the top.
static void print_launches(Llama *m, const int32_t *tokens, const Options *o) {
    float mhz, watts;
    const float host = bench_host(m, tokens);
    bench_power(m, tokens, &mhz, &watts);
    printf("      host %.2f ms to enqueue a step", host);
    if (watts > 0) printf("; SM at %.0f MHz, %.0f W while steps run", mhz, watts);
    fflush(stdout);                                        // the rest may fail where a library cannot be captured
    if (o->graph) {
        const GraphTime g = bench_graph(m, tokens, o->steps);
        printf("; %d kernels and %d copies or sets a step; as one CUDA graph %.2f ms", g.kernels, g.others, g.ms);
    }
    putchar('\n');
}
// -> tokens/s.
static double bench_row(const Row *r, const char *recipe, double floor_rate, double peer, const Options *o, double copy) {
    const LlamaOptions options = row_options(r, recipe);
    const LlamaConfig &config = options.config;
    size_t before, after, total;
    CUDA_CHECK(cudaMemGetInfo(&before, &total));
    Llama *m = llama_create(&options);
    weights_fill(m);
    int32_t *tokens = (int32_t *)xcalloc((size_t)m->M * 2, sizeof *tokens);
    for (int64_t i = 0; i < 2 * m->M; i++) tokens[i] = (int32_t)(rng_word(rng_stream(3, 0, rng_address(RNG_SAMPLE, 0, 0, 0, 0, 0)), (uint64_t)i) % (uint32_t)r->vocab);
    StepResult last = {0, 0, 0, 0};
    const double ms = bench_time(m, tokens, o->steps, &last);
    const double limit = bench_profile(m, tokens, copy, 0);
    CUDA_CHECK(cudaMemGetInfo(&after, &total));
    const double rate = (double)m->M / ms * 1e3, gib = (double)(before - after) / (1 << 30);
    const double peak = llama_peak_flops(m), mfu = peak > 0 ? 100 * rate * llama_flops_per_token(&config, &m->table) / peak : 0;
    printf("%-5s %3dx%-4d %-15s %10.0f %10.0f %-6s %9.0f %8.2f %6.1f %7.2f %5.0f %-6s %8.2f %6.3f   loss %.3f%s\n", r->name, r->batch, r->seq, recipe, rate, floor_rate,
           rate >= floor_rate ? "met" : "MISSED", peer, ms, mfu, gib, r->floor_gib, gib <= r->floor_gib ? "met" : "MISSED", limit, ms / limit,
           last.loss, last.finite ? "" : " NOT FINITE");
    if (o->profile) {
        bench_profile(m, tokens, copy, 1);
        printf("    attention: %s, workspace %.1f MiB\n", attention_plan_name(m->attention), (double)m->attention->workspace_bytes / 1048576);
    }
    if (o->gemm) gemm_table(&m->gemm);
    fflush(stdout);
    print_launches(m, tokens, o);
    fflush(stdout);
    free(tokens);
    llama_free(m);
    return rate;
}

int main(int argc, char **argv) {
    const Options o = options_parse(argc, argv);
    const Device d = device_open();
    const double copy = measure_copy();
    int driver;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    printf("%s, %d SMs, %.0f MHz at most, driver for CUDA %d.%d, cuBLASLt %zu, copy %.2f TB/s, peak %.0f TFLOP/s, CUDA context %.2f GiB\n", d.name, d.sms, d.clock_khz * 1e-3,
           driver / 1000, driver % 1000 / 10, cublasLtGetVersion(), copy * 1e-12, d.peak_flops * 1e-12, (double)(d.total_bytes - d.free_bytes) / (1 << 30));
    printf("%-5s %-8s %-15s %10s %10s %-6s %9s %8s %6s %7s %5s %-6s %8s %6s\n", "model", "B x T", "recipe", "tokens/s", "at least", "", "peer", "ms", "MFU %", "GiB",
           "most", "", "limit ms", "ratio");
    for (int i = 0; i < ROW_COUNT; i++) {
        if (o.model && strcmp(o.model, ROWS[i].name) != 0) continue;
        const Row *r = &ROWS[i];
        double bf16 = 0, quartet2 = 0;
        if (!o.recipe || strcmp(o.recipe, "bf16") == 0) bf16 = bench_row(r, "bf16", r->floor_bf16, r->peer_bf16, &o, copy);
        if (!o.recipe || strcmp(o.recipe, "quartet2") == 0) quartet2 = bench_row(r, "quartet2", r->floor_quartet2, r->peer_quartet2, &o, copy);
        if (o.recipe && strcmp(o.recipe, "bf16") != 0 && strcmp(o.recipe, "quartet2") != 0) bench_row(r, o.recipe, 0, 0, &o, copy);
        for (size_t k = 0; !o.recipe && i == ROW_COUNT - 1 && k < sizeof RECIPE_ROWS / sizeof RECIPE_ROWS[0]; k++) {
            const RecipeRow *other = &RECIPE_ROWS[k];
            const double unit = !other->than ? 1 : strcmp(other->than, "bf16") == 0 ? bf16 : quartet2;
            bench_row(r, other->recipe, other->floor * unit, 0, &o, copy);
        }
    }
    return 0;
}
