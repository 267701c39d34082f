// meta.h: what data/prepare.py wrote beside the shards: meta.json (vocabulary, bytes a token) and tokenizer.bin.
#ifndef LLMC_META_H
#define LLMC_META_H

#include "json.h"

typedef struct {
    char folder[4096];             // where the shards lie
    int found;                     // 0: no meta.json there, the rest is unknown
    int64_t vocab, eot_token;
    double val_bytes_per_token;    // 0: not known
} DataMeta;

// The folder part of a file name pattern ("." when it has none).
FN void meta_folder(const char *pattern, char *folder, size_t size) {
    const char *slash = strrchr(pattern, '/');
    int length = slash ? (int)(slash - pattern) : 1;
    if ((size_t)snprintf(folder, size, "%.*s", length, slash ? pattern : ".") >= size) fatal("%s: the path is too long", pattern);
}

// Reads meta.json beside the shards of `pattern`. Shards of other programs come without one: then found is 0. One that is
// there but wrong is fatal.
FN DataMeta meta_read(const char *pattern) {
    DataMeta meta;
    memset(&meta, 0, sizeof meta);
    meta_folder(pattern, meta.folder, sizeof meta.folder);
    char *path = xasprintf("%s/meta.json", meta.folder), error[1024];
    if (access(path, F_OK) != 0 && errno == ENOENT) { free(path); return meta; }
    cJSON *j = json_read_object(path, 1 << 20, error, sizeof error);
    if (!j || json_integer(j, path, "vocab_size", 1, 1 << 30, &meta.vocab, error, sizeof error) != 0 ||
        json_integer(j, path, "eot_token", 0, meta.vocab - 1, &meta.eot_token, error, sizeof error) != 0 ||
        json_real(j, path, "val_bytes_per_token", 0, 1e6, &meta.val_bytes_per_token, error, sizeof error) != 0)
        fatal("%s; make the data again with data/prepare.py", error);
    meta.found = 1;
    cJSON_Delete(j);
    free(path);
    return meta;
}

#endif
