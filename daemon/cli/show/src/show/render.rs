//! The tables of `show`.

use blobd_cli_common::described_model::{DescribedModel, ModelLocation};
use blobd_cli_common::output::{Table, counted, human_bytes, or_dash, printable, terminal_width};
use blobd_client::protocol::access::PolicyDecision;
use blobd_model::facts::ModelFacts;
use blobd_model::kind::ModelKind;
use blobd_model::metadata_json::short_text;
use blobd_store_format::stored_file::StoredForm;

use super::document::{Document, LayerRow, Sharing};
use super::header::{self, WholeKey};
use super::tensors::{self, NetworkLayer, TensorFacts};
use super::{Params, texts};
use crate::Digest;

/// The most lines of the overview: fewer than on a screen of 40, with the command above it.
const MAX_LINES: usize = 38;
/// The fewest rows of a table that is shortened: one, and the number of the others.
const MIN_ROWS: usize = 2;
/// A table's heading, and the empty line above it.
const LINES_PER_TABLE: usize = 2;

pub(super) fn render(document: &Document, model: &DescribedModel, params: &Params) -> String {
    let is_overview = !(params.tensors || params.metadata || params.layers || params.full);
    let overview = overview(document, model);
    let mut tables = vec![files(document)];
    if is_overview {
        tables.insert(0, types(document));
        tables.extend(document.sharing.as_ref().map(sharers));
        tables.retain(Table::has_rows);
        shorten(&mut tables, MAX_LINES.saturating_sub(overview.row_count() + 1));
    }
    tables.extend(document.network_layers.as_deref().map(layers));
    tables.extend((params.metadata && !params.full).then(|| metadata(document)));
    tables.extend(params.full.then(|| form(document)).flatten());
    tables.extend(params.full.then(|| keys(document)).flatten());
    tables.extend(params.tensors.then(|| tensors(document)));
    let tables = tables.iter().filter(|table| table.has_rows());
    let tables: Vec<_> = tables.map(|table| table.render(terminal_width())).collect();
    let overview = overview.render(terminal_width());
    if tables.is_empty() { overview } else { overview + "\n" + &tables.join("\n") }
}

/// Shortens the longest tables until all have `room` lines together.
fn shorten(tables: &mut [Table], room: usize) {
    let lines =
        |tables: &[Table]| tables.iter().map(|table| table.row_count() + LINES_PER_TABLE).sum::<usize>();
    let mut excess = lines(tables).saturating_sub(room);
    while let Some(longest) = tables.iter_mut().max_by_key(|table| table.row_count()) {
        let length = longest.row_count();
        if excess == 0 || length <= MIN_ROWS {
            break;
        }
        // Many rows at once: a model may have thousands of files.
        let next = length.saturating_sub(excess).max(length / 2).max(MIN_ROWS).min(length - 1);
        excess -= length - next;
        longest.shorten(next);
    }
}

fn overview(document: &Document, model: &DescribedModel) -> Table {
    let mut table = Table::new(&["name", &printable(&document.name)], &[]).of_values();
    let mut row = |label: &str, value: Option<String>| {
        if let Some(value) = value {
            table.row([label.to_owned(), value]);
        }
    };
    let number = |number: Option<u64>| number.map(|number| number.to_string());
    let is_model = document.kind == ModelKind::Model && remote(document).is_none();
    let unknown = || is_model.then(|| "-".to_owned());
    row(
        "kind",
        Some(header::kind_with_facts(document.kind, document.files.first().map(|file| &file.header))),
    );
    row("digest", document.digest.map(digest));
    row("place", remote(document).or_else(|| place(&model.place)));
    row("origin", document.origin.clone().filter(|_| document.stored));
    row("policy", document.policy.as_ref().and_then(policy));
    about(document, &mut row);
    row("architecture", document.architecture.clone().or_else(unknown));
    row("parameters", parameters(document).or_else(unknown));
    row("quantization", quantization(document).or_else(unknown));
    row("context length", number(document.context_length));
    row("blocks", blocks(document));
    row("heads", heads(document));
    row("experts", experts(document));
    row("vocabulary", number(document.vocabulary_size));
    row("capabilities", Some(document.capabilities.join(", ")).filter(|text| !text.is_empty()));
    row("projector", beside(document, model, "projector"));
    row("draft", beside(document, model, "draft").or_else(|| configured_draft(document)));
    row("ollama", for_ollama(document));
    row("template", texts::template(model).map(|text| first_line(&text)));
    row("system", model.text("system").map(first_line));
    row("sampling", texts::parameters(model).map(|lines| lines.join(", ")).or_else(|| defaults(document)));
    row("license", license(document, model));
    row("size", Some(size(document)));
    table
}

