//! `blobd save`: models as an OCI image layout, in a tar archive or a folder, for machines without a network.
//!
//! The layout has the manifests and the files as registries have them, so that other programs for OCI images read it too.
//! Files are read out of their tensors while they are written.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blobd_cli_common::connect::{client_error, connect};
use blobd_cli_common::model_name::{ModelName, expand};
use blobd_cli_common::output::{DataOutput, counted, human_bytes, print_json, print_message, printable};
use blobd_cli_common::output_file::refuse_terminal;
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, file_error, internal};
use blobd_client::model::OpenModel;
use blobd_client::protocol::signatures::SignaturesParams;
use blobd_store_format::archive::{TarReader, tar_header};
use blobd_store_format::artifact::ArtifactKind;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::index::{LayoutModel, LayoutSignature, ManifestIndex};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::signature::{Bundle, SignatureArtifact};
use clap::Args;
use serde::Serialize;

use crate::delta::{self, DeltaPlan, Given};
use crate::export::{
    Checked, ExportPlan, NewFile, is_folder_path, open_component, write_checked, write_layer,
};
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// Write models into one archive or folder, for a machine without a network
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd save llama3:8b -o llama3.tar
  blobd save llama3:8b 'qwen3:*' -o models.tar        a file that several models have is in it once
  blobd save llama3:8b -o models/                     the same as a folder
  blobd save llama3:8b -o - | ssh other blobd load -
  blobd save llama3:8b-tuned --given llama3:8b -o delta.tar
  blobd save 'qwen3:*' --given lab.inventory -o delta.tar

`blobd load` reads it. It is an OCI image layout with the manifests as their registries published
them: oras and crane read it too, and skopeo those with OCI manifests, not Ollama's.")]
pub struct Params {
    /// The models, by their names or by pattern
    #[arg(required = true, value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Save a delta: only what a store that has this model, or what this file of `blobd inventory` lists, lacks
    #[arg(long, value_name = "REF|FILE")]
    given: Vec<String>,
    /// The archive to write, - for standard output, or a folder, whose path ends with /
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// Replace files that exist
    #[arg(short, long)]
    force: bool,
}

#[derive(Debug, Serialize)]
struct Saved {
    path: String,
    /// The size of everything that was written.
    size: u64,
    saved: Vec<SavedModel>,
}

#[derive(Debug, Serialize)]
struct SavedModel {
    name: String,
    digest: Digest,
    /// The size of all its files.
    size: u64,
}

/// Writes the models. The archive or the files of the folder get their names when all is written.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let layout = Layout::new(&connected.client, &params.models, &params.given)?;
    let to_stdout = params.output == Path::new("-");
    if !is_folder_path(&params.output) && !params.force {
        refuse_terminal(Some(&params.output))?;
    }
    let is_folder = !to_stdout && is_folder_path(&params.output);
    let size = if is_folder { layout.size() } else { layout.archive_size() };
    let bar = Bar::new("saving", size, global.hides_progress());
    let source = Source { client: &connected.client, layout: &layout, open: RefCell::default() };
    let written = match (to_stdout, is_folder) {
        (true, _) => {
            let mut out = DataOutput::lock();
            let written = source.write_archive(&mut out, "standard output", &bar);
            out.result(written)
        }
        (false, true) => source.write_folder(global, params, &bar),
        (false, false) => source.write_file(global, params, &bar),
    };
    bar.clear();
    written?;
    layout.report(global, &params.output, size)
}

/// What is written: a value that is complete before anything is.
#[derive(Debug)]
struct Layout {
    models: Vec<(Reference, Manifest)>,
    /// In the order of the archive: the index and the manifests first, so that a reader knows what follows.
    files: Vec<LayoutFile>,
    /// Whether only parts of the models are written.
    is_delta: bool,
}

#[derive(Debug)]
struct LayoutFile {
    path: String,
    digest: Digest,
    size: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Bytes(Vec<u8>),
    /// A file of the model with this number.
    OfModel(usize),
    /// A blob of the model with this number, and the number of its descriptor there.
    Blob(usize, u32),
}

