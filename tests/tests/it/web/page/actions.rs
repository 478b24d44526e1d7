//! Actions on the page: what each says before it does it, that it does it, and how it is taken back.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::thread;

use blobd_client::protocol::route::Route;
use blobd_tests::browser::Browser;
use serde_json::{Value as Json, json};

use super::super::Web;
use super::pulling::fill;
use super::{Visit, import, model, open_link, three};

/// The text of an element of the dialog of an action.
pub(super) fn said(browser: &mut Browser, part: &str) -> String {
    let text = browser.evaluate(&format!("document.getElementById('action-{part}').textContent"));
    text.as_str().unwrap().to_owned()
}

/// Whether the dialog waits for the user to confirm.
pub(super) const IS_READY: &str = "document.getElementById('action').open && !document.getElementById('action-confirm').hidden && \
    document.getElementById('action-confirm').ariaDisabled === 'false'";
const IS_DONE: &str = "document.getElementById('action-confirm').hidden && \
    document.getElementById('action-done').textContent.endsWith('.')";

/// Presses Enter on the button of an action, and waits until its dialog says what it will do.
pub(super) fn begin(browser: &mut Browser, action: &str) {
    let button = format!(
        "[...document.querySelectorAll('[data-action^=\"{action}\"]')].find((one) => one.checkVisibility())"
    );
    browser.wait_for(&button);
    browser.evaluate(&format!("{button}.focus()"));
    browser.press("Enter");
    browser.wait_for(IS_READY);
}

/// Confirms with the keyboard alone, and waits until it is done. Returns what was done.
pub(super) fn confirm(browser: &mut Browser) -> String {
    press_until(browser, "action-confirm");
    browser.wait_for(IS_DONE);
    said(browser, "done")
}

/// Moves the focus to a button of the dialog by Tab, and presses Enter.
pub(super) fn press_until(browser: &mut Browser, id: &str) {
    let is_there = format!("document.activeElement?.id === '{id}'");
    for _ in 0..10 {
        if browser.evaluate(&is_there) == true {
            break;
        }
        browser.press("Tab");
    }
    assert_eq!(browser.evaluate(&is_there), true, "{id} is reached by Tab");
    browser.press("Enter");
}

pub(super) fn close(browser: &mut Browser) {
    press_until(browser, "action-close");
    browser.wait_for("!document.getElementById('action').open");
    // Also when what has begun the action is gone.
    browser.wait_for("document.activeElement !== document.body");
}

/// Opens the panel of a model.
pub(super) fn open_panel(browser: &mut Browser, name: &str) {
    browser.wait_for(&format!("document.querySelector('#models [data-row=\"{name}\"]')"));
    browser.evaluate(&format!("document.querySelector('#models [data-row=\"{name}\"]').click()"));
    browser.wait_for("document.getElementById('panel').open");
}

#[test]
fn models_are_pinned_removed_and_restored_and_the_rest_is_collected() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &three());
    let browser = &mut browser;
    pinned(&visit, browser);
    removed_and_restored(&visit, browser);
    undone(&visit, browser);
    restored_beside_another(&visit, browser);
    collected(&visit, browser);
    let (_, errors) = browser.take_requests_and_errors();
    assert_eq!(errors, Vec::<Json>::new(), "the console");
}

fn pinned(visit: &Visit, browser: &mut Browser) {
    let is_pinned = || visit.daemon.client().models().unwrap().models[0].pinned;
    open_panel(browser, "llama3-8b-q4:latest");
    begin(browser, "pin");
    assert!(said(browser, "effects").contains("neither removed nor evicted"));
    assert!(said(browser, "way").contains("takes it back") && !is_pinned());
    assert_eq!(confirm(browser), "llama3-8b-q4:latest is pinned.");
    assert!(is_pinned());
    // A pinned model is not removed: the daemon's reason is shown before anything is sent.
    close(browser);
    browser.wait_for("document.querySelector('#panel [data-action=pin]').textContent.startsWith('Unpin')");
    browser.evaluate("document.querySelector('#panel [data-action=trash]').click()");
    browser.wait_for("document.getElementById('action-problem').textContent.includes('pinned')");
    close(browser);
    begin(browser, "pin");
    assert_eq!(confirm(browser), "llama3-8b-q4:latest is not pinned any more.");
    assert!(!is_pinned());
    press_until(browser, "action-back");
    browser.wait_for("document.getElementById('action-done').textContent.endsWith('is pinned.')");
    assert!(is_pinned(), "taken back");
    press_until(browser, "action-back");
    browser.wait_for("document.getElementById('action-done').textContent.endsWith('any more.')");
    close(browser);
}

