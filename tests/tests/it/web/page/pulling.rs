//! Pulls on the page: their size before they begin, their progress, their end; newer versions; leases.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use blobd_tests::browser::Browser;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

use super::Visit;
use super::actions::{IS_READY, begin, close, confirm, press_until, said};
use crate::pull::registry_with;

const IS_ASKING: &str = "document.getElementById('action').open && \
    document.getElementById('action-confirm').textContent === 'Look up its size'";

/// Opens the dialog of a pull with the keyboard, fills it, and waits until it says what will be downloaded.
fn plan(browser: &mut Browser, source: &str, name: &str) {
    browser.wait_for("document.querySelector('[data-action=pull]')");
    browser.evaluate("document.querySelector('[data-action=pull]').focus()");
    browser.press("Enter");
    browser.wait_for(IS_ASKING);
    assert_eq!(browser.evaluate("document.activeElement.id"), "action-source", "the first field");
    fill(browser, "source", source);
    fill(browser, "name", name);
    browser.press("Enter");
    browser.wait_for("document.getElementById('action-confirm').textContent.startsWith('Pull ')");
}

/// Writes a text as a user does.
pub(super) fn fill(browser: &mut Browser, field: &str, text: &str) {
    browser.evaluate(&format!("document.getElementById('action-{field}').select()"));
    browser.call("Input.insertText", serde_json::json!({ "text": text }));
}

fn wait_for_result(browser: &mut Browser, part: &str) {
    browser.wait_for(&format!("document.getElementById('results').textContent.includes('{part}')"));
}

fn names(daemon: &TestDaemon) -> Vec<String> {
    daemon.client().models().unwrap().models.into_iter().map(|model| model.name).collect()
}

#[test]
fn model_is_pulled_stopped_and_pulled_again() {
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let visit = Visit::new(browser, &[]);
    let registry = registry_with(&ModelFile::dense_of(3, 2, 512));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(4 << 10, Duration::from_millis(100)));
    let source = registry.name("library/tiny:latest");
    pulled_and_stopped(browser, &visit, &source);
    registry.clear_faults();
    pulled_again(browser, &visit, &source);
}

fn pulled_and_stopped(browser: &mut Browser, visit: &Visit, source: &str) {
    plan(browser, source, "tiny");
    let effects = said(browser, "effects");
    assert!(
        effects.contains("will be downloaded of ") && effects.contains("that may be stored"),
        "{effects}"
    );
    assert!(said(browser, "way").contains("stopped at any time"));
    assert!(visit.daemon.client().running_pulls().unwrap().pulls.is_empty(), "nothing has begun");
    // A changed field needs another look.
    fill(browser, "limit", "5");
    browser.wait_for(IS_ASKING);
    browser.press("Enter");
    browser.wait_for("document.getElementById('action-confirm').textContent.startsWith('Pull ')");
    assert!(confirm(browser).starts_with("The pull has begun"));
    close(browser);
    browser.wait_for("document.querySelector('#pulls progress')?.value > 0");
    limited(browser, visit);
    begin(browser, "stop");
    assert!(said(browser, "effects").contains("are kept"));
    assert_eq!(confirm(browser), "The pull is stopped.");
    close(browser);
    wait_for_result(browser, "was stopped");
    eventually("the daemon has ended it", || visit.daemon.client().running_pulls().unwrap().pulls.is_empty());
    assert_eq!(names(&visit.daemon), [""; 0]);
}

/// The limit of all pulls is set, and set back.
fn limited(browser: &mut Browser, visit: &Visit) {
    let limit = || visit.daemon.client().limit().unwrap().bytes_per_second;
    browser.evaluate("document.querySelector('[data-action=limit]').click()");
    fill(browser, "limit", "2.5");
    browser.press("Enter");
    browser
        .wait_for(&format!("{IS_READY} && document.getElementById('action-confirm').textContent === 'Set'"));
    let effects = said(browser, "effects");
    assert!(effects.contains("now: no limit"), "{effects}");
    confirm(browser);
    assert_eq!(limit(), Some(2_500_000));
    press_until(browser, "action-back");
    browser.wait_for("document.getElementById('action-done').textContent.includes('no limit')");
    assert_eq!(limit(), None);
    close(browser);
}