impl Layout {
    fn new(client: &Client, names: &[ModelName], given: &[String]) -> Result<Self, ErrorBody> {
        let model = |reference: Reference| {
            let manifest = client.manifest(&reference).map_err(client_error)?;
            Ok((reference, manifest))
        };
        let named = expand(client, names)?.into_iter();
        let models = named.map(|named| named.reference.and_then(model)).collect::<Result<Vec<_>, _>>()?;
        let signatures = signatures(client, &models)?;
        if given.is_empty() {
            return Self::of(models, &signatures);
        }
        let given = Given::new(client, given)?;
        let plan = |(reference, manifest): &(Reference, Manifest)| {
            DeltaPlan::new(client, reference, manifest, &given)
        };
        let plans = models.iter().map(plan).collect::<Result<Vec<_>, _>>()?;
        Self::of_deltas(models, plans, &signatures)
    }

    fn of_deltas(
        models: Vec<(Reference, Manifest)>,
        plans: Vec<DeltaPlan>,
        signatures: &[Signature],
    ) -> Result<Self, ErrorBody> {
        let names = models.iter().map(|(reference, _)| reference.clone());
        let deltas = names.zip(plans.iter().map(|plan| plan.manifest.clone())).collect::<Vec<_>>();
        let (mut files, mut seen) = Self::head(&deltas, signatures)?;
        for (number, plan) in plans.into_iter().enumerate() {
            let bytes = plan
                .bytes
                .into_iter()
                .map(|(digest, bytes)| (digest, bytes.len() as u64, Content::Bytes(bytes)));
            let whole = plan.files.into_iter().map(|(digest, size)| (digest, size, Content::OfModel(number)));
            let blobs = plan.blobs.into_iter();
            let blobs = blobs.map(|(digest, (fd, size))| (digest, size, Content::Blob(number, fd)));
            let parts = bytes.chain(whole).chain(blobs).filter(|(digest, ..)| seen.insert(*digest));
            files.extend(parts.map(|(digest, size, content)| LayoutFile {
                path: ManifestIndex::layout_blob_path(digest),
                digest,
                size,
                content,
            }));
        }
        Ok(Self { models, files, is_delta: true })
    }

