//! Where each blob lies in the file.

use super::plan::{Segment, SplitPlan, Target};

/// A plan's segments by blob. Who looked at all segments for each blob would look at seventeen thousand
/// million of a file with as many tensors as there may be.
#[derive(Clone, Debug)]
pub struct BlobPlaces {
    /// The places of segments in the plan, those of one blob together and in the order of the file.
    segments: Vec<usize>,
    /// Where those of each blob begin, and where the last one's end.
    starts: Vec<usize>,
}

impl BlobPlaces {
    /// Sorts a plan's segments.
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

    /// The segments of a blob, in the order of the file. The plan is the one that this was made of.
    pub fn segments<'p>(&self, plan: &'p SplitPlan, blob: usize) -> impl Iterator<Item = &'p Segment> {
        let start = self.starts.get(blob).copied().unwrap_or_default();
        let end = self.starts.get(blob.saturating_add(1)).copied().unwrap_or_default();
        let places = self.segments.get(start..end.max(start)).unwrap_or_default();
        places.iter().filter_map(|place| plan.segments().get(*place))
    }
}
