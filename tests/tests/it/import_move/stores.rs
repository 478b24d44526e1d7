//! `import --from PROGRAM --move`, and the disk that a move needs.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::moves::{KilledMoves, Layout, MovedModel, Victim};
use blobd_tests::store_dir::{check_blobs, du};
use serde_json::json;

fn written(daemon: &TestDaemon, layout: Layout) -> (PathBuf, Vec<MovedModel>) {
    let folder = daemon.scratch().join("source");
    let models = layout.write(&folder);
    (folder, models)
}

fn from(program: &str, folder: &Path) -> String {
    format!("--from-{program}={}", folder.display())
}

fn kill_moves(layout: Layout) {
    const KILLS: u32 = 6;
    let mut moves = KilledMoves::new(layout, TestDaemon::start_on_disk()).unwrap();
    for (kill, victim) in (0..KILLS).zip(Victim::ALL.into_iter().cycle()) {
        let moved = moves.kill(1000 * (kill + 1) / KILLS, victim);
        assert_eq!(moved, Ok(()), "kill {kill}, {victim:?}");
    }
}

#[test]
fn killed_move_of_gguf_files_loses_nothing() {
    kill_moves(Layout::Gguf);
}

#[test]
fn killed_move_of_safetensors_folders_loses_nothing() {
    kill_moves(Layout::Safetensors);
}

#[test]
fn killed_move_out_of_ollama_loses_nothing() {
    kill_moves(Layout::Ollama);
}

#[test]
fn killed_move_out_of_the_hub_cache_loses_nothing() {
    kill_moves(Layout::Hub);
}

#[test]
fn killed_move_out_of_lm_studio_loses_nothing() {
    kill_moves(Layout::LmStudio);
}

#[test]
fn killed_move_out_of_llama_cpp_loses_nothing() {
    kill_moves(Layout::LlamaCpp);
}

#[test]
fn killed_move_of_shards_loses_nothing() {
    kill_moves(Layout::Shards);
}

#[test]
fn list_says_what_would_be_deleted() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Ollama);
    let listed = daemon.command().run(["import", &from("ollama", &folder), "--move", "--list", "--json"]);
    let listed = listed.succeeds().json();
    let deletes = |number: usize| listed["models"][number]["deletes"].as_array().unwrap().clone();
    assert!(deletes(0)[0].as_str().unwrap().ends_with("library/one/latest"), "{listed}");
    // Both need the configuration and the template.
    assert_eq!((deletes(0).len(), deletes(1).len()), (2, 4));
    let table =
        daemon.command().run(["import", &from("ollama", &folder), "--move", "--list"]).succeeds().text();
    assert!(table.contains("new; deletes 4 files"), "{table}");
    let files = folder.join("files");
    fs::create_dir_all(&files).unwrap();
    let path = ModelFile::dense(1).write_to(&files, "m.gguf");
    let listed = daemon.command().run(["import", "--move", "--list", "--json", files.to_str().unwrap()]);
    assert_eq!(listed.succeeds().json()["models"][0]["deletes"], json!([path.to_str().unwrap()]));
    assert!(models.iter().flat_map(|model| model.paths.keys()).all(|path| path.exists()));
}

#[test]
fn what_another_model_needs_stays() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Ollama);
    let blobd = daemon.command();
    blobd.run(["import", &from("ollama", &folder), "--move", "one:latest"]).succeeds();
    let is_there = |model: &MovedModel| model.paths.keys().filter(|path| path.exists()).count();
    assert_eq!((is_there(&models[0]), is_there(&models[1])), (2, 4), "the manifest and the weights are gone");
    // A link to a manifest needs it too.
    let link = folder.join("manifests/registry.ollama.ai/library/two/other");
    symlink("latest", &link).unwrap();
    blobd.run(["import", &from("ollama", &folder), "--move", "two:latest"]).succeeds();
    assert_eq!(is_there(&models[1]), 4);
    blobd.run(["import", &from("ollama", &folder), "--move"]).succeeds();
    assert!(models.iter().all(|model| is_there(model) == 0) && link.symlink_metadata().is_err());
    check_blobs(daemon.root());
}

#[test]
fn file_that_repositories_share_goes_with_the_last_of_them() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Hub);
    let blobd = daemon.command();
    let notes = folder.join("models--cy--copy").join("snapshots");
    blobd.run(["import", &from("hf", &folder), "--move", "hf.co/ben/*"]).succeeds();
    assert!(
        !folder.join("models--ben--folder").exists() && !folder.join(".locks/models--ben--folder").exists()
    );
    assert!(models[3].paths.keys().all(|path| path.exists()), "the shared file is needed");
    fs::write(notes.join("../README.md"), "mine").unwrap();
    blobd.run(["import", &from("hf", &folder), "--move"]).succeeds();
    assert!(!folder.join("blobs/a9").exists() && !folder.join("models--ann--tiny").exists());
    assert_eq!(
        fs::read_dir(folder.join("models--cy--copy")).unwrap().count(),
        1,
        "what is not imported stays"
    );
}

