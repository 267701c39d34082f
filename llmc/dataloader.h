// dataloader.h: token shards -> batches. The loader has no state: which tokens sample i holds is a function of
// (seed, i, shard list), so resuming is one integer, the number of ranks may change, and every sample comes exactly once
// an epoch.
//
// A shard is llm.c's: 256 int32 header (magic, version, count), then the tokens: (20240520, version 1) uint16 or
// (20240801, version 7) uint32, little-endian. All shards that match a pattern, in sorted order, are ONE stream of tokens;
// sample i is tokens [i*T, i*T + T] of it (targets are shifted by one), across shards where it must, so less than one
// sample is left over in all. Shards are mapped, never read whole. Positions and counts are 64-bit.
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <glob.h>
#include <sys/mman.h>

#include "file.h"
#include "rng.h"

#define SHARD_HEADER_BYTES 1024
enum { SHARD_MAGIC_U16 = 20240520, SHARD_VERSION_U16 = 1, SHARD_MAGIC_U32 = 20240801, SHARD_VERSION_U32 = 7 };

typedef struct {
    char *path;
    uint8_t *map;                  // the whole file, read-only
    int64_t bytes;                 // size of the file
    int64_t count;                 // tokens
    int64_t start;                 // position of its first token in the stream
    int token_bytes;               // 2 or 4
} DataShard;

typedef struct DataLoader {
    int64_t num_tokens;            // in all shards
    int64_t num_samples;           // an epoch: (num_tokens - 1) / seq
    int seq;                       // T
    int vocab;                     // every token id of a sample is below it
    int shuffle;                   // 0: samples come in the order of the text
    uint64_t seed;                 // of the shuffle
    int num_shards;
    DataShard *shards;
} DataLoader;

// ---------------------------------------------------------------------------------------------------------------------
// Shuffle

