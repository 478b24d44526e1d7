//! Users without the right to an action see it disabled, with the reason, and the daemon refuses it if it is sent.

use std::fs;

use blobd_tests::browser::Browser;
use blobd_tests::daemon::TestDaemon;
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
fn sent_all_the_same(browser: &mut Browser) -> Vec<String> {
    let actions = json!([
        ["pin", { "reference": "llama3-8b-q4", "pinned": true }],
        ["remove", { "references": ["llama3-8b-q4"], "keep_seconds": 600 }],
        ["undelete", { "reference": "phi3-mini" }],
        ["gc", {}],
        ["limit", { "bytes_per_second": 1 }],
    ]);
    let messages = browser.evaluate(&format!(
        "import('/connection.js').then((own) => Promise.all({actions}.map(([action, body]) => own.act(action, body))))\
         .then((answers) => answers.map((answer) => answer.error?.code ?? 'done'))"
    ));
    serde_json::from_value(messages).unwrap()
}

/// A pull of which only the denial is told, as the result of what has begun.
fn pull_is_denied(browser: &mut Browser) {
    browser.evaluate("import('/connection.js').then((own) => own.act('pull', { reference: 'tiny' }))");
    browser.wait_for("document.getElementById('results').textContent.includes('The pull of tiny')");
    let result = browser.evaluate("document.getElementById('results').textContent");
    assert!(result.as_str().unwrap().contains("access.pull"), "{result}");
}

fn check(settings: &str, buttons: &str, expected: &str) {
    let Some(mut browser) = Browser::start() else { return };
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, settings).unwrap();
    let daemon = opened(TestDaemon::start_at(&folder.path().join("store"), Some(&config)));
    import(&daemon.command(), daemon.scratch(), &three());
    daemon.command().line("rm phi3-mini --keep 1h").succeeds();
    let _web = page_of_another(&mut browser, &daemon);
    open_panel(&mut browser, "llama3-8b-q4:latest");
    browser.wait_for("document.querySelector('#trash tbody').textContent.includes('phi3-mini')");
    let reasons = reasons(&mut browser, buttons);
    assert!(reasons.len() >= 3 && reasons.iter().all(|reason| reason.contains(expected)), "{reasons:?}");
    assert!(
        browser
            .evaluate("document.getElementById('panel-why').textContent")
            .as_str()
            .unwrap()
            .contains(expected)
    );
    // Pressed all the same, it says the reason and has no button to confirm.
    browser.evaluate("document.querySelector('#panel [data-action=pin]').click()");
    assert!(said(&mut browser, "problem").contains(expected));
    assert_eq!(browser.evaluate("document.getElementById('action-confirm').hidden"), true);
    assert_eq!(sent_all_the_same(&mut browser), ["denied"; 5]);
    let models = daemon.client().models().unwrap().models;
    assert!(models.len() == 2 && models.iter().all(|model| !model.pinned));
    if settings.contains("pull = []") {
        pull_is_denied(&mut browser);
    }
}

#[test]
fn user_who_may_only_read_sees_which_right_an_action_needs() {
    if can_be_others() {
        check(
            "[access]\npull = []\n",
            "[data-action]",
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
