//! Damage after which collections refuse, because the needed blobs are unknown.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::checked_store::CheckedStore;

/// The kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A model's manifest is invalid.
    Manifest,
    /// A model's recipe is invalid.
    Recipe,
    /// A model's recipe is missing.
    LostRecipe,
    /// A file of a model that is stored whole is missing.
    LostFile,
    /// A record in the trash is damaged.
    Trash,
    /// There is a foreign file among the manifests.
    ForeignManifest,
    /// There is a foreign file in the trash.
    ForeignTrash,
}

impl Refusal {
    pub(super) const ALL: [Self; 7] = [
        Self::Manifest,
        Self::Recipe,
        Self::LostRecipe,
        Self::LostFile,
        Self::Trash,
        Self::ForeignManifest,
        Self::ForeignTrash,
    ];
}

impl CheckedStore<'_> {
    /// Damages a file while the daemon is down, so that it has no undamaged copy in memory, and removes a
    /// model. Kills the daemon again before the damage is repaired, because it would collect at an unknown
    /// time.
    pub(super) fn refuse(&mut self, refusal: Refusal, name: usize) {
        let Some((path, damaged)) = self.damage(refusal, name) else { return };
        let whole = fs::read(&path).ok();
        self.restart_killed(|_| match damaged {
            Some(bytes) => replace(&path, &bytes),
            None => fs::remove_file(&path).unwrap(),
        });
        self.remove_in_vain(name);
        self.restart_killed(|_| match whole {
            // The manifest may be gone with its name.
            Some(_) if refusal == Refusal::Manifest && !path.exists() => {}
            Some(whole) => replace(&path, &whole),
            None => fs::remove_file(&path).unwrap(),
        });
    }

    /// The file and its new content; no content if it is to be deleted.
    fn damage(&self, refusal: Refusal, name: usize) -> Option<(PathBuf, Option<Vec<u8>>)> {
        let root = &self.location.root;
        let some = b"{".to_vec();
        let (path, damaged) = match refusal {
            Refusal::Manifest => (self.manifest_of(name)?, Some(some)),
            Refusal::Recipe => (self.file_of(name, "recipes/")?, Some(some)),
            Refusal::LostRecipe => (self.file_of(name, "recipes/")?, None),
            Refusal::LostFile => (self.file_of(name, "blobs/")?, None),
            Refusal::Trash => {
                let record = blobd_tests::store_dir::names(&root.join("trash")).pop()?;
                (format!("trash/{record}"), Some(some))
            }
            Refusal::ForeignManifest => ("manifests/notes.txt".to_owned(), Some(some)),
            Refusal::ForeignTrash => {
                fs::create_dir_all(root.join("trash")).unwrap();
                ("trash/notes.txt".to_owned(), Some(some))
            }
        };
        Some((root.join(path), damaged))
    }
}

/// Replaces a file by a new one.
fn replace(path: &Path, bytes: &[u8]) {
    let _ = fs::remove_file(path);
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

/// Changes a blob in place.
pub(super) fn change(path: &Path, how: impl FnOnce(File)) {
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    how(File::options().write(true).open(path).unwrap());
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}
