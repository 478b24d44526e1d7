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
//!   and `habits` (what to do about a mistake), `completions`, `suggest`, `man`, `help`.
//! - Finding a daemon: `connect`, [`local_server`], `system_service`.
//! - One file per command, such as `pull`, `ls` and `exec`. `mount` and `web` have servers of their own.
//! - Models that are named: `model_name`, `model_source`, `local_model`, `source_file`, `target`.
//! - Results: [`output`] (tables, JSON), `times`, `progress`, `batch`, `output_file`.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use global::{Global, file_error, usage};
pub use local_server::LocalServer;

mod advice;
mod audit_log;
mod batch;
mod command_line;
mod completions;
mod config;
mod connect;
mod corrected;
mod demo;
mod df;
mod diff;
mod doctor;
mod edit;
mod exec;
mod export;
mod file_name;
mod fit;
mod gc;
mod global;
mod habits;
mod health;
mod help;
mod history;
mod import;
mod limit;
mod limited;
mod local_model;
pub mod local_server;
mod local_sidecars;
mod log;
mod login;
mod logout;
mod lost_models;
mod ls;
mod man;
mod model_name;
mod model_source;
mod mount;
mod nothing;
mod outdated;
pub mod output;
mod output_file;
mod partial;
mod pin;
mod progress;
mod promote;
mod prompt;
mod ps;
mod pull;
mod pull_plan;
mod reindex;
mod release;
mod rename;
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
mod target;
mod tensor;
mod times;
mod undelete;
mod upstream;
mod usage_error;
mod verify;
mod warm;
mod web;

/// The definition of all commands.
#[must_use]
pub fn command() -> clap::Command {
    command_line::command()
}

/// Runs the command that the arguments of this process name, and returns its exit code.
#[must_use]
pub fn main(server: &'static dyn LocalServer) -> ExitCode {
    command_line::main(server)
}
