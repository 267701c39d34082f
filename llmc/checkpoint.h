// checkpoint.h: atomic, verified, resumable checkpoints. OUT/step_00001000/ holds
//   model.safetensors      Hugging Face's names and shapes; BF16, or F32 under --master-weights fp32
//   config.json            with it, Hugging Face's LlamaForCausalLM loads the folder as it is
//   optimizer.safetensors  F32, exp_avg.NAME and exp_avg_sq.NAME for each NAME of the model
//   trainer.json           step, next sample, options, data, size and CRC-32C of each other file, and at its end its own CRC-32C
// It is written as OUT/.tmp-step_00001000, flushed to the disk, and renamed: a folder of the right name is complete, and
// checksums tell whether it still is. Older ones go only after a newer one stands.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "config.h"
#include "outlier.h"
#include "safetensors.h"

typedef struct {
    int64_t step;                    // optimizer steps done
    int64_t next_sample;             // global index of the first sample not yet trained on
    uint64_t data_fingerprint;       // of the training data
    double val_loss;                 // last evaluation, NaN: none
    OutlierWindow window;            // what --outlier-z compares the next steps with
} CheckpointState;

#define CHECKPOINT_NAME "step_%08lld"
static const char *const CHECKPOINT_FILES[] = {"model.safetensors", "config.json", "optimizer.safetensors"};
enum { CHECKPOINT_FILE_COUNT = 3 };

// ---------------------------------------------------------------------------------------------------------------------
// Tensors: a state of the model as runs of Hugging Face tensors

static const struct { enum LlamaState state; const char *prefix; } CHECKPOINT_MODEL[] = {{LLAMA_PARAMS, ""}},
    CHECKPOINT_OPTIMIZER[] = {{LLAMA_ADAM_M, "exp_avg."}, {LLAMA_ADAM_V, "exp_avg_sq."}};

// Calls visit for each tensor of one state in the order of the file. part->row etc. say which rows of p it is.
typedef int TensorVisitor(void *context, const Param *p, const HfPart *part, const char *name);
FN int checkpoint_each_tensor(const LlamaConfig *c, const ParamTable *t, const char *prefix, TensorVisitor *visit, void *context) {
    for (int i = 0; i < t->count; i++) {
        HfPart parts[3];
        int n = llama_hf_parts(c, &t->params[i], parts);
        for (int j = 0; j < n; j++) {
            char name[SAFETENSORS_NAME];
            if (snprintf(name, sizeof name, "%s%s", prefix, parts[j].name) >= (int)sizeof name)
                fatal("%s: the tensor's name is too long: this is a bug", parts[j].name);
            if (visit(context, &t->params[i], &parts[j], name) != 0) return -1;
        }
    }
    return 0;
}
FN float *checkpoint_buffer(const ParamTable *t) {
    int64_t most = 0;
    for (int i = 0; i < t->count; i++) most = t->params[i].count > most ? t->params[i].count : most;
    return (float *)xcalloc((size_t)most, sizeof(float));
}

typedef struct {
    Llama *m;
    enum LlamaState state;
    int dtype;
    SafeTensor *tensors; int count;
    const SafeFile *file;
    float *values;                   // of the whole parameter that the tensor is a part of
    char *error; size_t error_size;
} TensorPass;

