use proptest::prelude::*;

use super::*;

fn source(text: &str) -> PullSource {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn names_of_models_stay_references() {
    for text in [
        "llama3:8b",
        "hf.co/me/repo-GGUF:Q4_K_M",
        "hf.co/me/model.gguf",
        "https://huggingface.co/me/model.gguf",
        "https://ollama.com/me/model:8b",
        "hf.co/me/repo:Model-Q4_K_M.gguf",
        "http://127.0.0.1:1/a/b.gguf:latest",
        "https://registry.example/a/b",
    ] {
        assert_eq!(source(text), PullSource::Registry(text.parse().unwrap()), "{text}");
    }
}

#[test]
fn files_at_hugging_face_are_parsed_in_common_spellings() {
    for (text, revision, path, name) in [
        ("hf.co/me/x-GGUF/x-Q4_K_M.gguf", "main", "x-Q4_K_M.gguf", "hf.co/me/x-GGUF:Q4_K_M"),
        ("hf.co/me/x-GGUF/x-MXFP4.gguf", "main", "x-MXFP4.gguf", "hf.co/me/x-GGUF:MXFP4"),
        ("hf.co/me/x-GGUF/x-UD-IQ2_M.gguf", "main", "x-UD-IQ2_M.gguf", "hf.co/me/x-GGUF:UD-IQ2_M"),
        ("https://hf.co/me/x/y.Q8_0.gguf", "main", "y.Q8_0.gguf", "hf.co/me/x:y.Q8_0"),
        ("huggingface.co/me/x/a/b.gguf", "main", "a/b.gguf", "hf.co/me/x:b"),
        ("https://huggingface.co/me/x/blob/v1/b.gguf", "v1", "b.gguf", "hf.co/me/x:b"),
        ("https://huggingface.co/me/x/resolve/main/b.GGUF?download=true", "main", "b.GGUF", "hf.co/me/x:b"),
        ("huggingface.co/me/x/tree/v1/b.gguf?x#y", "v1", "b.gguf", "hf.co/me/x:b"),
        ("http://www.HuggingFace.co/me/x/blob/main/b.gguf", "main", "b.gguf", "hf.co/me/x:b"),
        ("https://huggingface.co:443/me/x/resolve/main/b.gguf", "main", "b.gguf", "hf.co/me/x:b"),
        ("http://HF.co.:80/me/x/b.gguf", "main", "b.gguf", "hf.co/me/x:b"),
        ("https://huggingface.co/me/x?show_file_info=b.gguf", "main", "b.gguf", "hf.co/me/x:b"),
        (
            "hf.co/me/x/Q4_0/x-Q4_0-00001-of-00003.gguf",
            "main",
            "Q4_0/x-Q4_0-00001-of-00003.gguf",
            "hf.co/me/x:Q4_0",
        ),
    ] {
        let PullSource::Hub(file) = source(text) else { panic!("{text}") };
        assert_eq!((file.revision(), file.path()), (revision, path), "{text}");
        assert_eq!(PullSource::Hub(file.clone()).name().unwrap().short(), name, "{text}");
        assert_eq!(source(&file.to_string()), PullSource::Hub(file));
    }
}

#[test]
fn file_of_a_repository_without_an_owner_has_an_address() {
    const ADDRESS: &str = "https://huggingface.co/gpt2/resolve/v1/onnx/x.gguf";
    let PullSource::Hub(file) = source(ADDRESS) else { panic!("no file at the hub") };
    assert_eq!((file.repository(), file.revision(), file.path()), ("gpt2", "v1", "onnx/x.gguf"));
    assert_eq!(file.to_string(), ADDRESS);
    assert_eq!(PullSource::Hub(file.clone()).name().unwrap().to_string(), "hf.co/_/gpt2:x");
    let latest = PullSource::Hub(file).latest().unwrap();
    assert_eq!(latest.to_string(), ADDRESS.replace("v1", "main"));
    assert_eq!(source(&latest.to_string()), latest);
    for text in ["hf.co/gpt2", "https://huggingface.co/gpt2", "https://huggingface.co/gpt2/tree/main"] {
        assert_eq!(source(text), PullSource::Registry("hf.co/gpt2".parse().unwrap()), "{text}");
    }
}

#[test]
fn newer_versions_are_looked_for_at_the_same_place() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let at = |revision: &str| format!("https://huggingface.co/me/x/resolve/{revision}/a/b.gguf");
    let digest = format!("me/x@sha256:{}", "a".repeat(64));
    let branches = [at("main"), at("v1"), at(COMMIT), at(&COMMIT[1..])];
    let [main, tag, commit, short] = branches.each_ref().map(String::as_str);
    let newest = "hf.co/me/x/a/b.gguf";
    for (text, latest, followed) in [
        ("me/x:8b", Some("me/x:8b"), Some("me/x:8b")),
        (&*digest, None, None),
        ("https://e.com/a/b.gguf", Some("https://e.com/a/b.gguf"), Some("https://e.com/a/b.gguf")),
        (newest, Some(newest), Some(newest)),
        (main, Some(newest), Some(newest)),
        (tag, Some(newest), Some(tag)),
        (short, Some(newest), Some(short)),
        (commit, Some(newest), None),
    ] {
        assert_eq!(source(text).latest(), latest.map(source), "{text}");
        assert_eq!(source(text).followed(), followed.map(source), "{text}");
    }
}

