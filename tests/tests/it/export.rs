//! `blobd export`: leftovers, owner and mode of its files, and limits.

mod paths;
mod rewrite;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};

use blobd_fixtures::skipped::skipped;
use blobd_store_format::recipe::{Recipe, seal};
use blobd_tests::command;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::names;
use blobd_tests::temp_dirs::disk_directory;
use blobd_tests::terminal::Terminal;
use blobd_tests::wait::eventually;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};

fn daemon_with(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start_on_disk();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    daemon
}

#[test]
fn signals_leave_nothing_behind() {
    let model = ModelFile::dense_of(1, 2, 1024);
    let daemon = daemon_with(&model);
    // Several moments for each signal.
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129), (Signal::TERM, 143)] {
        for millis in [0, 3, 10, 30, 60] {
            let folder = disk_directory();
            let mut export = daemon.command().command();
            let mut export =
                export.args(["export", "m", "-o"]).arg(folder.path().join("m.gguf")).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(millis));
            // It may have ended already.
            let _ = kill_process(Pid::from_child(&export), signal);
            let status = export.wait().unwrap();
            let is_done = status.success();
            // Before the command has installed its handlers, a signal ends it directly.
            let is_ended = status.code().is_none_or(|found| found == code || found == 0);
            assert!(is_ended, "{signal:?} after {millis} ms: {status}");
            let found = names(folder.path());
            assert!(found.is_empty() || found == ["m.gguf"], "{signal:?} after {millis} ms: {found:?}");
            assert!(!is_done || found == ["m.gguf"]);
        }
    }
}

#[test]
fn target_keeps_its_mode_and_a_new_file_has_that_of_the_umask() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let folder = disk_directory();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for old in [0o600, 0o640, 0o444] {
        let target = folder.path().join("old.gguf");
        fs::write(&target, "old").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(old)).unwrap();
        daemon.command().run(["export", "m", "--force", "-o", target.to_str().unwrap()]).succeeds();
        assert!(fs::read(&target).unwrap() == model.bytes());
        assert_eq!(mode(&target), old);
        fs::remove_file(&target).unwrap();
    }
    for (umask, expected) in [("022", 0o644), ("077", 0o600), ("002", 0o664)] {
        let target = folder.path().join("new.gguf");
        let export = daemon.command().command();
        let mut shell = Command::new("sh");
        let words = format!("umask {umask}; exec \"$0\" export m -o \"$1\"");
        shell.args(["-c", &words]).arg(export.get_program()).arg(&target);
        daemon.command().prepare(&mut shell);
        command::run(&mut shell).succeeds();
        assert_eq!(mode(&target), expected);
        fs::remove_file(&target).unwrap();
    }
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn export_writes_to_devices_and_pipes_directly() {
    let daemon = daemon_with(&ModelFile::dense(1));
    daemon.command().line("export m -o /dev/null").succeeds();
    let bytes = daemon.command().line("export m -o /dev/stdout").succeeds().stdout;
    assert!(bytes.starts_with(&ModelFile::dense(1).bytes()));
    let run = daemon.command().line("export m -o /dev/full --json").exits_with(6);
    assert!(run.error().message.contains("/dev/full"), "{}", run.stderr);
    // It does not hang if the reader has closed the pipe.
    let pipe = daemon.scratch().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let mut export = daemon.command().command();
    export.args(["export", "m", "-o"]).arg(&pipe).stderr(Stdio::null());
    let mut export = export.spawn().unwrap();
    drop(File::open(&pipe).unwrap());
    eventually("the export ends", || export.try_wait().unwrap().is_some());
}

