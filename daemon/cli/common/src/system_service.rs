//! The state of the system's service, for errors and checks: systemd's state of its units, and the last error that the
//! daemon has logged.

use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;
use std::{fmt, thread};

use blobd_client::sockets::SYSTEM_UNITS;

use crate::{ErrorBody, ErrorCode};

/// For answers of systemd: an error must not hang while its cause is looked up.
const TIME_LIMIT: Duration = Duration::from_secs(3);
/// More than either program prints.
const MAX_OUTPUT_BYTES: u64 = 64 << 10;
const MAX_LINE_CHARACTERS: usize = 500;

/// Whether systemd runs this machine.
pub fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// The units of the system's daemon, as systemd knows them; empty if it cannot be asked.
pub fn units() -> Vec<Unit> {
    const PROPERTIES: &str =
        "--property=Id,LoadState,ActiveState,SubState,Result,UnitFileState,ExecMainStatus,InvocationID";
    let mut show = Command::new("systemctl");
    show.arg("show").arg(PROPERTIES).args(SYSTEM_UNITS);
    output_within(TIME_LIMIT, show)
        .map_or_else(Vec::new, |text| text.split("\n\n").filter_map(Unit::parse).collect())
}

/// The error of a command for the system's daemon while nothing listens at its socket.
pub fn unavailable(socket: &str, evidence: &Path) -> ErrorBody {
    let units = units();
    let (state, hint) = match telling(&units) {
        Some(unit) => {
            let reason = unit.last_error().map_or_else(String::new, |line| format!(": {line}"));
            (format!("{unit}{reason}"), unit.next_step())
        }
        None => {
            (format!("nothing listens there, although {} exists", evidence.display()), NO_SYSTEMD.to_owned())
        }
    };
    let message = format!("{socket}: the system's daemon does not answer: {state}");
    ErrorBody::new(ErrorCode::Unavailable, message).with_hint(hint)
}

const NO_SYSTEMD: &str = "start the system's daemon; with systemd, `systemctl status blobd` shows its state";

/// The unit whose state explains why there is no daemon: the service if it was started, else the socket.
pub fn telling(units: &[Unit]) -> Option<&Unit> {
    let loaded = || units.iter().filter(|unit| unit.load != "not-found");
    let was_started = |unit: &&Unit| unit.is_service() && unit.active != "inactive";
    loaded().find(was_started).or_else(|| loaded().next())
}

/// Does work that may never return, such as a question to a daemon or a directory server. Returns `None` if there is no
/// result in time; the work then continues until the process ends.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, result) = channel();
    let run = move || {
        // The receiver may have given up.
        let _ = done.send(work());
    };
    let _not_joined = thread::Builder::new().name("limited".to_owned()).spawn(run).ok()?;
    result.recv_timeout(limit).ok()
}

/// A unit, in the words of `systemctl show`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    id: String,
    /// `loaded`, `masked`, `not-found` or `bad-setting`.
    load: String,
    /// `active`, `inactive`, `failed`, `activating` …
    active: String,
    /// More precisely, such as `auto-restart`.
    sub: String,
    /// `success`, or how it has failed.
    result: String,
    /// `enabled`, `disabled` …
    file_state: String,
    exit_code: String,
    invocation: String,
}

impl Unit {
    /// Lines `Property=value`; `None` without the name of the unit.
    pub fn parse(text: &str) -> Option<Self> {
        let mut unit = Self::default();
        for (property, value) in text.lines().filter_map(|line| line.split_once('=')) {
            let field = match property {
                "Id" => &mut unit.id,
                "LoadState" => &mut unit.load,
                "ActiveState" => &mut unit.active,
                "SubState" => &mut unit.sub,
                "Result" => &mut unit.result,
                "UnitFileState" => &mut unit.file_state,
                "ExecMainStatus" => &mut unit.exit_code,
                "InvocationID" => &mut unit.invocation,
                _ => continue,
            };
            value.clone_into(field);
        }
        (!unit.id.is_empty()).then_some(unit)
    }

    /// Whether it is a service, and not a socket.
    pub fn is_service(&self) -> bool {
        self.id.ends_with(".service")
    }

    /// Whether its last start or run ended with an error, also while systemd waits before it starts it again.
    pub fn has_failed(&self) -> bool {
        self.active == "failed" || self.sub == "auto-restart"
    }

    /// Whether it runs or listens.
    pub fn is_active(&self) -> bool {
        self.active == "active"
    }

    fn is_masked(&self) -> bool {
        self.load == "masked"
    }

    /// The last error that this run of the service has logged, if this user may read it.
    pub fn last_error(&self) -> Option<String> {
        let is_id =
            self.invocation.len() == 32 && self.invocation.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !self.is_service() || !self.has_failed() || !is_id {
            return None;
        }
        let mut journal = Command::new("journalctl");
        journal.args(["--quiet", "--no-pager", "--output=cat", "--priority=err"]);
        journal.arg(format!("_SYSTEMD_INVOCATION_ID={}", self.invocation));
        let text = output_within(TIME_LIMIT, journal)?;
        // The message of a command is followed by its hint.
        let line = text.lines().rev().find(|line| !line.starts_with("hint: ") && !line.trim().is_empty())?;
        let line = line.trim().trim_start_matches("blobd: ");
        Some(line.chars().take(MAX_LINE_CHARACTERS).collect())
    }

