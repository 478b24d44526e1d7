//! The models that clients import and pull, and the registry on loopback that offers them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault, Request};

use crate::Outcome;
use crate::random::Random;

/// A model, available as a file to import and from a registry.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// The file.
    pub(crate) path: PathBuf,
    /// The reference to pull.
    pub(crate) source: String,
    /// The SHA-256 of its bytes.
    pub(crate) digest: String,
    /// The size in bytes.
    size: usize,
}

/// A registry, and a directory with the same models as files.
#[derive(Debug)]
pub(crate) struct SampleRegistry {
    registry: FakeRegistry,
    folder: PathBuf,
}

/// The models that the clients of a daemon use.
#[derive(Debug)]
pub(crate) struct Samples {
    registry: SampleRegistry,
    /// Models that all clients import and pull.
    pub(crate) shared: Vec<Sample>,
    /// For each client a model that only it pulls, so that broken connections affect no other client. It is
    /// related to the last shared model, and large enough that a pull reuses tensors of that model.
    pub(crate) own: Vec<Sample>,
    /// A model that no client uses.
    pub(crate) probe: Sample,
}

/// The number of clients with a model of their own.
const CLIENTS: usize = 3;

impl SampleRegistry {
    /// Starts a registry without models; files are written to `folder`.
    ///
    /// # Errors
    /// When the registry cannot listen on a port.
    pub(crate) fn new(folder: &Path) -> Outcome<Self> {
        Ok(Self { registry: FakeRegistry::start()?, folder: folder.to_path_buf() })
    }

    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn add(&self, name: &str, model: &ModelFile) -> Outcome<Sample> {
        self.add_shards(name, std::slice::from_ref(model))
    }

    /// Adds a model of several files; the sample's file has one after the other.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn add_shards(&self, name: &str, shards: &[ModelFile]) -> Outcome<Sample> {
        const MODEL: &str = "application/vnd.ollama.image.model";
        let shards: Vec<_> = shards.iter().map(ModelFile::bytes).collect();
        let layers: Vec<_> = shards.iter().map(|shard| (MODEL, shard.as_slice())).collect();
        let (bytes, path) = (shards.concat(), self.folder.join(format!("sample-{name}.gguf")));
        std::fs::write(&path, &bytes)?;
        let reference = format!("library/sample-{name}:latest");
        self.registry.add_model(&reference, b"{}", &layers)?;
        let source = self.registry.name(&reference);
        Ok(Sample { path, source, digest: sha256(&bytes), size: bytes.len() })
    }

    /// Makes the next pull of a model fail at a random offset; after that the registry responds that it is
    /// gone.
    pub(crate) fn break_pull(&self, sample: &Sample, random: &mut Random) {
        self.break_after(sample, random.below(sample.size));
    }

    /// Makes the next pull of a model fail in the middle of the file.
    pub(crate) fn break_pull_in_the_middle(&self, sample: &Sample) {
        self.break_after(sample, sample.size / 2);
    }

    fn break_after(&self, sample: &Sample, bytes: usize) {
        const GONE: u16 = 410;
        const REQUESTS_OF_A_PULL: usize = 1000;
        let place = content(sample);
        self.registry.add_fault(&place, 1, Fault::CutAfter(bytes));
        self.registry.add_fault(&place, REQUESTS_OF_A_PULL, Fault::Status(GONE));
    }

    /// Slows the responses to the next requests for a model down, so that more operations overlap.
    pub(crate) fn slow_down(&self, sample: &Sample) {
        const REQUESTS: usize = 2;
        const PIECE_BYTES: usize = 48 << 10;
        let pause = std::time::Duration::from_millis(4);
        self.registry.add_fault(&content(sample), REQUESTS, Fault::Slow(PIECE_BYTES, pause));
    }

    /// The number of range requests that do not start at the first byte.
    pub(crate) fn resumed_count(&self) -> usize {
        let range = |request: &Request| request.header("range").unwrap_or_default().to_owned();
        let is_later = |range: &String| range.starts_with("bytes=") && !range.starts_with("bytes=0-");
        self.registry.requests().iter().map(range).filter(is_later).count()
    }

    /// Makes a model available again.
    pub(crate) fn clear_faults(&self, sample: &Sample) {
        self.registry.clear_faults_of(&content(sample));
    }
}

/// The common part of the paths of all requests for a model's bytes.
fn content(sample: &Sample) -> String {
    format!("/cdn/sha256:{}", sample.digest)
}

impl Samples {
    /// Three families of models and one with a tensor of more than 4 MiB. Within a family, models share all tensors but
    /// one; families share none.
    ///
    /// # Errors
    /// When the files cannot be written, or the registry cannot listen on a port.
    pub(crate) fn new(folder: &Path) -> Outcome<Arc<Self>> {
        let registry = SampleRegistry::new(folder)?;
        let mut shared = Vec::new();
        for family in 1..=2 {
            let original = ModelFile::dense(family);
            let relatives = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"];
            let relatives = relatives.map(|tensor| original.clone().with_changed(tensor));
            for (number, model) in [original].iter().chain(&relatives).enumerate() {
                shared.push(registry.add(&format!("{family}-{number}"), model)?);
            }
        }
        // An import writes the whole pages of such a tensor with direct I/O, which bypasses the page cache.
        let mut direct = ModelFile::dense(4);
        direct.add_noise(4, "direct", GgmlType::I8, &[(4 << 20) + 5000]);
        shared.push(registry.add("direct", &direct)?);
        let large = ModelFile::dense_of(3, 3, 128);
        let changed = |client: usize| large.clone().with_changed(&format!("blk.{client}.ffn_up.weight"));
        let add = |client| registry.add(&format!("own-{client}"), &changed(client));
        let own = (0..CLIENTS).map(add).collect::<Outcome<_>>()?;
        shared.push(registry.add("large", &large)?);
        let probe = registry.add("probe", &ModelFile::dense(9))?;
        Ok(Arc::new(Self { registry, shared, own, probe }))
    }

    /// The registry that has all these models.
    pub(crate) const fn registry(&self) -> &SampleRegistry {
        &self.registry
    }
}
