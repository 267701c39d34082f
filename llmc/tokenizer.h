// tokenizer.h: token id -> bytes, and bytes -> text that is safe to show. Reads the tokenizer.bin of data/prepare.py, which is
// llm.c's: 256 int32 header (20240328, version 2, vocabulary, end-of-text id), then a length byte and the bytes of each token.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "file.h"
#include "utf8.h"

enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2, TOKENIZER_HEADER_BYTES = 1024, TOKENIZER_VOCAB_MAX = 1 << 24 };

typedef struct Tokenizer {
    int vocab;                     // ids are 0 .. vocab - 1
    int eot;                       // end of text, led every document in training
    uint8_t *file;                 // the whole file
    int64_t *offsets;              // (vocab) where a token's length byte lies
} Tokenizer;

// Reads the header and checks it against the size of the file: a vocabulary of V tokens takes V to 256 V bytes.
FN void tokenizer_read_header(Tokenizer *t, int fd, const char *path, int64_t size) {
    char error[ERROR_TEXT];
    int32_t header[4];
    if (size < TOKENIZER_HEADER_BYTES)
        fatal("%s: %lld bytes are fewer than the %d-byte header of a tokenizer.bin; make the data again with data/prepare.py",
              path, (long long)size, (int)TOKENIZER_HEADER_BYTES);
    if (file_read_at(fd, path, header, sizeof header, 0, error, sizeof error) != 0) fatal("%s", error);
    const int64_t body = size - TOKENIZER_HEADER_BYTES, vocab = header[2];
    if (header[0] != TOKENIZER_MAGIC)
        fatal("%s: magic at byte 0 is %d, not %d: it is no tokenizer.bin; make the data again with data/prepare.py", path, header[0], (int)TOKENIZER_MAGIC);
    if (header[1] != TOKENIZER_VERSION)
        fatal("%s: version at byte 4 is %d, not %d; make the data again with data/prepare.py", path, header[1], (int)TOKENIZER_VERSION);
    if (vocab < 1 || vocab > TOKENIZER_VOCAB_MAX || body < vocab || body > vocab * 256)
        fatal("%s: vocabulary at byte 8 is %lld, which does not fit a file of %lld bytes; make the data again with data/prepare.py",
              path, (long long)vocab, (long long)size);
    if (header[3] < 0 || header[3] >= vocab)
        fatal("%s: end-of-text id at byte 12 is %d, the vocabulary has %lld; make the data again with data/prepare.py", path, header[3], (long long)vocab);
    t->vocab = header[2]; t->eot = header[3];
}
// Reads a tokenizer.bin; one that is not whole in every respect is fatal.
FN void tokenizer_open(Tokenizer *t, const char *path) {
    char error[ERROR_TEXT];
    int64_t size;
    memset(t, 0, sizeof *t);
    const int fd = file_open(path, &size, error, sizeof error);
    if (fd < 0) fatal("%s; make the data again with data/prepare.py", error);
    tokenizer_read_header(t, fd, path, size);
    t->file = (uint8_t *)xcalloc((size_t)size, 1);
    if (file_read_at(fd, path, t->file, size, 0, error, sizeof error) != 0) fatal("%s", error);
    close(fd);
    t->offsets = (int64_t *)xcalloc((size_t)t->vocab, sizeof(int64_t));
    int64_t at = TOKENIZER_HEADER_BYTES;
    for (int i = 0; i < t->vocab; i++) {
        if (at >= size || at + 1 + t->file[at] > size)
            fatal("%s: byte %lld: the file ends inside token %d of %d; make the data again with data/prepare.py", path, (long long)at, i, t->vocab);
        t->offsets[i] = at;
        at += 1 + t->file[at];
    }
    if (at != size)
        fatal("%s: byte %lld: %lld bytes follow the last token; make the data again with data/prepare.py", path, (long long)at, (long long)(size - at));
}
// The bytes of a token, not zero-terminated: a piece of UTF-8 that may begin or end inside a character. length: 0 to 255.
FN const uint8_t *tokenizer_decode(const Tokenizer *t, int id, int *length) {
    if (id < 0 || id >= t->vocab) fatal("token id %d is outside the tokenizer's vocabulary of %d", id, t->vocab);
    const uint8_t *p = t->file + t->offsets[id];
    *length = p[0];
    return p + 1;
}
FN void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->offsets);
    memset(t, 0, sizeof *t);
}

// Bytes a model wrote -> a string that cannot harm a terminal, to be freed. Printable UTF-8, newline and tab stay; every other
// byte becomes \xNN: invalid UTF-8, control characters (ESC, carriage return, U+0080 to U+009F).
FN char *text_escape(const uint8_t *bytes, size_t count) {
    static const char digits[] = "0123456789abcdef";
    char *out = (char *)xcalloc(count + 1, 4), *o = out;
    for (size_t i = 0; i < count;) {
        const int n = utf8_length(bytes + i, count - i);
        const int control = n == 1 ? (bytes[i] < 0x20 && bytes[i] != '\n' && bytes[i] != '\t') || bytes[i] == 0x7F
                                   : n == 2 && bytes[i] == 0xC2 && bytes[i + 1] < 0xA0;
        const int run = n > 0 ? n : 1;
        for (int k = 0; k < run; k++, i++) {
            if (n > 0 && !control) { *o++ = (char)bytes[i]; continue; }
            *o++ = '\\'; *o++ = 'x'; *o++ = digits[bytes[i] >> 4]; *o++ = digits[bytes[i] & 15];
        }
    }
    *o = 0;
    return out;
}

#endif
