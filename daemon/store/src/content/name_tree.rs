//! The files below `manifests/` and `pins/`, each at the place that its name gives it: host, namespace, model, tag.
//!
//! Listing ten thousand directories costs more than everything else that `ls` does. So a directory is listed again only
//! if its inode or its times have changed. Files are not covered by that: a caller that needs more than the name of a file
//! inspects it each time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use crate::root::{Directory, FileStatus, Stamp};
use crate::{StoreError, lock};

/// Directories between the root of the tree and a tag.
const DEPTH: usize = 3;

/// A remembered tree. Its default value remembers nothing.
#[derive(Debug, Default)]
pub(crate) struct NameTree {
    known: Mutex<Option<Arc<Listing>>>,
}

/// What a directory contained when it had this stamp.
#[derive(Debug)]
struct Listing {
    /// `None` if the directory had changed so recently that the next change may not show.
    stamp: Option<Stamp>,
    /// In order.
    entries: Arc<[NameEntry]>,
    /// For each entry that is a directory between the root and a tag, its content.
    below: Vec<Option<Arc<Listing>>>,
}

/// An entry of the tree that is not a directory between the root and a tag.
#[derive(Debug)]
pub(crate) struct NameEntry {
    /// Relative to the root of the tree.
    pub(crate) path: PathBuf,
    pub(crate) is_dir: bool,
    /// Whether it is where a tag belongs.
    pub(crate) is_at_tag_level: bool,
    /// The name of the model whose tag this is, if the path is one.
    pub(crate) reference: Option<Reference>,
}

/// What a visit of the tree finds.
pub(crate) enum Found<'t> {
    /// A directory between the root and the tags.
    Directory(FileStatus),
    Entry(&'t NameEntry),
    /// A directory that cannot be read. If the visitor returns no error, it is left out.
    Unreadable(StoreError),
}

/// What is in a tree, as a visit has found it. So a count of disk usage need not inspect the files again that a list of all
/// tags has just inspected.
#[derive(Debug, Default)]
pub struct VisitedFiles {
    /// Directories between the root and the tags.
    pub(crate) directories: Vec<FileStatus>,
    /// Files where tags belong.
    pub(crate) tags: Vec<FileStatus>,
    /// Everything else, with paths relative to the root of the tree.
    pub(crate) foreign: Vec<(PathBuf, FileStatus)>,
}

impl VisitedFiles {
    pub(crate) fn add(&mut self, entry: &NameEntry, status: FileStatus) {
        if entry.is_at_tag_level && status.is_file() {
            self.tags.push(status);
        } else {
            self.foreign.push((entry.path.clone(), status));
        }
    }
}

type Visitor<'v> = dyn FnMut(Found<'_>) -> Result<(), StoreError> + 'v;

impl NameTree {
    /// Everything below `root`. What cannot be read is left out.
    pub(crate) fn files(&self, root: &Directory) -> Result<VisitedFiles, StoreError> {
        let mut files = VisitedFiles::default();
        self.visit(root, &mut |found| {
            match found {
                Found::Directory(status) => files.directories.push(status),
                Found::Entry(entry) => {
                    let status = root.status(&entry.path)?;
                    status.into_iter().for_each(|status| files.add(entry, status));
                }
                Found::Unreadable(_) => {}
            }
            Ok(())
        })?;
        Ok(files)
    }

    /// Visits everything below `root`, in the order of the paths. A directory that is removed meanwhile counts as empty.
    pub(crate) fn visit(&self, root: &Directory, visitor: &mut Visitor<'_>) -> Result<(), StoreError> {
        let before = lock(&self.known).clone();
        let now =
            Visit { root, visitor }.directory(before.as_ref(), Path::new(""), &root.own_status()?, 0)?;
        *lock(&self.known) = Some(now);
        Ok(())
    }
}

impl Listing {
    fn below(&self, place: usize) -> Option<&Arc<Self>> {
        self.below.get(place)?.as_ref()
    }

    /// The content of the subdirectory at `path`.
    fn find_below(&self, path: &Path) -> Option<&Arc<Self>> {
        let place = self.entries.binary_search_by(|entry| entry.path.as_path().cmp(path)).ok()?;
        self.below(place)
    }
}

struct Visit<'v, 'f> {
    root: &'v Directory,
    visitor: &'v mut Visitor<'f>,
}

impl Visit<'_, '_> {
    fn directory(
        &mut self,
        before: Option<&Arc<Listing>>,
        path: &Path,
        status: &FileStatus,
        depth: usize,
    ) -> Result<Arc<Listing>, StoreError> {
        // Taken before the directory is listed: a change in between is seen the next time.
        let stamp = status.settled_stamp();
        let unchanged = before.filter(|before| stamp.is_some() && before.stamp == stamp);
        if let Some(known) = unchanged.filter(|_| depth == DEPTH) {
            for entry in &*known.entries {
                (self.visitor)(Found::Entry(entry))?;
            }
            return Ok(Arc::clone(known));
        }
        let entries = match unchanged {
            Some(known) => Arc::clone(&known.entries),
            None => list(self.root, path, depth)?,
        };
        let mut below = vec![None; entries.len()];
        for ((place, entry), below) in entries.iter().enumerate().zip(&mut below) {
            if entry.is_dir && depth < DEPTH {
                let before = match unchanged {
                    Some(known) => known.below(place),
                    None => before.and_then(|before| before.find_below(&entry.path)),
                };
                *below = self.subdirectory(before, &entry.path, depth + 1)?;
            } else {
                (self.visitor)(Found::Entry(entry))?;
            }
        }
        Ok(Arc::new(Listing { stamp, entries, below }))
    }

