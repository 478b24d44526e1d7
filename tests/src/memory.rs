//! Memory of a process, as the kernel counts it.

use std::fs;
use std::path::Path;

/// The proportional set size (PSS), in bytes, of a process's maps of files below `folder`: a page that eight
/// processes map counts an eighth for each.
///
/// # Panics
/// When the process cannot be inspected.
#[must_use]
pub fn shared_bytes(pid: u32, folder: &Path) -> u64 {
    let smaps = read(pid, "smaps");
    let mut counts = false;
    let mut kib = 0;
    for line in smaps.lines() {
        match line.split_once(":") {
            Some(("Pss", rest)) if counts => kib += number(rest),
            Some((field, _)) if field.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') => {}
            // `55d0-55d1 r--s 00000000 fe:00 1234   /path/of/the file`: a map begins.
            _ => counts = line.find('/').is_some_and(|start| Path::new(&line[start..]).starts_with(folder)),
        }
    }
    kib << 10
}

/// A field of a process's status in bytes, such as `VmHWM` or `RssAnon`.
///
/// # Panics
/// When there is no such field.
#[must_use]
pub fn status_bytes(pid: u32, field: &str) -> u64 {
    let status = read(pid, "status");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    number(line.unwrap_or_else(|| panic!("{field} of process {pid}"))) << 10
}

/// The number of a process's threads.
///
/// # Panics
/// When the process has ended.
#[must_use]
pub fn threads(pid: u32) -> usize {
    let path = format!("/proc/{pid}/task");
    fs::read_dir(&path).unwrap_or_else(|error| panic!("{path}: {error}")).count()
}

fn read(pid: u32, file: &str) -> String {
    let path = format!("/proc/{pid}/{file}");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number of kB")
}

#[cfg(test)]
mod tests {
    use std::process::id;

    use super::*;

    #[test]
    fn own_executable_is_mapped() {
        let executable = std::env::current_exe().unwrap();
        assert!(shared_bytes(id(), executable.parent().unwrap()) > 0);
        assert_eq!(shared_bytes(id(), Path::new("/nonexistent")), 0);
    }

    #[test]
    fn own_memory_is_counted() {
        assert!(status_bytes(id(), "VmHWM") >= status_bytes(id(), "RssAnon"));
    }
}
