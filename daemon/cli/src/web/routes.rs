//! What the page may request: its own files in `page/`, and those requests to the daemon that the table of the API marks:
//! questions, which change nothing, and actions, which its user has confirmed.

use std::time::Duration;

use blobd_client::error::ClientError;
use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::route::{Received, Route};
use hyper::Uri;

use crate::{Client, ErrorBody, ErrorCode};

/// What the page may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// What its user may do.
    Act,
    /// Nothing but reading.
    ReadOnly,
}

/// The daemon may be preparing its index for a minute before it can answer.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(90);
/// A collection of a large store takes minutes.
const ACTION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

#[derive(Clone, Copy, Debug)]
pub(super) struct Asset {
    pub(super) path: &'static str,
    pub(super) media_type: &'static str,
    pub(super) content: &'static str,
}

/// They contain no data of the store, so everybody may load them.
const ASSETS: [Asset; 22] = [
    Asset { path: "/", media_type: "text/html; charset=utf-8", content: include_str!("page/index.html") },
    Asset {
        path: "/style.css",
        media_type: "text/css; charset=utf-8",
        content: include_str!("page/style.css"),
    },
    script("/action_dialog.js", include_str!("page/action_dialog.js")),
    script("/actions.js", include_str!("page/actions.js")),
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
    script("/pulling.js", include_str!("page/pulling.js")),
    script("/rights.js", include_str!("page/rights.js")),
    script("/roving.js", include_str!("page/roving.js")),
    script("/tables.js", include_str!("page/tables.js")),
    script("/treemap.js", include_str!("page/treemap.js")),
    script("/updates.js", include_str!("page/updates.js")),
    script("/work.js", include_str!("page/work.js")),
    Asset { path: "/icon.svg", media_type: "image/svg+xml", content: include_str!("page/icon.svg") },
];

const fn script(path: &'static str, content: &'static str) -> Asset {
    Asset { path, media_type: "text/javascript; charset=utf-8", content }
}

pub(super) fn asset(path: &str) -> Option<Asset> {
    ASSETS.into_iter().find(|asset| asset.path == path)
}

/// The first tag of the page, and the same of a page that only shows.
const ROOT_TAG: [&str; 2] = ["<html lang=\"en\">", "<html lang=\"en\" data-mode=\"read-only\">"];

impl Asset {
    /// What is sent: the page learns its mode from its first tag, before it has asked anything.
    pub(super) fn in_mode(self, mode: Mode) -> Vec<u8> {
        let [plain, read_only] = ROOT_TAG;
        match mode {
            Mode::Act => self.content.into(),
            Mode::ReadOnly => self.content.replacen(plain, read_only, 1).into(),
        }
    }
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
    /// The body of an action; empty for other requests.
    body: Vec<u8>,
}

impl Relay {
    pub(crate) const fn new(client: Client) -> Self {
        Self(client)
    }

    /// A client for actions.
    pub(super) fn client(&self) -> Client {
        self.0.clone().with_timeout(ACTION_TIMEOUT)
    }

    /// Blocks until the daemon has responded.
    pub(super) fn ask(&self, request: &Request) -> Result<Vec<u8>, ClientError> {
        let (name, query) = (&*request.name, request.query.as_deref());
        let received = Received { name, query, body: &request.body };
        let limit = if request.route.is_for_page() { QUESTION_TIMEOUT } else { ACTION_TIMEOUT };
        self.0.clone().with_timeout(limit).forward(request.route, &received)
    }
}

/// The request at an address of the page: `/api/df?detail=12` stands for the daemon's `df` with `?detail=12`.
pub(super) fn question(uri: &Uri) -> Option<Request> {
    let path = direct(uri)?;
    let (route, name) = Route::find("GET", &path).filter(|(route, _)| route.is_for_page())?;
    let name = name.to_owned();
    Some(Request { route, name, query: uri.query().map(str::to_owned), body: Vec::new() })
}

/// What the user of the page has confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A request of the daemon.
    Send(Route),
    /// Stops a pull that the page has begun.
    StopPull,
    /// Compares the models with their sources, as `blobd outdated` does.
    Compare,
}

impl Action {
    /// Its name in messages.
    pub(super) fn verb(self) -> &'static str {
        match self {
            Self::Send(route) => route.verb(),
            Self::StopPull => "stop",
            Self::Compare => "outdated",
        }
    }
}

