//! Checks docs/JSON.md: every command prints exactly the documented shapes, with a daemon and without one, and every
//! failure is one documented error.

mod document;
mod failures;
mod imports;
mod matching;
mod notation;
mod runs;
mod sample;
mod session;
mod signatures;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::thread;

use blobd_client::protocol::error::ErrorCode;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::programs::is_unavailable;
use blobd_tests::temp_dirs::tmpfs_directory;

use self::document::Document;
use self::sample::Sample;
use self::session::Session;

/// Shown by no run, with the reason.
const NOT_SHOWN: &[(&str, &str)] = &[
    ("SpaceLimit as \"user_quota\"", "needs a user with a hard quota; tested in quotas.rs"),
    ("SpaceLimit as \"group_quota\"", "as \"user_quota\""),
    ("PlannedSpace.group present", "as \"user_quota\""),
    ("TrashedModel.added_by absent", "needs a model that an earlier version removed"),
    ("ShownConfiguration.system present", "needs a daemon for all users; tested in system_service.rs"),
    ("SystemDaemon.problem present", "as ShownConfiguration.system"),
    ("SystemDaemon.problem absent", "as ShownConfiguration.system"),
    ("HealthStatus as \"failing\"", "needs a disk that fails"),
    ("FitReport.adapters present", "needs a manifest with an adapter; tested in fit.rs"),
    ("FitReport.adapters: an element", "as FitReport.adapters present"),
    ("Machine.available_bytes as null", "needs a kernel before 3.14"),
    ("Machine.gpus: an element", "needs a GPU"),
    ("FitsIn as \"devices_and_memory\"", "needs a GPU; tested in fit.rs"),
    ("ShownList.read_only present", "needs a disk that fails"),
    ("ShownList.logical_bytes absent", "needs a measure of the disk that fails"),
    ("ShownList.stored_bytes absent", "as ShownList.logical_bytes"),
    ("ShownList.saved_bytes absent", "as ShownList.logical_bytes"),
    ("ComparedModel.error present", "needs a registry that fails; tested in outdated.rs"),
    ("ComparedModel.status as \"failed\"", "as error"),
    ("ComparedModel.status as \"outdated\"", "ends with exit code 1; tested in outdated.rs"),
    (
        "ChosenFiles.notes present",
        "needs a repository with weights of other formats; tested in pull/folders.rs",
    ),
    ("ChosenFiles.notes: an element", "as ChosenFiles.notes present"),
    ("RunningPull.destination present", "needs a push in progress; tested in push.rs"),
    ("RunningKind as \"push\"", "as RunningPull.destination"),
    ("RunningKind as \"transfer\"", "as RunningPull.destination"),
    ("RunningPull.total_bytes as null", "needs a registry that does not answer"),
    ("RunningPull.phase absent", "needs more pulls than run at a time"),
    ("State as \"queued\"", "as RunningPull.phase"),
    ("State as \"waiting\"", "needs a registry that is silent; tested in pull/slow_hosts.rs"),
    ("LoadedList.failed present", "needs a layout with a fault; tested in bundles.rs"),
    ("LoadedList.failed: an element", "as LoadedList.failed present"),
    ("LayoutList.failed present", "as LoadedList.failed present"),
    ("LayoutList.failed: an element", "as LoadedList.failed present"),
    ("SessionSummary.engine present", "needs `blobd exec`; tested in exec.rs"),
    ("SessionSummary.container present", "needs a process of another PID namespace; tested in containers.rs"),
    ("SessionSummary.command as null", "needs a client that ends at this moment"),
    ("Warmed.cold_bytes as null", "needs a command of a user who may not open the store's files"),
    ("Warmed.resident_bytes as null", "as cold_bytes"),
    ("Warmed.lock_error present", "root is not limited"),
    ("UnfinishedDownload.name as null", "needs a download that an earlier version began"),
    ("UnfinishedDownload.source as null", "as its name"),
    ("UnfinishedDownload.size as null", "as its name"),
    ("UnfinishedDownload.started as null", "as its name"),
    ("UnfinishedDownload.last_received as null", "needs a download without files"),
    ("UnfinishedDownload.uid as null", "as its name"),
    ("DroppedDownloads.kept: an element", "needs a pull that runs at the same time"),
    ("KeptDownload.name as string", "as DroppedDownloads.kept"),
    ("KeptDownload.name as null", "as DroppedDownloads.kept"),
    (
        "DifferingRange.first_from absent",
        "needs a kill during a second download; tested in pull/second_attempt.rs",
    ),
    ("DifferingRange.second_from absent", "as first_from"),
    ("GcReport.unlisted present", "needs 65,537 files; tested in the store and in ops::gc"),
    ("DroppedDownload.name as null", "as in UnfinishedDownload"),
    ("UserUsage.disk_bytes absent", "needs a user who does not administer; tested in quotas.rs"),
    ("QuotaState as \"ok\"", "needs a large quota; tested in quotas.rs"),
    ("QuotaState as \"full\"", "as \"ok\""),
    ("UserLimits.soft_bytes as null", "needs users with one limit; tested in quotas.rs"),
    ("UserLimits.hard_bytes as null", "as soft_bytes"),
    ("AuditRecord.seq absent", "needs a log of an earlier version"),
    ("Phase as \"repairing\"", "of a verification, whose progress is not printed"),
    ("WorkProgress.phase absent", "needs more pushes than run at a time"),
    ("ContextSource as \"model\"", "needs a manifest with num_ctx; tested in fit.rs"),
    ("LayerPlace as \"disk\"", "needs a model with a table; tested in fit.rs"),
    ("FitReport.vram_bytes absent", "only over HTTP, if no memory is given"),
    ("FitReport.layers absent", "as vram_bytes"),
    ("FitReport.layers_of absent", "as vram_bytes"),
    ("FitReport.total_bytes absent", "as vram_bytes"),
    ("FitReport.memory_bytes absent", "as vram_bytes"),
    ("FitReport.fits absent", "as vram_bytes"),
    ("FitReport.fits_in absent", "as vram_bytes"),
    ("FitReport.max_context absent", "as vram_bytes"),
    ("FitReport.devices absent", "as vram_bytes"),
];

