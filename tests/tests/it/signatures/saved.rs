//! Signatures in what `save` writes: they come back with the model, and `load` obeys the rules.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::Duration;

use blobd_fixtures::skipped::skipped;
use blobd_store_format::artifact::ArtifactKind;
use blobd_store_format::digest::Digest;
use blobd_store_format::index::ManifestIndex;
use blobd_tests::command::{self, Run};
use blobd_tests::registry::FakeRegistry;

use super::policy::Site;
use super::transport::{ALL, assert_nothing_stored, bundle_of, damaged};
use super::*;

/// How a saved model gets to another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Archive,
    Folder,
    Pipe,
}

impl Way {
    const ALL: [Self; 3] = [Self::Archive, Self::Folder, Self::Pipe];

    fn save(self, site: &Site, names: &[&str], more: &[&str]) -> PathBuf {
        let path = site.daemon.scratch().join(format!("{self:?}"));
        let output = match self {
            Self::Folder => format!("{}/", path.display()),
            Self::Archive | Self::Pipe => path.display().to_string(),
        };
        let _ = fs::remove_dir_all(&path);
        site.daemon.command().run([&["save"], names, &["-f", "-o", &output], more].concat()).succeeds();
        path
    }

    fn load(self, site: &Site, path: &Path) -> Run {
        let mut load = site.daemon.command().command();
        load.args(["load", "--json"]);
        if self != Self::Pipe {
            return command::run(load.arg(path));
        }
        let mut cat = Command::new("cat").arg(path).stdout(Stdio::piped()).spawn().unwrap();
        let run = command::run(load.arg("-").stdin(cat.stdout.take().unwrap()));
        drop(load);
        cat.wait().unwrap();
        run
    }

    /// Loads one model, which is refused for this reason; nothing may be left of it.
    fn is_refused(self, site: &Site, path: &Path, reason: &str) {
        let error = self.load(site, path).exits_with(7).error();
        assert_eq!(error.code, ErrorCode::DeniedByPolicy, "{self:?}: {error}");
        let error = error.to_string();
        assert!(error.contains(reason) && error.contains("[[trust]] demands"), "{self:?}: {reason}: {error}");
    }
}

/// The blob of a layout that is a folder.
fn blob(layout: &Path, digest: &Json) -> PathBuf {
    layout.join(ManifestIndex::layout_blob_path(digest.as_str().unwrap().parse().unwrap()))
}

fn read_json(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn saved_model_is_loaded_with_its_signatures_and_refused_without_the_right_one() {
    let publisher = Site::start("");
    for (seed, name) in [(1, "unsigned"), (2, "other"), (3, "right")] {
        publisher.import(seed, name);
    }
    publisher.sign("other", &publisher.other);
    publisher.sign("right", &publisher.site);
    publisher.sign("right", &publisher.other);
    for way in Way::ALL {
        let site = Site::start(ALL);
        for (name, reason) in [("unsigned", "not signed"), ("other", "expected one by site.pub")] {
            way.is_refused(&site, &way.save(&publisher, &[name], &[]), reason);
            assert_nothing_stored(&site);
        }
        // The others of the layout are loaded.
        let run = way.load(&site, &way.save(&publisher, &["other", "right", "unsigned"], &[])).exits_with(7);
        let document = run.json();
        let failed = document["failed"].as_array().unwrap().iter().map(|failed| &failed["name"]);
        assert_eq!(failed.collect::<Vec<_>>(), ["other:latest", "unsigned:latest"], "{document}");
        let signatures = site.daemon.command().line("verify right --signatures --json").succeeds().json();
        assert_eq!(signatures["models"][0]["signatures"].as_array().unwrap().len(), 2, "{signatures}");
        assert_eq!(site.refusal("right"), None);
        assert_eq!(site.daemon.client().models().unwrap().models.len(), 1);
    }
}

#[test]
fn unsigned_model_is_refused_before_its_weights_come_from_a_pipe() {
    let publisher = Site::start("");
    publisher.import(1, "m");
    publisher.sign("m", &publisher.other);
    let archive = fs::read(Way::Archive.save(&publisher, &["m"], &[])).unwrap();
    let weights = ModelFile::dense(1).bytes();
    let begin = archive.windows(256).position(|bytes| bytes == &weights[..256]).unwrap();
    let site = Site::start(ALL);
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut load = site.daemon.command().command();
    // No temporary file can be made.
    let absent = site.daemon.scratch().join("absent");
    load.args(["load", "-", "--json"]).stdin(Stdio::from(reader)).env("TMPDIR", absent);
    let (ended, is_ended) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            writer.write_all(&archive[..begin]).unwrap();
            // The weights never come.
            is_ended.recv_timeout(Duration::from_secs(30)).unwrap();
        });
        let run = command::run(&mut load);
        ended.send(()).unwrap();
        let error = run.exits_with(7).error();
        assert_eq!(error.code, ErrorCode::DeniedByPolicy, "{error}");
    });
    assert_nothing_stored(&site);
}

