//! What `/proc` says about the process at the other end of a connection: the program that uses a model, its container,
//! and whether it shares the daemon's namespaces.
//!
//! Only the last of these decides about rights. A container's processes on a shared kernel are visible here, with the
//! numbers that they have in the daemon's PID namespace; those of other PID namespaces have the number 0.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::Path;

use blobd_client::protocol::response::Engine;
use blobd_store_format::source::without_userinfo;
use serde_json::{Value, json};

use crate::sys::peer_pidfd;

/// Whether a process is in the user and PID namespaces and in the container of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Namespaces {
    Own,
    /// Or the kernel does not say.
    #[default]
    Other,
}

/// The place of a process whose container has no name.
const ELSEWHERE: &str = "another PID namespace";

/// A process, as it was when it was looked at.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerProcess {
    /// Its name; `None` after it has ended.
    pub(crate) command: Option<String>,
    /// The program that it runs for a client, if it is `blobd exec`.
    pub(crate) engine: Option<Engine>,
    /// The container that it is in; `None` for a process of the host.
    pub(crate) container: Option<String>,
}

impl PeerProcess {
    pub(crate) fn of(pid: i32) -> Self {
        let command = command(pid);
        let engine = command.as_deref().filter(|command| *command == "blobd").and_then(|_| engine(pid));
        Self { command, engine, container: place(pid) }
    }

    /// What the audit log and the log of requests have besides the process's name.
    pub(crate) fn details(self) -> BTreeMap<String, Value> {
        let engine = self.engine.map(|engine| ("engine".to_owned(), json!(engine)));
        let container = self.container.map(|container| ("container".to_owned(), json!(container)));
        engine.into_iter().chain(container).collect()
    }
}

/// The beginning of a process's command line for the log, without the credentials and queries of URLs; `None` after the
/// process has ended.
pub(crate) fn command_line(pid: i32) -> Option<String> {
    const MAX_CHARS: usize = 120;
    let arguments = read(&format!("/proc/{pid}/cmdline"))?;
    let words = arguments.split('\0').filter(|word| !word.is_empty());
    let words: Vec<_> =
        words.map(|word| without_userinfo(word.split('?').next().unwrap_or_default()).into_owned()).collect();
    let line: String = words.join(" ").chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect();
    (!line.is_empty()).then_some(line)
}

/// `None` after the process has ended.
pub(crate) fn command(pid: i32) -> Option<String> {
    let name = read(&format!("/proc/{pid}/comm"))?;
    Some(name.trim_end().chars().filter(|c| !c.is_control()).collect())
}

/// The program that this process of blobd runs, if its command is `exec`: its first child.
fn engine(pid: i32) -> Option<Engine> {
    let arguments = read(&format!("/proc/{pid}/cmdline"))?;
    if !arguments.split('\0').any(|word| word == "exec") {
        return None;
    }
    // The main thread starts it.
    let children = read(&format!("/proc/{pid}/task/{pid}/children"))?;
    let child = children.split_whitespace().next()?.parse().ok()?;
    Some(Engine { pid: child, command: command(child)? })
}

/// The container of a process: the first digits of its ID, or the name of its control group if it is in another PID
/// namespace. `None` for a process of the host.
fn container(pid: i32) -> Option<String> {
    let groups = control_groups(pid)?;
    let found = container_of(&groups);
    found.or_else(|| nested(&status(pid)).then(|| last_part(&groups).unwrap_or_else(|| ELSEWHERE.to_owned())))
}

/// The place of a peer that is in another PID namespace or a container. The kernel gives the number 0 to processes
/// whose namespace is not below the daemon's.
fn place(pid: i32) -> Option<String> {
    if pid > 0 { container(pid) } else { Some(ELSEWHERE.to_owned()) }
}

/// Whether a process of the daemon's PID namespace is in the daemon's container.
fn is_in_own_container(pid: i32) -> bool {
    control_groups(pid) == control_groups(own_pid()) || container(pid) == container(own_pid())
}

fn control_groups(pid: i32) -> Option<String> {
    read(&format!("/proc/{pid}/cgroup"))
}

