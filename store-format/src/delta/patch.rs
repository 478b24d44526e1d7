//! Patches: a header as parts of another one and new bytes.
//!
//! Headers of similar models differ in a few places, between which megabytes of vocabulary are equal. A patch is a list of
//! steps: a byte 0, a length and that many new bytes, or a byte 1, an offset in the other header and a length. Numbers have
//! eight bytes, the lowest first.

use std::collections::HashMap;

/// The longest header: the largest vocabularies have 20 MB.
pub const MAX_BYTES: u64 = 32 << 20;

const NEW: u8 = 0;
const COPY: u8 = 1;
/// Equal parts are found if they have this many bytes at a multiple of it.
const BLOCK: usize = 16;
/// A step that copies costs 17 bytes, and splits one with new bytes in two.
const LEAST_COPY: usize = 32;

/// Why a patch cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PatchError {
    #[error("header patch: ends within a step, or has one of an unknown kind")]
    Step,
    #[error("header patch: copies beyond the end of the other header of {base} bytes")]
    Outside { base: usize },
    #[error("header patch: wrong length of the result: expected {expected} bytes, found {found} or more")]
    Length { expected: u64, found: u64 },
}

/// The patch that makes `target` from `base`.
///
/// ```
/// use blobd_store_format::delta::patch::{apply, make};
///
/// let base: Vec<u8> = (0..200).collect();
/// let target = [&base[..90], b"new", &base[100..]].concat();
/// let patch = make(&base, &target);
/// assert!(patch.len() < 80);
/// assert_eq!(apply(&base, &patch, target.len() as u64)?, target);
/// # Ok::<(), blobd_store_format::delta::patch::PatchError>(())
/// ```
pub fn make(base: &[u8], target: &[u8]) -> Vec<u8> {
    let mut places: HashMap<[u8; BLOCK], usize> = HashMap::new();
    let (blocks, _) = base.as_chunks::<BLOCK>();
    for (number, block) in blocks.iter().enumerate() {
        places.entry(*block).or_insert(number.saturating_mul(BLOCK));
    }
    let (mut patch, mut position, mut new) = (Vec::new(), 0_usize, 0_usize);
    // Where the other header goes on after the last copy.
    let mut following = 0_usize;
    while let Some(block) = target.get(position..).and_then(<[u8]>::first_chunk::<BLOCK>) {
        // After a few different bytes, the same distance is the most likely.
        let likely = following.saturating_add(position.saturating_sub(new));
        let is_likely = base.get(likely..).is_some_and(|rest| rest.starts_with(block));
        let place = if is_likely { Some(likely) } else { places.get(block).copied() };
        let equal = place.map_or(0, |place| equal_bytes(base, place, target, position));
        let Some(place) = place.filter(|_| equal >= LEAST_COPY) else {
            position = position.saturating_add(1);
            continue;
        };
        push_new(&mut patch, target.get(new..position).unwrap_or_default());
        push_copy(&mut patch, place, equal);
        position = position.saturating_add(equal);
        (new, following) = (position, place.saturating_add(equal));
    }
    push_new(&mut patch, target.get(new..).unwrap_or_default());
    patch
}

fn equal_bytes(base: &[u8], place: usize, target: &[u8], position: usize) -> usize {
    let base = base.get(place..).unwrap_or_default();
    let target = target.get(position..).unwrap_or_default();
    base.iter().zip(target).take_while(|(a, b)| a == b).count()
}

fn push_new(patch: &mut Vec<u8>, bytes: &[u8]) {
    if !bytes.is_empty() {
        patch.push(NEW);
        patch.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        patch.extend_from_slice(bytes);
    }
}

fn push_copy(patch: &mut Vec<u8>, place: usize, length: usize) {
    patch.push(COPY);
    patch.extend_from_slice(&(place as u64).to_le_bytes());
    patch.extend_from_slice(&(length as u64).to_le_bytes());
}

/// The header of `size` bytes that a patch makes from `base`.
///
/// # Errors
/// [`PatchError`] for a patch that does not make that many bytes.
pub fn apply(base: &[u8], patch: &[u8], size: u64) -> Result<Vec<u8>, PatchError> {
    let (mut made, mut rest) = (Vec::new(), patch);
    while let Some(kind) = take::<1>(&mut rest) {
        let part = match kind {
            [NEW] => {
                let length = number(&mut rest)?;
                let (part, after) = rest.split_at_checked(length).ok_or(PatchError::Step)?;
                rest = after;
                part
            }
            [COPY] => {
                let (place, length) = (number(&mut rest)?, number(&mut rest)?);
                let part = base.get(place..).and_then(|from| from.get(..length));
                part.ok_or(PatchError::Outside { base: base.len() })?
            }
            _ => return Err(PatchError::Step),
        };
        let found = (made.len() as u64).saturating_add(part.len() as u64);
        if found > size {
            return Err(PatchError::Length { expected: size, found });
        }
        made.extend_from_slice(part);
    }
    match made.len() as u64 {
        found if found == size => Ok(made),
        found => Err(PatchError::Length { expected: size, found }),
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*bytes)
}

fn number(rest: &mut &[u8]) -> Result<usize, PatchError> {
    let bytes = take::<8>(rest).ok_or(PatchError::Step)?;
    usize::try_from(u64::from_le_bytes(bytes)).map_err(|_too_long| PatchError::Step)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_target_is_made_from_any_base(
            base in prop::collection::vec(0..4_u8, 0..300),
            cuts in prop::collection::vec((0..300_usize, 0..300_usize, prop::collection::vec(any::<u8>(), 0..9)), 0..6),
        ) {
            let mut target = Vec::new();
            for (start, length, new) in cuts {
                target.extend(base.iter().skip(start).take(length));
                target.extend(new);
            }
            let patch = make(&base, &target);
            prop_assert_eq!(apply(&base, &patch, target.len() as u64), Ok(target));
        }

        #[test]
        fn any_patch_is_refused_or_makes_the_announced_length(
            base in prop::collection::vec(any::<u8>(), 0..40),
            patch in prop::collection::vec(0..3_u8, 0..80),
            size in 0..60_u64,
        ) {
            if let Ok(made) = apply(&base, &patch, size) {
                prop_assert_eq!(made.len() as u64, size);
            }
        }
    }

    #[test]
    fn patches_of_headers_are_short() {
        let base: Vec<u8> =
            (0..100_000_u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        let mut target = base.clone();
        for place in (0..20).map(|number| 200_000 + number * 60) {
            target[place] ^= 1;
        }
        target.splice(10..10, *b"inserted");
        let patch = make(&base, &target);
        assert!(patch.len() < 1_500, "{}", patch.len());
        assert_eq!(apply(&base, &patch, target.len() as u64).unwrap(), target);
        assert_eq!(apply(&base, &[COPY], 1), Err(PatchError::Step));
        assert_eq!(apply(b"", &patch, 1 << 20).unwrap_err(), PatchError::Outside { base: 0 });
    }
}