#[test]
fn ollama_store_with_an_unreadable_manifest_is_left_alone() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Ollama);
    let broken = folder.join("manifests/registry.ollama.ai/library/one/broken");
    fs::write(&broken, b"{").unwrap();
    let run = daemon.command().run(["import", &from("ollama", &folder), "--move", "--json", "two:latest"]);
    let error = run.exits_with(1).error();
    assert!(error.message.contains("one/broken: cannot be read as a manifest"), "{}", error.message);
    assert!(models.iter().flat_map(|model| model.paths.keys()).all(|path| path.exists()));
    // One that can be read keeps what it names, even if it cannot be imported.
    fs::remove_file(&broken).unwrap();
    let mut own = models[1].paths.keys().filter(|path| !models[0].paths.contains_key(*path));
    let blob = own.find(|path| path.starts_with(folder.join("blobs"))).unwrap();
    fs::remove_file(blob).unwrap();
    daemon.command().run(["import", &from("ollama", &folder), "--move", "--json"]).exits_with(1);
    let left = models[1].paths.keys().filter(|path| path.exists()).count();
    assert_eq!(left, 3, "the manifest, the configuration and the template");
}

#[test]
fn store_of_a_running_program_is_refused_with_its_name() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Ollama);
    let program = daemon.scratch().join("ollama");
    symlink("/bin/sh", &program).unwrap();
    let mut serve = Command::new(&program)
        .arg0("sh")
        .args(["-c", "read line"])
        .env("OLLAMA_MODELS", &folder)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let run = daemon.command().run(["import", &from("ollama", &folder), "--move", "--json", "one:latest"]);
    let other = daemon.scratch().join("other");
    let of_other = Layout::Ollama.write(&other);
    let moved = daemon.command().run(["import", &from("ollama", &other), "--move", "one:latest"]);
    drop(serve.stdin.take());
    serve.wait().unwrap();
    let error = run.exits_with(4).error();
    assert!(error.message.contains("in use by ollama (process "), "{}", error.message);
    assert!(models[0].paths.keys().all(|path| path.exists()));
    moved.succeeds();
    assert!(of_other[0].paths.keys().any(|path| !path.exists()), "it uses another store");
}

#[test]
fn file_of_the_hub_cache_that_is_downloaded_is_refused() {
    let daemon = TestDaemon::start();
    let (folder, models) = written(&daemon, Layout::Hub);
    let digest = models[0].files.first().unwrap();
    let lock = folder.join(format!(".locks/models--ann--tiny/{digest}.lock"));
    let download = File::open(&lock).unwrap();
    let run =
        daemon.command().run(["import", &from("hf", &folder), "--move", "--json", "hf.co/ann/tiny:Q8_0"]);
    drop(download);
    let error = run.exits_with(4).error();
    assert!(error.message.contains(&format!("{digest}.lock: in use by ")), "{}", error.message);
    assert!(models[0].paths.keys().all(|path| path.exists()));
}

#[test]
fn models_of_programs_that_keep_other_records_are_not_moved() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let place = daemon.scratch().join("jan/ann/m");
    fs::create_dir_all(&place).unwrap();
    fs::rename(path, place.join("model.gguf")).unwrap();
    let from = format!("--from=jan={}", daemon.scratch().join("jan").display());
    let error = daemon.command().run(["import", &from, "--move", "--json"]).exits_with(1).error();
    assert!(error.message.contains("Jan: its models cannot be moved"), "{}", error.message);
    assert!(place.join("model.gguf").exists());
}

/// Both directories are measured again and again, the growing one first: so what is in both is never counted for more
/// than it is.
#[test]
fn source_and_store_never_need_more_than_the_sources_and_the_largest_file() {
    const MODELS: u64 = 6;
    let daemon = TestDaemon::start();
    let source = daemon.scratch().join("source");
    fs::create_dir(&source).unwrap();
    for seed in 0..MODELS {
        let mut model = ModelFile::empty();
        model.add_noise(seed, "t", GgmlType::F32, &[1 << 20]);
        let _path = model.write_to(&source, &format!("m{seed}-F32.gguf"));
    }
    let (sources, before) = (du(&source), du(daemon.root()));
    let is_done = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let sampled = scope.spawn(|| {
            let mut most = 0;
            while !is_done.load(Ordering::SeqCst) {
                let store = du(daemon.root());
                most = most.max(store + du(&source));
            }
            most
        });
        let run = daemon.command().run(["import", "--move", source.to_str().unwrap()]);
        is_done.store(true, Ordering::SeqCst);
        let most = sampled.join().unwrap();
        run.succeeds();
        most
    });
    let largest = sources / MODELS;
    assert!(most <= before + sources + largest + (1 << 20), "{most} of {sources} + {largest}");
    assert_eq!(fs::read_dir(&source).unwrap().count(), 0);
}
