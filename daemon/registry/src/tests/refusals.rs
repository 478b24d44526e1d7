//! What a user reads when a server refuses a request.
//!
//! The cases are the registry of refusals, `docs/REFUSALS.md`, in which a person can judge the texts: `BLESS=1` writes it.

mod cases;

use std::path::Path;
use std::sync::Arc;
use std::{env, fs};

use blobd_store_format::source::PullSource;

use self::cases::CASES;
use super::server::{Reply, Seen, Server, head, ok, redirect, response};
use super::*;
use crate::credentials::{Credential, CredentialFile, CredentialPolicy, Secret};

/// What is requested when the server refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Manifest,
    /// A manifest, with a token that the user has configured.
    ManifestWithToken,
    /// A token, after the registry has required one.
    Token,
    /// A layer.
    Layer,
    /// A layer at another host, to which the registry redirects with a signed URL.
    LayerAtStorage,
    /// A part of a layer.
    Part,
    /// The quantisation of a model at Hugging Face; the repository has other files.
    Hub,
    /// The list of files at Hugging Face.
    HubList,
    /// A file at a URL.
    Url,
    /// A manifest at the first of two mirrors, while the other lacks it.
    Mirror,
}

/// The body of a refusal.
enum Body {
    Text(&'static str),
    /// What the document calls it, and the bytes.
    Bytes(&'static str, fn() -> Vec<u8>),
    /// This text again and again, without end.
    Endless(&'static str),
    /// This text, and then a byte now and then.
    Drip(&'static str),
    /// This text around the `Authorization` and the path of the request.
    Echo(&'static str),
}

struct Case {
    /// Who refuses what, for the document.
    did: &'static str,
    asked: Asked,
    status: u16,
    headers: &'static str,
    body: Body,
}

const TOKEN: &str = "hf_hunter2hunter2";

impl Case {
    fn refuse(&self, seen: &Seen) -> Reply {
        let announced = |body: &[u8]| Reply::Whole(response(self.status, self.headers, body));
        let open = |text: &str| {
            let head = head(self.headers);
            let head = String::from_utf8(head).unwrap().replace("200 OK", &format!("{} X", self.status));
            format!("{head}{text}").into_bytes()
        };
        match &self.body {
            Body::Text(text) => announced(text.as_bytes()),
            Body::Bytes(_, bytes) => announced(&bytes()),
            Body::Endless(text) => Reply::ThenFlood(open(text)),
            Body::Drip(text) => Reply::ThenDrip(open(text)),
            Body::Echo(text) => {
                let credential = seen.header("authorization").unwrap_or("no credential");
                let echoed = text.replace("CREDENTIAL", credential).replace("PATH", &seen.path);
                announced(echoed.as_bytes())
            }
        }
    }

    /// The message and the hint, in which the addresses are replaced by names.
    async fn said(&'static self) -> (String, String) {
        let other = Server::start(move |seen, _| match self.asked {
            Asked::LayerAtStorage => self.refuse(seen),
            _ => Reply::Whole(response(404, "", b"")),
        })
        .await;
        let storage = other.url("/file?X-Amz-Signature=0123456789abcdef&Expires=17");
        let server = Server::start(move |seen, _| self.respond(seen, &storage)).await;
        let directory = tempfile::tempdir().unwrap();
        let file = CredentialFile::at(directory.path().join("credentials.json"));
        if self.asked == Asked::ManifestWithToken {
            let token = Credential::Token(Secret::new(TOKEN));
            file.set(&server.address().to_string().parse().unwrap(), &token).unwrap();
        }
        let credentials = CredentialPolicy { file: Some(file), ..CredentialPolicy::default() };
        let error = self.ask(&server, &other, credentials).await;
        let plain = |text: String| {
            let text = text.replace(&server.address().to_string(), "HOST");
            let text = text.replace(&other.address().to_string(), "STORAGE");
            text.replace(&directory.path().display().to_string(), "DIRECTORY")
        };
        (plain(error.to_string()), plain(error.hint().unwrap_or_default()))
    }

    fn respond(&self, seen: &Seen, storage: &str) -> Reply {
        let path = seen.path.as_str();
        match self.asked {
            Asked::Token if !path.starts_with("/token") => {
                let realm = format!("Bearer realm=\"http://{}/token\"", seen.header("host").unwrap());
                Reply::Whole(response(401, &format!("WWW-Authenticate: {realm}\r\n"), b"{}"))
            }
            Asked::LayerAtStorage => redirect(307, storage),
            Asked::Hub if path.ends_with("/refs") => {
                let commit = "0123456789abcdef0123456789abcdef01234567";
                Reply::Whole(ok(
                    format!(r#"{{"branches":[{{"name":"main","targetCommit":"{commit}"}}]}}"#).as_bytes()
                ))
            }
            Asked::Hub if path.contains("/tree/") => {
                Reply::Whole(ok(br#"[{"type":"file","path":"README.md","size":9}]"#))
            }
            Asked::Manifest | Asked::ManifestWithToken if path.contains("/tags/list") => {
                Reply::Whole(response(404, "", b""))
            }
            _ => self.refuse(seen),
        }
    }

    async fn ask(&self, server: &Server, other: &Server, credentials: CredentialPolicy) -> RegistryError {
        let mirrors = [
            ("hf.co".to_owned(), vec![server.url("")]),
            ("registry.ollama.ai".to_owned(), vec![server.url(""), other.url("")]),
        ];
        let retry = RetryPolicy {
            backoff: Duration::from_millis(1),
            longest_first_retry_after: Duration::from_millis(1),
            ..RetryPolicy::default()
        };
        let policy =
            RegistryPolicy { mirrors: mirrors.into(), credentials, retry, ..RegistryPolicy::default() };
        let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
        let source = match self.asked {
            Asked::Manifest | Asked::ManifestWithToken | Asked::Token => {
                return client.manifest(&tiny(server)).await.unwrap_err();
            }
            Asked::Layer | Asked::LayerAtStorage => {
                return client.open(&layer(server)).await.unwrap_err();
            }
            Asked::Part => return client.open_range(&layer(server), 5..8).await.unwrap_err(),
            Asked::Hub => "hf.co/u/r:Q4_K_M".to_owned(),
            Asked::HubList => "hf.co/u/r/m.gguf".to_owned(),
            Asked::Url => server.url("/m.gguf?token=0123456789abcdef"),
            Asked::Mirror => "tiny".to_owned(),
        };
        client.resolve(&source.parse::<PullSource>().unwrap()).await.unwrap_err()
    }

    fn sent(&self) -> String {
        let body = match &self.body {
            Body::Text(text) => shortened(text),
            Body::Bytes(name, _) => format!("({name})"),
            Body::Endless(text) => format!("{} (without end)", shortened(text)),
            Body::Drip(text) => format!("{} (then a byte now and then)", shortened(text)),
            Body::Echo(text) => shortened(text),
        };
        let headers = self.headers.trim_end().replace("\r\n", "; ");
        let parts =
            [self.status.to_string(), headers, if body.is_empty() { "(no body)".into() } else { body }];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ")
    }
}

fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 220;
    let shown: String = text
        .chars()
        .take(MAX_CHARS)
        .flat_map(|c| {
            if c.is_ascii() && !c.is_control() { c.to_string() } else { c.escape_debug().to_string() }
                .chars()
                .collect::<Vec<_>>()
        })
        .collect();
    if text.chars().count() > MAX_CHARS { format!("{shown}…") } else { shown }
}

/// All cases at once: some take as long as blobd waits for a body.
async fn all_said() -> Vec<(String, String)> {
    let tasks: Vec<_> = CASES.iter().map(|case| tokio::spawn(case.said())).collect();
    let mut said = Vec::new();
    for task in tasks {
        said.push(task.await.unwrap());
    }
    said
}

fn document(said: &[(String, String)]) -> String {
    let mut text = "# Refusals\n\n\
        What blobd prints when a server refuses a request: the server's own sentence in quotation marks, without control\n\
        characters and secrets, and then what blobd knows. `HOST` is the registry, and `STORAGE` the host to which it\n\
        redirects. Every row is a test (`daemon/registry/src/tests/refusals`), which also writes this file.\n\n\
        | situation | the server's response: status · headers · body | message | hint |\n|---|---|---|---|\n"
        .to_owned();
    for (case, (message, hint)) in CASES.iter().zip(said) {
        let cells = [case.did, &case.sent(), message, hint];
        let cells = cells.map(|cell| cell.replace('|', "\\|").replace('<', "&lt;"));
        text += &format!("| {} |\n", cells.join(" | "));
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn refusals_are_quoted_as_the_document_says() {
    assert!(CASES.len() >= 40, "{}", CASES.len());
    let said = Arc::new(all_said().await);
    for (case, (message, hint)) in CASES.iter().zip(said.iter()) {
        for text in [message, hint] {
            assert!(text.chars().all(|c| !c.is_control()), "{}: {text:?}", case.did);
            assert!(text.chars().count() < 800, "{}: {text}", case.did);
            for secret in [TOKEN, "hunter2", "0123456789abcdef", "\u{202e}"] {
                assert!(!text.contains(secret), "{}: {text}", case.did);
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/REFUSALS.md");
    let text = document(&said);
    if env::var_os("BLESS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    for (expected, found) in text.lines().zip(found.lines()) {
        assert_eq!(expected, found, "docs/REFUSALS.md differs from the cases; BLESS=1 writes it");
    }
    assert!(found == text, "docs/REFUSALS.md differs from the cases; BLESS=1 writes it");
}
