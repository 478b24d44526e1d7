//! What a user may have meant by a text that is not the name of a model, or by a file that does not exist: which command
//! takes it, and how to write it there.

use std::fmt::Display;
use std::path::Path;

use blobd_store_format::file_format::FileFormat;
use blobd_store_format::source::{PullSource, SourceError};

use crate::connect::as_typed;
use crate::{ErrorBody, usage};

/// Parses a source of a pull. A path of this machine is refused before a registry is asked for it.
pub fn parse_source(text: &str) -> Result<PullSource, ErrorBody> {
    let text = text.trim();
    if is_path(text) || is_weights_name(text) && Path::new(text).is_file() {
        let message = format!("{text:?}: is a path of this machine: expected the name of a model or a URL");
        let hint = format!("`blobd import {}` stores files of this machine", local_path(text));
        return Err(usage(message).with_hint(hint));
    }
    text.parse().map_err(|error: SourceError| match other_form(text) {
        Some(name) => usage(error).with_hint(format!("write it as {name}")),
        None if text.contains(['*', '?', '[']) => usage(error)
            .with_hint("registries are not searched by patterns; `blobd pull --all` updates what is stored"),
        None => usage(error),
    })
}

/// The error for text that is not a model's name, with what was probably meant.
pub fn refused_name(text: &str, error: &impl Display) -> ErrorBody {
    if is_path(text) {
        let message = format!("{text:?}: is a path: expected the name of a model");
        return usage(message).with_hint("`blobd ls` lists the names of models");
    }
    match other_form(text) {
        Some(name) => usage(error).with_hint(format!("write it as {name}")),
        None => usage(error),
    }
}

/// The hint for importing a file that does not exist.
pub fn instead_of_import(path: &Path) -> Option<String> {
    let text = path.to_str()?.trim();
    if text.starts_with('~') {
        return Some("~ stands for the home directory only if it is not quoted".to_owned());
    }
    if let Some(rest) = text.strip_prefix("file://") {
        return Some(format!("`blobd import {rest}` takes the path without file://"));
    }
    if is_path(text) {
        return None;
    }
    let name = other_form(text);
    let source: PullSource = name.as_deref().unwrap_or(text).parse().ok()?;
    let is_certain = match &source {
        PullSource::Registry(reference) => !reference.omits_tag() || has_host(text) && !is_weights_name(text),
        PullSource::Hub(_) | PullSource::Url(_) => true,
    };
    let is_possible = !text.contains('.');
    let name = name.as_deref().unwrap_or(text);
    (is_certain || is_possible).then(|| format!("`blobd pull {name}` downloads a model"))
}

/// The hint for a model that its registry does not have: the name may be the path of a file or a folder.
pub fn instead_of_pull(source: &PullSource) -> Option<String> {
    let PullSource::Registry(reference) = source else { return None };
    let typed = as_typed(reference);
    if Path::new(&typed).exists() {
        return Some(format!("`blobd import {typed}` stores what is at this path of this machine"));
    }
    let is_file_name = reference.omits_tag() && is_weights_name(reference.model());
    is_file_name.then(|| "`blobd import FILE` stores a file of this machine".to_owned())
}

fn is_path(text: &str) -> bool {
    let starts = ["/", "./", "../", "~/", "file://"];
    matches!(text, "." | ".." | "~")
        || starts.iter().any(|start| text.starts_with(start))
        || text.contains('\\')
}

fn local_path(text: &str) -> &str {
    text.strip_prefix("file://").unwrap_or(text)
}

fn is_weights_name(text: &str) -> bool {
    FileFormat::split_name(text).is_some()
}

/// Whether the text of a name begins with a host, or with a scheme.
pub(crate) fn has_host(text: &str) -> bool {
    text.split_once('/').is_some_and(|(first, _)| first.contains(['.', ':']))
}

