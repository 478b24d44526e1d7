/* Reads a file in every way and prints each result. For a real file and for a model under `blobd exec` it must print
 * the same. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t hash(const void *data, size_t length) {
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < length; i++) h = (h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return h;
}

static void say(const char *what, long result, const void *data, size_t length) {
    printf("%s %ld %016lx\n", what, result, (unsigned long)hash(data, length));
}

static void status(const char *what, int result, struct stat *s) {
    printf("%s %d %ld %d %o\n", what, result, (long)s->st_size, S_ISREG(s->st_mode), s->st_mode & 0444);
}

static void paths(const char *path) {
    struct stat s;
    status("stat", stat(path, &s), &s);
    status("lstat", lstat(path, &s), &s);
    status("fstatat", fstatat(AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW), &s);
    struct statx x;
    int result = statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &x);
    printf("statx %d %ld\n", result, (long)x.stx_size);
    result = (int)syscall(SYS_statx, AT_FDCWD, path, 0, STATX_BASIC_STATS, &x);
    printf("SYS_statx %d %ld\n", result, (long)x.stx_size);
    printf("access %d %d\n", access(path, R_OK), access(path, F_OK));
    char *real = realpath(path, NULL);
    printf("realpath %d\n", real && strcmp(real, path) == 0);
    free(real);
    char link[10];
    printf("readlink %zd %d", readlink(path, link, sizeof link), errno == EINVAL);
    errno = 0;
    printf(" %zd %d\n", readlinkat(AT_FDCWD, path, link, sizeof link), errno == EINVAL);
}

static void descriptors(const char *path, size_t size) {
    char *b = malloc(size + 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC), other = openat(AT_FDCWD, path, O_RDONLY);
    struct stat s;
    stat(path, &s);
    ino_t inode = s.st_ino;
    int next = open(path, O_RDONLY);
    status("fstat", fstat(next, &s), &s);
    printf("same inode %d\n", s.st_ino == inode);
    close(next);
    say("read", read(fd, b, 1000), b, 1000);
    int twin = dup(fd);
    say("read of a duplicate goes on", read(twin, b, 1000), b, 1000);
    say("lseek", lseek(fd, -500, SEEK_END), "", 0);
    say("read to the end", read(fd, b, 1000), b, 500);
    say("read behind it", read(fd, b, 1000), "", 0);
    say("the other's position is its own", lseek(other, 0, SEEK_CUR), "", 0);
    say("pread", pread(fd, b, size, 0), b, size);
    say("pread behind the end", pread(fd, b, 10, (off_t)size + 5), "", 0);
    struct iovec v[2] = {{b, 300}, {b + 300, 700}};
    lseek(fd, 4000, SEEK_SET);
    say("readv", readv(fd, v, 2), b, 1000);
    say("preadv", preadv(fd, v, 2, 77), b, 1000);
    say("preadv2", preadv2(fd, v, 2, 78, 0), b, 1000);
    say("preadv2 from the position", preadv2(fd, v, 2, -1, 0), b, 1000);
    say("readv after it", readv(fd, v, 1), b, 300);
    say("lseek before the start", lseek(fd, -1, SEEK_SET), "", 0);
    printf("EINVAL %d\n", errno == EINVAL);
    say("data", lseek(fd, 100, SEEK_DATA), "", 0);
    say("hole", lseek(fd, 100, SEEK_HOLE), "", 0);
    printf("no data behind the end %ld %d\n", (long)lseek(fd, (off_t)size, SEEK_DATA), errno == ENXIO);
    char *m = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_POPULATE, twin, 0);
    say("mmap", m != MAP_FAILED, m, size);
    munmap(m + 4096, 4096);
    munmap(m, size);
    m = mmap(NULL, 9000, PROT_READ, MAP_PRIVATE, fd, 8192);
    say("mmap of a part", m != MAP_FAILED, m, 9000);
    char *w = mmap(NULL, 9000, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 8192);
    w[0] = 1;
    say("private map", w != MAP_FAILED, w + 1, 8999);
    char *at = mmap(m, 4096, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 4096);
    say("mmap at a place", at == m, at, 4096);
    printf("shared and writable %d", mmap(NULL, 10, PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    printf(" %d\n", errno == EACCES);
    close(twin);
    say("read after the duplicate is closed", pread(fd, b, 10, 0), b, 10);
    close(fd), close(other), free(b);
}

static void streams(const char *path, size_t size) {
    char *b = malloc(size + 1);
    FILE *f = fopen(path, "rb");
    struct stat s;
    status("fstat of fileno", fstat(fileno(f), &s), &s);
    say("fread", (long)fread(b, 1, 24, f), b, 24);
    fseek(f, 0, SEEK_END);
    say("ftell", ftell(f), "", 0);
    rewind(f);
    say("fread of all", (long)fread(b, 1, size + 1, f), b, size);
    printf("feof %d\n", feof(f) != 0);
    fseeko(f, 12345, SEEK_SET);
    say("fgetc", fgetc(f), "", 0);
    char *m = mmap(NULL, size, PROT_READ, MAP_SHARED, fileno(f), 0);
    say("mmap of fileno", m != MAP_FAILED, m, size);
    fclose(f);
    f = fdopen(open(path, O_RDONLY), "r");
    say("fdopen", (long)fread(b, 1, size, f), b, size);
    fclose(f), free(b);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    struct stat s;
    if (stat(arguments[1], &s)) return perror(arguments[1]), 1;
    paths(arguments[1]);
    descriptors(arguments[1], (size_t)s.st_size);
    streams(arguments[1], (size_t)s.st_size);
    return 0;
}
