//! The form of the log: text or JSON on standard error, or entries of systemd's journal.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use tracing::Subscriber;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;

use super::journal::Journal;
use super::value_of;
use crate::ErrorBody;
use crate::colour::Paint;
use crate::usage;

const VARIABLE: &str = "BLOBD_LOG_FORMAT";
/// Names the device and the inode of the socket to which systemd has connected standard output or standard error of a
/// service, as `DEVICE:INODE`.
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    Json,
    /// The protocol of systemd's journal, which keeps the fields of messages apart.
    Journal,
}

impl Format {
    /// The format that the environment names, else the journal for a service whose standard error is the journal.
    pub(super) fn from_environment() -> Result<Self, ErrorBody> {
        match value_of(VARIABLE).as_deref() {
            None if is_journal() => Ok(Self::Journal),
            None | Some("text") => Ok(Self::Text),
            Some("json") => Ok(Self::Json),
            Some("journal") => Ok(Self::Journal),
            Some(name) => Err(usage(format!("{VARIABLE}: expected text, json or journal, found {name:?}"))),
        }
    }

    /// Falls back to text if there is no journal.
    pub(super) fn layer<S>(self) -> Box<dyn Layer<S> + Send + Sync>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        // Internal errors would be reported with `eprintln!`, which panics if standard error cannot be written.
        let lines = fmt::layer().with_writer(io::stderr).log_internal_errors(false);
        match self {
            Self::Json => {
                Box::new(lines.json().flatten_event(true).with_current_span(true).with_span_list(false))
            }
            Self::Journal => match Journal::connect() {
                Ok(journal) => Box::new(journal),
                Err(_no_journal) => Box::new(lines.with_target(false).with_ansi(false)),
            },
            Self::Text => Box::new(lines.with_target(false).with_ansi(Paint::of(&io::stderr()).is_on())),
        }
    }
}

/// The text of an error for standard error. If that is the journal, each line gets the priority of errors, as in
/// `sd-daemon(3)`: otherwise systemd takes it for an ordinary message.
pub fn at_error_priority(text: &str) -> String {
    if is_journal() {
        text.split_inclusive('\n').map(|line| format!("<3>{line}")).collect()
    } else {
        text.to_owned()
    }
}

fn is_journal() -> bool {
    value_of(JOURNAL_VARIABLE).is_some_and(|stream| names(&stream, io::stderr().as_fd()))
}

/// Whether `stream` is this descriptor's device and inode.
fn names(stream: &str, descriptor: BorrowedFd<'_>) -> bool {
    let Some((device, inode)) = stream.split_once(':') else { return false };
    let Ok(status) = rustix::fs::fstat(descriptor) else { return false };
    device.parse() == Ok(status.st_dev) && inode.parse() == Ok(status.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_is_recognised_by_its_device_and_inode() {
        let file = tempfile::tempfile().unwrap();
        let status = rustix::fs::fstat(&file).unwrap();
        let (device, inode) = (status.st_dev, status.st_ino);
        assert!(names(&format!("{device}:{inode}"), file.as_fd()));
        for other in
            [format!("{device}:{}", inode + 1), format!("{}:{inode}", device + 1), "1".into(), "x:y".into()]
        {
            assert!(!names(&other, file.as_fd()), "{other}");
        }
    }
}
