// tokenizer.bin: whatever opens gives each token's bytes, and text that is safe to show.
#include "fuzz.h"
#include "llmc/tokenizer.h"

static void read_tokenizer(const char *path) {
    Tokenizer t;
    tokenizer_open(&t, path);
    fuzz_check(t.vocab >= 1 && t.eot >= 0 && t.eot < t.vocab, "the end-of-text id is within the vocabulary");
    for (int i = 0; i < t.vocab; i++) {
        int length = -1;
        const uint8_t *piece = tokenizer_decode(&t, i, &length);
        char *safe = text_escape(piece, (size_t)length);
        for (const char *p = safe; *p; p++) fuzz_check((unsigned char)*p >= 0x20 || *p == '\n' || *p == '\t', "text without control characters");
        free(safe);
    }
    tokenizer_close(&t);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_tokenizer, data, size);
    return 0;
}
