//! A file that arrives with a wrong digest is downloaded a second time, compared with the first copy, and reported.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually_some;
use serde_json::Value as Json;

use super::{check_nothing_but_downloads, is_empty, offer, registry_with};

const ALWAYS: usize = usize::MAX;
/// Inside the data of a tensor of [`large`].
const PLACE: u64 = 5 << 20;
const NAME: &str = "library/tiny:latest";

/// A model of some 15 MiB.
fn large() -> ModelFile {
    ModelFile::dense_of(1, 2, 512)
}

fn size(model: &ModelFile) -> u64 {
    model.bytes().len() as u64
}

/// The weights of a model on the content network.
fn weights(model: &ModelFile) -> String {
    format!("/cdn/sha256:{}", sha256(&model.bytes()))
}

fn flip(registry: &FakeRegistry, model: &ModelFile, times: usize, offset: u64) {
    registry.add_fault(&weights(model), times, Fault::FlipInFile(offset));
}

/// Checks a pull's result, and returns what it says of the corrected file.
fn corrected(daemon: &TestDaemon, run: &Run, name: &str, model: &ModelFile) -> Json {
    assert!(daemon.command().run(["export", name, "-o", "-"]).succeeds().stdout == model.bytes());
    check_blobs(daemon.root());
    assert_eq!(staged(daemon.root()), [""; 0]);
    assert!(is_empty(&daemon.root().join("partial")), "nothing is left");
    let done = run.json_lines().pop().unwrap();
    let sources = ["downloaded_bytes", "reused_bytes", "already_stored_bytes"];
    let sum: u64 = sources.iter().map(|key| done[key].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), done["size"].as_u64(), "{done}");
    let [corrected] = done["corrected"].as_array().unwrap().clone().try_into().unwrap();
    assert_eq!(corrected["digest"], format!("sha256:{}", sha256(&model.bytes())));
    corrected
}

fn ranges(corrected: &Json) -> Vec<(u64, u64)> {
    let ranges = corrected["ranges"].as_array().unwrap().iter();
    ranges.map(|range| (range["offset"].as_u64().unwrap(), range["length"].as_u64().unwrap())).collect()
}

/// The name of a registry's content network as the output has it.
fn sender(registry: &FakeRegistry) -> String {
    let [cdn, server] = [registry.cdn_url(), registry.url()].map(|url| url.replace("http://", ""));
    format!("{cdn} (redirected by {server})")
}

#[test]
fn range_that_was_damaged_once_is_corrected_by_a_second_download_and_reported() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    flip(&registry, &model, 1, PLACE);
    let name = registry.name(NAME);
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    let found = corrected(&daemon, &run, &name, &model);
    assert_eq!((ranges(&found), &found["differing_bytes"]), (vec![(PLACE, 1)], &Json::from(1)));
    let range = &found["ranges"][0];
    assert_eq!([&range["first_from"], &range["second_from"]], [&Json::from(sender(&registry)); 2]);
    let tensors = range["tensors"].as_array().unwrap();
    let shown = daemon.command().run(["show", &name, "--json"]).succeeds().json();
    let names: Vec<&Json> =
        shown["tensors"].as_array().unwrap().iter().map(|tensor| &tensor["name"]).collect();
    assert!(tensors.len() == 1 && names.contains(&&tensors[0]), "{range}");
    let is_said = |line: &Json| line["status"].as_str().unwrap().ends_with(" again: wrong digest");
    assert!(run.json_lines().iter().any(is_said), "the progress says why it starts again");
    let (served, size) = (registry.bytes_served(), size(&model));
    assert!(served <= 2 * size + 4096, "bytes served: expected twice {size}, found {served}");
    let log = daemon.log();
    assert!(log.contains(&format!("differing_bytes=1 ranges=\"{PLACE}+1\"")), "{log}");
}

#[test]
fn corrected_file_is_explained_and_other_files_are_not_mentioned() {
    let model = large();
    let registry = registry_with(&model);
    flip(&registry, &model, 1, PLACE);
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let text = blobd.run(["pull", &registry.name(NAME)]).succeeds().text();
    for part in
        ["wrong digest", "1 B of ", "differed, in 1 range", &format!("byte {PLACE}, in "), "wrong from "]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = blobd.run(["pull", &registry.name(NAME)]).succeeds().text();
    assert!(!text.contains("wrong"), "{text}");
}

