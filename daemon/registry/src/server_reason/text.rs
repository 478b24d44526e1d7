//! Makes a server's text printable: one line of limited length, without control sequences for a terminal, and without
//! secrets from the request.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::HeaderValue;
use percent_encoding::percent_decode_str;
use url::Url;

/// A server's sentence has about 100 characters; a terminal shows this many in a few lines.
const MAX_CHARS: usize = 300;
/// How much of a text is searched for secrets. Larger than `MAX_CHARS`, so that no secret is cut in two before it is
/// found.
const MAX_SEARCHED_CHARS: usize = 4096;
/// Shorter values are not secrets and may occur in any text.
const MIN_SECRET_BYTES: usize = 6;
/// A value after `=` that is at least this long may be a signature.
const MIN_SIGNATURE_BYTES: usize = 16;
const HIDDEN: &str = "…";

/// The secrets of a request, which must not be printed even if the server repeats them.
#[derive(Debug, Default)]
pub(in super::super) struct Secrets {
    values: Vec<String>,
}

impl Secrets {
    /// The credentials of a request and the values in the query of its URL.
    pub(in super::super) fn new(authorization: Option<&HeaderValue>, url: &Url) -> Self {
        let header = authorization.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let credential = header.split_once(' ').map_or(header, |(_scheme, credential)| credential);
        let mut values = vec![credential.to_owned()];
        if let Some(pair) = STANDARD.decode(credential).ok().and_then(|pair| String::from_utf8(pair).ok()) {
            values.extend(pair.split_once(':').map(|(_user, password)| password.to_owned()));
        }
        for value in url.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('=')) {
            let (_name, value) = value;
            values.push(value.to_owned());
            values.push(percent_decode_str(value).decode_utf8_lossy().into_owned());
        }
        values.retain(|value| value.len() >= MIN_SECRET_BYTES);
        // The longest first, because one may be part of another.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        Self { values }
    }

    /// The text on one line without secrets; `None` if nothing is left.
    pub(in super::super) fn clean(&self, text: &str) -> Option<String> {
        let line: String = one_line(text).chars().take(MAX_SEARCHED_CHARS).collect();
        let line = self.values.iter().fold(line, |line, secret| line.replace(secret.as_str(), HIDDEN));
        let mut words = Vec::new();
        let mut after_scheme = false;
        for word in line.split(' ') {
            let scheme = word.trim_matches(|c: char| !c.is_alphanumeric()).to_ascii_lowercase();
            words.push(if after_scheme { without_credential(word) } else { without_query(word) });
            after_scheme = matches!(scheme.as_str(), "bearer" | "basic");
        }
        let line = words.join(" ");
        let mut shown: String = line.chars().take(MAX_CHARS).collect();
        if shown.len() < line.len() {
            shown.push('…');
        }
        shown.chars().any(char::is_alphanumeric).then_some(shown)
    }
}

/// Hides a word that follows the name of an authentication scheme if it looks like a credential.
fn without_credential(word: &str) -> String {
    let is_credential = word.len() >= MIN_SIGNATURE_BYTES || word.chars().any(|c| c.is_ascii_digit());
    if is_credential && word.len() >= MIN_SECRET_BYTES { HIDDEN.to_owned() } else { without_query(word) }
}

/// Removes the user and the query of a URL from a word, and values that may be signatures.
fn without_query(word: &str) -> String {
    let is_address = word.contains("://") || word.contains('/');
    let word = match word.split_once('?') {
        Some((address, query)) if is_address && query.contains('=') => format!("{address}?{HIDDEN}"),
        _ => word.to_owned(),
    };
    let word = match word.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            match authority.rsplit_once('@') {
                Some((_user, host)) => format!("{scheme}://{HIDDEN}@{host}{path}"),
                None => word,
            }
        }
        None => word,
    };
    match word.split_once('=') {
        Some((name, value)) if value.len() >= MIN_SIGNATURE_BYTES => format!("{name}={HIDDEN}"),
        _ => word,
    }
}

/// Decodes bytes as Latin-1 if that is announced, else as UTF-8 with invalid bytes replaced.
pub(super) fn decoded(bytes: &[u8], is_latin: bool) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) if is_latin => bytes.iter().copied().map(char::from).collect(),
        Err(_) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Whether the bytes were not text: the decoded text contains zeros or many replaced bytes.
pub(super) fn is_binary(text: &str) -> bool {
    let (mut all, mut wrong) = (0_usize, 0_usize);
    for c in text.chars().take(MAX_SEARCHED_CHARS) {
        all += 1;
        wrong += usize::from(matches!(c, '\0' | char::REPLACEMENT_CHARACTER));
    }
    wrong.saturating_mul(8) > all
}

