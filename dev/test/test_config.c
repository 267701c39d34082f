// test_config.c: options from the command line, from JSON and from model files; what is refused, and how it is said.
#include "dev/test/support.h"
#include "dev/test/fake_backend.h"
#include "llmc/config.h"

enum { WORDS = 24 };
// Splits "a b c" at spaces into argv; text must outlive it.
static int split(char *text, char **argv) {
    int n = 0;
    argv[n++] = (char *)"train";
    for (char *word = strtok(text, " "); word && n < WORDS; word = strtok(NULL, " ")) argv[n++] = word;
    argv[n] = NULL;
    return n;
}
static void parse(RunConfig *c, const char *line) {
    char *argv[WORDS + 1], *text = xstrdup(line);
    config_parse(c, split(text, argv), argv);
    free(text);
}
static void parse_only(const void *line) {
    static RunConfig c;
    parse(&c, (const char *)line);
}
// The command line must be refused: that exit status, one line, these words.
static void refuse(const char *line, int status, const char *part) {
    char text[4096];
    int got = run_child(parse_only, line, text, sizeof text);
    if (got != status) fail_msg("%s: exit status %d, not %d: %s", line, got, status, text);
    assert_one_line(text, part);
}
#define NEEDED "--train-data t*.bin --steps 100 "

