//! The location of a case's store: a directory, or a small file system of its own, which only the processes
//! of the case see, so that `statvfs` shows only their changes.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::filler::free_bytes;
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};
use tempfile::TempDir;

/// Much more than the models of a case need, so that the reserve is never released.
const MIB: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A directory that shares its file system with others.
    Directory,
    Tmpfs,
    /// On a loop device.
    Ext4,
}

/// A child process that runs a shell script, prints a line, and then waits until this is dropped or the
/// test's process ends.
#[derive(Debug)]
pub(super) struct Holder {
    child: Child,
    input: Option<ChildStdin>,
}

impl Holder {
    /// `None` if the script fails. `"$0"` is the path.
    pub(super) fn start(wrapper: &[&str], script: &str, path: &Path) -> Option<Self> {
        let words = [wrapper, &["sh", "-c", script]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(path);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = piped.spawn().ok()?;
        let (input, output) = (child.stdin.take(), child.stdout.take()?);
        let holder = Self { child, input };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).ok()?;
        (line == "ready\n").then_some(holder)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// A daemon and the location of its store.
#[derive(Debug)]
pub(super) struct StoreLocation {
    /// Declared before the mount, so that it is dropped first.
    pub(super) daemon: TestDaemon,
    /// The store as this process sees it.
    pub(super) root: PathBuf,
    /// The free bytes of the empty file system, if the store has its own.
    pub(super) capacity: Option<u64>,
    /// Keeps the mount.
    _holder: Option<Holder>,
}

impl StoreLocation {
    /// `None` if this kind is not available here.
    pub(super) fn make(kind: Kind) -> Option<Self> {
        let folder = if kind == Kind::Ext4 { disk_directory() } else { tmpfs_directory() };
        let Some(mount) = mount(kind, &folder)? else {
            let daemon = TestDaemon::start_in(folder);
            let root = daemon.root().to_path_buf();
            return Some(Self { daemon, root, capacity: None, _holder: None });
        };
        let root = format!("/proc/{}/root{}", mount.holder.child.id(), folder.path().join("store").display());
        let root = PathBuf::from(root);
        let capacity = Some(free_bytes(&root));
        let wrapper: Vec<&str> = mount.wrapper.iter().map(String::as_str).collect();
        let daemon = TestDaemon::start_under(&wrapper, folder);
        assert!(
            root.join("store.json").is_file(),
            "the store is seen through the process that keeps the mount"
        );
        Some(Self { daemon, root, capacity, _holder: Some(mount.holder) })
    }
}

struct Mount {
    holder: Holder,
    /// The command that starts a program in the mount's namespace.
    wrapper: Vec<String>,
}

/// `Some(None)` if the kind needs no mount.
fn mount(kind: Kind, folder: &TempDir) -> Option<Option<Mount>> {
    let (store, image) = (folder.path().join("store"), folder.path().join("image"));
    let (namespace, own, make) = match kind {
        Kind::Directory => return Some(None),
        Kind::Tmpfs => {
            let make = format!("mount -t tmpfs -o mode=700,size={MIB}m none \"$0\"");
            (["--user", "--preserve-credentials"].as_slice(), "--map-root-user", make)
        }
        Kind::Ext4 => {
            File::create(&image).unwrap().set_len(MIB << 20).unwrap();
            let mkfs = Command::new("mkfs.ext4").args(["-q", "-m", "0", "-b", "4096"]).arg(&image).output();
            if !mkfs.is_ok_and(|mkfs| mkfs.status.success()) {
                return None;
            }
            let make = format!("mount -o loop {} \"$0\" && rmdir \"$0/lost+found\"", image.display());
            (&[][..], "--mount", make)
        }
    };
    fs::create_dir(&store).unwrap();
    let script = format!("{make} && echo ready && exec cat");
    let holder = Holder::start(&["unshare", "--mount", own], &script, &store)?;
    let target = holder.child.id().to_string();
    let enter = ["nsenter", "--target", &target, "--mount"];
    let wrapper: Vec<String> = enter.iter().chain(namespace).map(ToString::to_string).collect();
    let mut trial = Command::new(&wrapper[0]);
    let is_entered = trial.args(&wrapper[1..]).arg("true").output().is_ok_and(|run| run.status.success());
    is_entered.then_some(Some(Mount { holder, wrapper }))
}
