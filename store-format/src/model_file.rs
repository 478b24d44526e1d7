//! The files of a model that no registry describes, such as a folder on a disk or a repository of a hub: which paths
//! they may have, and the media types of the layers that they become.
//!
//! A model has the same layers wherever its files come from, so that its manifest and its ID are the same.

use std::collections::BTreeSet;

use crate::descriptor::MediaType;
use crate::digest::Digest;
use crate::file_paths::{PathClash, case_twins, check};
use crate::manifest::is_file_name;
use crate::tensor::TensorFormat;

/// The media type of a file by its path, and by its format if it is one that is split.
pub fn layer_type(path: &str, format: Option<TensorFormat>) -> MediaType {
    let by_path = || {
        let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
        match extension(&name) {
            "json" => MediaType::OLLAMA_JSON,
            _ if is_license(&name) => MediaType::OLLAMA_LICENSE,
            _ if has_other_weights(&name) => MediaType::PACK_OTHER_WEIGHTS,
            _ => MediaType::PACK_CONFIG,
        }
    };
    MediaType::new(match format {
        Some(TensorFormat::Gguf) => MediaType::OLLAMA_MODEL,
        Some(TensorFormat::Safetensors) => MediaType::PACK_SAFETENSORS,
        None => by_path(),
    })
}

/// Whether a file has weights in a format that is not split, by its extension.
pub fn has_other_weights(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    is_pickle(&path) || is_plain_binary(&path) || OTHER_WEIGHTS.contains(&extension(&path))
}

/// Whether a file is a pickle of Python, by its extension. Reading one can run any code.
pub(crate) fn is_pickle(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    PICKLES.contains(&extension(&path)) && !is_plain_binary(&path)
}

/// Files of weights that end in `.bin` and are not pickles: OpenVINO's, and ggml's from before GGUF.
fn is_plain_binary(path: &str) -> bool {
    const STARTS: [&str; 2] = ["openvino_", "ggml-"];
    let name = path.rsplit('/').next().unwrap_or(path);
    extension(name) == "bin" && STARTS.iter().any(|start| name.starts_with(start))
}

/// The description of a network that is of no use without its weights, which are in another file: OpenVINO's.
pub(crate) fn describes_other_weights(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    extension(&name) == "xml" && name.starts_with("openvino_")
}

fn extension(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or("", |(_stem, extension)| extension)
}

const PICKLES: [&str; 8] = ["bin", "ckpt", "joblib", "msc", "pickle", "pkl", "pt", "pth"];
const OTHER_WEIGHTS: [&str; 16] = [
    "dduf",
    "engine",
    "flashpack",
    "h5",
    "hdf5",
    "mlmodel",
    "msgpack",
    "nemo",
    "npy",
    "npz",
    "onnx",
    "onnx_data",
    "ot",
    "pb",
    "tflite",
    "uqff",
];

fn is_license(name: &str) -> bool {
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    matches!(stem, "license" | "licence" | "copying")
}

/// Checks the paths of a model's files: they are relative, have no `..`, end in the name of a file, and differ from each
/// other even where case does not matter.
///
/// # Errors
/// [`ModelPathError`] for the first that is refused.
pub fn check_paths<'p>(paths: impl IntoIterator<Item = &'p str>) -> Result<(), ModelPathError> {
    let mut seen = BTreeSet::new();
    for path in paths {
        if !is_file_name(path) {
            return Err(ModelPathError::NotAPath { path: path.to_owned() });
        }
        // An export would rename them, because a model must not put a `.profile` into somebody's home.
        if path.split('/').any(|part| part.starts_with(['.', '-'])) {
            return Err(ModelPathError::Hidden { path: path.to_owned() });
        }
        if !seen.insert(path) {
            return Err(ModelPathError::Twice { path: path.to_owned() });
        }
    }
    let any_digest = Digest::of(b"");
    match check(seen.iter().map(|path| (*path, any_digest))) {
        Err(PathClash::FileAndFolder { path, other }) => {
            return Err(ModelPathError::FileAndFolder { path, other });
        }
        Err(PathClash::Same { path, .. }) => return Err(ModelPathError::Twice { path }),
        Ok(()) => {}
    }
    match case_twins(seen) {
        Some((first, second)) => Err(ModelPathError::CaseTwins { first, second }),
        None => Ok(()),
    }
}

/// Why files with these paths do not make a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelPathError {
    #[error(
        "{path:?}: wrong path: expected at most 255 bytes, relative, without `..`, backslashes and control characters"
    )]
    NotAPath { path: String },
    #[error("{path}: wrong path: expected no part that begins with `.` or `-`")]
    Hidden { path: String },
    #[error("{path}: two files have this path")]
    Twice { path: String },
    #[error("{path}: this file and the folder of {other} have one path")]
    FileAndFolder { path: String, other: String },
    #[error("{first} and {second}: their paths are the same where case does not matter")]
    CaseTwins { first: String, second: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_the_types_by_which_readers_find_them() {
        for (path, format, component) in [
            ("a/x.gguf", Some(TensorFormat::Gguf), "model"),
            ("model-00001-of-00002.safetensors", Some(TensorFormat::Safetensors), "model"),
            ("config.json", None, "json"),
            ("tokenizer/Tokenizer.JSON", None, "json"),
            ("LICENSE", None, "license"),
            ("docs/License.md", None, "license"),
            ("pytorch_model.bin", None, "model"),
            ("README.md", None, "weight.config"),
            ("tokenizer.model", None, "weight.config"),
            ("vocab", None, "weight.config"),
        ] {
            assert_eq!(layer_type(path, format).component(), component, "{path}");
        }
    }

    fn refused(paths: &[&str]) -> ModelPathError {
        check_paths(paths.iter().copied()).unwrap_err()
    }

    #[test]
    fn paths_that_lead_out_or_hide_are_refused() {
        let long = "x".repeat(256);
        for path in
            ["", "/etc/passwd", "../x", "a/../x", "a//x", "a/./x", "a/", "a\nx", "a\0x", "a\\x", &long]
        {
            assert!(matches!(refused(&["ok", path]), ModelPathError::NotAPath { .. }), "{path:?}");
        }
        for path in [".profile", "a/.git/config", "-o"] {
            assert!(matches!(refused(&["ok", path]), ModelPathError::Hidden { .. }), "{path:?}");
        }
        assert!(refused(&["a\nb"]).to_string().contains(r"a\nb"));
    }

    #[test]
    fn paths_that_cannot_be_side_by_side_are_refused() {
        assert!(matches!(refused(&["a", "b", "a"]), ModelPathError::Twice { .. }));
        assert!(matches!(refused(&["a", "a/b"]), ModelPathError::FileAndFolder { .. }));
        assert!(matches!(refused(&["a/Config.json", "a/config.json"]), ModelPathError::CaseTwins { .. }));
        assert!(matches!(refused(&["A/x", "a/y"]), ModelPathError::CaseTwins { .. }));
        assert_eq!(check_paths(["a/b", "a/c", "ab", "größe"]), Ok(()));
    }
}
