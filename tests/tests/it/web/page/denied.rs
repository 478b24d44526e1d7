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

/// The reasons of the buttons of actions that can be seen, which must all be disabled.
fn reasons(browser: &mut Browser) -> Vec<String> {
    let found = browser.evaluate(
        "[...document.querySelectorAll('[data-action]')].filter((one) => one.checkVisibility())\
         .map((one) => (one.ariaDisabled === 'true' ? one.title : `enabled: ${one.textContent}`))",
    );
    serde_json::from_value(found).unwrap()
}

/// Sends actions from the page, and returns the messages of their errors.
fn sent_all_the_same(browser: &mut Browser) -> Vec<String> {
    let actions = json!([
        ["pin", { "reference": "llama3-8b-q4", "pinned": true }],
        ["remove", { "references": ["llama3-8b-q4"], "keep_seconds": 600 }],
        ["undelete", { "reference": "phi3-mini" }],
        ["gc", {}],
    ]);
    let messages = browser.evaluate(&format!(
        "import('/connection.js').then((own) => Promise.all({actions}.map(([action, body]) => own.act(action, body))))\
         .then((answers) => answers.map((answer) => answer.error?.code ?? 'done'))"
    ));
    serde_json::from_value(messages).unwrap()
}

fn check(settings: &str, expected: &str) {
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
    let reasons = reasons(&mut browser);
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
    assert_eq!(sent_all_the_same(&mut browser), ["denied"; 4]);
    let models = daemon.client().models().unwrap().models;
    assert!(models.len() == 2 && models.iter().all(|model| !model.pinned));
}

#[test]
fn user_who_may_only_read_sees_which_right_an_action_needs() {
    if can_be_others() {
        check("[access]\npull = []\n", "This needs the right “pull” (access.pull in the configuration)");
    }
}

#[test]
fn names_that_others_have_added_cannot_be_changed_on_the_page() {
    if can_be_others() {
        check("", "uid 0 has added this name: only that user and administrators may change it.");
    }
}
