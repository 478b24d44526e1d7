//! Names in the completions of fish.

use super::Place;
use crate::suggest;

/// What is added to the generated script.
pub(super) fn names(places: &[Place]) -> String {
    let mut lines = Vec::new();
    for place in places {
        let line = line(place);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    format!("\n{}", lines.concat())
}

fn line(place: &Place) -> String {
    let names = place.command.join(" ");
    let condition = match &place.parent {
        Some(parent) => {
            format!("__fish_blobd_using_subcommand {parent}; and __fish_seen_subcommand_from {names}")
        }
        None => format!("__fish_blobd_using_subcommand {names}"),
    };
    let no_files = if place.takes_files { "" } else { " -f" };
    let (command, kinds) = (suggest::COMMAND, place.kinds());
    format!(
        "complete -c blobd -n \"{condition}\"{no_files} -a \"(blobd {command} {kinds} -- (commandline -opc) \
         2>/dev/null)\"\n"
    )
}
