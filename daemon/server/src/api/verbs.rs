//! Which verb a request is, for the log, the audit log and the metrics; and which models its parameters name.

use blobd_client::protocol::audit::LogParams;
use blobd_client::protocol::edit::EditParams;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::promote::PromoteParams;
use blobd_client::protocol::request::{
    GcParams, ImportParams, LimitParams, OpenParams, OpenPurpose, PinParams, PullParams, ReleaseParams,
    RemoveParams, RenameParams, TagParams, UndeleteParams, VerifyParams,
};
use blobd_client::protocol::space::RemovePartialsParams;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use hyper::Method;

use crate::audit::LIFECYCLE_VERBS;
use crate::ops::imported_name;
use crate::request_record::Verb;

/// Requests that read: method and path, or the start of a path that ends in a slash, and the verb.
const READING: [(&str, &str, &str); 27] = [
    ("GET", "/v1/version", "version"),
    ("GET", "/v1/access", "access"),
    ("GET", "/v1/models", "ls"),
    ("GET", "/v1/models/", "show"),
    ("GET", "/v1/manifests/", "manifest"),
    ("GET", "/v1/heads/", "heads"),
    ("GET", "/v1/fit/", "fit"),
    ("GET", "/v1/sharing/", "sharing"),
    ("GET", "/v1/history/", "history"),
    ("GET", "/v1/ps", "ps"),
    ("GET", "/v1/df", "df"),
    ("GET", "/v1/df/users", "df users"),
    ("GET", "/v1/partials", "partial ls"),
    ("GET", "/v1/trash", "trash"),
    ("GET", "/v1/doctor", "doctor"),
    ("GET", "/v1/eviction", "eviction"),
    ("GET", "/v1/gc", "gc plan"),
    ("GET", "/v1/limit", "limit show"),
    ("GET", "/v1/config", "config"),
    ("GET", "/v1/health", "health"),
    ("GET", "/v1/metrics", "metrics"),
    ("POST", "/v1/pull/plan", "pull plan"),
    ("POST", "/v1/resolve", "resolve"),
    ("POST", "/v1/inspect", "inspect"),
    ("POST", "/v1/log", "log"),
    // Not known to this version, or malformed.
    ("GET", "/", "unknown"),
    ("POST", "/", "unknown"),
];

/// Requests that change the store, give out descriptors or control the daemon.
const AUDITED: [(&str, &str); 16] = [
    ("/v1/open", "open"),
    ("/v1/import", "import"),
    ("/v1/pull", "pull"),
    ("/v1/edit", "edit"),
    ("/v1/promote", "promote"),
    ("/v1/remove", "rm"),
    ("/v1/undelete", "undelete"),
    ("/v1/tag", "tag"),
    ("/v1/rename", "rename"),
    ("/v1/pin", "pin"),
    ("/v1/gc", "gc"),
    ("/v1/verify", "verify"),
    ("/v1/reindex", "reindex"),
    ("/v1/release", "release"),
    ("/v1/partials/remove", "partial rm"),
    ("/v1/limit", "limit"),
];

/// The verbs of records about what the daemon does by itself.
const OF_DAEMON: [&str; 3] = ["evict", "scrub", "audit"];

/// The verbs that a record of the audit log can have.
pub(super) fn recorded() -> impl Iterator<Item = &'static str> {
    names().chain(OF_DAEMON).chain(LIFECYCLE_VERBS)
}

/// The results that a record of the audit log can have.
pub(super) fn results() -> impl Iterator<Item = &'static str> {
    let others = ["ok", "cancelled", "unacknowledged", "dropped", "omitted", "on", "off"];
    ErrorCode::ALL.into_iter().map(ErrorCode::name).chain(others)
}

/// All verbs.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    // Only the parameters tell them from `pin` and `open`.
    let purposes = OpenPurpose::ALL.into_iter().map(OpenPurpose::verb).filter(|verb| *verb != "open");
    let by_parameters = purposes.chain(["unpin"]);
    let of_paths = READING.iter().map(|(_, _, name)| *name).chain(AUDITED.iter().map(|(_, name)| *name));
    of_paths.chain(by_parameters)
}

/// The verb of a request; `unknown` if there is none.
pub(super) fn verb(method: &Method, path: &str) -> Verb {
    if method == Method::POST
        && let Some((_, name)) = AUDITED.iter().find(|(audited, _)| *audited == path)
    {
        return Verb { name, is_audited: true, gives_content: path == "/v1/open" };
    }
    let is_of = |start: &str| path == start || start.ends_with('/') && path.starts_with(start);
    let found = READING.iter().find(|(of, start, _)| method.as_str() == *of && is_of(start));
    Verb { name: found.map_or("unknown", |(_, _, name)| name), is_audited: false, gives_content: false }
}

/// What the parameters of a request name, for the records of failed requests too.
pub(super) trait Subject {
    /// The model, as the client named it.
    fn subject(&self) -> Option<String> {
        None
    }

    /// The verb, if the path does not decide it.
    fn verb(&self) -> Option<&'static str> {
        None
    }

    /// What the model is made from, if that has another name.
    fn source(&self) -> Option<String> {
        None
    }
}

macro_rules! subjects {
    ($($params:ty: $subject:expr $(, from $source:expr)?;)*) => {
        $(impl Subject for $params {
            fn subject(&self) -> Option<String> {
                let subject: fn(&Self) -> Option<String> = $subject;
                subject(self)
            }
            $(fn source(&self) -> Option<String> {
                let source: fn(&Self) -> Option<String> = $source;
                source(self)
            })?
        })*
    };
}

subjects! {
    ImportParams: |params| Some(imported(params));
    PullParams: |params| Some(pulled(params));
    EditParams: |params| Some(short_name(&params.target)), from |params| Some(short_name(&params.source));
    PromoteParams: |params| Some(short_name(&params.reference));
    RemoveParams: |params| Some(removed(params));
    UndeleteParams: |params| Some(short_name(&params.reference));
    TagParams: |params| Some(short_name(&params.target)), from |params| Some(short_name(&params.source));
    RenameParams: |params| Some(short_name(&params.target)), from |params| Some(short_name(&params.source));
    VerifyParams: |params| params.reference.as_ref().map(short_name);
    ReleaseParams: |params| params.reference.as_ref().map(short_name);
    RemovePartialsParams: |params| (!params.targets.is_empty()).then(|| params.targets.join(" "));
}

impl Subject for GcParams {}
impl Subject for LimitParams {}
impl Subject for LogParams {}

impl Subject for OpenParams {
    fn subject(&self) -> Option<String> {
        Some(short_name(&self.reference))
    }

    fn verb(&self) -> Option<&'static str> {
        Some(self.purpose.verb())
    }
}

impl Subject for PinParams {
    fn subject(&self) -> Option<String> {
        Some(short_name(&self.reference))
    }

    fn verb(&self) -> Option<&'static str> {
        Some(if self.pinned { "pin" } else { "unpin" })
    }
}

/// As the records of what was done have it, but an ID as it is.
pub(super) fn short_name(reference: &Reference) -> String {
    if reference.id_prefix().is_some() { reference.as_requested() } else { reference.short() }
}

/// The name that the model is to get, or the file's if no name can be made from that.
fn imported(params: &ImportParams) -> String {
    imported_name(params).map_or_else(|| params.file_name.clone(), |name| short_name(&name))
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
