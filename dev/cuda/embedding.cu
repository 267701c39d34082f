// embedding.cu: ladder of the token embedding: gather forward, scatter-add backward.
//
// Build: nvcc -std=c++17 -O3 -arch=native -o embedding dev/cuda/embedding.cu     Run: ./embedding [--quick]
//
// 1. backward by float32 atomics, in whatever order they come (not for the trainer: two runs differ)
// 2. the trainer's (llmc/cuda/embedding.cuh): sorted by token, runs cut into tiles, every sum in a fixed order
#include "ladder_compare.cuh"

#include "../../llmc/cuda/embedding.cuh"

__global__ void embedding_backward_atomics(float *dembed, const bf16 *dout, const int32_t *tokens, int64_t rows, int width) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * width) atomicAdd(dembed + (int64_t)tokens[i / width] * width + i % width, __bfloat162float(dout[i]));
}
static void backward_version(int version, float *dembed, const bf16 *dout, const int32_t *tokens, void *scratch, int64_t rows, int width, int vocab) {
    if (version == 2) return embedding_backward_launch(dembed, dout, tokens, scratch, rows, width, vocab, 0);
    embedding_backward_atomics<<<(unsigned)ceil_div(rows * width, 256), 256>>>(dembed, dout, tokens, rows, width);
    CUDA_LAUNCHED();
}

// How the tokens of a batch fall. Text: a third one token, the others by a power law.
enum Tokens { UNIFORM, TEXT, ONE_TOKEN };
static const char *const TOKENS_NAMES[] = {"uniform", "text-like", "one token"};
static std::vector<int32_t> random_tokens(Tokens kind, int64_t rows, int vocab) {
    std::vector<int32_t> tokens((size_t)rows);
    for (int64_t i = 0; i < rows; i++) {
        const Philox4 w = philox4x32((uint32_t)i, 0, 7, 0, 1234, 5678);
        const double u = rng_uniform(w.w[1]);
        const int32_t spread = std::min(vocab - 1, (int)(exp(u * log((double)vocab + 1)) - 1));
        tokens[i] = kind == UNIFORM ? (int32_t)(w.w[0] % (uint32_t)vocab) : kind == ONE_TOKEN || w.w[0] % 3 == 0 ? vocab - 1 : spread;
    }
    return tokens;
}

// Forward: the bits of the table's rows. Backward against float64 sums; tolerance: a sum of n terms and what was there errs by at most
// n units of float32 of the sum of magnitudes. The trainer's also twice, for equal bits.
static void check_shape(Tokens kind, int64_t rows, int width, int vocab) {
    const std::vector<int32_t> tokens = random_tokens(kind, rows, vocab);
    const Bf16Host table = host_gauss_bf16((int64_t)vocab * width, 1, 1.0f), dout = host_gauss_bf16(rows * width, 2, 1.0f);
    const std::vector<float> before = host_gauss((int64_t)vocab * width, 3, 1.0f);
    bf16 *d_table = device_copy_bf16(table), *d_dout = device_copy_bf16(dout), *out = device_poisoned<bf16>(rows * width);
    int32_t *d_tokens = device_copy(tokens);
    char *scratch = device_poisoned<char>((int64_t)embedding_backward_scratch_bytes(rows, width, vocab));
    char what[96];
    snprintf(what, sizeof what, "embedding, %s, %lld x %d of %d", TOKENS_NAMES[kind], (long long)rows, width, vocab);
    embedding_forward_launch(out, d_table, d_tokens, rows, width, 0);
    const Bf16Host got_out = host_copy_bf16(out, rows * width);
    int64_t unequal = 0;
    std::vector<double> sum(before.begin(), before.end()), magnitude(before.size());
    std::vector<int64_t> terms((size_t)vocab, 1);
    for (size_t i = 0; i < before.size(); i++) magnitude[i] = fabs(before[i]);
    for (int64_t row = 0; row < rows; row++) {
        terms[tokens[row]]++;
        for (int c = 0; c < width; c++) {
            const int64_t at = (int64_t)tokens[row] * width + c, i = row * width + c;
            unequal += got_out[i] != table[at];
            sum[at] += bf16_decode(dout[i]); magnitude[at] += fabs(bf16_decode(dout[i]));
        }
    }
    ladder_check(&ladder, unequal == 0, "%s: %lld values of the forward differ from the table's", what, (long long)unequal);
    std::vector<float> first;
    for (int version = 1; version <= 3; version++) {  // 3: version 2 once more
        float *dembed = device_copy(before);
        backward_version(std::min(version, 2), dembed, d_dout, d_tokens, scratch, rows, width, vocab);
        const std::vector<float> got = host_copy(dembed, (int64_t)vocab * width);
        Worst gradient;
        for (size_t i = 0; i < got.size(); i++) gradient.add(got[i], sum[i], (double)terms[i / width] * F32_UNIT * magnitude[i]);
        gradient.report(std::string(what) + ", backward version " + std::to_string(std::min(version, 2)));
        if (version == 3) ladder_check(&ladder, got == first, "%s: backward gives other bits the second time", what);
        first = got;
        device_free(dembed);
    }
    device_free(d_table, d_dout, out, d_tokens, scratch);
}

static void time_shape(Tokens kind, int64_t rows, int width, int vocab) {
    const std::vector<int32_t> tokens = random_tokens(kind, rows, vocab);
    std::vector<bool> seen((size_t)vocab);
    for (int32_t t : tokens) seen[t] = true;
    const double distinct = (double)std::count(seen.begin(), seen.end(), true), values = (double)rows * width;
    bf16 *table = device_gauss_bf16((int64_t)vocab * width, 1), *dout = device_gauss_bf16(rows * width, 2), *out = device_poisoned<bf16>(rows * width);
    float *dembed = device_gauss((int64_t)vocab * width, 3, 1.0f);
    int32_t *d_tokens = device_copy(tokens);
    char *scratch = device_poisoned<char>((int64_t)embedding_backward_scratch_bytes(rows, width, vocab));
    char shape[96];
    snprintf(shape, sizeof shape, "embedding, %lld rows x %d, vocabulary %d, tokens %s", (long long)rows, width, vocab, TOKENS_NAMES[kind]);
    ladder_heading(shape);
    ladder_time_row("  forward (trainer)", 2 * values + 2 * distinct * width, [=] { embedding_forward_launch(out, table, d_tokens, rows, width, 0); });
    for (int version = 1; version <= 2; version++) {
        ladder_time_row(version == 1 ? "1 backward, atomics" : "2 backward (trainer)", 2 * values + 8 * distinct * width, [=] { backward_version(version, dembed, dout, d_tokens, scratch, rows, width, vocab); });
    }
    device_free(table, dout, out, dembed, d_tokens, scratch);
}

int main(int argc, char **argv) {
    const bool timed = ladder_begin(argc, argv);
    for (Tokens kind : {UNIFORM, TEXT, ONE_TOKEN}) {
        check_shape(kind, 1, 128, 16);
        check_shape(kind, 63, 8, 5);
        check_shape(kind, 64, 128, 1);
        check_shape(kind, 193, 264, 7);
        check_shape(kind, 2000, 128, 1000);
        check_shape(kind, 5000, 640, 256);
    }
    if (timed) {
        time_shape(TEXT, 65536, 640, 32000);
        time_shape(UNIFORM, 65536, 1024, 32000);
        time_shape(TEXT, 65536, 1024, 32000);
        time_shape(TEXT, 16384, 2048, 65536);
        time_shape(TEXT, 65536, 128, 256);
        time_shape(ONE_TOKEN, 65536, 640, 256);
    }
    return ladder_end();
}
