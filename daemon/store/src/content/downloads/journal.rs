//! The journal of a download: records which bytes have arrived.
//!
//! A head names the file; records of equal length follow, each with its own checksum. The journal is only appended to,
//! and never synced: a torn or wrong record ends it, and after a reboot its claims are compared with the data
//! (`docs/STORE-FORMAT.md`).

use blobd_store_format::digest::Digest;

pub(crate) const HEAD_BYTES: usize = 48;
pub(crate) const RECORD_BYTES: usize = 52;

const MAGIC: &[u8; 8] = b"blobdpt1";
const CHECKSUM_BYTES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The following records belong to this boot of the machine and this plan.
    Session(Session),
    /// Bytes of the file have arrived; `crc` is the CRC-32 of their content.
    Arrived { offset: u64, length: u32, crc: u32 },
    /// A planned blob is in the store under this digest.
    Stored { blob: u32, digest: Digest },
    /// What has arrived before is a complete copy of the file with this digest, which is wrong. The following records
    /// are of a second copy, which replaces it.
    SecondCopy { first: Digest },
    /// `bytes` of a range of this length differ between the two copies.
    Differs { offset: u64, length: u32, bytes: u32 },
}

/// Identifies a time during which the data on disk is what a session wrote, and means the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    /// A power cut can lose unsynced data; killing the process cannot.
    pub(crate) boot: [u8; 16],
    /// With another plan, an offset in the file is in other files.
    pub(crate) plan: [u8; 16],
}

pub(crate) fn head(file: Digest, size: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(file.as_bytes());
    head.extend_from_slice(&size.to_le_bytes());
    head
}

impl Record {
    pub(crate) fn encode(self) -> Vec<u8> {
        let (kind, length, offset, content): (u32, u32, u64, [u8; 32]) = match self {
            Self::Session(Session { boot, plan }) => {
                let mut content = [0; 32];
                let (first, second) = content.split_at_mut(16);
                first.copy_from_slice(&boot);
                second.copy_from_slice(&plan);
                (1, 0, 0, content)
            }
            Self::Arrived { offset, length, crc } => (2, length, offset, padded(crc)),
            Self::Stored { blob, digest } => (3, blob, 0, *digest.as_bytes()),
            Self::SecondCopy { first } => (4, 0, 0, *first.as_bytes()),
            Self::Differs { offset, length, bytes } => (5, length, offset, padded(bytes)),
        };
        let mut record = Vec::with_capacity(RECORD_BYTES);
        record.extend_from_slice(&kind.to_le_bytes());
        record.extend_from_slice(&length.to_le_bytes());
        record.extend_from_slice(&offset.to_le_bytes());
        record.extend_from_slice(&content);
        record.extend_from_slice(&crc32fast::hash(&record).to_le_bytes());
        record
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (body, checksum) = bytes.split_at_checked(RECORD_BYTES - CHECKSUM_BYTES)?;
        if u32::from_le_bytes(checksum.try_into().ok()?) != crc32fast::hash(body) {
            return None;
        }
        let (kind, rest) = body.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (offset, content) = rest.split_first_chunk()?;
        let (length, offset) = (u32::from_le_bytes(*length), u64::from_le_bytes(*offset));
        match u32::from_le_bytes(*kind) {
            1 => {
                let (boot, plan) = content.split_first_chunk()?;
                Some(Self::Session(Session { boot: *boot, plan: plan.try_into().ok()? }))
            }
            2 => {
                let crc = u32::from_le_bytes(*content.first_chunk()?);
                Some(Self::Arrived { offset, length, crc })
            }
            3 => Some(Self::Stored { blob: length, digest: Digest::from_bytes(content.try_into().ok()?) }),
            4 => Some(Self::SecondCopy { first: Digest::from_bytes(content.try_into().ok()?) }),
            5 => {
                let bytes = u32::from_le_bytes(*content.first_chunk()?);
                Some(Self::Differs { offset, length, bytes })
            }
            _ => None,
        }
    }
}

