//! Capabilities of headers, configurations and templates together.

use super::*;
use blobd_store_format::gguf::{GgmlType, GgufWriter, Value};

fn header(architecture: &str, keys: &[(&str, Value)], tensors: &[&str]) -> Header {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", architecture).unwrap();
    for (key, value) in keys {
        let is_global = key.starts_with("tokenizer.") || key.starts_with("general.");
        let key = if is_global { (*key).to_owned() } else { format!("{architecture}.{key}") };
        writer.metadata(key, value.clone()).unwrap();
    }
    for name in tensors {
        writer.tensor(name, GgmlType::F32, &[4]).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

fn of(header: &Header) -> Vec<String> {
    of_model(header, None, &ManifestConfig::default())
}

fn of_model(header: &Header, template: Option<&str>, config: &ManifestConfig) -> Vec<String> {
    let kind = ModelKind::from_header(header);
    let sources = CapabilitySources { kind, header: Some(header), template, ..CapabilitySources::default() };
    capabilities(&CapabilitySources { config: Some(config), ..sources })
}

fn jinja(template: &str) -> Header {
    header("llama", &[("tokenizer.chat_template", Value::from(template))], &[])
}

#[test]
fn only_models_that_continue_text_have_completion() {
    let one = || Value::from(1_u32);
    let tensors = ["x.weight"];
    for (architecture, keys, expected) in [
        ("llama", vec![("block_count", one())], &["completion"][..]),
        ("llama", vec![("pooling_type", one())], &["embedding"]),
        ("bert", vec![], &["embedding"]),
        ("t5encoder", vec![], &["embedding"]),
        ("qwen3", vec![("pooling_type", Value::from(4_u32))], &["rerank"]),
        ("flux", vec![], &["image"]),
        ("wan", vec![], &["video"]),
        ("whisper", vec![("block_count", one())], &["audio"]),
        ("wavtokenizer-dec", vec![("block_count", one()), ("pooling_type", one())], &[]),
        ("controlvector", vec![], &[]),
        ("eagle3", vec![("block_count", one())], &[]),
        ("llama", vec![("general.type", Value::from("adapter"))], &[]),
        ("llama", vec![("general.type", Value::from("imatrix"))], &[]),
        // An unknown architecture.
        ("hologram", vec![], &[]),
        ("clip", vec![], &["vision"]),
        ("clip", vec![("has_audio_encoder", Value::from(true))], &["audio"]),
    ] {
        assert_eq!(of(&header(architecture, &keys, &tensors)), expected, "{architecture} {keys:?}");
    }
}

#[test]
fn template_layer_decides_unless_the_headers_template_can_do_more() {
    let plain = ManifestConfig::default();
    let go = "{{ if .Tools }}{{ .Suffix }}{{ range .Messages }}<t>{{ .Thinking }}</t>{{ end }}";
    let all = ["completion", "tools", "insert", "thinking"];
    assert_eq!(of_model(&jinja(""), Some(go), &plain), all);
    assert_eq!(of(&jinja("{% if tools %}")), ["completion", "tools"]);
    assert_eq!(of_model(&jinja("{% if tools %}"), Some("{{ .Prompt }}"), &plain), ["completion", "tools"]);
    let with_results = "{{ .Tools }}{{ .ToolCalls }}tool_response";
    let template = jinja("tools <think></think>");
    assert_eq!(of_model(&template, Some(with_results), &plain), ["completion", "tools"]);
}

#[test]
fn parser_and_renderer_replace_the_templates() {
    let config = |parser: Option<&str>, renderer: Option<&str>| ManifestConfig {
        parser: parser.map(str::to_owned),
        renderer: renderer.map(str::to_owned),
        ..ManifestConfig::default()
    };
    let template = jinja("tools <think></think>");
    assert_eq!(of_model(&template, None, &config(None, Some("x"))), ["completion"]);
    assert_eq!(of_model(&template, None, &config(Some("qwen3"), None)), ["completion", "tools"]);
    assert_eq!(of_model(&template, None, &config(Some("olmo3-think"), None)), ["completion", "thinking"]);
    assert_eq!(of_model(&template, None, &config(Some("later"), None)), ["completion"]);
}

#[test]
fn configuration_comes_first_and_nothing_is_named_twice() {
    let config = ManifestConfig::parse(br#"{"capabilities":["tools","completion"]}"#);
    assert_eq!(of_model(&jinja("{% if tools %}"), None, &config), ["tools", "completion"]);
    let cloud = CapabilitySources { config: Some(&config), ..CapabilitySources::default() };
    assert_eq!(capabilities(&cloud), ["tools", "completion"], "a model without weights has only these");
}

#[test]
fn towers_and_projectors_mean_vision_and_audio() {
    let block = || Value::from(1_u32);
    let omni = [("vision.block_count", block()), ("audio.block_count", block())];
    assert_eq!(of(&header("gemma4", &omni, &[])), ["completion", "vision", "audio"]);
    assert_eq!(of(&header("nemotron_h_omni", &omni, &[])), ["completion", "vision"]);
    let audio = ("has_audio_encoder", Value::from(true));
    let vision = ("has_vision_encoder", Value::from(true));
    let projector_type = ("vision.projector_type", Value::from("gemma3nv"));
    for (keys, expected) in [
        (vec![], &["completion", "vision"][..]),
        (vec![vision.clone()], &["completion", "vision"]),
        (vec![audio.clone()], &["completion", "audio"]),
        (vec![vision.clone(), audio.clone()], &["completion", "vision", "audio"]),
        (vec![vision, audio, projector_type], &["completion", "vision"]),
    ] {
        let (model, projector) = (header("llama", &[], &[]), header("clip", &keys, &["v.x"]));
        let sources = CapabilitySources {
            header: Some(&model),
            projectors: &[&projector],
            has_projector: true,
            ..CapabilitySources::default()
        };
        assert_eq!(capabilities(&sources), expected, "{keys:?}");
    }
    let unread = CapabilitySources { has_projector: true, ..CapabilitySources::default() };
    assert_eq!(capabilities(&unread), ["vision"]);
}

#[test]
fn gpt_oss_thinks_in_every_spelling() {
    for name in ["gptoss", "gpt-oss"] {
        assert_eq!(of(&header(name, &[], &[])), ["completion", "thinking"]);
        let config = ManifestConfig { model_family: Some(name.to_owned()), ..ManifestConfig::default() };
        assert_eq!(of_model(&jinja(""), None, &config), ["completion", "thinking"]);
    }
}

#[test]
fn vocabulary_with_a_template_has_no_completion() {
    let tokens = ("tokenizer.ggml.tokens", Value::strings([b"a".to_vec()]));
    let template = ("tokenizer.chat_template", Value::from("tools"));
    assert_eq!(of(&header("llama", &[tokens, template], &[])), [""; 0]);
}
