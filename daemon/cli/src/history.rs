//! `blobd history`

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect, print_result};
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::{Table, or_dash, terminal_width};
use blobd_cli_common::times::{local, relative};
use blobd_client::protocol::naming::{NameChange, NameHistory};
use blobd_store_format::origin::shown as shown_origin;
use clap::Args;

use crate::{Digest, ErrorBody};

/// Show what a name has meant, and who changed it
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd history llama3:8b                      the newest change first
  blobd history -v llama3:8b                   with exact times
  blobd history old-name                       also of a name that was removed

STORED says whether that version is still stored: `yes` under this name, another name under which
it is stored, `trash`, or `no`.")]
pub(super) struct Params {
    /// The name
    #[arg(value_name = "REF")]
    model: ModelName,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let name = only(global, client, &params.model)?;
    let history = client.history(&name).map_err(client_error)?;
    print_result(global, &history, |history| render(global, history))
}

fn render(global: &Global, history: &NameHistory) -> String {
    let rows = history.changes.iter().map(|change| row(global, &history.name, change));
    let table = Table::with_rows(&["TIME", "USER", "VERB", "ID", "STORED", "ORIGIN"], &[], rows);
    let table = table.with_names_in(&[4, 5]).leaving_out_first(&["USER", "ORIGIN"]);
    let omitted = match history.dropped {
        0 => String::new(),
        1 => "1 older change is no longer recorded\n".to_owned(),
        dropped => format!("{dropped} older changes are no longer recorded\n"),
    };
    table.render(terminal_width()) + &omitted
}

fn row(global: &Global, name: &str, change: &NameChange) -> [String; 6] {
    let time = |time: &String| if global.verbose { local(time) } else { relative(time) };
    let user = change.user.clone().or_else(|| change.uid.map(|uid| format!("uid {uid}")));
    [
        change.time.as_ref().map_or_else(|| "no record".to_owned(), time),
        or_dash(user),
        or_dash(change.verb.as_ref()),
        change.digest.map_or_else(|| "removed".to_owned(), Digest::short),
        stored(name, change),
        or_dash(change.origin.as_deref().map(shown_origin)),
    ]
}

fn stored(name: &str, change: &NameChange) -> String {
    match &change.stored_as[..] {
        _ if change.digest.is_none() => "-".to_owned(),
        names if names.iter().any(|stored| stored == name) => "yes".to_owned(),
        [other, ..] => other.clone(),
        [] if change.in_trash => "trash".to_owned(),
        [] => "no".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_version_is_named_if_it_has_another_name() {
        let version = |stored_as: &[&str], in_trash| NameChange {
            digest: Some(Digest::of(b"x")),
            stored_as: stored_as.iter().map(|name| (*name).to_owned()).collect(),
            in_trash,
            ..NameChange::default()
        };
        assert_eq!(stored("m:a", &version(&["m:b", "m:a"], true)), "yes");
        assert_eq!(stored("m:a", &version(&["m:b", "m:c"], true)), "m:b");
        assert_eq!(stored("m:a", &version(&[], true)), "trash");
        assert_eq!(stored("m:a", &version(&[], false)), "no");
        assert_eq!(stored("m:a", &NameChange::default()), "-");
    }
}
