//! Where programs keep their models, and what they call the files there.

use super::*;

/// A reference of RamaLama with its blobs: the hash, the name, the type and the content of each file.
fn add_reference(home: &Home, model: &str, tag: &str, files: &[(String, &str, &str, Vec<u8>)]) {
    let place = format!(".local/share/ramalama/store/{model}");
    home.add(&format!("{place}/snapshots/sha256-77/README.md"), "#");
    let files = files.iter().map(|(hash, name, kind, bytes)| {
        let blob = home.add(&format!("{place}/blobs/sha256-{hash}"), bytes);
        symlink(&blob, home.0.join(format!("{place}/snapshots/sha256-77/{name}"))).unwrap();
        json!({ "hash": format!("sha256:{hash}"), "name": name, "type": kind })
    });
    let reference =
        json!({ "hash": "sha256:77", "path": "x", "version": "v1.0.1", "files": files.collect::<Vec<_>>() });
    home.add(&format!("{place}/refs/{tag}.json"), reference.to_string());
}

#[test]
fn reference_of_ramalama_says_what_its_files_are() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    let named =
        |name: &str, kind: &'static str, bytes: Vec<u8>| (sha256(&bytes), name.to_owned(), kind, bytes);
    let model = |seed: u64| ModelFile::dense(seed).bytes();
    let files = |files: &[(String, String, &'static str, Vec<u8>)]| files.to_vec();
    let add = |model: &str, tag: &str, listed: Vec<(String, String, &'static str, Vec<u8>)>| {
        let listed: Vec<_> = listed
            .iter()
            .map(|(hash, name, kind, bytes)| (hash.clone(), name.as_str(), *kind, bytes.clone()))
            .collect();
        add_reference(&home, model, tag, &listed);
    };
    // Models of Ollama's registry have the name of the model.
    let template = named("chat_template", "chat_template", b"{{ . }}".to_vec());
    add("ollama/library/smollm", "135m", files(&[named("smollm", "gguf", model(1)), template]));
    add(
        "huggingface/ann/see",
        "Q8_0",
        files(&[named("see-Q8_0.gguf", "gguf", model(2)), named("vision.gguf", "mmproj", model(3))]),
    );
    // The blobs of small files are named by the SHA-256 of a name.
    let of_name = |name: &str, bytes: &str| {
        (sha256(format!("ben/safe/{name}").as_bytes()), name.to_owned(), "other", bytes.as_bytes().to_vec())
    };
    let weights = named("model.safetensors", "safetensor", safetensors(&[(1, "t")]));
    add(
        "huggingface/ben/safe",
        "latest",
        files(&[weights, of_name("config.json", "{}"), of_name("tokenizer.json", "{ }")]),
    );
    let place = ".local/share/ramalama/store/ollama/library/old";
    home.add_model(&format!("{place}/snapshots/sha256-88/old"), 4);
    home.add(&format!("{place}/snapshots/sha256-88/chat_template"), "x");
    home.add(&format!("{place}/refs/7b"), "sha256-88\nold---model\nchat_template---chat\nLICENSE---\n");
    home.add(".local/share/ramalama/store/ollama/library/part/snapshots/sha256-99/x", "");
    home.add(".local/share/ramalama/store/ollama/library/part/refs/latest", "sha256-99\npart---model\n");
    let blobd = daemon.command();
    let run = home.import(&blobd, &["--from", "ramalama"]).exits_with(1).json();
    let expected = [
        "ramalama/huggingface/ann/see:Q8_0",
        "ramalama/huggingface/ben/safe:latest",
        "ramalama/ollama/library/old:7b",
        "ramalama/ollama/library/smollm:135m",
    ];
    assert_eq!(names(&run["imported"]), expected, "{run}");
    assert_eq!(names(&run["failed"]), ["ramalama/ollama/library/part:latest"], "{run}");
    assert!(export(&blobd, expected[2]) == model(4) && export(&blobd, expected[3]) == model(1));
    let projector = blobd.run(["export", expected[0], "--component", "projector", "-o", "-"]).succeeds();
    assert!(projector.stdout == model(3));
}

#[test]
fn folder_of_a_program_is_taken_for_that_of_its_models() {
    let daemon = TestDaemon::start();
    let home = Home::new(daemon.scratch());
    home.add_model("lm/models/ann/a/a-Q8_0.gguf", 1);
    home.add_model("lm/.internal/bundled-models/ann/b/b-Q8_0.gguf", 2);
    home.add_model("jan/llamacpp/models/ann/a/model.gguf", 1);
    home.add_model("jan/mlx/models/ben/b/model.gguf", 2);
    home.add(".exo/models/ann--a/model.safetensors", safetensors(&[(1, "t")]));
    home.add_model("webui/user_data/models/a-Q8_0.gguf", 1);
    home.add_model("webui/user_data/models/ann_b/b-Q8_0.gguf", 2);
    for cache in ["scope", "scope/models", "scope/hub", "scope/hub/models"] {
        home.add_model(&format!("{cache}/ann/a___1/{}-Q8_0.gguf", cache.replace('/', "-")), 1);
    }
    home.add_model("hf/hub/models--ann--a/snapshots/0123/a-Q8_0.gguf", 1);
    home.add("hf/hub/models--ann--a/refs/main", "0123");
    home.add_model("hf/hub/modelscope--models--ann--a/snapshots/ms-print_1/a-Q8_0.gguf", 2);
    home.add("hf/hub/modelscope--models--ann--a/refs/main", "ms-print_1");
    let blobd = daemon.command();
    let folders: [(&str, &[&str]); 8] = [
        ("lmstudio=lm", &["lmstudio/ann/a:Q8_0"]),
        ("jan=jan", &["jan/ann/a:latest", "jan/ben/b:latest"]),
        ("exo=.exo", &["exo/ann/a:latest"]),
        (
            "text-generation-webui=webui",
            &["text-generation-webui/a:Q8_0", "text-generation-webui/ann_b:Q8_0"],
        ),
        ("modelscope=scope/hub/models", &["modelscope/ann/a.1:Q8_0"]),
        ("modelscope=scope/models", &["modelscope/ann/a.1:Q8_0"]),
        ("hf=hf", &["hf.co/ann/a:Q8_0"]),
        ("lemonade=hf", &["modelscope/ann/a:Q8_0"]),
    ];
    for (from, expected) in folders {
        let from = from.replace('=', &format!("={}/", home.0.display()));
        assert_eq!(names(&home.listed(&blobd, &["--from", &from])["models"]), expected, "{from}");
    }
    let from = format!("modelscope={}/scope", home.0.display());
    assert_eq!(home.listed(&blobd, &["--from", &from])["models"].as_array().unwrap().len(), 4);
}
