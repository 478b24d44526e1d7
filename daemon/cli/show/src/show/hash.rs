//! `blobd show --hash`: the hashes of tensors that llama.cpp's `gguf-hash` computes.
//!
//! Source of the form and of the numbers: `examples/gguf-hash` of llama.cpp.

use std::fs;
use std::path::{Path, PathBuf};

use blobd_cli_common::connect::{client_error, connect, note_name};
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::{print, print_json, printable};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::source_file::{SourceFile, file_paths};
use blobd_cli_common::{Global, file_error};
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_store_format::file_paths::distinct;
use blobd_store_format::gguf::Header;
use clap::Args;
use serde::Serialize;

use self::check::{Comparison, Manifest};
use self::hashes::{Algorithm, Hashes};
use crate::{ErrorBody, ErrorCode, Reference};

mod check;
mod hashes;

/// Options of `show --hash`.
#[derive(Debug, Args)]
pub(super) struct HashArgs {
    /// Print the hash of each tensor and of all tensors, as llama.cpp's gguf-hash does
    #[arg(
        long,
        value_name = "ALGORITHM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "xxh64",
        value_delimiter = ',',
        conflicts_with_all = ["tensors", "metadata", "layers", "full", "text", "residency"]
    )]
    hash: Vec<Algorithm>,
    /// Compare with a file that gguf-hash or --hash has written; exit code 5 if something differs
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["tensors", "metadata", "layers", "full", "text", "residency"]
    )]
    check: Option<PathBuf>,
}

impl HashArgs {
    pub(super) const fn is_given(&self) -> bool {
        !self.hash.is_empty() || self.check.is_some()
    }
}

#[derive(Debug, Serialize)]
struct Line {
    algorithm: Algorithm,
    hash: String,
    file: String,
    /// All tensors together if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Comparison>,
}

#[derive(Serialize)]
struct Report {
    hashes: Vec<Line>,
    /// Entries of the manifest for tensors that the model does not have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<String>,
}

pub(super) fn show(global: &Global, model: &ModelName, args: &HashArgs) -> Result<(), ErrorBody> {
    let manifest = args.check.as_deref().map(read_manifest).transpose()?;
    let algorithms = match (&manifest, args.hash.is_empty()) {
        (Some(manifest), true) => manifest.algorithms(),
        _ => hashes::expanded(&args.hash),
    };
    let connected = connect(global)?;
    let reference = &only(global, &connected.client, model)?;
    let request = OpenParams {
        reference: reference.clone(),
        tensors: TensorSelection::None,
        component: Some("model".to_owned()),
        files: FileSelection::All,
        purpose: OpenPurpose::Open,
    };
    let model = connected.client.open_with(&request).map_err(client_error)?;
    note_name(global, reference, model.name());
    // The lines have the stored name: the user may have given an ID.
    let stored: Reference = model.name().parse().unwrap_or_else(|_malformed| reference.clone());
    let mut hashes = Vec::new();
    let paths = file_paths(&stored, &model);
    let files = || paths.iter().map(String::as_str).zip(model.layers().iter().map(|layer| layer.digest));
    for layer in distinct(files()) {
        let name = paths.get(layer).map_or("", String::as_str);
        hashes.extend(file_lines(global, name, &model, layer, &algorithms)?);
    }
    let missing = manifest.as_ref().map(|manifest| manifest.compare(&mut hashes)).unwrap_or_default();
    let report = Report { hashes, missing };
    match (global.json, &args.check) {
        (true, _) => print_json(&report)?,
        (false, None) => print(&report.lines())?,
        (false, Some(path)) => print(&report.checked(path))?,
    }
    match &args.check {
        Some(path) => report.result(path, model.name()),
        None => Ok(()),
    }
}

fn read_manifest(path: &Path) -> Result<Manifest, ErrorBody> {
    let name = path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| file_error(&name, &error))?;
    let known = Manifest::parse(&text);
    known.ok_or_else(|| {
        let message =
            format!("{name}: no line with the hash of a tensor, such as `sha256    e3b0…  FILE:NAME`");
        ErrorBody::new(ErrorCode::InvalidInput, message)
    })
}

