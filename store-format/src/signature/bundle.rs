//! The file that a signature is kept in: a Sigstore bundle with a DSSE envelope.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::statement::expect;
use super::{SignatureError, Statement};

/// A checked bundle. Nothing says yet who has signed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    text: String,
    key_id: Option<String>,
    payload: Vec<u8>,
    signature: Vec<u8>,
    statement: Statement,
}

impl Bundle {
    /// The media type of the file.
    pub const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
    /// Its name beside the files of a model: that of OpenSSF's model signing.
    pub const FILE_NAME: &str = "model.sig";
    /// The longest bundle: 16,000 files.
    pub const MAX_BYTES: usize = 4 << 20;
    /// Longer than any digest in hexadecimal digits.
    const MAX_KEY_ID_BYTES: usize = 200;

    /// The bundle of a statement that was signed: `signature` is over [`signed_bytes`] of `payload`, which is the statement
    /// as JSON.
    ///
    /// # Errors
    /// [`SignatureError`] if [`Self::parse`] would refuse it.
    pub fn compose(key_id: &str, payload: &[u8], signature: &[u8]) -> Result<Self, SignatureError> {
        let file = BundleFile {
            media_type: Self::MEDIA_TYPE.to_owned(),
            verification_material: Material {
                public_key: Some(KeyHint { hint: Some(key_id.to_owned()) }),
                tlog_entries: Some(Vec::new()),
                ..Material::default()
            },
            dsse_envelope: Some(Envelope {
                payload: STANDARD.encode(payload),
                payload_type: Statement::PAYLOAD_TYPE.to_owned(),
                signatures: vec![EnvelopeSignature {
                    sig: STANDARD.encode(signature),
                    keyid: Some(String::new()),
                }],
            }),
        };
        Self::parse(&serde_json::to_vec(&file)?)
    }

