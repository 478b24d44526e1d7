//! The first bytes of a file, which say how it is split.

use blobd_store_format::gguf::{Header, HeaderParser, Progress};
use blobd_store_format::split::SplitPlan;

use super::{Job, TransferError};
use crate::registry::RemoteStream;

/// How a file is to be split, and what was fetched to know it.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) plan: SplitPlan,
    /// If it is a GGUF file.
    pub(super) header: Option<Header>,
    /// The file's first bytes: those that were there, and those that came.
    pub(super) bytes: Vec<u8>,
    /// The rest of the file, if the server sends it all at once: begins behind `bytes`.
    pub(super) whole: Option<RemoteStream>,
}

impl Head {
    /// That of a file of which nothing has to be known.
    pub(super) fn of_any(size: u64) -> Self {
        Self { plan: SplitPlan::whole(size), header: None, bytes: Vec::new(), whole: None }
    }
}

const MAGIC: &[u8] = b"GGUF";
/// What is asked for first.
const FIRST_BYTES: u64 = 64 << 10;

/// Fetches as much as it takes to plan, beyond the bytes that are `known`.
///
/// # Errors
/// [`TransferError`] when it cannot be had or is refused.
pub(super) fn fetch(job: &Job<'_>, known: Vec<u8>) -> Result<Head, TransferError> {
    let size = job.file.size();
    let mut head = HeadBytes { bytes: known, parsed: 0, parser: HeaderParser::new() };
    let mut whole: Option<RemoteStream> = None;
    loop {
        // What is named by its address alone must be one.
        if job.file.digest().is_some()
            && !MAGIC.starts_with(head.bytes.get(..MAGIC.len().min(head.bytes.len())).unwrap_or_default())
        {
            return Ok(Head { bytes: head.bytes, whole, ..Head::of_any(size) });
        }
        if head.is_complete()? || head.bytes.len() as u64 >= size {
            return head.planned(size, whole);
        }
        match &mut whole {
            Some(stream) => {
                let next = job.handle.block_on(stream.next())?;
                head.bytes.extend_from_slice(&next.ok_or(TransferError::Incomplete)?);
            }
            None => whole = head.fetch_more(job)?,
        }
    }
}

struct HeadBytes {
    bytes: Vec<u8>,
    /// How many the parser has been given.
    parsed: usize,
    parser: HeaderParser,
}

impl HeadBytes {
    fn is_complete(&mut self) -> Result<bool, TransferError> {
        let fresh = self.bytes.get(self.parsed..).unwrap_or_default();
        self.parsed = self.bytes.len();
        Ok(self.parser.push(fresh)? == Progress::Done)
    }

    /// Half as much again each time: what is fetched beyond the header may be in the store.
    fn fetch_more(&mut self, job: &Job<'_>) -> Result<Option<RemoteStream>, TransferError> {
        let start = self.bytes.len() as u64;
        let end = start.saturating_add(FIRST_BYTES.max(start / 2)).min(job.file.size());
        job.handle.block_on(async {
            let mut stream = job.registry.open_part(job.file, start..end).await?;
            // From the start, then: what is there already comes again.
            let mut again = if stream.is_whole() { self.bytes.len() } else { 0 };
            while let Some(bytes) = stream.next().await? {
                let fresh = bytes.get(again.min(bytes.len())..).unwrap_or_default();
                again = again.saturating_sub(bytes.len());
                self.bytes.extend_from_slice(fresh);
                if stream.is_whole() && again == 0 {
                    return Ok(Some(stream));
                }
            }
            Ok(None)
        })
    }

    fn planned(self, size: u64, whole: Option<RemoteStream>) -> Result<Head, TransferError> {
        let header = self.parser.finish()?;
        let plan = SplitPlan::new(&header, size)?;
        Ok(Head { plan, header: Some(header), bytes: self.bytes, whole })
    }
}
