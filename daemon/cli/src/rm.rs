//! `blobd rm` and `blobd undelete`

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use blobd_cli_common::batch::{self, Batch};
use blobd_cli_common::connect::{client_error, connect, print_report};
use blobd_cli_common::model_name::{ModelName, expand_among, names, parse_new_name};
use blobd_cli_common::output::{human_bytes, print, print_message, printable};
use blobd_cli_common::times::parse_period;
use blobd_cli_common::{Global, lost_models, usage};
use blobd_client::error::ClientError;
use blobd_client::protocol::lists::MAX_REMOVED_NAMES;
use blobd_client::protocol::naming::{Removed, Spared};
use blobd_client::protocol::request::{RemoveParams, UndeleteParams};
use blobd_store_format::text::one_line;
use clap::Args;

use crate::prompt::{self, Echo};
use crate::{Client, ErrorBody, Reference};

/// Remove models and free what nothing else needs
#[derive(Debug, Args)]
#[command(
    long_about = "Remove models and free what nothing else needs\n\nNames that cannot be removed are reported, and the \
others are removed. Pinned models are never removed. Users remove the names that they have added, \
administrators all. A pattern, --older-than and --unused leave out names of other users and models that are pinned, and \
the last two also models that are open now. The \
daemon records when models are used. Where records are missing, such as before its first start or after a crash, \
models count as used. A command without a daemon has no records."
)]
#[command(after_help = "Other stores may use this one as a lower store. `rm` knows nothing of them:
it frees what they need too, unless another model of this store needs it.

Examples:
  blobd rm llama3:8b
  blobd rm --dry-run llama3:8b                 what would be removed, freed and kept
  blobd rm --keep 7d llama3:8b                 `blobd undelete` can restore it for a week
  blobd rm 'llama3:*' 'hf.co/*:Q8_0'           all models with such names; asks on a terminal
  blobd rm --older-than 30d --dry-run          all models that were not used for 30 days
  blobd rm --unused --older-than 7d            all that were never opened and are older than a week
  blobd rm llama3:8b llama3:70b --json | jq .freed_bytes")]
pub(super) struct Params {
    /// The models, by name or by pattern; * stands for any text, ? for one character, [a-c] for one of these
    #[arg(required_unless_present_any = ["older_than", "unused"], value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Only models that were last used longer ago (30d, 12h); one that was never opened counts from when it got
    /// its name
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    older_than: Option<Duration>,
    /// Only models that were never opened
    #[arg(long)]
    unused: bool,
    /// Move the models to the trash for this time (7d, 12h) instead of freeing their space
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    keep: Option<Duration>,
    /// Only show what would be removed and freed
    #[arg(long)]
    dry_run: bool,
    /// Remove what patterns, --older-than and --unused select without asking on a terminal
    #[arg(short, long)]
    yes: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let mut request = RemoveParams {
        older_than_seconds: params.older_than.map(|age| age.as_secs()),
        unused: params.unused,
        keep_seconds: params.keep.map(|keep| keep.as_secs()),
        dry_run: params.dry_run,
        ..RemoveParams::default()
    };
    for model in params.models.clone() {
        match model {
            ModelName::Name(name) => request.references.push(name),
            ModelName::Pattern(pattern) => request.patterns.push(pattern),
        }
    }
    let count = params.models.len();
    request.go_on = count > 1;
    let connected = connect(global)?;
    let client = &connected.client;
    let is_selected = !request.patterns.is_empty() || params.older_than.is_some() || params.unused;
    if is_selected && !params.dry_run && !params.yes && io::stdin().is_terminal() {
        request = confirmed(client, request)?;
    }
    let removed = remove_all(client, request).map_err(client_error)?;
    if count <= 1 {
        return print_report(global, &removed, summary);
    }
    let errors: Vec<ErrorBody> = removed.failed.iter().map(|failed| failed.error.clone()).collect();
    if !global.json {
        batch::report_each(global, &errors);
    }
    print_report(global, &removed, summary)?;
    batch::result(count, errors, ["models was not removed", "models were not removed"])
}

