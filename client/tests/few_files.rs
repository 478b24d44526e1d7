//! A process that may open few files. The limit is the whole process's, so this test has a
//! binary to itself, and one test in it.
#![allow(clippy::unwrap_used)]

#[path = "daemon/fake.rs"]
#[allow(dead_code)]
mod fake;

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use blobd_client::error::ClientError;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn allow_files(count: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum }).unwrap();
}

#[test]
fn model_with_more_blobs_than_files_allowed_opens_mapped_and_a_full_table_is_explained() {
    let mut model = fake::FakeModel::new();
    let fd = model.add_file(b"0123");
    model.add_tensor("0", Some(fd), 0, 4);
    let file = Arc::clone(&model.files[0]);
    for i in 1..300 {
        model.files.push(Arc::clone(&file));
        model.head.fd_count += 1;
        model.add_tensor(&i.to_string(), Some(i), 0, 4);
    }
    model.head.layers[0].fd = Some(299);
    model.head.layers[0].size = 4;
    let client = model.client();
    let name = "tiny".parse().unwrap();
    let used = u64::try_from(file.as_raw_fd()).unwrap() + 1;

    allow_files(used + 150);
    let opened = client.open(&name).unwrap();
    assert_eq!(opened.fd_count(), 300);
    assert!(opened.fd(0).is_none());
    assert!(opened.map_all().unwrap().iter().all(|tensor| tensor[..] == *b"0123"));
    let mut written = Vec::new();
    assert_eq!(opened.write_layer(0, &mut written).unwrap(), 4);
    assert_eq!(written, b"0123");
    drop(opened);

    allow_files(used + 20);
    let error = client.open(&name).unwrap_err();
    assert!(matches!(error, ClientError::FdsLost), "{error}");
    assert!(error.to_string().contains("raise `ulimit -n`"));
}
