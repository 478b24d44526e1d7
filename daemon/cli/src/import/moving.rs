//! `blobd import --move`: deletes the imported files.
//!
//! A file is deleted when every model of the command that has it is imported: then all of its bytes are in the store, and
//! durable. It must still be the file that was there before the import, with the same content. So a crash at any moment
//! leaves each model whole in at least one of the two places, and the same command again moves the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use blobd_store_format::layout;
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, access, openat2, statat, unlinkat,
};
use rustix::io::Errno;
use tracing_mutex::stdsync::Mutex;

use super::beside::ModelFile;
use super::plan::{PathModel, Planned};
use crate::local_folder::Identity;
use crate::output::{counted, human_bytes, printable};
use crate::{ErrorBody, ErrorCode, file_error};

/// The files of the models of a command that are deleted; none unless that was asked for.
#[derive(Debug, Default)]
pub(super) struct Moves(Mutex<Sources>);

impl Moves {
    /// Notes the files of all models. A model that cannot be moved becomes an error.
    pub(super) fn plan(models: &mut [PathModel], with_sidecars: bool) -> Self {
        let mut sources = Sources::default();
        // What cannot be planned may have the same sidecars, which then stay.
        let takes_sidecars = models.iter().all(|(_, model)| model.is_ok());
        for (number, (path, model)) in models.iter_mut().enumerate() {
            let Ok(planned) = model else { continue };
            let (folder, mut files) = files_of(path, planned, with_sidecars);
            files.retain(|file| takes_sidecars || !file.is_sidecar);
            if let Err(error) = sources.add(number, folder, files) {
                *model = Err(error);
            }
        }
        let used = used_files();
        for (number, (_, model)) in models.iter_mut().enumerate() {
            if let Err(error) = sources.refuse_used(number, &used) {
                *model = Err(error);
            }
        }
        Self(Mutex::new(sources))
    }

    /// Deletes the files of an imported model that no other model needs. Returns what was done, for the user.
    pub(super) fn imported(&self, number: usize) -> Vec<String> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).imported(number)
    }
}

/// The files, and which models need each.
#[derive(Debug, Default)]
struct Sources {
    files: BTreeMap<PathBuf, Source>,
    /// The files of each model, by its number.
    of_models: BTreeMap<usize, Files>,
}

#[derive(Debug)]
struct Source {
    identity: Identity,
    /// The numbers of the models that are not imported yet.
    needed_by: BTreeSet<usize>,
}

/// The files of a model.
#[derive(Debug)]
struct Files {
    /// The folder that is the model. It is deleted if nothing is left in it.
    folder: Option<PathBuf>,
    paths: Vec<PathBuf>,
}

/// A file by its device and inode.
type Inode = (u64, u64);

impl Sources {
    /// Notes the files of a model, also of one that is refused: others may have the same files.
    ///
    /// # Errors
    /// [`ErrorBody`] when a file cannot be moved: it is a link, or its folder does not allow that it is deleted.
    fn add(
        &mut self,
        number: usize,
        folder: Option<PathBuf>,
        files: Vec<ListedFile>,
    ) -> Result<(), ErrorBody> {
        let mut first_error = Ok(());
        for ListedFile { path, listed, .. } in &files {
            match movable(path, *listed) {
                Ok(identity) => {
                    let new = || Source { identity, needed_by: BTreeSet::new() };
                    self.files.entry(path.clone()).or_insert_with(new).needed_by.insert(number);
                }
                Err(error) => first_error = first_error.and(Err(error)),
            }
        }
        let paths = files.into_iter().map(|file| file.path).collect();
        self.of_models.insert(number, Files { folder, paths });
        first_error
    }

    /// Refuses a model if another program has one of its files open.
    fn refuse_used(&self, number: usize, used: &BTreeMap<Inode, String>) -> Result<(), ErrorBody> {
        for path in self.of_models.get(&number).into_iter().flat_map(|files| &files.paths) {
            let Some(Source { identity, .. }) = self.files.get(path) else { continue };
            if let Some(program) = used.get(&identity.inode()) {
                let message = format!("{}: in use by {program}", path.display());
                let body = ErrorBody::new(ErrorCode::Busy, message);
                return Err(body.with_hint("stop that program first, or import without --move"));
            }
        }
        Ok(())
    }

