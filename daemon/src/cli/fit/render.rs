//! The tables of `fit`.

use super::report::{Devices, Memory, Report};
use crate::output::{Table, printable, terminal_width};
use crate::size::human_bytes;

pub(super) fn render(report: &Report<'_>, with_layers: bool) -> String {
    let mut tables = vec![overview(report).render(usize::MAX)];
    tables.extend(with_layers.then(|| layers(&report.memory).render(terminal_width())));
    tables.extend(report.devices.as_ref().map(|answer| devices(answer).render(terminal_width())));
    let mut text = tables.join("\n");
    for note in &report.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn overview(report: &Report<'_>) -> Table {
    let memory = &report.memory;
    let mut table = Table::new(&["name", &printable(report.name)], &[]);
    let mut row = |label: &str, value: String| table.row([label.to_owned(), value]);
    row("basis", basis(memory));
    row("context", settings(memory));
    if !memory.missing_keys.is_empty() {
        row("missing", memory.missing_keys.join(", "));
    }
    row("weights", human_bytes(memory.weights_bytes));
    row("KV cache", human_bytes(memory.kv_total_bytes));
    let (full, partial) = (human_bytes(memory.graph_full_bytes), human_bytes(memory.graph_partial_bytes));
    row("graph", format!("{full}, or {partial} with a part of the layers on the device"));
    if memory.vision_weights_bytes > 0 {
        let (weights, graph) = (memory.vision_weights_bytes, memory.vision_graph_bytes);
        row("vision", format!("{} of the weights, graph {}", human_bytes(weights), human_bytes(graph)));
    }
    if let Some(projector) = &report.projector {
        row("projector", human_bytes(projector.weights_bytes));
    }
    if let Some(draft) = &report.draft {
        let (weights, kv) = (human_bytes(draft.weights_bytes), human_bytes(draft.kv_total_bytes));
        let graph = human_bytes(draft.graph_full_bytes);
        row("draft model", format!("weights {weights}, KV cache {kv}, graph {graph} ({})", draft.basis));
    }
    row("required", format!("{} on one device", human_bytes(report.required_bytes)));
    if let Some(answer) = &report.devices {
        answer_rows(answer, &mut row);
    }
    table
}

fn answer_rows(answer: &Devices, row: &mut impl FnMut(&str, String)) {
    let verdict = if answer.fits { "yes" } else { "no" };
    row("fits", format!("{verdict}, {} of {} layers on devices", answer.layers, answer.layers_of));
    row("total", human_bytes(answer.total_bytes));
    row(
        "largest context",
        match answer.max_context {
            0 => "none fits".to_owned(),
            _ if answer.is_unlimited() => "any".to_owned(),
            context => context.to_string(),
        },
    );
}

fn basis(memory: &Memory<'_>) -> String {
    if memory.basis == memory.graph_basis {
        return memory.basis.clone();
    }
    format!("{}, graph {}", memory.basis, memory.graph_basis)
}

fn settings(memory: &Memory<'_>) -> String {
    let sequences = match memory.parallel {
        1 => "1 sequence".to_owned(),
        count => format!("{count} sequences"),
    };
    let Memory { context, batch, cache_type_k, cache_type_v, .. } = memory;
    let cache = if cache_type_k == cache_type_v {
        (*cache_type_k).to_owned()
    } else {
        format!("{cache_type_k} keys and {cache_type_v} values")
    };
    format!("{context}, {sequences}, batch {batch}, cache {cache}")
}

fn layers(memory: &Memory<'_>) -> Table {
    let mut table = Table::new(&["LAYER", "WEIGHTS", "KV CACHE"], &[1, 2]);
    for layer in &memory.weights {
        let block = layer.layer.strip_prefix("blk.").and_then(|number| number.parse::<usize>().ok());
        let kv = block.and_then(|block| memory.kv_bytes.get(block));
        let kv = kv.map_or_else(|| "-".to_owned(), |bytes| human_bytes(*bytes));
        table.row([layer.layer.to_owned(), human_bytes(layer.bytes), kv]);
    }
    table
}

fn devices(answer: &Devices) -> Table {
    let mut table = Table::new(&["DEVICE", "MEMORY", "LAYERS", "USED"], &[1, 2, 3]);
    for (number, device) in answer.devices.iter().enumerate() {
        let (vram, used) = (human_bytes(device.vram_bytes), human_bytes(device.used_bytes));
        table.row([number.to_string(), vram, device.layers.to_string(), used]);
    }
    table
}
