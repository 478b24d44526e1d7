//! Names in the completions of bash.

use std::collections::BTreeSet;

use clap::{Arg, Command};

use super::Place;
use crate::suggest;

/// What is added to the generated script. Bash splits words at colons, which names contain: only what follows the
/// last one is replaced.
pub(super) fn names(blobd: &Command, places: &[Place]) -> String {
    let (cases, valued, command) = (cases(places), valued_options(blobd), suggest::COMMAND);
    format!(
        r#"
_blobd_with_names() {{
    local index candidate kept=() words=()
    _blobd "$@"
    # Placeholders such as <REF> are no words to insert.
    for candidate in "${{COMPREPLY[@]}}"; do
        case "$candidate" in
            "<"* | "["*) ;;
            *) kept+=("$candidate") ;;
        esac
    done
    COMPREPLY=("${{kept[@]}}")
    local word=${{COMP_LINE:0:COMP_POINT}}
    word=${{word##*[[:space:]]}}
    [[ $word == -* ]] && return 0
    # The words that are no options and no values of options.
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${{words[0]}} ${{COMP_WORDS[index]}}" in
            {valued})
                [[ ${{COMP_WORDS[index + 1]}} == "=" ]] && ((index++))
                ((index++))
                ;;
            *" -"*) ;;
            *) words+=("${{COMP_WORDS[index]}}") ;;
        esac
    done
    # The word is the value of an option.
    ((index > COMP_CWORD)) && return 0
    local kinds="" files=""
    case "${{words[0]}} ${{words[1]}} " in
{cases}        *) return 0 ;;
    esac
    [[ -z $files ]] && compopt +o default +o bashdefault 2>/dev/null
    local before="" name
    [[ $word == *:* && $COMP_WORDBREAKS == *:* ]] && before=${{word%"${{word##*:}}"}}
    while IFS= read -r name; do
        [[ $name == "$word"* ]] && COMPREPLY+=("${{name#"$before"}}")
    done < <(blobd {command} "$kinds" -- "${{COMP_WORDS[@]}}" 2>/dev/null)
    return 0
}}
complete -F _blobd_with_names -o bashdefault -o default blobd
"#
    )
}

/// What each command expects. The second word of a line is the command of a command, or the first name.
fn cases(places: &[Place]) -> String {
    let mut cases = Vec::new();
    for place in places {
        let pattern = |name: &String| match &place.parent {
            Some(parent) => format!("\"{parent} {name} \"*"),
            None => format!("\"{name} \"*"),
        };
        let patterns = place.command.iter().map(pattern).collect::<Vec<_>>().join(" | ");
        let files = if place.takes_files { "; files=1" } else { "" };
        let case = format!("        {patterns}) kinds={}{files} ;;\n", place.kinds());
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases.concat()
}

/// Patterns for a command and an option whose value is a word of its own. An option that is a flag of another
/// command counts only with its command.
fn valued_options(blobd: &Command) -> String {
    let (mut valued, mut flags) = (BTreeSet::new(), BTreeSet::new());
    for (command, below) in commands(blobd) {
        for option in below.get_opts().filter(|option| !option.is_require_equals_set()) {
            let names = names_of(option).into_iter();
            let is_valued = option.get_action().takes_values();
            let kind = if is_valued { &mut valued } else { &mut flags };
            kind.extend(names.map(|name| (name, command.to_owned())));
        }
        let switches = below.get_arguments().filter(|argument| !argument.get_action().takes_values());
        flags.extend(switches.flat_map(names_of).map(|name| (name, command.to_owned())));
    }
    let is_flag = |name: &str| flags.iter().any(|(flag, _)| flag == name);
    let pattern = |(name, command): &(String, String)| match is_flag(name) {
        true => format!("\"{command} {name}\""),
        false => format!("*\" {name}\""),
    };
    let patterns: BTreeSet<String> = valued.iter().map(pattern).collect();
    patterns.into_iter().collect::<Vec<_>>().join(" | ")
}

/// All commands, each with the first word of its line.
fn commands(blobd: &Command) -> Vec<(&str, &Command)> {
    let mut all = vec![("", blobd)];
    for command in blobd.get_subcommands() {
        let below = command.get_subcommands();
        all.extend(std::iter::once(command).chain(below).map(|below| (command.get_name(), below)));
    }
    all
}

fn names_of(option: &Arg) -> Vec<String> {
    let long = option.get_long().map(|long| format!("--{long}"));
    let short = option.get_short().map(|short| format!("-{short}"));
    long.into_iter().chain(short).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{places, visible};
    use super::*;

    #[test]
    fn options_with_a_value_are_known_and_flags_of_the_same_name_are_not_confused_with_them() {
        let valued = valued_options(&visible());
        let patterns: Vec<&str> = valued.split(" | ").collect();
        for pattern in ["*\" --root\"", "*\" -o\"", "*\" --older-than\"", "\"edit --template\""] {
            assert!(patterns.contains(&pattern), "{pattern}: {valued}");
        }
        for flag in ["*\" --json\"", "*\" -q\"", "*\" --template\"", "\"show --template\""] {
            assert!(!patterns.contains(&flag), "{flag}: {valued}");
        }
    }

    #[test]
    fn commands_of_commands_are_not_confused_with_commands() {
        let cases = cases(&places(&visible()));
        assert!(cases.contains("\"partial rm \"* | "), "{cases}");
        assert!(cases.contains("        \"rm \"* | \"rmi \"*"), "{cases}");
        assert!(cases.contains("\"show \"* | \"inspect \"*) kinds=models; files=1 ;;"), "{cases}");
    }
}
