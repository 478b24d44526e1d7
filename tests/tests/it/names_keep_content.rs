//! No verb changes the content of a name unless asked to; what a pull replaces can be restored from the trash.

use std::collections::BTreeMap;
use std::fs::{self, File};

use blobd_client::client::Client;
use blobd_client::protocol::naming::{EditParams, KeyChange};
use blobd_client::protocol::request::{
    GcParams, ImportParams, PullParams, RenameParams, TagParams, UndeleteParams,
};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use proptest::prelude::*;

const MODEL: &str = "application/vnd.ollama.image.model";
/// Few names, so that steps conflict.
const NAMES: [&str; 4] = ["a:latest", "b:latest", "hf.co/me/c:q", "d:Q4_0"];
const FOLDERS: [&str; 3] = ["x", "y", "x/y"];
const FILES: [&str; 4] = ["d-Q4_0.gguf", "d.Q4_0.gguf", "a.gguf", "ä.gguf"];

/// One verb that may set a name, without `--force`.
#[derive(Clone, Debug)]
enum Step {
    Import {
        seed: u64,
        name: usize,
    },
    ImportUnnamed {
        seed: u64,
        folder: usize,
        file: usize,
    },
    /// A new version at the registry, or a page, under one of two tags.
    Publish {
        source: usize,
        seed: u64,
    },
    Pull {
        source: usize,
        name: Option<usize>,
    },
    Tag {
        from: usize,
        to: usize,
    },
    Rename {
        from: usize,
        to: usize,
    },
    Edit {
        from: usize,
        to: usize,
    },
    Undelete {
        from: usize,
        to: Option<usize>,
    },
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let (name, seed, source) = (0..NAMES.len(), 1..6_u64, 0..3_usize);
    prop_oneof![
        (seed.clone(), name.clone()).prop_map(|(seed, name)| Step::Import { seed, name }),
        (seed.clone(), 0..FOLDERS.len(), 0..FILES.len())
            .prop_map(|(seed, folder, file)| Step::ImportUnnamed { seed, folder, file }),
        (source.clone(), seed).prop_map(|(source, seed)| Step::Publish { source, seed }),
        (source.clone(), prop::option::of(name.clone()))
            .prop_map(|(source, name)| Step::Pull { source, name }),
        (source, prop::option::of(name.clone())).prop_map(|(source, name)| Step::Pull { source, name }),
        (name.clone(), name.clone()).prop_map(|(from, to)| Step::Tag { from, to }),
        (name.clone(), name.clone()).prop_map(|(from, to)| Step::Rename { from, to }),
        (name.clone(), name.clone()).prop_map(|(from, to)| Step::Edit { from, to }),
        (name.clone(), prop::option::of(name)).prop_map(|(from, to)| Step::Undelete { from, to }),
        Just(Step::Collect),
    ]
}

struct Fixture {
    daemon: TestDaemon,
    client: Client,
    registry: FakeRegistry,
    /// The file of each model that was seen under a name.
    contents: BTreeMap<Digest, Vec<u8>>,
}

/// What a name means and which source it follows.
type Names = BTreeMap<String, (Digest, Option<String>)>;

impl Fixture {
    fn new() -> Self {
        let daemon = TestDaemon::start();
        let (client, registry) = (daemon.client(), FakeRegistry::start().unwrap());
        let fixture = Self { daemon, client, registry, contents: BTreeMap::new() };
        (0..3).for_each(|source| fixture.publish(source, 1));
        fixture
    }

    fn publish(&self, source: usize, seed: u64) {
        let bytes = ModelFile::dense_of(seed, 1, 32).bytes();
        match source {
            2 => self.registry.add_page("/models/a.gguf", &bytes, &[]),
            tag => drop(self.registry.add_model(&format!("me/m:{tag}"), b"{}", &[(MODEL, &bytes)]).unwrap()),
        }
    }

    fn source(&self, source: usize) -> String {
        match source {
            2 => format!("{}/models/a.gguf", self.registry.url()),
            tag => self.registry.name(&format!("me/m:{tag}")),
        }
    }

    fn names(&self) -> Names {
        let models = self.client.models().unwrap().models;
        models.into_iter().map(|model| (model.name, (model.digest, model.follows))).collect()
    }

