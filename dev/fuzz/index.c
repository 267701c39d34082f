// The index of a sharded Hugging Face checkpoint: whatever name it gives stays in the folder.
#include "fuzz.h"
#include "dev/test/fake_backend.h"
#include "llmc/init_from.h"

static void read_index(const char *path) {
    char error[ERROR_TEXT] = "";
    const char *names[HF_FILES_MAX];
    cJSON *j = json_read_object(path, HF_INDEX_MAX, error, sizeof error);
    if (!j) return;
    const int n = hf_index_files(j, path, names, error, sizeof error);
    fuzz_check(n <= HF_FILES_MAX && (n != -1 || error[0]), "a refusal has a reason");
    for (int i = 0; i < n; i++) {
        fuzz_check(!strchr(names[i], '/') && names[i][0] != '.' && strstr(names[i], ".safetensors") != NULL, "a plain name");
        for (int k = 0; k < i; k++) fuzz_check(strcmp(names[i], names[k]) != 0, "each name once");
    }
    cJSON_Delete(j);
}
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    (void)fuzz_run(read_index, data, size);
    return 0;
}
