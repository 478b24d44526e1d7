//! The log in systemd's journal: one entry per message, with its fields.
//!
//! A crate for this exists, but its messages lack the fields, so `journalctl` would print `pull` without the model.

use std::fmt;
use std::io::{self, Write as _};
use std::os::unix::net::UnixDatagram;

use blobd_client::journal::{JOURNAL_SOCKET, JournalEntry};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

#[derive(Debug)]
pub(super) struct Journal {
    socket: UnixDatagram,
}

impl Journal {
    pub(super) fn connect() -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(JOURNAL_SOCKET)?;
        Ok(Self { socket })
    }
}

/// The fields of a span, such as the ID of a request.
struct SpanFields(Vec<(&'static str, String)>);

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for Journal {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut entry = Entry::default();
        attributes.record(&mut entry);
        if let Some(span) = context.span(id) {
            let of_span = entry.fields.into_iter().map(|(name, value)| match name {
                // The name of the span says whose ID it is.
                "id" => (span.name(), value),
                name => (name, value),
            });
            span.extensions_mut().insert(SpanFields(of_span.collect()));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut entry = Entry::default();
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(SpanFields(fields)) = span.extensions().get() {
                entry.fields.extend(fields.iter().cloned());
            }
        }
        event.record(&mut entry);
        if self.socket.send(entry.encode(event.metadata()).as_bytes()).is_err() {
            // The journal restarts, or the entry is too long. Standard error leads to it too.
            let _ = writeln!(io::stderr(), "{}", entry.line());
        }
    }
}

#[derive(Debug, Default)]
struct Entry {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Entry {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record(field, format!("{value:?}"));
    }
}

impl Entry {
    fn record(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }

    /// `pull uid=1000 model=llama3:8b`
    fn line(&self) -> String {
        let fields = self.fields.iter().map(|(name, value)| format!(" {name}={value}"));
        fields.fold(self.message.clone(), |line, field| line + &field)
    }

    fn encode(&self, metadata: &Metadata<'_>) -> JournalEntry {
        let mut entry = JournalEntry::default();
        entry.field("MESSAGE", &self.line());
        entry.field("PRIORITY", priority(*metadata.level()));
        entry.field("SYSLOG_IDENTIFIER", "blobd");
        entry.field("TARGET", metadata.target());
        entry.own_field("event", &self.message);
        for (name, value) in &self.fields {
            entry.own_field(name, value);
        }
        entry
    }
}

fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// The datagram that the journal receives for a message.
    fn sent(log: impl FnOnce()) -> Vec<u8> {
        let (socket, journal) = UnixDatagram::pair().unwrap();
        let subscriber = tracing_subscriber::registry().with(Journal { socket });
        tracing::subscriber::with_default(subscriber, log);
        let mut bytes = vec![0; 4096];
        let length = journal.recv(&mut bytes).unwrap();
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn entry_has_the_fields_one_by_one_and_all_of_them_in_its_message() {
        let name = "llama3:8b";
        let entry = sent(|| tracing::info!(uid = 7, model = %name, kept_by = "a b", "pull"));
        let entry = String::from_utf8(entry).unwrap();
        let lines: Vec<&str> = entry.lines().collect();
        assert_eq!(
            lines[..3],
            ["MESSAGE=pull uid=7 model=llama3:8b kept_by=a b", "PRIORITY=6", "SYSLOG_IDENTIFIER=blobd"]
        );
        assert!(lines[3].starts_with("TARGET=blobd_cli_common::log"), "{entry}");
        assert_eq!(
            lines[4..],
            ["BLOBD_EVENT=pull", "BLOBD_UID=7", "BLOBD_MODEL=llama3:8b", "BLOBD_KEPT_BY=a b"]
        );
    }

    #[test]
    fn entry_has_the_request_that_caused_it() {
        let entry =
            sent(|| tracing::error_span!("request", id = "ab.1").in_scope(|| tracing::info!(uid = 7, "rm")));
        let entry = String::from_utf8(entry).unwrap();
        assert!(entry.starts_with("MESSAGE=rm request=ab.1 uid=7\n"), "{entry}");
        assert!(entry.contains("\nBLOBD_REQUEST=ab.1\n"), "{entry}");
    }

    #[test]
    fn value_with_line_breaks_cannot_add_fields() {
        let entry = sent(|| tracing::warn!("a\nPRIORITY=0"));
        let length = 12_u64.to_le_bytes();
        let expected = [b"MESSAGE\n", &length[..], b"a\nPRIORITY=0\nPRIORITY=4\n"].concat();
        assert!(entry.starts_with(&expected), "{entry:?}");
    }
}
