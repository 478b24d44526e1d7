//! Opening models.

use std::io::Write as _;

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{FileSelection, OpenParams, TensorSelection};
use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::reader::Reader;
use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, seek};

fn daemon_with(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon
}

fn params(tensors: TensorSelection) -> OpenParams {
    OpenParams { tensors, ..OpenParams::new("m".parse().unwrap()) }
}

/// More than twice as many tensors as one batch of descriptors holds.
fn many_tensors() -> ModelFile {
    let mut file = ModelFile::empty();
    for index in 0..150 {
        file.add_noise(1, &format!("blk.{index}.attn_q.weight"), GgmlType::I8, &[100]);
    }
    file
}

fn code_of(opened: Result<blobd_client::model::OpenModel, ClientError>) -> ErrorCode {
    opened.map(|_| ()).unwrap_err().code()
}

#[test]
fn every_tensor_is_mapped_with_the_bytes_of_its_file() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let open = daemon.client().open(&"m".parse().unwrap()).unwrap();
    let maps = open.map_all().unwrap();
    assert_eq!(maps.len(), model.tensors.len());
    for (map, tensor) in maps.iter().zip(&model.tensors) {
        assert_eq!((map.name(), map.shape()), (tensor.name.as_str(), &tensor.shape[..]));
        assert_eq!(map.type_name(), tensor.ggml_type.name());
        assert!(map[..] == tensor.bytes(), "{}", tensor.name);
    }
    let (file, header) = (model.bytes(), open.header().unwrap());
    assert!(file.starts_with(&header) && header.len() > 500);
}

/// The daemon must not reuse its cached response for the old model.
#[test]
fn moved_name_opens_its_new_model() {
    let (first, second) = (ModelFile::dense(1), many_tensors());
    let daemon = daemon_with(&first);
    let client = daemon.client();
    let bytes_of = |model: &str| -> Vec<Vec<u8>> {
        let open = client.open(&model.parse().unwrap()).unwrap();
        open.map_all().unwrap().iter().map(|map| map.to_vec()).collect()
    };
    let expected = |model: &ModelFile| model.tensors.iter().map(ModelTensor::bytes).collect::<Vec<_>>();
    for _ in 0..2 {
        assert!(bytes_of("m") == expected(&first));
    }
    let path = second.write_to(daemon.scratch(), "second.gguf");
    daemon
        .command()
        .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), "m".as_ref(), "--force".as_ref()])
        .succeeds();
    assert!(bytes_of("m") == expected(&second));
    daemon.command().line("rm m").succeeds();
    assert_eq!(code_of(client.open(&"m".parse().unwrap())), ErrorCode::NotFound);
}

#[test]
fn prefix_and_names_select_tensors() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let client = daemon.client();
    let names = |selection| {
        let model = client.open_with(&params(selection)).unwrap();
        let names: Vec<_> = model.tensors().iter().map(|tensor| tensor.name.clone()).collect();
        (names, model.fd_count())
    };
    let (layer, fd_count) = names(TensorSelection::Prefix("blk.1.attn_".into()));
    assert_eq!(layer.len(), 5);
    assert!(layer.iter().all(|name| name.starts_with("blk.1.attn_")), "{layer:?}");
    assert_eq!(fd_count, 5 + 2, "and header and configuration");
    assert_eq!(names(TensorSelection::Prefix("nothing".into())).0, [""; 0]);
    assert_eq!(names(TensorSelection::None).0, [""; 0]);
    let wanted = ["output.weight".to_owned(), "token_embd.weight".to_owned()];
    let (found, _) = names(TensorSelection::Names(wanted.to_vec()));
    assert_eq!(found, ["token_embd.weight", "output.weight"], "in the order of the file");
}

#[test]
fn unknown_tensor_component_or_model_is_not_found() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let client = daemon.client();
    let names = TensorSelection::Names(vec!["output.weight".into(), "blk.99.attn_q.weight".into()]);
    let error = client.open_with(&params(names)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound);
    assert!(error.to_string().contains("blk.99.attn_q.weight"), "{error}");
    let component = OpenParams { component: Some("projector".into()), ..params(TensorSelection::All) };
    assert_eq!(code_of(client.open_with(&component)), ErrorCode::NotFound);
    assert_eq!(code_of(client.open(&"nobody".parse().unwrap())), ErrorCode::NotFound);
    let (code, error) = Reader::try_open(&[], &daemon.socket(), &["nobody"]).unwrap_err();
    assert_eq!(code, 3, "{error}");
}

#[test]
fn file_of_an_open_model_is_rebuilt_bit_for_bit() {
    let model = ModelFile { padding: 3, alignment: Some(512), ..ModelFile::separate_experts(1, 11) };
    let daemon = daemon_with(&model);
    let request = OpenParams { files: FileSelection::All, ..params(TensorSelection::All) };
    let open = daemon.client().open_with(&request).unwrap();
    let layer = open.layers().iter().position(|layer| layer.media_type.component() == "model").unwrap();
    let mut file = Vec::new();
    assert_eq!(open.write_layer(layer, &mut file).unwrap(), file.len() as u64);
    assert!(file == model.bytes());
    let without = daemon.client().open(&"m".parse().unwrap()).unwrap();
    assert_eq!(without.write_layer(layer, &mut file).unwrap_err().code(), ErrorCode::InvalidRequest);
}

