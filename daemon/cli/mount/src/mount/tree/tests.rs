use std::time::Duration;

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::manifest::Manifest;

use super::*;

const LICENSE: &str = "application/vnd.ollama.image.license";

fn listed(name: &str, day: u64, layers: &[(&str, &str, u64)]) -> MountedModel {
    let descriptor = |(media_type, content, size): &(&str, &str, u64)| Descriptor {
        media_type: MediaType::new(*media_type),
        digest: Digest::of(content.as_bytes()),
        size: *size,
    };
    let layers = layers.iter().map(descriptor).collect();
    let manifest = Manifest::compose(descriptor(&(MediaType::DOCKER_CONFIG, "{}", 2)), layers).unwrap();
    let modified = UNIX_EPOCH + Duration::from_secs(day * 86_400);
    let manifest = Arc::new(manifest);
    let contents = Arc::clone(&manifest);
    MountedModel { reference: name.parse().unwrap(), manifest, contents, origin: None, modified }
}

fn model(name: &str, content: &str) -> MountedModel {
    listed(name, 1, &[(MediaType::OLLAMA_MODEL, content, 1000), (LICENSE, "mit", 5)])
}

fn build(models: &[MountedModel]) -> Tree {
    Tree::build(models, &mut Inodes::default())
}

fn paths(tree: &Tree) -> Vec<String> {
    fn walk(tree: &Tree, inode: u64, path: &str, found: &mut Vec<String>) {
        for (name, entry) in &tree.directory(inode).unwrap().entries {
            let path = format!("{path}{name}");
            assert_eq!(tree.directory(entry.inode).is_some(), entry.is_directory, "{path}");
            if entry.is_directory {
                assert_eq!(tree.directory(entry.inode).unwrap().parent, inode, "{path}");
                walk(tree, entry.inode, &format!("{path}/"), found);
            } else {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, Tree::ROOT, "", &mut found);
    found
}

fn file<'t>(tree: &'t Tree, path: &str) -> (u64, &'t File) {
    match find(tree, path) {
        Some((inode, Node::File(file))) => (inode, file),
        other => panic!("{path}: {other:?}"),
    }
}

#[test]
fn empty_store_is_an_empty_models_directory() {
    let tree = build(&[]);
    assert!(paths(&tree).is_empty());
    assert!(find(&tree, "ollama/blobs").is_some() && find(&tree, "ollama/manifests").is_some());
}

#[test]
fn model_is_a_gguf_file_and_a_model_of_ollama() {
    let tree = build(&[model("llama3:8b", "w")]);
    let blob = |content: &str| format!("ollama/blobs/{}", layout::blob_name(Digest::of(content.as_bytes())));
    let mut expected = vec![
        "llama3/8b.gguf".to_owned(),
        "models/llama3:8b/llama3:8b.gguf".to_owned(),
        "lmstudio/blobd/llama3:8b/llama3:8b.gguf".to_owned(),
        "ollama/manifests/registry.ollama.ai/library/llama3/8b".to_owned(),
        blob("w"),
        blob("mit"),
        blob("{}"),
    ];
    expected.sort();
    let mut found = paths(&tree);
    found.sort();
    assert_eq!(found, expected);
    let manifest = file(&tree, "ollama/manifests/registry.ollama.ai/library/llama3/8b").1;
    assert!(matches!(&manifest.content, Content::Bytes(raw) if raw.len() as u64 == manifest.size));
}

#[test]
fn same_content_is_one_inode_under_all_its_names() {
    let mut inodes = Inodes::default();
    let first = listed("a:1", 7, &[(MediaType::OLLAMA_MODEL, "w", 1000)]);
    let models = [first, listed("b:2", 3, &[(MediaType::OLLAMA_MODEL, "w", 1000), (LICENSE, "mit", 5)])];
    let tree = Tree::build(&models, &mut inodes);
    let (inode, weights) = file(&tree, "a/1.gguf");
    assert_eq!(file(&tree, "b/2.gguf").0, inode);
    assert_eq!(weights.links, 7, "the blob, and two folders for engines of each model");
    assert_eq!(weights.modified, UNIX_EPOCH + Duration::from_secs(3 * 86_400));
    let Content::Layer(_, sources) = &weights.content else { panic!("{weights:?}") };
    assert_eq!(sources.len(), 2);
    assert_eq!(file(&Tree::build(&models[1..], &mut inodes), "b/2.gguf").0, inode, "in the next tree too");
    assert_eq!(file(&build(&models), "b/2.gguf").0, inode, "and in another mount");
}

#[test]
fn tag_that_names_another_model_gets_another_inode() {
    let mut inodes = Inodes::default();
    let before = file(&Tree::build(&[model("a:1", "old")], &mut inodes), "a/1.gguf").0;
    let after = file(&Tree::build(&[model("a:1", "new")], &mut inodes), "a/1.gguf").0;
    assert_ne!(before, after);
}

#[test]
fn colliding_inodes_are_distinguished() {
    let mut inodes = Inodes::default();
    let number = Inodes::default().number("wanted");
    inodes.taken.insert(number, "somebody else's".into());
    assert_eq!(inodes.number("wanted"), number + 1);
    assert_eq!(inodes.number("wanted"), number + 1);
}

#[test]
fn directory_has_its_name_before_a_file() {
    let models = [model("foo:8b", "one"), model("foo/8b.gguf:latest", "two")];
    let tree = build(&models);
    assert!(find(&tree, "foo/8b.gguf/latest.gguf").is_some());
    assert!(find(&tree, "foo/8b.gguf").is_some_and(|(_, node)| matches!(node, Node::Directory(_))));
    assert_eq!(file(&tree, "foo/8b+model.gguf").1.size, 1000, "the file has its other name");
}

#[test]
fn weights_have_their_name_before_companions() {
    let layers = [(MediaType::OLLAMA_MODEL, "w", 1), (MediaType::OLLAMA_PROJECTOR, "p", 2)];
    let tree = build(&[listed("a:8b", 1, &layers), model("a:mmproj-8b", "other")]);
    assert_eq!(file(&tree, "a/mmproj-8b.gguf").1.size, 1000);
    assert_eq!(file(&tree, "a/mmproj-8b+projector.gguf").1.size, 2);
}

/// The path of each repository is a prefix of the next one's, and the tags are what follows there.
#[test]
fn every_file_of_names_with_many_parts_is_reachable() {
    let names = [
        ("h/a/b:c", "h/a/b/c.gguf"),
        ("h/a/b/c:d", "h/a/b/c/d.gguf"),
        ("h/a/b:d.gguf", "h/a/b/d.gguf.gguf"),
        ("h/a/b/c.gguf:d", "h/a/b/c.gguf/d.gguf"),
        ("h/a/b/c.gguf/e:d", "h/a/b/c.gguf/e/d.gguf"),
        ("a/b:c", "a/b/c.gguf"),
        ("h:c", "h/c.gguf"),
        ("registry.ollama.ai/a/b/c:d", "registry.ollama.ai/a/b/c/d.gguf"),
    ];
    let models: Vec<MountedModel> = names
        .iter()
        .zip(1..)
        .map(|((name, _), size)| listed(name, 1, &[(MediaType::OLLAMA_MODEL, name, size)]))
        .collect();
    let tree = build(&models);
    for ((name, path), size) in names.iter().zip(1..) {
        let path = if *name == "h/a/b:c" { "h/a/b/c+model.gguf" } else { path };
        assert_eq!(file(&tree, path).1.size, size, "{path}");
    }
    let of_engines = ["ollama", "models", "lmstudio"];
    let is_weights = |path: &&String| {
        path.ends_with(".gguf") && !of_engines.iter().any(|directory| path.starts_with(directory))
    };
    assert_eq!(paths(&tree).iter().filter(is_weights).count(), names.len());
    let is_manifest = |path: &&String| path.starts_with("ollama/manifests");
    assert_eq!(paths(&tree).iter().filter(is_manifest).count(), names.len());
}

#[test]
fn namespace_called_ollama_shares_the_directory() {
    let tree = build(&[model("ollama:1", "a"), model("ollama/manifests:2", "b")]);
    for path in ["ollama/1.gguf", "ollama/manifests/2.gguf", "ollama/blobs"] {
        assert!(find(&tree, path).is_some(), "{path}");
    }
}

#[test]
fn contradicting_sizes_are_not_both_shown() {
    let liar = listed("b:1", 1, &[(MediaType::OLLAMA_MODEL, "w", 999)]);
    let tree = build(&[model("a:1", "w"), liar]);
    assert_eq!(file(&tree, "a/1.gguf").1.size, 1000);
    assert!(find(&tree, "b/1.gguf").is_none());
}

#[test]
fn unknown_paths_are_not_found() {
    let tree = build(&[model("a:1", "w")]);
    for path in ["b", "a/1", "a/1.gguf/x", "../a", "a/./1.gguf"] {
        assert!(find(&tree, path).is_none(), "{path}");
    }
    assert_eq!(find(&tree, "/").unwrap().0, Tree::ROOT);
}

fn find<'t>(tree: &'t Tree, path: &str) -> Option<(u64, &'t Node)> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let inode = parts
        .into_iter()
        .try_fold(Tree::ROOT, |inode, part| Some(tree.directory(inode)?.entries.get(part)?.inode))?;
    Some((inode, tree.node(inode)?))
}

