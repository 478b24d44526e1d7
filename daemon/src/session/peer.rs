//! Who is at the other end, and what they may do.

use std::fs;

/// The process at the other end of a connection, as the kernel names it: that of `connect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process, or 0 where the kernel does not tell.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// List and open models.
    Read,
    /// Add models.
    Pull,
    /// Remove and rename models, collect.
    Administer,
}

impl Peer {
    /// Asks the kernel who connected.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn of(stream: &tokio::net::UnixStream) -> std::io::Result<Self> {
        let credentials = stream.peer_cred()?;
        Ok(Self { pid: credentials.pid().unwrap_or_default(), uid: credentials.uid() })
    }

    /// The name of its command, as `ps` shows it; `None` once it has ended.
    #[must_use]
    pub fn command(&self) -> Option<String> {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).ok()?;
        Some(name.trim_end().chars().filter(|c| !c.is_control()).collect())
    }

    /// Whether the peer may do what a request needs. Who can connect at all is decided by the
    /// socket's mode: they may read and pull. The daemon's own user and root may do everything.
    #[must_use]
    pub fn may(&self, right: Right) -> bool {
        let own_uid = rustix::process::geteuid().as_raw();
        match right {
            Right::Read | Right::Pull => true,
            Right::Administer => self.uid == own_uid || self.uid == 0,
        }
    }

    /// The user's name, if `/etc/passwd` has one.
    #[must_use]
    pub fn user_name(&self) -> Option<String> {
        let users = fs::read_to_string("/etc/passwd").ok()?;
        users.lines().find_map(|line| {
            let mut fields = line.split(':');
            let (name, uid) = (fields.next()?, fields.nth(1)?);
            (uid.parse() == Ok(self.uid)).then(|| name.to_owned())
        })
    }

    /// How `rm` and the log name the peer.
    #[must_use]
    pub fn description(&self) -> String {
        match self.command() {
            Some(command) => format!("process {} ({command})", self.pid),
            None => format!("process {}", self.pid),
        }
    }
}
