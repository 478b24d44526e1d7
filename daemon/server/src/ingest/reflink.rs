//! Imports a file that is stored whole as a reflink: the blob shares the blocks of the imported file, which takes almost
//! no space and no writing. Where that is not possible, the file is read and written.

use std::io;

use blobd_store::{Assembler, HashedFile, Ingest};

use super::{Content, IngestError};

impl Content<'_> {
    /// Has the assembler's file share the blocks of this one; false if this one has to be read.
    pub(super) fn reflink(&mut self, assembler: &Assembler) -> Result<bool, IngestError> {
        let mut failed = None;
        let shares = assembler.reflink(&mut |target| {
            self.source.reflink_to(target).map_err(|error| {
                let kind = error.kind();
                failed = Some(error);
                kind.into()
            })
        });
        match failed {
            // The store only repeats it.
            Some(error) => Err(IngestError::Source(error)),
            None => Ok(shares?),
        }
    }

    /// Hashes the assembler's file after [`Self::reflink`]. The imported file may have changed by now.
    pub(super) fn hash_reflink(
        &mut self,
        assembler: &Assembler,
        ingest: &mut Ingest,
    ) -> Result<HashedFile, IngestError> {
        let mut unwanted = None;
        let mut wait = |read: u64| {
            self.report(&(0..read));
            unwanted = self.source.check_wanted().err();
            unwanted.is_none().then_some(self.size)
        };
        let hashed = assembler.hash_as_it_arrives(&mut wait, ingest)?;
        self.report(&(0..self.size));
        let stopped = || unwanted.unwrap_or_else(|| io::ErrorKind::Interrupted.into());
        hashed.ok_or_else(|| IngestError::Source(stopped()))
    }
}
