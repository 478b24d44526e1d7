//! Patterns of names: every command accepts the same patterns and ignores case in the same way.

use std::process::Stdio;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::terminal::Terminal;
use serde_json::Value as Json;

const QWEN: &str = "Qwen3-0.6B:Q8_0";
const HUB: &str = "hf.co/Qwen/Qwen3-1.7B-GGUF:Q4_K_M";
const LLAMA: &str = "llama3:8b";
const LONG: &str = "ghcr.io/owner/repo/llama3:1";

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    add_models(&daemon.command(), daemon.scratch());
    daemon
}

fn add_models(blobd: &Blobd, scratch: &std::path::Path) {
    for (seed, name) in [(1, QWEN), (2, HUB), (3, LLAMA), (4, LONG)] {
        let path = ModelFile::dense(seed).write_to(scratch, "m.gguf");
        blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
    }
}

fn listed(blobd: &Blobd, line: &[&str]) -> Vec<String> {
    let run = blobd.run(["ls", "-q"].iter().chain(line)).succeeds();
    run.text().lines().map(str::to_owned).collect()
}

fn sorted(list: &Json, key: &str) -> Vec<String> {
    let name = |item: &Json| item.as_str().or_else(|| item[key].as_str()).unwrap().to_owned();
    let mut names: Vec<String> = list.as_array().unwrap().iter().map(name).collect();
    names.sort();
    names
}

/// The patterns, and the models that each of them means.
fn cases() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("Qwen*", vec![QWEN, HUB]),
        ("qwen*", vec![QWEN, HUB]),
        ("QWEN3-0.6b", vec![QWEN]),
        ("qwen?-*:q8_0", vec![QWEN]),
        ("hf.co/*", vec![HUB]),
        ("HF.co/qwen/*:q4*", vec![HUB]),
        ("llama3:*", vec![LLAMA]),
        ("library/*", vec![LLAMA, QWEN]),
        ("registry.ollama.ai/*/llama[2-4]", vec![LLAMA]),
        ("ghcr.io/*/llama3", vec![LONG]),
        ("owner/*", vec![LONG]),
        ("*", vec![QWEN, HUB, LLAMA, LONG]),
    ]
}

#[test]
fn pattern_means_the_same_models_for_every_command() {
    let daemon = daemon();
    let blobd = daemon.command();
    for (pattern, models) in cases() {
        if !pattern.contains(['*', '?', '[']) {
            continue;
        }
        let mut models: Vec<String> = models.iter().map(|model| (*model).to_owned()).collect();
        models.sort();
        let json = |line: &[&str]| blobd.run(line).succeeds().json();
        assert_eq!(sorted(&json(&["ls", pattern, "--json"])["models"], "name"), models, "ls {pattern}");
        assert_eq!(sorted(&json(&["pin", pattern, "--json"])["pins"], "name"), models, "pin {pattern}");
        assert_eq!(sorted(&json(&["unpin", pattern, "--json"])["pins"], "name"), models, "unpin {pattern}");
        let removed = json(&["rm", pattern, "--dry-run", "--json"]);
        assert_eq!(sorted(&removed["removed"], ""), models, "rm {pattern}");
        let filter = format!("name={pattern}");
        assert_eq!(
            sorted(&json(&["ls", "--filter", &filter, "--json"])["models"], "name"),
            models,
            "{pattern}"
        );
        blobd.run(["verify", pattern]).succeeds();
        let one = blobd.run(["show", pattern, "--json"]);
        match models.as_slice() {
            [only] => assert_eq!(one.succeeds().json()["name"], only.as_str()),
            _ => assert!(one.exits_with(2).stderr.contains(&models[0]), "show {pattern}"),
        }
        json(&["rm", pattern, "--keep", "1d", "--json"]);
        assert_eq!(sorted(&json(&["ls", "--trash", pattern, "--json"])["models"], "name"), models);
        let restored = json(&["undelete", pattern, "--json"]);
        assert_eq!(sorted(&restored["undeleted"], "name"), models, "undelete {pattern}");
    }
}

#[test]
fn text_without_wildcards_is_found_in_any_case_and_a_name_is_taken_in_any_case() {
    let daemon = daemon();
    let blobd = daemon.command();
    for (text, count) in
        [("qwen", 2), ("QWEN", 2), ("gguf:q4", 1), ("llama3", 2), ("owner/repo", 1), ("x", 0)]
    {
        assert_eq!(listed(&blobd, &[text]).len(), count, "{text}");
    }
    assert_eq!(listed(&blobd, &["qwen", "ghcr.io"]).len(), 3, "any of several");
    for name in ["QWEN3-0.6B:q8_0", "hf.co/qwen/qwen3-1.7b-gguf:q4_k_m", "LLAMA3:8B", " llama3:8b\n"] {
        for verb in ["show", "pin", "unpin", "verify", "history", "warm", "fit"] {
            blobd.run([verb, name]).succeeds();
        }
    }
}

