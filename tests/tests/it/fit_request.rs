//! `GET /v1/fit/{reference}`: engines ask before they load a model.

use blobd_client::protocol::fit::{ContextSource, FitParams};
use blobd_model::estimate::{Basis, CacheType};
use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::{Dimensions, ModelFile};
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

const MODEL: &str = "application/vnd.ollama.image.model";
const TINY: Dimensions = Dimensions { block_count: 2, vocabulary_length: 512, ..Dimensions::SMALL_MIXTRAL };

/// The fields that say whether a model fits.
const ANSWER: [&str; 9] = [
    "vram_bytes",
    "layers",
    "layers_of",
    "total_bytes",
    "memory_bytes",
    "fits",
    "fits_in",
    "max_context",
    "devices",
];

/// A daemon with a model that has everything that is counted.
fn daemon_with_model() -> TestDaemon {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::llama("Llama", TINY).with("llama.context_length", 4096_u32);
    let mut adapter = ModelFile::empty().with("general.type", "adapter");
    adapter.add_noise(1, "blk.0.attn_q.weight.lora_a", GgmlType::F32, &[64, 16]);
    let (model, adapter, draft) = (model.bytes(), adapter.bytes(), ModelFile::llama("Draft", TINY).bytes());
    let mut projector = ModelFile::empty().with("general.architecture", "clip");
    projector.add_noise(2, "v.patch_embd.weight", GgmlType::F32, &[64, 16]);
    let projector = projector.bytes();
    let layers = [
        (MODEL, &model[..]),
        ("application/vnd.ollama.image.projector", &projector),
        ("application/vnd.ollama.image.draft", &draft),
        ("application/vnd.ollama.image.adapter", &adapter),
        ("application/vnd.ollama.image.params", br#"{"num_ctx":3000}"#),
    ];
    registry.add_model("me/tuned:1", b"{}", &layers).unwrap();
    let daemon = TestDaemon::start();
    daemon.command().run(["pull", "--name", "tuned", &registry.name("me/tuned:1")]).succeeds();
    daemon
}

fn ask(daemon: &TestDaemon, query: &str) -> (u16, Json) {
    let answer = http::get(&daemon.socket(), &format!("/v1/fit/{query}"));
    (answer.status, serde_json::from_str(&answer.body).unwrap())
}

#[test]
fn answer_is_that_of_the_command() {
    let daemon = daemon_with_model();
    for (query, options) in [
        ("vram_bytes=1048576", "--vram 1MiB"),
        ("vram_bytes=8589934592&context=512", "--vram 8GiB --ctx 512"),
        ("context=0&vram_bytes=2097152&vram_bytes=4194304", "--ctx 0 --vram 2MiB --vram 4MiB"),
        ("basis=ollama&vram_bytes=8589934592&parallel=2", "--basis ollama --vram 8GiB --parallel 2"),
        (
            "cpu_moe=true&batch=64&cache_type_k=q8_0&cache_type_v=f32&vram_bytes=1073741824&basis=llama.cpp",
            "--cpu-moe --batch 64 --cache-type-k q8_0 --cache-type-v f32 --vram 1GiB --basis llama.cpp",
        ),
    ] {
        let (status, answer) = ask(&daemon, &format!("tuned?{query}"));
        let words = ["fit", "tuned", "--json"].into_iter().chain(options.split_whitespace());
        let run = daemon.command().run(words);
        let expected: Json = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!((status, &answer), (200, &expected), "{query}");
        assert!(answer.get("projector").is_some() && answer.get("draft").is_some(), "{answer}");
    }
    let sessions = daemon.client().sessions().unwrap().sessions;
    assert!(sessions.is_empty(), "an estimate takes no lease: {sessions:?}");
}

#[test]
fn without_memory_to_fit_into_only_the_need_is_answered() {
    let daemon = daemon_with_model();
    let (status, need) = ask(&daemon, "tuned");
    assert_eq!(status, 200, "{need}");
    assert_eq!((&need["context"], &need["context_source"]), (&json!(3000), &json!("model")));
    for field in ANSWER {
        assert!(need.get(field).is_none(), "{field}: {need}");
    }
    let options = ["-c", "3000", "--mmproj", "PROJECTOR", "-md", "DRAFT", "--lora", "ADAPTER"];
    assert_eq!(need["options"], json!(options), "no -ngl");
    // A machine without devices.
    let needed = need["needed_bytes"].as_u64().unwrap();
    for (memory, fits) in [(needed, true), (needed - 1, false)] {
        let (_, answer) = ask(&daemon, &format!("tuned?memory_bytes={memory}"));
        assert_eq!((&answer["fits"], &answer["memory_bytes"]), (&json!(fits), &json!(needed)), "{answer}");
        assert_eq!(answer["devices"], json!([]));
    }
    // Layers beside a device that is one byte too small, and beside one that holds none.
    let required = need["required_bytes"].as_u64().unwrap();
    for (vram, fits_in) in [(1, "memory"), (required - 1, "devices_and_memory"), (required, "devices")] {
        let (_, answer) = ask(&daemon, &format!("tuned?memory_bytes={needed}&vram_bytes={vram}"));
        assert_eq!((&answer["fits"], &answer["fits_in"]), (&json!(true), &json!(fits_in)), "{answer}");
    }
    let (_, only_devices) = ask(&daemon, &format!("tuned?vram_bytes={}", required - 1));
    assert_eq!((&only_devices["fits"], &only_devices["fits_in"]), (&json!(false), &Json::Null));
    // The rest beside a device.
    let (_, beside) =
        ask(&daemon, "tuned?vram_bytes=1073741824&memory_bytes=18446744073709551615&cpu_moe=true");
    let rest = beside["memory_bytes"].as_u64().unwrap();
    assert!(rest > 0 && beside["fits"] == true, "{beside}");
    let (_, short) =
        ask(&daemon, &format!("tuned?vram_bytes=1073741824&memory_bytes={}&cpu_moe=true", rest - 1));
    assert_eq!(short["fits"], false, "{short}");
}

#[test]
fn client_has_the_parameters_and_the_answer_as_types() {
    let daemon = daemon_with_model();
    let params = FitParams {
        context: Some(1024),
        cache_type_k: Some(CacheType::Q8_0),
        vram_bytes: vec![8 << 30],
        basis: Some(Basis::LlamaCpp),
        ..FitParams::default()
    };
    let report = daemon.client().fit(&"tuned".parse().unwrap(), &params).unwrap();
    assert_eq!((report.memory.context, report.context_source), (1024, ContextSource::Option));
    assert_eq!((&*report.memory.cache_type_k, &*report.memory.cache_type_v), ("q8_0", "f16"));
    let answer = report.answer.as_ref().unwrap();
    assert!(answer.fits && answer.layers == answer.layers_of, "{answer:?}");
    let (_, json) = ask(&daemon, &format!("tuned?{}", params.to_query()));
    assert_eq!(serde_json::to_value(&report).unwrap(), json);
    let need = daemon.client().fit(&"tuned".parse().unwrap(), &FitParams::default()).unwrap();
    assert_eq!(need.answer, None);
}

#[test]
fn wrong_requests_are_explained() {
    let daemon = daemon_with_model();
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let path = ModelFile::dense(1).write_to(folder.path(), "untrained.gguf");
    daemon.command().run(["import", "--name", "untrained", path.to_str().unwrap()]).succeeds();
    for (query, status, code, words) in [
        ("absent", 404, "not_found", "absent"),
        ("tuned?vram=1", 400, "invalid_request", "query: \"vram\": unknown parameter: expected context"),
        ("tuned?context=1&context=2", 400, "invalid_request", "query: context: given twice"),
        (
            "tuned?parallel=0",
            400,
            "invalid_request",
            "query: parallel: expected a number from 1 on, found \"0\"",
        ),
        ("tuned?context=18446744073709551615", 400, "invalid_request", "use a smaller context"),
        (
            "untrained?context=0",
            400,
            "invalid_request",
            "does not say for which context the model was trained",
        ),
    ] {
        let (found, error) = ask(&daemon, query);
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{query}: {error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{query}: {message}");
    }
}