#[test]
fn every_tag_has_a_folder_of_its_own_for_engines() {
    let projector = (MediaType::OLLAMA_PROJECTOR, "p", 2);
    let models = [
        listed("llama3:8b", 1, &[(MediaType::OLLAMA_MODEL, "a", 1), projector]),
        listed("llama3:70b", 1, &[(MediaType::OLLAMA_MODEL, "b", 3), (MediaType::OLLAMA_MODEL, "c", 4)]),
    ];
    let tree = build(&models);
    for top in ["models", "lmstudio/blobd"] {
        assert_eq!(file(&tree, &format!("{top}/llama3:8b/llama3:8b.gguf")).1.size, 1);
        assert_eq!(file(&tree, &format!("{top}/llama3:8b/mmproj-llama3:8b.gguf")).1.size, 2);
        assert_eq!(file(&tree, &format!("{top}/llama3:70b/llama3:70b-00002-of-00002.gguf")).1.size, 4);
    }
}

#[test]
fn model_from_the_hub_is_in_the_hub_tree() {
    let mut models = [model("hf.co/me/tiny-GGUF:Q4_K_M", "w"), model("other:1", "x")];
    models[0].origin = Some("hf.co/me/tiny-GGUF:Q4_K_M".to_owned());
    let tree = build(&models);
    let commit = &models[0].manifest.digest().to_hex()[..40];
    let hub = "hub/models--me--tiny-GGUF";
    let main = file(&tree, &format!("{hub}/refs/main")).1;
    assert!(matches!(&main.content, Content::Bytes(bytes) if **bytes == *commit.as_bytes()));
    assert_eq!(file(&tree, &format!("{hub}/snapshots/{commit}/tiny-Q4_K_M.gguf")).1.size, 1000);
    assert!(find(&tree, &format!("{hub}/trees/{commit}.json")).is_some());
    assert_eq!(tree.directory(find(&tree, "hub").unwrap().0).unwrap().entries.len(), 1);
}
