//! The page in headless Chromium, with stores of 0, 3 and 300 models.

mod accessibility;
mod actions;
mod denied;
mod looks;
mod pulling;
mod sections;
mod sizes;

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use blobd_store_format::gguf::GgmlType;
use blobd_store_format::size::human_difference;
use blobd_tests::browser::Browser;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::Fault;

use super::Web;
use super::picture::Picture;
use crate::pull::registry_with;

/// Where pictures are written, if this is set.
const PICTURES: &str = "BLOBD_PICTURES";

/// Sizes of windows, from a telephone's to a desktop's.
const WINDOWS: [(u32, u32); 4] = [(360, 740), (400, 800), (800, 1000), (1400, 1000)];

/// A model of tensors of 64 KiB each, whose content their numbers determine.
fn model(tensors: &[u64]) -> ModelFile {
    model_of(tensors, 64 << 10)
}

fn model_of(tensors: &[u64], size: u64) -> ModelFile {
    let mut file = ModelFile::empty();
    for number in tensors {
        file.add_noise(*number, &format!("blk.{number}.weight"), GgmlType::I8, &[size]);
    }
    file
}

/// Imports models under these names.
fn import(blobd: &Blobd, scratch: &Path, models: &[(String, ModelFile)]) {
    let folder = scratch.join("files");
    fs::create_dir_all(&folder).unwrap();
    let mut arguments = vec!["import".into()];
    for (name, model) in models {
        arguments.push(model.write_to(&folder, &format!("{name}.gguf")).into_os_string());
    }
    blobd.run(&arguments).succeeds();
    fs::remove_dir_all(&folder).unwrap();
}

/// Three models of which two share most.
fn three() -> Vec<(String, ModelFile)> {
    [
        ("llama3-8b-q4", &[1, 2, 3, 4, 5, 6][..]),
        ("llama3-8b-tuned", &[1, 2, 3, 4, 7]),
        ("phi3-mini", &[8, 9, 10]),
    ]
    .map(|(name, tensors)| (name.to_owned(), model(tensors)))
    .into()
}

/// Three hundred models of thirty families, which share the first two tensors.
fn three_hundred() -> Vec<(String, ModelFile)> {
    let one = |number: u64| {
        let family = 1000 + number / 10 * 10;
        (format!("family{:02}-model{number:03}", number / 10), model(&[family, family + 1, 10_000 + number]))
    };
    (0..300).map(one).collect()
}

struct Visit {
    daemon: TestDaemon,
    web: Web,
}

impl Visit {
    /// Opens the page of a store with these models, and waits until it shows them.
    fn new(browser: &mut Browser, models: &[(String, ModelFile)]) -> Self {
        let daemon = TestDaemon::start();
        if !models.is_empty() {
            import(&daemon.command(), daemon.scratch(), models);
        }
        Self::of(browser, daemon)
    }

    fn of(browser: &mut Browser, daemon: TestDaemon) -> Self {
        let web = open_page(browser, &daemon.command());
        Self { daemon, web }
    }
}

/// Opens the page, and waits until it shows what it knows.
fn open_page(browser: &mut Browser, blobd: &Blobd) -> Web {
    let web = Web::start(blobd);
    open_link(browser, &web);
    web
}

fn open_link(browser: &mut Browser, web: &Web) {
    // Ends the page of the store before.
    browser.open("about:blank");
    browser.take_requests_and_errors();
    browser.open(&web.url());
    browser.wait_for("document.getElementById('figures').children.length > 0");
    browser.wait_for("document.getElementById('eviction-text').textContent !== ''");
    browser.wait_for("document.documentElement.dataset.facts === 'known'");
    browser.wait_for("document.documentElement.dataset.state === 'live'");
}