#[test]
fn one_model_is_the_same_at_any_commit_and_by_its_repository_or_its_file() {
    for (one, other, is_same) in [
        ("hf.co/me/x/b.gguf", "https://huggingface.co/me/x/blob/v1/b.gguf", true),
        ("hf.co/me/x/b.gguf", "hf.co/me/x/c.gguf", false),
        ("hf.co/me/x/b.gguf", "hf.co/me/y/b.gguf", false),
        ("hf.co/me/x:b", "hf.co/me/x/b.gguf", true),
        ("hf.co/me/y:b", "hf.co/me/x/b.gguf", false),
        ("me/x:b", "hf.co/me/x/b.gguf", false),
        ("llama3:8b", "llama3:8b", true),
        ("llama3:8b", "llama3:70b", false),
    ] {
        let (one, other) = (source(one), source(other));
        assert_eq!(one.is_same_model(&other), is_same, "{one} {other}");
        assert_eq!(other.is_same_model(&one), is_same, "{other} {one}");
    }
    let is_same_repository = |one: &str, other: &str| source(one).is_same_repository(&source(other));
    assert!(is_same_repository("hf.co/me/x/b.gguf", "hf.co/me/x/c.gguf"));
    assert!(!is_same_repository("hf.co/me/x/b.gguf", "hf.co/me/y/b.gguf"));
}

#[test]
fn files_of_one_commit_have_the_same_repository_and_the_same_fixed_revision() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let file = |repository: &str, revision: &str, file: &str| {
        source(&format!("https://huggingface.co/{repository}/blob/{revision}/{file}"))
    };
    let one = file("me/x", commit, "a.gguf");
    assert!(one.is_same_commit(&file("me/x", commit, "b.gguf")));
    assert!(!one.is_same_commit(&file("me/y", commit, "a.gguf")));
    assert!(!one.is_same_commit(&file("me/x", &commit.replace('0', "1"), "a.gguf")));
    let main = file("me/x", "main", "a.gguf");
    assert!(!main.is_same_commit(&main), "a branch moves");
    assert!(!source("llama3:8b").is_same_commit(&source("llama3:8b")));
}

#[test]
fn files_have_the_last_part_of_their_path_as_name() {
    for (text, expected) in [
        ("hf.co/me/x/a/b.gguf", Some("b.gguf")),
        ("https://example.com/files/c.gguf?download=true", Some("c.gguf")),
        ("llama3:8b", None),
    ] {
        assert_eq!(source(text).file_name().as_deref(), expected, "{text}");
    }
}

