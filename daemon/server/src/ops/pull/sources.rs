//! Where the bytes of a pulled model come from.

/// Where the bytes of a model's files come from. The numbers add up to the size of the files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sources {
    pub(super) downloaded_bytes: u64,
    pub(super) reused_bytes: u64,
    pub(super) already_stored_bytes: u64,
    /// Those reused bytes that a tensor index named.
    pub(super) indexed_bytes: u64,
}

impl Sources {
    /// Adds a file of which `earlier_bytes` were stored before and `received_bytes` came over the network, including samples
    /// and repeated requests. The rest was reused.
    pub(super) fn add(&mut self, size: u64, earlier_bytes: u64, received_bytes: u64) {
        let earlier = earlier_bytes.min(size);
        let downloaded = received_bytes.min(size.saturating_sub(earlier));
        let reused = size.saturating_sub(earlier).saturating_sub(downloaded);
        self.already_stored_bytes = self.already_stored_bytes.saturating_add(earlier);
        self.downloaded_bytes = self.downloaded_bytes.saturating_add(downloaded);
        self.reused_bytes = self.reused_bytes.saturating_add(reused);
    }

    pub(super) const fn sum(self) -> u64 {
        self.downloaded_bytes.saturating_add(self.reused_bytes).saturating_add(self.already_stored_bytes)
    }
}