#[test]
fn descriptors_are_read_only_and_have_their_own_offset() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let open = || daemon.client().open(&"m".parse().unwrap()).unwrap();
    let (ours, theirs) = (open(), open());
    for number in 0..u32::try_from(ours.fd_count()).unwrap() {
        let (fd, other) = (ours.fd(number).unwrap(), theirs.fd(number).unwrap());
        assert_eq!(fcntl_getfl(fd).unwrap() & OFlags::ACCMODE, OFlags::RDONLY);
        seek(fd, SeekFrom::Start(7)).unwrap();
        assert_eq!(seek(other, SeekFrom::Current(0)).unwrap(), 0, "an offset of its own");
        let mut file = std::fs::File::from(fd.try_clone_to_owned().unwrap());
        assert!(file.write_all(b"x").is_err());
        assert!(file.set_len(0).is_err());
    }
}

#[test]
fn experts_of_both_spellings_are_found_in_their_group() {
    let (stacked, separate) = (ModelFile::stacked_experts(1, 4), ModelFile::separate_experts(1, 4));
    let daemon = daemon_with(&stacked);
    let path = separate.write_to(daemon.scratch(), "separate.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let stack = daemon.client().open(&"m".parse().unwrap()).unwrap().map("blk.0.ffn_up_exps.weight").unwrap();
    let single = daemon.client().open(&"separate".parse().unwrap()).unwrap();
    for expert in 0..4 {
        let name = format!("blk.0.ffn_up.{expert}.weight");
        assert!(stack.expert(expert).unwrap() == &single.map(&name).unwrap()[..], "{name}");
    }
    assert_eq!(stack.expert(4), None);
}

#[test]
fn client_with_few_descriptors_maps_and_closes_one_at_a_time() {
    let model = many_tensors();
    let daemon = daemon_with(&model);
    let limited = ["sh", "-c", "ulimit -n 100; exec \"$0\" \"$@\""];
    let mut reader = Reader::try_open(&limited, &daemon.socket(), &["m"]).unwrap();
    let bytes = model.tensor_bytes();
    assert_eq!(reader.touch(), blobd_tests::oracle::sha256(&bytes));
    let open_files = std::fs::read_dir(format!("/proc/{}/fd", reader.pid())).unwrap().count();
    assert!(open_files < 20, "{open_files}");
}

#[test]
fn model_of_more_than_a_thousand_tensors_opens_in_a_process_with_256_files() {
    let model = ModelFile::deepseek_v3();
    assert_eq!(model.tensors.len(), 1086);
    let daemon = daemon_with(&model);
    let limited = ["sh", "-c", "ulimit -n 256; exec \"$0\" \"$@\""];
    let mut reader = Reader::try_open(&limited, &daemon.socket(), &["m"]).unwrap();
    assert_eq!(reader.opened["tensors"], 1086);
    let bytes = model.tensor_bytes();
    assert_eq!(reader.touch(), blobd_tests::oracle::sha256(&bytes));
}

#[test]
fn client_with_too_few_descriptors_gets_an_error() {
    let daemon = daemon_with(&many_tensors());
    let limited = ["sh", "-c", "ulimit -n 32; exec \"$0\" \"$@\""];
    let (code, error) = Reader::try_open(&limited, &daemon.socket(), &["m"]).unwrap_err();
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("ulimit -n"), "{error}");
    let mut unlimited = Reader::open(&daemon.socket(), "m");
    assert_eq!(unlimited.touch().len(), 64, "others are not disturbed");
}

#[test]
fn open_reads_no_blob_in_the_daemon() {
    let daemon = daemon_with(&ModelFile::dense_of(1, 1, 256));
    let read = || {
        let io = std::fs::read_to_string(format!("/proc/{}/io", daemon.pid())).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    let read_by_open = || {
        let before = read();
        drop(daemon.client().open(&"m".parse().unwrap()).unwrap());
        read() - before
    };
    // The manifest, the peer's name and the like; the model has megabytes. The first one also reads what is
    // then kept in memory, and the scrubber may read blobs at the same time as some.
    let reads: Vec<u64> = (0..5).map(|_| read_by_open()).collect();
    assert!(reads.iter().any(|bytes| *bytes < 32 << 10), "{reads:?}");
}

#[test]
fn client_can_wait_for_a_daemon_that_is_restarted() {
    let mut daemon = daemon_with(&ModelFile::dense(1));
    let client: Client = daemon.client();
    assert_eq!(client.models().unwrap().models.len(), 1);
    daemon.kill();
    let error = client.models().unwrap_err();
    assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
    daemon.restart();
    assert_eq!(client.models().unwrap().models.len(), 1);
}
