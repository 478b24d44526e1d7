//! Registries that cannot be reached, refuse, or send wrong data.

use blobd_tests::command::Run;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::Fault;

use super::Situation;
use super::fixture::{Fixture, registry};

/// A pull from a registry with this fault in its responses about manifests.
fn pull_with(fixture: &Fixture, fault: Fault) -> Run {
    let (registry, name) = registry();
    registry.add_fault("manifests", usize::MAX, fault);
    fixture.run(&["pull", &name])
}

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "nothing listens at the registry's port",
        command: "blobd pull http://127.0.0.1:1/library/m",
        run: |fixture| fixture.run(&["pull", "http://127.0.0.1:1/library/m"]),
        code: 1,
        happened: "127.0.0.1:1",
        why: "connection refused",
        to_do: "is the registry running, and is the port right?",
    },
    Situation {
        did: "a proxy that does not answer",
        command: "HTTPS_PROXY=http://127.0.0.1:1 blobd pull llama3:8b",
        run: |fixture| fixture.run_with("HTTPS_PROXY", "http://127.0.0.1:1", &["pull", "llama3:8b"]),
        code: 1,
        happened: "registry.ollama.ai",
        why: "connection through the proxy failed",
        to_do: "is HTTPS_PROXY right?",
    },
    Situation {
        did: "a proxy that is not understood",
        command: "ALL_PROXY=gopher://127.0.0.1:1 blobd pull llama3:8b",
        run: |fixture| fixture.run_with("ALL_PROXY", "gopher://127.0.0.1:1", &["pull", "llama3:8b"]),
        code: 2,
        happened: "ALL_PROXY: not understood",
        why: "found the scheme gopher",
        to_do: "expected [http|https|socks4|socks4a|socks5|socks5h]://[USER:PASSWORD@]HOST[:PORT]",
    },
    Situation {
        did: "a registry that says why it refuses",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| pull_with(fixture, Fault::Refusal(503, "maintenance until noon")),
        code: 1,
        happened: "127.0.0.1",
        why: "failed with status 503: \"maintenance until noon\"",
        to_do: "the server has a problem: try again later",
    },
    Situation {
        did: "a registry that requires a login (401)",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| pull_with(fixture, Fault::Status(401)),
        code: 7,
        happened: "library/m",
        why: "denied",
        to_do: "`blobd login ",
    },
    Situation {
        did: "a registry that refuses access (403)",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| pull_with(fixture, Fault::Status(403)),
        code: 7,
        happened: "library/m",
        why: "denied",
        to_do: "`blobd login ",
    },
    Situation {
        did: "too many requests (429)",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| pull_with(fixture, Fault::TooManyRequests(3600)),
        code: 1,
        happened: "127.0.0.1",
        why: "too many requests",
        to_do: "try again",
    },
    Situation {
        did: "a network with a login page",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| pull_with(fixture, Fault::WebPage),
        code: 1,
        happened: "127.0.0.1",
        why: "response is a web page, not a registry's",
        to_do: "is this network behind a login page?",
    },
    Situation {
        did: "a file that is not what its manifest says",
        command: "blobd pull registry.local:5000/library/m",
        run: |fixture| {
            let (registry, name) = registry();
            let weights = sha256(&ModelFile::dense(1).bytes());
            registry.add_fault(&format!("sha256:{weights}"), usize::MAX, Fault::FlipInFile(2000));
            fixture.run(&["pull", &name])
        },
        code: 1,
        happened: "digest",
        why: "only its publisher can correct",
        to_do: "a proxy or mirror keeps a damaged copy; the received data was deleted",
    },
];
