//! Opens files, on threads of its own. Each model and each file is opened once at the daemon, however many handles there
//! are.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError, Weak};
use std::{io, thread};

use blobd_client::error::ClientError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use tracing_mutex::stdsync::Mutex;

use super::error::OpenError;
use super::file::OpenFile;
use super::tree::{Content, LayerSource};
use crate::{Client, Digest};

#[derive(Debug)]
pub(super) struct Opener {
    client: Client,
    models: Table<(Digest, Box<str>), OpenModel>,
    files: Table<u64, OpenFile>,
}

type Table<K, T> = Mutex<HashMap<K, Weak<T>>>;

impl Opener {
    pub(super) fn new(client: Client) -> Self {
        Self { client, models: Mutex::default(), files: Mutex::default() }
    }

    /// Opens the file with this inode. Tries all models that contain the layer, because some may have been
    /// removed since they were listed; fails with the error of the last one.
    pub(super) fn open(&self, inode: u64, content: &Content) -> Result<Arc<OpenFile>, OpenError> {
        if let Some(file) = self.opened(inode) {
            return Ok(file);
        }
        let file = match content {
            Content::Bytes(bytes) => OpenFile::of_bytes(Arc::clone(bytes)),
            Content::Layer(digest, sources) => {
                let mut tried = Err(OpenError::Removed);
                for source in sources {
                    tried = self.open_layer(*digest, source);
                    if tried.is_ok() {
                        break;
                    }
                }
                tried?
            }
        };
        let file = Arc::new(file);
        remember(&self.files, inode, &file);
        Ok(file)
    }

    pub(super) fn opened(&self, inode: u64) -> Option<Arc<OpenFile>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).get(&inode)?.upgrade()
    }

    fn open_layer(&self, digest: Digest, source: &LayerSource) -> Result<OpenFile, OpenError> {
        let model = self.model(source)?;
        // The tag may name another model now.
        OpenFile::of_layer(model, digest).ok_or(OpenError::Removed)
    }

    fn model(&self, source: &LayerSource) -> Result<Arc<OpenModel>, ClientError> {
        let key = (source.manifest, source.component.clone());
        let known =
            self.models.lock().unwrap_or_else(PoisonError::into_inner).get(&key).and_then(Weak::upgrade);
        if let Some(model) = known {
            return Ok(model);
        }
        let params = OpenParams {
            reference: source.reference.clone(),
            tensors: TensorSelection::None,
            component: Some(source.component.to_string()),
            files: FileSelection::All,
            purpose: OpenPurpose::Mount,
        };
        let model = Arc::new(self.client.open_with(&params)?);
        remember(&self.models, (model.digest(), source.component.clone()), &model);
        Ok(model)
    }
}

fn remember<K: std::hash::Hash + Eq, T>(table: &Table<K, T>, key: K, value: &Arc<T>) {
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    table.retain(|_, known| known.strong_count() > 0);
    table.insert(key, Arc::downgrade(value));
}

/// Opening a model takes milliseconds; more threads would only wait for the daemon's disk.
const THREADS: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

/// The threads end when this is dropped.
#[derive(Debug)]
pub(super) struct Workers(Sender<Work>);

impl Workers {
    pub(super) fn start() -> io::Result<Self> {
        let (sender, waiting) = channel();
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..THREADS {
            let waiting = Arc::clone(&waiting);
            thread::Builder::new().name("mount-open".to_owned()).spawn(move || work(&waiting))?;
        }
        Ok(Self(sender))
    }

    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        // Cannot fail: the threads live as long as the sender.
        let _ = self.0.send(Box::new(work));
    }
}

fn work(waiting: &Mutex<Receiver<Work>>) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(next) = next else { return };
        next();
    }
}
