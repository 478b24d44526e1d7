//! `blobd undo`

use blobd_cli_common::connect::{client_error, connect, print_report};
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::printable;
use blobd_cli_common::times::{local, relative};
use blobd_cli_common::{Global, lost_models};
use blobd_client::protocol::naming::{UndoParams, Undone, UndoneName};
use clap::Args;

use crate::{Digest, ErrorBody};

/// Take back your newest change of names
///
/// Takes back what the newest request of yours has done to names: `rm --keep`, `tag`, `rename`, `undelete`, and the names
/// that `import`, `pull`, `load`, `edit` and `promote` have given. A name that was new is removed, and its model moves to
/// the trash, unless the model has another name. A name that meant another model means that one again. The next `undo`
/// takes back the change before that. Data that `rm` has freed does not come back.
///
/// Nothing is changed if a part of it cannot be taken back, such as a name that somebody has changed since.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd undo --dry-run                         what would be taken back
  blobd undo
  blobd undo llama3:8b                         the newest change of this name
  blobd history llama3:8b                      what the name has meant, and who changed it

A command with several models, such as `blobd pull A B`, sends a request for each, and `undo` takes
back the last one. `blobd rm A B` is one request.")]
pub(super) struct Params {
    /// Take back the newest change of this name; administrators take back those of other users too
    #[arg(value_name = "REF")]
    model: Option<ModelName>,
    /// Only show what would be taken back
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let reference = params.model.as_ref().map(|model| only(global, client, model)).transpose()?;
    let request = UndoParams { reference, dry_run: params.dry_run, ..UndoParams::default() };
    let undone = client.undo(&request).map_err(client_error)?;
    print_report(global, &undone, |undone| render(global, undone))
}

fn render(global: &Global, undone: &Undone) -> String {
    let Undone { change: _, verb, time, user, uid, names, reversed_by, dry_run, effects } = undone;
    let is_own = rustix::process::geteuid().as_raw() == *uid;
    let user = user.clone().unwrap_or_else(|| format!("uid {uid}"));
    let by = if is_own { String::new() } else { format!("{}, ", printable(&user)) };
    let when = if global.verbose { local(time) } else { relative(time) };
    let took = if *dry_run { "would take" } else { "took" };
    let mut text = format!("{took} back `{verb}` ({by}{when})\n");
    text.extend(names.iter().map(|name| line(*dry_run, name)));
    text += &lost_models::effects(effects);
    text.extend(reversed_by.iter().map(|command| format!("`{command}` reverses this\n")));
    text
}

fn line(is_planned: bool, undone: &UndoneName) -> String {
    let UndoneName { name, digest, replaced, renamed_from, stored_as, trashed_until } = undone;
    let name = printable(name);
    let id = |digest: &Option<Digest>| digest.map(Digest::short).unwrap_or_default();
    let verb = |past: &'static str, infinitive: &str| match is_planned {
        true => format!("would {infinitive}"),
        false => past.to_owned(),
    };
    match (digest, renamed_from, replaced) {
        (Some(_), Some(from), _) => {
            format!("{} {} to {name} {}\n", verb("renamed", "rename"), printable(from), id(digest))
        }
        (Some(_), None, Some(_)) if digest == replaced => {
            format!("{} {name} {}, which follows what it followed before\n", verb("kept", "keep"), id(digest))
        }
        (Some(_), None, Some(_)) => {
            format!("{} {name} {} in place of {}\n", verb("restored", "restore"), id(digest), id(replaced))
        }
        (Some(_), None, None) => format!("{} {name} {}\n", verb("restored", "restore"), id(digest)),
        (None, ..) => {
            let kept = match (stored_as, trashed_until) {
                (Some(other), _) => format!("the model stays as {}", printable(other)),
                (None, Some(until)) => format!("in the trash until {}", local(until)),
                (None, None) => "the model goes to the trash".to_owned(),
            };
            format!("{} {name} {}; {kept}\n", verb("removed", "remove"), id(replaced))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_says_what_a_name_means_now() {
        let [old, new] = [b"old", b"new"].map(|content| Some(Digest::of(content)));
        let [old_id, new_id] = [old, new].map(|digest| digest.map(Digest::short).unwrap());
        let other = || Some("n:latest".to_owned());
        let name = |digest, replaced| UndoneName {
            name: "m:latest".to_owned(),
            digest,
            replaced,
            ..UndoneName::default()
        };
        let removed = name(None, new);
        for (undone, expected) in [
            (name(old, None), format!("restored m:latest {old_id}")),
            (name(old, new), format!("restored m:latest {old_id} in place of {new_id}")),
            (name(old, old), format!("kept m:latest {old_id}, which follows what it followed before")),
            (
                UndoneName { renamed_from: other(), ..name(old, None) },
                format!("renamed n:latest to m:latest {old_id}"),
            ),
            (
                UndoneName { stored_as: other(), ..removed.clone() },
                format!("removed m:latest {new_id}; the model stays as n:latest"),
            ),
            (removed, format!("removed m:latest {new_id}; the model goes to the trash")),
        ] {
            assert_eq!(line(false, &undone), expected + "\n");
        }
        assert!(line(true, &name(old, None)).starts_with("would restore m:latest "));
    }
}
