//! What the commands of blobd have in common.
//!
//! ```
//! let sizes = [("model".to_owned(), 4_920_000_000_u64), ("projector".to_owned(), 876_000_000)];
//! let total = blobd_cli_common::output::human_bytes(sizes.iter().map(|(_, bytes)| bytes).sum());
//! assert_eq!(total, "5.40 GiB");
//! ```
//!
//! - Arguments: [`global`] (the options of every command), [`advice`] (what to do about a mistake).
//! - Finding a daemon: [`connect`], [`local_server`], [`system_service`].
//! - Models that are named: [`model_name`], [`model_source`], [`described_model`], [`local_files`], [`local_folder`], [`source_file`],
//!   [`model_folder`].
//! - Results: [`output`] (text, JSON), [`colour`], [`table`], [`times`], [`progress`], [`batch`], [`output_file`], [`lost_models`], [`residency`],
//!   [`log`].

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
pub use global::{Global, file_error, internal, usage};

pub mod advice;
pub mod batch;
pub mod colour;
pub mod connect;
pub mod described_model;
pub mod global;
pub mod local_files;
pub mod local_folder;
pub mod local_server;
pub mod log;
pub mod lost_models;
pub mod model_folder;
pub mod model_name;
pub mod model_source;
pub mod output;
pub mod output_file;
pub mod progress;
pub mod residency;
pub mod source_file;
mod sys;
pub mod system_service;
pub mod table;
pub mod times;
