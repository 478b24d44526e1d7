//! The hub tree: models that came from Hugging Face, as the `huggingface_hub` library keeps them in its cache.
//!
//! Models of one repository and commit make one snapshot. Where no commit is recorded, the snapshot has a made-up name of
//! the same form, which depends on the manifests of its models: huggingface_hub then finds it by the branch `main`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use blobd_store_format::derived_name::name_part;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::git_id::GitId;
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::origin::Origin;
use blobd_store_format::repository::RepositoryFiles;
use blobd_store_format::source::{HubFile, PullSource};
use serde_json::json;

use super::names::MountedModel;
use crate::{Digest, Reference};

/// The directory with the layout of the hub's cache.
pub(super) const HUB: &str = "hub";

/// The hexadecimal digits of a commit.
const COMMIT_DIGITS: usize = 40;
/// The digits of a commit in the tag of an imported model.
const TAG_DIGITS: usize = 12;

/// A repository at one commit, with the files of its stored models.
#[derive(Debug)]
pub(super) struct Snapshot<'m> {
    /// `models--ORG--NAME`.
    pub(super) repository: String,
    pub(super) commit: String,
    /// Whether `main` is this commit: it has the model with the repository's own name, or else the one that was set last.
    pub(super) is_main: bool,
    /// The other branches, tags and pull requests that are this commit, by the names of its models.
    pub(super) revisions: BTreeSet<String>,
    pub(super) modified: SystemTime,
    name_rank: u8,
    /// The key is the file's path in the repository.
    pub(super) files: BTreeMap<String, (&'m MountedModel, &'m Descriptor)>,
}

/// The snapshots of all repositories.
pub(super) fn snapshots(models: &[MountedModel]) -> Vec<Snapshot<'_>> {
    let mut repositories: BTreeMap<String, BTreeMap<Option<String>, Vec<&MountedModel>>> = BTreeMap::new();
    for model in models {
        if let Some(place) = model.origin.as_deref().and_then(HubCommit::parse) {
            let commits = repositories.entry(place.repository).or_default();
            commits.entry(place.commit).or_default().push(model);
        }
    }
    repositories.into_iter().flat_map(|(repository, commits)| of_repository(&repository, commits)).collect()
}

fn of_repository<'m>(
    repository: &str,
    commits: BTreeMap<Option<String>, Vec<&'m MountedModel>>,
) -> Vec<Snapshot<'m>> {
    let snapshots = commits.into_iter().map(|(commit, models)| Snapshot::new(repository, commit, models));
    let mut snapshots: Vec<_> = snapshots.collect();
    if let Some(main) = snapshots.iter_mut().max_by_key(|snapshot| (snapshot.name_rank, snapshot.modified)) {
        main.is_main = true;
    }
    // A revision of several models that was not updated for each of them is what was set last.
    let mut newest: Vec<&mut Snapshot<'_>> = snapshots.iter_mut().collect();
    newest.sort_by_key(|snapshot| Reverse(snapshot.modified));
    let mut seen = BTreeSet::new();
    for snapshot in newest {
        snapshot.revisions.retain(|revision| seen.insert(revision.clone()));
    }
    snapshots
}

/// The revision that a model of a commit has in its name, as pulls and imports give it: behind the tag of a GGUF file, or as
/// the tag. Its name cannot have the `/` that it has at the hub; only those of pull requests are known.
fn revision(model: &MountedModel, commit: &str) -> Option<String> {
    let origin = Origin::parse(model.origin.as_deref()?)?;
    let file = origin.hub_file()?;
    repository(&model.reference).filter(|repository| repository == file.repository())?;
    let tag = model.reference.tag();
    let revision = match FileFormat::GGUF.stem_of(file.path()) {
        None => tag,
        Some(stem) => {
            let listed = RepositoryFiles::new([file.path()]).all_models();
            let behind = |part: &str| tag.strip_prefix(part)?.strip_prefix('-');
            behind(&listed.first()?.tag).or_else(|| behind(&name_part(&stem.replace('/', "-"))))?
        }
    };
    let is_digits = commit.get(..TAG_DIGITS) == Some(revision);
    let others = [Reference::DEFAULT_TAG, HubFile::DEFAULT_REVISION, "refs", ""];
    let is_one = !is_digits && !others.contains(&revision);
    is_one.then(|| match revision.strip_prefix("refs-pr-") {
        Some(number) => format!("refs/pr/{number}"),
        None => revision.to_owned(),
    })
}

/// How much a name says that it is what `main` was: it is the repository's own, then it is not one of another commit, which
/// imports give the first digits of that commit, then it is any.
fn name_rank(name: &Reference, commit: Option<&str>) -> u8 {
    if repository(name).is_none() {
        return 0;
    }
    let digits = commit.and_then(|commit| commit.get(..TAG_DIGITS));
    match digits.is_some_and(|digits| name.tag().ends_with(digits)) {
        true => 0,
        false if name.tag() == Reference::DEFAULT_TAG => 2,
        false => 1,
    }
}

