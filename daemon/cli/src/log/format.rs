//! The form of the log: text or JSON on standard error, or entries of systemd's journal.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use blobd_client::protocol::error::ErrorBody;
use tracing::Subscriber;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;

use super::super::usage;
use super::journal::Journal;
use super::{has_color, value_of};

/// The variable that says in which form the log is written.
const VARIABLE: &str = "BLOBD_LOG_FORMAT";
/// Names the device and the inode of the socket to which systemd has connected standard output or standard error of a
/// service, as `DEVICE:INODE`.
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";
/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// One line per message, for people.
    Text,
    /// One JSON object per line.
    Json,
    /// The protocol of systemd's journal, which keeps the fields of messages apart.
    Journal,
}

impl Format {
    /// As the environment says; for a service of systemd whose standard error is the journal, that.
    pub(super) fn of_environment() -> Result<Self, ErrorBody> {
        let Some(name) = value_of(VARIABLE) else {
            return Ok(if is_journal() { Self::Journal } else { Self::Text });
        };
        Self::of_name(&name)
            .ok_or_else(|| usage(format!("{VARIABLE}: expected text, json or journal, found {name:?}")))
    }

    fn of_name(name: &str) -> Option<Self> {
        match name {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            "journal" => Some(Self::Journal),
            _ => None,
        }
    }

    /// Writes the messages. Text if there is no journal.
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
            Self::Text => Box::new(lines.with_target(false).with_ansi(has_color())),
        }
    }
}

/// The text of an error for standard error. If that is the journal, each line gets the priority of errors, as in
/// `sd-daemon(3)`: otherwise systemd takes it for an ordinary message.
pub(in super::super) fn at_error_priority(text: &str) -> String {
    if is_journal() {
        text.split_inclusive('\n').map(|line| format!("<3>{line}")).collect()
    } else {
        text.to_owned()
    }
}

/// Whether systemd has connected standard error to the journal.
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

    #[test]
    fn formats_have_names() {
        assert_eq!(Format::of_name("json"), Some(Format::Json));
        assert_eq!(Format::of_name("JSON"), None);
    }
}