    /// Checks the bytes of a bundle.
    ///
    /// # Errors
    /// [`SignatureError`] if it is too long, not a bundle with one signature by a key, or its statement is not about files.
    pub fn parse(bytes: &[u8]) -> Result<Self, SignatureError> {
        if bytes.len() > Self::MAX_BYTES {
            return Err(SignatureError::TooLong { most: Self::MAX_BYTES, found: bytes.len() });
        }
        let BundleFile { media_type, verification_material: material, dsse_envelope } =
            serde_json::from_slice(bytes)?;
        expect("media type", Self::MEDIA_TYPE, &media_type)?;
        if material.certificate.is_some() || material.x509_certificate_chain.is_some() {
            return Err(SignatureError::Certificate);
        }
        let key = material.public_key.ok_or(SignatureError::Missing { what: "public key" })?;
        let envelope = dsse_envelope.ok_or(SignatureError::Missing { what: "envelope" })?;
        expect("type of the payload", Statement::PAYLOAD_TYPE, &envelope.payload_type)?;
        let [signature] = <[EnvelopeSignature; 1]>::try_from(envelope.signatures)
            .map_err(|found| SignatureError::Count { what: "signatures", found: found.len() })?;
        let decode =
            |what, text: &str| STANDARD.decode(text).map_err(|_malformed| SignatureError::Base64 { what });
        let (payload, signature) =
            (decode("payload", &envelope.payload)?, decode("signature", &signature.sig)?);
        let is_printable = |hint: &String| {
            !hint.is_empty()
                && hint.len() <= Self::MAX_KEY_ID_BYTES
                && hint.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let statement = Statement::parse(&payload)?;
        // The parser has accepted it as JSON, which is UTF-8.
        let text = String::from_utf8_lossy(bytes).into_owned();
        Ok(Self { text, key_id: key.hint.filter(is_printable), payload, signature, statement })
    }

    /// The bundle as it was parsed.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the bundle says about the key that has signed it: the digest of its public part. Bundles of earlier versions have
    /// none, and nothing proves it.
    pub fn key_id(&self) -> Option<&str> {
        self.key_id.as_deref()
    }

    /// The bytes that the signature is over.
    pub fn signed_bytes(&self) -> Vec<u8> {
        signed_bytes(&self.payload)
    }

    pub fn signature(&self) -> &[u8] {
        &self.signature
    }

    pub const fn statement(&self) -> &Statement {
        &self.statement
    }
}

/// The bytes that a signature over a payload is made of: DSSE's "pre-authentication encoding".
pub fn signed_bytes(payload: &[u8]) -> Vec<u8> {
    let kind = Statement::PAYLOAD_TYPE;
    let mut bytes = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    bytes.extend_from_slice(payload);
    bytes
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BundleFile {
    media_type: String,
    verification_material: Material,
    #[serde(default)]
    dsse_envelope: Option<Envelope>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Material {
    #[serde(skip_serializing_if = "Option::is_none")]
    public_key: Option<KeyHint>,
    #[serde(skip_serializing)]
    certificate: Option<IgnoredAny>,
    #[serde(skip_serializing)]
    x509_certificate_chain: Option<IgnoredAny>,
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    tlog_entries: Option<Vec<()>>,
}

#[derive(Serialize, Deserialize)]
struct KeyHint {
    #[serde(default)]
    hint: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Serialize, Deserialize)]
struct EnvelopeSignature {
    sig: String,
    #[serde(default)]
    keyid: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::digest::Digest;
    use crate::signature::SignedFile;

    fn bundle() -> Bundle {
        let file = SignedFile { path: "a".to_owned(), digest: Digest::of(b"a") };
        let payload = Statement::new("m", vec![file]).unwrap().to_json().unwrap();
        Bundle::compose("0a1b", &payload, b"signed").unwrap()
    }

    #[test]
    fn bundle_reads_back_byte_for_byte() {
        let bundle = bundle();
        assert_eq!(Bundle::parse(bundle.text().as_bytes()).unwrap(), bundle);
        assert_eq!((bundle.key_id(), bundle.signature()), (Some("0a1b"), b"signed".as_slice()));
        assert!(bundle.signed_bytes().starts_with(b"DSSEv1 28 application/vnd.in-toto+json "));
        let written: Value = serde_json::from_str(bundle.text()).unwrap();
        assert_eq!(
            written["verificationMaterial"],
            json!({ "publicKey": { "hint": "0a1b" }, "tlogEntries": [] })
        );
    }

    #[test]
    fn hostile_bundles_are_refused() {
        let valid: Value = serde_json::from_str(bundle().text()).unwrap();
        let refusal = |change: &dyn Fn(&mut Value)| {
            let mut document = valid.clone();
            change(&mut document);
            Bundle::parse(&serde_json::to_vec(&document).unwrap()).unwrap_err().to_string()
        };
        assert!(refusal(&|bundle| bundle["mediaType"] = json!("text/plain")).contains("wrong media type"));
        assert!(
            refusal(&|bundle| bundle["dsseEnvelope"]["payload"] = json!("%"))
                .contains("payload: expected text")
        );
        assert!(refusal(&|bundle| bundle["dsseEnvelope"]["payload"] = json!([])).contains("wrong value"));
        assert!(refusal(&|bundle| bundle["dsseEnvelope"] = Value::Null).contains("no envelope"));
        assert!(
            refusal(&|bundle| bundle["dsseEnvelope"]["payloadType"] = json!("x"))
                .contains("type of the payload")
        );
        assert!(
            refusal(&|bundle| bundle["dsseEnvelope"]["signatures"] = json!([]))
                .contains("expected 1, found 0")
        );
        assert!(refusal(&|bundle| bundle["verificationMaterial"] = json!({})).contains("no public key"));
        assert!(
            refusal(&|bundle| bundle["verificationMaterial"] = json!({ "certificate": {} }))
                .contains("certificate")
        );
        let long = vec![b' '; Bundle::MAX_BYTES + 1];
        assert!(Bundle::parse(&long).unwrap_err().to_string().contains("too long"));
        for text in ["", "[]", "null", "{", &"[".repeat(1 << 20), &"{\"a\":".repeat(1 << 18)] {
            assert!(Bundle::parse(text.as_bytes()).is_err());
        }
    }

    #[test]
    fn hint_that_could_confuse_a_terminal_is_dropped() {
        let mut document: Value = serde_json::from_str(bundle().text()).unwrap();
        for hint in ["\u{1b}[2J", "", "a b", &"x".repeat(201)] {
            document["verificationMaterial"]["publicKey"]["hint"] = json!(hint);
            let parsed = Bundle::parse(&serde_json::to_vec(&document).unwrap()).unwrap();
            assert_eq!(parsed.key_id(), None, "{hint:?}");
        }
    }
}
