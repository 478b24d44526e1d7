//! Inventories: which files and tensors a store has, so that another machine can leave them out of what it sends.
//!
//! The file has a line that says what it is, the digests in ascending order without duplicates, 32 bytes each, and the SHA-256
//! of all bytes before. `docs/OPERATIONS.md` specifies it.

use std::collections::BTreeSet;

use crate::digest::Digest;

/// The digests of all files and tensors of a store.
///
/// ```
/// use blobd_store_format::digest::Digest;
/// use blobd_store_format::inventory::Inventory;
///
/// let inventory = Inventory::new([Digest::of(b"a"), Digest::of(b"b")]);
/// let bytes = inventory.to_bytes();
/// assert_eq!(bytes.len(), Inventory::FIRST_LINE.len() + 3 * 32);
/// let read = Inventory::parse(&bytes)?;
/// assert!(read.has(Digest::of(b"a")) && !read.has(Digest::of(b"c")));
/// # Ok::<(), blobd_store_format::inventory::InventoryError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Ascending, without duplicates.
    digests: Vec<Digest>,
}

impl Inventory {
    /// What the file begins with.
    pub const FIRST_LINE: &[u8] = b"blobd inventory 1\n";
    /// The longest inventory: four million files and tensors, those of thousands of models.
    pub const MAX_BYTES: u64 = 128 << 20;

    pub fn new(digests: impl IntoIterator<Item = Digest>) -> Self {
        let digests: BTreeSet<Digest> = digests.into_iter().collect();
        Self { digests: digests.into_iter().collect() }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Self::FIRST_LINE.to_vec();
        self.digests.iter().for_each(|digest| bytes.extend_from_slice(digest.as_bytes()));
        let sum = Digest::of(&bytes);
        bytes.extend_from_slice(sum.as_bytes());
        bytes
    }

    /// # Errors
    /// [`InventoryError`] for anything but the bytes of an inventory.
    pub fn parse(bytes: &[u8]) -> Result<Self, InventoryError> {
        if bytes.len() as u64 > Self::MAX_BYTES {
            return Err(InventoryError::TooLong { found: bytes.len() });
        }
        let rest = bytes.strip_prefix(Self::FIRST_LINE).ok_or(InventoryError::Kind)?;
        let (digests, []) = rest.as_chunks::<32>() else {
            return Err(InventoryError::Length { found: bytes.len() });
        };
        let Some((sum, digests)) = digests.split_last() else {
            return Err(InventoryError::Length { found: bytes.len() });
        };
        let summed = bytes.get(..bytes.len().saturating_sub(sum.len())).unwrap_or_default();
        let (expected, found) = (Digest::from_bytes(*sum), Digest::of(summed));
        if found != expected {
            return Err(InventoryError::Sum { expected, found });
        }
        let digests: Vec<Digest> = digests.iter().map(|bytes| Digest::from_bytes(*bytes)).collect();
        if digests.is_sorted_by(|a, b| a < b) { Ok(Self { digests }) } else { Err(InventoryError::Order) }
    }

    pub fn has(&self, digest: Digest) -> bool {
        self.digests.binary_search(&digest).is_ok()
    }

    /// The digests, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Digest> {
        self.digests.iter().copied()
    }

    pub const fn len(&self) -> usize {
        self.digests.len()
    }

    pub const fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }
}

/// Why bytes are not an inventory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InventoryError {
    #[error("inventory: too long: expected at most {} bytes, found {found}", Inventory::MAX_BYTES)]
    TooLong { found: usize },
    #[error("inventory: wrong first line: expected \"blobd inventory 1\"")]
    Kind,
    #[error("inventory: wrong length: expected a first line and digests of 32 bytes, found {found} bytes")]
    Length { found: usize },
    #[error("inventory: changed or incomplete: expected {expected}, found {found}")]
    Sum { expected: Digest, found: Digest },
    #[error("inventory: its digests are not in ascending order")]
    Order,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_or_cut_inventory_is_refused() {
        let bytes = Inventory::new((0..9_u8).map(|number| Digest::of(&[number]))).to_bytes();
        assert_eq!(Inventory::parse(&bytes).unwrap().len(), 9);
        for length in 0..bytes.len() {
            assert!(Inventory::parse(&bytes[..length]).is_err(), "{length}");
        }
        for place in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 1 << (place % 8);
            assert!(Inventory::parse(&changed).is_err(), "{place}");
        }
    }

    #[test]
    fn digests_out_of_order_are_refused() {
        let mut bytes = Inventory::FIRST_LINE.to_vec();
        bytes.extend_from_slice(&[[2; 32], [1; 32]].concat());
        bytes.extend_from_slice(Digest::of(&bytes).as_bytes());
        assert_eq!(Inventory::parse(&bytes), Err(InventoryError::Order));
        assert!(Inventory::parse(&Inventory::default().to_bytes()).unwrap().is_empty());
    }
}
