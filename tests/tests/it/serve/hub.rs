//! The hub's API, with the requests of `hf download`, `hf cache verify` and llama.cpp.

use std::fs;

use blobd_store_format::digest::Digest;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use serde_json::{Value as Json, json};

use super::Site;

const REPOSITORY: &str = "org/model-gguf";

fn site() -> (Site, Vec<u8>) {
    let site = Site::start_with("hub = true");
    let weights = site.add(&ModelFile::dense(1), &["hf.co/Org/Model-GGUF:Q4_0"]);
    site.add(&ModelFile::dense(2), &["hf.co/Org/Model-GGUF:Q8_0"]);
    (site, weights)
}

#[test]
fn client_of_the_hub_finds_the_files_and_downloads_them() {
    let (site, weights) = site();
    let model = site.get(&format!("/api/models/{REPOSITORY}/revision/main")).json();
    let commit = model["sha"].as_str().unwrap();
    assert_eq!((commit.len(), &model["id"]), (40, &json!(REPOSITORY)));
    let siblings: Vec<_> =
        model["siblings"].as_array().unwrap().iter().map(|file| &file["rfilename"]).collect();
    assert_eq!(siblings, ["Model-GGUF-Q4_0.gguf", "Model-GGUF-Q8_0.gguf"]);
    for path in ["", "/revision/HEAD"] {
        assert_eq!(site.get(&format!("/api/models/{REPOSITORY}{path}")).json(), model);
    }
    let tree = site.get(&format!("/api/models/{REPOSITORY}/tree/{commit}?recursive=true&expand=false"));
    let (file, digest) = (&tree.json()[0], Digest::of(&weights).to_hex());
    assert_eq!((&file["type"], &file["path"]), (&json!("file"), &json!("Model-GGUF-Q4_0.gguf")));
    assert_eq!((&file["size"], &file["lfs"]["oid"]), (&json!(weights.len()), &json!(digest)));
    assert_eq!(file["oid"].as_str().unwrap().len(), 40);
    assert_eq!(site.get(&format!("/api/models/{REPOSITORY}/tree/main")).json().as_array().unwrap().len(), 2);
    let path = format!("/{REPOSITORY}/resolve/{commit}/Model-GGUF-Q4_0.gguf");
    let head = site.head(&path);
    let etag = format!("\"{digest}\"");
    assert_eq!(
        (head.status, head.header("etag"), head.header("x-linked-etag")),
        (200, Some(&*etag), Some(&*etag))
    );
    assert_eq!(head.header("x-repo-commit"), Some(commit));
    let length = weights.len().to_string();
    assert_eq!(
        (head.header("content-length"), head.header("x-linked-size")),
        (Some(&*length), Some(&*length))
    );
    assert!(head.headers.iter().all(|(name, _)| !name.contains("xet")), "{head:?}");
    assert!(site.get(&path).body == weights);
    let part = site.get_with(&path, "Range: bytes=100-\r\n");
    assert!(part.status == 206 && part.body == weights[100..]);
}

#[test]
fn paths_are_asked_about_in_the_body_of_a_request() {
    let site = Site::start_with("hub = true");
    let folder = site.daemon.scratch().join("folder");
    fs::create_dir_all(folder.join("unet")).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("unet/model.safetensors"), safetensors(&[(3, "t")])).unwrap();
    let line = ["import", folder.to_str().unwrap(), "--name", "hf.co/org/folder"];
    site.daemon.command().run(line).succeeds();
    let (path, all) =
        ("/api/models/org/folder/paths-info/main", ["config.json", "unet", "unet/model.safetensors"]);
    let paths = |answer: &super::Answer| -> Vec<String> {
        assert_eq!(answer.status, 200, "{answer:?}");
        answer
            .json()
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["path"].as_str().unwrap().to_owned())
            .collect()
    };
    let body = json!({ "paths": all, "expand": true }).to_string();
    let answer = site.post(path, "application/json", &body);
    assert_eq!(paths(&answer), all);
    let tree = site.get("/api/models/org/folder/tree/main?recursive=true").json();
    let sorted = |list: &Json| {
        let mut list = list.as_array().unwrap().clone();
        list.sort_by_key(|entry| entry["path"].to_string());
        list
    };
    assert_eq!(sorted(&answer.json()), sorted(&tree));
    let form = "paths=unet%2Fmodel.safetensors&paths=absent&paths=un&expand=False";
    let answer = site.post(path, "application/x-www-form-urlencoded", form);
    assert_eq!(paths(&answer), ["unet/model.safetensors"]);
    assert_eq!(
        paths(&site.post("/api/models/org/folder/paths-info", "application/json", r#"{"paths":[]}"#)),
        [""; 0]
    );
    assert_eq!(site.post(path, "application/json", "{").status, 400);
    let long = format!("{{\"paths\":[\"{}\"]}}", "x".repeat(2 << 20));
    assert_eq!(site.post(path, "application/json", &long).status, 400);
    for path in ["/api/models/org/folder", "/api/models/org/folder/tree/main", "/v2/"] {
        assert_eq!(site.post(path, "application/json", &body).status, 405, "{path}");
    }
}

#[test]
fn tags_are_revisions_with_their_own_files() {
    let (site, _) = site();
    let refs = site.get(&format!("/api/models/{REPOSITORY}/refs")).json();
    assert_eq!(refs["branches"][0]["name"], "main");
    assert_eq!(refs["tags"][1]["name"], "Q8_0");
    let commit = refs["tags"][1]["targetCommit"].as_str().unwrap();
    for revision in ["Q8_0", "q8_0", "refs%2Ftags%2FQ8_0", commit] {
        let model = site.get(&format!("/api/models/{REPOSITORY}/revision/{revision}")).json();
        assert_eq!(model["sha"], commit, "{revision}");
        assert_eq!(model["siblings"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn what_is_not_stored_is_refused_as_the_hub_does() {
    let (site, _) = site();
    for (path, code) in [
        ("/api/models/no/such/revision/main".to_owned(), "RepoNotFound"),
        (format!("/api/models/{REPOSITORY}/revision/v2"), "RevisionNotFound"),
        (format!("/{REPOSITORY}/resolve/main/config.json"), "EntryNotFound"),
        (format!("/api/models/{REPOSITORY}/tree/main/folder"), "EntryNotFound"),
    ] {
        let answer = site.get(&path);
        assert_eq!((answer.status, answer.header("x-error-code")), (404, Some(code)), "{path}");
        assert!(answer.json()["error"].is_string());
    }
    assert_eq!(site.get("/api/agent-harnesses").status, 404);
    let without = Site::start();
    without.add(&ModelFile::dense(1), &["hf.co/Org/Model-GGUF:Q4_0"]);
    assert_eq!(without.get(&format!("/api/models/{REPOSITORY}")).status, 404);
}
