//! A path in place of a name, and a name in place of a path: the error names the command that accepts it.

use blobd_tests::command::Blobd;
use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;

#[test]
fn path_of_a_file_is_not_looked_up_at_a_registry() {
    let daemon = TestDaemon::start();
    let _path = ModelFile::dense(1).write_to(daemon.scratch(), "x.gguf");
    let run = |line: &[&str]| -> Run {
        let mut command = daemon.command().command();
        command::run(command.args(line).current_dir(daemon.scratch()))
    };
    for path in ["x.gguf", "./x.gguf", "../x.gguf", "/abs/x.gguf", "~/x.gguf", ".", "file:///x.gguf"] {
        for line in [&["pull", path][..], &["pull", path, "--dry-run"], &["pull", path, "--name", "m"]] {
            let refused = run(line).exits_with(2);
            assert!(refused.stderr.contains("`blobd import "), "{line:?}: {}", refused.stderr);
        }
    }
    for verb in ["rm", "pin", "export", "warm", "history", "verify"] {
        let refused = run(&[verb, "./x.gguf"]).exits_with(2);
        assert!(
            refused.stderr.contains("is a path") && refused.stderr.contains("`blobd ls`"),
            "{}",
            refused.stderr
        );
    }
    run(&["import", "x.gguf", "--name", "m"]).succeeds();
    assert!(run(&["show", "x.gguf"]).succeeds().text().contains("llama"), "a file is described as before");
    for (line, code) in
        [("import hf.co/me/x-GGUF", 3), ("import https://example.org/x.gguf", 3), ("import llama3:8b", 3)]
    {
        let words: Vec<&str> = line.split(' ').collect();
        let missing = run(&words).exits_with(code);
        assert!(missing.stderr.contains(&format!("`blobd pull {}`", words[1])), "{}", missing.stderr);
    }
}

#[test]
fn error_for_a_name_unknown_to_ollamas_registry_suggests_hugging_face() {
    let registry = FakeRegistry::start().unwrap();
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url())).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    for name in ["Qwen/Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B-GGUF:Q4_K_M", " me/mine\n"] {
        for verb in ["pull", "show", "fit"] {
            let missing = blobd.run([verb, name]).exits_with(3);
            assert!(missing.stderr.contains(&format!("hf.co/{}", name.trim())), "{verb}: {}", missing.stderr);
        }
    }
    let missing = blobd.run(["pull", "llama3:9b"]).exits_with(3);
    assert!(!missing.stderr.contains("hf.co"), "{}", missing.stderr);
    let missing = blobd.run(["pull", "model.gguf"]).exits_with(3);
    assert!(missing.stderr.contains("`blobd import FILE`"), "{}", missing.stderr);
}
