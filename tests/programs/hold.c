/* Maps a file, touches every page, says so, and waits until it is told to end. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int count, char **arguments) {
    struct stat s;
    int fd = count < 2 ? -1 : open(arguments[1], O_RDONLY);
    if (fd < 0 || fstat(fd, &s)) return perror("open"), 1;
    const volatile char *m = mmap(NULL, s.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (m == MAP_FAILED) return perror("mmap"), 1;
    unsigned sum = 0;
    for (long i = 0; i < s.st_size; i += 64) sum += m[i];
    printf("%u\n", sum);
    fflush(stdout);
    getchar();
    return 0;
}