#[test]
fn pages_of_models_are_references() {
    for (text, name) in [
        ("https://huggingface.co/me/x-GGUF", "hf.co/me/x-GGUF:latest"),
        ("huggingface.co/me/x-GGUF:Q4_K_M", "hf.co/me/x-GGUF:Q4_K_M"),
        ("https://huggingface.co/me/x-GGUF/?library=llama-cpp#usage", "hf.co/me/x-GGUF:latest"),
        ("http://hf.co/me/x-GGUF/tree/main", "hf.co/me/x-GGUF:latest"),
        ("https://www.huggingface.co/me/x-GGUF/tree/main/", "hf.co/me/x-GGUF:latest"),
        ("https://ollama.com/library/llama3", "llama3:latest"),
        ("https://Ollama.com.:443/library/llama3", "llama3:latest"),
        ("https://ollama.com/library/llama3:8b", "llama3:8b"),
        ("ollama.com/library/llama3/tags", "llama3:latest"),
        ("https://ollama.com/me/x:8b/blobs/6a0746a1ec1a", "me/x:8b"),
        ("https://hub.docker.com/r/ai/smollm2#x", "docker.io/ai/smollm2:latest"),
    ] {
        let PullSource::Registry(reference) = source(text) else { panic!("{text}") };
        assert_eq!(reference.short(), name, "{text}");
        assert_eq!(reference.scheme(), Scheme::Https, "{text}");
    }
}

#[test]
fn files_on_web_servers_get_a_name() {
    for (text, name) in [
        ("https://example.com/models/tiny.gguf", "example.com/models/tiny:latest"),
        ("http://127.0.0.1:80/tiny.gguf", "127.0.0.1:80/library/tiny:latest"),
        ("http://[::1]:80/tiny.gguf", "[::1]:80/library/tiny:latest"),
        ("https://e.com/a/b.c/my%20model.GGUF", "e.com/b-c/my-model:latest"),
        ("https://e.com/a/x-00001-of-00002.gguf?token=secret#part", "e.com/a/x:latest"),
    ] {
        let url = source(text);
        assert!(matches!(url, PullSource::Url(_)), "{text}");
        assert_eq!(url.name().unwrap().short(), name, "{text}");
        let json = serde_json::to_string(&url).unwrap();
        assert_eq!(serde_json::from_str::<PullSource>(&json).unwrap(), url);
    }
}

#[test]
fn source_has_the_host_and_scheme_of_its_address() {
    for (text, host, scheme) in [
        ("llama3:8b", Reference::DEFAULT_HOST, Scheme::Https),
        ("http://127.0.0.1:1/a/b:x", "127.0.0.1:1", Scheme::Http),
        ("https://huggingface.co/me/x/blob/main/b.gguf", "hf.co", Scheme::Https),
        ("http://e.com:80/b.gguf", "e.com:80", Scheme::Http),
        ("https://e.com/b.gguf", "e.com", Scheme::Https),
    ] {
        assert_eq!((source(text).host(), source(text).scheme()), (host, scheme), "{text}");
    }
}

#[test]
fn queries_are_sent_but_not_shown_and_not_written_down() {
    let url = source("https://example.com/models/tiny.gguf?signature=secret");
    assert!(!format!("{url} {url:?}").contains("secret"));
    assert_eq!(url.origin(), None);
    let PullSource::Url(file) = &url else { panic!("{url}") };
    assert_eq!(file.path_and_query(), "/models/tiny.gguf?signature=secret");
    assert!(source("https://example.com/models/tiny.gguf").origin().is_some());
}

#[test]
fn refused_url_is_shown_without_its_user_and_password() {
    for text in ["https://me:s3cret@e.com/x.gguf", "https://me:s3/cret@e.com/x.gguf?s3cret"] {
        let error = text.parse::<PullSource>().unwrap_err().to_string();
        assert_eq!(
            error,
            "source: wrong address: expected https://HOST[:PORT]/PATH/FILE.gguf, found \"https://…@e.com/x.gguf\""
        );
    }
    assert_eq!(without_userinfo("me:s3cret@e.com:1"), "…@e.com:1");
    assert_eq!(without_userinfo("https://e.com"), "https://e.com");
}

