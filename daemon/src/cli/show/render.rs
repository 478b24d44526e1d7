//! The tables of `show`.

use blobd_client::protocol::policy::PolicyDecision;
use blobd_store_format::digest::Digest;
use blobd_store_format::model_facts::ModelFacts;
use blobd_store_format::stored_file::StoredForm;

use super::document::{Document, Sharing};
use super::network_layers::NetworkLayer;
use super::{Params, tensors, texts};
use crate::cli::model_source::{DescribedModel, Place};
use crate::output::{Table, printable, terminal_width};
use crate::size::human_bytes;

/// Values of metadata are cut at this length.
const MAX_VALUE_CHARS: usize = 60;
/// The most models listed that share bytes.
const MAX_SHARERS: usize = 10;

pub(super) fn render(document: &Document, model: &DescribedModel, params: &Params) -> String {
    let is_overview = !(params.tensors || params.metadata || params.layers || params.full);
    let mut tables = vec![files(document)];
    if is_overview {
        tables.insert(0, types(document));
        tables.extend(document.sharing.as_ref().and_then(sharers));
    }
    tables.extend(document.network_layers.as_deref().map(layers));
    tables.extend((params.metadata && !params.full).then(|| metadata(document)));
    tables.extend(params.full.then(|| form(document)).flatten());
    tables.extend(params.full.then(|| keys(document)).flatten());
    tables.extend(params.tensors.then(|| tensors(document)));
    let tables: Vec<_> = tables.iter().map(|table| table.render(terminal_width())).collect();
    let overview = overview(document, model);
    overview.render(usize::MAX) + "\n" + &tables.join("\n")
}

fn overview(document: &Document, model: &DescribedModel) -> Table {
    let mut table = Table::new(&["name", &printable(&document.name)], &[]);
    let mut row = |label: &str, value: Option<String>| {
        if let Some(value) = value {
            table.row([label.to_owned(), value]);
        }
    };
    let number = |number: Option<u64>| number.map(|number| number.to_string());
    let unknown = || Some("-".to_owned());
    row("digest", document.digest.map(|digest| digest.to_string()));
    row("place", place(&model.place));
    row("origin", document.origin.clone().filter(|_| document.stored));
    row("policy", document.policy.as_ref().and_then(policy));
    row("architecture", document.architecture.clone().or_else(unknown));
    row("parameters", Some(parameters(document.parameters)));
    row("quantization", quantization(document).or_else(unknown));
    row("tensors", Some(document.tensors.len().to_string()));
    row("context length", number(document.context_length));
    row("embedding length", number(document.embedding_length));
    row("blocks", number(document.block_count));
    row("heads", heads(document));
    row("experts", experts(document));
    row("vocabulary", number(document.vocabulary_size));
    row("capabilities", Some(document.capabilities.join(", ")).filter(|text| !text.is_empty()));
    row("projector", projector(model));
    row("template", texts::template(model).map(|text| first_line(&text)));
    row("system", model.text("system").map(first_line));
    row("sampling", texts::parameters(model).map(|lines| lines.join(", ")));
    row("license", texts::license(model).map(|text| first_line(&text)));
    row("size", Some(size(document)));
    table
}

fn place(place: &Place) -> Option<String> {
    match place {
        Place::Store(_) => None,
        Place::LocalFiles => Some("a local file, not in the store".to_owned()),
        Place::Registry(origin) => Some(format!("not pulled; read from {origin}")),
    }
}

/// The decision of a rule, or a denial; `None` if the model is allowed by default.
fn policy(decision: &PolicyDecision) -> Option<String> {
    let PolicyDecision { allowed, rule, reason, found, place } = decision;
    let word = if *allowed { "allowed" } else { "denied" };
    let found = found.as_ref().map_or_else(String::new, |found| format!("; found: {}", printable(found)));
    let Some(rule) = rule else {
        return (!allowed).then(|| format!("denied: no rule allows it{found}"));
    };
    let place = place.as_ref().map_or_else(String::new, |place| format!(" ({})", printable(place)));
    let reason = reason.as_ref().map_or_else(String::new, |reason| format!(": {}", printable(reason)));
    Some(format!("{word} by rule {rule}{place}{reason}{found}"))
}

fn parameters(parameters: u64) -> String {
    let short = ModelFacts { parameters, ..ModelFacts::default() }.parameter_size();
    if parameters < 1000 { short } else { format!("{short} ({parameters})") }
}

