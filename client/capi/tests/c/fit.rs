//! C asks for an estimate of the memory that a model needs.

use std::process::Command;

use crate::fake::listen;
use crate::{run, sanitized, text};

const PROGRAM: &str = r#"
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
    if sanitized(PROGRAM, &source, &program).is_none() {
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
