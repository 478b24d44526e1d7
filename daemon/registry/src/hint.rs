//! Hints: the next step after an error, where blobd knows more than the server said.

use std::collections::BTreeSet;
use std::time::Duration;

use super::error::{RegistryError, few, later};

impl RegistryError {
    /// The next step, and the answers of the other mirrors if several were asked.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::AllFailed { error, others } => {
                let rest = if others.len() > 1 { "the other mirrors" } else { "the other mirror" };
                let rest = format!("{rest}: {}", others.join("; "));
                Some(error.hint().map_or_else(|| rest.clone(), |own| format!("{own}; {rest}")))
            }
            Self::Explained { hint, .. } => Some(hint.clone()),
            Self::Ambiguous { example, candidates, .. } if differ_in_name(candidates) => {
                Some(format!("name one of them: {example}, or a tag with more of its name"))
            }
            Self::Ambiguous { example, .. } => Some(format!("name one of them by its link: {example}")),
            Self::NoModel { others, example, .. } => Some(format!(
                "the repository has only files that belong to a model, such as projectors: {}; one of them is pulled by its \
                 link: {example}",
                few(others)
            )),
            Self::MissingShards { .. } => Some("only its publisher can add them".to_owned()),
            Self::NoSuchTag { latest: Some(_), page: Some(page), .. } => {
                Some(format!("{page} lists the tags of this model"))
            }
            Self::NoSuchTag { latest: Some(_), page: None, .. } => {
                Some("the registry does not list its tags; without a tag, latest is pulled".to_owned())
            }
            Self::NoSuchTag { page: Some(page), hub, .. } => {
                let hub = hub
                    .as_ref()
                    .map_or_else(String::new, |hub| format!("; at Hugging Face its name would be {hub}"));
                Some(format!("is the name right? if there is such a model, {page} lists its tags{hub}"))
            }
            Self::Status { status, retry_after, .. } => status_hint(*status, retry_after.as_ref()),
            Self::TooManyRequests { host, is_anonymous: true, .. } => {
                Some(format!("an account may have a higher limit: `blobd login {host}`"))
            }
            _ => None,
        }
    }
}

/// Whether a tag can select one of the files. A tag matches file names, not folders.
fn differ_in_name(paths: &[String]) -> bool {
    let names = paths.iter().map(|path| path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase());
    names.collect::<BTreeSet<_>>().len() == paths.len()
}

fn status_hint(status: u16, retry_after: Option<&Duration>) -> Option<String> {
    let hint = match status {
        401 | 403 => {
            "the storage to which the registry redirects refuses its link, which may have expired: try again"
        }
        402 => "the account at this server has to pay, or has used up what is free",
        408 | 425 => "try again",
        412 => "the registry serves this model to newer clients only: a newer version of blobd may pull it",
        451 => "it is withheld for legal reasons; other credentials do not change that",
        501 => return None,
        511 => "this network requires a login: open any web page in a browser",
        500.. => return Some(format!("the server has a problem: try again {}", later(retry_after))),
        _ => return None,
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_tag_is_advised_only_if_names_differ() {
        let hint = |candidates: [&str; 2]| {
            let candidates = candidates.map(str::to_owned).to_vec();
            let (subject, host, example) =
                ("model x".to_owned(), "hf.co".to_owned(), "hf.co/u/r/F".to_owned());
            RegistryError::Ambiguous { subject, host, candidates, example }.hint().unwrap()
        };
        let longer = "name one of them: hf.co/u/r/F, or a tag with more of its name";
        assert_eq!(hint(["a-Q8_0.gguf", "b-Q8_0.gguf"]), longer);
        assert_eq!(hint(["a/m-Q8_0.gguf", "b/M-Q8_0.gguf"]), "name one of them by its link: hf.co/u/r/F");
    }

    #[test]
    fn sidecars_of_a_repository_without_a_model_are_named() {
        let others = ["mmproj-F16.gguf", "imatrix.gguf"].map(str::to_owned).to_vec();
        let (subject, host, example) =
            ("model x".to_owned(), "hf.co".to_owned(), "hf.co/u/r/mmproj-F16.gguf".to_owned());
        let error = RegistryError::NoModel { subject, host, others, example };
        assert!(error.to_string().ends_with("of 2 GGUF files"), "{error}");
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("mmproj-F16.gguf, imatrix.gguf; ") && hint.ends_with("hf.co/u/r/mmproj-F16.gguf"),
            "{hint}"
        );
    }
}
