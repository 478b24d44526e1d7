//! The owner of a store: every file in it belongs to this user, whoever runs the command.
//!
//! A file of root's in a store of another user would stop that user's daemon: it could neither write to the file nor
//! create anything in a directory of root's. So root acts as the owner while it changes the store. The kernel then
//! creates each file with the right owner and group, and there is no moment, and no state after a crash, in which a
//! file has another one. It also works on NFS with `root_squash`, where root may not `chown`.
//!
//! A process that may not act as the owner does not change the store.

use std::fs::File;
use std::io;
use std::path::Path;

use blobd_store_format::layout;
use rustix::fs::{AtFlags, FileType, Stat, fstat, statat};

use crate::sys::FileIdentity;

/// The user and group that own the files of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOwner {
    pub uid: u32,
    /// The group of files that this process creates, if it acts as another user.
    pub gid: u32,
}

impl StoreOwner {
    /// The owner of the store in a directory is that of `store.json`, because the directory may be a mount point of
    /// root's; unless `store.json` is root's in a directory of another user, as after a `chown` of the directory alone.
    /// A new store belongs to the owner of its directory if this process can act as that user, and otherwise to its own
    /// user.
    pub(crate) fn from_directory(directory: &File) -> io::Result<Self> {
        let above = fstat(directory)?;
        let found = statat(directory, layout::STORE_FILE, AtFlags::SYMLINK_NOFOLLOW).ok();
        let store_file =
            found.filter(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile);
        Ok(match store_file {
            Some(file) if file.st_uid != 0 || above.st_uid == 0 => Self::from(file),
            Some(_roots) => Self::from(above),
            None => Self::for_new_files_in(above),
        })
    }

    fn for_new_files_in(directory: Stat) -> Self {
        let owner = Self::from(directory);
        if owner.act().is_ok() { owner } else { Self::for_process() }
    }

    pub fn for_process() -> Self {
        Self { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }

    pub fn is_own(self) -> bool {
        self.uid == Self::for_process().uid
    }

    /// Makes this thread, and those that it starts, create files as the owner until the result is dropped; `None` if
    /// the process runs as the owner. Fails if the process may not do that.
    pub fn act(self) -> io::Result<Option<FileIdentity>> {
        if self.is_own() {
            return Ok(None);
        }
        FileIdentity::assume(self.uid, self.gid).map(Some)
    }

    /// Whether this process sees the owner's real number: in a user namespace, all unmapped users share one.
    #[expect(clippy::disallowed_methods, reason = "a file of the kernel, not of the store")]
    pub fn is_mapped(self) -> bool {
        let map = std::fs::read_to_string("/proc/self/uid_map");
        map.map_or(true, |map| maps(&map, self.uid))
    }

    pub fn description(self) -> String {
        match self.is_mapped() {
            true => format!("uid {}", self.uid),
            false => "a user outside of this process's user namespace".to_owned(),
        }
    }

    /// Why this process cannot change the store of this owner, and what to do about it.
    pub(crate) fn refusal(self) -> String {
        let (own, uid) = (Self::for_process().uid, self.uid);
        if !self.is_mapped() {
            return format!("it belongs to {}; {RUN_OUTSIDE}", self.description());
        }
        format!(
            "it belongs to uid {uid}, and this process runs as uid {own}, which cannot act as that user; run the \
             command as its owner: {}",
            self.command("blobd …")
        )
    }

    /// A command for a shell that runs another one as the owner.
    pub fn command(self, run: &str) -> String {
        format!("sudo -u '#{}' {run}", self.uid)
    }
}

/// What to do about a store whose owner is not known here.
pub const RUN_OUTSIDE: &str = "run blobd outside of the container or namespace, as the store's owner";

/// Whether a map of user IDs (`user_namespaces(7)`) has this one. Each line: first ID, first ID outside, count.
fn maps(map: &str, uid: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (first, count) = (numbers.next().unwrap_or(0), numbers.nth(1).unwrap_or(0));
        (first..first.saturating_add(count)).contains(&u64::from(uid))
    })
}

impl From<Stat> for StoreOwner {
    fn from(stat: Stat) -> Self {
        Self { uid: stat.st_uid, gid: stat.st_gid }
    }
}

/// The owner for a directory that is to be created: root does not leave a directory of its own in one of another user.
pub(crate) fn owner_of_new_directory(path: &Path) -> Option<StoreOwner> {
    let above = path.ancestors().skip(1).find_map(|above| {
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        rustix::fs::stat(above).ok()
    });
    above.map(StoreOwner::for_new_files_in)
}

#[cfg(test)]
mod tests;
