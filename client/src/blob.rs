//! The blobs of an open model: descriptors that are mapped on demand.

use std::io::{self, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::map::{BlobMap, BlobSlice};

#[derive(Debug)]
pub(crate) enum Blob {
    Open {
        fd: OwnedFd,
        map: Mutex<MapSlot>,
    },
    /// Only the map: the process may not open as many files as the model has blobs.
    Mapped(Arc<BlobMap>),
}

#[derive(Debug, Default)]
pub(crate) struct MapSlot {
    /// Made ahead of use; taken by the first user.
    ready: Option<Arc<BlobMap>>,
    /// In use; unmapped when the last user drops it.
    in_use: Weak<BlobMap>,
}

#[derive(Debug)]
pub(crate) enum BlobError {
    Short { found: u64 },
    Io(io::Error),
}

impl Blob {
    pub(crate) fn open(fd: OwnedFd) -> Self {
        Self::Open { fd, map: Mutex::default() }
    }

    /// Maps the blob ahead of use, while the daemon opens the next files. A failure is reported when the
    /// map is used.
    pub(crate) fn prepare(&self) {
        if let Self::Open { fd, map } = self {
            map.lock().unwrap_or_else(PoisonError::into_inner).ready =
                BlobMap::new(fd.as_fd()).ok().map(Arc::new);
        }
    }

    pub(crate) fn mapped(fd: &OwnedFd) -> io::Result<Self> {
        BlobMap::new(fd.as_fd()).map(|map| Self::Mapped(Arc::new(map)))
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Open { fd, .. } => Some(fd.as_fd()),
            Self::Mapped(_) => None,
        }
    }

    /// `length` bytes from `offset` on, mapped; all ranges of a blob share one map.
    pub(crate) fn slice(&self, offset: u64, length: u64) -> Result<BlobSlice, BlobError> {
        let map = self.map().map_err(BlobError::Io)?;
        let found = map.length() as u64;
        BlobSlice::new(map, offset, length).ok_or(BlobError::Short { found })
    }

    pub(crate) fn whole(&self) -> io::Result<BlobSlice> {
        let map = self.map()?;
        let length = map.length() as u64;
        Ok(BlobSlice::new(map, 0, length).unwrap_or_default())
    }

    /// Writes `length` bytes from `offset` on to `out`. Reads into `buffer` where there is a
    /// descriptor: a large sequential read is cheaper than a fault per page.
    pub(crate) fn copy_to(
        &self,
        mut offset: u64,
        length: u64,
        buffer: &mut [u8],
        out: &mut impl Write,
    ) -> Result<(), CopyError> {
        if self.fd().is_none() {
            return out.write_all(&self.slice(offset, length)?).map_err(CopyError::Write);
        }
        let mut left = length;
        while left > 0 {
            let portion = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let part = buffer.get_mut(..portion).unwrap_or_default();
            self.read_at(offset, part)?;
            out.write_all(part).map_err(CopyError::Write)?;
            offset += portion as u64;
            left -= portion as u64;
        }
        Ok(())
    }

    pub(crate) fn read_at(&self, mut offset: u64, mut buffer: &mut [u8]) -> Result<(), BlobError> {
        let Self::Open { fd, .. } = self else {
            buffer.copy_from_slice(&self.slice(offset, buffer.len() as u64)?);
            return Ok(());
        };
        while !buffer.is_empty() {
            let count = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut *buffer, offset));
            let count = count.map_err(|error| BlobError::Io(error.into()))?;
            if count == 0 {
                return Err(BlobError::Short { found: offset });
            }
            buffer = buffer.get_mut(count..).unwrap_or_default();
            offset += count as u64;
        }
        Ok(())
    }

    fn map(&self) -> io::Result<Arc<BlobMap>> {
        match self {
            Self::Mapped(map) => Ok(Arc::clone(map)),
            Self::Open { fd, map } => {
                let mut slot = map.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(map) = slot.in_use.upgrade() {
                    return Ok(map);
                }
                let map = match slot.ready.take() {
                    Some(map) => map,
                    None => Arc::new(BlobMap::new(fd.as_fd())?),
                };
                slot.in_use = Arc::downgrade(&map);
                Ok(map)
            }
        }
    }
}

#[derive(Debug)]
pub(crate) enum CopyError {
    Read(BlobError),
    Write(io::Error),
}

impl From<BlobError> for CopyError {
    fn from(error: BlobError) -> Self {
        Self::Read(error)
    }
}
