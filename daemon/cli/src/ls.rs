//! `blobd ls`

use std::cmp::Reverse;
use std::collections::BTreeMap;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect, print_result, show};
use blobd_cli_common::model_name::is_any;
use blobd_cli_common::output::{
    Table, counted, human_bytes, or_dash, print_message, printable, terminal_width,
};
use blobd_cli_common::times::{local, relative};
use blobd_cli_import::other_stores;
use blobd_client::protocol::response::{LowerStore, ModelDetails, ModelList, ModelSummary};
use blobd_client::protocol::space::{DiskUsage, ModelUsage};
use blobd_model::kind::ModelKind;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::origin::shown as shown_origin;
use clap::{Args, ValueEnum};
use serde::Serialize;

use self::filter::Filter;
use self::template::Template;
use crate::{Client, Digest, ErrorBody, df};

mod filter;
mod template;

/// For an empty store.
pub(super) const NO_MODELS: &str = "no models; `blobd pull llama3:8b` or `blobd import FILE.gguf` adds one\n";
/// For a store whose models were all filtered out.
pub(super) const NO_MATCH: &str = "no model matches\n";

/// List the models
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd ls
  blobd ls llama                               models whose name contains llama, in any case
  blobd ls 'llama*' 'hf.co/*:q4*'              models with such names
  blobd ls --sort size                         the largest first
  blobd ls --filter older=30d --filter pinned=false
  blobd ls --filter name='hf.co/*' --filter quantization=Q4_K_M
  blobd ls --filter kind=embedding
  blobd ls --format '{name} {bytes}'           one line per model, for scripts
  blobd ls -q                                  only names, one per line
  blobd ls --trash                             models that `blobd undelete` can restore
  blobd ls --json | jq -r '.models[].name'

Patterns are as for `blobd rm`: * is any text, ? one character, [a-c] one of these.
Keys of --filter: name, origin (a part, or a pattern), kind, architecture or family,
quantization, pinned, damaged (true or false), older and newer (than a time such as 30d, by
MODIFIED). Kinds, one or several with commas: model, embedding, reranker, encoder, diffusion,
vocabulary, adapter, control-vector, imatrix, projector, draft. The table has a column KIND if
any is not a model.
ON DISK is what the store needs of the model, also if other models need it too. The last line has
what sharing saves, as `blobd df` has. Columns that say least are left out on a narrow terminal.
Fields of --format: name, id, digest, size, bytes, on-disk, modified, age, used, pinned, origin,
kind, architecture, quantization, state. {{.Name}} is understood as {name}, \\t is a tab.")]
pub(super) struct Params {
    /// List only models whose name contains one of these texts or matches one of these patterns
    #[arg(value_name = "TEXT|PATTERN", value_parser = NamePattern::search)]
    names: Vec<NamePattern>,
    /// List the models in the trash
    #[arg(long, conflicts_with_all = ["sort", "filters", "format"])]
    trash: bool,
    /// The order: by name, the largest first, or the last modified or used first
    #[arg(long, value_name = "KEY", default_value = "name", hide_default_value = true)]
    sort: Sort,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// List only matching models; several filters must all match
    #[arg(long = "filter", value_name = "KEY=VALUE")]
    filters: Vec<Filter>,
    /// Print each model as this text, such as '{name} {size}'; `table` for the usual table
    #[arg(long, value_name = "TEMPLATE|table")]
    format: Option<Template>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    Name,
    Size,
    Modified,
    Used,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.trash {
        return list_trash(global, params);
    }
    let connected = connect(global)?;
    let mut list = connected.client.models().map_err(client_error)?;
    let facts = params.facts(global, &connected.client, &list)?;
    list.models.retain(|model| params.is_listed(model, &facts));
    params.sort(&mut list.models, &facts);
    let shown = ShownList::new(list, &facts);
    print_result(global, &shown, |shown| render(global, params, shown, &facts))
}

/// The list with what `df` and the headers add to it.
#[derive(Debug, Serialize)]
struct ShownList {
    models: Vec<ShownModel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    read_only: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lower_stores: Vec<LowerStore>,
    #[serde(flatten)]
    saving: Option<Saving>,
}

