//! `blobd edit`

use std::fs;
use std::path::Path;

use blobd_client::protocol::MetadataValue;
use blobd_client::protocol::event::{Event, WorkProgress};
use blobd_client::protocol::naming::{ChangedKey, EditParams, Edited, KeyChange, TemplateLayer};
use blobd_model::edit::EditType;
use blobd_model::metadata_json::short_text;
use clap::Args;

use crate::connect::{client_error, connect, print_report, print_result};
use crate::model_name::{ModelName, only, parse_new_name};
use crate::output::{Table, human_bytes, or_dash, printable, terminal_width};
use crate::progress::Bar;
use crate::{Digest, ErrorBody, Global, Reference, file_error, lost_models, usage};

/// Make a model with other metadata that shares all tensors
#[derive(Debug, Args)]
#[command(
    long_about = "Make a model with other metadata that shares all tensors\n\nOnly the GGUF header is \
rewritten, or that of the first shard. The order of the keys and the alignment stay as they are, \
and new keys are appended. The other layers of the model, such as its license, are shared too."
)]
#[command(after_help = "Examples:
  blobd edit llama3:8b llama3:long --set llama.context_length=32768
  blobd edit llama3:8b my/llama:v2 --set general.name='My model' --unset general.url
  blobd edit llama3:8b fixed --template @chat_template.jinja
  blobd edit llama3:8b fixed --set 'tokenizer.ggml.eot_token_id:uint32=128009' --dry-run
  blobd edit llama3:8b tagged --set 'general.tags:array<string>=[\"chat\",\"en\"]'")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "SRC")]
    source: ModelName,
    /// The name of the new model
    #[arg(value_name = "DST", value_parser = parse_new_name)]
    target: Reference,
    /// Set a metadata key. Without a type (uint8 … float64, bool, string, array<…>), the key keeps its type. A
    /// value that starts with @ is the name of a file with the value; arrays are JSON
    #[arg(long, value_name = "KEY[:TYPE]=VALUE")]
    set: Vec<String>,
    /// Remove a metadata key
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    /// Set the chat template in the GGUF header, tokenizer.chat_template, which llama.cpp uses
    #[arg(long, value_name = "TEXT|@FILE")]
    template: Option<String>,
    /// Set the template layer of the manifest, which Ollama uses; it has the syntax of Go's templates
    #[arg(long, value_name = "TEXT|@FILE")]
    template_layer: Option<String>,
    /// Replace another model that has the name DST, even a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let (keys, template_layer) = changes(params)?;
    let mut bar: Option<Bar> = None;
    let quiet = global.hides_progress();
    let connected = connect(global)?;
    let request = EditParams {
        source: only(global, &connected.client, &params.source)?,
        target: params.target.clone(),
        keys,
        template_layer,
        force: params.force,
        dry_run: params.dry_run,
    };
    let edited = connected.client.edit(&request, |event| {
        if let Event::Progress(WorkProgress { total: Some(total), completed: Some(completed), .. }) = event {
            let label = params.target.short();
            bar.get_or_insert_with(|| Bar::new(&label, total, quiet)).set(completed, total);
        }
    });
    if let Some(bar) = bar {
        bar.clear();
    }
    let edited = edited.map_err(client_error)?;
    if params.dry_run { print_result(global, &edited, render) } else { print_report(global, &edited, render) }
}

fn changes(params: &Params) -> Result<(Vec<KeyChange>, Option<String>), ErrorBody> {
    let mut keys = params.set.iter().map(|setting| key_setting(setting)).collect::<Result<Vec<_>, _>>()?;
    if let Some(template) = &params.template {
        let (value, value_type) = (Some(text_of(template)?), Some("string".to_owned()));
        keys.push(KeyChange { key: CHAT_TEMPLATE.to_owned(), value, value_type });
    }
    keys.extend(params.unset.iter().map(|key| KeyChange { key: key.clone(), value: None, value_type: None }));
    let template_layer = params.template_layer.as_deref().map(text_of).transpose()?;
    if keys.is_empty() && template_layer.is_none() {
        return Err(usage("no change: give --set, --unset, --template or --template-layer"));
    }
    Ok((keys, template_layer))
}

