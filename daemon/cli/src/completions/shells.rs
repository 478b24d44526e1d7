//! Names in the completions of bash, zsh and fish.

use std::collections::BTreeSet;

use clap::{Arg, Command};

use super::CompletedArgument;
use crate::suggest;

/// The text that is added to the generated script. Bash splits words at colons, which names contain: only what follows the
/// last one is replaced.
pub(super) fn bash(blobd: &Command, arguments: &[CompletedArgument]) -> String {
    let (cases, valued, command) = (cases(arguments), valued_options(blobd), suggest::COMMAND);
    format!(
        r#"
_blobd_with_names() {{
    local index candidate kept=() words=()
    _blobd "$@"
    # Placeholders such as <REF> are not inserted.
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
    # The words that are neither options nor values of options.
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

/// The second word of a line is a subcommand or the first name.
fn cases(arguments: &[CompletedArgument]) -> String {
    let mut cases = Vec::new();
    for argument in arguments {
        let pattern = |name: &String| match &argument.parent {
            Some(parent) => format!("\"{parent} {name} \"*"),
            None => format!("\"{name} \"*"),
        };
        let patterns = argument.command.iter().map(pattern).collect::<Vec<_>>().join(" | ");
        let files = if argument.takes_files { "; files=1" } else { "" };
        let case = format!("        {patterns}) kinds={}{files} ;;\n", argument.kinds());
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
    let pattern = |(name, command): &(String, String)| {
        if is_flag(name) { format!("\"{command} {name}\"") } else { format!("*\" {name}\"") }
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

pub(super) fn fish(arguments: &[CompletedArgument]) -> String {
    let mut lines = Vec::new();
    for argument in arguments {
        let line = fish_line(argument);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    format!("\n{}", lines.concat())
}

fn fish_line(argument: &CompletedArgument) -> String {
    let names = argument.command.join(" ");
    let condition = match &argument.parent {
        Some(parent) => {
            format!("__fish_blobd_using_subcommand {parent}; and __fish_seen_subcommand_from {names}")
        }
        None => format!("__fish_blobd_using_subcommand {names}"),
    };
    let no_files = if argument.takes_files { "" } else { " -f" };
    let (command, kinds) = (suggest::COMMAND, argument.kinds());
    format!(
        "complete -c blobd -n \"{condition}\"{no_files} -a \"(blobd {command} {kinds} -- (commandline -opc) \
         2>/dev/null)\"\n"
    )
}

/// The generated script, with names instead of files for arguments that are names.
pub(super) fn zsh(script: &str, arguments: &[CompletedArgument]) -> String {
    let mut result = String::new();
    // The commands of the line, the innermost last.
    let mut command = String::new();
    for line in script.lines() {
        if let Some(label) = line.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
            label.clone_into(&mut command);
        }
        let argument = arguments.iter().find(|argument| is_specified(line, argument, &command));
        match argument {
            Some(argument) => {
                result.push_str(&line.replace(":_default'", &format!(":{}'", zsh_action(argument))));
            }
            None => result.push_str(line),
        }
        result.push('\n');
        if line.starts_with("#compdef") {
            result.push_str(&zsh_function());
        }
    }
    result
}

fn zsh_action(argument: &CompletedArgument) -> String {
    let files = if argument.takes_files { " files" } else { "" };
    format!("{{_blobd_names {}{files}}}", argument.kinds())
}

fn is_specified(line: &str, argument: &CompletedArgument, command: &str) -> bool {
    let specification = line.trim_start_matches(['\'', ':', '*']);
    line.starts_with('\'')
        && argument.command.first().is_some_and(|name| name == command)
        && specification.starts_with(&format!("{} -- ", argument.argument))
}

/// A function of the script, whose arguments are the kinds of names, and `files` where a file is possible too.
fn zsh_function() -> String {
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
    use crate::completions::{Shell, completed_arguments, script, visible};

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
    fn subcommands_are_not_confused_with_commands() {
        let cases = cases(&completed_arguments(&visible()));
        assert!(cases.contains("\"partial rm \"* | "), "{cases}");
        assert!(cases.contains("        \"rm \"* | \"rmi \"*"), "{cases}");
        assert!(cases.contains("\"show \"* | \"inspect \"*) kinds=models; files=1 ;;"), "{cases}");
    }

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
