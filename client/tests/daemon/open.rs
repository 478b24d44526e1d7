//! Opening a valid model.

use std::io::Read as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_client::protocol::response::{HeaderLocation, OpenPiece};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::tensor::Experts;

use crate::fake::{FakeModel, bytes_of, client_of};

fn open(model: FakeModel) -> OpenModel {
    model.client().open(&"tiny".parse().unwrap()).unwrap()
}

#[test]
fn every_tensor_reads_as_its_bytes_across_many_batches() {
    let mut model = FakeModel::new();
    for i in 0..=200u8 {
        let fd = model.add_file(&bytes_of(i, 64 + usize::from(i)));
        model.add_tensor(&format!("blk.{i}.weight"), Some(fd), 0, 64 + u64::from(i));
    }
    let model = open(model);
    assert_eq!((model.name(), model.fd_count()), ("tiny:latest", 201));
    for (i, tensor) in (0..).zip(model.map_all().unwrap()) {
        assert_eq!(tensor.name(), format!("blk.{i}.weight"));
        assert_eq!(tensor[..], bytes_of(i, 64 + usize::from(i)));
    }
    let tensor = model.map("blk.199.weight").unwrap();
    assert_eq!((tensor.type_name(), tensor.shape()), ("F32", &[65][..]));
    let error = model.map("blk.201.weight").unwrap_err();
    assert_eq!(error.to_string(), r#"model tiny:latest: no tensor "blk.201.weight""#);
    assert_eq!(error.code(), ErrorCode::NotFound);
}

#[test]
fn daemon_that_does_not_know_the_purpose_is_asked_without_it() {
    let requests = Arc::new(AtomicUsize::new(0));
    let (model, seen) = (Arc::new(FakeModel::new()), Arc::clone(&requests));
    let client = client_of(move |call| {
        seen.fetch_add(1, Ordering::Relaxed);
        let body = String::from_utf8_lossy(&call.body);
        if body.contains("\"nope\"") {
            return call.respond(400, r#"{"error":{"code":"invalid_request","message":"no tensor"}}"#);
        }
        match body.contains("purpose") {
            // The error of version 0.1.
            true => call.respond(
                400,
                r#"{"error":{"code":"invalid_request","message":"request body: unknown field `purpose`, expected one of `reference`, `tensors`, `component`, `files` at line 1 column 66"}}"#,
            ),
            false => model.serve(call),
        }
    });
    for purpose in OpenPurpose::ALL {
        let params = OpenParams { purpose, ..OpenParams::new("tiny".parse().unwrap()) };
        assert_eq!(client.open_with(&params).unwrap().name(), "tiny:latest", "{purpose:?}");
    }
    assert_eq!(requests.swap(0, Ordering::Relaxed), 7, "without a purpose, one request is enough");
    let tensors = TensorSelection::Names(vec!["nope".to_owned()]);
    let purpose = OpenPurpose::Export;
    let params = OpenParams { tensors, purpose, ..OpenParams::new("tiny".parse().unwrap()) };
    assert!(client.open_with(&params).is_err());
    assert_eq!(requests.load(Ordering::Relaxed), 1, "another refusal is not repeated");
}

#[test]
fn only_tensors_with_the_prefix_come() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&bytes_of(0, 96));
    for (offset, name) in (0..).step_by(32).zip(["blk.0.a", "blk.1.a", "blk.1.b"]) {
        model.add_tensor(name, Some(fd), offset, 32);
    }
    let params = OpenParams {
        tensors: TensorSelection::Prefix("blk.1.".to_owned()),
        ..OpenParams::new("tiny".parse().unwrap())
    };
    let model = model.client().open_with(&params).unwrap();
    let names: Vec<_> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["blk.1.a", "blk.1.b"]);
    assert!(model.tensor("blk.0.a").is_none());
    assert_eq!(model.map("blk.1.b").unwrap()[..], bytes_of(0, 96)[64..]);
}

#[test]
fn tensors_of_one_blob_share_its_map() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&bytes_of(0, 8192));
    model.add_tensor("a", Some(fd), 0, 4096);
    model.add_tensor("b", Some(fd), 4096, 4096);
    let model = open(model);
    let (a, b) = (model.map("a").unwrap(), model.map("b").unwrap());
    assert_eq!(a.as_ptr_range().end, b.as_ptr());
}

