use super::*;

const MIB: u64 = 1 << 20;

fn view(total: u64) -> (View, impl Fn(u64) -> Instant) {
    let start = Instant::now();
    let view = View::new(1, "llama3:8b".to_owned(), total, start);
    (view, move |seconds| start + Duration::from_secs(seconds))
}

#[test]
fn text_says_what_how_much_how_fast_and_how_long() {
    let (mut view, after) = view(1 << 30);
    view.set(100 * MIB, 1 << 30, after(10));
    assert_eq!(view.text(after(10)), "llama3:8b: 100 MiB of 1.00 GiB (9%), 10.0 MiB/s, 1m 32s left");
    view.set(600 * MIB, 1 << 30, after(20));
    assert_eq!(view.text(after(20)), "llama3:8b: 600 MiB of 1.00 GiB (58%), 50.0 MiB/s, 8s left");
    assert_eq!(view.text(after(50)), "llama3:8b: 600 MiB of 1.00 GiB (58%), no progress for 30s");
}

#[test]
fn text_of_an_unknown_total_has_what_is_known() {
    let (mut view, after) = view(0);
    assert_eq!(view.text(after(70)), "llama3:8b, no progress for 1m 10s");
    view.set(2048, 0, after(1));
    assert_eq!(view.text(after(1)), "llama3:8b: 2.00 KiB, 2.00 KiB/s");
}

#[test]
fn text_says_what_is_waited_for_and_since_when() {
    let (mut view, after) = view(0);
    view.wait("connecting", after(0));
    assert_eq!(view.text(after(1)), "llama3:8b: connecting");
    view.wait("connecting", after(5));
    assert_eq!(view.text(after(7)), "llama3:8b: connecting (7s)");
    view.set(600 * MIB, 1 << 30, after(7));
    view.wait("waiting for example.org: no data for 12 s", after(8));
    let text = "llama3:8b: 600 MiB of 1.00 GiB (58%); waiting for example.org: no data for 12 s";
    assert_eq!(view.text(after(9)), text);
}

#[test]
fn text_of_a_phase_has_its_own_amount() {
    let (mut view, after) = view(0);
    view.set(10 * MIB, 10 * MIB, after(1));
    view.enter("writing", (0, 1000), after(1));
    view.enter("writing", (100, 1000), after(2));
    assert_eq!(view.text(after(2)), "llama3:8b: writing, 10%, 9s left");
    view.enter("syncing", (0, 0), after(3));
    assert_eq!(view.text(after(8)), "llama3:8b: syncing (5s)");
}

#[test]
fn what_was_there_before_does_not_count_towards_the_speed() {
    let (mut view, after) = view(0);
    view.begin_at(20 * MIB, 120 * MIB, after(15));
    view.set(70 * MIB, 120 * MIB, after(20));
    assert_eq!(view.text(after(20)), "llama3:8b: 70.0 MiB of 120 MiB (58%), 10.0 MiB/s, 5s left");
    view.set_speed(Some(5 * MIB));
    assert!(view.text(after(20)).ends_with("5.00 MiB/s, 10s left"));
}

#[test]
fn bar_is_bounded_and_lines_fit_every_terminal() {
    let (mut view, after) = view(0);
    let name = "hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF-with-a-very-long-name:Q4_K_M".to_owned();
    view.label = name;
    let lines = |view: &View| {
        for columns in 20..=250 {
            let line = view.line(columns, after(30));
            assert!(line.chars().count() < columns, "{columns}: {line}");
            let cells = line.chars().filter(|c| ['█', '░'].contains(c)).count();
            assert!(
                cells <= MAX_BAR && (columns < WIDE || cells == 0 || cells >= MIN_BAR),
                "{columns}: {line}"
            );
        }
    };
    view.wait("asking a registry with a long name which files the model has, again and again", after(1));
    lines(&view);
    view.set(MIB * 1023, MIB * 1023 * 1023, after(2));
    lines(&view);
    view.wait("waiting for registry.example.org: no data for 12 s", after(3));
    lines(&view);
    view.enter("verifying", (10, 1000), after(4));
    view.enter("verifying", (20, 1000), after(5));
    lines(&view);
    view.enter("syncing", (0, 0), after(6));
    lines(&view);
}

#[test]
fn line_of_a_terminal_has_name_bar_amount_speed_and_time() {
    let (mut view, after) = view(0);
    view.set(100 * MIB, 200 * MIB, after(10));
    let line = view.line(80, after(10));
    assert_eq!(
        line, "llama3:8b                ██████░░░░░░     100 MiB / 200 MiB  10.0 MiB/s     10s",
        "{line}"
    );
    assert_eq!(view.line(40, after(10)), "llama3:8b       50%  10.0 MiB/s     10s");
    view.enter("verifying", (30, 100), after(10));
    let line = view.line(80, after(10));
    assert_eq!(line, "llama3:8b                ███░░░░░░░░░         verifying 30%");
}

#[test]
fn time_has_two_units_at_most() {
    let texts = [0, 59, 60, 3599, 3600, 12_000, 86_400, 190_000].map(time);
    assert_eq!(texts, ["0s", "59s", "1m 0s", "59m 59s", "1h 0m", "3h 20m", "1d 0h", "2d 4h"]);
}