/// A name or null: whether the user of the tests has a name depends on the machine.
const NAMES_OF_USERS: [&str; 8] = [
    "SessionSummary.user as ",
    "UnfinishedDownload.user as ",
    "UserId.user as ",
    "RunningPull.user as ",
    "NameChange.user present",
    "Undone.user ",
    "ChargedUser.user as ",
    "AuditRecord.user ",
];

/// Options of single commands that are used in no run, with the reason. Options of all commands need not be used.
const UNUSED_OPTIONS: &[(&str, &str)] = &[
    ("mount --allow-other", "does not change the output"),
    ("import --from", "as --from-ollama and --from-hf, for the usual folders"),
    ("log --follow", "does not end; tested in audit.rs"),
];

/// One test, because all runs together must show every key.
#[test]
fn outputs_have_the_documented_shapes_and_every_documented_key_occurs() {
    let (embedded, served) = thread::scope(|scope| {
        let embedded = scope.spawn(without_daemon);
        let served = scope.spawn(with_daemon);
        (embedded.join(), served.join())
    });
    let sessions = [embedded.expect("the runs without a daemon"), served.expect("the runs with a daemon")];
    let mut problems: Vec<_> = sessions.iter().flat_map(|session| session.problems.clone()).collect();
    problems.extend(shapes_not_shown(&sessions));
    problems.extend(options_not_used(&sessions));
    assert!(problems.is_empty(), "differs from docs/JSON.md:\n{}", lines(&problems));
    python_accepts_the_outputs(&sessions);
}

fn without_daemon() -> Session {
    let (sample, folder) = (Sample::new(), tmpfs_directory());
    let root = folder.path().join("store");
    let mut session = Session::new(Blobd::at_root(&root), false);
    runs::run_all(&mut session, &sample, &root);
    imports::run_all(&mut session, &sample);
    failures::run_all(&mut session, &sample);
    session
}

fn with_daemon() -> Session {
    let (sample, folder) = (Sample::new(), tmpfs_directory());
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let limits = "{ soft = '1 B', hard = \"1 TiB\" }";
    let quotas = format!(
        "[quotas]\ndefault = {{ hard = '5 B' }}\nusers = {{ {uid} = {limits} }}\n\
         groups = {{ {gid} = {{ together = {limits} }} }}\n"
    );
    let config = format!("[scrub]\nrate_bytes_per_second = 0\n{quotas}");
    let config = sample.config("daemon.toml", &config);
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let daemon = TestDaemon::start_under(&["env", &variable], folder);
    let mut session = Session::new(daemon.command(), true);
    runs::run_all(&mut session, &sample, daemon.root());
    imports::run_all(&mut session, &sample);
    runs::with_clients(&mut session, &daemon);
    failures::run_all(&mut session, &sample);
    failures::of_daemon(&mut session, &daemon);
    session
}

/// The digest of the first layer of a model at its registry.
fn layer_digest(blobd: &Blobd, reference: &str) -> String {
    let shown = blobd.run(["show", reference, "--json"]).succeeds().json();
    let layers = shown["layers"].as_array().expect("layers");
    let layer = layers.iter().find(|layer| layer["media_type"] == sample::MODEL).expect("weights");
    layer["digest"].as_str().expect("a digest").to_owned()
}

/// Optional keys that were never present or never absent, alternatives that were never taken, lists that were always
/// empty, and documented command lines that were never run.
fn shapes_not_shown(sessions: &[Session]) -> Vec<String> {
    let document = Document::read();
    let seen: BTreeSet<_> = sessions.iter().flat_map(|session| session.seen.clone()).collect();
    let points = document.types.points.iter().enumerate();
    let unseen: Vec<_> =
        points.filter(|(point, _)| !seen.contains(point)).map(|(_, what)| what.as_str()).collect();
    let excused = |what: &str| {
        NOT_SHOWN.iter().any(|(known, _reason)| *known == what)
            || NAMES_OF_USERS.iter().any(|user| what.starts_with(user))
    };
    let missing = unseen.iter().filter(|what| !excused(what)).map(|what| format!("shown by no run: {what}"));
    let stale = NOT_SHOWN.iter().filter(|(what, _)| !unseen.contains(what));
    let stale = stale.map(|(what, _)| format!("in NOT_SHOWN, but shown: {what}"));
    let run: BTreeSet<_> = sessions.iter().flat_map(|session| session.outputs.keys()).collect();
    let not_run = document.shapes.keys().filter(|command| !run.contains(command));
    missing.chain(stale).chain(not_run.map(|command| format!("run by no test: {command}"))).collect()
}

