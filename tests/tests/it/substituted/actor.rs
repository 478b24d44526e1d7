//! Who uses the store.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use blobd_tests::command::Blobd;
use blobd_tests::programs;
use rustix::process::geteuid;

use super::case::Substitute;

/// Any user but root.
const NOBODY: u32 = 65534;

/// A user who runs the commands, on a store that may be another user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    /// The user of this process, on a store of its own.
    Owner,
    /// Root, on the store of an ordinary user.
    RootOnAnothers,
    /// The ordinary user, on the same store; started by root.
    Nobody,
}

impl Actor {
    /// Who meets what: root that uses another user's store, or else the store's owner. What root has
    /// to lay out for an owner, who must not be able to change it back, that user meets too.
    pub(super) fn all(substitute: Substitute) -> &'static [Self] {
        let has_setpriv = || Command::new("setpriv").arg("--version").output().is_ok();
        match (geteuid().is_root() && has_setpriv(), substitute) {
            (true, Substitute::AnotherOwner) => &[Self::RootOnAnothers, Self::Nobody],
            (true, _) => &[Self::RootOnAnothers],
            (false, Substitute::AnotherOwner) => {
                println!("skipped: only root with setpriv can give a file to another user");
                &[]
            }
            (false, _) => &[Self::Owner],
        }
    }

    /// Gives the actor's store, and all below a directory, to its owner.
    pub(super) fn own(self, directory: &Path) {
        if self == Self::Owner {
            return;
        }
        let status =
            Command::new("chown").args(["-hR", &format!("{NOBODY}:{NOBODY}")]).arg(directory).status();
        assert!(status.unwrap().success());
    }

    /// Gives one entry to somebody who does not own the store.
    pub(super) fn disown(self, path: &Path) {
        // For root every owner but the store's is another one.
        let other = if self == Self::Nobody { 0 } else { 12345 };
        chown(path, Some(other), Some(other)).unwrap();
        let mode = if fs::metadata(path).unwrap().is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }

    /// `blobd` as this user.
    pub(super) fn blobd(self, place: &Blobd) -> Command {
        let mut command = match self {
            Self::Nobody => {
                let mut command = Command::new("setpriv");
                command.args([&format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}")]);
                command.args(["--clear-groups", "--"]).arg(programs::blobd());
                command
            }
            Self::Owner | Self::RootOnAnothers => Command::new(programs::blobd()),
        };
        place.prepare(&mut command);
        command
    }
}