/// The whole digest if it fits the terminal, else the ID.
fn digest(digest: Digest) -> String {
    const LABEL_CHARS: usize = "context length".len() + 2;
    let whole = digest.to_string();
    if LABEL_CHARS + whole.len() <= terminal_width() { whole } else { digest.short() }
}

fn remote(document: &Document) -> Option<String> {
    let config = document.config.as_ref()?;
    let host = config.remote_host.as_ref().filter(|_| document.tensors.is_empty())?;
    let model = config.remote_model.as_ref().map_or_else(String::new, |model| format!(" (as {model})"));
    Some(format!("runs at {host}, has no weights{model}"))
}

fn about(document: &Document, row: &mut impl FnMut(&str, Option<String>)) {
    let Some(about) = &document.about else { return };
    let quantized = about.quantized_by.as_ref().map(|name| format!("quantised by {name}"));
    let made_by = [about.organization.clone(), about.author.clone(), quantized];
    let mut made_by: Vec<String> = made_by.into_iter().flatten().collect();
    made_by.dedup();
    row("title", about.name.clone());
    row("made by", Some(made_by.join(", ")).filter(|text| !text.is_empty()));
    row("description", about.description.as_deref().map(first_line));
    let bases = about.base_models.iter().filter_map(|base| {
        let name = base.name.as_ref().or(base.url.as_ref())?;
        let organization = base.organization.as_ref().map(|name| format!(" ({name})"));
        Some(format!("{name}{}", organization.unwrap_or_default()))
    });
    row("base model", Some(bases.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty()));
}

