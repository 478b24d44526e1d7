//! Finding the model that a name means: IDs, names without a tag, and similar names, on the command line and the
//! socket.

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;

fn import(blobd: &Blobd, folder: &std::path::Path, seed: u64, name: &str) -> String {
    let path = ModelFile::dense(seed).write_to(folder, &format!("file-{seed}.gguf"));
    let imported = blobd.run(["import", path.to_str().unwrap(), "--name", name, "--json"]).succeeds().json();
    imported["imported"][0]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned()
}

#[test]
fn id_that_ls_prints_works_wherever_a_reference_does() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let id = &import(&blobd, daemon.scratch(), 1, "a:b")[..12];
    assert!(blobd.line("ls").succeeds().text().contains(id));
    for line in [
        format!("show {id}"),
        format!("show {} --json", &id[..5]),
        format!("show sha256:{id}"),
        format!("fit {id}"),
        format!("verify {id}"),
        format!("warm {id}"),
        format!("tensor {id} output.weight"),
        format!("diff {id} a:b"),
        format!("show --residency {id}"),
        format!("show --hash {id}"),
        format!("pin {id}"),
        format!("unpin {id}"),
        format!("tag {id} {}", "name:of-a-tag"),
    ] {
        blobd.line(&line).succeeds();
    }
    let hashes = blobd.line(&format!("show --hash=sha256 {id}")).succeeds().text();
    assert_eq!(hashes, blobd.line("show --hash=sha256 a:b").succeeds().text(), "they have the model's name");
    let run = blobd.line(&format!("rm {id}")).exits_with(2);
    for name in ["a:b", "name:of-a-tag", "or a name"] {
        assert!(run.stderr.contains(name), "{}", run.stderr);
    }
    blobd.line("rm name:of-a-tag").succeeds();
    let file = daemon.scratch().join("out");
    std::fs::create_dir(&file).unwrap();
    blobd.run(["export", id, "-o", file.to_str().unwrap()]).succeeds();
    assert!(file.join("a-b.gguf").is_file(), "the file has the model's name");
    assert_eq!(blobd.line(&format!("rm {id} --json")).succeeds().json()["removed"][0], "a:b");
}

#[test]
fn missing_tag_selects_the_only_one_but_not_for_a_removal() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "minilm:q4");
    let run = blobd.line("show minilm").succeeds();
    assert!(run.text().contains("minilm:q4"), "{}", run.text());
    assert_eq!(run.stderr, "blobd: minilm is minilm:q4\n");
    assert_eq!(blobd.line("show minilm -q").succeeds().stderr, "");
    assert_eq!(blobd.line("show minilm --json").succeeds().json()["name"], "minilm:q4");
    assert_eq!(blobd.line("show minilm:latest --stored").code, 3, "a tag that is given is meant");
    for line in ["rm minilm", "pin minilm"] {
        let run = blobd.line(line).exits_with(3);
        assert!(run.stderr.contains("did you mean minilm:q4?"), "{}", run.stderr);
    }
    // A new name is never taken for an existing one, pinned or not.
    blobd.line("pin minilm:q4").succeeds();
    import(&blobd, daemon.scratch(), 1, "minilm");
    assert!(blobd.line("ls -q").succeeds().text().contains("minilm:latest\n"));
}

#[test]
fn missing_tag_lists_existing_tags_and_contacts_no_registry() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    for (layers, tag) in [(1, "q4"), (2, "q5"), (3, "q8")] {
        import(&blobd, daemon.scratch(), layers, &format!("minilm:{tag}"));
    }
    for line in
        ["show minilm", "fit minilm", "export minilm", "show minlm --stored", "rm minilm", "verify MiniLM"]
    {
        let error = blobd.line(&format!("{line} --json")).exits_with(3).error();
        assert_eq!(error.code, ErrorCode::NotFound);
        let hint = error.hint.unwrap_or_default();
        assert!(hint.contains("minilm:q4, minilm:q5, minilm:q8"), "{line}: {hint}");
    }
}

#[test]
fn prefix_of_several_ids_is_refused_with_their_names() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let id = import(&blobd, daemon.scratch(), 1, "a");
    blobd.line("tag a b").succeeds();
    let error = blobd.line(&format!("unpin {} --json", &id[..8])).exits_with(2).error();
    assert!(error.message.contains("a:latest") && error.message.contains("b:latest"), "{}", error.message);
    let shown = blobd.line(&format!("show {} --json", &id[..8])).succeeds().json();
    assert_eq!(shown["name"], "a:latest", "both have the same content");
}

#[test]
fn name_that_looks_like_an_id_takes_precedence() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let id = import(&blobd, daemon.scratch(), 1, "a");
    import(&blobd, daemon.scratch(), 2, &id[..8]);
    let shown = blobd.line(&format!("show {} --json", &id[..8])).succeeds().json();
    assert_eq!(shown["name"], format!("{}:latest", &id[..8]));
}

#[test]
fn socket_and_embedded_commands_find_models_in_the_same_way() {
    let daemon = TestDaemon::start();
    let id = import(&daemon.command(), daemon.scratch(), 1, "minilm:q4");
    for name in ["minilm", &id[..12]] {
        let response = http::get(&daemon.socket(), &format!("/v1/models/{name}"));
        assert!(response.body.contains("\"name\":\"minilm:q4\""), "{name}: {response:?}");
        let missing = http::get(&daemon.socket(), "/v1/models/minilm:latest");
        assert!(missing.body.contains("did you mean minilm:q4?"), "{missing:?}");
    }
    let root = daemon.scratch().join("embedded");
    let blobd = Blobd::at_root(&root);
    let id = import(&blobd, daemon.scratch(), 1, "minilm:q4");
    for name in ["minilm", &id[..12]] {
        assert_eq!(blobd.line(&format!("show {name} --json")).succeeds().json()["name"], "minilm:q4");
    }
}
