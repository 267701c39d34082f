// model_file.h: the model's shape, from a preset's name or from a JSON file: own keys, or a Hugging Face config.json.
#ifndef LLMC_MODEL_FILE_H
#define LLMC_MODEL_FILE_H

#include "llama.h"
#include "options.h"

#define MODEL_VOCAB_MAX (1 << 24)

// ---------------------------------------------------------------------------------------------------------------------
// Presets: the model sizes of the Quartet II paper (arXiv 2601.22813), with its peak learning rates and tokens a step; the
// 560M and 1.9B shapes and their tokens a step are nanochat's d20 and d32.

typedef struct {
    const char *name;
    int layers, width, heads, vocab, seq;
    double lr;
    int64_t batch, total_batch;      // total_batch 0: one micro-batch
} Preset;

static const Preset PRESETS[] = {
    {"tiny", 4, 128, 2, 256, 128, 3e-3, 16, 0},
    {"30M", 6, 640, 5, 32000, 512, 1.2e-3, 128, 262144},
    {"50M", 7, 768, 6, 32000, 512, 1.2e-3, 128, 262144},
    {"100M", 8, 1024, 8, 32000, 512, 9e-4, 128, 262144},
    {"200M", 10, 1280, 10, 32000, 512, 7.2e-4, 64, 262144},
    {"560M", 20, 1280, 10, 65536, 2048, 6e-4, 16, 524288},
    {"1.9B", 32, 2048, 16, 65536, 2048, 4e-4, 8, 524288},
};
#define PRESET_COUNT ((int)(sizeof PRESETS / sizeof PRESETS[0]))

FN const Preset *preset_find(const char *name) {
    for (int i = 0; i < PRESET_COUNT; i++)
        if (strcmp(PRESETS[i].name, name) == 0) return &PRESETS[i];
    return NULL;
}
FN void preset_names(char *text, size_t size) {
    text[0] = '\0';
    for (int i = 0; i < PRESET_COUNT; i++)
        snprintf(text + strlen(text), size - strlen(text), "%s%s", i ? ", " : "", PRESETS[i].name);
}
FN void preset_shape(const Preset *p, LlamaConfig *m) {
    m->layers = p->layers; m->width = p->width;
    m->heads = m->kv_heads = p->heads;
    m->ffn = llama_default_ffn(p->width);
    m->vocab = p->vocab; m->seq = p->seq;
    m->tied = 0;
    m->norm_eps = 1e-5f; m->rope_theta = 10000.0f;
}
FN void presets_help(FILE *f) {
    fprintf(f, "  %-5s %6s %6s %6s %7s %6s %8s %6s %12s\n", "name", "layers", "width", "heads", "vocab", "seq", "lr", "batch", "total-batch");
    for (int i = 0; i < PRESET_COUNT; i++) {
        const Preset *p = &PRESETS[i];
        fprintf(f, "  %-5s %6d %6d %6d %7d %6d %8g %6lld %12lld\n", p->name, p->layers, p->width, p->heads, p->vocab, p->seq, p->lr,
                (long long)p->batch, (long long)(p->total_batch ? p->total_batch : p->batch * p->seq));
    }
    fprintf(f, "  (the vocabulary is the data's)\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// Own format: a JSON object with these keys.

typedef struct {
    int64_t layers, width, heads, kv_heads, ffn, vocab, seq, tied;
    double norm_eps, rope_theta;
} ModelFile;

#define FIELD_OF_MODEL(f) offsetof(ModelFile, f)
static const Option MODEL_TABLE[] = {
    {"", "layers", OPTION_INTEGER, FIELD_OF_MODEL(layers), NULL, 1, 1023, NULL, "N", ""},
    {"", "width", OPTION_INTEGER, FIELD_OF_MODEL(width), NULL, 1, 65536, NULL, "N", ""},
    {"", "heads", OPTION_INTEGER, FIELD_OF_MODEL(heads), NULL, 1, 4096, NULL, "N", ""},
    {"", "vocab", OPTION_INTEGER, FIELD_OF_MODEL(vocab), NULL, 1, MODEL_VOCAB_MAX, NULL, "N", ""},
    {"", "kv_heads", OPTION_INTEGER, FIELD_OF_MODEL(kv_heads), NULL, 1, 4096, NULL, "N", ""},
    {"", "ffn", OPTION_INTEGER, FIELD_OF_MODEL(ffn), NULL, 1, 1 << 20, NULL, "N", ""},
    {"", "seq", OPTION_INTEGER, FIELD_OF_MODEL(seq), "512", 1, 1 << 20, NULL, "N", ""},
    {"", "tied", OPTION_BOOL, FIELD_OF_MODEL(tied), "false", 0, 0, NULL, NULL, ""},
    {"", "norm_eps", OPTION_REAL, FIELD_OF_MODEL(norm_eps), "1e-5", 1e-12, 0.1, NULL, "X", ""},
    {"", "rope_theta", OPTION_REAL, FIELD_OF_MODEL(rope_theta), "10000", 1, 1e9, NULL, "X", ""},
};
enum { MODEL_COUNT = (int)(sizeof MODEL_TABLE / sizeof MODEL_TABLE[0]), MODEL_NEEDED = 4 };  // the first four must be given

FN int model_read_own(const char *path, ModelFile *f, char *error, size_t size) {
    uint8_t from[MODEL_COUNT] = {0};
    if (options_read_json(MODEL_TABLE, MODEL_COUNT, f, from, path, error, size) != 0) return -1;
    for (int i = 0; i < MODEL_NEEDED; i++)
        if (!from[i]) return set_error(error, size, "%s: key \"%s\" is missing; a whole number is expected", path, MODEL_TABLE[i].name);
    if (f->kv_heads == 0) f->kv_heads = f->heads;
    if (f->ffn == 0) f->ffn = llama_default_ffn((int)f->width);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Hugging Face's config.json of a LlamaForCausalLM. It has many keys that do not matter here; those that would make it
// another model are refused.

FN int model_refuse_foreign(const char *path, const cJSON *j, char *error, size_t size) {
    static const char *const off[] = {"attention_bias", "mlp_bias"};
    const cJSON *type = json_get(j, "model_type"), *act = json_get(j, "hidden_act"), *scaling = json_get(j, "rope_scaling");
    if (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "llama") == 0))
        return set_error(error, size, "%s: key \"model_type\" is not \"llama\"; other models are not supported", path);
    if (act && !(cJSON_IsString(act) && strcmp(act->valuestring, "silu") == 0))
        return set_error(error, size, "%s: key \"hidden_act\" is not \"silu\", the activation of SwiGLU", path);
    if (scaling && !cJSON_IsNull(scaling))
        return set_error(error, size, "%s: key \"rope_scaling\" is set; only plain rotary embeddings are supported", path);
    for (int i = 0; i < 2; i++)
        if (cJSON_IsTrue(json_get(j, off[i])))
            return set_error(error, size, "%s: key \"%s\" is true; layers here have no biases", path, off[i]);
    return 0;
}
// rope_theta stands at the top, or (transformers 5) within rope_parameters.
FN int model_read_rope(const char *path, const cJSON *j, ModelFile *f, char *error, size_t size) {
    const cJSON *p = json_get(j, "rope_parameters");
    if (p && cJSON_IsObject(p)) {
        const cJSON *type = json_get(p, "rope_type");
        if (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "default") == 0))
            return set_error(error, size, "%s: key \"rope_parameters.rope_type\" is not \"default\"; only plain rotary embeddings are supported",
                             path);
        j = p;
    }
    return json_get(j, "rope_theta") ? json_real(j, path, "rope_theta", 1, 1e9, &f->rope_theta, error, size) : 0;
}
FN int model_read_hf(const char *path, const cJSON *j, ModelFile *f, char *error, size_t size) {
    static const struct { const char *key; int row, needed; } keys[] = {
        {"num_hidden_layers", 0, 1}, {"hidden_size", 1, 1}, {"num_attention_heads", 2, 1}, {"vocab_size", 3, 1},
        {"num_key_value_heads", 4, 0}, {"intermediate_size", 5, 1}, {"max_position_embeddings", 6, 0}};
    const char *twice = json_duplicate_key(j);
    if (twice) return set_error(error, size, "%s: key \"%s\" is given twice", path, twice);
    if (model_refuse_foreign(path, j, error, size) != 0) return -1;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const Option *o = &MODEL_TABLE[keys[i].row];
        const cJSON *value = json_get(j, keys[i].key);
        if (!keys[i].needed && (!value || cJSON_IsNull(value))) continue;
        if (json_integer(j, path, keys[i].key, (int64_t)o->low, (int64_t)o->high, option_integer(o, f), error, size) != 0) return -1;
    }
    if (f->kv_heads == 0) f->kv_heads = f->heads;
    if (json_get(j, "rms_norm_eps") && json_real(j, path, "rms_norm_eps", 1e-12, 0.1, &f->norm_eps, error, size) != 0) return -1;
    const cJSON *tied = json_get(j, "tie_word_embeddings"), *head = json_get(j, "head_dim");
    if (tied && !cJSON_IsBool(tied))
        return set_error(error, size, "%s: key \"tie_word_embeddings\" holds %s; true or false is expected", path, json_type_name(tied));
    f->tied = cJSON_IsTrue(tied);
    if (head && !cJSON_IsNull(head) && !(cJSON_IsNumber(head) && head->valuedouble * (double)f->heads == (double)f->width))
        return set_error(error, size, "%s: key \"head_dim\" is not hidden_size / num_attention_heads; other head sizes are not supported",
                         path);
    return model_read_rope(path, j, f, error, size);
}

