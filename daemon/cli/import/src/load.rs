//! `blobd load`: stores the models of an OCI image layout, such as one that `blobd save` has written.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{client_error, connect_or_create};
use blobd_cli_common::model_name::parse_new_name;
use blobd_cli_common::output::{human_bytes, print_text, printable};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, file_error, internal, usage};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams};
use blobd_store_format::delta::{Delta, DeltaError};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::index::LayoutModel;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use clap::Args;
use serde::Serialize;

use crate::delta_source::DeltaSource;
use crate::import::summary;
use crate::layout_source::{LayoutSource, ReadModel};
use crate::layout_stream::{FilePipe, LayoutStream, OpenedStream};
use crate::{Client, Digest, ErrorBody, ErrorCode};

/// Store the models of an archive or folder that `blobd save` has written
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd load models.tar
  blobd load models/ --list                           the models in it; stores nothing
  blobd load tiny.tar --name tiny:copy
  ssh other blobd save llama3:8b -o - | blobd load -
  blobd load delta.tar                                of `save --given`; the rest is in this store

Other programs write such OCI image layouts too: skopeo, oras, crane. All digests are checked.
From a pipe, files are stored as they come; a delta, and an archive whose index does not come
first, are copied to TMPDIR.")]
pub struct Params {
    /// The archive or the folder, or - for standard input
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Name the only model of the layout [default: as it was saved]
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace other models that have the names now
    #[arg(short, long)]
    force: bool,
    /// List the models of the layout, and store nothing
    #[arg(short, long)]
    list: bool,
}

/// A model of the layout, as it is listed.
#[derive(Debug, Serialize)]
struct ListedModel {
    name: String,
    digest: Digest,
    /// The size of all its files; of a delta, of its parts.
    size: u64,
}

/// What there is at the path.
enum Layout {
    Source(LayoutSource),
    Stream(Box<LayoutStream>),
}

/// Stores the models, or lists them. One with a fault does not stop the others.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let bar = Bar::new("reading", 0, global.hides_progress());
    let layout = open(global, &params.path, &bar);
    let layout = match layout {
        Ok(Layout::Stream(stream)) if params.list => {
            let models = stream.into_checked_models();
            bar.clear();
            return models.and_then(|models| list(global, params, models));
        }
        layout => layout,
    };
    bar.clear();
    let layout = layout?;
    let models = match &layout {
        Layout::Source(source) => source.models()?,
        Layout::Stream(stream) => stream.models().to_vec(),
    };
    if params.name.is_some() && models.len() != 1 {
        return Err(usage(format!("--name: names one model, but the layout has {}", models.len())));
    }
    if params.list {
        return list(global, params, models);
    }
    let connected = connect_or_create(global)?;
    let mut from = match layout {
        Layout::Source(source) => Files::Source(source),
        Layout::Stream(stream) => Files::Stream(Some(stream)),
    };
    let last = models.iter().rposition(|(_, manifest)| manifest.is_ok());
    let mut batch = Batch::new(global, models.len());
    for (number, (listed, manifest)) in models.into_iter().enumerate() {
        let name = name_of(params, &listed);
        let label = name.as_ref().map_or_else(|_| listed.manifest.digest.to_string(), Reference::short);
        let load = |manifest: Manifest| {
            let model = Model { global, params, name: &name?, manifest: &manifest, number };
            match &mut from {
                Files::Source(source) => match delta_of(&manifest)? {
                    Some(delta) => {
                        let delta = DeltaSource::new(&connected.client, source, (&manifest, delta), &label)?;
                        Model { manifest: delta.manifest(), ..model }.load_delta(
                            &connected.client,
                            source,
                            &delta,
                        )
                    }
                    None => model.load(&connected.client, source),
                },
                Files::Stream(stream) => model.load_streamed(&connected.client, stream, last == Some(number)),
            }
        };
        if let Some(imported) = batch.add(&label, manifest.and_then(load))
            && !global.hides_reports()
        {
            print_text(&summary(imported))?;
        }
    }
    batch.finish("loaded", ["model was not loaded", "models were not loaded"])
}

/// Where the files of the models come from.
enum Files {
    Source(LayoutSource),
    /// `None` if its rest is not read any more.
    Stream(Option<Box<LayoutStream>>),
}

/// Opens what there is at the path. Of a stream, reads what tells its models.
fn open(global: &Global, path: &Path, bar: &Bar) -> Result<Layout, ErrorBody> {
    let (name, file) = if path == Path::new("-") {
        let name = "standard input".to_owned();
        let stdin = rustix::io::dup(io::stdin()).map_err(|error| file_error(&name, &error.into()))?;
        (name, File::from(stdin))
    } else {
        let name = path.display().to_string();
        let failed = |error: io::Error| file_error(&name, &error);
        if path.metadata().map_err(failed)?.is_dir() {
            return LayoutSource::from_folder(path).map(Layout::Source);
        }
        let file = File::open(path).map_err(failed)?;
        (name, file)
    };
    let metadata = file.metadata().map_err(|error| file_error(&name, &error))?;
    if metadata.is_file() {
        return LayoutSource::from_archive(name, file).map(Layout::Source);
    }
    Ok(match LayoutStream::open(global, name, file, bar)? {
        OpenedStream::Live(stream) => Layout::Stream(stream),
        OpenedStream::Copied(source) => Layout::Source(source),
    })
}

