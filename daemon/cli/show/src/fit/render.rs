//! The tables of `fit`.

use blobd_cli_common::output::{Table, counted, human_bytes, or_dash, printable, terminal_width};
use blobd_client::protocol::fit::{
    ContextSource, FitAnswer, FitDevice, FitMemory, FitReport, FitsIn, LayerPlace,
};
use blobd_model::estimate::ModelSet;
use blobd_store_format::tensor::TensorFormat;

use super::Fit;
use super::machine::Machine;

pub(super) fn render(fit: &Fit, with_layers: bool) -> String {
    let Fit { report, machine } = fit;
    let mut tables = vec![overview(fit).render(usize::MAX)];
    tables.extend(with_layers.then(|| layers(report).render(terminal_width())));
    let answer = report.answer.as_ref().filter(|_| report.memory.has_rule);
    let found = answer.map(|answer| &answer.devices).filter(|devices| !devices.is_empty());
    tables.extend(found.map(|found| devices(found, machine.as_ref()).render(terminal_width())));
    let mut text = tables.join("\n");
    for note in &report.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn overview(fit: &Fit) -> Table {
    let report = &fit.report;
    let memory = &report.memory;
    let mut table = Table::new(&["name", &printable(&report.name)], &[]);
    let mut row = |label: &str, value: String| table.row([label.to_owned(), value]);
    row("needs", needs(report));
    row("context", context(report));
    row("basis", basis(memory));
    if memory.has_rule && !memory.missing_keys.is_empty() {
        row("missing", memory.missing_keys.join(", "));
    }
    if memory.unsized_tensors > 0 {
        let count = memory.unsized_tensors;
        row("unknown types", format!("of {count} tensors, which count up to the next tensor"));
    }
    if memory.table_bytes > 0 {
        row("tables", format!("{} read from disk row by row, not resident", human_bytes(memory.table_bytes)));
    }
    companions(report, &mut row);
    if let Some(found) = &report.answer {
        answer(fit, found, &mut row);
    }
    table
}

fn needs(report: &FitReport) -> String {
    let memory = &report.memory;
    let (needed, weights) = (human_bytes(report.needed_bytes), human_bytes(memory.weights_bytes));
    if memory.basis.starts_with("weights only") {
        return format!("more than {needed}: weights {weights}, KV cache and graph are not known");
    }
    let at_least = if memory.has_rule { "" } else { "more than " };
    let mut parts = vec![
        format!("weights {}", human_bytes(memory.weights_bytes.saturating_sub(memory.table_bytes))),
        format!("KV cache {}", human_bytes(memory.kv_total_bytes)),
    ];
    parts.push(match report.format == TensorFormat::Safetensors.name() {
        true => "graph not counted".to_owned(),
        false => format!("graph {}", human_bytes(memory.graph_full_bytes)),
    });
    let has_companions = report.projector.is_some() || report.draft.is_some() || !report.adapters.is_empty();
    parts.extend(has_companions.then(|| "and what belongs to it".to_owned()));
    format!("{at_least}{needed} at context {}: {}", memory.context, parts.join(", "))
}

fn context(report: &FitReport) -> String {
    let FitMemory { context, batch, parallel, cache_type_k, cache_type_v, .. } = &report.memory;
    let source = match (report.context_source, report.context_length) {
        (ContextSource::Option, _) => String::new(),
        (ContextSource::Trained, _) => ", as trained".to_owned(),
        (ContextSource::Model, _) => ", the model's num_ctx".to_owned(),
        (ContextSource::Default, None) => ", since the file does not say".to_owned(),
        (ContextSource::Default, Some(trained)) if trained == *context => ", as trained".to_owned(),
        (ContextSource::Default, Some(trained)) => format!(" of the {trained} trained (--ctx 0 for all)"),
    };
    let sequences = counted(parallel, "sequence");
    let mixed = format!("{cache_type_k} keys and {cache_type_v} values");
    let cache = if cache_type_k == cache_type_v { cache_type_k } else { &mixed };
    format!("{context}{source}; {sequences}, batch {batch}, cache {cache}")
}

fn basis(memory: &FitMemory) -> String {
    if memory.basis == memory.graph_basis {
        return memory.basis.clone();
    }
    format!("{}, graph {}", memory.basis, memory.graph_basis)
}

fn companions(report: &FitReport, row: &mut impl FnMut(&str, String)) {
    let memory = &report.memory;
    if memory.vision_weights_bytes > 0 {
        let (weights, graph) = (memory.vision_weights_bytes, memory.vision_graph_bytes);
        row("vision", format!("{} of the weights, graph {}", human_bytes(weights), human_bytes(graph)));
    }
    if let Some(projector) = &report.projector {
        row("projector", human_bytes(projector.weights_bytes));
    }
    for bytes in &report.adapters {
        row("adapter", human_bytes(*bytes));
    }
    if let Some(draft) = &report.draft {
        let (weights, kv) = (human_bytes(draft.weights_bytes), human_bytes(draft.kv_total_bytes));
        let graph = human_bytes(draft.graph_full_bytes);
        row("draft model", format!("weights {weights}, KV cache {kv}, graph {graph} ({})", draft.basis));
    }
}

fn answer(fit: &Fit, answer: &FitAnswer, row: &mut impl FnMut(&str, String)) {
    let report = &fit.report;
    row("fits", verdict(fit, answer));
    if !report.memory.has_rule {
        return;
    }
    let largest = match answer.max_context {
        0 => "none fits".to_owned(),
        ModelSet::MAX_CONTEXT => "any".to_owned(),
        trained
            if report.context_length == Some(trained) && report.memory.context > trained && answer.fits =>
        {
            format!("{trained}, as trained, or more")
        }
        trained if report.context_length == Some(trained) => format!("{trained}, as trained"),
        context => context.to_string(),
    };
    row("largest context", largest);
    if !report.options.is_empty() {
        row("options", report.options.join(" "));
    }
}

fn verdict(fit: &Fit, answer: &FitAnswer) -> String {
    let Fit { report, machine } = fit;
    let on_devices = machine.is_none();
    if !report.memory.has_rule && on_devices && report.needed_bytes > answer.vram_bytes {
        return "no, the weights alone are larger".to_owned();
    } else if !report.memory.has_rule {
        return "not known".to_owned();
    }
    let FitAnswer { layers, layers_of, memory_bytes, .. } = answer;
    let word = if answer.fits { "yes" } else { "no" };
    let available = machine.as_ref().and_then(|machine| machine.available_bytes);
    let of_memory =
        available.map_or_else(String::new, |bytes| format!(" of {} available", human_bytes(bytes)));
    let memory = format!("{}{of_memory} in this machine's memory", human_bytes(*memory_bytes));
    match machine {
        Some(machine) if machine.gpus.is_empty() => format!("{word}, {memory}, no GPU found"),
        Some(_) if answer.fits_in == Some(FitsIn::Devices) => {
            format!("yes, on this machine's GPUs: {layers} of {layers_of} layers, {memory}")
        }
        Some(_) => {
            format!("{word}, {layers} of {layers_of} layers on this machine's GPUs and the rest, {memory}")
        }
        None if *memory_bytes > 0 => {
            let memory = human_bytes(*memory_bytes);
            format!("{word}, {layers} of {layers_of} layers on devices, {memory} in the machine's memory")
        }
        None => format!("{word}, {layers} of {layers_of} layers on devices"),
    }
}

/// The sum of the rows is the size of the file.
fn layers(report: &FitReport) -> Table {
    let memory = &report.memory;
    let mut table = Table::new(&["LAYER", "WEIGHTS", "KV CACHE", "WHERE"], &[1, 2]);
    let has_several = report.answer.as_ref().is_some_and(|answer| answer.devices.len() > 1);
    for layer in &memory.weights {
        let block = layer.block.and_then(|number| usize::try_from(number).ok());
        let kv = block.and_then(|block| memory.kv_bytes.get(block));
        let kv = or_dash(kv.map(|bytes| human_bytes(*bytes)));
        let number = layer.device.filter(|_| has_several);
        let device = number.map_or_else(|| "device".to_owned(), |number| format!("device {number}"));
        let place = match layer.place {
            LayerPlace::Device => device,
            LayerPlace::Memory => "memory".to_owned(),
            LayerPlace::DeviceAndMemory => format!("{device}, experts in memory"),
            LayerPlace::Disk => "disk, not resident".to_owned(),
        };
        table.row([printable(&layer.layer), human_bytes(layer.bytes), kv, place]);
    }
    let none = || "-".to_owned();
    table.row(["header, padding".to_owned(), human_bytes(report.header_bytes), none(), none()]);
    let kv = human_bytes(memory.kv_total_bytes);
    table.row(["the file".to_owned(), human_bytes(report.file_bytes), kv, none()]);
    table
}

fn devices(devices: &[FitDevice], machine: Option<&Machine>) -> Table {
    let rows = devices.iter().enumerate().map(|(number, device)| {
        let gpu = machine.and_then(|machine| machine.gpus.get(number));
        let name = gpu.map_or_else(|| number.to_string(), |gpu| printable(&gpu.name));
        [name, human_bytes(device.vram_bytes), device.layers.to_string(), human_bytes(device.used_bytes)]
    });
    Table::with_rows(&["DEVICE", "MEMORY", "LAYERS", "USED"], &[1, 2, 3], rows)
}
