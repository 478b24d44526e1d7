//! Models as ordinary files.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::{End, ModelFile};
use blobd_tests::mount::TestMount;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{blob_path, names};
use blobd_tests::wait::eventually;
use rustix::process::Signal;
use serde_json::Value as Json;

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

/// Several MiB, so that reading it takes many requests.
fn large() -> ModelFile {
    ModelFile::dense_of(1, 2, 512)
}

#[test]
fn mounted_file_is_the_original() {
    let daemon = TestDaemon::start();
    let models = [
        ("llama3:8b", large()),
        (
            "me/odd:1",
            ModelFile { padding: 3, alignment: Some(512), gap: 2, ..ModelFile::separate_experts(1, 11) },
        ),
        ("hf.co/me/tail:Q8_0", ModelFile { end: End::Trailing(vec![7; 100_001]), ..ModelFile::dense(2) }),
        ("bare:1", ModelFile { end: End::Bare, reversed: true, ..ModelFile::dense(3) }),
        ("ghcr.io/owner/repo.x/model:1", ModelFile::dense(4)),
    ];
    for (name, model) in &models {
        import(&daemon, model, name);
    }
    let Some(mount) = TestMount::start(&daemon) else { return };
    for (name, model) in &models {
        let path = mount.path(&format!("{}.gguf", name.replace(':', "/")));
        assert!(fs::read(&path).unwrap() == model.bytes(), "{name}");
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.mode()), (model.bytes().len() as u64, 0o100_444));
    }
    let top = ["bare", "ghcr.io", "hf.co", "hub", "llama3", "lmstudio", "me", "models", "ollama"];
    assert_eq!(names(&mount.path("")), top);
    assert_eq!(names(&mount.path("llama3")), ["8b.gguf"]);
}

#[test]
fn any_range_can_be_read() {
    let daemon = TestDaemon::start();
    let model = ModelFile { gap: 1, padding: 9, ..large() };
    import(&daemon, &model, "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let (file, bytes) = (File::open(mount.path("m/1.gguf")).unwrap(), model.bytes());
    let mut state = 1u64;
    for _ in 0..200 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = usize::try_from(state >> 33).unwrap() % (bytes.len() + 10);
        let mut buffer = vec![0; usize::try_from(state >> 3).unwrap() % 300_000];
        let count = file.read_at(&mut buffer, offset as u64).unwrap();
        let expected = bytes.get(offset..).unwrap_or_default();
        let expected = &expected[..expected.len().min(buffer.len())];
        assert!(buffer[..count] == *expected, "{} bytes at {offset}", buffer.len());
    }
    assert_eq!(file.read_at(&mut [0], 1 << 40).unwrap(), 0);
}

