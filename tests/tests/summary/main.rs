//! The last test program of `cargo test --workspace`: prints which tests the programs before it have skipped, and why.

use blobd_fixtures::skipped::take_records;

/// Of the tests with the same reason, as many are named.
const NAMED: usize = 3;

fn main() {
    // Another runner of tests asks each program which tests it has.
    if std::env::args().any(|argument| argument == "--list") {
        return;
    }
    match take_records() {
        Ok(reasons) => print(&reasons),
        Err(error) => println!("\nskipped tests: unknown: {error}\n"),
    }
}

fn print(reasons: &[(String, Vec<String>)]) {
    let count: usize = reasons.iter().map(|(_, tests)| tests.len()).sum();
    if count == 0 {
        return println!("\nskipped tests: none\n");
    }
    println!(
        "\nskipped tests: {count} were shown as passed, but did nothing or only a part, for these reasons:\n"
    );
    for (reason, tests) in reasons {
        let named = tests.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if tests.len() > NAMED { ", …" } else { "" };
        println!("  {:>3}  {reason}\n       {named}{more}", tests.len());
    }
    println!();
}
