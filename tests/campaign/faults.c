/* Counts the calls of this process and its forks that change files below one folder, and makes one of them fail or kills
 * the process there. Loaded with LD_PRELOAD, so that calls from Python, torch and safetensors are all seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, TORN, FAIL, FAIL_FROM_HERE, FAIL_AFTERWARDS }; /* the same numbers as in faults.py */

static struct { char root[PATH_MAX]; long at; int action, error, log; long *count; } plan;

/* Called by Python before each run. The count is shared with the processes that this one forks. */
void faults_arm(const char *root, long at, int action, int error, int log) {
    if (!plan.count)
        plan.count = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *plan.count = 0;
    plan.at = at, plan.action = action, plan.error = error, plan.log = log;
    strncpy(plan.root, root, sizeof plan.root - 1);
}

void faults_disarm(void) { plan.root[0] = 0; }

static const char *path_of(int folder, const char *path, char *buffer) {
    char link[64];
    if (path && path[0] == '/')
        return path;
    if (folder == AT_FDCWD)
        strcpy(link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0)
        return "";
    buffer[length] = 0;
    if (path)
        snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    return buffer;
}

/* What to do with this call: COUNT means nothing. */
static int decide(const char *call, int folder, const char *path) {
    char buffer[2 * PATH_MAX], line[2 * PATH_MAX + 64];
    if (!plan.root[0])
        return COUNT;
    const char *full = path_of(folder, path, buffer);
    size_t length = strlen(plan.root);
    if (strncmp(full, plan.root, length) != 0 || (full[length] && full[length] != '/'))
        return COUNT;
    long number = __atomic_add_fetch(plan.count, 1, __ATOMIC_SEQ_CST);
    if (plan.log >= 0) {
        int written = snprintf(line, sizeof line, "%ld %s .%s\n", number, call, full + length);
        syscall(SYS_write, plan.log, line, written);
    }
    int removes = strcmp(call, "unlink") == 0 || strcmp(call, "rmdir") == 0 || strcmp(call, "truncate") == 0;
    if (plan.action == FAIL_FROM_HERE ? number < plan.at || removes : number != plan.at) /* a full disk still removes */
        return COUNT;
    if (plan.action == KILL)
        kill(getpid(), SIGKILL);
    return plan.action;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *) dlsym(RTLD_NEXT, #name)

/* `result`: the real call. TORN means to stop a write halfway; other calls are killed after they took effect. */
#define GUARDED(call, folder, path, result) do {                            \
    int action = decide(call, folder, path);                                \
    if (action == FAIL || action == FAIL_FROM_HERE)                         \
        return errno = plan.error, -1;                                      \
    __typeof__(result) done = result;                                       \
    if (action == TORN)                                                     \
        kill(getpid(), SIGKILL);                                            \
    if (action == FAIL_AFTERWARDS)                                          \
        return errno = plan.error, -1;                                      \
    return done;                                                            \
} while (0)

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

#define OPEN(name)                                                          \
int name(const char *path, int flags, ...) {                                \
    REAL(name);                                                             \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
    if (!writes(flags)) return real(path, flags, mode);                     \
    GUARDED("open", AT_FDCWD, path, real(path, flags, mode));               \
}
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
int name(int folder, const char *path, int flags, ...) {                    \
    REAL(name);                                                             \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
    if (!writes(flags)) return real(folder, path, flags, mode);             \
    GUARDED("open", folder, path, real(folder, path, flags, mode));         \
}
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    int action = decide("write", file, NULL);
    if (action == FAIL || action == FAIL_FROM_HERE)
        return errno = plan.error, -1;
    if (action == TORN) {
        real(file, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    ssize_t done = real(file, data, size);
    return action == FAIL_AFTERWARDS ? (errno = plan.error, -1) : done;
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    GUARDED("write", file, NULL, real(file, data, size, at));
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    GUARDED("write", file, NULL, real(file, data, size, at));
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    GUARDED("write", file, NULL, real(file, parts, count));
}
int fsync(int file) { REAL(fsync); GUARDED("fsync", file, NULL, real(file)); }
int fdatasync(int file) { REAL(fdatasync); GUARDED("fsync", file, NULL, real(file)); }
int ftruncate(int file, off_t size) { REAL(ftruncate); GUARDED("truncate", file, NULL, real(file, size)); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); GUARDED("truncate", file, NULL, real(file, size)); }
int truncate(const char *path, off_t size) { REAL(truncate); GUARDED("truncate", AT_FDCWD, path, real(path, size)); }
int rename(const char *from, const char *to) { REAL(rename); GUARDED("rename", AT_FDCWD, to, real(from, to)); }
int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat);
    GUARDED("rename", b, to, real(a, from, b, to));
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    REAL(renameat2);
    GUARDED("rename", b, to, real(a, from, b, to, flags));
}
int link(const char *from, const char *to) { REAL(link); GUARDED("link", AT_FDCWD, to, real(from, to)); }
int symlink(const char *from, const char *to) { REAL(symlink); GUARDED("link", AT_FDCWD, to, real(from, to)); }
int unlink(const char *path) { REAL(unlink); GUARDED("unlink", AT_FDCWD, path, real(path)); }
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    GUARDED("unlink", folder, path, real(folder, path, flags));
}
int rmdir(const char *path) { REAL(rmdir); GUARDED("rmdir", AT_FDCWD, path, real(path)); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); GUARDED("mkdir", AT_FDCWD, path, real(path, mode)); }
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    GUARDED("mkdir", folder, path, real(folder, path, mode));
}
