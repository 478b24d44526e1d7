//! Where daemons listen by default, whether this machine has one for all its users, and what to do about a socket
//! that refuses this user.

use std::env;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid, getgroups};

use crate::name_service;

/// The socket of the system's daemon.
pub const SYSTEM_SOCKET: &str = "/run/blobd/blobd.sock";

/// The directories of systemd's system units, in the order in which systemd searches them.
const UNIT_DIRECTORIES: [&str; 7] = [
    "/etc/systemd/system",
    "/run/systemd/transient",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// The units of the system's daemon.
pub const SYSTEM_UNITS: [&str; 2] = ["blobd.socket", "blobd.service"];

/// The configuration of the system's daemon, for machines without systemd.
pub const SYSTEM_CONFIGURATION: &str = "/etc/blobd/config.toml";

/// The file of a system unit; `None` if it is not installed.
pub fn unit_file(unit: &str) -> Option<PathBuf> {
    let files = UNIT_DIRECTORIES.iter().map(|directory| Path::new(directory).join(unit));
    // A link to /dev/null masks a unit, and may outlive it.
    let is_mask = |file: &Path| fs::read_link(file).is_ok_and(|target| target == Path::new("/dev/null"));
    files.into_iter().find(|file| is_present(file) && !is_mask(file))
}

/// Whether something is there or may be: what this user may not see counts as existing.
fn is_present(file: &Path) -> bool {
    fs::symlink_metadata(file).map_or_else(
        |error| !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        |_found| true,
    )
}

/// What proves, while nothing listens at `socket`, that it is the socket of a daemon for all users: itself, or a file of
/// its installation. `None` for other sockets, and on machines without such a daemon.
pub fn evidence_of_service(socket: &Path) -> Option<PathBuf> {
    if socket != Path::new(SYSTEM_SOCKET) {
        return None;
    }
    let installed = SYSTEM_UNITS.into_iter().find_map(unit_file);
    let others = [socket, Path::new(SYSTEM_CONFIGURATION)].into_iter();
    installed.or_else(|| others.map(Path::to_path_buf).find(|file| is_present(file)))
}

/// The default sockets in order: the system's, then those at which this user's daemon may listen. A client uses the
/// latter only on a machine without a daemon for all users: [`Client::connect_default`](crate::Client).
pub fn default_sockets() -> Vec<PathBuf> {
    std::iter::once(PathBuf::from(SYSTEM_SOCKET)).chain(user_sockets()).collect()
}

/// The sockets at which this user's daemon may listen, in order. Only the last one always has a directory, or one
/// can be made: [`private_directory`]. All are tried, because the daemon's environment may differ from the client's,
/// such as in a cron job or after `su`.
pub fn user_sockets() -> Vec<PathBuf> {
    sockets_of(env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from), geteuid().as_raw())
}

fn sockets_of(runtime: Option<PathBuf>, uid: u32) -> Vec<PathBuf> {
    let runtime = runtime.filter(|directory| directory.is_absolute());
    // The value that systemd and elogind give the variable.
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    let usual = Some(usual).filter(|usual| runtime.as_ref() != Some(usual));
    let in_runtime =
        [runtime, usual].into_iter().flatten().map(|directory| directory.join("blobd/blobd.sock"));
    in_runtime.chain([directory_of(uid).join("blobd.sock")]).collect()
}

/// The directory for the socket of a user without a runtime directory. The name does not depend on `TMPDIR`, which
/// sessions set differently. Every user can create it first, so [`check_private`] comes before each use.
pub fn private_directory() -> PathBuf {
    directory_of(geteuid().as_raw())
}

fn directory_of(uid: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/blobd-{uid}"))
}

/// Checks that nobody but this user can put a socket into the directory.
///
/// # Errors
/// When it is missing, is a link, or belongs to or can be entered by somebody else.
pub fn check_private(directory: &Path) -> io::Result<()> {
    check_owned_by(directory, geteuid().as_raw())
}

fn check_owned_by(directory: &Path, uid: u32) -> io::Result<()> {
    let found = fs::symlink_metadata(directory)?;
    let mode = found.mode() & 0o7777;
    let name = directory.display();
    let refusal = if !found.is_dir() {
        format!("{name}: wrong kind of file: expected a directory, found another")
    } else if found.uid() != uid {
        format!("{name}: wrong owner: expected uid {uid}, found uid {}", found.uid())
    } else if mode & 0o077 != 0 {
        format!("{name}: wrong mode: expected 0700, found {mode:04o}")
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, refusal))
}

pub(crate) fn connect(socket: &Path) -> io::Result<UnixStream> {
    let private = private_directory();
    if socket.parent() == Some(&private) {
        check_private(&private)?;
    }
    UnixStream::connect(socket)
}

