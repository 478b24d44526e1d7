//! OpenSSF's `model_signing` from PyPI, which verifies what blobd signs, and the other way round.

use super::*;

use blobd_tests::programs::virtual_environment;

/// The program in a virtual environment; `None`, with the reason printed, where it cannot be installed.
fn model_signing(scratch: &Path) -> Option<PathBuf> {
    // It needs `pyopenssl`, and does not say so.
    let python = virtual_environment(scratch, &["model-signing==1.1.1", "pyopenssl"])?;
    Some(python.with_file_name("model_signing"))
}

fn verifies(program: &Path, folder: &Path, bundle: &Path, key: &Path) -> bool {
    let mut command = Command::new(program);
    command.args(["verify", "key", text(folder), "--signature", text(bundle), "--public_key", text(key)]);
    command.output().unwrap().status.success()
}

#[test]
fn model_signing_verifies_what_blobd_signs_and_the_other_way_round() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let Some(program) = model_signing(daemon.scratch()) else { return };
    let folder = publish(daemon.scratch());
    import(&blobd, &folder);
    let file = ModelFile::dense(1).write_to(daemon.scratch(), "single.gguf");
    blobd.run(["import", text(&file)]).succeeds();
    for (name, pair) in [("p256", P256), ("p384", P384)] {
        let key = key_files(daemon.scratch(), name, pair);
        for model in ["acme", "single"] {
            let exported = daemon.scratch().join(format!("{name}-{model}"));
            let bundle = exported.with_extension("sig");
            let sign = ["sign", model, "--key", text(&key.private), "-o", text(&bundle)];
            blobd.run(sign).succeeds();
            let into = format!("{}/", exported.display());
            blobd.run(["export", model, "--component", "all", "-o", &into]).succeeds();
            assert!(verifies(&program, &exported, &bundle, &key.public), "{name} {model}");
            let first = fs::read_dir(&exported).unwrap().next().unwrap().unwrap().path();
            let victim = if first.is_file() { first } else { exported.join("config.json") };
            fs::write(&victim, [fs::read(&victim).unwrap(), b" ".to_vec()].concat()).unwrap();
            assert!(!verifies(&program, &exported, &bundle, &key.public), "{name} {model}: altered");
        }
        // A folder, and a single file, which has no path in the signature.
        for (model, path) in [("acme", &folder), ("single", &file)] {
            let bundle = daemon.scratch().join(format!("{name}-{model}-publisher.sig"));
            let mut command = Command::new(&program);
            command.args(["sign", "key", text(path), "--signature", text(&bundle)]);
            let signed = command.args(["--private_key", text(&key.private)]).output().unwrap();
            assert!(signed.status.success(), "{}", String::from_utf8_lossy(&signed.stderr));
            let arguments = ["--key", text(&key.public), "--signature", text(&bundle)];
            assert_eq!(state(&blobd, model, &arguments).0, "signed", "{name} {model}");
            blobd.run(["sign", model, "--signature", text(&bundle)]).succeeds();
            assert_eq!(state(&blobd, model, &["--key", text(&key.public)]).0, "signed", "{name} {model}");
        }
    }
}
