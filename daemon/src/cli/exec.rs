//! `blobd exec`: a program for which `/blobd/<reference>.gguf` is a file.
//!
//! The program runs as a child with a small library under it (`client/preload`). When it opens
//! such a path, the library asks this process, over a socket that only the user can reach, and gets a
//! header and descriptors of blobs, which it maps. This process stays to answer, and to hold the leases;
//! it passes signals on and ends as the program does.

mod program;
mod service;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use clap::Args;
use rustix::process::{Pid, Resource, Signal, getpgrp, getrlimit, kill_process, setrlimit};
use rustix::termios::tcgetpgrp;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::connect::connect;
use super::{Global, usage};

/// Run a program that can open every model as /blobd/REF.gguf, without a copy
///
/// The file is a GGUF file with the model's weights, aligned to pages; its bytes are mapped from the store
/// in place. Works with dynamically linked programs: llama.cpp, Python, Node. A model's projector is
/// /blobd/REF+projector.gguf.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd exec -- llama-cli -m /blobd/llama3:8b.gguf -p Hello
  blobd exec -- python3 server.py --model /blobd/hf.co/user/repo:Q4_K_M.gguf
  blobd exec -- llama-mtmd-cli -m /blobd/llava.gguf --mmproj /blobd/llava+projector.gguf")]
pub(super) struct Params {
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// The library, compiled by `build.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libblobd_preload.so"));
/// The environment variable that names another library.
const LIBRARY_VARIABLE: &str = "BLOBD_PRELOAD";
/// The environment variable that tells the library where to ask.
const SOCKET_VARIABLE: &str = "BLOBD_EXEC_SOCKET";

pub(super) fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let [program, arguments @ ..] = &*params.command else { return Err(usage("exec: no command")) };
    program::check(program)?;
    let connected = connect(global)?;
    let folder = tempfile::Builder::new().prefix("blobd-exec-").tempdir_in(runtime_folder());
    let folder = folder.map_err(|error| failed("a temporary directory", &error))?;
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).map_err(|error| failed("its socket", &error))?;
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", preloaded(folder.path())?).env(SOCKET_VARIABLE, &socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("a runtime", &error))?;
    let _context = runtime.enter();
    // Before the program starts: a Ctrl-C is for it, and what it leaves is for us to remove.
    let signals = Signals::listen().map_err(|error| failed("signals", &error))?;
    let child = command.spawn().map_err(|error| failed(&program.to_string_lossy(), &error))?;
    // After it has started: the program keeps its own limit.
    raise_descriptor_limit();
    let client = connected.client.clone();
    std::thread::spawn(move || service::run(&listener, &client));
    let status = runtime.block_on(wait(child, signals)).map_err(|error| failed("the program", &error))?;
    Ok(exit_code(status))
}

/// Where a socket is short-lived and code may be loaded from; `/tmp` may forbid the latter.
fn runtime_folder() -> PathBuf {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    runtime.filter(|folder| folder.is_absolute() && folder.is_dir()).unwrap_or_else(env::temp_dir)
}

/// The value of `LD_PRELOAD`: our library, then what was there.
fn preloaded(folder: &Path) -> Result<OsString, ErrorBody> {
    let library = match env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None if LIBRARY.is_empty() => {
            return Err(usage("exec: this blobd was built for a system without preloaded libraries"));
        }
        None => written(folder).map_err(|error| failed("the library", &error))?,
    };
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        let message = format!("{}: a preloaded library's path may have no colon or space", library.display());
        return Err(usage(message).with_hint("set XDG_RUNTIME_DIR or TMPDIR to another directory"));
    }
    let mut value = library.into_os_string();
    if let Some(before) = env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        value.push(":");
        value.push(before);
    }
    Ok(value)
}

fn written(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("libblobd_preload.so");
    fs::write(&path, LIBRARY)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// The descriptors of all models in use are held here on their way. If the limit stays as it is, the
/// service says so when it matters.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    let _stays = setrlimit(Resource::Nofile, raised);
}

/// Signals by which programs are told something. The terminal sends the first two to the program
/// itself as well.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
    first_own: tokio::signal::unix::Signal,
    second_own: tokio::signal::unix::Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
            first_own: signal(SignalKind::user_defined1())?,
            second_own: signal(SignalKind::user_defined2())?,
        })
    }

    /// The next one that is to be passed on.
    async fn next(&mut self) -> Signal {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => if !has_terminal() { return Signal::INT },
                _ = self.quit.recv() => if !has_terminal() { return Signal::QUIT },
                _ = self.terminate.recv() => return Signal::TERM,
                _ = self.hang_up.recv() => return Signal::HUP,
                _ = self.first_own.recv() => return Signal::USR1,
                _ = self.second_own.recv() => return Signal::USR2,
            }
        }
    }
}

/// Whether keys pressed at a terminal reach this process, and with it the program.
fn has_terminal() -> bool {
    let terminal = fs::File::open("/dev/tty").and_then(|terminal| Ok(tcgetpgrp(terminal)?));
    terminal.is_ok_and(|foreground| foreground == getpgrp())
}

async fn wait(mut child: Child, mut signals: Signals) -> std::io::Result<ExitStatus> {
    let pid = Pid::from_child(&child);
    let (send, mut ended) = oneshot::channel();
    std::thread::spawn(move || send.send(child.wait()));
    loop {
        tokio::select! {
            status = &mut ended => {
                return status.unwrap_or_else(|_gone| Err(std::io::ErrorKind::BrokenPipe.into()));
            }
            signal = signals.next() => {
                // It may have ended meanwhile.
                let _ = kill_process(pid, signal);
            }
        }
    }
}

/// As a shell has it: 128 and the number of the signal that ended the program.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn failed(what: &str, error: &std::io::Error) -> ErrorBody {
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => ErrorCode::NotFound,
        std::io::ErrorKind::PermissionDenied => ErrorCode::Denied,
        _ => ErrorCode::Internal,
    };
    ErrorBody::new(code, format!("exec: {what}: {error}"))
}
