//! C reads the models of the table that the tests of all clients read.

use std::fmt::Write as _;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::fake::{FakeModel, listen};
use crate::layer_table::{Found, Model, Opened, data, model, table};
use crate::{run, sanitized, text};

/// Prints everything that the functions for weights return, and ends with the code of an error.
const PROGRAM: &str = r#"
#include <blobd_client.h>
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void print_bytes(blobd_bytes bytes) {
    for (size_t i = 0; i < bytes.size; i++) printf("%02x", ((const unsigned char *)bytes.data)[i]);
    printf("\n");
}

static void print_tensor(const blobd_weights *weights, size_t index, const blobd_weight *weight) {
    printf("tensor %s %s [", weight->name, weight->dtype);
    for (size_t i = 0; i < weight->rank; i++) printf("%s%" PRIu64, i == 0 ? "" : ", ", weight->shape[i]);
    printf("] %s ", weight->is_part ? "part" : "whole");
    if (weight->is_quantized) printf("%s %" PRIu32 " ", weight->quant_type == NULL ? "-" : weight->quant_type, weight->group_size);
    blobd_error error;
    blobd_bytes bytes, expert;
    assert(blobd_weight_map(weights, index, &bytes, &error) && error.code == 0 && bytes.size == weight->size);
    assert(blobd_weight_find(weights, weight->name) == index);
    print_bytes(bytes);
    uint64_t count = weight->rank == 0 ? 0 : weight->shape[0];
    size_t place = 0;
    for (uint64_t i = 0; i < count; i++) {
        assert(blobd_weight_expert(weights, index, i, &expert, &error));
        assert(memcmp(expert.data, (const char *)bytes.data + place, expert.size) == 0);
        place += expert.size;
    }
    assert(count == 0 || place == bytes.size);
    assert(!blobd_weight_expert(weights, index, count, &expert, &error) && error.code == 3);
}

int main(int count, char **arguments) {
    blobd_error error;
    blobd_weights *weights = blobd_weights_open(NULL, "tiny", count > 1 ? arguments[1] : NULL, &error);
    if (weights == NULL) {
        printf("%s\n", error.message);
        return error.code;
    }
    const char *name;
    for (size_t i = 0; (name = blobd_weights_component(weights, i)) != NULL; i++) printf("component %s\n", name);
    const char *type = blobd_weights_quantization(weights);
    printf("quantization %s %" PRIu32 "\n", type == NULL ? "-" : type, blobd_weights_group_size(weights));
    blobd_weight weight, member;
    size_t index = 0;
    for (; blobd_weight_at(weights, index, &weight); index++) print_tensor(weights, index, &weight);
    assert(index == blobd_weight_count(weights));
    blobd_bytes bytes;
    assert(!blobd_weight_map(weights, index, &bytes, &error) && error.code == 3);
    assert(blobd_weight_find(weights, "no such tensor") == SIZE_MAX && blobd_weight_find(weights, NULL) == SIZE_MAX);
    for (size_t i = 0; (name = blobd_weights_group(weights, i)) != NULL; i++) {
        printf("group %s", name);
        for (size_t k = 0; blobd_weight_at(weights, blobd_weights_group_member(weights, i, k), &member); k++) {
            printf(" %s", member.name);
        }
        printf("\n");
    }
    for (int i = 2; i < count; i++) {
        assert(blobd_weights_json(weights, arguments[i], &bytes, &error));
        printf("json %.*s\n", (int)bytes.size, (const char *)bytes.data);
    }
    assert(!blobd_weights_json(weights, "none.json", &bytes, &error) && error.code == 3);
    blobd_weights_close(weights);
    return 0;
}
"#;

/// The expected output of the program for a model of the table.
fn expected(entry: &Model, found: &Found) -> String {
    let mut out = String::new();
    let pair = |(name, size): &(Option<String>, Option<u32>)| {
        format!("{} {}", name.as_deref().unwrap_or("-"), size.unwrap_or(0))
    };
    for component in &entry.components {
        writeln!(out, "component {component}").unwrap();
    }
    writeln!(out, "quantization {}", pair(&found.quantization)).unwrap();
    for (name, tensor) in &found.tensors {
        let part = if tensor.part { "part" } else { "whole" };
        write!(out, "tensor {name} {} {:?} {part} ", tensor.dtype, tensor.shape).unwrap();
        if let Some(quantization) = &tensor.quantization {
            write!(out, "{} ", pair(quantization)).unwrap();
        }
        for byte in data(tensor.layer, tensor.start, tensor.size) {
            write!(out, "{byte:02x}").unwrap();
        }
        out.push('\n');
    }
    for (name, members) in &found.groups {
        let members: String = members.iter().map(|member| format!(" {member}")).collect();
        writeln!(out, "group {name}{members}").unwrap();
    }
    for document in entry.json.values() {
        writeln!(out, "json {document}").unwrap();
    }
    out
}

#[test]
fn every_model_is_read_from_c_as_the_table_says() {
    let folder = tempfile::tempdir().unwrap();
    let [socket, source, program] = ["socket", "weights.c", "weights"].map(|name| folder.path().join(name));
    if sanitized(PROGRAM, &source, &program).is_none() {
        return;
    }
    let served = Arc::new(Mutex::new(FakeModel::new()));
    let model_of_socket = Arc::clone(&served);
    listen(&socket, move |call| model_of_socket.lock().unwrap().serve(call));
    let run = |arguments: &[&str]| {
        let output = run(&mut Command::new(&program), &socket, arguments);
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
        (output.status.code(), text(&output.stdout))
    };
    let table = table();
    for entry in &table.models {
        *served.lock().unwrap() = model(&entry.layers, &entry.json);
        for opened in &entry.opened {
            match opened {
                Opened::Failed { component, error, words } => {
                    let (code, message) = run(&[component]);
                    let exit_code = if error == "not_found" { 3 } else { 1 };
                    assert_eq!(code, Some(exit_code), "{}: {message}", entry.name);
                    assert!(message.contains(words), "{}: {message}", entry.name);
                }
                Opened::Found(found) => {
                    let paths = entry.json.keys().map(String::as_str);
                    let arguments: Vec<_> = [&*found.component].into_iter().chain(paths).collect();
                    assert_eq!(run(&arguments), (Some(0), expected(entry, found)), "{}", entry.name);
                }
            }
        }
    }
    for refused in &table.refused {
        *served.lock().unwrap() = model([&refused.layer()], &Default::default());
        let (code, message) = run(&[]);
        assert_eq!(code, Some(1), "{}: {message}", refused.what);
        assert!(message.starts_with("layer \"w\": safetensors: "), "{}: {message}", refused.what);
    }
}
