//! Files that exist where an export would write.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::digest::{Digest, Hasher};

use crate::progress::Bar;
use crate::target::write_error;
use crate::{Global, file_error};

/// Fails if there is a file with any content. A device or pipe is written to, not replaced.
pub(super) fn refuse_existing(path: &Path) -> Result<(), ErrorBody> {
    match existing_bytes(path) {
        None => Ok(()),
        Some(_) => Err(write_error(path, &io::ErrorKind::AlreadyExists.into())),
    }
}

/// The size of a file that would be lost.
fn existing_bytes(path: &Path) -> Option<u64> {
    path.metadata().ok().filter(|found| found.is_file() && found.len() > 0).map(|found| found.len())
}

/// Whether there is a file with this digest and size. Fails if there is one with other content.
pub(super) fn has_content(
    global: &Global,
    path: &Path,
    digest: Digest,
    expected: u64,
) -> Result<bool, ErrorBody> {
    let Some(size) = existing_bytes(path) else { return Ok(false) };
    if size == expected {
        let bar = Bar::new(&format!("comparing {}", path.display()), size, global.hides_progress());
        let found = digest_of(path, &bar).map_err(|error| file_error(&path.display().to_string(), &error));
        bar.clear();
        if found? == digest {
            return Ok(true);
        }
    }
    let refused = write_error(path, &io::ErrorKind::AlreadyExists.into());
    Err(ErrorBody { message: format!("{}, with other content", refused.message), ..refused })
}

fn digest_of(path: &Path, bar: &Bar) -> io::Result<Digest> {
    const BUFFER_BYTES: usize = 1 << 20;
    let (mut file, mut hasher) = (File::open(path)?, Hasher::new());
    let size = file.metadata()?.len();
    let (mut buffer, mut done) = (vec![0; BUFFER_BYTES], 0_u64);
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(buffer.get(..length).unwrap_or_default());
        done = done.saturating_add(length as u64);
        bar.set(done, size);
    }
}