    /// A step may be refused: the names show what has happened.
    fn take(&self, step: &Step) {
        let reference = |name: usize| -> Reference { NAMES[name].parse().unwrap() };
        let client = &self.client;
        match *step {
            Step::Import { seed, name } => self.import(seed, "model.gguf", Some(reference(name))),
            Step::ImportUnnamed { seed, folder, file } => {
                self.import(seed, &format!("{}/{}", FOLDERS[folder], FILES[file]), None);
            }
            Step::Publish { source, seed } => self.publish(source, seed),
            Step::Pull { source, name } => {
                let source = self.source(source).parse().unwrap();
                let params = PullParams { name: name.map(reference), ..PullParams::of_source(source) };
                drop(client.pull(&params, |_| ()));
            }
            Step::Tag { from, to } => {
                let params =
                    TagParams { source: reference(from), target: reference(to), force: false, origin: None };
                drop(client.tag(&params));
            }
            Step::Rename { from, to } => {
                let params = RenameParams { source: reference(from), target: reference(to), force: false };
                drop(client.rename(&params));
            }
            Step::Edit { from, to } => {
                let value = Some("edited".to_owned());
                let key = KeyChange { key: "general.name".to_owned(), value, value_type: None };
                let (source, target) = (reference(from), reference(to));
                let keys = vec![key];
                let params = EditParams {
                    source,
                    target,
                    keys,
                    template_layer: None,
                    files: Vec::new(),
                    force: false,
                    dry_run: false,
                };
                drop(client.edit(&params, |_| ()));
            }
            Step::Undelete { from, to } => {
                let (reference, name) = (reference(from), to.map(reference));
                drop(client.undelete(&UndeleteParams { reference, name, force: false }));
            }
            Step::Collect => drop(client.gc(&GcParams::default()).unwrap()),
        }
    }

    fn import(&self, seed: u64, file_name: &str, name: Option<Reference>) {
        let path = self.daemon.scratch().join("import.gguf");
        fs::write(&path, ModelFile::dense_of(seed, 1, 32).bytes()).unwrap();
        let file_name = file_name.to_owned();
        let params = ImportParams { name, ..ImportParams::new(file_name) };
        drop(self.client.import(&params, File::open(&path).unwrap(), |_, _| ()));
    }

    fn export(&self, name: &str) -> Vec<u8> {
        self.daemon.command().run(["export", name, "-o", "-"]).succeeds().stdout
    }

    fn learn(&mut self) {
        for (name, (digest, _)) in self.names() {
            if !self.contents.contains_key(&digest) {
                let bytes = self.export(&name);
                self.contents.insert(digest, bytes);
            }
        }
    }

    /// Each name has what it had, except that it was renamed, or pulled from the source that it follows. What such a pull
    /// has replaced is in the trash.
    fn check(&self, step: &Step, before: &Names) {
        let (after, trash) = (self.names(), self.client.trash().unwrap().models);
        for (name, (digest, follows)) in before {
            let now = after.get(name).map(|(digest, _)| *digest);
            let renamed = matches!(step, Step::Rename { from, .. } if NAMES[*from] == name);
            if now == Some(*digest) || renamed && now.is_none() {
                continue;
            }
            let Step::Pull { source, .. } = step else {
                panic!("{step:?}: {name} had {digest}, and has {now:?}");
            };
            let source = self.source(*source);
            let follows = follows.as_deref().unwrap_or_default();
            assert!(follows == source || follows == format!("http://{source}"), "{step:?}: {name} {follows}");
            let kept = trash.iter().any(|kept| kept.name == *name && kept.digest == *digest && kept.replaced);
            assert!(kept, "{step:?}: {name} had {digest}, which cannot be restored");
        }
    }

    /// Restores everything in the trash and compares it bit for bit.
    fn restore_all(&self) {
        while let Some(trashed) = self.client.trash().unwrap().models.pop() {
            let reference = format!("{}@{}", trashed.name, trashed.digest).parse().unwrap();
            let name = Some("restored".parse().unwrap());
            self.client.undelete(&UndeleteParams { reference, name, force: true }).unwrap();
            assert!(self.export("restored") == self.contents[&trashed.digest], "{}", trashed.name);
            self.daemon.command().line("rm restored").succeeds();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 64, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn no_verb_changes_the_content_of_a_name_unless_asked_to(steps in prop::collection::vec(step(), 1..24)) {
        let mut fixture = Fixture::new();
        for step in &steps {
            let before = fixture.names();
            fixture.take(step);
            fixture.check(step, &before);
            fixture.learn();
        }
        fixture.restore_all();
    }
}
