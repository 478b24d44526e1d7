//! The commands `import` and `export`, and what is known about the stores of other programs.
//!
//! ```
//! use clap::Parser as _;
//!
//! #[derive(Debug, clap::Parser)]
//! struct Import {
//!     #[command(flatten)]
//!     params: blobd_cli_import::import::Params,
//! }
//!
//! assert!(Import::try_parse_from(["import", "model.gguf", "--name", "llama3:8b"]).is_ok());
//! assert!(Import::try_parse_from(["import"]).is_err());
//! ```
//!
//! - Into the store: [`import`]; its files are read from a local folder, several at a time with `parallel`.
//! - Models that other programs have: [`other_stores`], with one module per layout.
//! - Out of the store: [`export`].
//! - For machines without a network: [`save`] and [`load`], which reads a `layout_source`, or a `layout_stream` from a
//!   `tar_stream`; a `delta` has what a store with another [`inventory`] lacks, and `delta_source` rebuilds its files.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

pub(crate) use blobd_cli_common::local_folder;

mod delta;
mod delta_source;
pub mod export;
pub mod import;
pub mod inventory;
mod layout_source;
mod layout_stream;
pub mod load;
pub mod other_stores;
mod parallel;
pub mod save;
mod tar_stream;
