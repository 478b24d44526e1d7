//! Directories that Ollama makes beside its blobs while a sharded model is loaded, kept in memory.
//!
//! llama-server finds the other shards of a model by their names, and blobs have digests for names. So Ollama links the
//! shards under such names into a directory `.ollama-split-…` and removes it later. Nothing else can be made or removed in
//! the mount. The alternative, a manifest with one merged layer, would change the model's ID and need a file with a digest
//! that nobody has computed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::time::SystemTime;

use fuser::Errno;

use super::tree::{Node, Tree};

/// What the names of the directories start with.
const PREFIX: &str = ".ollama-split-";
/// Ollama makes one for each loaded model.
const MAX_DIRECTORIES: usize = 1000;
/// More than a model has shards.
const MAX_LINKS: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Aliases {
    by_name: BTreeMap<String, AliasDirectory>,
    last_inode: u64,
}

#[derive(Debug)]
pub(super) struct AliasDirectory {
    pub(super) inode: u64,
    pub(super) modified: SystemTime,
    /// The inodes of the linked files.
    pub(super) links: BTreeMap<String, u64>,
}

impl Aliases {
    /// The directory with this name, of those beside the blobs.
    pub(super) fn by_name(&self, name: &str) -> Option<&AliasDirectory> {
        self.by_name.get(name)
    }

    pub(super) fn by_inode(&self, inode: u64) -> Option<&AliasDirectory> {
        self.by_name.values().find(|directory| directory.inode == inode)
    }

    /// The names and inodes of all directories.
    pub(super) fn list(&self) -> impl Iterator<Item = (&String, u64)> {
        self.by_name.iter().map(|(name, directory)| (name, directory.inode))
    }

    pub(super) fn make(&mut self, tree: &Tree, parent: u64, name: &OsStr) -> Result<&AliasDirectory, Errno> {
        let name = name.to_str().filter(|name| name.starts_with(PREFIX)).ok_or(Errno::EROFS)?;
        if tree.ollama_blobs() != Some(parent) {
            return Err(Errno::EROFS);
        }
        if self.by_name.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        if self.by_name.len() >= MAX_DIRECTORIES {
            return Err(Errno::ENOSPC);
        }
        let is_free = |inode: &u64| tree.node(*inode).is_none();
        let inode =
            (self.last_inode.max(Tree::ROOT).saturating_add(1)..).find(is_free).ok_or(Errno::ENOSPC)?;
        self.last_inode = inode;
        let made = AliasDirectory { inode, modified: SystemTime::now(), links: BTreeMap::new() };
        Ok(self.by_name.entry(name.to_owned()).or_insert(made))
    }

    pub(super) fn remove(&mut self, tree: &Tree, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let known = name.to_str().filter(|_| tree.ollama_blobs() == Some(parent));
        let (name, directory) =
            known.and_then(|name| Some((name, self.by_name.get(name)?))).ok_or(Errno::EROFS)?;
        if !directory.links.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.by_name.remove(name);
        Ok(())
    }

    /// Gives a mounted file another name, in one of the directories.
    pub(super) fn link(&mut self, tree: &Tree, file: u64, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let directory = self.by_name.values_mut().find(|directory| directory.inode == parent);
        let directory = directory.ok_or(Errno::EROFS)?;
        let name = name.to_str().ok_or(Errno::EILSEQ)?;
        match tree.node(file) {
            Some(Node::File(_)) if directory.links.contains_key(name) => Err(Errno::EEXIST),
            Some(Node::File(_)) if directory.links.len() >= MAX_LINKS => Err(Errno::ENOSPC),
            Some(Node::File(_)) => {
                directory.links.insert(name.to_owned(), file);
                Ok(())
            }
            _ => Err(Errno::EPERM),
        }
    }

    pub(super) fn unlink(&mut self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let directory = self.by_name.values_mut().find(|directory| directory.inode == parent);
        let directory = directory.ok_or(Errno::EROFS)?;
        let removed = name.to_str().and_then(|name| directory.links.remove(name));
        removed.map(drop).ok_or(Errno::ENOENT)
    }
}