/// Removes with as many requests as the names need. Those of a command are removed one by one in any case.
fn remove_all(client: &Client, mut request: RemoveParams) -> Result<Removed, ClientError> {
    let mut rest = request.references.split_off(request.references.len().min(MAX_REMOVED_NAMES));
    let mut all = client.remove(&request)?;
    request.patterns.clear();
    while !rest.is_empty() {
        let following = rest.split_off(rest.len().min(MAX_REMOVED_NAMES));
        request.references = std::mem::replace(&mut rest, following);
        let removed = client.remove(&request)?;
        all.removed.extend(removed.removed);
        all.models.extend(removed.models);
        all.kept.extend(removed.kept);
        all.spared.extend(removed.spared);
        all.failed.extend(removed.failed);
        all.freed_bytes = all.freed_bytes.saturating_add(removed.freed_bytes);
        all.trashed_until = removed.trashed_until.or(all.trashed_until);
    }
    Ok(all)
}

/// Restore models from the trash
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd undelete llama3:8b
  blobd undelete llama3:8b --name llama3:old   beside the model that has the name now
  blobd undelete llama3:8b --force             in place of it
  blobd ls --trash                             list the models in the trash")]
pub(super) struct UndeleteArgs {
    /// The models, by the names that they had before, or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Restore the model under this name
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace another model that has the name now, even a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn undelete(global: &Global, args: &UndeleteArgs) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let trash = || {
        let trash = connected.client.trash().map_err(client_error)?.models;
        Ok(names(trash.iter().map(|model| model.name.as_str())))
    };
    let models = expand_among(&args.models, trash)?;
    if args.name.is_some() && models.len() > 1 {
        return Err(usage("--name: names one model, but several are given"));
    }
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let undelete = |reference| {
            let request = UndeleteParams { reference, name: args.name.clone(), force: args.force };
            connected.client.undelete(&request).map_err(client_error)
        };
        if let Some(done) = batch.add(&model.label, model.reference.and_then(undelete))
            && !global.hides_reports()
        {
            let effects = lost_models::effects(&done.effects);
            print(&format!("{} {} restored\n{effects}", printable(&done.name), done.digest.short()))?;
        }
    }
    batch.finish("undeleted", ["models was not restored", "models were not restored"])
}

/// Shows what would be removed and asks. Removes only that: a model that matches meanwhile was not shown.
fn confirmed(client: &Client, request: RemoveParams) -> Result<RemoveParams, ErrorBody> {
    let planned =
        remove_all(client, RemoveParams { dry_run: true, ..request.clone() }).map_err(client_error)?;
    if planned.models.is_empty() {
        return Ok(request);
    }
    print_message(&summary(&planned));
    let count = planned.models.len();
    let models = if count == 1 { "this model".to_owned() } else { format!("these {count} models") };
    let answer = prompt::ask(&format!("Remove {models}? [y/N] "), Echo::On)?;
    if !matches!(answer.to_ascii_lowercase().as_str(), "y" | "yes") {
        return Err(usage("rm: not confirmed: nothing was removed"));
    }
    let shown = planned.models.iter().filter_map(|model| model.name.parse().ok());
    // Names that were refused stay in the request, so that they are reported.
    let refused = request
        .references
        .iter()
        .filter(|name| planned.failed.iter().any(|failed| failed.name == name.short()));
    let references = shown.chain(refused.cloned()).collect();
    Ok(RemoveParams { references, patterns: Vec::new(), ..request })
}

fn summary(removed: &Removed) -> String {
    let (done, freed) = if removed.dry_run { ("would remove", "would free") } else { ("removed", "freed") };
    let is_alone = removed.models.len() == 1;
    let line = |model| {
        if is_alone { lost_models::subject(done, model) + "\n" } else { lost_models::line(done, model) }
    };
    let mut text: String = removed.models.iter().map(line).collect();
    if removed.models.is_empty() {
        if !removed.failed.is_empty() {
            return spared(&removed.spared);
        }
        text.push_str("no model to remove\n");
    }
    match &removed.trashed_until {
        Some(until) => text.push_str(&format!("in the trash until {until}; `blobd undelete` restores it\n")),
        None => text.push_str(&format!("{freed} {}\n", human_bytes(removed.freed_bytes))),
    }
    text + &lost_models::kept(&removed.kept) + &spared(&removed.spared)
}

/// One line for each reason, with as many models as fit.
fn spared(spared: &[Spared]) -> String {
    const WIDTH: usize = 80;
    const MAX_REASONS: usize = 12;
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for model in spared {
        reasons.entry(&model.reason).or_default().push(&model.name);
    }
    if reasons.len() > MAX_REASONS {
        return format!("not removed: {} models, which --json lists with their reasons\n", spared.len());
    }
    let line = |(reason, models): (&str, Vec<&str>)| {
        format!("not removed: {}: {reason}\n", one_line(&models, WIDTH))
    };
    reasons.into_iter().map(line).collect()
}
