// test_init_from.c: weights of Hugging Face's layout, in one file or in shards, of any of three dtypes, become the model's; what is
// another model, incomplete or not finite is refused in one line.
#include "dev/test/support.h"
#include "dev/test/fake_backend.h"
#include "llmc/init_from.h"
#include "dev/test/small_model.h"


// ---------------------------------------------------------------------------------------------------------------------
// A writer of its own for the files: tensor names spelled out here, values a function of name and index.

typedef struct { const char *name; int rows, cols; } Row;  // cols 0: a vector; %d: the layer
static const Row OUTER[] = {{"model.embed_tokens.weight", 128, 128}, {"model.norm.weight", 128, 0}, {"lm_head.weight", 128, 128}};
static const Row INNER[] = {
    {"model.layers.%d.input_layernorm.weight", 128, 0}, {"model.layers.%d.post_attention_layernorm.weight", 128, 0},
    {"model.layers.%d.self_attn.q_proj.weight", 128, 128}, {"model.layers.%d.self_attn.k_proj.weight", 64, 128}, {"model.layers.%d.self_attn.v_proj.weight", 64, 128},
    {"model.layers.%d.self_attn.o_proj.weight", 128, 128}, {"model.layers.%d.mlp.gate_proj.weight", 256, 128}, {"model.layers.%d.mlp.up_proj.weight", 256, 128},
    {"model.layers.%d.mlp.down_proj.weight", 128, 256}};
enum { TENSORS = 3 + 2 * 9 };

// A multiple of 2^-8 below 1 in magnitude: exact in every dtype. `fine` adds 2^-20, which only float32 holds.
static float value_of(const char *name, int64_t i, int fine) {
    const uint32_t w = rng_word(rng_stream(crc32c(0, name, strlen(name)), 0, 0), (uint64_t)i);
    return (float)((int)(w % 511) - 255) / 256.0f + (fine ? 0x1p-20f : 0);
}
// The half of a multiple of 2^-8 below 1, by search over the exponent: mantissa bits are the value's own.
static uint16_t half_of(float v) {
    const uint16_t sign = v < 0 ? 0x8000 : 0;
    if (v == 0) return 0;
    int exponent;
    const float m = frexpf(fabsf(v), &exponent);  // [0.5, 1)
    return (uint16_t)(sign | (exponent + 14) << 10 | ((int)(m * 2048) - 1024));
}
static void tensor_name(int i, char *name, Row *row) {
    *row = i < 3 ? OUTER[i] : INNER[(i - 3) % 9];
    snprintf(name, 96, row->name, (i - 3) / 9);
}
// What to write otherwise than a good file would have it.
typedef struct { int dtype, fine, skip, bad, twist; const char *extra; float bad_value; } Style;  // skip, bad, twist: number of a tensor, -1: none

