//! Splitting a model file into one blob per tensor or expert group, one for the header, and fillers.
//!
//! A [`SplitPlan`] is made from a [`FileLayout`](crate::file_layout::FileLayout). Its segments cover the
//! file exactly once, in order, so the file can be rebuilt bit for bit. [`Splitter`] maps the file's bytes
//! to their targets; it neither hashes nor writes.

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
