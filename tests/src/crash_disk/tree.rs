//! The current and the durable version of each directory and file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// The number of a file or directory.
pub(super) type Id = usize;

/// All files and directories that ever existed, by number. The first is the root.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    shadow: PathBuf,
    nodes: Vec<Node>,
}

#[derive(Debug)]
pub(super) enum Node {
    /// For each name the nodes that it has stood for since the last sync: the durable one first, the current
    /// one last.
    Dir(BTreeMap<OsString, Vec<Option<Id>>>),
    File(FileNode),
}

#[derive(Debug)]
pub(super) struct FileNode {
    pub(super) content: Content,
    pub(super) mode: u32,
    pub(super) durable_mode: u32,
}

/// The durable part of a file's content.
#[derive(Debug)]
pub(super) enum Content {
    /// The current content.
    All,
    /// The content before the first write since the last sync.
    Older(Vec<u8>),
    /// Nothing: it was never synced.
    Nothing,
}

impl Tree {
    /// The tree of a directory in which everything is durable.
    pub(super) fn adopt(root: &Path, shadow: &Path) -> Self {
        let nodes = vec![Node::Dir(BTreeMap::new())];
        let mut tree = Self { root: root.to_path_buf(), shadow: shadow.to_path_buf(), nodes };
        // A file that a crash has left with two names is one file.
        let mut files: BTreeMap<u64, PathBuf> = BTreeMap::new();
        let mut unvisited = vec![root.to_path_buf()];
        while let Some(directory) = unvisited.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let relative = path.strip_prefix(root).unwrap();
                if relative == Path::new("lock") {
                    // It is not written through the disk, and is never opened if it has a second name.
                } else if path.is_dir() {
                    tree.dir_created(relative);
                    unvisited.push(path);
                } else if let Some(first) = files.get(&fs::metadata(&path).unwrap().ino()) {
                    tree.name(relative, tree.find(first));
                } else {
                    tree.file_created(relative);
                    files.insert(fs::metadata(&path).unwrap().ino(), relative.to_path_buf());
                }
            }
        }
        tree.all_synced();
        tree
    }

    pub(super) fn node(&self, id: Id) -> &Node {
        &self.nodes[id]
    }

    /// The path of a file's content, even if the file has no name any more.
    pub(super) fn shadow(&self, id: Id) -> PathBuf {
        self.shadow.join(id.to_string())
    }

    pub(super) fn dir_created(&mut self, path: &Path) {
        let id = self.add(Node::Dir(BTreeMap::new()));
        self.name(path, Some(id));
    }

    /// Records a new file.
    pub(super) fn file_created(&mut self, path: &Path) {
        if self.find(path).is_some() {
            return;
        }
        let full = self.root.join(path);
        let mode = fs::metadata(&full).unwrap().permissions().mode() & 0o7777;
        let id = self.add(Node::File(FileNode { content: Content::Nothing, mode, durable_mode: mode }));
        fs::hard_link(full, self.shadow(id)).unwrap();
        self.name(path, Some(id));
    }

    /// The number of a file's names in the store.
    pub(super) fn names_of(&self, path: &Path) -> usize {
        let Some(id) = self.find(path) else { return 0 };
        let names = |node: &Node| match node {
            Node::Dir(names) => names.values().filter(|versions| versions.last() == Some(&Some(id))).count(),
            Node::File(_) => 0,
        };
        self.nodes.iter().map(names).sum()
    }

    /// Keeps the durable content of a file before it is overwritten.
    pub(super) fn about_to_write(&mut self, path: &Path) {
        let Some(id) = self.find(path) else { return };
        let shadow = self.shadow(id);
        if let Node::File(file) = &mut self.nodes[id]
            && matches!(file.content, Content::All)
        {
            file.content = Content::Older(fs::read(shadow).unwrap());
        }
    }

    pub(super) fn mode_set(&mut self, path: &Path, mode: u32) {
        if let Some(Node::File(file)) = self.find(path).map(|id| &mut self.nodes[id]) {
            file.mode = mode;
        }
    }

    /// Records that a file was renamed.
    pub(super) fn renamed(&mut self, from: &Path, to: &Path) {
        let id = self.find(from);
        self.name(from, None);
        self.name(to, id);
    }

    pub(super) fn removed(&mut self, path: &Path) {
        self.name(path, None);
    }

    pub(super) fn file_synced(&mut self, path: &Path) {
        if let Some(id) = self.find(path) {
            sync_content(&mut self.nodes[id]);
        }
    }

    pub(super) fn dir_synced(&mut self, path: &Path) {
        if let Some(id) = self.find(path) {
            sync_names(&mut self.nodes[id]);
        }
    }

    pub(super) fn all_synced(&mut self) {
        for node in &mut self.nodes {
            sync_content(node);
            sync_names(node);
        }
    }

    fn add(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Records that a name stands for another node from now on.
    fn name(&mut self, path: &Path, id: Option<Id>) {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return };
        let Some(directory) = self.find(above) else { return };
        if let Node::Dir(names) = &mut self.nodes[directory] {
            names.entry(name.to_owned()).or_insert_with(|| vec![None]).push(id);
        }
    }

    /// The node that a path below the root currently stands for.
    fn find(&self, path: &Path) -> Option<Id> {
        path.iter().try_fold(0, |directory, name| {
            let Node::Dir(names) = &self.nodes[directory] else { return None };
            names.get(name)?.last().copied().flatten()
        })
    }
}

fn sync_content(node: &mut Node) {
    if let Node::File(file) = node {
        file.content = Content::All;
        file.durable_mode = file.mode;
    }
}

fn sync_names(node: &mut Node) {
    if let Node::Dir(names) = node {
        names.retain(|_, versions| {
            versions.drain(..versions.len() - 1);
            versions.last().is_some_and(Option::is_some)
        });
    }
}
