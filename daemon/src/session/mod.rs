//! Sessions: what is spoken over upgraded connections. The connection is the lease; when it closes, for
//! whatever reason, the lease ends.

mod connection;
mod import;
mod open;

pub(crate) use connection::FrameStream;
pub(crate) use import::serve_import;
pub(crate) use open::{OpenPermits, serve_open};