const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Parses `key[:type]=value`. A key may have colons: only a type is split off.
fn key_setting(setting: &str) -> Result<KeyChange, ErrorBody> {
    let malformed =
        || usage(format!("--set: wrong form: expected KEY=VALUE or KEY:TYPE=VALUE, found {setting:?}"));
    let (name, value) = setting.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or_else(malformed)?;
    let typed = name.rsplit_once(':').filter(|(_, name)| name.parse::<EditType>().is_ok());
    let (key, value_type) = typed.map_or((name, None), |(key, name)| (key, Some(name.to_owned())));
    Ok(KeyChange { key: key.to_owned(), value: Some(text_of(value)?), value_type })
}

/// The text itself, or the content of the file whose name follows `@`.
fn text_of(argument: &str) -> Result<String, ErrorBody> {
    let Some(name) = argument.strip_prefix('@') else { return Ok(argument.to_owned()) };
    let size = fs::metadata(Path::new(name)).map_err(|error| file_error(name, &error))?.len();
    if size > MAX_VALUE_BYTES {
        let message = format!("{name}: {size} bytes, at most {MAX_VALUE_BYTES} can be sent in a request");
        return Err(usage(message));
    }
    let bytes = fs::read(Path::new(name)).map_err(|error| file_error(name, &error))?;
    String::from_utf8(bytes).map_err(|_binary| usage(format!("{name}: not text in UTF-8")))
}

/// Fits into a request of 1 MiB, in which a line break takes two bytes.
const MAX_VALUE_BYTES: u64 = 768 << 10;

fn render(edited: &Edited) -> String {
    let verb = if edited.dry_run { "would be written" } else { "new" };
    let digest = or_dash(edited.digest.map(Digest::short));
    let summary = format!("{} {digest}: {} {verb}\n", printable(&edited.name), human_bytes(edited.new_bytes));
    let row = |ChangedKey { key, from, to }: &ChangedKey| [key.clone(), abridged(from), abridged(to)];
    let table = Table::with_rows(&["KEY", "FROM", "TO"], &[], edited.changed.iter().map(row));
    let table = if table.has_rows() { table.render(terminal_width()) } else { String::new() };
    format!("{table}{}{summary}{}", note(edited), lost_models::effects(&edited.effects))
}

fn note(edited: &Edited) -> &'static str {
    let sets_template = edited.changed.iter().any(|change| change.key == CHAT_TEMPLATE);
    match edited.template_layer {
        Some(TemplateLayer::Kept) if sets_template => {
            "note: the manifest has a template layer, which Ollama uses instead of the chat template; \
             --template-layer replaces it\n"
        }
        Some(TemplateLayer::Replaced) => "the template layer of the manifest is replaced\n",
        Some(TemplateLayer::Added) => "a template layer is added to the manifest\n",
        _ => "",
    }
}

fn abridged(value: &Option<MetadataValue>) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.as_ref().map_or_else(|| "-".to_owned(), short_text);
    let shown: String = text.chars().take(MAX_CHARS).collect();
    let ellipsis = if shown.len() < text.len() { "…" } else { "" };
    shown + ellipsis
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_type_is_split_off_a_key() {
        for (setting, key, value_type, value) in [
            ("a=b", "a", None, "b"),
            ("a:uint8=1", "a", Some("uint8"), "1"),
            ("a:b=1", "a:b", None, "1"),
            ("a:b:array<string>=[]", "a:b", Some("array<string>"), "[]"),
            ("a==", "a", None, "="),
            ("a=", "a", None, ""),
        ] {
            let change = key_setting(setting).unwrap();
            assert_eq!(change.key, key, "{setting}");
            assert_eq!(change.value_type.as_deref(), value_type, "{setting}");
            assert_eq!(change.value.as_deref(), Some(value), "{setting}");
        }
        assert!(key_setting("a").is_err());
        assert!(key_setting("=a").is_err());
        assert!(key_setting("a=@/absent").unwrap_err().message.contains("/absent"));
    }
}
