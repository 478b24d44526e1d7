//! The models in a folder of GGUF files.

use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::model_folder::FolderFile;
use blobd_store_format::repository::{Choice, RepositoryFiles, Wanted};
use blobd_store_format::source::Components;

use super::related_files::{ModelFile, shards_among};
use crate::ErrorBody;
use crate::local_folder::Folder;

/// The files of each model, by the path of its first file: one file or all shards, with the projector and the draft that
/// belong to it. A projector or a draft is a model of its own only if the folder has no other models.
pub(super) fn models(
    folder: &Folder,
    files: &[FolderFile],
) -> Vec<(String, Result<Vec<ModelFile>, ErrorBody>)> {
    let sizes: BTreeMap<&str, u64> = files.iter().map(|file| (file.path.as_str(), file.size)).collect();
    let repository = RepositoryFiles::new(sizes.keys().copied());
    let mut firsts: Vec<&str> = repository.all_models().into_iter().map(|model| model.path).collect();
    firsts.extend(repository.other_gguf_files());
    if firsts.is_empty() {
        firsts = sizes.keys().copied().collect();
    }
    // The shorter names are for the files that are not in folders of their own.
    firsts.sort_by_key(|path| (path.matches('/').count(), *path));
    let (mut models, mut taken) = (Vec::new(), BTreeSet::new());
    for first in firsts {
        if taken.contains(first) {
            continue;
        }
        let model = files_of_model(folder, &repository, (first, &sizes));
        if let Ok(files) = &model {
            taken.extend(files.iter().filter_map(|file| Some(*sizes.get_key_value(file.source.as_str())?.0)));
        }
        models.push((first.to_owned(), model));
    }
    models
}

fn files_of_model(
    folder: &Folder,
    repository: &RepositoryFiles<'_>,
    (first, sizes): (&str, &BTreeMap<&str, u64>),
) -> Result<Vec<ModelFile>, ErrorBody> {
    let beside = first.strip_suffix(file_name(first)).unwrap_or_default();
    let names = sizes.keys().filter_map(|path| path.strip_prefix(beside).filter(|name| !name.contains('/')));
    let shown = folder.path().join(first);
    let open = |name: &str| folder.open(&format!("{beside}{name}")).ok();
    let shards = shards_among((file_name(first), names), &shown.display(), open)?;
    let shards = shards.unwrap_or_else(|| vec![file_name(first)]);
    let weights = shards.into_iter().map(|name| (format!("{beside}{name}"), None));
    let mut names = BTreeSet::new();
    let file = |(source, component): (String, Option<SidecarComponent>)| {
        let (name, size) = (file_name(&source), sizes.get(source.as_str()).copied().unwrap_or_default());
        // Its own name, as without folders; two files of a model cannot have the same.
        let path = if names.insert(name.to_lowercase()) { name.to_owned() } else { source.clone() };
        ModelFile { path, source, size, component }
    };
    Ok(weights.chain(sidecars(repository, first, sizes)).map(file).collect())
}

fn sidecars<'s>(
    repository: &RepositoryFiles<'_>,
    first: &str,
    sizes: &'s BTreeMap<&str, u64>,
) -> impl Iterator<Item = (String, Option<SidecarComponent>)> + 's {
    let choice = repository.choose(Wanted::File(first), &Components::DEFAULT);
    let Choice { projector, draft, .. } = choice.unwrap_or_default();
    let of = |files: Vec<usize>, component| files.into_iter().map(move |file| (file, Some(component)));
    let chosen = of(projector, SidecarComponent::Projector).chain(of(draft, SidecarComponent::Draft));
    chosen.filter_map(|(number, component)| Some(((*sizes.keys().nth(number)?).to_owned(), component)))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
