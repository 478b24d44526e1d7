//! `blobd exec`: unmodified programs find models as files.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::{Run, run};
use blobd_tests::compiler::{compile, has};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::memory::shared_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;

fn import(daemon: &TestDaemon, name: &str, file: &ModelFile) {
    let path = file.write_to(daemon.scratch(), &format!("{name}.gguf"));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

/// Writes a model's image as a real file, and returns the file's path.
fn real_file(daemon: &TestDaemon, name: &str) -> String {
    let image = daemon.client().open(&name.parse().unwrap()).unwrap().contiguous().unwrap();
    let path = daemon.scratch().join(format!("{name}.image"));
    fs::write(&path, &image[..]).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn exec(daemon: &TestDaemon, arguments: &[&str]) -> Run {
    daemon.command().run(["exec", "--"].iter().chain(arguments))
}

fn run_plainly(arguments: &[&str]) -> Run {
    run(Command::new(arguments[0]).args(&arguments[1..]).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// Tensors whose sizes are not multiples of a page, and packed experts, of which some must be copied.
fn awkward_model() -> ModelFile {
    let mut file = ModelFile::separate_experts(1, 12);
    file.add_noise(1, "odd", GgmlType::I8, &[70_001]);
    file.add_noise(1, "last", GgmlType::I8, &[31]);
    file
}

#[test]
fn program_reads_a_model_in_every_way_as_it_reads_a_file() {
    let daemon = TestDaemon::start();
    let Some(probe) = compile("tests/programs/probe.c", daemon.scratch(), &[]) else { return };
    let probe = probe.to_str().unwrap();
    for (name, file) in [("plain", ModelFile::dense(1)), ("awkward", awkward_model())] {
        import(&daemon, name, &file);
        let expected = run_plainly(&[probe, &real_file(&daemon, name)]).succeeds().text();
        let found = exec(&daemon, &[probe, &format!("/blobd/{name}.gguf")]).succeeds();
        assert_eq!(found.text(), expected, "{name}");
        assert_eq!(found.stderr, "");
    }
}

#[test]
fn file_tools_read_and_copy_a_model() {
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &awkward_model());
    let expected = fs::read(real_file(&daemon, "tiny")).unwrap();
    let copy = daemon.scratch().join("copy");
    exec(&daemon, &["cp", "/blobd/tiny.gguf", copy.to_str().unwrap()]).succeeds();
    assert!(fs::read(&copy).unwrap() == expected);
    for command in
        ["cat /blobd/tiny.gguf", "cat < /blobd/tiny.gguf", "dd if=/blobd/tiny.gguf bs=1000 status=none"]
    {
        let run = exec(&daemon, &["sh", "-c", command]);
        // A program cannot read a file that the shell has opened for it: this is refused and never gives
        // wrong bytes.
        let is_refused = run.code != 0 && run.stdout.is_empty() && run.stderr.contains("Bad file descriptor");
        assert!(run.stdout == expected || is_refused, "{command}: {}", run.stderr);
        assert!(is_refused == command.contains('<'), "{command}: {}", run.stderr);
    }
    daemon.command().line("tag tiny ghcr.io/owner/repo.x/tiny:1").succeeds();
    let many_parts = exec(&daemon, &["cat", "/blobd/ghcr.io/owner/repo.x/tiny:1.gguf"]).succeeds();
    assert!(many_parts.stdout == expected);
    let listed = exec(&daemon, &["ls", "-l", "/blobd/tiny.gguf"]).succeeds();
    assert!(listed.text().contains(&expected.len().to_string()) && listed.stderr.is_empty(), "{listed:?}");
}

/// Opens a model through paths of descriptors (`/dev/fd/N` and the like): the program's own ones, and
/// inherited ones.
fn check_descriptor_paths(exec: impl Fn(&[&str]) -> Run, expected: &[u8], refusals: &[&str]) {
    for command in [
        "sha256sum /proc/self/fd/5 5</blobd/tiny.gguf",
        "sha256sum 5</blobd/tiny.gguf </dev/fd/5",
        "cat /dev/stdin </blobd/tiny.gguf",
        "cat /dev/fd/5 5</blobd/tiny.gguf",
        "cd /proc/self/fd; exec 5</blobd/tiny.gguf; cat 5",
        "cp /dev/fd/5 /dev/stdout 5</blobd/tiny.gguf",
        "dd if=/dev/fd/5 status=none 5</blobd/tiny.gguf",
    ] {
        let run = exec(&["bash", "-c", command]);
        let is_refused = refusals.iter().any(|refusal| run.stderr.contains(refusal));
        assert!(run.code != 0 && run.stdout.is_empty() && is_refused, "{command}: {run:?}");
    }
    if has("python3") {
        const SCRIPT: &str = "
import os, sys
fd = os.open('/blobd/tiny.gguf', os.O_RDONLY)
for name in '/proc/self/fd/%d' % fd, '/dev/fd/%d' % fd, '/proc/%d/fd/%d' % (os.getpid(), fd):
    os.read(fd, 1000)
    whole = open(name, 'rb').read()
    assert whole == open('/blobd/tiny.gguf', 'rb').read()
    try: open(name, 'r+b'); assert False
    except OSError: pass
sys.stdout.buffer.write(whole)";
        assert!(exec(&["python3", "-c", SCRIPT]).succeeds().stdout == expected);
    }
}

#[test]
fn no_descriptor_path_gives_wrong_bytes() {
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &awkward_model());
    let expected = fs::read(real_file(&daemon, "tiny")).unwrap();
    let refusals = ["Bad file descriptor", "No such device or address"];
    check_descriptor_paths(|arguments| exec(&daemon, arguments), &expected, &refusals);
    // On a kernel without `memfd_secret`, the library must refuse.
    let shim = ["-shared", "-fPIC", "-ldl"];
    let Some(shim) = compile("tests/programs/no_secret.c", daemon.scratch(), &shim) else { return };
    let shim = format!("LD_PRELOAD={}", shim.display());
    let with_shim = |arguments: &[&str]| {
        let arguments =
            [&["env", "bash", "-c", "export LD_PRELOAD=$LD_PRELOAD:${0#*=}; exec \"$@\"", &shim], arguments];
        exec(&daemon, &arguments.concat())
    };
    check_descriptor_paths(with_shim, &expected, &refusals[..1]);
}

#[test]
fn program_that_checks_for_write_access_finds_a_read_only_file() {
    let daemon = TestDaemon::start();
    let Some(program) = compile("tests/programs/careful.c", daemon.scratch(), &["-pthread"]) else { return };
    for (name, file) in [("plain", ModelFile::dense(1)), ("awkward", awkward_model())] {
        import(&daemon, name, &file);
        exec(&daemon, &[program.to_str().unwrap(), &format!("/blobd/{name}.gguf")]).succeeds();
    }
}

#[test]
fn python_maps_and_reads_a_model() {
    if !has("python3") {
        return;
    }
    const SCRIPT: &str = "
import hashlib, mmap, os, sys
path = sys.argv[1]
with open(path, 'rb') as f:
    m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    assert f.read() == m[:] and len(m) == os.path.getsize(path) and os.path.isfile(path)
    assert os.preadv(f.fileno(), [bytearray(99)], 5) == 99 and os.path.realpath(path) == path
    print(hashlib.sha256(m).hexdigest())";
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &awkward_model());
    let expected = run_plainly(&["python3", "-c", SCRIPT, &real_file(&daemon, "tiny")]).succeeds().text();
    let found = exec(&daemon, &["python3", "-c", SCRIPT, "/blobd/tiny.gguf"]).succeeds().text();
    assert_eq!(found, expected);
}

/// `tests/programs/hold.c`, which holds a model mapped.
struct Holder {
    child: Child,
    output: BufReader<ChildStdout>,
    /// The program's own process, below `blobd exec`.
    pid: u32,
}

impl Holder {
    fn start(daemon: &TestDaemon, program: &Path, model: &str) -> Self {
        let mut command = daemon.command().command();
        command.args(["exec", "--"]).arg(program).arg(model).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut holder = Self { child, output, pid: 0 };
        holder.pid = holder.touched();
        holder
    }

    /// Touches every page again: a page that the kernel has reclaimed counts for no process.
    fn touch(&mut self) {
        self.say("t\n");
        self.touched();
    }

    /// Waits until the program has touched every page, and returns its process ID.
    fn touched(&mut self) -> u32 {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.split(' ').next().unwrap().parse().expect("the program has mapped the model")
    }

    fn say(&mut self, line: &str) {
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    fn end(mut self) {
        self.say("\n");
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn two_programs_share_pages_and_each_hold_a_lease() {
    let daemon = TestDaemon::start_on_disk();
    let Some(program) = compile("tests/programs/hold.c", daemon.scratch(), &[]) else { return };
    let mut file = ModelFile::dense_of(1, 2, 256);
    file.add_noise(1, "rope_freqs.weight", GgmlType::I8, &[4 << 20]);
    let size: usize = file.tensors.iter().map(|tensor| tensor.bytes().len()).sum();
    import(&daemon, "m", &file);
    let mut holders: Vec<_> = (0..2).map(|_| Holder::start(&daemon, &program, "/blobd/m.gguf")).collect();
    let sessions = daemon.client().sessions().unwrap().sessions;
    assert_eq!(sessions.len(), 2, "{sessions:?}");
    let engines: Vec<_> = sessions.iter().map(|session| session.engine.clone().unwrap()).collect();
    let mut pids: Vec<_> = engines.iter().map(|engine| engine.pid.to_string()).collect();
    let mut expected: Vec<_> = holders.iter().map(|holder| holder.pid.to_string()).collect();
    pids.sort();
    expected.sort();
    assert_eq!(pids, expected, "ps names the programs, not `blobd exec`");
    assert!(engines.iter().all(|engine| engine.command == "hold"), "{engines:?}");
    let blobs = daemon.root().join("blobs");
    let size = size as u64;
    eventually("the PSS of both programs is the size of the model", || {
        holders.iter_mut().for_each(Holder::touch);
        let sum: u64 = holders.iter().map(|holder| shared_bytes(holder.pid, &blobs)).sum();
        println!("PSS of two: {sum}, the model: {size}");
        sum >= size && sum < size + size / 20
    });
    holders.into_iter().for_each(Holder::end);
    eventually("the leases end", || daemon.client().sessions().unwrap().sessions.is_empty());
}

#[test]
fn works_without_a_daemon() {
    let daemon = TestDaemon::start();
    let Some(probe) = compile("tests/programs/probe.c", daemon.scratch(), &[]) else { return };
    import(&daemon, "tiny", &ModelFile::dense(1));
    let expected = run_plainly(&[probe.to_str().unwrap(), &real_file(&daemon, "tiny")]).succeeds().text();
    let mut daemon = daemon;
    daemon.stop();
    let arguments = ["exec", "--", probe.to_str().unwrap(), "/blobd/tiny.gguf"];
    assert_eq!(daemon.embedded().run(arguments).succeeds().text(), expected);
}

#[test]
fn missing_model_is_not_found_and_the_reason_is_printed() {
    let daemon = TestDaemon::start();
    let run = exec(&daemon, &["cat", "/blobd/nothing.gguf"]).exits_with(1);
    assert!(
        run.stderr.contains("blobd: /blobd/nothing.gguf: model nothing:latest: not in the store"),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("No such file or directory"), "{}", run.stderr);
    for path in ["/blobd/bad name.gguf", "/blobd/tiny", "/blobd/../etc/passwd", "/blobd/.gguf"] {
        let run = exec(&daemon, &["cat", path]).exits_with(1);
        assert!(run.stderr.contains("No such file"), "{path}: {}", run.stderr);
    }
    import(&daemon, "tiny", &ModelFile::dense(1));
    let run = exec(&daemon, &["cat", "/blobd/tiny+projector.gguf"]).exits_with(1);
    assert!(run.stderr.contains("no GGUF header") || run.stderr.contains("projector"), "{}", run.stderr);
    let run = exec(&daemon, &["sh", "-c", "echo x > /blobd/tiny.gguf"]);
    assert!(run.code != 0 && run.stderr.contains("Read-only file system"), "{}", run.stderr);
}

#[test]
fn exit_status_is_that_of_the_program() {
    let daemon = TestDaemon::start();
    exec(&daemon, &["true"]).succeeds();
    exec(&daemon, &["sh", "-c", "exit 7"]).exits_with(7);
    exec(&daemon, &["sh", "-c", "kill -9 $$"]).exits_with(137);
    let text = exec(&daemon, &["echo", "--root", "-h"]).succeeds().text();
    assert_eq!(text, "--root -h\n");
}

#[test]
fn signal_reaches_the_program_and_nothing_is_left() {
    let daemon = TestDaemon::start();
    let folder = tempfile::tempdir().unwrap();
    let mut command = daemon.command().command();
    command.env("XDG_RUNTIME_DIR", folder.path());
    command.args(["exec", "--", "sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"]);
    let mut child = command.spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn static_program_is_refused_with_a_hint() {
    let daemon = TestDaemon::start();
    let Some(program) = compile("tests/programs/hold.c", daemon.scratch(), &["-static"]) else { return };
    let run = exec(&daemon, &[program.to_str().unwrap(), "/blobd/tiny.gguf"]).exits_with(2);
    assert!(run.stderr.contains("is linked statically"), "{}", run.stderr);
    assert!(run.stderr.contains("blobd export"), "{}", run.stderr);
    exec(&daemon, &["blobd-no-such-program"]).exits_with(3);
}
