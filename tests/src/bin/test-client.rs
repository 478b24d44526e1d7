//! A client process: opens a model, maps all of it, and does what it is told line by line.
//!
//! `test-client SOCKET MODEL [PREFIX]`; then on standard input `touch` reads every mapped byte
//! and answers with their digest, `close` ends the lease and keeps the maps; the end of input
//! ends the process.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;

use blobd_client::Client;
use blobd_client::error::{ClientError, ModelError};
use blobd_client::model::{OpenModel, TensorMap};
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_tests::oracle::sha256_of;
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
    let client = Client::connect(argument()?)?;
    let mut params = OpenParams::new(argument()?.parse()?);
    if let Ok(prefix) = argument() {
        params.tensors = TensorSelection::Prefix(prefix);
    }
    let mut model = Some(client.open_with(&params)?);
    let maps = model.as_ref().map(OpenModel::map_all).transpose()?.unwrap_or_default();
    let fd_count = model.as_ref().map_or(0, OpenModel::fd_count);
    answer(&json!({ "tensors": maps.len(), "fds": fd_count }));
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "touch" => answer(&touch(&maps)?),
            "close" => {
                drop(model.take());
                answer(&json!({ "closed": true }));
            }
            other => return Err(format!("{other:?}: touch or close expected").into()),
        }
    }
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

fn answer(json: &Json) {
    // A parent that has gone ends the process by closing its input.
    let _ = writeln!(std::io::stdout(), "{json}");
}

fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    let code = error.downcast_ref::<ClientError>().map(ClientError::code);
    let code = code.or_else(|| error.downcast_ref::<ModelError>().map(ModelError::code));
    code.map_or(1, ErrorCode::exit_code)
}
