//! Keys that sign models, and the keys that verify what they have signed: P-256, P-384 and Ed25519, as `openssl genpkey`
//! and Python's `cryptography` write them into PEM files.
//!
//! The command line signs, so a private key never leaves its user's process; the daemon verifies. All cryptography is
//! `ring`'s: this crate only finds the key in the file.
//!
//! ```
//! use blobd_keys::{PrivateKey, PublicKey};
//!
//! # let private = include_str!("../tests/p256.pem");
//! # let public = include_str!("../tests/p256-public.pem");
//! let key = PrivateKey::parse(private)?;
//! let signature = key.sign(b"a statement")?;
//! let known = PublicKey::parse(public)?;
//! assert!(known.has_signed(b"a statement", &signature) && !known.has_signed(b"another", &signature));
//! assert_eq!(known.id(), key.public().id());
//! # Ok::<(), blobd_keys::KeyError>(())
//! ```
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a name that says it all needs no comment")]

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_store_format::digest::Digest;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1,
    ECDSA_P384_SHA384_ASN1_SIGNING, ED25519, EcdsaKeyPair, EcdsaSigningAlgorithm, Ed25519KeyPair,
    KeyPair as _, UnparsedPublicKey, VerificationAlgorithm,
};

/// Why a file is not a key that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    #[error("not a key: expected a PEM file with BEGIN {expected}, found none")]
    NoKey { expected: &'static str },
    #[error("the key is encrypted: expected one without a passphrase")]
    Encrypted,
    #[error("wrong kind of key: expected the public key, found a private key")]
    Private,
    #[error("wrong kind of key: expected the private key, found a public key")]
    Public,
    #[error("damaged: expected base64 between the lines BEGIN and END")]
    Base64,
    #[error("wrong kind of key: expected P-256, P-384 or Ed25519")]
    Unsupported,
    #[error("the system has no random numbers")]
    NoRandomness,
}

impl KeyError {
    /// What to do about it.
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Encrypted => "`openssl pkey -in KEY -out PLAIN` writes it without the passphrase",
            Self::Private => "`openssl pkey -in KEY -pubout -out PUBLIC` writes the public key",
            _ => {
                "`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY` makes a key, and \
                 `openssl pkey -in KEY -pubout -out PUBLIC` writes its public key"
            }
        }
    }
}

/// The longest file that is read as a key.
pub const MAX_FILE_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    P256,
    P384,
    Ed25519,
}

impl Kind {
    const ALL: [Self; 3] = [Self::P256, Self::P384, Self::Ed25519];

    /// What is before the key's bytes in the DER form of a public key. There is only one such form of each kind.
    const fn public_prefix(self) -> &'static [u8] {
        match self {
            Self::P256 => b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00",
            Self::P384 => b"\x30\x76\x30\x10\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22\x03\x62\x00",
            Self::Ed25519 => b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00",
        }
    }

    const fn public_bytes(self) -> usize {
        match self {
            Self::P256 => 65,
            Self::P384 => 97,
            Self::Ed25519 => 32,
        }
    }

    fn verification(self) -> &'static dyn VerificationAlgorithm {
        match self {
            Self::P256 => &ECDSA_P256_SHA256_ASN1,
            Self::P384 => &ECDSA_P384_SHA384_ASN1,
            Self::Ed25519 => &ED25519,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::P256 => "P-256",
            Self::P384 => "P-384",
            Self::Ed25519 => "Ed25519",
        }
    }
}

/// A key that verifies signatures.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublicKey {
    kind: Kind,
    bytes: Vec<u8>,
}

impl PublicKey {
    const LABEL: &str = "PUBLIC KEY";

    /// Reads the text of a PEM file.
    ///
    /// # Errors
    /// [`KeyError`] if it has no such key, or one of another kind.
    pub fn parse(pem: &str) -> Result<Self, KeyError> {
        if let Some(der) = block(pem, Self::LABEL)? {
            return Self::from_der(&der);
        }
        match PrivateKey::LABELS.iter().any(|label| pem.contains(&format!("BEGIN {label}-----"))) {
            true => Err(KeyError::Private),
            false => Err(KeyError::NoKey { expected: Self::LABEL }),
        }
    }

    fn from_der(der: &[u8]) -> Result<Self, KeyError> {
        let find = |kind: Kind| {
            let bytes = der.strip_prefix(kind.public_prefix())?;
            (bytes.len() == kind.public_bytes()).then(|| Self { kind, bytes: bytes.to_vec() })
        };
        Kind::ALL.into_iter().find_map(find).ok_or(KeyError::Unsupported)
    }