// The presets are design's table: typed here a second time.
static void test_presets(void **state) {
    (void)state;
    static const struct { const char *name; int layers, width, heads, ffn, vocab, seq; double lr; int64_t total; } want[] = {
        {"tiny", 4, 128, 2, 512, 256, 128, 3e-3, 2048}, {"30M", 6, 640, 5, 1792, 32000, 512, 1.2e-3, 262144},
        {"50M", 7, 768, 6, 2048, 32000, 512, 1.2e-3, 262144}, {"100M", 8, 1024, 8, 2816, 32000, 512, 9e-4, 262144},
        {"200M", 10, 1280, 10, 3584, 32000, 512, 7.2e-4, 262144}, {"560M", 20, 1280, 10, 3584, 65536, 2048, 6e-4, 524288},
        {"1.9B", 32, 2048, 16, 5632, 65536, 2048, 4e-4, 524288}};
    static RunConfig c;
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, NEEDED "--model %s", want[i].name);
        parse(&c, line);
        assert_int_equal(c.llama.layers, want[i].layers);
        assert_int_equal(c.llama.width, want[i].width);
        assert_int_equal(c.llama.heads, want[i].heads);
        assert_int_equal(c.llama.kv_heads, want[i].heads);
        assert_int_equal(c.llama.ffn, want[i].ffn);
        assert_int_equal(c.llama.vocab, want[i].vocab);
        assert_int_equal(c.seq, want[i].seq);
        assert_true(c.lr == want[i].lr);
        assert_int_equal(c.total_batch, want[i].total);
        assert_int_equal(c.tokens, 100 * want[i].total);
    }
}
static void test_defaults_and_overrides(void **state) {
    (void)state;
    static RunConfig c;
    parse(&c, NEEDED);
    assert_string_equal(c.model, "tiny");
    assert_string_equal(c.recipe, "quartet2");
    assert_string_equal(c.resume, "none");
    assert_true(c.beta1 == 0.9 && c.beta2 == 0.95 && c.adam_eps == 1e-8 && c.weight_decay == 0.1 && c.clip == 1 && c.min_lr == 0.1);
    assert_true(c.master_fp32 == 0 && c.grad_bf16 == 0 && c.attention == 0);
    assert_int_equal(c.warmup_steps, 10);
    assert_int_equal(c.eval_every, 0);  // nothing to evaluate on
    parse(&c, NEEDED "--grad-dtype bf16 --attention flash");
    assert_true(c.grad_bf16 == 1 && c.attention == 2);
    parse(&c, "--train-data=a --val-data b --model 30M --batch 8 --seq 256 --total-batch 16Ki --tokens 1M --lr 1e-3 --warmup 7 --schedule wsd --tied true");
    assert_int_equal(c.llama.seq, 256);
    assert_int_equal(c.llama.tied, 1);
    assert_int_equal(c.total_batch, 16384);
    assert_int_equal(c.steps, 62);      // 1e6 / 16384 = 61.04, rounded up
    assert_int_equal(c.tokens, 62 * 16384);
    assert_int_equal(c.warmup_steps, 7);
    assert_int_equal(c.schedule, SCHEDULE_WSD);
    assert_int_equal(c.eval_every, 100);
    assert_int_equal(config_micro_batches(&c, 1), 8);
    assert_int_equal(config_micro_batches(&c, 4), 2);
    parse(&c, NEEDED "--total-batch 0");
    config_set_ranks(&c, 4);            // one micro-batch a rank
    assert_int_equal(c.total_batch, 4 * 16 * 128);
    AdamWOptions a = config_adamw(&c, 99);
    assert_true(a.lr == (float)(3e-3 * 0.1) && a.beta1 == 0.9f && a.beta2 == 0.95f && a.clip == 1 && a.step == 99);
    parse(&c, "--train-data t --steps 1");
    assert_int_equal(c.warmup_steps, 0);
    parse(&c, "--train-data t --steps 100 --warmup 0.29");
    assert_int_equal(c.warmup_steps, 29);
}
static void test_numbers(void **state) {
    (void)state;
    static const struct { const char *text; int64_t value; } whole[] = {
        {"0", 0}, {"262144", 262144}, {"256Ki", 262144}, {"1Mi", 1048576}, {"2Gi", 2147483648}, {"3B", 3000000000}, {"1.5M", 1500000},
        {"0.75B", 750000000}, {"-5", -5}, {"9007199254740992", 9007199254740992}, {"10k", 10000}};
    static const char *const not_whole[] = {"", " 1", "1 ", "1.5", "0.0001k", "1e3", "0x10", "k", ".", "1.k", "--1", "+1", "1K", "1kB", "nan", "inf",
        "9007199254740993", "99999999999999999999", "10000000B", "1.1.1M"};
    static const char *const not_real[] = {"", " 1", "1 ", "0x1p3", "nan", "inf", "-inf", "1e999", "1,5", "1e", "e5", "--1", "1.2.3"};
    double x;
    int64_t n;
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        assert_int_equal(parse_whole(whole[i].text, &n), 0);
        assert_int_equal(n, whole[i].value);
    }
    for (size_t i = 0; i < sizeof not_whole / sizeof not_whole[0]; i++)
        if (parse_whole(not_whole[i], &n) == 0) fail_msg("\"%s\" was read as %lld", not_whole[i], (long long)n);
    for (size_t i = 0; i < sizeof not_real / sizeof not_real[0]; i++)
        if (parse_real(not_real[i], &x) == 0) fail_msg("\"%s\" was read as %g", not_real[i], x);
    assert_int_equal(parse_real("-1.25e-3", &x), 0);
    assert_true(x == -1.25e-3);
}
// Each command line that cannot be understood: exit status 2, one line that names the option and, where there is one, the remedy.
static void test_refused_command_lines(void **state) {
    (void)state;
    static const struct { const char *line, *part; } cases[] = {
        {"", "--train-data is needed"},
        {"--train-data t", "--steps or --tokens is needed"},
        {NEEDED "--tokens 5M", "--steps 100 and --tokens 5000000 are both given"},
        {NEEDED "--learning-rate 1", "--learning-rate: there is no such option; here it is --lr. See --help"},
        {NEEDED "--batch_size 1", "--batch_size: there is no such option; here it is --batch, sequences"},
        {NEEDED "--eval_every 1", "--eval_every: there is no such option; did you mean --eval-every?"},
        {NEEDED "--deterministic", "--deterministic: there is no such option; every run is; leave it out"},
        {NEEDED "--fused-kernels 1", "--fused-kernels: there is no such option. See --help"},  // nothing near it: nothing is guessed
        {NEEDED "--warmap 1", "did you mean --warmup?"},
        {NEEDED "--batc 1", "write --batch in full"},
        {NEEDED "--eval-every", "--eval-every needs a value (N)"},
        {NEEDED "--help=3", "--help takes no value"},
        {"--check --chekc", "--chekc: there is no such option; did you mean --check?"},
        {"--check --batch 0", "--batch 0: a whole number from 1"},
        {NEEDED "-x", "-x: there are no one-letter options"},
        {NEEDED "extra", "extra: only options are expected"},
        {NEEDED "--lr fast", "--lr fast: a number from 0 to 10 is expected"},
        {NEEDED "--lr nan", "--lr nan: a number"},
        {NEEDED "--lr -1", "--lr -1: a number"},
        {NEEDED "--lr 0", "--lr must be above 0"},
        {NEEDED "--batch 0", "--batch 0: a whole number from 1"},
        {NEEDED "--batch 1.5", "--batch 1.5: a whole number"},
        {NEEDED "--steps 0", "--steps 0: a whole number from 1"},
        {NEEDED "--seed -1", "--seed -1: a whole number from 0"},
        {NEEDED "--schedule cos", "--schedule cos: one of cosine|linear|constant|wsd"},
        {NEEDED "--tied yes", "--tied yes: true or false"},
        {NEEDED "--master-weights fp16", "one of bf16|fp32"},
        {NEEDED "--grad-dtype fp16", "one of fp32|bf16"},
        {NEEDED "--attention fa3", "one of auto|cudnn|flash"},
        {NEEDED "--nvfp4-gemm fp4", "one of auto|native|emulated"},
        {NEEDED "--recipe quartet3", "--recipe quartet3: there is no such recipe; the recipes are fp32"},
        {NEEDED "--bf16-layers 5", "--bf16-layers 5: tiny has 4 layers"},
        {NEEDED "--bf16-layers -1", "a whole number from 0"},
        {NEEDED "--model 31M", "--model 31M: there is no such preset; the presets are tiny, 30M"},
        {NEEDED "--batch 3 --seq 100", "must be a multiple of 128 (rotations are 128 long); the nearest is --batch 32"},
        {NEEDED "--batch 65536 --seq 1Mi", "too many tokens"},
        {NEEDED "--total-batch 3000", "--total-batch 3000 is not a multiple of batch x seq = 2048 tokens; the nearest is 2048"},
        {NEEDED "--total-batch 1000", "the nearest is 2048"},
        {NEEDED "--total-batch 1024Gi", "micro-batches a step; raise --batch"},
        {NEEDED "--warmup 100", "--warmup of 100 steps does not end within the run's 100 steps; the most is 99"},
        {NEEDED "--warmup 1.5", "must be whole"},
        {NEEDED "--eval-every 10", "--eval-every 10 needs --val-data"},
        {"--train-data t --tokens 9000000000000000", "steps of 2048 tokens are beyond"},
        {NEEDED "--out=", "--out may not be empty"},
        {NEEDED "--resume=", "--resume may not be empty"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) refuse(cases[i].line, 2, cases[i].part);
    char *line = xasprintf(NEEDED "--out %01500d", 0);
    refuse(line, 2, "text of at most 1023 bytes");
    free(line);
}

// What is said of other trainers' names: each option named there exists, and none of the names is an option itself.
static void test_names_elsewhere(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof OPTION_ELSEWHERE / sizeof OPTION_ELSEWHERE[0]; i++) {
        assert_true(option_find(CONFIG_TABLE, CONFIG_COUNT, OPTION_ELSEWHERE[i].row) >= 0);
        assert_true(option_find(CONFIG_TABLE, CONFIG_COUNT, OPTION_ELSEWHERE[i].name) < 0);
        for (const char *p = OPTION_ELSEWHERE[i].say; (p = strstr(p, "--")) != NULL;) {
            char name[32];
            p += 2;
            snprintf(name, sizeof name, "%.*s", (int)strspn(p, "abcdefghijklmnopqrstuvwxyz0123456789-"), p);
            if (option_find(CONFIG_TABLE, CONFIG_COUNT, name) < 0) fail_msg("--%s is offered for --%s, and does not exist", name, OPTION_ELSEWHERE[i].name);
        }
    }
}