#[test]
fn addresses_that_lead_elsewhere_are_refused() {
    for text in [
        "hf.co/me/../x/y.gguf",
        "hf.co/me/x/../../y.gguf",
        "hf.co/me/x/resolve/../y.gguf",
        "hf.co/me/x//y.gguf",
        "hf.co/../x/y.gguf",
        "https://hf.co/me/x/a%0Ab/../y.gguf",
        "https://example.com/../y.gguf",
        "https://example.com/a/./y.gguf",
        "https://user:password@example.com/a/y.gguf",
        "https://[::1/a/b/c/y.gguf",
        "hf.co/me/x/tree/v1",
        "hf.co/me/x/tree/main/Q4_K_M",
        "https://huggingface.co/me/x/blob/main/README.md",
        "https://huggingface.co/me/x/discussions/3",
        "https://huggingface.co/datasets/me/x",
        "https:///a/y.gguf",
        "https://example.com/a\nb/y.gguf",
        "https://example.com/a/b/y.gguf?a b",
        "file:///a/y.gguf",
        "ftp://example.com/a/y.gguf",
    ] {
        assert!(text.parse::<PullSource>().is_err(), "{text}");
    }
    assert!(format!("https://e/{}.gguf", "a".repeat(9000)).parse::<PullSource>().is_err());
}

#[test]
fn names_at_the_hub_are_those_that_it_allows() {
    let [longest, too_long] = [96, 97].map(|length| "x".repeat(length));
    for (name, is_allowed) in [
        ("a", true),
        ("_a", true),
        ("A-b_c.9", true),
        (&*longest, true),
        (&*too_long, false),
        ("", false),
        ("-a", false),
        (".a", false),
        ("a..b", false),
        ("a b", false),
        ("ä", false),
    ] {
        for repository in [format!("{name}/x"), format!("x/{name}")] {
            assert_eq!(HubFile::new(&repository, None, "a.gguf").is_ok(), is_allowed, "{repository}");
        }
        assert_eq!(HubFile::new("me/x", Some(name), "a.gguf").is_ok(), is_allowed, "revision {name:?}");
    }
    for repository in ["", "x/y/z", "/", "x/y/", "/x", "x/"] {
        assert!(HubFile::new(repository, None, "a.gguf").is_err(), "{repository}");
    }
}

#[test]
fn escapes_in_addresses_of_the_hub_are_read_and_written_for_all_characters() {
    for (written, path) in [
        ("my%20dir/a-Q4_K_M.gguf", "my dir/a-Q4_K_M.gguf"),
        ("my dir/a-Q4_K_M.gguf", "my dir/a-Q4_K_M.gguf"),
        ("my%2Fdir/a.gguf", "my/dir/a.gguf"),
        ("100%25/a.gguf", "100%/a.gguf"),
        ("a%2520b.gguf", "a%20b.gguf"),
        ("%E4%B8%AD%E6%96%87.gguf", "中文.gguf"),
        ("中文.gguf", "中文.gguf"),
        ("%e4%b8%ad.gguf", "中.gguf"),
        ("caf%C3%A9.gguf", "café.gguf"),
        ("a+b.gguf", "a+b.gguf"),
        ("a%2Bb.gguf", "a+b.gguf"),
        ("a[1]%5B2%5D.gguf", "a[1][2].gguf"),
        ("a%23b%3Fc.gguf", "a#b?c.gguf"),
        ("%22a%22'b'.gguf", "\"a\"'b'.gguf"),
        ("a%3Ab%40c.gguf", "a:b@c.gguf"),
        ("a%2Egguf", "a.gguf"),
        ("a%41.gguf", "aA.gguf"),
        ("a&b=c;d,e!f$g(h)*i~j.gguf", "a&b=c;d,e!f$g(h)*i~j.gguf"),
        ("a%7Cb%3Cc%3E%5E%60%7B%7D.gguf", "a|b<c>^`{}.gguf"),
    ] {
        for address in [
            format!("https://huggingface.co/me/x/resolve/main/{written}"),
            format!("https://huggingface.co/me/x/blob/main/{written}?download=true"),
            format!("https://huggingface.co/me/x/raw/main/{written}#top"),
            format!("hf.co/me/x/{written}"),
        ] {
            let PullSource::Hub(file) = source(&address) else { panic!("{address}") };
            assert_eq!(file.path(), path, "{address}");
            let text = file.to_string();
            assert!(!text.contains([' ', '#', '?', '"', '中']), "{text}");
            assert_eq!(source(&text), PullSource::Hub(file), "{text}");
        }
    }
    let shown = "https://huggingface.co/me/x?show_file_info=my+dir%2Fa%2Bb.gguf";
    let PullSource::Hub(file) = source(shown) else { panic!("{shown}") };
    assert_eq!(file.path(), "my dir/a+b.gguf");
}

