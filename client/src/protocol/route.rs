//! The requests of the API, each defined once: the table below.
//!
//! The table defines the daemon's dispatch, its rights, the verbs of its logs and metrics, the methods of the clients, what
//! the page may request, and the types of the clients in other languages. A test compares `docs/PROTOCOL.md` with it.

use std::fmt;
use std::marker::PhantomData;

use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::access::Right;
use super::error::{ErrorBody, ErrorCode};
use super::event::Event;
pub use super::params::Params;
use super::params::{EvictionParams, NoParams, SessionParams, Subject, UriParams, UsageParams, path_of};
use super::request::{OpenPurpose, PinParams};
use super::{access, audit, event, fit, naming, pull, push, request, response, signatures, space, upkeep};

/// Two requests have this path.
const GC: &str = "/v1/gc";
/// Two requests have this path.
const LIMIT: &str = "/v1/limit";

/// The table of all requests. A row is
/// `Name: METHOD path, verb, right, [flags], fn method(parameters) -> answer(types);`
///
/// - `path`: a model's name follows if it ends in `{reference}`.
/// - `verb`: names the request in `blobd log`, in the daemon's log and in the metrics.
/// - `right`: what its user needs; some parameters need a higher one.
/// - flags: `Audited` has a record in the audit log, `Content` gives out the content of a model, `Once` has another
///   result when it is sent a second time, `Page` may be asked by the page of `blobd web`, which may send one with `Action`
///   when its user has confirmed it.
/// - `fn method`: the clients have this method; without it, they have other methods for the request.
/// - parameters: in the path and the query of `Get`, and the JSON body of `Post`.
/// - answer: one JSON document, an [`Event`] per line, frames after an upgrade, or bytes of another format.
macro_rules! routes {
    ($callback:ident) => {
        $callback! {
            /// The daemon's version and the store that it serves.
            Version: Get "/v1/version", "version", Anyone, [Page], fn version(NoParams) -> Document(response::Version);
            /// The user of this connection as the daemon sees it, and its rights.
            Access: Get "/v1/access", "access", Anyone, [Page], fn access(NoParams) -> Document(access::OwnAccess);
            /// Whether the daemon works.
            Health: Get "/v1/health", "health", Anyone, [], fn health(NoParams) -> Document(upkeep::Health);
            /// Lists the models.
            Models: Get "/v1/models", "ls", Read, [Page], fn models(NoParams) -> Document(response::ModelList);
            /// The details of one model: its metadata, its files, and name, type, shape and size of every tensor. Passes no
            /// descriptors and maps nothing.
            Model: Get "/v1/models/{reference}", "show", Read, [Page],
                fn model(Reference) -> Document(response::ModelDetails);
            /// A model's manifest with the original bytes, whose digest is the model's ID.
            Manifest: Get "/v1/manifests/{reference}", "manifest", Read, [], (Reference) -> Bytes(Manifest);
            /// The headers and short texts of a model in the store. Takes no lease and does not count as use.
            Heads: Get "/v1/heads/{reference}", "heads", Read, [], fn heads(Reference) -> Document(response::ModelHeads);
            /// The memory that a model in the store needs, and how much of it fits into the memory in the parameters. Fails with
            /// `invalid_input` if the model has no GGUF file.
            Fit: Get "/v1/fit/{reference}", "fit", Read, [Page],
                ((Reference, fit::FitParams)) -> Document(fit::FitReport);
            /// What a name has meant, and who changed that. The name may have been removed.
            History: Get "/v1/history/{reference}", "history", Read, [],
                fn history(Reference) -> Document(naming::NameHistory);
            /// The bytes that a model shares with others.
            Sharing: Get "/v1/sharing/{reference}", "sharing", Read, [],
                fn sharing(Reference) -> Document(response::ModelSharing);
            /// Disk usage of the store and of each model.
            Usage: Get "/v1/df", "df", Read, [Page], (UsageParams) -> Document(space::DiskUsage);
            /// What is charged to each user, and the quotas. Administrators see all users, others themselves.
            UserUsage: Get "/v1/df/users", "df users", Read, [],
                fn user_usage(NoParams) -> Document(space::UserUsage);
            /// Lists the sessions: which processes have which models open.
            Sessions: Get "/v1/ps", "ps", Read, [Page], (SessionParams) -> Document(response::SessionList);
            /// Lists the pulls in progress.
            RunningPulls: Get "/v1/pulls", "pulls", Read, [Page],
                fn running_pulls(NoParams) -> Document(pull::RunningPulls);
            /// Lists unfinished downloads.
            Partials: Get "/v1/partials", "partial ls", Read, [Page],
                fn unfinished_downloads(NoParams) -> Document(space::UnfinishedDownloads);
            /// Lists the models in the trash.
            Trash: Get "/v1/trash", "trash", Read, [Page], fn trash(NoParams) -> Document(naming::TrashList);
            /// Checks the setup.
            Doctor: Get "/v1/doctor", "doctor", Read, [], fn doctor(NoParams) -> Document(upkeep::DoctorReport);
            /// The models that would be evicted to free space.
            Eviction: Get "/v1/eviction", "eviction", Read, [Page], (EvictionParams) -> Document(upkeep::EvictionPlan);
            /// What a collection would delete.
            GcPlan: Get GC, "gc plan", Read, [Page], (NoParams) -> Document(upkeep::GcReport);
            /// The rate limit of all pulls, pushes and transfers together.
            Limit: Get LIMIT, "limit show", Read, [Page], fn limit(NoParams) -> Document(upkeep::PullLimit);
            /// The settings that the daemon uses, and where each comes from.
            Configuration: Get "/v1/config", "config", Read, [],
                fn configuration(NoParams) -> Document(upkeep::Configuration);
            /// The metrics in Prometheus's text format.
            Metrics: Get "/v1/metrics", "metrics", Read, [], (NoParams) -> Bytes(String);

            /// Opens a model: after the upgrade, the daemon sends descriptors.
            Open: Post "/v1/open", "open", Read, [Audited, Content],
                (request::OpenParams) -> Frames(response::OpenHead);
            /// Ends the leases of a process or of a model. Maps stay valid; blobs of models that were removed meanwhile are
            /// freed. Fails with `denied` if all belong to other users and the caller is not an administrator.
            Release: Post "/v1/release", "release", Read, [Audited, Once, Action],
                fn release(request::ReleaseParams) -> Document(response::Released);
            /// Reads the store's content from the disk, compares it with its digests, and repairs it if requested. Damage is
            /// reported in the result, not as an error.
            Verify: Post "/v1/verify", "verify", Read, [Audited],
                fn verify(request::VerifyParams) -> Events(upkeep::VerifyProgress, upkeep::Verified);
            /// A model's signatures, and which of the given keys have made them. No file of the model is read: the store has
            /// their digests.
            Signatures: Post "/v1/signatures", "signatures", Read, [],
                fn signatures(signatures::SignaturesParams) -> Document(signatures::SignatureReport);
            /// Reads the audit log.
            Log: Post "/v1/log", "log", Read, [Once],
                (audit::LogParams) -> Events(Box<audit::AuditRecord>, audit::LogEnd);
            /// Pulls a model from its registry.
            Pull: Post "/v1/pull", "pull", Pull, [Audited, Action],
                fn pull(request::PullParams) -> Events(pull::PullProgress, pull::PullDone);
            /// Uploads a model to a registry.
            Push: Post "/v1/push", "push", Administer, [Audited],
                fn push(push::PushParams) -> Events(event::WorkProgress, push::Pushed);
            /// Publishes a model of one registry at another, without storing it.
            Transfer: Post "/v1/transfer", "transfer", Administer, [Audited],
                fn transfer(push::TransferParams) -> Events(event::WorkProgress, push::Transferred);
            /// The plan of a pull: the bytes to download and those to reuse. Requests the manifest, headers and samples of
            /// tensors from the registry, and stores nothing.
            PullPlan: Post "/v1/pull/plan", "pull plan", Pull, [Action],
                fn plan_pull(request::PullParams) -> Document(pull::PullPlan);
            /// Finds out which model a source names at its server now. Requests its manifest or its list of files, and stores
            /// nothing. Only the source of the parameters is used.
            Resolve: Post "/v1/resolve", "resolve", Pull, [],
                fn resolve(request::PullParams) -> Document(pull::Resolved);
            /// A model that is not in the store: its files, with their headers and short texts. Requests the manifest, headers
            /// and texts from the registry, and stores nothing. Only the source of the parameters is used.
            Inspect: Post "/v1/inspect", "inspect", Pull, [],
                fn inspect(request::PullParams) -> Document(response::ModelHeads);
            /// Imports a file whose descriptor the client sends after the upgrade.
            Import: Post "/v1/import", "import", Pull, [Audited],
                (request::ImportParams) -> Frames(pull::Imported);
            /// Makes a model with other metadata and the same tensors.
            Edit: Post "/v1/edit", "edit", Pull, [Audited],
                fn edit(naming::EditParams) -> Events(event::WorkProgress, naming::Edited);
            /// Copies what a model uses of lower stores into the writable store.
            Promote: Post "/v1/promote", "promote", Pull, [Audited],
                fn promote(naming::PromoteParams) -> Events(event::WorkProgress, naming::Promoted);
            /// Keeps a signature beside a model. The client has made it; it must be over the model's files.
            Sign: Post "/v1/sign", "sign", Pull, [Audited],
                fn sign(signatures::SignParams) -> Document(signatures::Signed);
            /// Removes names, and the data that only they need.
            Remove: Post "/v1/remove", "rm", Pull, [Audited, Once, Action],
                fn remove(request::RemoveParams) -> Document(naming::Removed);
            /// Restores a model from the trash.
            Undelete: Post "/v1/undelete", "undelete", Pull, [Audited, Once, Action],
                fn undelete(request::UndeleteParams) -> Document(naming::Undeleted);
            /// Takes back a change of names: the caller's newest one, or that of a given name.
            Undo: Post "/v1/undo", "undo", Pull, [Audited, Once, Action],
                fn undo(naming::UndoParams) -> Document(naming::Undone);
            /// Pins or unpins a model. Eviction and removal do not affect a pinned model.
            Pin: Post "/v1/pin", "pin", Pull, [Audited, Action],
                fn pin(request::PinParams) -> Document(naming::Pinned);
            /// Gives a model another name.
            Tag: Post "/v1/tag", "tag", Pull, [Audited], fn tag(request::TagParams) -> Document(naming::Tagged);
            /// Gives a model another name in place of its own.
            Rename: Post "/v1/rename", "rename", Pull, [Audited, Once],
                fn rename(request::RenameParams) -> Document(naming::Renamed);
            /// Drops unfinished downloads. Fails with `busy` if a pull uses one.
            RemovePartials: Post "/v1/partials/remove", "partial rm", Pull, [Audited, Once],
                fn remove_unfinished_downloads(space::RemovePartialsParams) -> Document(space::DroppedDownloads);
            /// Sets the rate limit of all pulls, pushes and transfers together, also of running ones, until the daemon stops.
            SetLimit: Post LIMIT, "limit", Administer, [Audited, Action],
                fn set_limit(request::LimitParams) -> Document(upkeep::PullLimit);
            /// Deletes unneeded data.
            Gc: Post GC, "gc", Administer, [Audited, Action], (request::GcParams) -> Document(upkeep::GcReport);
            /// Compares the daemon's index with the disk and repairs it.
            Reindex: Post "/v1/reindex", "reindex", Administer, [Audited],
                fn reindex(NoParams) -> Document(upkeep::Reindexed);
        }
    };
}
pub(crate) use routes;

