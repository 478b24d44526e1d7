//! Reads the configuration file, up to a limit.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use blobd_store_format::size::human_bytes;

/// More than any configuration has. A longer file is something else, such as a model that was named by mistake.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Reads a configuration file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_CONFIG_BYTES {
        let most = human_bytes(MAX_CONFIG_BYTES);
        return Err(io::Error::other(format!("too long: expected at most {most}")));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_too_long_is_not_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        let error = read(file.path()).unwrap_err().to_string();
        assert_eq!(error, "too long: expected at most 4.00 MiB");
    }
}
