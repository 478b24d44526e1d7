//! Entries of systemd's journal, in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): one datagram per entry,
//! one line `NAME=value` per field.

/// Where the journal receives them.
pub(crate) const SOCKET: &str = "/run/systemd/journal/socket";

/// An entry as it is sent.
#[derive(Debug, Default)]
pub(crate) struct Entry(Vec<u8>);

impl Entry {
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
