//! placeholder
pub mod protocol;
