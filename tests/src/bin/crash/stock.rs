//! The models that clients import and pull, and the registry on loopback that offers them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault, Request};

use crate::Outcome;
use crate::random::Random;

/// A model file that lies ready for import and can be pulled.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Where it lies.
    pub(crate) path: PathBuf,
    /// Where it can be pulled from.
    pub(crate) source: String,
    /// The SHA-256 of its bytes.
    pub(crate) digest: String,
    /// How many they are.
    size: usize,
}

/// Files and a registry that has the same.
#[derive(Debug)]
pub(crate) struct Shelf {
    registry: FakeRegistry,
    folder: PathBuf,
}

/// What the clients of a daemon work with.
#[derive(Debug)]
pub(crate) struct Stock {
    shelf: Shelf,
    /// What everybody imports and pulls.
    pub(crate) shared: Vec<Sample>,
    /// What only the client of this number pulls, so that the connections that are cut are its own.
    /// They are relatives of the last of the shared ones, and large enough that what they have in
    /// common with it is taken from the store.
    pub(crate) own: Vec<Sample>,
    /// A model that nobody has.
    pub(crate) probe: Sample,
}

/// How many clients have models of their own.
const OWNERS: usize = 3;

impl Shelf {
    /// With nothing on it yet; files go to `folder`.
    ///
    /// # Errors
    /// When there are no ports to listen on.
    pub(crate) fn new(folder: &Path) -> Outcome<Self> {
        Ok(Self { registry: FakeRegistry::start()?, folder: folder.to_path_buf() })
    }

    /// Adds a model.
    ///
    /// # Errors
    /// When there is no room for it.
    pub(crate) fn add(&self, name: &str, model: &ModelFile) -> Outcome<Sample> {
        const MODEL: &str = "application/vnd.ollama.image.model";
        let (bytes, path) = (model.bytes(), self.folder.join(format!("sample-{name}.gguf")));
        std::fs::write(&path, &bytes)?;
        let reference = format!("library/sample-{name}:latest");
        self.registry.add_model(&reference, b"{}", &[(MODEL, &bytes)])?;
        let source = self.registry.name(&reference);
        Ok(Sample { path, source, digest: sha256(&bytes), size: bytes.len() })
    }

    /// The next pull of a model breaks somewhere, and its registry has it no more after that.
    pub(crate) fn break_pull(&self, sample: &Sample, random: &mut Random) {
        self.break_after(sample, random.below(sample.size));
    }

    /// The same at half of its length.
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

    /// The next requests for a model are answered slowly, so that more happens meanwhile.
    pub(crate) fn slow_down(&self, sample: &Sample) {
        const REQUESTS: usize = 2;
        const PIECE_BYTES: usize = 48 << 10;
        let pause = std::time::Duration::from_millis(4);
        self.registry.add_fault(&content(sample), REQUESTS, Fault::Slow(PIECE_BYTES, pause));
    }

    /// How many requests there were for a part of a model and not for its beginning.
    pub(crate) fn resumed_count(&self) -> usize {
        let range = |request: &Request| request.header("range").unwrap_or_default().to_owned();
        let is_later = |range: &String| range.starts_with("bytes=") && !range.starts_with("bytes=0-");
        self.registry.requests().iter().map(range).filter(is_later).count()
    }

    /// Everything can be had again.
    pub(crate) fn mend(&self, sample: &Sample) {
        self.registry.clear_faults_of(&content(sample));
    }
}

/// What every request for its bytes has in its path.
fn content(sample: &Sample) -> String {
    format!("/cdn/sha256:{}", sample.digest)
}

impl Stock {
    /// Models that share all tensors but one, in three families that share none.
    ///
    /// # Errors
    /// When there is no room for them, or no port for the registry.
    pub(crate) fn new(folder: &Path) -> Outcome<Arc<Self>> {
        let shelf = Shelf::new(folder)?;
        let mut shared = Vec::new();
        for family in 1..=2 {
            let original = ModelFile::dense(family);
            let relatives = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"];
            let relatives = relatives.map(|tensor| original.clone().with_changed(tensor));
            for (number, model) in [original].iter().chain(&relatives).enumerate() {
                shared.push(shelf.add(&format!("{family}-{number}"), model)?);
            }
        }
        let large = ModelFile::dense_of(3, 3, 128);
        let changed = |owner: usize| large.clone().with_changed(&format!("blk.{owner}.ffn_up.weight"));
        let add = |owner| shelf.add(&format!("own-{owner}"), &changed(owner));
        let own = (0..OWNERS).map(add).collect::<Outcome<_>>()?;
        shared.push(shelf.add("large", &large)?);
        let probe = shelf.add("probe", &ModelFile::dense(9))?;
        Ok(Arc::new(Self { shelf, shared, own, probe }))
    }

    /// Where all of it can be had.
    pub(crate) const fn shelf(&self) -> &Shelf {
        &self.shelf
    }
}
