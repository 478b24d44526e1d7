//! `blobd sign`, and `blobd verify --signatures`

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{Connected, client_error, connect, print_report, print_result};
use blobd_cli_common::model_name::{ModelName, every_model, expand, only};
use blobd_cli_common::output::{Table, counted, or_dash, print, printable, terminal_width};
use blobd_cli_common::output_file::{Existing, Target, TemporaryName, write_error};
use blobd_cli_common::{Global, file_error, internal, usage};
use blobd_client::protocol::error::FailedItem;
use blobd_client::protocol::signatures::{
    GivenKey, SignParams, SignatureReport, SignatureState, SignaturesParams, Signed,
};
use blobd_keys::PrivateKey;
use blobd_store_format::signature::{Bundle, Statement, signed_bytes};
use clap::Args;
use serde::Serialize;

use crate::{ErrorBody, ErrorCode, Reference};

/// Sign a model with a key, or keep a signature that was made elsewhere
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd sign llama3:8b --key site.pem          sign all files of the model
  blobd sign llama3:8b --key site.pem -o llama3.sig
  blobd sign acme --signature model.sig        keep the publisher's signature
  blobd sign acme -o model.sig                 write the latest signature into a file
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out site.pem
  openssl pkey -in site.pem -pubout -out site.pub

A signature lists the files of the model with their digests, as OpenSSF's model signing defines
it: `model_signing verify key` verifies it too. No file is read: the store knows the digests. The
key stays in this process. `blobd verify --signatures` says who has signed a model.")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// The private key to sign with: a PEM file with a key of P-256, P-384 or Ed25519, without passphrase
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// A signature of the model to keep beside it, in place of a new one
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    signature: Option<PathBuf>,
    /// Write the signature into this file too; - for standard output. Alone, it writes the latest that is stored
    #[arg(short, long, value_name = "FILE", required_unless_present_any = ["key", "signature"])]
    output: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(short, long, requires = "output")]
    force: bool,
}

/// The options of `verify` that are about signatures.
#[derive(Debug, Args)]
pub(super) struct SignatureArgs {
    /// Say who has signed each model, instead of reading its data. Exit code 3 means that one is not signed, and 5
    /// that a signature is wrong
    #[arg(long, conflicts_with = "repair")]
    pub(super) signatures: bool,
    /// A public key to verify signatures with, in place of those that the configuration trusts: a PEM file; may be
    /// repeated
    #[arg(long, value_name = "FILE", requires = "signatures")]
    key: Vec<PathBuf>,
    /// Verify the signature in this file instead of those in the store
    #[arg(long, value_name = "FILE", requires = "signatures", requires = "models")]
    signature: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report<'r> {
    #[serde(flatten)]
    signed: &'r Signed,
    /// The file that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let to_stdout = params.output.as_deref().is_some_and(is_stdout);
    if to_stdout && global.json {
        return Err(usage(
            "--json: standard output has the signature already: expected a file after --output",
        ));
    }
    let key = params.key.as_deref().map(private_key).transpose()?;
    let given = params.signature.as_deref().map(read_bundle).transpose()?;
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &params.model)?;
    let (bundle, signed) = match (key, given) {
        (None, None) => stored(&connected, reference)?,
        (key, given) => {
            let bundle = match key {
                Some(key) => new_bundle(&connected, &reference, &key)?,
                None => given.unwrap_or_default(),
            };
            let request = SignParams { reference, bundle };
            let signed = connected.client.sign(&request).map_err(client_error)?;
            (request.bundle, signed)
        }
    };
    match params.output.as_deref() {
        Some(_) if to_stdout => return print(&bundle),
        Some(path) => write_bundle(path, &bundle, params.force)?,
        None => {}
    }
    let path = params.output.as_ref().map(|path| path.display().to_string());
    print_report(global, &Report { signed: &signed, path }, |report| render(report))
}

