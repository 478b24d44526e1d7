//! Tests the library from C and C++, built with their compilers, against a fake daemon.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use blobd_client::protocol::response::HeaderLocation;
use blobd_store_format::gguf::{GgmlType, GgufWriter};
use blobd_store_format::tensor::Experts;

#[path = "../../../tests/daemon/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../../tests/daemon/layer_table.rs"]
mod layer_table;
mod weights;

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
            blobd_fixtures::skipped::skipped(format_args!("no compiler `{compiler}` ({error})"));
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

/// Compiles a program that ends at the first memory error.
fn sanitized(text: &str, source: &Path, program: &Path) -> Option<()> {
    std::fs::write(source, text).unwrap();
    let link = dynamic();
    let paths =
        [source.to_str().unwrap(), "-g", "-fsanitize=address,undefined", "-o", program.to_str().unwrap()];
    let arguments: Vec<_> = paths.into_iter().chain(link.iter().map(String::as_str)).collect();
    compile("cc", &arguments)
}

fn dynamic() -> Vec<String> {
    let folder = library_folder().display().to_string();
    vec![format!("-L{folder}"), format!("-Wl,-rpath,{folder}"), "-lblobd_client".to_owned()]
}

/// Serves a model of a tensor and a stack of two experts on a socket.
fn serve(socket: &Path) {
    let mut model = FakeModel::new();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama").unwrap();
    writer.metadata("general.parameter_count", 7_u64).unwrap();
    writer.metadata("llama.block_count", 32_u32).unwrap();
    writer.metadata("llama.context_length", 8192_u32).unwrap();
    writer.metadata("llama.attention.value_length", 96_u32).unwrap();
    writer.metadata("llama.flags", vec![true, false]).unwrap();
    writer.metadata("llama.scores", vec![0.5_f32, -1.0, 2.0]).unwrap();
    writer.metadata("llama.none", Vec::<i64>::new()).unwrap();
    writer.metadata("tokenizer.ggml.tokens", vec!["a", "", "ü"]).unwrap();
    writer.metadata("llama.attention.head_count", vec![4_u32, 16]).unwrap();
    writer.metadata("llama.rope.freq_base", 500_000_f32).unwrap();
    writer.metadata("llama.i32", -5_i32).unwrap();
    writer.metadata("llama.i64", -6_i64).unwrap();
    writer.metadata("llama.f64", 0.5_f64).unwrap();
    writer.metadata("llama.bool", true).unwrap();
    writer.metadata("tokenizer.chat_template", "{{ x }}").unwrap();
    writer.tensor("a", GgmlType::F32, &[8]).unwrap().tensor("stack", GgmlType::F32, &[8, 2]).unwrap();
    let header = writer.header().unwrap();
    let fd = model.add_file(&header);
    model.head.layers[0].header = Some(HeaderLocation { fd, size: header.len() as u64 });
    let (a, stack) = (model.add_file(&[7; 32]), model.add_file(&[9; 64]));
    model.add_tensor("a", Some(a), 0, 32);
    model.add_tensor("stack", Some(stack), 0, 64);
    model.tensors[1].experts = Some(Experts { count: 2, stride: 32 });
    model.add_tensor("blk.0.q", Some(a), 0, 8);
    model.add_tensor("blk.0.k", Some(a), 8, 16);
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
        "llama, 24 parameters, 32 blocks, context 8192, 16 heads\ntemplate: {{ x }}\nrope.freq_base: 500000\n",
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

/// The values, and that a value of another type or an array counts as missing.
const METADATA_PROGRAM: &str = r#"
#include <blobd_client.h>
#include <assert.h>
#include <string.h>

int main(void) {
    blobd_error error;
    blobd_model *model = blobd_open(NULL, "tiny", &error);
    assert(model != NULL);
    blobd_facts facts;
    assert(blobd_facts_of(model, &facts, &error) && error.code == 0);
    assert(strcmp(facts.architecture, "llama") == 0 && strcmp(facts.chat_template, "{{ x }}") == 0);
    assert(facts.file_type == 0 && facts.embedding_length == 0);
    assert(facts.head_count_min == 4 && facts.head_count_max == 16);
    assert(facts.head_count_kv_min == 1 && facts.head_count_kv_max == 1);
    uint32_t u32 = 1;
    uint64_t u64 = 1;
    int32_t i32 = 1;
    int64_t i64 = 1;
    double f64 = 1;
    bool flag = false;
    blobd_bytes text;
    assert(blobd_metadata_u32(model, "block_count", &u32) && u32 == 32);
    assert(!blobd_metadata_u32(model, "llama.block_count", &u32) && u32 == 32);
    assert(!blobd_metadata_u64(model, "block_count", &u64) && u64 == 1);
    assert(!blobd_metadata_i32(model, "block_count", &i32) && i32 == 1);
    assert(blobd_metadata_u64(model, "general.parameter_count", &u64) && u64 == 7);
    assert(blobd_metadata_i32(model, "i32", &i32) && i32 == -5);
    assert(blobd_metadata_i64(model, "i64", &i64) && i64 == -6);
    assert(blobd_metadata_f64(model, "f64", &f64) && f64 == 0.5);
    assert(blobd_metadata_bool(model, "bool", &flag) && flag);
    assert(!blobd_metadata_u32(model, "attention.head_count", &u32));
    assert(blobd_metadata_string(model, "tokenizer.chat_template", &text));
    assert(text.size == 7 && memcmp(text.data, "{{ x }}", 7) == 0);
    assert(!blobd_metadata_string(model, "block_count", &text));
    blobd_head_sizes sizes;
    assert(blobd_head_sizes_of(model, &sizes, &error) && error.code == 0);
    assert(sizes.max == 0 && sizes.k == 0 && sizes.v == 96);
    uint32_t heads[3] = {0, 0, 77};
    assert(blobd_metadata_u32_array(model, "attention.head_count", NULL, 0) == 2);
    assert(blobd_metadata_u32_array(model, "attention.head_count", heads, 1) == 2 && heads[1] == 0);
    assert(blobd_metadata_u32_array(model, "attention.head_count", heads, 3) == 2);
    assert(heads[0] == 4 && heads[1] == 16 && heads[2] == 77);
    assert(blobd_metadata_i32_array(model, "attention.head_count", NULL, 0) == SIZE_MAX);
    assert(blobd_metadata_u32_array(model, "block_count", NULL, 0) == SIZE_MAX);
    assert(blobd_metadata_u32_array(model, NULL, NULL, 0) == SIZE_MAX);
    float scores[3];
    assert(blobd_metadata_f32_array(model, "scores", scores, 3) == 3 && scores[1] == -1.0f && scores[2] == 2.0f);
    bool flags[2];
    assert(blobd_metadata_bool_array(model, "flags", flags, 2) == 2 && flags[0] && !flags[1]);
    assert(blobd_metadata_i64_array(model, "none", NULL, 0) == 0);
    blobd_bytes tokens[3];
    assert(blobd_metadata_string_array(model, "tokenizer.ggml.tokens", tokens, 3) == 3);
    assert(tokens[0].size == 1 && tokens[1].size == 0 && tokens[1].data != NULL);
    assert(tokens[2].size == 2 && memcmp(tokens[2].data, "\xc3\xbc", 2) == 0);
    assert(!blobd_metadata_string(model, NULL, &text));
    blobd_layer layer;
    assert(blobd_layer_count(model) == 3);
    assert(blobd_layer_at(model, 0, &layer) && strcmp(layer.name, "a") == 0);
    assert(blobd_layer_at(model, 1, &layer) && strcmp(layer.name, "blk.0") == 0);
    assert(layer.tensor_count == 2 && layer.size == 24);
    assert(blobd_layer_find(model, "blk.0") == 1 && blobd_layer_find(model, "blk") == SIZE_MAX);
    assert(blobd_layer_tensor(model, 1, 0) == blobd_tensor_find(model, "blk.0.k"));
    assert(blobd_layer_tensor(model, 1, 1) == blobd_tensor_find(model, "blk.0.q"));
    assert(blobd_layer_tensor(model, 1, 2) == SIZE_MAX && blobd_layer_tensor(model, 3, 0) == SIZE_MAX);
    assert(!blobd_layer_at(model, 3, &layer));
    blobd_close(model);
    return 0;
}
"#;

#[test]
fn metadata_is_found_by_exact_type_and_without_the_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, source) = (folder.path().join("socket"), folder.path().join("metadata.c"));
    let program = folder.path().join("metadata");
    serve(&socket);
    if sanitized(METADATA_PROGRAM, &source, &program).is_some() {
        let output = run(&mut Command::new(&program), &socket, &[]);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    }
}

