//! `.ci/depends-on-rights` lists the tests that run a second time, as an ordinary user. Checks that it has all crates
//! and modules that use what the kernel treats differently for root.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::documents::repository;

/// Words of the code that show that a result depends on who runs it.
const MARKERS: &[&str] = &[
    // Who runs it, and who is at the other end.
    "geteuid",
    "getuid",
    "getegid",
    "getgid",
    "getgroups",
    "setuid",
    "setgid",
    "setgroups",
    "setpriv",
    "sudo",
    "multi_user",
    "name_service",
    "peercred",
    "socket_peercred",
    "uid",
    "gid",
    // Owners, modes and lists of access.
    "chown",
    "fchown",
    "lchown",
    "chmod",
    "fchmod",
    "umask",
    "set_permissions",
    "set_readonly",
    "from_mode",
    "set_mode",
    "PermissionsExt",
    "setxattr",
    "fsetxattr",
    "setfacl",
    "mkdirat",
    "mknodat",
    // Refusals.
    "PermissionDenied",
    "EACCES",
    "EPERM",
    "EROFS",
    "ACCESS",
    "PERM",
    "ROFS",
    // What only root may do, and limits that do not bind root.
    "mount",
    "umount",
    "unmount",
    "unshare",
    "mount_namespace",
    "TestMount",
    "HangingFiles",
    "setrlimit",
    "prlimit",
    "mlock",
    "mincore",
    "blobd_client::residency",
    // Settings that say who may do what.
    "single_user",
    "access.admin",
    "access.read",
    "access.pull",
    "quota.users",
    "quota.groups",
];

/// The first marker in this line of code.
fn marker(line: &str) -> Option<&'static str> {
    let code = line.trim_start();
    if code.starts_with("//") {
        return None;
    }
    let is_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let is_word = |at: usize, marker: &str| {
        !code[..at].ends_with(is_of_word) && !code[at + marker.len()..].starts_with(is_of_word)
    };
    let is_used = |marker: &str| code.match_indices(marker).any(|(at, _)| is_word(at, marker));
    let word = MARKERS.iter().copied().find(|marker| is_used(marker));
    word.or_else(|| code.contains("/proc/").then_some("/proc/"))
}

/// The first marker in a source file.
fn marker_in(path: &Path) -> Option<&'static str> {
    fs::read_to_string(path).unwrap().lines().find_map(marker)
}

/// The Rust files below a directory.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![directory.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            // Another crate, which has a line of its own.
            if path.is_dir() && !path.join("Cargo.toml").exists() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}

/// What the list names after this word, in its order.
fn listed(kind: &str) -> Vec<String> {
    let list = fs::read_to_string(repository().join(".ci/depends-on-rights")).unwrap();
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entries =
        lines.map(|line| line.split_once(' ').unwrap_or_else(|| panic!("{line}: expected `crate` or `it`")));
    entries.filter(|(of, _)| *of == kind).map(|(_, name)| name.to_owned()).collect()
}

/// The modules of this test binary, by path, and their files.
fn modules() -> BTreeMap<String, PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let name = |path: &Path| {
        let words = path.strip_prefix(&top).unwrap().with_extension("");
        words.to_str().unwrap().replace('/', "::")
    };
    sources(&top).into_iter().map(|path| (name(&path), path)).collect()
}

fn is_within(module: &str, outer: &str) -> bool {
    module.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn has_tests(path: &Path) -> bool {
    fs::read_to_string(path).unwrap().lines().any(|line| line.trim() == "#[test]")
}

/// The module whose tests use this one: itself, or else the nearest around it that has tests.
fn tested_by<'m>(module: &'m str, modules: &BTreeMap<String, PathBuf>) -> &'m str {
    match module.rsplit_once("::") {
        Some((outer, _)) if !has_tests(&modules[module]) => tested_by(outer, modules),
        _ => module,
    }
}

/// The crates of the workspace with their folders. The tests' own crate is listed by module.
fn crates() -> BTreeMap<String, PathBuf> {
    let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let (_, rest) = manifest.split_once("members = [").unwrap();
    let members = rest.split_once("\n]").unwrap().0.lines().filter_map(|line| line.trim().strip_prefix('"'));
    let folders = members.map(|line| repository().join(line.split('"').next().unwrap()));
    let with_name = folders.map(|folder| {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        (name.unwrap().to_owned(), folder)
    });
    with_name.filter(|(name, _)| name != env!("CARGO_PKG_NAME")).collect()
}

#[test]
fn tests_that_depend_on_the_user_are_listed_to_run_as_an_ordinary_user() {
    assert_eq!(marker("    let own = rustix::process::geteuid();"), Some("geteuid"));
    assert_eq!(marker(r#"fs::read("/proc/self/status")"#), Some("/proc/"));
    assert_eq!((marker("// geteuid()"), marker("let mounts = guid;")), (None, None));

    let (modules, listed_modules, listed_crates) = (modules(), listed("it"), listed("crate"));
    let mut missing = Vec::new();
    for (module, path) in modules.iter().filter(|(module, _)| *module != "rights" && *module != "main") {
        let Some(marker) = marker_in(path) else { continue };
        let tested_by = tested_by(module, &modules);
        if !listed_modules.iter().any(|outer| is_within(tested_by, outer)) {
            missing.push(format!("it {tested_by} (`{marker}` in {module})"));
        }
    }
    for (name, folder) in crates() {
        let marker = sources(&folder).iter().find_map(|path| marker_in(path));
        if let Some(marker) = marker.filter(|_| !listed_crates.contains(&name)) {
            missing.push(format!("crate {name} (`{marker}`)"));
        }
    }
    assert!(missing.is_empty(), ".ci/depends-on-rights lacks these lines:\n{}", missing.join("\n"));
}

#[test]
fn listed_tests_exist_and_are_listed_once() {
    let (modules, listed, crates) = (modules(), listed("it"), crates());
    for entry in &listed {
        let mut within = modules.iter().filter(|(module, _)| is_within(module, entry));
        assert!(modules.contains_key(entry), "it {entry}: there is no such module");
        assert!(
            within.any(|(_, path)| has_tests(path)),
            "it {entry}: expected a module with tests, found none"
        );
        let outer = listed.iter().find(|outer| *outer != entry && is_within(entry, outer));
        assert_eq!(outer, None, "it {entry}: listed twice");
    }
    assert!(listed.is_sorted() && listed.len() > 30, "{listed:?}");
    for name in self::listed("crate") {
        assert!(crates.contains_key(&name), "crate {name}: there is no such crate");
    }
}
