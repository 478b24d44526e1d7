//! One copy in memory, however many processes use a model.

use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::memory::{shared_bytes, status_bytes};
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::reader::Reader;

/// 64 MiB in tensors of the sizes that occur in small models.
fn large_model() -> ModelFile {
    let mut file = ModelFile::dense_of(1, 2, 1024);
    file.add_noise(1, "rope_freqs.weight", GgmlType::I8, &[4 << 20]);
    file
}

#[test]
fn eight_processes_that_touch_every_page_share_one_copy() {
    let daemon = TestDaemon::start_on_disk();
    let model = large_model();
    let bytes = model.tensor_bytes();
    let digest = sha256(&bytes);
    daemon
        .command()
        .run(["import".as_ref(), model.write_to(daemon.scratch(), "m.gguf").as_os_str()])
        .succeeds();
    let mut readers: Vec<_> = (0..8).map(|_| Reader::open(&daemon.socket(), "m")).collect();
    for reader in &mut readers {
        assert_eq!(reader.touch(), digest);
    }
    let blobs = daemon.root().join("blobs");
    let sum: u64 = readers.iter().map(|reader| shared_bytes(reader.pid(), &blobs)).sum();
    let size = bytes.len() as u64;
    assert!(size > 60 << 20);
    assert!(sum.abs_diff(size) <= size / 50, "PSS of eight: {sum}, the model: {size}");
}

#[test]
fn memory_of_a_client_does_not_grow_with_the_model() {
    let daemon = TestDaemon::start();
    let private_bytes = |name: &str, model: &ModelFile| {
        let path = model.write_to(daemon.scratch(), name);
        daemon
            .command()
            .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()])
            .succeeds();
        let mut reader = Reader::open(&daemon.socket(), name);
        reader.touch();
        status_bytes(reader.pid(), "RssAnon")
    };
    let small = private_bytes("small", &ModelFile::dense_of(1, 2, 32));
    let large = private_bytes("large", &large_model());
    assert!(large < small + (1 << 20), "{small} for 60 KiB, {large} for 64 MiB");
}