#[test]
fn failures_have_a_code_and_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let link = dynamic();
    let link: Vec<_> = link.iter().map(String::as_str).collect();
    let Some(program) = example(folder.path(), &link) else { return };
    let output = run(&mut Command::new(&program), &socket, &["tiny", "a"]);
    assert_eq!(output.status.code(), Some(8));
    assert!(text(&output.stderr).contains("nothing listens on"), "{}", text(&output.stderr));
    serve(&socket);
    let output = run(&mut Command::new(&program), &socket, &["tiny", "no such tensor"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("no such tensor, the model has 4"), "{}", text(&output.stderr));
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
        return blobd_fixtures::skipped::skipped("no valgrind");
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

const FIT_PROGRAM: &str = r#"
#include <blobd_client.h>
#include <assert.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    blobd_error error;
    blobd_fit fit;
    uint64_t devices[2] = {1, 2}, memory = 3;
    blobd_fit_params params;
    memset(&params, 0, sizeof params);
    params.context = 512;
    params.batch = 64;
    params.parallel = 2;
    params.cache_type_k = "q8_0";
    params.cache_type_v = "f32";
    params.basis = "ollama";
    params.vram_bytes = devices;
    params.vram_count = 2;
    params.memory_bytes = &memory;
    params.cpu_moe = true;
    assert(blobd_fit_of(NULL, "tiny", &params, &fit, &error) && error.code == 0);
    assert(fit.needed_bytes == 7 && fit.required_bytes == 6 && fit.weights_bytes == 5 && fit.kv_bytes == 4);
    assert(fit.graph_bytes == 3 && fit.context == 512 && fit.trained_context == 8192 && fit.has_rule);
    assert(fit.has_answer && fit.fits && fit.layers == 2 && fit.layers_of == 3 && fit.max_context == 1024);
    memset(&params, 0, sizeof params);
    params.trained_context = true;
    assert(blobd_fit_of(NULL, "tiny", &params, &fit, NULL) && !fit.has_answer && !fit.fits && fit.layers_of == 0);
    char *json = blobd_fit_json(NULL, "tiny", NULL, &error);
    assert(json != NULL && strstr(json, "\"needed_bytes\":7") != NULL && strstr(json, "\"fits\"") == NULL);
    blobd_text_free(json);
    blobd_text_free(NULL);
    params.basis = "vllm";
    assert(!blobd_fit_of(NULL, "tiny", &params, &fit, &error) && error.code == 2);
    printf("%s\n", error.message);
    params.basis = NULL;
    params.cache_type_v = "q9";
    assert(blobd_fit_json(NULL, "tiny", &params, &error) == NULL && error.code == 2);
    assert(!blobd_fit_of(NULL, NULL, NULL, &fit, &error) && error.code == 2);
    assert(!blobd_fit_of(NULL, "absent", NULL, &fit, &error) && error.code == 3);
    return 0;
}
"#;