/// The repository of the hub that a model is from, and its commit if the origin names one.
#[derive(Debug, PartialEq, Eq)]
struct HubCommit {
    repository: String,
    commit: Option<String>,
}

impl HubCommit {
    /// `None` if the origin is not the hub.
    fn parse(origin: &str) -> Option<Self> {
        let source = source(origin)?;
        let (repository, commit) = match &source {
            PullSource::Hub(file) => (file.repository().to_owned(), is_commit(file.revision())),
            PullSource::Registry(reference) => (repository(reference)?, None),
            PullSource::Url(_) => return None,
        };
        let commit = commit.map(str::to_owned);
        Some(Self { repository: format!("models--{}", repository.replace('/', "--")), commit })
    }
}

fn source(origin: &str) -> Option<PullSource> {
    match Origin::parse(origin)? {
        Origin::Copy(source) | Origin::Source(source) => Some(source),
        _ => None,
    }
}

fn is_commit(revision: &str) -> Option<&str> {
    let is_commit = revision.len() == COMMIT_DIGITS && revision.chars().all(|c| c.is_ascii_hexdigit());
    is_commit.then_some(revision)
}

/// The repository with this name at the hub.
fn repository(reference: &Reference) -> Option<String> {
    let is_hub = [HubFile::HOST, HubFile::API_HOST].contains(&reference.host());
    is_hub.then(|| reference.repository())
}

impl<'m> Snapshot<'m> {
    fn new(repository: &str, commit: Option<String>, mut models: Vec<&'m MountedModel>) -> Self {
        // If two models have a file of the same path, that of the model whose name was set last is shown.
        models.sort_by_key(|model| Reverse(model.modified));
        let mut files = BTreeMap::new();
        for model in &models {
            for (path, file) in paths(model) {
                files.entry(path).or_insert((*model, file));
            }
        }
        let revisions =
            models.iter().filter_map(|model| commit.as_deref().and_then(|commit| revision(model, commit)));
        let ranks = models.iter().map(|model| name_rank(&model.reference, commit.as_deref()));
        Self {
            repository: repository.to_owned(),
            name_rank: ranks.max().unwrap_or_default(),
            revisions: revisions.collect(),
            commit: commit.unwrap_or_else(|| made_up_commit(&models)),
            is_main: false,
            modified: models.first().map_or(SystemTime::UNIX_EPOCH, |model| model.modified),
            files,
        }
    }

    /// The content of `trees/COMMIT.json`. Every file is described as if it were stored by Git LFS, because only such
    /// entries have a SHA-256.
    pub(super) fn tree(&self) -> Vec<u8> {
        let entry = |(path, (_, file)): (&String, &(_, &Descriptor))| {
            let entry = json!({
                "size": file.size,
                "blob_id": pointer_id(file),
                "lfs_sha256": file.digest.to_hex(),
                "lfs_size": file.size,
                "xet_hash": null,
            });
            (path.clone(), entry)
        };
        let files: serde_json::Map<_, _> = self.files.iter().map(entry).collect();
        json!({ "format_version": 1, "files": files }).to_string().into_bytes()
    }
}

/// The first digits of the manifest's digest; of several models, of a digest of all.
fn made_up_commit(models: &[&MountedModel]) -> String {
    let mut digests: Vec<String> = models.iter().map(|model| model.manifest.digest().to_hex()).collect();
    digests.sort();
    let digest = match &*digests {
        [only] => only.clone(),
        several => Digest::of(several.concat().as_bytes()).to_hex(),
    };
    digest.chars().take(COMMIT_DIGITS).collect()
}

/// The name that Git gives to the file's pointer.
fn pointer_id(file: &Descriptor) -> String {
    let (digest, size) = (file.digest.to_hex(), file.size);
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n");
    GitId::of(pointer.as_bytes()).to_string()
}