fn place(place: &ModelLocation) -> Option<String> {
    match place {
        ModelLocation::Store(_) => None,
        ModelLocation::LocalFiles => Some("a local file, not in the store".to_owned()),
        ModelLocation::Registry(origin) => Some(format!("not pulled; read from {origin}")),
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

fn parameters(document: &Document) -> Option<String> {
    let (parameters, tensors) = (document.parameters, document.tensors.len());
    if parameters == 0 && tensors == 0 {
        return None;
    }
    let short = ModelFacts { parameters, ..ModelFacts::default() }.parameter_size();
    let count = if parameters < 1000 { short } else { format!("{short} ({parameters})") };
    Some(format!("{count} in {}", counted(tensors, "tensor")))
}

fn blocks(document: &Document) -> Option<String> {
    let embedding = document.embedding_length.map(|length| format!("embedding length {length}"));
    let blocks = document.block_count.map(|count| count.to_string());
    let parts: Vec<_> = blocks.into_iter().chain(embedding).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
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

fn beside(document: &Document, model: &DescribedModel, component: &str) -> Option<String> {
    if document.kind.name() == component {
        return None;
    }
    let files = model.files.iter().filter(|file| file.media_type.component() == component);
    let sizes: Vec<_> = files.map(|file| human_bytes(file.size)).collect();
    (!sizes.is_empty()).then(|| sizes.join(", "))
}

fn configured_draft(document: &Document) -> Option<String> {
    let draft = document.config.as_ref()?.draft.as_ref()?;
    let prefix = draft.tensor_prefix.as_ref().map(|prefix| format!("tensors {prefix}…"));
    let parts: Vec<_> = draft.architecture.clone().into_iter().chain(prefix).collect();
    Some(if parts.is_empty() { "among the layers".to_owned() } else { parts.join(", ") })
}

fn for_ollama(document: &Document) -> Option<String> {
    let config = document.config.as_ref()?;
    let fields = [
        ("renderer", &config.renderer),
        ("parser", &config.parser),
        ("requires", &config.requires),
        ("base", &config.base_name),
    ];
    let fields = fields.into_iter().filter_map(|(label, value)| Some(format!("{label} {}", value.as_ref()?)));
    Some(fields.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// The sampling parameters that the model's author recommends: in the configuration, else in the header.
fn defaults(document: &Document) -> Option<String> {
    const KEY: &str = "general.sampling.";
    let configured = document.config.iter().flat_map(|config| &config.generation_defaults);
    let mut found: Vec<_> = configured.map(|(name, value)| format!("{name} {value}")).collect();
    if found.is_empty() {
        let of_header = document.metadata.range(KEY.to_owned()..);
        let of_header = of_header.map_while(|(key, value)| Some((key.strip_prefix(KEY)?, value)));
        found = of_header.map(|(name, value)| format!("{name} {}", short_text(value))).collect();
    }
    (!found.is_empty()).then(|| format!("{} (recommended)", found.join(", ")))
}

fn license(document: &Document, model: &DescribedModel) -> Option<String> {
    let of_layer = model.text("license").map(first_line);
    let of_header = || {
        let about = document.about.as_ref()?;
        let parts = [&about.license, &about.license_name, &about.license_link];
        Some(parts.into_iter().flatten().map(|text| first_line(text)).collect::<Vec<_>>().join(", "))
    };
    of_layer.or_else(of_header).filter(|text| !text.is_empty())
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

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

fn types(document: &Document) -> Table {
    let total = document.types.iter().fold(0_u64, |sum, row| sum.saturating_add(row.bytes)).max(1);
    let rows = document.types.iter().map(|row| {
        let percent = u128::from(row.bytes) * 100 / u128::from(total);
        [row.type_name.clone(), row.tensors.to_string(), human_bytes(row.bytes), format!("{percent} %")]
    });
    Table::with_rows(&["TYPE", "TENSORS", "SIZE", "SHARE"], &[1, 2, 3], rows)
}

/// The files of the model. Models with a file per tensor have thousands: these are one row.
fn files(document: &Document) -> Table {
    let table = Table::new(&["FILE", "DIGEST", "SIZE", "STORED"], &[2]);
    let mut table = table.leaving_out_first(&["DIGEST", "STORED"]);
    let (tensors, others): (Vec<_>, Vec<_>) =
        document.layers.iter().partition(|layer| layer.media_type.component() == "tensor");
    for layer in others {
        let component = layer.media_type.component();
        let name = match &layer.name {
            Some(name) => format!("{component} {name}"),
            None => component.to_owned(),
        };
        let digest = or_dash(layer.digest.map(Digest::short));
        table.row([name, digest, human_bytes(layer.size), stored_as(layer)]);
    }
    if let Some(first) = tensors.first() {
        let bytes = tensors.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
        let name = format!("{} files with tensors", tensors.len());
        table.row([name, "-".to_owned(), human_bytes(bytes), stored_as(first)]);
    }
    table
}

fn stored_as(layer: &LayerRow) -> String {
    let stored = match layer.stored {
        Some(StoredForm::Blob) => "as one blob",
        Some(StoredForm::Recipe) => "by tensor",
        None => "-",
    };
    let unpacked = layer.unpacked_from.map(|packed| format!(", unpacked from {}", packed.short()));
    format!("{stored}{}", unpacked.unwrap_or_default())
}

fn sharers(sharing: &Sharing) -> Table {
    let rows = sharing.shared_with.iter().map(|other| [other.name.clone(), human_bytes(other.bytes)]);
    Table::with_rows(&["SHARES WITH", "ON DISK"], &[1], rows)
}

fn layers(rows: &[NetworkLayer]) -> Table {
    let rows = rows.iter().map(|row| [row.layer.clone(), row.tensors.to_string(), human_bytes(row.bytes)]);
    Table::with_rows(&["LAYER", "TENSORS", "SIZE"], &[1, 2], rows)
}

fn metadata(document: &Document) -> Table {
    let rows = document.metadata.iter().map(|(key, value)| [key.clone(), short_text(value)]);
    Table::with_rows(&["KEY", "VALUE"], &[], rows)
}

fn form(document: &Document) -> Option<Table> {
    let form = document.header.as_ref()?;
    let other: u64 = document.files.iter().map(tensors::other_bytes).fold(0, u64::saturating_add);
    let other = (!document.files.is_empty()).then(|| human_bytes(other));
    let rows = [
        ("version", form.version.map(|version| version.to_string())),
        ("byte order", Some(form.byte_order.to_owned())),
        ("alignment", form.alignment.map(|alignment| alignment.to_string())),
        ("data offset", Some(form.data_offset.to_string())),
        ("header and padding", other),
    ];
    let rows = rows.into_iter().filter_map(|(label, value)| Some([label.to_owned(), value?]));
    Some(Table::with_rows(&["HEADER", ""], &[], rows))
}

fn keys(document: &Document) -> Option<Table> {
    let rows = document.keys.as_ref()?.iter().map(WholeKey::cells);
    Some(Table::with_rows(&["KEY", "TYPE", "VALUE"], &[], rows))
}

fn tensors(document: &Document) -> Table {
    let has_files = document.tensors.iter().any(|tensor| tensor.facts().file.is_some());
    let rows = document.tensors.iter().map(|tensor| {
        let TensorFacts { name, type_name, shape, size, file, file_offset, blob } = tensor.facts();
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        let (offset, blob) = (or_dash(file_offset), or_dash(blob.map(Digest::short)));
        let file = has_files.then(|| or_dash(file));
        let facts = [name.to_owned(), type_name.to_owned(), shape.join("×"), human_bytes(size), offset, blob];
        facts.into_iter().chain(file)
    });
    let headings = ["TENSOR", "TYPE", "SHAPE", "SIZE", "OFFSET", "BLOB", "FILE"];
    let headings = if has_files { &headings[..] } else { &headings[..6] };
    Table::with_rows(headings, &[3, 4], rows).leaving_out_first(&["OFFSET", "BLOB", "SIZE"])
}
