//! Repositories of GGUF files that are passed through: all their files are shown, and each is pulled when it is asked for.

use blobd_store_format::digest::Digest;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::check_blobs;
use blobd_tests::wait::eventually;
use serde_json::json;

use super::Site;
use super::pull_through::{is_stored, site_of_hub};

const REPOSITORY: &str = "org/Tiny-GGUF";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn path(revision: &str, file: &str) -> String {
    format!("/{REPOSITORY}/resolve/{revision}/{file}")
}

fn names(site: &Site) -> Vec<String> {
    let model = site.get(&format!("/api/models/{REPOSITORY}/revision/main")).json();
    assert_eq!(model["sha"], COMMIT, "{model}");
    let siblings = model["siblings"].as_array().unwrap().iter();
    siblings.map(|file| file["rfilename"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_file_is_shown_and_only_those_that_are_asked_for_are_pulled() {
    let first = ModelFile::dense_of(1, 4, 512);
    let second = first.clone().with_changed("output.weight");
    let (q4, q8) = (first.bytes(), second.bytes());
    let files: [(&str, &[u8]); 3] =
        [("README.md", b"# Tiny"), ("Tiny-Q4_K_M.gguf", &q4), ("Tiny-Q8_0.gguf", &q8)];
    let hub = FakeRegistry::start().unwrap();
    hub.add_folder(REPOSITORY, COMMIT, &files);
    let site = site_of_hub(&hub, "");
    let all = ["README.md", "Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf"];
    assert_eq!(names(&site), all);
    let tree = site.get(&format!("/api/models/{REPOSITORY}/tree/{COMMIT}?recursive=true")).json();
    assert_eq!((&tree[0]["lfs"], &tree[0]["size"]), (&json!(null), &json!(6)));
    assert_eq!(tree[1]["lfs"]["oid"], Digest::of(&q4).to_hex());
    for (name, bytes) in files {
        let head = site.head(&path("main", name));
        assert_eq!((head.status, head.header("x-repo-commit")), (200, Some(COMMIT)), "{name}");
        assert_eq!(head.header("content-length"), Some(&*bytes.len().to_string()), "{name}");
    }
    assert!(hub.bytes_served() < 20_000, "{} bytes for the names of files", hub.bytes_served());

    let before = hub.bytes_served();
    assert!(site.get(&path("main", "Tiny-Q8_0.gguf")).body == q8);
    eventually("the model has its name", || is_stored(&site, "hf.co/org/Tiny-GGUF:Q8_0"));
    let cost = hub.bytes_served() - before;
    assert!(cost < q8.len() as u64 * 5 / 4, "{cost} bytes for {}", q8.len());
    assert!(!is_stored(&site, "hf.co/org/Tiny-GGUF:Q4_K_M"));
    let part = site.get_with(&path(COMMIT, "Tiny-Q8_0.gguf"), "Range: bytes=100-199\r\n");
    assert!(part.status == 206 && part.body == q8[100..200]);
    assert_eq!(hub.bytes_served() - before, cost, "the second client costs the hub nothing");

    // Another quantisation costs what the store does not have.
    let before = hub.bytes_served();
    assert!(site.get(&path(COMMIT, "Tiny-Q4_K_M.gguf")).body == q4);
    eventually("the model has its name", || is_stored(&site, "hf.co/org/Tiny-GGUF:Q4_K_M"));
    let cost = hub.bytes_served() - before;
    assert!(cost < q4.len() as u64 / 2, "{cost} bytes for {}", q4.len());
    for _ in 0..2 {
        assert_eq!(site.get(&path("main", "README.md")).body, b"# Tiny");
    }
    let readme = |requests: Vec<blobd_tests::registry::Request>| {
        requests.iter().filter(|request| request.path.ends_with("README.md")).count()
    };
    assert_eq!(readme(hub.requests()), 1);
    assert_eq!(names(&site), all, "the same files and the same commit when they are stored");
    check_blobs(&site.folder.path().join("store"));
}

#[test]
fn file_of_another_content_than_the_list_says_is_not_sent_as_a_whole() {
    let (weights, readme) = (ModelFile::dense_of(1, 4, 512).bytes(), b"# Tiny".as_slice());
    let hub = FakeRegistry::start().unwrap();
    hub.add_folder(REPOSITORY, COMMIT, &[("README.md", readme), ("Tiny-Q8_0.gguf", &weights)]);
    hub.add_page(&path(COMMIT, "README.md"), b"# Evil", &[]);
    let site = site_of_hub(&hub, "");
    assert_eq!(names(&site), ["README.md", "Tiny-Q8_0.gguf"]);
    let refused = site.get(&path("main", "README.md"));
    assert_eq!(refused.status, 502);
    assert!(refused.json()["error"].as_str().unwrap().contains("other content"), "{refused:?}");
}

#[test]
fn stored_files_are_shown_while_the_hub_does_not_answer() {
    let hub = FakeRegistry::start().unwrap();
    let site = site_of_hub(&hub, "");
    let weights = site.add(&ModelFile::dense(1), &["hf.co/org/Tiny-GGUF:Q8_0"]);
    drop(hub);
    let model = site.get(&format!("/api/models/{REPOSITORY}/revision/main")).json();
    assert_eq!(model["siblings"][0]["rfilename"], "Tiny-GGUF-Q8_0.gguf");
    assert!(site.get(&path("main", "Tiny-GGUF-Q8_0.gguf")).body == weights);
    assert_eq!(site.get("/api/models/org/other").status, 502);
}
