//! Also sends each record to systemd's journal, from where other programs ship it to another machine.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use blobd_client::journal::{JOURNAL_SOCKET, JournalEntry};
use blobd_client::protocol::audit::AuditRecord;
use serde_json::Value;

/// `SYSLOG_FACILITY` of entries about security.
const AUTHPRIV: &str = "10";

#[derive(Debug)]
pub(super) struct Forwarder {
    socket: UnixDatagram,
    journal: PathBuf,
    is_failing: bool,
}

impl Forwarder {
    pub(super) fn new() -> io::Result<Self> {
        Self::to(JOURNAL_SOCKET.into())
    }

    fn to(journal: PathBuf) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        // A journal that does not read must not delay the files.
        socket.set_nonblocking(true)?;
        Ok(Self { socket, journal, is_failing: false })
    }

    /// Sends a line of the log. Logs the first of several failures, and their end.
    pub(super) fn send(&mut self, line: &[u8]) -> bool {
        let Some(record) = AuditRecord::parse(line) else { return false };
        // Sent to the address each time: a connection would not survive a restart of the journal.
        let sent = self.socket.send_to(entry(&record, line).as_bytes(), &self.journal);
        match (&sent, self.is_failing) {
            (Err(error), false) => {
                tracing::error!("audit log: records cannot be sent to the journal: {error}");
            }
            (Ok(_), true) => tracing::warn!("audit log: records are sent to the journal again"),
            _ => {}
        }
        self.is_failing = sent.is_err();
        sent.is_ok()
    }
}

fn entry(record: &AuditRecord, line: &[u8]) -> JournalEntry {
    let mut entry = JournalEntry::default();
    entry.field("MESSAGE", &message(record));
    entry.field("PRIORITY", priority(record));
    entry.field("SYSLOG_IDENTIFIER", "blobd-audit");
    entry.field("SYSLOG_FACILITY", AUTHPRIV);
    let json = String::from_utf8_lossy(line);
    let fields = serde_json::from_str::<serde_json::Map<String, Value>>(&json).unwrap_or_default();
    for (name, value) in fields {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        entry.own_field(&name, &text);
    }
    entry.own_field("record", json.trim_end());
    entry
}

/// `ann (uid 7) rm llama3:8b: denied: …`
fn message(record: &AuditRecord) -> String {
    let AuditRecord { uid, user, verb, model, result, message, .. } = record;
    let who = user.as_ref().map_or_else(|| format!("uid {uid}"), |user| format!("{user} (uid {uid})"));
    let model = model.as_ref().map(|model| format!(" {model}")).unwrap_or_default();
    let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    format!("{who} {verb}{model}: {result}{message}")
}

/// Syslog's numbers: a warning for a refusal and for lost records, a notice for another failure.
fn priority(record: &AuditRecord) -> &'static str {
    match record.result.as_str() {
        "ok" | "on" | "unacknowledged" => "6",
        "denied" | "denied_by_policy" | "corrupt" | "dropped" | "omitted" | "off" => "4",
        _ => "5",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_has_each_key_of_the_record_and_the_whole_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = UnixDatagram::bind(&path).unwrap();
        let record = AuditRecord {
            uid: 7,
            user: Some("ann".to_owned()),
            verb: "partial rm".to_owned(),
            model: Some("m\nBLOBD_UID=0".to_owned()),
            result: "denied".to_owned(),
            message: Some("no".to_owned()),
            ..AuditRecord::default()
        };
        let line = AuditRecord::numbered(&record.line(), 12);
        assert!(Forwarder::to(path).unwrap().send(&line));
        let mut bytes = vec![0; 4096];
        let length = journal.recv(&mut bytes).unwrap();
        let entry = String::from_utf8_lossy(&bytes[..length]).into_owned();
        for field in [
            "PRIORITY=4\n",
            "SYSLOG_IDENTIFIER=blobd-audit\n",
            "BLOBD_SEQ=12\n",
            "BLOBD_UID=7\n",
            "BLOBD_USER=ann\n",
            "BLOBD_VERB=partial rm\n",
            "BLOBD_RESULT=denied\n",
            "BLOBD_RECORD={\"seq\":12,",
        ] {
            assert!(entry.contains(field), "{field:?}: {entry}");
        }
        // A value with a line break has its length before it, so it cannot add a field.
        assert!(entry.contains("BLOBD_MODEL\n"), "{entry}");
    }

    #[test]
    fn journal_that_is_absent_or_does_not_read_delays_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut forwarder = Forwarder::to(path.clone()).unwrap();
        let line = AuditRecord { verb: "rm".to_owned(), ..AuditRecord::default() }.line();
        assert!(!forwarder.send(&line));
        let _journal = UnixDatagram::bind(&path).unwrap();
        assert!(forwarder.send(&line));
        // At some point its buffer is full.
        assert!((0..1_000_000).any(|_| !forwarder.send(&line)));
    }
}
