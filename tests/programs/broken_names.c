/* A name service whose directory server is out of order: preloaded into a program, it fails for as long as the folder in
   BROKEN_NAMES has a file `fail`; and for as long as it has a file `hang`, it hangs when it is asked for a user. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int is_there(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("BROKEN_NAMES"), name);
    return access(path, F_OK) == 0;
}

static void hang(void)
{
    while (is_there("hang"))
        usleep(10000);
}

/* Returns whether the call fails. */
static int is_broken(void)
{
    if (!is_there("fail"))
        return 0;
    errno = ECONNREFUSED;
    return 1;
}

int getpwuid_r(uid_t uid, struct passwd *user, char *buffer, size_t size, struct passwd **result)
{
    int (*next)(uid_t, struct passwd *, char *, size_t, struct passwd **) = dlsym(RTLD_NEXT, "getpwuid_r");
    hang();
    *result = NULL;
    return is_broken() ? errno : next(uid, user, buffer, size, result);
}

int getpwnam_r(const char *name, struct passwd *user, char *buffer, size_t size, struct passwd **result)
{
    int (*next)(const char *, struct passwd *, char *, size_t, struct passwd **) =
        dlsym(RTLD_NEXT, "getpwnam_r");
    hang();
    *result = NULL;
    return is_broken() ? errno : next(name, user, buffer, size, result);
}

int getgrnam_r(const char *name, struct group *group, char *buffer, size_t size, struct group **result)
{
    int (*next)(const char *, struct group *, char *, size_t, struct group **) = dlsym(RTLD_NEXT, "getgrnam_r");
    *result = NULL;
    return is_broken() ? errno : next(name, group, buffer, size, result);
}
