//! What commands say about a store that has nothing to list.

use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;

#[test]
fn commands_print_a_sentence_if_there_is_nothing_to_list() {
    const NO_MODELS: &str = "no models; `blobd pull llama3:8b` or `blobd import FILE.gguf` adds one\n";
    const NO_DOWNLOADS: &str = "no unfinished downloads\n";
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    for (line, expected) in [
        ("ls", NO_MODELS),
        ("outdated", NO_MODELS),
        ("pull --all", NO_MODELS),
        ("ls llama", "no model matches\n"),
        ("ls --trash", "the trash is empty; `blobd rm --keep 7d MODEL` moves a model there\n"),
        ("ps", "no model is open\n"),
        ("partial ls", NO_DOWNLOADS),
        ("partial rm --all", NO_DOWNLOADS),
        ("partial rm --older-than 2d", "no unfinished download is that old\n"),
        ("gc", "nothing to delete\n"),
        ("gc --dry-run", "nothing to delete\n"),
        ("verify", "nothing is stored, so there is nothing to verify\n"),
    ] {
        // `ls` also names the models of other programs that the machine has.
        assert!(blobd.line(line).succeeds().text().starts_with(expected), "{line}");
    }
    let usage = blobd.line("df").succeeds().text();
    assert!(usage.contains("\nmodels  none\n"), "{usage}");
    let report = blobd.line("doctor").succeeds().text();
    assert!(report.contains("no complete pass yet"), "{report}");
}

#[test]
fn json_of_an_empty_store_has_empty_lists() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    for (line, key) in [
        ("ls", "models"),
        ("outdated", "models"),
        ("ls --trash", "models"),
        ("ps", "sessions"),
        ("partial ls", "downloads"),
        ("gc", "deleted"),
        ("verify", "corrupt"),
    ] {
        let document = blobd.line(&format!("{line} --json")).succeeds().json();
        assert_eq!(document[key].as_array().map(Vec::len), Some(0), "{line}: {document}");
    }
}

#[test]
fn models_that_were_not_pulled_are_not_counted_as_current() {
    let folder = tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    for (name, line, expected) in [
        ("m", "outdated", "the model has no source to compare with"),
        ("n", "outdated", "2 models, none has a source to compare with"),
        ("n", "pull --all", "2 models, none has a source to compare with"),
        ("n", "outdated nothing", "no model matches"),
    ] {
        blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        let text = blobd.line(line).succeeds().text();
        assert!(text.starts_with(expected) && text.lines().count() == 1, "{line}: {text}");
    }
}
