// safetensors.h: read and write the safetensors format (github.com/huggingface/safetensors):
//   8 bytes   N, little-endian: length of the header
//   N bytes   JSON: {"__metadata__":{...}, "NAME":{"dtype":"BF16","shape":[r,c],"data_offsets":[begin,end]}, ...}, spaces at the end
//   the rest  the tensors' values, little-endian, without gaps
// A file is trusted in nothing: whatever opens has offsets, sizes and names that hold, and any value can be read.
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "formats.h"
#include "json.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors.h copies values as they lie in memory: it needs a little-endian machine"
#endif

#define SAFETENSORS_NAME 128         // bytes of a tensor's name
#define SAFETENSORS_DIMS 8
#define SAFETENSORS_HEADER_MAX (16 << 20)  // bytes; real ones are below one MiB

typedef struct { const char *name; int bytes; } SafeDtype;
static const SafeDtype SAFE_DTYPES[] = {
    {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"I16", 2}, {"U16", 2}, {"I32", 4}, {"U32", 4}, {"I64", 8}, {"U64", 8}};
enum { SAFE_F32, SAFE_BF16, SAFE_F16, SAFE_DTYPE_COUNT = (int)(sizeof SAFE_DTYPES / sizeof SAFE_DTYPES[0]) };

typedef struct {
    char name[SAFETENSORS_NAME];
    int dtype;                       // row of SAFE_DTYPES
    int dims;
    int64_t shape[SAFETENSORS_DIMS];
    int64_t count;                   // values
    int64_t begin, end;              // bytes, from the start of the data
} SafeTensor;

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    char path[PATH_TEXT];
    int fd;
    SafeTensor *tensors;             // sorted by name
    int count;
    int64_t data_start, data_bytes;
} SafeFile;

