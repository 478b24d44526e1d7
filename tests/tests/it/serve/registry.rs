//! `/v2/` by OCI's distribution specification, request by request.

use blobd_store_format::digest::Digest;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::wait::eventually;
use serde_json::json;

use super::{Site, layers};

#[test]
fn another_blobd_pulls_the_exact_model() {
    let site = Site::start();
    let weights = site.add(&ModelFile::dense(1), &["tiny"]);
    let other = TestDaemon::start();
    let name = format!("{}/library/tiny", site.address);
    other.command().run(["pull", &name, "--name", "copy"]).succeeds();
    assert!(other.command().run(["export", "copy", "-o", "-"]).stdout == weights);
    let id = |daemon: &TestDaemon| daemon.client().models().unwrap().models.remove(0).digest;
    assert_eq!(id(&other), id(&site.daemon));
    // A repeated pull finds nothing new.
    let again = other.command().run(["pull", &name, "--name", "copy", "--json"]).succeeds();
    let done = again.json_lines().pop().unwrap();
    assert_eq!(done["downloaded_bytes"], 0, "{done}");
    eventually("the log has the request", || {
        site.daemon.log().contains("\"/v2/library/tiny/manifests/latest\": 200")
    });
}

#[test]
fn manifests_have_their_type_digest_and_version() {
    let site = Site::start();
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    let base = site.get("/v2/");
    assert_eq!((base.status, base.header("docker-distribution-api-version")), (200, Some("registry/2.0")));
    assert_eq!(site.head("/v2/").status, 200);
    let (manifest, digest) = site.manifest("library/tiny", "1");
    let by_digest = site.get(&format!("/v2/library/tiny/manifests/{digest}"));
    assert_eq!(Digest::of(&by_digest.body).to_string(), digest);
    assert_eq!(by_digest.json(), manifest);
    let media_type = manifest["mediaType"].as_str();
    assert_eq!(by_digest.header("content-type"), media_type);
    let head = site.head("/v2/library/tiny/manifests/1");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), Some(by_digest.body.len().to_string().as_str()));
    assert_eq!(
        (head.header("content-type"), head.header("docker-content-digest")),
        (media_type, Some(&*digest))
    );
    let etag = head.header("etag").unwrap();
    let unchanged = site.get_with("/v2/library/tiny/manifests/1", &format!("If-None-Match: {etag}\r\n"));
    assert_eq!((unchanged.status, unchanged.body.len()), (304, 0));
    assert_eq!(unchanged.header("docker-content-digest"), Some(&*digest));
}

#[test]
fn files_and_tensors_are_blobs_and_any_range_of_them_is_sent() {
    let site = Site::start();
    let model = ModelFile::dense(1);
    let weights = site.add(&model, &["tiny:1"]);
    let (manifest, _) = site.manifest("library/tiny", "1");
    let digest = layers(&manifest).into_iter().find(|digest| *digest == Digest::of(&weights).to_string());
    let path = format!("/v2/library/tiny/blobs/{}", digest.expect("the weights are a layer"));
    let whole = site.get(&path);
    assert_eq!((whole.status, whole.header("accept-ranges")), (200, Some("bytes")));
    assert!(whole.body == weights);
    // Stock Ollama needs the place of a blob although it is where it asks.
    assert_eq!(whole.header("location"), Some(&*path));
    let head = site.head(&path);
    assert_eq!(head.header("content-length"), Some(weights.len().to_string().as_str()));
    assert_eq!((head.status, head.body.len()), (200, 0));
    let (length, etag) = (weights.len(), whole.header("etag").unwrap());
    let middle = length / 3..length / 2;
    let range = format!("Range: bytes={}-{}\r\n", middle.start, middle.end - 1);
    let part = site.get_with(&path, &range);
    assert_eq!(part.status, 206);
    let expected = format!("bytes {}-{}/{length}", middle.start, middle.end - 1);
    assert_eq!(part.header("content-range"), Some(&*expected));
    assert!(part.body == weights[middle]);
    let same = site.get_with(&path, &format!("{range}If-Range: {etag}\r\n"));
    assert_eq!(same.status, 206);
    assert!(site.get_with(&path, &format!("{range}If-Range: \"other\"\r\n")).body == weights);
    assert!(site.get_with(&path, "Range: bytes=-7\r\n").body == weights[length - 7..]);
    assert!(site.get_with(&path, "Range: bytes=0-1,5-6\r\n").body == weights);
    let beyond = site.get_with(&path, &format!("Range: bytes={length}-\r\n"));
    assert_eq!((beyond.status, beyond.body.len()), (416, 0));
    assert_eq!(beyond.header("content-range"), Some(&*format!("bytes */{length}")));
    assert_eq!(site.get_with(&path, &format!("If-None-Match: {etag}\r\n")).status, 304);
    let config = manifest["config"]["digest"].as_str().unwrap();
    assert_eq!(site.get(&format!("/v2/library/tiny/blobs/{config}")).status, 200);
    // A tensor by its own digest.
    let tensors = site.daemon.command().run(["show", "tiny:1", "--tensors", "--json"]).succeeds().json();
    let tensor = &tensors["tensors"][0];
    let digest = tensor["digest"].as_str().unwrap_or_else(|| panic!("{tensors}"));
    let blob = site.get(&format!("/v2/library/tiny/blobs/{digest}"));
    assert_eq!((blob.status, Digest::of(&blob.body).to_string().as_str()), (200, digest));
}

