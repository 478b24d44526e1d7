//! Programs whose models are files in folders: LM Studio, Jan, GPT4All, ModelScope, exo, text-generation-webui.
//!
//! The folder of a file says which model it belongs to. No link is followed out of the folder, unless the user allows it:
//! `lms import` makes such links.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use blobd_store_format::derived_name::{DerivedName, name_part};
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_type::quantization_bits;
use blobd_store_format::model_folder::is_never_taken;

use super::claims::{self, Claims};
use super::file_list::FileList;
use super::found_model::{FoundFile, FoundModel, Problem, not_of_folder};
use super::jan;
use super::{ScanOptions, home, python_variable};
use crate::local_folder::Folder;
use crate::{ErrorBody, Reference};

/// How the folders of a program are read.
#[derive(Debug)]
pub(super) struct Layout {
    /// What the names of its models begin with.
    prefix: &'static str,
    /// The model that a file belongs to, by the parts of the file's path.
    place: fn(&[&str]) -> Option<DepthAndName>,
    /// What the program says about the files, or the hub's library if that has downloaded them.
    claims: fn(&Folder) -> Claims,
}

impl Layout {
    pub(super) const fn prefix(&self) -> &'static str {
        self.prefix
    }

    fn has_place_for(&self, path: &str) -> bool {
        !is_never_taken(path) && self.place_of(path).is_some()
    }

    pub(super) fn place_of(&self, path: &str) -> Option<DepthAndName> {
        (self.place)(&path.split('/').collect::<Vec<_>>())
    }
}

/// How many folders lead to a model, and its name without the prefix.
pub(super) type DepthAndName = (usize, String);

/// `PUBLISHER/REPOSITORY/FILE`; files elsewhere are not its models.
pub(super) const LM_STUDIO: Layout = Layout {
    prefix: "lmstudio",
    claims: claims::downloaded,
    place: |parts| match parts {
        [publisher, repository, _, ..] => Some((2, format!("{publisher}/{repository}"))),
        _ => None,
    },
};

/// `ORG/REPOSITORY/FILE`; older versions have `MODEL/FILE`.
pub(super) const JAN: Layout = Layout {
    prefix: "jan",
    claims: jan::claims,
    place: |parts| match parts {
        [org, repository, _, ..] => Some((2, format!("{org}/{repository}"))),
        [model, _] => Some((1, (*model).to_owned())),
        _ => None,
    },
};

pub(super) const GPT4ALL: Layout = Layout {
    prefix: "gpt4all",
    claims: claims::downloaded,
    place: |parts| if let [file] = parts { Some(flat(file)) } else { None },
};

/// `models/OWNER--NAME/snapshots/REVISION/FILE`; older versions have `hub/models/OWNER/NAME/FILE` and
/// `hub/OWNER/NAME/FILE`, and with `MODELSCOPE_CACHE` the same without `hub/`. Dots in a name are written as `___`.
pub(super) const MODEL_SCOPE: Layout = Layout {
    prefix: "modelscope",
    claims: claims::downloaded,
    place: |parts| {
        let cache = parts.strip_prefix(&["hub"]).unwrap_or(parts);
        let models = cache.strip_prefix(&["models"]).unwrap_or(cache);
        let depth = parts.len().saturating_sub(models.len());
        let name = |name: &str| name.replace("___", ".");
        match models {
            ["datasets", ..] => None,
            [repository, "snapshots", _, _, ..] => Some((depth + 3, name(&repository.replace("--", "/")))),
            [owner, model, _, ..] => Some((depth + 2, name(&format!("{owner}/{model}")))),
            _ => None,
        }
    },
};

pub(super) const EXO: Layout = Layout {
    prefix: "exo",
    claims: claims::of_exo,
    place: |parts| match parts {
        [repository, _, ..] => Some((1, repository.replace("--", "/"))),
        _ => None,
    },
};

pub(super) const TEXT_GENERATION_WEBUI: Layout = Layout {
    prefix: "text-generation-webui",
    claims: claims::downloaded,
    place: |parts| match parts {
        [file] => Some(flat(file)),
        [folder, ..] => Some((1, (*folder).to_owned())),
        [] => None,
    },
};

/// The GGUF files of llama.cpp's own folder.
pub(super) const LLAMA_CPP: Layout = Layout { prefix: "llamacpp", ..GPT4ALL };

/// A file that is not in a folder of its model has the model's name.
fn flat(file: &str) -> DepthAndName {
    let name = DerivedName::from_path(file);
    (0, name.map_or_else(|_| file.to_owned(), |name| name.first().model().to_owned()))
}

/// Whether the folder has a file of a model. Looks at names only, and at a limited number of them.
pub(super) fn has_model(root: &Path, layout: &Layout) -> bool {
    const MAX_ENTRIES: usize = 5_000;
    const MAX_DEPTH: usize = 6;
    let (mut left, mut entries) = (vec![(root.to_owned(), Vec::<String>::new())], 0_usize);
    while let Some((folder, parts)) = left.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            entries = entries.saturating_add(1);
            if entries > MAX_ENTRIES {
                return false;
            }
            let Ok(name) = entry.file_name().into_string() else { continue };
            let parts: Vec<String> = parts.iter().cloned().chain([name]).collect();
            let texts: Vec<&str> = parts.iter().map(String::as_str).collect();
            let is_weights = texts.last().is_some_and(|name| FileFormat::split_name(name).is_some());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && parts.len() < MAX_DEPTH => left.push((entry.path(), parts)),
                Ok(kind) if kind.is_dir() => {}
                Ok(_) if is_weights && layout.has_place_for(&texts.join("/")) => return true,
                _ => {}
            }
        }
    }
    false
}

