//! How an engine uses a model: `cargo run -p blobd-client --example engine -- MODEL`.
//!
//! Prints a line for every tensor, and reads the first expert ahead if there is one.

use std::process::ExitCode;

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::residency::Prefetch;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engine: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).ok_or("usage: engine MODEL")?;
    let client = Client::connect_default()?;
    let model = client.open(&name.parse()?)?;
    for tensor in model.tensors() {
        let map = model.map_tensor(tensor)?;
        let checksum =
            map.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        println!("{} {} {:?} {} bytes {checksum:016x}", map.name(), map.type_name(), map.shape(), map.len());
    }
    read_first_expert(&model)?;
    Ok(())
}

fn read_first_expert(model: &blobd_client::model::OpenModel) -> Result<(), ClientError> {
    for part in model.expert("", 0)? {
        part.bytes().prefetch(Prefetch::ReadAhead)?;
        println!("{}: expert 0 is {:?}, {} bytes", part.name(), part.shape(), part.bytes().len());
    }
    Ok(())
}
