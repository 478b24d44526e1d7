use std::collections::BTreeMap;

use blobd_registry::FailureCounts;

use super::register::Described;
use super::*;

fn metrics() -> Metrics {
    Metrics::new(["ls", "pull"]).unwrap()
}

fn described() -> Vec<Described> {
    let metrics = metrics();
    let current = lock(&metrics.current);
    [current.main.described(), current.sizes.described()].concat()
}

/// The rows of the tables: name, type, labels, meaning.
fn documented() -> BTreeMap<String, [String; 3]> {
    let document = include_str!("../../../../docs/METRICS.md");
    let rows =
        document.lines().filter(|line| line.starts_with("| `blobd_") || line.starts_with("| `process_"));
    let row = |row: &str| {
        let mut cells = row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned());
        let mut next = || cells.next().unwrap();
        (next().trim_matches('`').to_owned(), [next(), next(), next()])
    };
    rows.map(row).collect()
}

#[test]
fn every_metric_is_documented_with_its_type_labels_and_description() {
    let documented = documented();
    let described = described();
    for Described { name, kind, labels, help } in &described {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let expected = [(*kind).to_owned(), labels.join(", "), (*help).to_owned()];
        assert_eq!(documented.get(*name), Some(&expected), "docs/METRICS.md, {name}");
    }
    let names: Vec<_> = described.iter().map(|metric| metric.name).collect();
    let unknown: Vec<_> = documented.keys().filter(|name| !names.contains(&name.as_str())).collect();
    assert!(unknown.is_empty(), "not in the registry: {unknown:?}");
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    for Described { name, kind, .. } in described() {
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
        assert!(name.starts_with("blobd_") || name.starts_with("process_"), "{name}");
        if kind == "histogram" {
            assert!(name.ends_with("_seconds") || name.ends_with("_bytes_per_second"), "{name}");
        }
    }
}

#[test]
fn counters_never_decrease() {
    let metrics = metrics();
    let value = |stalls| {
        let text = metrics
            .text(&Reading {
                registry: FailureCounts { stalls, ..FailureCounts::default() },
                ..Reading::default()
            })
            .unwrap();
        let line = text.lines().find(|line| line.starts_with("blobd_download_stalls_total ")).unwrap();
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!([value(3), value(2), value(4)], ["3", "3", "4"]);
}

#[test]
fn gauges_of_the_condition_say_whether_the_store_can_be_changed_and_the_index_is_complete() {
    let metrics = metrics();
    for works in [true, false, true] {
        let reading = Reading { is_writable: works, is_index_ready: works, ..Reading::default() };
        let text = metrics.text(&reading).unwrap();
        for name in ["blobd_store_writable", "blobd_index_ready"] {
            let expected = format!("{name} {}", u8::from(works));
            assert!(text.lines().any(|line| line == expected), "{expected}: {text}");
        }
    }
}

#[test]
fn configuration_that_cannot_be_used_keeps_the_time_of_the_last_good_one() {
    let metrics = metrics();
    let value = |name: &str| {
        let text = metrics.text(&Reading::default()).unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
    };
    let read =
        || (value("blobd_config_reload_successful"), value("blobd_config_reload_success_timestamp_seconds"));
    metrics.events.configuration_read(false);
    assert_eq!(read(), (Some(0), None));
    metrics.events.configuration_read(true);
    let (successful, time) = read();
    assert!(successful == Some(1) && time > Some(1_700_000_000), "{time:?}");
    metrics.events.configuration_read(false);
    assert_eq!(read(), (Some(0), time));
}

#[test]
fn values_of_labels_have_no_spaces() {
    let verbs = ["ls", "pull plan"];
    let metrics = Metrics::new(verbs).unwrap();
    for verb in verbs {
        metrics.events.request_ended(&RequestEnd { verb, result: "ok", ..RequestEnd::default() });
    }
    let text = metrics.text(&Reading::default()).unwrap();
    let labels = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('}'));
    for (labels, _) in labels {
        assert!(!labels.contains(' '), "{labels}");
    }
    assert!(text.contains("verb=\"pull_plan\""), "{text}");
}

#[test]
fn sizes_are_absent_until_they_are_known_and_take_a_twentieth_of_the_time() {
    let metrics = metrics();
    let has_sizes = || metrics.text(&Reading::default()).unwrap().contains("blobd_logical_bytes");
    let start = Instant::now();
    let first = metrics.begin_sizes(start).unwrap();
    assert!(metrics.begin_sizes(start).is_none(), "only one at a time");
    drop(first);
    assert!(!has_sizes());
    assert!(metrics.begin_sizes(Instant::now()).is_none(), "too early");
    let mut count = metrics.begin_sizes(Instant::now() + SHORTEST_INTERVAL).unwrap();
    count.begun = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
    count.set(&SizeReading::default());
    drop(count);
    assert!(has_sizes());
    assert!(metrics.begin_sizes(Instant::now() + Duration::from_secs(180)).is_none());
    assert!(metrics.begin_sizes(Instant::now() + Duration::from_secs(220)).is_some());
}

#[test]
fn panic_during_a_count_prevents_no_later_one() {
    let metrics = metrics();
    let panicking = std::panic::AssertUnwindSafe(|| {
        let _count = metrics.begin_sizes(Instant::now()).unwrap();
        metrics.update_condition(|| panic!("while it is read"));
    });
    std::panic::catch_unwind(panicking).unwrap_err();
    // The text of the panic takes time, of which a count may take only a hundredth.
    assert!(metrics.begin_sizes(Instant::now() + Duration::from_secs(3600)).is_some());
    metrics.update_condition(|| ConditionReading { free: Some(7), ..ConditionReading::default() });
    assert!(metrics.text(&Reading::default()).unwrap().contains("blobd_free_bytes 7\n"));
}

#[test]
fn condition_that_is_not_known_is_absent() {
    let metrics = metrics();
    let has_used = || metrics.text(&Reading::default()).unwrap().contains("blobd_used_bytes");
    assert!(!has_used());
    metrics.update_condition(|| ConditionReading { used: Some(0), ..ConditionReading::default() });
    assert!(has_used());
    metrics.update_condition(ConditionReading::default);
    assert!(!has_used());
}
