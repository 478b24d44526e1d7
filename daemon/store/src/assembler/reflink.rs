//! A file that is stored whole and shares the blocks of its source (a reflink), instead of being written.
//!
//! The file system copies a shared block before either file changes it. So what is hashed is read from the new file, and
//! a source that changes meanwhile cannot make a blob whose digest is wrong.

use std::io;
use std::os::fd::BorrowedFd;

use super::Assembler;
use crate::{StoreError, lock};

impl Assembler {
    /// Has `reflink` make the file of the only blob share all blocks of its source; returns whether it does. If so, all
    /// bytes have arrived; otherwise they have to be written. To be called before anything is written.
    pub fn reflink(
        &self,
        reflink: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<bool>,
    ) -> Result<bool, StoreError> {
        const ONLY: usize = 0;
        let (path, size) = (self.staging.next_path(), self.plan.file_size());
        let Some(file) = self.staging.disk().create_reflink(&path, size, reflink)? else { return Ok(false) };
        // Counts as if the blocks were its own, as they are when the source is changed or removed.
        let reservation = self.staging.reserve_space(size, || Ok(()))?;
        self.staging.written().add(&path, file)?;
        let mut state = lock(&self.state);
        state.reservations.insert(ONLY, reservation);
        state.files.insert(ONLY, path);
        state.arrived.insert(0..size);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use blobd_store_format::digest::Digest;
    use blobd_store_format::split::SplitPlan;

    use super::*;
    use crate::assembler::tests::{Slice, staged};
    use crate::testing::{begin, new_store};

    const FILE: &[u8] = &[7; 10_000];

    /// Writes the bytes instead of making a reflink, because few file systems support reflinks.
    fn fill(target: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<bool> {
        File::from(target.try_clone_to_owned()?).write_all_at(bytes, 0)?;
        Ok(true)
    }

    #[test]
    fn file_that_shares_blocks_is_hashed_where_it_is_and_counts_in_full() {
        let (_folder, store) = new_store();
        let (mut ingest, before) = (begin(&store), store.ledger.used_bytes());
        let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(FILE.len() as u64));
        assert!(assembler.reflink(&mut |target| fill(target, FILE)).unwrap());
        let size_on_disk = store.ledger.size_on_disk(FILE.len() as u64);
        assert_eq!((assembler.missing(), store.ledger.used_bytes() - before), (Vec::new(), size_on_disk));
        let hashed = assembler.hash_as_it_arrives(&mut |_| Some(FILE.len() as u64), &mut ingest).unwrap();
        assert_eq!(hashed.map(|hashed| hashed.digest), Some(Digest::of(FILE)));
        drop(assembler);
        ingest.commit_blobs().unwrap();
        assert_eq!(store.content.blob_size(Digest::of(FILE)).unwrap(), Some(FILE.len() as u64));
        assert_eq!(store.ledger.used_bytes() - before, size_on_disk);
    }

    #[test]
    fn file_that_cannot_share_blocks_or_has_another_length_is_written() {
        let refuse: fn(BorrowedFd<'_>) -> io::Result<bool> = |_| Ok(false);
        for reflink in
            [refuse, |target| fill(target, &FILE[1..]), |target| fill(target, &[FILE, b"x"].concat())]
        {
            let (_folder, store) = new_store();
            let mut ingest = begin(&store);
            let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(FILE.len() as u64));
            assert!(!assembler.reflink(&mut |target| reflink(target)).unwrap());
            assert_eq!((staged(&store).len(), assembler.arrived_bytes()), (0, 0));
            let hashed = assembler.store_in_order(&mut Slice::new(FILE), &mut ingest).unwrap();
            assert_eq!(hashed.digest, Digest::of(FILE));
        }
    }

    #[test]
    fn failure_of_the_source_leaves_nothing() {
        let (_folder, store) = new_store();
        let ingest = begin(&store);
        let assembler = Assembler::new(ingest.staging(), SplitPlan::whole(FILE.len() as u64));
        let error = assembler.reflink(&mut |_| Err(io::ErrorKind::TimedOut.into())).unwrap_err();
        assert!(
            matches!(&error, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut),
            "{error}"
        );
        assert_eq!(staged(&store).len(), 0);
    }
}
