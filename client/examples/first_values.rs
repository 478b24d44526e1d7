//! Prints a tensor's type, shape and first values:
//! `cargo run --example first_values -- llama3:8b blk.0.attn_norm.weight`
use std::error::Error;

use blobd_client::Client;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let reference = arguments.next().ok_or("usage: first_values MODEL [TENSOR]")?.parse()?;
    let name = arguments.next().unwrap_or_else(|| "token_embd.weight".to_owned());

    let model = Client::connect_default()?.open(&reference)?;
    let tensor = model.map(&name)?;
    println!("{} {} {:?}", tensor.name(), tensor.type_name(), tensor.shape());
    if tensor.type_name() == "F32" {
        let values = tensor.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        println!("{:?}", values.take(8).collect::<Vec<f32>>());
    } else {
        println!("{:02x?}", &tensor[..tensor.len().min(32)]);
    }
    Ok(())
}
