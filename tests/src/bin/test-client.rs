//! A client process: opens a model, maps all of it, and executes commands from standard input.
//!
//! `test-client SOCKET MODEL [PREFIX]` reads one command per line: `touch` reads every mapped byte and prints
//! their digest; `close` ends the lease and keeps the maps; `attack` tries to change the model through every
//! descriptor and prints the outcomes; `lock` locks all descriptors; `pass PATH` sends them to a process that
//! listens at PATH. The process ends with its input.
//!
//! `test-client --hold SOCKET COUNT` connects so many times, prints how many connections succeeded, and keeps
//! them until its input ends. `test-client --lease SOCKET MODEL COUNT` opens the model so many times instead.
//!
//! `test-client --default` prints the name of the first model of the default daemon, or the code of the error.
//!
//! `test-client --requests SOCKET` reads requests, one `METHOD PATH BODY` per line, and prints a line with the status
//! and the body of each response.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use blobd_client::Client;
use blobd_client::error::{ClientError, ModelError};
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::MAX_FDS_PER_BATCH;
use blobd_client::protocol::connection::send_message;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_tests::http;
use blobd_tests::oracle::sha256_of;
use rustix::fs::{self, FallocateFlags, FlockOperation, Mode, OFlags, XattrFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value as Json, json};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(exit_code(&*error))
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("usage: test-client SOCKET MODEL [PREFIX]");
    let socket = argument()?;
    if socket == "--hold" {
        return hold(&argument()?, argument()?.parse()?);
    }
    if socket == "--lease" {
        return lease(&argument()?, &argument()?, argument()?.parse()?);
    }
    if socket == "--requests" {
        return requests(argument()?.as_ref());
    }
    if socket == "--default" {
        println!("{}", first_model_of_default());
        return Ok(());
    }
    let client = Client::connect(socket)?;
    let mut params = OpenParams::new(argument()?.parse()?);
    if let Ok(prefix) = argument() {
        params.tensors = TensorSelection::Prefix(prefix);
    }
    let mut model = Some(client.open_with(&params)?);
    let maps = model.as_ref().map(OpenModel::map_all).transpose()?.unwrap_or_default();
    let fd_count = model.as_ref().map_or(0, OpenModel::fd_count);
    respond(&json!({ "tensors": maps.len(), "fds": fd_count }));
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "touch" => respond(&touch(&maps)?),
            "attack" => respond(&attack(model.as_ref().ok_or("closed")?)),
            "lock" => respond(&lock(model.as_ref().ok_or("closed")?)),
            line if line.starts_with("pass ") => respond(&pass(model.as_ref().ok_or("closed")?, &line[5..])?),
            "close" => {
                drop(model.take());
                respond(&json!({ "closed": true }));
            }
            other => {
                return Err(format!(
                    "unknown command: expected touch, close, attack, lock or pass, found {other:?}"
                )
                .into());
            }
        }
    }
    Ok(())
}

fn first_model_of_default() -> String {
    match Client::connect_default().and_then(|client| client.models()) {
        Ok(list) => list.models.first().map_or_else(String::new, |model| model.name.clone()),
        Err(error) => error.code().name().to_owned(),
    }
}

/// Opens a model repeatedly and keeps the leases.
fn lease(socket: &str, model: &str, count: usize) -> Result<(), Box<dyn Error>> {
    let limit = Rlimit { current: getrlimit(Resource::Nofile).maximum, ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit)?;
    let client = Client::connect(socket)?;
    let reference = model.parse()?;
    let (mut leases, mut busy) = (Vec::new(), 0);
    for _ in 0..count {
        match client.open(&reference) {
            Ok(model) => leases.push(model),
            Err(error) if error.code() == ErrorCode::Busy => busy += 1,
            Err(error) => return Err(error.into()),
        }
    }
    respond(&json!({ "leases": leases.len(), "busy": busy }));
    // Until the input ends.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(leases);
    Ok(())
}

fn touch(maps: &[TensorMap]) -> Result<Json, Box<dyn Error>> {
    let bytes: u64 = maps.iter().map(|map| map.len() as u64).sum();
    let mut all: Box<dyn std::io::Read> = Box::new(std::io::empty());
    for map in maps {
        all = Box::new(std::io::Read::chain(all, &map[..]));
    }
    Ok(json!({ "bytes": bytes, "sha256": sha256_of(&mut all) }))
}

