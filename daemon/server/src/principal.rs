//! The user at the other end of a connection.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use blobd_client::protocol::response::Engine;

use crate::names::Names;
use crate::peer_process::{Namespaces, PeerProcess};
use crate::sys::peer_groups;

/// Who has sent a request. Rights depend on the user and its groups only, not on how they were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    /// 0 where the kernel does not report it.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) groups: Groups,
    /// For root only: whose root it is. [`Namespaces::Other`] for all others, for whom it makes no difference.
    pub(crate) namespaces: Namespaces,
}

/// The groups that a process had when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) primary: u32,
    /// `None` if the kernel does not report them; [`Principal::named`] then asks the name service.
    pub(crate) supplementary: Option<Arc<[u32]>>,
}

impl Groups {
    pub(crate) fn all(&self) -> BTreeSet<u32> {
        let supplementary = self.supplementary.iter().flat_map(|gids| gids.iter().copied());
        supplementary.chain([self.primary]).collect()
    }

    pub(crate) fn contains(&self, gid: u32) -> bool {
        self.primary == gid || self.supplementary.as_ref().is_some_and(|gids| gids.contains(&gid))
    }
}

impl Principal {
    /// A reader on another machine, who has neither a user nor a group here.
    pub(crate) fn unknown() -> Self {
        /// A number that no user and no group has.
        const NOBODY: u32 = u32::MAX;
        let groups = Groups { primary: NOBODY, supplementary: Some(Arc::default()) };
        Self { pid: 0, uid: NOBODY, groups, namespaces: Namespaces::Other }
    }

    /// The daemon itself.
    pub(crate) fn of_daemon() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let (uid, primary) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let groups = Groups { primary, supplementary: Some(Arc::default()) };
        Self { pid, uid, groups, namespaces: Namespaces::Other }
    }

    /// Reads the credentials of the peer from the kernel.
    pub(crate) fn from_stream(stream: &tokio::net::UnixStream) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        let groups =
            Groups { primary: credentials.gid(), supplementary: peer_groups(stream).ok().map(Arc::from) };
        let (pid, uid) = (credentials.pid().unwrap_or_default(), credentials.uid());
        let namespaces = if uid == 0 { Namespaces::from_peer(stream, pid) } else { Namespaces::Other };
        Ok(Self { pid, uid, groups, namespaces })
    }

    /// Finds the name of the user, and the groups if the kernel has not reported them, with the name service. Waits a
    /// moment.
    pub(crate) fn named(mut self, names: &Names) -> Self {
        names.name_of(self.uid);
        if self.groups.supplementary.is_none() {
            self.groups.supplementary = names.groups_of(self.uid);
        }
        self
    }

    /// With the groups that the name service reports. Waits a moment.
    pub(crate) fn with_groups_of(self, names: &Names) -> Self {
        let groups = Groups { supplementary: None, ..self.groups };
        Self { groups, ..self }.named(names)
    }

    /// Whether [`Self::named`] would not wait.
    pub(crate) fn is_named(&self, names: &Names) -> bool {
        names.knows(self.uid) && self.groups.supplementary.is_some()
    }

    /// The process that has connected, as it is now.
    pub(crate) fn process(&self) -> PeerProcess {
        PeerProcess::of(self.pid)
    }

    /// The process's name in `rm` and in the log.
    pub(crate) fn description(&self) -> String {
        let PeerProcess { command, engine, container } = self.process();
        let process = match command {
            Some(command) => format!("process {} ({command})", self.pid),
            None => format!("process {}", self.pid),
        };
        match (engine, container) {
            (Some(Engine { pid, command }), _) => format!("{process} for process {pid} ({command})"),
            (None, Some(place)) if self.pid > 0 => format!("{process} in {place}"),
            (None, Some(place)) => format!("a process in {place}"),
            (None, None) => process,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A user without processes that matter, with these groups besides the primary one.
    pub(crate) fn principal(uid: u32, primary: u32, supplementary: Option<&[u32]>) -> Principal {
        let groups = Groups { primary, supplementary: supplementary.map(Arc::from) };
        Principal { pid: 1, uid, groups, namespaces: Namespaces::default() }
    }

    #[test]
    fn groups_that_the_kernel_does_not_report_are_those_of_the_name_service() {
        let names = Names::from_files("ann:x:7:70::/:\n", "staff:x:80:ann\n");
        let named = principal(7, 5, None).named(&names);
        assert_eq!(named.groups.all(), [5, 70, 80].into());
        assert!(named.is_named(&names));
        let reported = principal(7, 5, Some(&[6])).named(&names);
        assert_eq!(reported.groups.all(), [5, 6].into());
    }

    #[tokio::test]
    async fn own_process_is_at_the_other_end_of_a_socket_pair() {
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        let found = Principal::from_stream(&ours).unwrap();
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
        assert_eq!(found.groups.primary, rustix::process::getegid().as_raw());
        assert!(found.groups.contains(found.groups.primary));
        assert!(found.groups.all().contains(&found.groups.primary));
    }
}
