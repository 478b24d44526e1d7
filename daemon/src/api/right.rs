//! The right that each request needs.

use hyper::Method;

use crate::access::Right;

/// A request that exists.
#[derive(Debug)]
struct Route {
    method: Method,
    /// `{reference}` at the end stands for any text.
    path: &'static str,
    /// `None` for a request that all who can connect may make.
    right: Option<Right>,
}

const fn get(path: &'static str, right: Right) -> Route {
    Route { method: Method::GET, path, right: Some(right) }
}

const fn post(path: &'static str, right: Right) -> Route {
    Route { method: Method::POST, path, right: Some(right) }
}

const fn open_to_all(path: &'static str) -> Route {
    Route { method: Method::GET, path, right: None }
}

/// All requests. Some need a higher right with certain parameters: see `Caller::require`.
const ROUTES: &[Route] = &[
    open_to_all("/v1/version"),
    open_to_all("/v1/access"),
    open_to_all("/v1/health"),
    get("/v1/models", Right::Read),
    get("/v1/models/{reference}", Right::Read),
    get("/v1/manifests/{reference}", Right::Read),
    get("/v1/heads/{reference}", Right::Read),
    get("/v1/history/{reference}", Right::Read),
    get("/v1/sharing/{reference}", Right::Read),
    get("/v1/df", Right::Read),
    // Of oneself.
    get("/v1/df/users", Right::Read),
    get("/v1/ps", Right::Read),
    get("/v1/pulls", Right::Read),
    get("/v1/partials", Right::Read),
    get("/v1/trash", Right::Read),
    get("/v1/doctor", Right::Read),
    get("/v1/eviction", Right::Read),
    get("/v1/gc", Right::Read),
    get("/v1/limit", Right::Read),
    get("/v1/config", Right::Read),
    get("/v1/metrics", Right::Read),
    post("/v1/open", Right::Read),
    // Of one's own leases.
    post("/v1/release", Right::Read),
    post("/v1/verify", Right::Read),
    // One's own records.
    post("/v1/log", Right::Read),
    post("/v1/pull", Right::Pull),
    post("/v1/pull/plan", Right::Pull),
    post("/v1/resolve", Right::Pull),
    post("/v1/inspect", Right::Pull),
    post("/v1/import", Right::Pull),
    post("/v1/edit", Right::Pull),
    post("/v1/promote", Right::Pull),
    // One's own downloads.
    post("/v1/partials/remove", Right::Pull),
    // Of names that the user has added: the operations check that by `Store::check_change`.
    post("/v1/remove", Right::Pull),
    post("/v1/undelete", Right::Pull),
    post("/v1/pin", Right::Pull),
    post("/v1/tag", Right::Pull),
    post("/v1/rename", Right::Pull),
    post("/v1/limit", Right::Administer),
    post("/v1/gc", Right::Administer),
    post("/v1/reindex", Right::Administer),
];

/// Whether a request exists, and the right that it needs: `None` if it does not, `Some(None)` if it needs none.
pub(super) fn needed(method: &Method, path: &str) -> Option<Option<Right>> {
    let route = ROUTES.iter().find(|route| route.method == *method && route.matches(path));
    route.map(|route| route.right)
}

impl Route {
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
        let document = include_str!("../../../docs/PROTOCOL.md");
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
            assert_eq!(needed(&method, path), None, "{method} {path}");
        }
        assert_eq!(needed(&Method::GET, "/v1/models/hf.co/a/b:c"), Some(Some(Right::Read)));
        assert_eq!(needed(&Method::GET, "/v1/version"), Some(None));
    }
}
