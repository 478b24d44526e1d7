//! Downloads the head of a file, which determines how it is split.

use std::sync::Arc;

use blobd_model::facts::ModelFacts;
use blobd_registry::{ByteStream, RegistryError, Sender};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::{FormatError, HeaderReader, MAX_HEADER_BYTES, ModelHeader, Progress};
use blobd_store_format::split::SplitPlan;

use super::{Job, TransferError};

#[derive(Debug)]
pub(super) struct Head {
    pub(super) plan: SplitPlan,
    /// The facts from the header, if the format is known; for an archive, those of each file.
    pub(super) facts: Vec<ModelFacts>,
    /// The stream of the rest, after the downloaded bytes, if the server sends the whole file.
    pub(super) whole: Option<ByteStream>,
    pub(super) sender: Option<Arc<Sender>>,
}

impl Head {
    pub(super) fn whole(size: u64) -> Self {
        Self { plan: SplitPlan::whole(size), facts: Vec::new(), whole: None, sender: None }
    }

    /// Plans a file of `size` bytes. Fails when the tensors do not fit the file.
    pub(super) fn new(
        header: &dyn ModelHeader,
        size: u64,
        Streamed { whole, sender, .. }: Streamed,
    ) -> Result<Self, FormatError> {
        let plan = SplitPlan::new(header.file_layout(size)?);
        Ok(Self { plan, facts: vec![ModelFacts::from_header(header)], whole, sender })
    }
}

/// The streams that a head was read from.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    /// The stream of the rest, if the server sends the whole file.
    whole: Option<ByteStream>,
    sender: Option<Arc<Sender>>,
    must_be_one_sender: bool,
}

const FIRST_BYTES: u64 = 64 << 10;

/// Downloads enough to make a plan. `bytes` are the known first bytes of the file; downloaded bytes are appended, also
/// on failure.
pub(super) fn fetch(job: &Job<'_>, bytes: &mut Vec<u8>) -> Result<Head, TransferError> {
    let size = job.file.size();
    let mut streamed = Streamed::default();
    match read_header(job, bytes, &mut streamed, HeadLimits { at_once: u64::MAX, most: u64::MAX }) {
        Ok(Some(header)) => Ok(Head::new(&*header, size, streamed)?),
        // No header is longer.
        Ok(None) => Err(TransferError::Incomplete),
        Err(TransferError::Format(error))
            if error.is_unknown_format() && !job.file.must_have_known_format() =>
        {
            let Streamed { whole, sender, .. } = streamed;
            Ok(Head { whole, sender, ..Head::whole(size) })
        }
        Err(error) => Err(error),
    }
}

impl Job<'_> {
    /// Downloads a file's header, and at most `excess` bytes after it unless the server ignores ranges; `None` if its
    /// format is unknown, or if it has more than `most` bytes.
    pub(crate) fn read_header(
        &self,
        excess: u64,
        most: u64,
    ) -> Result<Option<Box<dyn ModelHeader>>, TransferError> {
        let limits = HeadLimits { at_once: excess, most };
        self.retried(|_received| match fetch_header(self, limits) {
            Err(TransferError::SeveralServers) => {
                let file = &self.file.without_ranges();
                fetch_header(&Job { file, ..self.clone() }, limits)
            }
            header => header,
        })
    }
}

/// Downloads a header from one server.
///
/// The digest of the file is not verified unless all of it was downloaded. If its parts could come from several servers, a
/// registry could put a document of another server into a header of its own, by redirecting only some of the requests.
fn fetch_header(job: &Job<'_>, limits: HeadLimits) -> Result<Option<Box<dyn ModelHeader>>, TransferError> {
    let mut bytes = Vec::new();
    let mut streamed = Streamed { must_be_one_sender: true, ..Streamed::default() };
    let header = match read_header(job, &mut bytes, &mut streamed, limits) {
        Ok(Some(header)) => header,
        Ok(None) => return Ok(None),
        Err(TransferError::Format(error)) if error.is_unknown_format() => return Ok(None),
        Err(error) => return Err(error),
    };
    match job.file.digest() {
        Some(expected) if bytes.len() as u64 == job.file.size() && Digest::of(&bytes) != expected => {
            Err(TransferError::WrongHeader { expected })
        }
        _ => Ok(Some(header)),
    }
}

/// How much may be downloaded to read a header.
#[derive(Clone, Copy)]
struct HeadLimits {
    at_once: u64,
    most: u64,
}

/// Reads the header from `bytes` and from downloads; `None` if it has more bytes than allowed. `streamed` gets the rest
/// of the file if the server sends all of it.
fn read_header(
    job: &Job<'_>,
    bytes: &mut Vec<u8>,
    streamed: &mut Streamed,
    limits: HeadLimits,
) -> Result<Option<Box<dyn ModelHeader>>, TransferError> {
    let mut reader = HeaderReader::new();
    let mut read = 0;
    job.count_header(bytes.len())?;
    loop {
        let progress = reader.push(bytes.get(read..).unwrap_or_default())?;
        read = bytes.len();
        if progress == Progress::Done || read as u64 >= job.file.size() {
            return Ok(Some(reader.finish()?));
        }
        if read as u64 > limits.most {
            return Ok(None);
        }
        match &mut streamed.whole {
            Some(stream) => {
                let next =
                    job.wait_for(job.silence.until(stream.next()))??.ok_or(TransferError::Incomplete)?;
                job.count_header(bytes.len().saturating_add(next.len()))?;
                bytes.extend_from_slice(&next);
            }
            None => fetch_more(job, bytes, streamed, limits.at_once)?,
        }
    }
}

/// Downloads half as much again as has been downloaded, and at most `most` bytes: not much beyond the header, because the
/// rest may be in the store. Never more than the longest header. If the file's tensor index says how long its header is,
/// that much is downloaded at once.
fn fetch_more(
    job: &Job<'_>,
    bytes: &mut Vec<u8>,
    streamed: &mut Streamed,
    most: u64,
) -> Result<(), TransferError> {
    let start = bytes.len() as u64;
    let longest = MAX_HEADER_BYTES.max(start.saturating_add(FIRST_BYTES));
    let indexed = job.indexed_header_bytes().filter(|_| start == 0).map(|bytes| bytes.max(1));
    let next = indexed.unwrap_or_else(|| FIRST_BYTES.max(start / 2));
    let end = start.saturating_add(next.min(most)).min(longest).min(job.file.size());
    job.count_header(usize::try_from(end).unwrap_or(usize::MAX))?;
    let fetched = job.wait_for(async {
        let mut stream = if job.file.is_resumable() {
            job.silence.until(job.registry.open_part(job.file, start..end)).await?
        } else {
            job.silence.until(job.registry.open(job.file)).await?
        };
        let sender = Arc::clone(stream.sender());
        let is_other = streamed.sender.as_ref().is_some_and(|known| *known != sender);
        if streamed.must_be_one_sender && is_other {
            return Ok(false);
        }
        streamed.sender = Some(sender);
        // The stream starts at 0: known bytes are skipped.
        let mut skip = if stream.is_whole() { bytes.len() } else { 0 };
        while let Some(portion) = job.next_of(&mut stream).await? {
            let fresh = portion.get(skip.min(portion.len())..).unwrap_or_default();
            skip = skip.saturating_sub(portion.len());
            bytes.extend_from_slice(fresh);
            if stream.is_whole() && skip == 0 {
                streamed.whole = Some(stream);
                return Ok(true);
            }
        }
        Ok::<_, RegistryError>(true)
    })?;
    if fetched? { Ok(()) } else { Err(TransferError::SeveralServers) }
}
