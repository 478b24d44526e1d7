//! The files of a store, which links may not lead out of.
//!
//! The store may belong to somebody else. A link in it that leads to another folder would let its owner have any file read
//! that the caller may read, so such a link is followed only if the caller allows it.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::found_model::Problem;
use crate::local_folder::{Identity, Links, file_without_links};

/// Where the links of a store may lead.
#[derive(Debug)]
pub(super) struct Boundary {
    /// Without links.
    folders: Vec<PathBuf>,
    links: Links,
}

impl Boundary {
    /// The store in `folder`.
    ///
    /// # Errors
    /// When the folder is not there.
    pub(super) fn new(folder: &Path, links: Links) -> io::Result<Self> {
        Ok(Self { folders: vec![fs::canonicalize(folder)?], links })
    }

    /// Lets links lead to another folder, if that exists.
    pub(super) fn with(mut self, folder: &Path) -> Self {
        self.folders.extend(fs::canonicalize(folder).ok());
        self
    }

    pub(super) fn follows_all(&self) -> bool {
        self.links == Links::Everywhere
    }

    /// Checks a folder of the store, or the one behind the links there.
    pub(super) fn folder(&self, path: &Path) -> Result<(), Problem> {
        let found = fs::canonicalize(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => missing_content(path),
            _ => Problem::unreadable(path)(error),
        })?;
        match self.follows_all() || self.folders.iter().any(|folder| found.starts_with(folder)) {
            true => Ok(()),
            false => Err(folder_leads_out(path)),
        }
    }

    /// The regular file at a path of the store, or behind the links there, by its path without links.
    pub(super) fn file(&self, path: &Path) -> Result<(PathBuf, Identity), Problem> {
        let source = fs::canonicalize(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => missing_content(path),
            _ => Problem::unreadable(path)(error),
        })?;
        if !self.follows_all() && !self.folders.iter().any(|folder| source.starts_with(folder)) {
            return Err(leads_out(path));
        }
        let identity = file_without_links(&source).map_err(Problem::unreadable(&source))?;
        identity.map(|identity| (source.clone(), identity)).ok_or_else(|| {
            let link = if path.is_symlink() { "a link to " } else { "" };
            let found = if source.is_dir() { "a folder" } else { "a pipe, a socket or a device" };
            Problem::new(path, format!("wrong kind of file: expected a regular file, found {link}{found}"))
        })
    }
}

/// The problem of a link to a folder that is not followed.
fn folder_leads_out(path: &Path) -> Problem {
    let what = "wrong link: expected a folder of the store, found a link to a folder outside of it";
    Problem::new(path, what).with_hint("`--follow` follows links that lead out of a store")
}

/// The problem of a link that is not followed.
pub(super) fn leads_out(path: &Path) -> Problem {
    let what = "wrong link: expected a file of the store, found a link to a file outside of it";
    Problem::new(path, what).with_hint("`--follow` follows links that lead out of a store")
}

/// The problem of a file that does not exist, or of a link to one. Repositories that were copied out of their cache have such
/// links.
fn missing_content(path: &Path) -> Problem {
    /// A snapshot links to the repository's blobs, which link to those of the cache.
    const MAX_LINKS: usize = 8;
    let mut place = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&place) else { break };
        place = without_dots(&place.parent().unwrap_or(Path::new("/")).join(target));
    }
    if place == path {
        return Problem::new(path, "is missing: expected a file");
    }
    let what = format!("its content is missing: expected the file {}", place.display());
    let hint = "if the folder was copied from a cache, import that cache, or download the model again";
    Problem::new(path, what).with_hint(hint)
}

/// A path without `.` and `..`.
fn without_dots(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_out_of_the_store_are_followed_only_on_request() {
        let place = tempfile::tempdir().unwrap();
        let (store, other) = (place.path().join("store"), place.path().join("other"));
        fs::create_dir(&store).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(store.join("own"), "own").unwrap();
        fs::write(other.join("file"), "other").unwrap();
        symlink("own", store.join("inside")).unwrap();
        symlink("../other/file", store.join("out")).unwrap();
        symlink("../nowhere", store.join("dangling")).unwrap();
        symlink(".", store.join("folder")).unwrap();
        let inside = Boundary::new(&store, Links::Inside).unwrap();
        assert!(inside.file(&store.join("inside")).unwrap().0.ends_with("store/own"));
        let refused = |name: &str| inside.file(&store.join(name)).unwrap_err().error();
        assert!(refused("out").message.contains("outside of it"), "{}", refused("out"));
        assert!(refused("out").hint.is_some_and(|hint| hint.contains("--follow")));
        assert!(refused("dangling").message.ends_with("/nowhere"), "{}", refused("dangling"));
        assert!(refused("folder").message.ends_with("found a link to a folder"), "{}", refused("folder"));
        let all = Boundary::new(&store, Links::Everywhere).unwrap();
        assert!(all.file(&store.join("out")).unwrap().0.ends_with("other/file"));
        let with = Boundary::new(&store, Links::Inside).unwrap().with(&other);
        assert!(with.file(&store.join("out")).is_ok());
    }
}
