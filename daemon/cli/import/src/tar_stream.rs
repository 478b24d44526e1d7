//! A tar archive that is read once, from front to back, such as one from a pipe.

use std::fs::File;
use std::io::{self, BufReader, Read as _};

use blobd_cli_common::{file_error, internal};
use blobd_store_format::archive::TarReader;

use crate::layout_source::{LayoutSource, not_an_archive};
use crate::{ErrorBody, ErrorCode};

/// Headers are read from a buffer; more is read past it.
const BUFFER_BYTES: usize = 64 << 10;
/// How much is read at once.
pub(crate) const STEP_BYTES: usize = 1 << 20;

/// Gives one file after the other. What is not read of a file is skipped.
#[derive(Debug)]
pub(crate) struct TarStream {
    /// For errors.
    name: String,
    input: BufReader<File>,
    reader: TarReader,
    position: u64,
    /// How many files were begun.
    begun: usize,
    /// What is not read yet of the last one.
    left: u64,
    is_ended: bool,
}

/// A file of an archive.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) path: String,
    pub(crate) size: u64,
}

impl TarStream {
    pub(crate) fn new(name: String, input: File) -> Self {
        let reader = TarReader::new(u64::MAX).with_max_files(LayoutSource::MAX_MEMBERS);
        let input = BufReader::with_capacity(BUFFER_BYTES, input);
        Self { name, input, reader, position: 0, begun: 0, left: 0, is_ended: false }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The bytes of the archive that were read.
    pub(crate) const fn position(&self) -> u64 {
        self.position
    }

    /// The next file; `None` at the end of the archive.
    ///
    /// # Errors
    /// Also for an archive without its end.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ErrorBody> {
        let left = std::mem::take(&mut self.left);
        self.skip(left)?;
        while let Some(wanted) = self.reader.wanted() {
            self.skip(wanted.start.saturating_sub(self.position))?;
            let length = usize::try_from(wanted.end.saturating_sub(wanted.start)).map_err(internal)?;
            let mut bytes = vec![0; length];
            let read = self.fill(&mut bytes)?;
            if read < length {
                return Err(self.ends_early());
            }
            self.reader.push(&bytes).map_err(|error| not_an_archive(&self.name, &error))?;
            if let Some(file) = self.reader.files().get(self.begun) {
                (self.begun, self.left) = (self.begun.saturating_add(1), file.size);
                return Ok(Some(Entry { path: file.path.clone(), size: file.size }));
            }
        }
        self.read_padding()?;
        Ok(None)
    }

    /// Reads the rest of the archive, to find out whether it has its end.
    pub(crate) fn finish(&mut self) -> Result<(), ErrorBody> {
        while self.next()?.is_some() {}
        Ok(())
    }

    /// Reads the next bytes of the current file, none at its end.
    pub(crate) fn read<'b>(&mut self, buffer: &'b mut [u8]) -> Result<&'b [u8], ErrorBody> {
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let part = buffer.get_mut(..wanted).unwrap_or_default();
        if self.fill(part)? < wanted {
            return Err(self.ends_early());
        }
        self.left = self.left.saturating_sub(wanted as u64);
        Ok(part)
    }

    /// Reads all of the current file, which has at most `most` bytes.
    pub(crate) fn read_whole(&mut self, entry: &Entry, most: u64) -> Result<Vec<u8>, ErrorBody> {
        let Entry { path, size } = entry;
        if *size > most {
            let message =
                format!("{}: {path}: too long: expected at most {most} bytes, found {size}", self.name);
            return Err(ErrorBody::new(ErrorCode::InvalidInput, message));
        }
        let mut bytes = vec![0; usize::try_from(*size).map_err(internal)?];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads what follows the end, so that the program that writes it does not fail. Other programs fill the last record.
    fn read_padding(&mut self) -> Result<(), ErrorBody> {
        const LONGEST: u64 = 16 << 20;
        if !std::mem::replace(&mut self.is_ended, true) {
            let padding = io::copy(&mut self.input.by_ref().take(LONGEST), &mut io::sink());
            padding.map_err(|error| file_error(&self.name, &error))?;
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<(), ErrorBody> {
        let skipped = io::copy(&mut self.input.by_ref().take(length), &mut io::sink());
        let skipped = skipped.map_err(|error| file_error(&self.name, &error))?;
        self.position = self.position.saturating_add(skipped);
        if skipped == length { Ok(()) } else { Err(self.ends_early()) }
    }

    /// Reads as many bytes as fit, fewer at the end of the stream.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ErrorBody> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest) {
                Ok(0) => break,
                Ok(read) => filled = filled.saturating_add(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(file_error(&self.name, &error)),
            }
        }
        self.position = self.position.saturating_add(filled as u64);
        Ok(filled)
    }

    fn ends_early(&self) -> ErrorBody {
        let message = format!("{}: archive of {} bytes: its end is missing", self.name, self.position);
        ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("the program that writes it may say why; write it again")
    }
}
