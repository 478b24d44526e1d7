//! Ollama's key, which identifies a user at its registry: an OpenSSH file with an ed25519 key.
//!
//! A token request is signed with it instead of carrying a password. The signature covers the request's URL, so it
//! cannot be used for another request.

use std::fmt;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_store_format::digest::Digest;
use hyper::header::HeaderValue;
use ring::signature::Ed25519KeyPair;
use url::Url;

use super::CredentialError;
use super::hidden_header;

pub(crate) struct OllamaKey {
    pair: Ed25519KeyPair,
    /// The decoded content of `id_ed25519.pub`.
    public: Vec<u8>,
}

impl fmt::Debug for OllamaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OllamaKey([hidden])")
    }
}

impl OllamaKey {
    /// Reads the key; `None` if the file does not exist.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, CredentialError> {
        let Some(text) = super::read_if_there(path)? else { return Ok(None) };
        let malformed =
            |what: &str| CredentialError::Malformed { path: path.to_owned(), what: what.to_owned() };
        Self::parse(&text).map(Some).map_err(malformed)
    }

    /// The `Authorization` that Ollama's registry expects for a GET of `url`: the public key and the
    /// signature, without a scheme.
    pub(crate) fn authorization(&self, url: &Url) -> Option<HeaderValue> {
        // Ollama signs the base64 of the hexadecimal digest of the body; a GET has no body.
        let body = STANDARD.encode(Digest::of(b"").to_hex());
        let signature = self.pair.sign(format!("GET,{url},{body}").as_bytes());
        let (public, signature) = (STANDARD.encode(&self.public), STANDARD.encode(signature.as_ref()));
        hidden_header(&format!("{public}:{signature}"))
    }

    /// Parses an OpenSSH private key (`PROTOCOL.key` of OpenSSH).
    fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let binary = decode_armor(text).ok_or("not an OpenSSH private key")?;
        let mut file = Cursor(&binary);
        file.expect(MAGIC).ok_or("not an OpenSSH private key")?;
        if file.string() != Some(b"none".as_slice()) {
            return Err("the key has a passphrase, which blobd cannot ask for; expected an unencrypted key");
        }
        let (public, secret) = file.single_key().ok_or(MALFORMED)?;
        Self::from_blobs(public, secret)
    }

    fn from_blobs(public: &[u8], secret: &[u8]) -> Result<Self, &'static str> {
        if Cursor(public).string() != Some(ED25519) {
            return Err("the key has another type: expected ed25519");
        }
        let (point, seed) = Cursor(secret).ed25519().ok_or(MALFORMED)?;
        // Also checks that the two halves match.
        let pair = Ed25519KeyPair::from_seed_and_public_key(seed, point);
        let pair = pair.map_err(|_rejected| "the public and the private key do not match")?;
        Ok(Self { pair, public: public.to_owned() })
    }
}

const MAGIC: &[u8] = b"openssh-key-v1\0";
const ED25519: &[u8] = b"ssh-ed25519";
const MALFORMED: &str = "the OpenSSH private key is damaged";

fn decode_armor(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?.trim();
    let body = text.strip_prefix("-----BEGIN OPENSSH PRIVATE KEY-----")?;
    let body = body.strip_suffix("-----END OPENSSH PRIVATE KEY-----")?;
    let base64: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(base64).ok()
}