#[test]
fn escapes_in_urls_have_one_form() {
    for (written, path) in [
        ("/my%20dir/a.gguf", "/my%20dir/a.gguf"),
        ("/my dir/a.gguf", "/my%20dir/a.gguf"),
        ("/%6dy/%41%2d%7E.gguf", "/my/A-~.gguf"),
        ("/a%2fb.gguf", "/a%2Fb.gguf"),
        ("/a%2525.gguf", "/a%2525.gguf"),
        ("/中.gguf", "/%E4%B8%AD.gguf"),
        ("/%e4%b8%ad.gguf", "/%E4%B8%AD.gguf"),
        ("/a+b(1)[2]'\".gguf", "/a+b(1)%5B2%5D'%22.gguf"),
        ("/a%2Bb%23%3F%3A.gguf", "/a%2Bb%23%3F%3A.gguf"),
        ("/a|b^c`d{e}<f>.gguf", "/a%7Cb%5Ec%60d%7Be%7D%3Cf%3E.gguf"),
    ] {
        let PullSource::Url(url) = source(&format!("https://e.com{written}?token=x")) else {
            panic!("{written}")
        };
        assert_eq!(url.path_and_query(), format!("{path}?token=x"), "{written}");
        let PullSource::Url(again) = source(&format!("https://e.com{path}?token=x")) else {
            panic!("{path}")
        };
        assert_eq!(again, url);
    }
    let PullSource::Url(shard) = source("https://e.com/m/my%20x-00001-of-00002.gguf") else { panic!() };
    assert_eq!(shard.file_name(), "my x-00001-of-00002.gguf");
    let second = shard.with_file_name("my x-00002-of-00002.gguf").unwrap();
    assert_eq!(second.to_string(), "https://e.com/m/my%20x-00002-of-00002.gguf");
}

#[test]
fn escapes_that_hide_something_or_mean_nothing_are_refused() {
    for path in [
        "%2e%2e/x.gguf",
        "a/%2E%2e/x.gguf",
        "a/.%2e/x.gguf",
        "%2e%2e%2fx.gguf",
        "a%2F..%2Fx.gguf",
        "a%2F%2Fx.gguf",
        "%2Fetc/x.gguf",
        "a/%2e/x.gguf",
        "a%00.gguf",
        "a%0Ab.gguf",
        "a%1B[31m.gguf",
        "a%7F.gguf",
        "a%C2%85.gguf",
        "a%FF.gguf",
        "a%C0%AE.gguf",
        "a%ED%A0%80.gguf",
        "%E4%B8.gguf",
        "a%.gguf",
        "a%2.gguf",
        "a%zz.gguf",
        "a%+1.gguf",
        "%é1.gguf",
        "a%5Cb.gguf",
        "a%2Egguf%00",
    ] {
        for base in ["hf.co/me/x/", "https://huggingface.co/me/x/resolve/main/", "https://example.com/m/"] {
            let text = format!("{base}{path}");
            if let Ok(source) = text.parse::<PullSource>() {
                panic!("{text}: accepted as {source}");
            }
        }
    }
    let error = |text: &str| text.parse::<PullSource>().unwrap_err().to_string();
    assert_eq!(
        error("hf.co/me/x/100%.gguf"),
        "source: \"100%.gguf\": expected percent-escapes of UTF-8 text, such as %20, found \"%.g\""
    );
    assert!(error("https://e.com/a%00.gguf").ends_with("found \"%00\""));
    assert!(error("hf.co/me/x/a%FFb.gguf").ends_with("found \"%FF\""));
}