    /// The files that say what is in the layout, and the digests of those among them that models have.
    fn head(
        models: &[(Reference, Manifest)],
        signatures: &[Signature],
    ) -> Result<(Vec<LayoutFile>, BTreeSet<Digest>), ErrorBody> {
        let tags: Vec<&str> = models.iter().map(|(reference, _)| reference.tag()).collect();
        let listed = |(reference, manifest): &(Reference, Manifest)| {
            let is_only = tags.iter().filter(|tag| **tag == reference.tag()).count() == 1;
            let media_type = manifest.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
            LayoutModel {
                manifest: Descriptor {
                    media_type,
                    digest: manifest.digest(),
                    size: manifest.raw().len() as u64,
                },
                name: Some(whole_name(reference)),
                // Programs that take a tag find a model by this.
                ref_name: Some(if is_only { reference.tag().to_owned() } else { whole_name(reference) }),
            }
        };
        let models_of_index: Vec<_> = models.iter().map(listed).collect();
        let signatures_of_index: Vec<_> = signatures.iter().map(Signature::listed).collect();
        let index = ManifestIndex::compose_layout(&models_of_index, &signatures_of_index);
        let index = index.map_err(|error| ErrorBody::new(ErrorCode::InvalidRequest, error))?;
        let bytes = |path: &str, content: &[u8]| LayoutFile {
            path: path.to_owned(),
            digest: Digest::of(content),
            size: content.len() as u64,
            content: Content::Bytes(content.to_owned()),
        };
        let mut files = vec![
            bytes(ManifestIndex::LAYOUT_MARKER_PATH, ManifestIndex::LAYOUT_MARKER.as_bytes()),
            bytes(ManifestIndex::LAYOUT_PATH, &index),
        ];
        let mut seen = BTreeSet::new();
        for (_, manifest) in models {
            if seen.insert(manifest.digest()) {
                files.push(bytes(&ManifestIndex::layout_blob_path(manifest.digest()), manifest.raw()));
            }
        }
        let of_signature = |signature: &'_ Signature| {
            [signature.manifest.clone(), signature.bundle.text().as_bytes().to_owned()]
        };
        // Last: `load` does not read it, and must not find it between those that it waits for.
        let config = (!signatures.is_empty()).then(|| ArtifactKind::EMPTY_CONFIG.to_owned());
        for content in signatures.iter().flat_map(of_signature).chain(config) {
            let digest = Digest::of(&content);
            if seen.insert(digest) {
                files.push(bytes(&ManifestIndex::layout_blob_path(digest), &content));
            }
        }
        Ok((files, seen))
    }

    fn of(models: Vec<(Reference, Manifest)>, signatures: &[Signature]) -> Result<Self, ErrorBody> {
        let (mut files, mut seen) = Self::head(&models, signatures)?;
        for (number, (_, manifest)) in models.iter().enumerate() {
            let new = manifest.files().filter(|file| seen.insert(file.digest));
            files.extend(new.map(|file| LayoutFile {
                path: ManifestIndex::layout_blob_path(file.digest),
                digest: file.digest,
                size: file.size,
                content: Content::OfModel(number),
            }));
        }
        Ok(Self { models, files, is_delta: false })
    }

    fn size(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }

    fn archive_size(&self) -> u64 {
        let blocks = self.files.iter().map(|file| {
            let padded = file.size.checked_next_multiple_of(TarReader::BLOCK_BYTES).unwrap_or(u64::MAX);
            padded.saturating_add(TarReader::BLOCK_BYTES)
        });
        blocks.fold(END.len() as u64, u64::saturating_add)
    }

    fn report(&self, global: &Global, output: &Path, size: u64) -> Result<(), ErrorBody> {
        let path = output.display().to_string();
        let model = |(reference, manifest): &(Reference, Manifest)| SavedModel {
            name: reference.short(),
            digest: manifest.digest(),
            size: manifest.size(),
        };
        let saved = Saved { path, size, saved: self.models.iter().map(model).collect() };
        let to_stdout = output == Path::new("-");
        if global.json && !to_stdout {
            return print_json(&saved);
        }
        if !global.hides_reports() {
            let names = saved.saved.iter().map(|model| {
                format!("{} {}: {}\n", printable(&model.name), model.digest.short(), human_bytes(model.size))
            });
            let path = if to_stdout { "standard output" } else { &saved.path };
            let total = format!(
                "{}: {}, {} in {}\n",
                printable(path),
                human_bytes(size),
                counted(saved.saved.len(), "model"),
                counted(self.files.len(), "file"),
            );
            // Standard output may be the archive.
            print_message(&(names.collect::<String>() + &total));
        }
        Ok(())
    }
}

/// A signature of a model, with the bytes of its manifest.
#[derive(Debug)]
struct Signature {
    manifest: Vec<u8>,
    bundle: Bundle,
}

impl Signature {
    fn listed(&self) -> LayoutSignature {
        let media_type = MediaType::new(MediaType::OCI_MANIFEST);
        let (digest, size) = (Digest::of(&self.manifest), self.manifest.len() as u64);
        let bundle = Some(Digest::of(self.bundle.text().as_bytes()));
        LayoutSignature { manifest: Descriptor { media_type, digest, size }, bundle }
    }
}

/// The signatures that the store has of the models.
fn signatures(client: &Client, models: &[(Reference, Manifest)]) -> Result<Vec<Signature>, ErrorBody> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for (reference, manifest) in models.iter().filter(|(_, manifest)| seen.insert(manifest.digest())) {
        let params = SignaturesParams::new(reference.clone(), Vec::new());
        let report = client.signatures(&params).map_err(client_error)?;
        for signature in report.signatures {
            let invalid = |error: &dyn std::fmt::Display| internal(format!("{}: {error}", reference.short()));
            let bundle = Bundle::parse(signature.bundle.as_bytes()).map_err(|error| invalid(&error))?;
            let manifest = SignatureArtifact::compose(&manifest.descriptor(), &bundle);
            found.push(Signature { manifest: manifest.map_err(|error| invalid(&error))?, bundle });
        }
    }
    Ok(found)
}

