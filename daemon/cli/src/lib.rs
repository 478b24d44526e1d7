//! The command line of blobd: an ordinary client of its daemon.
//!
//! It turns arguments into requests of [`blobd_client`], and responses into text or JSON. It knows neither the store nor
//! the server: what needs these, such as `blobd serve`, it gets from its program as a
//! [`LocalServer`](blobd_cli_common::local_server::LocalServer).
//!
//! ```
//! let blobd = blobd_cli::command();
//! let error = blobd.try_get_matches_from(["blobd", "rm"]).unwrap_err();
//! assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument);
//! ```
//!
//! - Arguments: `command_line` (all commands, exit codes), `usage_error` and `other_tools` (what to do about a mistake),
//!   `completions`, `suggest`, `man`.
//! - One file per command, such as `pull`, `ls` and `df`, or for a few with one subject: `tag`, `rename`, `pin` and
//!   `unpin`. `web` has a server of its own.
//! - Commands with crates of their own, so that an edit of one compiles little: [`blobd_cli_import`] (`import`, `export`),
//!   [`blobd_cli_show`] (`show`, `tensor`, `diff`, `fit`), [`blobd_cli_mount`] (`mount`, `exec`).
//! - What all commands have in common, such as finding a daemon, tables and progress: [`blobd_cli_common`].

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
pub use command_line::main;

mod audit_log;
mod command_line;
mod completions;
mod config;
mod df;
mod doctor;
mod edit;
mod gc;
mod history;
mod login;
mod ls;
mod man;
mod other_tools;
mod outdated;
mod overview;
mod partial;
mod promote;
mod prompt;
mod ps;
mod pull;
mod pull_report;
mod push;
mod rm;
mod serve;
#[cfg(test)]
mod shown_commands;
mod sign;
mod suggest;
mod tag;
mod transfer;
mod undo;
mod usage_error;
mod verify;
mod warm;
mod web;

/// The definition of all commands.
#[must_use]
pub fn command() -> clap::Command {
    command_line::command()
}
