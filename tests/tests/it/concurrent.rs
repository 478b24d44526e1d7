//! Concurrent clients: in any order of operations, no model is broken, and nothing is lost or left over.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{GcParams, ImportParams, RemoveParams, TagParams, UndeleteParams};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{check_blobs, check_empty, staged};
use blobd_tests::wait::eventually;

const ROUNDS: usize = 30;

/// Three models that share most tensors.
fn models() -> [ModelFile; 3] {
    let base = ModelFile::dense(1);
    [base.clone(), base.clone().with_changed("output.weight"), base.with_changed("blk.0.attn_q.weight")]
}

fn import(client: &Client, path: &Path, name: &str) {
    let params =
        ImportParams { name: Some(name.parse().unwrap()), force: true, ..ImportParams::new("m.gguf") };
    client.import(&params, File::open(path).unwrap(), |_, _| ()).unwrap();
}

/// Accepts only success and "not found".
fn unless_gone<T>(result: Result<T, ClientError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.code() == ErrorCode::NotFound => None,
        Err(error) => panic!("{:?}: {error}", error.code()),
    }
}

fn remove(client: &Client, name: &str) {
    unless_gone(
        client.remove(&RemoveParams { references: vec![name.parse().unwrap()], ..RemoveParams::default() }),
    );
}

/// Opens a model and returns the digest of all mapped bytes.
fn open(client: &Client, name: &str) -> Option<String> {
    let model = unless_gone(client.open(&name.parse().unwrap()))?;
    let bytes: Vec<u8> = model.map_all().unwrap().iter().flat_map(|map| map.to_vec()).collect();
    Some(sha256(&bytes))
}

/// Restores and removes what other models have replaced.
fn empty_trash(client: &Client) {
    while let Some(trashed) = client.trash().unwrap().models.pop() {
        let reference = trashed.name.parse().unwrap();
        let name = Some("restored".parse().unwrap());
        client.undelete(&UndeleteParams { reference, name, force: false }).unwrap();
        remove(client, "restored");
    }
}

#[test]
fn imports_removals_and_collections_at_once_break_no_model() {
    let daemon = TestDaemon::start();
    let models = models();
    let files: Vec<PathBuf> =
        (0..3).map(|index| models[index].write_to(daemon.scratch(), &format!("{index}.gguf"))).collect();
    let whole: BTreeSet<String> = models.iter().map(|model| sha256(&model.tensor_bytes())).collect();
    let client = daemon.client();
    thread::scope(|scope| {
        let (client, files, whole) = (&client, &files, &whole);
        for (index, name) in ["a", "b"].into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    import(client, &files[(round + index) % 3], name);
                    if round % 3 == 2 {
                        remove(client, name);
                    }
                }
            });
        }
        scope.spawn(move || {
            for round in 0..ROUNDS {
                let params = TagParams {
                    source: "a".parse().unwrap(),
                    target: "c".parse().unwrap(),
                    force: true,
                    origin: None,
                };
                unless_gone(client.tag(&params));
                remove(client, if round % 2 == 0 { "c" } else { "b" });
            }
        });
        scope.spawn(move || {
            for round in 0..ROUNDS {
                client.gc(&GcParams { dry_run: round % 4 == 0, ..GcParams::default() }).unwrap();
                client.disk_usage().unwrap();
                client.models().unwrap();
            }
        });
        scope.spawn(move || {
            for round in 0..ROUNDS * 3 {
                if let Some(digest) = open(client, ["a", "b", "c"][round % 3]) {
                    assert!(whole.contains(&digest), "a mixture of models");
                }
            }
        });
    });
    check_blobs(daemon.root());
    assert_eq!(staged(daemon.root()), [""; 0]);
    for name in ["a", "b", "c"] {
        remove(&client, name);
    }
    empty_trash(&client);
    // The sessions of the last readers may have ended a moment ago.
    eventually("nothing is needed any more", || {
        client.gc(&GcParams::default()).unwrap();
        client.disk_usage().unwrap().physical_bytes == 0
    });
    check_empty(daemon.root());
}

#[test]
fn imports_of_one_file_at_once_store_it_once() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    let client = daemon.client();
    thread::scope(|scope| {
        for index in 0..6 {
            let (client, path) = (&client, &path);
            scope.spawn(move || import(client, path, &format!("copy-{index}")));
        }
    });
    let tensors: BTreeSet<_> =
        ModelFile::dense(1).tensors.iter().map(|tensor| sha256(&tensor.bytes())).collect();
    assert_eq!(check_blobs(daemon.root()).len(), tensors.len() + 2, "header and configuration");
    assert_eq!(client.models().unwrap().models.len(), 6);
    assert_eq!(staged(daemon.root()), [""; 0]);
}

#[test]
fn concurrent_readers_open_and_close_independently() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense(1);
    let path = model.write_to(daemon.scratch(), "m.gguf");
    let client = daemon.client();
    import(&client, &path, "m");
    let whole = sha256(&model.tensor_bytes());
    thread::scope(|scope| {
        for _ in 0..8 {
            let (client, whole) = (&client, &whole);
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(open(client, "m").as_ref(), Some(whole));
                }
            });
        }
    });
    eventually("all leases end", || client.sessions().unwrap().sessions.is_empty());
}