#[test]
#[allow(unsafe_code)]
fn mounted_file_can_be_mapped() {
    let daemon = TestDaemon::start();
    import(&daemon, &large(), "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let file = File::open(mount.path("m/1.gguf")).unwrap();
    // SAFETY: needed because mapping a file is unsafe; sound because the mount's files never change.
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    drop(file);
    assert!(map[..] == large().bytes());
}

#[test]
fn open_file_is_read_while_the_daemon_hangs_and_others_wait_for_it() {
    const WAITING: u64 = 12;
    let daemon = TestDaemon::start();
    import(&daemon, &large(), "m:1");
    (0..WAITING).for_each(|seed| import(&daemon, &ModelFile::dense(seed + 10), &format!("other:{seed}")));
    let Some(mount) = TestMount::start(&daemon) else { return };
    let (file, bytes) = (File::open(mount.path("m/1.gguf")).unwrap(), large().bytes());
    let paths: Vec<_> = (0..WAITING).map(|seed| mount.path(&format!("other/{seed}.gguf"))).collect();
    assert!(paths.iter().all(|path| path.exists()));
    let process = rustix::process::Pid::from_raw(daemon.pid().try_into().unwrap()).unwrap();
    rustix::process::kill_process(process, Signal::STOP).unwrap();
    std::thread::scope(|scope| {
        let opens: Vec<_> = paths.iter().map(|path| scope.spawn(move || File::open(path).is_ok())).collect();
        // Time for the opens to reach the daemon.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let (sender, receiver) = std::sync::mpsc::channel();
        let (place, file) = (bytes.len() as u64 / 2, &file);
        let read = scope.spawn(move || {
            let mut found = [0; 1000];
            file.read_exact_at(&mut found, place).unwrap();
            sender.send(found).unwrap();
        });
        let found = receiver.recv_timeout(std::time::Duration::from_secs(10));
        rustix::process::kill_process(process, Signal::CONT).unwrap();
        assert_eq!(found.unwrap()[..], bytes[bytes.len() / 2..][..1000]);
        read.join().unwrap();
        assert!(opens.into_iter().all(|open| open.join().unwrap()), "they succeed when the daemon continues");
    });
}

#[test]
fn nothing_can_be_written() {
    let daemon = TestDaemon::start();
    import(&daemon, &ModelFile::dense(1), "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let path = mount.path("m/1.gguf");
    for error in [
        File::options().write(true).open(&path).map(drop).unwrap_err(),
        fs::remove_file(&path).unwrap_err(),
        fs::write(mount.path("new"), b"x").unwrap_err(),
        fs::create_dir(mount.path("ollama/blobs/x")).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem, "{error}");
    }
    for path in ["m/2.gguf", "x", "m/1.gguf.bak", "ollama/blobs/sha256-0"] {
        assert_eq!(fs::metadata(mount.path(path)).unwrap_err().kind(), ErrorKind::NotFound, "{path}");
    }
    assert!(fs::read(mount.path("m")).is_err() && fs::read_dir(&path).is_err());
}

#[test]
fn mount_has_a_models_directory_for_ollama() {
    let daemon = TestDaemon::start();
    for (name, seed) in [("llama3:8b", 1), ("me/x:1", 2), ("hf.co/me/x:Q8_0", 3)] {
        import(&daemon, &ModelFile::dense(seed), name);
    }
    let Some(mount) = TestMount::start(&daemon) else { return };
    for blob in names(&mount.path("ollama/blobs")) {
        let bytes = fs::read(mount.path("ollama/blobs").join(&blob)).unwrap();
        assert_eq!(blob, format!("sha256-{}", sha256(&bytes)));
    }
    let models = daemon.client().models().unwrap().models;
    for path in ["registry.ollama.ai/library/llama3/8b", "registry.ollama.ai/me/x/1", "hf.co/me/x/Q8_0"] {
        let raw = fs::read(mount.path("ollama/manifests").join(path)).unwrap();
        assert!(models.iter().any(|model| model.digest == Digest::of(&raw)), "{path}");
        let manifest: Json = serde_json::from_slice(&raw).unwrap();
        let layers = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
        for layer in layers {
            let name = layer["digest"].as_str().unwrap().replace(':', "-");
            let size = fs::metadata(mount.path("ollama/blobs").join(name)).unwrap().len();
            assert_eq!(layer["size"].as_u64(), Some(size));
        }
    }
    let (file, blob) = (mount.path("llama3/8b.gguf"), sha256(&ModelFile::dense(1).bytes()));
    let blob = mount.path(&format!("ollama/blobs/sha256-{blob}"));
    assert_eq!(fs::metadata(file).unwrap().ino(), fs::metadata(blob).unwrap().ino(), "cached once");
}

/// Creates a model of files that are already stored, as a pull would.
fn compose(root: &Path, name: &str, layers: &[(&str, &[u8])]) {
    let descriptor = |(media_type, bytes): &(&str, &[u8])| Descriptor {
        media_type: MediaType::new(*media_type),
        digest: Digest::of(bytes),
        size: bytes.len() as u64,
    };
    let config: (&str, &[u8]) = (MediaType::DOCKER_CONFIG, b"{}");
    for (_, bytes) in layers.iter().chain([&config]) {
        let digest = Digest::of(bytes);
        let blob = root.join(layout::blob(digest));
        if !root.join(layout::recipe(digest)).exists() && !blob.exists() {
            fs::write(&blob, bytes).unwrap();
            fs::set_permissions(&blob, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        }
    }
    let manifest = Manifest::compose(descriptor(&config), layers.iter().map(descriptor).collect()).unwrap();
    let reference: Reference = name.parse().unwrap();
    let path = root.join(layout::manifest(&reference));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, manifest.raw()).unwrap();
}

/// What Ollama does while it loads a sharded model.
#[test]
fn directory_of_links_to_shards_can_be_made_beside_the_blobs() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense(1);
    import(&daemon, &model, "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let blobs = mount.path("ollama/blobs");
    let blob = blobs.join(format!("sha256-{}", sha256(&model.bytes())));
    let (directory, before) = (blobs.join(".ollama-split-428306-1"), names(&blobs));
    let link = directory.join("model-00001-of-00001.gguf");
    fs::create_dir(&directory).unwrap();
    fs::hard_link(&blob, &link).unwrap();
    assert!(fs::read(&link).unwrap() == model.bytes());
    assert_eq!(names(&directory), ["model-00001-of-00001.gguf"]);
    assert_eq!(names(&blobs).len(), before.len() + 1);
    assert_eq!(fs::metadata(&link).unwrap().ino(), fs::metadata(&blob).unwrap().ino(), "cached once");
    for (error, expected) in [
        (fs::create_dir(&directory).unwrap_err(), ErrorKind::AlreadyExists),
        (fs::hard_link(&blob, &link).unwrap_err(), ErrorKind::AlreadyExists),
        (fs::remove_dir(&directory).unwrap_err(), ErrorKind::DirectoryNotEmpty),
        (fs::write(directory.join("x"), b"x").unwrap_err(), ErrorKind::ReadOnlyFilesystem),
        (fs::create_dir(directory.join("x")).unwrap_err(), ErrorKind::ReadOnlyFilesystem),
        (fs::hard_link(&blob, blobs.join("x")).unwrap_err(), ErrorKind::ReadOnlyFilesystem),
        (fs::create_dir(mount.path(".ollama-split-1")).unwrap_err(), ErrorKind::ReadOnlyFilesystem),
        (fs::rename(&link, directory.join("x")).unwrap_err(), ErrorKind::ReadOnlyFilesystem),
        (fs::remove_file(&blob).unwrap_err(), ErrorKind::ReadOnlyFilesystem),
    ] {
        assert_eq!(error.kind(), expected, "{error}");
    }
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    let error = fs::set_permissions(&link, permissions).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    assert!(std::os::unix::fs::symlink("x", directory.join("y")).is_err());
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(names(&blobs), before);
    assert!(fs::read(&blob).unwrap() == model.bytes());
}

#[test]
fn shards_and_whole_layers_are_mounted_as_files() {
    let mut daemon = TestDaemon::start_on_disk();
    let shards = [large(), ModelFile::dense(2)];
    import(&daemon, &shards[0], "one:1");
    import(&daemon, &shards[1], "two:1");
    daemon.stop();
    let (first, second, projector) = (shards[0].bytes(), shards[1].bytes(), vec![5; 3 << 20]);
    let layers = [
        (MediaType::OLLAMA_MODEL, first.as_slice()),
        (MediaType::OLLAMA_MODEL, second.as_slice()),
        (MediaType::OLLAMA_PROJECTOR, projector.as_slice()),
    ];
    compose(daemon.root(), "big:70b", &layers);
    daemon.restart();
    let Some(mount) = TestMount::start(&daemon) else { return };
    let expected = ["70b-00001-of-00002.gguf", "70b-00002-of-00002.gguf", "mmproj-70b.gguf"];
    assert_eq!(names(&mount.path("big")), expected);
    for (name, (_, bytes)) in expected.iter().zip(layers) {
        let path = mount.path("big").join(name);
        let (one, two) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        assert!(fs::read(&path).unwrap() == bytes, "{name}");
        drop(one);
        let mut rest = Vec::new();
        (&two).read_to_end(&mut rest).unwrap();
        assert!(rest == bytes, "{name}");
    }
}

#[test]
fn open_files_survive_the_daemon_and_later_opens_use_the_next_daemon() {
    let mut daemon = TestDaemon::start();
    import(&daemon, &large(), "m:1");
    import(&daemon, &ModelFile::dense(2), "n:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let mut file = File::open(mount.path("m/1.gguf")).unwrap();
    let mut bytes = vec![0; 1000];
    file.read_exact(&mut bytes).unwrap();
    daemon.kill();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes == large().bytes());
    assert_eq!(names(&mount.path("m")), ["1.gguf"], "the list stays");
    let error = File::open(mount.path("n/1.gguf")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::HOSTDOWN.raw_os_error()), "{error}");
    daemon.restart();
    assert!(fs::read(mount.path("n/1.gguf")).unwrap() == ModelFile::dense(2).bytes());
    import(&daemon, &ModelFile::dense(3), "new:1");
    eventually("the new model is listed", || mount.path("new/1.gguf").is_file());
    assert!(mount.log().matches("nothing listens").count() <= 2, "{}", mount.log());
}

