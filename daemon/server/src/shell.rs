//! Text for a shell's command line.

/// The text as one word of a shell: in quotes if it has characters that a shell would interpret.
pub(crate) fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_is_quoted_if_a_shell_would_interpret_it() {
        for (text, word) in [
            ("/var/lib/blobd", "/var/lib/blobd"),
            ("/srv/my models", "'/srv/my models'"),
            ("a'b", "'a'\\''b'"),
            ("$(reboot)", "'$(reboot)'"),
            ("-rf", "'-rf'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(text), word);
        }
    }
}
