//! Two users of one store: a rule denies the guest the models named `secret/*`, and the owner nothing.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use blobd_client::protocol::pull::{PullDone, PullPlan};
use blobd_client::protocol::request::{PullParams, RemoveParams};
use blobd_fixtures::model::{ModelFile, ModelTensor, noise};
use blobd_fixtures::registry::{FakeRegistry, Fault};
use blobd_registry::{RegistryClient, RegistryPolicy, RetryPolicy};
use blobd_store::FileReader;
use blobd_store::testing::new_store;
use blobd_store_format::gguf::GgmlType;
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::*;
use crate::access::Access;
use crate::names::Names;
use crate::ops::{FetchLimit, Pull, Requester, TermsCache, plan_pull, pull, remove};
use crate::policy::{Action, NamePattern, Pattern, Policy, Rule};
use crate::principal::{Groups, Principal};
use crate::transfer::Transfers;
use crate::user_set::{Member, NameOrNumber, UserSet};

mod property;

const OWNER: u32 = 70;
const GUEST: u32 = 71;

const MODEL: &str = "application/vnd.ollama.image.model";
const LICENSE: &str = "application/vnd.ollama.image.license";
const CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// Six of these are large enough to be compared with stored tensors.
const TENSOR_BYTES: usize = 200 << 10;
const TENSORS: usize = 6;

/// In place of a fine-tuned tensor: a tensor with other bytes, which samples find.
const RETRAINED: usize = 9;

/// A file whose tensors are these fine-tunes of a common base. They differ from it in three bits, which samples miss.
/// So do headers with the vocabularies 0 and 1.
fn file(vocabulary: usize, tunes: [usize; TENSORS]) -> Vec<u8> {
    let mut words: Vec<String> = (0..16_000).map(|number| format!("{number:08}")).collect();
    words[7_777] = format!("word {vocabulary:03}");
    let mut model = ModelFile::empty().with("tokenizer.ggml.tokens", words);
    for (tensor, tune) in tunes.into_iter().enumerate() {
        let seed = if tune == RETRAINED { "retrained" } else { "base" };
        let mut bytes = noise(tensor as u64, seed, TENSOR_BYTES);
        if (1..RETRAINED).contains(&tune) {
            [9, TENSOR_BYTES / 2, TENSOR_BYTES - 7].iter().for_each(|place| bytes[place + tune] ^= 1);
        }
        let shape = [TENSOR_BYTES as u64];
        model.tensors.push(ModelTensor::of_bytes(format!("blk.{tensor}.w"), GgmlType::I8, &shape, bytes));
    }
    model.bytes()
}

fn rule() -> Rule {
    Rule {
        action: Action::Deny,
        registries: Vec::new(),
        names: Vec::new(),
        licenses: Vec::new(),
        formats: Vec::new(),
        users: UserSet::new(&[Member::User(NameOrNumber::Number(GUEST))], &Names::default()),
        except: UserSet::default(),
        reason: Some("not for guests".to_owned()),
        line: None,
    }
}

fn denying_names(pattern: &str) -> Rule {
    Rule { names: vec![NamePattern::parse(pattern).unwrap()], ..rule() }
}

/// A registry with models that name one file and serve another.
struct Source {
    registry: FakeRegistry,
    folder: TempDir,
}

impl Source {
    fn start() -> Self {
        Self { registry: FakeRegistry::start().unwrap(), folder: tempfile::tempdir().unwrap() }
    }

    fn name(&self) -> String {
        self.registry.name("x/y:1")
    }

    /// Publishes a model of the file `named`, as which `served` is sent. An incomplete model names another layer that
    /// the registry does not have.
    fn publish(&self, named: &[u8], served: &[u8], is_complete: bool) {
        let digest = Digest::of(named);
        let path: PathBuf = self.folder.path().join(Digest::of(served).to_hex());
        fs::write(&path, served).unwrap();
        self.registry.add_blob_file(digest, &path).unwrap();
        let config = self.registry.add_blob(b"{}".as_slice());
        let mut layers = vec![json!({ "mediaType": MODEL, "digest": digest, "size": named.len() })];
        if !is_complete {
            layers.push(json!({ "mediaType": LICENSE, "digest": Digest::of(b"absent"), "size": 300 << 10 }));
        }
        // Models with one manifest are one model, with all its names.
        let manifest = json!({ "schemaVersion": 2, "layers": layers, "annotations": { "from": self.name() },
            "config": { "mediaType": CONFIG, "digest": config, "size": 2 } });
        self.registry.add_manifest("x/y:1", manifest.to_string().as_bytes());
    }

