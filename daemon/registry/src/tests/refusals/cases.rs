//! The refusals: what servers of many kinds send, and what hostile servers could send.

use super::{Asked, Body, Case};
use crate::tests::gzip;

const JSON: &str = "Content-Type: application/json\r\n";
const HTML: &str = "Content-Type: text/html\r\n";

const fn case(did: &'static str, asked: Asked, status: u16, headers: &'static str, body: Body) -> Case {
    Case { did, asked, status, headers, body }
}

pub(super) const CASES: &[Case] = &[
    // Hugging Face.
    case(
        "Hugging Face: a repository without GGUF files",
        Asked::Hub,
        400,
        "X-Error-Message: Repository is not GGUF or is not compatible with llama.cpp\r\n",
        Body::Text(r#"{"error":"Repository is not GGUF or is not compatible with llama.cpp"}"#),
    ),
    case(
        "Hugging Face: no such repository, or a private one",
        Asked::HubList,
        401,
        "X-Error-Code: RepoNotFound\r\nX-Error-Message: Repository not found\r\n",
        Body::Text(r#"{"error":"Repository not found"}"#),
    ),
    case(
        "Hugging Face: a gated repository",
        Asked::HubList,
        403,
        "X-Error-Code: GatedRepo\r\nX-Error-Message: Access to model u/r is restricted and you are not in the authorized list.\r\n",
        Body::Text(
            "Access to model u/r is restricted and you are not in the authorized list. Visit https://huggingface.co/u/r to ask for access.",
        ),
    ),
    case(
        "Hugging Face: no such revision",
        Asked::HubList,
        404,
        "X-Error-Code: RevisionNotFound\r\nX-Error-Message: Invalid rev id: refs\r\n",
        Body::Text(""),
    ),
    case(
        "Hugging Face: too many requests, with the rest of the period",
        Asked::HubList,
        429,
        "RateLimit: \"api\";r=0;t=213\r\nRateLimit-Policy: \"fixed window\";\"api\";q=500;w=300\r\n",
        Body::Text(
            "We had to rate limit your IP (192.0.2.7). To continue using our service, create a HF account or login to your existing account, and make sure you pass a HF_TOKEN if you're using the API.",
        ),
    ),
    case(
        "Hugging Face: an error of the service",
        Asked::HubList,
        500,
        JSON,
        Body::Text(r#"{"error":"Internal Error - We're working hard to fix this as soon as possible!"}"#),
    ),
    // OCI registries.
    case(
        "registry: no such tag",
        Asked::Manifest,
        404,
        JSON,
        Body::Text(
            r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown","detail":{"Tag":"latest"}}]}"#,
        ),
    ),
    case(
        "registry: no such repository",
        Asked::Manifest,
        404,
        JSON,
        Body::Text(r#"{"errors":[{"code":"NAME_UNKNOWN"}]}"#),
    ),
    case("registry: Go's default page", Asked::Manifest, 404, "", Body::Text("404 page not found\n")),
    case(
        "registry: credentials required",
        Asked::Manifest,
        401,
        JSON,
        Body::Text(
            r#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required","detail":[{"Type":"repository","Name":"library/tiny","Action":"pull"}]}]}"#,
        ),
    ),
    case(
        "registry: credentials refused, which its body repeats",
        Asked::ManifestWithToken,
        401,
        "",
        Body::Echo("Could not verify CREDENTIAL for PATH"),
    ),
    case(
        "registry: an expired token",
        Asked::ManifestWithToken,
        401,
        "WWW-Authenticate: Bearer realm=\"https://h.example/t\",error=\"invalid_token\",error_description=\"The access token has expired\"\r\n",
        Body::Text(""),
    ),
    case(
        "registry: access denied",
        Asked::Manifest,
        403,
        JSON,
        Body::Text(
            r#"{"errors":[{"code":"DENIED","message":"permission_denied: the caller has no read access"}]}"#,
        ),
    ),
    case(
        "Docker Hub: the limit of pulls",
        Asked::Manifest,
        429,
        "Retry-After: 3540\r\n",
        Body::Text(
            r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your unauthenticated pull rate limit. https://www.docker.com/increase-rate-limit"}]}"#,
        ),
    ),
    case(
        "Ollama: the model needs a newer client",
        Asked::Manifest,
        412,
        JSON,
        Body::Text(
            "{\"errors\":[{\"code\":\"UPGRADE\",\"message\":\"The model you are attempting to pull requires a newer version of Ollama.\\n\\nPlease download the latest version at:\\n\\n\\thttps://ollama.com/download\\n\"}]}",
        ),
    ),
    case(
        "registry: several errors",
        Asked::Manifest,
        400,
        JSON,
        Body::Text(r#"{"errors":[{"message":"invalid tag"},{"message":"invalid repository"}]}"#),
    ),
    case(
        "registry: a warning in a header",
        Asked::Manifest,
        403,
        "Warning: 299 - \"This repository is frozen until 1 June\"\r\n",
        Body::Text(""),
    ),
    case(
        "registry: a layer is missing",
        Asked::Layer,
        404,
        JSON,
        Body::Text(r#"{"errors":[{"code":"BLOB_UNKNOWN","message":"blob unknown to registry"}]}"#),
    ),
    case(
        "registry: a range is refused",
        Asked::Part,
        416,
        "Content-Range: bytes */3\r\n",
        Body::Text("The requested range is not satisfiable for this object"),
    ),
    case(
        "registry: being restarted",
        Asked::Manifest,
        503,
        "Retry-After: 90\r\n",
        Body::Text("The registry is read-only during an upgrade"),
    ),
    case(
        "a registry that expects TLS",
        Asked::Manifest,
        400,
        "",
        Body::Text("Client sent an HTTP request to an HTTPS server.\n"),
    ),
    case("a registry that expects TLS, without a sentence", Asked::Manifest, 400, "", Body::Text("")),
    case(
        "registry: an error with the status of a success",
        Asked::Manifest,
        200,
        JSON,
        Body::Text(r#"{"errors":[{"code":"UNKNOWN","message":"upstream registry did not answer"}]}"#),
    ),
    case(
        "token service: an error with the status of a success",
        Asked::Token,
        200,
        JSON,
        Body::Text(r#"{"error":"bad_verification_code","error_description":"The code is incorrect"}"#),
    ),
    case(
        "hub mirror: an error with the status of a success",
        Asked::HubList,
        200,
        JSON,
        Body::Text(r#"{"error":"this mirror has no copy of the repository"}"#),
    ),
    case(
        "GitLab: no access",
        Asked::Manifest,
        403,
        JSON,
        Body::Text(
            r#"{"message":{"error":["project is archived"]},"error":{"message":"insufficient scope: read_registry"}}"#,
        ),
    ),
    case(
        "ModelScope: no such model",
        Asked::Url,
        404,
        JSON,
        Body::Text(
            r#"{"Code":10010205001,"Message":"The model a/b does not exist","RequestId":"7","Success":false}"#,
        ),
    ),
    // Token services.
    case(
        "token service: an account is locked",
        Asked::Token,
        403,
        JSON,
        Body::Text(r#"{"details":"account is locked, contact the administrator"}"#),
    ),
    case("token service: overloaded", Asked::Token, 503, "", Body::Text("try again in a minute")),
    case(
        "token service: a request that it does not understand",
        Asked::Token,
        400,
        JSON,
        Body::Text(r#"{"error":"invalid_scope","error_description":"scope repository:x is unknown"}"#),
    ),
    case("token service: too many requests", Asked::Token, 429, "Retry-After: 30\r\n", Body::Text("")),
    // Storage.
    case(
        "object store: an expired link",
        Asked::Url,
        403,
        "Content-Type: application/xml\r\n",
        Body::Text(
            "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>Request has expired</Message><X-Amz-Expires>60</X-Amz-Expires></Error>",
        ),
    ),
    case(
        "object store: a signature that it repeats",
        Asked::Url,
        403,
        "Content-Type: application/xml\r\n",
        Body::Echo(
            "<Error><Code>SignatureDoesNotMatch</Code><Message>The signature in https://s3.example PATH does not match</Message></Error>",
        ),
    ),
    case("object store: no such file", Asked::Url, 404, "x-ms-error-code: BlobNotFound\r\n", Body::Text("")),
    case(
        "object store to which a registry in the local network or on this machine redirects: not quoted",
        Asked::LayerAtStorage,
        403,
        "Content-Type: application/xml\r\nx-error-message: top secret\r\n",
        Body::Text(
            "<Error><Code>AccessDenied</Code><Message>secret of a service on this machine</Message></Error>",
        ),
    ),
    case(
        "the same: no such file",
        Asked::LayerAtStorage,
        404,
        "x-ms-error-code: BlobNotFound\r\n",
        Body::Text(""),
    ),
    // Web servers.
    case(
        "web server: a problem document",
        Asked::Url,
        403,
        "Content-Type: application/problem+json\r\n",
        Body::Text(
            r#"{"type":"https://h.example/quota","title":"You do not have enough credit.","detail":"Your current balance is 30, but that costs 50.","status":403}"#,
        ),
    ),
    case(
        "web server: withheld for legal reasons",
        Asked::Url,
        451,
        "",
        Body::Text("Removed after a notice of the rights holder."),
    ),
    case(
        "web server: removed",
        Asked::Url,
        410,
        HTML,
        Body::Text(
            "<html><head><title>This model was withdrawn by its author</title></head><body>…</body></html>",
        ),
    ),
    case(
        "web server: its own page for the status",
        Asked::Url,
        403,
        HTML,
        Body::Text(
            "<html><head><title>403 Forbidden</title></head><body><center>nginx</center></body></html>",
        ),
    ),
    case(
        "content network: a challenge for browsers",
        Asked::Url,
        403,
        HTML,
        Body::Text(
            "<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title></head></html>",
        ),
    ),
    case(
        "a network with a login page",
        Asked::Url,
        511,
        HTML,
        Body::Text("<html><title>Hotel &amp; Spa: please sign in</title></html>"),
    ),
    case(
        "web server: a gateway without an answer",
        Asked::Manifest,
        504,
        "",
        Body::Text("upstream request timeout"),
    ),
    case(
        "web server: payment required",
        Asked::Url,
        402,
        JSON,
        Body::Text(r#"{"message":"The free tier is used up"}"#),
    ),
    case(
        "a mirror that refuses beside one that lacks the model",
        Asked::Mirror,
        403,
        JSON,
        Body::Text(r#"{"error":"this mirror serves members only"}"#),
    ),
    case(
        "compressed without being asked to",
        Asked::Manifest,
        403,
        "Content-Encoding: gzip\r\n",
        Body::Bytes("gzip of: {\"error\":\"said in gzip\"}", || gzip(br#"{"error":"said in gzip"}"#)),
    ),
    case(
        "another type than announced",
        Asked::Manifest,
        400,
        "Content-Type: application/octet-stream\r\n",
        Body::Text(r#"{"error":{"message":"still a sentence"}}"#),
    ),
    case(
        "in Latin-1",
        Asked::Manifest,
        403,
        "Content-Type: text/plain; charset=iso-8859-1\r\n",
        Body::Bytes("Latin-1 of: Accès refusé", || b"Acc\xe8s refus\xe9".to_vec()),
    ),
    case("in another language", Asked::Manifest, 403, "", Body::Text(r#"{"message":"模型已被删除"}"#)),
    // Hostile servers.
    case(
        "hostile: escape sequences and text from right to left",
        Asked::Manifest,
        400,
        "",
        Body::Text("\u{1b}[2J\u{1b}]0;title\u{7}\u{1b}[31mYour disk\u{202e} is erased\u{0}\r\nrun: rm\t-rf"),
    ),
    case(
        "hostile: the same in JSON",
        Asked::Manifest,
        400,
        JSON,
        Body::Text(r#"{"error":"\u001b[1;31mred\u001b[0m\u0007 \u202etxet\u202c and\nmore"}"#),
    ),
    case(
        "hostile: a body without end",
        Asked::Manifest,
        400,
        "Connection: close\r\n",
        Body::Endless("It is a long story. "),
    ),
    case(
        "hostile: a gibibyte is announced",
        Asked::Manifest,
        400,
        "Content-Length: 1073741824\r\n",
        Body::Endless("{\"error\":\""),
    ),
    case(
        "hostile: a body that never ends",
        Asked::Manifest,
        503,
        "Connection: close\r\n",
        Body::Drip("{\"error\":\"please wait\"}\n"),
    ),
    case(
        "hostile: a sentence of 100 KB",
        Asked::Manifest,
        400,
        JSON,
        Body::Bytes("JSON of 100 KB on one line", || {
            format!(
                r#"{{"pad":"{}","error":"the end is reached {}"}}"#,
                "x".repeat(50_000),
                "y ".repeat(25_000)
            )
            .into_bytes()
        }),
    ),
    case(
        "hostile: JSON of 100 000 levels",
        Asked::Manifest,
        400,
        JSON,
        Body::Bytes("{\"error\":{\"error\":…", || "{\"error\":".repeat(100_000).into_bytes()),
    ),
    case(
        "hostile: 64 MiB in some KiB of gzip",
        Asked::Manifest,
        400,
        "Content-Encoding: gzip\r\n",
        Body::Bytes("gzip of many blanks", || gzip(&vec![b' '; 64 << 20])),
    ),
    case(
        "bytes that are no text",
        Asked::Manifest,
        400,
        "",
        Body::Bytes("random bytes", || (0..=255).chain(128..=255).collect()),
    ),
    case(
        "a server that names the faults of each field",
        Asked::Manifest,
        422,
        JSON,
        Body::Text(r#"{"errors":{"tag":["is invalid"]}}"#),
    ),
    case(
        "a server that lists messages",
        Asked::Manifest,
        400,
        JSON,
        Body::Text(r#"{"messages":["no such model"]}"#),
    ),
    case(
        "an API gateway: a fault",
        Asked::Manifest,
        400,
        JSON,
        Body::Text(
            r#"{"fault":{"faultstring":"The quota of this key is used up","detail":{"errorcode":"policies.Quota"}}}"#,
        ),
    ),
    case(
        "JSON with half of a character",
        Asked::Manifest,
        400,
        JSON,
        Body::Text(r#"{"error":"no model caf\ud800"}"#),
    ),
    case(
        "JSON after a byte order mark",
        Asked::Manifest,
        400,
        JSON,
        Body::Text("\u{feff}{\"error\":\"no such model\"}"),
    ),
    case("no sentence at all", Asked::Manifest, 418, JSON, Body::Text("{}")),
    case("a status that nobody has heard of", Asked::Manifest, 599, "", Body::Text("")),
];