/// Checks what must hold for every store. Returns the picture of the widest window in the light scheme.
fn check_page(browser: &mut Browser, web: &Web, name: &str) -> Picture {
    let address = browser.evaluate("location.href");
    assert_eq!(address, web.base.as_str(), "the token is not in the address");
    let [.., picture] = WINDOWS.map(|size| {
        check_window(browser, name, size, "dark");
        check_window(browser, name, size, "light")
    });
    check_keyboard(browser);
    let (requests, errors) = browser.take_requests_and_errors();
    assert_eq!(errors, Vec::<serde_json::Value>::new(), "{name}: the console");
    assert!(requests.len() > 8, "{requests:?}");
    let foreign: Vec<_> = requests.iter().filter(|url| !url.starts_with(&web.base)).collect();
    assert!(foreign.is_empty(), "{name}: {foreign:?}");
    picture
}

/// Tab reaches every control, and each has a name.
fn check_keyboard(browser: &mut Browser) {
    browser.evaluate(MARK_CONTROLS);
    let count = browser.evaluate("window.controls.length").as_u64().unwrap();
    assert!(count >= 4, "{count} controls");
    browser.evaluate("document.activeElement.blur(), getSelection().removeAllRanges()");
    for _ in 0..count * 2 + 5 {
        browser.press("Tab");
        browser.evaluate("window.reached.add(document.activeElement).add(document.activeElement.outerHTML)");
    }
    // When a table is drawn again, equal controls replace those that were marked.
    let missed = browser.evaluate(
        "window.controls.filter((control) => !window.reached.has(control) && !window.reached.has(control.outerHTML))\
         .map((control) => control.outerHTML.slice(0, 99))",
    );
    assert_eq!(missed, serde_json::json!([]), "not reached by Tab");
    let nameless = browser.evaluate(NAMELESS);
    assert_eq!(nameless, serde_json::json!([]), "without a name");
}

/// Checks the page in a window of this size and with these colours.
fn check_window(browser: &mut Browser, name: &str, size: (u32, u32), scheme: &str) -> Picture {
    browser.show_in(size.0, size.1, scheme);
    browser.evaluate("scrollTo(0, 0)");
    // The treemap follows the size of the window.
    browser.wait_for(
        "document.getElementById('treemap').viewBox?.baseVal?.width === \
         document.getElementById('treemap').parentElement.clientWidth || \
         !document.getElementById('treemap').checkVisibility()",
    );
    let what = format!("{name}-{}-{scheme}", size.0);
    let overflow = browser.evaluate("document.documentElement.scrollWidth - innerWidth");
    assert!(overflow.as_i64().unwrap() <= 0, "{what}: wider than the window by {overflow}");
    let faint = browser.evaluate(FAINT_TEXTS);
    assert_eq!(faint, serde_json::json!([]), "{what}: texts of low contrast");
    let picture = browser.screenshot();
    keep(&format!("{what}.png"), &picture);
    let picture = Picture::decode(&picture);
    looks::check_scheme(&picture, scheme, &what);
    picture
}

