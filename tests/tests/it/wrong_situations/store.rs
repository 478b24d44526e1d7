//! Stores that are absent, of another version, full or damaged.

use std::fs;

use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::flip_byte;

use super::Situation;
use super::place::files_below;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "a mistyped --root",
        command: "blobd ls --root /srv/modles",
        run: |place| place.run(&["ls", "--root", "modles"]),
        code: 3,
        happened: "modles: contains no store",
        why: "no such directory",
        to_do: "check the path; `blobd pull` and `blobd import` create a store",
    },
    Situation {
        did: "a directory with other files",
        command: "blobd ls --root ~",
        run: |place| {
            fs::create_dir(place.root()).unwrap();
            fs::write(place.root().join("notes.txt"), "").unwrap();
            place.run(&["ls"])
        },
        code: 2,
        happened: "store: has files",
        why: "no store.json",
        to_do: "choose an empty directory with --root",
    },
    Situation {
        did: "a store that a newer version wrote",
        command: "blobd ls",
        run: |place| {
            fs::create_dir(place.root()).unwrap();
            fs::write(place.root().join("store.json"), r#"{"format":99,"id":"x"}"#).unwrap();
            place.run(&["ls"])
        },
        code: 2,
        happened: "format 99",
        why: "is newer than this blobd supports",
        to_do: "upgrade blobd or choose another --root",
    },
    Situation {
        did: "a quota that is used",
        command: "blobd import m.gguf",
        run: |place| {
            let model = ModelFile::dense(1).write_to(&place.path(""), "m.gguf");
            place.configured("[space]\nquota = \"16 KiB\"\n", &["import", model.to_str().unwrap()])
        },
        code: 6,
        happened: "its quota is 16.0 KiB",
        why: "are used; this needs",
        to_do: "nothing was stored",
    },
    Situation {
        did: "a damaged blob",
        command: "blobd export m",
        run: |place| {
            place.with_models(&["m"]);
            let blobs = files_below(&place.root().join("blobs"));
            let largest = blobs.iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
            flip_byte(largest, 77);
            place.run(&["export", "m", "-o", "out.gguf"])
        },
        code: 5,
        happened: "out.gguf: wrong digest: expected sha256:",
        why: "the stored data is damaged",
        to_do: "pull or import the model again",
    },
    Situation {
        did: "a manifest that cannot be read stops a collection",
        command: "blobd gc",
        run: |place| {
            place.with_models(&["m"]);
            let manifest = files_below(&place.root().join("manifests")).pop().unwrap();
            fs::write(manifest, "{").unwrap();
            place.run(&["gc"])
        },
        code: 5,
        happened: "manifests/",
        why: "manifest: EOF while parsing",
        to_do: "pull or import this model again, or `blobd rm` it",
    },
    Situation {
        did: "a directory of the store is gone",
        command: "blobd gc",
        run: |place| {
            place.with_models(&["m"]);
            fs::remove_dir_all(place.root().join("recipes")).unwrap();
            place.run(&["gc"])
        },
        code: 5,
        happened: "recipes: missing",
        why: "missing",
        to_do: "put it back",
    },
];
