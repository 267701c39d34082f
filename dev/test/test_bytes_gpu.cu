// test_bytes_gpu.cu: how many bytes the NVFP4 quantizers move, by the card's own counters, against the fewest that their tensors allow.
//
// Runs itself under Nsight Compute (ncu), one launch of each at 65536 x 2816, whose tensors are far larger than the L2 cache, and adds up what each kernel
// read and wrote in DRAM. Without ncu, or where it may not read the counters, it says so and fails.
#include "dev/cuda/ladder.cuh"
#include "llmc/cuda/quantize.cuh"

#include <string>

static const OperandSpec FOUR_SIX = NVFP4(ROUND_FOUR_SIX, BLOCK_1X16), EDEN = NVFP4_ROTATED(ROUND_MS_EDEN_POSTHOC, 128, FROM_ORIGINAL);
static const OperandSpec SEARCHED = NVFP4_ROTATED(ROUND_MS_EDEN_SEARCH, 128, FROM_ORIGINAL);
enum { ROWS = 65536, COLS = 2816 };

// Bytes a value: read and written once, each. c: a block's correction, which the range alignment of packed scales reads again.
// allowed: times the fewest. What is written last may still lie in the L2 cache; what is fetched twice, or spilled from registers, shows as more.
struct Case { const char *name; double floor, allowed = 1.05; };
static const Case CASES[] = {
    {"forward, decoded: 2 in; codes 0.5, scales 0.0625, operand 2 out", 4.5625},
    {"forward, packed: 2 in; codes 0.5, scales 0.0625 out", 2.5625},
    {"dY both ways, decoded: 2 in; operands 4, c 0.25 out", 6.25},
    {"dY both ways, two scales searched (some registers spill): the same", 6.25, 1.10},
    {"dY both ways, packed: 2 in; codes 1, c 0.25 out; c 0.25 in, scales 0.125 out", 3.625},
    {"saved X again, decoded: 0.5625 in; operand 2, c 0.125 out", 2.6875},
    {"saved X again, packed: 0.5625 in; codes 0.5, c 0.125 out; c 0.125 in, scales 0.0625 out", 1.375},
};
enum { CASE_COUNT = sizeof CASES / sizeof CASES[0] };

// One launch of each, with a kernel of this name between them.
static __global__ void next_case_kernel() {}
static void launch_all() {
    const int64_t n = (int64_t)ROWS * COLS;
    DeviceArray<bf16> x(n), along_n(n), along_m(n);
    DeviceArray<uint8_t> codes(n / 2), codes_m(n / 2), scales(n / 16), tiled(tiled_scale_bytes(ROWS, COLS)), tiled_m(tiled_scale_bytes(COLS, ROWS));
    DeviceArray<uint8_t> workspace(eden_workspace_bytes(ROWS, COLS));
    DeviceArray<float> amax(1), st(2), saved(1), alpha(1);
    EdenAddress a = {1, 2, 3, 1, GEMM_DGRAD, OPERAND_A, 0, 0}, b = {1, 2, 3, 1, GEMM_WGRAD, OPERAND_A, 0, 0};
    fill_gauss(x, n, 7);
    amax_launch(0, x, n, amax);
    const auto next = [] { next_case_kernel<<<1, 1>>>(); CUDA_LAUNCHED(); };
    next(); quantize_forward_launch(0, &FOUR_SIX, x, ROWS, COLS, amax, codes, scales, along_n, saved, NULL, NULL);
    next(); quantize_forward_native_launch(0, &FOUR_SIX, x, ROWS, COLS, amax, codes_m, tiled, st, NULL, NULL);
    next(); eden_both_launch(0, &EDEN, x, ROWS, COLS, along_n, along_m, a, b, workspace, st);
    next(); eden_both_launch(0, &SEARCHED, x, ROWS, COLS, along_n, along_m, a, b, workspace, st);
    next(); eden_both_native_launch(0, x, ROWS, COLS, codes_m, tiled, (uint8_t *)along_m.p, tiled_m, a, b, workspace, st);
    next(); eden_requant_launch(0, &EDEN, codes, scales, ROWS, COLS, along_m, b, saved, alpha, workspace, st);
    quantize_forward_native_launch(0, &FOUR_SIX, x, ROWS, COLS, amax, codes, tiled, saved, NULL, NULL);
    next(); eden_requant_native_launch(0, codes, tiled, ROWS, COLS, codes_m, tiled_m, b, saved, alpha, workspace, st);
    CUDA_CHECK(cudaDeviceSynchronize());
}

// A line of ncu's CSV: its fields, quotes removed.
static std::vector<std::string> csv_fields(const char *line) {
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (const char *p = line; *p && *p != '\n'; p++) {
        if (*p == '"') quoted = !quoted;
        else if (*p == ',' && !quoted) fields.emplace_back();
        else fields.back() += *p;
    }
    return fields;
}
static double csv_number(std::string text) {
    text.erase(std::remove(text.begin(), text.end(), ','), text.end());
    return atof(text.c_str());
}
// What the counters say of each case; the eden case before the last is followed by the forward that makes its source, which is left out.
static int count_bytes(const char *program, double bytes[CASE_COUNT]) {
    char command[1024], line[4096];
    snprintf(command, sizeof command, "ncu --clock-control none --csv --print-units base --metrics dram__bytes_read.sum,dram__bytes_write.sum '%s' --launch 2>&1", program);
    FILE *f = popen(command, "r");
    if (!f) return 0;
    std::vector<std::string> names;
    int at = -1, values = 0;
    while (fgets(line, sizeof line, f)) {
        const std::vector<std::string> fields = csv_fields(line);
        if (fields[0] == "ID") { names = fields; continue; }
        if (fields.size() != names.size() || names.empty()) { if (strncmp(line, "==", 2) != 0 || strstr(line, "ERR")) fputs(line, stdout); continue; }
        const auto field = [&](const char *name) { return fields[(size_t)(std::find(names.begin(), names.end(), name) - names.begin())]; };
        const std::string kernel = field("Kernel Name"), metric = field("Metric Name");
        if (kernel.find("next_case_kernel") != std::string::npos) { at += metric.find("read") != std::string::npos; continue; }
        const bool source = at == CASE_COUNT - 2 && kernel.find("forward_kernel") != std::string::npos;
        if (at < 0 || at >= CASE_COUNT || source) continue;
        bytes[at] += csv_number(field("Metric Value"));
        values++;
    }
    return pclose(f) == 0 ? values : 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--launch") == 0) { launch_all(); return 0; }
    Ladder l = ladder_create(argc, argv);
    double bytes[CASE_COUNT] = {0};
    const int values = count_bytes(argv[0], bytes);
    ladder_check(&l, values >= 2 * CASE_COUNT, "ncu gave %d values: it must be on the PATH and allowed to read the counters", values);
    printf("%d x %d values; bytes a value in DRAM\n%-90s %9s %9s %6s\n", ROWS, COLS, "", "counted", "fewest", "ratio");
    for (int i = 0; i < CASE_COUNT && values; i++) {
        const double each = bytes[i] / ((double)ROWS * COLS);
        printf("%-90s %9.4f %9.4f %6.3f\n", CASES[i].name, each, CASES[i].floor, each / CASES[i].floor);
        ladder_check(&l, each < CASES[i].allowed * CASES[i].floor, "%s: %.4f bytes a value, fewest %.4f", CASES[i].name, each, CASES[i].floor);
    }
    return ladder_finish(&l);
}
