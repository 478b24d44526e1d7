//! The routes: the right that each request needs, and what it takes its turn and its memory from.

use blobd_store::ListingSize;
use hyper::Method;

use crate::access::Right;
use crate::permits::PermitPool;
use crate::state::Daemon;

/// A request that exists.
#[derive(Debug)]
pub(super) struct Route {
    method: Method,
    /// `{reference}` at the end stands for any text.
    path: &'static str,
    /// `None` for a request that all who can connect may make.
    pub(super) right: Option<Right>,
    /// Where its user takes a turn before it uses a thread that may block.
    pub(super) turns: fn(&Daemon) -> &PermitPool,
    /// What is counted before its response is made.
    pub(super) memory: Memory,
}

/// The memory of a response and of the work for it. It is counted before the work begins, and reduced to the length of the
/// response when that is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Memory {
    /// Short, or counted by the request itself. If it is not short because of what the client has asked for, it is counted
    /// when its length is known, and made after that.
    Short,
    /// At most this many bytes, by what the daemon does now.
    Daemon(fn(&Daemon) -> usize),
    /// At most this many bytes, by what the store has.
    Store(fn(&StoreSize) -> usize),
}

/// What responses about the whole store grow with.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreSize {
    pub(super) listing: ListingSize,
    pub(super) blobs: usize,
}

impl StoreSize {
    /// Memory of `bytes` for each model, and of its texts (such as its name), as values and as JSON.
    const fn models(&self, bytes: usize) -> usize {
        let ListingSize { models, text_bytes } = self.listing;
        models.saturating_mul(bytes).saturating_add(text_bytes.saturating_mul(3))
    }

    /// The same, and `per_blob` for each blob.
    const fn models_and_blobs(&self, bytes: usize, per_blob: usize) -> usize {
        self.models(bytes).saturating_add(self.blobs.saturating_mul(per_blob))
    }
}

/// More than an open model takes in the list of all of them, as a value and as JSON.
const SESSION_BYTES: usize = 1 << 10;
/// More than the text of all metrics.
const METRICS_BYTES: usize = 128 << 10;

const fn get(path: &'static str, right: Right, turns: fn(&Daemon) -> &PermitPool) -> Route {
    Route { method: Method::GET, path, right: Some(right), turns, memory: Memory::Short }
}

const fn post(path: &'static str, right: Right, turns: fn(&Daemon) -> &PermitPool) -> Route {
    Route { method: Method::POST, path, right: Some(right), turns, memory: Memory::Short }
}

const fn open_to_all(path: &'static str, turns: fn(&Daemon) -> &PermitPool) -> Route {
    Route { method: Method::GET, path, right: None, turns, memory: Memory::Short }
}

/// Work with the disk that takes a moment.
fn disk(daemon: &Daemon) -> &PermitPool {
    &daemon.limits.disk
}

/// Work that reads the whole store: few run at a time.
fn survey(daemon: &Daemon) -> &PermitPool {
    &daemon.work.surveys
}

fn health(daemon: &Daemon) -> &PermitPool {
    daemon.limits.health.turns()
}

fn scrapes(daemon: &Daemon) -> &PermitPool {
    &daemon.work.scrapes
}

/// Waits for a registry.
fn plans(daemon: &Daemon) -> &PermitPool {
    &daemon.work.plans
}

/// Waits for a registry, and has a header in memory.
fn inspections(daemon: &Daemon) -> &PermitPool {
    &daemon.work.inspections
}

fn pulls(daemon: &Daemon) -> &PermitPool {
    &daemon.work.pulls
}

/// Reads, hashes and writes a whole model.
fn imports(daemon: &Daemon) -> &PermitPool {
    &daemon.work.imports
}

/// Reads, hashes and writes a header, after waiting for the memory for it.
fn edits(daemon: &Daemon) -> &PermitPool {
    &daemon.work.edits
}

fn verifications(daemon: &Daemon) -> &PermitPool {
    &daemon.work.verifications
}

