//! Stores that are absent, of another version, full or damaged.

use std::fs;

use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::flip_byte;

use super::Situation;
use super::fixture::files_below;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "a mistyped --root",
        command: "blobd ls --root /srv/modles",
        run: |fixture| fixture.run(&["ls", "--root", "modles"]),
        code: 3,
        happened: "modles: contains no store",
        why: "no such directory",
        to_do: "check the path; `blobd pull` and `blobd import` create a store",
    },
    Situation {
        did: "a directory with other files",
        command: "blobd ls --root ~",
        run: |fixture| {
            fs::create_dir(fixture.root()).unwrap();
            fs::write(fixture.root().join("notes.txt"), "").unwrap();
            fixture.run(&["ls"])
        },
        code: 2,
        happened: "store: has files",
        why: "no store.json",
        to_do: "choose an empty directory with --root",
    },
    Situation {
        did: "a store that a newer version wrote",
        command: "blobd ls",
        run: |fixture| {
            fs::create_dir(fixture.root()).unwrap();
            fs::write(fixture.root().join("store.json"), r#"{"format":99,"id":"x"}"#).unwrap();
            fixture.run(&["ls"])
        },
        code: 2,
        happened: "format 99",
        why: "is newer than this blobd supports",
        to_do: "upgrade blobd or choose another --root",
    },
    Situation {
        did: "a quota that is used",
        command: "blobd import m.gguf",
        run: |fixture| {
            let model = ModelFile::dense(1).write_to(&fixture.path(""), "m.gguf");
            fixture.configured("[space]\nquota = \"16 KiB\"\n", &["import", model.to_str().unwrap()])
        },
        code: 6,
        happened: "its quota is 16 KiB",
        why: "are used; this needs",
        to_do: "nothing was stored",
    },
    Situation {
        did: "a damaged blob",
        command: "blobd export m",
        run: |fixture| {
            fixture.with_models(&["m"]);
            let blobs = files_below(&fixture.root().join("blobs"));
            let largest = blobs.iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
            flip_byte(largest, 77);
            fixture.run(&["export", "m", "-o", "out.gguf"])
        },
        code: 5,
        happened: "out.gguf: wrong digest: expected sha256:",
        why: "the stored data is damaged",
        to_do: "pull or import the model again",
    },
    Situation {
        did: "a manifest that cannot be read stops a collection",
        command: "blobd gc",
        run: |fixture| {
            fixture.with_models(&["m"]);
            let manifest = files_below(&fixture.root().join("manifests")).pop().unwrap();
            fs::write(manifest, "{").unwrap();
            fixture.run(&["gc"])
        },
        code: 5,
        happened: "manifests/",
        why: "manifest: EOF while parsing",
        to_do: "pull or import this model again, or `blobd rm` it",
    },
    Situation {
        did: "a directory of the store is gone",
        command: "blobd gc",
        run: |fixture| {
            fixture.with_models(&["m"]);
            fs::remove_dir_all(fixture.root().join("recipes")).unwrap();
            fixture.run(&["gc"])
        },
        code: 5,
        happened: "recipes: missing",
        why: "missing",
        to_do: "put it back",
    },
];
