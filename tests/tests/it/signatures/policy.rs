//! The rules `[[trust]]`: what must be signed before its content leaves the daemon.

use blobd_tests::reader::Reader;
use blobd_tests::temp_dirs::tmpfs_directory;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::*;

/// A daemon with rules, and the keys `site` and `other` beside its configuration. `{site}` in a rule is the public key.
pub(super) struct Site {
    pub(super) daemon: TestDaemon,
    folder: TempDir,
    pub(super) site: KeyFiles,
    pub(super) other: KeyFiles,
}

impl Site {
    pub(super) fn start(rules: &str) -> Self {
        let folder = tmpfs_directory();
        let [site, other] =
            [("site", P256), ("other", ED25519)].map(|(name, key)| key_files(folder.path(), name, key));
        fs::write(folder.path().join("config.toml"), with_keys(rules, &site)).unwrap();
        let config = folder.path().join("config.toml");
        let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
        Self { daemon, folder, site, other }
    }

    pub(super) fn import(&self, seed: u64, name: &str) {
        let file = ModelFile::dense(seed).write_to(self.daemon.scratch(), "model.gguf");
        self.daemon.command().run(["import", text(&file), "--name", name]).succeeds();
    }

    pub(super) fn sign(&self, name: &str, key: &KeyFiles) {
        self.daemon.command().run(["sign", name, "--key", text(&key.private)]).succeeds();
    }

    /// Other rules from now on.
    pub(super) fn reload(&self, rules: &str) {
        self.reload_until(rules, "SIGHUP: the configuration was reloaded");
    }

    fn reload_until(&self, rules: &str, said: &str) {
        fs::write(self.folder.path().join("config.toml"), with_keys(rules, &self.site)).unwrap();
        let pid = Pid::from_raw(self.daemon.pid().cast_signed()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        eventually("the configuration is read again", || self.daemon.log().contains(said));
    }

    /// Why the content of a model is refused, if it is.
    pub(super) fn refusal(&self, name: &str) -> Option<String> {
        let output = self.folder.path().join("exported.gguf");
        let run = self.daemon.command().run(["export", name, "--json", "--force", "-o", text(&output)]);
        if run.code == 0 {
            return None;
        }
        let error = run.exits_with(7).error();
        assert_eq!(error.code, ErrorCode::DeniedByPolicy, "{error}");
        Some(error.to_string())
    }
}

fn with_keys(rules: &str, site: &KeyFiles) -> String {
    rules.replace("{site}", &format!("[{:?}]", site.public))
}

const ENFORCED: &str = "[[trust]]\npattern = \"signed*\"\nkeys = {site}\nmode = \"enforce\"\n";

#[test]
fn content_of_a_model_leaves_only_if_it_is_signed_as_its_rule_demands() {
    let site = Site::start(ENFORCED);
    site.import(1, "signed");
    site.import(2, "free");
    assert_eq!(site.refusal("free"), None);
    let unsigned = site.refusal("signed").unwrap();
    assert!(unsigned.contains("model signed:latest: not signed"), "{unsigned}");
    assert!(
        unsigned.contains("config.toml:1: [[trust]] demands") && unsigned.contains("site.pub"),
        "{unsigned}"
    );
    let opened = site.daemon.client().open(&"signed".parse().unwrap());
    assert!(opened.unwrap_err().to_string().contains("not signed"));
    let push = site.daemon.command().run(["push", "signed", "http://127.0.0.1:1/a/b:1", "--json"]);
    assert!(push.exits_with(7).error().message.contains("not signed"));
    site.sign("signed", &site.other);
    let by_other = site.refusal("signed").unwrap();
    assert!(by_other.contains("expected one by site.pub, found one by another key"), "{by_other}");
    // What says something about a model gives out none of its weights.
    site.daemon.command().line("show signed").succeeds();
    site.sign("signed", &site.site);
    assert_eq!(site.refusal("signed"), None);
    let reader = Reader::open(&site.daemon.socket(), "signed");
    drop(reader);
    let report = site.daemon.command().line("verify signed --signatures --json").succeeds().json();
    assert_eq!(report["models"][0]["trust"]["satisfied"], true, "{report}");
    assert_eq!(report["models"][0]["key"], "site.pub", "by the key of the configuration");
    // An edited model is another one, also under another name.
    site.daemon.command().line("edit signed edited --set general.name=Other").succeeds();
    assert!(site.refusal("edited").unwrap().contains("not signed"));
    site.sign("edited", &site.site);
    assert_eq!(site.refusal("edited"), None);
}

#[test]
fn rules_warn_except_and_change_with_the_configuration() {
    let warning = ENFORCED.replace("enforce", "warn");
    let site = Site::start(&format!("[[trust]]\npattern = \"signed2\"\nmode = \"off\"\n{warning}"));
    for (seed, name) in [(1, "signed1"), (2, "signed2")] {
        site.import(seed, name);
        assert_eq!(site.refusal(name), None);
        assert_eq!(site.refusal(name), None);
    }
    let log = site.daemon.log();
    assert_eq!(log.matches("model signed1:latest: not signed").count(), 1, "{log}");
    assert!(!log.contains("model signed2:latest: not signed"), "{log}");
    site.reload(ENFORCED);
    assert!(site.refusal("signed1").is_some() && site.refusal("signed2").is_some());
    // A key that cannot be read must not open what it closed.
    let unreadable = ENFORCED.replace("{site}", "[\"/nonexistent\"]");
    site.reload_until(&unreadable, "trust.keys: /nonexistent: cannot read");
    assert!(site.refusal("signed1").is_some());
}

#[test]
fn command_without_a_daemon_obeys_the_rules_of_its_configuration() {
    let folder = tmpfs_directory();
    let key = key_files(folder.path(), "site", P256);
    let config = folder.path().join("config.toml");
    fs::write(&config, with_keys(ENFORCED, &key)).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let file = ModelFile::dense(1).write_to(folder.path(), "signed.gguf");
    blobd.run(["import", text(&file)]).succeeds();
    let export = || blobd.run(["export", "signed", "-f", "-o", text(&folder.path().join("out.gguf"))]);
    export().exits_with(7);
    blobd.run(["sign", "signed", "--key", text(&key.private)]).succeeds();
    export().succeeds();
}
