//! Redirects: resolves the target of a `Location` header, and decides whether it may be followed.

use hyper::header::LOCATION;
use hyper::{HeaderMap, StatusCode};
use url::Url;

use super::origin::{Origin, names_user};

/// `Location` is missing or not a URL.
const MALFORMED: &str = "target is not a URL";
const NAMES_USER: &str = "target contains a user name";
/// A redirect from TLS to plain HTTP, which networks with a login page send.
const DOWNGRADE: &str = "it leads from https to http; is this network behind a login page?";

/// 300 and 304 are not redirects for a plain GET.
pub(super) fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// The redirect's target, or the reason why it is refused.
pub(super) fn target(from: &Url, headers: &HeaderMap) -> Result<Url, &'static str> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let target = location.and_then(|location| resolve(from, location)).ok_or(MALFORMED)?;
    if names_user(&target) {
        return Err(NAMES_USER);
    }
    let is_https = |url| Origin::from_url(url).map(|origin| origin.is_https());
    match (is_https(from), is_https(&target)) {
        (_, None) => Err(MALFORMED),
        (Some(true), Some(false)) => Err(DOWNGRADE),
        _ => Ok(target),
    }
}

pub(super) fn resolve(from: &Url, location: &str) -> Option<Url> {
    let mut url = from.join(location).ok()?;
    url.set_fragment(None);
    Some(url)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn redirect(from: &str, location: &str) -> Result<String, &'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(LOCATION, HeaderValue::from_str(location).unwrap());
        target(&from.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn relative_locations_are_resolved() {
        for (location, url) in [
            ("https://cdn.example/x?sig=1#part", "https://cdn.example/x?sig=1"),
            ("HTTPS://cdn.example/x", "https://cdn.example/x"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/x?q=a:b", "https://r.example:1/x?q=a:b"),
            ("?__sign=abc", "https://r.example:1/v2/a/blobs?__sign=abc"),
            ("x/y?u=http://z/..", "https://r.example:1/v2/a/x/y?u=http://z/.."),
            ("./x", "https://r.example:1/v2/a/x"),
            ("../x", "https://r.example:1/v2/x"),
            ("../../../../x", "https://r.example:1/x"),
            ("..", "https://r.example:1/v2/"),
            ("", "https://r.example:1/v2/a/blobs?q"),
        ] {
            assert_eq!(redirect("https://r.example:1/v2/a/blobs?q", location), Ok(url.into()), "{location}");
        }
    }

    #[test]
    fn locations_that_are_no_http_url_are_refused() {
        for location in
            ["file:///etc/passwd", "gopher://x/", "data:x", "javascript:x", "https://", "//", "http://a b/"]
        {
            assert_eq!(redirect("http://r.example/a", location), Err(MALFORMED), "{location}");
        }
        let none = target(&"http://r.example/".parse().unwrap(), &HeaderMap::new());
        assert_eq!(none, Err(MALFORMED));
    }

    #[test]
    fn tls_is_never_given_up() {
        assert_eq!(redirect("https://a.example/", "http://a.example/"), Err(DOWNGRADE));
        assert_eq!(redirect("http://a.example/", "https://b.example/"), Ok("https://b.example/".into()));
        assert_eq!(redirect("http://a.example/", "http://b.example/"), Ok("http://b.example/".into()));
    }

    #[test]
    fn user_names_in_a_target_are_refused() {
        let refused = Err(NAMES_USER);
        assert_eq!(redirect("https://a.example/", "https://a.example@b.example/"), refused);
        assert_eq!(redirect("https://a.example/", "//user:password@b.example/"), refused);
    }
}