#[test]
fn experts_are_found_in_their_stack() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&bytes_of(0, 192));
    model.add_tensor("stack", Some(fd), 64, 128);
    model.tensors[0].experts = Some(Experts { count: 4, stride: 32 });
    let stack = open(model).map("stack").unwrap();
    assert_eq!(stack.expert(3), Some(&bytes_of(0, 192)[160..]));
    assert_eq!(stack.expert(4), None);
    assert_eq!(stack.expert(u64::MAX), None);
}

#[test]
fn tensor_without_elements_is_an_empty_slice() {
    let mut model = FakeModel::new();
    model.add_tensor("empty", None, 0, 0);
    let model = open(model);
    let tensor = model.map("empty").unwrap();
    assert!(tensor.is_empty());
    assert_eq!(tensor.shape(), [0]);
}

#[test]
fn first_of_equal_names_is_found_and_both_can_be_mapped() {
    let mut model = FakeModel::new();
    let fd = model.add_file(b"0123");
    model.add_tensor("t", Some(fd), 0, 2);
    model.add_tensor("t", Some(fd), 2, 2);
    let model = open(model);
    assert_eq!(model.map("t").unwrap()[..], *b"01");
    assert_eq!(model.map_tensor(&model.tensors()[1]).unwrap()[..], *b"23");
}

#[test]
fn hundred_thousand_tensors_are_found_by_name() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&bytes_of(0, 100_000));
    for i in 0..100_000 {
        model.add_tensor(&format!("blk.{i}.weight"), Some(fd), i, 1);
    }
    let model = open(model);
    for i in (0..100_000).step_by(997) {
        assert_eq!(model.tensor(&format!("blk.{i}.weight")).unwrap().offset, i);
    }
}

#[test]
fn maps_outlive_the_model_and_the_daemon() {
    let mut model = FakeModel::new();
    let large = bytes_of(3, 5 << 20);
    let fd = model.add_file(&large);
    model.add_tensor("large", Some(fd), 0, 5 << 20);
    let (ended, lease_end) = mpsc::channel();
    let model = Arc::new(model);
    let daemon = Arc::downgrade(&model);
    let client = client_of(move |call| {
        model.serve(call);
        ended.send(()).unwrap();
    });
    let opened = client.open(&"tiny".parse().unwrap()).unwrap();
    let tensor = opened.map("large").unwrap();
    assert!(lease_end.try_recv().is_err(), "the lease ended while the model was open");
    drop((opened, client));
    lease_end.recv().unwrap();
    while daemon.strong_count() > 0 {
        std::thread::yield_now();
    }
    assert!(tensor[..] == large);
}

#[test]
fn maps_outlive_a_daemon_that_dies_first() {
    let mut model = FakeModel::new();
    let fd = model.add_file(b"0123");
    model.add_tensor("t", Some(fd), 0, 4);
    let client = client_of({
        let model = Arc::new(model);
        move |call| {
            let params = serde_json::from_slice(&call.body).unwrap();
            let mut connection = call.upgrade();
            model.send_tables(&mut connection, &params);
            model.send_files(&mut connection);
        }
    });
    let model = client.open(&"tiny".parse().unwrap()).unwrap();
    assert_eq!(model.map("t").unwrap()[..], *b"0123");
}

