//! What `df -v` and `ps` show about sharing, users, downloads, quarantine and pulls.

use std::time::Duration;

use blobd_client::protocol::space::{DiskUsage, ModelUsage, UsageKind};
use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::reader::Reader;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, flip_byte};
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::pull::registry_with;

const ALWAYS: usize = usize::MAX;

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

/// A model of tensors of 256 KiB each, whose content their numbers determine.
fn model(tensors: &[u64]) -> ModelFile {
    let mut file = ModelFile::empty();
    for number in tensors {
        file.add_noise(*number, &format!("blk.{number}.weight"), GgmlType::I8, &[256 << 10]);
    }
    file
}

fn detailed(daemon: &TestDaemon, limit: u32) -> DiskUsage {
    daemon.client().disk_usage_in_detail(limit).unwrap()
}

fn of<'u>(usage: &'u DiskUsage, name: &str) -> &'u ModelUsage {
    usage.models.iter().find(|model| model.name == name).unwrap_or_else(|| panic!("{name}: {usage:#?}"))
}

#[test]
fn df_says_which_models_share_how_much_with_whom() {
    let daemon = TestDaemon::start();
    for (name, tensors) in [("a", &[1, 2, 3][..]), ("b", &[1, 2, 4]), ("c", &[1, 5]), ("alone", &[9])] {
        import(&daemon, &model(tensors), name);
    }
    let usage = detailed(&daemon, 1000);
    let sharers = |name: &str| {
        let model = of(&usage, name);
        model.shared_with.iter().map(|other| (other.name.clone(), other.bytes >> 18)).collect::<Vec<_>>()
    };
    let named = |list: &[(&str, u64)]| {
        list.iter().map(|(name, count)| (format!("{name}:latest"), *count)).collect::<Vec<_>>()
    };
    assert_eq!(sharers("a:latest"), named(&[("b", 2), ("c", 1)]));
    assert_eq!(sharers("c:latest"), named(&[("a", 1), ("b", 1)]));
    assert_eq!(sharers("alone:latest"), []);
    let parts: Vec<_> = usage
        .shared_parts
        .iter()
        .map(|part| (part.model_count, part.models.len(), part.bytes >> 18))
        .collect();
    assert_eq!(parts, [(2, 2, 1), (3, 3, 1)], "{usage:#?}");
    let shared = usage.rows.iter().find(|row| row.kind == UsageKind::Shared).unwrap();
    assert_eq!(usage.shared_parts.iter().map(|part| part.bytes).sum::<u64>(), shared.bytes);
    let short = detailed(&daemon, 1);
    assert_eq!(of(&short, "a:latest").shared_with.len(), 1);
    assert!(
        short.shared_parts.iter().all(|part| part.models.len() == 1 && part.model_count > 1),
        "{short:?}"
    );
    assert!(daemon.client().disk_usage().unwrap().shared_parts.is_empty(), "only in detail");
    let text = daemon.command().line("df -v").succeeds().text();
    assert!(text.contains("a:latest, b:latest, c:latest"), "{text}");
    let mut lines = text.lines().skip_while(|line| !line.starts_with("MODEL"));
    let below = lines.find(|line| line.starts_with("c:latest")).and_then(|_| lines.next());
    assert!(
        below.is_some_and(|line| line.starts_with("  shared with a:latest 256 KiB, b:latest 256 KiB")),
        "{text}"
    );
}

#[test]
fn df_says_who_opened_a_model_last() {
    let mut daemon = TestDaemon::start();
    import(&daemon, &model(&[1]), "m");
    assert_eq!(of(&detailed(&daemon, 1), "m:latest").last_opened_by, None);
    drop(Reader::open(&daemon.socket(), "m"));
    let own = rustix::process::getuid().as_raw();
    let opened_by = |daemon: &TestDaemon| of(&detailed(daemon, 1), "m:latest").last_opened_by.clone();
    let before = opened_by(&daemon).unwrap();
    assert_eq!(before.uid, own);
    // `ps` looks at the model without opening it.
    let opened = of(&detailed(&daemon, 1), "m:latest").last_opened.clone();
    daemon.command().line("ps").succeeds();
    assert_eq!(of(&detailed(&daemon, 1), "m:latest").last_opened, opened);
    daemon.stop();
    daemon.restart();
    assert_eq!(opened_by(&daemon), Some(before), "kept across a restart");
}

/// A model stays open after its name was given to another one.
#[test]
fn open_model_is_not_mistaken_for_the_current_model_of_its_name() {
    let daemon = TestDaemon::start();
    import(&daemon, &model(&[1]), "e");
    let reader = Reader::open(&daemon.socket(), "e");
    let blobd = daemon.command();
    let session = || blobd.line("ps --json").succeeds().json()["sessions"][0].clone();
    let before = session()["model_bytes"].clone();
    assert!(before.as_u64().is_some_and(|bytes| bytes > 256 << 10), "{before}");
    blobd.line("tag e other").succeeds();
    import(&daemon, &model(&[2, 3, 4]), "new");
    blobd.line("rename new e --force").succeeds();
    assert_eq!(session()["model_bytes"], before, "by the other name of the model");
    let usage = detailed(&daemon, 1);
    assert_eq!((&of(&usage, "e:latest").last_opened, &of(&usage, "e:latest").last_opened_by), (&None, &None));
    blobd.line("rm other").succeeds();
    assert_eq!(session()["model_bytes"], Json::Null);
    let text = blobd.line("ps").succeeds().text();
    assert!(text.contains("e:latest"), "{text}");
    drop(reader);
}

