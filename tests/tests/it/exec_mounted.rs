//! `blobd exec` on files of `blobd mount`: the children of a server that cannot be preloaded share the blobs' pages.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use blobd_tests::command::Run;
use blobd_tests::compiler::compile;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::memory::shared_bytes;
use blobd_tests::model::ModelFile;
use blobd_tests::mount::TestMount;
use blobd_tests::oracle::sha256;
use blobd_tests::wait::eventually;

fn import(daemon: &TestDaemon, name: &str, path: &Path) {
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

fn exec(daemon: &TestDaemon, arguments: &[&str]) -> Run {
    daemon.command().run(["exec", "--"].iter().chain(arguments))
}

/// A static parent with a child that holds a file mapped.
struct Runner {
    parent: Child,
    output: BufReader<ChildStdout>,
    pid: u32,
}

impl Runner {
    fn start(daemon: &TestDaemon, arguments: &[&Path]) -> Self {
        let mut command = daemon.command().command();
        command.args(["exec", "--"]).args(arguments).stdin(Stdio::piped());
        let mut parent = command.spawn().unwrap();
        let mut output = BufReader::new(parent.stdout.take().unwrap());
        let pid = Self::touched(&mut output);
        Self { parent, output, pid }
    }

    fn touched(output: &mut BufReader<ChildStdout>) -> u32 {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.split(' ').next().unwrap().parse().expect("the child has mapped the file")
    }

    fn touch(&mut self) {
        self.parent.stdin.as_mut().unwrap().write_all(b"t\n").unwrap();
        Self::touched(&mut self.output);
    }

    fn end(mut self) {
        self.parent.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert!(self.parent.wait().unwrap().success());
    }
}

#[test]
fn children_of_a_static_server_share_the_pages_of_a_mounted_file() {
    let daemon = TestDaemon::start_on_disk();
    let Some(parent) = compile("tests/programs/parent.c", daemon.scratch(), &["-static"]) else { return };
    let Some(holder) = compile("tests/programs/hold.c", daemon.scratch(), &[]) else { return };
    let model = ModelFile::dense_of(1, 2, 512);
    import(&daemon, "m:1", &model.write_to(daemon.scratch(), "m.gguf"));
    let Some(mount) = TestMount::start(&daemon) else { return };
    // As Ollama names it.
    let blob = mount.path(&format!("ollama/blobs/sha256-{}", sha256(&model.bytes())));
    let size: u64 = model.tensors.iter().map(blobd_tests::model::ModelTensor::size_bytes).sum();
    let mut runners: Vec<_> = (0..2).map(|_| Runner::start(&daemon, &[&parent, &holder, &blob])).collect();
    let blobs = daemon.root().join("blobs");
    eventually("the PSS of both children is the size of the model", || {
        runners.iter_mut().for_each(Runner::touch);
        let sum: u64 = runners.iter().map(|runner| shared_bytes(runner.pid, &blobs)).sum();
        println!("PSS of two: {sum}, the model: {size}");
        sum >= size && sum < size + size / 20
    });
    for runner in &runners {
        assert_eq!(shared_bytes(runner.pid, &mount.path("")), 0, "no page of the mount");
    }
    runners.into_iter().for_each(Runner::end);
}

#[test]
fn exec_aligns_mounted_weights_and_shows_other_mounted_files_unchanged() {
    let daemon = TestDaemon::start();
    let folder = ModelFolder::transformers(1);
    import(&daemon, "tiny", &folder.write_to(daemon.scratch().join("tiny")));
    import(&daemon, "m:1", &ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf"));
    let Some(mount) = TestMount::start(&daemon) else { return };
    let shard = "model-00001-of-00002.safetensors";
    for (mounted, shown) in [
        ("m/1.gguf".to_owned(), "m:1.gguf".to_owned()),
        (format!("tiny/latest/{shard}"), format!("tiny/{shard}")),
    ] {
        let mounted = mount.path(&mounted);
        let found = exec(&daemon, &["cat", mounted.to_str().unwrap()]).succeeds();
        let expected = exec(&daemon, &["cat", &format!("/blobd/{shown}")]).succeeds();
        assert!(found.stdout == expected.stdout, "{shown}");
        let original = std::fs::read(&mounted).unwrap();
        assert!(found.stdout != original, "{shown}: the pages of its blobs are at whole pages");
    }
    let config = mount.path("tiny/latest/config.json");
    let found = exec(&daemon, &["cat", config.to_str().unwrap()]).succeeds();
    assert!(found.stdout == folder.0["config.json"] && found.stderr.is_empty());
}
