//! The `blobd` program: the command line and the daemon in one.

// These macros panic if the descriptor cannot be written, such as a closed pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::env;
use std::process::ExitCode;

use blobd_server::client_file;

mod demo;
mod this_machine;

/// The program runs itself for the work of a process of its own: to read a client's file, and as a reader of the demo.
fn main() -> ExitCode {
    let first = env::args_os().nth(1);
    match first.as_ref().and_then(|first| first.to_str()) {
        Some(client_file::COMMAND) => {
            client_file::run();
            ExitCode::SUCCESS
        }
        Some(demo::reader::COMMAND) => demo::reader::main(),
        _ => blobd_cli::main(&this_machine::ThisMachine),
    }
}