fn removed_and_restored(visit: &Visit, browser: &mut Browser) {
    let count = || visit.daemon.client().models().unwrap().models.len();
    begin(browser, "trash");
    let effects = said(browser, "effects");
    // Two of its six tensors of 64 KiB are its own.
    assert!(effects.contains("for 7 days: then a collection frees 1"), "{effects}");
    assert!(effects.contains("256 KiB stay for the models that share them"), "{effects}");
    assert_eq!(count(), 3, "nothing is removed yet");
    let done = confirm(browser);
    assert!(done.starts_with("llama3-8b-q4:latest is in the trash until "), "{done}");
    assert_eq!(count(), 2);
    browser.wait_for("!document.getElementById('panel').open");
    press_until(browser, "action-back");
    browser.wait_for("document.getElementById('action-done').textContent.endsWith('is restored.')");
    assert_eq!(count(), 3);
    close(browser);
    open_panel(browser, "llama3-8b-q4:latest");
    begin(browser, "trash");
    confirm(browser);
    close(browser);
    browser.wait_for("document.querySelector('#trash tbody').textContent.includes('llama3-8b-q4')");
}

/// The removal, for a time of its own, and a change of names that a command has made. What is newer than what the dialog
/// shows is not taken back.
fn undone(visit: &Visit, browser: &mut Browser) {
    let names = || {
        let models = visit.daemon.client().models().unwrap().models;
        models.into_iter().map(|model| model.name).collect::<Vec<_>>()
    };
    let before = names();
    open_panel(browser, "phi3-mini:latest");
    begin(browser, "trash");
    fill(browser, "days", "1.5");
    browser.press("Enter");
    browser.wait_for(IS_READY);
    assert!(said(browser, "effects").contains("for 1.5 days"), "{}", said(browser, "effects"));
    confirm(browser);
    let trash = visit.daemon.command().line("ls --trash --json").succeeds().json();
    let models = trash["models"].as_array().unwrap();
    let removed = models.iter().find(|model| model["name"] == "phi3-mini:latest").unwrap();
    let kept = browser.evaluate(&format!(
        "(Date.parse({}) - Date.parse({})) / 3_600_000",
        removed["expires"], removed["removed"]
    ));
    assert_eq!(kept, 36, "hours");
    close(browser);
    begin(browser, "undo");
    let effects = said(browser, "effects");
    assert!(effects.contains("the rm of") && effects.contains("phi3-mini:latest is restored."), "{effects}");
    assert!(said(browser, "way").contains("blobd rm --keep"), "{}", said(browser, "way"));
    assert_eq!(confirm(browser), "The rm is taken back.");
    assert_eq!(names(), before);
    close(browser);
    visit.daemon.command().line("tag phi3-mini other").succeeds();
    begin(browser, "undo");
    let effects = said(browser, "effects");
    assert!(effects.contains("other:latest is removed; the model stays as phi3-mini:latest."), "{effects}");
    visit.daemon.command().line("rename other another").succeeds();
    press_until(browser, "action-confirm");
    browser.wait_for("document.getElementById('action-problem').textContent.includes('a newer change now')");
    close(browser);
    assert!(names().contains(&"another:latest".to_owned()), "{:?}", names());
    visit.daemon.command().line("rm another").succeeds();
}

/// Another model has the name meanwhile.
fn restored_beside_another(visit: &Visit, browser: &mut Browser) {
    import(&visit.daemon.command(), visit.daemon.scratch(), &[("llama3-8b-q4".to_owned(), model(&[50]))]);
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelector('#models [data-row=\"llama3-8b-q4:latest\"]')");
    begin(browser, "restore");
    assert!(said(browser, "effects").contains("Another model is called llama3-8b-q4:latest now"));
    assert_eq!(confirm(browser), "llama3-8b-q4:latest-restored is restored.");
    close(browser);
    browser.wait_for("document.getElementById('trash-section').hidden");
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 4");
}

fn collected(visit: &Visit, browser: &mut Browser) {
    visit.daemon.command().line("rm phi3-mini --keep 1s").succeeds();
    blobd_tests::wait::eventually("the time in the trash is over", || {
        visit
            .daemon
            .client()
            .gc(&blobd_client::protocol::request::GcParams { dry_run: true, quarantine: false })
            .unwrap()
            .freed_bytes
            > 0
    });
    browser.evaluate("document.getElementById('refresh').click()");
    begin(browser, "gc");
    let effects = said(browser, "effects");
    assert!(effects.contains("will be deleted, which frees ") && effects.contains("KiB"), "{effects}");
    assert_eq!(said(browser, "way"), "This cannot be taken back.");
    assert!(said(browser, "confirm").starts_with("Delete "));
    let done = confirm(browser);
    assert!(done.ends_with("KiB were freed."), "{done}");
    close(browser);
    browser.wait_for("document.getElementById('gc-part').hidden");
}

