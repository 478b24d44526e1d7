//! Compares blobd with plain tools: `just bench`.
//!
//! Every number is a median over several rounds, in which blobd and its baseline alternate. Limits apply to
//! ratios, because absolute times on a shared machine mean little.

use std::error::Error;
use std::path::PathBuf;

mod balloon;
mod generated;
mod hash;
mod headers;
mod import;
mod measure;
mod mount;
mod open;
mod plain_map;
mod pull;
mod recipes;
mod safetensors;
mod scale;
mod serve;
mod touch;
mod verify;

/// Command-line options.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The binary under test.
    blobd: PathBuf,
    /// A directory on the disk to be measured.
    disk: PathBuf,
    /// A directory in memory.
    tmpfs: PathBuf,
    /// Transformer blocks of the model that is imported or pulled: 4 make 1.2 GiB, 31 make 4.4 GiB.
    blocks: u32,
    /// How often each measurement is taken.
    rounds: usize,
    /// Blobs and models of the store for `scale`; several sizes if absent.
    blobs: Option<u32>,
    models: Option<u32>,
    /// The only measurement to take. If absent, all that are not in [`ON_DEMAND`].
    only: Option<String>,
}

type Measurement = fn(&Setup) -> measure::Outcome<()>;

const MEASUREMENTS: [(&str, Measurement); 10] = [
    ("hash", hash::run),
    ("headers", headers::run),
    ("recipes", recipes::run),
    ("import", import::run),
    ("safetensors", safetensors::run),
    ("pull", pull::run),
    ("serve", serve::run),
    ("verify", verify::run),
    ("open", open::run),
    ("touch", touch::run),
];

/// Run only with `--only`: one needs a million inodes and some minutes, the other mounts and drops the page
/// cache, which needs root.
const ON_DEMAND: [(&str, Measurement); 2] = [("scale", scale::run), ("mount", mount::run)];

const USAGE: &str = "--disk=DIR, --tmpfs=DIR, --blocks=N, --rounds=N, --blobs=N, --models=N or \
                     --only=hash|headers|recipes|import|safetensors|pull|serve|verify|open|touch|scale|mount";

fn main() -> Result<(), Box<dyn Error>> {
    let setup = Setup::from_args(std::env::args().skip(1))?;
    println!(
        "blobd benchmark: {} blocks, {} rounds, medians; disk {}",
        setup.blocks,
        setup.rounds,
        setup.disk.display()
    );
    if let Some((_, measurement)) = ON_DEMAND.iter().find(|(name, _)| setup.only.as_deref() == Some(*name)) {
        return measurement(&setup);
    }
    for (name, measurement) in MEASUREMENTS {
        if setup.only.as_deref().is_none_or(|only| only == name) {
            measurement(&setup)?;
        }
    }
    Ok(())
}

impl Setup {
    fn from_args(arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let blobd = std::env::current_exe()?.with_file_name("blobd");
        let (disk, tmpfs) = (PathBuf::from("target"), PathBuf::from("/dev/shm"));
        let mut setup =
            Self { blobd, disk, tmpfs, blocks: 4, rounds: 7, blobs: None, models: None, only: None };
        for argument in arguments {
            match argument.split_once('=') {
                Some(("--disk", path)) => setup.disk = path.into(),
                Some(("--tmpfs", path)) => setup.tmpfs = path.into(),
                Some(("--blocks", count)) => setup.blocks = count.parse()?,
                Some(("--rounds", count)) => setup.rounds = count.parse()?,
                Some(("--blobs", count)) => setup.blobs = Some(count.parse()?),
                Some(("--models", count)) => setup.models = Some(count.parse()?),
                Some(("--only", name)) => setup.only = Some(name.to_owned()),
                _ => return Err(format!("{argument}: unknown option: expected {USAGE}").into()),
            }
        }
        if !setup.blobd.is_file() {
            return Err(format!(
                "{}: does not exist; run `cargo build --release -p blobd`",
                setup.blobd.display()
            )
            .into());
        }
        std::fs::create_dir_all(&setup.disk)?;
        setup.disk = setup.disk.canonicalize()?;
        Ok(setup)
    }
}
