//! Completions load in the shells and complete, manual pages have no errors.
//!
//! A shell that is not installed is skipped.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;

struct Shells {
    daemon: TestDaemon,
}

impl Shells {
    fn with_models() -> Self {
        let daemon = TestDaemon::start();
        let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
        for name in ["llama3:8b", "llama3:70b", "qwen:1b"] {
            daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        }
        Self { daemon }
    }

    /// A file with the shell's completions.
    fn completions(&self, shell: &str) -> PathBuf {
        let script = self.daemon.command().line(&format!("completions {shell}")).succeeds().text();
        let path = self.daemon.scratch().join(format!("_blobd.{shell}"));
        std::fs::write(&path, script).unwrap();
        path
    }

    /// Runs a script in a shell that finds `blobd` and the daemon; `None` where the shell is not installed.
    fn run(&self, shell: &str, options: &[&str], script: &str) -> Option<Run> {
        if let Err(error) = Command::new(shell).arg("--version").output() {
            skipped(format_args!("{shell} cannot be run: {error}"));
            return None;
        }
        let mut command = Command::new(shell);
        command.args(options).args(["-c", script]);
        self.daemon.command().prepare(&mut command);
        command.env("PATH", path_with(programs::blobd().parent().unwrap()));
        std::fs::create_dir_all(self.daemon.scratch().join("home")).unwrap();
        command.env("HOME", self.daemon.scratch().join("home"));
        Some(command::run(&mut command).succeeds())
    }
}

fn path_with(directory: &Path) -> String {
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap_or_default())
}

fn lines(run: &Run) -> Vec<String> {
    let mut lines: Vec<String> = run.text().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn bash_completes_commands_options_and_models() {
    let shells = Shells::with_models();
    let script = shells.completions("bash");
    let complete = |words: &str, cursor: usize| {
        let line = words.replace("' '", " ").replace('\'', "");
        let script = format!(
            "set -eu; . {}; set +eu; COMP_WORDS=({words}); COMP_CWORD={cursor}; COMP_LINE='{line}'; \
             COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); \
             _blobd_with_names blobd \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        shells.run("bash", &["--norc"], &script).map(|run| {
            assert_eq!(run.stderr, "", "{words}");
            lines(&run)
        })
    };
    let Some(commands) = complete("blobd imp", 1) else { return };
    assert_eq!(commands, ["import"]);
    assert!(complete("blobd ls --tr", 2).unwrap().contains(&"--trash".to_owned()));
    assert_eq!(complete("blobd show q", 2).unwrap(), ["qwen:1b"]);
    // Bash passes the colon as a word of its own, and replaces only what follows it.
    assert_eq!(complete("blobd rm llama3 : 7", 4).unwrap(), [""], "spaces are not part of a name");
    let script = format!(
        ". {}; COMP_WORDS=(blobd rm llama3 : 7); COMP_CWORD=4; COMP_LINE='blobd rm llama3:7'; \
         COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _blobd_with_names blobd 7 :; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display()
    );
    assert_eq!(lines(&shells.run("bash", &["--norc"], &script).unwrap()), ["70b"]);
}

/// Completes the last word in bash, as Readline calls the function: without the colon, which separates words.
fn completed_in_bash(shells: &Shells, script: &Path, line: &str) -> Option<Vec<String>> {
    let words: Vec<String> = line.split(' ').map(|word| format!("'{word}'")).collect();
    let script = format!(
        "set -e; . {}; set +e; COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}; COMP_WORDS=({}); COMP_CWORD={}; \
         COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _blobd_with_names blobd \
         \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display(),
        words.join(" "),
        words.len() - 1
    );
    let run = shells.run("bash", &["--norc"], &script)?;
    assert_eq!(run.stderr, "", "{line}");
    // Options are offered too where nothing is typed yet.
    Some(lines(&run).into_iter().filter(|word| !word.is_empty() && !word.starts_with('-')).collect())
}

#[test]
fn bash_completes_what_each_command_expects() {
    let shells = Shells::with_models();
    let script = shells.completions("bash");
    let blobd = shells.daemon.command();
    blobd.line("rm --keep 7d llama3:70b").succeeds();
    let reader = Reader::open(&shells.daemon.socket(), "qwen:1b");
    let pid = reader.pid().to_string();
    let Some(models) = completed_in_bash(&shells, &script, "blobd rm ") else { return };
    assert_eq!(models, ["llama3:8b", "qwen:1b"]);
    for (line, expected) in [
        ("blobd undelete ", vec!["llama3:70b"]),
        ("blobd --json rm q", vec!["qwen:1b"]),
        ("blobd --root /nowhere rm q", vec![]),
        ("blobd export -o qwe", vec![]),
        ("blobd export -o x q", vec!["qwen:1b"]),
        ("blobd edit --template x q", vec!["qwen:1b"]),
        ("blobd show --template q", vec!["qwen:1b"]),
        ("blobd partial rm ", vec![]),
        ("blobd partial r", vec!["rm"]),
        ("blobd import ", vec![]),
        ("blobd import rm ", vec![]),
        ("blobd help par", vec!["partial"]),
        ("blobd release q", vec!["qwen:1b"]),
    ] {
        assert_eq!(completed_in_bash(&shells, &script, line).unwrap(), expected, "{line}");
    }
    let processes = completed_in_bash(&shells, &script, "blobd release ").unwrap();
    assert!(processes.contains(&pid), "{processes:?}");
}

