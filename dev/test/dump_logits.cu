// dump_logits: the logits of a checkpoint as the trainer computes them, for check_transformers.py. Valid C11 (CPU backend) and valid
// CUDA (GPU backend).
//   dump_logits CHECKPOINT RECIPE TOKENS LOGITS
// CHECKPOINT: a folder with config.json and model.safetensors. TOKENS: int32 (B,T), T the model's longest sequence.
// LOGITS is written: float32 (B,T,vocab).
#ifdef __CUDACC__
#include "llmc/cuda/backend.cuh"
#else
#include "llmc/cpu/backend.h"
#endif
#include "llmc/init_from.h"

// The checkpoint's model, its weights as BF16, to compute with the recipe.
static Llama *model_read(const char *folder, const char *recipe, LlamaConfig *shape) {
    char path[PATH_TEXT], error[ERROR_TEXT];
    RunConfig c;
    LlamaOptions o;
    memset(&c, 0, sizeof c);
    memset(&o, 0, sizeof o);
    path_join(path, folder, "config.json");
    if (model_file_read(path, &c.llama, error, sizeof error) != 0) fatal("%s", error);
    o.config = *shape = c.llama;
    o.recipe = recipe_find(recipe);
    o.micro_batches = 1;
    // One sequence at a time; a batch's tokens must be a multiple of 128.
    o.batch = (int)(128 / greatest_common_divisor(c.llama.seq, 128));
    Llama *m = llama_create(&o);
    init_from(folder, m, &c);
    return m;
}
static FILE *stream_open(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    if (!f) fatal("%s: cannot be opened (%s)", path, strerror(errno));
    return f;
}

int main(int argc, char **argv) {
    if (argc != 5) fatal_usage("usage: dump_logits CHECKPOINT RECIPE TOKENS LOGITS");
    LlamaConfig c;
    Llama *m = model_read(argv[1], argv[2], &c);
    FILE *in = stream_open(argv[3], "rb"), *out = stream_open(argv[4], "wb");
    const size_t T = (size_t)c.seq, count = T * (size_t)c.vocab;
    int32_t *tokens = (int32_t *)xcalloc(T, sizeof *tokens);
    float *logits = (float *)xcalloc(count, sizeof *logits);
    int sequences = 0;
    for (size_t n; (n = fread(tokens, sizeof *tokens, T, in)) > 0; sequences++) {
        if (n != T) fatal("%s: not whole sequences of %d tokens", argv[3], c.seq);
        for (size_t t = 0; t < T; t++)
            if (tokens[t] < 0 || tokens[t] >= c.vocab) fatal("%s: token %d is outside the vocabulary of %d", argv[3], (int)tokens[t], c.vocab);
        llama_logits_from(m, tokens, c.seq, 0, logits);
        if (fwrite(logits, sizeof *logits, count, out) != count) fatal("%s: cannot be written (%s)", argv[4], strerror(errno));
    }
    if (ferror(in) || fclose(out) != 0) fatal("%s or %s: %s", argv[3], argv[4], strerror(errno));
    fclose(in);
    printf("%d sequences by %s\n", sequences, llama_device_name(m));
    free(logits);
    free(tokens);
    llama_free(m);
    return 0;
}
