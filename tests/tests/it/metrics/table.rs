//! A table of events, and of the samples whose values each event changes.

use std::collections::BTreeSet;

use blobd_tests::wait::eventually;

use super::events::{self, Fixture};
use super::samples::{Samples, documented, family};

/// An event, and the samples whose values it changes.
struct Event {
    what: &'static str,
    happen: fn(&mut Fixture),
    moves: &'static [&'static str],
}

const EVENTS: &[Event] = &[
    Event {
        what: "models are listed",
        happen: events::list,
        moves: &[
            "blobd_requests_total{result=\"ok\",verb=\"ls\"}",
            "blobd_request_duration_seconds_count{verb=\"ls\"}",
            "process_cpu_seconds_total",
        ],
    },
    Event {
        what: "a model that does not exist is removed",
        happen: events::remove_absent,
        moves: &[
            "blobd_requests_total{result=\"failed\",verb=\"rm\"}",
            "blobd_request_errors_total{code=\"not_found\"}",
        ],
    },
    Event {
        what: "a model is imported",
        happen: events::import,
        moves: &[
            "blobd_imported_bytes_total",
            "blobd_import_throughput_bytes_per_second_count",
            "blobd_logical_bytes",
            "blobd_stored_bytes",
            "blobd_used_bytes",
            "blobd_free_bytes",
            "blobd_blobs",
            "blobd_models",
            "blobd_disk_bytes{kind=\"unique\"}",
            "blobd_disk_bytes{kind=\"records\"}",
            "blobd_sizes_timestamp_seconds",
        ],
    },
    Event {
        what: "a model is imported that shares tensors with another",
        happen: events::import_similar,
        moves: &[
            "blobd_reused_bytes_total{verb=\"import\"}",
            "blobd_saved_bytes",
            "blobd_disk_bytes{kind=\"shared\"}",
        ],
    },
    Event {
        what: "a model is opened",
        happen: events::open,
        moves: &[
            "blobd_open_duration_seconds_count",
            "blobd_descriptors_sent_total",
            "blobd_sessions",
            "blobd_permits_in_use{pool=\"lasting_connections\"}",
            "process_open_fds",
        ],
    },
    Event {
        what: "a model is pulled, and the first request fails",
        happen: events::pull,
        moves: &[
            "blobd_pulls_started_total",
            "blobd_pulls_ended_total{result=\"ok\"}",
            "blobd_downloaded_bytes_total",
            "blobd_pull_throughput_bytes_per_second_count",
            "blobd_download_retries_total",
        ],
    },
    Event {
        what: "a model is pulled that its registry does not have",
        happen: events::pull_absent,
        moves: &["blobd_pulls_ended_total{result=\"failed\"}", "blobd_pull_errors_total{code=\"not_found\"}"],
    },
    Event {
        what: "a user plans more pulls at a time than one user may",
        happen: events::plan_many_pulls,
        moves: &["blobd_permits_waiting{pool=\"pull_plans\"}"],
    },
    Event {
        what: "their clients are interrupted",
        happen: events::interrupt_plans,
        moves: &["blobd_permits_waiting{pool=\"pull_plans\"}"],
    },
    Event {
        what: "a download has a wrong digest",
        happen: events::pull_wrong_bytes,
        moves: &["blobd_download_digest_mismatches_total"],
    },
    Event {
        what: "a server stops sending in the middle of a file",
        happen: events::pull_from_stalling_server,
        moves: &["blobd_download_stalls_total"],
    },
    Event {
        what: "a slow pull is in progress",
        happen: events::begin_slow_pull,
        moves: &["blobd_pulls_running", "blobd_permits_in_use{pool=\"pulls\"}"],
    },
    Event {
        what: "its client is interrupted",
        happen: events::interrupt_pull,
        moves: &["blobd_pulls_ended_total{result=\"cancelled\"}", "blobd_pulls_running"],
    },
    Event {
        what: "a slow push is in progress",
        happen: events::begin_slow_push,
        moves: &["blobd_pushes_running", "blobd_permits_in_use{pool=\"pushes\"}"],
    },
    Event {
        what: "its client is interrupted",
        happen: events::interrupt_pull,
        moves: &["blobd_pushes_running"],
    },
    Event {
        what: "a damaged blob is found",
        happen: events::find_damage,
        moves: &[
            "blobd_verify_failures_total",
            "blobd_verified_bytes_total",
            "blobd_damaged_blobs",
            "blobd_disk_bytes{kind=\"quarantine\"}",
        ],
    },
    Event {
        what: "the damage is repaired",
        happen: events::repair,
        moves: &["blobd_repaired_blobs_total", "blobd_damaged_blobs"],
    },
    Event {
        what: "another process adds a blob that no model needs",
        happen: events::add_unneeded_blob,
        moves: &[
            "blobd_index_rebuilds_total",
            "blobd_reclaimable_bytes",
            "blobd_disk_bytes{kind=\"unneeded\"}",
        ],
    },
    Event {
        what: "unneeded blobs are collected",
        happen: events::collect,
        moves: &["blobd_gc_runs_total", "blobd_gc_freed_bytes_total", "blobd_reclaimable_bytes"],
    },
    Event {
        what: "a model is moved to the trash",
        happen: events::trash,
        moves: &["blobd_disk_bytes{kind=\"trash\"}"],
    },
    Event {
        what: "the configuration gets a quota that only some models fit",
        happen: events::set_quota,
        moves: &["blobd_quota_bytes", "blobd_min_free_bytes", "blobd_group_quota_bytes{group=\"0\"}"],
    },
    Event {
        what: "a model is imported that does not fit the quota",
        happen: events::import_beyond_quota,
        moves: &["blobd_evictions_total", "blobd_evicted_bytes_total"],
    },
    Event {
        what: "a user has too many connections",
        happen: events::connect_too_often,
        moves: &["blobd_connections_refused_total"],
    },
    Event {
        what: "another machine reads something",
        happen: events::read_from_another_machine,
        moves: &["blobd_served_requests_total{status=\"2xx\"}", "blobd_served_bytes_total"],
    },
    Event {
        what: "a pass of the verification in the background has ended",
        happen: events::end_scrub,
        moves: &["blobd_scrub_success_timestamp_seconds"],
    },
    Event {
        what: "a lower store becomes unavailable",
        happen: events::lose_lower_store,
        moves: &["blobd_lower_stores_unavailable"],
    },
    Event {
        what: "a user exceeds the number of recorded refusals",
        happen: events::attempt_too_often,
        moves: &["blobd_audit_records_omitted_total{class=\"attempts\"}"],
    },
    Event {
        what: "the audit log cannot be written",
        happen: events::block_audit_log,
        moves: &[
            "blobd_audit_records_lost_total{class=\"changes\"}",
            "blobd_audit_records_lost_total{class=\"attempts\"}",
        ],
    },
    Event {
        what: "the daemon is restarted",
        happen: events::restart,
        moves: &["process_start_time_seconds"],
    },
];