fn list(global: &Global, params: &Params, models: Vec<ReadModel>) -> Result<(), ErrorBody> {
    let mut batch = Batch::new(global, models.len());
    for (listed, manifest) in models {
        let model = || {
            let (name, manifest) = (name_of(params, &listed)?.short(), manifest?);
            let digest = delta_of(&manifest)?.map_or(manifest.digest(), |delta| delta.manifest.digest);
            Ok(ListedModel { name, digest, size: manifest.size() })
        };
        if let Some(ListedModel { name, digest, size }) = batch.add(&listed.manifest.digest, model())
            && !global.json
        {
            print_text(&format!("{} {}: {}\n", printable(name), digest.short(), human_bytes(*size)))?;
        }
    }
    batch.finish("models", ["model cannot be loaded", "models cannot be loaded"])
}

/// The requested name, or the one in the layout. A layout that other programs wrote may have only a tag; then the model is
/// named after the file.
fn name_of(params: &Params, listed: &LayoutModel) -> Result<Reference, ErrorBody> {
    if let Some(name) = &params.name {
        return Ok(name.clone());
    }
    let whole = listed.name.iter().chain(listed.ref_name.iter().filter(|name| name.contains([':', '/'])));
    if let Some(name) = whole.into_iter().find_map(|name| name.parse().ok()) {
        return Ok(name);
    }
    let tag = listed.ref_name.as_deref().unwrap_or(Reference::DEFAULT_TAG);
    let stem = params.path.file_stem().and_then(|stem| stem.to_str()).filter(|stem| *stem != "-");
    let named = stem.and_then(|stem| format!("{}:{tag}", stem.to_lowercase()).parse().ok());
    named.ok_or_else(|| {
        let digest = listed.manifest.digest;
        usage(format!("model {digest}: has no name in the layout")).with_hint("--name gives it one")
    })
}

fn delta_of(manifest: &Manifest) -> Result<Option<Delta>, ErrorBody> {
    let invalid = |error: DeltaError| ErrorBody::new(ErrorCode::InvalidInput, error.to_string());
    Delta::in_manifest(manifest).map_err(invalid)
}

#[derive(Clone, Copy)]
struct Model<'m> {
    global: &'m Global,
    params: &'m Params,
    name: &'m Reference,
    manifest: &'m Manifest,
    /// Its place in the layout.
    number: usize,
}

/// Where a file of a model is.
#[derive(Clone, Copy)]
enum Place {
    /// In a file, from this offset on.
    At(u64),
    /// It follows in the stream.
    Stream,
}