#[test]
fn altered_signature_and_that_of_another_model_are_refused_by_load() {
    let publisher = Site::start("");
    publisher.import(1, "m");
    publisher.import(2, "another");
    let bundle = bundle_of(&publisher, "m", &publisher.site);
    let of_another = bundle_of(&publisher, "another", &publisher.site);
    let path = Way::Folder.save(&publisher, &["m"], &[]);
    let original = blob(&path, &json!(Digest::of(bundle.as_bytes())));
    let site = Site::start(ALL);
    let refused = |reason: &str| {
        Way::Folder.is_refused(&site, &path, reason);
        assert_nothing_stored(&site);
    };
    // Cut off, changed, and gone.
    let replace = |bytes: &[u8]| {
        fs::remove_file(&original).unwrap();
        fs::write(&original, bytes).unwrap();
        refused("not signed");
    };
    replace(&bundle.as_bytes()[..100]);
    replace(damaged(&bundle).as_bytes());
    replace(b"");
    fs::remove_file(&original).unwrap();
    refused("not signed");
    // Signatures with right digests, in place of the right one.
    let index = path.join(ManifestIndex::LAYOUT_PATH);
    let before = read_json(&index);
    let manifest = read_json(&blob(&path, &before["manifests"][1]["digest"]));
    assert_eq!(manifest["subject"]["digest"], before["manifests"][0]["digest"]);
    let with = |bundle: &str, subject: &Json| {
        let mut manifest = manifest.clone();
        manifest["layers"][0]["digest"] = json!(Digest::of(bundle.as_bytes()));
        manifest["layers"][0]["size"] = json!(bundle.len());
        manifest["subject"]["digest"] = subject.clone();
        let manifest = manifest.to_string();
        for content in [bundle, &manifest] {
            fs::write(blob(&path, &json!(Digest::of(content.as_bytes()))), content).unwrap();
        }
        let mut changed = before.clone();
        changed["manifests"][1]["digest"] = json!(Digest::of(manifest.as_bytes()));
        changed["manifests"][1]["size"] = json!(manifest.len());
        // Other programs write no digest of the index, and not where a bundle is.
        changed.as_object_mut().unwrap().remove("annotations");
        changed["manifests"][1].as_object_mut().unwrap().remove("annotations");
        fs::remove_file(&index).unwrap();
        fs::write(&index, changed.to_string()).unwrap();
    };
    let model = before["manifests"][0]["digest"].clone();
    with(&damaged(&bundle), &model);
    refused("which did not sign this");
    with(&of_another, &model);
    refused("wrong signature: file ");
    with(&bundle, &json!(Digest::of(b"another model")));
    refused("not signed");
    with("{}", &model);
    refused("not signed");
    with(&bundle, &model);
    Way::Folder.load(&site, &path).succeeds();
    assert_eq!(state(&site.daemon.command(), "m", &[]).0, "signed");
    // As an archive, of which a pipe is copied first.
    let tar = path.with_extension("tar");
    let arguments =
        ["--format=ustar", "-cf", text(&tar), "-C", text(&path), "oci-layout", "index.json", "blobs"];
    if !Command::new("tar").args(arguments).status().is_ok_and(|status| status.success()) {
        return skipped("there is no tar");
    }
    for way in [Way::Archive, Way::Pipe] {
        let site = Site::start(ALL);
        way.load(&site, &tar).succeeds();
        assert_eq!(state(&site.daemon.command(), "m", &[]).0, "signed");
    }
}

#[test]
fn altered_model_with_the_signature_of_the_original_is_refused_by_load() {
    let publisher = Site::start("");
    publisher.import(1, "m");
    publisher.sign("m", &publisher.site);
    publisher.daemon.command().line("edit m altered --set general.name=Other").succeeds();
    let path = Way::Folder.save(&publisher, &["m", "altered"], &[]);
    let index = path.join(ManifestIndex::LAYOUT_PATH);
    let mut changed = read_json(&index);
    let [_, altered, signature] = changed["manifests"].as_array().unwrap().as_slice() else {
        panic!("{changed}")
    };
    let mut manifest = read_json(&blob(&path, &signature["digest"]));
    manifest["subject"]["digest"] = altered["digest"].clone();
    let manifest = manifest.to_string();
    let digest = json!(Digest::of(manifest.as_bytes()));
    fs::write(blob(&path, &digest), &manifest).unwrap();
    changed["manifests"][2]["digest"] = digest;
    changed["manifests"][2]["size"] = json!(manifest.len());
    changed["manifests"].as_array_mut().unwrap().remove(0);
    changed.as_object_mut().unwrap().remove("annotations");
    fs::remove_file(&index).unwrap();
    fs::write(&index, changed.to_string()).unwrap();
    let site = Site::start(ALL);
    Way::Folder.is_refused(&site, &path, "wrong signature: file ");
    assert_nothing_stored(&site);
}

