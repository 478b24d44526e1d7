//! `Content-Encoding`: decodes compressed bodies, and recognises labels that are wrong.
//!
//! Every request asks for uncompressed bytes. Some servers compress them nevertheless, and some object stores keep a
//! label from the upload, such as `aws-chunked`, which does not describe the stored bytes. So a document is decoded if
//! it starts like compressed data, and a file is decoded unless its length or its first bytes show that the label is
//! wrong.

use std::fmt;
use std::io::{self, Read as _, Write as _};

use blobd_store_format::descriptor::Compression;
use bytes::{Buf as _, Bytes};
use flate2::write::MultiGzDecoder;
use hyper::HeaderMap;
use hyper::header::CONTENT_ENCODING;

use super::decoder::Decoder;

/// Labels that do not change the bytes.
const HARMLESS: [&str; 8] = ["", "identity", "none", "binary", "aws-chunked", "utf-8", "8bit", "7bit"];
/// Longer labels are cut when printed.
const MAX_LABEL_CHARS: usize = 40;
/// How many times a document may be compressed: by the server, and again by a proxy.
const MAX_LAYERS: usize = 2;

/// The labels of a response that say its bytes are encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ContentEncoding {
    labels: Vec<String>,
}

impl fmt::Display for ContentEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: String = self.labels.join(", ").chars().take(MAX_LABEL_CHARS).collect();
        write!(f, "content encoding {labels:?}")
    }
}

impl ContentEncoding {
    pub(super) fn from_headers(headers: &HeaderMap) -> Self {
        let values =
            headers.get_all(CONTENT_ENCODING).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
        let mut labels = Vec::new();
        for value in values {
            let named = value.split(',').map(|label| label.trim().to_ascii_lowercase());
            labels.extend(named.filter(|label| !HARMLESS.contains(&label.as_str())));
        }
        Self { labels }
    }

    pub(super) fn is_none(&self) -> bool {
        self.labels.is_empty()
    }

    pub(super) fn is_gzip(&self) -> bool {
        matches!(self.labels.as_slice(), [only] if matches!(only.as_str(), "gzip" | "x-gzip"))
    }
}

/// The compression of bytes, recognised by how they start.
pub(super) fn compression_of(bytes: &[u8]) -> Option<Compression> {
    match bytes {
        [0x1f, 0x8b, ..] => Some(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        _ => None,
    }
}

/// A document that may have been compressed.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub(super) content: Vec<u8>,
    /// Whether decompression reached the end without an error.
    pub(super) is_complete: bool,
}

/// Decompresses a document if it is compressed. Returns at most `max_bytes` and one byte more, which shows that it is
/// too long.
pub(super) fn unpacked(document: Vec<u8>, max_bytes: u64) -> Unpacked {
    let mut unpacked = Unpacked { content: document, is_complete: true };
    for _ in 0..MAX_LAYERS {
        let Some(compression) = compression_of(&unpacked.content) else { break };
        let mut content = Vec::new();
        let decoder = Decoder::new(unpacked.content.as_slice(), Some(compression));
        let read =
            decoder.and_then(|decoder| decoder.take(max_bytes.saturating_add(1)).read_to_end(&mut content));
        unpacked = Unpacked { content, is_complete: unpacked.is_complete && read.is_ok() };
    }
    unpacked
}

/// Decompresses a gzip file as its bytes arrive. A file that does not start like gzip is passed on unchanged.
pub(super) struct GzipStream {
    state: State,
    /// Bytes received but not decompressed yet.
    pending: Bytes,
}

enum State {
    /// Fewer than two bytes have arrived.
    Beginning,
    Plain,
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
}

/// How many bytes are decompressed in one step. gzip expands them at most a thousandfold, which limits the memory.
const STEP_BYTES: usize = 4 << 10;

impl fmt::Debug for GzipStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GzipStream").field("pending", &self.pending.len()).finish_non_exhaustive()
    }
}

impl GzipStream {
    pub(super) fn new() -> Self {
        Self { state: State::Beginning, pending: Bytes::new() }
    }

    /// Adds bytes after all earlier ones have been decompressed.
    pub(super) fn push(&mut self, bytes: Bytes) {
        self.pending = match self.pending.is_empty() {
            true => bytes,
            false => [&self.pending[..], &bytes].concat().into(),
        };
    }

