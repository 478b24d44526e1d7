//! The first bytes of a file, which say how it is split.

use blobd_store_format::gguf::{HeaderParser, Progress};
use blobd_store_format::split::SplitPlan;
use tokio::runtime::Handle;

use super::{RemoteFile, TransferError};
use crate::registry::{BlobStream, Part};

/// How a file is to be split, and what was fetched to know it.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) plan: SplitPlan,
    /// The file's first bytes: those that were there, and those that came.
    pub(super) bytes: Vec<u8>,
    /// The rest of the file, if the server sends it all at once: begins behind `bytes`.
    pub(super) whole: Option<BlobStream>,
}

const MAGIC: &[u8] = b"GGUF";
/// What is asked for first.
const FIRST_BYTES: u64 = 64 << 10;

/// Fetches as much as it takes to plan, beyond the bytes that are `known`.
///
/// # Errors
/// [`TransferError`] when it cannot be had or is refused.
pub(super) fn fetch(handle: &Handle, source: &RemoteFile, known: Vec<u8>) -> Result<Head, TransferError> {
    let size = source.file.size;
    let mut head = HeadBytes { known: known.len(), bytes: known, parsed: 0, parser: HeaderParser::new() };
    let mut whole: Option<BlobStream> = None;
    loop {
        if !MAGIC.starts_with(head.bytes.get(..MAGIC.len().min(head.bytes.len())).unwrap_or_default()) {
            return Ok(head.finished(SplitPlan::whole(size), whole));
        }
        if head.is_complete()? || head.bytes.len() as u64 >= size {
            return head.planned(size, whole);
        }
        match &mut whole {
            Some(stream) => {
                let next = handle.block_on(stream.next())?;
                head.bytes.extend_from_slice(&next.ok_or(TransferError::Incomplete)?);
            }
            None => whole = head.fetch_more(handle, source)?,
        }
    }
}

struct HeadBytes {
    known: usize,
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
    fn fetch_more(
        &mut self,
        handle: &Handle,
        source: &RemoteFile,
    ) -> Result<Option<BlobStream>, TransferError> {
        let start = self.bytes.len() as u64;
        let end = start.saturating_add(FIRST_BYTES.max(start / 2)).min(source.file.size);
        handle.block_on(async {
            match source.part(start..end).await? {
                Part::Range(mut stream) => {
                    while let Some(bytes) = stream.next().await? {
                        self.bytes.extend_from_slice(&bytes);
                    }
                    Ok(None)
                }
                Part::Whole(mut stream) => {
                    // From the start: what is there already comes again.
                    self.bytes.truncate(self.known);
                    let mut skip = self.bytes.len();
                    while skip > 0 {
                        let Some(mut bytes) = stream.next().await? else { break };
                        let again = skip.min(bytes.len());
                        skip -= again;
                        self.bytes.extend_from_slice(&bytes.split_off(again));
                    }
                    Ok(Some(stream))
                }
            }
        })
    }

    fn planned(self, size: u64, whole: Option<BlobStream>) -> Result<Head, TransferError> {
        let Self { bytes, parser, .. } = self;
        let header = parser.finish()?;
        let plan = SplitPlan::new(&header, size)?;
        Ok(Head { plan, bytes, whole })
    }

    fn finished(self, plan: SplitPlan, whole: Option<BlobStream>) -> Head {
        Head { plan, bytes: self.bytes, whole }
    }
}
