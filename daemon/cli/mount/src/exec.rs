//! `blobd exec`: runs a program that sees each model as the file `/blobd/<reference>.gguf`, or as the folder
//! `/blobd/<reference>` if it is one.
//!
//! The program runs as a child process with a library in `LD_PRELOAD` (`client/preload`). When it opens
//! such a path, the library requests the file from this process, over a socket that only the user can
//! reach, receives a header and blob descriptors, and maps them. This process serves these requests, holds
//! the leases, forwards signals, and exits with the program's exit code.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::{env, fs};

use blobd_cli_common::connect::connect;
use blobd_cli_common::{Global, file_error, usage};
use blobd_client::process::{Signals, first_of, listen, raise_descriptor_limit};
use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, kill_process};
use rustix::termios::tcgetpgrp;
use tokio::signal::unix::SignalKind;
use tokio::sync::oneshot;

use crate::ErrorBody;

mod file_image;
mod folders;
mod mounted;
mod program;
mod service;

/// Run a program that can open every model as /blobd/REF.gguf or as the folder /blobd/REF, without a copy
///
/// The file is a GGUF file with the model's weights, aligned to pages; its bytes are mapped from the store
/// in place. A model's projector is /blobd/REF+projector.gguf. A model that was imported or pulled as a folder is the
/// folder /blobd/REF, with its configuration and its safetensors files, whose tensors are mapped in place too. Works with
/// dynamically linked programs: llama.cpp, Python, Node. Of programs that are linked statically or written in Go, such as
/// Ollama, only the child processes see these paths.
///
/// Files of weights in a mount made by `blobd mount` are mapped from the store in the same way.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd exec -- llama-cli -m /blobd/llama3:8b.gguf -p Hello
  blobd exec -- python3 server.py --model /blobd/hf.co/user/repo:Q4_K_M.gguf
  blobd exec -- python3 generate.py --model /blobd/hf.co/user/repo
  blobd exec -- llama-mtmd-cli -m /blobd/llava.gguf --mmproj /blobd/llava+projector.gguf
  OLLAMA_MODELS=/mnt/models/ollama blobd exec -- ollama serve")]
pub struct Params {
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// The library to preload, compiled by `build.rs`; empty where there was no glibc to compile it for.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libblobd_preload.so"));
/// Path of another library to preload instead.
const LIBRARY_VARIABLE: &str = "BLOBD_PRELOAD";
/// Gives the library the path of this process's socket.
const SOCKET_VARIABLE: &str = "BLOBD_EXEC_SOCKET";

/// Runs the program, and returns its exit status.
pub fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let [program, arguments @ ..] = &*params.command else { return Err(usage("exec: no command")) };
    program::check(program, arguments)?;
    let connected = connect(global)?;
    let folder = tempfile::Builder::new().prefix("blobd-exec-").tempdir_in(runtime_folder());
    let folder = folder.map_err(|error| failed("a temporary directory", &error))?;
    // The library recognises directories in it by the paths that the kernel reports.
    let place = folder.path().canonicalize().map_err(|error| failed("a temporary directory", &error))?;
    let socket = place.join("socket");
    let listener = UnixListener::bind(&socket).map_err(|error| failed("a socket", &error))?;
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", preloaded(folder.path())?).env(SOCKET_VARIABLE, &socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("a runtime", &error))?;
    let _context = runtime.enter();
    // Before the program starts: from then on Ctrl-C must end the program, and not this process, which
    // removes the temporary directory.
    let mut signals = forwarded_signals().map_err(|error| failed("signals", &error))?;
    let child = command.spawn().map_err(|error| failed(&program.to_string_lossy(), &error))?;
    // After the start: the program inherits the original limit.
    raise_descriptor_limit();
    let client = connected.client.clone();
    std::thread::spawn(move || service::run(&listener, &client, place.join("folders")));
    let status =
        runtime.block_on(wait(child, &mut signals)).map_err(|error| failed("the program", &error))?;
    Ok(exit_code(status))
}

/// `XDG_RUNTIME_DIR` if possible: `/tmp` may be mounted `noexec`, and then no library can be loaded from it.
fn runtime_folder() -> PathBuf {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    runtime.filter(|folder| folder.is_absolute() && folder.is_dir()).unwrap_or_else(env::temp_dir)
}

/// The value of `LD_PRELOAD`: the library, then the previous value.
fn preloaded(folder: &Path) -> Result<OsString, ErrorBody> {
    let library = match env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None if LIBRARY.is_empty() => {
            let message = "exec: not available: expected a blobd with the library that programs load, found one that was built \
                           without it, since it needs glibc";
            return Err(usage(message).with_hint(
                "set BLOBD_PRELOAD to the library of a package of the same version, or use `blobd mount`",
            ));
        }
        None => write_library(folder).map_err(|error| failed("the library", &error))?,
    };
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        let message = format!(
            "{}: the path of a preloaded library must not contain a colon or a space",
            library.display()
        );
        return Err(usage(message).with_hint("set XDG_RUNTIME_DIR or TMPDIR to another directory"));
    }
    let mut value = library.into_os_string();
    if let Some(before) = env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        value.push(":");
        value.push(before);
    }
    Ok(value)
}

fn write_library(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("libblobd_preload.so");
    fs::write(&path, LIBRARY)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

fn forwarded_signals() -> std::io::Result<Signals> {
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::quit(),
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ];
    listen(kinds)
}

/// Whether this process is in the terminal's foreground group, which gets Ctrl-C from the terminal.
fn has_terminal() -> bool {
    let terminal = fs::File::open("/dev/tty").and_then(|terminal| Ok(tcgetpgrp(terminal)?));
    terminal.is_ok_and(|foreground| foreground == getpgrp())
}

async fn wait(mut child: Child, signals: &mut Signals) -> std::io::Result<ExitStatus> {
    let pid = Pid::from_child(&child);
    let (send, mut ended) = oneshot::channel();
    std::thread::spawn(move || send.send(child.wait()));
    loop {
        tokio::select! {
            status = &mut ended => {
                return status.unwrap_or_else(|_gone| Err(std::io::ErrorKind::BrokenPipe.into()));
            }
            kind = first_of(signals) => {
                // The terminal sends these two to the program itself.
                let is_key = [SignalKind::interrupt(), SignalKind::quit()].contains(&kind);
                let signal = Signal::from_named_raw(kind.as_raw_value());
                if let Some(signal) = signal.filter(|_| !is_key || !has_terminal()) {
                    // Fails if the program has just ended.
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// 128 plus the signal's number if a signal ended the program, as in shells.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn failed(what: &str, error: &std::io::Error) -> ErrorBody {
    file_error(&format!("exec: {what}"), error)
}
