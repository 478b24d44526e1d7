/* A preloaded library that makes `memfd_secret` fail, as on a kernel without it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>

long syscall(long number, ...) {
    __builtin_va_list list;
    __builtin_va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = __builtin_va_arg(list, long);
    __builtin_va_end(list);
    if (number == 447 /* memfd_secret */) return errno = ENOSYS, -1;
    long (*next)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
