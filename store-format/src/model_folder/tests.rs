//! Folders of each kind, and folders with faults.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn listing(paths: &[&str]) -> Vec<FolderFile> {
    paths.iter().map(|path| FolderFile { path: (*path).to_owned(), size: 10 }).collect()
}

fn listed(paths: &[&str]) -> ListedFolder {
    ListedFolder::new(listing(paths), &Selection::default()).unwrap()
}

fn paths(files: &[FolderFile]) -> Vec<&str> {
    files.iter().map(|file| file.path.as_str()).collect()
}

/// A plan with the contents of some files.
fn plan(paths: &[&str], texts: &[(&str, Json)]) -> FolderPlan {
    let folder = listed(paths);
    let asked: Vec<_> = folder.texts().map(str::to_owned).collect();
    let texts: BTreeMap<_, _> =
        texts.iter().map(|(path, text)| ((*path).to_owned(), text.to_string().into_bytes())).collect();
    assert!(texts.keys().all(|path| asked.contains(path)), "{asked:?}");
    folder.plan(&texts).unwrap()
}

fn index(tensors: &[(&str, &str)], total: &Json) -> Json {
    let map: serde_json::Map<_, _> =
        tensors.iter().map(|(tensor, shard)| ((*tensor).to_owned(), Json::from(*shard))).collect();
    json!({ "metadata": { "total_size": total }, "weight_map": map })
}

const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn index_names_safetensors_files_only() {
    for other in ["config.json", INDEX, "absent.bin"] {
        let map = index(&[("a", other), ("b", ONE)], &Json::Null);
        let plan = plan(&["config.json", INDEX, ONE], &[(INDEX, map)]);
        let fault = FolderFault::NotSafetensors { index: INDEX.to_owned(), file: other.to_owned() };
        assert_eq!(plan.faults(), [fault], "{other}");
        assert!(plan.faults()[0].is_fatal());
    }
}

#[test]
fn shards_of_two_sets_are_noted() {
    const WHOLE: &str = "model-00001-of-00001.safetensors";
    let plan = plan(&["config.json", WHOLE, ONE, TWO], &[]);
    let [first, second] = [WHOLE, ONE].map(str::to_owned);
    assert_eq!(plan.faults(), [FolderFault::SeveralSets { first, second }]);
    assert!(!plan.faults()[0].is_fatal());
}

#[test]
fn kinds_of_folders_are_recognised_by_their_files() {
    for (files, kind) in [
        (&["config.json", INDEX, ONE, TWO][..], FolderKind::Transformers),
        (&["model_index.json", "unet/config.json", "unet/x.safetensors"], FolderKind::Diffusers),
        (&["adapter_config.json", "adapter_model.safetensors"], FolderKind::Adapter),
        (&["params.json", "consolidated.safetensors", "tekken.json"], FolderKind::Mistral),
        (&["consolidated-00001-of-00001.safetensors"], FolderKind::Mistral),
        (&["config.json", "consolidated.safetensors"], FolderKind::Transformers),
        (&["a.safetensors"], FolderKind::Weights),
        (&["ae.sft"], FolderKind::Weights),
    ] {
        assert_eq!(plan(files, &[]).kind(), kind, "{files:?}");
    }
    let files = ["config.json", "model.safetensors"];
    let of = |config: Json| plan(&files, &[("config.json", config)]).kind();
    assert_eq!(of(json!({ "quantization": { "group_size": 64, "bits": 4 } })), FolderKind::Mlx);
    assert_eq!(of(json!({ "quantization_config": { "bits": 4 } })), FolderKind::Transformers);
    assert_eq!(of(json!([])), FolderKind::Transformers);
}

