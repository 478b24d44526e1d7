//! Tables on terminals of several widths, with names that are longer than a line and alike: no line is longer than the
//! terminal, and no two rows read the same.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use blobd_client::model::OpenModel;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, flip_byte};
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

const MODEL: &str = "application/vnd.ollama.image.model";

/// Publishes a version of each model. Returns the paths of the weights.
fn publish(registry: &FakeRegistry, names: &[String], version: u64) -> Vec<String> {
    let publish_one = |(seed, name): (u64, &String)| {
        let weights = ModelFile::dense(1000 * version + seed).bytes();
        registry.add_model(name.trim_start_matches("hf.co/"), b"{}", &[(MODEL, &weights)]).unwrap();
        format!("/cdn/sha256:{}", sha256(&weights))
    };
    (0..).zip(names).map(publish_one).collect()
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

/// LM Studio's folder, with these models of Hugging Face.
fn lmstudio_folder(daemon: &TestDaemon, names: &[String]) -> PathBuf {
    let folder = daemon.scratch().join("lmstudio");
    for (seed, name) in (100..).zip(names) {
        let (repository, quant) = name.trim_start_matches("hf.co/").split_once(':').unwrap();
        let file = repository.rsplit('/').next().unwrap().replace("GGUF", quant);
        fs::create_dir_all(folder.join(repository)).unwrap();
        drop(ModelFile::dense(seed).write_to(&folder.join(repository), &format!("{file}.gguf")));
    }
    folder
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
    let value = "a-value-that-is-longer-than-a-line-".repeat(8);
    let edit =
        format!("edit {first} edited --dry-run --set general.name={value} --set general.author={value}1");
    let lmstudio = lmstudio_folder(&daemon, &names);
    for line in [
        &format!("show {first}"),
        &format!("show {first} --tensors"),
        &format!("show {first} --metadata"),
        &format!("show {first} --layers"),
        &format!("show {first} --residency"),
        &edit,
        &format!("import --list --from-lmstudio={}", lmstudio.display()),
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

#[test]
fn tables_about_registries_fit_the_terminal_and_their_rows_differ() {
    let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
    let (blobd, names) = (daemon.command(), names());
    let addresses: Vec<String> =
        names.iter().map(|name| registry.name(name.trim_start_matches("hf.co/"))).collect();
    publish(&registry, &names, 1);
    let pull = |name: &String| blobd.run(["pull", name]);
    addresses.iter().for_each(|name| drop(pull(name).succeeds()));
    let weights = publish(&registry, &names, 2);
    check(&daemon, "outdated", names.len());
    check(&daemon, &format!("pull --dry-run {}", addresses[0]), 2);
    let planned = blobd.run(["pull", "--all", "--dry-run"]).succeeds();
    assert!(planned.text().ends_with("30 models: would download at most 1.84 MiB\n"), "{}", planned.text());
    for path in &weights {
        registry.add_fault(path, 1, Fault::CutAfter(ModelFile::dense(1).bytes().len() / 2));
        registry.add_fault(path, usize::MAX, Fault::Status(404));
    }
    addresses.iter().for_each(|name| drop(pull(name).exits_with(1)));
    check(&daemon, "partial ls", names.len());
    check(&daemon, "df -v", names.len());
    check(&daemon, "verify --signatures", names.len());
    let shown = blobd.run(["show", &addresses[0], "--json"]).succeeds().json();
    let tensors = shown["tensors"].as_array().unwrap();
    for tensor in tensors {
        let path = blob_path(daemon.root(), tensor["digest"].as_str().unwrap());
        flip_byte(&path, 3);
    }
    check(&daemon, "verify", 5);
    check(&daemon, "ls", names.len());
    check(&daemon, "df -v", names.len());
}
