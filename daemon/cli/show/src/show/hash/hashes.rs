//! The algorithms of `gguf-hash`.

use std::hash::Hasher as _;

use blobd_store_format::digest::Hasher;
use clap::ValueEnum;
use serde::Serialize;
use sha1::{Digest as _, Sha1};
use twox_hash::XxHash64;

/// An algorithm, in the order of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Algorithm {
    Xxh64,
    Sha1,
    Sha256,
    // A UUIDv5 in a namespace of llama.cpp, of all tensors together. Not a doc comment, which the help would print.
    Uuid,
    #[serde(skip)]
    All,
}

impl Algorithm {
    const EACH: [Self; 4] = [Self::Xxh64, Self::Sha1, Self::Sha256, Self::Uuid];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Xxh64 => "xxh64",
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Uuid => "uuid",
            Self::All => "all",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::EACH.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

pub(super) fn expanded(chosen: &[Algorithm]) -> Vec<Algorithm> {
    let is_chosen = |algorithm: &Algorithm| chosen.contains(algorithm) || chosen.contains(&Algorithm::All);
    Algorithm::EACH.into_iter().filter(is_chosen).collect()
}

/// The namespace `uuid5(NAMESPACE_URL, "en.wikipedia.org/wiki/Llama.cpp")`.
const UUID_NAMESPACE: [u8; 16] =
    [0xef, 0x00, 0x12, 0x06, 0xda, 0xdc, 0x5f, 0x6d, 0xa1, 0x5f, 0x33, 0x59, 0xe5, 0x77, 0xd4, 0xe5];

pub(super) struct Hashes(Vec<State>);

enum State {
    Xxh64(XxHash64),
    Sha1(Sha1),
    Sha256(Hasher),
    Uuid(Sha1),
}

impl Hashes {
    /// A single tensor has no UUID.
    pub(super) fn of_tensor(algorithms: &[Algorithm]) -> Self {
        let own = algorithms.iter().filter(|algorithm| **algorithm != Algorithm::Uuid);
        Self(own.filter_map(|algorithm| State::new(*algorithm)).collect())
    }

    pub(super) fn of_model(algorithms: &[Algorithm]) -> Self {
        Self(algorithms.iter().filter_map(|algorithm| State::new(*algorithm)).collect())
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        for state in &mut self.0 {
            match state {
                State::Xxh64(hasher) => hasher.write(bytes),
                State::Sha1(hasher) | State::Uuid(hasher) => hasher.update(bytes),
                State::Sha256(hasher) => hasher.update(bytes),
            }
        }
    }

    pub(super) fn finish(self) -> Vec<(Algorithm, String)> {
        let text = |state| match state {
            State::Xxh64(hasher) => (Algorithm::Xxh64, format!("{:016x}", hasher.finish())),
            State::Sha1(hasher) => (Algorithm::Sha1, hex(&hasher.finalize())),
            State::Sha256(hasher) => (Algorithm::Sha256, hasher.finish().to_hex()),
            State::Uuid(hasher) => (Algorithm::Uuid, uuid(&hasher.finalize())),
        };
        self.0.into_iter().map(text).collect()
    }
}

impl State {
    fn new(algorithm: Algorithm) -> Option<Self> {
        Some(match algorithm {
            Algorithm::Xxh64 => Self::Xxh64(XxHash64::with_seed(0)),
            Algorithm::Sha1 => Self::Sha1(Sha1::new()),
            Algorithm::Sha256 => Self::Sha256(Hasher::new()),
            Algorithm::Uuid => Self::Uuid(Sha1::new_with_prefix(UUID_NAMESPACE)),
            Algorithm::All => return None,
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// RFC 9562, section 5.5: the first 16 bytes of the SHA-1, with the bits of version and variant set.
fn uuid(sha1: &[u8]) -> String {
    let mut bytes = sha1.first_chunk::<16>().copied().unwrap_or_default();
    let [.., version, _, variant, _, _, _, _, _, _, _] = &mut bytes;
    *version = (*version & 0x0f) | 0x50;
    *variant = (*variant & 0x3f) | 0x80;
    let text = hex(&bytes);
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| text.get(range).unwrap_or_default());
    parts.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of XXH64 is well known; the others were computed with Python's `hashlib` and `uuid`.
    #[test]
    fn hashes_of_known_bytes() {
        let mut hashes = Hashes::of_model(&expanded(&[Algorithm::All]));
        for chunk in [&b"ab"[..], b"", b"c"] {
            hashes.update(chunk);
        }
        let expected = [
            (Algorithm::Xxh64, "44bc2cf5ad770999"),
            (Algorithm::Sha1, "a9993e364706816aba3e25717850c26c9cd0d89d"),
            (Algorithm::Sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (Algorithm::Uuid, "9f2200fc-45e8-5a39-9535-c3ea5c0e0cef"),
        ];
        assert_eq!(hashes.finish(), expected.map(|(algorithm, text)| (algorithm, text.to_owned())));
    }

    #[test]
    fn algorithms_are_listed_once_and_in_order() {
        assert_eq!(expanded(&[Algorithm::Sha256, Algorithm::Xxh64]), [Algorithm::Xxh64, Algorithm::Sha256]);
        assert_eq!(expanded(&[Algorithm::All, Algorithm::Sha1]), Algorithm::EACH);
    }
}