#[test]
fn models_are_found_under_their_names_as_repositories() {
    let site = Site::start();
    site.add(
        &ModelFile::dense(1),
        &["tiny:8b", "hf.co/Org/Model-GGUF:Q4_0", "localhost:5000/m:1", "ann/own:1"],
    );
    for (repository, tag) in [
        ("library/tiny", "8b"),
        ("tiny", "8B"),
        ("registry.ollama.ai/library/tiny", "8b"),
        ("hf.co/org/model-gguf", "q4_0"),
        ("hf.co/Org/Model-GGUF", "Q4_0"),
        ("org/model-gguf", "Q4_0"),
        ("localhost_5000/m", "1"),
        ("m", "1"),
        ("ann/own", "1"),
    ] {
        let head = site.head(&format!("/v2/{repository}/manifests/{tag}"));
        assert_eq!(head.status, 200, "{repository}:{tag}");
    }
    assert_eq!(site.head("/v2/org/model-gguf/manifests/Q4_0?ns=hf.co").status, 200);
    assert_eq!(site.head("/v2/org/model-gguf/manifests/Q4_0?ns=ghcr.io").status, 404);
    let catalog = site.get("/v2/_catalog").json();
    let listed = json!(["ann/own", "hf.co/org/model-gguf", "library/tiny", "localhost_5000/m"]);
    assert_eq!(catalog["repositories"], listed);
}

#[test]
fn lists_come_in_pages() {
    let site = Site::start();
    site.add(&ModelFile::dense(1), &["tiny:a", "tiny:b", "tiny:c"]);
    let first = site.get("/v2/library/tiny/tags/list?n=2");
    assert_eq!(first.json(), json!({ "name": "library/tiny", "tags": ["a", "b"] }));
    let link = first.header("link").unwrap();
    assert_eq!(link, "</v2/library/tiny/tags/list?n=2&last=b>; rel=\"next\"");
    let next = link[1..].split('>').next().unwrap();
    let last = site.get(next);
    assert_eq!((&last.json()["tags"], last.header("link")), (&json!(["c"]), None));
    assert_eq!(site.get("/v2/tiny/tags/list").json()["tags"], json!(["a", "b", "c"]));
    assert_eq!(site.get("/v2/tiny/tags/list?n=0").json()["tags"], json!([]));
    assert_eq!(site.get("/v2/tiny/tags/list?n=x").refusal().0, 400);
    assert_eq!(site.get("/v2/_catalog?n=1").json()["repositories"], json!(["library/tiny"]));
}

