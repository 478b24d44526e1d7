//! Pulls in this process, from a registry on loopback that has the files of [`crate::samples`].
//!
//! Each thread has its own registry, so that the faults of one test do not affect others.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blobd_client::protocol::request::{PullParams, VerifyParams};
use blobd_client::protocol::upkeep::Verified;
use blobd_registry::{RegistryClient, RegistryPolicy, RetryPolicy};
use blobd_server::ops::{self, OpError};
use blobd_server::transfer::Transfers;
use blobd_store::Store;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::registry::{FakeRegistry, Fault};
use crate::samples::{EMPTY, NAMES, PACKED, WHOLE, files, reference};
use crate::temp_dirs::tmpfs_directory;
use crate::verbs::{InProcess, Verbs as _};

thread_local! {
    static REGISTRY: PullSource = PullSource::start();
}

/// A registry that has the model of every file, and its client.
#[derive(Debug)]
struct PullSource {
    registry: FakeRegistry,
    client: RegistryClient,
}

/// Pulls the model of a file, by its number.
///
/// # Errors
/// The error that a client would get.
pub fn pull(store: &Arc<Store>, file: usize, name: &Reference) -> Result<(), OpError> {
    REGISTRY.with(|source| source.pull(store, file, name))
}

/// The same after a first pull that was interrupted in the middle.
///
/// # Errors
/// The error that a client would get.
pub fn pull_in_two_parts(store: &Arc<Store>, file: usize, name: &Reference) -> Result<(), OpError> {
    const GONE: u16 = 410;
    const REQUESTS_OF_A_PULL: usize = 1000;
    REGISTRY.with(|source| {
        let (digest, length) = (files()[file].digest, files()[file].bytes.len());
        let place = format!("/cdn/{digest}");
        source.registry.add_fault(&place, 1, Fault::CutAfter(length / 2));
        source.registry.add_fault(&place, REQUESTS_OF_A_PULL, Fault::Status(GONE));
        let _first = source.pull(store, file, name);
        source.registry.clear_faults();
        source.pull(store, file, name)
    })
}

/// Pulls the model of a file whose first copy is damaged in the middle.
///
/// # Errors
/// The error that a client would get.
pub fn pull_twice(store: &Arc<Store>, file: usize, name: &Reference) -> Result<(), OpError> {
    REGISTRY.with(|source| {
        let (digest, length) = (files()[file].digest, files()[file].bytes.len() as u64);
        // A pull that continues an interrupted one may already receive the second copy.
        if !store.content().partial_files().is_ok_and(|begun| begun.contains(&digest)) {
            source.registry.add_fault(&format!("/cdn/{digest}"), 1, Fault::FlipInFile(length / 2));
        }
        let pulled = source.pull(store, file, name);
        source.registry.clear_faults();
        pulled
    })
}

/// `verify --repair` of everything.
///
/// # Errors
/// The error that a client would get.
pub fn repair(store: &Arc<Store>) -> Result<Verified, OpError> {
    REGISTRY.with(|source| {
        let (events, _heard) = mpsc::channel(EVENTS_WAITING);
        let params = VerifyParams { reference: None, repair: true };
        ops::verify(
            store,
            &source.client,
            runtime().handle(),
            &ops::CallerPolicy::default(),
            &params,
            &events,
        )
    })
}

/// The capacity of the channel for events; further ones are dropped.
const EVENTS_WAITING: usize = 4;

impl PullSource {
    fn start() -> Self {
        let registry = FakeRegistry::start().unwrap();
        for (number, (manifest, config)) in models().iter().enumerate() {
            registry.add_manifest(&model(number), manifest.raw());
            registry.add_blob(files()[number].bytes.clone());
            registry.add_blob(config.clone());
        }
        let retry = RetryPolicy { backoff: Duration::from_millis(1), ..RetryPolicy::default() };
        let policy = RegistryPolicy { retry, ..RegistryPolicy::default() };
        let client = RegistryClient::new(&policy).unwrap();
        Self { registry, client }
    }

    fn pull(&self, store: &Arc<Store>, file: usize, name: &Reference) -> Result<(), OpError> {
        let (events, _heard) = mpsc::channel(EVENTS_WAITING);
        let source = self.registry.name(&model(file)).parse().unwrap();
        let params = PullParams { name: Some(name.clone()), force: true, ..PullParams::of_source(source) };
        let pull = ops::Pull {
            watch: None,
            arriving: None,
            gauge: None,
            store,
            registry: &self.client,
            transfers: &Transfers::default(),
            fetches: &ops::FetchLimit::default(),
            handle: runtime().handle(),
            requester: ops::Requester::own(),
            policy: &ops::CallerPolicy::default(),
            params: &params,
            events: &events,
        };
        ops::pull(pull).map(|_| ())
    }
}

/// The manifest and the configuration of each file's model, as an import of the file makes them: so an
/// imported and a pulled file are the same model.
fn models() -> &'static [(Manifest, Vec<u8>)] {
    static MODELS: OnceLock<Vec<(Manifest, Vec<u8>)>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let folder = tmpfs_directory();
        let verbs = InProcess::open(&folder.path().join("store"));
        let mut models: Vec<_> = (0..WHOLE).map(|file| imported(&verbs, folder.path(), file)).collect();
        let (manifest, config) = &models[EMPTY];
        let whole = Descriptor {
            media_type: MediaType::new("application/vnd.ollama.image.license"),
            digest: files()[WHOLE].digest,
            size: files()[WHOLE].bytes.len() as u64,
        };
        let layers = manifest.layers().iter().cloned().chain([whole]).collect();
        let config_file = manifest.files().next().unwrap().clone();
        let with_whole = Manifest::compose(config_file.clone(), layers).unwrap();
        let packed = Descriptor {
            media_type: MediaType::new("application/vnd.cncf.model.weight.v1.tar+gzip"),
            digest: files()[PACKED].digest,
            size: files()[PACKED].bytes.len() as u64,
        };
        let with_packed = Manifest::compose(config_file, vec![packed]).unwrap();
        let config = config.clone();
        models.extend([(with_whole, config.clone()), (with_packed, config)]);
        models
    })
}

fn imported(verbs: &InProcess, folder: &Path, file: usize) -> (Manifest, Vec<u8>) {
    let path = folder.join("model.gguf");
    fs::write(&path, &files()[file].bytes).unwrap();
    verbs.import_with(&path, Some(NAMES[0]), true).unwrap();
    let manifest = verbs.store.names().manifest(&reference(0)).unwrap();
    let config = manifest.files().next().unwrap();
    let mut bytes = Vec::new();
    verbs.store.content().open_blob(config.digest, config.size).unwrap().read_to_end(&mut bytes).unwrap();
    (manifest, bytes)
}

fn model(file: usize) -> String {
    format!("library/file-{file}:latest")
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    })
}
