//! Decompresses files while they are downloaded, and documents.

use std::fmt;
use std::io::{self, BufRead, Read};

use blobd_store_format::descriptor::Compression;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The content of a file, which may be compressed.
pub enum Decoder<R> {
    Plain(R),
    /// A sequence of gzip members.
    Gzip(Box<MultiGzDecoder<R>>),
    /// A sequence of zstd frames.
    Zstd(Box<ZstdFrames<R>>),
}

impl<R> fmt::Debug for Decoder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain",
            Self::Gzip(_) => "Gzip",
            Self::Zstd(_) => "Zstd",
        })
    }
}

impl<R: BufRead> Decoder<R> {
    /// Decompresses `source`.
    pub fn new(source: R, compression: Option<Compression>) -> io::Result<Self> {
        Ok(match compression {
            None => Self::Plain(source),
            Some(Compression::Gzip) => Self::Gzip(Box::new(MultiGzDecoder::new(source))),
            Some(Compression::Zstd) => Self::Zstd(Box::new(ZstdFrames::new(source)?)),
        })
    }

    /// The source, which still contains the compressed bytes that have not been read.
    pub fn source(&mut self) -> &mut R {
        match self {
            Self::Plain(source) => source,
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zstd(decoder) => &mut decoder.source,
        }
    }

    pub fn into_source(self) -> R {
        match self {
            Self::Plain(source) => source,
            Self::Gzip(decoder) => decoder.into_inner(),
            Self::Zstd(decoder) => decoder.source,
        }
    }
}

impl<R: BufRead> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(source) => source.read(buffer),
            Self::Gzip(decoder) => decoder.read(buffer),
            Self::Zstd(decoder) => decoder.read(buffer),
        }
    }
}

/// Reads the content of all frames of a file, one after the other.
pub struct ZstdFrames<R> {
    source: R,
    decoder: FrameDecoder,
    /// Whether the decoder is inside a frame of the file.
    is_begun: bool,
}

impl<R> fmt::Debug for ZstdFrames<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZstdFrames").field("is_begun", &self.is_begun).finish_non_exhaustive()
    }
}

/// The header of a frame with the smallest window. The decoder limits the window memory of every frame except the
/// first, so it gets this frame first.
const SMALLEST_FRAME: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0, 0];

impl<R: BufRead> ZstdFrames<R> {
    fn new(source: R) -> io::Result<Self> {
        let mut decoder = FrameDecoder::new();
        decoder.init(&SMALLEST_FRAME[..]).map_err(io::Error::other)?;
        Ok(Self { source, decoder, is_begun: false })
    }

    /// Begins the next frame that has content; false at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => self.skip(length.into())?,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
        if skipped == length { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_begun || self.decoder.is_finished() && self.decoder.can_collect() == 0 {
                self.is_begun = self.begin()?;
                if !self.is_begun {
                    return Ok(0);
                }
            }
            if buffer.is_empty() || self.decoder.can_collect() > 0 {
                return self.decoder.read(buffer);
            }
            if self.decoder.is_finished() {
                continue;
            }
            let strategy = BlockDecodingStrategy::UptoBytes(buffer.len());
            self.decoder.decode_blocks(&mut self.source, strategy).map_err(io::Error::other)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    /// Pipes bytes through a program; `None` if the program is not installed.
    fn through(program: &[&str], bytes: &[u8]) -> Option<Vec<u8>> {
        let mut child = Command::new(program[0])
            .args(&program[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let mut stdin = child.stdin.take()?;
        std::thread::scope(|scope| {
            scope.spawn(move || io::Write::write_all(&mut stdin, bytes).unwrap());
            Some(child.wait_with_output().unwrap().stdout)
        })
    }

    fn unpack(bytes: &[u8], compression: Compression) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        Decoder::new(bytes, Some(compression))?.read_to_end(&mut content)?;
        Ok(content)
    }

    fn sample() -> Vec<u8> {
        (0..300_000_u32).flat_map(|number| (number / 7).wrapping_mul(77).to_le_bytes()).collect()
    }

    #[test]
    fn files_of_the_programs_are_unpacked_also_in_several_parts() {
        for (program, compression) in [
            (&["gzip", "-c"][..], Compression::Gzip),
            (&["gzip", "-1c"], Compression::Gzip),
            (&["zstd", "-c"], Compression::Zstd),
            (&["zstd", "-19", "-c"], Compression::Zstd),
        ] {
            let Some(packed) = through(program, &sample()) else { continue };
            assert!(unpack(&packed, compression).unwrap() == sample(), "{program:?}");
            let twice = [&packed[..], &packed].concat();
            assert!(unpack(&twice, compression).unwrap() == sample().repeat(2), "{program:?}");
            for garbage in [&b"garbage"[..], &packed[..9], &packed[..packed.len() - 5]] {
                assert!(unpack(&[&packed, garbage].concat(), compression).is_err(), "{program:?}");
            }
            for length in [1, 5, 20, packed.len() / 2, packed.len() - 5] {
                assert!(unpack(&packed[..length], compression).is_err(), "{program:?} {length}");
            }
        }
    }

    #[test]
    fn frames_without_content_are_skipped_and_large_windows_are_refused() {
        let Some(packed) = through(&["zstd", "-c"], b"content") else { return };
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz", &packed].concat();
        assert_eq!(unpack(&skipped, Compression::Zstd).unwrap(), b"content");
        assert_eq!(unpack(&skipped[..11], Compression::Zstd).unwrap(), b"");
        assert!(unpack(&skipped[..10], Compression::Zstd).is_err());
        // A window of almost 4 TiB.
        let large = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0];
        assert!(unpack(&large, Compression::Zstd).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_unpacked_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (start, compression) in
                [(&[0x28, 0xb5, 0x2f, 0xfd][..], Compression::Zstd), (&[0x1f, 0x8b, 8], Compression::Gzip)]
            {
                let _ = unpack(&[start, &bytes].concat(), compression);
            }
        }
    }
}