#[test]
fn whole_layers_and_the_header_read_as_their_files() {
    let mut model = FakeModel::new();
    let template = model.add_file(b"{{ .Prompt }}");
    model.add_layer("application/vnd.ollama.image.template", Some(template), 13);
    let params = model.add_file(b"\xff\xfe");
    model.add_layer("application/vnd.ollama.image.params", Some(params), 2);
    let fd = model.add_file(b"GGUF and padding");
    model.head.layers[0].header = Some(HeaderLocation { fd, size: 16 });
    model.head.layers[0].size = 4096;
    let model = open(model);

    assert_eq!(model.header().unwrap()[..], *b"GGUF and padding");
    assert_eq!(model.text("template").unwrap().unwrap(), "{{ .Prompt }}");
    assert_eq!(model.text("license").unwrap(), None);
    assert!(matches!(model.text("params"), Err(ModelError::NotText { layer: 2 })));
    assert_eq!(model.layer_bytes(2).unwrap()[..], *b"\xff\xfe");
    assert!(matches!(model.layer_bytes(0), Err(ModelError::NotWhole { layer: 0 })));
    assert!(matches!(model.layer_bytes(3), Err(ModelError::NoLayer { layer: 3, count: 3 })));
    assert!(matches!(model.layer_header(1), Err(ModelError::NoHeader { layer: Some(1) })));
    assert!(matches!(model.write_layer(0, Vec::new()), Err(ModelError::NoPieces { layer: 0 })));
    let mut written = Vec::new();
    assert_eq!(model.write_layer(1, &mut written).unwrap(), 13);
    assert_eq!(written, b"{{ .Prompt }}");
}

#[test]
fn split_file_is_put_together_bit_for_bit() {
    let mut model = FakeModel::new();
    let (header, weights) = (bytes_of(1, 1000), bytes_of(2, 9 << 20));
    let header_fd = model.add_file(&header);
    let weights_fd = model.add_file(&weights);
    let literal = bytes_of(9, 600 << 10);
    let pieces = vec![
        OpenPiece::Fd { fd: header_fd, offset: 0, length: 1000 },
        OpenPiece::Zeros { zeros: 24 },
        OpenPiece::Fd { fd: weights_fd, offset: 100, length: (9 << 20) - 100 },
        OpenPiece::Literal { literal: literal.clone() },
        OpenPiece::Zeros { zeros: 100_000 },
    ];
    let expected = [&header, &[0; 24][..], &weights[100..], &literal, &[0; 100_000]].concat();
    model.set_pieces(
        blobd_client::protocol::frame::cut_literals(pieces),
        u64::try_from(expected.len()).unwrap(),
    );
    let params = OpenParams { files: FileSelection::All, ..OpenParams::new("tiny".parse().unwrap()) };
    let model = model.client().open_with(&params).unwrap();
    let mut written = Vec::new();
    assert_eq!(model.write_layer(0, &mut written).unwrap(), u64::try_from(expected.len()).unwrap());
    assert!(written == expected);
}

#[test]
fn file_that_a_manifest_names_twice_can_be_read_as_either_layer() {
    let mut model = FakeModel::new();
    let fd = model.add_file(b"GGUF and padding");
    model.set_pieces(vec![OpenPiece::Fd { fd, offset: 0, length: 16 }], 16);
    model.head.layers[0].header = Some(HeaderLocation { fd, size: 8 });
    let again = model.add_layer(MediaType::OLLAMA_MODEL, None, 16);
    let other = model.add_layer(MediaType::OLLAMA_PROJECTOR, None, 16);
    for same in [again, other] {
        model.head.layers[same].digest = model.head.layers[0].digest;
    }
    let params = OpenParams { files: FileSelection::All, ..OpenParams::new("tiny".parse().unwrap()) };
    let model = model.client().open_with(&params).unwrap();
    for layer in [0, again, other] {
        let mut written = Vec::new();
        assert_eq!(model.write_layer(layer, &mut written).unwrap(), 16);
        assert_eq!(written, b"GGUF and padding");
        assert_eq!(model.layer_header(layer).unwrap()[..], *b"GGUF and");
    }
}

#[test]
fn descriptors_are_for_engines_that_map_themselves() {
    let mut model = FakeModel::new();
    let fd = model.add_file(b"0123");
    let model = open(model);
    let mut file = std::fs::File::from(model.fd(fd).unwrap().try_clone_to_owned().unwrap());
    std::io::Seek::rewind(&mut file).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "0123");
    assert!(model.fd(1).is_none());
}

#[test]
fn model_is_shared_between_threads() {
    let mut model = FakeModel::new();
    let fd = model.add_file(&bytes_of(0, 4096));
    model.add_tensor("t", Some(fd), 0, 4096);
    let model = open(model);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(model.map("t").unwrap()[..], bytes_of(0, 4096)));
        }
    });
}
