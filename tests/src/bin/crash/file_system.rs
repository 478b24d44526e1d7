//! File systems in files: made, mounted through a loop device, unmounted whatever happens.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use blobd_tests::places::fast_folder;

use crate::Outcome;
use crate::needs;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// ext4: one journal for all metadata; data before the metadata that needs it.
    Ext4,
    /// XFS: a journal of its own kind, delayed allocation.
    Xfs,
    /// btrfs: copy on write, with a log tree for `fsync`.
    Btrfs,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Ext4, Self::Btrfs, Self::Xfs];

    /// What `mkfs` and `mount` call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Whether several images of one disk can be mounted at a time. btrfs takes them for parts of one
    /// file system.
    pub(crate) const fn mounts_copies(self) -> bool {
        matches!(self, Self::Ext4 | Self::Xfs)
    }

    /// Why it cannot be had here; none if it can.
    pub(crate) fn lack(self) -> Option<String> {
        let package = match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        };
        needs::program(&self.maker(), package).or_else(|| self.try_out().err().map(|error| error.to_string()))
    }

    /// Makes one in a new file. It is as small as its tools allow.
    ///
    /// # Errors
    /// What the tools say.
    pub(crate) fn make(self, image: &Path) -> Outcome<()> {
        let bytes: u64 = match self {
            Self::Ext4 => 64 << 20,
            Self::Xfs => 300 << 20,
            Self::Btrfs => 128 << 20,
        };
        File::create(image)?.set_len(bytes)?;
        // Nothing is left to be initialised later: it would be in the record of every run.
        let options: &[&str] = match self {
            Self::Ext4 => &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"],
            Self::Xfs | Self::Btrfs => &["-q", "-f", "-K"],
        };
        run(Command::new(needs::path(&self.maker())).args(options).arg(image))
    }

    fn maker(self) -> String {
        format!("mkfs.{}", self.name())
    }

    /// Finds out whether this kernel mounts it, and lets us.
    fn try_out(self) -> Outcome<()> {
        let folder = fast_folder();
        let (image, directory) = (folder.path().join("image"), folder.path().join("mounted"));
        std::fs::create_dir(&directory)?;
        self.make(&image)?;
        Mounted::mount(self, &image, &directory)?.unmount()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A file system that is mounted until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Mounted {
    directory: PathBuf,
    is_mounted: bool,
}

impl Mounted {
    /// Mounts the file system in `image`. The loop device is the kernel's choice among the free
    /// ones, and goes with the mount.
    ///
    /// # Errors
    /// What `mount` says; a journal that cannot be replayed among it.
    pub(crate) fn mount(kind: Kind, image: &Path, directory: &Path) -> Outcome<Self> {
        let mut command = Command::new("mount");
        // Trimming would make holes in the image, which is no write that could be recorded.
        let options = match kind {
            // Several images of one disk may be mounted at a time.
            Kind::Xfs => "loop,nodiscard,nouuid",
            Kind::Ext4 | Kind::Btrfs => "loop,nodiscard",
        };
        command.args(["-t", kind.name(), "-o", options]).arg(image).arg(directory);
        run(&mut command)?;
        Ok(Self { directory: directory.to_path_buf(), is_mounted: true })
    }

    /// Where it is.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Unmounts it, and so writes what it still has in memory.
    ///
    /// # Errors
    /// What `umount` says.
    pub(crate) fn unmount(mut self) -> Outcome<()> {
        self.is_mounted = false;
        unmount(&self.directory)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.is_mounted {
            return;
        }
        if let Err(error) = unmount(&self.directory) {
            eprintln!("{}: {error}", self.directory.display());
            // Out of the way at least; the kernel does the rest when the last file is closed.
            let _ = run(Command::new("umount").arg("--lazy").arg(&self.directory));
        }
    }
}

/// A process that has just been killed may hold a file for a moment still.
fn unmount(directory: &Path) -> Outcome<()> {
    const ATTEMPTS: u32 = 100;
    let attempt = || run(Command::new("umount").arg(directory));
    for _ in 1..ATTEMPTS {
        if attempt().is_ok() {
            return Ok(());
        }
        sleep(Duration::from_millis(20));
    }
    attempt()
}

/// Runs a command to its end; its output is dropped unless it fails.
pub(crate) fn run(command: &mut Command) -> Outcome<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(format!("{program}: {}: {complaint}", output.status).into())
}
