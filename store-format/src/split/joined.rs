//! The recipe of a stored file after parts of it have been joined with parts of other files.

use std::collections::BTreeMap;

use super::plan::{SplitPlan, Target};
use crate::digest::Digest;
use crate::recipe::{Piece, Recipe};

impl SplitPlan {
    /// The recipe by this plan of a file that is stored by another recipe, after the bytes of these groups have been stored in
    /// the blobs with these digests. `None` if the plan needs a blob that the file does not have.
    pub fn joined(self, stored: &Recipe, groups: &BTreeMap<usize, Digest>) -> Option<Recipe> {
        let pieces: BTreeMap<u64, &Piece> = stored.pieces().with_offsets().collect();
        let sizes = stored.blob_sizes();
        let group = |group: usize| groups.get(&group).copied();
        let mut blobs: Vec<Option<Digest>> =
            self.blobs().iter().map(|blob| blob.shared_group().and_then(group)).collect();
        let mut literals = Vec::new();
        for segment in self.segments() {
            let planned = match segment.target {
                Target::Blob { blob, .. } => self.blobs().get(blob),
                Target::Literal { .. } => None,
            };
            if planned.is_some_and(|planned| planned.shared_group().is_some()) {
                continue;
            }
            match (segment.target, *pieces.get(&segment.offset_in_file)?) {
                (Target::Blob { blob, offset_in_blob }, Piece::Blob { blob: digest, offset, length }) => {
                    let is_it = (*offset, *length) == (offset_in_blob, segment.length)
                        && sizes.get(digest).copied() == planned.map(|planned| planned.size);
                    *blobs.get_mut(blob)? = Some(*digest).filter(|_| is_it);
                }
                (Target::Literal { .. }, Piece::Literal { literal }) => literals.push(literal.clone()),
                // The length is checked before allocating: a recipe can declare any number of zeros.
                (Target::Literal { .. }, Piece::Zeros { zeros }) if *zeros == segment.length => {
                    literals.push(vec![0; usize::try_from(*zeros).ok()?]);
                }
                _ => return None,
            }
        }
        let blobs: Vec<Digest> = blobs.into_iter().collect::<Option<_>>()?;
        self.recipe(stored.file(), &blobs, literals).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{GgmlType, GgufWriter, Header};
    use crate::split::SharedPart;

    const EXPERTS: [u32; 2] = [2, 1];

    /// The plan of a shard with two experts and another tensor; `parts` are the places of the experts in a group of four.
    fn plan(parts: &[SharedPart]) -> (SplitPlan, Digest) {
        let mut writer = GgufWriter::new();
        for expert in EXPERTS {
            writer.tensor(&format!("blk.0.ffn_up.{expert}.weight"), GgmlType::I8, &[64]).unwrap();
        }
        writer.tensor("norm", GgmlType::I8, &[40]).unwrap();
        let header = writer.header().unwrap();
        // Three bytes follow the last tensor.
        let size = header.len() as u64 + 2 * 64 + 40 + 3;
        let layout = Header::parse(&header).unwrap().file_layout(size).unwrap();
        (SplitPlan::sharing(layout, parts), Digest::of(&header))
    }

    fn parts() -> [SharedPart; 2] {
        let part = |tensor: usize, expert: u32| SharedPart {
            tensor,
            group: 7,
            blob_size: 256,
            offset_in_blob: u64::from(expert) * 64,
        };
        [part(0, EXPERTS[0]), part(1, EXPERTS[1])]
    }

    #[test]
    fn recipe_in_pieces_becomes_the_one_that_an_import_makes() {
        let (file, group, norm) = (Digest::of(b"file"), Digest::of(b"group"), Digest::of(b"norm"));
        let (apart, header) = plan(&[]);
        let blobs = [header, Digest::of(b"two"), Digest::of(b"one"), norm];
        let stored = apart.clone().recipe(file, &blobs, vec![vec![1, 2, 3]]).unwrap();
        let (shared, _) = plan(&parts());
        let expected = shared.clone().recipe(file, &[header, group, norm], vec![vec![1, 2, 3]]).unwrap();
        let groups = BTreeMap::from([(7, group)]);
        assert_eq!(shared.clone().joined(&stored, &groups), Some(expected.clone()));
        // As often as wanted.
        assert_eq!(shared.clone().joined(&expected, &groups), Some(expected.clone()));
        assert_eq!(shared.clone().joined(&stored, &BTreeMap::new()), None, "the group has no digest");
        assert_eq!(apart.clone().joined(&stored, &groups), Some(stored));
        // Its blob is the group's, not the tensor's.
        assert_eq!(apart.joined(&expected, &groups), None);
    }

    #[test]
    fn recipe_of_another_file_is_not_joined() {
        let (shared, header) = plan(&parts());
        let size = shared.file_size();
        let groups = BTreeMap::from([(7, Digest::of(b"group"))]);
        let whole = |length| vec![Piece::Blob { blob: header, offset: 0, length }];
        let other =
            |pieces| Recipe::new(Digest::of(b"file"), crate::tensor::TensorFormat::Gguf, pieces, Vec::new());
        assert_eq!(shared.clone().joined(&other(whole(9)).unwrap(), &groups), None);
        assert_eq!(shared.joined(&other(whole(size)).unwrap(), &groups), None);
    }
}
