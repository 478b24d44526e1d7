//! What systemd passes to a service, and what a service tells systemd: `sd_listen_fds(3)`, `sd_notify(3)`, and entries
//! of the journal in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).
//!
//! Written here because it is a few variables, one descriptor and one datagram: a crate would be longer than this.
//! Without the variables, nothing of this has an effect.

mod activation;
mod notify;

pub(crate) use activation::{ActivationError, PassedSocket};
pub(crate) use notify::{Notifier, keep_alive};

/// Where the journal receives entries, one datagram for each.
pub(crate) const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// An entry of the journal as it is sent: one line `NAME=value` per field.
#[derive(Debug, Default)]
pub(crate) struct JournalEntry(Vec<u8>);

impl JournalEntry {
    /// Adds a field. A value with line breaks has its length before it, in 8 bytes, the lowest first.
    pub(crate) fn field(&mut self, name: &str, value: &str) {
        let bytes = &mut self.0;
        bytes.extend_from_slice(name.as_bytes());
        if value.contains('\n') {
            bytes.push(b'\n');
            bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            bytes.push(b'=');
        }
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(b'\n');
    }

    /// Adds a field of blobd itself, such as `BLOBD_UID` or `BLOBD_MODEL`.
    pub(crate) fn own_field(&mut self, name: &str, value: &str) {
        self.field(&format!("BLOBD_{}", name.to_ascii_uppercase().replace(['.', ' '], "_")), value);
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}