#[test]
fn command_for_one_model_takes_a_pattern_that_matches_one() {
    let daemon = daemon();
    let blobd = daemon.command();
    let only = "qwen3-0*";
    let bytes = ModelFile::dense(1).bytes();
    let exported = blobd.run(["export", only, "-o", "-"]).succeeds();
    assert!(exported.stdout == bytes && exported.stderr.contains(QWEN), "{}", exported.stderr);
    for line in [
        &["show", only][..],
        &["show", only, "--residency"],
        &["show", only, "--hash"],
        &["fit", only],
        &["warm", only],
        &["history", only],
        &["tensor", only, "output_norm.weight"],
        &["diff", only, "hf.co/*"],
        &["tag", only, "copy:1"],
        &["rename", "cop*", "copy:2"],
        &["edit", only, "edited:1", "--set", "general.name=x"],
    ] {
        blobd.run(line).succeeds();
        let several: Vec<&str> = line.iter().map(|word| if *word == only { "qwen*" } else { word }).collect();
        if several != line {
            let refused = blobd.run(&several).exits_with(2);
            assert!(
                refused.stderr.contains("matches 2 models") && refused.stderr.contains(HUB),
                "{}",
                refused.stderr
            );
            let none: Vec<&str> =
                line.iter().map(|word| if *word == only { "qwem3*" } else { word }).collect();
            let missing = blobd.run(&none).exits_with(3);
            assert!(missing.stderr.contains("qwem3*"), "{}", missing.stderr);
        }
    }
    assert_eq!(listed(&blobd, &["copy*", "edited*"]), ["copy:2", "edited:1"]);
}

#[test]
fn pattern_that_matches_nothing_is_not_found_and_the_nearest_names_are_listed() {
    let daemon = daemon();
    let blobd = daemon.command();
    for verb in ["rm", "pin", "unpin", "verify", "show", "undelete"] {
        let missing = blobd.run([verb, "lama3*"]).exits_with(3);
        if verb != "undelete" {
            assert!(missing.stderr.contains(LLAMA), "{verb}: {}", missing.stderr);
        }
    }
    let both = blobd.run(["pin", "lama*", "llama*", "--json"]).exits_with(3);
    assert_eq!(sorted(&both.json()["pins"], "name"), [LLAMA]);
    assert_eq!(both.json()["failed"][0]["name"], "lama*");
}

#[test]
fn leases_and_records_are_found_by_pattern() {
    let daemon = daemon();
    let blobd = daemon.command();
    let _readers = [Reader::open(&daemon.socket(), QWEN), Reader::open(&daemon.socket(), HUB)];
    let released = blobd.line("release QWEN* --json").succeeds().json();
    assert_eq!(released["released"].as_array().unwrap().len(), 2);
    blobd.line("release QWEN*").exits_with(3);
    let count = |pattern: &str| {
        let log = blobd.run(["log", "--model", pattern, "--verb", "import", "--json"]).succeeds();
        log.text().lines().filter(|line| line.contains("\"verb\":\"import\"")).count()
    };
    assert_eq!([count("qwen*"), count("LLAMA3:8B"), count("x*"), count("*")], [2, 1, 0, 4]);
}

/// Runs `rm` on a terminal on which the user has typed this, and returns what was shown.
fn rm_on_terminal(blobd: &Blobd, line: &[&str], typed: &str) -> (String, Run) {
    let terminal = Terminal::new(24, 100);
    terminal.type_in(typed);
    let mut command = blobd.command();
    command
        .arg("rm")
        .args(line)
        .stdin(Stdio::from(terminal.another()))
        .stderr(Stdio::from(terminal.another()));
    let output = command.output().unwrap();
    drop(command);
    let run = Run {
        arguments: line.join(" "),
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: String::new(),
    };
    (terminal.shown(), run)
}

#[test]
fn removal_by_pattern_asks_on_a_terminal() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    add_models(&blobd, folder.path());
    for typed in ["n\n", "\n", "what\n"] {
        let (shown, run) = rm_on_terminal(&blobd, &["qwen*"], typed);
        assert!(
            shown.contains(QWEN) && shown.contains(HUB) && shown.contains("Remove these 2 models?"),
            "{shown}"
        );
        assert_eq!(run.exits_with(2).text(), "");
    }
    assert_eq!(listed(&blobd, &[]).len(), 4);
    let (shown, run) = rm_on_terminal(&blobd, &["qwen*"], "y\n");
    assert!(run.succeeds().text().contains("freed"), "{shown}");
    assert_eq!(listed(&blobd, &[]), [LONG, LLAMA]);
    let (shown, run) = rm_on_terminal(&blobd, &["llama*", "-y"], "");
    assert!(run.code == 0 && !shown.contains('?'), "{shown}");
    // Only a pattern needs an answer, and without a terminal nobody can be asked.
    let (shown, run) = rm_on_terminal(&blobd, &[LONG, "--dry-run"], "");
    assert!(run.code == 0 && !shown.contains('?'), "{shown}");
    blobd.line("rm ghcr*").succeeds();
    assert!(listed(&blobd, &[]).is_empty());
}
