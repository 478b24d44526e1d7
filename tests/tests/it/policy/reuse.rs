//! Stored tensors and headers of a denied model stand in for no download, although their samples agree.
//!
//! A registry names the digest of the denied file, and serves another file of the same layout that agrees with it
//! nearly everywhere, as the public base of a fine-tune does.

use std::fs;

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::manifest::Manifest;
use blobd_tests::archives::tar;
use blobd_tests::command::Run;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::registry::FakeRegistry;
use blobd_tests::tensor_indexes::{IndexedModel, recipe_of};
use serde_json::{Value as Json, json};

use super::super::access::Shared;
use super::{MODEL, SOCKET, denying, fails};

const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const TENSOR: &str = "application/vnd.ollama.image.tensor";
const ARCHIVE: &str = "application/vnd.cncf.model.weight.v1.tar";

/// A store with a model at `secret/x` and a registry that serves `base` under the digest of its file.
struct Attack {
    shared: Shared,
    registry: FakeRegistry,
    secret: Vec<u8>,
    base: Vec<u8>,
}

impl Attack {
    fn start(media_type: &str, base: Vec<u8>, secret: Vec<u8>) -> Self {
        assert!(base.len() == secret.len() && base != secret);
        let [own, registry] = [(); 2].map(|()| FakeRegistry::start().unwrap());
        let manifest = own.add_model("secret/x:1", b"{}", &[(media_type, &secret)]).unwrap();
        let shared = Shared::start(SOCKET);
        shared.daemon.command().run(["pull", &own.name("secret/x:1"), "--name", "secret/x"]).succeeds();
        let path = shared.folder.path().join("base");
        fs::write(&path, &base).unwrap();
        let file = &manifest.layers()[0];
        registry.add_blob_file(file.digest, &path).unwrap();
        let config = registry.add_blob(b"{ }".as_slice());
        let raw = json!({ "schemaVersion": 2,
            "config": { "mediaType": CONFIG, "digest": config, "size": 3 },
            "layers": [{ "mediaType": media_type, "digest": file.digest, "size": file.size }] });
        registry.add_manifest("me/y:1", raw.to_string().as_bytes());
        Self { shared, registry, secret, base }
    }

    fn plan(&self) -> Json {
        let run =
            self.shared.daemon.command().run(["pull", &self.registry.name("me/y:1"), "--dry-run", "--json"]);
        run.succeeds().json()
    }

    fn pull(&self, name: &str) -> Run {
        let source = self.registry.name("me/y:1");
        self.shared.daemon.command().run(["pull", &source, "--name", name, "--json"])
    }

    /// Without a rule, a stored file is present by its digest.
    fn gives_all_without_a_rule(&self) {
        let before = self.registry.bytes_served();
        assert_eq!(self.plan()["download_bytes"], 3, "the configuration");
        self.pull("allowed").succeeds();
        assert_eq!(self.registry.bytes_served() - before, 3);
        self.shared.daemon.command().line("rm allowed").succeeds();
    }

    fn gives_nothing_of_a_denied_model(&self) {
        self.shared.reload(&denying("name = \"secret/*\""));
        let before = self.registry.bytes_served();
        let plan = self.plan();
        let file = &plan["files"][0];
        let known = ["stored_bytes", "resumed_bytes", "similar_bytes"].map(|key| file[key].as_u64().unwrap());
        assert_eq!((known, &file["download_bytes"]), ([0; 3], &file["size"]), "{plan}");
        let needed = plan["space"]["needed_bytes"].as_u64().unwrap();
        assert!(needed >= self.base.len() as u64, "{plan}");
        fails(self.pull("stolen"));
        let served = self.registry.bytes_served() - before;
        assert!(served >= self.base.len() as u64, "all of the file is requested: {served}");
        self.shared.daemon.command().line("export stolen -o -").exits_with(3);
    }
}

fn attack(media_type: &str, base: Vec<u8>, secret: Vec<u8>) {
    let attack = Attack::start(media_type, base, secret);
    attack.gives_all_without_a_rule();
    attack.gives_nothing_of_a_denied_model();
}

