// golden.h: reads the golden vectors of dev/test/golden, made by dev/reference/quantize_reference.py.
//
// gauss, edge, zeros: a 32 x 256 matrix each. x: float32 bit patterns, 8 hex digits a value, row-major. words_per_value,
// words_per_block: the random words that the stochastic quantizers consume, in index order. sign_bits: 128 rotation signs,
// 1 = minus. quantizers: codes, one hex digit a value (bit 3 = sign; code 8, minus zero, equals code 0); scales, two hex
// digits a block, row-major; tensor_scale, float32 bits. mx_*: exponents of the E8M0 scales, mask of |v| < 6.
// posthoc: the quantizer ms_eden_posthoc_128 on each of the three. formats: conversions, input and expected code.
#ifndef TEST_GOLDEN_H
#define TEST_GOLDEN_H

#include "llmc/json.h"

// The parsed file dev/test/golden/NAME.json, to be freed by cJSON_Delete.
FN cJSON *golden_open(const char *name) {
    char path[256], error[ERROR_TEXT];
    snprintf(path, sizeof path, "dev/test/golden/%s.json", name);
    cJSON *j = json_read_object(path, 1 << 24, error, sizeof error);
    if (!j) fatal("%s; run the tests from the repository root", error);
    return j;
}
// The hex digits of a key, `digits` a number. -> count numbers, to be freed by the caller.
FN uint32_t *golden_hex(const cJSON *object, const char *key, int digits, int64_t *count) {
    const cJSON *item = json_get(object, key);
    if (!cJSON_IsString(item)) fatal("golden vectors: key \"%s\" is missing or not a string", key);
    const char *s = item->valuestring;
    const size_t length = strlen(s);
    if (length % (size_t)digits) fatal("golden vectors: \"%s\" holds %zu digits, not a multiple of %d", key, length, digits);
    *count = (int64_t)(length / (size_t)digits);
    uint32_t *v = (uint32_t *)xcalloc((size_t)*count, sizeof(uint32_t));
    for (int64_t i = 0; i < *count; i++) {
        char number[9] = "";
        memcpy(number, s + i * digits, (size_t)digits);
        char *end;
        v[i] = (uint32_t)strtoul(number, &end, 16);
        if (*end) fatal("golden vectors: \"%s\" is not hexadecimal at digit %lld", key, (long long)(i * digits));
    }
    return v;
}

#endif
