//! Repairs from a registry and from the store itself.

use std::fs;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;

use super::{TENSOR, corrupt, tensor_digest};

const MODEL: &str = "application/vnd.ollama.image.model";
const TEMPLATE: &str = "application/vnd.ollama.image.template";
const PROMPT: &[u8] = b"{{ .System }} {{ .Prompt }}";

/// A registry, a daemon that has pulled its model, and the model's name.
struct Pulled {
    registry: FakeRegistry,
    daemon: TestDaemon,
    name: String,
    model: ModelFile,
}

impl Pulled {
    fn new(model: ModelFile) -> Self {
        let registry = FakeRegistry::start().unwrap();
        registry
            .add_model("library/tiny:latest", b"{}", &[(MODEL, &model.bytes()), (TEMPLATE, PROMPT)])
            .unwrap();
        let (daemon, name) = (TestDaemon::start(), registry.name("library/tiny:latest"));
        daemon.command().run(["pull", &name]).succeeds();
        Self { registry, daemon, name, model }
    }

    fn spoil_tensor(&self, tensor: &str) -> String {
        let digest = tensor_digest(&self.daemon.command(), &self.name, tensor);
        flip_byte(&blob_path(self.daemon.root(), &digest), 5);
        digest
    }

    /// Repairs. Returns the exit code, the only finding and the number of bytes that the registry sent.
    fn repair(&self) -> (i32, serde_json::Value, u64) {
        let before = self.registry.bytes_served();
        let run = self.daemon.command().line("verify --repair --json");
        let [found] = corrupt(&run).try_into().unwrap();
        (run.code, found, self.registry.bytes_served() - before)
    }

    fn check_whole(&self) {
        check_blobs(self.daemon.root());
        self.daemon.command().line("verify").succeeds();
        let exported = self.daemon.command().run(["export", &self.name, "-o", "-"]).succeeds();
        assert!(exported.stdout == self.model.bytes());
    }
}

#[test]
fn repair_fetches_the_tensor_and_nothing_else() {
    for delivery in [BlobDelivery::Redirect, BlobDelivery::Direct, BlobDelivery::RelativeLocation] {
        let pulled = Pulled::new(ModelFile { padding: 7, ..ModelFile::dense(1) });
        pulled.registry.set_blob_delivery(delivery);
        pulled.registry.require_token();
        let size = pulled.model.tensors.iter().find(|tensor| tensor.name == TENSOR).unwrap().size_bytes();
        let digest = pulled.spoil_tensor(TENSOR);
        let (code, found, served) = pulled.repair();
        assert_eq!((code, served), (0, size), "{found}");
        assert_eq!((found["repaired"].as_bool(), found["fetched_bytes"].as_u64()), (Some(true), Some(size)));
        assert_eq!(found["digest"], digest);
        assert!(!pulled.registry.credentials_leaked());
        pulled.check_whole();
        assert_eq!(names(&pulled.daemon.root().join("quarantine")).len(), 1);
    }
}

#[test]
fn expert_group_is_fetched_in_as_many_ranges_as_it_takes() {
    let pulled = Pulled::new(ModelFile::separate_experts(1, 12));
    pulled.spoil_tensor("blk.0.ffn_up.3.weight");
    let by_the_pull = pulled.registry.requests().len();
    let (code, found, served) = pulled.repair();
    assert_eq!((code, served), (0, 12 * 1024), "{found}");
    let ranges = pulled
        .registry
        .requests()
        .into_iter()
        .skip(by_the_pull)
        .filter(|request| request.header("range").is_some());
    // In the file, 10 and 11 are between 1 and 2, so there are three ranges: 0 to 1, 2 to 9, 10 to 11. Each
    // causes a request to the registry and one to the content network.
    assert_eq!(ranges.count(), 2 * 3);
    pulled.check_whole();
}

#[test]
fn header_template_and_configuration_are_repaired() {
    let pulled = Pulled::new(ModelFile::dense(1));
    let shown = pulled.daemon.command().run(["show", &pulled.name, "--json"]).json();
    for layer in shown["layers"].as_array().unwrap().iter().filter(|layer| layer["stored"] == "blob") {
        flip_byte(&blob_path(pulled.daemon.root(), layer["digest"].as_str().unwrap()), 1);
        let (code, found, served) = pulled.repair();
        assert_eq!((code, Some(served)), (0, layer["size"].as_u64()), "{found}");
        assert_eq!(found["digest"], layer["digest"]);
    }
    let file = shown["layers"][1]["digest"].as_str().unwrap().replace(':', "-");
    let recipe = fs::read(pulled.daemon.root().join(format!("recipes/{file}.json"))).unwrap();
    let (header, size) = blobd_store_format::recipe::Recipe::parse(&recipe).unwrap().header().unwrap();
    flip_byte(&blob_path(pulled.daemon.root(), &header.to_string()), 9);
    let (code, found, served) = pulled.repair();
    assert_eq!((code, served), (0, size), "{found}");
    pulled.check_whole();
}

#[test]
fn missing_blob_is_fetched() {
    let pulled = Pulled::new(ModelFile::dense(1));
    let digest = tensor_digest(&pulled.daemon.command(), &pulled.name, TENSOR);
    fs::remove_file(blob_path(pulled.daemon.root(), &digest)).unwrap();
    let (code, found, _) = pulled.repair();
    assert_eq!((code, found["repaired"].as_bool()), (0, Some(true)), "{found}");
    pulled.check_whole();
}

