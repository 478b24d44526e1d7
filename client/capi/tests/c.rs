//! Tests the library from C and C++, built with their compilers, against a fake daemon.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use blobd_client::protocol::response::HeaderLocation;
use blobd_store_format::gguf::{GgmlType, GgufWriter};
use blobd_store_format::recipe::Experts;

#[path = "../../tests/daemon/fake.rs"]
#[allow(dead_code)]
mod fake;

use fake::{FakeModel, listen};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The directory of the compiled library. Cargo does not build a library of this kind for tests, so it is
/// built here, once.
fn library_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let executable = std::env::current_exe().unwrap();
        let folder = executable.ancestors().nth(2).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap();
        let profile = if name == "debug" { "dev" } else { name };
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "blobd-client-c", "--profile", profile]);
        cargo.arg("--target-dir").arg(folder.parent().unwrap()).current_dir(root());
        match cargo.output() {
            Ok(output) => assert!(output.status.success(), "{}", text(&output.stderr)),
            // These tests may be run by a user without cargo, after another user has built them.
            Err(error) => assert!(folder.join("libblobd_client.so").is_file(), "cargo build: {error}"),
        }
        folder.to_path_buf()
    })
}

/// Runs a compiler; `None`, with a message, if it is not installed.
fn compile(compiler: &str, arguments: &[&str]) -> Option<()> {
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(root().join("include")).args(arguments);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(())
        }
        Err(error) => {
            eprintln!("skipped: no compiler `{compiler}` ({error})");
            None
        }
    }
}

/// Compiles the example with these arguments for the linker.
fn example(folder: &Path, link: &[&str]) -> Option<PathBuf> {
    let (source, program) = (root().join("examples/first_values.c"), folder.join("first_values"));
    let paths = [source.to_str().unwrap(), "-g", "-o", program.to_str().unwrap()];
    compile("cc", &[&paths[..], link].concat()).map(|()| program)
}

fn dynamic() -> Vec<String> {
    let folder = library_folder().display().to_string();
    vec![format!("-L{folder}"), format!("-Wl,-rpath,{folder}"), "-lblobd_client".to_owned()]
}

/// Serves a model of a tensor and a stack of two experts on a socket.
fn serve(socket: &Path) {
    let mut model = FakeModel::new();
    let mut writer = GgufWriter::new();
    writer.tensor("a", GgmlType::F32, &[8]).unwrap().tensor("stack", GgmlType::F32, &[8, 2]).unwrap();
    let header = writer.header().unwrap();
    let fd = model.add_file(&header);
    model.head.layers[0].header = Some(HeaderLocation { fd, size: header.len() as u64 });
    let (a, stack) = (model.add_file(&[7; 32]), model.add_file(&[9; 64]));
    model.add_tensor("a", Some(a), 0, 32);
    model.add_tensor("stack", Some(stack), 0, 64);
    model.tensors[1].experts = Some(Experts { count: 2, stride: 32 });
    listen(socket, move |call| model.serve(call));
}

fn run(command: &mut Command, socket: &Path, arguments: &[&str]) -> Output {
    command.args(arguments).env("BLOBD_SOCKET", socket).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn example_reads_tensors_and_image_without_leaks() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    serve(&socket);
    let link = dynamic();
    let link: Vec<_> = link.iter().map(String::as_str).collect();
    let Some(program) = example(folder.path(), &link) else { return };
    let output = run(&mut Command::new(&program), &socket, &["tiny", "stack"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    for expected in [
        "a                                F32              32 bytes",
        "stack: 09 09 09 09 09 09 09 09\n",
        "expert 0: 32 bytes\n",
        "image: GGUF, ",
    ] {
        assert!(printed.contains(expected), "{printed}");
    }
    assert!(printed.ends_with("0 of them copied\n"), "{printed}");
    let checked = [&link[..], &["-fsanitize=address,undefined"]].concat();
    let Some(program) = example(folder.path(), &checked) else { return };
    let output = run(&mut Command::new(&program), &socket, &["tiny", "a"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn failures_have_a_code_and_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let link = dynamic();
    let link: Vec<_> = link.iter().map(String::as_str).collect();
    let Some(program) = example(folder.path(), &link) else { return };
    let output = run(&mut Command::new(&program), &socket, &["tiny", "a"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("nothing listens on"), "{}", text(&output.stderr));
    serve(&socket);
    let output = run(&mut Command::new(&program), &socket, &["tiny", "no such tensor"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("no such tensor, the model has 2"), "{}", text(&output.stderr));
    let output = run(&mut Command::new(&program), &socket, &["bad name", "a"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn static_library_links_and_has_no_memory_errors() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    serve(&socket);
    let library = library_folder().join("libblobd_client.a");
    let link = [library.to_str().unwrap(), "-lpthread", "-ldl", "-lm"];
    let Some(program) = example(folder.path(), &link) else { return };
    let output = run(&mut Command::new(&program), &socket, &["tiny", "a"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    if Command::new("valgrind").arg("--version").output().is_err() {
        return eprintln!("skipped: no valgrind");
    }
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=99", "--leak-check=full"]).arg(&program);
    let output = run(&mut valgrind, &socket, &["tiny", "a"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn header_is_valid_c_and_cpp() {
    let header = root().join("include/blobd_client.h");
    let header = header.to_str().unwrap();
    let _no_compiler = compile("cc", &["-std=c99", "-pedantic", "-fsyntax-only", header]);
    let _no_compiler =
        compile("c++", &["-std=c++11", "-pedantic", "-fsyntax-only", "-x", "c++-header", header]);
}
