//! A pull of very many segments that is interrupted and resumed repeatedly.

use std::time::Duration;

use blobd_tests::model::noise;
use blobd_tests::raw_gguf::{RawGguf, id};
use blobd_tests::registry::FakeRegistry;

use super::{Begin, REMOVABLE};
use crate::Outcome;
use crate::context::AttackContext;

const TENSORS: u64 = 16_384;
/// The minimum size of a tensor with its padding.
const TENSOR_BYTES: u64 = 32;
/// How long each client stays connected.
const LIFE: Duration = Duration::from_secs(2);
/// Slow enough that one connection transfers only a part of the file and spends most of its time on the
/// header.
const BYTES_PER_SECOND: u64 = 500_000;
const LAYER: &str = "application/vnd.ollama.image.model";

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let registry = FakeRegistry::start()?;
    let tensor = |raw: RawGguf, n: u64| {
        raw.tensor(format!("blk.{n}.weight"), id::F32, &[TENSOR_BYTES / 4], n * TENSOR_BYTES)
    };
    let header = (0..TENSORS).fold(RawGguf::new(), tensor);
    let model = header.with_data(&noise(7, "resumed", usize::try_from(TENSORS * TENSOR_BYTES)?));
    registry
        .add_model("library/many:latest", b"{}", &[(LAYER, &model)])
        .map_err(|error| error.to_string())?;
    let context = context.clone();
    Ok(Box::new(move || {
        let mut pull = None;
        context.repeat(LIFE, move |context| {
            drop(pull.take());
            let (source, name) = (registry.name("library/many"), format!("{REMOVABLE}0"));
            let body =
                format!(r#"{{"reference":"{source}","name":"{name}","limit_rate":{BYTES_PER_SECOND}}}"#);
            pull = Some(context.send("POST /v1/pull HTTP/1.1", &body)?);
            context.count("resumed");
            context.set("bytes served", registry.bytes_served());
            Ok(())
        });
        Ok(())
    }))
}