#[test]
fn df_lists_downloads_trash_and_quarantine_one_by_one() {
    let daemon = TestDaemon::start();
    let (blobd, large) = (daemon.command(), ModelFile::dense(1));
    for (name, tensor) in [("damaged", 2), ("old", 3)] {
        import(&daemon, &model(&[tensor]), name);
    }
    let shown = blobd.line("show damaged --json").succeeds().json();
    let digest = shown["tensors"][0]["digest"].as_str().unwrap().to_owned();
    flip_byte(&blob_path(daemon.root(), &digest), 77);
    blobd.line("verify damaged").exits_with(5);
    blobd.line("rm old --keep 7d").succeeds();
    let registry = registry_with(&large);
    let weights = format!("/cdn/sha256:{}", sha256(&large.bytes()));
    registry.add_fault(&weights, 1, Fault::CutAfter(large.bytes().len() / 2));
    registry.add_fault(&weights, ALWAYS, Fault::Status(404));
    blobd.run(["pull", &registry.name("library/tiny:latest")]).exits_with(1);
    let usage = blobd.line("df --json").succeeds().json();
    assert_eq!(usage["quarantined"][0]["digest"], *digest);
    assert!(usage["quarantined"][0]["bytes"].as_u64().unwrap() >= 256 << 10, "{usage}");
    assert_eq!(usage["trash"][0]["name"], "old:latest");
    let rows = usage["rows"].as_array().unwrap();
    let download = rows.iter().find(|row| row["kind"] == "download").unwrap();
    assert_eq!(download["size"].as_u64(), Some(large.bytes().len() as u64));
    let received = download["received_bytes"].as_u64().unwrap();
    assert!(received > 0 && received < large.bytes().len() as u64, "{download}");
    assert_eq!(download["user"]["uid"], rustix::process::getuid().as_raw());
    let text = blobd.line("df -v").succeeds().text();
    for part in ["UNFINISHED DOWNLOAD", "IN THE TRASH", "in 7 days", "DAMAGED BLOB", &digest[7..15]] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

fn pulls(blobd: &Blobd) -> Vec<Json> {
    blobd.line("ps --json").succeeds().json()["pulls"].as_array().unwrap().clone()
}

#[test]
fn ps_lists_a_pull_with_its_progress_and_speed_until_it_ends() {
    let daemon = TestDaemon::start();
    let (blobd, large) = (daemon.command(), ModelFile::dense_of(3, 2, 512));
    let registry: FakeRegistry = registry_with(&large);
    registry.add_fault("/cdn/", ALWAYS, Fault::Slow(64 << 10, Duration::from_millis(100)));
    let name = registry.name("library/tiny:latest");
    let mut child = blobd.command().args(["pull", &name, "--quiet"]).spawn().unwrap();
    let mut last = Json::Null;
    eventually("the pull has a speed", || {
        last = pulls(&blobd).pop().unwrap_or_default();
        last["bytes_per_second"].as_u64().is_some_and(|speed| speed > 0)
    });
    let size = large.bytes().len() as u64;
    assert!(last["total_bytes"].as_u64().is_some_and(|total| total > size), "{last}");
    assert!(last["completed_bytes"].as_u64().is_some_and(|done| done > 0 && done <= size + 4096), "{last}");
    assert_eq!(last["pid"].as_u64(), Some(u64::from(child.id())));
    assert!(name.ends_with(last["model"].as_str().unwrap()), "{last}");
    assert!(last["source"].as_str().unwrap().contains("library/tiny"), "{last}");
    let text = blobd.line("ps").succeeds().text();
    assert!(text.contains("PULL OF") && text.contains("/s"), "{text}");
    registry.clear_faults();
    assert!(child.wait().unwrap().success());
    eventually("it is not listed any more", || pulls(&blobd).is_empty());
}

/// The query of a URL may be a credential.
#[test]
fn source_of_a_pull_is_listed_without_its_query() {
    let daemon = TestDaemon::start();
    let (blobd, model) = (daemon.command(), ModelFile::dense_of(3, 2, 512));
    let registry = FakeRegistry::start().unwrap();
    registry.add_page("/secret.gguf", &model.bytes(), &[]);
    registry.add_fault("/secret.gguf", ALWAYS, Fault::Slow(64 << 10, Duration::from_millis(100)));
    let url = format!("{}/secret.gguf?token=hidden", registry.url());
    let mut child = blobd.command().args(["pull", &url, "--quiet", "--name", "m"]).spawn().unwrap();
    let mut listed = Vec::new();
    eventually("the pull is listed", || {
        listed = pulls(&blobd);
        !listed.is_empty()
    });
    let text = serde_json::to_string(&listed).unwrap();
    assert!(text.contains("/secret.gguf") && !text.contains("hidden"), "{text}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn wrong_query_is_refused() {
    let daemon = TestDaemon::start();
    for path in
        ["/v1/df?detail", "/v1/df?detail=-1", "/v1/df?x=1", "/v1/ps?residency=1", "/v1/eviction?bytes=x"]
    {
        let response = blobd_tests::http::get(&daemon.socket(), path);
        assert_eq!(response.status, 400, "{path}: {response:?}");
    }
}
