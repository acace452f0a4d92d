// Preloaded into `megarl`: makes one call of a C library function on one file fail, or do half of its work.
//
// MEGARL_FAULT = "call|part of the path|error number|n|counter file" chooses the n-th such call of all processes
// together. With error number 0 `write` writes half of what it was given, as POSIX allows.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

// The error number of this call; 0 if it does half of its work, -1 if it is undisturbed.
static int fault(const char *call, const char *path) {
    const char *order = getenv("MEGARL_FAULT");
    if (!order || !path) return -1;
    char copy[4096], *rest = copy;
    snprintf(copy, sizeof copy, "%s", order);
    const char *wanted = strsep(&rest, "|"), *part = strsep(&rest, "|"), *number = strsep(&rest, "|");
    const char *count = strsep(&rest, "|"), *counter = rest;
    if (!counter || strcmp(call, wanted) || !strstr(path, part)) return -1;
    int fd = syscall(SYS_openat, AT_FDCWD, counter, O_CREAT | O_WRONLY | O_APPEND, 0600);
    syscall(SYS_write, fd, ".", 1);
    long seen = syscall(SYS_lseek, fd, 0, SEEK_CUR);  // after the byte of this process, whoever else appends
    syscall(SYS_close, fd);
    return seen == atol(count) ? atoi(number) : -1;
}

static int fault_at(const char *call, int fd) {
    if (!getenv("MEGARL_FAULT")) return -1;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return -1;
    path[length] = 0;
    return fault(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WRITE(name, parameters, half, whole)                     \
    ssize_t name parameters {                                    \
        int number = fault_at("write", fd);                      \
        if (number > 0) return errno = number, -1;               \
        return number == 0 && count > 1 ? NEXT(name) half : NEXT(name) whole; \
    }
WRITE(write, (int fd, const void *data, size_t count), (fd, data, count / 2), (fd, data, count))
WRITE(pwrite, (int fd, const void *data, size_t count, off_t at), (fd, data, count / 2, at), (fd, data, count, at))
WRITE(pwrite64, (int fd, const void *data, size_t count, off64_t at), (fd, data, count / 2, at), (fd, data, count, at))

int fsync(int fd) {
    int number = fault_at("fsync", fd);
    return number > 0 ? errno = number, -1 : NEXT(fsync)(fd);
}

int rename(const char *from, const char *to) {
    int number = fault("rename", to);
    return number > 0 ? errno = number, -1 : NEXT(rename)(from, to);
}

#define OPEN(name, parameters, arguments)                        \
    int name parameters {                                        \
        va_list list;                                            \
        va_start(list, flags);                                   \
        int mode = va_arg(list, int), number = fault("open", path); \
        va_end(list);                                            \
        return number > 0 ? errno = number, -1 : NEXT(name) arguments; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