/// The models below the folder. A model with a file that cannot be read is listed with the reason.
///
/// # Errors
/// That of the folder if it cannot be listed.
pub(super) fn models(
    root: &Path,
    options: &ScanOptions<'_>,
    layout: &Layout,
) -> Result<Vec<FoundModel>, ErrorBody> {
    let folder = Folder::list(root, options.links)?;
    let claims = (layout.claims)(&folder);
    let mut lists: BTreeMap<DepthAndName, (String, FileList)> = BTreeMap::new();
    for path in folder.paths().filter(|path| !is_never_taken(path)) {
        let parts: Vec<&str> = path.split('/').collect();
        let Some((depth, name)) = layout.place_of(path) else { continue };
        let (place, rest) = parts.split_at_checked(depth).unwrap_or_default();
        let place = place.join("/");
        let list = || {
            let parts: Vec<String> = name.split('/').map(name_part).collect();
            FileList::new(format!("{}/{}", layout.prefix, parts.join("/")), folder.path().join(&place))
        };
        let key = (depth, format!("{place}/{name}"));
        let (_, list) = lists.entry(key).or_insert_with(|| (place.clone(), list()));
        let found = file(&folder, path, rest.join("/"));
        let checked = |file| match claims.files.get(path) {
            Some((claim, list)) => claim.check(file, list),
            None => Ok(file),
        };
        list.add(rest.join("/"), found.and_then(checked));
        if let Some(elsewhere) = claims.elsewhere.get(path) {
            list.leave_out(elsewhere);
        }
    }
    Ok(lists.into_values().flat_map(|(_, list)| with_plain_tag(list.models(options.selection))).collect())
}

fn file(folder: &Folder, path: &str, path_in_model: String) -> Result<FoundFile, Problem> {
    let place = folder.path().join(path);
    match folder.identity(path) {
        Ok(identity) => Ok(FoundFile::new(path_in_model, place, identity)),
        Err(found) => Err(not_of_folder(&place, found)),
    }
}

/// The only model of a folder needs no tag to tell it from others. A quantisation stays: it says what the model is.
pub(super) fn with_plain_tag(mut models: Vec<FoundModel>) -> Vec<FoundModel> {
    if let [only] = models.as_mut_slice()
        && let Some(target) = only.target.as_ref().filter(|target| quantization_bits(target.tag()).is_none())
        && let Ok(plain) =
            Reference::from_parts(target.host(), target.namespace(), target.model(), Reference::DEFAULT_TAG)
    {
        only.rename(plain);
    }
    models
}

/// What LM Studio's own settings say, else its usual folders.
pub(super) fn lm_studio_places() -> Vec<PathBuf> {
    let Some(user) = home() else { return Vec::new() };
    let pointed = fs::read_to_string(user.join(".lmstudio-home-pointer")).ok();
    let pointed = pointed.map(|text| PathBuf::from(text.trim())).filter(|path| path.is_absolute());
    let usual = [".lmstudio", ".cache/lm-studio"].map(|place| user.join(place));
    let homes: Vec<PathBuf> = pointed.into_iter().chain(usual).collect();
    homes.iter().flat_map(|home| downloads_folder(home).into_iter().chain([home.join("models")])).collect()
}

fn downloads_folder(home: &Path) -> Option<PathBuf> {
    let settings: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(home.join("settings.json")).ok()?).ok()?;
    let folder = PathBuf::from(settings.get("downloadsFolder")?.as_str()?);
    folder.is_absolute().then_some(folder)
}

/// Where models are in Jan's data folder.
pub(super) const JAN_SUBFOLDERS: [&str; 3] = ["llamacpp/models", "mlx/models", "models"];

pub(super) fn jan_places() -> Vec<PathBuf> {
    let data = super::data_home().map(|data| data.join("Jan/data"));
    let config = home().map(|home| home.join(".config/Jan/data"));
    let folders = data.into_iter().chain(config);
    let folders = folders.flat_map(|data| JAN_SUBFOLDERS.map(|name| data.join(name)));
    folders.chain(home().map(|home| home.join("jan/models"))).collect()
}

pub(super) fn gpt4all_places() -> Vec<PathBuf> {
    super::data_home().map(|data| data.join("nomic.ai/GPT4All")).into_iter().collect()
}

pub(super) fn model_scope_places() -> Vec<PathBuf> {
    let own = super::cache_home().map(|cache| cache.join("modelscope"));
    python_variable("MODELSCOPE_CACHE").into_iter().chain(own).collect()
}

pub(super) fn exo_places() -> Vec<PathBuf> {
    let own = super::data_home().map(|data| data.join("exo/models"));
    python_variable("EXO_MODELS_DIR").into_iter().chain(own).collect()
}

/// Where models are in the program's checkout.
pub(super) const TEXT_GENERATION_WEBUI_SUBFOLDERS: [&str; 2] = ["user_data/models", "models"];

pub(super) fn text_generation_webui_places() -> Vec<PathBuf> {
    let checkout = home().map(|home| home.join("text-generation-webui"));
    let folders = |checkout: PathBuf| TEXT_GENERATION_WEBUI_SUBFOLDERS.map(|name| checkout.join(name));
    checkout.into_iter().flat_map(folders).collect()
}