// Each JSON file that cannot be understood: exit status 1, one line that names file, key and what is expected.
static void test_refused_json(void **state) {
    (void)state;
    static const struct { const char *json, *part; } cases[] = {
        {"", "is not valid JSON at line 1"},
        {"[1]", "a JSON object {...} was expected"},
        {"{\"lr\": 1e-3,\n \"batch\" 3}", "is not valid JSON at line 2"},
        {"{\"lr\": 1e-3} trailing", "is not valid JSON"},
        {"{\"lr\": nan}", "is not valid JSON"},
        {"{\"learning_rate\": 1}", "there is no option \"learning_rate\"; here it is --lr"},
        {"{\"eval_every\": 1}", "there is no option \"eval_every\"; did you mean \"eval-every\"?"},
        {"{\"fused\": 1}", "there is no option \"fused\"\n"},
        {"{\"lrr\": 1}", "there is no option \"lrr\"; did you mean \"lr\"?"},
        {"{\"lr\": \"1e-3\"}", "key \"lr\" is \"1e-3\"; a number from 0 to 10 is expected"},
        {"{\"lr\": null}", "key \"lr\" is null"},
        {"{\"lr\": [1]}", "key \"lr\" is [1]"},
        {"{\"lr\": 11}", "key \"lr\" is 11"},
        {"{\"batch\": 1.5}", "key \"batch\" is 1.5; a whole number from 1 to 65536 is expected"},
        {"{\"batch\": true}", "key \"batch\" is true"},
        {"{\"tokens\": \"3X\"}", "key \"tokens\" is \"3X\""},
        {"{\"tied\": 1}", "key \"tied\" is 1; true or false is expected"},
        {"{\"tied\": \"true\"}", "true or false is expected"},
        {"{\"schedule\": \"sine\"}", "one of cosine|linear|constant|wsd is expected"},
        {"{\"schedule\": 0}", "one of cosine"},
        {"{\"out\": 5}", "text of at most"},
        {"{\"lr\": 1e-3, \"lr\": 2e-3}", "key \"lr\" is given twice"},
        {"{\"config\": \"other.json\"}", "\"config\" is for the command line only"},
        {"{\"help\": true}", "\"help\" is for the command line only"},
        {"{\"check\": true}", "\"check\" is for the command line only"},
    };
    char *path = xstrdup(folder_path("run.json")), line[512];
    snprintf(line, sizeof line, NEEDED "--config %s", path);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put_text(path, cases[i].json);
        refuse(line, 1, cases[i].part);
        refuse(line, 1, path);
    }
    file_put(path, "{\"lr\":1}\0{", 10);
    refuse(line, 1, "it holds a zero byte");
    unlink(path);
    refuse(line, 1, "cannot open: No such file");
    refuse(NEEDED "--config /", 1, "is not a regular file");
    free(path);
}
static char *options_text(const RunConfig *c) {
    cJSON *j = config_to_json(c);
    char *text = json_print(j, 1);
    cJSON_Delete(j);
    return text;
}
static void test_json_and_command_line(void **state) {
    (void)state;
    static RunConfig c, again;
    char line[512];
    put_text(folder_path("a.json"), "{\"train-data\": \"x\", \"steps\": 30, \"lr\": 0.5, \"tied\": true, \"total-batch\": \"4Ki\", \"schedule\": \"linear\"}");
    snprintf(line, sizeof line, "--lr 0.25 --config %s", folder_path("a.json"));
    parse(&c, line);
    assert_true(c.lr == 0.25);          // the command line wins, wherever it stands
    assert_int_equal(c.steps, 30);
    assert_int_equal(c.llama.tied, 1);
    assert_int_equal(c.total_batch, 4096);
    assert_int_equal(c.schedule, SCHEDULE_LINEAR);
    snprintf(line, sizeof line, "--tokens 40960 --config %s", folder_path("a.json"));
    parse(&c, line);
    assert_int_equal(c.steps, 10);      // --tokens of the command line over "steps" of the file
    // What was decided, written and read again, decides the same.
    parse(&c, "--train-data a\"b\\c --val-data v --model 30M --tokens 3B --lr 0.00123456789 --warmup 0.123 --seed 9007199254740992 --clip 0 --adam-eps 1e-30 --keep 3");
    char *text = options_text(&c);
    put_text(folder_path("b.json"), text);
    snprintf(line, sizeof line, "--config %s", folder_path("b.json"));
    parse(&again, line);
    char *text_again = options_text(&again);
    assert_string_equal(text, text_again);
    assert_true(again.lr == 0.00123456789 && again.warmup == 0.123 && again.adam_eps == 1e-30);
    assert_int_equal(again.steps, c.steps);
    assert_int_equal(again.seed, 9007199254740992);
    assert_memory_equal(&again.llama, &c.llama, sizeof c.llama);
    free(text);
    free(text_again);
}
// --help and the parser read one table; this reads the help as a person does and asks the parser about each name.
static void test_help_lists_the_options(void **state) {
    (void)state;
    char *text = NULL, name[64];
    size_t size = 0;
    int listed = 0;
    FILE *f = open_memstream(&text, &size);
    config_help(f);
    assert_int_equal(fclose(f), 0);
    for (char *line = text; (line = strstr(line, "\n  --")) != NULL; line++, listed++) {
        assert_int_equal(sscanf(line, " --%63[a-z0-9-]", name), 1);
        char command[128], said[4096];
        snprintf(command, sizeof command, "--%s", name);
        int status = run_child(parse_only, command, said, sizeof said);
        int action = strcmp(name, "help") == 0 || strcmp(name, "version") == 0 || strcmp(name, "check") == 0;
        if (status != (action ? 0 : 2) || (!action && !strstr(said, "needs a value"))) fail_msg("--%s is listed, but: %s", name, said);
    }
    assert_int_equal(listed, CONFIG_COUNT);
    for (int i = 0; i < CONFIG_COUNT; i++) {
        snprintf(name, sizeof name, "\n  --%s ", CONFIG_TABLE[i].name);
        assert_non_null(strstr(text, name));
    }
    for (int i = 0; i < RECIPE_COUNT; i++) assert_non_null(strstr(text, RECIPES[i].name));
    free(text);
}
// --check describes no run, so nothing that a run needs is asked for; the folder may stand before or after it.
static void test_check_needs_nothing_else(void **state) {
    (void)state;
    static RunConfig c;
    parse(&c, "--check");
    assert_true(c.check);
    assert_string_equal(c.out, "runs/default");
    parse(&c, "--check --out elsewhere");
    assert_true(c.check);
    assert_string_equal(c.out, "elsewhere");
    parse(&c, NEEDED);
    assert_false(c.check);
}