    /// `None` if there is no such directory any more, or it cannot be read.
    fn subdirectory(
        &mut self,
        before: Option<&Arc<Listing>>,
        path: &Path,
        depth: usize,
    ) -> Result<Option<Arc<Listing>>, StoreError> {
        let Some(status) = self.root.status(path)?.filter(FileStatus::is_dir) else { return Ok(None) };
        (self.visitor)(Found::Directory(status))?;
        match self.directory(before, path, &status, depth) {
            Ok(listing) => Ok(Some(listing)),
            Err(error) => (self.visitor)(Found::Unreadable(error)).map(|()| None),
        }
    }
}

/// Opens the directory at `path`. Each component is opened by itself, so that no symbolic link is followed.
fn open(root: &Directory, path: &Path) -> Result<Option<Directory>, StoreError> {
    let mut opened = root.find_directory(".")?;
    for component in path {
        let Some(directory) = opened else { break };
        opened = directory.find_directory(component)?;
    }
    Ok(opened)
}

/// The paths of the files, where tags belong, that equal `place` except for the case of letters and for the host, since one
/// host may have several names. Lists only the directories on the way there, so that it takes hardly longer in a store with
/// many models.
pub(crate) fn files_named(root: &Directory, place: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut found = vec![PathBuf::new()];
    for (depth, name) in place.iter().enumerate() {
        for path in std::mem::take(&mut found) {
            let Some(directory) = open(root, &path)? else { continue };
            directory.each_entry(|entry| {
                let is_named = depth == 0 || entry.name.eq_ignore_ascii_case(name);
                if is_named && entry.is_dir() == (depth < DEPTH) {
                    found.push(path.join(&entry.name));
                }
                Ok(())
            })?;
        }
    }
    Ok(found)
}

fn list(root: &Directory, path: &Path, depth: usize) -> Result<Arc<[NameEntry]>, StoreError> {
    let Some(directory) = open(root, path)? else { return Ok(Arc::default()) };
    let mut entries = Vec::new();
    directory.each_entry(|entry| {
        let path = path.join(&entry.name);
        let is_at_tag_level = depth == DEPTH;
        let reference = layout::parse_tag_place(&path).filter(|_| is_at_tag_level);
        entries.push(NameEntry { path, is_dir: entry.is_dir(), is_at_tag_level, reference });
        Ok(())
    })?;
    entries.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok(entries.into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::root::Root;

    fn tree(files: &[&str]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|file| write(&folder, file));
        folder
    }

    fn write(folder: &TempDir, file: &str) {
        let path = folder.path().join("manifests").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn visit(tree: &NameTree, folder: &TempDir) -> Vec<(String, bool)> {
        let root = Root::open(folder.path()).unwrap();
        let mut found = Vec::new();
        tree.visit(&root.existing_directory(layout::MANIFESTS).unwrap(), &mut |visited| {
            if let Found::Entry(entry) = visited {
                found.push((entry.path.to_str().unwrap().to_owned(), entry.reference.is_some()));
            }
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn files_in_another_case_are_found_at_each_level() {
        let folder = tree(&[
            "r.io/n/Model/Q8",
            "R.io/n/model/q8",
            "r.io/n/other/q8",
            "r.io/n/model2",
            "r.io/n/dir/q8/x",
        ]);
        let root = Root::open(folder.path()).unwrap();
        let manifests = root.existing_directory(layout::MANIFESTS).unwrap();
        let found = |place: &str| {
            let mut found = files_named(&manifests, Path::new(place)).unwrap();
            found.sort();
            found.into_iter().map(|path| path.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for host in ["r.IO", "other"] {
            assert_eq!(found(&format!("{host}/N/mOdel/q8")), ["R.io/n/model/q8", "r.io/n/Model/Q8"]);
        }
        for absent in ["r.io/n/model/q4", "r.io/n/model2/q8", "r.io/n/dir/q8", "r.io/m/model/q8"] {
            assert_eq!(found(absent), [""; 0], "{absent}");
        }
    }

    #[test]
    fn tags_are_found_in_order_and_other_files_have_no_reference() {
        let folder = tree(&["r.io/library/b/latest", "r.io/library/a/8b", "stray", "r.io/library/a/x/y"]);
        let expected = [
            ("r.io/library/a/8b", true),
            ("r.io/library/a/x", true),
            ("r.io/library/b/latest", true),
            ("stray", false),
        ];
        let expected = expected.map(|(path, is_tag)| (path.to_owned(), is_tag));
        assert_eq!(visit(&NameTree::default(), &folder), expected);
    }

    #[test]
    fn changes_to_known_directories_are_seen() {
        let (folder, tree) = (tree(&["h/n/a/1", "h/n/b/1"]), NameTree::default());
        let paths = |tree| visit(tree, &folder).into_iter().map(|(path, _)| path).collect::<Vec<_>>();
        assert_eq!(paths(&tree), ["h/n/a/1", "h/n/b/1"]);
        let has_settled = || {
            let known = lock(&tree.known).clone().unwrap();
            let models = known.below[0].as_ref().unwrap().below[0].as_ref().unwrap();
            models.stamp.is_some() && models.below.iter().flatten().all(|model| model.stamp.is_some())
        };
        while !has_settled() {
            std::thread::sleep(std::time::Duration::from_millis(100));
            visit(&tree, &folder);
        }
        write(&folder, "h/n/a/2");
        write(&folder, "h/n/c/1");
        fs::remove_file(folder.path().join("manifests/h/n/b/1")).unwrap();
        assert_eq!(paths(&tree), ["h/n/a/1", "h/n/a/2", "h/n/c/1"]);
    }
}
