//! Decodes HTTP bodies with a content length or chunks.

use crate::error::ProtocolError;

/// Decodes a body incrementally: removes the chunks' framing and finds the end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BodyDecoder {
    state: State,
    line: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// In a body of known length; the bytes left.
    Counted(u64),
    ChunkSize,
    /// In a chunk; the bytes left.
    ChunkData(u64),
    /// Between a chunk and the next one's line.
    ChunkEnd,
    Trailer,
    Done,
}

impl BodyDecoder {
    pub(super) const fn counted(length: u64) -> Self {
        let state = if length == 0 { State::Done } else { State::Counted(length) };
        Self { state, line: Vec::new() }
    }

    pub(super) const fn chunked() -> Self {
        Self { state: State::ChunkSize, line: Vec::new() }
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Appends decoded bytes to `out`; returns the number of bytes of `input` that belong to the body.
    pub(super) fn decode(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, ProtocolError> {
        let mut rest = input;
        while !rest.is_empty() && !self.is_done() {
            match &mut self.state {
                State::Counted(left) | State::ChunkData(left) => {
                    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                    let (data, after) = rest.split_at(count);
                    out.extend_from_slice(data);
                    *left -= count as u64;
                    rest = after;
                    self.end_data();
                }
                _ => rest = self.take_line(rest)?,
            }
        }
        Ok(input.len() - rest.len())
    }

    fn end_data(&mut self) {
        match self.state {
            State::Counted(0) => self.state = State::Done,
            State::ChunkData(0) => self.state = State::ChunkEnd,
            _ => {}
        }
    }

    /// Consumes part of a framing line; returns the rest.
    fn take_line<'a>(&mut self, rest: &'a [u8]) -> Result<&'a [u8], ProtocolError> {
        let end = rest.iter().position(|byte| *byte == b'\n');
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        self.line.extend_from_slice(part);
        if self.line.len() > MAX_FRAMING_LINE_BYTES {
            return Err(ProtocolError::Chunks);
        }
        if end.is_some() {
            self.state = self.after_line()?;
            self.line.clear();
        }
        Ok(after.get(1..).unwrap_or_default())
    }

    fn after_line(&self) -> Result<State, ProtocolError> {
        let line = self.line.strip_suffix(b"\r").unwrap_or(&self.line);
        match self.state {
            State::ChunkSize => match chunk_size(line) {
                Some(0) => Ok(State::Trailer),
                Some(size) => Ok(State::ChunkData(size)),
                None => Err(ProtocolError::Chunks),
            },
            State::ChunkEnd if line.is_empty() => Ok(State::ChunkSize),
            State::Trailer if line.is_empty() => Ok(State::Done),
            State::Trailer => Ok(State::Trailer),
            _ => Err(ProtocolError::Chunks),
        }
    }
}

/// The hexadecimal number in front of the extensions.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?;
    let digits = std::str::from_utf8(digits).ok()?.trim_ascii();
    // `from_str_radix` would take a sign.
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| plain)
}

/// The longest framing line: chunk size with extension, or a trailer.
const MAX_FRAMING_LINE_BYTES: usize = 1 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(mut decoder: BodyDecoder, input: &[u8]) -> Result<(Vec<u8>, usize, bool), ProtocolError> {
        let mut out = Vec::new();
        let used = decoder.decode(input, &mut out)?;
        Ok((out, used, decoder.is_done()))
    }

    #[test]
    fn counted_body_ends_at_its_length() {
        assert_eq!(decode(BodyDecoder::counted(3), b"abcdef"), Ok((b"abc".to_vec(), 3, true)));
        assert_eq!(decode(BodyDecoder::counted(3), b"ab"), Ok((b"ab".to_vec(), 2, false)));
        assert_eq!(decode(BodyDecoder::counted(0), b"ab"), Ok((Vec::new(), 0, true)));
    }

    #[test]
    fn chunks_extensions_and_trailers_are_taken_off() {
        let body = b"3\r\nabc\r\n00A ;name=value\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nnext";
        let (out, used, done) = decode(BodyDecoder::chunked(), body).unwrap();
        assert_eq!(out, b"abc0123456789");
        assert_eq!((used, done), (body.len() - 4, true));
    }

    #[test]
    fn malformed_chunks_are_refused() {
        for body in
            ["x\r\n", "\r\n", "-1\r\n", "+1\r\na", "3\r\nabcd\r\n", "10000000000000000\r\n", "1 2\r\n"]
        {
            assert_eq!(
                decode(BodyDecoder::chunked(), body.as_bytes()),
                Err(ProtocolError::Chunks),
                "{body:?}"
            );
        }
        let endless = format!("1;{}", "x".repeat(MAX_FRAMING_LINE_BYTES));
        assert_eq!(decode(BodyDecoder::chunked(), endless.as_bytes()), Err(ProtocolError::Chunks));
    }

    proptest! {
        #[test]
        fn chunked_body_is_decoded_in_any_portions(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..60), 0..6),
            portions in prop::collection::vec(1usize..20, 1..20),
        ) {
            let mut bytes = Vec::new();
            for chunk in &chunks {
                bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            let (mut decoder, mut out, mut rest) = (BodyDecoder::chunked(), Vec::new(), &bytes[..]);
            for portion in portions.iter().cycle() {
                let now = &rest[..(*portion).min(rest.len())];
                prop_assert_eq!(decoder.decode(now, &mut out).unwrap(), now.len());
                rest = &rest[now.len()..];
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(decoder.is_done());
            prop_assert_eq!(out, chunks.concat());
        }

        #[test]
        fn garbage_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok((out, used, _)) = decode(BodyDecoder::chunked(), &bytes) {
                prop_assert!(out.len() <= used && used <= bytes.len());
            }
        }
    }
}
