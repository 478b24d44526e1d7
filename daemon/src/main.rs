//! The `blobd` command: daemon and command line in one.

use std::process::ExitCode;

fn main() -> ExitCode {
    blobd_server::cli::main()
}
