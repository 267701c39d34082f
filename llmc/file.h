// file.h: files that are written whole or not at all: checked reads and writes, checksums, folders.
//
// Functions that return int return 0, or -1 with one line in `error` (what, where, what to do), so that a caller can pass
// over a bad file, clean up after a failed write, or stop.
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

#define ERROR_TEXT 1024              // bytes of an error line
#define PATH_TEXT 4096               // bytes of a path

// Fills `error` and returns -1, so that a check reads `if (bad) return set_error(error, size, "...", ...)`.
PRINTF_LIKE(3, 4)
static int set_error(char *error, size_t size, const char *format, ...) {
    va_list args; va_start(args, format);
    vsnprintf(error, size, format, args);
    va_end(args);
    text_one_line(error);
    return -1;
}
// folder/name into path (PATH_TEXT bytes); too long a path is fatal.
FN void path_join(char *path, const char *folder, const char *name) {
    if (snprintf(path, PATH_TEXT, "%s/%s", folder, name) >= PATH_TEXT)
        fatal("%s/%s: the path is longer than %d bytes; use a shorter --out", folder, name, PATH_TEXT - 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), eight bytes at a time. Start with crc = 0.

static uint32_t crc32c_table[8][256];

FN void crc32c_init(void) {
    if (crc32c_table[0][1]) return;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (c & 1 ? 0x82F63B78u : 0u);
        crc32c_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            crc32c_table[k][i] = (crc32c_table[k - 1][i] >> 8) ^ crc32c_table[0][crc32c_table[k - 1][i] & 0xFF];
}
FN uint32_t crc32c(uint32_t crc, const void *data, size_t size) {
    const uint8_t *p = (const uint8_t *)data;
    crc32c_init();
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = crc32c_table[7][low & 0xFF] ^ crc32c_table[6][(low >> 8) & 0xFF] ^ crc32c_table[5][(low >> 16) & 0xFF] ^
              crc32c_table[4][low >> 24] ^ crc32c_table[3][p[4]] ^ crc32c_table[2][p[5]] ^ crc32c_table[1][p[6]] ^
              crc32c_table[0][p[7]];
    }
    for (; size > 0; size--, p++) crc = (crc >> 8) ^ crc32c_table[0][(crc ^ *p) & 0xFF];
    return ~crc;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Exactly `size` bytes at `offset`. 0, or -1 with the reason.
FN int file_read_at(int fd, const char *path, void *data, int64_t size, int64_t offset, char *error, size_t error_size) {
    char *p = (char *)data;
    for (int64_t done = 0; done < size;) {
        ssize_t n = pread(fd, p + done, (size_t)(size - done), (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return set_error(error, error_size, "%s: cannot read at byte %lld: %s", path, (long long)(offset + done), strerror(errno));
        if (n == 0)
            return set_error(error, error_size, "%s: ends at byte %lld, but %lld bytes were expected from byte %lld", path,
                        (long long)(offset + done), (long long)size, (long long)offset);
        done += n;
    }
    return 0;
}
// Opens a regular file for reading. -> file descriptor and its size, or -1 with the reason.
FN int file_open(const char *path, int64_t *size, char *error, size_t error_size) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);        // a FIFO would wait here for its writer; regular files do not mind
    if (fd < 0) return set_error(error, error_size, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return set_error(error, error_size, "%s: is not a regular file", path);
    }
    *size = (int64_t)st.st_size;
    return fd;
}
// A whole text file of at most `limit` bytes, zero-terminated, to be freed. NULL: the reason is in error.
FN char *file_read_text(const char *path, int64_t limit, int64_t *size, char *error, size_t error_size) {
    int fd = file_open(path, size, error, error_size);
    if (fd < 0) return NULL;
    char *text = NULL;
    if (*size > limit) {
        set_error(error, error_size, "%s: holds %lld bytes; at most %lld are accepted here", path, (long long)*size, (long long)limit);
    } else {
        text = (char *)xcalloc((size_t)*size + 1, 1);
        if (file_read_at(fd, path, text, *size, 0, error, error_size) != 0) { free(text); text = NULL; }
    }
    close(fd);
    return text;
}
// CRC-32C of a file that must hold `size` bytes. 0, or -1 with the reason.
FN int file_checksum(const char *path, int64_t expected_size, uint32_t *crc, char *error, size_t error_size) {
    const int64_t CHUNK = 1 << 20;
    int64_t size;
    int fd = file_open(path, &size, error, error_size), rc = 0;
    if (fd < 0) return -1;
    if (size != expected_size) {
        close(fd);
        return set_error(error, error_size, "%s: holds %lld bytes, not the %lld that were written",
                         path, (long long)size, (long long)expected_size);
    }
    void *chunk = xcalloc((size_t)CHUNK, 1);
    *crc = 0;
    for (int64_t at = 0; at < size && rc == 0; at += CHUNK) {
        int64_t n = size - at < CHUNK ? size - at : CHUNK;
        rc = file_read_at(fd, path, chunk, n, at, error, error_size);
        if (rc == 0) *crc = crc32c(*crc, chunk, (size_t)n);
    }
    free(chunk);
    close(fd);
    return rc;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing: bytes go through a buffer and are counted and summed on the way. The first error sticks; later writes do nothing
// and writer_close() reports it.

enum { WRITER_BUFFER = 1 << 20 };

typedef struct {
    int fd, failed;
    char path[PATH_TEXT];
    char *error; size_t error_size;  // the caller's, filled on the first error
    uint8_t *buffer; size_t fill;
    int64_t size;                    // bytes taken so far
    uint32_t crc;                    // of those bytes
} FileWriter;

FN int writer_fail(FileWriter *w, const char *what) {
    if (!w->failed)
        set_error(w->error, w->error_size, "%s: cannot %s: %s%s", w->path, what, strerror(errno),
             errno == ENOSPC || errno == EDQUOT ? "; free some space, or use another --out" : "");
    w->failed = 1;
    return -1;
}
// Creates the file (it must not exist). 0 or -1.
FN int writer_open(FileWriter *w, const char *path, char *error, size_t error_size) {
    memset(w, 0, sizeof *w);
    w->error = error; w->error_size = error_size;
    if (snprintf(w->path, sizeof w->path, "%s", path) >= (int)sizeof w->path) { errno = ENAMETOOLONG; w->fd = -1; return writer_fail(w, "create"); }
    w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0) return writer_fail(w, "create");
    w->buffer = (uint8_t *)xcalloc(WRITER_BUFFER, 1);
    return 0;
}
FN int writer_flush(FileWriter *w) {
    for (size_t done = 0; done < w->fill && !w->failed;) {
        ssize_t n = write(w->fd, w->buffer + done, w->fill - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) writer_fail(w, "write");
        else done += (size_t)n;
    }
    w->fill = 0;
    return w->failed ? -1 : 0;
}
FN int writer_put(FileWriter *w, const void *data, size_t size) {
    const uint8_t *p = (const uint8_t *)data;
    if (w->failed) return -1;
    w->size += (int64_t)size;
    w->crc = crc32c(w->crc, data, size);
    while (size > 0 && !w->failed) {
        size_t n = WRITER_BUFFER - w->fill < size ? WRITER_BUFFER - w->fill : size;
        memcpy(w->buffer + w->fill, p, n);
        w->fill += n; p += n; size -= n;
        if (w->fill == WRITER_BUFFER) writer_flush(w);
    }
    return w->failed ? -1 : 0;
}
// Flushes to the disk and closes. 0, or -1 if anything since writer_open failed.
FN int writer_close(FileWriter *w) {
    if (w->fd >= 0) {
        writer_flush(w);
        if (!w->failed && fsync(w->fd) != 0) writer_fail(w, "write to the disk");
        if (close(w->fd) != 0) writer_fail(w, "close");
    }
    free(w->buffer);
    w->buffer = NULL; w->fd = -1;
    return w->failed ? -1 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Folders

// Makes the names in a folder last: without it a rename may be lost with the power.
FN int folder_sync(const char *path, char *error, size_t error_size) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return set_error(error, error_size, "%s: cannot open the folder: %s", path, strerror(errno));
    int rc = fsync(fd);
    // Some network and FUSE file systems cannot sync a folder and say EINVAL: nothing better is to be had there.
    if (rc != 0 && errno != EINVAL) set_error(error, error_size, "%s: cannot write the folder to the disk: %s", path, strerror(errno));
    else rc = 0;
    close(fd);
    return rc;
}
// Makes the name of a file or folder last: flushes the folder that it lies in. One that may be written but not read cannot be.
FN int folder_sync_parent(const char *path, char *error, size_t size) {
    char parent[PATH_TEXT];
    const char *slash = strrchr(path, '/');
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) + (slash == path) : 1, slash ? path : ".");
    return access(parent, R_OK) == 0 ? folder_sync(parent, error, size) : 0;
}
// Creates a folder and its parents, whose names then last; one that exists is fine. 0 or -1.
FN int folder_create(const char *path, char *error, size_t error_size) {
    char partial[PATH_TEXT];
    struct stat st;
    if (snprintf(partial, sizeof partial, "%s", path) >= (int)sizeof partial || !path[0])
        return set_error(error, error_size, "%s: is not a usable folder name", path);
    for (char *p = partial + 1;; p++) {
        if (*p != '/' && *p != '\0') continue;
        char end = *p;
        *p = '\0';
        if (mkdir(partial, 0777) != 0) {
            int reason = errno;
            if (stat(partial, &st) != 0 || !S_ISDIR(st.st_mode))
                return set_error(error, error_size, "%s: cannot create the folder: %s", partial, strerror(reason));
        } else if (folder_sync_parent(partial, error, error_size) != 0) return -1;
        *p = end;
        if (end == '\0') return 0;
    }
}
// Removes a folder of plain files. A folder within it is not expected and left, with an error. Of a link in its place the link alone goes: what
// it leads to is somebody else's. 0 or -1.
FN int folder_remove(const char *path, char *error, size_t error_size) {
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISLNK(st.st_mode))
        return unlink(path) == 0 ? 0 : set_error(error, error_size, "%s: cannot remove the link: %s", path, strerror(errno));
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        set_error(error, error_size, "%s: cannot open the folder: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return -1;
    }
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (unlinkat(fd, e->d_name, 0) != 0) rc = set_error(error, error_size, "%s/%s: cannot remove: %s", path, e->d_name, strerror(errno));
    }
    closedir(d);
    if (rc == 0 && rmdir(path) != 0) rc = set_error(error, error_size, "%s: cannot remove the folder: %s", path, strerror(errno));
    return rc;
}

#endif
