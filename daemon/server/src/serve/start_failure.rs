//! A daemon that cannot start until an administrator changes something: its exit code, which tells systemd that another
//! start would fail too, and its answer to the clients that wait at the socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};

/// `EX_CONFIG` of `sysexits.h`, for systemd: `RestartPreventExitStatus=` of the units names it.
const EXIT_CODE: u8 = 78;

/// How long the daemon waits for the requests of connected clients. A socket that is closed before its request was read
/// is reset, and its client does not see the answer.
const REQUESTS_LIMIT: Duration = Duration::from_secs(1);

/// The same as for every command, unless a service manager waits for the daemon.
pub(super) fn exit_code(error: &ErrorBody, is_service: bool) -> u8 {
    if is_service && is_permanent(error) { EXIT_CODE } else { error.code.exit_code() }
}

/// Whether every start fails in this way until somebody corrects the configuration, the unit, the permissions or the
/// store. A lock, a full disk and a failed read may pass.
const fn is_permanent(error: &ErrorBody) -> bool {
    matches!(error.code, ErrorCode::InvalidRequest | ErrorCode::Denied | ErrorCode::Corrupt)
}

/// Answers the clients that wait at the socket which systemd keeps. Otherwise systemd would start the daemon for them
/// again at once, until it gives up and closes the socket.
pub(super) fn answer_waiting(listener: &UnixListener, error: &ErrorBody) {
    if !is_permanent(error) {
        return;
    }
    let message = format!("the daemon cannot start: {}", error.message);
    let error = ErrorBody::new(ErrorCode::Unavailable, message)
        .with_hint("its administrator finds more with `systemctl status blobd` and `journalctl -u blobd`");
    let body = serde_json::to_string(&ErrorResponse { error }).unwrap_or_default();
    let status = ErrorCode::Unavailable.http_status();
    let response = format!(
        "HTTP/1.1 {status} Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let until = Instant::now() + REQUESTS_LIMIT;
    // It does not block: systemd keeps those that connect later.
    while let Ok((client, _address)) = listener.accept() {
        answer(client, &response, until);
    }
}

fn answer(mut client: UnixStream, response: &str, until: Instant) {
    // A timeout of zero would mean none.
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let is_limited = client.set_nonblocking(false).and_then(|()| client.set_read_timeout(Some(left)));
    if is_limited.is_err() || client.set_write_timeout(Some(left)).is_err() {
        return;
    }
    // More than the head of any request. What the request says does not matter, nor whether its client still listens.
    let _ = client.read(&mut [0; 64 << 10]);
    let _ = client.write_all(response.as_bytes());
}

#[cfg(test)]
mod tests {
    use blobd_client::Client;
    use blobd_client::error::ClientError;

    use super::*;

    #[test]
    fn exit_code_of_a_wrong_configuration_is_not_that_of_other_failures() {
        let code = |code| exit_code(&ErrorBody::new(code, "x"), true);
        for permanent in [ErrorCode::InvalidRequest, ErrorCode::Denied, ErrorCode::Corrupt] {
            assert_eq!(code(permanent), 78);
        }
        assert_eq!(code(ErrorCode::Busy), ErrorCode::Busy.exit_code());
        assert_eq!(exit_code(&ErrorBody::new(ErrorCode::InvalidRequest, "x"), false), 2);
        assert!(ErrorCode::ALL.iter().all(|code| code.exit_code() != EXIT_CODE));
    }

    #[test]
    fn clients_that_wait_get_the_reason_and_silent_ones_do_not_delay_them_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let client = Client::connect(&path).unwrap();
        let waiting = std::thread::spawn(move || client.models().unwrap_err());
        answer_waiting(&listener, &ErrorBody::new(ErrorCode::Busy, "held by another daemon"));
        assert!(!waiting.is_finished(), "the next start may succeed");
        answer_waiting(&listener, &ErrorBody::new(ErrorCode::InvalidRequest, "config.toml:1:1: unknown key"));
        let ClientError::Daemon(error) = waiting.join().unwrap() else { panic!("not an answer") };
        assert_eq!(error.code, ErrorCode::Unavailable);
        assert_eq!(error.message, "the daemon cannot start: config.toml:1:1: unknown key");
        drop(silent);
    }
}