// A model's shape from a file in either format. 0, or -1 with the reason.
FN int model_file_read(const char *path, LlamaConfig *m, char *error, size_t size) {
    ModelFile f;
    memset(&f, 0, sizeof f);
    options_defaults(MODEL_TABLE, MODEL_COUNT, &f);
    cJSON *j = json_read_object(path, 1 << 16, error, size);
    if (!j) return -1;
    int rc = json_get(j, "hidden_size") ? model_read_hf(path, j, &f, error, size) : model_read_own(path, &f, error, size);
    cJSON_Delete(j);
    if (rc != 0) return -1;
    m->layers = (int)f.layers; m->width = (int)f.width; m->heads = (int)f.heads; m->kv_heads = (int)f.kv_heads;
    m->ffn = (int)f.ffn; m->vocab = (int)f.vocab; m->seq = (int)f.seq; m->tied = (int)f.tied;
    m->norm_eps = (float)f.norm_eps; m->rope_theta = (float)f.rope_theta;
    return 0;
}
// The shape as a JSON object that model_file_read() takes. The caller deletes it.
FN cJSON *model_to_json(const LlamaConfig *m) {
    cJSON *j = json_new_object();
    json_add_number(j, "layers", m->layers); json_add_number(j, "width", m->width); json_add_number(j, "heads", m->heads);
    json_add_number(j, "kv_heads", m->kv_heads); json_add_number(j, "ffn", m->ffn); json_add_number(j, "vocab", m->vocab);
    json_add_number(j, "seq", m->seq); json_add_bool(j, "tied", m->tied);
    json_add_float(j, "norm_eps", m->norm_eps); json_add_float(j, "rope_theta", m->rope_theta);
    return j;
}

#endif