/// A fine-tune that differs from its base in one bit of each tensor that a pull would compare.
fn tuned(base: &ModelFile) -> ModelFile {
    let mut tuned = base.clone();
    let large = tuned.tensors.iter_mut().filter(|tensor| tensor.size_bytes() > 64 << 10);
    large.for_each(ModelTensor::flip_last_bit);
    tuned
}

fn dense() -> ModelFile {
    ModelFile::dense_of(1, 2, 256)
}

#[test]
fn denied_file_is_not_assembled_from_tensors_whose_samples_agree_with_a_public_base() {
    attack(MODEL, dense().bytes(), tuned(&dense()).bytes());
}

#[test]
fn tensors_that_an_index_names_are_not_taken_from_a_denied_model() {
    let secret = tuned(&dense()).bytes();
    let attack = Attack::start(MODEL, dense().bytes(), secret.clone());
    let manifest = attack.registry.manifest("/v2/me/y/manifests/1").unwrap();
    let model = IndexedModel {
        registry: &attack.registry,
        name: ("me/y", "1"),
        manifest: Manifest::parse(manifest).unwrap(),
        file: Digest::of(&secret),
    };
    model.publish(&recipe_of(&secret));
    attack.gives_nothing_of_a_denied_model();
}

#[test]
fn header_of_a_denied_file_is_not_assembled_from_samples() {
    let with_word = |word: &str| {
        let words =
            (0..20_000).map(|number| if number == 7_777 { word.to_owned() } else { format!("{number:08}") });
        dense().with("tokenizer.ggml.tokens", words.collect::<Vec<_>>())
    };
    attack(MODEL, with_word("a").bytes(), with_word("b").bytes());
}

#[test]
fn packed_experts_of_a_denied_file_are_not_taken_by_samples() {
    let mut base = ModelFile::empty();
    for expert in 0..8 {
        let name = format!("blk.0.ffn_up.{expert}.weight");
        let stack = ("blk.0.ffn_up_exps.weight", expert);
        base.tensors.push(ModelTensor::of_expert(1, name, GgmlType::F16, &[256, 512], stack));
    }
    attack(MODEL, base.bytes(), tuned(&base).bytes());
}

#[test]
fn tensors_in_an_archive_of_a_denied_model_are_not_taken_by_samples() {
    let packed = |model: &ModelFile| tar(&[("m/tiny.gguf", &model.bytes())]);
    attack(ARCHIVE, packed(&dense()), packed(&tuned(&dense())));
}

#[test]
fn layer_with_one_tensor_of_a_denied_model_is_not_taken_by_samples() {
    let layer = |last: u8| {
        let data = vec![7; (2 << 20) - 1];
        let header =
            format!(r#"{{"w":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, data.len() + 1);
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &data, &[last]].concat()
    };
    attack(TENSOR, layer(1), layer(2));
}

/// What another model has of the file counts, however much of the denied one is the same.
#[test]
fn tensors_that_a_readable_model_has_too_are_reused() {
    let case = Attack::start(MODEL, dense().bytes(), tuned(&dense()).bytes());
    let public = dense().with("general.name", "public").with_changed("output.weight");
    let path = public.write_to(case.shared.folder.path(), "public.gguf");
    case.shared.daemon.command().run(["import", path.to_str().unwrap(), "--name", "public"]).succeeds();
    case.shared.reload(&denying("name = \"secret/*\""));
    let file = &case.plan()["files"][0];
    let similar = file["similar_bytes"].as_u64().unwrap();
    assert!(similar > case.base.len() as u64 / 2 && similar < case.base.len() as u64, "{file}");
    // The registry is asked for the rest of the file that it has, and for what differs.
    fails(case.pull("stolen"));
    case.registry.add_blob(case.secret.as_slice());
    case.pull("own").succeeds();
    assert!(case.shared.daemon.command().line("export own -o -").succeeds().stdout == case.secret);
}