/// Tries every way to change a blob. Returns for each its outcome: `ok`, or the error.
fn attack(model: &OpenModel) -> Json {
    let mut outcomes = serde_json::Map::new();
    for fd in (0..).map_while(|number| model.fd(number)) {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = std::fs::read_link(&path).unwrap_or_default();
        let write = OFlags::RDWR | OFlags::CLOEXEC;
        for (way, done) in [
            ("write", rustix::io::write(fd, b"x").map(drop)),
            ("truncate", fs::ftruncate(fd, 0)),
            ("allocate", fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 1)),
            ("chmod", fs::fchmod(fd, Mode::RWXU)),
            ("chown", fs::fchown(fd, Some(rustix::process::getuid()), None)),
            ("reopen", fs::open(&path, write, Mode::empty()).map(drop)),
            ("open and truncate", fs::open(&path, write | OFlags::TRUNC, Mode::empty()).map(drop)),
            ("open by name", fs::open(&target, write, Mode::empty()).map(drop)),
            ("unlink", fs::unlink(&target)),
            ("attribute", fs::fsetxattr(fd, "user.x", b"x", XattrFlags::empty())),
        ] {
            let outcome = done.map_or_else(|error| error.to_string(), |()| "ok".to_owned());
            outcomes.entry(way).or_insert(outcome.into());
        }
    }
    outcomes.into()
}

/// Locks every descriptor with `flock` and with `fcntl`.
fn lock(model: &OpenModel) -> Json {
    let fds = || (0..).map_while(|number| model.fd(number));
    let flocked = fds().filter(|fd| fs::flock(fd, FlockOperation::NonBlockingLockExclusive).is_ok()).count();
    let locked = fds().filter(|fd| fs::fcntl_lock(fd, FlockOperation::NonBlockingLockShared).is_ok()).count();
    json!({ "flocked": flocked, "locked": locked })
}

/// Sends as many descriptors as fit into one message to another process.
fn pass(model: &OpenModel, path: &str) -> Result<Json, Box<dyn Error>> {
    let fds: Vec<_> =
        (0..MAX_FDS_PER_BATCH).map_while(|number| model.fd(u32::try_from(number).ok()?)).collect();
    send_message(UnixStream::connect(path)?, &[0], &fds)?;
    Ok(json!({ "passed": fds.len() }))
}

/// Connects `count` times, or until the limit of open files is reached.
fn hold(socket: &str, count: usize) -> Result<(), Box<dyn Error>> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let held: Vec<_> = (0..count).map_while(|_| UnixStream::connect(socket).ok()).collect();
    // Time for the daemon to refuse the connections over its limit.
    std::thread::sleep(Duration::from_secs(1));
    let (mut refused, mut busy) = (0, 0);
    for mut stream in &held {
        stream.set_nonblocking(true)?;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(received @ 1..) = stream.read(&mut buffer) {
            bytes.extend_from_slice(&buffer[..received]);
        }
        refused += usize::from(!bytes.is_empty());
        busy += usize::from(String::from_utf8_lossy(&bytes).contains("\"code\":\"busy\""));
    }
    respond(&json!({ "connected": held.len(), "refused": refused, "busy": busy }));
    std::io::stdin().lock().lines().for_each(drop);
    Ok(())
}

fn requests(socket: &Path) -> Result<(), Box<dyn Error>> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().ok_or("a request has too few words: expected METHOD PATH BODY");
        let answer = match (word()?, word()?) {
            ("GET", path) => http::get(socket, path),
            (_, path) => http::post(socket, path, word()?),
        };
        respond(&json!({ "status": answer.status, "body": answer.body }));
    }
    Ok(())
}

fn respond(json: &Json) {
    // If the parent has ended, this process ends because its input is closed.
    let _ = writeln!(std::io::stdout(), "{json}");
}

fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    let code = error.downcast_ref::<ClientError>().map(ClientError::code);
    let code = code.or_else(|| error.downcast_ref::<ModelError>().map(ModelError::code));
    code.map_or(1, ErrorCode::exit_code)
}