#[test]
fn page_that_only_shows_has_no_action() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &three());
    visit.daemon.command().line("rm phi3-mini --keep 1h").succeeds();
    let web = Web::start_with(&visit.daemon.command(), &[], &["--read-only"]);
    open_link(&mut browser, &web);
    open_panel(&mut browser, "llama3-8b-q4:latest");
    browser.wait_for("document.querySelector('#trash tbody').textContent.includes('phi3-mini')");
    assert_eq!(browser.evaluate("document.querySelectorAll('[data-action]').length"), 0);
    let texts = browser.evaluate(
        "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility()).map((one) => one.textContent)",
    );
    let texts = texts.to_string();
    assert!(!texts.contains("Pin") && !texts.contains("trash") && !texts.contains("Restore"), "{texts}");
    let footer = browser.evaluate("document.querySelector('footer').innerText");
    assert!(footer.as_str().unwrap().contains("it changes nothing"), "{footer}");
    // Sent all the same, it is refused.
    let sent = browser.evaluate(
        "import('/connection.js').then((own) => own.act('pin', { reference: 'llama3-8b-q4', pinned: true }))",
    );
    assert!(sent["error"]["message"].as_str().unwrap().contains("--read-only"), "{sent}");
    assert!(visit.daemon.client().models().unwrap().models.iter().all(|model| !model.pinned));
}

/// Every action of the page, as a path and a body that the daemon accepts.
fn every_action() -> Vec<(String, Json)> {
    let of_daemon = Route::ALL.iter().filter(|route| route.is_action_of_page()).map(|route| {
        let body = match route {
            Route::Pin => json!({ "reference": "llama3-8b-q4", "pinned": true }),
            Route::Remove => json!({ "references": ["llama3-8b-q4"], "keep_seconds": 600 }),
            Route::SetLimit => json!({ "bytes_per_second": 1 }),
            Route::Release => json!({ "pid": std::process::id() }),
            Route::Undo | Route::Gc => json!({}),
            _ => json!({ "reference": "phi3-mini" }),
        };
        (route.path().replacen("/v1/", "api/", 1), body)
    });
    of_daemon.chain([("stop".to_owned(), json!({ "id": 1 })), ("outdated".to_owned(), json!({}))]).collect()
}

/// Answers everybody with an empty page, and ends with the process of the tests.
fn other_site() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let page = "<!doctype html><title>another site</title>";
            let length = page.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\n");
            let _ = stream.write_all(format!("{head}Connection: close\r\n\r\n{page}").as_bytes());
        }
    });
    format!("http://{address}/")
}

/// A page at another port of the same address is another origin, and for cookies the same site.
#[test]
fn another_site_can_neither_act_nor_frame_the_page() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &three());
    // Even one that knows the key.
    let key = browser.evaluate("sessionStorage.getItem('blobd-key')");
    let base = json!(visit.web.base);
    browser.open(&other_site());
    browser.wait_for("document.title === 'another site'");
    for (path, body) in every_action() {
        let attempts = format!(
            "(() => {{ const address = {base} + {path}, body = {body}, key = {key}; \
             const outcome = (options) => fetch(address, {{ method: 'POST', body, ...options }})\
               .then((answer) => answer.type + answer.status, () => 'failed'); \
             return Promise.all([outcome({{ mode: 'no-cors' }}), outcome({{ mode: 'no-cors', headers: {{ 'Content-Type': 'text/plain' }} }}), \
               outcome({{ headers: {{ 'X-Blobd-Key': key, 'Content-Type': 'application/json' }} }}), \
               outcome({{ credentials: 'include' }})]); }})()",
            path = json!(path),
            body = json!(body.to_string()),
        );
        let outcomes = browser.evaluate(&attempts);
        assert_eq!(
            outcomes,
            json!(["failed", "failed", "failed", "failed"]),
            "{path}: no answer can be read"
        );
    }
    // A form, sent into a new frame; and the page itself in a frame.
    browser.evaluate(&format!(
        "(() => {{ const frame = document.createElement('iframe'); frame.name = 'target'; document.body.append(frame); \
         const form = document.createElement('form'); form.method = 'post'; form.enctype = 'text/plain'; \
         form.target = 'target'; form.action = {base} + 'api/pin'; const field = document.createElement('input'); \
         field.name = '{{\"reference\":\"llama3-8b-q4\",\"pinned\":true,\"x\":\"'; field.value = '\"}}'; form.append(field); \
         document.body.append(form); form.submit(); \
         const other = document.createElement('iframe'); other.id = 'framed'; other.src = {base}; \
         other.onload = () => {{ other.dataset.loaded = 'yes'; }}; document.body.append(other); }})()"
    ));
    browser.wait_for("document.getElementById('framed').dataset.loaded === 'yes'");
    let (_, errors) = browser.take_requests_and_errors();
    let errors = serde_json::to_string(&errors).unwrap();
    assert!(errors.contains("frame-ancestors") || errors.contains("X-Frame-Options"), "{errors}");
    let models = visit.daemon.client().models().unwrap().models;
    assert!(models.len() == 3 && models.iter().all(|model| !model.pinned), "{models:?}");
    assert_eq!(visit.daemon.client().limit().unwrap().bytes_per_second, None);
    let log = visit.daemon.command().line("log --json").succeeds().text();
    let verbs = Route::ALL.iter().filter(|route| route.is_action_of_page()).map(|route| route.verb());
    for verb in verbs {
        assert!(!log.contains(&format!("\"{verb}\"")), "no request has reached the daemon: {verb}: {log}");
    }
}
