//! `blobd web`: a page that shows the store and acts on it, on loopback, for one user.
//!
//! The command itself listens on a port of 127.0.0.1, and asks the daemon over its socket as any other command does. So
//! the kernel tells the daemon which user asks, the daemon listens on no port, and the page can see and do only what its
//! user may. Everybody on the machine can connect to a port of loopback, so the server answers with data only if the
//! request has the key of the session ([`access`]). The page is embedded in the binary, and loads nothing from
//! elsewhere.
//!
//! | file | responsibility |
//! |---|---|
//! | `access` | the one-time token, the key of the session, and which requests are refused |
//! | `pulls` | pulls that the page has begun |
//! | `routes` | the files of the page, and the questions and actions that are relayed to the daemon |
//! | `server` | accepts connections, with limits on each |

use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs};

use access::Secret;
use blobd_cli_common::connect::{connect, print_result};
use blobd_cli_common::{Global, internal};
use blobd_client::process::{Signals, first_of, listen_for_end};
use clap::Args;
use routes::{Mode, Relay};
use serde_json::json;
use server::WebServer;
use tempfile::NamedTempFile;

use crate::{ErrorBody, ErrorCode};

mod access;
mod pulls;
mod routes;
mod server;

/// Show the disk, the models, pulls and sessions on a page in the browser, and act on them
#[derive(Debug, Args)]
#[command(
    after_help = "The page can be opened only on this machine, and the link works once. It shows and does what
the other commands show and do for this user, and says what an action will do before it does it.
Ctrl-C ends it.

From another machine, with a port of your choice:
  ssh -L 8642:127.0.0.1:8642 HOST blobd web --no-open --port 8642

Examples:
  blobd web
  blobd web --no-open                          only print the link
  blobd web --read-only                        a page that can change nothing
  blobd web --json | head -n 1 | jq -r .url"
)]
pub(super) struct Params {
    /// The port of 127.0.0.1 to listen on; a free one by default
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Print the link, and do not open a browser
    #[arg(long)]
    no_open: bool,
    /// Offer no action on the page, and refuse every request that changes something
    #[arg(long)]
    read_only: bool,
}

const END_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let relay = Relay::new(connected.client.clone());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(internal)?;
    let stop = {
        let _context = runtime.enter();
        listen_for_end().map_err(internal)?
    };
    let token = Secret::random().map_err(internal)?;
    let mode = if params.read_only { Mode::ReadOnly } else { Mode::Act };
    let server = runtime.block_on(WebServer::bind(params.port, token.clone(), relay, mode));
    let server = server.map_err(|error| cannot_listen(params.port, &error))?;
    let url = format!("http://{}/#{}", server.address().map_err(internal)?, token.as_str());
    print_result(global, &json!({ "url": url }), |_page| {
        format!("{url}\nThe link works once. Ctrl-C ends the page.\n")
    })?;
    // Deleted at the end.
    let _link = (!params.no_open && !global.json).then(|| open_browser(&url));
    runtime.block_on(serve(&server, stop));
    server.stop_pulls();
    runtime.shutdown_timeout(END_TIMEOUT);
    Ok(())
}

async fn serve(server: &WebServer, mut stop: Signals) {
    tokio::select! {
        () = server.serve() => {}
        _kind = first_of(&mut stop) => {}
    }
}

fn cannot_listen(port: u16, error: &io::Error) -> ErrorBody {
    let (code, hint) = match error.kind() {
        io::ErrorKind::AddrInUse => (ErrorCode::Busy, "choose another --port, or none for a free one"),
        io::ErrorKind::PermissionDenied => {
            (ErrorCode::Denied, "ports below 1024 are for root; choose another --port")
        }
        _ => (ErrorCode::Internal, "leave out --port for a free one"),
    };
    ErrorBody::new(code, format!("127.0.0.1:{port}: cannot listen: {error}")).with_hint(hint)
}

/// Opens the page where there is a desktop. The browser gets a file that only this user can read and that leads to the
/// page: the arguments of a program, and so the link, could be read by all users.
fn open_browser(url: &str) -> Option<NamedTempFile> {
    let has_desktop = ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| env::var_os(name).is_some());
    if !has_desktop || !io::stdout().is_terminal() {
        return None;
    }
    let link = write_link(url).ok()?;
    let mut command = Command::new("xdg-open");
    command.arg(link.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Without a program that opens it, the printed link remains.
    let mut child = command.spawn().ok()?;
    std::thread::spawn(move || child.wait());
    Some(link)
}

fn write_link(url: &str) -> io::Result<NamedTempFile> {
    let directory = env::var_os("XDG_RUNTIME_DIR").map_or_else(env::temp_dir, PathBuf::from);
    let mut file = tempfile::Builder::new().prefix("blobd-web-").suffix(".html").tempfile_in(directory)?;
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600))?;
    write!(
        file,
        "<!doctype html><meta charset=\"utf-8\"><title>blobd</title>\
         <meta http-equiv=\"refresh\" content=\"0;url={url}\"><a href=\"{url}\">blobd</a>"
    )?;
    file.flush()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_is_readable_for_its_user_only() {
        let link = write_link("http://127.0.0.1:1/#secret").unwrap();
        let mode = fs::metadata(link.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(fs::read_to_string(link.path()).unwrap().contains("url=http://127.0.0.1:1/#secret"));
    }

    #[test]
    fn used_port_is_an_error_that_says_what_to_do() {
        let error = cannot_listen(80, &io::ErrorKind::AddrInUse.into());
        assert!(error.code == ErrorCode::Busy && error.message.starts_with("127.0.0.1:80: "), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("--port")));
    }
}