/// Advice for a user whose connection the kernel refuses; `None` if there is none.
pub fn hint(socket: &Path, reason: &io::Error) -> Option<String> {
    // An error of [`check_private`] has no number.
    if reason.raw_os_error() != Some(rustix::io::Errno::ACCESS.raw_os_error()) {
        return None;
    }
    Some(match fs::metadata(socket) {
        Ok(found) => hint_for_mode(&found),
        Err(_hidden) => hint_for_directory(socket),
    })
}

/// For a socket whose own permissions refuse this user.
fn hint_for_mode(socket: &Metadata) -> String {
    const TO_WRITE: u32 = 0o020;
    let gid = socket.gid();
    // Not every member of root's group should be made one to use a model.
    if socket.permissions().mode() & TO_WRITE == 0 || gid == 0 {
        let uid = socket.uid();
        return format!(
            "only uid {uid} may connect; the daemon's owner can set socket_group in its configuration"
        );
    }
    let groups = getgroups().unwrap_or_default();
    if getegid().as_raw() == gid || groups.iter().any(|group| group.as_raw() == gid) {
        return "the system's security policy refuses it; see the kernel's audit log".to_owned();
    }
    let uid = geteuid().as_raw();
    // Without an answer of the name service the advice has numbers.
    let name =
        name_service::group_by_id(gid).ok().flatten().map_or_else(|| gid.to_string(), |group| group.name);
    let is_member = matches!(name_service::groups_of(uid), Ok(Some(groups)) if groups.contains(&gid));
    if is_member {
        return format!("you joined the group {name} after this session began: log in again");
    }
    // Groups of a directory are changed there, and usermod takes names of the usual form only.
    let is_local = is_plain(&name) && name_service::local_names("/etc/group").contains(&name);
    match name_service::user_by_id(uid).ok().flatten() {
        Some(user) if is_local && is_plain(&user.name) => {
            format!("join the group {name} (`sudo usermod -aG {name} {}`) and log in again", user.name)
        }
        _ => format!("join the group {name} and log in again"),
    }
}

/// Whether a name is one word of a shell. Names of Active Directory have backslashes and spaces.
fn is_plain(name: &str) -> bool {
    name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.@+".contains(c))
}

/// For a socket in a directory that this user may not enter.
fn hint_for_directory(socket: &Path) -> String {
    // The last one that can be inspected is the one that cannot be entered.
    let visible = socket.ancestors().skip(1).find_map(|path| Some((path, fs::metadata(path).ok()?)));
    let blocking = visible.map(|(path, found)| format!("{} (uid {})", path.display(), found.uid()));
    let directory = blocking.unwrap_or_else(|| "a directory of its path".to_owned());
    format!(
        "{directory} does not admit you; the daemon's owner can set socket to a path that others can reach"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(runtime: Option<&str>) -> Vec<String> {
        let sockets = sockets_of(runtime.map(PathBuf::from), 7);
        sockets.iter().map(|socket| socket.display().to_string()).collect()
    }

    #[test]
    fn sockets_of_a_user_do_not_depend_on_one_variable() {
        let without = ["/run/user/7/blobd/blobd.sock", "/tmp/blobd-7/blobd.sock"];
        assert_eq!(names(None), without);
        assert_eq!(names(Some("relative")), without);
        assert_eq!(names(Some("/run/user/7")), without);
        assert_eq!(names(Some("/x")), ["/x/blobd/blobd.sock", without[0], without[1]]);
    }

    #[test]
    fn directory_that_others_could_have_made_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (own, link) = (folder.path().join("own"), folder.path().join("link"));
        let uid = geteuid().as_raw();
        let refusal = |path: &Path, uid| check_owned_by(path, uid).unwrap_err().to_string();
        fs::create_dir(&own).unwrap();
        let set = |mode| fs::set_permissions(&own, fs::Permissions::from_mode(mode)).unwrap();
        set(0o700);
        check_owned_by(&own, uid).unwrap();
        assert!(refusal(&own, uid + 1).contains(&format!("expected uid {}, found uid {uid}", uid + 1)));
        set(0o711);
        assert!(refusal(&own, uid).contains("expected 0700, found 0711"));
        set(0o700);
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(refusal(&link, uid).contains("expected a directory"));
        let absent = check_owned_by(&folder.path().join("absent"), uid).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn advice_has_a_command_only_for_names_that_are_words_of_a_shell() {
        assert!(is_plain("ann.lee@example.com") && is_plain("models-x"));
        assert!(!is_plain("DOMAIN\\ann") && !is_plain("domain users") && !is_plain("a;b"));
    }
}