/// The files with the paths that they have in the repository. Weights without a recorded path have that of the model's origin,
/// or the name that is usual there; other files without one are not from the repository.
fn paths(model: &MountedModel) -> Vec<(String, &Descriptor)> {
    let files = || model.contents.files().zip(model.contents.names()).skip(1);
    let own =
        files().filter_map(|(file, name)| Some((name.filter(|name| is_file_name(name))?.to_owned(), file)));
    let subject = model.reference.model();
    let subject = subject.strip_suffix("-GGUF").or_else(|| subject.strip_suffix("-gguf")).unwrap_or(subject);
    let unnamed: Vec<_> =
        files().filter(|(file, name)| name.is_none() && file.media_type.holds_tensors()).collect();
    let listed = unnamed.iter().map(|(file, _)| ListedFile {
        media_type: &file.media_type,
        name: None,
        digest: file.digest,
        extension: FileFormat::announced(&file.media_type, None).map(FileFormat::extension),
    });
    let origin = model.origin.as_deref().and_then(Origin::parse);
    let made = match (&*unnamed, origin.as_ref().and_then(Origin::hub_file)) {
        ([_], Some(file)) => vec![file.path().to_owned()],
        _ => file_paths::names(&format!("{subject}-{}", model.reference.tag()), &listed.collect::<Vec<_>>()),
    };
    own.chain(made.into_iter().zip(unnamed.iter().map(|(file, _)| *file))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use blobd_store_format::descriptor::MediaType;
    use blobd_store_format::manifest::Manifest;

    use super::*;

    const COMMIT: &str = "0123456789012345678901234567890123456789";

    fn model(name: &str, origin: &str, day: u64, files: &[(&str, Option<&str>, &str)]) -> MountedModel {
        let descriptor = |media_type: &str, content: &str| Descriptor {
            media_type: MediaType::new(media_type),
            digest: Digest::of(content.as_bytes()),
            size: content.len() as u64,
        };
        let layers = files
            .iter()
            .map(|(media_type, name, content)| (descriptor(media_type, content), name.map(str::to_owned)));
        let config = descriptor(MediaType::DOCKER_CONFIG, "{}");
        let manifest = Arc::new(Manifest::compose_named(config, layers.collect()).unwrap());
        MountedModel {
            reference: name.parse().unwrap(),
            contents: Arc::clone(&manifest),
            manifest,
            origin: Some(origin.to_owned()),
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(day),
        }
    }

    fn folder(name: &str, origin: &str, day: u64, content: &str) -> MountedModel {
        let files = [
            (MediaType::PACK_SAFETENSORS, Some("model.safetensors"), content),
            (MediaType::OLLAMA_JSON, Some("config.json"), "{}"),
            (MediaType::OLLAMA_JSON, Some(".hidden/x.json"), "[]"),
        ];
        model(name, origin, day, &files)
    }

    #[test]
    fn place_is_read_from_the_origin() {
        let place = |origin| HubCommit::parse(origin).map(|place| (place.repository, place.commit));
        let found =
            |repository: &str, commit: Option<&str>| Some((repository.to_owned(), commit.map(str::to_owned)));
        assert_eq!(place("copy hf.co/me/tiny:latest"), found("models--me--tiny", None));
        assert_eq!(place("hf.co/me/tiny-GGUF:Q4_K_M"), found("models--me--tiny-GGUF", None));
        let file = format!("https://huggingface.co/me/tiny/resolve/{COMMIT}/a.gguf");
        assert_eq!(place(&file), found("models--me--tiny", Some(COMMIT)));
        assert_eq!(place("copy hf.co/gpt2:latest in huggingface"), found("models--gpt2", None));
        let file = format!("copy https://huggingface.co/gpt2/resolve/{COMMIT}/model.safetensors");
        assert_eq!(place(&file), found("models--gpt2", Some(COMMIT)));
        let branch = "https://huggingface.co/me/tiny/resolve/main/a.gguf";
        assert_eq!(place(branch), found("models--me--tiny", None));
        for other in ["import tiny", "registry.ollama.ai/library/llama3:8b", "ghcr.io/me/tiny:1", ""] {
            assert_eq!(place(other), None, "{other}");
        }
    }

    #[test]
    fn snapshot_has_the_paths_of_the_repository() {
        let models =
            [folder("hf.co/me/tiny", "copy hf.co/me/tiny", 1, "w"), folder("mine", "import mine", 1, "w")];
        let [only] = snapshots(&models).try_into().unwrap();
        assert_eq!((only.repository.as_str(), only.is_main), ("models--me--tiny", true));
        assert_eq!(only.commit, models[0].manifest.digest().to_hex()[..40]);
        let paths: Vec<&String> = only.files.keys().collect();
        assert_eq!(paths, [".hidden/x.json", "config.json", "model.safetensors"]);
        let tree: serde_json::Value = serde_json::from_slice(&only.tree()).unwrap();
        assert_eq!(tree["files"]["config.json"]["lfs_sha256"], Digest::of(b"{}").to_hex());
        assert_eq!(tree["files"]["config.json"]["blob_id"].as_str().unwrap().len(), 40);
    }

    #[test]
    fn tags_without_names_of_files_make_one_snapshot_with_usual_names() {
        let tag = |tag: &str, content| {
            let name = format!("hf.co/me/tiny-GGUF:{tag}");
            let template = ("application/vnd.ollama.image.template", None, "t");
            model(&name, &name, 1, &[(MediaType::OLLAMA_MODEL, None, content), template])
        };
        let models = [tag("Q4_K_M", "four"), tag("Q8_0", "eight")];
        let [only] = snapshots(&models).try_into().unwrap();
        let paths: Vec<&String> = only.files.keys().collect();
        assert_eq!(paths, ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"]);
        assert_eq!(only.commit.len(), 40);
        assert_ne!(only.commit, models[0].manifest.digest().to_hex()[..40]);
    }

    #[test]
    fn file_without_a_name_has_that_of_its_origin() {
        let origin = format!("copy https://huggingface.co/me/tiny-GGUF/resolve/{COMMIT}/q8/Small-Q8_0.gguf");
        let models = [model("hf.co/me/tiny-GGUF:Q8_0", &origin, 1, &[(MediaType::OLLAMA_MODEL, None, "w")])];
        let [only] = snapshots(&models).try_into().unwrap();
        assert_eq!(only.commit, COMMIT);
        assert_eq!(only.files.keys().collect::<Vec<_>>(), ["q8/Small-Q8_0.gguf"]);
    }

    #[test]
    fn main_is_the_commit_of_the_model_that_was_set_last() {
        let file =
            |commit: &str| format!("https://huggingface.co/me/tiny/resolve/{commit}/model.safetensors");
        let other = COMMIT.replace('0', "a");
        let models = [folder("a", &file(COMMIT), 2, "new"), folder("b", &file(&other), 1, "old")];
        let found: Vec<_> =
            snapshots(&models).into_iter().map(|snapshot| (snapshot.commit, snapshot.is_main)).collect();
        assert_eq!(found, [(COMMIT.to_owned(), true), (other, false)]);
    }

    #[test]
    fn main_is_the_commit_of_the_model_with_the_name_of_the_repository() {
        let file =
            |commit: &str| format!("copy https://huggingface.co/me/tiny/resolve/{commit}/model.safetensors");
        let other = COMMIT.replace('0', "a");
        let named = format!("hf.co/me/tiny:{}", &other[..TAG_DIGITS]);
        for last in [named.as_str(), "mine", "hf.co/me/tiny:v1.0"] {
            let models =
                [folder("hf.co/me/tiny", &file(COMMIT), 1, "main"), folder(last, &file(&other), 2, "last")];
            let found = snapshots(&models).into_iter().map(|snapshot| (snapshot.commit, snapshot.is_main));
            assert_eq!(
                found.collect::<Vec<_>>(),
                [(COMMIT.to_owned(), true), (other.clone(), false)],
                "{last}"
            );
        }
    }

    #[test]
    fn revisions_are_in_the_names_of_models() {
        let file = |path: &str| format!("copy https://huggingface.co/me/tiny/resolve/{COMMIT}/{path} in hf");
        let weights = file("model.safetensors");
        for (tag, expected) in [
            ("v1.0", Some("v1.0")),
            ("refs-pr-3", Some("refs/pr/3")),
            ("latest", None),
            ("main", None),
            (&COMMIT[..TAG_DIGITS], None),
        ] {
            let found = revision(&folder(&format!("hf.co/me/tiny:{tag}"), &weights, 1, "w"), COMMIT);
            assert_eq!(found.as_deref(), expected, "{tag}");
        }
        assert_eq!(
            revision(&folder("mine:v1", &weights, 1, "w"), COMMIT),
            None,
            "not a name of the repository"
        );
        for (path, tag, expected) in [
            ("q/tiny-Q8_0.gguf", "Q8_0", None),
            ("q/tiny-Q8_0.gguf", "Q8_0-v1-x", Some("v1-x")),
            ("q/tiny-Q8_0.gguf", "q-tiny-Q8_0-v1", Some("v1")),
            ("q/tiny-Q8_0.gguf", "other", None),
            ("tiny.gguf", "tiny-v1", Some("v1")),
        ] {
            let weights = [(MediaType::OLLAMA_MODEL, None, "w")];
            let found = revision(&model(&format!("hf.co/me/tiny:{tag}"), &file(path), 1, &weights), COMMIT);
            assert_eq!(found.as_deref(), expected, "{path} {tag}");
        }
    }

    #[test]
    fn revision_is_the_commit_of_the_model_that_was_set_last() {
        let other = COMMIT.replace('0', "a");
        let model = |tag: &str, commit: &str, day, content| {
            let origin =
                format!("copy https://huggingface.co/me/tiny/resolve/{commit}/tiny-{tag}.gguf in hf");
            let weights = [(MediaType::OLLAMA_MODEL, None, content)];
            model(&format!("hf.co/me/tiny:{tag}-v1"), &origin, day, &weights)
        };
        let models = [model("Q8_0", COMMIT, 1, "old"), model("Q4_K_M", &other, 2, "new")];
        let found = snapshots(&models).into_iter().map(|found| (found.commit, found.revisions.len()));
        assert_eq!(found.collect::<Vec<_>>(), [(COMMIT.to_owned(), 0), (other, 1)]);
    }
}
