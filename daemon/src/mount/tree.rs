//! The mounted tree as a value: names and nodes, made from a list of models. It reads nothing.
//!
//! A file's inode stands for its content, not for its name: the same layer under several names is
//! one inode and therefore cached once, and a tag that comes to name another model gets another
//! inode, so that what the kernel has cached of the first is never shown for the second.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::names::{self, OLLAMA_BLOBS, OLLAMA_MANIFESTS};

/// A model as it is mounted.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    /// Its tag.
    pub reference: Reference,
    /// What its registry says about it.
    pub manifest: Arc<Manifest>,
    /// When the tag was last set.
    pub modified: SystemTime,
}

/// All directories and files by inode.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: HashMap<u64, Node>,
}

/// A directory or a file.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    /// A directory.
    Directory(Directory),
    /// A regular file.
    File(File),
}

/// A directory.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    /// The directory that it is in; the root is in itself.
    pub parent: u64,
    /// What is in it, by name.
    pub entries: BTreeMap<Box<str>, Entry>,
    /// When the newest model below it was last set.
    pub modified: SystemTime,
}

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// What it names.
    pub inode: u64,
    /// Whether that is a directory.
    pub is_directory: bool,
}

/// A regular file.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// Its length in bytes.
    pub size: u64,
    /// When the first of the tags that lead to it was last set.
    pub modified: SystemTime,
    /// How many names it has.
    pub links: u32,
    /// Where its bytes come from.
    pub content: Content,
}

/// Where a file's bytes come from.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// It is a manifest, which is here.
    Manifest(Arc<Manifest>),
    /// It is a layer with this digest of any of these models.
    Layer(Digest, Vec<LayerSource>),
}

/// A model that has a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerSource {
    /// The model.
    pub reference: Reference,
    /// The digest of its manifest.
    pub manifest: Digest,
    /// The part that the layer plays in it.
    pub component: Box<str>,
}

/// Numbers that stay the same for the same content and the same directory, from one tree to the
/// next and, but for collisions, from one mount to the next.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    taken: HashMap<u64, Box<str>>,
}

impl Inodes {
    /// The number of what this key describes. Of two keys that want the same number, the later gets
    /// the next one: nobody can have one layer's bytes shown for another's.
    fn number(&mut self, key: &str) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = *Digest::of(key.as_bytes()).as_bytes();
        let mut number = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        loop {
            // 0 is nothing and 1 is the root.
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
    /// The root's inode, as FUSE has it.
    pub(crate) const ROOT: u64 = 1;

    /// The tree of these models. Where a file and a directory would have the same name, the
    /// directory has it; of two files, the first.
    #[must_use]
    pub(crate) fn build(models: &[Listed], inodes: &mut Inodes) -> Self {
        let mut builder = Builder { nodes: HashMap::new(), inodes };
        builder.nodes.insert(Self::ROOT, Node::Directory(Directory::new(Self::ROOT)));
        for path in [&OLLAMA_BLOBS, &OLLAMA_MANIFESTS] {
            builder.directory(path, UNIX_EPOCH);
        }
        for model in models {
            builder.directory(&names::ollama_directory(&model.reference), model.modified);
            builder.directory(&OLLAMA_BLOBS, model.modified);
            let has_files = [names::weights, names::companions]
                .iter()
                .any(|find| !find(model.reference.tag(), &model.manifest).is_empty());
            if has_files {
                builder.directory(&names::directory(&model.reference), model.modified);
            }
        }
        for model in models {
            builder.add_ollama(model);
        }
        for find in [names::weights, names::companions] {
            for model in models {
                for named in find(model.reference.tag(), &model.manifest) {
                    builder.add_layer(&names::directory(&model.reference), &named.name, model, named.file);
                }
            }
        }
        Self { nodes: builder.nodes }
    }

    /// What has this inode.
    #[must_use]
    pub(crate) fn node(&self, inode: u64) -> Option<&Node> {
        self.nodes.get(&inode)
    }

    /// The directory with this inode.
    #[must_use]
    pub(crate) fn directory(&self, inode: u64) -> Option<&Directory> {
        match self.node(inode)? {
            Node::Directory(directory) => Some(directory),
            Node::File(_) => None,
        }
    }

    /// How many nodes there are.
    #[must_use]
    pub(crate) fn node_count(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// The length of all files, each content once.
    #[must_use]
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

    /// How many directories are in it.
    #[must_use]
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
    fn add_ollama(&mut self, model: &Listed) {
        let manifest = &model.manifest;
        let file = File {
            size: manifest.raw().len() as u64,
            modified: model.modified,
            links: 0,
            content: Content::Manifest(Arc::clone(manifest)),
        };
        let directory = names::ollama_directory(&model.reference);
        self.add(&directory, model.reference.tag(), manifest.digest(), file);
        for layer in manifest.files() {
            self.add_layer(&OLLAMA_BLOBS, &layout::blob_name(layer.digest), model, layer);
        }
    }

    fn add_layer(&mut self, directory: &[&str], name: &str, model: &Listed, layer: &Descriptor) {
        let source = LayerSource {
            reference: model.reference.clone(),
            manifest: model.manifest.digest(),
            component: layer.media_type.component().into(),
        };
        let content = Content::Layer(layer.digest, vec![source]);
        let file = File { size: layer.size, modified: model.modified, links: 0, content };
        self.add(directory, name, layer.digest, file);
    }

    /// Gives a file a name, if that is free, and what is known of it to the one that has its content.
    fn add(&mut self, directory: &[&str], name: &str, digest: Digest, file: File) {
        let inode = self.inodes.number(&digest.to_string());
        let parent = self.directory(directory, file.modified);
        let size = match self.nodes.get(&inode) {
            Some(Node::File(known)) => known.size,
            Some(Node::Directory(_)) => return,
            None => file.size,
        };
        let Some(Node::Directory(parent)) = self.nodes.get_mut(&parent) else { return };
        let is_taken = parent.entries.get(name).is_some_and(|entry| entry.inode != inode);
        // Manifests that contradict each other about a layer's size are not both right.
        if is_taken || size != file.size {
            return;
        }
        let is_new = parent.entries.insert(name.into(), Entry { inode, is_directory: false }).is_none();
        match self.nodes.entry(inode).or_insert_with(|| Node::File(file.clone())) {
            Node::File(known) => known.merge(file, is_new),
            Node::Directory(_) => {}
        }
    }

    /// The directory with this path, made if it is not there.
    fn directory(&mut self, path: &[&str], modified: SystemTime) -> u64 {
        let mut inode = Tree::ROOT;
        let mut whole = String::from("directory");
        self.touch(inode, modified);
        for name in path {
            whole.push('/');
            whole.push_str(name);
            let child = self.inodes.number(&whole);
            if let Some(Node::Directory(parent)) = self.nodes.get_mut(&inode) {
                parent.entries.insert((*name).into(), Entry { inode: child, is_directory: true });
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
    /// Adds what a further name knows of the same content.
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
