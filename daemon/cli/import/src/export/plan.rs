//! The files of an export and their places, decided and checked before anything is written.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use blobd_cli_common::output_file::{Existing, write_error};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, file_error, usage};
use blobd_store_format::digest::Hasher;
use blobd_store_format::file_paths::{case_twins, check, distinct};

use crate::{Digest, ErrorBody, ErrorCode};

#[derive(Clone, Debug)]
pub(crate) struct NewFile {
    /// Its number among the files of the model, or among those made from it.
    pub(crate) index: usize,
    /// A safe path below a folder.
    pub(crate) path: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// No two files have the same place.
#[derive(Debug)]
pub(crate) struct ExportPlan {
    pub(super) files: Vec<PlannedFile>,
}

#[derive(Debug)]
pub(super) struct PlannedFile {
    pub(super) file: NewFile,
    pub(super) place: OutputPath,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OutputPath {
    /// The path that the user gave: links are followed, and devices are written to.
    Named(PathBuf),
    /// A path below a folder, which the model's manifest decides. No link below the folder is followed.
    Below { folder: PathBuf, path: String },
}

impl OutputPath {
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Named(path) => path.clone(),
            Self::Below { folder, path } => folder.join(path),
        }
    }

    /// The folders that must exist, from the outermost to the innermost.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        let Self::Below { folder, path } = self else { return Vec::new() };
        let ends = path.match_indices('/').filter_map(|(end, _)| path.get(..end));
        let root = (!folder.as_os_str().is_empty()).then(|| folder.clone());
        root.into_iter().chain(ends.map(|end| folder.join(end))).collect()
    }

    /// The innermost folder that exists: the file is written on its file system.
    pub(super) fn existing_folder(&self) -> PathBuf {
        match self {
            Self::Named(path) => parent_of(path).to_owned(),
            Self::Below { folder, .. } => {
                let existing = self.folders().into_iter().rev().find(|folder| folder.is_dir());
                existing.unwrap_or_else(|| parent_of(folder).to_owned())
            }
        }
    }
}

impl ExportPlan {
    /// Places files in the given folder or the current one, or a single file at the given path. A file that is listed
    /// several times is written once.
    pub(crate) fn new(output: Option<&Path>, files: &[NewFile]) -> Result<Self, ErrorBody> {
        let listed = || files.iter().map(|file| (file.path.as_str(), file.digest));
        check(listed()).map_err(|clash| {
            let body = ErrorBody::new(ErrorCode::InvalidInput, clash);
            body.with_hint(
                "only its publisher can correct this; `blobd mount` shows all files by their digests",
            )
        })?;
        let kept = distinct(listed());
        let place = |path: &str| match output {
            None => Ok(OutputPath::Below { folder: PathBuf::new(), path: path.to_owned() }),
            Some(folder) if is_folder_path(folder) => {
                Ok(OutputPath::Below { folder: folder.to_owned(), path: path.to_owned() })
            }
            Some(path) if kept.len() == 1 => Ok(OutputPath::Named(path.to_owned())),
            Some(path) => {
                let (path, count) = (path.display(), kept.len());
                let refused = usage(format!(
                    "{path}: is one file, but the model has {count} such files; give a directory"
                ));
                Err(refused.with_hint(format!("`-o {path}/` makes one")))
            }
        };
        let chosen = kept.iter().filter_map(|index| files.get(*index));
        let planned = chosen
            .map(|file| Ok(PlannedFile { place: place(&file.path)?, file: file.clone() }))
            .collect::<Result<_, ErrorBody>>()?;
        let plan = Self { files: planned };
        plan.check_folders()?;
        plan.check_case()?;
        Ok(plan)
    }

    /// Checks that folders below the given one are folders and not links, which could lead anywhere.
    fn check_folders(&self) -> Result<(), ErrorBody> {
        for PlannedFile { place, .. } in &self.files {
            for folder in place.folders() {
                refuse_link(place, &folder)?;
                match fs::metadata(&folder) {
                    Ok(found) if !found.is_dir() => return Err(refused(&folder, "a file", "a folder")),
                    _ => {}
                }
            }
            if let OutputPath::Below { folder, .. } = place
                && !folder.as_os_str().is_empty()
            {
                let parent = parent_of(folder);
                fs::metadata(parent).map_err(|error| file_error(&folder.display().to_string(), &error))?;
            }
        }
        Ok(())
    }

