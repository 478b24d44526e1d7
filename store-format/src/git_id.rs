//! The names that git gives to files. A hub's list of files has no other digest of a file that is stored in git itself.

use std::fmt;
use std::str::FromStr;

use sha1::{Digest as _, Sha1};

/// The SHA-1 of a file as a git object: of the text `blob`, a space, the length in decimal digits, a NUL byte, and the
/// content (git's `hash-object`). It shows that a file was received as it was listed; it never names a blob of a store,
/// because two files with one SHA-1 can be made.
///
/// ```
/// use blobd_store_format::git_id::GitId;
///
/// let id: GitId = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad".parse()?;
/// assert_eq!(GitId::of(b"hello world\n"), id);
/// # Ok::<(), blobd_store_format::git_id::GitIdError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GitId([u8; 20]);

impl GitId {
    pub fn of(content: &[u8]) -> Self {
        let mut hasher = GitHasher::new(content.len() as u64);
        hasher.update(content);
        hasher.finish()
    }
}

/// Computes a [`GitId`] incrementally.
#[derive(Clone, Debug)]
pub struct GitHasher(Sha1);

impl GitHasher {
    /// For content of this length.
    pub fn new(length: u64) -> Self {
        let mut hasher = Sha1::new();
        hasher.update(format!("blob {length}\0"));
        Self(hasher)
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> GitId {
        GitId(self.0.finalize().into())
    }
}

/// 40 lower-case hexadecimal digits.
impl fmt::Display for GitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("git object: expected 40 lower-case hexadecimal digits")]
pub struct GitIdError;

impl FromStr for GitId {
    type Err = GitIdError;

    fn from_str(text: &str) -> Result<Self, GitIdError> {
        let mut bytes = [0; 20];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return Err(GitIdError);
        }
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            let [high, low] = pair.map(digit);
            *byte = high.zip(low).map(|(high, low)| high << 4 | low).ok_or(GitIdError)?;
        }
        Ok(Self(bytes))
    }
}

const fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte.wrapping_sub(b'0')),
        b'a'..=b'f' => Some(byte.wrapping_sub(b'a').wrapping_add(10)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_git() {
        // `git hash-object`, of an empty file and of a text.
        assert_eq!(GitId::of(b"").to_string(), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(GitId::of(b"hello world\n").to_string(), "3b18e512dba79e4c8300dd08aeb37f8e728b8dad");
        let id = GitId::of(b"x");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn texts_that_are_not_ids_are_refused() {
        let id = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391";
        for text in [
            "",
            "1f",
            &id[1..],
            &format!("{id}0"),
            &format!("{id}00"),
            &id.to_uppercase(),
            &id.replace('e', "g"),
        ] {
            assert_eq!(text.parse::<GitId>(), Err(GitIdError), "{text}");
        }
    }
}