    /// The next bytes of the file; `None` if more must arrive first, or at the end.
    pub(super) fn next(&mut self, is_end: bool) -> io::Result<Option<Bytes>> {
        loop {
            if let State::Beginning = self.state {
                if self.pending.len() < 2 && !is_end {
                    return Ok(None);
                }
                let is_gzip = compression_of(&self.pending) == Some(Compression::Gzip);
                self.state = if is_gzip {
                    State::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))
                } else {
                    State::Plain
                };
            }
            let State::Gzip(decoder) = &mut self.state else {
                let bytes = std::mem::take(&mut self.pending);
                return Ok((!bytes.is_empty()).then_some(bytes));
            };
            let step = self.pending.split_to(self.pending.len().min(STEP_BYTES));
            match step.has_remaining() {
                true => decoder.write_all(&step)?,
                false if is_end => decoder.try_finish()?,
                false => return Ok(None),
            }
            let content = std::mem::take(decoder.get_mut());
            if !content.is_empty() || !step.has_remaining() {
                return Ok((!content.is_empty()).then(|| content.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::write::GzEncoder;
    use hyper::header::HeaderValue;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn encoding(values: &[&str]) -> ContentEncoding {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(CONTENT_ENCODING, HeaderValue::from_str(value).unwrap());
        }
        ContentEncoding::from_headers(&headers)
    }

    #[test]
    fn labels_that_change_nothing_are_dropped() {
        for values in [
            &[][..],
            &["identity"],
            &["AWS-Chunked"],
            &["aws-chunked,"],
            &["binary", "Identity, none"],
            &["utf-8"],
        ] {
            assert!(encoding(values).is_none(), "{values:?}");
        }
        for values in [&["gzip"][..], &["aws-chunked, gzip"], &["x-gzip"], &["GZIP", "aws-chunked"]] {
            assert!(encoding(values).is_gzip(), "{values:?}");
        }
        let several = encoding(&["br, gzip"]);
        assert!(!several.is_none() && !several.is_gzip());
        assert_eq!(several.to_string(), "content encoding \"br, gzip\"");
        assert!(encoding(&[&"x".repeat(1000)]).to_string().len() < 70);
    }

    #[test]
    fn documents_are_decompressed_whatever_their_label_says() {
        let document = br#"{"a":1}"#.to_vec();
        for sent in [document.clone(), gzip(&document), gzip(&gzip(&document))] {
            let found = unpacked(sent, 100);
            assert!(found.content == document && found.is_complete);
        }
        let bomb = gzip(&vec![0; 10 << 20]);
        assert_eq!(unpacked(bomb, 1000).content.len(), 1001);
        let long: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let cut = gzip(&long);
        let Unpacked { content, is_complete } = unpacked(cut[..cut.len() / 2].to_vec(), 1 << 20);
        assert!(!is_complete && !content.is_empty() && long.starts_with(&content));
    }

    #[test]
    fn file_is_decompressed_as_it_arrives() {
        let file: Vec<u8> = (0..50_000_u32).flat_map(u32::to_le_bytes).collect();
        for (sent, expected) in
            [(gzip(&file), &file[..]), (file.clone(), &file), (gzip(b""), b""), (vec![7], &[7])]
        {
            for portion in [1, 1000, 100_000] {
                let (mut stream, mut received) = (GzipStream::new(), Vec::new());
                for bytes in sent.chunks(portion) {
                    stream.push(Bytes::copy_from_slice(bytes));
                    while let Some(more) = stream.next(false).unwrap() {
                        received.extend_from_slice(&more);
                    }
                }
                while let Some(more) = stream.next(true).unwrap() {
                    received.extend_from_slice(&more);
                }
                assert!(received == expected, "{portion}");
            }
        }
        let mut damaged = gzip(&file);
        damaged[200] ^= 0xff;
        let mut stream = GzipStream::new();
        stream.push(damaged.into());
        let outcome = loop {
            match stream.next(true) {
                Ok(Some(_)) => {}
                outcome => break outcome,
            }
        };
        assert!(outcome.is_err());
    }
}
