//! Typical failures of every command: one error on standard error, and nothing on standard output.

use std::fs;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;

use super::sample::Sample;
use super::session::Session;

/// Commands that name something that does not exist.
const ABSENT: &[&str] = &[
    "show absent --stored",
    "show absent --residency",
    "show absent --hash",
    "show moe --template",
    "diff absent moe",
    "diff moe absent",
    "tensor absent output.weight",
    "tensor moe absent",
    "fit absent --stored",
    "warm absent",
    "warm moe --component projector",
    "export absent",
    "export moe --component projector",
    "edit absent new --set general.name=x",
    "tag absent new",
    "rename absent new",
    "pin absent",
    "unpin absent",
    "rm absent",
    "undelete absent",
    "verify absent",
    "release absent",
    "release 2147483647",
    "import /absent.gguf",
    "logout absent.example.org",
    "exec -- /absent",
];

/// Commands that are malformed or contradictory.
const MISUSED: &[&str] = &[
    "show ..",
    "tensor moe blk.0.ffn_up_exps.weight --values 0..1000000000000",
    "tensor moe blk.0.ffn_up_exps.weight -o /tmp/x",
    "edit moe new",
    "edit moe new --set nothing",
    "import --name x /a /b",
    "pull --name x a b",
    "export moe --merge -o -",
    "login host --user a:b --password-stdin",
    "serve --config /absent.toml",
    "login",
    "exec",
    "mount",
    "gc --plan-eviction=much",
    "rm moe --keep long",
    "limit fast",
    "release 0",
    "partial",
    "config",
    "config show --config /absent.toml",
    "ls --config /absent.toml",
    "ls --sort colour",
    "ls --filter nothing",
    "ls --nothing",
    "nothing",
    "upload base",
    "show",
    "help nothing",
    "man nothing",
    "completions nothing",
];

/// Failures on the store that [`super::runs::run_all`] leaves.
pub(super) fn run_all(session: &mut Session, sample: &Sample) {
    for line in ABSENT {
        session.line_fails("not_found", line);
    }
    for line in MISUSED {
        session.line_fails("invalid_request", line);
    }
    pulls(session, sample);
    let broken = sample.path("broken.gguf");
    for command in ["import", "show", "fit"] {
        session.fails("invalid_input", [command, &broken]);
    }
    session.line("pin", "moe");
    session.line_fails("denied", "rm moe");
    session.line_fails("denied", "edit large moe --set general.name=x");
    // It may have been evicted.
    session.ok("import", ["import", &sample.path("separate.gguf"), "--name", "separate"]);
    session.line_fails("busy", "tag moe separate");
    without_space(session, sample);
}

/// A registry that cannot be reached, and one that does not have the model.
fn pulls(session: &mut Session, sample: &Sample) {
    let closed = "http://127.0.0.1:1/me/absent:1";
    session.fails_after_output("pull", ["pull", closed], "upstream");
    session.line_fails("upstream", &format!("pull --dry-run {closed}"));
    let unknown = sample.registry.name("me/absent:1");
    session.fails_after_output("pull", ["pull", &unknown], "not_found");
    for line in ["pull --dry-run", "show", "fit"] {
        session.line_fails("not_found", &format!("{line} {unknown}"));
    }
}

/// A store whose quota is used up.
fn without_space(session: &mut Session, sample: &Sample) {
    if session.has_daemon {
        return;
    }
    let config = sample.config("full.toml", "[space]\nquota = \"1 MiB\"");
    let config = config.to_str().unwrap();
    let path = sample.path("new.gguf");
    fs::write(&path, ModelFile::dense(11).bytes()).unwrap();
    session.fails("no_space", ["import", &path, "--name", "new", "--config", config]);
    let rule = "[[policy.rules]]\naction = \"deny\"\nname = \"new\"\nreason = \"not reviewed\"";
    let config = sample.config("denying.toml", rule);
    let config = config.to_str().unwrap();
    session.fails("denied_by_policy", ["import", &path, "--name", "new", "--config", config]);
}

/// Failures of a daemon.
pub(super) fn of_daemon(session: &mut Session, daemon: &TestDaemon) {
    let socket = daemon.socket();
    let socket = socket.to_str().unwrap();
    session.line_fails("busy", &format!("serve --socket {socket} --root {}", daemon.root().display()));
    session.line_fails("invalid_request", &format!("ls --root /absent --socket {socket}"));
    session.line_fails("not_found", "mount /absent");
}