    /// Whether its private key has made the signature over these bytes.
    pub fn has_signed(&self, bytes: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(self.kind.verification(), &self.bytes).verify(bytes, signature).is_ok()
    }

    /// The digest of the key's PEM file, as it is in the hint of a bundle.
    pub fn id(&self) -> String {
        Digest::of(self.pem().as_bytes()).to_hex()
    }

    /// `P-256`, `P-384` or `Ed25519`.
    pub const fn algorithm(&self) -> &'static str {
        self.kind.name()
    }

    /// The key as a PEM file.
    pub fn pem(&self) -> String {
        const LINE: usize = 64;
        let base64 = STANDARD.encode([self.kind.public_prefix(), &self.bytes].concat());
        let mut pem = format!("-----BEGIN {}-----\n", Self::LABEL);
        for (index, character) in base64.chars().enumerate() {
            if index > 0 && index.is_multiple_of(LINE) {
                pem.push('\n');
            }
            pem.push(character);
        }
        pem + &format!("\n-----END {}-----\n", Self::LABEL)
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({} {})", self.algorithm(), self.id())
    }
}

enum Pair {
    Ecdsa(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

/// A key that signs.
pub struct PrivateKey {
    pair: Pair,
    public: PublicKey,
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey([hidden], {:?})", self.public)
    }
}

impl PrivateKey {
    const PKCS8: &str = "PRIVATE KEY";
    const SEC1: &str = "EC PRIVATE KEY";
    const ENCRYPTED: &str = "ENCRYPTED PRIVATE KEY";
    const LABELS: [&str; 3] = [Self::PKCS8, Self::SEC1, Self::ENCRYPTED];

    /// Reads the text of a PEM file: PKCS #8, or the older form for elliptic curves.
    ///
    /// # Errors
    /// [`KeyError`] if it has no such key, an encrypted one, or one of another kind.
    pub fn parse(pem: &str) -> Result<Self, KeyError> {
        // The older form has its encryption in a line of its own.
        if pem.contains(Self::ENCRYPTED) || pem.contains("Proc-Type: 4,ENCRYPTED") {
            return Err(KeyError::Encrypted);
        }
        if let Some(der) = block(pem, Self::PKCS8)? {
            return Self::from_pkcs8(&der);
        }
        if let Some(der) = block(pem, Self::SEC1)? {
            let wrapped = CURVES.iter().map(|curve| curve.pkcs8(&der));
            return wrapped
                .map(|der| Self::from_pkcs8(&der))
                .find(Result::is_ok)
                .unwrap_or(Err(KeyError::Unsupported));
        }
        match pem.contains(&format!("BEGIN {}-----", PublicKey::LABEL)) {
            true => Err(KeyError::Public),
            false => Err(KeyError::NoKey { expected: Self::PKCS8 }),
        }
    }

    fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der) {
            let public = PublicKey { kind: Kind::Ed25519, bytes: pair.public_key().as_ref().to_vec() };
            return Ok(Self { pair: Pair::Ed25519(pair), public });
        }
        let random = SystemRandom::new();
        let read = |curve: &Curve| {
            let pair = EcdsaKeyPair::from_pkcs8(curve.signing, der, &random).ok()?;
            let public = PublicKey { kind: curve.kind, bytes: pair.public_key().as_ref().to_vec() };
            Some(Self { pair: Pair::Ecdsa(pair), public })
        };
        CURVES.iter().find_map(read).ok_or(KeyError::Unsupported)
    }

    /// Signs these bytes.
    ///
    /// # Errors
    /// [`KeyError::NoRandomness`].
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, KeyError> {
        Ok(match &self.pair {
            Pair::Ed25519(pair) => pair.sign(bytes).as_ref().to_vec(),
            Pair::Ecdsa(pair) => {
                let signed = pair.sign(&SystemRandom::new(), bytes);
                signed.map_err(|_unspecified| KeyError::NoRandomness)?.as_ref().to_vec()
            }
        })
    }

    pub const fn public(&self) -> &PublicKey {
        &self.public
    }
}

struct Curve {
    kind: Kind,
    signing: &'static EcdsaSigningAlgorithm,
    /// The algorithm of a key in PKCS #8.
    algorithm: &'static [u8],
}

const CURVES: [Curve; 2] = [
    Curve {
        kind: Kind::P256,
        signing: &ECDSA_P256_SHA256_ASN1_SIGNING,
        algorithm: b"\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07",
    },
    Curve {
        kind: Kind::P384,
        signing: &ECDSA_P384_SHA384_ASN1_SIGNING,
        algorithm: b"\x30\x10\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22",
    },
];

