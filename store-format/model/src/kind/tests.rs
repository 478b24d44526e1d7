//! The kinds of headers that real programs write.

use super::*;
use blobd_store_format::gguf::{GgmlType, GgufWriter, Value};

/// A header with this metadata and these tensors.
fn header(keys: &[(&str, Value)], tensors: &[&str]) -> Header {
    let mut writer = GgufWriter::new();
    for (key, value) in keys {
        writer.metadata(*key, value.clone()).unwrap();
    }
    for name in tensors {
        writer.tensor(name, GgmlType::F32, &[4]).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

fn text(text: &str) -> Value {
    Value::from(text)
}

fn architecture(name: &str) -> (&'static str, Value) {
    ("general.architecture", text(name))
}

fn tokens() -> (&'static str, Value) {
    ("tokenizer.ggml.tokens", Value::strings([b"a".to_vec()]))
}

#[test]
fn kind_determines_the_use_of_the_layer() {
    for (kind, media_type) in [
        (ModelKind::Model, MediaType::OLLAMA_MODEL),
        (ModelKind::Vocabulary, MediaType::OLLAMA_MODEL),
        (ModelKind::Adapter, MediaType::OLLAMA_ADAPTER),
        (ModelKind::Projector, MediaType::OLLAMA_PROJECTOR),
        (ModelKind::Draft, MediaType::OLLAMA_DRAFT),
    ] {
        assert_eq!(kind.media_type(), media_type, "{kind}");
    }
}

#[test]
fn tensors_of_a_text_model_decide_against_a_diffusion_model() {
    let prefix = DIFFUSION_PREFIXES[0];
    let image = format!("{prefix}x");
    let kind = |tensors: &[&str]| ModelKind::from_header(&header(&[], tensors));
    assert_eq!(kind(&[&image]), ModelKind::Diffusion);
    for text in ["token_embd.weight", "blk.0.attn_q.weight"] {
        assert_ne!(kind(&[&image, text]), ModelKind::Diffusion, "{text}");
    }
}

#[test]
fn declared_type_decides_before_the_architecture() {
    for (declared, kind) in [
        ("model", ModelKind::Model),
        ("adapter", ModelKind::Adapter),
        ("imatrix", ModelKind::Imatrix),
        ("mmproj", ModelKind::Projector),
        ("projector", ModelKind::Projector),
        ("vocab", ModelKind::Vocabulary),
        ("something-new", ModelKind::Model),
    ] {
        let keys = [("general.type", text(declared)), architecture("llama")];
        assert_eq!(ModelKind::from_header(&header(&keys, &["token_embd.weight"])), kind, "{declared}");
    }
}

#[test]
fn architecture_decides_for_files_that_declare_no_type() {
    for (name, kind) in [
        ("clip", ModelKind::Projector),
        ("controlvector", ModelKind::ControlVector),
        ("eagle3", ModelKind::Draft),
        ("dflash", ModelKind::Draft),
        ("dspark", ModelKind::Draft),
        ("gemma4-assistant", ModelKind::Draft),
        ("flux", ModelKind::Diffusion),
        ("wan", ModelKind::Diffusion),
        ("qwen_image", ModelKind::Diffusion),
        ("t5encoder", ModelKind::Encoder),
        ("bert", ModelKind::Encoder),
        ("nomic-bert-moe", ModelKind::Encoder),
        ("t5", ModelKind::Model),
        ("whisper", ModelKind::Model),
        ("llama", ModelKind::Model),
    ] {
        for declared in [None, Some("model")] {
            let declared = declared.map(|declared| ("general.type", text(declared)));
            let keys: Vec<_> = declared.into_iter().chain([architecture(name)]).collect();
            assert_eq!(ModelKind::from_header(&header(&keys, &["x.weight"])), kind, "{name}");
        }
    }
}

#[test]
fn pooling_distinguishes_embedding_models_and_rerankers() {
    let rank = 4_u32;
    for (name, pooling, kind) in [
        ("bert", Value::from(1_u32), ModelKind::Embedding),
        ("bert", Value::from(rank), ModelKind::Reranker),
        ("bert", Value::from(0_u32), ModelKind::Encoder),
        ("qwen3", Value::from(3_u32), ModelKind::Embedding),
        ("wavtokenizer-dec", Value::from(1_u32), ModelKind::Model),
        ("qwen3", Value::from(rank), ModelKind::Reranker),
        // Another integer width, and no integer at all.
        ("qwen3", Value::from(4_u64), ModelKind::Reranker),
        ("qwen3", text("last"), ModelKind::Embedding),
    ] {
        let key = format!("{name}.pooling_type");
        let keys = [architecture(name), (key.as_str(), pooling.clone())];
        assert_eq!(
            ModelKind::from_header(&header(&keys, &["token_embd.weight"])),
            kind,
            "{name} {pooling:?}"
        );
    }
}

#[test]
fn encoder_with_a_classifier_is_a_reranker() {
    let labels = ("bert.classifier.output_labels", Value::strings([b"yes".to_vec()]));
    let pooling = ("bert.pooling_type", Value::from(2_u32));
    assert_eq!(ModelKind::from_header(&header(&[architecture("bert"), labels], &["x"])), ModelKind::Reranker);
    let with_output = header(&[architecture("bert"), pooling], &["cls.weight", "cls.output.weight"]);
    assert_eq!(ModelKind::from_header(&with_output), ModelKind::Reranker);
}

#[test]
fn tensors_determine_the_kind_of_files_without_metadata() {
    for (tensors, kind) in [
        (&["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"][..], ModelKind::Adapter),
        (&["blk.0.ffn_up.weight.in_sum2", "blk.0.ffn_up.weight.counts"], ModelKind::Imatrix),
        (&["direction.1", "direction.2"], ModelKind::ControlVector),
        (&["v.patch_embd.weight", "v.blk.0.attn_q.weight", "mm.0.weight"], ModelKind::Projector),
        (&["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.x"], ModelKind::Diffusion),
        (&["double_blocks.0.img_attn.qkv.weight", "img_in.weight"], ModelKind::Diffusion),
        (&["token_embd.weight", "blk.0.attn_q.weight", "v.patch_embd.weight"], ModelKind::Model),
        (&["token_embd.weight", "direction.1"], ModelKind::Model),
        (&[], ModelKind::Model),
    ] {
        assert_eq!(ModelKind::from_header(&header(&[], tensors)), kind, "{tensors:?}");
    }
}

#[test]
fn file_with_tokens_and_no_tensors_is_a_vocabulary_unless_it_is_a_shard() {
    let shard = ("split.count", Value::from(3_u16));
    let whole = header(&[architecture("llama"), tokens()], &[]);
    assert_eq!(ModelKind::from_header(&whole), ModelKind::Vocabulary);
    let shard = header(&[architecture("llama"), tokens(), shard], &[]);
    assert_eq!(ModelKind::from_header(&shard), ModelKind::Model);
}

#[test]
fn file_with_only_the_prediction_blocks_of_its_model_is_a_draft() {
    let of = |predicting: u32, tensors: &[&str]| {
        let keys = [
            architecture("glm4moe"),
            ("glm4moe.block_count", Value::from(47_u32)),
            ("glm4moe.nextn_predict_layers", Value::from(predicting)),
        ];
        ModelKind::from_header(&header(&keys, tensors))
    };
    assert_eq!(of(1, &["token_embd.weight", "blk.46.nextn.eh_proj.weight"]), ModelKind::Draft);
    assert_eq!(of(1, &["blk.0.attn_q.weight", "blk.46.nextn.eh_proj.weight"]), ModelKind::Model);
    assert_eq!(of(0, &["blk.46.attn_q.weight"]), ModelKind::Model);
    assert_eq!(of(u32::MAX, &["blk.46.attn_q.weight"]), ModelKind::Model);
}

#[test]
fn use_of_a_layer_decides_before_its_header() {
    let llama = header(&[architecture("llama")], &["token_embd.weight"]);
    let clip = header(&[architecture("clip")], &["v.patch_embd.weight"]);
    assert_eq!(ModelKind::for_layer("draft", Some(&llama)), ModelKind::Draft);
    assert_eq!(ModelKind::for_layer("adapter", None), ModelKind::Adapter);
    assert_eq!(ModelKind::for_layer("model", Some(&clip)), ModelKind::Projector);
    assert_eq!(ModelKind::for_layer("model", None), ModelKind::Model);
}

#[test]
fn names_are_read_back_and_others_are_refused_with_the_list() {
    for kind in ModelKind::all() {
        assert_eq!(kind.name().parse(), Ok(kind));
        let json = serde_json::to_string(&kind).unwrap();
        assert_eq!(serde_json::from_str::<ModelKind>(&json).unwrap(), kind);
        assert!(MediaType::new(kind.media_type()).holds_tensors(), "{kind}");
    }
    let error = "lora".parse::<ModelKind>().unwrap_err().to_string();
    assert!(error.contains("control-vector") && error.ends_with("found \"lora\""), "{error}");
}

#[test]
fn kind_of_a_later_version_counts_as_missing() {
    #[derive(Deserialize)]
    struct Record {
        #[serde(default, deserialize_with = "ModelKind::deserialize_known")]
        kind: Option<ModelKind>,
    }
    for (json, kind) in [
        (r#"{"kind":"draft"}"#, Some(ModelKind::Draft)),
        (r#"{"kind":"hologram"}"#, None),
        (r#"{"kind":null}"#, None),
        ("{}", None),
    ] {
        assert_eq!(serde_json::from_str::<Record>(json).unwrap().kind, kind, "{json}");
    }
}
