//! Sessions on upgraded connections. The connection is the lease: the lease ends when the connection
//! closes.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod connection;
mod import;
mod open;

pub(crate) use connection::FrameStream;
pub(crate) use import::serve_import;
pub(crate) use open::serve_open;
