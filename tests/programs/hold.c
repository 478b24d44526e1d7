/* Maps a file, touches every page and prints its process ID. Repeats that for each input line that begins with `t`.
   Ends at any other line. With a second argument `private`, the map is private and writable, and one byte is written. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int count, char **arguments) {
    struct stat s;
    int fd = count < 2 ? -1 : open(arguments[1], O_RDONLY);
    if (fd < 0 || fstat(fd, &s)) return perror("open"), 1;
    int private = count > 2 && !strcmp(arguments[2], "private");
    int protection = PROT_READ | (private ? PROT_WRITE : 0);
    volatile char *m = mmap(NULL, s.st_size, protection, private ? MAP_PRIVATE : MAP_SHARED, fd, 0);
    if (m == MAP_FAILED) return perror("mmap"), 1;
    if (private) m[s.st_size / 2]++;
    char line[16];
    do {
        unsigned sum = 0;
        for (long i = 0; i < s.st_size; i += 64) sum += m[i];
        printf("%d %u\n", getpid(), sum);
        fflush(stdout);
    } while (fgets(line, sizeof line, stdin) && line[0] == 't');
    return 0;
}
