//! The configuration file, and paths from the command line and the environment.

use std::fs;
use std::process::Stdio;

use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

#[test]
fn configuration_errors_are_one_line_with_place_and_hint() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let place = config.display();
    for (text, message) in [
        ("\n[space\n", format!("blobd: {place}:2:7: ")),
        ("[mirrors]\n\"x\" = \"ftp://y\"", format!("blobd: {place}: mirror of x: \"ftp://y\": http://HOST")),
        ("root = \"models\"", format!("blobd: {place}:1:8: root: \"models\", an absolute path")),
        ("[space]\nquota = -5", format!("blobd: {place}:2:9: space.quota: -5, a size such as ")),
        (
            "[space]\nqouta = 5",
            format!("blobd: {place}:2:1: unknown key \"qouta\"\nhint: did you mean space.quota?\n"),
        ),
    ] {
        fs::write(&config, text).unwrap();
        let run = blobd.line("ls").exits_with(2);
        assert!(run.stderr.starts_with(&message) && !run.stderr.contains('\u{fffd}'), "{}", run.stderr);
    }
    fs::write(&config, "[scrub]\nrate_bytes_per_second = \"50MB\"\npass_days = \"2 weeks\"\n").unwrap();
    blobd.line("ls").succeeds();
    let run = blobd.line("ls --config /nonexistent.toml").exits_with(2);
    assert!(run.stderr.contains("hint: create it"), "{}", run.stderr);
}

#[test]
fn relative_root_of_the_environment_is_refused() {
    let folder = tmpfs_directory();
    let mut list = Blobd::at_root("store".as_ref()).command();
    let run = command::run(list.arg("ls").current_dir(folder.path())).exits_with(2);
    assert!(run.stderr.contains("BLOBD_ROOT: \"store\", an absolute path expected"), "{}", run.stderr);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was created");
}

#[test]
fn relative_paths_of_options_name_the_same_files_for_other_processes() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let mut serve = Blobd::at_root(&root).command();
    serve.env_remove("BLOBD_ROOT").current_dir(folder.path()).stderr(Stdio::null());
    let mut daemon = serve.args(["serve", "--root", "store", "--socket", "s"]).spawn().unwrap();
    let blobd = Blobd::at_root(&root);
    // Before that, each command would open the store, and so keep it from the daemon.
    eventually("the daemon listens", || folder.path().join("s").exists());
    eventually("the daemon responds: nothing else takes a limit", || blobd.line("limit off").code == 0);
    let model = ModelFile::dense_of(1, 2, 128).write_to(folder.path(), "m.gguf");
    blobd.run(["import".as_ref(), model.as_os_str()]).succeeds();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(root.join("store.json").exists());
}

#[test]
fn rates_may_be_written_per_second() {
    let daemon = TestDaemon::start();
    let json = daemon.command().line("limit 20MB/s --json").succeeds().json();
    assert_eq!(json["bytes_per_second"], 20_000_000);
    daemon.command().line("limit 20MB/h").exits_with(2);
}
