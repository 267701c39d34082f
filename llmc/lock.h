// lock.h: one run a folder. Two would mix their logs and checkpoints.
//
// OUT/.lock is held by flock(2) for the life of the process: the kernel lets go of it however the process ends, so that a lock
// cannot be stale; what the file says (process, host) is only for the message. Where the file system is shared between hosts,
// Linux passes flock on to the server (NFS 2.6.12 on). File systems without locks go unguarded, with a warning.
#ifndef LLMC_LOCK_H
#define LLMC_LOCK_H

#include <sys/file.h>

#include "file.h"

typedef struct { int fd; char path[PATH_TEXT]; } FolderLock;  // fd -1: not held
static FolderLock folder_lock = {-1, ""};                     // the process's: it has one run
static void (*lock_before_release)(void);                     // ends what still writes into the folder; NULL: nothing does

// Who holds the lock, as its file says.
FN void lock_holder(int fd, char *text, size_t size) {
    const ssize_t n = pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    for (char *p = text; *p; p++) if ((unsigned char)*p < 0x20 || (unsigned char)*p >= 0x7F) *p = '?';  // it may hold anything
    if (!text[0]) snprintf(text, size, "an unknown process");
}
FN void lock_write_holder(void) {
    const FolderLock *l = &folder_lock;
    char host[256] = "", text[320];
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "unknown");
    const int n = snprintf(text, sizeof text, "process %ld on %s\n", (long)getpid(), host);
    // A full disk leaves the file empty: the lock holds all the same.
    if (ftruncate(l->fd, 0) == 0 && pwrite(l->fd, text, (size_t)n, 0) != n) (void)ftruncate(l->fd, 0);
}
FN void lock_release(void) {
    if (folder_lock.fd < 0) return;
    if (lock_before_release) lock_before_release();
    (void)unlink(folder_lock.path);  // while it is held: nobody else can have it
    close(folder_lock.fd);
    folder_lock.fd = -1;
}
// Takes the lock of a folder that exists, until the process ends or lock_release(). One held by another process is fatal; so is
// a folder that cannot be written.
FN void lock_take(const char *folder) {
    FolderLock *l = &folder_lock;
    path_join(l->path, folder, ".lock");
    for (;;) {
        struct stat held, named;
        l->fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (l->fd < 0) fatal("%s: cannot open for writing: %s; use another --out", l->path, strerror(errno));
        int rc;
        do rc = flock(l->fd, LOCK_EX | LOCK_NB); while (rc != 0 && errno == EINTR);
        if (rc != 0 && errno == EWOULDBLOCK) {
            char holder[256];
            lock_holder(l->fd, holder, sizeof holder);
            fatal("%s: another run is writing there (%s); stop it or use another --out", folder, holder);
        }
        if (rc != 0) warn("%s: this file system has no locks (%s); take care that no other run uses this --out", folder, strerror(errno));
        // The holder before removes the file when it ends: what is held must still be what the name says.
        if (fstat(l->fd, &held) == 0 && stat(l->path, &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev) break;
        close(l->fd);
    }
    lock_write_holder();
    if (atexit(lock_release) != 0) warn("%s: will be left behind when this run ends; it does no harm", l->path);
}
// The same, but a folder that is not there yet is left for later: 0 then.
FN int lock_take_if_there(const char *folder) {
    struct stat st;
    if (stat(folder, &st) != 0 || !S_ISDIR(st.st_mode)) return 0;
    lock_take(folder);
    return 1;
}

#endif