FN int safe_by_name(const void *a, const void *b) { return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name); }
FN int safe_by_begin(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

// A whole number >= 0 of the header. 0 or -1.
FN int safe_whole(const cJSON *j, int64_t *value) {
    if (!cJSON_IsNumber(j) || !(j->valuedouble >= 0 && j->valuedouble <= JSON_INTEGER_MAX) || j->valuedouble != floor(j->valuedouble)) return -1;
    *value = (int64_t)j->valuedouble;
    return 0;
}
FN int safe_parse_shape(const char *path, const cJSON *shape, SafeTensor *t, char *error, size_t size) {
    if (!cJSON_IsArray(shape)) return set_error(error, size, "%s: tensor \"%s\": \"shape\" is not a list", path, t->name);
    t->count = 1;
    for (const cJSON *j = shape->child; j; j = j->next) {
        if (t->dims == SAFETENSORS_DIMS)
            return set_error(error, size, "%s: tensor \"%s\": \"shape\" has more than %d dimensions", path, t->name, SAFETENSORS_DIMS);
        int64_t n = 0;
        if (safe_whole(j, &n) != 0)
            return set_error(error, size, "%s: tensor \"%s\": \"shape\" holds something else than whole numbers", path, t->name);
        if (__builtin_mul_overflow(t->count, n, &t->count))
            return set_error(error, size, "%s: tensor \"%s\": the product of \"shape\" overflows", path, t->name);
        t->shape[t->dims++] = n;
    }
    return 0;
}
// One entry of the header.
FN int safe_parse_tensor(const char *path, const cJSON *j, int64_t data_bytes, SafeTensor *t, char *error, size_t size) {
    if (strlen(j->string) >= SAFETENSORS_NAME)
        return set_error(error, size, "%s: tensor name \"%.64s...\" is longer than %d bytes", path, j->string, SAFETENSORS_NAME - 1);
    snprintf(t->name, sizeof t->name, "%s", j->string);
    if (!cJSON_IsObject(j)) return set_error(error, size, "%s: tensor \"%s\": an object was expected", path, t->name);
    const char *dtype = json_text(j, path, "dtype", error, size);
    if (!dtype) return set_error(error, size, "%s: tensor \"%s\": \"dtype\" is not text", path, t->name);
    while (t->dtype < SAFE_DTYPE_COUNT && strcmp(SAFE_DTYPES[t->dtype].name, dtype) != 0) t->dtype++;
    if (t->dtype == SAFE_DTYPE_COUNT)
        return set_error(error, size, "%s: tensor \"%s\": dtype \"%.32s\" is not known", path, t->name, dtype);
    if (safe_parse_shape(path, json_get(j, "shape"), t, error, size) != 0) return -1;
    const cJSON *offsets = json_get(j, "data_offsets");
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || safe_whole(offsets->child, &t->begin) != 0 || safe_whole(offsets->child->next, &t->end) != 0)
        return set_error(error, size, "%s: tensor \"%s\": \"data_offsets\" is not two whole numbers", path, t->name);
    if (t->begin > t->end || t->end > data_bytes)
        return set_error(error, size, "%s: tensor \"%s\": data_offsets [%lld, %lld] lie outside the file's %lld bytes of data",
                         path, t->name, (long long)t->begin, (long long)t->end, (long long)data_bytes);
    int64_t bytes;
    if (__builtin_mul_overflow(t->count, (int64_t)SAFE_DTYPES[t->dtype].bytes, &bytes) || bytes != t->end - t->begin)
        return set_error(error, size, "%s: tensor \"%s\": data_offsets span %lld bytes, which is not what dtype and shape make",
                         path, t->name, (long long)(t->end - t->begin));
    return 0;
}
// No name twice, no gap, no overlap: the tensors are the data.
FN int safe_check_layout(SafeFile *f, char *error, size_t size) {
    int64_t at = 0;
    qsort(f->tensors, (size_t)f->count, sizeof(SafeTensor), safe_by_begin);
    for (int i = 0; i < f->count; i++) {
        const SafeTensor *t = &f->tensors[i];
        if (t->begin != at)
            return set_error(error, size, "%s: tensor \"%s\": data_offsets begin at %lld, %s the tensor before, which ends at %lld",
                             f->path, t->name, (long long)t->begin, t->begin < at ? "within" : "behind a gap after", (long long)at);
        at = t->end;
    }
    if (at != f->data_bytes)
        return set_error(error, size, "%s: %lld bytes after the last tensor belong to none", f->path, (long long)(f->data_bytes - at));
    qsort(f->tensors, (size_t)f->count, sizeof(SafeTensor), safe_by_name);
    for (int i = 1; i < f->count; i++)
        if (strcmp(f->tensors[i - 1].name, f->tensors[i].name) == 0)
            return set_error(error, size, "%s: tensor \"%s\" is listed twice", f->path, f->tensors[i].name);
    return 0;
}
FN int safe_parse_header(SafeFile *f, const cJSON *header, char *error, size_t size) {
    f->tensors = (SafeTensor *)xcalloc((size_t)cJSON_GetArraySize(header), sizeof(SafeTensor));
    for (const cJSON *j = header->child; j; j = j->next) {
        if (strcmp(j->string, "__metadata__") == 0) continue;
        if (safe_parse_tensor(f->path, j, f->data_bytes, &f->tensors[f->count], error, size) != 0) return -1;
        f->count++;
    }
    return safe_check_layout(f, error, size);
}
FN void safetensors_close(SafeFile *f) {
    if (f->fd >= 0) close(f->fd);
    free(f->tensors);
    f->tensors = NULL; f->fd = -1; f->count = 0;
}
// Opens and checks a file. 0, or -1 with the reason (then there is nothing to close).
FN int safetensors_open(SafeFile *f, const char *path, char *error, size_t size) {
    int64_t bytes = 0;
    uint64_t length = 0;
    memset(f, 0, sizeof *f);
    snprintf(f->path, sizeof f->path, "%s", path);
    f->fd = file_open(path, &bytes, error, size);
    if (f->fd < 0) return -1;
    int rc = -1;
    if (bytes < 8)
        set_error(error, size, "%s: holds %lld bytes; a safetensors file begins with 8 bytes of header length", path, (long long)bytes);
    else if (file_read_at(f->fd, path, &length, 8, 0, error, size) != 0) rc = -1;
    else if (length > SAFETENSORS_HEADER_MAX || (int64_t)length > bytes - 8)
        set_error(error, size, "%s: byte 0: a header of %llu bytes does not fit the file of %lld bytes",
                  path, (unsigned long long)length, (long long)bytes);
    else rc = 0;
    if (rc == 0) {
        char *text = (char *)xcalloc((size_t)length + 1, 1);
        cJSON *header = NULL;
        f->data_start = 8 + (int64_t)length;
        f->data_bytes = bytes - f->data_start;
        rc = file_read_at(f->fd, path, text, (int64_t)length, 8, error, size);
        if (rc == 0) header = json_parse_object(text, (size_t)length, path, error, size);
        rc = header ? safe_parse_header(f, header, error, size) : -1;
        cJSON_Delete(header);
        free(text);
    }
    if (rc != 0) safetensors_close(f);
    return rc;
}
FN const SafeTensor *safetensors_find(const SafeFile *f, const char *name) {
    SafeTensor key;
    snprintf(key.name, sizeof key.name, "%s", name);
    return f->count == 0 ? NULL : (const SafeTensor *)bsearch(&key, f->tensors, (size_t)f->count, sizeof(SafeTensor), safe_by_name);
}
// The tensor of that name, if it is of that dtype and shape (cols 0: a vector of `rows`). NULL: the reason is in error.
FN const SafeTensor *safetensors_expect(const SafeFile *f, const char *name, int dtype, int64_t rows, int64_t cols, char *error, size_t size) {
    const SafeTensor *t = safetensors_find(f, name);
    if (!t) { set_error(error, size, "%s: tensor \"%s\" is missing", f->path, name); return NULL; }
    if (t->dtype != dtype) {
        set_error(error, size, "%s: tensor \"%s\" is %s; %s is expected",
                  f->path, name, SAFE_DTYPES[t->dtype].name, SAFE_DTYPES[dtype].name);
        return NULL;
    }
    if (t->dims != (cols ? 2 : 1) || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        set_error(error, size, "%s: tensor \"%s\" has another shape than (%lld, %lld)",
                  f->path, name, (long long)rows, (long long)(cols ? cols : 1));
        return NULL;
    }
    return t;
}
// IEEE half precision: 5 bits of exponent, 10 of mantissa. Exact in float32.
FN float f16_decode(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}
// Values first .. first+count-1 of a tensor of dtype F32, BF16 or F16 as float32. 0, or -1 with the reason.
FN int safetensors_read(const SafeFile *f, const SafeTensor *t, int64_t first, int64_t count, float *values, char *error, size_t size) {
    if (first < 0 || count < 0 || first > t->count || count > t->count - first)
        return set_error(error, size, "%s: tensor \"%s\" holds %lld values; %lld from %lld on were asked for",
                         f->path, t->name, (long long)t->count, (long long)count, (long long)first);
    const int64_t at = f->data_start + t->begin + first * SAFE_DTYPES[t->dtype].bytes;
    if (t->dtype == SAFE_F32) return file_read_at(f->fd, f->path, values, count * 4, at, error, size);
    if (t->dtype != SAFE_BF16 && t->dtype != SAFE_F16)
        return set_error(error, size, "%s: tensor \"%s\" is %s; only F32, BF16 and F16 can be read as numbers",
                         f->path, t->name, SAFE_DTYPES[t->dtype].name);
    // 16-bit values go into the second half of the buffer, then spread upward from its start: each is read before it is overwritten.
    uint16_t *half = (uint16_t *)(void *)values + count;
    if (file_read_at(f->fd, f->path, half, count * 2, at, error, size) != 0) return -1;
    for (int64_t i = 0; i < count; i++) {
        uint16_t b;
        memcpy(&b, half + i, 2);
        float v = t->dtype == SAFE_F16 ? f16_decode(b) : bf16_decode(b);
        memcpy(values + i, &v, 4);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing: all tensors are announced first, then their values follow in that order, in pieces of any size.

typedef struct {
    FileWriter file;
    const SafeTensor *tensors;       // the caller's
    int count, current;
    int64_t done;                    // values of the current tensor written so far
} SafeWriter;

// Describes a tensor of (rows, cols), or a vector of `rows` when cols is 0.
FN void safe_describe(SafeTensor *t, const char *name, int dtype, int64_t rows, int64_t cols) {
    memset(t, 0, sizeof *t);
    if (snprintf(t->name, sizeof t->name, "%s", name) >= (int)sizeof t->name)
        fatal("%s: the tensor's name is too long: this is a bug", name);
    t->dtype = dtype;
    t->dims = cols ? 2 : 1;
    t->shape[0] = rows; t->shape[1] = cols;
    t->count = rows * (cols ? cols : 1);
}
// Creates the file and writes the header. 0, or -1 with the reason in `error`, which later calls fill too. The file must be
// ended either way.
FN int safetensors_begin(SafeWriter *w, const char *path, SafeTensor *tensors, int count, char *error, size_t size) {
    cJSON *header = json_new_object(), *metadata = json_new_object();
    int64_t at = 0;
    json_add_text(metadata, "format", "pt");
    json_add(header, "__metadata__", metadata);
    for (int i = 0; i < count; i++) {
        SafeTensor *t = &tensors[i];
        cJSON *j = json_new_object(), *shape = cJSON_CreateArray(), *offsets = cJSON_CreateArray();
        t->begin = at;
        t->end = at = t->begin + t->count * SAFE_DTYPES[t->dtype].bytes;
        for (int d = 0; d < t->dims; d++) cJSON_AddItemToArray(shape, json_number((double)t->shape[d]));
        cJSON_AddItemToArray(offsets, json_number((double)t->begin));
        cJSON_AddItemToArray(offsets, json_number((double)t->end));
        json_add_text(j, "dtype", SAFE_DTYPES[t->dtype].name);
        json_add(j, "shape", shape);
        json_add(j, "data_offsets", offsets);
        json_add(header, t->name, j);
    }
    char *text = json_print(header, 0);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;  // the data starts at a multiple of 8
    w->tensors = tensors; w->count = count; w->current = 0; w->done = 0;
    writer_open(&w->file, path, error, size);
    writer_put(&w->file, &padded, 8);
    writer_put(&w->file, text, length);
    writer_put(&w->file, "        ", padded - length);
    cJSON_Delete(header);
    free(text);
    return w->file.failed ? -1 : 0;
}
// The next `count` values, all of the current tensor, as the file holds them. 0 or -1.
FN int safetensors_append_stored(SafeWriter *w, const void *values, int64_t count) {
    if (w->current == w->count || count > w->tensors[w->current].count - w->done)
        fatal("%s: more values than announced: this is a bug", w->file.path);
    const SafeTensor *t = &w->tensors[w->current];
    writer_put(&w->file, values, (size_t)count * (size_t)SAFE_DTYPES[t->dtype].bytes);
    w->done += count;
    if (w->done == t->count) { w->current++; w->done = 0; }
    return w->file.failed ? -1 : 0;
}
// The same from float32, for a tensor of dtype F32 or BF16 (nearest even). 0 or -1.
FN int safetensors_append(SafeWriter *w, const float *values, int64_t count) {
    if (w->current < w->count && w->tensors[w->current].dtype == SAFE_F32) return safetensors_append_stored(w, values, count);
    uint16_t piece[4096];
    int rc = 0;
    for (int64_t i = 0; i < count && rc == 0; i += 4096) {
        const int64_t n = count - i < 4096 ? count - i : 4096;
        for (int64_t j = 0; j < n; j++) piece[j] = bf16_encode(values[i + j]);
        rc = safetensors_append_stored(w, piece, n);
    }
    return rc;
}
// Flushes to the disk and closes. 0, or -1 if anything failed. Then file.size and file.crc are the file's.
FN int safetensors_end(SafeWriter *w) {
    int complete = w->current == w->count, failed = w->file.failed, rc = writer_close(&w->file);
    if (!complete && !failed) fatal("%s: fewer values than announced: this is a bug", w->file.path);
    return rc;
}

#endif
