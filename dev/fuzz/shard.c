// Token shards: header, sizes, token ids. Whatever opens gives samples of ids within the vocabulary.
#include "fuzz.h"
#include "llmc/dataloader.h"

static void read_shard(const char *path) {
    enum { T = 16, VOCAB = 300 };
    DataLoader d, other;
    int32_t tokens[T], targets[T];
    dataloader_open(&d, path, T, VOCAB, 1, 1);
    dataloader_open(&other, path, T, VOCAB, 2, 0);
    fuzz_check(dataloader_fingerprint(&d) == dataloader_fingerprint(&other), "the fingerprint is the text's alone: another seed and order do not change it");
    dataloader_close(&other);
    const int64_t at[] = {0, 1, d.num_samples - 1, d.num_samples, 3 * d.num_samples + 1};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        dataloader_sample(&d, at[i], tokens, targets);
        for (int t = 0; t < T; t++) fuzz_check(tokens[t] >= 0 && tokens[t] < VOCAB && targets[t] >= 0 && targets[t] < VOCAB, "ids within the vocabulary");
    }
    dataloader_close(&d);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_shard, data, size);
    return 0;
}