impl Curve {
    /// A key in the older form as PKCS #8, which has it in a sequence with its algorithm.
    fn pkcs8(&self, key: &[u8]) -> Vec<u8> {
        const VERSION: &[u8] = b"\x02\x01\x00";
        let (sequence, octets) = (0x30, 0x04);
        element(sequence, &[VERSION, self.algorithm, &element(octets, key)].concat())
    }
}

/// An element in DER.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let length: Vec<u8> = length.into_iter().skip_while(|byte| *byte == 0).collect();
    let head = match (length.as_slice(), u8::try_from(length.len())) {
        ([], _) => vec![tag, 0],
        ([short @ ..=0x7f], _) => vec![tag, *short],
        (_, bytes) => [&[tag, 0x80 | bytes.unwrap_or_default()], length.as_slice()].concat(),
    };
    [head.as_slice(), content].concat()
}

/// The content of the first block of a PEM file with this label.
fn block(pem: &str, label: &str) -> Result<Option<Vec<u8>>, KeyError> {
    let begin = format!("-----BEGIN {label}-----");
    let Some((_, rest)) = pem.split_once(&begin) else { return Ok(None) };
    let (body, _) = rest.split_once(&format!("-----END {label}-----")).ok_or(KeyError::Base64)?;
    let base64: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(base64).map(Some).map_err(|_malformed| KeyError::Base64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [(&str, &str, &str); 4] = [
        ("P-256", include_str!("../tests/p256.pem"), include_str!("../tests/p256-public.pem")),
        ("P-256", include_str!("../tests/p256-sec1.pem"), include_str!("../tests/p256-public.pem")),
        ("P-384", include_str!("../tests/p384.pem"), include_str!("../tests/p384-public.pem")),
        ("Ed25519", include_str!("../tests/ed25519.pem"), include_str!("../tests/ed25519-public.pem")),
    ];

    #[test]
    fn each_kind_of_key_verifies_what_it_has_signed_and_nothing_else() {
        for (algorithm, private, public) in KEYS {
            let (private, public) = (PrivateKey::parse(private).unwrap(), PublicKey::parse(public).unwrap());
            assert_eq!(public.algorithm(), algorithm);
            assert_eq!(&public, private.public());
            let signature = private.sign(b"x").unwrap();
            assert!(public.has_signed(b"x", &signature) && !public.has_signed(b"y", &signature));
            for (_, other, _) in KEYS {
                let other = PrivateKey::parse(other).unwrap();
                let is_same = other.public() == &public;
                assert_eq!(other.public().has_signed(b"x", &signature), is_same);
            }
            for end in 0..signature.len() {
                assert!(!public.has_signed(b"x", &signature[..end]));
            }
        }
    }

    #[test]
    fn public_key_is_written_as_openssl_writes_it() {
        for (_, _, public) in KEYS {
            let key = PublicKey::parse(public).unwrap();
            assert_eq!(key.pem(), public);
            assert_eq!(key.id(), Digest::of(public.as_bytes()).to_hex());
        }
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let (_, private, public) = KEYS[0];
        assert_eq!(PublicKey::parse(private).unwrap_err(), KeyError::Private);
        assert_eq!(PrivateKey::parse(public).unwrap_err(), KeyError::Public);
        assert_eq!(PublicKey::parse("").unwrap_err(), KeyError::NoKey { expected: "PUBLIC KEY" });
        assert_eq!(
            PrivateKey::parse("ssh-ed25519 AAAA").unwrap_err(),
            KeyError::NoKey { expected: "PRIVATE KEY" }
        );
        let pem =
            |label: &str, body: &str| format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
        assert_eq!(
            PrivateKey::parse(&pem("ENCRYPTED PRIVATE KEY", "AAAA")).unwrap_err(),
            KeyError::Encrypted
        );
        for body in ["%", "AAAA", ""] {
            assert!(PublicKey::parse(&pem("PUBLIC KEY", body)).is_err(), "{body}");
            assert!(PrivateKey::parse(&pem("PRIVATE KEY", body)).is_err(), "{body}");
            assert!(PrivateKey::parse(&pem("EC PRIVATE KEY", body)).is_err(), "{body}");
        }
        assert_eq!(PublicKey::parse("-----BEGIN PUBLIC KEY-----\nAAAA").unwrap_err(), KeyError::Base64);
    }

    #[test]
    fn lengths_are_those_of_der() {
        let head =
            |length: usize| element(4, &vec![0; length])[..].iter().copied().take(4).collect::<Vec<_>>();
        assert_eq!(element(4, &[]), [4, 0]);
        assert_eq!(head(127)[..2], [4, 127]);
        assert_eq!(head(200)[..3], [4, 0x81, 200]);
        assert_eq!(head(300), [4, 0x82, 1, 44]);
    }
}