fn pulled_again(browser: &mut Browser, visit: &Visit, source: &str) {
    plan(browser, source, "tiny");
    let effects = said(browser, "effects");
    assert!(effects.contains("received by an earlier pull"), "{effects}");
    confirm(browser);
    close(browser);
    wait_for_result(browser, "tiny:latest is pulled");
    assert_eq!(names(&visit.daemon), ["tiny:latest"]);
    browser.wait_for("document.querySelector('#models tbody').textContent.includes('tiny')");
    // That it was stopped, and that it is pulled.
    for _ in 0..2 {
        browser.evaluate("document.querySelector('#results button').click()");
    }
    assert_eq!(browser.evaluate("document.getElementById('results').textContent"), "");
    // A source that does not exist: the dialog says so, and nothing begins.
    browser.evaluate("document.querySelector('[data-action=pull]').click()");
    fill(browser, "source", &source.replace("tiny", "none"));
    browser.press("Enter");
    browser.wait_for("document.getElementById('action-problem').checkVisibility()");
    assert!(visit.daemon.client().running_pulls().unwrap().pulls.is_empty());
}

/// The strip, the table and what is read aloud name a push as what it is.
#[test]
fn push_is_shown_while_it_runs_and_cannot_be_stopped_here() {
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let visit = Visit::new(browser, &[]);
    let file = ModelFile::dense_of(1, 2, 128).write_to(visit.daemon.scratch(), "tiny.gguf");
    visit.daemon.command().run(["import", file.to_str().unwrap(), "--name", "tiny"]).succeeds();
    let registry = FakeRegistry::start().unwrap();
    let destination = registry.name("team/tiny:1");
    let mut push = visit.daemon.command().command();
    push.args(["push", "tiny", &destination, "--limit-rate", "1KB"]).stdout(Stdio::null());
    let mut push = push.stderr(Stdio::null()).spawn().unwrap();
    browser.wait_for("document.querySelector('#strip-items')?.textContent.includes('pushing tiny')");
    browser.wait_for("document.getElementById('pulls-live').textContent === 'push of tiny:latest begins'");
    let row = browser.evaluate("document.querySelector('#pulls tbody tr').textContent").to_string();
    assert!(row.contains("push") && row.contains(&format!("tiny:latest → {destination}")), "{row}");
    assert_eq!(browser.evaluate("document.querySelectorAll('#pulls button').length"), 0);
    push.kill().unwrap();
    push.wait().unwrap();
    browser.wait_for("document.getElementById('pulls-live').textContent === 'push of tiny:latest has ended'");
}

#[test]
fn models_that_a_pull_would_evict_are_named_before_it_begins() {
    const MODEL: &str = "application/vnd.ollama.image.model";
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let registry = FakeRegistry::start().unwrap();
    for (name, tensor) in [("a", 1), ("b", 2)] {
        let weights = super::model_of(&[tensor], 4 << 20).bytes();
        registry.add_model(&format!("library/{name}:1"), b"{}", &[(MODEL, &weights)]).unwrap();
    }
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "[space]\nquota = \"6 MiB\"\nevict = \"all\"\n").unwrap();
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    daemon.command().run(["pull", &registry.name("library/a:1"), "--name", "a"]).succeeds();
    let visit = Visit::of(browser, daemon);
    plan(browser, &registry.name("library/b:1"), "b");
    let effects = said(browser, "effects");
    assert!(effects.contains("To make room, these models will be removed: a:latest."), "{effects}");
    assert_eq!(names(&visit.daemon), ["a:latest"], "nothing has begun");
    confirm(browser);
    close(browser);
    wait_for_result(browser, "b:latest is pulled");
    assert_eq!(names(&visit.daemon), ["b:latest"]);
}

