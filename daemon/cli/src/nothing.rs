//! What is printed in place of an empty table.

/// The store is empty.
pub(super) const NO_MODELS: &str = "no models; `blobd pull llama3:8b` or `blobd import FILE.gguf` adds one\n";
/// The store has models, but only some were asked for.
pub(super) const NO_MATCH: &str = "no model matches\n";
