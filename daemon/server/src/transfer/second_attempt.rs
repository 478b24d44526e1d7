//! A second download of a file whose first one has a wrong digest.
//!
//! The first copy stays on disk. The second comes over other connections, and from another mirror if there is one; it is
//! compared with the first as it arrives, and replaces it. So the user learns which bytes were wrong and who sent them.
//! There is no third attempt: a file that is wrong twice is wrong at its source, or something on the way damages data all
//! the time.

use blobd_client::protocol::pull::CorrectedFile;
use blobd_registry::{RegistryClient, RemoteFile, Sender};
use blobd_store::{Assembler, Differences, Ingest, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MAX_HEADER_BYTES;
use blobd_store_format::git_id::GitId;
use blobd_store_format::split::BlobContent;

use super::file_transfer::Transfer;
use super::single_flight::TransferGuard;
use super::two_copies::{Copy, Senders, TwoCopies};
use super::{Job, Received, Reuse, TransferError, Transfers};

/// A complete copy of a file that has a wrong digest.
#[derive(Debug)]
pub(super) struct FirstCopy {
    digest: Digest,
    /// Its first bytes, which are compared even if the second copy is split in another way.
    head: Vec<u8>,
    senders: Senders,
    downloaded_bytes: u64,
}

impl FirstCopy {
    /// The copy of an earlier pull, which was interrupted during the second download.
    pub(super) fn from_earlier_pull(digest: Digest) -> Self {
        Self { digest, head: Vec::new(), senders: Senders::default(), downloaded_bytes: 0 }
    }
}

impl Transfer<'_> {
    /// Ends the transfer of a file whose digest is wrong although nothing in it was assumed.
    pub(super) fn into_first_copy(self, found: Digest) -> Result<FirstCopy, StoreError> {
        let (head, senders) = (head_of(self.shared.assembler())?, self.shared.senders());
        Ok(FirstCopy { digest: found, head, senders, downloaded_bytes: self.received.downloaded_bytes })
    }
}

/// The header of a file; of one without a header, its start.
fn head_of(assembler: &Assembler) -> Result<Vec<u8>, StoreError> {
    const START_BYTES: u64 = 64 << 10;
    let plan = assembler.plan();
    let header = plan.blobs().first().filter(|blob| blob.content == BlobContent::Header);
    let length = header.map_or(START_BYTES, |header| header.size.min(MAX_HEADER_BYTES)).min(plan.file_size());
    let mut head = vec![0; usize::try_from(length).unwrap_or_default()];
    assembler.read(0, &mut head)?;
    Ok(head)
}

/// How to request a file from other senders than those who sent it wrong.
struct OtherSenders {
    registry: RegistryClient,
    file: RemoteFile,
}

impl OtherSenders {
    fn excluding<'s>(job: &Job<'_>, senders: impl IntoIterator<Item = &'s Sender>) -> Self {
        let senders: Vec<&Sender> = senders.into_iter().collect();
        job.again.set();
        job.registry.set_peers_aside(senders.iter().copied());
        Self { registry: job.registry.with_fresh_connections(), file: job.file.avoiding(senders) }
    }

    fn job<'j>(&'j self, job: &'j Job<'j>) -> Job<'j> {
        Job { registry: &self.registry, file: &self.file, ..job.clone() }
    }
}

impl Transfers {
    /// Downloads a file a second time, and compares it with its first copy.
    pub(super) fn receive_again(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
        expected: Digest,
        first: &FirstCopy,
    ) -> Result<Received, TransferError> {
        note_wrong(job, first.digest, expected);
        let elsewhere = OtherSenders::excluding(job, first.senders.all());
        let job = elsewhere.job(job);
        let mut transfer = self.begin(guard, ingest, &job, Reuse::Nothing { wrong: first.digest })?;
        let hashed = transfer.run()?;
        let assembler = transfer.shared.assembler();
        let differences = match assembler.differences() {
            Some((_first, differences)) => differences,
            None => Differences::between(&first.head, &head_of(assembler)?, 0),
        };
        let senders = transfer.shared.senders();
        let second = Copy { digest: hashed.file.digest, senders: &senders };
        let copies = [Copy { digest: first.digest, senders: &first.senders }, second];
        let copies = TwoCopies::new(expected, copies, &differences).with_tensors_of(assembler.plan());
        let corrected = corrected(copies, job.file)?;
        let received = transfer.finish(ingest, hashed)?;
        let downloaded_bytes = received.downloaded_bytes.saturating_add(first.downloaded_bytes);
        Ok(Received { downloaded_bytes, corrected: Some(corrected), ..received })
    }
}

#[derive(Debug)]
pub(crate) struct SmallFile {
    pub(crate) bytes: Vec<u8>,
    pub(crate) digest: Digest,
    pub(crate) corrected: Option<CorrectedFile>,
}

impl Job<'_> {
    /// Downloads a small file into memory, a second time if its digest is wrong.
    pub(crate) fn receive_small(&self) -> Result<SmallFile, TransferError> {
        let (bytes, sender) = self.read_whole()?;
        let digest = Digest::of(&bytes);
        if let Some(expected) = self.file.git_id().filter(|expected| *expected != GitId::of(&bytes)) {
            drop(bytes);
            return self.receive_again(expected, &sender);
        }
        let Some(expected) = self.file.digest().filter(|expected| *expected != digest) else {
            return Ok(SmallFile { bytes, digest, corrected: None });
        };
        note_wrong(self, digest, expected);
        let elsewhere = OtherSenders::excluding(self, [&*sender]);
        let (second, second_sender) = elsewhere.job(self).read_whole()?;
        let whole = 0..self.file.size();
        let [mut first_senders, mut second_senders] = [Senders::default(), Senders::default()];
        first_senders.note(&whole, &sender);
        second_senders.note(&whole, &second_sender);
        let second_digest = Digest::of(&second);
        let copies = [
            Copy { digest, senders: &first_senders },
            Copy { digest: second_digest, senders: &second_senders },
        ];
        let copies = TwoCopies::new(expected, copies, &Differences::between(&bytes, &second, 0));
        let corrected = corrected(copies, self.file)?;
        Ok(SmallFile { bytes: second, digest: second_digest, corrected: Some(corrected) })
    }
}

impl Job<'_> {
    /// Downloads a file of git whose first download was wrong. Which of the two is right, git's name alone says.
    fn receive_again(&self, expected: GitId, sender: &Sender) -> Result<SmallFile, TransferError> {
        self.registry.note_wrong_file();
        let (bytes, _sender) = OtherSenders::excluding(self, [sender]).job(self).read_whole()?;
        let found = GitId::of(&bytes);
        match found == expected {
            true => Ok(SmallFile { digest: Digest::of(&bytes), bytes, corrected: None }),
            false => Err(TransferError::GitId { expected, found }),
        }
    }
}

fn note_wrong(job: &Job<'_>, found: Digest, expected: Digest) {
    job.registry.note_wrong_file();
    let label = job.file.label();
    tracing::info!(
        "{label}: wrong digest: expected {expected}, found {found}; it is downloaded again and compared"
    );
}

fn corrected(copies: TwoCopies, file: &RemoteFile) -> Result<CorrectedFile, TransferError> {
    match copies.is_corrected() {
        true => Ok(copies.into_corrected(file)),
        false => Err(TransferError::Digest(Box::new(copies))),
    }
}