macro_rules! define_routes {
    (@right Anyone) => { None };
    (@right $right:ident) => { Some(Right::$right) };
    (@encode $path:expr, $params:ident, Get) => {{
        let (name, query) = $params.to_uri();
        Ok(Encoded { target: path_of($path, name, &query), body: None })
    }};
    (@encode $path:expr, $params:ident, Post) => {
        Ok(Encoded { target: $path.to_owned(), body: Some(serde_json::to_vec($params)?) })
    };
    (@decode $received:ident, Get, $($params:tt)*) => { UriParams::from_uri($received.name, $received.query) };
    // The protocol allows any query and body here.
    (@decode $received:ident, Post, NoParams) => {{ let _any = $received; Ok(NoParams {}) }};
    (@decode $received:ident, Post, $($params:tt)*) => { from_body($received.body) };
    ($(
        $(#[$doc:meta])*
        $name:ident: $method:ident $path:tt, $verb:literal, $right:ident, [$($flag:ident),*],
            $(fn $call:ident)? ($($params:tt)*) -> $answer:ident($($type:tt)*);
    )*) => {
        /// A request of the API.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Route {
            $($(#[$doc])* $name,)*
        }

        impl Route {
            /// All requests.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            const fn definition(self) -> Definition {
                match self {
                    $(Self::$name => Definition {
                        method: Method::$method,
                        path: $path,
                        verb: $verb,
                        right: define_routes!(@right $right),
                        flags: &[$(Flag::$flag),*],
                        answer: AnswerKind::$answer,
                    },)*
                }
            }

            /// What the parameters of a request name.
            pub fn subject(self, received: &Received<'_>) -> Result<Subject, ErrorBody> {
                match self {
                    $(Self::$name => <markers::$name as Request>::decode(received).map(|params| params.subject()),)*
                }
            }
        }

        impl Route {
            /// The request as it is sent, with parameters that were received from elsewhere: only what they mean is taken over.
            pub fn forwarded(self, received: &Received<'_>) -> Result<Encoded, ErrorBody> {
                let failed = |error| ErrorBody::new(ErrorCode::Internal, error);
                match self {
                    $(Self::$name => {
                        let params = <markers::$name as Request>::decode(received)?;
                        <markers::$name as Request>::encode(&params).map_err(failed)
                    })*
                }
            }
        }

        /// A type for each request, with the types of its parameters and its answer.
        pub mod markers {
            $(
                $(#[$doc])*
                #[derive(Clone, Copy, Debug)]
                pub struct $name;
            )*
        }

        $(impl Request for markers::$name {
            const ROUTE: Route = Route::$name;
            type Params = $($params)*;
            type Answer = $answer<$($type)*>;

            fn encode(params: &Self::Params) -> Result<Encoded, serde_json::Error> {
                define_routes!(@encode $path, params, $method)
            }

            fn decode(received: &Received<'_>) -> Result<Self::Params, ErrorBody> {
                define_routes!(@decode received, $method, $($params)*)
            }
        })*
    };
}

routes!(define_routes);

/// The types of a request. Implemented by the [`markers`].
pub trait Request {
    /// The request.
    const ROUTE: Route;
    /// Its parameters.
    type Params: Params;
    /// The form and the types of its answer.
    type Answer;

    /// The parameters as they are sent.
    fn encode(params: &Self::Params) -> Result<Encoded, serde_json::Error>;

    /// The parameters as they were received.
    fn decode(received: &Received<'_>) -> Result<Self::Params, ErrorBody>;
}

/// The parameters of a request as they are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The path and the query.
    pub target: String,
    /// The JSON body of a POST request.
    pub body: Option<Vec<u8>>,
}

/// The parameters of a request as they were received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received<'r> {
    /// The model's name at the end of the path, in place of `{reference}`, without percent-encoding.
    pub name: &'r str,
    /// What follows the question mark.
    pub query: Option<&'r str>,
    /// The body of a POST request.
    pub body: &'r [u8],
}

/// An answer of one JSON document.
#[derive(Debug)]
pub struct Document<T>(PhantomData<T>);

/// An answer of an [`Event`] per line.
#[derive(Debug)]
pub struct Events<P, D>(PhantomData<Event<P, D>>);

/// An upgrade to frames, with the type of the frame that has the result.
#[derive(Debug)]
pub struct Frames<T>(PhantomData<T>);

/// An answer of bytes from which this type is parsed.
#[derive(Debug)]
pub struct Bytes<T>(PhantomData<T>);

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// One JSON document.
    Document,
    /// An [`Event`] per line.
    Events,
    /// An upgrade to frames.
    Frames,
    /// Bytes of another format.
    Bytes,
}

