//! What to do after an error, where blobd knows more than the server has said.

use std::time::Duration;

use super::error::{RegistryError, later};

impl RegistryError {
    /// What to do next, and what the other mirrors answered if several were asked.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::AllFailed { error, others } => {
                let rest = if others.len() > 1 { "the other mirrors" } else { "the other mirror" };
                let rest = format!("{rest}: {}", others.join("; "));
                Some(error.hint().map_or_else(|| rest.clone(), |own| format!("{own}; {rest}")))
            }
            Self::Explained { hint, .. } => Some(hint.clone()),
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
            Self::Status { status, retry_after, .. } => of_status(*status, retry_after.as_ref()),
            Self::TooManyRequests { host, is_anonymous: true, .. } => {
                Some(format!("an account may have a higher limit: `blobd login {host}`"))
            }
            _ => None,
        }
    }
}

fn of_status(status: u16, retry_after: Option<&Duration>) -> Option<String> {
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
