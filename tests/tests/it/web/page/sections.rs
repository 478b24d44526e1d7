//! Parts of the page that are empty in most stores: what would be freed, and lower stores.

use std::fs;
use std::path::PathBuf;

use blobd_tests::browser::Browser;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

use super::looks::refresh;
use super::{Visit, check_page, import, keep, model, open_page, three};

/// Writes a configuration file.
fn write_config(folder: &TempDir, settings: &str) -> PathBuf {
    let path = folder.path().join("config.toml");
    fs::write(&path, format!("{settings}\n[scrub]\nrate_bytes_per_second = 0\n")).unwrap();
    path
}

fn text(browser: &mut Browser, selector: &str) -> String {
    let text = browser.evaluate(&format!("document.querySelector('{selector}').textContent"));
    text.as_str().unwrap().to_owned()
}

/// Without a daemon: that would evict meanwhile.
#[test]
fn page_shows_what_a_collection_and_an_eviction_would_free() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = tmpfs_directory();
    // A trash would keep the replaced content, which then is not collected.
    let config = write_config(&folder, "[trash]\ndisplaced = 0");
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    import(&blobd, folder.path(), &three());
    import(&blobd, folder.path(), &[("phi3-new".to_owned(), model(&[11, 12]))]);
    blobd.line("tag phi3-new phi3-mini --force").succeeds();
    blobd.line("rm phi3-new").succeeds();
    // Some 850 KiB are used, of which 200 KiB are not needed: of the 440 KiB above the limit, the older two models have
    // the rest.
    let limits = "quota = \"4 MiB\"\nmin_free = 0\nevict = \"all\"\nhigh_watermark = 11\nlow_watermark = 10";
    write_config(&folder, &format!("[space]\n{limits}"));
    let web = open_page(&mut browser, &blobd);
    assert!(text(&mut browser, "#gc-text").starts_with("would free "));
    let garbage = text(&mut browser, "#gc tbody");
    assert!(garbage.contains("tensors and files") && garbage.contains("KiB"), "{garbage}");
    let plan = text(&mut browser, "#eviction-text");
    assert!(plan.starts_with("would remove 2 models: ") && plan.contains(" are needed"), "{plan}");
    let evicted = text(&mut browser, "#eviction tbody");
    let is_evicted = ["llama3-8b-q4", "llama3-8b-tuned", "phi3-mini"].map(|name| evicted.contains(name));
    assert_eq!(is_evicted, [true, true, false], "{evicted}");
    check_page(&mut browser, &web, "freed");
    browser.show_in(1400, 1700, "light");
    keep("freed-whole-light.png", &browser.screenshot());
    // What has been freed vanishes without a reload.
    blobd.line("gc").succeeds();
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.getElementById('gc-text').textContent === 'would free nothing.'");
}

#[test]
fn page_shows_models_of_lower_stores_and_names_those_that_are_missing() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = tmpfs_directory();
    let [lower, missing, away] = ["lower", "missing", "away"].map(|name| folder.path().join(name));
    import(&Blobd::at_root(&lower), folder.path(), &three()[..1]);
    let config = write_config(&folder, &format!("lower = [{lower:?}, {missing:?}]"));
    let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    let visit = Visit::of(&mut browser, daemon);
    // The store itself has no model.
    assert_eq!(browser.evaluate("document.getElementById('empty').checkVisibility()"), false);
    let models = text(&mut browser, "#models tbody");
    assert!(models.contains(&format!("llama3-8b-q4:latestin {}", lower.display())), "{models}");
    assert!(text(&mut browser, "#figures").contains("Models1In lower stores1"));
    assert_eq!(warnings(&mut browser), [missing.to_str().unwrap()]);
    check_page(&mut browser, &visit.web, "lower");
    import(&visit.daemon.command(), folder.path(), &three()[1..]);
    refresh(&mut browser);
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 3");
    assert_eq!(browser.evaluate("document.querySelectorAll('#models .tag').length"), 1);
    check_page(&mut browser, &visit.web, "lower-and-own");
    fs::rename(&lower, &away).unwrap();
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 2");
    assert_eq!(warnings(&mut browser), [lower.to_str().unwrap(), missing.to_str().unwrap()]);
    fs::rename(&away, &lower).unwrap();
    browser.evaluate("document.getElementById('refresh').click()");
    browser.wait_for("document.querySelectorAll('#models tbody tr').length === 3");
    assert_eq!(warnings(&mut browser), [missing.to_str().unwrap()]);
}

/// The lower stores that the visible warnings name.
fn warnings(browser: &mut Browser) -> Vec<String> {
    let lines = browser.evaluate(
        "[...document.querySelectorAll('[role=status] .warning')].filter((line) => line.checkVisibility())\
         .map((line) => line.textContent.match(/are not shown: (?:.*? )?(\\/[^:]+)/)[1])",
    );
    serde_json::from_value(lines).unwrap()
}