/// The method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET: the parameters are in the path and the query.
    Get,
    /// POST: the parameters are the body.
    Post,
}

impl Method {
    /// As in HTTP.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

struct Definition {
    method: Method,
    path: &'static str,
    verb: &'static str,
    right: Option<Right>,
    flags: &'static [Flag],
    answer: AnswerKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    Action,
    Audited,
    Content,
    Once,
    Page,
}

/// The placeholder for a model's name at the end of a path.
const NAME: &str = "{reference}";

impl Route {
    /// The request with this method and path, and the name at the end of the path, percent-encoded.
    pub fn find<'p>(method: &str, path: &'p str) -> Option<(Self, &'p str)> {
        let with_method = Self::ALL.iter().filter(|route| route.method().name() == method);
        with_method.filter_map(|route| Some((*route, route.name_in(path)?))).next()
    }

    /// The model's name at the end of a path of this request, percent-encoded; empty if the request has none.
    pub fn name_in(self, path: &str) -> Option<&str> {
        match self.path().strip_suffix(NAME) {
            Some(prefix) => path.strip_prefix(prefix),
            None => (self.path() == path).then_some(""),
        }
    }

    /// Its method.
    pub const fn method(self) -> Method {
        self.definition().method
    }

    /// Its path. A model's name takes the place of `{reference}` at the end.
    pub const fn path(self) -> &'static str {
        self.definition().path
    }

    /// The name of the request in the logs and the metrics. The parameters of some decide it: see [`Subject::verb`].
    pub const fn verb(self) -> &'static str {
        self.definition().verb
    }

    /// The right that its user needs; `None` if everybody who can connect may send it.
    pub const fn right(self) -> Option<Right> {
        self.definition().right
    }

    /// The form of its answer.
    pub const fn answer(self) -> AnswerKind {
        self.definition().answer
    }

    /// Whether the audit log has a record of each: it changes the store, gives out descriptors or controls the daemon.
    pub fn is_audited(self) -> bool {
        self.has(Flag::Audited)
    }

    /// Whether it gives out the content of a model.
    pub fn gives_content(self) -> bool {
        self.has(Flag::Content)
    }

    /// Whether a second execution has the same result as the first.
    pub fn is_repeatable(self) -> bool {
        !self.has(Flag::Once)
    }

    /// Whether the page of `blobd web` may ask it.
    pub fn is_for_page(self) -> bool {
        self.has(Flag::Page)
    }

    /// Whether the page of `blobd web` may send it when its user has confirmed it.
    pub fn is_action_of_page(self) -> bool {
        self.has(Flag::Action)
    }

    /// All verbs of requests.
    pub fn verbs() -> impl Iterator<Item = &'static str> {
        let purposes = OpenPurpose::ALL.into_iter().map(OpenPurpose::verb);
        let by_parameters = purposes.filter(|verb| *verb != Self::Open.verb()).chain([PinParams::UNPIN]);
        Self::ALL.iter().map(|route| route.verb()).chain(by_parameters)
    }

    fn has(self, flag: Flag) -> bool {
        self.definition().flags.contains(&flag)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method().name(), self.path())
    }
}