    /// From now on the server closes the connection after this many bytes of a file.
    fn break_off_after(&self, bytes: usize) {
        self.registry.add_fault("/cdn/", usize::MAX, Fault::EmptyRange(bytes as u64));
        self.registry.add_fault("/cdn/", usize::MAX, Fault::CutAfter(bytes));
    }
}

struct Site {
    _folder: TempDir,
    store: Arc<Store>,
    registry: RegistryClient,
    transfers: Transfers,
    fetches: FetchLimit,
    runtime: Runtime,
    rule: Rule,
}

impl Site {
    fn new() -> Self {
        let (folder, store) = new_store();
        let wait = Duration::from_millis(1);
        let retry =
            RetryPolicy { backoff: wait, max_failures: 1, max_first_failures: 1, ..RetryPolicy::default() };
        let registry = RegistryClient::new(&RegistryPolicy { retry, ..RegistryPolicy::default() }).unwrap();
        let (transfers, fetches) = (Transfers::default(), FetchLimit::default());
        let (runtime, rule) = (Runtime::new().unwrap(), denying_names("secret/*"));
        Self { _folder: folder, store, registry, transfers, fetches, runtime, rule }
    }

    fn policy(&self, uid: u32) -> CallerPolicy {
        let rules = vec![self.rule.clone()];
        let policy = Policy { rules, default: Action::Allow, file: None, names: Names::default() };
        CallerPolicy::new(Arc::new(policy), &principal(uid), &Arc::<TermsCache>::default())
    }

