//! The projector and the draft in the folder of a local model file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use blobd_client::protocol::request::{Sidecar, SidecarComponent};
use blobd_store_format::repository::{Choice, RepositoryFiles, Wanted};
use blobd_store_format::source::Components;
use blobd_store_format::text::printable;

/// A file that belongs to another one in its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalSidecar {
    pub(super) path: PathBuf,
    file_name: String,
    component: SidecarComponent,
}

impl LocalSidecar {
    pub(super) fn request(&self) -> Sidecar {
        Sidecar { component: self.component, file_name: self.file_name.clone() }
    }
}

/// The files with their sidecars. If these are `taken` with their models, they are not files of their own.
pub(super) fn with_sidecars(paths: &[PathBuf], taken: bool) -> Vec<(&Path, Vec<LocalSidecar>)> {
    let mut files: Vec<_> = paths.iter().map(|path| (path.as_path(), sidecars_of(path))).collect();
    if taken {
        let sidecars = files.iter().flat_map(|(_, sidecars)| sidecars);
        let sidecars: BTreeSet<PathBuf> = sidecars.map(|sidecar| sidecar.path.clone()).collect();
        files.retain(|(path, _)| !sidecars.contains(*path));
    }
    files
}

/// What the user should know of sidecars that were not stored.
pub(super) fn note(sidecars: &[LocalSidecar]) -> Option<String> {
    let names: Vec<_> = sidecars.iter().map(|sidecar| printable(&sidecar.file_name)).collect();
    let (are, them) = if names.len() == 1 { ("is", "it") } else { ("are", "them") };
    let text = format!(
        "{} {are} in the same folder; --with-sidecars stores {them} in the same model",
        names.join(" and ")
    );
    (!names.is_empty()).then_some(text)
}

/// The most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 10_000;

/// Chooses them by the rules for a repository. Returns none if the folder cannot be read: the file itself may still be
/// readable.
fn sidecars_of(path: &Path) -> Vec<LocalSidecar> {
    let Some(own) = path.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let folder = path.parent().unwrap_or(Path::new(""));
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(listed) else { return Vec::new() };
    let names = entries.take(MAX_ENTRIES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    let files = RepositoryFiles::new(names.iter().map(String::as_str));
    let Ok(Choice { projector, draft, .. }) = files.choose(Wanted::File(own), &Components::DEFAULT) else {
        return Vec::new();
    };
    let sidecar = |(number, component): (usize, SidecarComponent)| {
        let file_name = names.get(number)?.clone();
        Some(LocalSidecar { path: folder.join(&file_name), file_name, component })
    };
    let projector = projector.into_iter().map(|file| (file, SidecarComponent::Projector));
    let draft = draft.into_iter().map(|file| (file, SidecarComponent::Draft));
    projector.chain(draft).filter_map(sidecar).collect()
}
