//! The parameters of requests: what they name, for the logs, and how those of GET requests are written.

use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::reference::{Reference, ReferenceError};
use blobd_store_format::source::PullSource;

use super::audit::LogParams;
use super::error::{ErrorBody, ErrorCode};
use super::fit::FitParams;
use super::naming::EditParams;
use super::naming::{PromoteParams, UndoParams};
use super::push::{PushParams, TransferParams};
use super::request::{
    GcParams, ImportParams, LimitParams, OpenParams, PinParams, PullParams, ReleaseParams, RemoveParams,
    RenameParams, TagParams, UndeleteParams, VerifyParams,
};
use super::signatures::{SignParams, SignaturesParams};
use super::space::RemovePartialsParams;

/// The parameters of a request.
pub trait Params {
    /// What they name.
    fn subject(&self) -> Subject {
        Subject::default()
    }
}

/// What the parameters of a request name, for the records of failed requests too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// The model, as the client named it.
    pub model: Option<String>,
    /// What the model is made from, if that has another name.
    pub source: Option<String>,
    /// The verb, if the request does not decide it.
    pub verb: Option<&'static str>,
}

impl Subject {
    fn model(name: &Reference) -> Self {
        Self::text(short_name(name))
    }

    fn text(text: String) -> Self {
        Self { model: Some(text), ..Self::default() }
    }

    fn made_from(self, source: &Reference) -> Self {
        Self { source: Some(short_name(source)), ..self }
    }

    fn with_verb(self, verb: &'static str) -> Self {
        Self { verb: Some(verb), ..self }
    }
}

/// As the records of what was done have it, but an ID as it is.
fn short_name(reference: &Reference) -> String {
    if reference.id_prefix().is_some() { reference.as_requested() } else { reference.short() }
}

macro_rules! subjects {
    ($($params:ty: $subject:expr;)*) => {
        $(impl Params for $params {
            fn subject(&self) -> Subject {
                let subject: fn(&Self) -> Subject = $subject;
                subject(self)
            }
        })*
    };
}

subjects! {
    Reference: |name| Subject::model(name);
    (Reference, FitParams): |(name, _)| Subject::model(name);
    OpenParams: |params| Subject::model(&params.reference).with_verb(params.purpose.verb());
    ImportParams: |params| Subject::text(imported(params));
    PullParams: |params| Subject::text(pulled(params));
    PushParams: |params| Subject::model(&params.reference);
    TransferParams: |params| Subject::model(&params.source);
    EditParams: |params| Subject::model(&params.target).made_from(&params.source);
    PromoteParams: |params| Subject::model(&params.reference);
    SignParams: |params| Subject::model(&params.reference);
    SignaturesParams: |params| Subject::model(&params.reference);
    RemoveParams: |params| Subject::text(removed(params));
    UndeleteParams: |params| Subject::model(&params.reference);
    UndoParams: |params| params.reference.as_ref().map(Subject::model).unwrap_or_default();
    TagParams: |params| Subject::model(&params.target).made_from(&params.source);
    RenameParams: |params| Subject::model(&params.target).made_from(&params.source);
    PinParams: |params| Subject::model(&params.reference).with_verb(params.verb());
    VerifyParams: |params| params.reference.as_ref().map(Subject::model).unwrap_or_default();
    ReleaseParams: |params| params.reference.as_ref().map(Subject::model).unwrap_or_default();
    RemovePartialsParams: |params| match params.targets.is_empty() {
        true => Subject::default(),
        false => Subject::text(params.targets.join(" ")),
    };
}

impl Params for NoParams {}
impl Params for UsageParams {}
impl Params for SessionParams {}
impl Params for EvictionParams {}
impl Params for GcParams {}
impl Params for LimitParams {}
impl Params for LogParams {}

/// The name that the model is to get, or the file's if no name can be made from that.
fn imported(params: &ImportParams) -> String {
    let derived = || DerivedName::from_path(&params.file_name).ok().map(|names| short_name(names.first()));
    params.name.as_ref().map(short_name).or_else(derived).unwrap_or_else(|| params.file_name.clone())
}

/// What is to be pulled: the name, or the URL.
fn pulled(params: &PullParams) -> String {
    match &params.source {
        PullSource::Registry(reference) => short_name(reference),
        url => url.to_string(),
    }
}

fn removed(params: &RemoveParams) -> String {
    let names = params.references.iter().map(short_name);
    names.chain(params.patterns.iter().map(ToString::to_string)).collect::<Vec<_>>().join(" ")
}

/// Parameters in the path and the query of a GET request.
pub trait UriParams: Sized {
    /// The name of the model, which ends the path, and the query without its question mark.
    fn to_uri(&self) -> (Option<&Reference>, String);

    /// The parameters of a request with this name, without percent-encoding, and this query.
    fn from_uri(name: &str, query: Option<&str>) -> Result<Self, ErrorBody>;
}

/// The parameters of a request that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct NoParams {}

/// The parameters of [`Route::Usage`](super::route::Route::Usage).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageParams {
    /// Adds which models share what, with at most this many names in each list.
    pub detail: Option<u64>,
}

/// The parameters of [`Route::Sessions`](super::route::Route::Sessions).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionParams {
    /// Adds how much of each model is in memory.
    pub residency: bool,
}

/// The parameters of [`Route::Eviction`](super::route::Route::Eviction).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictionParams {
    /// The bytes to free; absent to reach the low watermark.
    pub bytes: Option<u64>,
}

impl UriParams for NoParams {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (None, String::new())
    }

    fn from_uri(_name: &str, _query: Option<&str>) -> Result<Self, ErrorBody> {
        Ok(Self {})
    }
}

