//! Checks `docs/OPERATIONS.md`: its example is a valid configuration, its keys exist, and it explains all
//! checks of `doctor`.

use std::fs;

use blobd_tests::command::Blobd;
use blobd_tests::temp_dirs::tmpfs_directory;

const OPERATIONS: &str = include_str!("../../../docs/OPERATIONS.md");

/// The names in the first column of the table with this header.
fn first_column(head: &str) -> Vec<&'static str> {
    let rows = OPERATIONS.lines().skip_while(|line| !line.starts_with(head)).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('`').nth(1).expect("a name")).collect()
}

fn check_config(content: &str) {
    let folder = tmpfs_directory();
    let path = folder.path().join("config.toml");
    fs::write(&path, content).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let run = blobd.run(["ls", "--config", path.to_str().unwrap()]);
    assert_eq!(run.code, 0, "{content}: {}", run.stderr);
}

#[test]
fn example_is_a_configuration() {
    let example = OPERATIONS.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    check_config(example);
}

/// Each key is accepted on its own with the default in the table.
#[test]
fn every_key_of_the_table_exists() {
    let keys = first_column("| key |");
    assert!(keys.len() > 10, "{keys:?}");
    let rows =
        OPERATIONS.lines().filter(|line| keys.iter().any(|key| line.starts_with(&format!("| `{key}` |"))));
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (key, default) = (cells[1].trim_matches('`'), cells[2].split('`').nth(1));
        let Some(default) = default else { continue };
        match key.split_once('.') {
            Some((section, key)) => check_config(&format!("[{section}]\n{key} = {default}")),
            None => check_config(&format!("{key} = {default}")),
        }
    }
}

#[test]
fn every_check_of_doctor_is_explained() {
    let folder = tmpfs_directory();
    let report = Blobd::at_root(&folder.path().join("store")).line("doctor --json").json();
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    let mut explained = first_column("| check |");
    explained.sort_unstable();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, explained, "in docs/OPERATIONS.md");
}
