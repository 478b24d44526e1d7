//! What the page may request: its own files in `page/`, and those requests to the daemon that the table of the API marks.
//! Each is one question to the daemon, and none changes anything.

use blobd_client::error::ClientError;
use blobd_client::protocol::route::{Received, Route};
use hyper::Uri;

use crate::Client;

#[derive(Clone, Copy, Debug)]
pub(super) struct Asset {
    pub(super) path: &'static str,
    pub(super) media_type: &'static str,
    pub(super) content: &'static str,
}

/// They contain no data of the store, so everybody may load them.
const ASSETS: [Asset; 17] = [
    Asset { path: "/", media_type: "text/html; charset=utf-8", content: include_str!("page/index.html") },
    Asset {
        path: "/style.css",
        media_type: "text/css; charset=utf-8",
        content: include_str!("page/style.css"),
    },
    script("/app.js", include_str!("page/app.js")),
    script("/connection.js", include_str!("page/connection.js")),
    script("/families.js", include_str!("page/families.js")),
    script("/format.js", include_str!("page/format.js")),
    script("/layers.js", include_str!("page/layers.js")),
    script("/matrix.js", include_str!("page/matrix.js")),
    script("/overview.js", include_str!("page/overview.js")),
    script("/panel.js", include_str!("page/panel.js")),
    script("/picture.js", include_str!("page/picture.js")),
    script("/poll.js", include_str!("page/poll.js")),
    script("/roving.js", include_str!("page/roving.js")),
    script("/tables.js", include_str!("page/tables.js")),
    script("/treemap.js", include_str!("page/treemap.js")),
    script("/work.js", include_str!("page/work.js")),
    Asset { path: "/icon.svg", media_type: "image/svg+xml", content: include_str!("page/icon.svg") },
];

const fn script(path: &'static str, content: &'static str) -> Asset {
    Asset { path, media_type: "text/javascript; charset=utf-8", content }
}

pub(super) fn asset(path: &str) -> Option<Asset> {
    ASSETS.into_iter().find(|asset| asset.path == path)
}

/// Asks the daemon, as the user who runs the command.
#[derive(Clone, Debug)]
pub(crate) struct Relay(Client);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    route: Route,
    /// Empty if the request names no model. No character of a name has to be encoded in a path.
    name: String,
    query: Option<String>,
}

impl Relay {
    pub(crate) const fn new(client: Client) -> Self {
        Self(client)
    }

    /// Blocks until the daemon has responded.
    pub(super) fn ask(&self, request: &Request) -> Result<Vec<u8>, ClientError> {
        let (name, query) = (&*request.name, request.query.as_deref());
        let received = Received { name, query, ..Received::default() };
        self.0.forward(request.route, &received)
    }
}

/// The request at an address of the page: `/api/df?detail=12` stands for the daemon's `df` with `?detail=12`.
pub(super) fn request(uri: &Uri) -> Option<Request> {
    let path = format!("/v1/{}", uri.path().strip_prefix("/api/")?);
    let (route, name) = Route::find("GET", &path).filter(|(route, _)| route.is_for_page())?;
    let name = name.to_owned();
    Some(Request { route, name, query: uri.query().map(str::to_owned) })
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::route::Method;

    use super::*;

    /// The content security policy forbids both, because names of models are untrusted text.
    #[test]
    fn page_has_no_inline_code_and_sets_no_html() {
        for Asset { path, content, .. } in ASSETS {
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                " style=\"",
                " onclick",
            ] {
                assert!(!content.contains(forbidden), "{path}: {forbidden}");
            }
        }
    }

    #[test]
    fn page_loads_only_its_own_files() {
        for Asset { path, content, .. } in ASSETS {
            let remote =
                content.match_indices("http").map(|(at, _)| &content[at..content.len().min(at + 40)]);
            let remote: Vec<_> =
                remote.filter(|text| text.starts_with("http:") || text.starts_with("https:")).collect();
            let is_namespace = |text: &&str| text.starts_with("http://www.w3.org/2000/svg");
            assert!(remote.iter().all(is_namespace), "{path}: {remote:?}");
        }
    }

    #[test]
    fn only_requests_for_the_page_are_relayed() {
        let find = |path: &str| request(&path.parse().unwrap());
        for route in Route::ALL.iter().filter(|route| route.method() == Method::Get) {
            let found = find(&route.path().replacen("/v1/", "/api/", 1).replace("{reference}", "m"));
            assert_eq!(found.map(|found| found.route), route.is_for_page().then_some(*route), "{route}");
        }
        let query = Some("detail=12".to_owned());
        let detailed = Request { route: Route::Usage, name: String::new(), query };
        assert_eq!(find("/api/df?detail=12"), Some(detailed));
        let name = "hf.co/me/m:Q4".to_owned();
        assert_eq!(find("/api/fit/hf.co/me/m:Q4"), Some(Request { route: Route::Fit, name, query: None }));
        let direct = Route::Usage.path();
        let others = ["/api/", "/api/df/", "/API/df", "/api//df", "/df"].map(str::to_owned);
        for path in others.into_iter().chain([direct.to_owned(), format!("/api/..{direct}")]) {
            assert_eq!(find(&path), None, "{path}");
        }
    }
}
