// test_selfcheck_gpu.cu: --check on a card: all of it is right, and it notices what is not: a byte of a packed operand's codes, of its scales, of their
// padding; a product by another alpha; on a card without FP4 tensor cores `native` is an error and `auto` emulated.
#include <sys/wait.h>

#include "llmc/cuda/selfcheck.cuh"

#include "check.h"

static void packed_faults(Gemm *g) {
    DeviceArena arena;
    arena.count = 0;
    const int64_t rows = 200, k = 352;
    const ForwardOperand o = forward_operand(&arena, rows, k, 9, NULL, NULL);
    const Nvfp4Operand packed = {o.codes, o.tiled};
    float *values = emulated_values(o.values, rows, k, 0);
    check(operand_differences(packed, values, rows, k, NULL) == 0, "a packed operand of %d x %d holds the emulated one", (int)rows, (int)k);
    struct { const char *what; uint8_t *at; uint8_t flip; int64_t least, most; } faults[] = {
        {"a code", o.codes + 4321, 0x03, 1, 1}, {"a block's scale", o.tiled + tiled_scale_offset(133, 7, k / 16), 0x08, 1, 16},
        {"padding behind the rows", o.tiled + tiled_scale_offset(201, 3, k / 16), 0x38, -1, -1}, {"padding behind the columns", o.tiled + tiled_scale_offset(5, 22, k / 16), 0x38, -1, -1}};
    for (int i = 0; i < 4; i++) {
        uint8_t was, now;
        CUDA_CHECK(cudaMemcpy(&was, faults[i].at, 1, cudaMemcpyDeviceToHost));
        now = was ^ faults[i].flip;
        CUDA_CHECK(cudaMemcpy(faults[i].at, &now, 1, cudaMemcpyHostToDevice));
        const int64_t n = operand_differences(packed, values, rows, k, NULL);
        check(n >= faults[i].least && n <= faults[i].most, "a wrong byte in %s is noticed (%d)", faults[i].what, (int)n);
        CUDA_CHECK(cudaMemcpy(faults[i].at, &was, 1, cudaMemcpyHostToDevice));
    }
    free(values);
    arena_free(&arena);
    (void)g;
}
// A product of the right operands, measured against operands whose neighbouring blocks of 16 are exchanged: what a wrong layout looks like.
static void product_faults(Gemm *g) {
    DeviceArena arena;
    ProductCheck c;
    arena.count = 0;
    memset(&c, 0, sizeof c);
    float *alpha = (float *)arena_take(&arena, 4);
    const ForwardOperand w = forward_operand(&arena, 256, 512, 1, NULL, NULL), x = forward_operand(&arena, 128, 512, 2, w.st, alpha);
    c.name = "forward"; c.m = 128; c.n = 256; c.k = 512;
    c.a_values = x.values; c.b_values = w.values; c.b_transposed = 1; c.alpha = alpha;
    float *a = emulated_values(x.values, 128, 512, 0), *b = emulated_values(w.values, 256, 512, 0);
    for (int d_float32 = 0; d_float32 < 2; d_float32++) {
        const double right = product_run(g, &c, 0, d_float32, a, b);
        for (int64_t i = 0; i < 128 * 512; i += 32)
            for (int j = 0; j < 16; j++) { const float t = a[i + j]; a[i + j] = a[i + 16 + j]; a[i + 16 + j] = t; }
        const double wrong = product_run(g, &c, 0, d_float32, a, b);
        for (int64_t i = 0; i < 128 * 512; i += 32)
            for (int j = 0; j < 16; j++) { const float t = a[i + j]; a[i + j] = a[i + 16 + j]; a[i + 16 + j] = t; }
        check(right <= 1 && wrong > 10, "%s: error %.3f of its bound, %.0f with blocks exchanged", d_float32 ? "float32" : "BF16", right, wrong);
    }
    free(a); free(b);
    arena_free(&arena);
}
static void choice(Gemm *g) {
    char why[256];
    const int supported = nvfp4_gemm_supported(g, why, sizeof why);
    check(nvfp4_gemm_native(g, NVFP4_GEMM_AUTO, why, sizeof why) == supported, "auto: %s: %s", supported ? "native" : "emulated", why);
    check(nvfp4_gemm_native(g, NVFP4_GEMM_EMULATED, why, sizeof why) == 0, "emulated is emulated");
    if (supported) check(nvfp4_gemm_native(g, NVFP4_GEMM_NATIVE, why, sizeof why) == 1, "native is native");
}

int main(int argc, char **argv) {
    // What `native` says where it cannot be: in a process of its own, as it ends it. ("native-only" is this program's own call of itself.)
    DeviceArena arena;
    Gemm g;
    arena.count = 0;
    gemm_open(&g, arena_take(&arena, (int64_t)GEMM_WORKSPACE_BYTES), arena_take(&arena, 32), 0);
    char why[256];
    if (argc == 2 && strcmp(argv[1], "native-only") == 0) return !nvfp4_gemm_native(&g, NVFP4_GEMM_NATIVE, why, sizeof why);
    check(selfcheck_run_gpu("/tmp") == 0, "--check finds this machine right");
    packed_faults(&g);
    product_faults(&g);
    choice(&g);
    if (!nvfp4_gemm_supported(&g, why, sizeof why)) {
        char *command = xasprintf("'%s' native-only 2>/dev/null", argv[0]);
        const int status = system(command);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 1, "--nvfp4-gemm native is an error on this card (exit status %d)", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        free(command);
    }
    gemm_close(&g);
    arena_free(&arena);
    return checks_finish();
}