/// Texts with a contrast below 4.5, as WCAG computes it.
const FAINT_TEXTS: &str = r"(() => {
  const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4))
    .reduce((sum, v, place) => sum + v * [.2126, .7152, .0722][place], 0);
  const back = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || ['title', 'NOSCRIPT'].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const area = element.closest('g')?.querySelector('rect');
    const front = light(parse(area ? style.fill : style.color));
    const behind = light(area ? parse(getComputedStyle(area).fill) : back(element));
    const contrast = (Math.max(front, behind) + .05) / (Math.min(front, behind) + .05);
    if (contrast < 4.5) faint.push(`${element.tagName} ${element.textContent.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return faint;
})()";

const MARK_CONTROLS: &str = "window.reached = new Set(), window.controls = \
    [...document.querySelectorAll('button, input, summary, a[href], [tabindex=\"0\"]')]\
    .filter((control) => control.checkVisibility())";

/// Controls without a name, landmarks that are missing, and tables without a caption.
const NAMELESS: &str = "[...window.controls.filter((control) => !(control.textContent.trim() || \
    control.getAttribute('aria-label') || control.labels?.length)).map((control) => control.outerHTML.slice(0, 99)), \
    ...['header', 'main', 'footer', 'h1'].filter((name) => document.querySelectorAll(name).length !== 1), \
    ...[...document.querySelectorAll('table')].filter((table) => !table.caption?.textContent).map((table) => table.id), \
    ...[...document.querySelectorAll('section')].filter((one) => !document.getElementById(one.getAttribute('aria-labelledby')))\
    .map((one) => one.id)]";

fn keep(name: &str, picture: &[u8]) {
    if let Some(folder) = env::var_os(PICTURES) {
        fs::write(PathBuf::from(folder).join(name), picture).unwrap();
    }
}

#[test]
fn page_works_without_models_and_with_three() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &[]);
    let none = empty(&visit, &mut browser);
    let visit = Visit::new(&mut browser, &three());
    let three = three_models(visit, &mut browser);
    check_difference(&none, &three);
}

#[test]
fn page_works_with_three_hundred_models() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &three_hundred());
    let many = many_models(&visit, &mut browser);
    accessibility::check_many(&mut browser);
    sizes::check_time(&mut browser, &visit);
    for few in [&[][..], &three()] {
        let _visit = Visit::new(&mut browser, few);
        check_difference(&many, &Picture::decode(&browser.screenshot()));
    }
}

fn check_difference(one: &Picture, other: &Picture) {
    assert!(one.difference(other) > 0.02, "{}", one.difference(other));
}

fn empty(visit: &Visit, browser: &mut Browser) -> Picture {
    assert_eq!(browser.evaluate("document.getElementById('empty').checkVisibility()"), true);
    assert_eq!(browser.evaluate("document.getElementById('models-section').checkVisibility()"), false);
    let picture = check_page(browser, &visit.web, "empty");
    looks::check_steady(browser);
    // What arrives is shown without a reload.
    import(&visit.daemon.command(), visit.daemon.scratch(), &three()[..1]);
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelector('#models tbody').textContent.includes('llama3-8b-q4')");
    assert_eq!(browser.evaluate("document.getElementById('empty').checkVisibility()"), false);
    picture
}

fn three_models(mut visit: Visit, browser: &mut Browser) -> Picture {
    looks::check_steady(browser);
    // What each needs alone, and what two share.
    looks::check_treemap(browser, 4);
    looks::check_legend(browser);
    // Its name looks like HTML, and is text.
    fs::write(visit.daemon.root().join("<img src=x onerror=alert(1)>"), vec![1; 100_000]).unwrap();
    let reader = Reader::open(&visit.daemon.socket(), "phi3-mini");
    let large = ModelFile::dense_of(3, 2, 512);
    let registry = registry_with(&large);
    // So slow that it does not end before the page has been checked on a busy machine.
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(1 << 10, Duration::from_millis(100)));
    let name = registry.name("library/tiny:latest");
    let mut pull = visit.daemon.command().command();
    let mut pull = pull.args(["pull", &name, "--quiet"]).spawn().unwrap();
    browser.wait_for("document.querySelector('#pulls progress')?.value > 0");
    browser.wait_for("document.querySelector('#pulls tbody').textContent.includes('/s')");
    browser.wait_for("document.getElementById('pulls-live').textContent.includes('begins')");
    browser.wait_for("document.querySelector('#sessions tbody').textContent.includes('test-client')");
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelector('#parts tbody').textContent.includes('onerror')");
    browser.wait_for("document.querySelector('#sessions tbody').textContent.includes('%')");
    assert_eq!(browser.evaluate("document.querySelectorAll('img').length"), 0);
    shown_like_df(&visit, browser);
    let picture = check_page(browser, &visit.web, "three");
    sorted_by_keyboard(browser);
    treemap_by_keyboard(browser);
    layers_are_compared(browser);
    pull.kill().unwrap();
    pull.wait().unwrap();
    browser.wait_for("document.getElementById('pulls-live').textContent.includes('has ended')");
    drop(reader);
    visit.daemon.kill();
    browser.wait_for("document.getElementById('status').textContent.includes('no answer')");
    visit.daemon.restart();
    browser.wait_for("document.getElementById('status').textContent === 'live'");
    session_is_of_this_window(&visit, browser);
    picture
}

/// The areas of the treemap add up to the disk space, in proportion.
fn shown_like_df(visit: &Visit, browser: &mut Browser) {
    let usage = visit.daemon.client().disk_usage_in_detail(10).unwrap();
    let rows = browser.evaluate("document.querySelectorAll('#treemap g').length").as_u64().unwrap();
    assert!(rows >= 5, "{rows}");
    let covered = browser.evaluate(
        "[...document.querySelectorAll('#treemap rect')].reduce((sum, r) => sum + r.width.baseVal.value * \
         r.height.baseVal.value, 0) / (document.getElementById('treemap').viewBox.baseVal.width * \
         document.getElementById('treemap').viewBox.baseVal.height)",
    );
    // The names of families have the rest.
    assert!((0.85..1.01).contains(&covered.as_f64().unwrap()), "{covered}");
    let [files, stored, saved] = human_difference(usage.logical_bytes, usage.stored_bytes);
    let sentence = browser.evaluate("document.getElementById('sentence').textContent");
    let sentence = sentence.as_str().unwrap();
    assert!(
        sentence.starts_with("3 models, ")
            && sentence.contains(&format!("{files} as files, {stored} stored, {saved} saved")),
        "{sentence}"
    );
    let text = browser.evaluate("document.querySelector('#parts tbody').textContent");
    let text = text.as_str().unwrap();
    assert!(text.contains("shared by llama3-8b-q4:latest, llama3-8b-tuned:latest"), "{text}");
    assert_eq!(usage.shared_parts.len(), 1);
}

fn sorted_by_keyboard(browser: &mut Browser) {
    let first = |browser: &mut Browser| {
        browser
            .evaluate("document.querySelector('#models tbody td').textContent")
            .as_str()
            .unwrap()
            .to_owned()
    };
    browser.evaluate("document.querySelector('#models thead button').focus()");
    browser.press("Enter");
    let sorted = "document.querySelector('#models thead th').ariaSort";
    assert_eq!(browser.evaluate(sorted), "ascending");
    assert_eq!(first(browser), "llama3-8b-q4:latest");
    browser.press("Enter");
    assert_eq!(browser.evaluate(sorted), "descending");
    assert_eq!(first(browser), "phi3-mini:latest");
    browser.evaluate("document.getElementById('filter').focus()");
    browser.press("t");
    browser.press("u");
    assert_eq!(first(browser), "llama3-8b-tuned:latest");
    browser.evaluate(
        "const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))",
    );
}

fn treemap_by_keyboard(browser: &mut Browser) {
    let label = "document.activeElement.getAttribute('aria-label')";
    browser.evaluate("document.querySelector('#treemap g[tabindex=\"0\"]').focus()");
    let first = browser.evaluate(label);
    browser.press("ArrowRight");
    let second = browser.evaluate(label);
    assert!(first.is_string() && second.is_string() && first != second, "{first} {second}");
    assert_eq!(browser.evaluate("document.getElementById('treemap-detail').textContent"), second);
    browser.press("End");
    assert_ne!(browser.evaluate(label), second);
}

/// The panel of a model, the matrix, and the strip of layers of two models.
fn layers_are_compared(browser: &mut Browser) {
    browser.evaluate("document.querySelector('#models tbody button').click()");
    browser.wait_for("document.getElementById('panel').open");
    let commands = browser.evaluate("document.getElementById('panel-commands').textContent");
    assert!(commands.as_str().unwrap().contains("blobd show "), "{commands}");
    browser.evaluate("document.getElementById('panel-close').click()");
    assert_eq!(browser.evaluate("document.getElementById('panel').open"), false);
    // Each of the two with the other.
    assert_eq!(browser.evaluate("document.querySelectorAll('#matrix [data-id]').length"), 2);
    browser.evaluate(
        "document.querySelector('#matrix [data-id]').dispatchEvent(new MouseEvent('click', { bubbles: true }))",
    );
    browser.wait_for("document.getElementById('layers-summary').textContent.includes('tensors differ')");
    let summary = browser.evaluate("document.getElementById('layers-summary').textContent");
    assert!(summary.as_str().unwrap().contains("in layers 5–7"), "{summary}");
    assert_eq!(browser.evaluate("document.querySelectorAll('#layers [data-id]').length"), 7);
    assert!(browser.evaluate("document.querySelectorAll('#layers .only').length").as_u64() >= Some(2));
}

/// A reload keeps the session; another use of the link does not begin one.
fn session_is_of_this_window(visit: &Visit, browser: &mut Browser) {
    browser.evaluate("location.reload()");
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 3");
    assert_eq!(browser.evaluate("document.cookie"), "");
    browser.evaluate("sessionStorage.clear()");
    browser.open("about:blank");
    browser.open(&visit.web.url());
    browser.wait_for("document.getElementById('problem').textContent.includes('used already')");
    assert_eq!(browser.evaluate("document.querySelectorAll('#figures div').length"), 0);
    browser.take_requests_and_errors();
}

fn many_models(visit: &Visit, browser: &mut Browser) -> Picture {
    assert_eq!(browser.evaluate("document.querySelectorAll('#models tbody tr').length"), 50);
    browser.evaluate("document.getElementById('models-all').click()");
    assert_eq!(browser.evaluate("document.querySelectorAll('#models tbody tr').length"), 300);
    browser.evaluate("location.reload()");
    browser.wait_for("document.getElementById('figures').children.length > 0");
    browser.wait_for("document.documentElement.dataset.facts === 'known'");
    looks::check_steady(browser);
    looks::check_treemap(browser, 300);
    check_page(browser, &visit.web, "many")
}

/// The pictures in the README: `just pictures`.
#[test]
fn pictures_show_a_pull_and_models_that_share() {
    let Some(mut browser) = Browser::start() else { return };
    let visit = Visit::new(&mut browser, &family());
    let reader = Reader::open(&visit.daemon.socket(), "llama3-8b");
    let registry = registry_with(&ModelFile::dense_of(3, 2, 512));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(32 << 10, Duration::from_millis(100)));
    let name = registry.name("library/tiny:latest");
    let mut pull = visit.daemon.command().command();
    let mut pull = pull.args(["pull", &name, "--name", "gemma3:12b", "--quiet"]).spawn().unwrap();
    browser.wait_for("document.querySelector('#pulls progress')?.position > 0.1");
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelector('#sessions tbody').textContent.includes('%')");
    // Where a user's store is.
    browser.evaluate("document.getElementById('store').textContent = '~/.local/share/blobd'");
    let mut pictures = Vec::new();
    for scheme in ["light", "dark"] {
        browser.show_in(1120, 1100, scheme);
        browser.wait_for("document.getElementById('treemap').viewBox.baseVal.width > 1000");
        let picture = browser.screenshot();
        assert!(picture.len() < 150 << 10, "{} bytes", picture.len());
        keep(&format!("web-{scheme}.png"), &picture);
        pictures.push(Picture::decode(&picture));
        looks::check_scheme(&pictures[pictures.len() - 1], scheme, "pictures");
    }
    assert!(pictures[0].difference(&pictures[1]) > 0.3, "the schemes differ");
    pull.kill().unwrap();
    pull.wait().unwrap();
    drop(reader);
}

/// Models as on a machine where some have been tried: quants and fine-tunes share tensors.
fn family() -> Vec<(String, ModelFile)> {
    // Large enough for the picture that the store's own files are small beside them.
    let size = if env::var_os(PICTURES).is_some() { 4 << 20 } else { 64 << 10 };
    [
        ("llama3-8b", (0..16).collect::<Vec<u64>>()),
        ("llama3-8b-tuned", (0..12).chain(20..24).collect()),
        ("llama3-8b-abliterated", (0..12).chain(30..34).collect()),
        ("qwen3-30b", (100..124).collect()),
        ("qwen3-30b-coder", (100..110).chain(200..214).collect()),
        ("phi4", (300..309).collect()),
        ("nomic-embed", vec![400]),
    ]
    .map(|(name, tensors)| (name.to_owned(), model_of(&tensors, size)))
    .into()
}
