//! `ls`: order, filters, formats, totals, times.

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;

fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start();
    for (layers, name) in [(1, "small:F16"), (3, "large:F16"), (2, "other/middle:F16")] {
        let path =
            ModelFile::dense_of(layers, layers, 32).write_to(daemon.scratch(), &format!("of-{layers}.gguf"));
        daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
    }
    daemon.command().line("pin large:F16").succeeds();
    daemon
}

fn names(daemon: &TestDaemon, line: &str) -> Vec<String> {
    daemon.command().line(line).succeeds().text().lines().map(str::to_owned).collect()
}

#[test]
fn models_are_listed_in_the_requested_order() {
    let daemon = daemon();
    let (small, middle, large) = ("small:F16", "other/middle:F16", "large:F16");
    assert_eq!(names(&daemon, "ls -q"), [large, middle, small]);
    assert_eq!(names(&daemon, "ls -q --reverse"), [small, middle, large]);
    assert_eq!(names(&daemon, "ls -q --sort size"), [large, middle, small]);
    assert_eq!(names(&daemon, "ls -q --sort size --reverse"), [small, middle, large]);
    assert_eq!(names(&daemon, "ls -q --sort modified").len(), 3);
    let _reader = Reader::open(&daemon.socket(), small);
    assert_eq!(names(&daemon, "ls -q --sort used").first().map(String::as_str), Some(small));
    let listed = daemon.command().line("ls --sort size --reverse --json").succeeds().json();
    assert_eq!(listed["models"][0]["name"], small, "JSON has the same order");
}

#[test]
fn filters_must_all_match() {
    let daemon = daemon();
    let count = |filters: &str| names(&daemon, &format!("ls -q {filters}")).len();
    for (filters, expected) in [
        ("--filter name=l", 3),
        ("--filter name=other/*", 1),
        ("--filter pinned=true", 1),
        ("--filter pinned=false --filter name=small", 1),
        ("--filter pinned=true --filter name=small", 0),
        ("--filter newer=1h", 3),
        ("--filter older=1h", 0),
        ("--filter family=llama", 3),
        ("--filter architecture=qwen*", 0),
        ("--filter quantization=*", 0), // these models have no file type
        ("--filter origin=of-1", 1),
        ("--filter damaged=true", 0),
        ("arg", 1),
    ] {
        assert_eq!(count(filters), expected, "{filters}");
    }
    let listed = daemon.command().line("ls --filter pinned=true --json").succeeds().json();
    assert_eq!(listed["models"].as_array().unwrap().len(), 1);
}

#[test]
fn format_is_a_line_per_model_for_scripts() {
    let daemon = daemon();
    let text = daemon
        .command()
        .run(["ls", "--format", "{name}\\t{architecture} {quantization} {pinned}"])
        .succeeds();
    assert_eq!(text.text().lines().next(), Some("large:F16\tllama - true"));
    let docker = daemon.command().run(["ls", "small", "--format", "{{.Name}}"]).succeeds();
    assert_eq!(docker.text(), "small:F16\n");
    let table = daemon.command().line("ls --format table").succeeds().text();
    assert_eq!(table, daemon.command().line("ls").succeeds().text());
    let wrong = daemon.command().run(["ls", "--format", "{nope}"]).exits_with(2);
    assert!(wrong.stderr.contains("architecture"), "{}", wrong.stderr);
}

#[test]
fn table_ends_with_the_totals_and_has_relative_times_or_local_ones() {
    let daemon = daemon();
    let text = daemon.command().line("ls").succeeds().text();
    assert!(text.lines().last().unwrap().starts_with("3 models: "), "{text}");
    assert!(text.contains("just now") || text.contains(" ago"), "{text}");
    assert!(!text.contains("ORIGIN"), "{text}");
    let text = daemon.command().line("ls -v").succeeds().text();
    assert!(text.contains("ORIGIN") && text.contains("of-1.gguf"), "{text}");
    let year_of = |line: &str| line.contains(" 20") && line.contains(':');
    assert!(text.lines().nth(1).is_some_and(year_of), "{text}");
    let listed = daemon.command().line("ls --json").succeeds().json();
    assert!(listed["models"][0]["modified"].as_str().unwrap().ends_with('Z'));
    daemon.command().line("rm --keep 7d small:F16").succeeds();
    let trash = daemon.command().line("ls --trash").succeeds().text();
    assert!(trash.contains("in 6 days") || trash.contains("in 7 days"), "{trash}");
}