#[test]
fn referrers_are_the_manifests_with_that_subject() {
    let site = Site::start();
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    let (_, digest) = site.manifest("tiny", "1");
    let index = site.get(&format!("/v2/tiny/referrers/{digest}?artifactType=a%2Fb"));
    assert_eq!(index.header("content-type"), Some("application/vnd.oci.image.index.v1+json"));
    assert_eq!(index.header("oci-filters-applied"), Some("artifactType"));
    assert_eq!(index.json()["manifests"], json!([]));
    // A model whose manifest refers to the first one, as a signature does.
    let registry = FakeRegistry::start().unwrap();
    let referring = registry.add_model("me/x:1", b"{}", &[("a/b", b"text")]).unwrap();
    let raw = String::from_utf8(referring.raw().to_vec()).unwrap();
    let subject = format!(
        "{{\"subject\":{{\"mediaType\":\"m/n\",\"digest\":\"{digest}\",\"size\":1}},\"artifactType\":\"a/b\","
    );
    registry.add_manifest("me/x:1", raw.replacen('{', &subject, 1).as_bytes());
    site.daemon.command().run(["pull", &registry.name("me/x:1"), "--name", "tiny:signature"]).succeeds();
    let (_, referring) = site.manifest("tiny", "signature");
    for filter in ["", "?artifactType=a%2Fb"] {
        let index = site.get(&format!("/v2/tiny/referrers/{digest}{filter}")).json();
        assert_eq!(index["manifests"][0]["digest"], json!(referring), "{index}");
        assert_eq!(index["manifests"][0]["artifactType"], "a/b");
    }
    let other = site.get(&format!("/v2/tiny/referrers/{digest}?artifactType=c%2Fd")).json();
    assert_eq!(other["manifests"], json!([]));
}

#[test]
fn what_is_not_there_is_refused_as_registries_do() {
    let site = Site::start();
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    let unknown = format!("sha256:{}", "a".repeat(64));
    for (path, status, code) in [
        ("/v2/nothing/manifests/1".to_owned(), 404, "NAME_UNKNOWN"),
        ("/v2/nothing/tags/list".to_owned(), 404, "NAME_UNKNOWN"),
        ("/v2/tiny/manifests/2".to_owned(), 404, "MANIFEST_UNKNOWN"),
        (format!("/v2/tiny/manifests/{unknown}"), 404, "MANIFEST_UNKNOWN"),
        (format!("/v2/tiny/blobs/{unknown}"), 404, "BLOB_UNKNOWN"),
        ("/v2/tiny/blobs/sha512:abcd".to_owned(), 404, "BLOB_UNKNOWN"),
        ("/v2/tiny/blobs/sha256:abcd".to_owned(), 400, "DIGEST_INVALID"),
        ("/v2/tiny/blobs/x".to_owned(), 400, "DIGEST_INVALID"),
        ("/v2/tiny/manifests/sha256:abcd".to_owned(), 400, "DIGEST_INVALID"),
        ("/v2/tiny/referrers/x".to_owned(), 400, "DIGEST_INVALID"),
        ("/v2/../../etc/passwd".to_owned(), 404, "NAME_UNKNOWN"),
        ("/v2/%2e%2e/blobs/x".to_owned(), 400, "DIGEST_INVALID"),
        ("/v2/x".to_owned(), 404, "NAME_UNKNOWN"),
        ("/v2/%ff/tags/list".to_owned(), 400, "NAME_INVALID"),
    ] {
        assert_eq!(site.get(&path).refusal(), (status, code.to_owned()), "{path}");
        let head = site.head(&path);
        assert_eq!((head.status, head.body.len()), (status, 0), "{path}");
    }
    let message = &site.get("/v2/tiny/manifests/2").json()["errors"][0]["message"];
    assert_eq!(message, "no manifest \"2\" of \"tiny\"; tags: 1");
    for (method, path) in [
        ("POST", "/v2/tiny/blobs/uploads/"),
        ("PUT", "/v2/tiny/manifests/1"),
        ("DELETE", "/v2/tiny/manifests/1"),
    ] {
        let answer = site.ask(method, path, "Content-Length: 0\r\n");
        assert_eq!(answer.refusal(), (405, "UNSUPPORTED".to_owned()), "{method}");
        assert_eq!(answer.header("allow"), Some("GET, HEAD"));
    }
    assert_eq!(site.get("/").status, 404);
    assert_eq!(site.get("/v1/models").status, 404);
}