fn lines(list: &[String]) -> String {
    list.iter().map(|line| format!("  {line}\n")).collect()
}

/// Options of commands that no run has.
fn options_not_used(sessions: &[Session]) -> Vec<String> {
    let blobd = &sessions[0].blobd;
    let of_all: BTreeSet<_> = options(blobd, &["--help"]).into_iter().flatten().collect();
    let mut unused = Vec::new();
    for command in commands(blobd) {
        let used: BTreeSet<_> =
            sessions.iter().filter_map(|session| session.used_options.get(&command)).flatten().collect();
        for names in options(blobd, &[&command, "--help"]) {
            let is_known = |name: &String| of_all.contains(name) || used.contains(name);
            let long = format!("{command} {}", names.last().map_or("", String::as_str));
            if !names.iter().any(is_known) && !UNUSED_OPTIONS.iter().any(|(excused, _)| *excused == long) {
                unused.push(format!("option used by no run: {long}"));
            }
        }
    }
    unused
}

/// The options that a help text lists, each by all its names.
fn options(blobd: &Blobd, arguments: &[&str]) -> Vec<Vec<String>> {
    let help = blobd.run(arguments).succeeds().text();
    help.lines().filter_map(option_names).collect()
}

/// The names of the option that a line of a help text describes.
fn option_names(line: &str) -> Option<Vec<String>> {
    let line = line.trim_start();
    let names = line.split([' ', ',', '[', '=']).take_while(|word| word.is_empty() || word.starts_with('-'));
    let names: Vec<_> = names.filter(|word| word.len() > 1).map(str::to_owned).collect();
    (line.starts_with('-') && !names.is_empty()).then_some(names)
}

/// The commands that `blobd --help` lists.
fn commands(blobd: &Blobd) -> Vec<String> {
    let help = blobd.line("--help").succeeds().text();
    let listed =
        help.lines().skip_while(|line| *line != "Get:").take_while(|line| *line != "Global options:");
    let listed = listed.filter(|line| line.starts_with("  "));
    let names =
        listed.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    names.map(str::to_owned).collect()
}

#[test]
fn every_command_is_documented_and_every_documented_command_exists() {
    let folder = tmpfs_directory();
    let commands: BTreeSet<_> = commands(&Blobd::at_root(&folder.path().join("store"))).into_iter().collect();
    assert!(commands.len() > 20, "{commands:?}");
    let document = Document::read();
    let alone = document.without_json.iter().filter(|name| !name.contains(' ') && !name.starts_with('-'));
    let sections: BTreeSet<_> = document.sections.iter().chain(alone).cloned().collect();
    assert_eq!(commands, sections);
    for section in &document.sections {
        let has_shape = document.shapes.keys().any(|line| line.split(' ').nth(1) == Some(section));
        assert!(has_shape, "{section}: a section without a shape");
    }
}

#[test]
fn table_of_errors_is_that_of_the_code() {
    let document = Document::read();
    for row in document.errors.iter().filter(|row| row.code != "interrupted") {
        let code: ErrorCode = serde_json::from_value(row.code.clone().into())
            .unwrap_or_else(|error| panic!("{}: {error}", row.code));
        assert_eq!(i32::from(code.exit_code()), row.exit_code, "{}", row.code);
        assert_eq!(Some(code.http_status()), row.http_status, "{}", row.code);
    }
    let documented: BTreeSet<_> = document.errors.iter().map(|row| row.code.clone()).collect();
    assert_eq!(documented.len(), document.errors.len(), "a code is listed twice");
    let defined: BTreeSet<_> =
        ErrorCode::ALL.map(ErrorCode::name).into_iter().chain(["interrupted"]).collect();
    assert_eq!(documented, defined.into_iter().map(str::to_owned).collect());
}

/// Python's parser reads one output of each kind.
fn python_accepts_the_outputs(sessions: &[Session]) {
    for (command, (output, has_lines)) in sessions.iter().flat_map(|session| &session.outputs) {
        let mut python = Command::new("python3");
        python.args(["-m", "json.tool"]).args(has_lines.then_some("--json-lines"));
        python.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = match python.spawn() {
            Err(error) if is_unavailable(&error) => return skipped(format_args!("python3: {error}")),
            child => child.expect("python3 starts"),
        };
        child.stdin.take().expect("a pipe").write_all(output).expect("python3 reads");
        let ended = child.wait_with_output().expect("python3 ends");
        assert!(ended.status.success(), "{command}: {}", String::from_utf8_lossy(&ended.stderr));
    }
}