impl Model<'_> {
    /// The files that the manifest names, each once.
    fn files(&self) -> Vec<&Descriptor> {
        let mut seen = BTreeSet::new();
        self.manifest.files().filter(|file| seen.insert(file.digest)).collect()
    }

    fn load(&self, client: &Client, source: &LayoutSource) -> Result<Imported, ErrorBody> {
        let files = self.files();
        let places: Vec<Place> = files.iter().map(|file| Place::At(source.offset_of(file.digest))).collect();
        let open = |number: usize| {
            let file = files.get(number).ok_or_else(|| internal("load: no such file"))?;
            source.open_blob(file.digest, file.size)
        };
        self.import(client, source.signatures(self.manifest.digest())?, &places, open)
    }

    /// Loads files that a thread rebuilds, each in a pipe, and those that the delta has whole.
    fn load_delta(
        &self,
        client: &Client,
        source: &LayoutSource,
        delta: &DeltaSource<'_>,
    ) -> Result<Imported, ErrorBody> {
        let files = self.files();
        let signatures = source.signatures(self.manifest.digest())?;
        let places: Vec<Place> =
            files.iter().map(|file| delta.offset_of(file).map_or(Place::Stream, Place::At)).collect();
        thread::scope(|scope| {
            let (to_feeder, pipes) = channel::<FilePipe>();
            let feeder = scope.spawn(move || {
                pipes.iter().try_for_each(|FilePipe { digest, end, .. }| delta.write(digest, end))
            });
            let open = |number: usize| {
                let (Some(file), Some(place)) = (files.get(number), places.get(number)) else {
                    return Err(internal("load: no such file"));
                };
                if matches!(place, Place::At(_)) {
                    return source.open_blob(file.digest, file.size);
                }
                let (reader, end) = io::pipe().map_err(internal)?;
                // If the thread has failed, the daemon finds that the file is too short.
                let _ = to_feeder.send(FilePipe { digest: file.digest, size: file.size, end });
                Ok(OwnedFd::from(reader))
            };
            let imported = self.import(client, signatures, &places, open);
            drop(to_feeder);
            let fed = feeder.join().map_err(|_panic| internal("load: a thread has failed"))?;
            match (imported, fed) {
                // A pipe that nobody reads is not the reason.
                (Err(_), Err(of_source)) if of_source.code != ErrorCode::Internal => Err(of_source),
                (imported, _) => imported,
            }
        })
    }

    /// Loads the files while they arrive: each is a pipe, and a thread writes into one after the other.
    fn load_streamed(
        &self,
        client: &Client,
        from: &mut Option<Box<LayoutStream>>,
        is_last: bool,
    ) -> Result<Imported, ErrorBody> {
        let mut stream = from.take().ok_or_else(|| internal("load: the stream is not read any more"))?;
        let files = self.files();
        let signatures = stream.signatures(self.manifest.digest());
        let places: Vec<Place> = files
            .iter()
            .map(|file| match stream.copied(file.digest) {
                Some(member) => Place::At(member.offset),
                None if file.size == 0 => Place::At(0),
                None => Place::Stream,
            })
            .collect();
        let pipe_count = places.iter().filter(|place| matches!(place, Place::Stream)).count();
        let ready = stream.begin(self.number).and_then(|()| match is_last && pipe_count == 0 {
            true => stream.finish(),
            false => Ok(()),
        });
        let copied = ready.and_then(|()| stream.copied_file());
        let copied = match copied {
            Ok(copied) => copied,
            Err(error) => {
                *from = Some(stream);
                return Err(error);
            }
        };
        let last = if is_last { pipe_count.checked_sub(1) } else { None };
        let (to_feeder, pipes) = channel();
        let (done, fed) = channel();
        let bar = Bar::new("", 0, true);
        thread::spawn(move || {
            let result = stream.feed(&pipes, last, &bar);
            drop(pipes);
            // Fails if nobody waits for the rest of the stream.
            let _ = done.send((stream, result));
        });
        let mut opened = BTreeSet::new();
        let open = |number: usize| {
            let (Some(file), Some(place)) = (files.get(number), places.get(number)) else {
                return Err(internal("load: no such file"));
            };
            if matches!(place, Place::At(_)) {
                let empty = || tempfile::tempfile().map_err(internal);
                let file = copied.as_ref().filter(|_| file.size > 0);
                let file = file.map_or_else(empty, |copied| copied.try_clone().map_err(internal));
                return file.map(OwnedFd::from);
            }
            if !opened.insert(number) {
                let message = "load: the daemon was stopped, and what came from the pipe is lost";
                return Err(ErrorBody::new(ErrorCode::Busy, message).with_hint("load it again"));
            }
            let (reader, end) = io::pipe().map_err(internal)?;
            // If the stream has failed, the daemon finds that the file is too short, and its error is replaced below.
            let _ = to_feeder.send(FilePipe { digest: file.digest, size: file.size, end });
            Ok(OwnedFd::from(reader))
        };
        let imported = self.import(client, signatures, &places, open);
        drop(to_feeder);
        // The thread may wait for bytes that never come.
        let waits = if imported.is_err() && is_last { Duration::from_secs(1) } else { Duration::MAX };
        let Ok((stream, result)) = fed.recv_timeout(waits) else { return imported };
        *from = Some(stream);
        match (imported, result) {
            (Err(_), Err(of_stream)) => Err(of_stream),
            (imported, _) => imported,
        }
    }

    fn import(
        &self,
        client: &Client,
        signatures: Vec<String>,
        places: &[Place],
        open: impl FnMut(usize) -> Result<OwnedFd, ErrorBody>,
    ) -> Result<Imported, ErrorBody> {
        let Self { global, params, name, manifest, .. } = self;
        let listed = |(file, place): (&Descriptor, &Place)| ImportFile {
            path: layout::blob_name(file.digest),
            size: file.size,
            component: None,
            digest: Some(file.digest),
            was_read: false,
            offset: if let Place::At(offset) = place { *offset } else { 0 },
            stream: matches!(place, Place::Stream),
        };
        let request = ImportParams {
            name: Some((*name).clone()),
            force: params.force,
            files: self.files().into_iter().zip(places).map(listed).collect(),
            manifest: Some(String::from_utf8_lossy(manifest.raw()).into_owned()),
            signatures,
            ..ImportParams::new(params.path.display().to_string())
        };
        let bar = Bar::new(&name.short(), manifest.size(), global.hides_progress());
        let imported = client.import_listed(&request, open, |progress| bar.show(&progress));
        bar.clear();
        imported.map_err(client_error)
    }
}
