//! Command names of other tools, and near misses: what they mean here.
//!
//! Similarity alone would lead from `delete` to `undelete`, which does the opposite, so common commands of other tools
//! are listed. Words that mean exactly one command here are aliases of that command instead.

use clap::Command;

/// Commands of other tools, each with the command that does the same here.
const ADVICE: &[(&str, &str)] = &[
    ("abort", STOP_PULL),
    ("add", "`blobd pull NAME` fetches a model, `blobd import FILE` stores a file of this machine"),
    ("cache", "`blobd warm MODEL` reads a model into memory, `blobd df` shows disk usage"),
    ("cancel", STOP_PULL),
    ("cat", "`blobd export MODEL -o -` writes the model's file to standard output"),
    ("chat", RUN),
    ("check", "`blobd verify` reads and checks the stored data, `blobd doctor` checks the set-up"),
    ("clean", CLEAN),
    ("cleanup", CLEAN),
    ("compare", "`blobd diff A B` compares two models"),
    (
        "convert",
        "`blobd export MODEL` writes GGUF files at another alignment, in another byte order, merged or split",
    ),
    ("copy", "`blobd tag SRC DST` gives a model another name; the data is shared"),
    (
        "create",
        "`blobd import FILE --name MODEL` stores a file, `blobd edit SRC DST` makes a model with other metadata",
    ),
    ("daemon", "`blobd serve` runs the daemon"),
    ("disk", "`blobd df` shows disk usage"),
    ("download", "`blobd pull NAME` fetches a model"),
    ("downloads", "`blobd partial ls` lists unfinished downloads, `blobd pull NAME` continues one"),
    ("du", "`blobd df -v` shows disk usage of each model"),
    ("fetch", "`blobd pull NAME` fetches a model"),
    ("find", SEARCH),
    ("fsck", "`blobd verify` reads and checks the stored data"),
    ("generate", RUN),
    ("get", "`blobd pull NAME` fetches a model, `blobd export MODEL` writes its file"),
    ("image", NO_GROUP),
    ("info", "`blobd show MODEL` describes a model, `blobd doctor` checks the set-up"),
    ("install", "`blobd pull NAME` fetches a model; the daemon needs no installation: `blobd serve`"),
    ("logs", LOGS),
    ("model", NO_GROUP),
    ("models", "`blobd ls` lists the models"),
    (
        "open",
        "`blobd exec -- PROGRAM` runs a program that opens models as files, `blobd show MODEL` describes one",
    ),
    ("preload", "`blobd warm MODEL` reads a model into memory"),
    ("prune", CLEAN),
    ("put", "`blobd import FILE` stores a file of this machine"),
    ("quantize", "blobd does not quantise; `blobd pull` and `blobd import` store what other tools made"),
    ("repair", "`blobd verify --repair` repairs damaged data"),
    (
        "restore",
        "`blobd undelete MODEL` takes a model out of the trash, `blobd undo` takes back your newest change",
    ),
    ("resume", "`blobd pull NAME` continues an unfinished download, `blobd partial ls` lists them"),
    ("revert", "`blobd undo` takes back your newest change of names"),
    ("run", RUN),
    ("search", SEARCH),
    ("start", "`blobd serve` runs the daemon; with systemd, `systemctl start blobd`"),
    ("status", STATUS),
    ("stop", "`blobd release MODEL` ends a model's use; Ctrl-C or `systemctl stop blobd` stops the daemon"),
    (
        "system",
        "`blobd df` shows disk usage, `blobd gc` deletes what no model needs, `blobd doctor` checks the set-up",
    ),
    ("tags", "`blobd ls TEXT` lists the models whose name contains the text"),
    ("top", "`blobd ps` shows who has which model open"),
    (
        "trash",
        "`blobd ls --trash` lists the trash, `blobd rm --keep 7d MODEL` fills it, `blobd undelete MODEL` restores",
    ),
    ("umount", "Ctrl-C ends `blobd mount`, and so does `umount DIR`"),
    ("unload", "`blobd release MODEL` ends a model's use"),
    ("unmount", "Ctrl-C ends `blobd mount`, and so does `umount DIR`"),
    ("untag", "`blobd rm MODEL` removes a name; data that other models need stays"),
    ("update", UPDATE),
    ("upgrade", UPDATE),
    ("upload", "`blobd push MODEL DESTINATION` uploads a model to a registry"),
];

const RUN: &str = "blobd stores models and does not run them; \
                   `blobd exec -- llama-cli -m /blobd/MODEL.gguf` runs a program with a stored model";
const NO_GROUP: &str =
    "commands here have no group: `blobd ls`, `blobd pull NAME`, `blobd rm MODEL`, `blobd show MODEL`";
