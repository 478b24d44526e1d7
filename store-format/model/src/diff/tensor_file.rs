//! The files that have the tensors of a model: how they are named, and which files of two models correspond.

/// A file of a model that has tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFile {
    component: String,
    path: Option<String>,
}

impl TensorFile {
    /// A file of a component, such as `model`, with its path in the model if it has one.
    pub fn new(component: impl Into<String>, path: Option<String>) -> Self {
        Self { component: component.into(), path }
    }

    /// What it is in its model, such as `model` or `draft`.
    pub fn component(&self) -> &str {
        &self.component
    }

    /// Its path in the model, or its component if it has none.
    pub fn name(&self) -> &str {
        self.path.as_deref().unwrap_or(&self.component)
    }

    /// Whether it has this name, is in the folder of this name, or is this component.
    pub fn is_named(&self, wanted: &str) -> bool {
        let folder = wanted.trim_end_matches('/');
        let is_in_folder = || self.name().strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        self.name() == wanted || self.component == wanted || (!folder.is_empty() && is_in_folder())
    }

    fn folder(&self) -> &str {
        self.path.as_deref().and_then(|path| path.rsplit_once('/')).map_or("", |(folder, _)| folder)
    }

    /// How sure it is that this file of one model takes the place of that file of another model.
    pub(super) fn likeness(&self, other: &Self) -> Likeness {
        match self.component == other.component {
            false => Likeness::None,
            true if self.path == other.path => Likeness::Path,
            true if self.folder() == other.folder() => Likeness::Folder,
            true => Likeness::Component,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Likeness {
    None,
    Component,
    Folder,
    Path,
}

impl Likeness {
    pub(super) const DECREASING: [Self; 4] = [Self::Path, Self::Folder, Self::Component, Self::None];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_takes_the_place_of_the_one_with_its_path_then_folder_then_component() {
        let file = |component: &str, path: Option<&str>| TensorFile::new(component, path.map(str::to_owned));
        let wanted = file("model", Some("vae/m.safetensors"));
        for (other, expected) in [
            (file("model", Some("vae/m.safetensors")), Likeness::Path),
            (file("model", Some("vae/n.safetensors")), Likeness::Folder),
            (file("model", Some("m.safetensors")), Likeness::Component),
            (file("model", None), Likeness::Component),
            (file("draft", Some("vae/m.safetensors")), Likeness::None),
        ] {
            assert_eq!(wanted.likeness(&other), expected, "{other:?}");
        }
    }

    #[test]
    fn files_are_named_by_path_folder_or_component() {
        let file = TensorFile::new("model", Some("vae/m.safetensors".to_owned()));
        for (wanted, is_named) in [
            ("vae/m.safetensors", true),
            ("vae", true),
            ("vae/", true),
            ("model", true),
            ("va", false),
            ("/", false),
        ] {
            assert_eq!(file.is_named(wanted), is_named, "{wanted}");
        }
        assert!(TensorFile::new("draft", None).is_named("draft"));
    }
}
