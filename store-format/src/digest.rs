//! SHA-256 digests, which name everything in a store.
//!
//! A [`Digest`] comes only from hashing or from well-formed text, so a path built from one
//! ([`crate::layout`]) cannot lead out of the store.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits.
///
/// Upper-case digits are refused: they would give one blob two names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        hasher.finish()
    }

    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 hexadecimal digits without the algorithm's name.
    pub fn to_hex(self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut hex, byte| {
            hex.push(hex_digit(byte >> 4));
            hex.push(hex_digit(byte & 15));
            hex
        })
    }

    /// The first twelve hexadecimal digits, as in `ollama list`.
    pub fn short(self) -> String {
        let mut hex = self.to_hex();
        hex.truncate(12);
        hex
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub fn from_hex(hex: &str) -> Result<Self, DigestError> {
        let malformed = || DigestError { found: printable(hex) };
        if hex.len() != 64 {
            return Err(malformed());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let nibble = |index: usize| pair.get(index).copied().and_then(hex_value);
            *byte = nibble(0).zip(nibble(1)).map(|(high, low)| high << 4 | low).ok_or_else(malformed)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text.strip_prefix("sha256:").ok_or_else(|| DigestError { found: printable(text) })?;
        Self::from_hex(hex).map_err(|_malformed| DigestError { found: printable(text) })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(DigestVisitor)
    }
}

/// Parses borrowed text without allocating; a collection reads millions of digests.
struct DigestVisitor;

impl serde::de::Visitor<'_> for DigestVisitor {
    type Value = Digest;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a digest")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Digest, E> {
        text.parse().map_err(E::custom)
    }
}

/// Computes a [`Digest`] incrementally.
#[derive(Clone, Debug, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("digest: expected sha256: and 64 lower-case hexadecimal digits, found {found:?}")]
#[non_exhaustive]
pub struct DigestError {
    pub found: String,
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

const fn hex_digit(nibble: u8) -> char {
    match nibble {
        0..=9 => (b'0' + nibble) as char,
        _ => (b'a' - 10 + nibble) as char,
    }
}

/// Truncates untrusted text for an error message.
fn printable(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn digest_of_empty_input_is_the_well_known_one() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse(), Ok(Digest::of(b"")));
        assert_eq!(Digest::of(b"").short(), "e3b0c44298fc");
    }

    #[test]
    fn malformed_digests_are_refused() {
        let hex = &EMPTY[7..];
        for text in [
            String::new(),
            hex.to_owned(),
            format!("sha512:{hex}"),
            format!("sha256-{hex}"),
            format!("sha256:{}", hex.to_uppercase()),
            format!("sha256:{}", &hex[1..]),
            format!("sha256:{hex}0"),
            format!("sha256:../{}", &hex[3..]),
            format!("sha256:{}é", &hex[2..]),
            format!("sha256:{}\0", &hex[1..]),
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn json_form_is_the_text_form() {
        let json = serde_json::to_string(&Digest::of(b"")).unwrap();
        assert_eq!(json, format!("{EMPTY:?}"));
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), Digest::of(b""));
        assert!(serde_json::from_str::<Digest>("\"sha256:00\"").is_err());
    }
}