#[test]
fn delta_has_the_signatures_of_the_model_that_it_makes() {
    let publisher = Site::start("");
    publisher.import(1, "base");
    publisher.daemon.command().line("edit base unsigned --set general.name=Unsigned").succeeds();
    publisher.daemon.command().line("edit base signed --set general.name=Signed").succeeds();
    publisher.sign("signed", &publisher.site);
    let base = Way::Archive.save(&publisher, &["base"], &[]).with_extension("base");
    fs::rename(base.with_extension(""), &base).unwrap();
    for way in Way::ALL {
        let site = Site::start(&ALL.replace("\"*\"", "\"*signed\""));
        Way::Archive.load(&site, &base).succeeds();
        let blobs = || fs::read_dir(site.daemon.root().join("blobs")).unwrap().count();
        let before = blobs();
        way.is_refused(&site, &way.save(&publisher, &["unsigned"], &["--given", "base"]), "not signed");
        assert_eq!((blobs(), site.daemon.client().models().unwrap().models.len()), (before, 1));
        way.load(&site, &way.save(&publisher, &["signed"], &["--given", "base"])).succeeds();
        assert_eq!(state(&site.daemon.command(), "signed", &[]).0, "signed");
        assert_eq!(site.refusal("signed"), None);
    }
}

#[test]
fn model_with_its_signature_among_its_files_is_loaded_from_a_pipe() {
    let publisher = Site::start("");
    let folder = publish(publisher.daemon.scratch());
    import(&publisher.daemon.command(), &folder);
    let bundle = bundle_of(&publisher, "acme", &publisher.site);
    // Under another name it is an ordinary file.
    fs::write(folder.join("original.json"), &bundle).unwrap();
    publisher.daemon.command().run(["import", text(&folder), "--name", "again"]).succeeds();
    let site = Site::start("");
    let path = Way::Pipe.save(&publisher, &["acme", "again"], &[]);
    let run = Way::Pipe.load(&site, &path);
    assert_eq!(run.code, 0, "{}", run.text());
    for name in ["acme", "again"] {
        let digest =
            |site: &Site| site.daemon.command().run(["show", name, "--json"]).json()["digest"].clone();
        assert_eq!(digest(&site), digest(&publisher));
    }
}

#[test]
fn layout_has_a_signature_as_a_referrer_and_other_programs_read_it() {
    let publisher = Site::start("");
    import(&publisher.daemon.command(), &publish(publisher.daemon.scratch()));
    // skopeo reads models with an OCI manifest only.
    let registry = FakeRegistry::start().unwrap();
    let name = registry.name("team/acme:1");
    publisher.daemon.command().run(["push", "acme", &name, "--as", "modelpack"]).succeeds();
    publisher.daemon.command().run(["pull", &name]).succeeds();
    publisher.sign(&name, &publisher.site);
    let path = Way::Folder.save(&publisher, &[&name], &[]);
    let index = read_json(&path.join(ManifestIndex::LAYOUT_PATH));
    let [model, signature] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
    assert_eq!(signature["artifactType"], Bundle::MEDIA_TYPE);
    let manifest = read_json(&blob(&path, &signature["digest"]));
    assert_eq!(manifest["subject"]["digest"], model["digest"]);
    let read = |descriptor: &Json| fs::read(blob(&path, &descriptor["digest"])).unwrap();
    assert_eq!(read(&manifest["config"]), ArtifactKind::EMPTY_CONFIG);
    Bundle::parse(&read(&manifest["layers"][0])).unwrap();
    let copy = path.with_extension("copy");
    let mut skopeo = Command::new("skopeo");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests"]);
    // It needs the tag, because there are two manifests.
    skopeo.arg(format!("oci:{}:1", path.display())).arg(format!("dir:{}", copy.display()));
    match skopeo.output() {
        Err(error) => skipped(format_args!("skopeo cannot be run: {error}")),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(fs::read(copy.join("manifest.json")).unwrap(), read(model));
        }
    }
}
