// init_from.h: initial weights from a Llama checkpoint of Hugging Face's layout: a folder with config.json and model.safetensors, or
// the shards that model.safetensors.index.json lists. Tensors are F32, BF16 or F16. The folder may come from anywhere: what is not
// exactly the run's model is refused, names in the index cannot leave the folder, and no NaN or infinity becomes a weight.
#ifndef LLMC_INIT_FROM_H
#define LLMC_INIT_FROM_H

#include "checkpoint.h"

enum { HF_FILES_MAX = 512, HF_INDEX_MAX = 1 << 24, HF_TENSORS_MAX = 100000 };

typedef struct { SafeFile *files; int count; } HfWeights;

FN void hf_weights_close(HfWeights *w) {
    for (int i = 0; i < w->count; i++) safetensors_close(&w->files[i]);
    free(w->files);
    w->files = NULL; w->count = 0;
}
// A file's name within the folder: letters, digits, '-', '_' and '.', not at the start; ends in .safetensors.
FN int hf_name_is_plain(const char *name) {
    const size_t n = strlen(name), end = strlen(".safetensors");
    for (const char *p = name; *p; p++)
        if (!((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') || *p == '-' || *p == '_' || (*p == '.' && p > name))) return 0;
    return n > end && n < 256 && strcmp(name + n - end, ".safetensors") == 0;
}
// The distinct names of an index's weight_map, in order of appearance, into names (HF_FILES_MAX). They point into `index`.
// -> their number, or -1 with the reason.
FN int hf_index_files(const cJSON *index, const char *path, const char **names, char *error, size_t size) {
    const cJSON *map = json_get(index, "weight_map");
    int count = 0, tensors = 0;
    if (!cJSON_IsObject(map) || !map->child) return set_error(error, size, "%s: key \"weight_map\" is not an object of tensor and file names", path);
    for (const cJSON *j = map->child; j; j = j->next) {
        if (++tensors > HF_TENSORS_MAX) return set_error(error, size, "%s: \"weight_map\" lists more than %d tensors", path, (int)HF_TENSORS_MAX);
        if (!cJSON_IsString(j) || !hf_name_is_plain(j->valuestring))
            return set_error(error, size, "%s: \"weight_map\": the file of tensor \"%.100s\" is not the plain name of a .safetensors file", path, j->string);
        int known = 0;
        for (int i = count - 1; i >= 0 && !known; i--) known = strcmp(names[i], j->valuestring) == 0;
        if (known) continue;
        if (count == HF_FILES_MAX) return set_error(error, size, "%s: \"weight_map\" names more than %d files", path, (int)HF_FILES_MAX);
        names[count++] = j->valuestring;
    }
    return count;
}
FN const SafeTensor *hf_weights_find(const HfWeights *w, const char *name, const SafeFile **file) {
    for (int i = 0; i < w->count; i++) {
        const SafeTensor *t = safetensors_find(&w->files[i], name);
        if (t) { *file = &w->files[i]; return t; }
    }
    return NULL;
}
FN int hf_weights_add(HfWeights *w, const char *folder, const char *name, char *error, size_t size) {
    char path[PATH_TEXT];
    path_join(path, folder, name);
    if (safetensors_open(&w->files[w->count], path, error, size) != 0) return -1;
    const SafeFile *f = &w->files[w->count], *other;
    for (int i = 0; i < f->count; i++)
        if (hf_weights_find(w, f->tensors[i].name, &other)) {
            set_error(error, size, "%s: tensor \"%s\" is in %s too", path, f->tensors[i].name, other->path);
            safetensors_close(&w->files[w->count]);
            return -1;
        }
    w->count++;
    return 0;
}
// Opens the folder's weights: model.safetensors if it is there, else the index's shards. 0, or -1 with the reason; to be closed either way.
FN int hf_weights_open(HfWeights *w, const char *folder, char *error, size_t size) {
    char path[PATH_TEXT];
    const char *names[HF_FILES_MAX];
    w->count = 0;
    w->files = (SafeFile *)xcalloc(HF_FILES_MAX, sizeof(SafeFile));
    path_join(path, folder, "model.safetensors");
    if (access(path, F_OK) == 0) return hf_weights_add(w, folder, "model.safetensors", error, size);
    path_join(path, folder, "model.safetensors.index.json");
    if (access(path, F_OK) != 0)
        return set_error(error, size, "%s: holds neither model.safetensors nor model.safetensors.index.json; pickled weights (.bin, .pt) are not read", folder);
    cJSON *index = json_read_object(path, HF_INDEX_MAX, error, size);
    const int files = index ? hf_index_files(index, path, names, error, size) : -1;
    int rc = files < 0 ? -1 : 0;
    for (int i = 0; i < files && rc == 0; i++) rc = hf_weights_add(w, folder, names[i], error, size);
    cJSON_Delete(index);
    return rc;
}

// ---------------------------------------------------------------------------------------------------------------------

// The folder's shape must be the run's; only the sequence length may differ.
FN void init_check_shape(const char *folder, const RunConfig *c) {
    char path[PATH_TEXT], error[ERROR_TEXT];
    LlamaConfig there;
    memset(&there, 0, sizeof there);
    path_join(path, folder, "config.json");
    if (model_file_read(path, &there, error, sizeof error) != 0) fatal("--init-from: %s", error);
    cJSON *theirs = model_to_json(&there), *ours = model_to_json(&c->llama);
    for (const cJSON *a = theirs->child, *b = ours->child; a && b; a = a->next, b = b->next) {  // the same keys in the same order
        char *was = json_print(a, 0), *is = json_print(b, 0);
        if (strcmp(a->string, "seq") != 0 && strcmp(was, is) != 0)
            fatal("--init-from %s: %s is %s there and %s in this run; use --model %s%s", folder, a->string, was, is, path,
                  strcmp(a->string, "vocab") == 0 ? " (a vocabulary must be a multiple of 128 and hold the data's tokens)" : "");
        free(was);
        free(is);
    }
    cJSON_Delete(theirs);
    cJSON_Delete(ours);
}

typedef struct { TensorPass pass; HfWeights weights; int rounded; } InitPass;

FN int init_tensor(void *context, const Param *p, const HfPart *part, const char *name) {
    InitPass *x = (InitPass *)context;
    const int64_t rows = part->is_vector ? part->cols : part->rows, cols = part->is_vector ? 0 : part->cols, count = part->rows * part->cols;
    float *values = x->pass.values + part->row * part->cols;
    const SafeFile *f = NULL;
    const SafeTensor *t = hf_weights_find(&x->weights, name, &f);
    if (!t) return set_error(x->pass.error, x->pass.error_size, "tensor \"%s\" is in none of its files", name);
    if (t->dtype != SAFE_F16 && t->dtype != SAFE_BF16 && t->dtype != SAFE_F32)
        return set_error(x->pass.error, x->pass.error_size, "%s: tensor \"%s\" is %s; F32, BF16 or F16 is expected", f->path, name, SAFE_DTYPES[t->dtype].name);
    if (!safetensors_expect(f, name, t->dtype, rows, cols, x->pass.error, x->pass.error_size) ||
        safetensors_read(f, t, 0, count, values, x->pass.error, x->pass.error_size) != 0) return -1;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(values[i]))
            return set_error(x->pass.error, x->pass.error_size, "%s: tensor \"%s\": value %lld is %g; weights must be finite", f->path, name, (long long)i, (double)values[i]);
        if (x->pass.dtype == SAFE_F32) continue;
        const float stored = bf16_round(values[i]);
        if (!isfinite(stored))
            return set_error(x->pass.error, x->pass.error_size, "%s: tensor \"%s\": value %lld is %g, beyond BF16; use --master-weights fp32", f->path, name, (long long)i, (double)values[i]);
        x->rounded |= stored != values[i];
        values[i] = stored;
    }
    if (part->row + part->rows == p->rows) llama_write(x->pass.m, LLAMA_PARAMS, p, x->pass.values);
    x->pass.count++;
    return 0;
}
// Tensors that a file may hold beyond the model's: the tied head written out, and rotary tables of old checkpoints.
FN int init_may_ignore(const LlamaConfig *c, const char *name) {
    return (c->tied && strcmp(name, "lm_head.weight") == 0) || strstr(name, ".rotary_emb.inv_freq") != NULL;
}
// The parameters of the model (any initial values before) become the folder's. What does not fit is fatal, in one line.
FN void init_from(const char *folder, Llama *m, const RunConfig *c) {
    char error[ERROR_TEXT];
    const ParamTable *t = llama_params(m);
    InitPass x;
    memset(&x, 0, sizeof x);
    init_check_shape(folder, c);
    if (hf_weights_open(&x.weights, folder, error, sizeof error) != 0) fatal("--init-from: %s", error);
    x.pass.m = m; x.pass.dtype = checkpoint_model_dtype(c); x.pass.error = error; x.pass.error_size = sizeof error;
    x.pass.values = checkpoint_buffer(t);
    if (checkpoint_each_tensor(&c->llama, t, "", init_tensor, &x) != 0) fatal("--init-from %s: %s", folder, error);
    int extra = -x.pass.count;
    const char *stranger = NULL;
    for (int i = 0; i < x.weights.count; i++)
        for (int k = 0; k < x.weights.files[i].count; k++) {
            const char *name = x.weights.files[i].tensors[k].name;
            if (init_may_ignore(&c->llama, name)) continue;
            extra++;
            if (strstr(name, ".bias")) stranger = name;
        }
    if (extra != 0)
        fatal("--init-from %s: its files hold %d tensors that this model has not%s%s; it is another model", folder, extra, stranger ? ", one is " : "", stranger ? stranger : "");
    printf("initial weights from %s: %d tensors%s\n", folder, x.pass.count, x.rounded ? ", rounded to BF16" : "");
    hf_weights_close(&x.weights);
    free(x.pass.values);
}

#endif
