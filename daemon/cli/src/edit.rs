//! `blobd edit`

use std::fs;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_cli_common::connect::{client_error, connect, print_report, print_result};
use blobd_cli_common::model_name::{ModelName, only, parse_new_name};
use blobd_cli_common::output::{Table, human_bytes, or_dash, printable, terminal_width};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, file_error, lost_models, usage};
use blobd_client::protocol::MetadataValue;
use blobd_client::protocol::event::{Event, WorkProgress};
use blobd_client::protocol::naming::{
    ChangedFile, ChangedKey, EditParams, Edited, FileChange, KeyChange, TemplateLayer,
};
use blobd_model::edit::EditType;
use blobd_model::metadata_json::short_text;
use clap::Args;

use crate::{Digest, ErrorBody, Reference};

/// Make a model with other metadata or small files that shares all tensors
#[derive(Debug, Args)]
#[command(
    long_about = "Make a model with other metadata or small files that shares all tensors\n\nOf a GGUF model, \
the header is rewritten, or that of the first shard. The order of the keys and the alignment stay as they \
are, and new keys are appended. Of any model that is a folder, the files without weights can be replaced, \
added and removed. The other files of the model, such as its license, are shared too."
)]
#[command(after_help = "Examples:
  blobd edit llama3:8b llama3:long --set llama.context_length=32768
  blobd edit llama3:8b my/llama:v2 --set general.name='My model' --unset general.url
  blobd edit llama3:8b fixed --template @chat_template.jinja
  blobd edit llama3:8b fixed --set 'tokenizer.ggml.eot_token_id:uint32=128009' --dry-run
  blobd edit llama3:8b tagged --set 'general.tags:array<string>=[\"chat\",\"en\"]'
  blobd edit hf.co/org/model fixed --file chat_template.jinja=@template.jinja
  blobd edit hf.co/org/model slim --remove-file tokenizer/merges.txt --dry-run")]
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
    /// Replace or add a file of a model that is a folder, such as generation_config.json. A value that starts with @ is
    /// the name of a file with the content. Files with weights and their indexes cannot be edited
    #[arg(long, value_name = "PATH=TEXT|@FILE")]
    file: Vec<String>,
    /// Remove a file of a model that is a folder
    #[arg(long, value_name = "PATH")]
    remove_file: Vec<String>,
    /// Replace another model that has the name DST, even a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let (keys, template_layer, files) = changes(params)?;
    let mut bar: Option<Bar> = None;
    let quiet = global.hides_progress();
    let connected = connect(global)?;
    let request = EditParams {
        source: only(global, &connected.client, &params.source)?,
        target: params.target.clone(),
        keys,
        template_layer,
        files,
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

type Changes = (Vec<KeyChange>, Option<String>, Vec<FileChange>);

fn changes(params: &Params) -> Result<Changes, ErrorBody> {
    let mut keys = params.set.iter().map(|setting| key_setting(setting)).collect::<Result<Vec<_>, _>>()?;
    if let Some(template) = &params.template {
        let (value, value_type) = (Some(text_of(template)?), Some("string".to_owned()));
        keys.push(KeyChange { key: CHAT_TEMPLATE.to_owned(), value, value_type });
    }
    keys.extend(params.unset.iter().map(|key| KeyChange { key: key.clone(), value: None, value_type: None }));
    let template_layer = params.template_layer.as_deref().map(text_of).transpose()?;
    let mut files = params.file.iter().map(|setting| file_setting(setting)).collect::<Result<Vec<_>, _>>()?;
    let removed = |path: &String| FileChange { path: path.clone(), text: None, base64: None };
    files.extend(params.remove_file.iter().map(removed));
    if keys.is_empty() && template_layer.is_none() && files.is_empty() {
        return Err(usage(
            "no change: give --set, --unset, --template, --template-layer, --file or --remove-file",
        ));
    }
    Ok((keys, template_layer, files))
}

/// Parses `path=text` or `path=@file`. A file may have any content; it is sent in the shorter of two forms.
fn file_setting(setting: &str) -> Result<FileChange, ErrorBody> {
    let malformed =
        || usage(format!("--file: wrong form: expected PATH=TEXT or PATH=@FILE, found {setting:?}"));
    let (path, value) = setting.split_once('=').filter(|(path, _)| !path.is_empty()).ok_or_else(malformed)?;
    let (path, name) = (path.to_owned(), value.strip_prefix('@'));
    let content = match name {
        Some(name) => content_of(name, MAX_FILE_BYTES)?,
        None => value.as_bytes().to_vec(),
    };
    let encoded_length = content.len().div_ceil(3).saturating_mul(4);
    let text = String::from_utf8(content);
    match text {
        Ok(text) if escaped_length(&text) <= encoded_length => {
            Ok(FileChange { path, text: Some(text), base64: None })
        }
        text => {
            let content = text.map_or_else(std::string::FromUtf8Error::into_bytes, String::into_bytes);
            Ok(FileChange { path, text: None, base64: Some(STANDARD.encode(content)) })
        }
    }
}

/// The length of a text as JSON.
fn escaped_length(text: &str) -> usize {
    let length = |c: char| match c {
        '"' | '\\' | '\n' | '\r' | '\t' => 2,
        c if c.is_ascii_control() => 6,
        c => c.len_utf8(),
    };
    text.chars().map(length).sum()
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
    let bytes = content_of(name, MAX_VALUE_BYTES)?;
    String::from_utf8(bytes).map_err(|_binary| usage(format!("{name}: not text in UTF-8")))
}

fn content_of(name: &str, limit: u64) -> Result<Vec<u8>, ErrorBody> {
    let failed = |error| file_error(name, &error);
    let size = fs::metadata(Path::new(name)).map_err(failed)?.len();
    if size > limit {
        return Err(usage(format!("{name}: {size} bytes, at most {limit} can be sent in a request")));
    }
    fs::read(Path::new(name)).map_err(failed)
}

/// The longest value of a key, with room for the escapes of JSON and for other keys.
const MAX_VALUE_BYTES: u64 = 768 << 10;
/// The longest file: in base64, with room for the rest of the request.
const MAX_FILE_BYTES: u64 = (EditParams::MAX_BODY_BYTES as u64 - (1 << 20)) / 4 * 3;

fn render(edited: &Edited) -> String {
    let verb = if edited.dry_run { "would be written" } else { "new" };
    let digest = or_dash(edited.digest.map(Digest::short));
    let summary = format!("{} {digest}: {} {verb}\n", printable(&edited.name), human_bytes(edited.new_bytes));
    let row = |ChangedKey { key, from, to }: &ChangedKey| [key.clone(), abridged(from), abridged(to)];
    let table =
        Table::with_rows(&["KEY", "FROM", "TO"], &[], edited.changed.iter().map(row)).with_texts_in(&[1, 2]);
    let file = |file: &ChangedFile| [file.path.clone(), change_of(file).to_owned(), human_bytes(file.size)];
    let files = Table::with_rows(&["FILE", "CHANGE", "SIZE"], &[2], edited.changed_files.iter().map(file));
    let shown = |table: Table| if table.has_rows() { table.render(terminal_width()) } else { String::new() };
    let (table, files) = (shown(table), shown(files));
    format!("{table}{files}{}{summary}{}", note(edited), lost_models::effects(&edited.effects))
}

const fn change_of(file: &ChangedFile) -> &'static str {
    match (file.from, file.to) {
        (None, _) => "added",
        (_, None) => "removed",
        _ => "replaced",
    }
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