#[test]
fn chosen_components_are_recorded_with_the_source() {
    let named = |name: &str| Projector::Named(name.to_owned());
    for (text, projector, draft) in [
        ("hf.co/me/x:Q4_K_M", Projector::Nearest, Draft::Nearest),
        ("hf.co/me/x:Q4_K_M --no-projector", Projector::None, Draft::Nearest),
        ("hf.co/me/x:Q4_K_M --no-projector --no-draft", Projector::None, Draft::None),
        ("hf.co/me/x/a.gguf --projector my%20mmproj.gguf --no-draft", named("my mmproj.gguf"), Draft::None),
        (
            "https://huggingface.co/me/x/resolve/v1/a.gguf --projector --no-draft",
            named("--no-draft"),
            Draft::Nearest,
        ),
    ] {
        let pulled: PulledSource = text.parse().unwrap();
        assert_eq!(pulled.components, Components { projector, draft, ..Components::default() }, "{text}");
        assert_eq!(pulled.components.are_default(), !text.contains(" --"), "{text}");
        assert_eq!(pulled.to_string(), text);
    }
    let text =
        "hf.co/me/x:latest --include fp16/%2A --include my%20%2A --exclude %2A.bin --revision refs/pr/1";
    let pulled: PulledSource = text.parse().unwrap();
    let Components { include, exclude, revision, .. } = &pulled.components;
    assert_eq!(
        (&include[..], &exclude[..]),
        (&["fp16/*".to_owned(), "my *".to_owned()][..], &["*.bin".to_owned()][..])
    );
    assert_eq!((revision.as_deref(), pulled.to_string()), (Some("refs/pr/1"), text.to_owned()));
    let earlier: PulledSource = "hf.co/me/x/my -- model.gguf".parse().unwrap();
    assert_eq!(earlier.source, source("hf.co/me/x/my%20--%20model.gguf"));
    assert!("import x --no-draft".parse::<PulledSource>().is_err());
    assert!("hf.co/me/x:Q4_K_M --force".parse::<PulledSource>().is_err());
}

#[test]
fn shards_are_known_by_their_names() {
    let shard = ShardName::from_path("a/x-00002-of-00003.gguf").unwrap();
    assert_eq!(shard.number(), 2);
    assert_eq!(shard.all()[0], "a/x-00001-of-00003.gguf");
    assert_eq!(shard.all().len(), 3);
    for name in [
        "x.gguf",
        "x-1-of-3.gguf",
        "x-00004-of-00003.gguf",
        "x-00000-of-00003.gguf",
        "x-00001-of-99999.gguf",
        "x-00001-of-00003",
        "x-+0001-of-00003.gguf",
        "-of-.gguf",
        "x-00001-of-00003.fp16.gguf",
        "x-00001-of-00003..safetensors",
        "x-00001-of-00003.a.b.safetensors",
    ] {
        assert_eq!(ShardName::from_path(name), None, "{name}");
    }
    assert_eq!(ShardName::stem_of("x-00001-of-00003.gguf"), "x");
}

#[test]
fn shards_of_a_variant_are_a_set_of_their_own() {
    let shard = ShardName::from_path("vae/x-00001-of-00002.fp16.SafeTensors").unwrap();
    assert_eq!(
        shard.all(),
        ["vae/x-00001-of-00002.fp16.SafeTensors", "vae/x-00002-of-00002.fp16.SafeTensors"]
    );
    let set = |path| ShardName::from_path(path).unwrap().set();
    assert_eq!(shard.set(), set("vae/x-00002-of-00002.fp16.safetensors"));
    for other in [
        "vae/x-00002-of-00002.safetensors",
        "vae/x-00002-of-00002.bf16.safetensors",
        "vae/x-00002-of-00003.fp16.safetensors",
        "x-00002-of-00002.fp16.safetensors",
    ] {
        assert_ne!(shard.set(), set(other), "{other}");
    }
    assert_eq!(ShardName::stem_of("x-00001-of-00002.fp16.safetensors"), "x");
    assert_eq!(ShardName::from_path("ae-00001-of-00002.sft").unwrap().all()[1], "ae-00002-of-00002.sft");
}

proptest! {
    #[test]
    fn any_text_is_refused_or_reads_back(text in "(https?://|hf.co/)?[a-z./:?#@%-]{0,30}(.gguf)?") {
        if let Ok(source) = text.parse::<PullSource>() {
            let json = serde_json::to_string(&source).unwrap();
            prop_assert_eq!(serde_json::from_str::<PullSource>(&json).unwrap(), source);
        }
    }

    #[test]
    fn every_path_at_the_hub_is_written_so_that_it_reads_back(path in "\\PC{1,20}") {
        if let Ok(file) = HubFile::new("me/x", Some("main"), &format!("{path}.gguf")) {
            let text = file.to_string();
            prop_assert!(!text.contains(char::is_whitespace));
            prop_assert_eq!(text.parse::<PullSource>().unwrap(), PullSource::Hub(file));
        }
    }
}
