//! Imports of models that consist of several files.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams};

mod folders;
mod gguf;
mod requests;
pub(crate) mod shared_experts;

/// The request for the import of these files.
fn listing<'f>(name: &str, files: impl IntoIterator<Item = (&'f str, u64)>) -> ImportParams {
    let file = |(path, size): (&str, u64)| ImportFile {
        path: path.to_owned(),
        size,
        component: None,
        digest: None,
        was_read: false,
        offset: 0,
        stream: false,
    };
    ImportParams { files: files.into_iter().map(file).collect(), ..ImportParams::new(name) }
}

/// Imports the listed files of a folder.
fn import_listed(client: &Client, folder: &Path, params: &ImportParams) -> Result<Imported, ClientError> {
    client.import_listed(params, |number| opened(&folder.join(&params.files[number].path)), |_| ())
}

fn opened(path: &Path) -> Result<OwnedFd, ErrorBody> {
    Ok(File::open(path).unwrap().into())
}
