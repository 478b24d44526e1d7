//! Entries of systemd's journal in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).

/// Where the journal receives entries, one datagram for each.
pub const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// An entry of the journal as it is sent: one line `NAME=value` per field.
#[derive(Debug, Default)]
pub struct JournalEntry(Vec<u8>);

impl JournalEntry {
    /// Adds a field. A value with line breaks has its length before it, in 8 bytes, the lowest first.
    pub fn field(&mut self, name: &str, value: &str) {
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
    pub fn own_field(&mut self, name: &str, value: &str) {
        self.field(&format!("BLOBD_{}", name.to_ascii_uppercase().replace(['.', ' '], "_")), value);
    }

    /// The entry as it is sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_with_line_breaks_cannot_add_fields() {
        let mut entry = JournalEntry::default();
        entry.field("MESSAGE", "a\nPRIORITY=0");
        entry.own_field("used bytes", "1");
        let length = 12_u64.to_le_bytes();
        let expected = [b"MESSAGE\n", &length[..], b"a\nPRIORITY=0\nBLOBD_USED_BYTES=1\n"].concat();
        assert_eq!(entry.as_bytes(), expected);
    }
}
