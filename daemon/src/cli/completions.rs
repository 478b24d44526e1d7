//! `blobd completions`

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use clap::{Arg, Args, Command, CommandFactory as _, ValueEnum};
use clap_complete::aot;

use super::{Cli, Global};
use crate::output::{print, print_json};

/// Print a script that completes commands, options and names of models in a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  source <(blobd completions bash)             for this shell; add it to ~/.bashrc
  blobd completions zsh > ~/.zfunc/_blobd      into a directory of $fpath
  blobd completions fish > ~/.config/fish/completions/blobd.fish")]
pub(super) struct Params {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let script = script(params.shell)?;
    if global.json { print_json(&serde_json::json!({ "script": script })) } else { print(&script) }
}

fn script(shell: Shell) -> Result<String, ErrorBody> {
    let generator = match shell {
        Shell::Bash => aot::Shell::Bash,
        Shell::Zsh => aot::Shell::Zsh,
        Shell::Fish => aot::Shell::Fish,
    };
    let mut command = visible();
    let mut script = Vec::new();
    aot::generate(generator, &mut command, "blobd", &mut script);
    let script = String::from_utf8(script)
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("script: {error}")))?;
    Ok(match shell {
        Shell::Bash => script + &models_in_bash(&command),
        Shell::Zsh => models_in_zsh(&script, &command),
        Shell::Fish => script + &models_in_fish(&command),
    })
}

/// The commands without the internal ones, which the generators would offer.
fn visible() -> Command {
    let all = Cli::command();
    let commands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("blobd")
        .args(all.get_arguments().cloned())
        .subcommands(commands)
        .disable_help_subcommand(true)
}

/// Whether the argument is the name of a stored model.
fn is_model(argument: &Arg) -> bool {
    const NAMES: [&str; 8] = ["REF", "REF|PATH", "REF|PATTERN", "PID|REF", "SRC", "OLD", "A", "B"];
    let names = argument.get_value_names().unwrap_or_default();
    argument.is_positional() && names.iter().any(|name| NAMES.contains(&name.as_str()))
}

/// The commands that take names of stored models, with their aliases, separated by `separator`.
fn commands_with_models(command: &Command, separator: &str) -> String {
    let with_models = command.get_subcommands().filter(|command| command.get_positionals().any(is_model));
    let names =
        with_models.flat_map(|command| std::iter::once(command.get_name()).chain(command.get_all_aliases()));
    names.collect::<Vec<_>>().join(separator)
}

/// Bash splits words at colons, which names contain: only what follows the last one is replaced.
fn models_in_bash(command: &Command) -> String {
    let commands = commands_with_models(command, "|");
    format!(
        r#"
_blobd_with_models() {{
    local index candidate kept=()
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
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "${{COMP_WORDS[index]}}" in
            {commands})
                local before="" name
                [[ $word == *:* && $COMP_WORDBREAKS == *:* ]] && before=${{word%"${{word##*:}}"}}
                while IFS= read -r name; do
                    [[ $name == "$word"* ]] && COMPREPLY+=("${{name#"$before"}}")
                done < <(blobd ls --quiet 2>/dev/null)
                return 0
                ;;
        esac
    done
    return 0
}}
complete -F _blobd_with_models -o bashdefault -o default blobd
"#
    )
}

/// Names of models instead of file names, for the arguments that are models.
fn models_in_zsh(script: &str, command: &Command) -> String {
    const MODELS: &str = r#"
_blobd_models() {
    local -a names
    names=("${(@f)$(blobd ls --quiet 2>/dev/null)}")
    compadd -a names
    _files
}
"#;
    let arguments =
        command.get_subcommands().flat_map(Command::get_positionals).filter(|argument| is_model(argument));
    let ids: Vec<String> = arguments.map(|argument| argument.get_id().to_string()).collect();
    let is_of_model = |line: &str| {
        let specification = line.trim_start_matches(['\'', ':', '*']);
        line.starts_with('\'') && ids.iter().any(|id| specification.starts_with(&format!("{id} -- ")))
    };
    let mut result = String::new();
    for line in script.lines() {
        if is_of_model(line) {
            result.push_str(&line.replace(":_default'", ":_blobd_models'"));
        } else {
            result.push_str(line);
        }
        result.push('\n');
        if line.starts_with("#compdef") {
            result.push_str(MODELS);
        }
    }
    result
}

fn models_in_fish(command: &Command) -> String {
    let commands = commands_with_models(command, " ");
    format!(
        "\ncomplete -c blobd -n \"__fish_seen_subcommand_from {commands}\" -a \"(blobd ls --quiet 2>/dev/null)\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_completed_and_names_of_models_where_they_are_expected() {
        let command = visible();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell).unwrap();
            for name in command.get_subcommands().map(Command::get_name) {
                assert!(script.contains(name), "{shell:?}: {name}");
            }
            assert!(script.contains("blobd ls --quiet"), "{shell:?}");
            assert!(!script.contains("mount-guard"), "{shell:?}");
        }
        let commands = commands_with_models(&command, " ");
        for name in ["show", "inspect", "rm", "tag", "diff", "export", "release", "rename"] {
            assert!(commands.split(' ').any(|known| known == name), "{name}: {commands}");
        }
        assert!(!commands.split(' ').any(|known| known == "gc" || known == "import"), "{commands}");
        let zsh = script(Shell::Zsh).unwrap();
        assert!(zsh.contains(":_blobd_models'"), "{zsh}");
    }
}
