//! Lists of files: pages, mirrors and odd entries.

use super::server::{Reply, Seen, Server, response};
use super::*;
use crate::RemoteModel;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn entry(path: &str) -> String {
    let path = serde_json::to_string(path).unwrap();
    format!(r#"{{"type":"file","path":{path},"size":9}}"#)
}

/// The path of the only file of `hf.co/u/r/PATH` at a mirror that lists files as `tree` says.
async fn listed(path: &str, tree: impl Fn(&Seen) -> Vec<u8> + Send + Sync + 'static) -> Result<String> {
    let mirror = Server::start(move |seen, _| Reply::Whole(tree(seen))).await;
    let mirrors = [("hf.co".to_owned(), vec![mirror.url("/cache")])].into();
    let policy = RegistryPolicy { mirrors, ..RegistryPolicy::default() };
    let client = RegistryClient::with_limits(&policy, limits(), Proxies::default()).unwrap();
    let source = format!("https://huggingface.co/u/r/blob/{COMMIT}/{path}").parse().unwrap();
    let RemoteModel::Files { files, .. } = client.resolve(&source).await? else { unreachable!() };
    assert!(
        mirror.paths().iter().all(|path| path.starts_with("/cache/api/models/u/r/tree/")),
        "{:?}",
        mirror.paths()
    );
    Ok(files[0].label())
}

#[tokio::test]
async fn next_page_is_requested_from_the_same_mirror() {
    let tree = format!("/api/models/u/r/tree/{COMMIT}");
    for link in [
        format!("<https://huggingface.co{tree}?recursive=true&cursor=2>; rel=\"next\""),
        format!("<http://other.example/prefix{tree}?cursor=2>; rel=next"),
        format!("<{tree}?cursor=2>; rel=\"next\""),
        format!("</cache{tree}?cursor=2>; rel=\"next\""),
        "<?cursor=2>; rel=next".to_owned(),
        "<https://other.example/next?cursor=2>; rel=next".to_owned(),
        format!("<https://other.example{tree}/cursor=2>; rel=next"),
    ] {
        let header = format!("Link: {link}\r\n");
        let found = listed("late.gguf", move |seen| match seen.path.contains("cursor=2") {
            true => response(200, "", format!("[{}]", entry("late.gguf")).as_bytes()),
            false => response(200, &header, format!("[{}]", entry("early.gguf")).as_bytes()),
        });
        assert_eq!(found.await.expect(&link), "hf.co/u/r/late.gguf", "{link}");
    }
}

#[tokio::test]
async fn list_of_endless_pages_is_refused() {
    let error =
        listed("late.gguf", |_| response(200, "Link: <?cursor=1>; rel=next\r\n", b"[]")).await.unwrap_err();
    assert!(error.to_string().contains("more pages than the limit"), "{error}");
}

#[tokio::test]
async fn list_may_be_compressed() {
    let list = || format!("[{}]", entry("m.gguf")).into_bytes();
    let found = listed("m.gguf", move |_| response(200, "Content-Encoding: gzip\r\n", &gzip(&list())));
    assert_eq!(found.await.unwrap(), "hf.co/u/r/m.gguf");
    let found = listed("m.gguf", move |_| response(200, "", &gzip(&list())));
    assert_eq!(found.await.unwrap(), "hf.co/u/r/m.gguf");
    let bomb = gzip(&vec![b' '; 8 << 20]);
    let error =
        listed("m.gguf", move |_| response(200, "Content-Encoding: gzip\r\n", &bomb)).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn invalid_paths_do_not_make_a_repository_unusable() {
    let long = format!("{}.txt", "x".repeat(308));
    let paths = ["notes\\readme.md", &long, "../up.gguf", "a\u{7}.gguf", "m.gguf"];
    let list = format!("[{}]", paths.map(entry).join(","));
    let found = listed("m.gguf", move |_| response(200, "", list.as_bytes()));
    assert_eq!(found.await.unwrap(), "hf.co/u/r/m.gguf");
}