const NEED: &str = r#""name":"tiny:latest","digest":null,"basis":"b","graph_basis":"b","has_rule":true,"context":512,
"batch":64,"parallel":2,"cache_type_k":"q8_0","cache_type_v":"f32","kv_bytes":[4],"kv_total_bytes":4,
"graph_partial_bytes":3,"graph_full_bytes":3,"weights":[],"weights_bytes":5,"table_bytes":0,"vision_weights_bytes":0,
"vision_graph_bytes":0,"missing_keys":[],"file_bytes":5,"header_bytes":0,"required_bytes":6,"needed_bytes":7,
"context_length":8192,"context_source":"option","notes":[],"options":[]"#;
const ANSWER: &str = r#""vram_bytes":3,"layers":2,"layers_of":3,"total_bytes":9,"memory_bytes":1,"fits":true,
"max_context":1024,"devices":[]"#;

#[test]
fn estimate_is_read_from_c_with_all_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let [socket, source, program] = ["socket", "fit.c", "fit"].map(|name| folder.path().join(name));
    if sanitized(FIT_PROGRAM, &source, &program).is_none() {
        return;
    }
    listen(&socket, |call| {
        let all = "get /v1/fit/registry.ollama.ai/library/tiny?context=512&batch=64&parallel=2&cache_type_k=q8_0&cache_type_v=f32&\
                   vram_bytes=1&vram_bytes=2&memory_bytes=3&cpu_moe=true&basis=ollama http/1.1";
        match call.line().to_owned().as_str() {
            line if line == all => call.respond(200, &format!("{{{NEED},{ANSWER}}}")),
            "get /v1/fit/registry.ollama.ai/library/tiny?context=0 http/1.1"
            | "get /v1/fit/registry.ollama.ai/library/tiny http/1.1" => {
                call.respond(200, &format!("{{{NEED}}}"));
            }
            line if line.contains("absent") => {
                call.respond(404, r#"{"error":{"code":"not_found","message":"no such model"}}"#);
            }
            line => panic!("{line}"),
        }
    });
    let output = run(&mut Command::new(&program), &socket, &[]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "basis: expected llama.cpp or ollama, found \"vllm\"\n");
}
