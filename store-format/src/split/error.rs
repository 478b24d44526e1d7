//! Errors of splitting.

/// Why a file's bytes do not fit its plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// More bytes than planned.
    #[error("file: continues after its {file_size} bytes")]
    TooLong {
        /// The file's size in the plan.
        file_size: u64,
    },
    /// Fewer bytes than planned.
    #[error("file: ends after {found} of its {file_size} bytes")]
    TooShort {
        /// The number of bytes received.
        found: u64,
        /// The file's size in the plan.
        file_size: u64,
    },
}