static void write_file(const char *path, int first, int last, const Style *s) {
    char *header = xasprintf("{"), error[ERROR_TEXT] = "";
    const int bytes = s->dtype == SAFE_F32 ? 4 : 2;
    int64_t at = 0;
    FileWriter w;
    for (int i = first; i < last; i++) {
        char name[96], shape[64];
        Row row;
        tensor_name(i, name, &row);
        if (i == s->skip) continue;
        if (row.cols) snprintf(shape, sizeof shape, "%d,%d", i == s->twist ? row.cols : row.rows, i == s->twist ? row.rows : row.cols);
        else snprintf(shape, sizeof shape, "%d", row.rows);
        const int64_t size = (int64_t)row.rows * (row.cols ? row.cols : 1) * bytes;
        char *more = xasprintf("%s%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", header, header[1] ? "," : "", name,
                               SAFE_DTYPES[s->dtype].name, shape, (long long)at, (long long)(at + size));
        free(header);
        header = more;
        at += size;
    }
    char *whole = s->extra ? xasprintf("%s,\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%lld,%lld]}}", header, s->extra, (long long)at, (long long)at + 1)
                           : xasprintf("%s}", header);
    const uint64_t length = strlen(whole);
    unlink(path);
    assert_int_equal(writer_open(&w, path, error, sizeof error), 0);
    writer_put(&w, &length, 8);
    writer_put(&w, whole, length);
    for (int i = first; i < last; i++) {
        char name[96];
        Row row;
        tensor_name(i, name, &row);
        const int64_t count = i == s->skip ? 0 : (int64_t)row.rows * (row.cols ? row.cols : 1);
        for (int64_t k = 0; k < count; k++) {
            const float v = i == s->bad && k == 5 ? s->bad_value : value_of(name, k, s->fine);
            const uint16_t half = s->dtype == SAFE_F16 ? half_of(v) : bf16_encode(v);
            if (bytes == 4) writer_put(&w, &v, 4); else writer_put(&w, &half, 2);
        }
    }
    if (s->extra) writer_put(&w, "", 1);
    assert_int_equal(writer_close(&w), 0);
    free(header);
    free(whole);
}
static const Style GOOD = {SAFE_BF16, 0, -1, -1, -1, NULL, 0};
static char *make_folder(const char *name, const char *changes) {
    char *folder = xstrdup(folder_path(name)), error[ERROR_TEXT], path[PATH_TEXT];
    assert_int_equal(folder_create(folder, error, sizeof error), 0);
    char *text = xasprintf("{\"model_type\":\"llama\",\"hidden_size\":128,\"intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
                           "\"num_key_value_heads\":1,\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"vocab_size\":128,\"max_position_embeddings\":4096%s}", changes);
    path_join(path, folder, "config.json");
    unlink(path);
    put_text(path, text);
    free(text);
    return folder;
}
// Every value of every tensor, through the table's own rows: q, k, v and gate, up are runs of rows of ours.
static void assert_weights(const Llama *m, int fine) {
    for (int i = 0; i < TENSORS; i++) {
        char name[96];
        Row row;
        tensor_name(i, name, &row);
        const int layer = i < 3 ? -1 : (i - 3) / 9, k = i < 3 ? -1 : (i - 3) % 9;
        static const ParamKind outer[] = {PARAM_EMBED, PARAM_FINAL_NORM, PARAM_LM_HEAD},
            inner[] = {PARAM_ATTN_NORM, PARAM_FFN_NORM, PARAM_QKV, PARAM_QKV, PARAM_QKV, PARAM_ATTN_OUT, PARAM_GATE_UP, PARAM_GATE_UP, PARAM_DOWN};
        const int first_row = k == 3 ? 128 : k == 4 ? 192 : k == 7 ? 256 : 0;
        const Param *p = param_get(&m->table, i < 3 ? outer[i] : inner[k], layer);
        const float *have = m->state[LLAMA_PARAMS] + p->offset + (int64_t)first_row * p->cols;
        for (int64_t j = 0; j < (int64_t)row.rows * (row.cols ? row.cols : 1); j++)
            if (have[j] != value_of(name, j, fine)) fail_msg("%s: value %d is %g, not %g", name, (int)j, (double)have[j], (double)value_of(name, j, fine));
    }
}

static void test_dtypes_and_shards(void **state) {
    (void)state;
    static const struct { int dtype, fine, shards; const char *options; } cases[] = {
        {SAFE_BF16, 0, 0, ""}, {SAFE_F16, 0, 0, ""}, {SAFE_F32, 0, 1, ""}, {SAFE_F16, 0, 1, "--master-weights fp32"},
        {SAFE_F32, 1, 0, "--master-weights fp32"}, {SAFE_F32, 1, 1, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Style style = GOOD;
        char *name = xasprintf("good%d", (int)i), *folder = make_folder(name, ""), path[PATH_TEXT];
        style.dtype = cases[i].dtype; style.fine = cases[i].fine;
        if (cases[i].shards) {
            char *index = xasprintf("{\"metadata\":{},\"weight_map\":{");
            for (int k = 0; k < TENSORS; k++) {
                char tensor[96];
                Row row;
                tensor_name(k, tensor, &row);
                char *more = xasprintf("%s%s\"%s\":\"model-0000%d-of-00002.safetensors\"", index, k ? "," : "", tensor, k < 10 ? 1 : 2);
                free(index);
                index = more;
            }
            char *whole = xasprintf("%s}}", index);
            path_join(path, folder, "model.safetensors.index.json");
            put_text(path, whole);
            free(index); free(whole);
            path_join(path, folder, "model-00001-of-00002.safetensors");
            write_file(path, 0, 10, &style);
            path_join(path, folder, "model-00002-of-00002.safetensors");
            write_file(path, 10, TENSORS, &style);
        } else {
            path_join(path, folder, "model.safetensors");
            write_file(path, 0, TENSORS, &style);
        }
        make_config(cases[i].options);
        Llama *m = make_model(1);
        init_from(folder, m, &config);
        // Under BF16 masters the fine part (2^-20 of values down to 2^-8) is rounded away: the nearest BF16 is the coarse value, but for 0.
        if (cases[i].fine && !config.master_fp32)
            for (int64_t k = 0; k < m->table.total; k++) {
                assert_true(bf16_round(m->state[LLAMA_PARAMS][k]) == m->state[LLAMA_PARAMS][k]);
                if (m->state[LLAMA_PARAMS][k] == bf16_round(0x1p-20f)) m->state[LLAMA_PARAMS][k] = 0;
            }
        assert_weights(m, cases[i].fine && config.master_fp32);
        llama_free(m);
        free(folder); free(name);
    }
}
// A checkpoint of this program is such a folder, and --model need not be given.
static void test_own_checkpoint(void **state) {
    (void)state;
    char *folder = xstrdup(folder_path("own/step_00000003")), *argv[] = {(char *)"train", (char *)"--train-data", (char *)"t", (char *)"--steps", (char *)"9",
        (char *)"--lr", (char *)"1e-3", (char *)"--batch", (char *)"2", (char *)"--seq", (char *)"64", (char *)"--init-from", folder, NULL};
    CheckpointState s;
    make_config("");
    memset(&s, 0, sizeof s);
    s.step = 3;
    Llama *m = make_model(8), *other = make_model(9);
    checkpoint_save(folder_path("own"), m, &config, &s);
    config_parse(&config, 13, argv);
    assert_int_equal(config.llama.layers, 2);
    init_from(folder, other, &config);
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        assert_memory_equal(m->state[LLAMA_PARAMS] + p->offset, other->state[LLAMA_PARAMS] + p->offset, (size_t)p->count * sizeof(float));
    }
    llama_free(m);
    llama_free(other);
    free(folder);
}