fn render(Report { signed, path }: &Report<'_>) -> String {
    let (name, files) = (printable(&signed.name), counted(signed.files, "file"));
    let wrote = path.as_ref().map(|path| format!("wrote {}\n", printable(path))).unwrap_or_default();
    let done = if signed.unchanged { "signature of" } else { "signed" };
    let missing = match signed.missing.len() {
        0 => String::new(),
        count => {
            let files = counted(count, "file");
            format!("; it lists {files} that the model lacks, such as {}", signed.missing.join(", "))
        }
    };
    format!("{name}: {done} {files}{}\n{wrote}", printable(&missing))
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// The latest stored signature.
fn stored(connected: &Connected, reference: Reference) -> Result<(String, Signed), ErrorBody> {
    let request = SignaturesParams::new(reference, Vec::new());
    let report = connected.client.signatures(&request).map_err(client_error)?;
    let Some(latest) = report.signatures.into_iter().next_back() else {
        let message = format!("model {}: not signed", report.name);
        return Err(ErrorBody::new(ErrorCode::NotFound, message).with_hint("--key FILE signs it"));
    };
    let signed = Signed {
        name: report.name,
        digest: report.digest,
        key_id: latest.key_id,
        files: report.files.len() as u64,
        missing: latest.missing,
        unchanged: true,
    };
    Ok((latest.bundle, signed))
}

fn new_bundle(connected: &Connected, reference: &Reference, key: &PrivateKey) -> Result<String, ErrorBody> {
    let request = SignaturesParams::new(reference.clone(), Vec::new());
    let SignatureReport { name, files, .. } = connected.client.signatures(&request).map_err(client_error)?;
    let failed = |error: &dyn std::fmt::Display| {
        ErrorBody::new(
            ErrorCode::InvalidInput,
            format!("model {}: cannot be signed: {error}", printable(&name)),
        )
    };
    let payload = Statement::new(&name, files).and_then(|statement| statement.to_json());
    let payload = payload.map_err(|error| failed(&error))?;
    let signature = key.sign(&signed_bytes(&payload)).map_err(|error| failed(&error))?;
    let bundle = Bundle::compose(&key.public().id(), &payload, &signature).map_err(|error| failed(&error))?;
    Ok(bundle.text().to_owned())
}

fn private_key(path: &Path) -> Result<PrivateKey, ErrorBody> {
    PrivateKey::parse(&read_text(path, blobd_keys::MAX_FILE_BYTES)?).map_err(|error| {
        let message = format!("{}: {error}", path.display());
        ErrorBody::new(ErrorCode::InvalidInput, message).with_hint(error.hint())
    })
}

fn read_bundle(path: &Path) -> Result<String, ErrorBody> {
    read_text(path, Bundle::MAX_BYTES as u64)
}

fn read_text(path: &Path, most: u64) -> Result<String, ErrorBody> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most.saturating_add(1)).read_to_end(&mut text));
    read.map_err(|error| file_error(&path.display().to_string(), &error))?;
    let refused = |what: &str| {
        let message = format!("{}: {what}", path.display());
        ErrorBody::new(ErrorCode::InvalidInput, message)
    };
    if text.len() as u64 > most {
        return Err(refused(&format!("too long: expected at most {most} bytes")));
    }
    String::from_utf8(text).map_err(|_other| refused("wrong kind of file: expected text, found other bytes"))
}

fn write_bundle(path: &Path, bundle: &str, force: bool) -> Result<(), ErrorBody> {
    let existing = if force { Existing::Replace } else { Existing::Keep };
    let write = || -> io::Result<()> {
        let target = Target::create(path, bundle.len() as u64, existing, &TemporaryName::default())?;
        let mut file = target.file();
        file.write_all(bundle.as_bytes())?;
        target.publish()
    };
    write().map_err(|error| write_error(path, &error))
}

#[derive(Serialize)]
struct Verified<'r> {
    models: &'r [SignatureReport],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    failed: &'r [FailedItem],
}

