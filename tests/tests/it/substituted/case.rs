//! A store with one replaced entry.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use blobd_tests::command::{self, Blobd};
use blobd_tests::store_dir::{Snapshot, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::template::{Template, name_of};
use super::user::User;
use super::verbs;
use super::watch::Watch;

/// What replaces an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Substitute {
    /// A symbolic link to the original, which now lies outside the store.
    Link,
    /// A symbolic link without a target.
    DanglingLink,
    Fifo,
    /// A directory in place of a file, or the reverse.
    OtherKind,
    Socket,
    /// The entry itself, but of an owner other than the store's.
    AnotherOwner,
}

/// A store with one replaced entry.
#[derive(Debug)]
pub(super) struct Case {
    user: User,
    entry: PathBuf,
    substitute: Substitute,
    /// The original's.
    permissions: fs::Permissions,
    folder: TempDir,
    before: Snapshot,
    watch: Watch,
}

impl Case {
    pub(super) fn lay_out(template: &Template, user: User, entry: &Path, substitute: Substitute) -> Self {
        let folder = tmpfs_directory();
        user.own(folder.path());
        let (store, outside) = (folder.path().join("store"), folder.path().join("outside"));
        template.copy_to(&store);
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("precious"), "years of work").unwrap();
        let path = store.join(entry);
        let permissions = fs::metadata(&path).unwrap().permissions();
        if substitute == Substitute::AnotherOwner {
            user.disown(&path);
        } else {
            let is_dir = path.is_dir();
            fs::rename(&path, outside.join("original")).unwrap();
            substitute.put(&path, is_dir, &outside);
            user.own(&outside);
        }
        let before = content(&store, entry);
        let watch = Watch::start(&outside);
        Self { user, entry: entry.to_path_buf(), substitute, permissions, folder, before, watch }
    }

    /// Runs every verb, embedded and through a daemon. Returns those that took too long.
    pub(super) fn run_every_verb(&self, template: &Template) -> Vec<String> {
        let blobd = Blobd::at_root(&self.store());
        let mut slow = verbs::run_embedded(self.user, &blobd);
        slow.extend(verbs::run_through_daemon(template, self.user, &blobd, self.folder.path()));
        slow
    }

    /// Asserts that nothing was lost, that nothing outside was accessed, and that the store is complete after
    /// the original is restored.
    pub(super) fn check(self) {
        let events = self.watch.events();
        assert!(events.is_empty(), "outside the store: {events:?}");
        let after = content(&self.store(), &self.entry);
        for (path, state) in &self.before {
            assert!(after.contains_key(path), "lost: {}", path.display());
            // The audit log has a record of each verb.
            let grows = path.starts_with(self.store().join("audit"));
            assert!(grows || after[path].2 == state.2, "changed: {}", path.display());
        }
        self.put_back();
        let blobd = Blobd::at_root(&self.store());
        for words in [&["undelete", &name_of("c")][..], &["verify"]] {
            let run = command::run(self.user.blobd(&blobd).args(words));
            assert_eq!(run.code, 0, "put back: {words:?}: {}{}", run.text(), run.stderr);
        }
    }

    fn put_back(&self) {
        let path = self.store().join(&self.entry);
        if self.substitute == Substitute::AnotherOwner {
            self.user.own(&self.store());
            if path.exists() {
                fs::set_permissions(&path, self.permissions.clone()).unwrap();
            }
            return;
        }
        if let Ok(metadata) = fs::symlink_metadata(&path) {
            if metadata.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.unwrap();
        }
        // Interrupted transactions need not be kept.
        if path.parent().is_some_and(Path::exists) {
            fs::rename(self.folder.path().join("outside/original"), &path).unwrap();
        }
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }
}

impl Substitute {
    fn put(self, path: &Path, is_dir: bool, outside: &Path) {
        match self {
            Self::Link => symlink(outside.join("original"), path).unwrap(),
            Self::DanglingLink => symlink(outside.join("absent"), path).unwrap(),
            Self::Fifo => make_node(path, FileType::Fifo),
            Self::OtherKind if is_dir => fs::write(path, "not a directory").unwrap(),
            Self::OtherKind => fs::create_dir(path).unwrap(),
            // Only a node of this type: the path is too long for `bind`.
            Self::Socket => make_node(path, FileType::Socket),
            Self::AnotherOwner => unreachable!("the entry stays"),
        }
    }
}

fn make_node(path: &Path, kind: FileType) {
    mknodat(CWD, path, kind, Mode::from_raw_mode(0o644), 0).unwrap();
}

/// The files that must not be lost: all but the replaced entry, and but those that commands regularly rewrite
/// or clear.
fn content(store: &Path, replaced: &Path) -> Snapshot {
    const REWRITTEN: [&str; 6] = ["index", "lock", "scrub.json", "staging", "reserve", "store.json"];
    let mut content = snapshot(store);
    content.retain(|path, _| {
        let relative = path.strip_prefix(store).unwrap();
        let is_rewritten = REWRITTEN.iter().any(|name| relative.starts_with(name));
        !is_rewritten && !relative.starts_with(replaced)
    });
    content
}
