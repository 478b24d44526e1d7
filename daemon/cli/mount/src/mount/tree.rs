//! The mounted tree as a value: names and nodes, computed from a list of models without I/O.
//!
//! An inode identifies content, not a name. The same layer under several names is one inode and is cached
//! once. If a tag is changed to another model, its file gets another inode, so that the kernel never serves
//! cached data of the previous model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use blobd_cli_common::model_folder::is_folder;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::layout;

use super::hub::{self, HUB, Snapshot};
use super::names::{self, MountedModel, OLLAMA_BLOBS, OLLAMA_MANIFESTS};
use super::router::{self, LM_STUDIO, MODELS};
use crate::{Digest, Reference};

#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// By inode.
    nodes: HashMap<u64, Node>,
}

#[derive(Clone, Debug)]
pub(crate) enum Node {
    Directory(Directory),
    File(File),
}

#[derive(Clone, Debug)]
pub(crate) struct Directory {
    /// The inode of the parent; the root's own inode for the root.
    pub parent: u64,
    pub entries: BTreeMap<Box<str>, Entry>,
    /// The time of the newest tag below it.
    pub modified: SystemTime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub inode: u64,
    pub is_directory: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct File {
    pub size: u64,
    /// The time of its oldest tag.
    pub modified: SystemTime,
    pub links: u32,
    pub content: Content,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// These bytes, such as a manifest.
    Bytes(Arc<[u8]>),
    /// The layer with this digest, in any of these models.
    Layer(Digest, Vec<LayerSource>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerSource {
    pub reference: Reference,
    pub manifest: Digest,
    pub component: Box<str>,
}

/// The inode of a file with this content, unless it collides with another.
pub(crate) fn inode(digest: Digest) -> u64 {
    number(&digest.to_string())
}

fn number(key: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *Digest::of(key.as_bytes()).as_bytes();
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// Assigns inode numbers. The same content or directory has the same number in each tree and, except for
/// collisions, in each mount.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    taken: HashMap<u64, Box<str>>,
}

impl Inodes {
    /// The number for a key, taken from its hash. If two keys collide, the later one gets the next number, so
    /// that the content of one layer is never served for another.
    fn number(&mut self, key: &str) -> u64 {
        let mut number = number(key);
        loop {
            // 0 is invalid, and 1 is the root.
            number = number.max(Tree::ROOT + 1);
            match self.taken.get(&number) {
                Some(other) if **other != *key => number = number.wrapping_add(1),
                Some(_) => return number,
                None => {
                    self.taken.insert(number, key.into());
                    return number;
                }
            }
        }
    }
}

impl Tree {
    /// The root's inode in FUSE.
    pub(crate) const ROOT: u64 = 1;

    /// If a file and a directory would have the same name, the directory gets it; of two files, the first. The other
    /// file has its [other name](names::NamedFile::other_name).
    pub(crate) fn build(models: &[MountedModel], inodes: &mut Inodes) -> Self {
        let mut builder = Builder { nodes: HashMap::new(), inodes };
        builder.nodes.insert(Self::ROOT, Node::Directory(Directory::new(Self::ROOT)));
        for path in [&OLLAMA_BLOBS[..], &OLLAMA_MANIFESTS, &[HUB], &MODELS, &LM_STUDIO] {
            builder.directory(path, UNIX_EPOCH);
        }
        for model in models {
            builder.directory(&names::ollama_directory(&model.reference), model.modified);
            builder.directory(&OLLAMA_BLOBS, model.modified);
            let has_files = [names::weights, names::companions]
                .iter()
                .any(|find| !find(model.reference.tag(), &model.contents).is_empty());
            if has_files {
                builder.directory(&names::directory(&model.reference), model.modified);
            }
        }
        for model in models {
            builder.add_ollama(model);
            builder.add_for_engines(model);
        }
        for snapshot in hub::snapshots(models) {
            builder.add_snapshot(&snapshot);
        }
        for model in models.iter().filter(|model| is_folder(&model.contents)) {
            for placed in names::folder(&model.reference, &model.contents) {
                builder.add_layer(&placed.directory, &placed.name, model, placed.file);
            }
        }
        for find in [names::weights, names::companions] {
            for model in models {
                for named in find(model.reference.tag(), &model.contents) {
                    let directory = names::directory(&model.reference);
                    if !builder.add_layer(&directory, &named.name, model, named.file) {
                        builder.add_layer(&directory, &named.other_name(), model, named.file);
                    }
                }
            }
        }
        Self { nodes: builder.nodes }
    }

    pub(crate) fn node(&self, inode: u64) -> Option<&Node> {
        self.nodes.get(&inode)
    }

    pub(crate) fn directory(&self, inode: u64) -> Option<&Directory> {
        match self.node(inode)? {
            Node::Directory(directory) => Some(directory),
            Node::File(_) => None,
        }
    }

    /// The directory of Ollama's blobs.
    pub(crate) fn ollama_blobs(&self) -> Option<u64> {
        OLLAMA_BLOBS
            .iter()
            .try_fold(Self::ROOT, |inode, name| Some(self.directory(inode)?.entries.get(*name)?.inode))
    }

    pub(crate) fn node_count(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// Each content counts once.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.nodes.values().fold(0, |sum, node| match node {
            Node::File(file) => file.size.saturating_add(sum),
            Node::Directory(_) => sum,
        })
    }
}

impl Directory {
    const fn new(parent: u64) -> Self {
        Self { parent, entries: BTreeMap::new(), modified: UNIX_EPOCH }
    }

