// options.h: a table of named options, read three ways from the same rows: the command line (getopt_long), a JSON file, and
// --help. A value lies in a field of the caller's struct: int64_t (whole number, choice, bool), double, or char[OPTION_TEXT].
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <getopt.h>
#include <stddef.h>

#include "json.h"

#define OPTION_TEXT 1024             // bytes of a text option, its final zero included

typedef enum {
    OPTION_STRING,
    OPTION_INTEGER,                  // whole number; k, M, B, and Ki, Mi, Gi may follow
    OPTION_REAL,
    OPTION_CHOICE,                   // one of `choices`; stored as its place in the list
    OPTION_BOOL,                     // true or false
    OPTION_ACTION                    // takes no value; the caller acts on it
} OptionKind;
typedef enum { BY_DEFAULT, BY_FILE, BY_COMMAND_LINE } OptionSource;

typedef struct {
    const char *group;               // heading in --help
    const char *name;                // without the dashes; also the JSON key
    OptionKind kind;
    size_t offset;                   // of the field in the caller's struct
    const char *initial;             // default, in the syntax of the command line; NULL: zero, and the caller decides later
    double low, high;                // bounds of a number
    const char *choices;             // "a|b|c"
    const char *placeholder;         // what --help shows for the value
    const char *help;                // one line
} Option;

// ---------------------------------------------------------------------------------------------------------------------
// Text to values. All of the text must be the number: no spaces, no hexadecimal, no "inf" or "nan", no rest.