/// Two mirrors of registry.ollama.ai, the first of which damages what it sends.
fn mirrors(folder: &Path, mirrors: [&FakeRegistry; 2]) -> String {
    let config = folder.join("config.toml");
    let urls = mirrors.map(FakeRegistry::url);
    fs::write(&config, format!("[mirrors]\n\"registry.ollama.ai\" = {urls:?}\n")).unwrap();
    config.to_str().unwrap().to_owned()
}

#[test]
fn second_download_comes_from_another_mirror() {
    let (folder, model) = (tmpfs_directory(), large());
    let [wrong, right] = [registry_with(&model), registry_with(&model)];
    flip(&wrong, &model, ALWAYS, PLACE);
    let config = mirrors(folder.path(), [&wrong, &right]);
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let run = blobd.run(["pull", "tiny", "--json", "--config", &config]).succeeds();
    let done = run.json_lines().pop().unwrap();
    let range = &done["corrected"][0]["ranges"][0];
    let senders = [&wrong, &right].map(|mirror| Json::from(sender(mirror)));
    assert_eq!([&range["first_from"], &range["second_from"]], [&senders[0], &senders[1]], "{done}");
    for (mirror, what) in [(&wrong, "first"), (&right, "second")] {
        let (served, size) = (mirror.bytes_served(), size(&model));
        assert!(served < size + 4096, "{what}: {served} of {size}");
    }
}

#[test]
fn file_that_is_wrong_at_its_source_is_downloaded_twice_and_no_more() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    flip(&registry, &model, ALWAYS, PLACE);
    let error = daemon.command().run(["pull", &registry.name(NAME), "--json"]).exits_with(1).error();
    assert!(error.message.contains("has the same bytes"), "{error}");
    assert!(error.message.contains(&sender(&registry)), "{error}");
    assert!(error.hint.as_deref().unwrap().contains("publisher"), "{error}");
    let (served, size) = (registry.bytes_served(), size(&model));
    assert!(served <= 2 * size + 4096, "bytes served: expected twice {size}, found {served}");
    check_nothing_but_downloads(&daemon.command(), daemon.root());
}

#[test]
fn file_that_is_damaged_differently_each_time_is_reported_as_such() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    flip(&registry, &model, 1, PLACE);
    flip(&registry, &model, ALWAYS, PLACE + (2 << 20));
    let error = daemon.command().run(["pull", &registry.name(NAME), "--json"]).exits_with(1).error();
    assert!(error.message.contains("a second download, from "), "{error}");
    // The second place is damaged in both if different requests have brought the two.
    assert!(error.message.ends_with(&format!(", first at offset {PLACE}")), "{error}");
    assert!(error.hint.as_deref().unwrap().contains("memory"), "{error}");
    check_nothing_but_downloads(&daemon.command(), daemon.root());
}

#[test]
fn wrong_byte_of_the_header_is_found_whether_the_header_is_valid_or_not() {
    // The magic number, the version, the number of tensors, and a name.
    for offset in [0, 4, 9, 60] {
        let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
        let registry = registry_with(&model);
        flip(&registry, &model, 1, offset);
        let name = registry.name(NAME);
        let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
        let done = run.json_lines().pop().unwrap();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes(), "{offset}");
        // An invalid header is noticed before there is a copy to compare with.
        if !done["corrected"].is_null() {
            assert_eq!(ranges(&corrected(&daemon, &run, &name, &model)), [(offset, 1)]);
        }
    }
}

#[test]
fn small_files_and_files_of_one_request_get_a_second_attempt_too() {
    let (daemon, model) = (TestDaemon::start(), ModelFile::dense(1));
    let files = [model.bytes(), b"{{ .Prompt }}".to_vec(), super::CONFIG.to_vec()];
    for delivery in [BlobDelivery::Redirect, BlobDelivery::Direct] {
        for file in &files {
            let registry = registry_with(&model);
            registry.set_blob_delivery(delivery);
            let (place, digest) = (file.len() as u64 - 3, sha256(file));
            registry.add_fault(&format!("/{}sha256:{digest}", side(delivery)), 1, Fault::FlipInFile(place));
            let name = registry.name(NAME);
            let done = daemon.command().run(["pull", &name, "--json"]).succeeds().json_lines().pop().unwrap();
            let [found] = done["corrected"].as_array().unwrap().clone().try_into().unwrap();
            assert_eq!((ranges(&found), found["size"].as_u64()), (vec![(place, 1)], Some(file.len() as u64)));
            assert!(found["ranges"][0]["first_from"].is_string(), "{found}");
            assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
            daemon.command().run(["rm", &name]).succeeds();
        }
    }
}

