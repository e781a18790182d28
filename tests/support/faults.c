// Let the k-th system call of a kind fail below a folder. Loaded with LD_PRELOAD; `faults.py` sets the fault.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, FSYNC, RENAME, OPEN, LINK, UNLINK, FLOCK, LOCK, KINDS };

static char root[PATH_MAX];
static int at_kind = -1, at_call, at_error, lasting, seen[KINDS];

// `error` 0 cuts a write short. A lasting fault also hits all later calls of the kind.
void faults_set(const char *folder, int kind, int call, int error, int lasts) {
    snprintf(root, sizeof root, "%s/", folder);
    at_kind = kind, at_call = call, at_error = error, lasting = lasts;
    memset(seen, 0, sizeof seen);
}

int faults_seen(int kind) { return seen[kind]; }

static int below(const char *path) {
    char where[PATH_MAX];
    if (!root[0] || !path) return 0;
    if (path[0] == '/') return !strncmp(path, root, strlen(root));
    if (!getcwd(where, sizeof where - 1)) return 0;
    strcat(where, "/");
    return !strncmp(where, root, strlen(root));
}

static int holds(int descriptor) {
    char link[64], path[PATH_MAX];
    if (!root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

// Whether this call is the one. `errno` says how it fails.
static int hit(int kind, int concerned) {
    if (!concerned) return 0;
    int call = ++seen[kind];
    if (kind != at_kind || !(call == at_call || (lasting && call > at_call))) return 0;
    errno = at_error;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPENS(name)                                                                                              \
    int name(const char *path, int flags, ...) {                                                                 \
        REAL(name);                                                                                              \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);                    \
        return hit(OPEN, below(path)) ? -1 : real(path, flags, mode);                                            \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                                           \
    int name(int folder, const char *path, int flags, ...) {                                                     \
        REAL(name);                                                                                              \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more);                    \
        return hit(OPEN, below(path)) ? -1 : real(folder, path, flags, mode);                                    \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    if (!hit(WRITE, holds(file))) return real(file, data, size);
    return at_error ? -1 : real(file, data, (size + 1) / 2);
}

#define WRITES_AT(name, offset_t)                                                                                \
    ssize_t name(int file, const void *data, size_t size, offset_t place) {                                      \
        REAL(name);                                                                                              \
        if (!hit(WRITE, holds(file))) return real(file, data, size, place);                                      \
        return at_error ? -1 : real(file, data, (size + 1) / 2, place);                                          \
    }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    if (!hit(WRITE, holds(file))) return real(file, parts, count);
    return at_error ? -1 : real(file, parts, (count + 1) / 2);
}

#define SYNCS(name)                                                                                              \
    int name(int file) { REAL(name); return hit(FSYNC, holds(file)) ? -1 : real(file); }
SYNCS(fsync)
SYNCS(fdatasync)

int rename(const char *from, const char *to) { REAL(rename); return hit(RENAME, below(to)) ? -1 : real(from, to); }
int renameat(int one, const char *from, int other, const char *to) {
    REAL(renameat);
    return hit(RENAME, below(to)) ? -1 : real(one, from, other, to);
}
int link(const char *from, const char *to) { REAL(link); return hit(LINK, below(to)) ? -1 : real(from, to); }
int linkat(int one, const char *from, int other, const char *to, int flags) {
    REAL(linkat);
    return hit(LINK, below(to)) ? -1 : real(one, from, other, to, flags);
}
int unlink(const char *path) { REAL(unlink); return hit(UNLINK, below(path)) ? -1 : real(path); }
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return hit(UNLINK, below(path)) ? -1 : real(folder, path, flags);
}
int flock(int file, int how) { REAL(flock); return hit(FLOCK, holds(file)) ? -1 : real(file, how); }

#define CONTROLS(name)                                                                                           \
    int name(int file, int what, ...) {                                                                          \
        REAL(name);                                                                                              \
        va_list more; va_start(more, what); void *given = va_arg(more, void *); va_end(more);                     \
        int locks = what == F_SETLK || what == F_SETLKW || what == F_GETLK;                                      \
        return hit(LOCK, locks && holds(file)) ? -1 : real(file, what, given);                                   \
    }
CONTROLS(fcntl)
CONTROLS(fcntl64)
