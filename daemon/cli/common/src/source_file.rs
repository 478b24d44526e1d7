//! The files of an open model: their paths in an export, and their content, which is read at any offset and verified.

use std::borrow::Cow;

use blobd_client::model::OpenModel;
use blobd_client::protocol::response::OpenPiece;
use blobd_store_format::digest::Hasher;
use blobd_store_format::file_format::{FileFormat, FileKind, FormatError};
use blobd_store_format::file_paths::{ListedFile, paths};
use blobd_store_format::gguf::{GgufError, Header, HeaderParser, Progress};
use blobd_store_format::stored_file::FilePieces;

use crate::connect::model_error;
use crate::{Digest, ErrorBody, ErrorCode, Reference};

/// The name of files that have none of their own: `llama3-8b` for `llama3:8b`.
pub fn stem(reference: &Reference) -> String {
    /// A file name has at most 255 bytes, and the longest names of models have more. Suffixes need the rest.
    const MAX_STEM_BYTES: usize = 200;
    let stem = format!("{}-{}", reference.model(), reference.tag());
    stem.get(..MAX_STEM_BYTES).unwrap_or(&stem).to_owned()
}

/// The path of each layer below the folder of an export: its own from the manifest, or made from the model's name.
pub fn file_paths(reference: &Reference, model: &OpenModel) -> Vec<String> {
    let listed = model.layers().iter().enumerate().map(|(layer, open)| ListedFile {
        media_type: &open.media_type,
        name: open.name.as_deref(),
        digest: open.digest,
        extension: extension(model, layer),
    });
    paths(&stem(reference), &listed.collect::<Vec<_>>())
}

/// Whether one of the model's files is a safetensors file.
pub fn has_safetensors(model: &OpenModel) -> bool {
    let of_format = Some(FileFormat::SAFETENSORS.extension());
    (0..model.layers().len()).any(|layer| extension(model, layer) == of_format)
}

/// The extension of a file's format by its first bytes. `None` if it cannot be read; then its export fails too.
fn extension(model: &OpenModel, layer: usize) -> Option<&'static str> {
    const START_BYTES: usize = 512;
    let mut start = vec![0; START_BYTES];
    let read = model.file(layer).ok()?.read_at(0, &mut start, |fd, at, bytes| model.read_at(fd, at, bytes));
    start.truncate(read.ok()?);
    let format = FileFormat::from_start(&start).map(FileFormat::extension);
    format.or_else(|| FileKind::from_start(&start).extension())
}

const STEP_BYTES: usize = 1 << 20;

/// A file of an open model. It is hashed as far as it is read from the start to the end.
#[derive(Debug)]
pub struct SourceFile<'m> {
    model: &'m OpenModel,
    pieces: Cow<'m, FilePieces<OpenPiece>>,
    digest: Digest,
    hasher: Hasher,
    /// The bytes before it are hashed.
    hashed: u64,
}

impl<'m> SourceFile<'m> {
    /// Opens the file with number `layer`.
    pub fn open(model: &'m OpenModel, layer: usize) -> Result<Self, ErrorBody> {
        let pieces = model.file(layer).map_err(model_error)?;
        let digest = model.layers().get(layer).map_or_else(|| Digest::of(b""), |layer| layer.digest);
        Ok(Self { model, pieces, digest, hasher: Hasher::new(), hashed: 0 })
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.pieces.size()
    }

    /// The name of its model.
    pub fn model(&self) -> &str {
        self.model.name()
    }

    /// Reads and parses the header, to be called before other bytes are read.
    pub fn read_header(&mut self) -> Result<Header, ErrorBody> {
        let mut parser = HeaderParser::new();
        let mut offset = 0;
        let mut buffer = vec![0; STEP_BYTES];
        while offset < self.size() {
            let length = self.load(offset, &mut buffer)?;
            offset = offset.saturating_add(length as u64);
            let bytes = buffer.get(..length).unwrap_or_default();
            match parser.push(bytes) {
                Ok(Progress::NeedMore) => {}
                Ok(Progress::Done) => break,
                Err(GgufError::Magic { .. }) => return Err(self.of_another_format(bytes)),
                Err(error) => return Err(self.invalid(&error)),
            }
        }
        parser.finish().map_err(|error| self.invalid(&error))
    }

    /// Fills the buffer from `offset` on, which must be in the file.
    pub fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), ErrorBody> {
        self.hash_up_to(offset)?;
        self.load(offset, buffer)?;
        if self.hashed == offset {
            self.hasher.update(buffer);
            self.hashed = offset.saturating_add(buffer.len() as u64);
        }
        Ok(())
    }

    /// Checks the digest of the whole file. Only the parts that were not read in order are read again.
    pub fn verify(mut self) -> Result<(), ErrorBody> {
        self.hash_up_to(self.size())?;
        let found = self.hasher.finish();
        if found == self.digest {
            return Ok(());
        }
        let message =
            format!("wrong digest: expected {}, found {found}; the stored data is damaged", self.digest);
        let message = format!("model {}: {message}", self.model.name());
        Err(ErrorBody::new(ErrorCode::Corrupt, message).with_hint("pull or import the model again"))
    }

    fn hash_up_to(&mut self, end: u64) -> Result<(), ErrorBody> {
        let mut buffer = Vec::new();
        while self.hashed < end {
            let missing = usize::try_from(end.saturating_sub(self.hashed)).unwrap_or(usize::MAX);
            buffer.resize(missing.min(STEP_BYTES), 0);
            let length = self.load(self.hashed, &mut buffer)?;
            if length == 0 {
                break;
            }
            self.hasher.update(buffer.get(..length).unwrap_or_default());
            self.hashed = self.hashed.saturating_add(length as u64);
        }
        Ok(())
    }

    fn load(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, ErrorBody> {
        let read = self.pieces.read_at(offset, buffer, |fd, at, bytes| self.model.read_at(fd, at, bytes));
        read.map_err(model_error)
    }

    fn of_another_format(&self, start: &[u8]) -> ErrorBody {
        match FileFormat::from_start(start) {
            Some(format) => self.invalid(&format_args!(
                "wrong format: expected a {} file, found a {} file",
                FileFormat::GGUF.title(),
                format.title()
            )),
            None => self.invalid(&FormatError::unknown(start)),
        }
    }

    fn invalid(&self, error: &impl std::fmt::Display) -> ErrorBody {
        let message = format!("model {}: {error}", self.model.name());
        ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("only GGUF files can be rewritten or hashed")
    }
}
