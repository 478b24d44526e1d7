//! Downloads the headers of an archive and of the files in it, which determine how it is split.

use std::ops::Range;
use std::sync::Arc;

use blobd_model::facts::ModelFacts;
use blobd_registry::{RegistryError, Sender};
use blobd_store_format::archive::{TarReader, layout};
use blobd_store_format::file_format::{FormatError, HeaderReader, MAX_HEADER_BYTES, ModelHeader, Progress};
use blobd_store_format::file_layout::ArchiveFile;
use blobd_store_format::split::SplitPlan;

use super::{Job, TransferError, compression_of};

/// The size of a request: enough for the headers of most models, and for many small files.
const REQUEST_BYTES: u64 = 64 << 10;

/// The files in an archive, with the headers of those with a known format.
pub(crate) struct ArchiveHead {
    pub(crate) files: Vec<(ArchiveFile, Option<Box<dyn ModelHeader>>)>,
    pub(super) parts: Vec<(u64, Vec<u8>)>,
}

impl ArchiveHead {
    /// If the digest of the archive is not verified afterwards, all parts must have the same sender
    /// (`must_be_one_sender`), as in [`super::head::fetch_header`].
    pub(super) fn fetch(job: &Job<'_>, must_be_one_sender: bool) -> Result<Self, TransferError> {
        let mut window = Window { job, parts: Vec::new(), fetched: 0, sender: None, must_be_one_sender };
        let mut reader = TarReader::new(job.file.size());
        let mut files = Vec::new();
        while let Some(wanted) = reader.wanted() {
            reader.push(window.read(wanted)?)?;
            // As it is found, so that the archive is read from front to back.
            if let Some(file) = reader.files().get(files.len()) {
                files.push((file.clone(), window.header(file)?));
            }
        }
        Ok(Self { files, parts: window.parts })
    }

    pub(super) fn facts(&self) -> Vec<ModelFacts> {
        let headers = self.files.iter().filter_map(|(_, header)| header.as_deref());
        headers.map(ModelFacts::from_header).collect()
    }

    pub(super) fn fetched_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes.len() as u64))
    }

    pub(super) fn plan(&self, archive_size: u64) -> Result<SplitPlan, FormatError> {
        let file = |(file, header): &(ArchiveFile, Option<Box<dyn ModelHeader>>)| {
            let layout = header.as_ref().map(|header| header.file_layout(file.size)).transpose()?;
            Ok((file.clone(), layout))
        };
        let files = self.files.iter().map(file).collect::<Result<_, FormatError>>()?;
        Ok(SplitPlan::new(layout(archive_size, files)))
    }
}

/// The downloaded parts of an archive, which is read from front to back.
struct Window<'j> {
    job: &'j Job<'j>,
    parts: Vec<(u64, Vec<u8>)>,
    fetched: u64,
    sender: Option<Arc<Sender>>,
    must_be_one_sender: bool,
}

impl Window<'_> {
    /// Reads a range that starts in or after the last part.
    fn read(&mut self, range: Range<u64>) -> Result<&[u8], TransferError> {
        self.extend_to(&range)?;
        let Some((offset, bytes)) = self.parts.last() else { return Err(TransferError::Incomplete) };
        let place = |at: u64| usize::try_from(at.saturating_sub(*offset)).unwrap_or(usize::MAX);
        bytes.get(place(range.start)..place(range.end)).ok_or(TransferError::Incomplete)
    }

    /// Reads the header of a file; `None` if its format is unknown.
    fn header(&mut self, file: &ArchiveFile) -> Result<Option<Box<dyn ModelHeader>>, TransferError> {
        let (mut reader, end) = (HeaderReader::new(), file.offset.saturating_add(file.size));
        let mut position = file.offset;
        while position < end {
            // First the bytes that are there already: often they are the whole header.
            let known = self.end();
            let next = if known > position { known } else { position.saturating_add(REQUEST_BYTES) }.min(end);
            let progress = reader.push(self.read(position..next)?);
            position = next;
            match progress {
                Ok(Progress::Done) => break,
                Ok(_) => {}
                Err(error) if error.is_unknown_format() => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        match reader.finish() {
            Err(error) if error.is_unknown_format() => Ok(None),
            header => Ok(Some(header?)),
        }
    }

    fn end(&self) -> u64 {
        self.parts.last().map_or(0, |(offset, bytes)| offset.saturating_add(bytes.len() as u64))
    }

    /// Downloads so that the last part contains the range.
    fn extend_to(&mut self, range: &Range<u64>) -> Result<(), TransferError> {
        if self.parts.is_empty() || range.start > self.end() {
            self.parts.push((range.start, Vec::new()));
        }
        let start = self.end();
        if range.end <= start {
            return Ok(());
        }
        let end = range.end.max(start.saturating_add(REQUEST_BYTES)).min(self.job.file.size());
        let counted = self.fetched.saturating_add(end.saturating_sub(start));
        self.job.count_header(usize::try_from(counted).unwrap_or(usize::MAX))?;
        let (bytes, sender) = self.job.read_range(start..end)?;
        let earlier = self.sender.replace(Arc::clone(&sender));
        if self.must_be_one_sender && earlier.is_some_and(|earlier| earlier != sender) {
            return Err(TransferError::SeveralServers);
        }
        self.fetched = self.fetched.saturating_add(bytes.len() as u64);
        if self.fetched > MAX_HEADER_BYTES {
            return Err(TransferError::ArchiveHeaders { limit: MAX_HEADER_BYTES });
        }
        if let Some((_, part)) = self.parts.last_mut() {
            part.extend_from_slice(&bytes);
        }
        Ok(())
    }
}

impl Job<'_> {
    pub(crate) fn read_archive(&self, must_be_one_sender: bool) -> Result<ArchiveHead, TransferError> {
        if let Some(compression) = compression_of(self.file) {
            return Err(TransferError::NotInspected { compression });
        }
        ArchiveHead::fetch(self, must_be_one_sender)
    }

    /// Downloads a range into memory. Refused where the server ignores ranges: the headers in an archive are far
    /// apart.
    fn read_range(&self, range: Range<u64>) -> Result<(Vec<u8>, Arc<Sender>), TransferError> {
        self.retried(|_received| {
            let read = self.wait_for(async {
                let mut stream = self.registry.open_part(self.file, range.clone()).await?;
                if stream.is_whole() {
                    return Ok(None);
                }
                let bytes = self.rest_of(&mut stream).await?;
                Ok::<_, RegistryError>(Some((bytes, Arc::clone(stream.sender()))))
            });
            read??.ok_or(TransferError::NoRanges)
        })
    }
}