/// A bounded reader.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn expect(&mut self, bytes: &[u8]) -> Option<()> {
        (self.take(bytes.len())? == bytes).then_some(())
    }

    fn number(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// Reads a length and that many bytes.
    fn string(&mut self) -> Option<&'a [u8]> {
        let count = self.number()?.try_into().ok()?;
        self.take(count)
    }

    /// Reads the part after the cipher's name in a file that contains one unencrypted key.
    fn single_key(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let (kdf, options) = (self.string()?, self.string()?);
        if kdf != b"none" || !options.is_empty() || self.number()? != 1 {
            return None;
        }
        let (public, secret) = (self.string()?, self.string()?);
        self.0.is_empty().then_some((public, secret))
    }

    /// The secret part: two equal check numbers, the public point, and the seed followed by the point again.
    /// The comment and padding after that are ignored.
    fn ed25519(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        if self.number()? != self.number()? || self.string()? != ED25519 {
            return None;
        }
        let (point, secret) = (self.string()?, self.string()?);
        let (seed, again) = secret.split_at_checked(32)?;
        (again == point).then_some((point, seed))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use ring::signature::{ED25519 as VERIFY, UnparsedPublicKey};

    use super::*;

    /// Made by `ssh-keygen -t ed25519 -N ''` for these tests; not used elsewhere.
    const KEY: &str = include_str!("../testdata/id_ed25519");
    const PUBLIC: &str = include_str!("../testdata/id_ed25519.pub");

    /// Whether the test key signed an `Authorization` for a GET of `url`, checked as a server does.
    pub(crate) fn is_signed(authorization: &str, url: &str) -> bool {
        let Some((public, signature)) = authorization.split_once(':') else { return false };
        let wire = STANDARD.decode(public).unwrap();
        let signature = STANDARD.decode(signature).unwrap();
        let empty =
            "ZTNiMGM0NDI5OGZjMWMxNDlhZmJmNGM4OTk2ZmI5MjQyN2FlNDFlNDY0OWI5MzRjYTQ5NTk5MWI3ODUyYjg1NQ==";
        let key = UnparsedPublicKey::new(&VERIFY, &wire[wire.len() - 32..]);
        PUBLIC.split(' ').nth(1) == Some(public)
            && key.verify(format!("GET,{url},{empty}").as_bytes(), &signature).is_ok()
    }

    fn armored(binary: &[u8]) -> String {
        let base64 = STANDARD.encode(binary);
        format!("-----BEGIN OPENSSH PRIVATE KEY-----\n{base64}\n-----END OPENSSH PRIVATE KEY-----\n")
    }

    #[test]
    fn signature_is_the_one_that_ollama_makes() {
        let key = OllamaKey::parse(KEY.as_bytes()).unwrap();
        let url = "https://registry.ollama.ai/token?nonce=a&service=s&ts=1";
        let header = key.authorization(&url.parse().unwrap()).unwrap();
        assert!(is_signed(header.to_str().unwrap(), url));
        assert!(!is_signed(
            header.to_str().unwrap(),
            "https://registry.ollama.ai/token?nonce=b&service=s&ts=1"
        ));
        assert_eq!(format!("{key:?} {header:?}"), "OllamaKey([hidden]) Sensitive");
    }

    #[test]
    fn truncated_or_changed_key_is_refused() {
        let whole = decode_armor(KEY.as_bytes()).unwrap();
        let comment_and_padding = 40;
        for length in 0..whole.len() - comment_and_padding {
            assert!(OllamaKey::parse(armored(&whole[..length]).as_bytes()).is_err(), "{length}");
        }
        for at in 0..whole.len() - comment_and_padding {
            let mut changed = whole.clone();
            changed[at] ^= 0xff;
            // Any result is right, but it must not panic. The check numbers and the halves of the key are compared.
            let _ = OllamaKey::parse(armored(&changed).as_bytes());
        }
        for text in ["", "-----BEGIN OPENSSH PRIVATE KEY-----", PUBLIC, &armored(b"openssh-key-v2\0")] {
            assert_eq!(OllamaKey::parse(text.as_bytes()).unwrap_err(), "not an OpenSSH private key");
        }
    }

    #[test]
    fn key_with_a_passphrase_or_of_another_type_is_refused() {
        let encrypted = [MAGIC, b"\0\0\0\x0aaes256-ctr\0\0\0\x06bcrypt"].concat();
        let error = OllamaKey::parse(armored(&encrypted).as_bytes()).unwrap_err();
        assert!(error.contains("passphrase"), "{error}");
        let error = OllamaKey::from_blobs(b"\0\0\0\x07ssh-rsa", b"").unwrap_err();
        assert!(error.contains("ed25519"), "{error}");
    }
}
