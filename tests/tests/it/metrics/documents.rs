//! The alerts and the dashboard use metrics that exist, and Prometheus's own tools accept what blobd writes.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use blobd_fixtures::skipped::skipped;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::Fault;

use super::samples::{documented, family};
use crate::pull::registry_with;

const ALERTS: &str = include_str!("../../../../docs/monitoring/alerts.yml");
const DASHBOARD: &str = include_str!("../../../../docs/monitoring/dashboard.json");

/// The names of metrics in a text.
fn mentioned(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("blobd_") || word.starts_with("process_"));
    names.map(family).collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_exist() {
    let documented = documented();
    for (document, text) in [("alerts.yml", ALERTS), ("dashboard.json", DASHBOARD)] {
        let names = mentioned(text);
        assert!(names.len() > 8, "{document}: {names:?}");
        let unknown: Vec<_> = names.iter().filter(|name| !documented.contains(**name)).collect();
        assert!(unknown.is_empty(), "{document}: {unknown:?}");
    }
}

#[test]
fn every_panel_of_the_dashboard_has_a_title_and_queries() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    for panel in panels {
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()), "{panel}");
        assert!(panel["targets"].as_array().is_some_and(|targets| !targets.is_empty()), "{panel}");
    }
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}

/// What a panel shows in one unit: bytes and seconds say so in the names of their metrics, and a rate is per second.
#[test]
fn every_panel_of_the_dashboard_has_one_unit_that_fits_all_its_queries() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = &panel["title"];
        assert_eq!(panel["fieldConfig"]["overrides"].as_array().map(Vec::len), Some(0), "{title}");
        let unit = panel["fieldConfig"]["defaults"]["unit"].as_str().unwrap();
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let is_rate = query.contains("rate(") && !query.contains("histogram_quantile");
            let fits = match (query.contains("bytes"), query.contains("seconds"), is_rate) {
                (true, _, true) => unit == "Bps",
                (true, _, false) => unit == "bytes",
                // Seconds of a processor per second are a number of processors.
                (false, true, true) => unit == "short",
                (false, true, false) => unit == "s",
                (false, false, true) => unit == "reqps",
                (false, false, false) => ["short", "bool_yes_no"].contains(&unit),
            };
            assert!(fits, "{title}: {query} in {unit}");
        }
    }
}

#[test]
fn dashboard_and_alerts_cover_all_important_metrics() {
    for name in
        ["blobd_store_writable", "blobd_lower_stores_unavailable", "blobd_scrub_success_timestamp_seconds"]
    {
        assert!(DASHBOARD.contains(name) && ALERTS.contains(name), "{name}");
    }
    assert!(
        DASHBOARD.contains("blobd_audit_records_lost_total")
            && ALERTS.contains("blobd_audit_records_lost_total")
    );
    assert!(DASHBOARD.contains("blobd_config_reload_success_timestamp_seconds"));
    assert!(ALERTS.contains("blobd_config_reload_successful == 0"));
}

fn has_promtool() -> bool {
    let has = Command::new("promtool").arg("--version").output().is_ok();
    if !has {
        skipped("promtool is not installed (Debian: prometheus)");
    }
    has
}

#[test]
fn promtool_finds_no_problem_in_the_metrics_of_a_busy_daemon() {
    if !has_promtool() {
        return;
    }
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    let registry = registry_with(&model);
    registry.add_fault("/manifests/", 1, Fault::Status(503));
    let name = registry.name("library/tiny:latest");
    daemon.command().run(["pull", &name]).succeeds();
    daemon.command().line("show absent").exits_with(3);
    let _reader = Reader::open(&daemon.socket(), &name);
    let answer = http::get(&daemon.socket(), "/v1/metrics");
    let mut promtool = Command::new("promtool");
    let mut child =
        promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(answer.body.as_bytes()).unwrap();
    let checked = child.wait_with_output().unwrap();
    let problems = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success() && problems.is_empty(), "{problems}\n{}", answer.body);
}

#[test]
fn promtool_accepts_the_alerts() {
    if !has_promtool() {
        return;
    }
    let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/monitoring/alerts.yml");
    let checked = Command::new("promtool").args(["check", "rules"]).arg(alerts).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
