//! File systems in image files, mounted through loop devices and unmounted on drop.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use blobd_tests::temp_dirs::tmpfs_directory;

use crate::Outcome;
use crate::requirements;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Journals metadata; writes data before the metadata that refers to it.
    Ext4,
    /// Journals metadata; allocates blocks late.
    Xfs,
    /// Copy on write, with a log tree for `fsync`.
    Btrfs,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Ext4, Self::Btrfs, Self::Xfs];

    /// Its name for `mkfs` and `mount`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Whether several images of one disk can be mounted at a time. btrfs treats them as devices of one file
    /// system.
    pub(crate) const fn mounts_copies(self) -> bool {
        matches!(self, Self::Ext4 | Self::Xfs)
    }

    /// The reason why it is not available here; `None` if it is.
    pub(crate) fn missing(self) -> Option<String> {
        let package = match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        };
        requirements::program(&self.maker(), package)
            .or_else(|| self.try_out().err().map(|error| error.to_string()))
    }

    /// Creates a file system in a new file. It is as small as its tools allow.
    ///
    /// # Errors
    /// When `mkfs` fails.
    pub(crate) fn make(self, image: &Path) -> Outcome<()> {
        let bytes: u64 = match self {
            Self::Ext4 => 64 << 20,
            Self::Xfs => 300 << 20,
            Self::Btrfs => 128 << 20,
        };
        File::create(image)?.set_len(bytes)?;
        // No lazy initialisation, whose writes would be in the record of every run.
        let options: &[&str] = match self {
            Self::Ext4 => &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"],
            Self::Xfs | Self::Btrfs => &["-q", "-f", "-K"],
        };
        run(Command::new(requirements::path(&self.maker())).args(options).arg(image))
    }

    fn maker(self) -> String {
        format!("mkfs.{}", self.name())
    }

    /// Checks whether this kernel supports it and permits mounting.
    fn try_out(self) -> Outcome<()> {
        let folder = tmpfs_directory();
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
    /// Mounts the file system in `image`. The kernel chooses a free loop device and releases it on unmount.
    ///
    /// # Errors
    /// When `mount` fails, for instance because the journal cannot be replayed.
    pub(crate) fn mount(kind: Kind, image: &Path, directory: &Path) -> Outcome<Self> {
        let mut command = Command::new("mount");
        // Discards would punch holes in the image without a recorded write.
        let options = match kind {
            // Several images of one disk may be mounted at a time.
            Kind::Xfs => "loop,nodiscard,nouuid",
            Kind::Ext4 | Kind::Btrfs => "loop,nodiscard",
        };
        command.args(["-t", kind.name(), "-o", options]).arg(image).arg(directory);
        run(&mut command)?;
        Ok(Self { directory: directory.to_path_buf(), is_mounted: true })
    }

    /// The mount point.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Unmounts it, which writes all cached data.
    ///
    /// # Errors
    /// When `umount` fails.
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
            // Detaches it at least; the kernel unmounts it when the last file is closed.
            let _ = run(Command::new("umount").arg("--lazy").arg(&self.directory));
        }
    }
}

/// Retries for a while: a process that was just killed may still have a file open.
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

/// Runs a command; its output is only used in the error.
pub(crate) fn run(command: &mut Command) -> Outcome<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(format!("{program}: {}: {message}", output.status).into())
}