#[test]
fn registry_without_ranges_can_repair() {
    for fault in [Fault::IgnoreRange, Fault::WrongRange, Fault::UnnamedRange, Fault::Gzip] {
        let pulled = Pulled::new(ModelFile::dense(1));
        pulled.registry.add_fault("/cdn/", usize::MAX, fault);
        pulled.spoil_tensor(TENSOR);
        let (code, found, _) = pulled.repair();
        assert_eq!((code, found["repaired"].as_bool()), (0, Some(true)), "{found}");
        assert!(found["fetched_bytes"].as_u64().unwrap() <= pulled.model.bytes().len() as u64);
        pulled.check_whole();
    }
}

#[test]
fn bytes_that_are_not_the_tensor_are_not_published() {
    let pulled = Pulled::new(ModelFile::dense(1));
    let digest = pulled.spoil_tensor(TENSOR);
    let faults = [
        Fault::FlipByte(3),
        Fault::ShortBy(1),
        Fault::ExtraBytes(1),
        Fault::CutAfter(100),
        Fault::Status(404),
        Fault::Status(416),
        Fault::WebPage,
        Fault::Body(vec![0; 100]),
    ];
    for fault in faults {
        pulled.registry.add_fault("/cdn/", usize::MAX, fault.clone());
        let (code, found, _) = pulled.repair();
        pulled.registry.clear_faults();
        assert_eq!((code, found["repaired"].as_bool()), (5, Some(false)), "{fault:?}: {found}");
        assert!(found["reason"].as_str().unwrap().contains("not repaired: "), "{fault:?}: {found}");
        assert!(!blob_path(pulled.daemon.root(), &digest).exists(), "{fault:?}");
        assert_eq!(staged(pulled.daemon.root()), [""; 0], "{fault:?}");
    }
    assert_eq!(pulled.repair().0, 0, "without a fault");
    pulled.check_whole();
}

#[test]
fn unreachable_registry_is_reported() {
    let Pulled { registry, daemon, name, model } = Pulled::new(ModelFile::dense(1));
    let digest = tensor_digest(&daemon.command(), &name, TENSOR);
    flip_byte(&blob_path(daemon.root(), &digest), 5);
    drop(registry);
    let run = daemon.command().line("verify --repair --json").exits_with(5);
    let [found] = corrupt(&run).try_into().unwrap();
    assert!(found["reason"].as_str().unwrap().contains("127.0.0.1"), "{found}");
    // Importing the original file repairs it, too.
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon.command().line("verify").succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
}

#[test]
fn tensor_is_repaired_from_the_origin_of_another_model() {
    let pulled = Pulled::new(ModelFile::dense(1));
    // The same tensors, imported under a name that sorts first; its origin is not a registry.
    let sibling =
        ModelFile::dense(1).with_changed("output.weight").write_to(pulled.daemon.scratch(), "a.gguf");
    pulled.daemon.command().run(["import".as_ref(), sibling.as_os_str()]).succeeds();
    pulled.spoil_tensor(TENSOR);
    let (code, found, _) = pulled.repair();
    assert_eq!((code, found["models"].as_array().unwrap().len()), (0, 2), "{found}");
    pulled.check_whole();
}

#[test]
fn whole_file_in_the_store_repairs_its_tensors_without_a_network() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    let model = ModelFile::separate_experts(3, 11);
    let path = model.write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    let file = blobd.line("show m --json").json()["layers"][1]["digest"].as_str().unwrap().to_owned();
    let whole = blob_path(&root, &file);
    fs::write(&whole, model.bytes()).unwrap();
    let digest = tensor_digest(&blobd, "m", "blk.0.ffn_down.10.weight");
    flip_byte(&blob_path(&root, &digest), 5);
    // The manually added copy has the wrong mode, which is reported and repaired, too.
    let found = corrupt(&blobd.line("verify --repair --json").succeeds());
    let found = found.iter().find(|found| found["digest"] == digest).unwrap();
    assert_eq!((found["repaired"].as_bool(), found.get("fetched_bytes")), (Some(true), None));
    check_blobs(&root);
    assert!(blobd.run(["export", "m", "-o", "-"]).stdout == model.bytes());
}

#[test]
fn correct_copy_in_quarantine_is_restored() {
    let folder = tmpfs_directory();
    let root = folder.path().join("store");
    let blobd = Blobd::at_root(&root);
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    let digest = tensor_digest(&blobd, "m", TENSOR);
    let blob = blob_path(&root, &digest);
    flip_byte(&blob, 5);
    blobd.line("verify").exits_with(5);
    let quarantine = root.join("quarantine");
    flip_byte(&quarantine.join(&names(&quarantine)[0]), 5);
    let [found] = corrupt(&blobd.line("verify m --repair --json").succeeds()).try_into().unwrap();
    assert_eq!((found["repaired"].as_bool(), found.get("fetched_bytes")), (Some(true), None));
    check_blobs(&root);
    blobd.line("verify").succeeds();
}

#[test]
fn bytes_of_a_repair_that_have_a_wrong_digest_are_fetched_a_second_time() {
    let pulled = Pulled::new(ModelFile::dense(1));
    pulled.spoil_tensor(TENSOR);
    pulled.registry.add_fault("/cdn/", 1, Fault::FlipByte(3));
    let (code, found, served) = pulled.repair();
    assert_eq!((code, &found["repaired"], found["fetched_bytes"].as_u64()), (0, &true.into(), Some(served)));
    pulled.check_whole();
    pulled.spoil_tensor(TENSOR);
    pulled.registry.add_fault("/cdn/", 2, Fault::FlipByte(3));
    let (code, found, _served) = pulled.repair();
    assert_eq!((code, &found["repaired"]), (5, &false.into()));
    assert!(found["reason"].as_str().unwrap().ends_with(", twice"), "{found}");
    let (code, found, _served) = pulled.repair();
    assert_eq!((code, &found["repaired"]), (0, &true.into()), "{found}");
    pulled.check_whole();
}