    fn imported(&mut self, number: usize) -> Vec<String> {
        let Some(Files { folder, paths }) = self.of_models.remove(&number) else { return Vec::new() };
        let (mut count, mut bytes, mut notes) = (0_usize, 0_u64, Vec::new());
        for path in &paths {
            let Some(source) = self.files.get_mut(path) else { continue };
            source.needed_by.remove(&number);
            if !source.needed_by.is_empty() {
                continue;
            }
            match delete(path, source.identity) {
                Ok(()) => {
                    count = count.saturating_add(1);
                    bytes = bytes.saturating_add(source.identity.size());
                }
                Err(reason) => {
                    notes.push(format!("{}: not deleted: {reason}", printable(&path.display().to_string())));
                }
            }
        }
        if let Some(folder) = folder {
            delete_empty(&folder, &paths);
        }
        if count > 0 {
            notes.insert(0, format!("{} deleted, {}", counted(count, "imported file"), human_bytes(bytes)));
        }
        notes
    }
}

/// A file of a model before its import.
#[derive(Debug)]
struct ListedFile {
    path: PathBuf,
    /// What was listed at the path, if it was listed in a folder.
    listed: Option<Identity>,
    /// Whether it is a projector or a draft, which several models may have.
    is_sidecar: bool,
}

/// The folder that is a model, if it is one, and the files of the model.
fn files_of(path: &Path, planned: &Planned, with_sidecars: bool) -> (Option<PathBuf>, Vec<ListedFile>) {
    match planned {
        Planned::List(model) => {
            let files = model.paths().into_iter().zip(&model.files);
            let file = |((path, listed), file): ((PathBuf, Option<Identity>), &ModelFile)| {
                // The path of a listed folder has no links, unless one was put there since.
                let path = if listed.is_some() { path } else { unique(&path) };
                ListedFile { path, listed, is_sidecar: file.component.is_some() }
            };
            (model.folder().map(Path::to_owned), files.map(file).collect())
        }
        Planned::File { sidecars } => {
            let sidecars = sidecars.iter().filter(|_| with_sidecars);
            let files =
                std::iter::once((path, false)).chain(sidecars.map(|file| (file.path.as_path(), true)));
            let file = |(path, is_sidecar): (&Path, bool)| ListedFile {
                path: unique(path),
                listed: None,
                is_sidecar,
            };
            (None, files.map(file).collect())
        }
    }
}

/// The one path of a file, however it was named: its folder without links, and its own name.
fn unique(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = absolute.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

/// Deletes the folders of these files that are empty now, up to `folder` and no further.
fn delete_empty(folder: &Path, paths: &[PathBuf]) {
    let folders = paths.iter().flat_map(|path| path.ancestors().skip(1));
    let mut folders: Vec<&Path> = folders.filter(|parent| parent.starts_with(folder)).collect();
    folders.sort_unstable();
    folders.dedup();
    for folder in folders.iter().rev() {
        // Refused for a folder that has anything in it.
        let _ = fs::remove_dir(folder);
    }
}

/// The files that other programs have open or mapped, each with one program. Of the programs of other users only root
/// sees them.
fn used_files() -> BTreeMap<Inode, String> {
    let mut used = BTreeMap::new();
    let own = std::process::id().to_string();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        if pid == own || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        // A map keeps its file in `map_files`, also when the descriptor is closed.
        let links = ["fd", "map_files"].map(|folder| fs::read_dir(process.path().join(folder)));
        for link in links.into_iter().flatten().flatten().flatten() {
            if let Ok(data) = fs::metadata(link.path())
                && data.is_file()
            {
                used.entry((data.dev(), data.ino())).or_insert_with(|| program(&process.path(), &pid));
            }
        }
    }
    used
}

fn program(process: &Path, pid: &str) -> String {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    format!("{} (process {pid})", printable(name.trim_end()))
}

fn movable(path: &Path, listed: Option<Identity>) -> Result<Identity, ErrorBody> {
    let shown = path.display();
    let failed = |error: Errno| file_error(&shown.to_string(), &error.into());
    let (_folder, _name, stat) = find(path).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        let message = format!("{shown}: cannot be moved: expected a file, found a link");
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("name the file that the link leads to, or import without --move"));
    }
    if let Some(store) = path.ancestors().skip(1).find(|folder| folder.join(layout::STORE_FILE).exists()) {
        let message = format!("{shown}: cannot be moved: it is a file of the store {}", store.display());
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message)
            .with_hint("`blobd tag` gives a stored model another name; without --move it is copied"));
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| {
        file_error(&format!("{}: cannot delete files in it", folder.display()), &error.into())
    })?;
    // A file that was listed is deleted only if it still is that one.
    Ok(listed.unwrap_or_else(|| Identity::new(&stat)))
}

