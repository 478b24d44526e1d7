//! The files of the models of a command: which models need each, and which files can be deleted when a model is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use blobd_cli_common::file_error;
use blobd_store_format::layout;
use rustix::fs::{Access, FileType, access, readlinkat};
use rustix::io::Errno;

use super::deletion::{Deletion, Doomed, ModelLocation, Stage, find};
use crate::local_folder::Identity;
use crate::other_stores::{FoundModel, Program};
use crate::{ErrorBody, ErrorCode};

/// The files, and which models need each.
#[derive(Debug, Default)]
pub(super) struct Sources {
    files: BTreeMap<PathBuf, Source>,
    /// The files of each model, by its number.
    models: BTreeMap<usize, Files>,
}

#[derive(Debug)]
struct Source {
    identity: Identity,
    stage: Stage,
    /// The numbers of the models that are not imported yet.
    needed_by: BTreeSet<usize>,
}

/// The files of a model.
#[derive(Debug)]
struct Files {
    place: ModelLocation,
    paths: Vec<PathBuf>,
}

/// A file of a model before its import.
#[derive(Debug)]
pub(super) struct ListedFile {
    pub(super) path: PathBuf,
    /// What was listed at the path, if it was listed in a folder.
    pub(super) listed: Option<Identity>,
    /// Whether it is a projector or a draft, which several models may have.
    pub(super) is_sidecar: bool,
}

impl Sources {
    /// Notes the files of a model, also of one that is refused: others may have the same files.
    ///
    /// # Errors
    /// [`ErrorBody`] when a file cannot be moved: it is a link, or its folder does not allow that it is deleted.
    pub(super) fn add(
        &mut self,
        number: usize,
        place: ModelLocation,
        files: Vec<ListedFile>,
    ) -> Result<(), ErrorBody> {
        let mut first_error = Ok(());
        for ListedFile { path, listed, .. } in &files {
            match movable_file(path, *listed) {
                Ok(identity) => self.need(number, path, (identity, Stage::Content)),
                Err(error) => first_error = first_error.and(Err(error)),
            }
        }
        let paths = files.into_iter().map(|file| file.path).collect();
        self.models.insert(number, Files { place, paths });
        first_error
    }

