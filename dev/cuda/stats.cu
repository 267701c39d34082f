// dev/cuda/stats.cu: the ladder of --quant-stats: every operand that a recipe rounds, and gradients, against cpu/stats.h.
//   nvcc -std=c++17 -O3 -arch=native -Xcompiler "-ffp-contract=off -fopenmp" dev/cuda/stats.cu -o stats && ./stats
#include "ladder.cuh"
#include "ladder_address.cuh"

#include "../../llmc/cpu/stats.h"
#include "../../llmc/cuda/stats.cuh"

#define F64_UNIT 0x1p-53   // of a float64 operation

static int near(double got, double want, double tolerance) {
    if (!(fabs(want) < INFINITY)) return !(fabs(got) < INFINITY);
    return fabs(got - want) <= tolerance;
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands

// What an operand is quantized from: as the CPU holds it, and as the GPU does: BF16 values, with a row's factor where there is one.
struct Source { std::vector<float> x, row_factor; std::vector<uint16_t> values; float x_factor; };

static Source source_original(DataKind kind, int64_t rows, int64_t cols) {
    Source s;
    s.values = make_data(kind, rows, cols, (uint64_t)(rows * 131 + cols));
    for (uint16_t v : s.values) s.x.push_back(bf16_decode(v));
    s.x_factor = 1.0f;
    return s;
}
// The forward's operand of it, as `forward` leaves it.
static Source source_forward(const OperandSpec *forward, DataKind kind, int64_t rows, int64_t cols) {
    const Source original = source_original(kind, rows, cols);
    if (forward->rounding == ROUND_NONE || forward->rounding == ROUND_BF16) return original;
    Source s;
    const QuantizeAddress at = cpu_address(an_address(GEMM_FORWARD, OPERAND_B));
    const QuantizeRandom random = quantize_random(&at, forward);
    std::vector<float> values((size_t)(rows * cols));
    s.x.resize((size_t)(rows * cols));
    s.x_factor = quantize_operand(s.x.data(), original.x.data(), rows, cols, 0, forward, &at);
    const int by_row = forward->format == FORMAT_E2M1;
    quantize_tensor(values.data(), NULL, original.x.data(), rows, cols, 0, forward, &random, !by_row);
    for (float v : values) s.values.push_back(bf16_encode(v));
    for (int64_t r = 0; by_row && r < rows; r++) {
        float amax = 0.0f;
        for (int64_t c = 0; c < cols; c++) amax = fmaxf(amax, fabsf(original.x[(size_t)(r * cols + c)]));
        s.row_factor.push_back(plain_scale(amax, E2M1_MAX).factor);
    }
    return s;
}
static void check_operand(Ladder *l, const char *name, const OperandSpec *spec, const Source &s, DataKind kind, int64_t rows, int64_t cols, int along_rows,
                          EdenAddress at) {
    const int64_t n = rows * cols, bytes = stats_workspace_bytes(rows, cols);
    DeviceArray<uint16_t> x(s.values);
    DeviceArray<float> row_factor(s.row_factor), x_factor(std::vector<float>(1, s.x_factor));
    DeviceArray<uint8_t> workspace(std::vector<uint8_t>((size_t)bytes + 64, 0xFF));
    DeviceArray<double> out(std::vector<double>(STATS_OPERAND_VALUES + 1, NAN));
    stats_operand_launch(0, spec, at, (const bf16 *)x.p, s.row_factor.empty() ? NULL : row_factor.p, s.x_factor == 1.0f ? NULL : x_factor.p, rows, cols,
                         along_rows, workspace, out);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> after = host_copy(workspace.p + bytes, 64);
    ladder_check(l, std::count(after.begin(), after.end(), 0xFF) == 64, "%s: wrote beyond its workspace", name);
    if (kind == DATA_NAN || kind == DATA_INF) return;                  // not trained on; nothing is promised but that it ends

    OperandStats got, want;
    memset(&want, 0, sizeof want);
    stats_operand_read(&got, out.host(STATS_OPERAND_VALUES).data());
    std::vector<float> quantized((size_t)n);
    const QuantizeAddress cpu = cpu_address(at);
    const float factor = quantize_operand(quantized.data(), s.x.data(), rows, cols, along_rows, spec, &cpu);
    stats_operand(&want, s.x.data(), s.x_factor, quantized.data(), factor, rows, cols, along_rows, spec, &cpu);
    // The two sums of the relative error have no negative term: in another order, each is off by at most n roundings.
    const double tolerance = want.error * (2.0 * (double)n + 4) * F64_UNIT;
    ladder_check(l, near(got.error, want.error, tolerance), "%s: error %.17g, CPU %.17g", name, got.error, want.error);
    // The rest are counts, largest values, and sums of 128 in the same order.
    ladder_check(l, got.zeros == want.zeros, "%s: zeros %.17g, CPU %.17g", name, got.zeros, want.zeros);
    ladder_check(l, got.clipped == want.clipped, "%s: clipped %.17g, CPU %.17g", name, got.clipped, want.clipped);
    ladder_check(l, near(got.amax, want.amax, 0), "%s: amax %.17g, CPU %.17g", name, got.amax, want.amax);
    ladder_check(l, near(got.peak, want.peak, want.peak * 4 * F64_UNIT), "%s: peak %.17g, CPU %.17g", name, got.peak, want.peak);
}
// Of every recipe, what its operands are rounded from, in its place among the GEMMs.
static void check_recipes(Ladder *l, int64_t rows, int64_t cols) {
    for (int r = 0; r < RECIPE_COUNT; r++) for (int gemm = 0; gemm < 3; gemm++) for (int operand = 0; operand < 2; operand++) {
        const GemmSpec *g = &RECIPES[r].gemm[gemm];
        const OperandSpec *spec = operand == OPERAND_A ? &g->a : &g->b;
        if (spec->rounding == ROUND_NONE && spec->rotation == 0) continue;
        const int along_rows = gemm == GEMM_WGRAD || (gemm == GEMM_DGRAD && operand == OPERAND_B);
        const int unit = std::max(spec->rotation, operand_block(spec));
        if ((along_rows ? rows : cols) % unit) continue;
        const OperandSpec *forward = gemm == GEMM_DGRAD ? &RECIPES[r].gemm[GEMM_FORWARD].b : &RECIPES[r].gemm[GEMM_FORWARD].a;
        if (spec->source == FROM_FORWARD && cols % std::max(forward->rotation, operand_block(forward))) continue;
        for (DataKind kind : ladder_kinds(l)) {
            if (l->small && kind != DATA_GAUSS) continue;      // sums take the same way whatever the values
            if (spec->source == FROM_FORWARD && kind >= DATA_HUGE && kind != DATA_SPARSE) continue;  // the forward leaves no finite operand
            const Source s = spec->source == FROM_FORWARD ? source_forward(forward, kind, rows, cols) : source_original(kind, rows, cols);
            char name[160];
            snprintf(name, sizeof name, "%s, GEMM %d, operand %d, %s, %lld x %lld", RECIPES[r].name, gemm, operand, DATA_NAMES[kind], (long long)rows, (long long)cols);
            check_operand(l, name, spec, s, kind, rows, cols, along_rows, an_address(gemm, operand));
        }
    }
}
// What no recipe asks for now.
static void check_others(Ladder *l, int64_t rows, int64_t cols) {
    static const OperandSpec specs[] = {
        {ROUND_MS_EDEN, FORMAT_NVFP4, BLOCK_1X16, 128, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0},
        {ROUND_FOUR_SIX, FORMAT_NVFP4, BLOCK_1X16, 64, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0},
        {ROUND_RTN, FORMAT_NVFP4, BLOCK_1X16, 16, FROM_ORIGINAL, SIGNS_NONE, SEARCH_FEW, 0},
        {ROUND_SR, FORMAT_MXFP4, BLOCK_1X32, 0, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0},
        {ROUND_QUEST, FORMAT_MXFP4, BLOCK_1X32, 128, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0},
        {ROUND_RTN, FORMAT_E4M3, BLOCK_TENSOR, 32, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 0},
        {ROUND_RTN, FORMAT_E2M1, BLOCK_ROW, 0, FROM_ORIGINAL, SIGNS_RANDOM, SEARCH_FEW, 5},
    };
    for (const OperandSpec &spec : specs) for (int along_rows = 0; along_rows < 2; along_rows++) for (DataKind kind : ladder_kinds(l)) {
        if ((along_rows ? rows : cols) % std::max(spec.rotation, operand_block(&spec)) || (l->small && kind != DATA_GAUSS)) continue;
        char name[160];
        snprintf(name, sizeof name, "format %d by %d, rotation %d, along %s, %s, %lld x %lld", (int)spec.format, (int)spec.rounding, spec.rotation,
                 along_rows ? "rows" : "columns", DATA_NAMES[kind], (long long)rows, (long long)cols);
        check_operand(l, name, &spec, source_original(kind, rows, cols), kind, rows, cols, along_rows, an_address(GEMM_WGRAD, OPERAND_A));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

static std::vector<float> noisy(int64_t count, uint64_t seed, float size, float noise, bool as_bf16) {
    std::vector<float> x;
    for (int64_t i = 0; i < count; i++) {
        const float v = size * gauss_value(77, (uint64_t)i) + noise * gauss_value(seed, (uint64_t)i);
        x.push_back(as_bf16 ? bf16_round(v) : v);
    }
    return x;
}
static std::vector<uint16_t> as_bf16(const std::vector<float> &x) {
    std::vector<uint16_t> bits;
    for (float v : x) bits.push_back(bf16_encode(v));
    return bits;
}
static void check_gradient(Ladder *l, int got_bf16, int exact_bf16, int before, float size, int64_t count) {
    const std::vector<float> got = noisy(count, 1, size, 0.1f * size, got_bf16), exact = noisy(count, 2, size, 0.0f, exact_bf16),
                             old = noisy(count, 3, 0.0f, size, before == 2);
    DeviceArray<float> g(got), e(exact), b(old);
    DeviceArray<uint16_t> g16(as_bf16(got)), e16(as_bf16(exact)), b16(as_bf16(old));
    DeviceArray<uint8_t> workspace(stats_workspace_bytes(1, 1));
    DeviceArray<double> out(STATS_GRADIENT_VALUES);
    stats_gradient_launch(0, got_bf16 ? (void *)g16.p : (void *)g.p, got_bf16, exact_bf16 ? (void *)e16.p : (void *)e.p, exact_bf16,
                          before == 0 ? NULL : before == 1 ? (void *)b.p : (void *)b16.p, before == 2, count, workspace, out);
    CUDA_CHECK(cudaDeviceSynchronize());
    GradientStats have, want;
    stats_gradient_read(&have, out.host(STATS_GRADIENT_VALUES).data());
    std::vector<float> difference = got;
    for (int64_t i = 0; before && i < count; i++) difference[(size_t)i] -= old[(size_t)i];
    stats_gradient(&want, difference.data(), exact.data(), count);
    // n roundings of each sum; that of <g,e> is off by n roundings of sum |g e|, at most the root of the other two: 1 in the cosine.
    const double tolerance = (2.0 * (double)count + 8) * F64_UNIT;
    ladder_check(l, near(have.cosine, want.cosine, 2 * tolerance), "gradient of %lld, cosine %.17g, CPU %.17g", (long long)count, have.cosine, want.cosine);
    ladder_check(l, near(have.error, want.error, want.error * tolerance), "gradient of %lld, error %.17g, CPU %.17g", (long long)count, have.error, want.error);
}

// ---------------------------------------------------------------------------------------------------------------------

static void time_shape(const Ladder *l, int64_t rows, int64_t cols) {
    const int64_t n = rows * cols;
    DeviceArray<bf16> x(n);
    DeviceArray<uint8_t> workspace(stats_workspace_bytes(rows, cols));
    DeviceArray<double> out(STATS_OPERAND_VALUES);
    fill_gauss(x, n, 7);
    char title[96];
    snprintf(title, sizeof title, "--quant-stats, %lld x %lld", (long long)rows, (long long)cols);
    ladder_heading(title);
    static const char *const names[] = {"fp8", "quartet2", "quartet2-search", "nvidia-46", "quartet", "fp4-dge-occ"};
    for (const char *name : names) for (int gemm = 0; gemm < 3; gemm += 2) for (int operand = 0; operand < 2; operand++) {
        const GemmSpec *g = &recipe_find(name)->gemm[gemm];
        const OperandSpec *spec = operand == OPERAND_A ? &g->a : &g->b;
        if (spec->rounding == ROUND_NONE) continue;
        char row[64];
        snprintf(row, sizeof row, "%s, GEMM %d, operand %c", name, gemm, "AB"[operand]);
        ladder_row(l, row, ladder_time([&](int) {
            stats_operand_launch(0, spec, an_address(gemm, operand), x, NULL, NULL, rows, cols, gemm == GEMM_WGRAD, workspace, out); }), (double)n, 2, 0);
    }
    ladder_row(l, "gradient, BF16", ladder_time([&](int) { stats_gradient_launch(0, x, 1, x, 1, NULL, 0, n, workspace, out); }), (double)n, 4, 0);
}

int main(int argc, char **argv) {
    Ladder l = ladder_create(argc, argv);
    if (l.large) fatal_usage("%s: --large is for the quantizers' ladders; this one takes --quick, --small or nothing", argv[0]);
    static const int64_t shapes[][2] = {{128, 128}, {37, 160}, {96, 48}, {384, 256}, {256, 1152}};
    for (const int64_t *s : shapes) {
        if (l.small && s[0] * s[1] > 128 * 128) continue;
        check_recipes(&l, s[0], s[1]);
        check_others(&l, s[0], s[1]);
    }
    for (int64_t count : {(int64_t)1, (int64_t)1000, (int64_t)100003}) for (float size : {0.0f, 1.0f, 1e-30f})
        for (int got = 0; got < 2; got++) for (int exact = 0; exact < 2; exact++) for (int before = 0; before < 3; before++)
            if (!l.small || count < 100000) check_gradient(&l, got, exact, before, size, count);
    if (!l.quick) {
        ladder_ceilings(&l);
        time_shape(&l, 65536, 640);
        time_shape(&l, 16384, 2048);
    }
    return ladder_finish(&l);
}
