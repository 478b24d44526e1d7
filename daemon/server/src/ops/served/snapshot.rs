//! The tags of a model as one repository of a hub: the files of all of them, or of one, with the paths that they have
//! there. The name of a commit follows from these, because a store keeps none. A repository that is passed through has the files
//! and the commit that it has at the hub.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use blobd_registry::{HubListing, TreeFile};
use blobd_store::Store;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_paths::{ListedFile, paths};
use blobd_store_format::git_id::GitId;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;
use blobd_store_format::source::HubFile as HubOriginFile;

use super::{View, present, signature};
use crate::ops::OpError;

/// The files of a revision, by their paths.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) files: BTreeMap<String, HubFile>,
    /// The commit at the hub, if it is known.
    commit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    pub(crate) content: HubContent,
    pub(crate) size: u64,
}

/// What a file of a repository is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HubContent {
    /// The file is stored outside of git.
    Digest(Digest),
    InGit(GitId),
}

impl HubContent {
    /// `None` if the list of files says neither.
    pub(crate) fn of_listed(file: &TreeFile) -> Option<Self> {
        file.digest.map(Self::Digest).or(file.git_id.map(Self::InGit))
    }
}

impl HubFile {
    pub(crate) const fn with_digest(digest: Digest, size: u64) -> Self {
        Self { content: HubContent::Digest(digest), size }
    }

    pub(crate) const fn digest(&self) -> Option<Digest> {
        match self.content {
            HubContent::Digest(digest) => Some(digest),
            HubContent::InGit(_) => None,
        }
    }

    /// What git stores of a file whose content is elsewhere (git-lfs, `docs/spec.md`).
    pub(crate) fn pointer(&self) -> Option<String> {
        let (digest, size) = (self.digest()?, self.size);
        Some(format!("version https://git-lfs.github.com/spec/v1\noid {digest}\nsize {size}\n"))
    }

    pub(crate) fn git_id(&self) -> GitId {
        match self.content {
            HubContent::InGit(id) => id,
            HubContent::Digest(_) => GitId::of(self.pointer().unwrap_or_default().as_bytes()),
        }
    }
}

impl Snapshot {
    /// The files of a model that may not be stored yet.
    pub(crate) fn of_files(tag: &Reference, files: &[(Descriptor, Option<String>)]) -> Self {
        let mut snapshot = Self::default();
        snapshot.add(tag, files);
        snapshot
    }

    /// The files of a repository at the hub.
    pub(crate) fn of_listing(listing: &HubListing) -> Self {
        let file = |file: &TreeFile| {
            Some((file.path.clone(), HubFile { content: HubContent::of_listed(file)?, size: file.size }))
        };
        Self { files: listing.files.iter().filter_map(file).collect(), commit: Some(listing.commit.clone()) }
    }

    fn add(&mut self, tag: &Reference, files: &[(Descriptor, Option<String>)]) {
        let listed = files.iter().map(|(file, name)| ListedFile {
            media_type: &file.media_type,
            name: name.as_deref(),
            digest: file.digest,
            extension: None,
        });
        let paths = paths(&format!("{}-{}", tag.model(), tag.tag()), &listed.collect::<Vec<_>>());
        for (path, (file, _)) in paths.into_iter().zip(files) {
            let file = HubFile::with_digest(file.digest, file.size);
            let is_taken = self.files.get(&path).is_some_and(|other| *other != file);
            let path = if is_taken { format!("{}/{path}", tag.tag()) } else { path };
            self.files.insert(path, file);
        }
    }

    /// 40 hexadecimal digits, as git's. If the hub's is not known, it is the same for the same files.
    pub(crate) fn commit(&self) -> String {
        if let Some(commit) = &self.commit {
            return commit.clone();
        }
        let mut listing = String::new();
        for (path, file) in &self.files {
            // Writing to a text does not fail.
            let _ = match file.content {
                HubContent::Digest(digest) => writeln!(listing, "{digest} {path}"),
                HubContent::InGit(id) => writeln!(listing, "{id} {path}"),
            };
        }
        let digest = Digest::of(listing.as_bytes()).to_hex();
        digest.get(..40).unwrap_or_default().to_owned()
    }
}