/// The hashes of a file's tensors in the order of its table, and of all their bytes in sequence.
fn file_lines(
    global: &Global,
    name: &str,
    model: &OpenModel,
    layer: usize,
    algorithms: &[Algorithm],
) -> Result<Vec<Line>, ErrorBody> {
    let mut source = SourceFile::open(model, layer)?;
    let header = source.read_header()?;
    let ranges = tensor_ranges(&header, &source)?;
    let bar = Bar::new(name, source.size(), global.hides_progress());
    let line =
        |(algorithm, hash), tensor| Line { algorithm, hash, file: name.to_owned(), tensor, result: None };
    let (mut lines, mut whole) = (Vec::new(), Hashes::of_model(algorithms));
    let mut buffer = vec![0; STEP_BYTES];
    for (tensor, offset, size) in ranges {
        let mut own = Hashes::of_tensor(algorithms);
        let mut done = 0;
        while done < size {
            let length = usize::try_from(size.saturating_sub(done)).unwrap_or(usize::MAX).min(STEP_BYTES);
            let chunk = buffer.get_mut(..length).unwrap_or_default();
            source.read(offset.saturating_add(done), chunk)?;
            own.update(chunk);
            whole.update(chunk);
            done = done.saturating_add(length as u64);
            bar.set(offset.saturating_add(done), source.size());
        }
        lines.extend(own.finish().into_iter().map(|hash| line(hash, Some(tensor.clone()))));
    }
    bar.clear();
    lines.extend(whole.finish().into_iter().map(|hash| line(hash, None)));
    // Hashes of damaged data must not be taken for those of the model.
    source.verify()?;
    Ok(lines)
}

/// Name, offset in the file and size of each tensor.
fn tensor_ranges(header: &Header, source: &SourceFile<'_>) -> Result<Vec<(String, u64, u64)>, ErrorBody> {
    let refused =
        |error| ErrorBody::new(ErrorCode::InvalidInput, format!("model {}: {error}", source.model()));
    let layout = header.file_layout(source.size()).map_err(refused)?;
    let place = |offset: u64| header.data_offset().saturating_add(offset);
    Ok(layout
        .tensors()
        .iter()
        .map(|range| (range.name.to_owned(), place(range.offset), range.size))
        .collect())
}

const STEP_BYTES: usize = 1 << 20;

impl Line {
    fn label(&self) -> String {
        match &self.tensor {
            Some(tensor) => format!("{}:{tensor}", self.file),
            None => self.file.clone(),
        }
    }
}

impl Report {
    fn lines(&self) -> String {
        let text = |line: &Line| {
            let result = line.result.map_or_else(String::new, |result| format!("  -  {}", result.name()));
            let (algorithm, label) = (line.algorithm.name(), printable(&line.label()));
            format!("{algorithm:8}  {}  {label}{result}\n", line.hash)
        };
        self.hashes.iter().map(text).collect()
    }

    /// The lines between those that `gguf-hash --check` prints.
    fn checked(&self, path: &Path) -> String {
        let outcome = match (self.differs(), self.is_known()) {
            (true, _) => "Failure",
            (false, true) => "Success",
            (false, false) => "Manifest Missing Entry",
        };
        let path = path.display();
        format!("manifest  {path}\n{}\nVerification results for {path} - {outcome}\n", self.lines())
    }

    fn differs(&self) -> bool {
        !self.missing.is_empty() || self.hashes.iter().any(|line| line.result == Some(Comparison::Mismatch))
    }

    fn is_known(&self) -> bool {
        self.hashes.iter().any(|line| line.result == Some(Comparison::Ok))
    }

    fn result(&self, path: &Path, model: &str) -> Result<(), ErrorBody> {
        let path = path.display();
        if self.differs() {
            let different: Vec<_> = self
                .hashes
                .iter()
                .filter(|line| line.result == Some(Comparison::Mismatch))
                .map(Line::label)
                .collect();
            let (count, first) =
                (different.len() + self.missing.len(), different.first().or(self.missing.first()));
            let first = first.cloned().unwrap_or_default();
            let message =
                format!("model {model}: {count} hashes differ from {path}, the first is that of {first}");
            return Err(ErrorBody::new(ErrorCode::Corrupt, message)
                .with_hint("the data is what was stored: the file describes another model or version"));
        }
        match self.is_known() {
            true => Ok(()),
            false => Err(ErrorBody::new(
                ErrorCode::InvalidInput,
                format!("{path}: no hash of a tensor of model {model} by these algorithms"),
            )),
        }
    }
}
