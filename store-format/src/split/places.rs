//! The positions of each blob in the file.

use super::plan::{Segment, SplitPlan, Target};

/// An index of a plan's segments by blob. Without it, finding the segments of all blobs is quadratic.
#[derive(Clone, Debug)]
pub struct BlobPlaces {
    /// Indices of segments in the plan, grouped by blob, in file order.
    segments: Vec<usize>,
    /// The start of each blob's group, and the end of the last.
    starts: Vec<usize>,
}

impl BlobPlaces {
    /// Builds the index.
    #[must_use]
    pub fn of(plan: &SplitPlan) -> Self {
        let own = plan.segments().iter().enumerate().filter_map(|(place, segment)| match segment.target {
            Target::Blob { blob, .. } => Some((blob, place)),
            Target::Literal { .. } => None,
        });
        let mut own: Vec<(usize, usize)> = own.collect();
        own.sort_unstable();
        let starts = (0..=plan.blobs().len()).map(|blob| own.partition_point(|(other, _)| *other < blob));
        Self { starts: starts.collect(), segments: own.into_iter().map(|(_, place)| place).collect() }
    }

    /// The segments of a blob, in file order. `plan` must be the plan that this was made from.
    pub fn segments<'p>(&self, plan: &'p SplitPlan, blob: usize) -> impl Iterator<Item = &'p Segment> {
        let start = self.starts.get(blob).copied().unwrap_or_default();
        let end = self.starts.get(blob.saturating_add(1)).copied().unwrap_or_default();
        let places = self.segments.get(start..end.max(start)).unwrap_or_default();
        places.iter().filter_map(|place| plan.segments().get(*place))
    }
}
