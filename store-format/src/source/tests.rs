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
fn files_at_hugging_face_are_read_as_people_write_them() {
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
        ("https://e.com/a/b.c/my%20model.GGUF", "e.com/b-c/my-20model:latest"),
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
        assert_eq!(error, "source: \"https://…@e.com/x.gguf\": https://HOST[:PORT]/PATH/FILE.gguf expected");
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
        "https://example.com/a b/y.gguf",
        "https://example.com/a/b/y.gguf?a b",
        "file:///a/y.gguf",
        "ftp://example.com/a/y.gguf",
    ] {
        assert!(text.parse::<PullSource>().is_err(), "{text}");
    }
    assert!(format!("https://e/{}.gguf", "a".repeat(9000)).parse::<PullSource>().is_err());
}

#[test]
fn shards_are_known_by_their_names() {
    let shard = ShardName::of("a/x-00002-of-00003.gguf").unwrap();
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
    ] {
        assert_eq!(ShardName::of(name), None, "{name}");
    }
    assert_eq!(ShardName::stem_of("x-00001-of-00003.gguf"), "x");
}

proptest! {
    #[test]
    fn any_text_is_refused_or_reads_back(text in "(https?://|hf.co/)?[a-z./:?#@%-]{0,30}(.gguf)?") {
        if let Ok(source) = text.parse::<PullSource>() {
            let json = serde_json::to_string(&source).unwrap();
            prop_assert_eq!(serde_json::from_str::<PullSource>(&json).unwrap(), source);
        }
    }
}
