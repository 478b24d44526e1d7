//! Pull speed, compared with `curl` of the same file from the same server to the same disk.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_tests::model::{Dimensions, ModelFile};
use blobd_tests::registry::{BlobDelivery, FakeRegistry};

use crate::Setup;
use crate::balloon::Balloon;
use crate::measure::{
    Daemon, Outcome, Series, digest_of, digests_of_file_and_part, gib, header_bytes, mib,
    processor_time_of_children, run as run_command, timed,
};

/// The measurements of all rounds.
#[derive(Debug, Default)]
struct Times {
    /// `curl` to `/dev/null`: the speed of the server.
    ceiling: Series,
    hash: Series,
    /// The digests of the file and of its blobs.
    lanes: Series,
    curl: Series,
    curl_and_sync: Series,
    bound: Series,
    pull: Series,
    curl_processor: Series,
    pull_processor: Series,
    peak_rss_bytes: u64,
}

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    if !has_curl()? {
        println!("\npull: skipped: curl is not installed");
        return Ok(());
    }
    let directory = tempfile::tempdir_in(&setup.tmpfs)?;
    let file = directory.path().join("model.gguf");
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = ModelFile::llama("bench", dimensions).write_file(&file)?;
    println!("\npull of {:.2} GiB from a server on this machine", gib(size));
    let (offer, header) = (Offer::start(&file)?, header_bytes(&file)?);
    let mut times = Times::default();
    let _balloon = Balloon::inflate()?;
    // Deleted only at the end, for the same reason as in `import`.
    let (mut directories, mut daemons) = (Vec::new(), Vec::new());
    for round in 0..setup.rounds {
        times.ceiling.push(timed(|| fetch(&offer.layer_url(), Path::new("/dev/null")))?.0);
        times.hash.push(timed(|| digest_of(&file))?.0);
        times.lanes.push(timed(|| digests_of_file_and_part(&file, header))?.0);
        // The order alternates, because the first run may make the second one faster or slower.
        let curl_first = round % 2 == 0;
        for curl_is_next in [curl_first, !curl_first] {
            rustix::fs::sync();
            if curl_is_next {
                let directory = tempfile::tempdir_in(&setup.disk)?;
                times.fetch(&offer, &directory.path().join("copy"))?;
                directories.push(directory);
            } else {
                let mut daemon = Daemon::start(&setup.blobd, &setup.disk)?;
                times.pull(&offer, &setup.blobd, &daemon)?;
                daemon.kill()?;
                daemons.push(daemon);
            }
        }
        times.add_bound()?;
    }
    times.print(size);
    Ok(())
}

impl Times {
    fn fetch(&mut self, offer: &Offer, target: &Path) -> Outcome<()> {
        let before = processor_time_of_children()?;
        let fetched = timed(|| fetch(&offer.layer_url(), target))?.0;
        self.curl_processor.push(processor_time_of_children()?.saturating_sub(before));
        let synced = timed(|| run_command(Command::new("sync").arg(target)))?.0;
        self.curl.push(fetched);
        self.curl_and_sync.push(fetched + synced);
        Ok(())
    }

    fn pull(&mut self, offer: &Offer, blobd: &Path, daemon: &Daemon) -> Outcome<()> {
        // The command is a child that has been waited for, the daemon is still running.
        let spent = || Outcome::Ok(processor_time_of_children()? + daemon.processor_time()?);
        let before = spent()?;
        self.pull.push(timed(|| daemon.pull(blobd, &offer.model()))?.0);
        self.pull_processor.push(spent()?.saturating_sub(before));
        self.peak_rss_bytes = self.peak_rss_bytes.max(daemon.peak_rss_bytes()?);
        Ok(())
    }

    /// The minimum time on this machine: `curl`'s processor time and one pass for both digests, divided by
    /// the cores, but at least the time of the whole file's digest on one core, and at least `curl`'s time.
    fn add_bound(&mut self) -> Outcome<()> {
        let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
        let (processor, hash) = (self.curl_processor.last(), self.hash.last());
        self.bound.push(((processor + self.lanes.last()) / cores).max(hash).max(self.curl.last()));
        Ok(())
    }

    fn print(&self, size: u64) {
        for (what, series) in [
            ("curl to /dev/null       ", &self.ceiling),
            ("one digest              ", &self.hash),
            ("both digests            ", &self.lanes),
            ("disk: curl              ", &self.curl),
            ("disk: curl + sync       ", &self.curl_and_sync),
            ("disk: bound             ", &self.bound),
            ("disk: blobd pull        ", &self.pull),
        ] {
            let seconds = series.seconds();
            println!("  {what}   {seconds:8.2} s  {:6.2} GiB/s", gib(size) / seconds);
        }
        let [curl, pull] = [&self.curl_processor, &self.pull_processor].map(Series::seconds);
        let limit = 1.2f64.mul_add(curl, self.lanes.seconds());
        println!(
            "  processor time             {pull:8.2} s, curl {curl:.2} s (limit {limit:.2} s: both digests and 1.2 of curl)"
        );
        println!("  speed against curl         {:8.2}    (floor 0.9)", self.pull.ratio(&self.curl));
        println!("  speed against curl + sync  {:8.2}", self.pull.ratio(&self.curl_and_sync));
        println!("  speed against bound        {:8.2}", self.pull.ratio(&self.bound));
        println!("  peak RSS of the daemon     {:8.1} MiB (limit 96)", mib(self.peak_rss_bytes));
    }
}

/// A registry with one model. The kernel sends its file from the page cache, over connections that stay open.
pub(crate) struct Offer {
    registry: FakeRegistry,
    layer: Digest,
}

impl Offer {
    const MODEL: &str = "library/bench";
    const CONFIG: &[u8] = br#"{"model_format":"gguf","model_family":"llama"}"#;

    /// A model whose one layer is the file at `path`.
    pub(crate) fn start(path: &Path) -> Outcome<Self> {
        let (registry, layer) = (FakeRegistry::start()?, digest_of(path)?);
        registry.keep_connections();
        registry.set_blob_delivery(BlobDelivery::Direct);
        registry.add_blob_file(layer, path)?;
        let descriptor = |media_type: &str, digest, size| Descriptor {
            media_type: MediaType::new(media_type),
            digest,
            size,
        };
        let config = registry.add_blob(Self::CONFIG);
        let config = descriptor(MediaType::DOCKER_CONFIG, config, Self::CONFIG.len() as u64);
        let weights = descriptor(MediaType::OLLAMA_MODEL, layer, path.metadata()?.len());
        registry.add_manifest(Self::MODEL, Manifest::compose(config, vec![weights])?.raw());
        Ok(Self { registry, layer })
    }

    /// The reference to pull.
    fn model(&self) -> String {
        self.registry.name(Self::MODEL)
    }

    pub(crate) const fn layer(&self) -> Digest {
        self.layer
    }

    pub(crate) fn layer_url(&self) -> String {
        format!("{}/v2/{}/blobs/{}", self.registry.url(), Self::MODEL, self.layer)
    }
}

/// Fetches a file with `curl`, which prints only errors and uses no proxy.
pub(crate) fn fetch(url: &str, target: &Path) -> Outcome<()> {
    let mut curl = Command::new("curl");
    run_command(curl.args(["-fsS", "--noproxy", "*", "-o"]).arg(target).arg(url))
}

pub(crate) fn has_curl() -> Outcome<bool> {
    match Command::new("curl").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) => Ok(status.success()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}