static void load(const void *folder) { init_from((const char *)folder, make_model(1), &config); }
static void expect_refused(const char *folder, const char *part) {
    char text[4096];
    if (run_child(load, folder, text, sizeof text) != 1) fail_msg("not refused: %s", part);
    assert_one_line(text, part);
}
static void test_refused(void **state) {
    (void)state;
    char path[PATH_TEXT], *folder = make_folder("bad", "");
    make_config("");
    expect_refused(folder_path("nowhere"), "config.json: cannot open");
    expect_refused(folder, "holds neither model.safetensors nor model.safetensors.index.json");
    path_join(path, folder, "model.safetensors");
    static const struct { Style style; const char *part; } cases[] = {
        {{SAFE_BF16, 0, 4, -1, -1, NULL, 0}, "tensor \"model.layers.0.post_attention_layernorm.weight\" is in none of its files"},
        {{SAFE_BF16, 0, -1, 3, -1, NULL, NAN}, "model.safetensors: tensor \"model.layers.0.input_layernorm.weight\": value 5 is nan; weights must be finite"},
        {{SAFE_F32, 0, -1, 0, -1, NULL, -INFINITY}, "tensor \"model.embed_tokens.weight\": value 5 is -inf"},
        {{SAFE_F32, 0, -1, 0, -1, NULL, 3.4e38f}, "value 5 is 3.4e+38, beyond BF16; use --master-weights fp32"},
        {{SAFE_BF16, 0, -1, -1, 11, NULL, 0}, "tensor \"model.layers.0.mlp.down_proj.weight\" has another shape than (128, 256)"},
        {{SAFE_BF16, 0, -1, -1, -1, "model.layers.0.self_attn.q_proj.bias", 0}, "hold 1 tensors that this model has not, one is model.layers.0.self_attn.q_proj.bias"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file(path, 0, TENSORS, &cases[i].style);
        expect_refused(folder, cases[i].part);
    }
    write_file(path, 0, TENSORS, &GOOD);
    char text[4096];
    assert_int_equal(run_child(load, folder, text, sizeof text), 0);
    assert_int_equal(truncate(path, 5000), 0);
    expect_refused(folder, "model.safetensors: tensor \"");
    unlink(path);
    // An index that points elsewhere, or at a file that is not there.
    path_join(path, folder, "model.safetensors.index.json");
    static const struct { const char *file, *part; } names[] = {
        {"../good0/model.safetensors", "is not the plain name of a .safetensors file"}, {"/etc/passwd", "is not the plain name"}, {".safetensors", "is not the plain name"},
        {"model.bin", "is not the plain name"}, {"model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors: cannot open"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *index = xasprintf("{\"weight_map\":{\"a\":\"%s\"}}", names[i].file);
        unlink(path);
        put_text(path, index);
        expect_refused(folder, names[i].part);
        free(index);
    }
    // Another model.
    static const struct { const char *changes, *part; } shapes[] = {
        {",\"rope_theta\":500000.0", "key \"rope_theta\" is given twice"}, {",\"rope_parameters\":{\"rope_theta\":500000.0}", "rope_theta is 500000 there and 10000 in this run"}, {",\"tie_word_embeddings\":true", "tied is true there and false in this run"},
        {",\"rope_scaling\":{\"type\":\"linear\"}", "rope_scaling"}, {",\"attention_bias\":true", "attention_bias"}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        char *other = make_folder("other", shapes[i].changes);
        expect_refused(other, shapes[i].part);
        free(other);
    }
    make_config("--tied true");
    expect_refused(folder_path("good0"), "tied is false there and true in this run; use --model ");
    free(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_dtypes_and_shards), cmocka_unit_test(test_own_checkpoint), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
