//! Completions load in the shells and complete, manual pages have no errors.
//!
//! A shell that is not installed is skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;

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
            println!("skipped: {shell} cannot be run: {error}");
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
             _blobd_with_models blobd \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; \
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
         COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _blobd_with_models blobd 7 :; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display()
    );
    assert_eq!(lines(&shells.run("bash", &["--norc"], &script).unwrap()), ["70b"]);
}

#[test]
fn zsh_loads_the_completions_and_finds_the_models() {
    let shells = Shells::with_models();
    let path = shells.completions("zsh");
    let script = format!(
        "autoload -U compinit; compinit -D -u; source {0}; \
         whence -w _blobd _blobd_models; \
         compadd() {{ print -l -- \"${{names[@]}}\" }}; _files() {{ : }}; _blobd_models; \
         print -r -- ${{_comps[blobd]}}",
        path.display()
    );
    let Some(run) = shells.run("zsh", &["-f"], &script) else { return };
    assert_eq!(run.stderr, "");
    let text = run.text();
    for part in ["_blobd: function", "_blobd_models: function", "llama3:8b\n", "qwen:1b\n", "\n_blobd\n"] {
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
    assert!(pull.contains("--limit\\-rate") || pull.contains("\\-\\-limit\\-rate"), "{pull}");
    for page in pages {
        let path = page.as_str().unwrap();
        let checked = Command::new("groff")
            .args(["-man", "-Tutf8", "-ww", "-z", "-K", "utf8", path])
            .stdin(std::process::Stdio::null())
            .output();
        match checked {
            Err(error) => return println!("skipped: groff cannot be run: {error}"),
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