/// All requests. Some need a higher right with certain parameters: see `Caller::require`.
const ROUTES: &[Route] = &[
    open_to_all("/v1/version", disk),
    open_to_all("/v1/access", disk),
    open_to_all("/v1/health", health),
    get("/v1/models", Right::Read, disk).by_store(|size| size.models(1 << 10)),
    get("/v1/models/{reference}", Right::Read, disk),
    get("/v1/manifests/{reference}", Right::Read, disk),
    get("/v1/heads/{reference}", Right::Read, disk),
    get("/v1/fit/{reference}", Right::Read, disk),
    get("/v1/history/{reference}", Right::Read, disk).by_store(|size| size.models(256)),
    get("/v1/sharing/{reference}", Right::Read, survey).by_store(|size| size.models_and_blobs(512, 16)),
    get("/v1/df", Right::Read, survey).by_store(|size| size.models_and_blobs(1 << 10, 32)),
    // Users see their own row.
    get("/v1/df/users", Right::Read, survey).by_store(|size| size.models_and_blobs(128, 32)),
    get("/v1/ps", Right::Read, disk).by_daemon(|daemon| daemon.sessions.count() * SESSION_BYTES),
    get("/v1/pulls", Right::Read, disk),
    get("/v1/partials", Right::Read, survey).by_store(|size| size.models_and_blobs(512, 32)),
    get("/v1/trash", Right::Read, disk).by_store(|size| size.models(1 << 10)),
    get("/v1/doctor", Right::Read, survey).by_store(|size| size.models_and_blobs(256, 32)),
    get("/v1/eviction", Right::Read, survey).by_store(|size| size.models_and_blobs(1 << 10, 128)),
    get("/v1/gc", Right::Read, survey).by_store(|size| size.models_and_blobs(128, 128)),
    get("/v1/limit", Right::Read, disk),
    get("/v1/config", Right::Read, disk),
    get("/v1/metrics", Right::Read, scrapes).by_daemon(|_| METRICS_BYTES),
    post("/v1/open", Right::Read, disk),
    // Users end their own leases.
    post("/v1/release", Right::Read, disk),
    post("/v1/verify", Right::Read, verifications),
    // One's own records.
    post("/v1/log", Right::Read, survey),
    post("/v1/pull", Right::Pull, pulls),
    post("/v1/pull/plan", Right::Pull, plans),
    post("/v1/resolve", Right::Pull, plans),
    post("/v1/inspect", Right::Pull, inspections),
    post("/v1/import", Right::Pull, imports),
    post("/v1/edit", Right::Pull, edits),
    post("/v1/promote", Right::Pull, imports),
    // One's own downloads.
    post("/v1/partials/remove", Right::Pull, disk),
    // Users change the names that they added: `Store::check_change` checks that.
    post("/v1/remove", Right::Pull, disk),
    post("/v1/undelete", Right::Pull, disk),
    post("/v1/pin", Right::Pull, disk),
    post("/v1/tag", Right::Pull, disk),
    post("/v1/rename", Right::Pull, disk),
    post("/v1/limit", Right::Administer, disk),
    post("/v1/gc", Right::Administer, survey).by_store(|size| size.models_and_blobs(128, 128)),
    post("/v1/reindex", Right::Administer, disk),
];

/// The route of a request, if it exists.
pub(super) fn find(method: &Method, path: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|route| route.method == *method && route.matches(path))
}

impl Route {
    const fn by_daemon(mut self, bytes: fn(&Daemon) -> usize) -> Self {
        self.memory = Memory::Daemon(bytes);
        self
    }

    const fn by_store(mut self, bytes: fn(&StoreSize) -> usize) -> Self {
        self.memory = Memory::Store(bytes);
        self
    }

    fn matches(&self, path: &str) -> bool {
        match self.path.strip_suffix("{reference}") {
            Some(prefix) => path.starts_with(prefix),
            None => self.path == path,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The rows of the table in a section: tests of all requests through the socket read them too.
    fn documented(section: &str) -> BTreeMap<String, String> {
        let document = include_str!("../../../../docs/PROTOCOL.md");
        let rows = document.lines().skip_while(|line| *line != section).skip(1);
        let rows = rows
            .take_while(|line| !line.starts_with('#'))
            .filter(|line| ["| `GET ", "| `POST "].iter().any(|start| line.starts_with(start)));
        let row = |row: &str| {
            let mut cells = row.trim_matches('|').split('|').map(str::trim);
            let request = cells.next().unwrap().trim_matches('`').to_owned();
            (request, cells.next().unwrap().trim_matches('`').to_owned())
        };
        rows.map(row).collect()
    }

    #[test]
    fn every_request_and_its_right_are_documented() {
        let name = |right: &Option<Right>| right.map_or("none", Right::name).to_owned();
        let routes =
            ROUTES.iter().map(|route| (format!("{} {}", route.method, route.path), name(&route.right)));
        assert_eq!(routes.collect::<BTreeMap<_, _>>(), documented("### 2.2 Rights"));
    }

    /// A new request must say what the policy means for it.
    #[test]
    fn every_request_says_what_the_policy_checks() {
        let documented = documented("### 2.3 Policy");
        let routes: Vec<_> = ROUTES.iter().map(|route| format!("{} {}", route.method, route.path)).collect();
        assert!(
            documented.keys().eq(routes.iter().collect::<std::collections::BTreeSet<_>>()),
            "{documented:?}"
        );
        let known = ["nothing", "the model", "the source", "the file"];
        assert!(documented.values().all(|checked| known.contains(&checked.as_str())), "{documented:?}");
    }

    #[test]
    fn requests_that_are_not_in_the_table_do_not_exist() {
        for (method, path) in [
            (Method::DELETE, "/v1/models"),
            (Method::POST, "/v1/models"),
            (Method::GET, "/v1/tag"),
            (Method::GET, "/v1/model"),
            (Method::GET, "/"),
            (Method::HEAD, "/v1/df"),
        ] {
            assert!(find(&method, path).is_none(), "{method} {path}");
        }
        let right = |path| find(&Method::GET, path).map(|route| route.right);
        assert_eq!(right("/v1/models/hf.co/a/b:c"), Some(Some(Right::Read)));
        assert_eq!(right("/v1/version"), Some(None));
    }
}
