//! Pins that people set: models that eviction and removal leave alone. Each is an empty file under
//! `pins/`, at the place that its tag has under `manifests/`.

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::{Store, StoreError};

impl Store {
    /// Whether a model is pinned; if that cannot be told, it is. The reference is a stored tag's.
    #[must_use]
    pub fn is_pinned(&self, reference: &Reference) -> bool {
        self.path(layout::pin(reference)).try_exists().unwrap_or(true)
    }

    /// Pins a model, durably.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn pin(&self, reference: &Reference) -> Result<(), StoreError> {
        let relative = layout::pin(reference);
        let path = self.path(&relative);
        let (Some(above), Some(directory)) = (relative.parent(), path.parent()) else { return Ok(()) };
        self.disk().create_dir_all(self.root(), above)?;
        let file = self.disk().create_file(&path, 0o644)?;
        self.disk().sync_file(&path, &file)?;
        self.disk().sync_dir(directory)
    }

    /// Lets a model go again, durably; says whether it was pinned.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn unpin(&self, reference: &Reference) -> Result<bool, StoreError> {
        let path = self.path(layout::pin(reference));
        let was_pinned = self.disk().remove_file(&path)?.is_some();
        // Also if it was gone: whoever removed it may have died before it came to a sync.
        if path.parent().is_some_and(std::path::Path::is_dir) {
            self.sync_and_prune(&path)?;
        }
        Ok(was_pinned)
    }
}
