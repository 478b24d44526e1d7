//! How a model file is taken apart: one blob per tensor, one per expert group, one for the
//! header, and what lies between them.
//!
//! A [`SplitPlan`] is made from a [`FileLayout`](crate::file_layout::FileLayout) alone, whatever the
//! file's format. Its segments cover the file exactly once, in order, without gap or overlap, so putting them together again gives
//! the file, bit for bit, whatever its padding, order or tail. [`Splitter`] walks the plan over
//! the file's bytes; it hands out slices, and neither hashes nor writes.

mod error;
mod places;
mod plan;
mod splitter;
#[cfg(test)]
mod tests;

pub use error::SplitError;
pub use places::BlobPlaces;
pub use plan::{BlobContent, PlannedBlob, PlannedTensor, Segment, SplitPlan, Target};
pub use splitter::{Part, Splitter};