/// Reads a file of `/proc` with few calls: the kernel does not tell its length, and `fs::read` begins with 32 bytes.
fn read(path: &str) -> Option<String> {
    const USUAL_BYTES: usize = 4096;
    let mut bytes = Vec::with_capacity(USUAL_BYTES);
    File::open(path).ok()?.read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

impl Namespaces {
    /// Compares the process `pid` at the other end of a socket with the daemon. The kernel vouches for the number only
    /// together with a descriptor of the process (`SO_PEERPIDFD`, Linux 6.5): it may be another process's since.
    pub(crate) fn from_peer(socket: impl AsFd, pid: i32) -> Self {
        let Ok(process) = peer_pidfd(socket) else { return Self::Other };
        let is_own = pid > 0
            && has_own_proc()
            && is_same_link(pid, "pid").unwrap_or_else(|| !nested(&status(pid)))
            && is_same_link(pid, "user").unwrap_or_else(|| has_same_ids(pid))
            && is_in_own_container(pid);
        // Last: what was read was this process's if its number has not been free since.
        if is_own && is_process(process.as_raw_fd(), pid) { Self::Own } else { Self::Other }
    }
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Whether `/proc` is that of the daemon's PID namespace, whose numbers the kernel gives to peers.
fn has_own_proc() -> bool {
    fs::read_link("/proc/self").is_ok_and(|own| own == Path::new(&own_pid().to_string()))
}

/// Whether a namespace is the daemon's. `None` if the kernel does not say: a process of another user, for a daemon
/// without the capability to inspect it.
fn is_same_link(pid: i32, namespace: &str) -> Option<bool> {
    let own = fs::read_link(format!("/proc/self/ns/{namespace}")).ok()?;
    let found = fs::read_link(format!("/proc/{pid}/ns/{namespace}")).ok()?;
    Some(own == found)
}

fn status(pid: i32) -> String {
    read(&format!("/proc/{pid}/status")).unwrap_or_default()
}

/// Whether a process has a number in a PID namespace below that of `/proc`; true if that is not known.
fn nested(status: &str) -> bool {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_none_or(|numbers| numbers.split_whitespace().count() != 1)
}

/// Whether user and group numbers mean the same to a process and to the daemon.
fn has_same_ids(pid: i32) -> bool {
    ["uid_map", "gid_map"].iter().all(|map| {
        let own = read(&format!("/proc/self/{map}"));
        own.is_some() && own == read(&format!("/proc/{pid}/{map}"))
    })
}

/// Whether a descriptor is of the process that has this number now.
fn is_process(pidfd: i32, pid: i32) -> bool {
    let about = read(&format!("/proc/self/fdinfo/{pidfd}")).unwrap_or_default();
    let number = about.lines().find_map(|line| line.strip_prefix("Pid:"));
    number.is_some_and(|number| number.trim() == pid.to_string())
}

/// The container's ID in the paths of `/proc/PID/cgroup`, as Docker, Podman, containerd, CRI-O and LXC name groups.
fn container_of(groups: &str) -> Option<String> {
    /// As many as `docker ps` shows.
    const SHOWN: usize = 12;
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut parts = paths.flat_map(|path| path.rsplit('/'));
    parts.find_map(|part| {
        if let Some(name) = part.strip_prefix("lxc.payload.") {
            return Some(shown(name));
        }
        let id = part.strip_suffix(".scope").unwrap_or(part).rsplit(['-', ':']).next()?;
        let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then(|| id.get(..SHOWN).unwrap_or(id).to_owned())
    })
}

fn last_part(groups: &str) -> Option<String> {
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.flat_map(|path| path.rsplit('/')).find(|part| !part.is_empty()).map(shown)
}

/// Names of control groups are chosen by those who create them.
fn shown(name: &str) -> String {
    const MAX_CHARS: usize = 64;
    name.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const ID: &str = "3f2a91bc04d13f2a91bc04d13f2a91bc04d13f2a91bc04d13f2a91bc04d1aaaa";

    #[test]
    fn container_is_found_in_the_groups_of_each_runtime() {
        for group in [
            format!("0::/system.slice/docker-{ID}.scope\n"),
            format!("0::/machine.slice/libpod-{ID}.scope/container\n"),
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n"),
            format!("0::/kubepods/besteffort/pod1/{ID}\n"),
            format!("0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}\n"),
            format!("1:name=systemd:/docker/{ID}\n0::/\n"),
        ] {
            assert_eq!(container_of(&group).as_deref(), Some("3f2a91bc04d1"), "{group}");
        }
        assert_eq!(container_of("0::/lxc.payload.web/system.slice\n").as_deref(), Some("web"));
        for group in ["0::/user.slice/user-1000.slice/session-2.scope\n", "0::/\n", "", "no"] {
            assert_eq!(container_of(group), None, "{group}");
        }
    }

    #[test]
    fn process_with_several_numbers_is_in_another_namespace() {
        assert!(!nested("Name:\tx\nNSpid:\t7\n"));
        assert!(nested("Name:\tx\nNSpid:\t7\t1\n") && nested("Name:\tx\n"), "unknown is another");
        assert_eq!(last_part("0::/a.slice/b.service\n").as_deref(), Some("b.service"));
    }

    #[test]
    fn own_process_is_in_its_own_namespaces_and_a_dead_or_other_one_is_not_known() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        if peer_pidfd(&ours).is_err() {
            blobd_fixtures::skipped::skipped("the kernel has no SO_PEERPIDFD (Linux 6.5)");
            return;
        }
        assert_eq!(Namespaces::from_peer(&ours, own_pid()), Namespaces::Own);
        // The number of another process than the descriptor's.
        assert_eq!(Namespaces::from_peer(&ours, 1), Namespaces::Other);
        assert_eq!(Namespaces::from_peer(&ours, 0), Namespaces::Other);
    }
}