// A permutation of 0 .. 2^bits - 1 (bits >= 2) drawn by (seed, epoch): a Feistel network of eight rounds whose round
// function is Philox. The halves differ by a bit when bits is odd; they swap widths every round.
FN uint64_t feistel_permute(uint64_t x, int bits, uint64_t seed, int64_t epoch) {
    int low = bits / 2, high = bits - low;
    for (int round = 0; round < 8; round++) {
        RngStream s = rng_stream(seed, (uint32_t)epoch, rng_address(RNG_SHUFFLE, round, 0, 0, 0, 0));
        uint64_t right = x & ((1ull << low) - 1), left = x >> low;
        uint64_t mixed = (left ^ rng_word(s, right)) & ((1ull << high) - 1);
        x = right << high | mixed;
        int width = low; low = high; high = width;
    }
    return x;
}
// Where index lands in the epoch's permutation of 0 .. n-1. Walks the cycle of a permutation of the next power of two until
// it is back below n: fewer than two steps on average.
FN int64_t shuffle_index(int64_t index, int64_t n, uint64_t seed, int64_t epoch) {
    if (n < 2) return 0;
    int bits = 2;
    while (((n - 1) >> bits) != 0) bits++;
    uint64_t x = (uint64_t)index;
    do x = feistel_permute(x, bits, seed, epoch); while (x >= (uint64_t)n);
    return (int64_t)x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shards

// Checks a header against the size of the file. Sets token_bytes and count; anything wrong is fatal.
FN void shard_check(DataShard *s) {
    if (s->bytes < SHARD_HEADER_BYTES)
        fatal("%s: %lld bytes are fewer than the %d-byte header of a token shard; make the data again with data/prepare.py",
              s->path, (long long)s->bytes, SHARD_HEADER_BYTES);
    int32_t header[3];
    memcpy(header, s->map, sizeof header);
    const int is_u16 = header[0] == SHARD_MAGIC_U16;
    if (!is_u16 && header[0] != SHARD_MAGIC_U32)
        fatal("%s: magic at byte 0 is %d, not %d or %d: it is no token shard; make one from text with data/prepare.py",
              s->path, header[0], SHARD_MAGIC_U16, SHARD_MAGIC_U32);
    const int version = is_u16 ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    if (header[1] != version)
        fatal("%s: version at byte 4 is %d, magic %d goes with %d; make the data again with data/prepare.py",
              s->path, header[1], header[0], version);
    if (header[2] <= 0)
        fatal("%s: token count at byte 8 is %d: the shard is empty; remove it or make the data again with data/prepare.py",
              s->path, header[2]);
    s->token_bytes = is_u16 ? 2 : 4;
    s->count = header[2];
    const int64_t want = SHARD_HEADER_BYTES + s->count * s->token_bytes;
    if (s->bytes != want)
        fatal("%s: the file has %lld bytes, but a count of %lld at byte 8 needs %lld: it is %s; copy or make it again",
              s->path, (long long)s->bytes, (long long)s->count, (long long)want, s->bytes < want ? "cut short" : "too long");
}
FN void shard_open(DataShard *s, const char *path) {
    char error[ERROR_TEXT];
    s->path = xstrdup(path);
    const int fd = file_open(path, &s->bytes, error, sizeof error);
    if (fd < 0) fatal("%s; check --train-data and --val-data", error);
    if (s->bytes > 0) {
        void *map = mmap(NULL, (size_t)s->bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) fatal("%s: cannot map %lld bytes: %s", path, (long long)s->bytes, strerror(errno));
        s->map = (uint8_t *)map;
    }
    close(fd);
    shard_check(s);
}
// Copies tokens [first, first + count) of one shard as int32, checking each id.
FN void shard_read(const DataShard *s, int64_t first, int64_t count, int vocab, int32_t *out) {
    const uint8_t *bytes = s->map + SHARD_HEADER_BYTES + first * s->token_bytes;
    uint32_t largest = 0;
    if (s->token_bytes == 2) {
        const uint16_t *tokens = (const uint16_t *)bytes;
        for (int64_t i = 0; i < count; i++) { out[i] = tokens[i]; largest = u32_max(largest, tokens[i]); }
    } else {
        const uint32_t *tokens = (const uint32_t *)bytes;
        for (int64_t i = 0; i < count; i++) { out[i] = (int32_t)tokens[i]; largest = u32_max(largest, tokens[i]); }
    }
    if (largest < (uint32_t)vocab) return;
    int64_t bad = 0;
    while ((uint32_t)out[bad] < (uint32_t)vocab) bad++;
    fatal("%s: token %lld (byte %lld) is id %u, the vocabulary has %d; use the model and data of one tokenizer", s->path,
          (long long)(first + bad), (long long)(SHARD_HEADER_BYTES + (first + bad) * s->token_bytes), (uint32_t)out[bad], vocab);
}
// The last shard that begins at or before a position.
FN int shard_find(const DataLoader *d, int64_t position) {
    int low = 0, high = d->num_shards - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (d->shards[middle].start <= position) low = middle; else high = middle - 1;
    }
    return low;
}
// Copies tokens [position, position + count) of the stream. The range lies inside the stream.
FN void stream_read(const DataLoader *d, int64_t position, int64_t count, int32_t *out) {
    for (int s = shard_find(d, position); count > 0; s++) {
        const DataShard *shard = &d->shards[s];
        const int64_t first = position - shard->start, left = shard->count - first, n = left < count ? left : count;
        shard_read(shard, first, n, d->vocab, out);
        position += n; out += n; count -= n;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The loader

// Opens every shard that matches a glob pattern, in sorted order, as samples of seq tokens. shuffle: 0 for validation.
// Fatal: no match, a shard that is not whole, text of fewer than seq + 1 tokens. Token ids are checked as they are read.
FN void dataloader_open(DataLoader *d, const char *pattern, int seq, int vocab, uint64_t seed, int shuffle) {
    if (seq < 1 || vocab < 1) fatal("data loader: seq %d and vocab %d must be at least 1", seq, vocab);
    memset(d, 0, sizeof *d);
    d->seq = seq; d->vocab = vocab; d->seed = seed; d->shuffle = shuffle;
    glob_t found;
    const int rc = glob(pattern, GLOB_ERR, NULL, &found);
    if (rc == GLOB_NOMATCH || (rc == GLOB_ABORTED && errno == ENOENT))  // the latter: its folder is not there
        fatal("%s: no file matches; make shards with data/prepare.py, or put the pattern in quotes", pattern);
    if (rc != 0) fatal("%s: cannot look for files: %s; check --train-data and --val-data", pattern, rc == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    d->num_shards = (int)found.gl_pathc;
    d->shards = (DataShard *)xcalloc(found.gl_pathc, sizeof(DataShard));
    for (int i = 0; i < d->num_shards; i++) {
        shard_open(&d->shards[i], found.gl_pathv[i]);
        d->shards[i].start = d->num_tokens;
        d->num_tokens += d->shards[i].count;
    }
    globfree(&found);
    d->num_samples = (d->num_tokens - 1) / seq;
    if (d->num_samples < 1)
        fatal("%s: the text has %lld tokens, one sample of --seq %d needs %lld; bring more text or use a smaller --seq",
              pattern, (long long)d->num_tokens, seq, (long long)seq + 1);
}

// Sample `index` (>= 0) of the endless sequence of epochs: tokens (T) and targets (T), targets[t] following tokens[t].
FN void dataloader_sample(const DataLoader *d, int64_t index, int32_t *tokens, int32_t *targets) {
    if (index < 0) fatal("data loader: sample %lld is below 0; the checkpoint's data position is damaged", (long long)index);
    const int64_t epoch = index / d->num_samples, T = d->seq;
    int64_t sample = index % d->num_samples;
    if (d->shuffle) sample = shuffle_index(sample, d->num_samples, d->seed, epoch);
    stream_read(d, sample * T, T, tokens);
    memcpy(targets, tokens + 1, (size_t)(T - 1) * sizeof(int32_t));
    stream_read(d, sample * T + T, 1, targets + T - 1);
}
// Samples first .. first + batch - 1: tokens and targets (B,T).
FN void dataloader_batch(const DataLoader *d, int64_t first, int batch, int32_t *tokens, int32_t *targets) {
    for (int64_t b = 0; b < batch; b++) dataloader_sample(d, first + b, tokens + b * d->seq, targets + b * d->seq);
}

// A hash of the text: the shards' sizes and 16 runs of 64 tokens spread over each (a short shard: all of it). A checkpoint
// keeps it, so that a run is not resumed on other data. The shards' names and folder do not matter, their order does.
FN uint64_t dataloader_fingerprint(const DataLoader *d) {
    const int64_t RUNS = 16, RUN = 64;
    uint64_t hash = 0xCBF29CE484222325ull;
    for (int i = 0; i < d->num_shards; i++) {
        const DataShard *s = &d->shards[i];
        const int64_t runs = s->count > RUNS * RUN ? RUNS : 1, run = runs > 1 ? RUN : s->count;
        hash = (hash ^ (uint64_t)s->count ^ (uint64_t)s->token_bytes << 32) * 0x100000001B3ull;
        for (int64_t k = 0; k < runs * run; k++) {
            uint32_t token = 0;
            const int64_t start = runs > 1 ? k / run * (s->count - run) / (runs - 1) : 0;
            memcpy(&token, s->map + SHARD_HEADER_BYTES + (start + k % run) * s->token_bytes, (size_t)s->token_bytes);
            hash = (hash ^ token) * 0x100000001B3ull;
            hash ^= hash >> 29;
        }
    }
    return hash;
}

FN void dataloader_close(DataLoader *d) {
    for (int i = 0; i < d->num_shards; i++) {
        munmap(d->shards[i].map, (size_t)d->shards[i].bytes);
        free(d->shards[i].path);
    }
    free(d->shards);
    memset(d, 0, sizeof *d);
}

#endif
