//! A pull of very many segments that is given up and resumed over and over.

use std::time::Duration;

use blobd_tests::model::noise;
use blobd_tests::raw_gguf::{RawGguf, id};
use blobd_tests::registry::FakeRegistry;

use super::{Begin, REMOVABLE};
use crate::Outcome;
use crate::ground::Ground;

const TENSORS: u64 = 16_384;
/// The least that a tensor takes with its padding.
const TENSOR_BYTES: u64 = 32;
/// How long each client lives.
const LIFE: Duration = Duration::from_secs(2);
/// So that one client's life brings a part of the file and its header alone takes most of it.
const BYTES_PER_SECOND: u64 = 500_000;
const LAYER: &str = "application/vnd.ollama.image.model";

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let registry = FakeRegistry::start()?;
    let tensor = |raw: RawGguf, n: u64| {
        raw.tensor(format!("blk.{n}.weight"), id::F32, &[TENSOR_BYTES / 4], n * TENSOR_BYTES)
    };
    let header = (0..TENSORS).fold(RawGguf::new(), tensor);
    let model = header.with_data(&noise(7, "resumed", usize::try_from(TENSORS * TENSOR_BYTES)?));
    registry
        .add_model("library/many:latest", b"{}", &[(LAYER, &model)])
        .map_err(|error| error.to_string())?;
    let ground = ground.clone();
    Ok(Box::new(move || {
        let mut pull = None;
        ground.repeat(LIFE, move |ground| {
            drop(pull.take());
            let (source, name) = (registry.name("library/many"), format!("{REMOVABLE}0"));
            let body =
                format!(r#"{{"reference":"{source}","name":"{name}","limit_rate":{BYTES_PER_SECOND}}}"#);
            pull = Some(ground.send("POST /v1/pull HTTP/1.1", &body)?);
            ground.count("resumed");
            ground.note("bytes served", registry.bytes_served());
            Ok(())
        });
        Ok(())
    }))
}