    pub(crate) fn directory_count(&self) -> u32 {
        let count = self.entries.values().filter(|entry| entry.is_directory).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

struct Builder<'i> {
    nodes: HashMap<u64, Node>,
    inodes: &'i mut Inodes,
}

impl Builder<'_> {
    fn add_ollama(&mut self, model: &MountedModel) {
        let directory = names::ollama_directory(&model.reference);
        self.add_bytes(&directory, model.reference.tag(), model.manifest.raw(), model.modified);
        for layer in model.manifest.files() {
            self.add_layer(&OLLAMA_BLOBS, &layout::blob_name(layer.digest), model, layer);
        }
    }

    /// The model as a folder of its own, for engines that take a directory of those.
    fn add_for_engines(&mut self, model: &MountedModel) {
        let name = router::folder_name(&model.reference);
        let parents: [&[&str]; 2] = [&MODELS, &LM_STUDIO];
        for file in router::files(&name, &model.contents) {
            for parent in parents {
                let directory: Vec<&str> = parent.iter().copied().chain([name.as_str()]).collect();
                self.add_layer(&directory, &file.name, model, file.file);
            }
        }
    }

    fn add_snapshot(&mut self, snapshot: &Snapshot<'_>) {
        let top = |folders: &[&str]| {
            let parts = [HUB, &snapshot.repository].into_iter().chain(folders.iter().copied());
            parts.map(str::to_owned).collect::<Vec<_>>()
        };
        let main = snapshot.is_main.then_some("main");
        for revision in main.into_iter().chain(snapshot.revisions.iter().map(String::as_str)) {
            let (folders, name) = revision.rsplit_once('/').unwrap_or(("", revision));
            let folders = folders.split('/').filter(|folder| !folder.is_empty());
            let directory: Vec<&str> = std::iter::once("refs").chain(folders).collect();
            self.add_bytes(&top(&directory), name, snapshot.commit.as_bytes(), snapshot.modified);
        }
        let tree = format!("{}.json", snapshot.commit);
        self.add_bytes(&top(&["trees"]), &tree, &snapshot.tree(), snapshot.modified);
        let placed = snapshot.files.iter().map(|(path, file)| {
            let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
            let mut directory = top(&["snapshots", &snapshot.commit]);
            directory.extend(folders.split('/').filter(|folder| !folder.is_empty()).map(str::to_owned));
            (directory, name, *file)
        });
        let placed: Vec<_> = placed.collect();
        // A directory takes the name of a file.
        for (directory, ..) in &placed {
            self.directory(directory, snapshot.modified);
        }
        for (directory, name, (model, file)) in &placed {
            self.add_layer(directory, name, model, file);
        }
    }

    fn add_bytes(&mut self, directory: &[String], name: &str, bytes: &[u8], modified: SystemTime) -> bool {
        let content = Content::Bytes(bytes.into());
        let file = File { size: bytes.len() as u64, modified, links: 0, content };
        self.add(directory, name, Digest::of(bytes), file)
    }

    fn add_layer(
        &mut self,
        directory: &[impl AsRef<str>],
        name: &str,
        model: &MountedModel,
        layer: &Descriptor,
    ) -> bool {
        let source = LayerSource {
            reference: model.reference.clone(),
            manifest: model.manifest.digest(),
            component: layer.media_type.component().into(),
        };
        let content = Content::Layer(layer.digest, vec![source]);
        let file = File { size: layer.size, modified: model.modified, links: 0, content };
        self.add(directory, name, layer.digest, file)
    }

    /// Adds a name for a file if the name is free, and returns whether it was. A file with the same content gets the
    /// name as a link.
    fn add(&mut self, directory: &[impl AsRef<str>], name: &str, digest: Digest, file: File) -> bool {
        let inode = self.inodes.number(&digest.to_string());
        let parent = self.directory(directory, file.modified);
        let size = match self.nodes.get(&inode) {
            Some(Node::File(known)) => known.size,
            Some(Node::Directory(_)) => return false,
            None => file.size,
        };
        let Some(Node::Directory(parent)) = self.nodes.get_mut(&parent) else { return false };
        let is_taken = parent.entries.get(name).is_some_and(|entry| entry.inode != inode);
        // Two manifests that give a layer different sizes cannot both be correct.
        if is_taken || size != file.size {
            return false;
        }
        let is_new = parent.entries.insert(name.into(), Entry { inode, is_directory: false }).is_none();
        match self.nodes.entry(inode).or_insert_with(|| Node::File(file.clone())) {
            Node::File(known) => known.merge(file, is_new),
            Node::Directory(_) => {}
        }
        true
    }

    /// The inode of the directory with this path, which is created if it is missing.
    fn directory(&mut self, path: &[impl AsRef<str>], modified: SystemTime) -> u64 {
        let mut inode = Tree::ROOT;
        let mut whole = String::from("directory");
        self.touch(inode, modified);
        for name in path.iter().map(AsRef::as_ref) {
            whole.push('/');
            whole.push_str(name);
            let child = self.inodes.number(&whole);
            if let Some(Node::Directory(parent)) = self.nodes.get_mut(&inode) {
                parent.entries.insert(name.into(), Entry { inode: child, is_directory: true });
            }
            self.nodes.entry(child).or_insert_with(|| Node::Directory(Directory::new(inode)));
            self.touch(child, modified);
            inode = child;
        }
        inode
    }

    fn touch(&mut self, inode: u64, modified: SystemTime) {
        if let Some(Node::Directory(directory)) = self.nodes.get_mut(&inode) {
            directory.modified = directory.modified.max(modified);
        }
    }
}

impl File {
    fn merge(&mut self, other: Self, is_new_name: bool) {
        self.links = self.links.saturating_add(is_new_name.into());
        self.modified = self.modified.min(other.modified);
        if let (Content::Layer(_, known), Content::Layer(_, further)) = (&mut self.content, other.content) {
            for source in further {
                if !known.contains(&source) {
                    known.push(source);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
