//! Users without the right to an action see it disabled, with the reason, and the daemon refuses it if it is sent.

use std::fs;

use blobd_tests::browser::Browser;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::json;

use super::super::Web;
use super::actions::{open_panel, said};
use super::{import, open_link, three};
use crate::multi_user::{USERS, can_be_others, opened};

/// The page of another user than the one who has added the models.
fn page_of_another(browser: &mut Browser, daemon: &TestDaemon) -> Web {
    let (reuid, regid) = (format!("--reuid={}", USERS[0]), format!("--regid={}", USERS[0]));
    let wrapper = ["setpriv", &reuid, &regid, "--clear-groups", "--"];
    let web = Web::start_with(&daemon.command(), &wrapper, &[]);
    open_link(browser, &web);
    web
}

/// The reasons of these buttons, which must all be disabled.
fn reasons(browser: &mut Browser, buttons: &str) -> Vec<String> {
    let found = browser.evaluate(&format!(
        "[...document.querySelectorAll('{buttons}')].filter((one) => one.checkVisibility())\
         .map((one) => (one.ariaDisabled === 'true' ? one.title : `enabled: ${{one.textContent}}`))"
    ));
    serde_json::from_value(found).unwrap()
}

/// Sends actions from the page, and returns the messages of their errors.
fn sent_all_the_same(browser: &mut Browser, session: u32) -> Vec<String> {
    let actions = json!([
        ["pin", { "reference": "llama3-8b-q4", "pinned": true }],
        ["remove", { "references": ["llama3-8b-q4"], "keep_seconds": 600 }],
        ["undelete", { "reference": "phi3-mini" }],
        ["gc", {}],
        ["limit", { "bytes_per_second": 1 }],
        ["undo", { "reference": "phi3-mini" }],
        ["release", { "pid": session }],
    ]);
    let messages = browser.evaluate(&format!(
        "import('/connection.js').then((own) => Promise.all({actions}.map(([action, body]) => own.act(action, body))))\
         .then((answers) => answers.map((answer) => answer.error?.code ?? 'done'))"
    ));
    serde_json::from_value(messages).unwrap()
}

/// A pull of which only the denial is told, as the result of what has begun.
fn pull_is_denied(browser: &mut Browser, source: &str, expected: &str) {
    let request = json!({ "reference": source, "name": "followed" });
    browser.evaluate(&format!("import('/connection.js').then((own) => own.act('pull', {request}))"));
    browser.wait_for("document.getElementById('results').textContent.includes('followed has failed')");
    let result = browser.evaluate("document.getElementById('results').textContent");
    assert!(result.as_str().unwrap().contains(expected), "{result}");
}

/// What a process of another user has open is not released.
fn release_is_denied(browser: &mut Browser) {
    browser.wait_for("document.querySelector('#sessions [data-action]')");
    let reasons = reasons(browser, "#sessions [data-action]");
    let expected = "The process belongs to root: only that user and administrators may release it.";
    assert_eq!(reasons, [expected]);
    browser.evaluate("document.querySelector('#sessions [data-action]').click()");
    assert_eq!(said(browser, "problem"), expected);
    browser.evaluate("document.getElementById('action-close').click()");
}

/// A user without the right to pull cannot even ask the source; another one sees why the name cannot be updated.
fn update_is_denied(browser: &mut Browser, may_pull: bool, expected: &str) {
    browser.evaluate("document.getElementById('updates-check').click()");
    if !may_pull {
        let told = browser.evaluate("document.getElementById('updates-text').textContent");
        assert!(told.as_str().unwrap().contains(expected), "{told}");
        return;
    }
    browser.wait_for("document.querySelector('#updates [data-action]')");
    let reasons = reasons(browser, "#updates [data-action]");
    assert!(reasons.len() == 1 && reasons[0].contains(expected), "{reasons:?}");
    assert_eq!(browser.evaluate("document.querySelector('[data-action=update-all]')"), json!(null));
}

/// A model that has a newer version at its source, which the registry's address names.
fn followed(daemon: &TestDaemon) -> (FakeRegistry, String) {
    const MODEL: &str = "application/vnd.ollama.image.model";
    let registry = FakeRegistry::start().unwrap();
    let publish = |seed| {
        registry.add_model("library/f:1", b"{}", &[(MODEL, &ModelFile::dense(seed).bytes())]).unwrap();
    };
    publish(1);
    let source = registry.name("library/f:1");
    daemon.command().run(["pull", &source, "--name", "followed"]).succeeds();
    publish(2);
    (registry, source)
}

/// `buttons` are those that are disabled with the reason `expected`.
fn check(settings: &str, buttons: &str, expected: &str) {
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, settings).unwrap();
    let daemon = opened(TestDaemon::start_at(&folder.path().join("store"), Some(&config)));
    import(&daemon.command(), daemon.scratch(), &three());
    daemon.command().line("rm phi3-mini --keep 1h").succeeds();
    let (_registry, source) = followed(&daemon);
    let before = daemon.client().models().unwrap().models;
    let reader = Reader::open(&daemon.socket(), "llama3-8b-tuned");
    let _web = page_of_another(browser, &daemon);
    release_is_denied(browser);
    update_is_denied(browser, !settings.contains("pull = []"), expected);
    open_panel(browser, "llama3-8b-q4:latest");
    browser.wait_for("document.querySelector('#trash tbody').textContent.includes('phi3-mini')");
    let reasons = reasons(browser, buttons);
    assert!(reasons.len() >= 3 && reasons.iter().all(|reason| reason.contains(expected)), "{reasons:?}");
    let why = browser.evaluate("document.getElementById('panel-why').textContent");
    assert!(why.as_str().unwrap().contains(expected), "{why}");
    // Pressed all the same, it says the reason and has no button to confirm.
    browser.evaluate("document.querySelector('#panel [data-action=pin]').click()");
    assert!(said(browser, "problem").contains(expected));
    assert_eq!(browser.evaluate("document.getElementById('action-confirm').hidden"), true);
    assert_eq!(sent_all_the_same(browser, reader.pid()), ["denied"; 7]);
    pull_is_denied(browser, &source, if settings.is_empty() { "uid 0" } else { "access.pull" });
    assert_eq!(daemon.client().models().unwrap().models, before);
    assert_eq!(daemon.client().sessions().unwrap().sessions.len(), 1);
}

#[test]
fn user_who_may_only_read_sees_which_right_an_action_needs() {
    if can_be_others() {
        check(
            "[access]\npull = []\n",
            "header [data-action], #panel [data-action], #trash [data-action]",
            "This needs the right “pull” (access.pull in the configuration)",
        );
    }
}

#[test]
fn names_that_others_have_added_cannot_be_changed_on_the_page() {
    if can_be_others() {
        check(
            "",
            "#panel [data-action], #trash [data-action]",
            "uid 0 has added this name: only that user and administrators may change it.",
        );
    }
}