    /// Notes the files of a model in a program's store, and the links that lead to them.
    ///
    /// # Errors
    /// When one of them cannot be moved, or is outside of the store.
    pub(super) fn add_found(
        &mut self,
        number: usize,
        (program, root): (&'static Program, &Path),
        model: &FoundModel,
    ) -> Result<(), ErrorBody> {
        let (mut paths, mut first_error) = (Vec::new(), Ok(()));
        let entries = model.entries.iter().map(|entry| (entry, None));
        for (place, content) in
            entries.chain(model.files.iter().map(|file| (&file.place, Some(file.identity))))
        {
            let chain = chain(root, place);
            for (path, identity, is_link) in chain.as_deref().unwrap_or_default() {
                let is_first = *path == unique(place);
                let stage = match (content, is_link) {
                    (None, _) => Stage::Entry,
                    (Some(_), true) if is_first => Stage::Entry,
                    (Some(_), true) => Stage::Link,
                    (Some(_), false) => Stage::Content,
                };
                // A file that was listed is deleted only if it still is that one.
                let identity = content.filter(|_| !is_link).unwrap_or(*identity);
                self.need(number, path, (identity, stage));
                paths.push(path.clone());
            }
            first_error = first_error.and(chain.map(|_| ()));
        }
        self.models.insert(number, Files { place: ModelLocation::Store(program, root.to_owned()), paths });
        first_error
    }

    /// Keeps a file that a model whose files are not known may need.
    pub(super) fn keep(&mut self, number: usize, path: &Path) {
        let path = unique(path);
        if let Ok((identity, _)) = movable(&path) {
            self.need(number, &path, (identity, Stage::Content));
        }
    }

    fn need(&mut self, number: usize, path: &Path, (identity, stage): (Identity, Stage)) {
        let new = || Source { identity, stage, needed_by: BTreeSet::new() };
        let source = self.files.entry(path.to_owned()).or_insert_with(new);
        source.stage = source.stage.min(stage);
        source.needed_by.insert(number);
    }

    /// The files of a model with their identities.
    pub(super) fn of_model(&self, number: usize) -> impl Iterator<Item = (&Path, Identity)> {
        let paths = self.models.get(&number).into_iter().flat_map(|files| &files.paths);
        paths.filter_map(|path| Some((path.as_path(), self.files.get(path)?.identity)))
    }

    /// Keeps the program of the model's store away from its files.
    ///
    /// # Errors
    /// The reason why that is not possible.
    pub(super) fn lock(&self, number: usize) -> Result<Vec<File>, String> {
        let Some(files) = self.models.get(&number) else { return Ok(Vec::new()) };
        files.place.lock(files.paths.iter().map(PathBuf::as_path))
    }

    /// The files that programs lock while they download files of this model.
    pub(super) fn locks(&self, number: usize) -> BTreeSet<PathBuf> {
        let files = self.models.get(&number);
        files.map(|files| files.place.locks(files.paths.iter().map(PathBuf::as_path))).unwrap_or_default()
    }

    pub(super) fn largest_file(&self) -> u64 {
        self.files.values().map(|source| source.identity.size()).max().unwrap_or_default()
    }

    /// What can be deleted when this model is imported too: what no other model needs, and nothing that stays leads to.
    /// `gone` is deleted already, or would be.
    ///
    /// # Errors
    /// When the store cannot be searched. Then everything stays.
    pub(super) fn imported(
        &mut self,
        number: usize,
        gone: &BTreeSet<PathBuf>,
    ) -> Result<Deletion, ErrorBody> {
        let Some(Files { place, paths }) = self.models.remove(&number) else {
            return Ok(Deletion::default());
        };
        let mut free: BTreeMap<Stage, Vec<Doomed>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for path in paths.into_iter().filter(|path| seen.insert(path.clone())) {
            let Some(source) = self.files.get_mut(&path) else { continue };
            source.needed_by.remove(&number);
            if source.needed_by.is_empty() {
                let (stage, identity) = (source.stage, source.identity);
                free.entry(stage).or_default().push(Doomed { path, stage, identity });
            }
        }
        let mut gone = gone.clone();
        let mut deletion = Deletion { place, files: Vec::new() };
        for stage in Stage::ALL {
            let mut files = free.remove(&stage).unwrap_or_default();
            if stage != Stage::Entry && !files.is_empty() {
                let used = deletion.place.used(&gone)?;
                files.retain(|file| !used.contains(&file.identity.inode()));
            }
            gone.extend(files.iter().map(|file| file.path.clone()));
            deletion.files.extend(files);
        }
        Ok(deletion)
    }
}

/// A path, what is there, and whether that is a link.
type Hop = (PathBuf, Identity, bool);

/// The links that lead from a path to a file, and the file. All of them must be in the store.
fn chain(root: &Path, place: &Path) -> Result<Vec<Hop>, ErrorBody> {
    const MAX_LINKS: usize = 8;
    let (mut hops, mut path) = (Vec::new(), unique(place));
    while hops.len() < MAX_LINKS {
        let failed = |error: Errno| file_error(&path.display().to_string(), &error.into());
        if !path.starts_with(root) {
            break;
        }
        let (identity, is_link) = movable(&path)?;
        hops.push((path.clone(), identity, is_link));
        if !is_link {
            return Ok(hops);
        }
        let (folder, name, _stat) = find(&path).map_err(failed)?;
        let target = readlinkat(&folder, name, Vec::new()).map_err(failed)?;
        let target = PathBuf::from(std::ffi::OsString::from_vec(target.into_bytes()));
        path = unique(&path.parent().unwrap_or(root).join(target));
    }
    let message = format!("{}: cannot be moved: it leads to a file outside of the store", place.display());
    Err(ErrorBody::new(ErrorCode::InvalidInput, message).with_hint("import it without --move"))
}

/// The one path of a file, however it was named: its folder without links, and its own name.
pub(super) fn unique(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = absolute.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

fn movable_file(path: &Path, listed: Option<Identity>) -> Result<Identity, ErrorBody> {
    let (identity, is_link) = movable(path)?;
    if is_link {
        let message = format!("{}: cannot be moved: expected a file, found a link", path.display());
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("name the file that the link leads to, or import without --move"));
    }
    // A file that was listed is deleted only if it still is that one.
    Ok(listed.unwrap_or(identity))
}

/// What is at a path, and whether it is a link, if it can be deleted.
fn movable(path: &Path) -> Result<(Identity, bool), ErrorBody> {
    let shown = path.display();
    let failed = |error: Errno| file_error(&shown.to_string(), &error.into());
    let (_folder, _name, stat) = find(path).map_err(failed)?;
    let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
    if let Some(store) = path.ancestors().skip(1).find(|folder| folder.join(layout::STORE_FILE).exists()) {
        let message = format!("{shown}: cannot be moved: it is a file of the store {}", store.display());
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("`blobd tag` gives a stored model another name; without --move it is copied"));
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| {
        file_error(&format!("{}: cannot delete files in it", folder.display()), &error.into())
    })?;
    Ok((Identity::new(&stat), is_link))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn imported(sources: &mut Sources, number: usize) -> Vec<String> {
        sources.imported(number, &BTreeSet::new()).unwrap().execute().notes()
    }

    fn file(folder: &Path, name: &str) -> PathBuf {
        let path = folder.canonicalize().unwrap().join(name);
        fs::write(&path, name).unwrap();
        path
    }

    fn files<const N: usize>(paths: [&PathBuf; N]) -> Vec<ListedFile> {
        let file = |path: &PathBuf| ListedFile { path: path.clone(), listed: None, is_sidecar: false };
        paths.into_iter().map(file).collect()
    }

