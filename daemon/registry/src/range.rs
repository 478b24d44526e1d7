//! A part of a file: for a repair, which needs one tensor of a model and not all of it.

use std::ops::Range;

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use bytes::{Buf as _, Bytes};
use hyper::header::{CONTENT_RANGE, HeaderValue};

use super::fetch::{Answer, Target, What};
use super::mirrors::Failures;
use super::{BlobStream, RegistryClient, RegistryError};

impl RegistryClient {
    /// Starts to fetch the bytes `range` of one of the files that `reference`'s manifest lists. A
    /// server that knows no ranges sends all of it; then what comes before is skipped, and the
    /// connection is closed behind.
    ///
    /// # Errors
    /// As for [`Self::part`].
    pub async fn range(
        &self,
        reference: &Reference,
        file: &Descriptor,
        range: Range<u64>,
    ) -> Result<RangeStream, RegistryError> {
        Ok(self.part(reference, file, range.clone()).await?.only(&range))
    }

    /// The same for a caller who can use all of the file if that is what the server sends.
    ///
    /// # Errors
    /// [`RegistryError`] as for [`Self::blob`]; [`RegistryError::RangeDiffers`] when another part
    /// comes than was asked for, or when the range is empty or not inside the file.
    pub async fn part(
        &self,
        reference: &Reference,
        file: &Descriptor,
        range: Range<u64>,
    ) -> Result<Part, RegistryError> {
        let mut failures = Failures::default();
        for registry in self.shared.mirrors.of(reference)? {
            let path = format!("blobs/{}", file.digest);
            let target = Target::new(&registry, reference, &path, What::Blob(file.digest), None)?;
            if let Some(settled) = failures.settle(self.part_of(target, file, &range, |_| Ok(())).await) {
                return settled;
            }
        }
        Err(failures.into_error(reference.host()))
    }

    /// The same of anything that can be asked for; `check` looks at the head of the answer first.
    pub(super) async fn part_of(
        &self,
        target: Target<'_>,
        file: &Descriptor,
        range: &Range<u64>,
        check: impl FnOnce(&Answer) -> Result<(), RegistryError>,
    ) -> Result<Part, RegistryError> {
        let expected = content_range(range, file.size);
        let header = last_of(range)
            .filter(|last| *last < file.size)
            .and_then(|last| HeaderValue::try_from(format!("bytes={}-{last}", range.start)).ok());
        let Some(header) = header else {
            let (digest, host) = (file.digest, target.origin.host().to_owned());
            let found = format!("{} bytes in all", file.size);
            return Err(RegistryError::RangeDiffers { digest, host, found, expected });
        };
        let answer = self.shared.get(&target.with_range(header)).await?;
        check(&answer)?;
        let page = answer.web_page();
        if !answer.is_partial() {
            let stream = BlobStream::open(answer.host(), answer.into_body(), file, &self.shared.limits);
            return stream.map(Part::Whole).map_err(|error| page.unwrap_or(error));
        }
        check_part(&answer, file.digest, &expected)?;
        let length = range.end.saturating_sub(range.start);
        let part = Descriptor { size: length, ..file.clone() };
        let expected = Some(expected);
        let stream = BlobStream::open(answer.host(), answer.into_body(), &part, &self.shared.limits)
            .map_err(|error| of_part(error, expected.as_deref()))?;
        Ok(Part::Range(RangeStream { stream, skip: 0, left: length, received: 0, expected }))
    }
}

/// What a server sends when it is asked for a part of a file.
#[derive(Debug)]
pub enum Part {
    /// That part.
    Range(RangeStream),
    /// All of it, from the first byte on: it knows no ranges.
    Whole(BlobStream),
}

impl Part {
    /// The part alone.
    pub(super) fn only(self, range: &Range<u64>) -> RangeStream {
        let (skip, left) = (range.start, range.end.saturating_sub(range.start));
        match self {
            Self::Range(stream) => stream,
            Self::Whole(stream) => RangeStream { stream, skip, left, received: 0, expected: None },
        }
    }
}

/// The bytes of a part of a file as they arrive; counted, not hashed.
#[derive(Debug)]
pub struct RangeStream {
    stream: BlobStream,
    /// How many bytes come before those that were asked for.
    skip: u64,
    /// How many of those are still to come.
    left: u64,
    received: u64,
    /// The `Content-Range` of an answer that has one.
    expected: Option<String>,
}

impl RangeStream {
    /// The next bytes, never none; nothing once exactly as many have come as were asked for.
    ///
    /// # Errors
    /// As for [`BlobStream::next`]; [`RegistryError::RangeDiffers`] when a part of the right name
    /// has another length.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        // Of a part the end is looked at too: there must not be more. Of the whole file only what
        // is needed is read.
        while self.left > 0 || self.expected.is_some() {
            let next = self.stream.next().await;
            let next = next.map_err(|error| of_part(error, self.expected.as_deref()))?;
            let Some(mut bytes) = next else { return Ok(None) };
            self.received = self.received.saturating_add(bytes.len() as u64);
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(bytes.len());
            bytes.advance(skipped);
            self.skip = self.skip.saturating_sub(skipped as u64);
            bytes.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.left = self.left.saturating_sub(bytes.len() as u64);
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    /// How many bytes have come over the network, those that were skipped included.
    #[must_use]
    pub const fn received_bytes(&self) -> u64 {
        self.received
    }
}

fn last_of(range: &Range<u64>) -> Option<u64> {
    range.end.checked_sub(1).filter(|last| *last >= range.start)
}

/// The header's value for this part of a file of `size` bytes.
fn content_range(range: &Range<u64>, size: u64) -> String {
    format!("bytes {}-{}/{size}", range.start, range.end.saturating_sub(1))
}

/// A part must say which it is, and be the one that was asked for.
fn check_part(answer: &Answer, digest: Digest, expected: &str) -> Result<(), RegistryError> {
    const MAX_CHARS: usize = 80;
    let mut values = answer.headers().get_all(CONTENT_RANGE).iter();
    let found = match (values.next(), values.next()) {
        (Some(value), None) if value.as_bytes().eq_ignore_ascii_case(expected.as_bytes()) => return Ok(()),
        (Some(value), None) => String::from_utf8_lossy(value.as_bytes()).chars().take(MAX_CHARS).collect(),
        (None, _) => "a part that it does not name".to_owned(),
        (Some(_), Some(_)) => "several parts".to_owned(),
    };
    Err(RegistryError::RangeDiffers { digest, host: answer.host(), found, expected: expected.to_owned() })
}

/// Of a part it is not the manifest that says how long it is.
fn of_part(error: RegistryError, expected: Option<&str>) -> RegistryError {
    match (error, expected) {
        (RegistryError::SizeDiffers { digest, host, found_bytes, .. }, Some(expected)) => {
            let found = format!("{found_bytes} bytes");
            RegistryError::RangeDiffers { digest, host, found, expected: expected.to_owned() }
        }
        (error, _) => error,
    }
}
