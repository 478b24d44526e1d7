//! What systemd passes to a service, and what a service tells systemd: `sd_listen_fds(3)`, `sd_notify(3)`.
//!
//! Written here because it is a few variables, one descriptor and one datagram: a crate would be longer than this.
//! Without the variables, nothing of this has an effect.

mod activation;

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

pub(crate) use activation::{ActivationError, PassedSocket};

const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
/// How long one request for more time is valid, and after how long it is repeated.
const EXTENSION: Duration = Duration::from_secs(60);
const EXTENSION_INTERVAL: Duration = Duration::from_secs(15);
/// After this time the start is considered to hang. Deleting what an interrupted import of the largest models has left
/// takes minutes on a slow disk.
const LONGEST_START: Duration = Duration::from_secs(3600);
/// How long a message may wait for a busy systemd.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Does nothing if systemd has not requested messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notifier(Option<Arc<Target>>);

#[derive(Debug)]
struct Target {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl Notifier {
    /// Whether systemd, or another service manager, waits for messages of this process.
    pub(crate) fn is_requested() -> bool {
        env::var_os(SOCKET_VARIABLE).is_some_and(|name| !name.is_empty())
    }

    pub(crate) fn from_environment() -> Self {
        let Some(name) = env::var(SOCKET_VARIABLE).ok().filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        match Target::at(&name) {
            Ok(target) => Self(Some(Arc::new(target))),
            Err(error) => {
                tracing::warn!(
                    "NOTIFY_SOCKET: {name:?}: {error}; systemd is not told that blobd has started"
                );
                Self::default()
            }
        }
    }

    pub(crate) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\n{}", status_line(status)));
    }

    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=stopping");
    }

    /// Shows `status` in `systemctl status`, and requests more time to start until the result is dropped.
    pub(crate) fn starting(&self, status: &str) -> StartTime {
        // Sent here and not by the thread: none may follow "READY=1" of a short start.
        self.send(&format!("{}\n{}", status_line(status), more_time()));
        if self.0.is_none() {
            return StartTime(None);
        }
        let (started, ended) = channel();
        let notifier = self.clone();
        let extend = move || {
            let mut left = LONGEST_START;
            while !left.is_zero() && ended.recv_timeout(EXTENSION_INTERVAL) == Err(RecvTimeoutError::Timeout)
            {
                notifier.send(&more_time());
                left = left.saturating_sub(EXTENSION_INTERVAL);
            }
        };
        // Without the thread, the start has the time that the unit allows.
        let spawned = thread::Builder::new().name("start-time".to_owned()).spawn(extend);
        StartTime(spawned.ok().map(|_thread| started))
    }

    /// A failed message is not repeated.
    fn send(&self, message: &str) {
        let Some(target) = &self.0 else { return };
        if let Err(error) = target.socket.send_to_addr(message.as_bytes(), &target.address) {
            tracing::warn!("systemd cannot be told {message:?}: {error}");
        }
    }
}

impl Target {
    /// `name` is an absolute path, or an abstract name after `@`.
    fn at(name: &str) -> io::Result<Self> {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        Ok(Self { socket, address })
    }
}

/// While it exists, systemd does not consider a slow start a failed one.
#[derive(Debug)]
#[must_use]
pub(crate) struct StartTime(#[expect(dead_code, reason = "its drop ends the thread")] Option<Sender<()>>);

fn more_time() -> String {
    format!("EXTEND_TIMEOUT_USEC={}", EXTENSION.as_micros())
}

/// A message is made of lines.
fn status_line(status: &str) -> String {
    let text: String = status.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("STATUS={text}")
}

/// Tells systemd at regular intervals that the daemon is alive, if its unit has a watchdog; else waits for ever. It
/// must run in the task that accepts connections: a message then proves that this task and others run.
pub(crate) async fn keep_alive(notifier: &Notifier) {
    let Some(interval) = watchdog_interval(|name| env::var(name).ok(), std::process::id()) else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(interval).await;
        // Runs on one of the threads that serve connections.
        if tokio::spawn(async {}).await.is_ok() {
            notifier.send("WATCHDOG=1");
        }
    }
}

/// Half the time after which systemd considers the process `pid` hung.
fn watchdog_interval(variable: impl Fn(&'static str) -> Option<String>, pid: u32) -> Option<Duration> {
    let number = |name| variable(name)?.parse::<u64>().ok();
    if variable("WATCHDOG_PID").is_some() && number("WATCHDOG_PID") != Some(u64::from(pid)) {
        return None;
    }
    let microseconds = number("WATCHDOG_USEC").filter(|found| *found > 0)?;
    Some(Duration::from_micros(microseconds / 2).max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_of_another_process_is_not_answered() {
        let interval = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
            watchdog_interval(|name| find(name).map(|(_, value)| (*value).to_owned()), 7)
        };
        let half = Some(Duration::from_secs(15));
        assert_eq!(interval(&[("WATCHDOG_USEC", "30000000")]), half);
        assert_eq!(interval(&[("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", "7")]), half);
        assert_eq!(interval(&[("WATCHDOG_USEC", "30000000"), ("WATCHDOG_PID", "8")]), None);
        assert_eq!(interval(&[("WATCHDOG_USEC", "0")]), None);
        assert_eq!(interval(&[]), None);
    }

    #[test]
    fn status_is_one_line() {
        assert_eq!(status_line("serving /a\nREADY=1"), "STATUS=serving /a READY=1");
    }

    #[test]
    fn message_reaches_a_path_and_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("blobd-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        let receivers = [
            (UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap().to_owned()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}")),
        ];
        for (receiver, name) in receivers {
            Notifier(Some(Arc::new(Target::at(&name).unwrap()))).ready("serving");
            let mut message = [0; 64];
            let length = receiver.recv(&mut message).unwrap();
            assert_eq!(&message[..length], b"READY=1\nSTATUS=serving");
        }
    }

    #[test]
    fn nothing_is_sent_without_a_socket() {
        let notifier = Notifier::default();
        drop(notifier.starting("opening"));
        notifier.ready("serving");
        notifier.stopping();
    }
}