fn quantization(document: &Document) -> Option<String> {
    let bits = document.bits_per_weight.map(|bits| format!("{bits:.2} bits per weight"));
    let parts: Vec<_> = document.quantization.clone().into_iter().chain(bits).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn heads(document: &Document) -> Option<String> {
    let heads = document.head_count?;
    Some(match document.head_count_kv {
        Some(kv) if kv != heads => format!("{heads}, {kv} for keys and values"),
        _ => heads.to_string(),
    })
}

fn experts(document: &Document) -> Option<String> {
    let experts = document.expert_count.filter(|count| *count > 0)?;
    Some(match document.expert_used_count {
        Some(used) => format!("{experts}, {used} used for each token"),
        None => experts.to_string(),
    })
}

fn projector(model: &DescribedModel) -> Option<String> {
    let files = model.files.iter().filter(|file| file.media_type.component() == "projector");
    let sizes: Vec<_> = files.map(|file| human_bytes(file.size)).collect();
    (!sizes.is_empty()).then(|| sizes.join(", "))
}

fn size(document: &Document) -> String {
    let size = human_bytes(document.size);
    match &document.sharing {
        Some(Sharing { unique_bytes, shared_bytes, shared_with }) if !shared_with.is_empty() => format!(
            "{size}; on disk {} of its own and {} shared",
            human_bytes(*unique_bytes),
            human_bytes(*shared_bytes)
        ),
        _ => size,
    }
}

/// The first line that is not empty, cut.
fn first_line(text: &str) -> String {
    cut(text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default())
}

fn cut(text: &str) -> String {
    let shown: String = text.chars().take(MAX_VALUE_CHARS).collect();
    if shown.len() < text.len() { shown + "…" } else { shown }
}

/// The quantisation mix.
fn types(document: &Document) -> Table {
    let mut table = Table::new(&["TYPE", "TENSORS", "SIZE", "SHARE"], &[1, 2, 3]);
    let total = document.types.iter().fold(0_u64, |sum, row| sum.saturating_add(row.bytes)).max(1);
    for row in &document.types {
        let percent = u128::from(row.bytes) * 100 / u128::from(total);
        table.row([
            row.type_name.clone(),
            row.tensors.to_string(),
            human_bytes(row.bytes),
            format!("{percent} %"),
        ]);
    }
    table
}

fn files(document: &Document) -> Table {
    let mut table = Table::new(&["FILE", "DIGEST", "SIZE", "STORED"], &[2]);
    for layer in &document.layers {
        let stored = match layer.stored {
            Some(StoredForm::Blob) => "as one blob",
            Some(StoredForm::Recipe) => "by tensor",
            None => "-",
        };
        let unpacked = layer.unpacked_from.map(|packed| format!(", unpacked from {}", packed.short()));
        let stored = format!("{stored}{}", unpacked.unwrap_or_default());
        let component = layer.media_type.component();
        let name = match &layer.name {
            Some(name) => format!("{component} {name}"),
            None => component.to_owned(),
        };
        let digest = layer.digest.map_or_else(|| "-".to_owned(), Digest::short);
        table.row([name, digest, human_bytes(layer.size), stored]);
    }
    table
}

fn sharers(sharing: &Sharing) -> Option<Table> {
    let mut table = Table::new(&["SHARES WITH", "ON DISK"], &[1]);
    for other in sharing.shared_with.iter().take(MAX_SHARERS) {
        table.row([other.name.clone(), human_bytes(other.bytes)]);
    }
    let more = sharing.shared_with.len().saturating_sub(MAX_SHARERS);
    if more > 0 {
        table.row([format!("and {more} more")]);
    }
    (!sharing.shared_with.is_empty()).then_some(table)
}

fn layers(rows: &[NetworkLayer]) -> Table {
    let mut table = Table::new(&["LAYER", "TENSORS", "SIZE"], &[1, 2]);
    for row in rows {
        table.row([row.layer.clone(), row.tensors.to_string(), human_bytes(row.bytes)]);
    }
    table
}

fn metadata(document: &Document) -> Table {
    let mut table = Table::new(&["KEY", "VALUE"], &[]);
    for (key, value) in &document.metadata {
        table.row([key.clone(), cut(&value.to_string())]);
    }
    table
}

fn form(document: &Document) -> Option<Table> {
    let form = document.header.as_ref()?;
    let mut table = Table::new(&["HEADER", ""], &[]);
    table.row(["version".to_owned(), form.version.to_string()]);
    table.row(["byte order".to_owned(), form.byte_order.to_owned()]);
    table.row(["alignment".to_owned(), form.alignment.to_string()]);
    table.row(["data offset".to_owned(), form.data_offset.to_string()]);
    let other: u64 = document.files.iter().map(tensors::other_bytes).fold(0, u64::saturating_add);
    table.row(["header and padding".to_owned(), human_bytes(other)]);
    Some(table)
}

fn keys(document: &Document) -> Option<Table> {
    let mut table = Table::new(&["KEY", "TYPE", "VALUE"], &[]);
    for key in document.keys.as_ref()? {
        table.row(key.cells());
    }
    Some(table)
}

fn tensors(document: &Document) -> Table {
    let mut table = Table::new(&["TENSOR", "TYPE", "SHAPE", "SIZE", "OFFSET", "BLOB"], &[3, 4]);
    for tensor in &document.tensors {
        let shape: Vec<String> = tensor.shape().iter().map(u64::to_string).collect();
        table.row([
            tensor.name().to_owned(),
            tensor.type_name().to_owned(),
            shape.join("×"),
            human_bytes(tensor.size()),
            tensor.file_offset().map_or_else(|| "-".to_owned(), |offset| offset.to_string()),
            tensor.blob().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table
}
