//! The requests that the page may make: those that the table of the API marks. Each is one question to the daemon, and
//! none changes anything.

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::route::{Received, Route};
use hyper::Uri;

/// Asks the daemon, as the user who runs the command.
#[derive(Clone, Debug)]
pub(crate) struct Relay(Client);

/// How the paths of the page begin, and how those of the daemon do.
const PREFIXES: [&str; 2] = ["/api/", "/v1/"];

/// A request that the page may make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    route: Route,
    query: Option<String>,
}

impl Relay {
    pub(crate) const fn new(client: Client) -> Self {
        Self(client)
    }

    /// Sends the request to the daemon, and returns its response. Blocks.
    pub(super) fn ask(&self, request: &Request) -> Result<Vec<u8>, ClientError> {
        let received = Received { query: request.query.as_deref(), ..Received::default() };
        self.0.forward(request.route, &received)
    }
}

/// The request at this address, if there is one: `/api/df?detail=12` is the daemon's with `/v1` in place of `/api`.
pub(super) fn find(uri: &Uri) -> Option<Request> {
    let [page, daemon] = PREFIXES;
    let path = format!("{daemon}{}", uri.path().strip_prefix(page)?);
    let (route, _) = Route::find("GET", &path).filter(|(route, _)| route.is_for_page())?;
    Some(Request { route, query: uri.query().map(str::to_owned) })
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::route::Method;

    use super::*;

    #[test]
    fn only_requests_for_the_page_are_relayed() {
        let find = |path: &str| find(&path.parse().unwrap());
        for route in Route::ALL.iter().filter(|route| route.method() == Method::Get) {
            let found = find(&route.path().replacen("/v1/", "/api/", 1).replace("{reference}", "m"));
            assert_eq!(found.map(|found| found.route), route.is_for_page().then_some(*route), "{route}");
        }
        let detailed = Request { route: Route::Usage, query: Some("detail=12".to_owned()) };
        assert_eq!(find("/api/df?detail=12"), Some(detailed));
        for path in ["/v1/df", "/api/", "/api/df/", "/api/../v1/df", "/API/df", "/api//df", "/df"] {
            assert_eq!(find(path), None, "{path}");
        }
    }
}
