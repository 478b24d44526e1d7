//! The command line of blobd: an ordinary client of its daemon.
//!
//! It turns arguments into requests of [`blobd_client`], and responses into text or JSON. It knows neither the store nor
//! the server: what needs these, such as `blobd serve`, it gets from its program as a [`LocalServer`].
//!
//! ```
//! let blobd = blobd_cli::command();
//! let error = blobd.try_get_matches_from(["blobd", "rm"]).unwrap_err();
//! assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument);
//! ```
//!
//! - Arguments: `command_line` (all commands, exit codes), `global` (the options of every command), `usage_error`, `advice`
//!   and `other_tools` (what to do about a mistake), `completions`, `suggest`, `man`.
//! - Finding a daemon: `connect`, [`local_server`], `system_service`.
//! - One file per command, such as `pull`, `ls` and `exec`, or for a few with one subject: `tag`, `rename`, `pin` and
//!   `unpin`. `mount` and `web` have servers of their own.
//! - Models that are named: `model_name`, `model_source`, `local_model`, `source_file`; their tensors: `tensor_choice`.
//! - Results: [`output`] (tables, JSON), `times`, `progress`, `batch`, `output_file`, `lost_models`.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
pub use command_line::main;
use global::{Global, file_error, internal, usage};
pub use local_server::LocalServer;

mod advice;
mod audit_log;
mod batch;
mod command_line;
mod completions;
mod config;
mod connect;
mod df;
mod diff;
mod doctor;
mod edit;
mod exec;
mod export;
mod fit;
mod gc;
mod global;
mod history;
mod import;
mod local_folder;
mod local_model;
pub mod local_server;
mod log;
mod login;
mod lost_models;
mod ls;
mod man;
mod model_folder;
mod model_name;
mod model_source;
mod mount;
mod other_stores;
mod other_tools;
mod outdated;
pub mod output;
mod output_file;
mod parallel;
mod partial;
mod progress;
mod promote;
mod prompt;
mod ps;
mod pull;
mod pull_report;
mod push;
mod residency;
mod rm;
mod serve;
mod show;
#[cfg(test)]
mod shown_commands;
mod source_file;
mod suggest;
mod sys;
mod system_service;
mod tag;
mod tensor;
mod tensor_choice;
mod times;
mod usage_error;
mod verify;
mod warm;
mod web;

/// The definition of all commands.
#[must_use]
pub fn command() -> clap::Command {
    command_line::command()
}