#[test]
fn other_formats_and_files_of_other_programs_are_left_out_with_the_reason() {
    let plan = plan(
        &[
            "model.safetensors",
            "README.md",
            "tokenizer.model",
            "pytorch_model.bin",
            "a/optimizer.PT",
            "openvino/openvino_model.bin",
            "openvino/openvino_model.xml",
            "ggml-model.bin",
            "onnx/model.onnx",
            "model.gguf",
            "pytorch_model.bin.index.json",
            "original/consolidated.00.pth",
            "original/params.json",
            ".gitattributes",
            ".cache/huggingface/download/x.metadata",
            "Thumbs.db",
            "x.safetensors.incomplete",
            "model.safetensors.partial-3",
            "downloading_model.safetensors",
            "._____temp/model.safetensors",
        ],
        &[],
    );
    assert_eq!(paths(plan.files()), ["README.md", "model.safetensors", "tokenizer.model"]);
    let left_out: BTreeMap<&str, Reason> =
        plan.left_out().iter().map(|left| (left.file.path.as_str(), left.reason)).collect();
    let expected = [
        ("pytorch_model.bin", Reason::Pickle),
        ("a/optimizer.PT", Reason::Pickle),
        ("onnx/model.onnx", Reason::OtherFormat),
        ("openvino/openvino_model.bin", Reason::OtherFormat),
        ("openvino/openvino_model.xml", Reason::OfOtherFormat),
        ("ggml-model.bin", Reason::OtherFormat),
        ("model.gguf", Reason::Gguf),
        ("pytorch_model.bin.index.json", Reason::IndexOfPickles),
        ("original/consolidated.00.pth", Reason::Original),
        ("original/params.json", Reason::Original),
        (".gitattributes", Reason::Hidden),
        (".cache/huggingface/download/x.metadata", Reason::Hidden),
        ("Thumbs.db", Reason::Hidden),
        ("x.safetensors.incomplete", Reason::Partial),
        ("model.safetensors.partial-3", Reason::Partial),
        ("downloading_model.safetensors", Reason::Partial),
        ("._____temp/model.safetensors", Reason::Partial),
    ];
    assert_eq!(left_out, expected.into());
    let texts: BTreeSet<String> = plan.left_out().iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), expected.len());
    assert!(texts.iter().any(|text| text.contains("pytorch_model.bin: a pickle, which is never read")));
    let large = FolderFile { path: "video.mp4".to_owned(), size: 1 << 40 };
    let files = listing(&["a.safetensors"]).into_iter().chain([large]);
    let folder = ListedFolder::new(files, &Selection::default()).unwrap();
    assert_eq!(folder.left_out[0].reason, Reason::Large);
}