/// Rewrites a name with the scheme of another program: `hf://user/repo` becomes `hf.co/user/repo`.
fn other_form(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://").or_else(|| text.split_once(':'))?;
    let name = match scheme.to_ascii_lowercase().as_str() {
        "hf" | "huggingface" | "hf.co" | "huggingface.co" => {
            format!("hf.co/{}", rest.trim_start_matches('/'))
        }
        "ollama" | "docker" | "oci" | "registry" => rest.trim_start_matches('/').to_owned(),
        _ => return None,
    };
    name.parse::<PullSource>().is_ok().then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_refused_as_a_source_and_as_a_name() {
        for (text, hint) in [
            ("./x.gguf", "`blobd import ./x.gguf`"),
            ("/abs/x.gguf", "`blobd import /abs/x.gguf`"),
            ("~/models/x.gguf", "`blobd import ~/models/x.gguf`"),
            ("../models", "`blobd import ../models`"),
            (".", "`blobd import .`"),
            ("file:///abs/x.gguf", "`blobd import /abs/x.gguf`"),
            (r"C:\models\x.gguf", "`blobd import C:"),
        ] {
            let refused = parse_source(text).unwrap_err();
            assert!(refused.to_string().contains("path of this machine"), "{refused}");
            assert!(refused.hint.unwrap().starts_with(hint), "{text}");
            let refused = refused_name(text, &"");
            assert!(refused.to_string().contains("is a path"), "{refused}");
            assert_eq!(refused.hint.as_deref(), Some("`blobd ls` lists the names of models"), "{text}");
        }
    }

    #[test]
    fn space_around_names_is_ignored_and_forms_of_other_programs_are_explained() {
        for text in [" llama3:8b\n", "\tllama3:8b"] {
            assert_eq!(parse_source(text).unwrap().to_string(), "registry.ollama.ai/library/llama3:8b");
        }
        for (text, name) in [
            ("hf://Qwen/Qwen3-0.6B-GGUF", "hf.co/Qwen/Qwen3-0.6B-GGUF"),
            ("hf:Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-0.6B-GGUF:Q4_K_M"),
            ("huggingface://Qwen/Qwen3-0.6B-GGUF", "hf.co/Qwen/Qwen3-0.6B-GGUF"),
            ("ollama://llama3:8b", "llama3:8b"),
            ("docker://ghcr.io/a/b/c:1", "ghcr.io/a/b/c:1"),
            ("oci://registry.example/a/b", "registry.example/a/b"),
        ] {
            let hint = format!("write it as {name}");
            assert_eq!(parse_source(text).unwrap_err().hint, Some(hint.clone()), "{text}");
            assert_eq!(refused_name(text, &"").hint, Some(hint), "{text}");
        }
        assert!(parse_source("qwen*").unwrap_err().hint.unwrap().contains("pull --all"));
        assert_eq!(parse_source("my model").unwrap_err().hint, None);
    }

    #[test]
    fn path_without_a_file_may_be_a_model_of_a_registry() {
        let hint = |text: &str| instead_of_import(Path::new(text));
        for (text, command) in [
            ("hf.co/Qwen/Qwen3-0.6B-GGUF", "`blobd pull hf.co/Qwen/Qwen3-0.6B-GGUF`"),
            ("huggingface.co/Qwen/Qwen3-0.6B-GGUF", "`blobd pull huggingface.co/Qwen/Qwen3-0.6B-GGUF`"),
            ("https://example.org/x.gguf", "`blobd pull https://example.org/x.gguf`"),
            ("hf.co/me/x/x.gguf", "`blobd pull hf.co/me/x/x.gguf`"),
            ("ollama.com/library/llama3", "`blobd pull ollama.com/library/llama3`"),
            ("llama3:8b", "`blobd pull llama3:8b`"),
            ("llama3", "`blobd pull llama3`"),
            ("Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "`blobd pull Qwen/"),
            ("hf://me/x", "`blobd pull hf.co/me/x`"),
            ("file:///abs/x.gguf", "`blobd import /abs/x.gguf`"),
            ("~/x.gguf", "~ stands for"),
        ] {
            assert!(hint(text).unwrap_or_default().starts_with(command), "{text}: {:?}", hint(text));
        }
        for text in ["x.gguf", "./llama3", "/abs/llama3", "dir/x.gguf", "dir.d/x.gguf", "a b"] {
            assert_eq!(hint(text), None, "{text}");
        }
    }

    #[test]
    fn name_like_that_of_a_file_may_be_one() {
        let hint = |text: &str| instead_of_pull(&text.parse().unwrap());
        assert!(hint("x.gguf").is_some() && hint("dir.d/x.gguf").is_some());
        assert_eq!(hint("llama3").or_else(|| hint("x.gguf:latest")), None);
    }
}
