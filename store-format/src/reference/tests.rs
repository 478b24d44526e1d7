use proptest::prelude::*;

use super::*;

#[test]
fn defaults_fill_omitted_parts() {
    for (text, full, short) in [
        ("llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
        ("llama3:8b", "registry.ollama.ai/library/llama3:8b", "llama3:8b"),
        ("me/llama3", "registry.ollama.ai/me/llama3:latest", "me/llama3:latest"),
        ("hf.co/me/repo-GGUF:Q4_K_M", "hf.co/me/repo-GGUF:Q4_K_M", "hf.co/me/repo-GGUF:Q4_K_M"),
        ("localhost:5000/a/b", "http://localhost:5000/a/b:latest", "localhost:5000/a/b:latest"),
        ("https://localhost/a/b", "https://localhost/a/b:latest", "localhost/a/b:latest"),
        ("localhost:5000/x:y", "http://localhost:5000/_/x:y", "localhost:5000/x:y"),
        ("127.0.0.1:5000/x", "http://127.0.0.1:5000/_/x:latest", "127.0.0.1:5000/x:latest"),
        ("[::1]:5000/x", "http://[::1]:5000/_/x:latest", "[::1]:5000/x:latest"),
        ("[::1]/a/b", "http://[::1]/a/b:latest", "[::1]/a/b:latest"),
        ("lan:5000/x", "lan:5000/_/x:latest", "lan:5000/x:latest"),
        ("https://registry.example/x", "registry.example/_/x:latest", "registry.example/x:latest"),
        ("huggingface.co/a/b:c", "hf.co/a/b:c", "hf.co/a/b:c"),
        ("hf.co/gpt2", "hf.co/_/gpt2:latest", "hf.co/gpt2:latest"),
        ("https://www.HuggingFace.co/a/b", "hf.co/a/b:latest", "hf.co/a/b:latest"),
        ("ollama.com/library/llama3:8b", "registry.ollama.ai/library/llama3:8b", "llama3:8b"),
        ("ollama.com/llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
        ("localhost/x", "registry.ollama.ai/localhost/x:latest", "localhost/x:latest"),
        ("https://hf.co/a/b:c", "hf.co/a/b:c", "hf.co/a/b:c"),
        ("docker.io/smollm2", "docker.io/ai/smollm2:latest", "docker.io/ai/smollm2:latest"),
        ("https://index.docker.io/x:y", "docker.io/ai/x:y", "docker.io/ai/x:y"),
        ("docker.io/library/x", "docker.io/library/x:latest", "docker.io/library/x:latest"),
        ("http://127.0.0.1:1/a/b:c", "http://127.0.0.1:1/a/b:c", "127.0.0.1:1/a/b:c"),
        ("docker.io/_/x", "docker.io/_/x:latest", "docker.io/_/x:latest"),
        ("ghcr.io/OWNER/REPO/MODEL:1", "ghcr.io/OWNER/REPO/MODEL:1", "ghcr.io/OWNER/REPO/MODEL:1"),
        (
            "registry.gitlab.com/group/sub.group/project/model:v1.0",
            "registry.gitlab.com/group/sub.group/project/model:v1.0",
            "registry.gitlab.com/group/sub.group/project/model:v1.0",
        ),
        (
            "harbor.example:8443/proxy/hf.co/me/x__y--z",
            "harbor.example:8443/proxy/hf.co/me/x__y--z:latest",
            "harbor.example:8443/proxy/hf.co/me/x__y--z:latest",
        ),
        (
            "1234.dkr.ecr.eu-central-1.amazonaws.com/m:1",
            "1234.dkr.ecr.eu-central-1.amazonaws.com/_/m:1",
            "1234.dkr.ecr.eu-central-1.amazonaws.com/m:1",
        ),
        ("models.d/file", "models.d/_/file:latest", "models.d/file:latest"),
        ("group/sub/project/model", "group/sub/project/model:latest", "group/sub/project/model:latest"),
        ("[::1]:5000/a/b/c", "http://[::1]:5000/a/b/c:latest", "[::1]:5000/a/b/c:latest"),
        ("ollama.com/a/b/c", "registry.ollama.ai/a/b/c:latest", "registry.ollama.ai/a/b/c:latest"),
        ("ollama.com/a.b/c", "registry.ollama.ai/a.b/c:latest", "registry.ollama.ai/a.b/c:latest"),
    ] {
        let reference: Reference = text.parse().unwrap();
        assert_eq!(reference.to_string(), full);
        assert_eq!(reference.short(), short);
    }
}

#[test]
fn tag_that_was_left_out_is_left_out_of_requests_and_is_no_difference() {
    let (short, full): (Reference, Reference) = ("me/m".parse().unwrap(), "me/m:latest".parse().unwrap());
    assert_eq!(short, full);
    assert!(short.omits_tag() && !full.omits_tag());
    assert_eq!(short.as_requested(), "registry.ollama.ai/me/m");
    assert_eq!(full.as_requested(), "registry.ollama.ai/me/m:latest");
    let again: Reference = serde_json::from_str(&serde_json::to_string(&short).unwrap()).unwrap();
    assert!(again.omits_tag());
    assert!(!short.with_tag("latest").unwrap().omits_tag());
}

#[test]
fn id_is_four_or_more_hexadecimal_digits_in_place_of_a_name() {
    let id = |text: &str| text.parse::<Reference>().unwrap().id_prefix();
    assert_eq!(id("A80c"), Some("a80c".to_owned()));
    assert_eq!(id("sha256:a80c4f"), Some("a80c4f".to_owned()));
    for text in ["a80", "a80c:latest", "me/a80c", "llama", "sha256:xyz", "other:a80c", "hf.co/a/a80c"] {
        assert_eq!(id(text), None, "{text}");
    }
}

#[test]
fn digest_pins_a_name() {
    let digest = Digest::of(b"manifest");
    let reference: Reference = format!("llama3:8b@{digest}").parse().unwrap();
    assert_eq!(reference.digest(), Some(digest));
    assert_eq!(reference.to_string().parse(), Ok(reference));
}

#[test]
fn hostile_and_malformed_names_are_refused() {
    for text in [
        "",
        ":",
        "/",
        "a:",
        ":b",
        "a/",
        "/a",
        "a//b",
        "..",
        "../a",
        "a/../b",
        "a/..",
        "a:..",
        "a:.hidden",
        "-a",
        ".a",
        "a b",
        "a\0",
        "a\n",
        "ä",
        "a/b//d",
        "a/b/../d",
        "a/b/.c/d",
        "a/b/-c/d",
        "a/b+c/d",
        "a/b/c/",
        "/a/b/c/d",
        "host/name:space/model:tag",
        "host/a/name:space/model:tag",
        "ftp://a/b/c",
        "http://model",
        "[::1/a/b",
        "[::g]/a/b",
        "[::1]:65536/a/b",
        "[::1]x/a/b",
        "a@",
        "a@sha256:00",
        "a@b@c",
        "a:b:c",
    ] {
        assert!(text.parse::<Reference>().is_err(), "{text:?} was accepted");
    }
    assert!("a".repeat(1 << 20).parse::<Reference>().is_err());
}

#[test]
fn parts_may_be_as_long_as_registries_and_file_names_allow() {
    let refused = |text: String| text.parse::<Reference>().expect_err(&text).to_string();
    for text in [
        format!("hf.co/{}/{}:Q4_K_M", "u".repeat(96), "r".repeat(96)),
        format!("hf.co/me/{}", "r".repeat(252)),
        format!("{}:{}", "m".repeat(247), "t".repeat(128)),
        format!("{}/{}/m", "h".repeat(253), "n/".repeat(126) + "n"),
        format!("https://{}/{}/m:{}@{}", "h".repeat(253), "n".repeat(253), "t".repeat(128), Digest::of(b"")),
    ] {
        let reference: Reference = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(reference.to_string().parse(), Ok(reference));
    }
    assert_eq!(
        refused(format!("h/{}/m", "n".repeat(254))),
        "reference: path of 256 bytes: expected at most 255"
    );
    assert_eq!(
        refused(format!("h/{}n/m", "n/".repeat(127))),
        "reference: path of 257 bytes: expected at most 255"
    );
    assert!(refused(format!("m:{}", "t".repeat(129))).contains("tag \"ttt"));
    assert!(refused(format!("{}/n/m", "h".repeat(254))).contains("host \"hhh"));
    assert!(refused(format!("m{}", "m".repeat(255))).contains("expected 1 to 255 letters"));
}

#[test]
fn repository_may_lack_a_namespace() {
    let repository = |text: &str| text.parse::<Reference>().unwrap().repository();
    assert_eq!(repository("localhost:5000/x"), "x");
    assert_eq!(repository("http://host/x"), "x");
    assert_eq!(repository("localhost:5000/a/x"), "a/x");
    assert_eq!(repository("x"), "library/x");
    assert_eq!(repository("ghcr.io/owner/repo/model"), "owner/repo/model");
    assert_eq!(repository("registry.example/model"), "model");
}

#[test]
fn names_of_one_service_name_the_same_model() {
    let stored = Reference::from_parts("huggingface.co", "me", "x", "Q4_0").unwrap();
    let named: Reference = "huggingface.co/me/x:Q4_0".parse().unwrap();
    assert_eq!(named.host(), "hf.co");
    assert!(named.same_model(&stored) && stored.same_model(&named));
}

#[test]
fn names_are_compared_without_case() {
    let [a, b]: [Reference; 2] = ["LLaMA3:8B", "llama3:8b"].map(|text| text.parse().unwrap());
    assert_ne!(a, b);
    assert!(a.same_model(&b));
    assert!(!a.same_model(&b.with_tag("70b").unwrap()));
}

proptest! {
    #[test]
    fn text_form_reads_back(
        host in "[a-z0-9_][a-zA-Z0-9_.:-]{0,40}",
        namespace in "[a-z0-9_][a-zA-Z0-9_.-]{0,20}(/[a-z0-9_][a-zA-Z0-9_.-]{0,8}){0,3}",
        model in "[a-z0-9_][a-zA-Z0-9_.-]{0,20}", tag in "[a-z0-9_][a-zA-Z0-9_.-]{0,20}",
    ) {
        let reference = Reference::from_parts(&host, &namespace, &model, &tag).unwrap();
        prop_assert_eq!(reference.to_string().parse(), Ok(reference.clone()));
        prop_assert_eq!(reference.short().parse(), Ok(reference));
    }

    #[test]
    fn any_text_is_refused_or_reads_back(text in "\\PC{0,60}") {
        if let Ok(reference) = text.parse::<Reference>() {
            prop_assert_eq!(reference.to_string().parse(), Ok(reference));
        }
    }
}
