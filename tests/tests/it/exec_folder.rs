//! `blobd exec`: unmodified programs find models that are folders.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::command::{Run, run};
use blobd_tests::compiler::{compile, has};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::memory::{shared_bytes, status_bytes};
use blobd_tests::model::noise;
use blobd_tests::wait::eventually;

fn program(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name).to_str().unwrap().to_owned()
}

/// A safetensors file with F32 tensors of these numbers of elements.
fn safetensors(seed: u64, tensors: &[(&str, u64)]) -> Vec<u8> {
    let (mut writer, mut data) = (HeaderWriter::new(), Vec::new());
    for (name, count) in tensors {
        writer.tensor(name, Dtype::F32, &[*count]).unwrap();
        data.extend(noise(seed, name, usize::try_from(4 * count).unwrap()));
    }
    let mut file = writer.metadata("format", "pt").header().unwrap();
    file.extend(data);
    file
}

/// A model with tensors of whole pages, of odd sizes and without elements, a file in a folder, and a stored GGUF file's name.
fn folder() -> ModelFolder {
    let mut folder = ModelFolder::transformers(1);
    folder.add("tokenizer/vocab.txt", "a\nb\n");
    folder.add("empty.json", "");
    folder
}

fn odd_folder() -> ModelFolder {
    let mut folder = ModelFolder::default();
    let tensors =
        [("bias", 3), ("embedding", 70_001), ("norm", 1024), ("none", 0), ("scale", 1), ("late", 5000)];
    folder.add("model.safetensors", safetensors(7, &tensors));
    folder.add("config.json", r#"{"model_type":"llama"}"#);
    folder
}

/// Imports a folder, and returns where it was written.
fn import(daemon: &TestDaemon, name: &str, folder: &ModelFolder) -> PathBuf {
    let path = folder.write_to(daemon.scratch().join("folders").join(name));
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
    path
}

fn exec(daemon: &TestDaemon, arguments: &[&str]) -> Run {
    daemon.command().run(["exec", "--"].iter().chain(arguments))
}

fn run_plainly(arguments: &[&str]) -> Run {
    run(Command::new(arguments[0]).args(&arguments[1..]).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn python_finds_the_folder_that_was_imported() {
    let daemon = TestDaemon::start();
    if !has("python3") {
        return;
    }
    for (name, folder) in [("tiny", folder()), ("odd", odd_folder())] {
        let real = import(&daemon, name, &folder);
        let expected = run_plainly(&["python3", &program("folder.py"), real.to_str().unwrap()]).succeeds();
        let found = exec(&daemon, &["python3", &program("folder.py"), &format!("/blobd/{name}")]).succeeds();
        assert_eq!(found.text(), expected.text(), "{name}");
        assert_eq!(found.stderr, "", "{name}");
    }
}

#[test]
fn cpp_finds_the_folder_that_was_imported() {
    let daemon = TestDaemon::start();
    if !has("g++") {
        return;
    }
    let binary = daemon.scratch().join("folder");
    let binary = binary.to_str().unwrap();
    run_plainly(&["g++", "-std=c++17", "-O1", "-o", binary, &program("folder.cpp")]).succeeds();
    let real = import(&daemon, "tiny", &folder());
    let expected = run_plainly(&[binary, real.to_str().unwrap()]).succeeds().text();
    assert_eq!(exec(&daemon, &[binary, "/blobd/tiny"]).succeeds().text(), expected);
}

#[test]
fn tools_and_child_processes_work_in_the_folder() {
    let daemon = TestDaemon::start();
    let folder = folder();
    import(&daemon, "me/tiny:v1", &folder);
    let vocabulary = String::from_utf8(folder.0["tokenizer/vocab.txt"].clone()).unwrap();
    for command in [
        "cat /blobd/me/tiny:v1/tokenizer/vocab.txt",
        "cd /blobd/me/tiny:v1 && cat tokenizer/vocab.txt",
        "cd /blobd/me/tiny:v1/tokenizer && sh -c 'cat ../tokenizer/vocab.txt'",
        "cat /blobd//me/./tiny:v1/tokenizer/../tokenizer/vocab.txt",
    ] {
        assert_eq!(exec(&daemon, &["sh", "-c", command]).succeeds().text(), vocabulary, "{command}");
    }
    let listed = exec(&daemon, &["ls", "-lR", "/blobd/me/tiny:v1"]).succeeds();
    assert!(listed.text().contains("vocab.txt") && !listed.text().contains("->"), "{}", listed.text());
    let copy = daemon.scratch().join("copy");
    exec(&daemon, &["cp", "-r", "/blobd/me/tiny:v1", copy.to_str().unwrap()]).succeeds();
    for (path, bytes) in folder.0.iter().filter(|(path, _)| !path.ends_with(".safetensors")) {
        assert!(fs::read(copy.join(path)).unwrap() == *bytes, "{path}");
    }
}

#[test]
fn program_without_the_library_finds_no_file_in_the_folder() {
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &folder());
    let command = "cd /blobd/tiny && env -u LD_PRELOAD cat config.json";
    let run = exec(&daemon, &["sh", "-c", command]).exits_with(1);
    assert!(run.stdout.is_empty() && run.stderr.contains("No such file"), "{run:?}");
}

#[test]
fn nothing_in_a_folder_can_be_changed() {
    let daemon = TestDaemon::start();
    let folder = folder();
    import(&daemon, "tiny", &folder);
    for command in [
        "rm -f config.json",
        "rmdir tokenizer",
        "mkdir new",
        "touch new",
        "ln -s config.json new",
        "ln config.json new",
        "mv config.json new",
        "chmod 600 config.json",
        "truncate -s 0 config.json",
        "rm -rf /blobd/tiny",
        "mkdir /blobd",
    ] {
        let script = format!("cd /blobd/tiny && ! {command} && cat config.json && ls");
        let run = exec(&daemon, &["sh", "-c", &script]).succeeds();
        assert!(run.stderr.contains("Read-only file system"), "{command}: {}", run.stderr);
        assert!(run.stdout.starts_with(&folder.0["config.json"]), "{command}");
        assert_eq!(run.stdout.iter().filter(|byte| **byte == b'\n').count(), 8, "{command}: {}", run.text());
    }
}

#[test]
fn directory_of_a_folder_is_removed_when_no_program_uses_it() {
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &folder());
    let script = "cat /blobd/tiny/config.json >/dev/null; cd ${BLOBD_EXEC_SOCKET%/*}/folders; \
        for i in $(seq 200); do [ -z \"$(ls)\" ] && exit 0; sleep 0.05; done; exit 1";
    exec(&daemon, &["bash", "-c", script]).succeeds();
}

#[test]
fn model_that_is_not_a_folder_is_refused_with_the_path_to_use() {
    let daemon = TestDaemon::start();
    let file = blobd_tests::model::ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), file.as_os_str(), "--name".as_ref(), "one".as_ref()]).succeeds();
    let run = exec(&daemon, &["cat", "/blobd/one"]).exits_with(1);
    assert!(run.stderr.contains("one: the model is not a folder; open /blobd/one.gguf"), "{}", run.stderr);
    import(&daemon, "tiny", &folder());
    for path in ["/blobd/tiny/missing.json", "/blobd/tiny/missing.gguf", "/blobd/missing/config.json"] {
        let run = exec(&daemon, &["cat", path]).exits_with(1);
        assert!(run.stderr.contains("No such file"), "{path}: {}", run.stderr);
    }
    let run = exec(&daemon, &["sh", "-c", "echo x > /blobd/tiny/config.json"]);
    assert!(run.code != 0 && run.stderr.contains("Read-only file system"), "{}", run.stderr);
}

