//! Names in the completions of zsh.

use super::Place;
use crate::suggest;

/// The generated script, with names instead of files for the arguments that are names.
pub(super) fn with_names(script: &str, places: &[Place]) -> String {
    let mut result = String::new();
    // The commands of the line, the innermost last.
    let mut command = String::new();
    for line in script.lines() {
        if let Some(label) = line.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
            label.clone_into(&mut command);
        }
        let place = places.iter().find(|place| is_specified(line, place, &command));
        match place {
            Some(place) => result.push_str(&line.replace(":_default'", &format!(":{}'", action(place)))),
            None => result.push_str(line),
        }
        result.push('\n');
        if line.starts_with("#compdef") {
            result.push_str(&function());
        }
    }
    result
}

fn action(place: &Place) -> String {
    let files = if place.takes_files { " files" } else { "" };
    format!("{{_blobd_names {}{files}}}", place.kinds())
}

/// Whether a line of the script is the argument of this command.
fn is_specified(line: &str, place: &Place, command: &str) -> bool {
    let specification = line.trim_start_matches(['\'', ':', '*']);
    line.starts_with('\'')
        && place.command.first().is_some_and(|name| name == command)
        && specification.starts_with(&format!("{} -- ", place.argument))
}

/// Gets the kinds of names, and `files` if it may be a file too.
fn function() -> String {
    format!(
        r#"
_blobd_names() {{
    local -a names
    names=("${{(@f)$(blobd {} "$1" -- ${{(Q)${{(z)BUFFER}}}} 2>/dev/null)}}")
    compadd -a names
    [[ $2 == files ]] && _files
}}
"#,
        suggest::COMMAND
    )
}

#[cfg(test)]
mod tests {
    use super::super::{Shell, script};

    #[test]
    fn arguments_of_each_command_have_their_kind_of_names() {
        let script = script(Shell::Zsh).unwrap();
        let actions: Vec<&str> = script.split(":{_blobd_names ").skip(1).collect();
        let count = |kinds: &str| actions.iter().filter(|action| action.starts_with(kinds)).count();
        assert!(count("models}'") > 10 && count("models files}'") > 1, "{script}");
        for kinds in ["trash}'", "downloads}'", "models,processes}'"] {
            assert_eq!(count(kinds), 1, "{kinds}");
        }
        assert_eq!(count("commands}'"), 2);
    }
}
