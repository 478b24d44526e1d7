//! `blobd ls`

use std::time::{Duration, SystemTime};

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::response::ModelSummary;
use clap::Args;

use super::Global;
use super::connect::show;
use crate::output::{Table, print_message, printable, terminal_width};
use crate::size::human_bytes;

/// List the models
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd ls
  blobd ls llama                               models whose name contains llama
  blobd ls -q                                  only names, one per line
  blobd ls --trash                             models that `blobd undelete` can restore
  blobd ls --json | jq -r '.models[].name'")]
pub(super) struct Params {
    /// List only models whose name contains this text
    #[arg(value_name = "TEXT")]
    filter: Option<String>,
    /// List the models in the trash
    #[arg(long)]
    trash: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.trash {
        return list_trash(global, params);
    }
    let models = |client: &Client| {
        let mut list = client.models()?;
        list.models.retain(|model| params.is_listed(&model.name));
        Ok(list)
    };
    show(global, models, |list| {
        if global.quiet {
            return names(list.models.iter().map(|model| &model.name));
        }
        if let Some(reason) = &list.read_only {
            print_message(&format!("blobd: the store is read-only: {}\n", printable(reason)));
        }
        let mut table = Table::new(&["NAME", "ID", "SIZE", "MODIFIED", "PIN"], &[2]);
        list.models.iter().for_each(|model| table.row(row(model)));
        table.render(terminal_width())
    })
}

impl Params {
    fn is_listed(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }
}

fn list_trash(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let models = |client: &Client| {
        let mut list = client.trash()?;
        list.models.retain(|model| params.is_listed(&model.name));
        Ok(list)
    };
    show(global, models, |list| {
        if global.quiet {
            return names(list.models.iter().map(|model| &model.name));
        }
        let mut table = Table::new(&["NAME", "ID", "SIZE", "REMOVED", "EXPIRES"], &[2]);
        for model in &list.models {
            let (id, size, removed) = (model.digest.short(), human_bytes(model.size), age(&model.removed));
            table.row([model.name.clone(), id, size, removed, model.expires.clone()]);
        }
        table.render(terminal_width())
    })
}

/// One name per line, for scripts.
fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(|name| format!("{}\n", printable(name))).collect()
}

fn row(model: &ModelSummary) -> [String; 5] {
    let pin = if model.pinned { "pinned" } else { "-" }.to_owned();
    let (id, size) = (model.digest.short(), human_bytes(model.size));
    let (id, size, modified) = match &model.damage {
        None => (id, size, age(&model.modified)),
        // Without the manifest, ID and size are unknown.
        Some(damage) if model.size == 0 => ("-".to_owned(), "-".to_owned(), format!("damaged: {damage}")),
        Some(damage) => (id, size, damage.clone()),
    };
    [model.name.clone(), id, size, modified, pin]
}

/// `3 hours ago`
fn age(modified: &str) -> String {
    const UNITS: [(u64, &str); 5] =
        [(365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute")];
    let Ok(modified) = humantime::parse_rfc3339(modified) else { return modified.to_owned() };
    let age = SystemTime::now().duration_since(modified).unwrap_or(Duration::ZERO).as_secs();
    for (seconds, name) in UNITS {
        if age >= seconds {
            let count = age / seconds;
            return format!("{count} {name}{} ago", if count == 1 { "" } else { "s" });
        }
    }
    "just now".to_owned()
}