impl UriParams for Reference {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (Some(self), String::new())
    }

    fn from_uri(name: &str, _query: Option<&str>) -> Result<Self, ErrorBody> {
        name.parse().map_err(|error: ReferenceError| ErrorBody::new(ErrorCode::InvalidRequest, error))
    }
}

impl UriParams for (Reference, FitParams) {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (Some(&self.0), self.1.to_query())
    }

    fn from_uri(name: &str, query: Option<&str>) -> Result<Self, ErrorBody> {
        let params = query.unwrap_or_default().parse();
        let invalid = |error| ErrorBody::new(ErrorCode::InvalidRequest, format!("query: {error}"));
        Ok((Reference::from_uri(name, None)?, params.map_err(invalid)?))
    }
}

impl UriParams for UsageParams {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (None, self.detail.map_or_else(String::new, |limit| format!("detail={limit}")))
    }

    fn from_uri(_name: &str, query: Option<&str>) -> Result<Self, ErrorBody> {
        Ok(Self { detail: number(query, "detail")? })
    }
}

impl UriParams for SessionParams {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (None, if self.residency { "residency=true".to_owned() } else { String::new() })
    }

    fn from_uri(_name: &str, query: Option<&str>) -> Result<Self, ErrorBody> {
        match query {
            None => Ok(Self { residency: false }),
            Some("residency=true") => Ok(Self { residency: true }),
            Some(other) => Err(wrong_query(other, "residency=true")),
        }
    }
}

impl UriParams for EvictionParams {
    fn to_uri(&self) -> (Option<&Reference>, String) {
        (None, self.bytes.map_or_else(String::new, |bytes| format!("bytes={bytes}")))
    }

    fn from_uri(_name: &str, query: Option<&str>) -> Result<Self, ErrorBody> {
        Ok(Self { bytes: number(query, "bytes")? })
    }
}

/// The number in a query `KEY=NUMBER`; `None` without a query.
fn number(query: Option<&str>, key: &str) -> Result<Option<u64>, ErrorBody> {
    let Some(query) = query else { return Ok(None) };
    let value = query.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
    let number = value.and_then(|number| number.parse().ok());
    number.map(Some).ok_or_else(|| wrong_query(query, &format!("{key}=NUMBER")))
}

fn wrong_query(query: &str, expected: &str) -> ErrorBody {
    let message = format!("query: not one of this request: expected {expected}, found {query:?}");
    ErrorBody::new(ErrorCode::InvalidRequest, message)
}

/// The path of a route with this name in place of `{reference}`, percent-encoded except for slashes and other characters
/// that need not be; and the query, if there is one.
pub(super) fn path_of(path: &str, name: Option<&Reference>, query: &str) -> String {
    let mut target = path.split('{').next().unwrap_or_default().to_owned();
    for byte in name.map(Reference::as_requested).unwrap_or_default().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b':' | b'.' | b'-' | b'_' | b'@' => {
                target.push(byte.into());
            }
            _ => target.push_str(&format!("%{byte:02X}")),
        }
    }
    if !query.is_empty() {
        target.push('?');
        target.push_str(query);
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(params: &impl UriParams) -> String {
        let (name, query) = params.to_uri();
        path_of("/p/{reference}", name, &query)
    }

    #[test]
    fn parameters_of_queries_survive_a_round_trip() {
        let usage = UsageParams { detail: Some(7) };
        assert_eq!(written(&usage), "/p/?detail=7");
        assert_eq!(UsageParams::from_uri("", Some("detail=7")).unwrap(), usage);
        assert_eq!(UsageParams::from_uri("", None).unwrap(), UsageParams::default());
        let sessions = SessionParams { residency: true };
        assert_eq!(written(&sessions), "/p/?residency=true");
        assert_eq!(SessionParams::from_uri("", Some("residency=true")).unwrap(), sessions);
        let fit =
            ("hf.co/a/b c".parse::<Reference>().ok(), FitParams { context: Some(0), ..FitParams::default() });
        assert_eq!(fit.0, None, "no such name");
        let fit = ("hf.co/a/b:c".parse::<Reference>().unwrap(), fit.1);
        assert_eq!(written(&fit), "/p/hf.co/a/b:c?context=0");
        assert_eq!(<(Reference, FitParams)>::from_uri("hf.co/a/b:c", Some("context=0")).unwrap(), fit);
    }

    #[test]
    fn query_of_another_request_is_refused() {
        let message = |query| UsageParams::from_uri("", Some(query)).unwrap_err().message;
        let expected = "query: not one of this request: expected detail=NUMBER, found \"detail=x\"";
        assert_eq!(message("detail=x"), expected);
        for query in ["", "detail", "detail=", "detail=-1", "details=1", "bytes=1"] {
            assert_eq!(UsageParams::from_uri("", Some(query)).unwrap_err().code, ErrorCode::InvalidRequest);
        }
        assert!(SessionParams::from_uri("", Some("residency=false")).is_err());
    }

    #[test]
    fn parameters_name_models_as_the_records_of_what_was_done() {
        let name = |text: &str| text.parse::<Reference>().unwrap();
        let tag =
            TagParams { source: name("a"), target: name("library/b:latest"), force: false, origin: None };
        assert_eq!(
            tag.subject(),
            Subject { model: Some("b:latest".into()), source: Some("a:latest".into()), verb: None }
        );
        let unpin = PinParams { reference: name("a:q4"), pinned: false };
        assert_eq!(
            unpin.subject(),
            Subject { model: Some("a:q4".into()), source: None, verb: Some("unpin") }
        );
        let import = |file_name: &str| ImportParams::new(file_name);
        assert_eq!(import("tiny-Q4_K_M.gguf").subject().model.as_deref(), Some("tiny:Q4_K_M"));
        assert_eq!(RemovePartialsParams::default().subject(), Subject::default());
    }
}