/// The action at an address of the page: a POST to `/api/pin` stands for the daemon's `pin`.
pub(super) fn action(uri: &Uri) -> Option<Action> {
    match uri.path() {
        "/stop" => Some(Action::StopPull),
        "/outdated" => Some(Action::Compare),
        _ => {
            let path = direct(uri)?;
            let (route, _) = Route::find("POST", &path).filter(|(route, _)| route.is_action_of_page())?;
            Some(Action::Send(route))
        }
    }
}

fn direct(uri: &Uri) -> Option<String> {
    Some(format!("/v1/{}", uri.path().strip_prefix("/api/")?))
}

/// An action with this body. Some have parameters that the page does not need; it may not send them.
pub(super) fn request(route: Route, body: Vec<u8>) -> Result<Request, ErrorBody> {
    if route == Route::Remove && !can_be_taken_back(&body) {
        let message = "rm: the page removes nothing at once: expected keep_seconds or dry_run";
        return Err(ErrorBody::new(ErrorCode::Denied, message).with_hint("use `blobd rm`"));
    }
    Ok(Request { route, name: String::new(), query: None, body })
}

/// Whether a removal goes to the trash or only tells what it would do.
fn can_be_taken_back(body: &[u8]) -> bool {
    let params = serde_json::from_slice::<RemoveParams>(body);
    params.is_ok_and(|params| params.dry_run || params.keep_seconds.is_some_and(|kept| kept > 0))
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
        let find = |path: &str| question(&path.parse().unwrap());
        for route in Route::ALL.iter().filter(|route| route.method() == Method::Get) {
            let found = find(&route.path().replacen("/v1/", "/api/", 1).replace("{reference}", "m"));
            assert_eq!(found.map(|found| found.route), route.is_for_page().then_some(*route), "{route}");
        }
        let query = Some("detail=12".to_owned());
        let detailed = Request { route: Route::Usage, name: String::new(), query, body: Vec::new() };
        assert_eq!(find("/api/df?detail=12"), Some(detailed));
        let name = "hf.co/me/m:Q4".to_owned();
        let fit = Request { route: Route::Fit, name, query: None, body: Vec::new() };
        assert_eq!(find("/api/fit/hf.co/me/m:Q4"), Some(fit));
        let direct = Route::Usage.path();
        let others = ["/api/", "/api/df/", "/API/df", "/api//df", "/df"].map(str::to_owned);
        for path in others.into_iter().chain([direct.to_owned(), format!("/api/..{direct}")]) {
            assert_eq!(find(&path), None, "{path}");
        }
    }

    #[test]
    fn only_actions_of_the_page_are_relayed() {
        let find = |path: &str| action(&path.parse().unwrap());
        for route in Route::ALL {
            let path = route.path().replacen("/v1/", "/api/", 1).replace("{reference}", "m");
            // Some paths have a question and an action.
            let expected = Route::ALL.iter().find(|other| {
                other.path() == route.path() && other.method() == Method::Post && other.is_action_of_page()
            });
            assert_eq!(find(&path), expected.copied().map(Action::Send), "{route}");
        }
        assert_eq!((find("/stop"), find("/outdated")), (Some(Action::StopPull), Some(Action::Compare)));
        for path in [Route::Pin.path(), "/pin", "/api/pin/", "/api/", "/api/session"] {
            assert_eq!(find(path), None, "{path}");
        }
    }

    #[test]
    fn what_cannot_be_taken_back_is_not_removed_by_the_page() {
        for (body, is_relayed) in [
            (r#"{"references":["m"],"keep_seconds":604800}"#, true),
            (r#"{"references":["m"],"dry_run":true}"#, true),
            (r#"{"references":["m"],"keep_seconds":0}"#, false),
            (r#"{"references":["m"]}"#, false),
            (r#"{"unused":true}"#, false),
            ("", false),
        ] {
            assert_eq!(request(Route::Remove, body.into()).is_ok(), is_relayed, "{body}");
        }
        assert!(request(Route::Pin, Vec::new()).is_ok(), "the daemon checks it");
    }

    #[test]
    fn page_knows_that_it_only_shows() {
        let page = |mode| String::from_utf8(asset("/").unwrap().in_mode(mode)).unwrap();
        assert!(page(Mode::ReadOnly).contains(ROOT_TAG[1]) && !page(Mode::Act).contains("data-mode"));
    }
}
