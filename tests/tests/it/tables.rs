//! Tables on terminals of several widths, with names that are longer than a line and alike: no line is longer than the
//! terminal, and no two rows read the same.

use std::collections::HashSet;
use std::process::Command;

use blobd_client::model::OpenModel;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::terminal::Terminal;

const WIDTHS: [u16; 4] = [60, 80, 120, 200];

/// As on the hub: the repositories of a user begin alike, and those of a model end alike.
fn names() -> Vec<String> {
    let users = ["bartowski", "unsloth", "a-user-with-a-very-long-name"];
    let repositories = [
        "Llama-3.2-1B-Instruct",
        "Llama-3.2-1B-Instruct-abliterated",
        "Qwen3-Coder-30B-A3B-Instruct-1M-UD",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "DeepSeek-R1-0528-Qwen3-8B",
    ];
    let of_user = |user: &'static str| {
        repositories.into_iter().flat_map(move |repository| {
            ["Q4_K_M", "UD-Q4_K_XL"].map(|quant| format!("hf.co/{user}/{repository}-GGUF:{quant}"))
        })
    };
    users.into_iter().flat_map(of_user).collect()
}

/// What the command shows on a terminal of this width.
fn shown(daemon: &TestDaemon, line: &str, columns: u16) -> Vec<String> {
    let terminal = Terminal::new(24, columns);
    let mut command: Command = daemon.command().command();
    command.args(line.split(' ')).stdout(terminal.another());
    let mut child = command.spawn().unwrap();
    drop(command);
    let _code = child.wait().unwrap();
    terminal.shown().replace('\r', "").lines().map(str::to_owned).collect()
}

/// Lines that begin with a space belong to the row above them.
fn check(daemon: &TestDaemon, line: &str, fewest_rows: usize) {
    for columns in WIDTHS {
        let lines = shown(daemon, line, columns);
        let long = lines.iter().find(|line| line.chars().count() > usize::from(columns));
        assert_eq!(long, None, "{line} in {columns} columns: {lines:#?}");
        let rows: Vec<&String> =
            lines.iter().filter(|line| !line.is_empty() && !line.starts_with(' ')).collect();
        assert!(rows.len() > fewest_rows, "{line} in {columns} columns: {lines:#?}");
        let mut seen = HashSet::new();
        let same = rows.iter().find(|row| !seen.insert(**row));
        assert_eq!(same, None, "{line} in {columns} columns: {lines:#?}");
    }
}

fn store(names: &[String]) -> (TestDaemon, Vec<OpenModel>) {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    for (seed, name) in (0..).zip(names) {
        // All share most of it.
        let model = ModelFile::dense_of(70, 1, 64)
            .with_changed("output.weight")
            .with("general.name", seed.to_string());
        let path = model.write_to(daemon.scratch(), "model.gguf");
        blobd.run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
    }
    let open = names.iter().map(|name| daemon.client().open(&name.parse().unwrap()).unwrap()).collect();
    (daemon, open)
}

#[test]
fn tables_fit_the_terminal_and_their_rows_differ() {
    let names = names();
    assert_eq!(names.len(), 30);
    let (daemon, open) = store(&names);
    let count = names.len();
    for line in ["ls", "ls -v", "ls --sort size", "log", "log --limit 0 --verb import", "df -v", "ps"] {
        check(&daemon, line, count);
    }
    let first = &names[0];
    daemon.command().run(["tag", "--force", &names[1], first]).succeeds();
    daemon.command().run(["tag", "--force", &names[2], first]).succeeds();
    for line in [
        &format!("show {first}"),
        &format!("show {first} --tensors"),
        &format!("show {first} --metadata"),
        &format!("history {first}"),
        &format!("diff {first} {}", names[3]),
        "df",
        "df --users",
        "gc --plan-eviction=1GiB",
    ] {
        check(&daemon, line, 2);
    }
    drop(open);
    for name in &names {
        daemon.command().run(["rm", "--keep", "7d", name]).succeeds();
    }
    check(&daemon, "ls --trash", count);
    check(&daemon, "df -v", count);
    check(&daemon, "gc --dry-run", 0);
}