// "262144", "256Ki", "1.5M", "3B". 0 or -1: not a whole number, or beyond 2^53.
FN int parse_whole(const char *text, int64_t *value) {
    static const struct { const char *suffix; int64_t factor; } units[] = {
        {"", 1}, {"k", 1000}, {"M", 1000000}, {"B", 1000000000}, {"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}};
    const char *p = text + (*text == '-');
    int64_t digits = 0, divisor = 1, factor = 0, scaled;
    int count = 0, point = 0;
    for (; (*p >= '0' && *p <= '9') || (*p == '.' && !point); p++) {
        if (*p == '.') { point = 1; continue; }
        if (count++ >= 16) return -1;
        digits = digits * 10 + (*p - '0');
        if (point) divisor *= 10;
    }
    if (count == 0 || p[-1] == '.') return -1;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(p, units[i].suffix) == 0) factor = units[i].factor;
    if (factor == 0 || __builtin_mul_overflow(digits, factor, &scaled) || scaled % divisor != 0) return -1;
    scaled /= divisor;
    if (scaled > (int64_t)JSON_INTEGER_MAX) return -1;
    *value = *text == '-' ? -scaled : scaled;
    return 0;
}
FN int parse_real(const char *text, double *value) {
    char *end;
    if (!text[0] || text[strspn(text, "0123456789.eE+-")] != '\0') return -1;
    *value = strtod(text, &end);
    return *end == '\0' && isfinite(*value) ? 0 : -1;
}
// The place of `text` in "a|b|c", -1 if it is not there.
FN int choice_index(const char *choices, const char *text) {
    size_t n = strlen(text);
    int index = 0;
    for (const char *p = choices; *p; index++) {
        size_t length = strcspn(p, "|");
        if (length == n && strncmp(p, text, n) == 0) return index;
        p += length + (p[length] == '|');
    }
    return -1;
}
// Choice number `index` into name[64].
FN void choice_name(const char *choices, int64_t index, char name[64]) {
    const char *p = choices;
    for (; index > 0 && *p; index--) p += strcspn(p, "|") + 1;
    snprintf(name, 64, "%.*s", (int)strcspn(p, "|"), p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Storing

// What a value of the option must look like.
FN void option_expected(const Option *o, char *text, size_t size) {
    switch (o->kind) {
    case OPTION_INTEGER: snprintf(text, size, "a whole number from %.0f to %.0f", o->low, o->high); break;
    case OPTION_REAL: snprintf(text, size, "a number from %g to %g", o->low, o->high); break;
    case OPTION_CHOICE: snprintf(text, size, "one of %s", o->choices); break;
    case OPTION_BOOL: snprintf(text, size, "true or false"); break;
    default: snprintf(text, size, "text of at most %d bytes", OPTION_TEXT - 1);
    }
}
FN int64_t *option_integer(const Option *o, void *base) { return (int64_t *)(void *)((char *)base + o->offset); }
FN double *option_real(const Option *o, void *base) { return (double *)(void *)((char *)base + o->offset); }
FN char *option_string(const Option *o, void *base) { return (char *)base + o->offset; }

// Stores a value given as text. 0, or -1: it is not what option_expected() says.
FN int option_set_text(const Option *o, void *base, const char *text) {
    int64_t whole = 0;
    double real = 0;
    switch (o->kind) {
    case OPTION_INTEGER:
        if (parse_whole(text, &whole) != 0 || (double)whole < o->low || (double)whole > o->high) return -1;
        *option_integer(o, base) = whole;
        return 0;
    case OPTION_REAL:
        if (parse_real(text, &real) != 0 || real < o->low || real > o->high) return -1;
        *option_real(o, base) = real;
        return 0;
    case OPTION_CHOICE:
    case OPTION_BOOL:
        whole = choice_index(o->kind == OPTION_BOOL ? "false|true" : o->choices, text);
        if (whole < 0) return -1;
        *option_integer(o, base) = whole;
        return 0;
    default:
        if (strlen(text) >= OPTION_TEXT) return -1;
        snprintf(option_string(o, base), OPTION_TEXT, "%s", text);
        return 0;
    }
}
// Stores a JSON value: of the option's own type; whole numbers may also be text ("3B"). 0 or -1.
FN int option_set_json(const Option *o, void *base, const cJSON *j) {
    if (cJSON_IsString(j) && o->kind != OPTION_REAL && o->kind != OPTION_BOOL) return option_set_text(o, base, j->valuestring);
    if (cJSON_IsBool(j) && o->kind == OPTION_BOOL) { *option_integer(o, base) = cJSON_IsTrue(j); return 0; }
    if (!cJSON_IsNumber(j) || !(j->valuedouble >= o->low && j->valuedouble <= o->high)) return -1;
    if (o->kind == OPTION_REAL) { *option_real(o, base) = j->valuedouble; return 0; }
    if (o->kind != OPTION_INTEGER || j->valuedouble != floor(j->valuedouble)) return -1;
    *option_integer(o, base) = (int64_t)j->valuedouble;
    return 0;
}
FN void option_add_json(const Option *o, const void *base, cJSON *object) {
    char name[64];
    const char *field = (const char *)base + o->offset;
    switch (o->kind) {
    case OPTION_INTEGER: json_add_number(object, o->name, (double)*(const int64_t *)(const void *)field); break;
    case OPTION_REAL: json_add_number(object, o->name, *(const double *)(const void *)field); break;
    case OPTION_BOOL: json_add_bool(object, o->name, *(const int64_t *)(const void *)field != 0); break;
    case OPTION_CHOICE:
        choice_name(o->choices, *(const int64_t *)(const void *)field, name);
        json_add_text(object, o->name, name);
        break;
    default: json_add_text(object, o->name, field);
    }
}
FN void options_defaults(const Option *table, int count, void *base) {
    for (int i = 0; i < count; i++)
        if (table[i].initial && option_set_text(&table[i], base, table[i].initial) != 0)
            fatal("the default of --%s is not a value of it: this is a bug", table[i].name);
}

// ---------------------------------------------------------------------------------------------------------------------
// Finding

FN int option_find(const Option *table, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0) return i;
    return -1;
}
// Number of letters to insert, remove or replace to turn a into b (Levenshtein), for "did you mean".
FN int edit_distance(const char *a, const char *b) {
    enum { LONGEST = 63 };
    int n = (int)strlen(b), row[LONGEST + 1];
    if (n > LONGEST) n = LONGEST;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1] && i <= LONGEST; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}
// The row whose name is nearest to `name`, or NULL when none is near enough to be meant: two letters (two that changed places) or a third.
FN const char *option_nearest(const Option *table, int count, const char *name) {
    const int length = (int)strlen(name);
    int best = 0;
    for (int i = 1; i < count; i++)
        if (edit_distance(name, table[i].name) < edit_distance(name, table[best].name)) best = i;
    const int near = length < 3 ? 1 : length < 6 ? 2 : length / 3;
    return edit_distance(name, table[best].name) <= near ? table[best].name : NULL;
}
// What other trainers call things, the row that it belongs to here, and what to say of it.
static const struct { const char *name, *row, *say; } OPTION_ELSEWHERE[] = {
    {"deterministic", "seed", "every run is; leave it out"},
    {"learning-rate", "lr", "here it is --lr"},
    {"min-learning-rate", "min-lr", "here it is --min-lr, as a share of the peak"},
    {"batch-size", "batch", "here it is --batch, sequences a micro-batch on each device, and --total-batch, tokens a step"},
    {"global-batch-size", "total-batch", "here it is --total-batch, in tokens"},
    {"grad-accum", "total-batch", "set by --total-batch, tokens a step"},
    {"gradient-accumulation-steps", "total-batch", "set by --total-batch, tokens a step"},
    {"seq-len", "seq", "here it is --seq"},
    {"seq-length", "seq", "here it is --seq"},
    {"epochs", "tokens", "set by --steps or --tokens"},
    {"dtype", "recipe", "here it is --recipe"},
    {"precision", "recipe", "here it is --recipe"},
    {"input-bin", "train-data", "here it is --train-data"},
    {"output-dir", "out", "here it is --out"},
    {"grad-clip", "clip", "here it is --clip"},
};
// What to add to "there is no such option" for `name` of the command line or of a file. Empty when nothing helps.
FN void option_suggest(const Option *table, int count, const char *name, int in_file, char *text, size_t size) {
    char plain[64];  // with the dashes of the command line, as "batch_size" in a file or a habit
    snprintf(plain, sizeof plain, "%s", name);
    for (char *p = plain; *p; p++)
        if (*p == '_') *p = '-';
    for (size_t i = 0; i < sizeof OPTION_ELSEWHERE / sizeof OPTION_ELSEWHERE[0]; i++)
        if (strcmp(plain, OPTION_ELSEWHERE[i].name) == 0 && option_find(table, count, OPTION_ELSEWHERE[i].row) >= 0) {
            snprintf(text, size, "; %s", OPTION_ELSEWHERE[i].say);
            return;
        }
    const char *nearest = option_nearest(table, count, option_find(table, count, plain) >= 0 ? plain : name);
    if (!nearest) text[0] = 0;
    else snprintf(text, size, in_file ? "; did you mean \"%s\"?" : "; did you mean --%s?", nearest);
}

// ---------------------------------------------------------------------------------------------------------------------
// The three readers

// What --help shows for the value.
FN const char *option_hint(const Option *o) {
    return o->kind == OPTION_BOOL ? "true|false" : o->kind == OPTION_ACTION ? "" : o->choices ? o->choices : o->placeholder;
}

// Called for each option of the command line, in order, with its row and value (NULL for an action).
typedef void OptionVisitor(void *context, int row, const char *value);

// Walks the command line; what it cannot understand is a usage error (exit 2). Names must be given in full: an abbreviation
// would change its meaning on the day a longer name is added.
FN void options_walk(const Option *table, int count, int argc, char **argv, OptionVisitor *visit, void *context) {
    struct option *rows = (struct option *)xcalloc((size_t)count + 1, sizeof *rows);
    int answer, row = -1;
    for (int i = 0; i < count; i++) {
        rows[i].name = table[i].name;
        rows[i].has_arg = table[i].kind == OPTION_ACTION ? no_argument : required_argument;
    }
    optind = 0;  // glibc: start anew
    opterr = 0;
    while ((answer = getopt_long(argc, argv, ":", rows, &row)) != -1) {
        const char *word = argv[optind - 1], *name;
        if (answer != 0) {
            if (optopt) fatal_usage("-%c: there are no one-letter options; see --help", optopt);
            char bare[64];
            name = word + strspn(word, "-");
            snprintf(bare, sizeof bare, "%.*s", (int)strcspn(name, "="), name);
            int known = option_find(table, count, bare);
            if (known < 0) {
                char suggestion[160];
                option_suggest(table, count, bare, 0, suggestion, sizeof suggestion);
                fatal_usage("%s: there is no such option%s. See --help", word, suggestion);
            }
            if (answer == ':') fatal_usage("--%s needs a value (%s); see --help", bare, option_hint(&table[known]));
            fatal_usage("--%s takes no value", bare);
        }
        if (optarg == word) word = argv[optind - 2];
        name = word + 2;
        if (strcspn(name, "=") != strlen(table[row].name))
            fatal_usage("%.*s: write --%s in full", (int)strcspn(word, "="), word, table[row].name);
        visit(context, row, optarg);
    }
    if (optind < argc) fatal_usage("%s: only options are expected, each as --name value; see --help", argv[optind]);
    free(rows);
}
// Reads a JSON file whose keys are options' names. `from[row]` is set to BY_FILE for each. 0, or -1 with the reason.
FN int options_read_json(const Option *table, int count, void *base, uint8_t *from, const char *path, char *error, size_t error_size) {
    cJSON *object = json_read_object(path, 1 << 16, error, error_size);
    if (!object) return -1;
    int rc = 0;
    const char *twice = json_duplicate_key(object);
    if (twice) rc = set_error(error, error_size, "%s: key \"%s\" is given twice", path, twice);
    for (const cJSON *j = object->child; j && rc == 0; j = j->next) {
        int row = option_find(table, count, j->string);
        if (row < 0) {
            char suggestion[160];
            option_suggest(table, count, j->string, 1, suggestion, sizeof suggestion);
            rc = set_error(error, error_size, "%s: there is no option \"%s\"%s", path, j->string, suggestion);
        } else if (table[row].kind == OPTION_ACTION || strcmp(table[row].name, "config") == 0) {
            rc = set_error(error, error_size, "%s: \"%s\" is for the command line only", path, j->string);
        } else if (option_set_json(&table[row], base, j) != 0) {
            char expected[256], *value = json_print(j, 0);
            option_expected(&table[row], expected, sizeof expected);
            rc = set_error(error, error_size, "%s: key \"%s\" is %.80s; %s is expected", path, j->string, value, expected);
            free(value);
        } else {
            from[row] = BY_FILE;
        }
    }
    cJSON_Delete(object);
    return rc;
}
FN void options_help(const Option *table, int count, FILE *f) {
    const char *group = "";
    for (int i = 0; i < count; i++) {
        const Option *o = &table[i];
        char left[128];
        if (strcmp(group, o->group) != 0) fprintf(f, "\n%s\n", o->group);
        group = o->group;
        snprintf(left, sizeof left, "--%s %s", o->name, option_hint(o));
        fprintf(f, "  %-38s %s", left, o->help);
        if (o->initial && o->initial[0]) fprintf(f, " [%s]", o->initial);
        fputc('\n', f);
    }
}

#endif