#[derive(Debug, Serialize)]
struct ShownModel {
    #[serde(flatten)]
    summary: ModelSummary,
    #[serde(flatten)]
    disk: Option<OnDisk>,
}

#[derive(Debug, Serialize)]
struct OnDisk {
    unique_bytes: u64,
    shared_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_opened: Option<String>,
}

/// What sharing saves in the whole store: the figures of `df`.
#[derive(Debug, Serialize)]
struct Saving {
    logical_bytes: u64,
    stored_bytes: u64,
    saved_bytes: u64,
}

impl ShownList {
    fn new(list: ModelList, facts: &Facts) -> Self {
        let shown = |summary: ModelSummary| {
            let of_store = facts.usage_of(&summary);
            let disk = of_store.map(|usage| OnDisk {
                unique_bytes: usage.unique_bytes,
                shared_bytes: usage.shared_bytes,
                last_opened: usage.last_opened.clone(),
            });
            ShownModel { summary, disk }
        };
        let saving = facts.usage.as_ref().map(|usage| Saving {
            logical_bytes: usage.logical_bytes,
            stored_bytes: usage.stored_bytes,
            saved_bytes: usage.saved_bytes,
        });
        let ModelList { models, read_only, lower_stores } = list;
        Self { models: models.into_iter().map(shown).collect(), read_only, lower_stores, saving }
    }

    fn summaries(&self) -> impl Iterator<Item = &ModelSummary> {
        self.models.iter().map(|model| &model.summary)
    }
}

impl Params {
    fn facts(&self, global: &Global, client: &Client, list: &ModelList) -> Result<Facts, ErrorBody> {
        let mut facts = Facts { listed: list.models.len(), ..Facts::default() };
        let format = self.format.as_ref().filter(|format| !format.is_table());
        if self.sort == Sort::Used || format.is_some_and(Template::needs_usage) {
            facts.read_usage(client.disk_usage().map_err(client_error)?);
        } else if format.is_none() && (global.json || !global.quiet) {
            // A list without these columns is better than none.
            client.disk_usage().into_iter().for_each(|usage| facts.read_usage(usage));
        }
        let needs_header = |model: &&ModelSummary| {
            let of_format = format.is_some_and(|format| format.needs_header(model));
            let (costly, cheap): (Vec<_>, Vec<_>) =
                self.filters.iter().partition(|filter| filter.needs_header(model));
            (of_format || !costly.is_empty())
                && is_any(&self.names, &model.name)
                && cheap.iter().all(|filter| filter.matches(model, &Facts::default()))
        };
        facts.read_headers(client, list.models.iter().filter(needs_header));
        Ok(facts)
    }

    fn is_listed(&self, model: &ModelSummary, facts: &Facts) -> bool {
        is_any(&self.names, &model.name) && self.filters.iter().all(|filter| filter.matches(model, facts))
    }

    /// The list is sorted by name already, which also orders equal models. RFC 3339 sorts as text.
    fn sort(&self, models: &mut [ModelSummary], facts: &Facts) {
        match self.sort {
            Sort::Name => {}
            Sort::Size => models.sort_by_key(|model| Reverse(model.size)),
            Sort::Modified => models.sort_by(|a, b| b.modified.cmp(&a.modified)),
            Sort::Used => models.sort_by(|a, b| facts.used(b).cmp(&facts.used(a))),
        }
        if self.reverse {
            models.reverse();
        }
    }
}

/// Facts beyond the list of models. What was not read is absent.
#[derive(Debug, Default)]
struct Facts {
    /// How many names the store lists, before a selection.
    listed: usize,
    usage: Option<DiskUsage>,
    /// The places of the models in `usage`, by name.
    used: BTreeMap<String, usize>,
    headers: BTreeMap<String, HeaderFacts>,
}

#[derive(Debug)]
struct HeaderFacts {
    kind: Option<ModelKind>,
    architecture: Option<String>,
    quantization: Option<String>,
}

impl Facts {
    fn read_usage(&mut self, usage: DiskUsage) {
        let names = usage.models.iter().map(|model| model.name.clone());
        self.used = names.zip(0..).collect();
        self.usage = Some(usage);
    }