const LOGS: &str = "`blobd log` shows who has changed, opened or been refused what; the daemon's own messages go to \
                    standard error, and with systemd `journalctl -u blobd` shows them";
const STATUS: &str = "`blobd health` asks the daemon whether it works, `blobd doctor` checks the set-up, \
                      `blobd ps` shows who has which model open";
const CLEAN: &str = "`blobd gc` deletes what no model needs, `blobd rm MODEL` removes models, \
                     `blobd partial rm` drops unfinished downloads";
const STOP_PULL: &str = "Ctrl-C stops a pull and keeps what has arrived; `blobd partial rm NAME` drops that";
const UPDATE: &str = "`blobd outdated` lists the models with another version at their source, \
                      `blobd pull NAME` fetches it, `blobd pull --all` fetches all of them";
const SEARCH: &str = "`blobd ls TEXT` searches the stored models; to find others, use the registry's web page, \
                      then `blobd pull NAME`";

pub(super) fn advice(word: &str, blobd: &Command) -> String {
    let word = word.to_ascii_lowercase();
    if let Some(advice) = known_advice(&word) {
        return advice.to_owned();
    }
    let visible = blobd.get_subcommands().filter(|command| !command.is_hide_set());
    if let Some(near) = nearest(&word, visible.flat_map(names))
        && let Some(command) = blobd.find_subcommand(near)
    {
        return format!("did you mean `blobd {}`?", command.get_name());
    }
    let near = nearest(&word, ADVICE.iter().map(|(known, _)| *known)).and_then(known_advice);
    near.unwrap_or("`blobd help` lists the commands").to_owned()
}

fn known_advice(word: &str) -> Option<&'static str> {
    let at = ADVICE.binary_search_by(|(known, _)| (*known).cmp(word)).ok()?;
    ADVICE.get(at).map(|(_, advice)| *advice)
}

pub(super) fn names(command: &Command) -> impl Iterator<Item = &str> {
    std::iter::once(command.get_name()).chain(command.get_all_aliases())
}

/// The known word that differs in one or two letters.
pub(super) fn nearest<'c>(word: &str, known: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    /// Longer words are not compared, which would take quadratic time.
    const MAX_CHARS: usize = 40;
    if word.chars().count() > MAX_CHARS {
        return None;
    }
    let negated = |text: &str| text.starts_with("un");
    let distance = |candidate: &str| strsim::osa_distance(word, candidate);
    let allowed = if word.chars().count() <= 4 { 1 } else { 2 };
    let candidates = known.filter(|candidate| negated(candidate) == negated(word));
    let near = candidates.filter(|candidate| distance(candidate) <= allowed);
    near.min_by_key(|candidate| distance(candidate))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands() -> Vec<String> {
        let command = crate::command();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        visible.map(|command| command.get_name().to_owned()).collect()
    }

    fn advice_for(word: &str) -> String {
        advice(word, &crate::command())
    }

    #[test]
    fn words_are_sorted_so_that_they_are_found() {
        assert!(ADVICE.is_sorted_by(|a, b| a.0 < b.0));
        assert!(advice_for("add").contains("blobd pull"));
    }

    #[test]
    fn advice_names_only_commands_that_exist() {
        let known = commands();
        for (word, advice) in ADVICE {
            for named in advice.split("`blobd ").skip(1) {
                let name = named.split([' ', '`']).next().unwrap();
                assert!(name.starts_with('-') || known.iter().any(|known| known == name), "{word}: {name}");
            }
        }
    }

    #[test]
    fn no_advice_is_about_a_word_that_is_a_command_itself() {
        let command = crate::command();
        let known: Vec<&str> = command.get_subcommands().flat_map(names).collect();
        let hidden: Vec<_> = ADVICE.iter().filter(|(word, _)| known.contains(word)).collect();
        assert!(hidden.is_empty(), "{hidden:?}");
    }

    #[test]
    fn typos_suggest_the_command_and_never_its_opposite() {
        for (typed, meant) in
            [("pul", "pull"), ("improt", "import"), ("exprot", "export"), ("verfy", "verify")]
        {
            assert_eq!(advice_for(typed), format!("did you mean `blobd {meant}`?"));
        }
        for word in ["delet", "pinn", "xyzzy", "dellete", "nothing-like-it"] {
            assert!(!advice_for(word).contains("blobd un"), "{word}: {}", advice_for(word));
        }
        assert_eq!(advice_for("delte"), "did you mean `blobd rm`?", "the command of a similar alias");
        assert_eq!(advice_for("serach"), advice_for("search"));
    }
}
