//! Files that are no models, and files that cannot be written.

use std::fs;

use blobd_tests::model::ModelFile;

use super::Situation;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "importing a file that does not exist",
        command: "blobd import absent.gguf",
        run: |fixture| fixture.run(&["import", "absent.gguf"]),
        code: 3,
        happened: "absent.gguf",
        why: "No such file or directory",
        to_do: "check the path",
    },
    Situation {
        did: "importing a file that is not a model",
        command: "blobd import notes.txt",
        run: |fixture| {
            fixture.write("notes.txt", "buy milk");
            fixture.run(&["import", "notes.txt"])
        },
        code: 1,
        happened: "notes.txt",
        why: "wrong format: expected a GGUF or safetensors file, found a text",
        to_do: "it has no weights: name the file that has them",
    },
    Situation {
        did: "importing an incomplete file",
        command: "blobd import half.gguf",
        run: |fixture| {
            let bytes = ModelFile::dense(1).bytes();
            fixture.write("half.gguf", &bytes[..bytes.len() / 2]);
            fixture.run(&["import", "half.gguf"])
        },
        code: 1,
        happened: "half.gguf: gguf",
        why: "end beyond the data section",
        to_do: "it is incomplete: copy or download it again",
    },
    Situation {
        did: "importing a folder without a model",
        command: "blobd import models/",
        run: |fixture| {
            fs::create_dir(fixture.path("models")).unwrap();
            fixture.run(&["import", "models"])
        },
        code: 1,
        happened: "models: folder",
        why: "no weights: expected a safetensors file",
        to_do: "name the folder that has the weights",
    },
    Situation {
        did: "exporting onto a file that exists",
        command: "blobd export m -o notes.txt",
        run: |fixture| {
            fixture.write("notes.txt", "buy milk");
            fixture.with_models(&["m"]).run(&["export", "m", "-o", "notes.txt"])
        },
        code: 4,
        happened: "notes.txt",
        why: "exists already",
        to_do: "--force replaces it; -o names another file",
    },
    Situation {
        did: "exporting into a directory that does not exist",
        command: "blobd export m -o absent/m.gguf",
        run: |fixture| fixture.with_models(&["m"]).run(&["export", "m", "-o", "absent/m.gguf"]),
        code: 3,
        happened: "absent/m.gguf",
        why: "No such file or directory",
        to_do: "check the path; the directories in it must exist",
    },
];