#[test]
fn folder_is_one_session_and_its_directory_goes_with_the_program() {
    let daemon = TestDaemon::start();
    import(&daemon, "tiny", &folder());
    let runtime = tempfile::tempdir().unwrap();
    let mut command = daemon.command().command();
    let script = "cd /blobd/tiny; exec 7<.; cat *.json >/dev/null; echo ready; read line";
    command.env("XDG_RUNTIME_DIR", runtime.path()).args(["exec", "--", "bash", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let sessions = daemon.client().sessions().unwrap().sessions;
    let models: Vec<_> = sessions.iter().map(|session| session.model.as_str()).collect();
    assert_eq!(models, ["tiny:latest"], "{sessions:?}");
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 0);
    eventually("the lease ends", || daemon.client().sessions().unwrap().sessions.is_empty());
}

/// `tests/programs/hold.c`, which holds a file mapped.
struct Holder {
    child: Child,
    output: BufReader<ChildStdout>,
    pid: u32,
}

impl Holder {
    fn start(daemon: &TestDaemon, program: &Path, arguments: &[&str]) -> Self {
        let mut command = daemon.command().command();
        command.args(["exec", "--"]).arg(program).args(arguments).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let pid = Self::touched(&mut output);
        Self { child, output, pid }
    }

    fn touched(output: &mut BufReader<ChildStdout>) -> u32 {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.split(' ').next().unwrap().parse().expect("the program has mapped the file")
    }

    /// Touches every page again: a page that the kernel has reclaimed counts for no process.
    fn touch(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"t\n").unwrap();
        Self::touched(&mut self.output);
    }

    fn end(mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn programs_share_the_pages_of_a_folder_even_in_private_writable_maps() {
    let daemon = TestDaemon::start_on_disk();
    let Some(program) = compile("tests/programs/hold.c", daemon.scratch(), &[]) else { return };
    let mut folder = odd_folder();
    let tensors = [("odd.bias", 5), ("embedding", 1 << 20), ("odd.large", (1 << 19) + 3), ("up", 1 << 18)];
    folder.add("model.safetensors", safetensors(1, &tensors));
    import(&daemon, "m", &folder);
    let size = folder.0["model.safetensors"].len() as u64;
    let blobs = daemon.root().join("blobs");
    for kind in ["shared", "private"] {
        let path = "/blobd/m/model.safetensors";
        let mut holders: Vec<_> = (0..2).map(|_| Holder::start(&daemon, &program, &[path, kind])).collect();
        eventually("the PSS of both programs is the size of the model", || {
            holders.iter_mut().for_each(Holder::touch);
            let sum: u64 = holders.iter().map(|holder| shared_bytes(holder.pid, &blobs)).sum();
            println!("{kind}: PSS of two: {sum}, the model: {size}");
            sum >= size - size / 20 && sum < size + size / 20
        });
        for holder in &holders {
            assert!(status_bytes(holder.pid, "RssAnon") < size / 4, "{kind}");
        }
        holders.into_iter().for_each(Holder::end);
    }
}