    /// Checks that files whose paths differ in case only are not the same file there.
    fn check_case(&self) -> Result<(), ErrorBody> {
        let below = || {
            self.files.iter().filter_map(|planned| match &planned.place {
                OutputPath::Below { path, .. } => Some((path.as_str(), &planned.place)),
                OutputPath::Named(_) => None,
            })
        };
        let (Some((first, second)), Some((_, place))) =
            (case_twins(below().map(|(path, _)| path)), below().next())
        else {
            return Ok(());
        };
        let folder = place.existing_folder();
        let ignores_case = ignores_case(&folder).map_err(|error| write_error(&folder, &error))?;
        if !ignores_case {
            return Ok(());
        }
        let message = format!("{}: {first} and {second} are one file on this file system", folder.display());
        let body = ErrorBody::new(ErrorCode::InvalidRequest, message);
        Err(body.with_hint("export to a file system that distinguishes upper and lower case"))
    }
}

/// Whether files are written into a folder of this path, which need not exist.
pub(crate) fn is_folder_path(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().as_bytes().ends_with(b"/")
}

impl PlannedFile {
    /// What may be done with an existing file. One that appears during the export is never replaced: it may be another
    /// file of this export.
    pub(super) fn existing(&self, force: bool) -> Existing {
        match (force, &self.place) {
            (true, OutputPath::Named(_)) => Existing::Replace,
            (true, OutputPath::Below { .. }) if fs::symlink_metadata(self.place.path()).is_ok() => {
                Existing::Replace
            }
            _ => Existing::Keep,
        }
    }

    /// Fails if something other than a file has this name: it cannot be replaced.
    pub(super) fn check_kind(&self) -> Result<(), ErrorBody> {
        let OutputPath::Below { .. } = self.place else { return Ok(()) };
        let path = self.place.path();
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => Err(refused(&path, "a folder", "a file")),
            Ok(found) if !found.is_file() && !found.is_symlink() => {
                Err(refused(&path, "a device or pipe", "a file"))
            }
            _ => Ok(()),
        }
    }
}

/// The folder that the user gave may be a link; those in it may not.
pub(super) fn refuse_link(place: &OutputPath, folder: &Path) -> Result<(), ErrorBody> {
    let is_given = matches!(place, OutputPath::Below { folder: given, .. } if given == folder);
    match fs::symlink_metadata(folder) {
        Ok(found) if found.is_symlink() && !is_given => Err(refused(folder, "a link", "a folder")),
        _ => Ok(()),
    }
}

/// Fails if there is a file with any content. A device or pipe is written to, not replaced.
pub(super) fn refuse_existing(path: &Path) -> Result<(), ErrorBody> {
    existing_bytes(path).map_or(Ok(()), |_size| Err(write_error(path, &io::ErrorKind::AlreadyExists.into())))
}

/// The size of a file that has content.
fn existing_bytes(path: &Path) -> Option<u64> {
    path.metadata().ok().filter(|found| found.is_file() && found.len() > 0).map(|found| found.len())
}

/// Whether there is a file with this digest and size. Fails if there is one with other content.
pub(super) fn has_content(
    global: &Global,
    path: &Path,
    digest: Digest,
    expected: u64,
) -> Result<bool, ErrorBody> {
    let Some(size) = existing_bytes(path) else { return Ok(false) };
    if size == expected {
        let bar = Bar::new(&format!("comparing {}", path.display()), size, global.hides_progress());
        let found = digest_of(path, &bar).map_err(|error| file_error(&path.display().to_string(), &error));
        bar.clear();
        if found? == digest {
            return Ok(true);
        }
    }
    let refused = write_error(path, &io::ErrorKind::AlreadyExists.into());
    Err(ErrorBody { message: format!("{}, with other content", refused.message), ..refused })
}

