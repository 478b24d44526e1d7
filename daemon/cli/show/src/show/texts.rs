//! The texts of a model: template, system prompt, licenses, parameters, and a Modelfile made of them.

use blobd_cli_common::Global;
use blobd_cli_common::described_model::{DescribedFile, DescribedModel, ModelLocation};
use blobd_cli_common::output::{print as print_text, print_json};
use blobd_model::card::ModelCard;
use serde_json::{Map, Value as Json, json};

use crate::{ErrorBody, ErrorCode};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Text {
    Template,
    License,
    System,
    Parameters,
    Modelfile,
}

impl Text {
    const fn name(self) -> &'static str {
        match self {
            Self::Template => "template",
            Self::License => "license",
            Self::System => "system",
            Self::Parameters => "parameters",
            Self::Modelfile => "modelfile",
        }
    }

    fn of(self, model: &DescribedModel) -> Option<String> {
        match self {
            Self::Template => template(model),
            Self::License => license(model),
            Self::System => model.text("system").map(str::to_owned),
            Self::Parameters => parameters(model).map(|lines| lines.join("\n")),
            Self::Modelfile => Some(modelfile(model)),
        }
    }
}

pub(super) fn print(global: &Global, model: &DescribedModel, text: Text) -> Result<(), ErrorBody> {
    let found = text.of(model).ok_or_else(|| {
        let message = format!("model {}: has no {}", model.name, text.name());
        ErrorBody::new(ErrorCode::NotFound, message)
    })?;
    if global.json {
        return print_json(&json!({"name": model.name, text.name(): found}));
    }
    let end = if found.ends_with('\n') { "" } else { "\n" };
    print_text(&format!("{found}{end}"))
}

/// The manifest's template, else the header's, which is in Jinja.
pub(super) fn template(model: &DescribedModel) -> Option<String> {
    let of_header = || {
        let (_, header) = model.weights().next()?;
        let value = header.value("tokenizer.chat_template")?;
        value.as_str().map(str::to_owned)
    };
    model.text("template").map(str::to_owned).or_else(of_header)
}

/// All licenses of the manifest, each after the other, else what the header says about the license.
pub(super) fn license(model: &DescribedModel) -> Option<String> {
    let texts: Vec<_> = model.texts("license").collect();
    let of_header = || {
        let mut headers = model.files.iter().filter_map(DescribedFile::header);
        headers.find_map(|header| ModelCard::from_header(&header).license_text())
    };
    if texts.is_empty() { of_header() } else { Some(texts.join("\n")) }
}

/// The parameters as in a Modelfile, one per line: `stop "<|eot_id|>"`.
pub(super) fn parameters(model: &DescribedModel) -> Option<Vec<String>> {
    let parameters: Map<String, Json> = serde_json::from_str(model.text("params")?).ok()?;
    let lines = parameters.iter().flat_map(|(name, value)| {
        let values = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        values.into_iter().map(move |value| format!("{name} {}", parameter(&value)))
    });
    Some(lines.collect())
}

/// A parameter's value; text is quoted unless it is one plain word.
fn parameter(value: &Json) -> String {
    let is_plain = |text: &&str| !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_');
    value.as_str().filter(is_plain).map_or_else(|| value.to_string(), str::to_owned)
}

fn modelfile(model: &DescribedModel) -> String {
    let source = match &model.place {
        ModelLocation::Store(_) | ModelLocation::Registry(_) => model.name.clone(),
        ModelLocation::LocalFiles => {
            model.files.first().and_then(|file| file.name.clone()).unwrap_or_default()
        }
    };
    let mut text = format!("# Modelfile by `blobd show --modelfile`\nFROM {source}\n");
    let quoted = |instruction: &str, value: &str| format!("{instruction} \"\"\"{value}\"\"\"\n");
    text += &model.text("template").map_or_else(String::new, |template| quoted("TEMPLATE", template));
    text += &model.text("system").map_or_else(String::new, |system| quoted("SYSTEM", system));
    for parameter in parameters(model).unwrap_or_default() {
        text += &format!("PARAMETER {parameter}\n");
    }
    text += &messages(model);
    text + &model.texts("license").map(|license| quoted("LICENSE", license)).collect::<String>()
}

/// Messages that precede each conversation.
fn messages(model: &DescribedModel) -> String {
    let messages: Vec<Map<String, Json>> =
        model.text("messages").and_then(|json| serde_json::from_str(json).ok()).unwrap_or_default();
    let lines = messages.iter().filter_map(|message| {
        let (role, content) = (message.get("role")?.as_str()?, message.get("content")?.as_str()?);
        Some(format!("MESSAGE {role} \"\"\"{content}\"\"\"\n"))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::descriptor::MediaType;

    use super::*;

    fn model(texts: &[(&str, &str)]) -> DescribedModel {
        let files = texts.iter().map(|(component, text)| DescribedFile {
            media_type: MediaType::new(format!("application/vnd.ollama.image.{component}")),
            name: None,
            digest: None,
            size: text.len() as u64,
            content: Some(text.as_bytes().to_vec()),
            path: None,
        });
        DescribedModel {
            name: "m:1".to_owned(),
            digest: None,
            place: ModelLocation::Registry("m:1".to_owned()),
            files: files.collect(),
        }
    }

    #[test]
    fn modelfile_has_an_instruction_for_each_text() {
        let model = model(&[
            ("template", "{{ .Prompt }}"),
            ("system", "Be brief."),
            ("params", r#"{"stop":["<|end|>","x y"],"temperature":0.5,"mirostat":1}"#),
            ("messages", r#"[{"role":"user","content":"hi"}]"#),
            ("license", "MIT"),
            ("license", "Apache-2.0"),
        ]);
        let expected = "FROM m:1\nTEMPLATE \"\"\"{{ .Prompt }}\"\"\"\nSYSTEM \"\"\"Be brief.\"\"\"\nPARAMETER \
                        mirostat 1\nPARAMETER stop \"<|end|>\"\nPARAMETER stop \"x y\"\nPARAMETER temperature \
                        0.5\nMESSAGE user \"\"\"hi\"\"\"\nLICENSE \"\"\"MIT\"\"\"\nLICENSE \"\"\"Apache-2.0\"\"\"\n";
        assert_eq!(modelfile(&model).split_once('\n').unwrap().1, expected);
    }

    #[test]
    fn texts_that_a_model_lacks_are_absent() {
        let model = model(&[]);
        for text in [Text::Template, Text::License, Text::System, Text::Parameters] {
            assert_eq!(text.of(&model), None);
        }
    }
}
