// small_model.h: the configuration and the model of tests that need no more than some weights. After fake_backend.h, and what defines RunConfig.
#ifndef TEST_SMALL_MODEL_H
#define TEST_SMALL_MODEL_H

static RunConfig config;
// The model in `json`; extra options behind.
static void make_config_of(const char *json, const char *extra) {
    char *argv[64], *text = xasprintf("--train-data t --steps 100 --batch 2 --lr 1e-3 --model %s %s", folder_path("model.json"), extra);
    int n = 0;
    put_text(folder_path("model.json"), json);
    argv[n++] = (char *)"train";
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[n++] = word;
    argv[n] = NULL;
    config_parse(&config, n, argv);
    free(text);
}
// q, k and v differ in size.
MAYBE_UNUSED static void make_config(const char *extra) {
    make_config_of("{\"layers\": 2, \"width\": 128, \"heads\": 2, \"kv_heads\": 1, \"ffn\": 256, \"vocab\": 128, \"seq\": 64}", extra);
}
static Llama *make_model(int64_t seed) {
    LlamaOptions o;
    memset(&o, 0, sizeof o);
    o.config = config.llama;
    o.master_fp32 = (int)config.master_fp32;
    o.seed = (uint64_t)seed;
    Llama *m = llama_create(&o);
    llama_init(m);
    return m;
}

#endif
