//! The page with stores of each size: how long it takes until the models are shown, and pictures to look at.

use std::env;
use std::time::Duration;

use blobd_tests::browser::Browser;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::Fault;

use super::super::Web;
use super::{PICTURES, Visit, family, keep, model_of, three, three_hundred};
use crate::pull::registry_with;

/// How many milliseconds the page takes from its address to the models, at best of some times.
fn shown_after(browser: &mut Browser, web: &Web) -> f64 {
    let one = |browser: &mut Browser| {
        // The session is of this window.
        browser.open("about:blank");
        browser.open(&web.base);
        browser.wait_for("performance.getEntriesByName('models')[0]");
        browser.evaluate("performance.getEntriesByName('models')[0].startTime").as_f64().unwrap()
    };
    (0..5).map(|_| one(browser)).fold(f64::INFINITY, f64::min)
}

/// Compares the time of a page of very many models with that of one in the same run, because the machine may be busy: no
/// step may take time that grows with the square of the number of models.
pub(super) fn check_time(browser: &mut Browser, visit: &Visit) {
    let many = shown_after(browser, &visit.web);
    let other = Visit::new(browser, &three()[..1]);
    let one = shown_after(browser, &other.web);
    println!("models are shown after {many:.0} ms for very many, {one:.0} ms for one");
    assert!(many < one.max(50.0) * 20.0, "{many:.0} ms for very many, {one:.0} ms for one");
}

/// Names as they are at Hugging Face, of families of four quants.
fn thirty_one() -> Vec<(String, ModelFile)> {
    let quants = ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"];
    let one = |number: u64| {
        let (family, quant) = (number / 4, quants[usize::try_from(number % 4).unwrap()]);
        let shared = (0..6).map(|tensor| 1000 * (family + 1) + tensor);
        let own = (0..2 + number % 3).map(|tensor| 1000 * (family + 1) + 100 * (number % 4 + 1) + tensor);
        let tensors: Vec<_> = shared.chain(own).collect();
        (format!("Meta-Llama-3.{family}-8B-Instruct-abliterated-{quant}"), model_of(&tensors, 1 << 20))
    };
    (0..31).map(one).collect()
}

fn four() -> Vec<(String, ModelFile)> {
    let mut models = family();
    models.truncate(4);
    models
}

/// Keeps pictures of the whole page in both schemes and two widths.
fn keep_all(browser: &mut Browser, name: &str) {
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
        browser.show_in(width, 900, scheme);
        browser.evaluate("scrollTo(0, 0)");
        let height = browser.evaluate("document.documentElement.scrollHeight").as_u64().unwrap();
        browser.show_in(width, u32::try_from(height.clamp(900, 4000)).unwrap(), scheme);
        browser.evaluate("new Promise((done) => setTimeout(done, 300))");
        keep(&format!("{name}-{width}-{scheme}.png"), &browser.screenshot());
    }
}

/// Checks nothing: the pictures are to be looked at, in the directory that `BLOBD_PICTURES` names.
#[test]
fn pictures_show_stores_of_each_size() {
    if env::var_os(PICTURES).is_none() {
        return;
    }
    let Some(mut browser) = Browser::start() else { return };
    let browser = &mut browser;
    let stores = [
        ("0", Vec::new()),
        ("1", three()[..1].to_vec()),
        ("4", four()),
        ("31", thirty_one()),
        ("300", three_hundred()),
    ];
    for (name, models) in stores {
        let _visit = Visit::new(browser, &models);
        keep_all(browser, &format!("{name}-models"));
    }
    busy_and_lost(browser);
}

/// Two pulls, an open model, something in the trash; the dialogs; then the daemon is lost.
fn busy_and_lost(browser: &mut Browser) {
    let mut visit = Visit::new(browser, &four());
    let reader = Reader::open(&visit.daemon.socket(), "llama3-8b");
    visit.daemon.command().line("rm qwen3-30b --keep 7d").succeeds();
    let pulls: Vec<_> = [("gemma3:12b", 3), ("hf.example/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 4)]
        .map(|(name, seed)| begun_pull(&visit.daemon, name, seed))
        .into();
    browser.wait_for("document.querySelectorAll('#pulls progress').length === 2");
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelector('#trash tbody').textContent.includes('qwen3')");
    keep_all(browser, "two-pulls");
    browser.evaluate("document.querySelector('#models tbody button').click()");
    keep_all(browser, "panel");
    browser.evaluate("document.querySelector('#panel [data-action=trash]').click()");
    browser.wait_for("document.getElementById('action-way').textContent");
    keep_all(browser, "dialog-trash");
    browser.evaluate("document.getElementById('action').close(), document.getElementById('panel').close()");
    browser.evaluate("document.querySelector('[data-action=pull]').click()");
    keep_all(browser, "dialog-pull");
    browser.evaluate("document.getElementById('action').close()");
    for (mut pull, _registry) in pulls {
        pull.kill().unwrap();
        pull.wait().unwrap();
    }
    drop(reader);
    visit.daemon.kill();
    browser.wait_for("document.getElementById('status').textContent.includes('no answer')");
    keep_all(browser, "lost");
}

fn begun_pull(
    daemon: &TestDaemon,
    name: &str,
    seed: u64,
) -> (std::process::Child, blobd_tests::registry::FakeRegistry) {
    let registry = registry_with(&ModelFile::dense_of(seed, 2, 512));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(8 << 10, Duration::from_millis(100)));
    let mut command = daemon.command().command();
    command.args(["pull", &registry.name("library/tiny:latest"), "--name", name, "--quiet"]);
    (command.spawn().unwrap(), registry)
}