/// The name as other programs write it, without a scheme.
fn whole_name(reference: &Reference) -> String {
    format!("{}/{}:{}", reference.host(), reference.repository(), reference.tag())
}

/// The end of an archive: two blocks of zeros.
const END: [u8; 1024] = [0; 1024];

/// Writes what the layout lists. One model is open at a time.
struct Source<'s> {
    client: &'s Client,
    layout: &'s Layout,
    open: RefCell<Option<(usize, OpenModel)>>,
}

impl Source<'_> {
    fn write_file(&self, global: &Global, params: &Params, bar: &Bar) -> Result<(), ErrorBody> {
        let size = self.layout.archive_size();
        // The digest only tells files of one plan apart.
        let file = NewFile { index: 0, path: "archive".to_owned(), digest: Digest::of(b""), size };
        let plan = ExportPlan::new(Some(&params.output), &[file])?;
        let checked = Checked::new(plan, params.force)?;
        let write = |planned: &NewFile, out: &File, name: &str, _: &Bar| {
            self.write_archive(out, name, bar).map(|()| planned.digest)
        };
        write_checked(global, params.force, checked, write, || Ok(())).map(|_written| ())
    }

    fn write_folder(&self, global: &Global, params: &Params, bar: &Bar) -> Result<(), ErrorBody> {
        let file = |(index, file): (usize, &LayoutFile)| NewFile {
            index,
            path: file.path.clone(),
            digest: file.digest,
            size: file.size,
        };
        let files: Vec<NewFile> = self.layout.files.iter().enumerate().map(file).collect();
        let plan = ExportPlan::new(Some(&params.output), &files)?;
        let checked = match params.force {
            true => Checked::new(plan, true)?,
            false => Checked::comparing(global, plan)?,
        };
        let mut done = 0_u64;
        let write = |planned: &NewFile, out: &File, name: &str, _: &Bar| {
            let file = self.layout.files.get(planned.index);
            let file = file.ok_or_else(|| internal("save: no such file"))?;
            self.write_content(file, out, name)?;
            done = done.saturating_add(file.size);
            bar.set(done, self.layout.size());
            Ok(file.digest)
        };
        write_checked(global, params.force, checked, write, || Ok(())).map(|_written| ())
    }

    fn write_archive(&self, out: impl Write, name: &str, bar: &Bar) -> Result<(), ErrorBody> {
        let failed = |error: io::Error| file_error(name, &error);
        let mut out = CountingWriter { out, written: 0, size: self.layout.archive_size(), bar };
        for file in &self.layout.files {
            let header = tar_header(&file.path, file.size).ok_or_else(|| internal("save: a long path"))?;
            out.write_all(&header).map_err(failed)?;
            self.write_content(file, &mut out, name)?;
            let rest = file.size % TarReader::BLOCK_BYTES;
            if let Some(padding) = TarReader::BLOCK_BYTES.checked_sub(rest).filter(|_| rest > 0) {
                io::copy(&mut io::Read::take(io::repeat(0), padding), &mut out).map_err(failed)?;
            }
        }
        out.write_all(&END).map_err(failed)?;
        out.flush().map_err(failed)
    }

    fn write_content(&self, file: &LayoutFile, mut out: impl Write, name: &str) -> Result<(), ErrorBody> {
        let number = match &file.content {
            Content::Bytes(bytes) => {
                return out.write_all(bytes).map_err(|error| file_error(name, &error));
            }
            Content::OfModel(number) | Content::Blob(number, _) => *number,
        };
        let mut open = self.open.borrow_mut();
        let is_open = open.as_ref().is_some_and(|(of, _)| *of == number);
        if !is_open {
            let (reference, manifest) =
                self.layout.models.get(number).ok_or_else(|| internal("save: no such model"))?;
            let model = match self.layout.is_delta {
                true => delta::open(self.client, reference)?,
                false => open_component(self.client, reference, None)?,
            };
            if model.digest() != manifest.digest() {
                let message = format!("{}: is another model than before", reference.short());
                return Err(ErrorBody::new(ErrorCode::Busy, message).with_hint("save it again"));
            }
            *open = Some((number, model));
        }
        let (_, model) = open.as_ref().ok_or_else(|| internal("save: no model is open"))?;
        if let Content::Blob(_, fd) = &file.content {
            return write_blob(model, *fd, file.digest, out, name);
        }
        let layer = model.layers().iter().position(|layer| layer.digest == file.digest);
        let layer = layer.ok_or_else(|| not_as_published(model.name(), file.digest))?;
        let hidden = Bar::new("", 0, true);
        write_layer(model, layer, out, name, &hidden)
    }
}

