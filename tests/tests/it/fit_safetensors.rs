//! `fit` of models of safetensors files: the command and the daemon give the same answer.

use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::http;
use serde_json::{Value as Json, json};

fn daemon_with(folder: &ModelFolder) -> TestDaemon {
    let daemon = TestDaemon::start();
    let directory = tempfile::tempdir().unwrap();
    let path = folder.write_to(directory.path().join("model"));
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "folder"]).succeeds();
    daemon
}

fn fit(daemon: &TestDaemon, options: &str) -> (i32, Json) {
    let words = ["fit", "folder", "--json"].into_iter().chain(options.split_whitespace());
    let run = daemon.command().run(words);
    (run.code, serde_json::from_slice(&run.stdout).unwrap_or_default())
}

fn ask(daemon: &TestDaemon, query: &str) -> (u16, Json) {
    let answer = http::get(&daemon.socket(), &format!("/v1/fit/folder?{query}"));
    (answer.status, serde_json::from_str(&answer.body).unwrap())
}

fn config(folder: &ModelFolder) -> Json {
    serde_json::from_slice(&folder.0["config.json"]).unwrap()
}

/// 2 * blocks * heads * elements * tokens * bytes, of the keys in `config.json`.
fn kv_oracle(config: &Json, tokens: u64) -> u64 {
    let number = |key: &str| config[key].as_u64().unwrap();
    let head = number("hidden_size") / number("num_attention_heads");
    2 * number("num_hidden_layers") * number("num_key_value_heads") * head * tokens * 2
}

#[test]
fn weights_and_cache_of_a_folder_are_those_of_its_files() {
    let folder = ModelFolder::transformers(1);
    let daemon = daemon_with(&folder);
    let (code, answer) = fit(&daemon, "--ctx 1000 --vram 1GiB");
    let kv = kv_oracle(&config(&folder), 1000);
    assert_eq!(
        (code, &answer["basis"], &answer["fits"]),
        (0, &json!("safetensors-2026-11:llama"), &json!(true))
    );
    assert_eq!((&answer["format"], &answer["graph_basis"]), (&json!("safetensors"), &json!("not counted")));
    assert_eq!((&answer["kv_total_bytes"], &answer["context_length"]), (&json!(kv), &json!(2048)));
    let weights = 4 * 2 * 128 * 64;
    assert_eq!(
        (&answer["weights_bytes"], &answer["required_bytes"]),
        (&json!(weights), &json!(weights + kv))
    );
    let shards = folder.0.iter().filter(|(path, _)| path.ends_with(".safetensors"));
    let file_bytes: usize = shards.map(|(_, content)| content.len()).sum();
    assert_eq!(answer["file_bytes"], file_bytes);
    assert_eq!(answer["header_bytes"], file_bytes as u64 - weights);
    let block =
        json!({"layer": "model.layers.0", "block": 0, "bytes": 16384, "place": "device", "device": 0});
    assert!(answer["weights"].as_array().unwrap().contains(&block), "{answer}");
    let notes = answer["notes"].to_string();
    assert!(notes.contains("transformers and vLLM") && notes.contains("not counted"), "{notes}");
    for (query, options) in [
        ("context=1000&vram_bytes=1073741824", "--ctx 1000 --vram 1GiB"),
        ("vram_bytes=60000", "--vram 60000B"),
        (
            "context=0&parallel=2&cache_type_v=f32&vram_bytes=90000",
            "--ctx 0 --parallel 2 --cache-type-v f32 --vram 90000B",
        ),
    ] {
        assert_eq!(ask(&daemon, query), (200, fit(&daemon, options).1), "{query}");
    }
    let largest = answer["required_bytes"].as_u64().unwrap();
    let (code, exact) = fit(&daemon, &format!("--vram {largest}B"));
    assert_eq!((code, &exact["max_context"]), (1, &json!(1000)), "the default context is 2048");
    let text = daemon.command().run(["fit", "folder", "--layers", "--vram", "1GiB"]).succeeds().text();
    assert!(text.contains("graph not counted") && !text.contains("options"), "{text}");
    let refused =
        daemon.command().run(["fit", "folder", "--basis", "ollama", "--json"]).exits_with(2).error().message;
    assert!(refused.contains("safetensors"), "{refused}");
    daemon.command().run(["fit", "folder", "--cache-type-k", "q8_0"]).exits_with(2);
}

#[test]
fn model_without_a_rule_never_fits() {
    for (name, change) in [
        ("an unknown architecture", json!({"model_type": "mamba2"})),
        ("a block without weights", json!({"model_type": "llama", "num_hidden_layers": 2})),
        ("no architecture", json!({})),
    ] {
        let mut folder = ModelFolder::transformers(2);
        let mut config = config(&folder);
        config.as_object_mut().unwrap().remove("model_type");
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        folder.add("config.json", config.to_string());
        let daemon = daemon_with(&folder);
        let (code, answer) = fit(&daemon, "--vram 1TiB");
        let basis = answer["basis"].as_str().unwrap();
        assert!(basis.starts_with("weights only: "), "{name}: {basis}");
        assert_eq!((code, &answer["fits"], &answer["has_rule"]), (1, &json!(false), &json!(false)), "{name}");
        assert_eq!(
            (&answer["weights_bytes"], &answer["kv_total_bytes"]),
            (&json!(65536), &json!(0)),
            "{name}"
        );
        let text = daemon.command().run(["fit", "folder"]).succeeds().text();
        assert!(text.contains("not known\n"), "{name}: {text}");
    }
}

#[test]
fn experts_of_a_mixture_can_stay_in_memory() {
    let names = ["self_attn.q_proj", "mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj"];
    let mut writer = HeaderWriter::new();
    for block in 0..2 {
        for name in names {
            writer.tensor(&format!("model.layers.{block}.{name}.weight"), Dtype::BF16, &[64, 32]).unwrap();
        }
    }
    let mut file = writer.header().unwrap();
    file.resize(file.len() + 2 * names.len() * 4096, 7);
    let mut folder = ModelFolder::default();
    folder.add("model.safetensors", file);
    let config = json!({
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "hidden_size": 32, "max_position_embeddings": 512,
    });
    folder.add("config.json", config.to_string());
    let daemon = daemon_with(&folder);
    let (_, answer) = fit(&daemon, "--vram 1GiB --cpu-moe");
    assert_eq!((&answer["memory_bytes"], &answer["fits"]), (&json!(2 * 2 * 4096), &json!(true)));
    assert_eq!(answer["kv_total_bytes"], 2 * 2 * 2 * 32 * 512 * 2);
    assert_eq!(answer["weights"][0]["place"], "device_and_memory");
}
