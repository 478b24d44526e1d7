//! The commands `mount` and `exec`: models as files, for programs that know nothing of blobd.
//!
//! ```
//! use clap::Parser as _;
//!
//! #[derive(Debug, clap::Parser)]
//! struct Mount {
//!     #[command(flatten)]
//!     params: blobd_cli_mount::mount::Params,
//! }
//!
//! assert!(Mount::try_parse_from(["mount", "/mnt/models"]).is_ok());
//! ```
//!
//! - [`mount`]: a read-only file system (FUSE) that shows all models, in the layouts that programs expect.
//! - [`exec`]: runs a program with a preloaded library (`client/preload`) that maps the blobs themselves.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

pub mod exec;
pub mod mount;
