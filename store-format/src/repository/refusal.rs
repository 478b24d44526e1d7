//! Why no files of a repository were chosen.

/// Why no files were chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no file at this path.
    #[error("no such file")]
    NoSuchFile,
    /// No model has this tag.
    #[error("no such tag")]
    NoSuchTag {
        /// The tags of the models that there are.
        tags: Vec<String>,
    },
    /// The repository has no model in a GGUF file.
    #[error("no GGUF file with a model")]
    NoModel {
        /// The paths of the other GGUF files: projectors, drafts, importance matrices.
        others: Vec<String>,
    },
    /// The tag means several models.
    #[error("several models")]
    Ambiguous {
        /// The path of each; of shards, the first that is there.
        candidates: Vec<String>,
    },
    /// Shards of the model are missing.
    #[error("shards are missing")]
    MissingShards {
        /// How many shards the model has.
        count: usize,
        /// The numbers, from 1, and paths of those that are missing.
        missing: Vec<(usize, String)>,
    },
    /// There is no projector with this name.
    #[error("no such projector")]
    NoProjector {
        /// The paths of the projectors that there are.
        projectors: Vec<String>,
    },
}