#[test]
fn patterns_choose_files_of_any_format() {
    let files = ["config.json", "model.safetensors", "model.bin", "onnx/a.onnx", "onnx/b/c.onnx", "x.tmp"];
    let chosen = |include: &[&str], exclude: &[&str]| {
        let selection = Selection::new(include.iter().copied(), exclude.iter().copied());
        let folder = ListedFolder::new(listing(&files), &selection)?;
        Ok::<_, FolderError>(folder.files.into_iter().map(|file| file.path).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(
        chosen(&["*"], &[]).unwrap(),
        "config.json model.bin model.safetensors onnx/a.onnx onnx/b/c.onnx"
    );
    assert_eq!(chosen(&["*.BIN", "config*"], &[]).unwrap(), "config.json model.bin");
    assert_eq!(chosen(&["onnx/"], &["*c.onnx"]).unwrap(), "onnx/a.onnx");
    assert_eq!(chosen(&[], &["config.json"]).unwrap(), "model.safetensors");
    assert!(matches!(chosen(&["config.json"], &[]), Err(FolderError::NoWeights { .. })));
    let folder = ListedFolder::new(listing(&files), &Selection::new(["config.json", "*.bin"], [])).unwrap();
    assert_eq!(folder.left_out.iter().filter(|left| left.reason == Reason::NotIncluded).count(), 3);
}

#[test]
fn folder_with_no_weights_but_gguf_files_has_a_model_in_each() {
    let found = |files: &[&str], selection: &Selection| {
        let found = ListedFolder::gguf_files(listing(files), selection);
        found.map(|files| files.into_iter().map(|file| file.path).collect::<Vec<_>>())
    };
    let files = ["README.md", "a.gguf", "b.GGUF", "c.gguf.incomplete", "d.bin"];
    assert_eq!(found(&files, &Selection::default()).unwrap(), ["a.gguf", "b.GGUF"]);
    assert_eq!(found(&files, &Selection::new([], ["b*"])).unwrap(), ["a.gguf"]);
    assert_eq!(found(&files, &Selection::new(["a*", "*.md"], [])).unwrap(), ["a.gguf"]);
    // Files that patterns choose are one model, unless all of them are GGUF files.
    assert_eq!(found(&files, &Selection::new(["a*", "d*"], [])), None);
    assert_eq!(found(&["a.gguf", "model.safetensors"], &Selection::default()), None);
    assert_eq!(found(&["README.md"], &Selection::default()), None);
}

#[test]
fn folder_without_safetensors_is_refused_with_what_can_be_done_with_its_other_weights() {
    let refused = |files: &[&str]| ListedFolder::new(listing(files), &Selection::default()).unwrap_err();
    let error = refused(&["a.json", "x.bin", "y.gguf"]);
    assert_eq!(
        error.to_string(),
        "folder: no weights: expected a safetensors file, found \"x.bin\", \"y.gguf\""
    );
    assert!(error.advice().contains("FOLDER/*.gguf"));
    assert!(refused(&["a.json", "x.bin"]).advice().contains("--include '*'"));
    assert_eq!(refused(&["a.json"]).advice(), "name the folder that has the weights");
    let parts = refused(&["README.md", "a.gguf.part1of2", "a.gguf.part2of2"]);
    assert_eq!(parts.to_string(), "\"a.gguf.part1of2\": expected a whole file, found a part of one");
    assert_eq!(parts.advice(), "join the parts: `cat a.gguf.part1of2 a.gguf.part2of2 > a.gguf`");
}

#[test]
fn shards_beside_an_index_that_names_none_are_reported() {
    let index = ("model.safetensors.index.json".to_owned(), br#"{"weight_map":{}}"#.to_vec());
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let files = listing(&[shards[0], shards[1], &index.0]);
    let plan = ListedFolder::new(files, &Selection::default()).unwrap().plan(&[index].into()).unwrap();
    let expected = shards.map(|shard| FolderFault::NotInIndex { shard: shard.to_owned() });
    assert_eq!(plan.faults(), expected);
}

#[test]
fn paths_that_are_not_allowed_are_refused_if_the_file_is_taken() {
    for path in ["../x", "/x", "a/../b", "a\0b", "a\nb", "a//b", &"x".repeat(256), "Model.safetensors"] {
        let files = || listing(&["model.safetensors", path]);
        let error = ListedFolder::new(files(), &Selection::default()).unwrap_err();
        assert!(matches!(error, FolderError::Path(_)), "{path:?}: {error}");
        assert!(!error.to_string().contains(char::is_control), "{path:?}");
        let without = Selection::new([], [path]);
        assert!(
            ListedFolder::new(files(), &without).is_ok() || path.eq_ignore_ascii_case("model.safetensors")
        );
    }
    let many = (0..=ListedFolder::MAX_FILES).map(|number| FolderFile { path: number.to_string(), size: 1 });
    assert_eq!(ListedFolder::new(many, &Selection::default()).unwrap_err(), FolderError::TooManyFiles);
}

#[test]
fn names_that_look_like_options_are_left_out() {
    let plan = plan(&["model.safetensors", "-rf.json", "--o/config.json"], &[]);
    assert!(plan.left_out().iter().all(|left| left.reason == Reason::Dash), "{:?}", plan.left_out());
    assert_eq!(plan.left_out().len(), 2);
    assert!(plan.left_out()[0].to_string().contains("rename it"));
}

#[test]
fn excluded_files_do_not_count() {
    let excluded = (0..ListedFolder::MAX_FILES).map(|number| format!("d/{number}"));
    let files = excluded.chain(["model.safetensors".to_owned()]).map(|path| FolderFile { path, size: 1 });
    let listed =
        |exclude: &[&str]| ListedFolder::new(files.clone(), &Selection::new([], exclude.iter().copied()));
    assert_eq!(listed(&[]).unwrap_err(), FolderError::TooManyFiles);
    assert!(listed(&["d/"]).is_ok());
}

#[test]
fn patterns_that_choose_nothing_are_named() {
    let paths = ["a.safetensors", "sub/b.json", ".hid.json", "x1.json"];
    let useless = |include: &[&str], exclude: &[&str]| {
        let selection = Selection::new(include.iter().copied(), exclude.iter().copied());
        let useless = selection.useless(&paths.into_iter());
        useless.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    for used in ["sub/", "./sub/*", "*.json", "X1.json", ".hid.json"] {
        assert_eq!(useless(&[], &[used]), "", "{used}");
    }
    for (exclude, words) in [
        ("sub", "matches no file; with a `/` at its end"),
        ("x{1,2}.json", "braces and commas stand for themselves"),
        ("*.json,*.txt", "braces and commas stand for themselves"),
        ("nothing", "matches no file"),
    ] {
        let text = useless(&[], &[exclude]);
        assert!(text.starts_with("--exclude ") && text.contains(words), "{text}");
    }
    assert_eq!(useless(&["*.safetensors"], &[]), "");
    assert!(useless(&[".hid.json"], &[]).contains("hidden files"));
}

#[test]
fn patterns_without_weights_are_refused_as_such() {
    for selection in [Selection::new(["nothing*"], []), Selection::new([], ["*"])] {
        let error = ListedFolder::new(listing(&["a.safetensors", "b.json"]), &selection).unwrap_err();
        assert_eq!(error.advice(), "the patterns have to match at least one file with weights");
    }
}

#[test]
fn tensor_that_an_index_names_twice_is_a_fault() {
    let text = |first: &str, second: &str| {
        format!(r#"{{"weight_map":{{"a":"{first}","b":"{ONE}","a":"{second}"}}}}"#).into_bytes()
    };
    let faults = |first: &str, second: &str| {
        let folder = listed(&[ONE, TWO, INDEX]);
        folder.plan(&[(INDEX.to_owned(), text(first, second))].into()).unwrap().faults().to_vec()
    };
    assert_eq!(faults(TWO, TWO), []);
    let [index, tensor, first, second] = [INDEX, "a", ONE, TWO].map(str::to_owned);
    let fault = FolderFault::TensorNamedTwice { index, tensor, first, second };
    assert_eq!(faults(ONE, TWO), std::slice::from_ref(&fault));
    assert!(!fault.is_fatal());
}

#[test]
fn index_that_agrees_with_its_shards_has_no_faults() {
    let tensors = [("a", ONE), ("b", TWO), ("c", TWO)];
    for total in [json!(7), json!(7.0), json!("7"), json!(null)] {
        let plan = plan(&[INDEX, ONE, TWO, "config.json"], &[(INDEX, index(&tensors, &total))]);
        assert_eq!(plan.faults(), []);
        assert_eq!(plan.indexed_files(), [ONE, TWO].into());
        assert_eq!(plan.check_tensors([(ONE, vec![("a", 1)]), (TWO, vec![("b", 2), ("c", 4)])]), []);
    }
    // The index of a variant, in a folder.
    let (index_path, shard) =
        ("unet/d.safetensors.index.fp16.json", "unet/d.fp16-00001-of-00001.safetensors");
    let plan = plan(
        &[index_path, shard, "unet/d.safetensors"],
        &[(index_path, index(&[("a", "d.fp16-00001-of-00001.safetensors")], &json!(1)))],
    );
    assert_eq!((plan.faults(), plan.indexed_files()), (&[][..], [shard].into()));
}

/// The faults of an index, with whether they are fatal.
fn faults(paths: &[&str], tensors: &[(&str, &str)]) -> Vec<(String, bool)> {
    let plan = plan(paths, &[(INDEX, index(tensors, &json!(null)))]);
    plan.faults().iter().map(|fault| (fault.to_string(), fault.is_fatal())).collect()
}

#[test]
fn faults_of_an_index_are_named_by_the_list_of_files() {
    let both = [("a", ONE), ("b", TWO)];
    assert_eq!(faults(&[INDEX, ONE], &both), [(format!("{TWO}: missing: {INDEX} names this shard"), true)]);
    assert_eq!(
        faults(&[INDEX, ONE, TWO, "model.safetensors"], &both),
        [(
            format!(
                "model.safetensors: beside the shards of {INDEX}: programs load this file, not the shards"
            ),
            false
        )]
    );
    let other = "model-00001-of-00003.safetensors";
    assert_eq!(
        faults(&[INDEX, ONE, TWO, other], &both),
        [(format!("{other}: named like a shard, but no index names it"), false)]
    );
    for path in ["../x.safetensors", "/etc/passwd", "a/../../x", ""] {
        let [(text, is_fatal)] = faults(&[INDEX, ONE], &[("a", path), ("b", ONE)]).try_into().unwrap();
        assert!(is_fatal && text.contains("below the folder of the index") && text.contains(path), "{text}");
    }
    let incomplete = format!("{TWO}.incomplete");
    let found = faults(&[INDEX, ONE, &incomplete], &both);
    assert!(found[0].0.contains("missing") && found[0].1, "{found:?}");
    // Without an index, the numbers in the names show which shards are missing.
    let numbers = plan(&["model-00003-of-00003.safetensors", "model-00001-of-00003.safetensors"], &[]);
    assert_eq!(
        numbers.faults(),
        [FolderFault::MissingShard { index: None, shard: "model-00002-of-00003.safetensors".to_owned() }]
    );
}

#[test]
fn shards_of_a_variant_are_complete_by_themselves() {
    let all = [ONE, TWO, "model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"];
    assert_eq!(plan(&all, &[]).faults(), []);
    assert_eq!(plan(&all, &[]).check_tensors(all.map(|path| (path, [("a", 1)]))).len(), 2);
    let missing = plan(&["config.json", ONE, TWO, all[2]], &[]);
    let expected = FolderFault::MissingShard { index: None, shard: all[3].to_owned() };
    assert_eq!(missing.faults(), std::slice::from_ref(&expected));
    assert_eq!(plan(&["config.json", all[2]], &[]).faults(), [expected]);
}

#[test]
fn shard_that_a_pattern_leaves_out_is_not_an_error() {
    let selection = Selection::new([], [TWO]);
    let folder = ListedFolder::new(listing(&[INDEX, ONE, TWO]), &selection).unwrap();
    let text = index(&[("a", ONE), ("b", TWO)], &json!(null)).to_string();
    let plan = folder.plan(&[(INDEX.to_owned(), text.into_bytes())].into()).unwrap();
    assert_eq!(plan.faults(), [FolderFault::ShardLeftOut { index: INDEX.to_owned(), shard: TWO.to_owned() }]);
    assert!(!plan.faults()[0].is_fatal());
    assert_eq!(plan.indexed_files(), [ONE].into());
    assert_eq!(plan.check_tensors([(ONE, vec![("a", 1)])]), []);
}

#[test]
fn tensor_that_two_shards_have_is_named_with_and_without_an_index() {
    let text = index(&[("a", ONE), ("b", TWO)], &json!(null));
    let other = "other-00001-of-00002.safetensors";
    for plan in [plan(&[ONE, TWO, other], &[]), plan(&[INDEX, ONE, TWO, other], &[(INDEX, text)])] {
        assert!(plan.indexed_files().is_superset(&[ONE, TWO].into()));
        let faults = plan.check_tensors([
            (ONE, vec![("a", 1)]),
            (TWO, vec![("a", 1), ("b", 1)]),
            (other, vec![("b", 1)]),
        ]);
        let twice = |fault: &&FolderFault| matches!(fault, FolderFault::TensorTwice { .. });
        let [fault] = faults.iter().filter(twice).collect::<Vec<_>>().try_into().unwrap();
        let expected = format!(
            "{TWO}: tensor \"a\": {ONE} has one of this name too; it depends on the program which is used"
        );
        assert_eq!((fault.to_string(), fault.is_fatal()), (expected, false));
    }
}

#[test]
fn faults_of_an_index_are_named_by_the_tensors() {
    let plan = plan(&[INDEX, ONE, TWO], &[(INDEX, index(&[("a", ONE), ("b", TWO), ("c", TWO)], &json!(9)))]);
    let texts = |one: Vec<(&'static str, u64)>, two: Vec<(&'static str, u64)>| {
        let faults = plan.check_tensors([(ONE, one), (TWO, two)]);
        faults.iter().map(|fault| (fault.to_string(), fault.is_fatal())).collect::<Vec<_>>()
    };
    assert_eq!(texts(vec![("a", 4)], vec![("b", 4), ("c", 1)]), []);
    for (one, two, words, is_fatal) in [
        (
            vec![("a", 4), ("c", 1)],
            vec![("b", 4)],
            "expected in model-00002-of-00002.safetensors, found in",
            true,
        ),
        (
            vec![("a", 4)],
            vec![("b", 5)],
            "tensor \"c\": expected in model-00002-of-00002.safetensors, found nowhere",
            true,
        ),
        (
            vec![("a", 4), ("x\u{1b}", 0)],
            vec![("b", 4), ("c", 1)],
            "tensor \"x\\u{1b}\" of model-00001",
            false,
        ),
        (
            vec![("a", 4)],
            vec![("b", 4), ("c", 2)],
            "wrong total_size: expected 10 bytes of tensors, found 9",
            false,
        ),
    ] {
        let [(text, found)] = texts(one, two).try_into().unwrap();
        assert!(text.contains(words) && found == is_fatal, "{text}");
    }
    // A shard that the index does not name.
    let without_one = self::plan(&[INDEX, ONE, TWO], &[(INDEX, index(&[("a", TWO), ("b", TWO)], &json!(8)))]);
    let found = without_one.check_tensors([(ONE, vec![("a", 4)]), (TWO, vec![("b", 4)])]);
    let [fault] = found.try_into().unwrap();
    assert!(fault.to_string().ends_with(&format!("expected in {TWO}, found in {ONE}")), "{fault}");
    // An index of another model.
    let many: Vec<(String, u64)> = (0..1000).map(|number| (number.to_string(), 1)).collect();
    let many = many.iter().map(|(name, size)| (name.as_str(), *size));
    assert_eq!(plan.check_tensors([(ONE, many.collect::<Vec<_>>())]).len(), 20);
}

#[test]
fn malformed_indexes_are_faults() {
    for text in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, "{\"weight_map\":{}"] {
        let plan = listed(&[INDEX, ONE]).plan(&[(INDEX.to_owned(), text.into())].into()).unwrap();
        let [fault @ FolderFault::Index { .. }, ..] = plan.faults() else { panic!("{text}") };
        assert!(
            fault.is_fatal() && fault.to_string().starts_with("model.safetensors.index.json: wrong index")
        );
    }
    let odd = r#"{"metadata":null,"weight_map":{"a":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}}"#;
    let plan = listed(&[INDEX, ONE, TWO]).plan(&[(INDEX.to_owned(), odd.into())].into()).unwrap();
    let faults = plan.check_tensors([(ONE, vec![]), (TWO, vec![("a", 1)])]);
    assert_eq!(faults, [], "the last counts, as for Python");
}

#[test]
fn components_without_a_folder_are_named() {
    let model_index = json!({
        "_class_name": "P", "_diffusers_version": "0.42", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"],
        "safety_checker": [null, null], "requires_safety_checker": false,
    });
    let files = ["model_index.json", "unet/x.safetensors"];
    let plan = plan(&files, &[("model_index.json", model_index)]);
    assert_eq!(plan.faults(), [FolderFault::NoComponent { component: "vae".to_owned() }]);
    assert!(!plan.faults()[0].is_fatal());
}

#[test]
fn components_whose_weights_are_left_out_are_named() {
    let model_index = json!({
        "unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "text_encoder": ["transformers", "T"],
        "scheduler": ["diffusers", "S"], "controlnet": ["diffusers", "C"],
    });
    let files = [
        "controlnet/config.json",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/model.safetensors",
        "text_encoder/pytorch_model.bin",
        "unet/x.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.bin",
    ];
    let plan = plan(&files, &[("model_index.json", model_index)]);
    let left_out = ["text_encoder/pytorch_model.bin", "vae/diffusion_pytorch_model.bin"].map(str::to_owned);
    let [encoder, vae] = left_out.clone();
    assert_eq!(
        plan.faults(),
        [
            FolderFault::NoWeightsOfComponent { component: "controlnet".to_owned(), left_out: None },
            FolderFault::NoWeightsOfComponent { component: "vae".to_owned(), left_out: Some(vae.clone()) },
            FolderFault::WeightsLeftOut { paths: vec![encoder, vae] },
        ]
    );
    assert!(plan.faults().iter().all(|fault| !fault.is_fatal() && !fault.is_of_index()));
}

#[test]
fn excluded_weights_are_not_named_and_downloads_that_have_not_ended_are_never_taken() {
    let selection = Selection::new([], ["*.bin"]);
    let files = ["a.safetensors", "b.bin", "c.safetensors.part", "d.bin.crdownload", "e.json.download"];
    let folder = ListedFolder::new(listing(&files), &selection).unwrap();
    let plan = folder.plan(&BTreeMap::new()).unwrap();
    assert_eq!(plan.faults(), []);
    let reasons = plan.left_out().iter().map(|left| left.reason);
    assert_eq!(
        reasons.collect::<Vec<_>>(),
        [Reason::Excluded, Reason::Partial, Reason::Partial, Reason::Partial]
    );
}

#[test]
fn long_texts_are_not_asked_for_and_refused() {
    let size = ListedFolder::MAX_TEXT_BYTES + 1;
    let index = FolderFile { path: INDEX.to_owned(), size };
    let files = listing(&["a.safetensors"]).into_iter().chain([index]);
    let folder = ListedFolder::new(files, &Selection::default()).unwrap();
    assert_eq!(folder.texts().count(), 0);
    let long = vec![b' '; usize::try_from(size).unwrap()];
    let error = folder.plan(&[(INDEX.to_owned(), long)].into()).unwrap_err();
    assert_eq!(error, FolderError::TextTooLong { path: INDEX.to_owned() });
}

proptest! {
    #[test]
    fn every_file_is_taken_or_left_out_with_a_reason(
        names in vec("[a-c.]{0,2}/?[a-c-]{0,3}(\\.safetensors|\\.bin|\\.json|\\.gguf|)", 0..12),
    ) {
        let files: Vec<FolderFile> = names.iter().map(|path| FolderFile { path: path.clone(), size: 1 }).collect();
        if let Ok(folder) = ListedFolder::new(files.clone(), &Selection::default()) {
            let plan = folder.plan(&BTreeMap::new()).unwrap();
            let left_out = plan.left_out().iter().map(|left| left.file.clone());
            let mut found: Vec<FolderFile> = plan.files().iter().cloned().chain(left_out).collect();
            let mut expected = files;
            found.sort();
            expected.sort();
            prop_assert_eq!(found, expected);
            prop_assert!(plan.files().is_sorted());
        }
    }

    /// A model that is split into shards at random agrees with its index; after one tensor is moved it does not.
    #[test]
    fn moved_tensor_is_found(
        tensors in btree_map("[a-z]{1,6}", (0..3_usize, 0..100_u64), 1..20),
        moved in any::<prop::sample::Index>(),
    ) {
        let shard = |number: usize| format!("m-{:05}-of-00003.safetensors", number + 1);
        let map: BTreeMap<&String, String> = tensors.iter().map(|(name, (place, _))| (name, shard(*place))).collect();
        let total: u64 = tensors.values().map(|(_, size)| size).sum();
        let text = json!({ "metadata": { "total_size": total }, "weight_map": map }).to_string();
        let shards: Vec<String> = (0..3).map(shard).collect();
        let all: Vec<&str> = shards.iter().map(String::as_str).chain(["m.safetensors.index.json"]).collect();
        let plan = listed(&all).plan(&[("m.safetensors.index.json".to_owned(), text.into_bytes())].into()).unwrap();
        let in_shard = |number: usize, tensors: &BTreeMap<String, (usize, u64)>| -> Vec<(String, u64)> {
            let own = tensors.iter().filter(|(_, (place, _))| *place == number);
            own.map(|(name, (_, size))| (name.clone(), *size)).collect()
        };
        let check = |tensors: &BTreeMap<String, (usize, u64)>| {
            let files: Vec<_> = (0..3).map(|number| in_shard(number, tensors)).collect();
            let given = shards.iter().zip(&files).map(|(path, own)| {
                (path.as_str(), own.iter().map(|(name, size)| (name.as_str(), *size)).collect::<Vec<_>>())
            });
            plan.check_tensors(given.collect::<Vec<_>>())
        };
        prop_assert_eq!(check(&tensors), []);
        let mut other = tensors.clone();
        let name = tensors.keys().nth(moved.index(tensors.len())).unwrap();
        other.get_mut(name).unwrap().0 = (tensors[name].0 + 1) % 3;
        prop_assert!(check(&other).iter().any(FolderFault::is_fatal));
    }

    #[test]
    fn any_texts_make_a_plan(config in any::<Vec<u8>>(), index in "\\{.{0,40}\\}", pipeline in ".{0,40}") {
        let texts = [("config.json", config), (INDEX, index.into_bytes()), ("model_index.json", pipeline.into_bytes())];
        let texts = texts.map(|(path, text)| (path.to_owned(), text));
        let _ = listed(&[INDEX, ONE, "config.json", "model_index.json"]).plan(&texts.into()).unwrap();
    }
}

#[test]
fn weights_that_are_stored_whole_are_named() {
    let files = ["model.safetensors", "a.bin", "onnx/b.onnx"];
    let files = files.map(|path| FolderFile { path: path.to_owned(), size: 1 });
    let plan = |includes: &[&'static str]| {
        let selection = Selection::new(includes.iter().copied(), []);
        let listed = ListedFolder::new(files.clone(), &selection).unwrap();
        listed.plan(&BTreeMap::new()).unwrap().faults().to_vec()
    };
    let paths = ["a.bin", "onnx/b.onnx"].map(str::to_owned).into();
    assert_eq!(plan(&[]), [FolderFault::WeightsLeftOut { paths }]);
    let [fault] = plan(&["*"]).try_into().unwrap();
    let expected =
        "a.bin, onnx/b.onnx: stored whole, as a pattern includes them: no tensor of them is shared";
    assert_eq!((fault.to_string(), fault.is_fatal()), (expected.to_owned(), false));
}

#[test]
fn gguf_files_are_taken_unless_the_patterns_leave_them_out() {
    let takes = |includes: &[&'static str], excludes: &[&'static str]| {
        let file = FolderFile { path: "q/m-Q8_0.gguf".to_owned(), size: 1 };
        Selection::new(includes.iter().copied(), excludes.iter().copied()).takes_gguf(&file)
    };
    assert!(takes(&[], &[]) && takes(&["*"], &[]) && takes(&["*.gguf"], &["*.bin"]));
    assert!(!takes(&["*.json"], &[]) && !takes(&["*"], &["q/"]));
}
