package blobd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// SystemSocket is the socket of the system's daemon.
const SystemSocket = "/run/blobd/blobd.sock"

// The directories of systemd's system units, the units of the system's daemon, and its configuration.
var (
	unitDirectories = []string{
		"/etc/systemd/system",
		"/run/systemd/transient",
		"/run/systemd/system",
		"/run/systemd/generator",
		"/usr/local/lib/systemd/system",
		"/usr/lib/systemd/system",
		"/lib/systemd/system",
	}
	systemUnits = []string{"blobd.socket", "blobd.service"}
)

const systemConfiguration = "/etc/blobd/config.toml"

// evidenceOfService is what proves, while nothing listens at the socket, that it is the socket of a daemon
// for all users: itself, or a file of its installation. It is empty for other sockets, and on machines
// without such a daemon.
func evidenceOfService(socket string) string {
	if socket != SystemSocket {
		return ""
	}
	for _, unit := range systemUnits {
		for _, directory := range unitDirectories {
			file := filepath.Join(directory, unit)
			// A link to /dev/null masks a unit, and may outlive it.
			if target, _ := os.Readlink(file); target != os.DevNull && exists(file) {
				return file
			}
		}
	}
	for _, file := range []string{socket, systemConfiguration} {
		if exists(file) {
			return file
		}
	}
	return ""
}

// exists reports whether something is there or may be: what this user may not see counts as existing.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR)
}

// DefaultSockets are the sockets that are tried if none is given, in this order: the system's, then
// those at which this user's daemon may listen. A client uses the latter only on a machine without a
// daemon for all users.
func DefaultSockets() []string {
	usual := fmt.Sprintf("/run/user/%d", os.Geteuid())
	directories := []string{usual}
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(runtime) && runtime != usual {
		directories = []string{runtime, usual}
	}
	sockets := []string{SystemSocket}
	for _, directory := range directories {
		sockets = append(sockets, filepath.Join(directory, "blobd/blobd.sock"))
	}
	return append(sockets, filepath.Join(privateDirectory(), "blobd.sock"))
}

// privateDirectory is the directory for the socket of a user without a runtime directory.
func privateDirectory() string {
	return fmt.Sprintf("/tmp/blobd-%d", os.Geteuid())
}

// checkBeforeConnecting fails if another user could have put the socket into the private directory.
func checkBeforeConnecting(path string) error {
	if directory := privateDirectory(); filepath.Dir(path) == directory {
		return checkPrivate(directory, os.Geteuid())
	}
	return nil
}

func checkPrivate(directory string, uid int) error {
	found, err := os.Lstat(directory)
	if err != nil {
		return err
	}
	status, known := found.Sys().(*syscall.Stat_t)
	switch {
	case !found.IsDir() || !known:
		return foreign("%s: not a directory", directory)
	case int(status.Uid) != uid:
		return foreign("%s: wrong owner: expected uid %d, found uid %d", directory, uid, status.Uid)
	case status.Mode&0o077 != 0:
		return foreign("%s: wrong mode: expected 0700, found %04o", directory, status.Mode&0o7777)
	}
	return nil
}

// foreignDirectory says why a directory may be another user's.
type foreignDirectory string

func foreign(format string, values ...any) error {
	return foreignDirectory(fmt.Sprintf(format, values...))
}

func (text foreignDirectory) Error() string { return string(text) }

// Is makes it a missing permission.
func (text foreignDirectory) Is(target error) bool { return target == fs.ErrPermission }

// connectHint says what to do when the kernel refuses a connection; it is empty if this is not known.
func connectHint(path string, err error) string {
	if !errors.Is(err, syscall.EACCES) {
		return ""
	}
	var found syscall.Stat_t
	if syscall.Stat(path, &found) != nil {
		return "a directory of its path does not admit you; the daemon's owner can set socket to another path"
	}
	return hintFor(found.Mode, found.Uid, found.Gid)
}

func hintFor(mode, uid, gid uint32) string {
	// Not every member of root's group should be made one to use a model.
	if mode&syscall.S_IWGRP == 0 || gid == 0 {
		return fmt.Sprintf("only uid %d may connect; the daemon's owner can set socket_group in its configuration", uid)
	}
	name := strconv.FormatUint(uint64(gid), 10)
	if group, err := user.LookupGroupId(name); err == nil {
		name = group.Name
	}
	return "join the group " + name + " and log in again"
}