#[test]
fn existing_file_is_replaced_only_on_request() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let target = daemon.scratch().join("out.gguf");
    let export = |words: &[&str]| {
        let common = ["export", "m", "--json", "-o", target.to_str().unwrap()];
        daemon.command().run(common.iter().chain(words))
    };
    let same_size = vec![7; model.bytes().len()];
    for old in [&b"years of work"[..], &same_size] {
        for words in [&[][..], &["--alignment", "64"]] {
            fs::write(&target, old).unwrap();
            let error = export(words).exits_with(4).error();
            assert!(error.message.contains("out.gguf: exists already"), "{error}");
            assert!(error.hint.unwrap().contains("--force"));
            assert!(fs::read(&target).unwrap() == old);
        }
    }
    let exported = export(&["--force"]).succeeds().json()["exported"][0].clone();
    assert_eq!(exported["already_there"], false);
    assert!(fs::read(&target).unwrap() == model.bytes());
    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
    let before = inode(&target);
    let exported = export(&[]).succeeds().json()["exported"][0].clone();
    assert_eq!((exported["already_there"].as_bool(), inode(&target)), (Some(true), before));
    // An empty file, such as one of mktemp or of a shell's redirection, has nothing to lose.
    fs::write(&target, "").unwrap();
    export(&[]).succeeds();
    assert!(fs::read(&target).unwrap() == model.bytes());
}

#[test]
fn only_texts_are_written_to_a_terminal_unless_forced() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let run = |words: &[&str]| {
        let terminal = Terminal::new(24, 80);
        let mut command = daemon.command().command();
        let run = command::run(command.args(words).stdout(terminal.another()));
        drop(command);
        (run, terminal.shown())
    };
    let tensor = ["tensor", "m", "output_norm.weight", "--dump"];
    for words in [&["export", "m", "-o", "-"][..], &["export", "m", "-o", "/dev/stdout"], &tensor] {
        let (refused, shown) = run(words);
        assert!(refused.exits_with(2).stderr.contains("is a terminal"), "{words:?}");
        assert_eq!(shown, "", "{words:?}");
        let (done, shown) = run(&[words, &["--force"]].concat());
        done.succeeds();
        assert!(!shown.is_empty(), "{words:?}");
    }
    let (done, shown) = run(&["export", "m", "--component", "config", "-o", "-"]);
    done.succeeds();
    assert!(shown.contains("model_format"), "{shown}");
}

#[test]
fn export_that_does_not_fit_leaves_nothing() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let folder = disk_directory();
    let export = daemon.command().command();
    let mut script = Command::new("unshare");
    let words = "mount -t tmpfs -o size=16k none \"$1\" || exit 77
        \"$0\" export m -o \"$1/m.gguf\" --json; code=$?
        ls -A \"$1\"; exit $code";
    script.args(["--mount", "sh", "-c", words]).arg(export.get_program()).arg(folder.path());
    daemon.command().prepare(&mut script);
    let Ok(output) = script.output() else { return skipped("no unshare") };
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() != Some(6) && (errors.contains("unshare") || errors.contains("mount:")) {
        return skipped(format_args!("takes root: {errors}"));
    }
    assert_eq!(output.status.code(), Some(6), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "nothing is left");
}

/// Adds a piece of zeros to the recipe of the only model.
fn plant(daemon: &TestDaemon, zeros: u64) {
    let [name] = names(&daemon.root().join("recipes")).try_into().expect("one recipe");
    let path = daemon.root().join("recipes").join(name);
    let mut recipe: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    recipe["pieces"].as_array_mut().unwrap().push(serde_json::json!({ "zeros": zeros }));
    recipe["size"] = (recipe["size"].as_u64().unwrap() + zeros).into();
    recipe.as_object_mut().unwrap().remove("check");
    fs::remove_file(&path).unwrap();
    fs::write(&path, seal(serde_json::to_vec(&recipe).unwrap())).unwrap();
}

#[test]
fn recipe_larger_than_its_file_in_the_manifest_is_refused() {
    for (zeros, reason) in [(Recipe::MAX_LITERAL_BYTES, "as in the manifest"), (1 << 50, "too much padding")]
    {
        let mut daemon = daemon_with(&ModelFile::dense(1));
        daemon.stop();
        plant(&daemon, zeros);
        daemon.restart();
        let folder = disk_directory();
        let target = folder.path().join("m.gguf");
        for words in [vec!["export", "m", "-o", "-"], vec!["export", "m", "-o", target.to_str().unwrap()]] {
            let run = daemon.command().run([&words[..], &["--json"]].concat()).exits_with(5);
            assert!(run.error().message.contains(reason), "{}", run.stderr);
        }
        assert_eq!(names(folder.path()), [""; 0]);
        daemon.client().open(&"m".parse().unwrap()).unwrap_err();
        daemon.command().line("verify").exits_with(5);
    }
}
