//! Sessions on upgraded connections. The connection is the lease: the lease ends when the connection
//! closes.

mod connection;
mod import;
mod open;

pub(crate) use connection::FrameStream;
pub(crate) use import::serve_import;
pub(crate) use open::serve_open;