fn digest_of(path: &Path, bar: &Bar) -> io::Result<Digest> {
    const BUFFER_BYTES: usize = 1 << 20;
    let (mut file, mut hasher) = (File::open(path)?, Hasher::new());
    let size = file.metadata()?.len();
    let (mut buffer, mut done) = (vec![0; BUFFER_BYTES], 0_u64);
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(buffer.get(..length).unwrap_or_default());
        done = done.saturating_add(length as u64);
        bar.set(done, size);
    }
}

fn refused(path: &Path, found: &str, expected: &str) -> ErrorBody {
    let message = format!("{}: wrong kind of file: expected {expected}, found {found}", path.display());
    ErrorBody::new(ErrorCode::Busy, message).with_hint("move it away, or give another folder with -o")
}

fn parent_of(path: &Path) -> &Path {
    let is_last =
        |part: Option<Component<'_>>| matches!(part, Some(Component::ParentDir | Component::CurDir));
    match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        _ if is_last(path.components().next_back()) => path,
        Some(parent) => parent,
        None => Path::new("."),
    }
}

/// Whether a folder's file system treats names that differ only in case as one: tested with a file.
fn ignores_case(folder: &Path) -> io::Result<bool> {
    let name = format!(".blobd-export-{}-case", std::process::id());
    let (path, twin) = (folder.join(&name), folder.join(name.to_uppercase()));
    File::options().write(true).create_new(true).open(&path)?;
    let found = fs::symlink_metadata(&twin).is_ok();
    fs::remove_file(&path)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn file(path: &str, content: u8) -> NewFile {
        NewFile {
            index: usize::from(content),
            path: path.to_owned(),
            digest: Digest::of(&[content]),
            size: 1,
        }
    }

    fn places(output: Option<&Path>, files: &[(&str, u8)]) -> Result<Vec<PathBuf>, ErrorBody> {
        let files: Vec<_> = files.iter().map(|(path, content)| file(path, *content)).collect();
        Ok(ExportPlan::new(output, &files)?.files.iter().map(|planned| planned.place.path()).collect())
    }

    #[test]
    fn several_files_go_into_a_folder_and_one_to_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let (there, new) = (folder.path(), folder.path().join("new/"));
        let two = [("a/x", 1), ("b", 2)];
        assert_eq!(places(None, &two).unwrap(), [Path::new("a/x"), Path::new("b")]);
        assert_eq!(places(Some(there), &two).unwrap(), [there.join("a/x"), there.join("b")]);
        assert_eq!(places(Some(&new), &two).unwrap(), [new.join("a/x"), new.join("b")]);
        let path = there.join("out.bin");
        assert_eq!(places(Some(&path), &two[..1]).unwrap(), [path.as_path()]);
        assert_eq!(places(Some(&path), &[("a", 1), ("a", 1)]).unwrap(), [path.as_path()]);
        let refused = places(Some(&path), &two).unwrap_err();
        assert!(refused.message.contains("has 2 such files") && refused.hint.unwrap().contains("out.bin/`"));
        assert!(places(Some(&there.join("no/such/")), &two).is_err());
        assert_eq!(fs::read_dir(there).unwrap().count(), 0, "a plan writes nothing");
    }

    #[test]
    fn clashes_and_links_are_refused_by_the_plan() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let there = folder.path();
        for files in [[("a", 1), ("a", 2)], [("a", 1), ("a/b", 2)]] {
            assert!(places(Some(there), &files).is_err(), "{files:?}");
        }
        symlink(outside.path(), there.join("unet")).unwrap();
        let error = places(Some(there), &[("unet/model", 1)]).unwrap_err();
        assert!(error.message.contains("expected a folder, found a link"), "{error}");
        fs::write(there.join("vae"), "a file").unwrap();
        let error = places(Some(there), &[("vae/model", 1)]).unwrap_err();
        assert!(error.message.contains("expected a folder, found a file"), "{error}");
        // The given folder itself may be a link.
        symlink(there, outside.path().join("link")).unwrap();
        assert!(places(Some(&outside.path().join("link")), &[("x/model", 1)]).is_ok());
    }

    #[test]
    fn paths_that_differ_in_case_are_two_files_where_case_matters() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(places(Some(folder.path()), &[("A", 1), ("a", 2)]).unwrap().len(), 2);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the file that finds it out is removed");
    }
}