/// What the completions run.
#[test]
fn suggestions_start_nothing_create_nothing_and_print_no_errors() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    let suggested = |blobd: &Blobd, kind: &str| {
        let run = blobd.run(["__suggest", kind, "--", "blobd", "rm", ""]).succeeds();
        assert_eq!(run.stderr, "", "{kind}");
        run.text().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for kind in ["models", "trash", "downloads", "processes"] {
        assert!(suggested(&blobd, kind).is_empty(), "{kind}");
    }
    assert!(!root.exists());
    // With a store that no process has open.
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    for name in ["a", "b"] {
        blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
    }
    blobd.line("rm --keep 7d b").succeeds();
    let before = contents(&root);
    assert_eq!(suggested(&blobd, "models"), ["a:latest"]);
    assert_eq!(suggested(&blobd, "trash"), ["b:latest"]);
    assert!(suggested(&blobd, "processes").is_empty());
    assert_eq!(contents(&root), before, "nothing was written");
    // With one that belongs to a daemon that does not respond.
    let mute = UnixListener::bind(folder.path().join("mute")).unwrap();
    assert!(suggested(&Blobd::at_socket(&folder.path().join("mute")), "models").is_empty());
    drop(mute);
    // With a broken configuration.
    std::fs::write(folder.path().join("bad.toml"), "root = ").unwrap();
    let broken =
        Blobd::at_socket(&folder.path().join("absent")).configured_by(&folder.path().join("bad.toml"));
    assert!(suggested(&broken, "models").is_empty());
}

/// The files of a store, with their times of change.
fn contents(root: &Path) -> Vec<(PathBuf, SystemTime)> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let (path, metadata) = entry.map(|entry| (entry.path(), entry.metadata().unwrap())).unwrap();
            found.push((path.clone(), metadata.modified().unwrap()));
            if metadata.is_dir() {
                folders.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn zsh_loads_the_completions_and_finds_the_models() {
    let shells = Shells::with_models();
    let path = shells.completions("zsh");
    let script = format!(
        "autoload -U compinit; compinit -D -u; source {0}; \
         whence -w _blobd _blobd_names; \
         compadd() {{ print -l -- \"${{names[@]}}\" }}; _files() {{ print files }}; _blobd_names models files; \
         print -r -- ${{_comps[blobd]}}",
        path.display()
    );
    let Some(run) = shells.run("zsh", &["-f"], &script) else { return };
    assert_eq!(run.stderr, "");
    let text = run.text();
    for part in
        ["_blobd: function", "_blobd_names: function", "llama3:8b\n", "qwen:1b\n", "files\n", "\n_blobd\n"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn fish_completes_commands_options_and_models() {
    let shells = Shells::with_models();
    let path = shells.completions("fish");
    let complete = |line: &str| {
        let script = format!("source {}; complete -C '{line}'", path.display());
        let run = shells.run("fish", &["--no-config"], &script)?;
        assert_eq!(run.stderr, "", "{line}");
        let words =
            run.text().lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect();
        Some::<Vec<String>>(words)
    };
    let Some(commands) = complete("blobd imp") else { return };
    assert!(commands.contains(&"import".to_owned()), "{commands:?}");
    assert!(complete("blobd ls --tr").unwrap().contains(&"--trash".to_owned()));
    let models = complete("blobd show ll").unwrap();
    assert!(
        models.contains(&"llama3:8b".to_owned()) && models.contains(&"llama3:70b".to_owned()),
        "{models:?}"
    );
    shells.daemon.command().line("rm --keep 7d llama3:70b").succeeds();
    assert_eq!(complete("blobd undelete l").unwrap(), ["llama3:70b"]);
    assert_eq!(complete("blobd rm l").unwrap(), ["llama3:8b"]);
    assert_eq!(complete("blobd --root /nowhere rm l").unwrap(), Vec::<String>::new());
    assert_eq!(complete("blobd help par").unwrap(), ["partial"]);
    assert!(complete("blobd partial rm l").unwrap().is_empty());
    // Files are completed where files are expected.
    std::fs::write(shells.daemon.scratch().join("home/weights.gguf"), "").unwrap();
    let in_home = format!("blobd import {}/home/wei", shells.daemon.scratch().display());
    assert_eq!(complete(&in_home).unwrap().len(), 1);
}

#[test]
fn manual_pages_of_all_commands_have_no_errors() {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let directory = folder.path().join("man1");
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let pages = blobd.run(["man", "--dir", directory.to_str().unwrap(), "--json"]).succeeds().json();
    let pages = pages["pages"].as_array().unwrap().clone();
    assert!(pages.len() > 25, "{pages:?}");
    let pull = std::fs::read_to_string(directory.join("blobd-pull.1")).unwrap();
    assert_eq!(blobd.line("man pull").succeeds().text(), pull);
    for (line, name) in [("partial", "partial"), ("partial rm", "partial-rm"), ("partial ls", "partial-ls")] {
        let page = std::fs::read_to_string(directory.join(format!("blobd-{name}.1"))).unwrap();
        assert_eq!(blobd.line(&format!("man {line}")).succeeds().text(), page);
    }
    let keys = std::fs::read_to_string(directory.join("blobd.toml.5")).unwrap();
    assert_eq!(blobd.line("man blobd.toml").succeeds().text(), keys);
    assert!(pull.contains("--limit\\-rate") || pull.contains("\\-\\-limit\\-rate"), "{pull}");
    for page in pages {
        let path = page.as_str().unwrap();
        let checked = Command::new("groff")
            .args(["-man", "-Tutf8", "-ww", "-z", "-K", "utf8", path])
            .stdin(std::process::Stdio::null())
            .output();
        match checked {
            Err(error) => return skipped(format_args!("groff cannot be run: {error}")),
            Ok(output) => {
                assert!(output.status.success(), "{path}");
                assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{path}");
            }
        }
        let mut man = Command::new("man");
        man.env("MANWIDTH", "80").args(["--warnings=w", "--encoding=utf8", "--local-file", path]);
        if let Ok(output) = man.stdin(std::process::Stdio::null()).output() {
            assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{path}");
        }
    }
}