/// A metric that has the same value as long as a daemon works, or that changes by itself. That
/// `blobd_store_writable` and `blobd_index_ready` become 0 is tested on a read-only mount (`special_files.rs`) and by
/// unit tests.
struct Steady {
    sample: &'static str,
    /// The least value that it has.
    least: f64,
}

const STEADY: &[Steady] = &[
    Steady { sample: "blobd_store_writable", least: 1.0 },
    Steady { sample: "blobd_index_ready", least: 1.0 },
    Steady { sample: "blobd_permits_limit{pool=\"imports\"}", least: 1.0 },
    Steady { sample: "blobd_permits_limit{pool=\"memory_bytes\"}", least: 48e6 },
    Steady { sample: "blobd_config_reload_success_timestamp_seconds", least: 1.7e9 },
    Steady { sample: "blobd_config_reload_successful", least: 1.0 },
    // Of the group of root, in which the user of the tests may not be; `quotas.rs` compares it with the charges.
    Steady { sample: "blobd_group_charged_bytes{group=\"0\"}", least: 0.0 },
    // Whether it moves depends on the machine's journal; a unit test sends records to one.
    Steady { sample: "blobd_audit_records_not_forwarded_total", least: 0.0 },
    Steady { sample: "process_max_fds", least: 64.0 },
    Steady { sample: "process_resident_memory_bytes", least: 1e6 },
    Steady { sample: "process_virtual_memory_bytes", least: 1e6 },
];

#[test]
fn every_metric_has_a_row_and_changes_with_its_event() {
    let mut fixture = Fixture::new();
    for Event { what, happen, moves } in EVENTS {
        let before = fixture.samples();
        happen(&mut fixture);
        for sample in *moves {
            let changed = || fixture.samples().value(sample) != before.value(sample);
            eventually(&format!("{what}: {sample} changes"), changed);
        }
        // Counters only grow, except that they begin again with a daemon.
        if *what != "the daemon is restarted" {
            check_growth(what, moves, &before, &fixture.samples());
        }
    }
    fixture.check_disk_bytes();
    for Steady { sample, least } in STEADY {
        eventually(sample, || fixture.samples().value(sample) >= *least);
    }
}

fn check_growth(what: &str, moves: &[&str], before: &Samples, after: &Samples) {
    let counters = moves.iter().filter(|sample| family(sample).ends_with("_total"));
    for sample in counters {
        assert!(after.value(sample) > before.value(sample), "{what}: {sample}");
    }
}

#[test]
fn every_metric_has_a_row() {
    let moved = EVENTS.iter().flat_map(|event| event.moves).copied();
    let steady = STEADY.iter().map(|steady| steady.sample);
    let rows: BTreeSet<String> = moved.chain(steady).map(|sample| family(sample).to_owned()).collect();
    let mut documented = documented();
    // Its value is always 1; the test of the form has it.
    assert!(documented.remove("blobd_build_info"));
    assert_eq!(documented, rows);
}
