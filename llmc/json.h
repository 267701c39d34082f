// json.h: cJSON with errors that name file, line and key, and with numbers and text that are always valid JSON.
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <math.h>
#include <strings.h>

#if __has_include(<cjson/cJSON.h>)
#include <cjson/cJSON.h>
#else
#include <cJSON.h>
#endif

#include "file.h"
#include "utf8.h"

#define JSON_INTEGER_MAX 9007199254740992.0  // 2^53: beyond it a JSON number (float64) may not be what was written

// A JSON object from `size` bytes of text; `where` names them in errors. NULL: the reason is in error. The caller deletes it.
FN cJSON *json_parse_object(const char *text, size_t size, const char *where, char *error, size_t error_size) {
    const char *end = text;
    cJSON *j = NULL;
    if (memchr(text, '\0', size)) {  // cJSON would stop there
        set_error(error, error_size, "%s: is not JSON: it holds a zero byte", where);
        return NULL;
    }
    j = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    if (j) while (end < text + size && strchr(" \t\r\n", *end)) end++;
    if (!j || end < text + size) {
        int line = 1;
        for (const char *p = text; p < end; p++) line += *p == '\n';
        set_error(error, error_size, "%s: is not valid JSON at line %d (byte %lld)", where, line, (long long)(end - text));
        cJSON_Delete(j);
        return NULL;
    }
    if (!cJSON_IsObject(j)) {
        set_error(error, error_size, "%s: a JSON object {...} was expected", where);
        cJSON_Delete(j);
        return NULL;
    }
    return j;
}
FN cJSON *json_read_object(const char *path, int64_t limit, char *error, size_t error_size) {
    int64_t size = 0;
    char *text = file_read_text(path, limit, &size, error, error_size);
    if (!text) return NULL;
    cJSON *j = json_parse_object(text, (size_t)size, path, error, error_size);
    free(text);
    return j;
}
FN const char *json_type_name(const cJSON *j) {
    return cJSON_IsNumber(j) ? "a number" : cJSON_IsString(j) ? "a string" : cJSON_IsBool(j) ? "true or false"
         : cJSON_IsArray(j) ? "a list" : cJSON_IsObject(j) ? "an object" : "null";
}
// Keys of an object are compared exactly (cJSON's own look-up ignores case unless asked).
FN const cJSON *json_get(const cJSON *object, const char *key) { return cJSON_GetObjectItemCaseSensitive(object, key); }

// A number that must be there, within [low, high]. 0 or -1.
FN int json_real(const cJSON *object, const char *where, const char *key, double low, double high, double *value, char *error, size_t error_size) {
    const cJSON *j = json_get(object, key);
    if (!j) return set_error(error, error_size, "%s: key \"%s\" is missing; a number is expected", where, key);
    if (!cJSON_IsNumber(j))
        return set_error(error, error_size, "%s: key \"%s\" holds %s; a number is expected", where, key, json_type_name(j));
    if (!(j->valuedouble >= low && j->valuedouble <= high))
        return set_error(error, error_size, "%s: key \"%s\" is %.17g; it must be from %.17g to %.17g",
                         where, key, j->valuedouble, low, high);
    *value = j->valuedouble;
    return 0;
}
FN int json_integer(const cJSON *object, const char *where, const char *key, int64_t low, int64_t high, int64_t *value, char *error, size_t error_size) {
    double x = 0;
    if (json_real(object, where, key, (double)low, (double)high, &x, error, error_size) != 0) return -1;
    if (x != floor(x) || fabs(x) > JSON_INTEGER_MAX)
        return set_error(error, error_size, "%s: key \"%s\" is %.17g; a whole number is expected", where, key, x);
    *value = (int64_t)x;
    return 0;
}
// A string that must be there. NULL: the reason is in error.
FN const char *json_text(const cJSON *object, const char *where, const char *key, char *error, size_t error_size) {
    const cJSON *j = json_get(object, key);
    if (j && cJSON_IsString(j)) return j->valuestring;
    set_error(error, error_size, "%s: key \"%s\" %s%s; a string is expected", where, key, j ? "holds " : "is missing",
              j ? json_type_name(j) : "");
    return NULL;
}
// The first key that an object holds twice, NULL if none: which of the two was meant cannot be known.
FN const char *json_duplicate_key(const cJSON *object) {
    for (const cJSON *a = object->child; a; a = a->next)
        for (const cJSON *b = a->next; b; b = b->next)
            if (strcmp(a->string, b->string) == 0) return a->string;
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// cJSON's builders return NULL when memory is out.
FN cJSON *json_new_object(void) {
    cJSON *j = cJSON_CreateObject();
    if (!j) fatal("out of memory while writing JSON");
    return j;
}
FN void json_add(cJSON *object, const char *key, cJSON *item) {
    if (!item || !cJSON_AddItemToObject(object, key, item)) fatal("out of memory while writing JSON");
}
// A float64 in as few digits (15 to 17) as read back to the same float64: cJSON's own printing is a little off for some. NaN
// and infinity have no JSON: null.
FN cJSON *json_number(double x) {
    char text[64];
    if (!isfinite(x)) return cJSON_CreateNull();
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    return cJSON_CreateRaw(text);
}
FN void json_add_number(cJSON *object, const char *key, double x) { json_add(object, key, json_number(x)); }
FN void json_add_bool(cJSON *object, const char *key, int x) { json_add(object, key, cJSON_CreateBool(x)); }

// Copies text of any bytes to valid UTF-8 without zero bytes: what is not becomes U+FFFD. To be freed.
FN char *utf8_clean(const char *text, size_t n) {
    char *out = (char *)xcalloc(3 * n + 1, 1), *o = out;
    for (size_t i = 0; i < n;) {
        int length = text[i] ? utf8_length((const unsigned char *)text + i, n - i) : 0;
        memcpy(o, length ? text + i : "\xEF\xBF\xBD", (size_t)(length ? length : 3));
        o += length ? length : 3;
        i += (size_t)(length ? length : 1);
    }
    return out;
}
FN void json_add_text(cJSON *object, const char *key, const char *text) {
    char *clean = utf8_clean(text, strlen(text));
    json_add(object, key, cJSON_CreateString(clean));
    free(clean);
}
// A float32 in as few digits (6 to 9) as read back to the same float32. NaN and infinity have no JSON: null, and KEY_text
// says which.
FN void json_add_float(cJSON *object, const char *key, float x) {
    char text[128];
    if (isfinite(x)) {
        for (int digits = 6; digits <= 9; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, (double)x);
            if (strtof(text, NULL) == x) break;
        }
        json_add(object, key, cJSON_CreateRaw(text));
        return;
    }
    json_add(object, key, cJSON_CreateNull());
    snprintf(text, sizeof text, "%s_text", key);
    json_add_text(object, text, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}
// The object as text in one line (pretty = 0) or indented, to be freed.
FN char *json_print(const cJSON *j, int pretty) {
    char *text = pretty ? cJSON_Print(j) : cJSON_PrintUnformatted(j);
    if (!text) fatal("out of memory while writing JSON");
    return text;
}

#endif
