//! The user who runs the commands.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::programs;
use rustix::process::geteuid;

use super::case::Substitute;

/// Any user but root.
const ORDINARY_UID: u32 = 65534;

/// A user who runs the commands, on a store that may be another user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    /// The user of this process, on its own store.
    Owner,
    /// Root, on the store of an ordinary user.
    RootOnAnothers,
    /// The ordinary user, on the same store; started by root.
    Ordinary,
}

impl User {
    /// The users to test with a substitute: root on another user's store, or without root the store's owner.
    /// An entry of another owner, which only root can create, is also tested as the ordinary user, who cannot
    /// change it back.
    pub(super) fn all(substitute: Substitute) -> &'static [Self] {
        let has_setpriv = || Command::new("setpriv").arg("--version").output().is_ok();
        match (geteuid().is_root() && has_setpriv(), substitute) {
            (true, Substitute::AnotherOwner) => &[Self::RootOnAnothers, Self::Ordinary],
            (true, _) => &[Self::RootOnAnothers],
            (false, Substitute::AnotherOwner) => {
                skipped("only root with setpriv can give a file to another user");
                &[]
            }
            (false, _) => &[Self::Owner],
        }
    }

    /// Gives the user's store, and all below a directory, to its owner.
    pub(super) fn own(self, directory: &Path) {
        if self == Self::Owner {
            return;
        }
        let status = Command::new("chown")
            .args(["-hR", &format!("{ORDINARY_UID}:{ORDINARY_UID}")])
            .arg(directory)
            .status();
        assert!(status.unwrap().success());
    }

    /// Gives one entry to a user who does not own the store.
    pub(super) fn disown(self, path: &Path) {
        // As root, any uid but the store's owner will do.
        let other = if self == Self::Ordinary { 0 } else { 12345 };
        chown(path, Some(other), Some(other)).unwrap();
        let mode = if fs::metadata(path).unwrap().is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }

    /// `blobd` as this user.
    pub(super) fn blobd(self, place: &Blobd) -> Command {
        let mut command = match self {
            Self::Ordinary => {
                let mut command = Command::new("setpriv");
                command.args([&format!("--reuid={ORDINARY_UID}"), &format!("--regid={ORDINARY_UID}")]);
                command.args(["--clear-groups", "--"]).arg(programs::blobd());
                command
            }
            Self::Owner | Self::RootOnAnothers => Command::new(programs::blobd()),
        };
        place.prepare(&mut command);
        command
    }
}
