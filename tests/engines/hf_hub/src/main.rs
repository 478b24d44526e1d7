//! Downloads a repository from HF_ENDPOINT with the crate hf-hub: `blobd-engine-hf-hub ORG/REPOSITORY FILE`. Compares what the
//! client says about FILE with what it downloads, and prints the path of the downloaded file.

use std::fs;
use std::path::PathBuf;

use hf_hub::HFClientSync;
use hf_hub::repository::RepoTreeEntry;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let (Some(repository), Some(file)) = (arguments.next(), arguments.next()) else {
        return Err("usage: blobd-engine-hf-hub ORG/REPOSITORY FILE".into());
    };
    let (owner, name) = repository.split_once('/').ok_or("expected ORG/REPOSITORY")?;
    println!("{}", download(owner, name, &file)?.display());
    Ok(())
}

fn download(owner: &str, name: &str, file: &str) -> Result<PathBuf, Error> {
    let repository = HFClientSync::new()?.model(owner, name);
    assert!(repository.exists().send()? && repository.revision_exists().revision("main").send()?);
    assert!(repository.file_exists().filename(file).send()?);
    assert!(!repository.file_exists().filename("no/such/file").send()?);
    let commit = repository.info().send()?.sha.ok_or("the repository has no commit")?;
    let branches = repository.list_refs().send()?.branches;
    assert!(branches.iter().any(|branch| branch.target_commit == commit), "{branches:?}, {commit}");
    let snapshot = repository.snapshot_download().send()?;
    assert!(snapshot.ends_with(&commit), "{}, {commit}", snapshot.display());
    let downloaded = repository.download_file().filename(file).revision(&*commit).send()?;
    assert_eq!(fs::canonicalize(&downloaded)?, fs::canonicalize(snapshot.join(file))?);
    let bytes = fs::read(&downloaded)?;
    let part = repository.download_file_to_bytes().filename(file).range(8..100).send()?;
    assert_eq!(bytes.get(8..100), Some(&*part));
    let listed = repository.list_tree().recursive(true).send()?;
    let is_listed = |entry: &RepoTreeEntry| matches!(entry, RepoTreeEntry::File { path, size, .. } if path == file && *size == bytes.len() as u64);
    assert!(listed.iter().any(is_listed), "{listed:?}");
    Ok(downloaded)
}