/// Says who has signed models.
pub(super) fn verify(global: &Global, models: &[ModelName], args: &SignatureArgs) -> Result<(), ErrorBody> {
    let keys = args.key.iter().map(|path| given_key(path)).collect::<Result<Vec<_>, _>>()?;
    let bundle = args.signature.as_deref().map(read_bundle).transpose()?;
    let connected = connect(global)?;
    let models = match models {
        [] => every_model(&connected.client)?,
        models => expand(&connected.client, models)?,
    };
    let mut batch = Batch::new(global, models.len());
    for model in models {
        let report = model.reference.and_then(|reference| {
            let request =
                SignaturesParams { bundle: bundle.clone(), ..SignaturesParams::new(reference, keys.clone()) };
            connected.client.signatures(&request).map_err(client_error)
        });
        batch.add(&model.label, report);
    }
    let reports = batch.done().to_vec();
    print_result(global, &Verified { models: &reports, failed: batch.failed() }, |_| table(&reports))?;
    batch.result(["models was not checked", "models were not checked"])?;
    let of =
        |state| reports.iter().filter(move |report| report.state == state).map(|report| report.name.as_str());
    let wrong: Vec<_> = of(SignatureState::Wrong).collect();
    let others = [SignatureState::Unsigned, SignatureState::UnknownKey].into_iter().flat_map(of);
    let others: Vec<_> = others.collect();
    match (wrong.as_slice(), others.as_slice()) {
        ([], []) => Ok(()),
        ([], others) => {
            Err(ErrorBody::new(ErrorCode::NotFound, format!("{}: not signed by these keys", few(others)))
                .with_hint(
                    "`blobd sign REF --key FILE` signs a model; `--key` names the public keys to verify with",
                ))
        }
        (wrong, _) => Err(ErrorBody::new(ErrorCode::Corrupt, format!("{}: wrong signature", few(wrong)))),
    }
}

/// The models if they are few; the table before has them all.
fn few(models: &[&str]) -> String {
    const MOST: usize = 3;
    match models.len() {
        0..=MOST => printable(&models.join(", ")),
        count => counted(count, "model"),
    }
}

/// A public key with the name of its file.
fn given_key(path: &Path) -> Result<GivenKey, ErrorBody> {
    let pem = read_text(path, blobd_keys::MAX_FILE_BYTES)?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.ok_or_else(|| internal(format!("{}: has no name", path.display())))?;
    Ok(GivenKey { name, pem })
}

fn table(reports: &[SignatureReport]) -> String {
    let mut table = Table::new(&["NAME", "STATE", "KEY", "REASON"], &[]);
    for report in reports {
        let best = report.signatures.iter().rev().find(|signature| signature.state == report.state);
        let key = report.key.clone().or_else(|| {
            const ID_DIGITS: usize = 12;
            let id = best?.key_id.as_ref()?;
            Some(id.get(..ID_DIGITS).unwrap_or(id).to_owned())
        });
        let reason = best.and_then(|best| best.reason.clone());
        let name = printable(&report.name).to_string();
        table.row([name, report.state.to_string(), or_dash(key), or_dash(reason)]);
    }
    table.render(terminal_width())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    fn signed() -> Signed {
        let (name, digest) = ("m:latest".to_owned(), Digest::of(b"m"));
        Signed { name, digest, key_id: None, files: 2, missing: Vec::new(), unchanged: false }
    }

    #[test]
    fn what_was_signed_and_written_is_said() {
        let report =
            |signed: &Signed, path: Option<&str>| render(&Report { signed, path: path.map(str::to_owned) });
        assert_eq!(report(&signed(), None), "m:latest: signed 2 files\n");
        let partial = Signed { missing: vec!["README.md".to_owned()], unchanged: true, ..signed() };
        assert_eq!(
            report(&partial, Some("m.sig")),
            "m:latest: signature of 2 files; it lists 1 file that the model lacks, such as README.md\nwrote m.sig\n"
        );
    }

    #[test]
    fn files_that_are_too_long_or_not_text_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert!(private_key(&path).unwrap_err().message.contains("expected text"));
        std::fs::write(&path, vec![b' '; 65 << 10]).unwrap();
        assert!(private_key(&path).unwrap_err().message.contains("too long"));
        std::fs::write(&path, "no key").unwrap();
        let error = private_key(&path).unwrap_err();
        assert!(error.message.contains("BEGIN PRIVATE KEY") && error.hint.unwrap().contains("openssl"));
    }
}
