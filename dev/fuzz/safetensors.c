// safetensors files. Of whatever opens, every value of every tensor lies in the file and can be read.
#include "fuzz.h"
#include "llmc/safetensors.h"

static void read_safetensors(const char *path) {
    char error[ERROR_TEXT] = "";
    SafeFile f;
    if (safetensors_open(&f, path, error, sizeof error) != 0) {
        fuzz_check(error[0] && !strchr(error, '\n'), "a refusal is one line");
        return;
    }
    for (int i = 0; i < f.count; i++) {
        const SafeTensor *t = &f.tensors[i];
        const int64_t n = t->count < 64 ? t->count : 64;
        float first[64], last[64];
        fuzz_check(safetensors_find(&f, t->name) == t, "a tensor is found by its name");
        fuzz_check(t->begin >= 0 && t->end <= f.data_bytes, "a tensor lies in the file");
        const int readable = t->dtype == SAFE_F32 || t->dtype == SAFE_BF16 || t->dtype == SAFE_F16;
        const int rc = safetensors_read(&f, t, 0, n, first, error, sizeof error) | safetensors_read(&f, t, t->count - n, n, last, error, sizeof error);
        fuzz_check(!readable || rc == 0, "values can be read");
        fuzz_check(safetensors_read(&f, t, t->count, 1, first, error, sizeof error) != 0, "values beyond the end cannot");
    }
    safetensors_close(&f);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_safetensors, data, size);
    return 0;
}
