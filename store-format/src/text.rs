//! Texts that are shown to people, or pasted into a shell.

/// Replaces control characters, which could move the cursor or change colours, and those that change the direction of
/// text, which could make one name look like another: names and metadata come from files and registries.
pub fn printable(text: &str) -> String {
    let is_hidden = |c: char| c.is_control() || changes_direction(c);
    text.chars().map(|c| if is_hidden(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

const fn changes_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// As many names as fit `width`, at least one, and the number of the others: `a, b and 12 more`.
pub fn one_line(names: &[impl AsRef<str>], width: usize) -> String {
    const MORE: usize = " and 99999 more".len();
    let mut line = String::new();
    for (listed, name) in names.iter().enumerate() {
        let name = printable(name.as_ref());
        let length = line.chars().count() + ", ".len() + name.chars().count();
        let is_last = listed + 1 == names.len();
        if listed > 0 && length + if is_last { 0 } else { MORE } > width {
            return format!("{line} and {} more", names.len() - listed);
        }
        line.push_str(if listed > 0 { ", " } else { "" });
        line.push_str(&name);
    }
    line
}

/// The text as one word of a shell: in quotes if it has characters that a shell would interpret.
pub fn quoted(text: &str) -> String {
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
    fn names_that_do_not_fit_a_line_are_counted() {
        assert_eq!(one_line(&[] as &[&str], 80), "");
        assert_eq!(one_line(&["a:latest", "b:latest"], 80), "a:latest, b:latest");
        assert_eq!(one_line(&["a:latest", "b:latest", "c:latest"], 27), "a:latest and 2 more");
        assert_eq!(one_line(&["a:latest", "b:latest"], 18), "a:latest, b:latest", "exactly the width");
        assert_eq!(one_line(&["a-long-name:latest", "b"], 5), "a-long-name:latest and 1 more");
        let many: Vec<_> = (0..1000).map(|number| format!("model-{number}:latest")).collect();
        let line = one_line(&many, 80);
        assert!(line.chars().count() <= 80 && line.starts_with("model-0:latest, model-1:latest"), "{line}");
        assert!(line.ends_with("and 996 more"), "{line}");
    }

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

    #[test]
    fn escapes_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\n"), "a\u{fffd}[31mb\u{fffd}");
        assert_eq!(printable("\u{7f}\u{9b}1m"), "\u{fffd}\u{fffd}1m");
        for direction in ["\u{200e}", "\u{200f}", "\u{202a}", "\u{202e}", "\u{2066}", "\u{2069}"] {
            assert_eq!(printable(direction), "\u{fffd}", "{direction:?}");
        }
        assert_eq!(printable("ä\u{200d}中"), "ä\u{200d}中");
    }
}
