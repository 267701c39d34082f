// --config run.json, --model model.json (own keys or Hugging Face's), and the checked part of a checkpoint's trainer.json.
#include "fuzz.h"
#include "dev/test/fake_backend.h"
#include "llmc/config.h"
#include "llmc/outlier.h"

static void read_run(const char *path) {
    static RunConfig c;
    char *argv[] = {(char *)"train", (char *)"--config", (char *)path, NULL};
    config_parse(&c, 3, argv);
    fuzz_check(c.steps >= 1 && c.batch >= 1 && c.seq >= 1 && c.llama.width % 128 == 0 && c.total_batch % (c.batch * c.seq) == 0, "a run's numbers fit");
    cJSON *j = config_to_json(&c);
    char *text = json_print(j, 0), error[ERROR_TEXT];
    cJSON *again = json_parse_object(text, strlen(text), "again", error, sizeof error);
    fuzz_check(again != NULL, "what is logged is JSON");
    cJSON_Delete(j);
    cJSON_Delete(again);
    free(text);
}
static void read_model(const char *path) {
    LlamaConfig m;
    char error[ERROR_TEXT] = "";
    memset(&m, 0, sizeof m);
    if (model_file_read(path, &m, error, sizeof error) != 0) return;
    fuzz_check(m.layers >= 1 && m.width >= 1 && m.heads >= 1 && m.kv_heads >= 1 && m.ffn >= 1 && m.vocab >= 1 && m.seq >= 1 && m.norm_eps > 0, "a model's sizes are positive");
    config_check_shape(&m, path);
    fuzz_check(m.width % m.heads == 0 && m.heads % m.kv_heads == 0, "heads fit");
    if (m.layers < 16) {
        ParamTable t = llama_param_table(&m);
        fuzz_check(t.total > 0 && llama_param_count(&t) <= t.total, "the parameters can be counted");
        free(t.params);
    }
}
static void read_window(const char *path) {
    char error[ERROR_TEXT] = "";
    OutlierWindow w;
    cJSON *j = json_read_object(path, 1 << 20, error, sizeof error);
    if (!j) return;
    if (outlier_from_json(j, path, &w, error, sizeof error) == 0) {
        fuzz_check(w.count >= 0 && w.count <= OUTLIER_ROOM, "the window holds what fits");
        (void)outlier_limits(&w, 1000, 0, 4);
    }
    cJSON_Delete(j);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_run, data, size);
    (void)fuzz_run(read_model, data, size);
    (void)fuzz_run(read_window, data, size);
    return 0;
}
