//! Classifies errors from reading a file.

use std::io;

use rustix::io::Errno;

/// Why a file could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The disk has lost data, or a checksum of the file system is wrong.
    Damage,
    /// This process lacks a resource that reading any file needs; waiting may help.
    Shortage,
    /// Anything else, such as a missing permission: it says nothing about the bytes.
    Refusal,
}

impl Fault {
    /// The errors that disks, cables, file servers and file systems report for lost data.
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

    /// Classifies the error of a call.
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
    fn errors_are_classified_as_damage_shortage_or_refusal() {
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