/// Where the bytes of a blob come from.
fn side(delivery: BlobDelivery) -> &'static str {
    if delivery == BlobDelivery::Redirect { "cdn/" } else { "blobs/" }
}

#[test]
fn server_without_ranges_sends_the_file_a_second_time() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    let damaged = {
        let mut bytes = model.bytes();
        bytes[6 << 20] ^= 1;
        bytes
    };
    registry.add_fault(&weights(&model), 1, Fault::Body(damaged));
    registry.add_fault(&weights(&model), ALWAYS, Fault::IgnoreRange);
    let name = registry.name(NAME);
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    assert_eq!(ranges(&corrected(&daemon, &run, &name, &model)), [(6 << 20, 1)]);
}

/// The second download continues after a kill: what has arrived again is not requested a third time.
#[test]
fn killed_second_download_is_resumed_with_the_recorded_differences() {
    let (mut daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    flip(&registry, &model, 1, 1 << 20);
    let name = registry.name(NAME);
    let mut command = daemon.command().command();
    command.args(["pull", &name, "--json", "--limit-rate", "8MB"]).stdout(Stdio::piped());
    let mut pull = command.stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(pull.stdout.take().unwrap()).lines();
    let noted = eventually_some("part of the second copy has arrived", || {
        let line: Json = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let is_again = line["status"].as_str().unwrap().ends_with(" again: wrong digest");
        line["completed"].as_u64().filter(|completed| is_again && *completed > 6 << 20)
    });
    daemon.kill();
    pull.wait().unwrap();
    daemon.restart();
    let before = registry.bytes_served();
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    let found = corrected(&daemon, &run, &name, &model);
    assert_eq!(ranges(&found), [(1 << 20, 1)]);
    assert!(found["ranges"][0]["first_from"].is_null(), "of an earlier pull: {found}");
    let (served, size) = (registry.bytes_served() - before, size(&model));
    assert!(served <= size - noted + (64 << 10), "{served} of {size}, although {noted} had arrived again");
    let done = run.json_lines().pop().unwrap();
    assert!(done["already_stored_bytes"].as_u64().unwrap() >= noted, "{done}");
}

#[test]
fn two_pulls_of_a_damaged_file_share_both_downloads() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    flip(&registry, &model, 1, PLACE);
    let name = registry.name(NAME);
    let pulls: Vec<_> = (0..2)
        .map(|_| {
            let mut command = daemon.command().command();
            command.args(["pull", &name, "--json"]).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut reports = 0;
    for pull in pulls {
        let output = pull.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        reports += usize::from(String::from_utf8(output.stdout).unwrap().contains("\"corrected\""));
    }
    assert_eq!(reports, 1, "the pull that has downloaded it");
    let (served, size) = (registry.bytes_served(), size(&model));
    assert!(served <= 2 * size + 4096, "bytes served: expected twice {size}, found {served}");
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
}

/// First what was reused is downloaded, then everything a second time.
#[test]
fn damage_beside_reused_tensors_is_found_and_corrected() {
    let (daemon, model) = (TestDaemon::start(), large());
    let registry = registry_with(&model);
    daemon.command().run(["pull", &registry.name(NAME)]).succeeds();
    let other = large().with_changed("output.weight");
    offer(&registry, "library/tiny:other", &other.bytes());
    let (same, changed) = (model.bytes(), other.bytes());
    let place = (0..changed.len()).rev().find(|place| same[*place] != changed[*place]).unwrap() as u64;
    flip(&registry, &other, 1, place);
    let name = registry.name("library/tiny:other");
    let run = daemon.command().run(["pull", &name, "--json"]).succeeds();
    assert_eq!(ranges(&corrected(&daemon, &run, &name, &other)), [(place, 1)]);
}