static void model_line(char line[512], const char *json) {
    put_text(folder_path("model.json"), json);
    snprintf(line, 512, NEEDED "--lr 1e-3 --batch 2 --model %s", folder_path("model.json"));
}
static void test_model_files(void **state) {
    (void)state;
    static RunConfig c;
    char line[512];
    model_line(line, "{\"layers\": 3, \"width\": 256, \"heads\": 4, \"kv_heads\": 2, \"vocab\": 1000, \"seq\": 64, \"tied\": true, \"norm_eps\": 1e-6, \"rope_theta\": 5e5}");
    parse(&c, line);
    assert_int_equal(c.llama.layers, 3);
    assert_int_equal(c.llama.kv_heads, 2);
    assert_int_equal(c.llama.ffn, 768);     // 8/3 of 256 = 682.7, up to a multiple of 256
    assert_int_equal(c.llama.vocab, 1024);  // up to a multiple of 128
    assert_int_equal(c.seq, 64);
    assert_int_equal(c.llama.tied, 1);
    assert_true(c.llama.norm_eps == 1e-6f && c.llama.rope_theta == 5e5f);
    cJSON *shape = config_model_to_json(&c.llama);
    char *text = json_print(shape, 0);
    LlamaConfig before = c.llama;
    model_line(line, text);
    parse(&c, line);
    assert_memory_equal(&before, &c.llama, sizeof before);
    cJSON_Delete(shape);
    free(text);
    // TinyLlama's config.json, shortened.
    model_line(line, "{\"architectures\": [\"LlamaForCausalLM\"], \"bos_token_id\": 1, \"hidden_act\": \"silu\", \"hidden_size\": 2048, \"intermediate_size\": 5632,"
                     "\"max_position_embeddings\": 2048, \"model_type\": \"llama\", \"num_attention_heads\": 32, \"num_hidden_layers\": 22, \"num_key_value_heads\": 4,"
                     "\"rms_norm_eps\": 1e-05, \"rope_scaling\": null, \"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", \"vocab_size\": 32000}");
    parse(&c, line);
    assert_int_equal(c.llama.layers, 22);
    assert_int_equal(c.llama.width, 2048);
    assert_int_equal(c.llama.ffn, 5632);
    assert_int_equal(c.llama.heads, 32);
    assert_int_equal(c.llama.kv_heads, 4);
    assert_int_equal(c.llama.seq, 2048);
    assert_true(c.llama.rope_theta == 10000.0f);
}
static void test_refused_model_files(void **state) {
    (void)state;
#define SHAPE(rest) "{\"layers\": 1, \"vocab\": 256, " rest "}"
#define HF(rest) "{\"hidden_size\": 256, \"intermediate_size\": 768, \"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"vocab_size\": 256" rest "}"
    static const struct { const char *json, *part; } cases[] = {
        {SHAPE("\"width\": 100, \"heads\": 2"), "width 100 is not a multiple of 128 (rotations are 128 long); the nearest is 128"},
        {SHAPE("\"width\": 200, \"heads\": 2"), "the nearest is 256"},
        {SHAPE("\"width\": 256, \"heads\": 3"), "3 heads do not divide width 256 into heads of even size; the nearest number is 2"},
        {SHAPE("\"width\": 128, \"heads\": 128"), "the nearest number is 64"},
        {SHAPE("\"width\": 256, \"heads\": 4, \"kv_heads\": 3"), "kv_heads 3 must divide heads 4"},
        {SHAPE("\"width\": 256, \"heads\": 8, \"kv_heads\": 1"), "a multiple of 128; the nearest is 2"},
        {SHAPE("\"width\": 256, \"heads\": 4, \"ffn\": 700"), "ffn 700 is not a multiple of 128 (rotations are 128 long); the nearest is 640"},
        {SHAPE("\"width\": 256"), "key \"heads\" is missing"},
        {SHAPE("\"width\": 256, \"heads\": 4, \"experts\": 8"), "there is no option \"experts\""},
        {SHAPE("\"width\": 256, \"heads\": \"four\""), "key \"heads\" is \"four\"; a whole number"},
        {SHAPE("\"width\": 1e9, \"heads\": 4"), "key \"width\" is 1000000000; a whole number from 1 to 65536"},
        {SHAPE("\"width\": 256, \"heads\": 4, \"norm_eps\": -1"), "key \"norm_eps\" is -1"},
        {HF(", \"model_type\": \"mistral\""), "key \"model_type\" is not \"llama\""},
        {HF(", \"rope_scaling\": {\"type\": \"linear\"}"), "key \"rope_scaling\" is set"},
        {HF(", \"attention_bias\": true"), "key \"attention_bias\" is true"},
        {HF(", \"hidden_act\": \"gelu\""), "key \"hidden_act\" is not \"silu\""},
        {HF(", \"head_dim\": 32"), "key \"head_dim\""},
        {HF(", \"rms_norm_eps\": \"small\""), "key \"rms_norm_eps\" holds a string; a number is expected"},
        {"{\"hidden_size\": 256}", "key \"num_hidden_layers\" is missing; a number is expected"},
        {"{\"hidden_size\": 256.5, \"num_hidden_layers\": 1}", "key \"hidden_size\" is 256.5; a whole number is expected"},
    };
    char line[512];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        model_line(line, cases[i].json);
        refuse(line, 1, cases[i].part);
        refuse(line, 1, "model.json");
    }
    snprintf(line, sizeof line, NEEDED "--model %s", folder_path("absent.json"));
    refuse(line, 1, "absent.json: cannot open");
    model_line(line, SHAPE("\"width\": 256, \"heads\": 4"));
    snprintf(line, sizeof line, NEEDED "--model %s", folder_path("model.json"));
    refuse(line, 2, "--lr is needed with --model");
}