FN int tensor_describe(void *context, const Param *p, const HfPart *part, const char *name) {
    TensorPass *x = (TensorPass *)context;
    (void)p;
    if (part->is_vector) safe_describe(&x->tensors[x->count++], name, x->dtype, part->cols, 0);
    else safe_describe(&x->tensors[x->count++], name, x->dtype, part->rows, part->cols);
    return 0;
}
FN int tensor_load(void *context, const Param *p, const HfPart *part, const char *name) {
    TensorPass *x = (TensorPass *)context;
    const int64_t rows = part->is_vector ? part->cols : part->rows, cols = part->is_vector ? 0 : part->cols;
    const SafeTensor *t = safetensors_expect(x->file, name, x->dtype, rows, cols, x->error, x->error_size);
    if (!t || safetensors_read(x->file, t, 0, t->count, x->values + part->row * part->cols, x->error, x->error_size) != 0) return -1;
    if (part->row + part->rows == p->rows) llama_write(x->m, x->state, p, x->values);
    x->count++;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Saving

// What a checkpoint is written from: the model's states copied to host memory, so that training can go on meanwhile.
enum { CHECKPOINT_STATES = 3 };
static const enum LlamaState CHECKPOINT_STATE[CHECKPOINT_STATES] = {LLAMA_PARAMS, LLAMA_ADAM_M, LLAMA_ADAM_V};

typedef struct {
    RunConfig config;
    CheckpointState state;
    const ParamTable *params;        // the model's: a copy must not outlive it
    void *values[CHECKPOINT_STATES]; // as they will lie in the file: its dtype, its order, no padding; NULL before the first copy
} CheckpointCopy;

FN int checkpoint_model_dtype(const RunConfig *c) { return c->master_fp32 ? SAFE_F32 : SAFE_BF16; }

// One state of the model into `to`. Hugging Face's tensors are runs of rows of ours in order, so the file's values are ours
// without padding.
FN void checkpoint_copy_state(Llama *m, enum LlamaState state, int dtype, void *to, float *buffer) {
    const ParamTable *t = llama_params(m);
    int64_t at = 0;
    for (int i = 0; i < t->count; at += t->params[i++].count) {
        const Param *p = &t->params[i];
        if (dtype == SAFE_F32) { llama_read(m, state, p, (float *)to + at); continue; }
        llama_read(m, state, p, buffer);
        for (int64_t j = 0; j < p->count; j++) {
            const uint16_t stored = bf16_encode(buffer[j]);
            if (bf16_decode(stored) != buffer[j] && buffer[j] == buffer[j])
                fatal("%s: value %lld is %.9g, which BF16 cannot hold: this is a bug, resuming would not be exact",
                      p->name, (long long)j, (double)buffer[j]);
            ((uint16_t *)to)[at + j] = stored;
        }
    }
}
FN int checkpoint_state_dtype(const RunConfig *c, int state) { return state == 0 ? checkpoint_model_dtype(c) : SAFE_F32; }

// Takes the memory for copies, 10 bytes a parameter (12 with float32 masters), all of it at once, so that a machine that lacks
// it says so at the start and not at the first save. checkpoint_copy_free() returns it.
FN void checkpoint_copy_reserve(CheckpointCopy *k, const ParamTable *params, const RunConfig *c) {
    for (int i = 0; i < CHECKPOINT_STATES; i++)
        if (!k->values[i]) k->values[i] = xcalloc((size_t)llama_param_count(params), (size_t)SAFE_DTYPES[checkpoint_state_dtype(c, i)].bytes);
}
// Copies what a checkpoint needs.
FN void checkpoint_copy(CheckpointCopy *k, Llama *m, const RunConfig *c, const CheckpointState *s) {
    float *buffer = checkpoint_buffer(llama_params(m));
    k->config = *c; k->state = *s; k->params = llama_params(m);
    checkpoint_copy_reserve(k, k->params, c);
    for (int i = 0; i < CHECKPOINT_STATES; i++)
        checkpoint_copy_state(m, CHECKPOINT_STATE[i], checkpoint_state_dtype(c, i), k->values[i], buffer);
    free(buffer);
}
// What another rank than the first does meanwhile, when the optimizer state is spread over all: it gives its part.
FN void checkpoint_copy_serve(Llama *m) {
    const ParamTable *t = llama_params(m);
    for (int s = 1; s < CHECKPOINT_STATES; s++)
        for (int i = 0; i < t->count; i++) llama_read(m, CHECKPOINT_STATE[s], &t->params[i], NULL);
}
FN void checkpoint_copy_free(CheckpointCopy *k) {
    for (int i = 0; i < CHECKPOINT_STATES; i++) free(k->values[i]);
    memset(k, 0, sizeof *k);
}

typedef struct { int64_t bytes; uint32_t crc; } FileSum;

// The states as one safetensors file. 0, or -1 with the reason.
FN int checkpoint_write_tensors(const char *path, const CheckpointCopy *k, int optimizer, FileSum *sum, char *error, size_t size) {
    const int states = optimizer ? 2 : 1;
    SafeWriter w;
    TensorPass x;
    memset(&x, 0, sizeof x);
    x.dtype = optimizer ? SAFE_F32 : checkpoint_model_dtype(&k->config);
    x.tensors = (SafeTensor *)xcalloc((size_t)k->params->count * 3 * (size_t)states, sizeof(SafeTensor));
    for (int i = 0; i < states; i++)
        (void)checkpoint_each_tensor(&k->config.llama, k->params, optimizer ? CHECKPOINT_OPTIMIZER[i].prefix : CHECKPOINT_MODEL[i].prefix, tensor_describe, &x);
    int rc = safetensors_begin(&w, path, x.tensors, x.count, error, size);
    for (int i = 0; i < x.count && rc == 0; i++) {
        const int state = optimizer ? 1 + i / (x.count / 2) : 0, first = optimizer ? (state - 1) * (x.count / 2) : 0;
        rc = safetensors_append_stored(&w, (const char *)k->values[state] + x.tensors[i].begin - x.tensors[first].begin, x.tensors[i].count);
    }
    if (safetensors_end(&w) != 0) rc = -1;
    sum->bytes = w.file.size; sum->crc = w.file.crc;
    free(x.tensors);
    return rc;
}
FN int checkpoint_write_text(const char *path, const char *text, FileSum *sum, char *error, size_t size) {
    FileWriter w;
    writer_open(&w, path, error, size);
    writer_put(&w, text, strlen(text));
    int rc = writer_close(&w);
    sum->bytes = w.size; sum->crc = w.crc;
    return rc;
}
// What transformers' LlamaConfig reads. The tokenizer's special tokens are not known here: null, not a wrong default.
FN char *checkpoint_hf_config(const LlamaConfig *m, int master_fp32) {
    cJSON *j = json_new_object(), *list = cJSON_CreateArray();
    cJSON_AddItemToArray(list, cJSON_CreateString("LlamaForCausalLM"));
    json_add(j, "architectures", list);
    json_add_text(j, "model_type", "llama");
    json_add_number(j, "hidden_size", m->width);
    json_add_number(j, "intermediate_size", m->ffn);
    json_add_number(j, "num_hidden_layers", m->layers);
    json_add_number(j, "num_attention_heads", m->heads);
    json_add_number(j, "num_key_value_heads", m->kv_heads);
    json_add_number(j, "head_dim", llama_head_dim(m));
    json_add_text(j, "hidden_act", "silu");
    json_add_float(j, "rms_norm_eps", m->norm_eps);
    json_add_float(j, "rope_theta", m->rope_theta);
    json_add(j, "rope_scaling", cJSON_CreateNull());
    json_add_number(j, "vocab_size", m->vocab);
    json_add_number(j, "max_position_embeddings", m->seq);
    json_add_bool(j, "tie_word_embeddings", m->tied);
    json_add_bool(j, "attention_bias", 0);
    json_add_bool(j, "mlp_bias", 0);
    json_add_number(j, "initializer_range", 0.02);
    json_add_text(j, "torch_dtype", master_fp32 ? "float32" : "bfloat16");
    json_add(j, "bos_token_id", cJSON_CreateNull());
    json_add(j, "eos_token_id", cJSON_CreateNull());
    json_add(j, "pad_token_id", cJSON_CreateNull());
    char *text = json_print(j, 1);
    cJSON_Delete(j);
    return text;
}
// trainer.json: the object's text without its last brace, then its checksum in a form of fixed length.
#define TRAINER_END ",\n\"crc32c\":\"%08x\"}\n"
enum { TRAINER_END_LENGTH = 2 + 8 + 1 + 10 + 2 };
FN char *checkpoint_trainer_text(const RunConfig *c, const CheckpointState *s, const FileSum *sums) {
    cJSON *j = json_new_object(), *files = json_new_object();
    char hex[32];
    json_add_number(j, "format", 1);
    json_add_number(j, "step", (double)s->step);
    json_add_number(j, "next_sample", (double)s->next_sample);
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)s->data_fingerprint);
    json_add_text(j, "data_fingerprint", hex);
    json_add_number(j, "val_loss", s->val_loss);  // NaN: null
    json_add(j, "outliers", outlier_to_json(&s->window));
    json_add(j, "options", config_to_json(c));
    json_add(j, "model", config_model_to_json(&c->llama));
    for (int i = 0; i < CHECKPOINT_FILE_COUNT; i++) {
        cJSON *f = json_new_object();
        json_add_number(f, "bytes", (double)sums[i].bytes);
        snprintf(hex, sizeof hex, "%08x", sums[i].crc);
        json_add_text(f, "crc32c", hex);
        json_add(files, CHECKPOINT_FILES[i], f);
    }
    json_add(j, "files", files);
    char *body = json_print(j, 1);
    size_t length = strlen(body);
    while (length && body[length - 1] != '}') length--;
    body[--length] = '\0';
    while (length && body[length - 1] == '\n') body[--length] = '\0';
    char *text = xasprintf("%s" TRAINER_END, body, crc32c(0, body, length));
    free(body);
    cJSON_Delete(j);
    return text;
}
// Fills the folder. 0, or -1 with the reason.
FN int checkpoint_write_folder(const char *folder, const CheckpointCopy *k, char *error, size_t size) {
    char path[PATH_TEXT], *text;
    FileSum sums[CHECKPOINT_FILE_COUNT], own;
    path_join(path, folder, CHECKPOINT_FILES[0]);
    if (checkpoint_write_tensors(path, k, 0, &sums[0], error, size) != 0) return -1;
    path_join(path, folder, CHECKPOINT_FILES[1]);
    text = checkpoint_hf_config(&k->config.llama, (int)k->config.master_fp32);
    int rc = checkpoint_write_text(path, text, &sums[1], error, size);
    free(text);
    path_join(path, folder, CHECKPOINT_FILES[2]);
    if (rc != 0 || checkpoint_write_tensors(path, k, 1, &sums[2], error, size) != 0) return -1;
    path_join(path, folder, "trainer.json");
    text = checkpoint_trainer_text(&k->config, &k->state, sums);
    rc = checkpoint_write_text(path, text, &own, error, size);
    free(text);
    return rc == 0 ? folder_sync(folder, error, size) : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which there are

typedef struct { int64_t *steps; int count; } CheckpointList;  // newest first

FN int steps_descending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}
// The steps of the folders OUT/step_XXXXXXXX, good or not. An OUT that is not there has none.
FN CheckpointList checkpoint_list(const char *out) {
    CheckpointList list;
    int room = 0;
    DIR *d = opendir(out);
    list.steps = NULL; list.count = 0;
    if (!d && errno != ENOENT) fatal("%s: cannot open the folder: %s; use another --out", out, strerror(errno));
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char name[64];
        long long step = -1;
        if (sscanf(e->d_name, "step_%15lld", &step) != 1 || step < 0) continue;
        snprintf(name, sizeof name, CHECKPOINT_NAME, step);
        if (strcmp(name, e->d_name) != 0) continue;
        if (list.count == room) {
            room = room ? 2 * room : 16;
            int64_t *more = (int64_t *)xcalloc((size_t)room, sizeof(int64_t));
            if (list.count) memcpy(more, list.steps, (size_t)list.count * sizeof(int64_t));
            free(list.steps);
            list.steps = more;
        }
        list.steps[list.count++] = step;
    }
    if (d) closedir(d);
    if (list.count) qsort(list.steps, (size_t)list.count, sizeof(int64_t), steps_descending);
    return list;
}
FN void checkpoint_path(char *path, const char *out, const char *prefix, int64_t step) {
    char name[64];
    snprintf(name, sizeof name, "%s" CHECKPOINT_NAME, prefix, (long long)step);
    path_join(path, out, name);
}
// Removes all but the newest `keep` of the checkpoints up to `step`, and those of every `keep_every`-th step (0: none). Those of
// later steps, left by a run that went back, are not touched.
FN void checkpoint_prune(const char *out, int64_t step, int64_t keep, int64_t keep_every) {
    CheckpointList list = checkpoint_list(out);
    int64_t kept = 0;
    for (int i = 0; i < list.count; i++) {
        char path[PATH_TEXT], error[ERROR_TEXT];
        if (list.steps[i] > step || kept++ < keep || (keep_every > 0 && list.steps[i] % keep_every == 0)) continue;
        checkpoint_path(path, out, "", list.steps[i]);
        if (folder_remove(path, error, sizeof error) != 0) warn("%s; this old checkpoint stays", error);
    }
    free(list.steps);
}
// The folder `part`, complete, takes its name. One of that name, broken or of a run that went back, makes room only now.
FN int checkpoint_publish(const char *out, const char *part, const char *path, const char *old, char *error, size_t size) {
    char ignored[ERROR_TEXT];
    const int replaces = rename(path, old) == 0;
    if (!replaces && errno != ENOENT) return set_error(error, size, "%s: cannot rename to %s: %s", path, old, strerror(errno));
    if (rename(part, path) != 0) {
        set_error(error, size, "%s: cannot rename to %s: %s", part, path, strerror(errno));
        if (replaces) (void)rename(old, path);
        return -1;
    }
    if (folder_sync(out, error, size) != 0) return -1;
    if (replaces && folder_remove(old, ignored, sizeof ignored) != 0) warn("%s", ignored);
    return 0;
}
// Writes OUT/step_XXXXXXXX of the copy, then removes those beyond --keep. 0, or -1 with the reason in one line, the checkpoints
// before it untouched. May run in another thread than the one that trains.
FN int checkpoint_write(const char *out, const CheckpointCopy *k, char *error, size_t size) {
    char part[PATH_TEXT], path[PATH_TEXT], old[PATH_TEXT], why[ERROR_TEXT] = "", ignored[ERROR_TEXT];
    struct stat st;
    checkpoint_path(part, out, ".tmp-", k->state.step);
    checkpoint_path(path, out, "", k->state.step);
    checkpoint_path(old, out, ".old-", k->state.step);
    if ((lstat(part, &st) == 0 && folder_remove(part, why, sizeof why) != 0) || (lstat(old, &st) == 0 && folder_remove(old, why, sizeof why) != 0))
        return set_error(error, size, "%s; remove it by hand", why);
    if (folder_create(part, why, sizeof why) != 0) return set_error(error, size, "%s; use another --out", why);
    if (checkpoint_write_folder(part, k, why, sizeof why) != 0 || checkpoint_publish(out, part, path, old, why, sizeof why) != 0) {
        (void)folder_remove(part, ignored, sizeof ignored);  // the first error is the one to tell
        return set_error(error, size, "%s; no checkpoint was written for step %lld, those before it are untouched", why, (long long)k->state.step);
    }
    checkpoint_prune(out, k->state.step, k->config.keep, k->config.keep_every);
    return 0;
}
// The same at once, of the model as it is now. Whatever fails is fatal.
FN void checkpoint_save(const char *out, Llama *m, const RunConfig *c, const CheckpointState *s) {
    char error[ERROR_TEXT];
    CheckpointCopy k;
    memset(&k, 0, sizeof k);
    checkpoint_copy(&k, m, c, s);
    if (checkpoint_write(out, &k, error, sizeof error) != 0) fatal("%s", error);
    checkpoint_copy_free(&k);
}
// What a run that died in the middle of a save left in OUT: half-written folders go, and one that had made room for a newer one
// that did not come takes its name again. Only the holder of OUT's lock may call it.
FN void checkpoint_tidy(const char *out) {
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char from[PATH_TEXT], path[PATH_TEXT], error[ERROR_TEXT];
        long long step = -1;
        const int part = sscanf(e->d_name, ".tmp-step_%15lld", &step) == 1, old = !part && sscanf(e->d_name, ".old-step_%15lld", &step) == 1;
        if ((!part && !old) || step < 0) continue;
        checkpoint_path(from, out, part ? ".tmp-" : ".old-", step);
        checkpoint_path(path, out, "", step);
        if (strcmp(strrchr(from, '/') + 1, e->d_name) != 0) continue;
        if (old && access(path, F_OK) != 0 && rename(from, path) == 0) continue;
        if (folder_remove(from, error, sizeof error) != 0) warn("%s; it was left by a run that died while saving", error);
    }
    if (d) closedir(d);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checking

