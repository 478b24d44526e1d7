//! The first bytes of a file, which say how it is split.

use blobd_registry::{RegistryError, RemoteStream};
use blobd_store_format::gguf::{Header, HeaderParser, Progress};
use blobd_store_format::split::SplitPlan;

use super::{Job, TransferError};

/// How a file is to be split, and what was fetched to know it.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) plan: SplitPlan,
    /// If it is a GGUF file.
    pub(super) header: Option<Header>,
    /// The rest of the file, if the server sends it all at once: begins behind what was fetched.
    pub(super) whole: Option<RemoteStream>,
}

impl Head {
    /// That of a file of which nothing has to be known.
    pub(super) fn of_any(size: u64) -> Self {
        Self { plan: SplitPlan::whole(size), header: None, whole: None }
    }
}

const MAGIC: &[u8] = b"GGUF";
/// What is asked for first.
const FIRST_BYTES: u64 = 64 << 10;

/// Fetches as much as it takes to plan. `bytes` are the file's first that there are; what comes is
/// added to them, also if more should have come.
///
/// # Errors
/// [`TransferError`] when it cannot be had or is refused.
pub(super) fn fetch(job: &Job<'_>, bytes: &mut Vec<u8>) -> Result<Head, TransferError> {
    let size = job.file.size();
    let mut head = HeadBytes { bytes, parsed: 0, parser: HeaderParser::new() };
    let mut whole: Option<RemoteStream> = None;
    loop {
        // What is named by its address alone must be one.
        if job.file.digest().is_some() && head.is_of_another_kind(size) {
            return Ok(Head { whole, ..Head::of_any(size) });
        }
        if head.is_complete()? || head.bytes.len() as u64 >= size {
            return head.planned(size, whole);
        }
        match &mut whole {
            Some(stream) => {
                let next = job.wait_for(stream.next())??;
                head.bytes.extend_from_slice(&next.ok_or(TransferError::Incomplete)?);
            }
            None => whole = head.fetch_more(job)?,
        }
    }
}

struct HeadBytes<'b> {
    bytes: &'b mut Vec<u8>,
    /// How many the parser has been given.
    parsed: usize,
    parser: HeaderParser,
}

impl HeadBytes<'_> {
    fn is_of_another_kind(&self, size: u64) -> bool {
        let start = self.bytes.get(..MAGIC.len().min(self.bytes.len())).unwrap_or_default();
        !MAGIC.starts_with(start) || size < MAGIC.len() as u64
    }

    fn is_complete(&mut self) -> Result<bool, TransferError> {
        let fresh = self.bytes.get(self.parsed..).unwrap_or_default();
        self.parsed = self.bytes.len();
        Ok(self.parser.push(fresh)? == Progress::Done)
    }

    /// Half as much again each time: what is fetched beyond the header may be in the store.
    fn fetch_more(&mut self, job: &Job<'_>) -> Result<Option<RemoteStream>, TransferError> {
        let start = self.bytes.len() as u64;
        let end = start.saturating_add(FIRST_BYTES.max(start / 2)).min(job.file.size());
        let fetched = job.wait_for(async {
            let mut stream = if job.file.is_resumable() {
                job.registry.open_part(job.file, start..end).await?
            } else {
                job.registry.open(job.file).await?
            };
            // From the start, then: what is there already comes again.
            let mut again = if stream.is_whole() { self.bytes.len() } else { 0 };
            while let Some(bytes) = job.next_of(&mut stream).await? {
                let fresh = bytes.get(again.min(bytes.len())..).unwrap_or_default();
                again = again.saturating_sub(bytes.len());
                self.bytes.extend_from_slice(fresh);
                if stream.is_whole() && again == 0 {
                    return Ok(Some(stream));
                }
            }
            Ok::<_, RegistryError>(None)
        })?;
        Ok(fetched?)
    }

    fn planned(self, size: u64, whole: Option<RemoteStream>) -> Result<Head, TransferError> {
        let header = self.parser.finish()?;
        let plan = SplitPlan::new(&header, size)?;
        Ok(Head { plan, header: Some(header), whole })
    }
}