    /// What the user should do about it.
    pub fn next_step(&self) -> String {
        const LOOK: &str = "look at it with `systemctl status blobd.socket blobd` and `journalctl -u blobd`";
        match self.active.as_str() {
            "inactive" => format!("{LOOK}, and start it with `{}`", self.mended_by()),
            _ => LOOK.to_owned(),
        }
    }

    /// The command that starts the unit.
    pub fn mended_by(&self) -> String {
        let id = &self.id;
        match (self.is_masked(), self.file_state.as_str()) {
            (true, _) => format!("sudo systemctl unmask {id}"),
            (_, "disabled") => format!("sudo systemctl enable --now {id}"),
            _ => format!("sudo systemctl start {id}"),
        }
    }
}

/// `blobd.service is failed (exit code 78)`
impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut details = Vec::new();
        if self.sub == "auto-restart" {
            details.push("to be restarted".to_owned());
        }
        if self.has_failed() && !["", "success", "exit-code"].contains(&self.result.as_str()) {
            details.push(self.result.clone());
        }
        if self.has_failed() && !["", "0"].contains(&self.exit_code.as_str()) {
            details.push(format!("exit code {}", self.exit_code));
        }
        match self.file_state.as_str() {
            _ if self.is_masked() => details.push("masked".to_owned()),
            // A service that its socket starts need not be enabled.
            "disabled" if self.active == "inactive" => details.push("disabled".to_owned()),
            _ => {}
        }
        write!(f, "{} is {}", self.id, self.active)?;
        if details.is_empty() { Ok(()) } else { write!(f, " ({})", details.join(", ")) }
    }
}

/// The standard output of a program; `None` if it is missing, fails or takes too long.
fn output_within(limit: Duration, mut command: Command) -> Option<String> {
    // The texts of systemd are not translated, but its pager and colours depend on the environment.
    command.env("SYSTEMD_PAGER", "").env("SYSTEMD_COLORS", "0").env("LC_ALL", "C");
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let mut child = Killed(child);
    let output = child.0.stdout.take()?;
    let read = move || {
        let mut bytes = Vec::new();
        output.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes).is_ok().then_some(bytes)
    };
    // The thread ends when the program does, which is killed on return.
    let bytes = within(limit, read)??;
    let has_succeeded = child.0.wait().is_ok_and(|status| status.success());
    has_succeeded.then(|| String::from_utf8_lossy(&bytes).into_owned())
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(properties: &str) -> Unit {
        Unit::parse(&properties.replace(' ', "\n")).unwrap()
    }

    #[test]
    fn state_of_a_unit_is_one_line_with_the_next_step() {
        for (properties, told, step) in [
            (
                "Id=blobd.service LoadState=loaded ActiveState=failed SubState=failed Result=exit-code ExecMainStatus=78 UnitFileState=disabled",
                "blobd.service is failed (exit code 78)",
                "journalctl -u blobd",
            ),
            (
                "Id=blobd.service LoadState=loaded ActiveState=activating SubState=auto-restart Result=signal ExecMainStatus=9",
                "blobd.service is activating (to be restarted, signal, exit code 9)",
                "systemctl status blobd",
            ),
            (
                "Id=blobd.socket LoadState=loaded ActiveState=failed Result=service-start-limit-hit UnitFileState=enabled",
                "blobd.socket is failed (service-start-limit-hit)",
                "systemctl status blobd",
            ),
            (
                "Id=blobd.socket LoadState=loaded ActiveState=inactive SubState=dead Result=success UnitFileState=disabled",
                "blobd.socket is inactive (disabled)",
                "sudo systemctl enable --now blobd.socket",
            ),
            (
                "Id=blobd.socket LoadState=loaded ActiveState=inactive Result=success UnitFileState=enabled",
                "blobd.socket is inactive",
                "sudo systemctl start blobd.socket",
            ),
            (
                "Id=blobd.socket LoadState=masked ActiveState=inactive UnitFileState=masked",
                "blobd.socket is inactive (masked)",
                "sudo systemctl unmask blobd.socket",
            ),
        ] {
            let unit = unit(properties);
            assert_eq!(unit.to_string(), told);
            assert!(unit.next_step().contains(step), "{told}: {}", unit.next_step());
            assert_eq!(unit.last_error(), None, "without the ID of a run");
        }
    }

    #[test]
    fn state_of_a_started_service_takes_precedence_over_its_socket() {
        let socket = unit("Id=blobd.socket LoadState=loaded ActiveState=inactive");
        let service = |state| unit(&format!("Id=blobd.service LoadState=loaded ActiveState={state}"));
        let absent = unit("Id=blobd.service LoadState=not-found ActiveState=inactive");
        let told = |units: &[Unit]| telling(units).map(|unit| unit.id.clone());
        assert_eq!(told(&[socket.clone(), service("failed")]).as_deref(), Some("blobd.service"));
        assert_eq!(told(&[socket.clone(), service("inactive")]).as_deref(), Some("blobd.socket"));
        assert_eq!(told(&[socket, absent.clone()]).as_deref(), Some("blobd.socket"));
        assert_eq!(told(&[absent]), None);
        assert_eq!(Unit::parse("Garbage"), None);
    }

    #[test]
    fn missing_failing_or_hanging_program_gives_no_state() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let long = Duration::from_secs(600);
        assert_eq!(output_within(long, shell("echo Id=a")).as_deref(), Some("Id=a\n"));
        assert_eq!(output_within(long, shell("echo Id=a; exit 1")), None);
        assert_eq!(output_within(long, Command::new("/nonexistent/systemctl")), None);
        assert_eq!(output_within(Duration::from_millis(50), shell("exec sleep 1000")), None);
    }
}
