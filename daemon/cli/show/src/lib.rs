//! The commands that read what models consist of: `show`, `tensor`, `diff` and `fit`.
//!
//! ```
//! use clap::Parser as _;
//!
//! #[derive(Debug, clap::Parser)]
//! struct Diff {
//!     #[command(flatten)]
//!     params: blobd_cli_show::diff::Params,
//! }
//!
//! assert!(Diff::try_parse_from(["diff", "llama3:8b-Q4_K_M", "llama3:8b-Q4_K_S"]).is_ok());
//! assert!(Diff::try_parse_from(["diff", "llama3:8b-Q4_K_M"]).is_err());
//! ```
//!
//! A model is one of the store, one of a registry, or a file on this machine that `local_model` reads. Tensors are named
//! as `tensor_choice` says.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

pub mod diff;
pub mod fit;
mod local_model;
pub mod show;
pub mod tensor;
mod tensor_choice;
