/* Runs operations on a read-only file that must fail or must have no lasting effect. Exits with 0 if all behave as on
 * a real file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) return fprintf(stderr, "%s: errno %d\n", #condition, errno), 1; \
    } while (0)

/* The lowest free descriptor number, which shows whether descriptors were leaked. */
static int free_number(void) {
    int fd = dup(1);
    close(fd);
    return fd;
}

static int streams_that_write(const char *path) {
    int before = free_number();
    for (int i = 0; i < 50; i++) {
        CHECK(!fopen(path, "r+b") && errno == EROFS);
        CHECK(!fopen(path, "w") && errno == EROFS);
        CHECK(!fopen(path, "a") && errno == EROFS);
    }
    CHECK(free_number() == before);
    return 0;
}

/* Checks each page, because the header, copied tensors and mapped tensors differ. */
static int maps_that_are_made_writable(const char *path) {
    struct stat s;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && fstat(fd, &s) == 0);
    size_t size = s.st_size;
    char *shared = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    char *own = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    char *before = malloc(size), *after = malloc(size);
    CHECK(shared != MAP_FAILED && own != MAP_FAILED && pread(fd, before, size, 0) == (ssize_t)size);
    for (size_t page = 0; page < size; page += 4096) {
        CHECK(mprotect(shared + page, 4096, PROT_READ | PROT_WRITE) && errno == EACCES);
        CHECK(mprotect(own + page, 4096, PROT_READ | PROT_WRITE) && errno == EACCES);
    }
    /* A private map that is writable from the start is a copy. */
    char *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(copy != MAP_FAILED && !memcmp(copy, before, size));
    memset(copy, 1, size);
    int other = open(path, O_RDONLY);
    CHECK(other >= 0 && pread(other, after, size, 0) == (ssize_t)size && !memcmp(before, after, size));
    CHECK(!memcmp(shared, before, size) && !memcmp(own, before, size));
    return 0;
}

static void *open_it(void *path) {
    open(path, O_RDONLY);
    return NULL;
}

/* A child that is forked while a thread waits for a response, here from a socket that never sends one, must not wait
 * for it, too. */
static int fork_during_a_request(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char *real = strdup(getenv("BLOBD_EXEC_SOCKET"));
    snprintf(address.sun_path, sizeof address.sun_path, "%s.silent", real);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), stat;
    CHECK(!bind(listener, (struct sockaddr *)&address, sizeof address) && !listen(listener, 1));
    setenv("BLOBD_EXEC_SOCKET", address.sun_path, 1);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, open_it, (void *)path));
    int request = accept(listener, NULL, NULL);
    char length[4];
    CHECK(request >= 0 && read(request, length, 4) == 4);
    setenv("BLOBD_EXEC_SOCKET", real, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        _exit(open(path, O_RDONLY) < 0);
    }
    CHECK(waitpid(child, &stat, 0) == child && stat == 0);
    close(request);
    CHECK(!pthread_join(thread, NULL));
    unlink(address.sun_path);
    return 0;
}

static void *open_often(void *path) {
    for (int i = 0; i < 5000; i++) {
        FILE *f = fopen(path, "r");
        if (!f) return path;
        fclose(f);
    }
    return NULL;
}

/* Forks while other threads open and close models. */
static int forks_beside_opens(const char *path) {
    pthread_t threads[2];
    void *failed;
    int stat;
    for (int i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, open_often, (void *)path));
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(30);
            FILE *f = fopen(path, "r");
            _exit(!f || fgetc(f) != 'G');
        }
        CHECK(waitpid(child, &stat, 0) == child && stat == 0);
    }
    for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], &failed) && !failed);
    return 0;
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    const char *path = arguments[1];
    return fork_during_a_request(path) || forks_beside_opens(path) || streams_that_write(path) ||
           maps_that_are_made_writable(path);
}
