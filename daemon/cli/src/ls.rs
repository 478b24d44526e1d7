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
use blobd_client::protocol::response::{ModelDetails, ModelList, ModelSummary};
use blobd_model::kind::ModelKind;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::origin::shown as shown_origin;
use clap::{Args, ValueEnum};

use self::filter::Filter;
use self::template::Template;
use crate::{Client, ErrorBody};

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
Fields of --format: name, id, digest, size, bytes, modified, age, used, pinned, origin, kind,
architecture, quantization. {{.Name}} is understood as {name}, \\t is a tab.")]
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
    let facts = params.facts(&connected.client, &list)?;
    list.models.retain(|model| params.is_listed(model, &facts));
    params.sort(&mut list.models, &facts);
    print_result(global, &list, |list| render(global, params, list, &facts))
}

impl Params {
    fn facts(&self, client: &Client, list: &ModelList) -> Result<Facts, ErrorBody> {
        let mut facts = Facts::default();
        let format = self.format.as_ref();
        if self.sort == Sort::Used || format.is_some_and(Template::needs_use) {
            facts.read_use(client)?;
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

/// Facts beyond the list of models, by name: times of use, and facts from headers. What was not read is absent.
#[derive(Debug, Default)]
struct Facts {
    /// When a model was last opened, RFC 3339.
    used: BTreeMap<String, String>,
    headers: BTreeMap<String, HeaderFacts>,
}

#[derive(Debug)]
struct HeaderFacts {
    kind: Option<ModelKind>,
    architecture: Option<String>,
    quantization: Option<String>,
}

impl Facts {
    fn read_use(&mut self, client: &Client) -> Result<(), ErrorBody> {
        let models = client.disk_usage().map_err(client_error)?.models;
        self.used = models.into_iter().filter_map(|model| Some((model.name, model.last_opened?))).collect();
        Ok(())
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
        self.used.get(&model.name).map(String::as_str)
    }

    fn kind(&self, model: &ModelSummary) -> Option<ModelKind> {
        model.kind.or_else(|| self.headers.get(&model.name)?.kind)
    }

    fn architecture(&self, model: &ModelSummary) -> Option<&str> {
        self.headers.get(&model.name)?.architecture.as_deref()
    }

    fn quantization(&self, model: &ModelSummary) -> Option<&str> {
        self.headers.get(&model.name)?.quantization.as_deref()
    }
}

fn render(global: &Global, params: &Params, list: &ModelList, facts: &Facts) -> String {
    if let Some(template) = params.format.as_ref().filter(|template| !template.is_table()) {
        return list.models.iter().map(|model| template.line(model, facts)).collect();
    }
    if global.quiet {
        return names(list.models.iter().map(|model| &model.name));
    }
    if let Some(reason) = &list.read_only {
        print_message(&format!("blobd: the store is read-only: {}\n", printable(reason)));
    }
    for lower in &list.lower_stores {
        if let Some(problem) = &lower.problem {
            print_message(&format!("blobd: a lower store is left out: {}\n", printable(problem)));
        }
    }
    let has_selected = !params.names.is_empty() || !params.filters.is_empty();
    if list.models.is_empty() {
        let others = other_stores::present().map(|found| format!("{found}\n")).unwrap_or_default();
        return if has_selected { NO_MATCH.to_owned() } else { format!("{NO_MODELS}{others}") };
    }
    let headings = ["NAME", "ID", "SIZE", "KIND", "MODIFIED", "PIN", "STORE", "ORIGIN"];
    let is_shown = |heading: &str| match heading {
        "KIND" => list.models.iter().any(|model| model.kind.is_some_and(|kind| kind != ModelKind::Model)),
        "STORE" => !list.lower_stores.is_empty(),
        "ORIGIN" => global.verbose,
        _ => true,
    };
    let shown: Vec<_> = headings.into_iter().filter(|heading| is_shown(heading)).collect();
    let rows = list.models.iter().map(|model| {
        let row = headings.into_iter().zip(row(global, model)).filter(|(heading, _)| is_shown(heading));
        row.map(|(_, cell)| cell)
    });
    Table::with_rows(&shown, &[2], rows).render(terminal_width()) + &total(&list.models)
}

/// `3 models, 12.1 GiB as if nothing were shared`.
fn total(models: &[ModelSummary]) -> String {
    let bytes = models.iter().fold(0u64, |sum, model| sum.saturating_add(model.size));
    let as_if = if models.len() == 1 { "" } else { " as if nothing were shared" };
    format!("{}, {}{as_if}\n", counted(models.len(), "model"), human_bytes(bytes))
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
            .render(terminal_width())
    })
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(|name| format!("{}\n", printable(name))).collect()
}

fn row(global: &Global, model: &ModelSummary) -> [String; 8] {
    let pin = if model.pinned { "pinned" } else { "-" }.to_owned();
    let (id, size) = (model.digest.short(), human_bytes(model.size));
    let (id, size, modified) = match &model.damage {
        None => (id, size, time(global, &model.modified)),
        // Without the manifest, ID and size are unknown.
        Some(damage) if model.size == 0 => ("-".to_owned(), "-".to_owned(), format!("damaged: {damage}")),
        Some(damage) => (id, size, damage.clone()),
    };
    let origin = shown_origin(model.origin.as_deref().unwrap_or("-")).to_owned();
    [model.name.clone(), id, size, or_dash(model.kind), modified, pin, or_dash(model.store.as_ref()), origin]
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
        modified: String::new(),
        pinned: false,
        origin: None,
        follows: None,
        damage: None,
        store: None,
        added_by: None,
    }
}
