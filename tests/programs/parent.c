/* Starts the program in its arguments as a child process and ends with its exit code. It is linked statically: no library
 * can be preloaded into it, as into a server in Go that starts runners. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **arguments) {
    if (count < 2) return 64;
    pid_t child = fork();
    if (child == 0) {
        execvp(arguments[1], arguments + 1);
        perror(arguments[1]);
        _exit(127);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0) return perror("parent"), 1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