fn padded(number: u32) -> [u8; 32] {
    let mut content = [0; 32];
    let (first, _) = content.split_at_mut(size_of::<u32>());
    first.copy_from_slice(&number.to_le_bytes());
    content
}

/// The records up to the first that is torn or wrong; none if the journal is for another file.
pub(crate) fn parse(journal: &[u8], file: Digest, size: u64) -> Vec<Record> {
    let Some((found, records)) = journal.split_at_checked(HEAD_BYTES) else { return Vec::new() };
    if found != head(file, size) {
        return Vec::new();
    }
    records.chunks_exact(RECORD_BYTES).map_while(Record::parse).collect()
}

/// The size of the file in the journal's head; `None` if the journal is for another file.
pub(crate) fn size(journal: &[u8], file: Digest) -> Option<u64> {
    let bytes = journal.get(HEAD_BYTES - size_of::<u64>()..HEAD_BYTES)?.try_into().ok()?;
    let size = u64::from_le_bytes(bytes);
    (journal.get(..HEAD_BYTES)? == head(file, size)).then_some(size)
}

/// The blobs that the journal records as stored, for any size of the file.
pub(crate) fn stored(journal: &[u8], file: Digest) -> Vec<Digest> {
    let Some(size) = size(journal, file) else { return Vec::new() };
    let records = parse(journal, file, size).into_iter();
    records
        .filter_map(|record| match record {
            Record::Stored { digest, .. } => Some(digest),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> impl Strategy<Value = Record> {
        prop_oneof![
            any::<([u8; 16], [u8; 16])>().prop_map(|(boot, plan)| Record::Session(Session { boot, plan })),
            any::<(u64, u32, u32)>().prop_map(|(offset, length, crc)| Record::Arrived {
                offset,
                length,
                crc
            }),
            any::<(u32, [u8; 32])>()
                .prop_map(|(blob, digest)| Record::Stored { blob, digest: Digest::from_bytes(digest) }),
            any::<[u8; 32]>().prop_map(|first| Record::SecondCopy { first: Digest::from_bytes(first) }),
            any::<(u64, u32, u32)>().prop_map(|(offset, length, bytes)| Record::Differs {
                offset,
                length,
                bytes
            }),
        ]
    }

    #[test]
    fn stored_blobs_are_found_without_the_size() {
        let (file, blob) = (Digest::of(b"x"), Digest::of(b"y"));
        let mut journal = head(file, 7);
        journal.extend(Record::Stored { blob: 3, digest: blob }.encode());
        assert_eq!(stored(&journal, file), [blob]);
        assert_eq!(stored(&journal, blob), []);
        assert_eq!(stored(b"short", file), []);
    }

    proptest! {
        #[test]
        fn records_are_read_up_to_the_first_torn_or_flipped_byte(
            records in prop::collection::vec(record(), 0..8),
            cut in any::<prop::sample::Index>(),
            flip in any::<prop::sample::Index>(),
        ) {
            let file = Digest::of(b"x");
            let mut journal = head(file, 7);
            records.iter().for_each(|record| journal.extend(record.encode()));
            prop_assert_eq!(&parse(&journal, file, 7), &records);
            prop_assert_eq!(parse(&journal, file, 8), vec![]);
            let cut = cut.index(journal.len() + 1);
            let whole = cut.saturating_sub(HEAD_BYTES) / RECORD_BYTES;
            prop_assert_eq!(&parse(&journal[..cut], file, 7)[..], &records[..whole]);
            let flip = flip.index(journal.len());
            journal[flip] ^= 1;
            let before = flip.saturating_sub(HEAD_BYTES) / RECORD_BYTES;
            prop_assert_eq!(&parse(&journal, file, 7)[..], &records[..before]);
        }

        #[test]
        fn garbage_is_not_a_journal(journal in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(parse(&journal, Digest::of(b"x"), 7), vec![]);
        }
    }
}