    /// What a model takes in the writable store.
    fn usage_of(&self, model: &ModelSummary) -> Option<&ModelUsage> {
        let place = self.used.get(&model.name).filter(|_| model.store.is_none())?;
        self.usage.as_ref()?.models.get(*place)
    }

    /// Leaves out damaged models, which `ls` lists anyway.
    fn read_headers<'m>(&mut self, client: &Client, models: impl Iterator<Item = &'m ModelSummary>) {
        for model in models {
            let Ok(reference) = model.name.parse() else { continue };
            if let Ok(ModelDetails { kind, architecture, quantization, .. }) = client.model(&reference) {
                self.headers.insert(model.name.clone(), HeaderFacts { kind, architecture, quantization });
            }
        }
    }

    fn used(&self, model: &ModelSummary) -> Option<&str> {
        self.usage_of(model)?.last_opened.as_deref()
    }

    fn on_disk(&self, model: &ModelSummary) -> Option<String> {
        self.usage_of(model).map(|usage| human_bytes(usage.unique_bytes.saturating_add(usage.shared_bytes)))
    }

    fn kind(&self, model: &ModelSummary) -> Option<ModelKind> {
        model.kind.or_else(|| self.headers.get(&model.name)?.kind)
    }

    fn architecture<'f>(&'f self, model: &'f ModelSummary) -> Option<&'f str> {
        let of_header = || self.headers.get(&model.name)?.architecture.as_deref();
        model.architecture.as_deref().or_else(of_header)
    }

    fn quantization<'f>(&'f self, model: &'f ModelSummary) -> Option<&'f str> {
        let of_header = || self.headers.get(&model.name)?.quantization.as_deref();
        model.quantization.as_deref().or_else(of_header)
    }
}

fn render(global: &Global, params: &Params, list: &ShownList, facts: &Facts) -> String {
    if let Some(template) = params.format.as_ref().filter(|template| !template.is_table()) {
        return list.summaries().map(|model| template.line(model, facts)).collect();
    }
    if global.quiet {
        return names(list.summaries().map(|model| &model.name));
    }
    if let Some(reason) = &list.read_only {
        print_message(&format!("blobd: the store is read-only: {}\n", printable(reason)));
    }
    for lower in &list.lower_stores {
        if let Some(problem) = &lower.problem {
            print_message(&format!("blobd: a lower store is left out: {}\n", printable(problem)));
        }
    }
    if list.models.is_empty() {
        let has_selected = !params.names.is_empty() || !params.filters.is_empty();
        let others = other_stores::present().map(|found| format!("{found}\n")).unwrap_or_default();
        return if has_selected { NO_MATCH.to_owned() } else { format!("{NO_MODELS}{others}") };
    }
    table(global, list, facts).render(terminal_width()) + &total(list, facts)
}

fn table(global: &Global, list: &ShownList, facts: &Facts) -> Table {
    const HEADINGS: [&str; 11] =
        ["NAME", "ID", "SIZE", "ON DISK", "KIND", "QUANT", "MODIFIED", "PIN", "STORE", "STATE", "ORIGIN"];
    let is_shown = |heading: &str| match heading {
        "KIND" => list.summaries().any(|model| model.kind.is_some_and(|kind| kind != ModelKind::Model)),
        "STORE" => !list.lower_stores.is_empty(),
        "STATE" => list.summaries().any(|model| model.damage.is_some()),
        "ORIGIN" => global.verbose,
        _ => true,
    };
    let shown: Vec<_> = HEADINGS.into_iter().filter(|heading| is_shown(heading)).collect();
    let rows = list.summaries().map(|model| {
        let row =
            HEADINGS.into_iter().zip(row(global, model, facts)).filter(|(heading, _)| is_shown(heading));
        row.map(|(_, cell)| cell)
    });
    let texts: Vec<_> = (0..)
        .zip(&shown)
        .filter(|(_, heading)| matches!(**heading, "STATE" | "ORIGIN" | "STORE"))
        .map(|(column, _)| column)
        .collect();
    let table = Table::with_rows(&shown, &[2, 3], rows).with_names_in(&[0]).with_texts_in(&texts);
    table.leaving_out_first(&["ID", "MODIFIED", "PIN", "KIND", "QUANT", "ON DISK"])
}

