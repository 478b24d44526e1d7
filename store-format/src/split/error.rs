//! Why bytes are not those of the plan.

/// Why a file's bytes do not fit its plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// More bytes than the file was said to have.
    #[error("file: goes on after its {file_size} bytes")]
    TooLong {
        /// The file's size in the plan.
        file_size: u64,
    },
    /// Fewer bytes than the file was said to have.
    #[error("file: ends after {found} of its {file_size} bytes")]
    TooShort {
        /// How many bytes came.
        found: u64,
        /// The file's size in the plan.
        file_size: u64,
    },
}