    #[test]
    fn file_is_deleted_when_all_of_its_models_are_imported() {
        let folder = tempfile::tempdir().unwrap();
        let [own, shared] = ["own", "shared"].map(|name| file(folder.path(), name));
        let mut sources = Sources::default();
        sources.add(0, ModelLocation::Anywhere, files([&own, &shared])).unwrap();
        sources.add(1, ModelLocation::Anywhere, files([&shared])).unwrap();
        assert_eq!(imported(&mut sources, 0), ["1 imported file deleted, 3 B"]);
        assert!(!own.exists() && shared.exists());
        assert_eq!(imported(&mut sources, 1), ["1 imported file deleted, 6 B"]);
        assert!(!shared.exists());
    }

    #[test]
    fn bytes_of_a_file_with_other_hard_links_are_not_freed() {
        let folder = tempfile::tempdir().unwrap();
        let [linked, twice] = ["linked", "twice"].map(|name| file(folder.path(), name));
        let again = twice.with_file_name("again");
        fs::hard_link(&linked, linked.with_file_name("other")).unwrap();
        fs::hard_link(&twice, &again).unwrap();
        let mut sources = Sources::default();
        sources.add(0, ModelLocation::Anywhere, files([&linked, &twice, &again])).unwrap();
        let expected = "3 imported files deleted, 5 B; 6 B stay: the file has another hard link";
        assert_eq!(imported(&mut sources, 0), [expected]);
    }

    #[test]
    fn file_of_a_model_that_is_not_imported_stays() {
        let folder = tempfile::tempdir().unwrap();
        let shared = file(folder.path(), "shared");
        let mut sources = Sources::default();
        sources.add(0, ModelLocation::Anywhere, files([&shared])).unwrap();
        sources.add(1, ModelLocation::Anywhere, files([&shared])).unwrap();
        assert_eq!(imported(&mut sources, 1), Vec::<String>::new());
        assert!(shared.exists());
    }

    #[test]
    fn file_that_changed_stays_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [changed, replaced, gone] = ["changed", "replaced", "gone"].map(|name| file(folder.path(), name));
        let mut sources = Sources::default();
        sources.add(0, ModelLocation::Anywhere, files([&changed, &replaced, &gone])).unwrap();
        fs::write(&changed, "other content").unwrap();
        fs::rename(file(folder.path(), "new"), &replaced).unwrap();
        fs::remove_file(&gone).unwrap();
        let notes = imported(&mut sources, 0);
        assert_eq!(notes.len(), 3);
        assert!(
            notes[..2].iter().all(|note| note.ends_with("it changed while it was imported")),
            "{notes:?}"
        );
        assert!(changed.exists() && replaced.exists());
    }

    #[test]
    fn file_has_one_path_however_it_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let path = file(&folder, "a");
        let linked = folder.join("linked");
        std::os::unix::fs::symlink(&folder, &linked).unwrap();
        for named in [path.clone(), folder.join("./a"), linked.join("a")] {
            assert_eq!(unique(&named), path, "{}", named.display());
        }
        // Only its folder: a link is not the file that it leads to.
        std::os::unix::fs::symlink(&path, folder.join("b")).unwrap();
        assert_eq!(unique(&folder.join("b")), folder.join("b"));
    }

    #[test]
    fn listed_file_behind_a_folder_that_became_a_link_is_not_deleted() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        ["own", "other"].iter().for_each(|name| fs::create_dir(place.join(name)).unwrap());
        let [own, other] = ["own/a", "other/a"].map(|name| file(&place, name));
        let mut sources = Sources::default();
        let listed = Some(Identity::from(&own.metadata().unwrap()));
        sources
            .add(0, ModelLocation::Anywhere, vec![ListedFile { path: own, listed, is_sidecar: false }])
            .unwrap();
        fs::rename(place.join("own"), place.join("away")).unwrap();
        std::os::unix::fs::symlink(place.join("other"), place.join("own")).unwrap();
        let notes = imported(&mut sources, 0);
        assert!(notes.len() == 1 && notes[0].contains("not deleted"), "{notes:?}");
        assert!(other.exists());
    }

    #[test]
    fn files_of_a_store_are_refused() {
        let store = tempfile::tempdir().unwrap();
        fs::create_dir(store.path().join("blobs")).unwrap();
        file(store.path(), "store.json");
        let blob = file(store.path(), "blobs/blob");
        let error = Sources::default().add(0, ModelLocation::Anywhere, files([&blob])).unwrap_err();
        assert!(error.message.contains("it is a file of the store "), "{error:?}");
        assert!(blob.exists());
    }

    #[test]
    fn links_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (file(folder.path(), "target"), folder.path().join("link"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let error = Sources::default().add(0, ModelLocation::Anywhere, files([&link])).unwrap_err();
        assert!(error.message.ends_with("link: cannot be moved: expected a file, found a link"), "{error:?}");
        assert!(link.exists());
    }
}