impl View {
    /// The tags of a repository: those of Hugging Face come first there.
    pub(crate) fn hub_tags(&self, store: &Store, repository: &str) -> Result<Vec<Reference>, OpError> {
        let tags = self.tags(store, repository, Some(blobd_store_format::host::HUGGING_FACE))?;
        if tags.is_empty() { self.tags(store, repository, None) } else { Ok(tags) }
    }

    /// The files of a revision: `main`, a tag, or a commit of one of these: the one that follows from the files, or the one at
    /// the hub that they came from.
    pub(crate) fn snapshot(
        &self,
        store: &Store,
        tags: &[Reference],
        revision: &str,
    ) -> Result<Option<Snapshot>, OpError> {
        let revision = ["refs/heads/", "refs/tags/"]
            .iter()
            .find_map(|start| revision.strip_prefix(start))
            .unwrap_or(revision);
        let all = snapshot(store, tags)?;
        if revision == "main" || all.commit() == revision {
            return Ok(Some(all));
        }
        let is_of_commit = |tag: &&Reference| {
            let origin = present(store.names().manifest(tag)).ok().flatten();
            origin
                .and_then(|manifest| hub_file(store, tag, manifest.digest()))
                .is_some_and(|file| file.revision() == revision)
        };
        let of_commit: Vec<Reference> = tags.iter().filter(is_of_commit).cloned().collect();
        if !of_commit.is_empty() {
            return snapshot(store, &of_commit).map(Some);
        }
        for tag in tags {
            let own = snapshot(store, std::slice::from_ref(tag))?;
            if tag.tag().eq_ignore_ascii_case(revision) || own.commit() == revision {
                return Ok(Some(own));
            }
        }
        Ok(None)
    }
}

/// The file at the hub that a tag's model came from. Its path is that of the only weights without a name of their own.
fn hub_file(store: &Store, tag: &Reference, manifest: Digest) -> Option<HubOriginFile> {
    let origin = store.names().name_origin(tag, manifest).origin?;
    Origin::parse(&origin)?.hub_file().cloned()
}

fn snapshot(store: &Store, tags: &[Reference]) -> Result<Snapshot, OpError> {
    let mut snapshot = Snapshot::default();
    for tag in tags {
        let Some(model) = present(store.names().model(tag))? else { continue };
        let mut contents = model.contents()?;
        // It describes the model to a registry.
        contents.retain(|named| named.file.descriptor.digest != model.manifest.config().digest);
        let mut files: Vec<_> =
            contents.into_iter().map(|named| (named.file.descriptor, named.name)).collect();
        let mut unnamed =
            files.iter_mut().filter(|(file, name)| name.is_none() && file.media_type.holds_tensors());
        if let (Some((_, name)), None) = (unnamed.next(), unnamed.next()) {
            *name = hub_file(store, tag, model.manifest.digest()).map(|file| file.path().to_owned());
        }
        snapshot.add(tag, &files);
    }
    if let Some(signature) = signature::of_repository(store, tags)? {
        let file = HubFile::with_digest(signature.digest, signature.size);
        snapshot.files.entry(Bundle::FILE_NAME.to_owned()).or_insert(file);
    }
    Ok(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointer_and_its_name_are_those_of_git_lfs() {
        let file = HubFile::with_digest(Digest::of(b"hello\n"), 6);
        let pointer = "version https://git-lfs.github.com/spec/v1\n\
            oid sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03\nsize 6\n";
        assert_eq!(file.pointer().as_deref(), Some(pointer));
        assert_eq!(file.git_id(), GitId::of(pointer.as_bytes()));
    }

    #[test]
    fn commit_follows_from_the_files() {
        let with = |path: &str, content: &[u8]| {
            let file = HubFile::with_digest(Digest::of(content), 1);
            Snapshot { files: [(path.to_owned(), file)].into(), commit: None }.commit()
        };
        assert_eq!(with("a", b"x"), with("a", b"x"));
        assert_ne!(with("a", b"x"), with("b", b"x"));
        assert_ne!(with("a", b"x"), with("a", b"y"));
        assert!(with("a", b"x").len() == 40);
    }
}
