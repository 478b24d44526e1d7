//! What sharing saves is one number, wherever it is shown: `df`, `ls`, the page's data, the metrics, the demo and the README.

use std::fs;
use std::path::Path;

use blobd_client::protocol::space::{DiskUsage, UsageKind};
use blobd_store_format::size::human_difference;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use crate::web::Web;

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

/// A model, a relative that shares most of it, five more names of the first, an unneeded blob and a model in the trash.
fn store() -> TestDaemon {
    let daemon = TestDaemon::start();
    let model = || ModelFile::dense_of(70, 2, 256);
    import(&daemon, &model(), "base");
    import(&daemon, &model().with_changed("output.weight"), "tuned");
    import(&daemon, &ModelFile::dense_of(71, 1, 256), "gone");
    for tag in ["a", "b", "c", "d", "e"] {
        daemon.command().line(&format!("tag base base:{tag}")).succeeds();
    }
    daemon.command().line("rm gone --keep 7d").succeeds();
    daemon
}

fn check_parts(usage: &DiskUsage) {
    assert_eq!(usage.saved_bytes, usage.logical_bytes.saturating_sub(usage.stored_bytes), "{usage:#?}");
    assert_eq!(usage.rows.iter().map(|row| row.bytes).sum::<u64>(), usage.disk_bytes, "{usage:#?}");
    let of_models = [UsageKind::Model, UsageKind::Shared];
    let stored = usage.rows.iter().filter(|row| of_models.contains(&row.kind)).map(|row| row.bytes);
    assert_eq!(stored.sum::<u64>(), usage.stored_bytes, "{usage:#?}");
}

/// The value of a gauge.
fn metric(daemon: &TestDaemon, name: &str) -> Option<u64> {
    let text = http::get(&daemon.socket(), "/v1/metrics").body;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
    line.map(|value| value.parse().unwrap())
}

#[test]
fn savings_are_the_same_everywhere() {
    let daemon = store();
    let usage = daemon.client().disk_usage().unwrap();
    check_parts(&usage);
    assert_eq!((usage.models.len(), usage.model_count), (7, 2));
    assert!(usage.saved_bytes > 0, "{usage:#?}");
    let figures = [
        ("logical_bytes", usage.logical_bytes),
        ("stored_bytes", usage.stored_bytes),
        ("saved_bytes", usage.saved_bytes),
    ];
    let web = Web::start(&daemon.command());
    let shown = [daemon.command().line("df --json").succeeds().json(), web.ask("df?detail=12", &web.key())];
    for (field, bytes) in figures {
        for shown in &shown {
            assert_eq!(shown[field].as_u64(), Some(bytes), "{field}: {shown}");
        }
        eventually("the metrics have been counted", || {
            metric(&daemon, &format!("blobd_{field}")) == Some(bytes)
        });
    }
    let [files, stored, saved] = human_difference(usage.logical_bytes, usage.stored_bytes);
    let text = daemon.command().line("df").succeeds().text();
    let line = format!("models  2 models: {files} as files, {stored} stored, {saved} saved");
    assert!(text.contains(&line), "{line}: {text}");
    let base = text.lines().find(|line| line.starts_with("base:a ")).unwrap_or_default();
    assert!(base.ends_with("  and 5 other names"), "{text}");
    let listed = daemon.command().line("ls").succeeds().text();
    let last = format!("7 names of 2 models: {files} as files, {stored} stored, {saved} saved");
    assert!(listed.lines().last().unwrap_or_default().starts_with(&last), "{last}: {listed}");
    let listed = daemon.command().line("ls --json").succeeds().json();
    for (field, bytes) in figures {
        assert_eq!(listed[field].as_u64(), Some(bytes), "{field}: {listed}");
    }
    let own = listed["models"][0]["unique_bytes"]
        .as_u64()
        .zip(usage.models.first().map(|model| model.unique_bytes));
    assert!(own.is_some_and(|(listed, used)| listed == used), "{listed}");
}

#[test]
fn names_of_one_model_save_nothing() {
    let daemon = TestDaemon::start();
    import(&daemon, &ModelFile::dense_of(70, 2, 256), "m");
    let alone = daemon.client().disk_usage().unwrap();
    for tag in ["a", "b", "c", "d", "e"] {
        daemon.command().line(&format!("tag m m:{tag}")).succeeds();
    }
    let usage = daemon.client().disk_usage().unwrap();
    check_parts(&usage);
    assert_eq!(usage.saved_bytes, alone.saved_bytes);
    assert_eq!((usage.logical_bytes, usage.stored_bytes), (alone.logical_bytes, alone.stored_bytes));
}

/// The demo's models do not depend on the machine, so the README can name its figures.
#[test]
fn demo_and_readme_name_the_same_savings() {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let demo: Json = Blobd::at_root(&folder.path().join("store")).line("demo --json").succeeds().json();
    let bytes = |field: &str| demo[field].as_u64().unwrap();
    assert_eq!(bytes("saved_bytes"), bytes("logical_bytes") - bytes("stored_bytes"), "{demo}");
    let [files, stored, saved] = human_difference(bytes("logical_bytes"), bytes("stored_bytes"));
    let percent = bytes("saved_bytes") * 100 / bytes("logical_bytes");
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("README.md");
    let readme = fs::read_to_string(readme).unwrap();
    for part in [
        format!("**{percent} % of the disk saved**"),
        format!("are {files} as files and {stored} in the store: {saved} saved"),
    ] {
        assert!(readme.contains(&part), "README.md: {part}");
    }
}