fn delete(path: &Path, before: Identity) -> Result<(), String> {
    let failed = |error: Errno| std::io::Error::from(error).to_string();
    let (folder, name, stat) = find(path).map_err(failed)?;
    if !Identity::new(&stat).is_content_of(&before) {
        return Err("it changed while it was imported".to_owned());
    }
    unlinkat(folder, name, AtFlags::empty()).map_err(failed)
}

/// What is at a path, and its folder. The folder's path must have no links: whoever owns a part of it could put one there,
/// and have a file of the same name elsewhere deleted.
fn find(path: &Path) -> rustix::io::Result<(OwnedFd, &OsStr, Stat)> {
    let (folder, name) = path.parent().zip(path.file_name()).ok_or(Errno::INVAL)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat2(CWD, folder, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((folder, name, stat))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        sources.add(0, None, files([&own, &shared])).unwrap();
        sources.add(1, None, files([&shared])).unwrap();
        assert_eq!(sources.imported(0), ["1 imported file deleted, 3 B"]);
        assert!(!own.exists() && shared.exists());
        assert_eq!(sources.imported(1), ["1 imported file deleted, 6 B"]);
        assert!(!shared.exists());
    }

    #[test]
    fn file_of_a_model_that_is_not_imported_stays() {
        let folder = tempfile::tempdir().unwrap();
        let shared = file(folder.path(), "shared");
        let mut sources = Sources::default();
        sources.add(0, None, files([&shared])).unwrap();
        sources.add(1, None, files([&shared])).unwrap();
        assert_eq!(sources.imported(1), Vec::<String>::new());
        assert!(shared.exists());
    }

    #[test]
    fn file_that_changed_stays_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [changed, replaced, gone] = ["changed", "replaced", "gone"].map(|name| file(folder.path(), name));
        let mut sources = Sources::default();
        sources.add(0, None, files([&changed, &replaced, &gone])).unwrap();
        fs::write(&changed, "other content").unwrap();
        fs::rename(file(folder.path(), "new"), &replaced).unwrap();
        fs::remove_file(&gone).unwrap();
        let notes = sources.imported(0);
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
        sources.add(0, None, vec![ListedFile { path: own, listed, is_sidecar: false }]).unwrap();
        fs::rename(place.join("own"), place.join("away")).unwrap();
        std::os::unix::fs::symlink(place.join("other"), place.join("own")).unwrap();
        let notes = sources.imported(0);
        assert!(notes.len() == 1 && notes[0].contains("not deleted"), "{notes:?}");
        assert!(other.exists());
    }

    #[test]
    fn files_of_a_store_are_refused() {
        let store = tempfile::tempdir().unwrap();
        fs::create_dir(store.path().join("blobs")).unwrap();
        file(store.path(), "store.json");
        let blob = file(store.path(), "blobs/blob");
        let error = Sources::default().add(0, None, files([&blob])).unwrap_err();
        assert!(error.message.contains("it is a file of the store "), "{error:?}");
        assert!(blob.exists());
    }

    #[test]
    fn links_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (file(folder.path(), "target"), folder.path().join("link"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let error = Sources::default().add(0, None, files([&link])).unwrap_err();
        assert!(error.message.ends_with("link: cannot be moved: expected a file, found a link"), "{error:?}");
        assert!(link.exists());
    }

    #[test]
    fn file_that_another_program_has_open_is_refused_with_the_name_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), "used");
        let mut reader = std::process::Command::new("sleep")
            .arg("60")
            .stdin(fs::File::open(&path).unwrap())
            .spawn()
            .unwrap();
        let mut sources = Sources::default();
        sources.add(0, None, files([&path])).unwrap();
        let used = used_files();
        reader.kill().unwrap();
        reader.wait().unwrap();
        let error = sources.refuse_used(0, &used).unwrap_err();
        assert!(
            error.message.contains("used: in use by ") && error.message.contains("(process "),
            "{error:?}"
        );
        assert_eq!(sources.refuse_used(0, &used_files()), Ok(()));
    }
}