/// Removes terminal escape sequences and invisible characters, and collapses white space.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            '\u{1b}' => skip_escape(&mut characters),
            '\u{9b}' => skip_until(&mut characters, is_final),
            _ if is_unseen(c) => {}
            _ if c.is_whitespace() || c.is_control() => {
                if !line.is_empty() && !line.ends_with(' ') {
                    line.push(' ');
                }
            }
            char::REPLACEMENT_CHARACTER if line.ends_with(c) => {}
            _ => line.push(c),
        }
    }
    line.truncate(line.trim_end().len());
    line
}

/// Skips the rest of an escape sequence: `[` and parameters up to a letter, `]` and a text up to its end, or one
/// character.
fn skip_escape(characters: &mut std::str::Chars<'_>) {
    match characters.next() {
        Some('[') => skip_until(characters, is_final),
        Some(']' | 'P' | '_' | '^') => skip_until(characters, |c| matches!(c, '\u{7}' | '\u{9c}' | '\\')),
        _ => {}
    }
}

fn skip_until(characters: &mut std::str::Chars<'_>, is_end: impl Fn(char) -> bool) {
    // An unfinished sequence must not hide the rest of a long text.
    const MAX_SEQUENCE_CHARS: usize = 256;
    let mut rest = characters.clone();
    if rest.by_ref().take(MAX_SEQUENCE_CHARS).any(is_end) {
        *characters = rest;
    }
}

const fn is_final(c: char) -> bool {
    matches!(c, '\u{40}'..='\u{7e}')
}

/// Characters without width, and those that change the direction of text.
const fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{e000}'..='\u{f8ff}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{10ffff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(text: &str) -> Option<String> {
        Secrets::default().clean(text)
    }

    #[test]
    fn text_becomes_one_printable_line() {
        for (text, expected) in [
            ("  two\r\n\twords \u{a0} here\0", "two words here"),
            ("\u{1b}[31mred\u{1b}[0m alert", "red alert"),
            ("\u{1b}]0;new title\u{7}text", "text"),
            ("\u{1b}]8;;https://evil.example\u{1b}\\link", "link"),
            ("\u{9b}2Jcleared", "cleared"),
            ("\u{1b}[never closed \u{1b}", "ever closed"),
            ("abc\u{202e}fgp.exe\u{2069}", "abcfgp.exe"),
            ("zero\u{200b}width\u{feff}", "zerowidth"),
            ("a\u{fffd}\u{fffd}\u{fffd}b", "a\u{fffd}b"),
            ("中文 и русский", "中文 и русский"),
        ] {
            assert_eq!(clean(text).as_deref(), Some(expected), "{text:?}");
        }
        for text in ["", " \n", "\u{1b}[2J", "---", "\u{202e}"] {
            assert_eq!(clean(text), None, "{text:?}");
        }
    }

    #[test]
    fn long_text_is_cut_by_characters() {
        let cut = clean(&"ä ".repeat(100_000)).unwrap();
        assert_eq!(cut.chars().count(), MAX_CHARS + 1);
        assert!(cut.ends_with('…'));
        assert_eq!(clean(&"x".repeat(MAX_CHARS)).unwrap().len(), MAX_CHARS);
    }

    #[test]
    fn secrets_of_the_request_are_not_repeated() {
        let basic = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode("me:pass word"))).unwrap();
        let url = "https://cdn.example/f?X-Amz-Signature=0123456789&key=a%2Fb%2Fc%2Fd&n=1".parse().unwrap();
        let secrets = Secrets::new(Some(&basic), &url);
        let encoded = STANDARD.encode("me:pass word");
        for text in [
            format!("got {encoded}"),
            "wrong 'pass word'".into(),
            "sig:0123456789".into(),
            "key a/b/c/d".into(),
        ] {
            let found = secrets.clean(&text).unwrap();
            assert!(found.contains('…'), "{found}");
            for secret in [encoded.as_str(), "pass word", "0123456789", "a/b/c/d", "a%2Fb"] {
                assert!(!found.contains(secret), "{found}");
            }
        }
    }

    #[test]
    fn signatures_and_users_in_urls_are_not_repeated() {
        for (text, expected) in [
            ("see https://h/p?sig=abc&x=1 now", "see https://h/p?… now"),
            ("path /blob?token=abc", "path /blob?…"),
            ("at https://me:pw@h/x", "at https://…@h/x"),
            ("X-Amz-Signature=0123456789abcdef0", "X-Amz-Signature=…"),
            ("header Bearer hf_abcdef123 is wrong", "header Bearer … is wrong"),
            ("Bearer authorization needed", "Bearer authorization needed"),
            ("is it right? a=b", "is it right? a=b"),
            ("https://h/docs says why", "https://h/docs says why"),
            ("unknown tag=latest", "unknown tag=latest"),
        ] {
            assert_eq!(clean(text).as_deref(), Some(expected));
        }
    }
}
