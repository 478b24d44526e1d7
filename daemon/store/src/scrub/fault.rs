//! What an error says of the file that was looked at.

use std::io;

use rustix::io::Errno;

/// Whose fault it is that a file could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The disk's: it has lost something, or a checksum of the file system does not fit.
    Damage,
    /// This process lacks what it takes to read any file: a pause may help.
    Shortage,
    /// Anything else, such as a permission: nothing is known about the bytes.
    Refusal,
}

impl Fault {
    /// What a disk, a cable, a server behind it or a file system says that has lost something.
    const DAMAGE: [Errno; 8] = [
        Errno::IO,
        Errno::REMOTEIO,
        Errno::TIMEDOUT,
        Errno::NOLINK,
        Errno::UCLEAN,
        Errno::BADMSG,
        Errno::NODATA,
        Errno::ILSEQ,
    ];
    const SHORTAGE: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];

    /// The one that a call has failed with.
    pub fn of(error: &io::Error) -> Self {
        let is_one_of = |errnos: &[Errno]| Errno::from_io_error(error).is_some_and(|no| errnos.contains(&no));
        if is_one_of(&Self::DAMAGE) || error.kind() == io::ErrorKind::UnexpectedEof {
            Self::Damage
        } else if is_one_of(&Self::SHORTAGE) {
            Self::Shortage
        } else {
            Self::Refusal
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_disk_says_is_damage_and_only_what_all_files_need_is_a_shortage() {
        for errno in Fault::DAMAGE {
            assert_eq!(Fault::of(&errno.into()), Fault::Damage, "{errno}");
        }
        assert_eq!(Fault::of(&io::ErrorKind::UnexpectedEof.into()), Fault::Damage);
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(Fault::of(&errno.into()), Fault::Shortage, "{errno}");
        }
        for errno in [Errno::ACCESS, Errno::PERM, Errno::LOOP, Errno::STALE, Errno::INVAL] {
            assert_eq!(Fault::of(&errno.into()), Fault::Refusal, "{errno}");
        }
    }
}