    fn with_pull<T>(&self, uid: u32, source: &str, name: &str, run: impl FnOnce(Pull<'_>) -> T) -> T {
        let source = PullParams::of_source(source.parse().unwrap());
        let params = PullParams { name: Some(name.parse().unwrap()), ..source };
        let (events, _receiver) = mpsc::channel(1);
        let requester = Requester::new(&principal(uid), Access::default().rights_of(&principal(uid)));
        run(Pull {
            store: &self.store,
            registry: &self.registry,
            transfers: &self.transfers,
            fetches: &self.fetches,
            handle: self.runtime.handle(),
            requester,
            policy: &self.policy(uid),
            params: &params,
            events: &events,
            watch: None,
            arriving: None,
            gauge: None,
        })
    }

    fn pull(&self, uid: u32, source: &Source, name: &str) -> Result<PullDone, OpError> {
        self.with_pull(uid, &source.name(), name, pull)
    }

    fn plan(&self, uid: u32, source: &Source) -> PullPlan {
        self.with_pull(uid, &source.name(), "planned", |pull| plan_pull(pull, &|_, _| None)).unwrap()
    }

    /// Has the owner pull a model of this file from a registry that has it.
    fn add(&self, name: &str, file: &[u8]) {
        let source = Source::start();
        source.publish(file, file, true);
        self.pull(OWNER, &source, name).unwrap();
    }

    fn remove(&self, name: &Reference) {
        let params = RemoveParams { references: vec![name.clone()], ..RemoveParams::default() };
        remove(&self.store, &|_, _| None, Requester::own(), &params).unwrap();
    }

    /// Whether a user may open a model, and its weights are this file.
    fn reads(&self, uid: u32, name: &str, file: &[u8]) -> bool {
        let name = name.parse().unwrap();
        let Ok(model) = self.store.names().model(&name) else { return false };
        self.policy(uid).check_named(&self.store, &name).is_ok()
            && FileReader::new(self.store.content(), &model.files[1])
                .read_range(0..file.len() as u64)
                .unwrap()
                == file
    }
}

fn principal(uid: u32) -> Principal {
    Principal {
        pid: 1,
        uid,
        groups: Groups { primary: uid, supplementary: None },
        namespaces: crate::peer_process::Namespaces::default(),
    }
}

/// The bytes that the only file of a plan takes from the store.
fn from_store(plan: &PullPlan) -> [u64; 3] {
    let file = plan.files.iter().find(|file| file.name == "model").unwrap();
    [file.stored_bytes, file.resumed_bytes, file.similar_bytes]
}

#[test]
fn samples_that_agree_give_nothing_of_a_denied_model() {
    let (base, tuned) = (file(0, [0; TENSORS]), file(1, [1; TENSORS]));
    let (site, source) = (Site::new(), Source::start());
    site.add("secret/x", &tuned);
    source.publish(&tuned, &base, true);
    assert_eq!(from_store(&site.plan(GUEST, &source)), [0; 3]);
    assert!(matches!(site.pull(GUEST, &source, "stolen"), Err(OpError::DigestMismatch { .. })));
    // Neither does the public base, whose tensors agree too, hide that the file is not served.
    site.add("open/base", &base);
    site.pull(GUEST, &source, "stolen").unwrap_err();
    // Once a model that the guest may read has the tensors, they are reused.
    site.add("open/tuned", &tuned);
    assert_eq!(from_store(&site.plan(GUEST, &source))[0], tuned.len() as u64);
    site.pull(GUEST, &source, "own").unwrap();
    assert!(site.reads(GUEST, "own", &tuned));
}

#[test]
fn tensors_of_a_readable_model_are_reused_for_a_user_with_rules() {
    let (site, source) = (Site::new(), Source::start());
    site.add("open/base", &file(0, [0; TENSORS]));
    let tuned = file(0, [0, 0, 0, 0, 0, RETRAINED]);
    source.publish(&tuned, &tuned, true);
    let done = site.pull(GUEST, &source, "own").unwrap();
    assert!(done.reused_bytes >= (TENSORS as u64 - 1) * TENSOR_BYTES as u64, "{done:?}");
    assert!(site.reads(GUEST, "own", &tuned));
}

/// A file with one tensor that the source has, and five that only a denied model has.
fn completed_with_secret_tensors() -> (Site, Source, Vec<u8>) {
    let (site, source) = (Site::new(), Source::start());
    site.add("secret/x", &file(0, [1; TENSORS]));
    let mixed = |tune: usize| file(0, [tune, tune, tune, tune, tune, RETRAINED]);
    let (named, served) = (mixed(1), mixed(0));
    source.publish(&named, &served, false);
    site.pull(OWNER, &source, "unfinished").unwrap_err();
    assert!(!site.store.content().downloads().unwrap().is_empty());
    source.publish(&named, &served, true);
    (site, source, named)
}

#[test]
fn download_that_took_tensors_of_a_denied_model_is_not_continued_from_the_same_source() {
    let (site, source, named) = completed_with_secret_tensors();
    assert_eq!(from_store(&site.plan(GUEST, &source)), [0; 3]);
    site.pull(GUEST, &source, "stolen").unwrap_err();
    let done = site.pull(OWNER, &source, "finished").unwrap();
    assert!(done.downloaded_bytes < TENSOR_BYTES as u64, "the owner continues it: {done:?}");
    assert!(site.reads(OWNER, "finished", &named));
}

#[test]
fn download_that_took_tensors_of_a_readable_model_is_continued_from_the_same_source() {
    let (mut site, source, named) = completed_with_secret_tensors();
    site.rule = denying_names("other/*");
    let done = site.pull(GUEST, &source, "own").unwrap();
    assert!(done.downloaded_bytes < TENSOR_BYTES as u64, "{done:?}");
    assert!(site.reads(GUEST, "own", &named));
}

#[test]
fn own_download_that_took_tensors_of_a_model_is_discarded_when_that_is_denied() {
    let (mut site, source) = (Site::new(), Source::start());
    let tuned = file(0, [1; TENSORS]);
    site.add("secret/x", &tuned);
    site.rule = denying_names("other/*");
    let other = file(1, [1; TENSORS]);
    source.publish(&other, &other, false);
    site.pull(GUEST, &source, "unfinished").unwrap_err();
    source.publish(&other, &file(1, [0; TENSORS]), true);
    site.rule = denying_names("secret/*");
    assert_eq!(from_store(&site.plan(GUEST, &source)), [0; 3]);
    site.pull(GUEST, &source, "stolen").unwrap_err();
}

/// The guest's source has only what the other one did not send.
#[test]
fn download_that_another_source_began_is_not_continued_after_it_has_changed_the_source() {
    let (site, [trusted, evil]) = (Site::new(), [(); 2].map(|()| Source::start()));
    let (tuned, base) = (file(1, [1; TENSORS]), file(0, [0; TENSORS]));
    trusted.publish(&tuned, &tuned, true);
    let half = tuned.len() / 2;
    trusted.break_off_after(half);
    site.pull(OWNER, &trusted, "secret/x").unwrap_err();
    assert!(site.store.content().downloads().unwrap()[0].received_bytes > half as u64 / 2);
    evil.publish(&tuned, &base, true);
    evil.registry.add_fault("/cdn/", usize::MAX, Fault::Status(404));
    site.pull(OWNER, &evil, "unfinished").unwrap_err();
    assert_eq!(site.store.content().downloads().unwrap()[0].about.as_ref().unwrap().source, evil.name());
    evil.registry.clear_faults();
    let mixed = [&base[..base.len() / 4], &tuned[base.len() / 4..]].concat();
    evil.publish(&tuned, &mixed, true);
    assert_eq!(from_store(&site.plan(GUEST, &evil)), [0; 3]);
    site.pull(GUEST, &evil, "stolen").unwrap_err();
    // Bytes that a guest has received belong to the guest, whatever other users have.
    evil.publish(&tuned, &tuned, true);
    site.pull(GUEST, &evil, "own").unwrap();
}

#[test]
fn refusal_of_a_manifest_says_nothing_of_a_denied_file_that_it_names() {
    let (mut site, source) = (Site::new(), Source::start());
    let secret = ModelFile::dense(1).with("general.license", "secret-1.0").bytes();
    site.add("secret/x", &secret);
    site.rule = Rule { licenses: vec![Pattern::parse("secret-*").unwrap()], ..rule() };
    source.publish(&secret, &secret, true);
    source.registry.add_fault("/cdn/", usize::MAX, Fault::Status(404));
    let error = site.pull(GUEST, &source, "stolen").unwrap_err();
    assert!(!matches!(error, OpError::DeniedByPolicy { .. }), "{error}");
    source.registry.clear_faults();
    let error = site.pull(GUEST, &source, "stolen").unwrap_err();
    assert!(matches!(error, OpError::DeniedByPolicy { .. }), "{error}");
}

#[test]
fn each_model_is_decided_about_once_and_none_for_users_without_rules() {
    let site = Site::new();
    for number in 0..3 {
        site.add(&format!("open/{number}"), &ModelFile::dense(number).bytes());
    }
    let file = |number| {
        let model = site.store.names().model(&format!("open/{number}").parse().unwrap()).unwrap();
        model.files[1].descriptor.clone()
    };
    let decided = |uid| {
        let policy = site.policy(uid);
        let reusable = Reusable::new(&site.store, &policy);
        for number in [1, 1, 2] {
            assert!(reusable.has_file(&file(number)).unwrap());
        }
        site.store.names().all_summaries().unwrap().iter().for_each(|tag| {
            assert!(reusable.may_read(&tag.reference, tag.manifest.as_ref().unwrap().digest));
        });
        reusable.known().models.len()
    };
    assert_eq!((decided(GUEST), decided(OWNER)), (3, 0));
}

#[test]
fn file_that_another_pull_has_completed_is_found_when_it_is_looked_for_again() {
    let site = Site::new();
    let bytes = ModelFile::dense(1).bytes();
    site.add("secret/x", &bytes);
    let file = site.store.names().model(&"secret/x".parse().unwrap()).unwrap().files[1].descriptor.clone();
    let policy = site.policy(GUEST);
    let reusable = Reusable::new(&site.store, &policy);
    assert!(!reusable.has_file(&file).unwrap());
    site.add("open/x", &bytes);
    assert!(!reusable.has_file(&file).unwrap(), "it is remembered");
    let remote = RemoteFile::layer(&"me/x:1".parse().unwrap(), &file);
    reusable.look_again(&remote);
    assert!(reusable.has_file(&file).unwrap());
}