/// What sharing saves, in the words of `df`; of a selection only how much it is.
fn total(list: &ShownList, facts: &Facts) -> String {
    let own = list.summaries().filter(|model| model.store.is_none()).count();
    let lower = match list.models.len() - own {
        0 => String::new(),
        lower => format!("; {} in lower stores", counted(lower, "name")),
    };
    match &facts.usage {
        Some(usage) if list.models.len() == facts.listed && own > 0 => {
            let models = usize::try_from(usage.model_count).unwrap_or(usize::MAX);
            let names = if own == models { String::new() } else { format!("{} of ", counted(own, "name")) };
            format!("{names}{}{lower}\n", df::saving(usage))
        }
        _ => {
            let mut sizes: BTreeMap<Digest, u64> = BTreeMap::new();
            sizes.extend(list.summaries().map(|model| (model.digest, model.size)));
            let bytes = sizes.into_values().fold(0, u64::saturating_add);
            let listed = if list.models.len() == facts.listed {
                String::new()
            } else {
                format!(" of {}", facts.listed)
            };
            format!("{}{listed}, {} as files\n", counted(list.models.len(), "name"), human_bytes(bytes))
        }
    }
}

fn list_trash(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let models = |client: &Client| {
        let mut list = client.trash()?;
        list.models.retain(|model| is_any(&params.names, &model.name));
        if params.reverse {
            list.models.reverse();
        }
        Ok(list)
    };
    show(global, models, |list| {
        if global.quiet {
            return names(list.models.iter().map(|model| &model.name));
        }
        if list.models.is_empty() {
            let is_empty = "the trash is empty; `blobd rm --keep 7d MODEL` moves a model there\n";
            return (if params.names.is_empty() { is_empty } else { NO_MATCH }).to_owned();
        }
        let rows = list.models.iter().map(|model| {
            let reason = if model.replaced { "replaced" } else { "removed" }.to_owned();
            let [removed, expires] = [&model.removed, &model.expires].map(|at| time(global, at));
            [model.name.clone(), model.digest.short(), human_bytes(model.size), reason, removed, expires]
        });
        Table::with_rows(&["NAME", "ID", "SIZE", "BECAUSE", "WHEN", "EXPIRES"], &[2], rows)
            .leaving_out_first(&["BECAUSE", "WHEN", "SIZE"])
            .render(terminal_width())
    })
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(|name| format!("{}\n", printable(name))).collect()
}

fn row(global: &Global, model: &ModelSummary, facts: &Facts) -> [String; 11] {
    let pin = if model.pinned { "pinned" } else { "-" }.to_owned();
    // Without the manifest, ID and size are unknown.
    let has_manifest = model.damage.is_none() || model.size > 0;
    let [id, size] = [model.digest.short(), human_bytes(model.size)];
    let known = |text: String| if has_manifest { text } else { "-".to_owned() };
    let state = match &model.damage {
        None => "-".to_owned(),
        Some(damage) if has_manifest => damage.clone(),
        Some(damage) => format!("damaged: {damage}"),
    };
    [
        model.name.clone(),
        known(id),
        known(size),
        or_dash(facts.on_disk(model)),
        or_dash(model.kind),
        or_dash(facts.quantization(model)),
        time(global, &model.modified),
        pin,
        or_dash(model.store.as_ref()),
        state,
        shown_origin(model.origin.as_deref().unwrap_or("-")).to_owned(),
    ]
}

fn time(global: &Global, rfc3339: &str) -> String {
    if global.verbose { local(rfc3339) } else { relative(rfc3339) }
}

/// A model for tests.
#[cfg(test)]
fn summary(name: &str) -> ModelSummary {
    ModelSummary {
        name: name.to_owned(),
        digest: blobd_store_format::digest::Digest::of(b""),
        size: 1,
        kind: None,
        architecture: None,
        quantization: None,
        modified: String::new(),
        pinned: false,
        origin: None,
        follows: None,
        damage: None,
        store: None,
        added_by: None,
    }
}
