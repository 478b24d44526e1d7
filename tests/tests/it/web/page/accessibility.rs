//! What axe-core says about the page: `just axe` installs it with npm. Without it, these tests are skipped.

use std::path::Path;

use blobd_fixtures::skipped::skipped;
use blobd_tests::browser::Browser;
use serde_json::Value as Json;

use super::{Visit, three};

/// Below the target directory, so that nothing of it is in the repository.
const AXE: &str = "../target/axe/node_modules/axe-core/axe.min.js";

fn axe() -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(AXE);
    let source = std::fs::read_to_string(&path);
    source.map_err(|error| skipped(format_args!("{}: {error}; `just axe` installs it", path.display()))).ok()
}

/// Nothing that axe-core calls serious or critical, in both colour schemes, in a wide and a narrow window.
fn check(browser: &mut Browser, what: &str) {
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "dark")] {
        browser.show_in(width, 900, scheme);
        let violations = browser.evaluate(
            "axe.run().then((result) => result.violations\
             .filter((one) => ['serious', 'critical'].includes(one.impact))\
             .map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120)).join('; ')}`))",
        );
        assert_eq!(violations, Json::Array(Vec::new()), "{what}, {width} pixels, {scheme}");
    }
}

#[test]
fn page_has_no_serious_violation_of_accessibility() {
    let Some(axe) = axe() else { return };
    let Some(mut browser) = Browser::start() else { return };
    for models in [&[][..], &three()] {
        let _visit = Visit::new(&mut browser, models);
        browser.evaluate(&format!("{axe}; 0"));
        check(&mut browser, &format!("{} models", models.len()));
        check_dialog(&mut browser, "pull");
        if !models.is_empty() {
            browser.evaluate("document.querySelector('#models tbody button').click()");
            browser.wait_for("document.getElementById('panel').open");
            check(&mut browser, "the panel");
            check_dialog(&mut browser, "trash");
        }
    }
}

/// Checks the page that is open, which has very many models.
pub(super) fn check_many(browser: &mut Browser) {
    let Some(axe) = axe() else { return };
    browser.evaluate(&format!("{axe}; 0"));
    check(browser, "many models");
    browser.evaluate("document.querySelector('#models tbody button').click()");
    browser.wait_for("document.getElementById('panel').open");
    check_dialog(browser, "pin");
}

/// Opens the dialog of an action, and checks it before it is confirmed.
fn check_dialog(browser: &mut Browser, action: &str) {
    browser.evaluate(&format!("document.querySelector('[data-action={action}]').click()"));
    browser.wait_for("document.getElementById('action-confirm').ariaDisabled === 'false'");
    check(browser, &format!("the dialog of {action}"));
    browser.evaluate("document.getElementById('action').close()");
}
