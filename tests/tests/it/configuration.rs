//! The configuration file, and paths from the command line and the environment.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;

use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn configuration_errors_are_one_line_with_place_and_hint() {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let place = config.display();
    for (text, message) in [
        ("\n[space\n", format!("blobd: {place}:2:7: ")),
        ("[mirrors]\n\"x\" = \"ftp://y\"", format!("blobd: {place}:2:7: mirrors.x: expected a URL such as ")),
        ("root = \"models\"", format!("blobd: {place}:1:8: root: expected an absolute path")),
        ("[space]\nquota = -5", format!("blobd: {place}:2:9: space.quota: expected a size such as ")),
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
    assert!(run.stderr.contains("BLOBD_ROOT: expected an absolute path, found \"store\""), "{}", run.stderr);
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

/// A daemon with a configuration file that the test changes.
struct Configured {
    _folder: tempfile::TempDir,
    config: PathBuf,
    daemon: TestDaemon,
}

impl Configured {
    fn start(text: &str) -> Self {
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        fs::write(&config, text).unwrap();
        let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
        Self { _folder: folder, config, daemon }
    }

    /// Waits until the daemon has read the changed file, and returns what it has logged since.
    fn reload(&self, text: &str) -> String {
        fs::write(&self.config, text).unwrap();
        let before = self.daemon.log().len();
        let pid = Pid::from_raw(self.daemon.pid().try_into().unwrap()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        let new = || self.daemon.log()[before..].to_owned();
        eventually("the daemon has read its configuration", || new().contains("SIGHUP: the configuration"));
        new()
    }

    fn show(&self) -> serde_json::Value {
        let blobd = Blobd::at_socket(&self.daemon.socket()).configured_by(&self.config);
        blobd.line("config show --json").succeeds().json()
    }

    /// The setting, and its value in the daemon if that is another one.
    fn setting(&self, key: &str) -> (serde_json::Value, Option<serde_json::Value>) {
        let shown = self.show();
        let find = |list: &serde_json::Value| {
            list.as_array().unwrap().iter().find(|setting| setting["key"] == key).cloned()
        };
        let used = find(&shown["daemon"]["differences"]).map(|used| used["value"].clone());
        (find(&shown["settings"]).unwrap(), used)
    }
}

#[test]
fn config_show_prints_each_value_and_its_origin() {
    let configured = Configured::start("durability = \"fsync\"\n\n[space]\nquota = \"3 GiB\"\n");
    let (quota, used) = configured.setting("space.quota");
    assert_eq!((&quota["value"], &quota["origin"]), (&"3 GiB".into(), &"file".into()));
    assert_eq!((quota["place"].as_str().unwrap().rsplit_once(':').unwrap().1, used), ("4", None));
    let (socket, _) = configured.setting("socket");
    assert_eq!((&socket["origin"], &socket["place"]), (&"environment".into(), &"BLOBD_SOCKET".into()));
    assert_eq!(configured.setting("transfer.max_connections").0["origin"], "default");
    let text = Blobd::at_socket(&configured.daemon.socket()).configured_by(&configured.config);
    let text = text.line("config show").succeeds().text();
    for part in [
        "space.quota",
        "\"3 GiB\"",
        "line 4",
        "BLOBD_SOCKET",
        "not set",
        "still uses",
        "root = ",
        "BLOBD_ROOT when it was started",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    fs::write(&configured.config, "[space]\nqouta = 1\n").unwrap();
    let run = Blobd::at_socket(&configured.daemon.socket()).configured_by(&configured.config);
    assert!(run.line("config show").exits_with(2).stderr.contains("config.toml:2:1: unknown key"));
}

#[test]
fn config_show_creates_nothing() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let run = blobd.line("config show --json").succeeds();
    assert!(run.json()["daemon"].is_null());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn quota_and_transfer_limits_change_without_a_restart() {
    let configured = Configured::start("[scrub]\nrate_bytes_per_second = 0\n");
    let model = ModelFile::dense_of(1, 2, 128).write_to(configured.daemon.scratch(), "m.gguf");
    let import = ["import".as_ref(), model.as_os_str()];
    let log = configured.reload("[space]\nquota = \"4096 B\"\n[transfer]\nlimit_rate = \"3 MiB\"\n");
    assert!(log.contains("space.quota: null before, \"4 KiB\" now"), "{log}");
    assert!(log.contains("scrub.rate_bytes_per_second: \"0 B\" before"), "{log}");
    configured.daemon.command().run(import).exits_with(6);
    let limit = configured.daemon.command().line("limit --json").succeeds().json();
    assert_eq!(limit["bytes_per_second"], 3 << 20);
    // A limit that was set since stays as long as the configured one does.
    configured.daemon.command().line("limit 5MiB").succeeds();
    configured.reload("[transfer]\nlimit_rate = \"3 MiB\"\nmax_connections = 2\n");
    let limit = configured.daemon.command().line("limit --json").succeeds().json();
    assert_eq!(limit["bytes_per_second"], 5 << 20);
    configured.daemon.command().run(import).succeeds();
    assert_eq!(configured.setting("transfer.max_connections").1, None, "the daemon uses it");
}

#[test]
fn mirrors_change_without_a_restart() {
    let configured = Configured::start("");
    let pull = || configured.daemon.command().line("pull registry.example/me/m --json");
    configured.reload("[mirrors]\n\"registry.example\" = \"http://127.0.0.1:1\"\n");
    let run = pull().exits_with(1);
    assert!(run.stderr.contains("127.0.0.1:1"), "{}", run.stderr);
}

#[test]
fn file_with_an_error_changes_nothing() {
    let configured = Configured::start("[space]\nquota = \"3 GiB\"\n");
    let log = configured.reload("[space]\nquota = -5\n");
    assert!(log.contains("the configuration stays as it is: ") && log.contains("config.toml:2:9"), "{log}");
    let log = configured.reload("[mirrors]\n\"x\" = \"ftp://y\"\n[space]\nquota = \"1 B\"\n");
    assert!(log.contains("the configuration stays as it is: "), "{log}");
    fs::write(&configured.config, "[space]\nquota = \"1 B\"\n").unwrap();
    let (_, used) = configured.setting("space.quota");
    assert_eq!(used, Some("3 GiB".into()));
}

/// Neither the password nor a change that was not made.
#[test]
fn refused_file_is_logged_without_its_password_and_without_changes() {
    let configured = Configured::start("[space]\nquota = \"3 GiB\"\n");
    let wrong =
        "[mirrors]\n\"mir.example\" = \"https://user:s3cret@127.0.0.1:1/x\"\n[space]\nquota = \"1 B\"\n";
    let log = configured.reload(wrong);
    let error = "config.toml:2:17: mirrors.mir.example: expected a URL such as";
    assert!(log.contains("the configuration stays as it is: ") && log.contains(error), "{log}");
    assert!(!log.contains("s3cret") && !log.contains(" before, "), "{log}");
    let blobd = Blobd::at_socket(&configured.daemon.socket()).configured_by(&configured.config);
    let run = blobd.line("config show").exits_with(2);
    assert!(run.stderr.contains(error) && !run.stderr.contains("s3cret"), "{}", run.stderr);
    // What only the start of the daemon finds.
    let log = configured.reload("ca_files = [\"/nonexistent/ca.pem\"]\n[space]\nquota = \"1 B\"\n");
    assert!(log.contains("config.toml:1:13: ca_files: /nonexistent/ca.pem: "), "{log}");
    assert!(!log.contains(" before, "), "{log}");
    assert_eq!(log.matches("name PEM files").count(), 1, "the hint once: {log}");
}

/// `systemctl reload` runs it first.
#[test]
fn config_show_refuses_what_the_daemon_refuses() {
    let folder = tmpfs_directory();
    let (config, root) = (folder.path().join("config.toml"), folder.path().join("store"));
    fs::write(folder.path().join("empty.pem"), "no certificate").unwrap();
    let blobd = Blobd::at_root(&root).configured_by(&config);
    let (place, directory) = (config.display(), folder.path().display());
    for (text, message) in [
        ("[mirrors]\nx = \"http://u@y\"".to_owned(), "2:5: mirrors.x: expected a URL such as ".to_owned()),
        ("socket_group = \"no-such\"".to_owned(), "1:1: socket_group: no such group: ".to_owned()),
        ("insecure_registries = [\"http://x\"]".to_owned(), "1:24: insecure_registries".to_owned()),
        (format!("ca_files = [\"{directory}/no.pem\"]"), format!("1:13: ca_files: {directory}/no.pem: ")),
        (format!("ca_files = [\"{directory}/empty.pem\"]"), "1:13: ca_files: ".to_owned()),
        (format!("lower = [\"/a\", \"{}\"]", root.display()), "1:16: lower: ".to_owned()),
    ] {
        fs::write(&config, &text).unwrap();
        let (shown, served) = (blobd.line("config show"), blobd.line("serve"));
        for run in [shown, served] {
            let stderr = &run.stderr;
            assert_eq!(run.code, 2, "{text}: {stderr}");
            assert!(stderr.contains(&format!("{place}:{message}")), "{text}: {stderr}");
        }
    }
}

/// As a user of the system's daemon does.
#[test]
fn config_show_names_the_file_that_the_daemon_reads() {
    let configured = Configured::start("[space]\nquota = \"3 GiB\"\n");
    let own = configured.daemon.scratch().join("own.toml");
    fs::write(&own, "[space]\nquota = \"4 GiB\"\n").unwrap();
    let blobd = Blobd::at_socket(&configured.daemon.socket()).configured_by(&own);
    let text = blobd.line("config show").succeeds().text();
    let file = configured.config.display();
    assert!(text.contains(&format!("reads another file, {file}, and uses:")), "{text}");
    assert!(text.contains("space.quota = \"3 GiB\": change it there and send it SIGHUP"), "{text}");
    let shown = blobd.line("config show --json").succeeds().json();
    assert_eq!(shown["daemon"]["file"], file.to_string());
}

#[test]
fn settings_of_the_socket_take_effect_after_a_restart() {
    let mut configured = Configured::start("");
    let log = configured.reload("durability = \"fsync\"\nsocket_mode = \"0666\"\n");
    assert!(log.contains("socket_mode: \"0666\" takes effect when the daemon is restarted"), "{log}");
    let mode = |configured: &Configured| {
        fs::metadata(configured.daemon.socket()).unwrap().permissions().mode() & 0o777
    };
    assert_eq!(mode(&configured), 0o600);
    assert_eq!(configured.setting("durability").1, Some("auto".into()));
    configured.daemon.stop();
    configured.daemon.restart();
    assert_eq!(mode(&configured), 0o666);
    assert_eq!(configured.setting("durability").1, None);
}