fn from_body<P: serde::de::DeserializeOwned>(body: &[u8]) -> Result<P, ErrorBody> {
    let malformed = |error| ErrorBody::new(ErrorCode::InvalidRequest, format!("request body: {error}"));
    serde_json::from_slice(body).map_err(malformed)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn requests_differ_in_method_or_path_and_have_verbs_of_their_own() {
        let all = |part: fn(&Route) -> String| Route::ALL.iter().map(part).collect::<BTreeSet<_>>().len();
        assert_eq!(all(Route::to_string), Route::ALL.len());
        assert_eq!(all(|route| route.verb().to_owned()), Route::ALL.len());
        assert!(Route::ALL.iter().all(|route| route.path().starts_with("/v1/") && !route.verb().is_empty()));
    }

    #[test]
    fn each_request_is_found_by_its_method_and_path() {
        for route in Route::ALL {
            let path = route.path().replace(NAME, "hf.co/a/b:c");
            let found = Route::find(route.method().name(), &path);
            let name = if route.path().ends_with(NAME) { "hf.co/a/b:c" } else { "" };
            assert_eq!(found, Some((*route, name)), "{route}");
        }
    }

    #[test]
    fn requests_that_are_not_in_the_table_do_not_exist() {
        for (method, path) in [
            ("DELETE", Route::Models.path()),
            ("POST", Route::Models.path()),
            ("GET", Route::Tag.path()),
            ("get", Route::Models.path()),
            ("GET", "/v1/model"),
            ("GET", "/v1/models?x"),
            ("GET", "/"),
            ("HEAD", Route::Usage.path()),
        ] {
            assert_eq!(Route::find(method, path), None, "{method} {path}");
        }
    }

    /// The first two cells of the rows that begin with a request, in a section of the specification.
    fn documented(section: &str) -> BTreeMap<String, String> {
        let document = include_str!("../../../docs/PROTOCOL.md");
        let lines = document.lines().skip_while(|line| *line != section).skip(1);
        let rows =
            lines.take_while(|line| !line.starts_with("#")).filter_map(|line| line.strip_prefix("| `"));
        let row = |row: &str| {
            let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned());
            Some((cells.next()?, cells.next()?))
        };
        rows.filter(|row| row.starts_with("GET ") || row.starts_with("POST ")).filter_map(row).collect()
    }

    #[test]
    fn every_request_is_documented_with_its_right_and_what_the_policy_checks() {
        let rights = Route::ALL
            .iter()
            .map(|route| (route.to_string(), route.right().map_or("none", Right::name).to_owned()));
        assert_eq!(rights.collect::<BTreeMap<_, _>>(), documented("### 2.2 Rights"));
        let checked = documented("### 2.3 Policy");
        let known = ["nothing", "the model", "the source", "the file"];
        assert!(checked.values().all(|checked| known.contains(&checked.as_str())), "{checked:?}");
        let all: BTreeSet<_> = Route::ALL.iter().map(Route::to_string).collect();
        assert_eq!(checked.into_keys().collect::<BTreeSet<_>>(), all);
        // Some rows say what a query adds.
        let first =
            |cell: String| cell.split(['`', '?']).next().unwrap_or_default().trim_end_matches(',').to_owned();
        assert_eq!(documented("## 2. Requests").into_keys().map(first).collect::<BTreeSet<_>>(), all);
    }

    #[test]
    fn page_may_send_only_requests_that_read() {
        let for_page = || Route::ALL.iter().filter(|route| route.is_for_page());
        assert!(for_page().count() > 0);
        for route in for_page() {
            assert!(route.method() == Method::Get && !route.is_audited(), "{route}");
            assert_eq!((route.answer(), route.is_repeatable()), (AnswerKind::Document, true), "{route}");
        }
    }

    /// A link or a picture on another site makes a browser send a GET, so none of them changes anything.
    #[test]
    fn actions_of_the_page_are_sent_by_post_and_give_no_content() {
        let actions = || Route::ALL.iter().filter(|route| route.is_action_of_page());
        assert!(actions().count() > 0);
        for route in actions() {
            assert!(route.method() == Method::Post && !route.is_for_page(), "{route}");
            // The command itself keeps the pulls.
            let is_document = route.answer() == AnswerKind::Document || *route == Route::Pull;
            assert!(!route.gives_content() && is_document, "{route}");
        }
    }

    #[test]
    fn forwarded_request_has_nothing_that_is_not_a_parameter() {
        let query = |query| Received { query: Some(query), ..Received::default() };
        let forwarded =
            |route: Route, query: &Received<'_>| route.forwarded(query).map(|encoded| encoded.target);
        let usage = format!("{}?detail=12", Route::Usage.path());
        assert_eq!(forwarded(Route::Usage, &query("detail=12")).unwrap(), usage);
        assert!(forwarded(Route::Usage, &query("detail=12 HTTP/1.1\r\nHost: x")).is_err());
        assert_eq!(forwarded(Route::Models, &query("x HTTP/1.1\r\nHost: x")).unwrap(), Route::Models.path());
    }

    /// Malformed names, queries and bodies are refused, and nothing panics.
    #[test]
    fn malformed_parameters_are_refused() {
        let malformed = Received { name: "../../etc/passwd", query: Some("no=such"), body: b"{\"no\":1}" };
        for route in Route::ALL {
            let takes_none = matches!(route, Route::Reindex)
                || route.method() == Method::Get && !route.path().ends_with(NAME) && !takes_query(*route);
            assert_eq!(route.subject(&malformed).is_ok(), takes_none, "{route}");
        }
    }

    fn takes_query(route: Route) -> bool {
        matches!(route, Route::Usage | Route::Sessions | Route::Eviction)
    }
}
