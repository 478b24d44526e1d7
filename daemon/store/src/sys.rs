//! Kernel calls that no safe crate wraps; the crate's only `unsafe`.

mod file_identity;
mod lease;
mod memory;
mod writeback;

pub use file_identity::FileIdentity;
pub(crate) use lease::is_in_use;
pub use memory::give_back_memory;
pub(crate) use writeback::start_writeback;
