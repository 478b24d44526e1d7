//! `blobd log` with several conditions, and its note about omitted records.

use blobd_tests::daemon::TestDaemon;

use super::{eventual_records, import, records, results};

#[test]
fn several_verbs_and_results_are_alternatives_and_a_period_has_an_end() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    blobd.line("tag m copy").succeeds();
    blobd.line("rm copy").succeeds();
    blobd.line("rm absent").exits_with(3);
    blobd.line("pull 127.0.0.1:1/a/b").exits_with(1);
    let all = eventual_records(
        &blobd,
        "--verb import --verb tag --verb rm --verb pull",
        &["import ok", "tag ok", "rm ok", "rm not_found", "pull upstream"],
    );
    let found = |options: &str| results(&records(&blobd, options));
    assert_eq!(found("--verb tag --verb rm"), ["tag ok", "rm ok", "rm not_found"]);
    assert_eq!(found("--result not_found --result upstream"), ["rm not_found", "pull upstream"]);
    assert_eq!(found("--verb rm --result ok"), ["rm ok"]);
    let time = all[2]["time"].as_str().unwrap();
    assert_eq!(found(&format!("--until {time}")), ["import ok", "tag ok"]);
    assert_eq!(found(&format!("--since {time} --verb rm --until 2100-01-01")), ["rm ok", "rm not_found"]);
    assert!(found("--until 1h").is_empty());
    let error = blobd.line("log --result dennied --json").exits_with(2).error();
    assert_eq!(error.message, "log: result: expected one such as ok or denied, found \"dennied\"");
    assert_eq!(error.hint.as_deref(), Some("did you mean denied?"));
    blobd.line("log --until tomorrow").exits_with(2);
}

#[test]
fn records_that_the_limit_leaves_out_are_counted() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    (0..60).for_each(|number| drop(blobd.line(&format!("tag m t{number}")).succeeds()));
    blobd_tests::wait::eventually("all are recorded", || records(&blobd, "--verb tag").len() == 60);
    let run = blobd.line("log").succeeds();
    assert_eq!(run.text().lines().count(), 51, "with the heading");
    // The start of the daemon is one of them.
    assert_eq!(run.stderr, "blobd: 12 earlier records not shown (`--limit 0`)\n");
    assert_eq!(
        blobd.line("log --verb tag -n 59").succeeds().stderr,
        "blobd: 1 earlier record not shown (`--limit 0`)\n"
    );
    let run = blobd.line("log --limit 0").succeeds();
    assert_eq!((run.text().lines().count(), run.stderr.as_str()), (63, ""));
    assert_eq!(blobd.line("log --limit 0 --verb tag").succeeds().stderr, "");
}
