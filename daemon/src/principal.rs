//! The process at the other end of a connection, and its rights.

use std::collections::BTreeMap;
use std::fs;

/// The process that connected, as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// 0 where the kernel does not report it.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    /// List and open models.
    Read,
    /// Add models.
    Pull,
    /// Remove and rename models, collect.
    Administer,
}

impl Peer {
    pub(crate) fn of(stream: &tokio::net::UnixStream) -> std::io::Result<Self> {
        let credentials = stream.peer_cred()?;
        Ok(Self { pid: credentials.pid().unwrap_or_default(), uid: credentials.uid() })
    }

    /// The name of its command, as `ps` shows it; `None` after it has ended.
    pub(crate) fn command(&self) -> Option<String> {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).ok()?;
        Some(name.trim_end().chars().filter(|c| !c.is_control()).collect())
    }

    /// Whether the peer has this right. The mode of the socket decides which users can connect: all of them
    /// may read and pull. The daemon's own user and root have all rights.
    pub(crate) fn may(&self, right: Right) -> bool {
        let own_uid = rustix::process::geteuid().as_raw();
        match right {
            Right::Read | Right::Pull => true,
            Right::Administer => self.uid == own_uid || self.uid == 0,
        }
    }

    /// The peer's name in `rm` and in the log.
    pub(crate) fn description(&self) -> String {
        match self.command() {
            Some(command) => format!("process {} ({command})", self.pid),
            None => format!("process {}", self.pid),
        }
    }
}

/// The names of users from `/etc/passwd`.
#[derive(Debug, Default)]
pub(crate) struct UserNames(BTreeMap<u32, String>);

impl UserNames {
    /// Without names if the file cannot be read.
    pub(crate) fn read() -> Self {
        Self::parse(&fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    fn parse(passwd: &str) -> Self {
        let mut names = BTreeMap::new();
        for line in passwd.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(Ok(uid))) = (fields.next(), fields.nth(1).map(str::parse)) {
                // The first entry of a user counts.
                names.entry(uid).or_insert_with(|| name.to_owned());
            }
        }
        Self(names)
    }

    pub(crate) fn name_of(&self, uid: u32) -> Option<String> {
        self.0.get(&uid).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_name_of_a_user_counts() {
        let users = UserNames::parse("root:x:0:0::/root:/bin/sh\ntoor:x:0:0::/:\nno\nb:x:y:\nann:x:7:7:::\n");
        assert_eq!(users.name_of(0).as_deref(), Some("root"));
        assert_eq!(users.name_of(7).as_deref(), Some("ann"));
        assert_eq!(users.name_of(8), None);
    }
}