fn write_blob(
    model: &OpenModel,
    fd: u32,
    digest: Digest,
    mut out: impl Write,
    name: &str,
) -> Result<(), ErrorBody> {
    let content = model.blob_bytes(fd).map_err(|error| ErrorBody::new(error.code(), error.to_string()))?;
    let found = Digest::of(&content);
    if found != digest {
        let message = format!(
            "{}: wrong digest: expected {digest}, found {found}; the stored data is damaged",
            model.name()
        );
        return Err(ErrorBody::new(ErrorCode::Corrupt, message).with_hint("pull or import the model again"));
    }
    out.write_all(&content).map_err(|error| file_error(name, &error))
}

/// Shows how far an archive is. Files are hashed while they are read, so it need not hash again.
struct CountingWriter<'b, W> {
    out: W,
    written: u64,
    size: u64,
    bar: &'b Bar,
}

impl<W: Write> Write for CountingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.out.write(bytes)?;
        self.written = self.written.saturating_add(length as u64);
        self.bar.set(self.written, self.size);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn not_as_published(model: &str, file: Digest) -> ErrorBody {
    let message = format!(
        "{model}: cannot be saved: file {file} was stored decompressed, and its compressed form cannot be made again"
    );
    let body = ErrorBody::new(ErrorCode::InvalidRequest, message);
    body.with_hint(format!("`blobd export {model}` writes the files that were in it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, layers: &[&str]) -> (Reference, Manifest) {
        let descriptor = |content: &&str| Descriptor {
            media_type: MediaType::new(MediaType::OLLAMA_MODEL),
            digest: Digest::of(content.as_bytes()),
            size: content.len() as u64,
        };
        let config = Descriptor { media_type: MediaType::new(MediaType::DOCKER_CONFIG), ..descriptor(&"{}") };
        let manifest = Manifest::compose(config, layers.iter().map(descriptor).collect()).unwrap();
        (name.parse().unwrap(), manifest)
    }

    #[test]
    fn layout_has_each_file_once_and_the_index_first() {
        let models = vec![model("a:q4", &["weights", "template"]), model("b:q4", &["weights", "other"])];
        let layout = Layout::of(models, &[]).unwrap();
        let paths: BTreeSet<&str> = layout.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!((layout.files.len(), paths.len()), (2 + 2 + 4, 8));
        assert_eq!(layout.files[0].path, "oci-layout");
        assert_eq!(layout.files[1].path, "index.json");
        let Content::Bytes(index) = &layout.files[1].content else { panic!("{layout:?}") };
        let (listed, _) = ManifestIndex::parse_layout(index).unwrap();
        // With one tag, the whole names tell them apart.
        assert_eq!(listed[1].ref_name.as_deref(), Some("registry.ollama.ai/library/b:q4"));
        assert_eq!(listed[1].name, listed[1].ref_name);
        let single = Layout::of(vec![model("a:q4", &["weights"])], &[]).unwrap();
        let Content::Bytes(index) = &single.files[1].content else { panic!("{single:?}") };
        let (listed, _) = ManifestIndex::parse_layout(index).unwrap();
        assert_eq!(listed[0].ref_name.as_deref(), Some("q4"));
    }
}
