// utf8.h: where a UTF-8 character ends, for text that comes from anywhere.
#ifndef LLMC_UTF8_H
#define LLMC_UTF8_H

#include "common.h"

// The length of the UTF-8 character at s (at most n bytes), 0 if there is none: overlong forms, surrogates and cut ends.
FN int utf8_length(const unsigned char *s, size_t n) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    int length = s[0] < 0x80 ? 1 : (s[0] & 0xE0) == 0xC0 ? 2 : (s[0] & 0xF0) == 0xE0 ? 3 : (s[0] & 0xF8) == 0xF0 ? 4 : 0;
    if (length == 0 || (size_t)length > n) return 0;
    uint32_t c = length == 1 ? s[0] : s[0] & (0xFFu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
        c = c << 6 | (s[i] & 0x3Fu);
    }
    return c < least[length] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF) ? 0 : length;
}

#endif
