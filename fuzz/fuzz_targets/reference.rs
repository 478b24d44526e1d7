//! References.
//!
//! Invariant: any text is refused or names a model whose long form reads back as itself and whose
//! short form as the same model; its path under `manifests/` is five plain names and nothing else,
//! so no name leads out of the store. The address of a file is refused or reads back as itself, with
//! its query, and makes such a name too. A pattern of names is refused or reads back as itself, and a search for a
//! name finds it.
#![no_main]

use std::path::Component;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(digest) = text.parse::<Digest>() {
        assert_eq!(digest.to_string(), text);
        assert_eq!(layout::parse_blob_name(&layout::blob_name(digest)), Some(digest));
    }
    if let Some(digest) = layout::parse_blob_name(text) {
        assert_eq!(layout::blob_name(digest), text, "one digest has one name");
    }
    if let Ok(source) = text.parse::<PullSource>() {
        let json = serde_json::to_string(&source).expect("text is JSON");
        assert_eq!(serde_json::from_str::<PullSource>(&json).ok().as_ref(), Some(&source));
        assert!(source.origin().is_none_or(|origin| origin.parse::<PullSource>().is_ok()));
        if let Ok(name) = source.name() {
            assert_eq!(layout::manifest(&name).components().count(), 5);
        }
    }
    if let Ok(pattern) = text.parse::<NamePattern>() {
        assert_eq!(pattern.to_string().parse(), Ok(pattern));
    }
    let Ok(reference) = text.parse::<Reference>() else { return };
    assert!(NamePattern::search(&reference.short()).is_ok_and(|search| search.matches(&reference)));
    assert_eq!(reference.to_string().parse(), Ok(reference.clone()));
    let short: Reference = reference.short().parse().expect("the short form is a reference");
    assert!(short.same_model(&reference) && reference.same_model(&short));
    let json = serde_json::to_string(&reference).expect("text is JSON");
    assert_eq!(serde_json::from_str::<Reference>(&json).ok(), Some(reference.clone()));

    let path = layout::manifest(&reference);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    assert!(path.components().count() == 5 && path.components().all(plain), "{path:?}");
    assert!(path.starts_with(layout::MANIFESTS));
    assert!(path.iter().all(|part| part.len() <= 255 && !part.as_encoded_bytes().starts_with(b".")));
    let place = path.strip_prefix(layout::MANIFESTS).expect("checked above");
    let read_back = layout::parse_tag_place(place);
    assert!(read_back.is_some_and(|read_back| read_back.same_model(&reference)));
});
