//! The files of an export: all are written, then all get their names, or none does if the export fails or is interrupted.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use blobd_cli_common::internal;
use blobd_cli_common::output::print_stopped;
use blobd_cli_common::output_file::{OutputFile, Target, TemporaryName, write_error};
use blobd_cli_common::progress::Bar;
use blobd_client::process::on_end;
use blobd_store_format::digest::Hasher;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::plan::{OutputPath, PlannedFile, refuse_link};
use crate::{Digest, ErrorBody};

/// Files that have no names yet. Dropped before [`Outputs::publish`] has succeeded, it leaves nothing.
#[derive(Debug)]
pub(super) struct Outputs {
    targets: Vec<Output>,
    made: Made,
}

#[derive(Debug)]
struct Output {
    place: OutputPath,
    target: Target,
    replaces: bool,
}

impl Outputs {
    /// Creates the files, and reserves space for all of them before any is written.
    pub(super) fn create(files: &[&PlannedFile], force: bool, is_json: bool) -> Result<Self, ErrorBody> {
        allow_open_files(files.len());
        let names: Vec<_> = files.iter().map(|_file| TemporaryName::default()).collect();
        let made = Made::default();
        remove_at_end(names.clone(), made.clone(), is_json)?;
        let create = |(planned, name): (&&PlannedFile, &TemporaryName)| {
            let (path, size) = (planned.place.path(), planned.file.size);
            let existing = planned.existing(force);
            let target = match &planned.place {
                OutputPath::Named(path) => Target::create(path, size, existing, name),
                place @ OutputPath::Below { .. } => {
                    let output = OutputFile::create_in(&place.existing_folder(), &path, existing, name);
                    output.and_then(|output| Target::from_file(output, size))
                }
            };
            let target = target.map_err(|error| write_error(&path, &error))?;
            let replaces = fs::symlink_metadata(&path).is_ok();
            Ok(Output { place: planned.place.clone(), target, replaces })
        };
        let targets = files.iter().zip(&names).map(create).collect::<Result<_, ErrorBody>>()?;
        Ok(Self { targets, made })
    }

    pub(super) fn file(&self, index: usize) -> Option<&fs::File> {
        self.targets.get(index).map(|output| output.target.file())
    }

    /// Gives all files their names: first those that replace none, so that a failure can be undone.
    pub(super) fn publish(self) -> Result<(), ErrorBody> {
        let Self { mut targets, made } = self;
        for output in &targets {
            output.target.sync().map_err(|error| write_error(&output.place.path(), &error))?;
        }
        targets.sort_by_key(|output| output.replaces);
        // A signal that ends the process waits for this lock.
        let mut list = made.lock();
        for output in targets {
            make_folders(&output.place, &mut list)?;
            let (path, is_new) = (output.place.path(), !output.replaces);
            output.target.publish().map_err(|error| write_error(&path, &error))?;
            if is_new {
                list.push(path);
            }
        }
        list.clear();
        Ok(())
    }
}

/// Writes and hashes in one pass, and shows how far it is.
pub(super) struct HashingWriter<'b, W: Write> {
    out: BufWriter<W>,
    hasher: Hasher,
    written: u64,
    size: u64,
    bar: &'b Bar,
}

impl<'b, W: Write> HashingWriter<'b, W> {
    pub(super) fn new(out: W, size: u64, bar: &'b Bar) -> Self {
        const BUFFER_BYTES: usize = 1 << 20;
        let out = BufWriter::with_capacity(BUFFER_BYTES, out);
        Self { out, hasher: Hasher::new(), written: 0, size, bar }
    }

    /// The digest of what was written.
    pub(super) fn finish(mut self) -> io::Result<Digest> {
        self.out.flush()?;
        Ok(self.hasher.finish())
    }
}

impl<W: Write> Write for HashingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.out.write(bytes)?;
        self.hasher.update(bytes.get(..length).unwrap_or_default());
        self.written = self.written.saturating_add(length as u64);
        self.bar.set(self.written, self.size);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn make_folders(place: &OutputPath, made: &mut Vec<PathBuf>) -> Result<(), ErrorBody> {
    for folder in place.folders() {
        refuse_link(place, &folder)?;
        match fs::create_dir(&folder) {
            Ok(()) => made.push(folder),
            Err(_) if folder.is_dir() => {}
            Err(error) => return Err(write_error(&folder, &error)),
        }
    }
    Ok(())
}

/// The files and folders that an export has made so far. They are removed if it fails or is interrupted.
#[derive(Clone, Debug, Default)]
struct Made(Arc<Mutex<Vec<PathBuf>>>);

impl Made {
    fn lock(&self) -> MadeList<'_> {
        MadeList(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct MadeList<'m>(MutexGuard<'m, Vec<PathBuf>>);

impl std::ops::Deref for MadeList<'_> {
    type Target = Vec<PathBuf>;

    fn deref(&self) -> &Vec<PathBuf> {
        &self.0
    }
}

impl std::ops::DerefMut for MadeList<'_> {
    fn deref_mut(&mut self) -> &mut Vec<PathBuf> {
        &mut self.0
    }
}

/// Removes what is still listed: it belongs to an export that has failed.
impl Drop for MadeList<'_> {
    fn drop(&mut self) {
        for path in self.0.drain(..).rev() {
            // A folder in which somebody else has put a file meanwhile stays.
            let _ = if is_folder(&path) { fs::remove_dir(&path) } else { fs::remove_file(&path) };
        }
    }
}

fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

fn remove_at_end(names: Vec<TemporaryName>, made: Made, is_json: bool) -> Result<(), ErrorBody> {
    let remove = move || {
        // Never unlocked: the process ends, and no file must get its name before it does.
        std::mem::forget(made.lock());
        names.iter().for_each(TemporaryName::remove_and_block);
        print_stopped(is_json, "export", "nothing was written");
    };
    on_end(remove).map_err(internal)
}

/// Raises the limit of open files, if it may be: every file stays open until all are written.
fn allow_open_files(count: usize) {
    /// The most files that are open for other purposes; the model's own descriptors take up to half of the limit.
    const OTHERS: u64 = 64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let needed = current.unwrap_or(u64::MAX).saturating_add(count as u64).saturating_add(OTHERS);
    if current.is_some_and(|current| (count as u64).saturating_add(OTHERS) > current / 2) {
        let raised = maximum.map_or(needed, |maximum| needed.min(maximum));
        // If it fails, a file that cannot be opened is the error.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum });
    }
}