#[test]
fn newer_version_of_a_model_is_found_and_pulled() {
    const MODEL: &str = "application/vnd.ollama.image.model";
    let Some(mut browser) = Browser::start() else { return };
    let registry = FakeRegistry::start().unwrap();
    let publish = |seed| {
        let weights = ModelFile::dense(seed).bytes();
        registry.add_model("library/m:a", b"{}", &[(MODEL, &weights)]).unwrap();
    };
    publish(1);
    let daemon = TestDaemon::start();
    daemon.command().run(["pull", &registry.name("library/m:a"), "--name", "m"]).succeeds();
    let before = daemon.client().models().unwrap().models[0].digest;
    let (browser, visit) = (&mut browser, daemon);
    let web = super::open_page(browser, &visit.command());
    browser.evaluate("document.getElementById('updates-check').click()");
    browser.wait_for(
        "document.getElementById('updates-text').textContent.startsWith('0 models have another version')",
    );
    publish(2);
    browser.evaluate("document.getElementById('updates-check').click()");
    browser.wait_for(
        "document.getElementById('updates-text').textContent.startsWith('1 model has another version')",
    );
    begin(browser, "update");
    let effects = said(browser, "effects");
    assert!(effects.contains("will be downloaded") && effects.contains("goes to the trash"), "{effects}");
    confirm(browser);
    close(browser);
    wait_for_result(browser, "m:latest is pulled");
    assert_ne!(visit.client().models().unwrap().models[0].digest, before);
    browser.wait_for("document.getElementById('updates-text').textContent.startsWith('0 models')");
    drop(web);
}

/// All newer versions at once, but for that of a pinned model.
#[test]
fn newer_versions_of_several_models_are_pulled_at_once() {
    const MODEL: &str = "application/vnd.ollama.image.model";
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let registry = FakeRegistry::start().unwrap();
    let daemon = TestDaemon::start();
    let publish = |seed: u64| {
        for (number, name) in (0..).zip(["a", "b", "c"]) {
            let weights = ModelFile::dense(seed + number).bytes();
            registry.add_model(&format!("library/{name}:1"), b"{}", &[(MODEL, &weights)]).unwrap();
        }
    };
    publish(1);
    for name in ["a", "b", "c"] {
        let source = registry.name(&format!("library/{name}:1"));
        daemon.command().run(["pull", &source, "--name", name]).succeeds();
    }
    daemon.command().line("pin c").succeeds();
    let digests = || {
        let models = daemon.client().models().unwrap().models;
        models
            .into_iter()
            .map(|model| (model.name, model.digest))
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let before = digests();
    publish(11);
    let _web = super::open_page(browser, &daemon.command());
    browser.evaluate("document.getElementById('updates-check').click()");
    browser.wait_for("document.getElementById('updates-text').textContent.startsWith('3 models have')");
    let pinned = browser.evaluate("document.querySelector('[data-action=\"update c:latest\"]').title");
    assert!(pinned.as_str().unwrap().contains("unpin it first"), "{pinned}");
    begin(browser, "update-all");
    assert_eq!(said(browser, "title"), "Update 2 models");
    let effects = said(browser, "effects");
    assert!(effects.contains("for 2 models: a:latest (") && effects.contains("go to the trash"), "{effects}");
    assert_eq!(digests(), before, "nothing has begun");
    assert!(confirm(browser).starts_with("2 pulls have begun"));
    close(browser);
    wait_for_result(browser, "a:latest is pulled");
    wait_for_result(browser, "b:latest is pulled");
    let after = digests();
    let changed: Vec<_> = before.keys().filter(|name| before[*name] != after[*name]).collect();
    assert_eq!(changed, ["a:latest", "b:latest"]);
    browser.wait_for("document.querySelector('[data-action=update-all]') === null");
}

#[test]
fn lease_of_a_process_is_ended() {
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let visit = Visit::new(browser, &super::three());
    let reader = Reader::open(&visit.daemon.socket(), "phi3-mini");
    browser.evaluate("document.getElementById('refresh').click()");
    begin(browser, "release");
    let effects = said(browser, "effects");
    assert!(
        effects.contains(&format!("process {}", reader.pid())) && effects.contains("phi3-mini"),
        "{effects}"
    );
    assert!(said(browser, "way").contains("cannot be taken back"));
    assert_eq!(confirm(browser), format!("1 lease of process {} ended.", reader.pid()));
    assert!(visit.daemon.client().sessions().unwrap().sessions.is_empty());
    close(browser);
    browser.wait_for("document.getElementById('sessions-section').hidden");
}
