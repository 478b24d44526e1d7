//! Compares the bytes of tensors whose digests cannot tell whether they differ.

use blobd_client::protocol::error::ErrorBody;
use blobd_model::diff::{Change, TensorPair};

use super::side::{Opened, Side};
use crate::connect::Connected;

/// Marks as shared what has the same bytes in different packed groups: if one expert of a group differs, the
/// digest of the whole group does.
pub(super) fn find_equal(
    connected: Option<&Connected>,
    a: &Side,
    b: &Side,
    pairs: &mut [TensorPair<'_>],
) -> Result<(), ErrorBody> {
    let packed = &a.packed_blobs() | &b.packed_blobs();
    let mut candidates: Vec<_> = pairs.iter_mut().filter(|pair| pair.may_be_equal(&packed)).collect();
    candidates.retain(|pair| a.is_unique(pair.name()) && b.is_unique(pair.name()));
    if candidates.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = candidates.iter().map(|pair| pair.name().to_owned()).collect();
    let (a, b) = (a.open(connected, names.clone())?, b.open(connected, names)?);
    for pair in candidates {
        if has_same_bytes(&a, &b, pair.name())? {
            pair.change = Change::Shared;
        }
    }
    Ok(())
}

fn has_same_bytes(a: &Opened<'_>, b: &Opened<'_>, name: &str) -> Result<bool, ErrorBody> {
    Ok(*a.bytes(name)? == *b.bytes(name)?)
}
