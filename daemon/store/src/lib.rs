//! A store of model weights: a directory of digest-named blobs, with the recipes and manifests that make models of
//! them.
//!
//! A [`Store`] has four parts: its [`Content`], the [`Ledger`] of disk space, the [`Names`] of models, and the
//! [`Liveness`] of all data. A part uses only those before it in this order.
//!
//! A file under its final name is complete, durable and has the digest in its name. A tag points only at a complete
//! model ([`Ingest::commit`]). Leased digests are not collected ([`leases`], [`gc`]). Damaged blobs are moved to
//! quarantine and never used ([`scrub`]). `docs/STORE-FORMAT.md` describes the files.
//!
//! ```
//! use std::sync::Arc;
//!
//! use blobd_store::{Ingest, Store};
//! use blobd_store_format::descriptor::{Descriptor, MediaType};
//! use blobd_store_format::manifest::Manifest;
//!
//! let folder = tempfile::tempdir()?;
//! let store = Arc::new(Store::open(folder.path().join("store"))?);
//! let mut ingest = Ingest::begin(&store, store.liveness().leases().grant("an example"))?;
//! let mut stage = |bytes: &[u8], media_type| {
//!     let digest = ingest.add_bytes(bytes)?;
//!     Ok::<_, blobd_store::StoreError>(Descriptor {
//!         media_type: MediaType::new(media_type),
//!         digest,
//!         size: bytes.len() as u64,
//!     })
//! };
//! let config = stage(b"{}", MediaType::DOCKER_CONFIG)?;
//! let weights = stage(b"the weights", MediaType::OLLAMA_MODEL)?;
//! let digest = weights.digest;
//! ingest.commit(&"example".parse()?, &Manifest::compose(config, vec![weights])?, None)?;
//!
//! let blob = store.content().open_blob(digest, 0)?;
//! assert_eq!(std::io::read_to_string(blob)?, "the weights");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![allow(missing_docs, reason = "an item has a comment where its name does not say it all")]
// Files of the store are opened only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use tracing_mutex::stdsync::{Mutex, MutexGuard};

// The parts of a store, each of which uses those before it.
mod content;
mod ledger;
mod liveness;
mod names;

// Transactions and verification, which use all parts.
mod assembler;
mod ingest;
pub mod scrub;
mod seal;
mod staging;
mod store_listing;

// What the parts use.
mod bounded_read;
pub mod disk;
mod error;
mod filesystem;
pub mod index;
pub mod leases;
mod lock_file;
mod node;
mod owner;
mod rate;
mod root;
mod space;
mod store_dir;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use assembler::{
    Assembler, BlobSink, BlobWriter, CHUNKS_IN_USE, Difference, Differences, HashedFile, PartialFile,
    RangeSource, SharedBlobs,
};
pub use bounded_read::{CHUNK_BYTES, fill, read_uninterrupted};
pub use content::downloads::{BytesFrom, DownloadAbout, DownloadSummary, PartialDownload};
pub use content::lower::{HeldLowerStores, LowerStatus};
pub use content::name_tree::VisitedFiles;
pub use content::other_files::OtherFiles;
pub use content::quarantine::QuarantinedBlob;
pub use content::reader::FileReader;
pub use content::recipes::OpenRecipe;
pub use content::stored_files::{NamedFile, StoredFile};
pub use content::surroundings::{ForeignGroup, ForeignOwner, Inodes, Mount, Ownership, WrongGroups};
pub use content::{Content, StoreEvents};
pub use error::{DisplayPath, StoreError};
pub use filesystem::{Durability, FileSystem};
pub use ingest::{BlobRange, Committed, Ingest, Joined, NewName};
pub use ledger::Ledger;
pub use ledger::charge_limit::{Account, ChargeLimit, Members, Payer, Pool};
pub use liveness::charges::UserCharge;
pub use liveness::{EvictionObserver, Liveness, MakeSpace, gc};
pub use lock_file::{CommandState, LockHolder};
pub use names::changes::RecordedChange;
pub use names::history::NameHistory;
pub use names::name_rule::{NameRule, NameUser};
pub use names::origins::{FileVersion, RecordedFacts};
pub use names::pins::Pinner;
pub use names::records::{Actor, ChangeId, HistoryEntry, HistoryRow, NameOrigin, Verb};
pub use names::summaries::{ListingSize, ManifestSummary, TagSummary};
pub use names::tags::Tags;
pub use names::trash::{Displaced, TrashedModel};
pub use names::{Model, Names};
pub use owner::{RUN_OUTSIDE, StoreOwner};
pub use rate::RateLimiter;
pub use root::FileStatus;
pub use seal::StagedBlob;
pub use space::{AvailableSpace, Eviction, SpacePolicy, SpaceStatus};
pub use staging::Staging;
pub use store_dir::FORMAT;
pub use store_listing::StoreListing;
pub use sys::{FileIdentity, give_back_memory};

use disk::{Disk, KernelDisk};

/// Options for [`Store::open_with`].
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub durability: Durability,
    pub space: SpacePolicy,
    pub disk: Arc<dyn Disk>,
    /// Read-only stores, searched after this one in this order.
    pub lower: Vec<PathBuf>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            space: SpacePolicy::default(),
            disk: Arc::new(KernelDisk),
            lower: Vec::new(),
        }
    }
}

/// An open store. One process has it open at a time.
#[derive(Debug)]
pub struct Store {
    pub(crate) content: Arc<Content>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) names: Arc<Names>,
    pub(crate) liveness: Arc<Liveness>,
}

impl Store {
    /// Opens the store in `root` with default options. See [`Self::open_with`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store in `root`, or creates one there if the directory is empty or absent. Removes abandoned
    /// transactions from `staging/`.
    ///
    /// # Errors
    /// [`StoreError::Locked`], [`StoreError::NewerFormat`] (nothing is changed then), [`StoreError::NotAStore`],
    /// [`StoreError::Io`].
    pub fn open_with(root: impl Into<PathBuf>, options: StoreOptions) -> Result<Self, StoreError> {
        let content = Arc::new(Content::open(&root.into(), options)?);
        content.announce(None, None);
        content.sweep_staging();
        content.inspect_lower_stores();
        let ledger = Arc::new(Ledger::new(Arc::clone(&content)));
        let names = Arc::new(Names::new(Arc::clone(&content), Arc::clone(&ledger)));
        let liveness = Liveness::new(Arc::clone(&content), Arc::clone(&ledger), Arc::clone(&names));
        Ok(Self { content, ledger, names, liveness: Arc::new(liveness) })
    }

    /// Blobs and recipes, quarantine and lower stores.
    pub const fn content(&self) -> &Arc<Content> {
        &self.content
    }

    /// Disk space, reservations, and what is charged to users.
    pub const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Tags with their histories, pins and origins, and the trash.
    pub const fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// Leases, what is alive, and collections.
    pub const fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// Compares the catalog with the disk, corrects it, and has the database rewritten. Reads every recipe.
    pub fn reindex(&self) -> Result<index::Differences, StoreError> {
        let differences = self.content.index().reindex()?;
        // Names may have been changed by other programs too.
        self.ledger.note_charges_changed();
        Ok(differences)
    }

    /// For tests that inspect the store's files directly.
    #[cfg(test)]
    pub(crate) fn path(&self, relative: impl AsRef<std::path::Path>) -> PathBuf {
        self.content.root.full(relative).path().to_path_buf()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave the data behind these locks inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