#[test]
fn removed_model_disappears_and_open_files_stay_readable() {
    let daemon = TestDaemon::start();
    import(&daemon, &large(), "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let mut file = File::open(mount.path("m/1.gguf")).unwrap();
    let _ = daemon.command().line("rm m:1").succeeds();
    eventually("it is listed no more", || !mount.path("m").exists());
    assert_eq!(names(&mount.path("ollama/blobs")), [""; 0]);
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert!(bytes == large().bytes());
    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
}

#[test]
fn file_of_a_moved_tag_is_the_new_model() {
    let daemon = TestDaemon::start();
    let models = [ModelFile::dense(1), ModelFile::dense(1).with_changed("output.weight")];
    import(&daemon, &models[0], "m:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let path = mount.path("m/1.gguf");
    let old = File::open(&path).unwrap();
    assert!(fs::read(&path).unwrap() == models[0].bytes());
    import(&daemon, &models[1], "m:2");
    daemon.command().line("tag m:2 m:1 --force").succeeds();
    eventually("the file is the other one", || fs::read(&path).is_ok_and(|bytes| bytes == models[1].bytes()));
    let mut bytes = vec![0; models[0].bytes().len()];
    old.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == models[0].bytes(), "the open file still has the old bytes");
}

#[test]
fn damaged_model_cannot_be_opened() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense(1);
    import(&daemon, &model, "m:1");
    import(&daemon, &ModelFile::dense(2), "n:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    let tensor = model.tensors.iter().max_by_key(|tensor| tensor.size_bytes()).unwrap();
    let blob = blob_path(daemon.root(), &format!("sha256:{}", sha256(&tensor.bytes())));
    fs::set_permissions(&blob, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    File::options().write(true).open(&blob).unwrap().set_len(10).unwrap();
    let error = File::open(mount.path("m/1.gguf")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{error}");
    assert!(fs::read(mount.path("n/1.gguf")).unwrap() == ModelFile::dense(2).bytes());
}

#[test]
fn mount_ends_with_its_process_in_every_case() {
    let daemon = TestDaemon::start();
    import(&daemon, &large(), "m:1");
    let Some(mut mount) = TestMount::start(&daemon) else { return };
    assert_eq!(mount.end_with(Signal::TERM).code(), Some(0), "{}", mount.log());
    mount.is_left_clean();
    mount.restart(&daemon.command());
    assert_eq!(mount.end_with(Signal::INT).code(), Some(0), "{}", mount.log());
    mount.is_left_clean();
    mount.restart(&daemon.command());
    let busy = File::open(mount.path("m/1.gguf")).unwrap();
    assert_eq!(mount.end_with(Signal::TERM).code(), Some(0), "{}", mount.log());
    mount.is_left_clean();
    drop(busy);
    mount.restart(&daemon.command());
    let busy = File::open(mount.path("m/1.gguf")).unwrap();
    assert_eq!(mount.end_with(Signal::KILL).code(), None);
    mount.is_left_clean();
    drop(busy);
    mount.restart(&daemon.command());
    assert!(fs::read(mount.path("m/1.gguf")).unwrap() == large().bytes());
    assert!(daemon.client().sessions().unwrap().sessions.len() <= 1);
}

#[test]
fn mount_ends_when_it_is_unmounted() {
    let daemon = TestDaemon::start();
    let Some(mut mount) = TestMount::start(&daemon) else { return };
    let unmounted = std::process::Command::new("umount").arg(mount.path("")).status().unwrap();
    assert!(unmounted.success());
    mount.is_left_clean();
    let path = format!("/proc/{}/exe", mount.pid());
    eventually("the process has ended", || fs::read_link(&path).is_err());
    // It has already ended; this only reads its exit status.
    assert_eq!(mount.end_with(Signal::TERM).code(), Some(0));
}

#[test]
fn invalid_mount_point_is_refused() {
    let daemon = TestDaemon::start();
    let mount = |directory: &Path| daemon.command().run(["mount".as_ref(), directory.as_os_str()]);
    let missing = mount(&daemon.scratch().join("missing")).exits_with(3);
    assert!(
        missing.stderr.contains("No such file") && missing.stderr.contains("mkdir"),
        "{}",
        missing.stderr
    );
    let full = mount(daemon.scratch()).exits_with(2);
    assert!(full.stderr.contains("not empty"), "{}", full.stderr);
    let file = daemon.scratch().join("file");
    fs::write(&file, b"x").unwrap();
    assert!(mount(&file).exits_with(2).stderr.contains("not a directory"));
}

/// The bytes of the model's tensors that are in the page cache of the store.
fn resident(daemon: &TestDaemon, name: &str) -> u64 {
    let model = daemon.client().open(&name.parse().unwrap()).unwrap();
    let maps = model.map_all().unwrap();
    maps.iter().map(|tensor| tensor.bytes().residency().unwrap().resident_bytes).sum()
}

#[test]
fn reading_does_not_change_the_page_cache_of_the_store() {
    let daemon = TestDaemon::start_on_disk();
    let model = large();
    import(&daemon, &model, "m:1");
    import(&daemon, &ModelFile::dense_of(7, 2, 512), "n:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    daemon.command().line("warm m:1").succeeds();
    let warm = resident(&daemon, "m:1");
    assert!(warm >= model.tensors.iter().map(blobd_tests::model::ModelTensor::size_bytes).sum(), "all of it");
    let mut file = File::open(mount.path("m/1.gguf")).unwrap();
    file.read_exact(&mut [0; 4096]).unwrap();
    drop(file);
    assert!(fs::read(mount.path("m/1.gguf")).unwrap() == model.bytes());
    assert_eq!(resident(&daemon, "m:1"), warm, "what `warm` has read stays");

    rustix::fs::sync();
    let blobs = fs::read_dir(daemon.root().join("blobs")).unwrap();
    for blob in blobs {
        let file = File::open(blob.unwrap().path()).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        // Linux before 6.14, or a file system without it.
        let flag = rustix::io::ReadWriteFlags::from_bits_retain(0x80);
        let read = rustix::io::preadv2(&file, &mut [std::io::IoSliceMut::new(&mut [0])], 0, flag);
        if read == Err(rustix::io::Errno::OPNOTSUPP) {
            return;
        }
    }
    let cold = resident(&daemon, "n:1");
    assert!(fs::read(mount.path("n/1.gguf")).unwrap() == ModelFile::dense_of(7, 2, 512).bytes());
    let left = resident(&daemon, "n:1");
    assert!(left <= cold + warm / 10, "no second copy stays: {left} of {warm}, {cold} before");
}

#[test]
fn models_from_the_hub_are_in_the_layout_of_its_cache() {
    const NAME: &str = "hf.co/me/tiny:latest";
    let daemon = TestDaemon::start();
    let folder = ModelFolder::transformers(1);
    let cache = daemon.scratch().join("cache/models--me--tiny");
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), "a".repeat(40)).unwrap();
    folder.write_to(cache.join("snapshots").join("a".repeat(40)));
    let second = ModelFolder::transformers(2);
    second.write_to(cache.join("snapshots").join("b".repeat(40)));
    fs::create_dir_all(cache.join("refs/refs/pr")).unwrap();
    for reference in ["refs/v1", "refs/refs/pr/3"] {
        fs::write(cache.join(reference), "b".repeat(40)).unwrap();
    }
    let from = format!("--from-hf={}", daemon.scratch().join("cache").display());
    daemon.command().run(["import", &from]).succeeds();
    import(&daemon, &ModelFile::dense(1), "not-from-there:1");
    let Some(mount) = TestMount::start(&daemon) else { return };
    assert_eq!(names(&mount.path("hub")), ["models--me--tiny"]);
    let repository = mount.path("hub/models--me--tiny");
    assert_eq!(names(&repository), ["refs", "snapshots", "trees"]);
    let commit = fs::read_to_string(repository.join("refs/main")).unwrap();
    assert_eq!(commit, "a".repeat(40), "as in the cache");
    assert_eq!(ModelFolder::read(&repository.join("snapshots").join(&commit)), folder);
    for reference in ["refs/v1", "refs/refs/pr/3"] {
        let commit = fs::read_to_string(repository.join(reference)).unwrap();
        assert_eq!(ModelFolder::read(&repository.join("snapshots").join(commit)), second, "{reference}");
    }
    let tree = fs::read(repository.join("trees").join(format!("{commit}.json"))).unwrap();
    let tree: Json = serde_json::from_slice(&tree).unwrap();
    assert_eq!(tree["format_version"], 1);
    for (path, bytes) in &folder.0 {
        let entry = &tree["files"][path];
        assert_eq!((&entry["size"], &entry["lfs_sha256"]), (&bytes.len().into(), &sha256(bytes).into()));
    }
    let other = mount.path(&NAME.replace(':', "/"));
    assert_eq!(ModelFolder::read(&other), folder, "also by its name");
}

#[test]
fn engines_find_every_tag_in_a_folder_of_its_own() {
    let daemon = TestDaemon::start();
    let models = [("llama3:8b", ModelFile::dense(1)), ("llama3:70b", ModelFile::dense(2))];
    models.iter().for_each(|(name, model)| import(&daemon, model, name));
    let Some(mount) = TestMount::start(&daemon) else { return };
    for top in ["models", "lmstudio/blobd"] {
        assert_eq!(names(&mount.path(top)), ["llama3:70b", "llama3:8b"]);
        for (name, model) in &models {
            let file = mount.path(top).join(name).join(format!("{name}.gguf"));
            assert!(fs::read(file).unwrap() == model.bytes(), "{top} {name}");
        }
    }
}

#[test]
fn mount_without_a_daemon_is_refused() {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let command = blobd_tests::command::Blobd::at_root(&folder.path().join("store"));
    let directory = folder.path().join("mount");
    fs::create_dir(&directory).unwrap();
    let refused = command.run(["mount".as_ref(), directory.as_os_str()]).exits_with(3);
    assert!(refused.stderr.contains("blobd serve"), "{}", refused.stderr);
}