static RunConfig vocab_config;
static void set_vocab(const void *vocab) { config_set_vocab(&vocab_config, *(const int64_t *)vocab, "data/meta.json"); }
static void test_vocabulary(void **state) {
    (void)state;
    char line[512], text[4096];
    int64_t vocab = 50257;
    parse(&vocab_config, NEEDED);
    config_set_vocab(&vocab_config, 257, "x");
    assert_int_equal(vocab_config.llama.vocab, 384);
    vocab = 0;
    assert_int_equal(run_child(set_vocab, &vocab, text, sizeof text), 1);
    assert_one_line(text, "data/meta.json: a vocabulary of 0 tokens");
    model_line(line, SHAPE("\"width\": 256, \"heads\": 4"));
    parse(&vocab_config, line);
    config_set_vocab(&vocab_config, 100, "x");
    assert_int_equal(vocab_config.llama.vocab, 256);  // a file's vocabulary stays
    vocab = 257;
    assert_int_equal(run_child(set_vocab, &vocab, text, sizeof text), 1);
    assert_one_line(text, "the data has 257 tokens, but");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets), cmocka_unit_test(test_defaults_and_overrides), cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_refused_command_lines), cmocka_unit_test(test_names_elsewhere), cmocka_unit_test(test_refused_json), cmocka_unit_test(test_json_and_command_line),
        cmocka_unit_test(test_help_lists_the_options), cmocka_unit_test(test_check_needs_nothing_else), cmocka_unit_test(test_model_files), cmocka_unit_test(test_refused_model_files),
        cmocka_unit_test(test_vocabulary)};
    return cmocka_run_group_tests(tests, test_folder_make, test_tree_remove);
}
