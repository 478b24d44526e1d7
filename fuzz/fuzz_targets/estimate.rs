//! Memory estimates.
//!
//! Invariant: any header has an estimate or a named error, whatever the settings, and no device holds more
//! than its memory.
#![no_main]

use blobd_model::estimate::{Basis, CacheType, Model, ModelSet, Settings};
use blobd_store_format::gguf::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((numbers, file)) = input.split_first_chunk::<40>() else { return };
    let [context, batch, parallel, first, second] = std::array::from_fn(|place| number(numbers, place));
    let Ok(header) = Header::parse(file) else { return };
    let Ok(model) = Model::new(&header, []) else { return };
    let models =
        ModelSet { draft: Some(model.clone()), projector: None, adapters: vec![model.clone()], model };
    for cache_type in CacheType::ALL {
        let settings = Settings {
            context,
            batch,
            parallel,
            cache_type_k: cache_type,
            cache_type_v: cache_type,
            ..Settings::default()
        };
        for basis in [Basis::Ollama, Basis::LlamaCpp] {
            let Ok(estimate) = models.estimate(&settings, basis) else { continue };
            let placement = estimate.place(&[first, second]);
            assert!(placement.layers <= placement.layers_of);
            for device in placement.devices {
                assert!(device.used_bytes <= device.vram_bytes);
            }
        }
    }
});

fn number(bytes: &[u8], place: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| bytes[place * 8 + byte]))
}