// trainer.json, its own checksum tested. NULL: the reason is in error. The caller deletes it.
FN cJSON *checkpoint_read_trainer(const char *folder, char *error, size_t size) {
    char path[PATH_TEXT], end[TRAINER_END_LENGTH + 1];
    int64_t length = 0;
    path_join(path, folder, "trainer.json");
    char *text = file_read_text(path, 1 << 20, &length, error, size);
    if (!text) return NULL;
    cJSON *j = NULL;
    int64_t body = length - TRAINER_END_LENGTH;
    if (body > 0) snprintf(end, sizeof end, TRAINER_END, crc32c(0, text, (size_t)body));
    if (body <= 0 || memcmp(text + body, end, TRAINER_END_LENGTH) != 0)
        set_error(error, size, "%s: does not end with its checksum: it was cut or changed", path);
    else j = json_parse_object(text, (size_t)length, path, error, size);
    free(text);
    return j;
}
FN int checkpoint_read_state(const char *where, const cJSON *j, CheckpointState *s, char *error, size_t size) {
    int64_t format = 0;
    if (json_integer(j, where, "format", 1, 1000, &format, error, size) != 0) return -1;
    if (format != 1)
        return set_error(error, size, "%s: format %lld was written by a newer program; this one reads format 1", where, (long long)format);
    if (json_integer(j, where, "step", 1, (int64_t)MANY, &s->step, error, size) != 0) return -1;
    if (json_integer(j, where, "next_sample", 0, (int64_t)JSON_INTEGER_MAX, &s->next_sample, error, size) != 0) return -1;
    const char *hex = json_text(j, where, "data_fingerprint", error, size);
    if (!hex) return -1;
    s->data_fingerprint = strtoull(hex, NULL, 16);
    const cJSON *loss = json_get(j, "val_loss");
    s->val_loss = loss && cJSON_IsNumber(loss) ? loss->valuedouble : NAN;
    return outlier_from_json(json_get(j, "outliers"), where, &s->window, error, size);
}
// Whether the folder is a whole, unchanged checkpoint: every file's size and checksum. 0, or -1 with the reason.
FN int checkpoint_verify(const char *folder, CheckpointState *s, char *error, size_t size) {
    cJSON *j = checkpoint_read_trainer(folder, error, size);
    if (!j) return -1;
    int rc = checkpoint_read_state(folder, j, s, error, size);
    for (int i = 0; i < CHECKPOINT_FILE_COUNT && rc == 0; i++) {
        char path[PATH_TEXT];
        int64_t bytes = 0;
        uint32_t crc = 0;
        const char *said = NULL;
        const cJSON *f = json_get(json_get(j, "files"), CHECKPOINT_FILES[i]);
        path_join(path, folder, CHECKPOINT_FILES[i]);
        if (json_integer(f, path, "bytes", 0, (int64_t)JSON_INTEGER_MAX, &bytes, error, size) != 0 || !(said = json_text(f, path, "crc32c", error, size)) ||
            file_checksum(path, bytes, &crc, error, size) != 0) rc = -1;
        else if (crc != strtoull(said, NULL, 16)) rc = set_error(error, size, "%s: its checksum is %08x, not the %s that was written", path, crc, said);
    }
    cJSON_Delete(j);
    return rc;
}
// --resume auto: the newest good checkpoint of OUT.
FN int checkpoint_find_newest(const char *out, char *path, size_t size) {
    CheckpointList list = checkpoint_list(out);
    int found = 0;
    for (int i = 0; i < list.count && !found; i++) {
        char folder[PATH_TEXT], error[ERROR_TEXT];
        CheckpointState s;
        checkpoint_path(folder, out, "", list.steps[i]);
        if (checkpoint_verify(folder, &s, error, sizeof error) != 0) warn("%s; passing over this checkpoint", error);
        else if (s.step != list.steps[i]) warn("%s: is of step %lld; passing over this checkpoint", folder, (long long)s.step);
        else found = snprintf(path, size, "%s", folder) < (int)size;
    }
    if (list.count && !found) warn("%s: none of the %d checkpoints is good; starting from step 0", out, list.count);
    free(list.steps);
    return found;
}
// Where to go on. "auto": the newest good checkpoint of OUT (stderr says why others were passed over), 0 if there is none.
// "none": 0; an OUT that holds checkpoints is refused, for the two runs would mix. Else a checkpoint's folder: one that is
// missing or not good is fatal. Returns 1 with its path.
FN int checkpoint_find(const char *resume, const char *out, char *path, size_t size) {
    char error[ERROR_TEXT];
    CheckpointState s;
    if (strcmp(resume, "auto") == 0) return checkpoint_find_newest(out, path, size);
    CheckpointList list = checkpoint_list(out);
    if (strcmp(resume, "none") == 0) {
        if (list.count)
            fatal("%s: holds checkpoints of an earlier run (the newest: " CHECKPOINT_NAME "); go on with it by --resume auto, or use another --out",
                  out, (long long)list.steps[0]);
        return 0;
    }
    if (snprintf(path, size, "%s", resume) >= (int)size) fatal("--resume %s: the path is too long", resume);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = '\0';
    if (checkpoint_verify(path, &s, error, sizeof error) != 0) fatal("--resume %s: not a good checkpoint: %s", resume, error);
    if (list.count && list.steps[0] > s.step)
        warn("%s: holds checkpoints after step %lld, which --resume auto would take until this run replaces them", out, (long long)s.step);
    free(list.steps);
    return 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading

// Options that differ from the checkpoint's. Some make it another run and are refused; of others the run says that they
// changed; the rest (intervals, file names) do not matter.
FN void checkpoint_compare(const char *path, const cJSON *then, const cJSON *now, const char *const *names, int count, int refuse) {
    for (int i = 0; i < count; i++) {
        const cJSON *a = json_get(then, names[i]), *b = json_get(now, names[i]);
        if (!a || !b || cJSON_Compare(a, b, 1)) continue;
        char *was = json_print(a, 0), *is = json_print(b, 0);
        if (refuse) fatal("--resume %s: %s was %s there and is %s here; it cannot change within a run", path, names[i], was, is);
        warn("--resume %s: --%s was %s there and is %s here; the run goes on with the new value", path, names[i], was, is);
        free(was);
        free(is);
    }
}
// The object as it would be read back from a file, so that it compares with one that was.
FN cJSON *json_reread(cJSON *j) {
    char error[ERROR_TEXT], *text = json_print(j, 0);
    cJSON *again = json_parse_object(text, strlen(text), "options", error, sizeof error);
    if (!again) fatal("%s", error);
    cJSON_Delete(j);
    free(text);
    return again;
}
FN void checkpoint_compare_run(const char *path, const cJSON *trainer, const RunConfig *c, const CheckpointState *then, uint64_t fingerprint) {
    static const char *const shape[] = {"layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq", "tied", "norm_eps", "rope_theta"};
    static const char *const fixed[] = {"seed", "total-batch", "master-weights"};
    static const char *const free_[] = {"recipe", "bf16-layers", "batch", "steps", "lr", "warmup", "schedule", "min-lr", "weight-decay", "beta1", "beta2", "adam-eps", "clip", "on-nan", "outlier-z",
                                        "attention", "grad-dtype", "reduce-dtype", "nvfp4-gemm"};
    cJSON *options = json_reread(config_to_json(c)), *model = json_reread(config_model_to_json(&c->llama));
    const cJSON *was = json_get(trainer, "options");
    checkpoint_compare(path, json_get(trainer, "model"), model, shape, (int)(sizeof shape / sizeof shape[0]), 1);
    checkpoint_compare(path, was, options, fixed, (int)(sizeof fixed / sizeof fixed[0]), 1);
    if (then->data_fingerprint != fingerprint)
        fatal("--resume %s: the training data is not what the run was begun with (fingerprint %016llx there, %016llx here); give the same --train-data",
              path, (unsigned long long)then->data_fingerprint, (unsigned long long)fingerprint);
    if (then->step > c->steps)
        fatal("--resume %s: it is after step %lld, but the run is of %lld steps; raise --steps",
              path, (long long)then->step, (long long)c->steps);
    checkpoint_compare(path, was, options, free_, (int)(sizeof free_ / sizeof free_[0]), 0);
    cJSON_Delete(options);
    cJSON_Delete(model);
}
// One safetensors file into the model's states; names, shapes and dtypes must be exactly the model's.
FN int checkpoint_read_tensors(const char *path, Llama *m, const LlamaConfig *c, int optimizer, int dtype, char *error, size_t size) {
    const ParamTable *t = llama_params(m);
    SafeFile f;
    TensorPass x;
    if (safetensors_open(&f, path, error, size) != 0) return -1;
    memset(&x, 0, sizeof x);
    x.m = m; x.dtype = dtype; x.file = &f; x.error = error; x.error_size = size;
    x.values = checkpoint_buffer(t);
    int rc = 0;
    for (int i = 0; i < (optimizer ? 2 : 1) && rc == 0; i++) {
        x.state = optimizer ? CHECKPOINT_OPTIMIZER[i].state : CHECKPOINT_MODEL[i].state;
        rc = checkpoint_each_tensor(c, t, optimizer ? CHECKPOINT_OPTIMIZER[i].prefix : CHECKPOINT_MODEL[i].prefix, tensor_load, &x);
    }
    if (rc == 0 && x.count != f.count) rc = set_error(error, size, "%s: holds %d tensors, the model has %d", path, f.count, x.count);
    safetensors_close(&f);
    free(x.values);
    return rc;
}
// Reads the checkpoint that checkpoint_find() gave into the model. s->data_fingerprint is that of the current data (in);
// the rest of s is set. Another model, seed, total batch, master precision or data is refused; other options that changed are
// told of.
FN void checkpoint_load(const char *path, Llama *m, const RunConfig *c, CheckpointState *s) {
    char file[PATH_TEXT], error[ERROR_TEXT];
    CheckpointState then;
    cJSON *trainer = checkpoint_read_trainer(path, error, sizeof error);
    if (!trainer || checkpoint_read_state(path, trainer, &then, error, sizeof error) != 0) fatal("%s", error);
    checkpoint_compare_run(path, trainer, c, &then, s->data_fingerprint);
    cJSON_Delete(trainer);
    path_join(file, path, CHECKPOINT_FILES[0]);
    if (checkpoint_read_tensors(file, m, &c->llama, 0, c->master_fp32 ? SAFE_F32 : SAFE_BF16, error, sizeof error) != 0) fatal("%s", error);
    path_join(file, path, CHECKPOINT_FILES[2]);
    if (checkpoint_read_tensors(file, m, &c->llama, 1, SAFE_F32, error, sizeof error) != 0) fatal("%s", error);
    *s = then;
}

#endif
