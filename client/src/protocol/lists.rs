//! The most entries of each list in the parameters of a request.
//!
//! A body may have a megabyte, which is room for a hundred thousand short entries, and what the daemon does for one entry
//! can take far longer than reading it. So each list has a limit, and a longer one is refused before it is in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

/// The most names of a removal. The files of each are read while no other name can change.
pub const MAX_REMOVED_NAMES: usize = 1000;
/// The most patterns of a removal. Each is compared with every stored name.
pub const MAX_PATTERNS: usize = 64;
/// The most unfinished downloads that a removal names. Each is compared with every download.
pub const MAX_PARTIAL_TARGETS: usize = 256;
/// The most keys that an edit changes. Each is looked for among all keys of the model.
pub const MAX_EDITED_KEYS: usize = 256;
/// The most verbs, and the most results, that a request for records names: more than there are.
pub const MAX_LOG_CHOICES: usize = 64;
/// The most sidecars of one import; a model has one of each kind, or the shards of a draft.
pub const MAX_SIDECARS: usize = 15;
/// The most files of one import. A model with more layers than [`MAX_OPEN_LAYERS`](super::MAX_OPEN_LAYERS) cannot be
/// opened as a whole, and its configuration is one of them.
pub const MAX_IMPORTED_FILES: usize = 4000;
/// The most signatures of one import: as many as a store keeps of a model.
pub const MAX_SIGNATURES: usize = 8;
/// The most experts that an open names: more than any model has in a layer.
pub const MAX_EXPERTS: usize = 4096;
/// The most tensors that an open names: half of the shortest names that a body has room for, and far more than a client
/// selects one by one.
pub const MAX_TENSOR_NAMES: usize = 65_536;

macro_rules! lists {
    ($($name:ident: at most $limit:expr;)*) => {
        $(pub(super) fn $name<'de, D, T>(list: D) -> Result<Vec<T>, D::Error>
        where
            D: Deserializer<'de>,
            T: Deserialize<'de>,
        {
            list.deserialize_seq(AtMost { name: stringify!($name), limit: $limit, entry: PhantomData })
        })*
    };
}

lists! {
    references: at most MAX_REMOVED_NAMES;
    patterns: at most MAX_PATTERNS;
    targets: at most MAX_PARTIAL_TARGETS;
    keys: at most MAX_EDITED_KEYS;
    sidecars: at most MAX_SIDECARS;
    files: at most MAX_IMPORTED_FILES;
    signatures: at most MAX_SIGNATURES;
    numbers: at most MAX_EXPERTS;
    names: at most MAX_TENSOR_NAMES;
}

/// A list with this name.
struct AtMost<T> {
    name: &'static str,
    limit: usize,
    entry: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for AtMost<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} {}", self.limit, self.name)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            if entries.len() == self.limit {
                return Err(A::Error::custom(format!(
                    "{}: too many: expected at most {}",
                    self.name, self.limit
                )));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

/// One text, or a list of alternatives. Duplicates are dropped.
pub(super) mod one_or_several {
    use std::collections::HashSet;

    use serde::{Serialize as _, Serializer};

    use super::{AtMost, Deserializer, Error, MAX_LOG_CHOICES, PhantomData, SeqAccess, Visitor, fmt};

    pub(in super::super) fn serialize<S: Serializer>(
        texts: &[String],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match texts {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<String>, D::Error> {
        deserializer.deserialize_any(OneOrSeveral)
    }

    struct OneOrSeveral;

    impl<'de> Visitor<'de> for OneOrSeveral {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a text or a list of at most {MAX_LOG_CHOICES} texts")
        }

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
            Ok(vec![text.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
            let several =
                AtMost::<String> { name: "alternatives", limit: MAX_LOG_CHOICES, entry: PhantomData };
            let mut seen = HashSet::new();
            let mut texts = several.visit_seq(list)?;
            texts.retain(|text| seen.insert(text.clone()));
            Ok(texts)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::audit::LogParams;
    use super::super::route::{Received, Route};
    use super::*;

    /// The body of a request with this list, for each list there is.
    fn with_list(name: &str, entries: usize) -> (Route, Value) {
        let list = |entry: fn(usize) -> Value| (0..entries).map(entry).collect::<Value>();
        let names = |place| json!(format!("n{place}"));
        match name {
            "references" => (Route::Remove, json!({ "references": list(names) })),
            "patterns" => (Route::Remove, json!({ "patterns": list(|place| json!(format!("n{place}*"))) })),
            "targets" => (Route::RemovePartials, json!({ "targets": list(names) })),
            "keys" => {
                let keys = list(|place| json!({ "key": place.to_string() }));
                (Route::Edit, json!({ "source": "a", "target": "b", "keys": keys }))
            }
            "sidecars" => {
                let sidecars = list(|_| json!({ "component": "draft", "file_name": "d.gguf" }));
                (Route::Import, json!({ "file_name": "a.gguf", "sidecars": sidecars }))
            }
            "files" => {
                let files = list(|place| json!({ "path": place.to_string(), "size": 0 }));
                (Route::Import, json!({ "file_name": "a", "files": files }))
            }
            "signatures" => (Route::Import, json!({ "file_name": "a", "signatures": list(|_| json!("{}")) })),
            "numbers" => {
                let experts = json!({ "experts": { "numbers": list(|place| json!(place)) } });
                (Route::Open, json!({ "reference": "a", "tensors": experts }))
            }
            "names" => (Route::Open, json!({ "reference": "a", "tensors": { "names": list(names) } })),
            "alternatives" => (Route::Log, json!({ "verb": list(|_| json!("rm")) })),
            _ => (Route::Log, json!({ "result": list(|_| json!("ok")) })),
        }
    }

    #[test]
    fn each_list_is_refused_beyond_its_limit() {
        for (name, limit) in [
            ("references", MAX_REMOVED_NAMES),
            ("patterns", MAX_PATTERNS),
            ("targets", MAX_PARTIAL_TARGETS),
            ("keys", MAX_EDITED_KEYS),
            ("sidecars", MAX_SIDECARS),
            ("files", MAX_IMPORTED_FILES),
            ("signatures", MAX_SIGNATURES),
            ("numbers", MAX_EXPERTS),
            ("names", MAX_TENSOR_NAMES),
            ("alternatives", MAX_LOG_CHOICES),
            ("", MAX_LOG_CHOICES),
        ] {
            let decoded = |entries| {
                let (route, body) = with_list(name, entries);
                let body = body.to_string();
                route.subject(&Received { body: body.as_bytes(), ..Received::default() })
            };
            decoded(limit).unwrap();
            let refusal = decoded(limit + 1).unwrap_err().message;
            assert!(refusal.contains(&format!("{name}: too many: expected at most {limit}")), "{refusal}");
        }
    }

    #[test]
    fn alternatives_are_one_text_or_several_and_each_is_kept_once() {
        let verbs = |verb: Value| {
            serde_json::from_value::<LogParams>(json!({ "verb": verb })).map(|params| params.verbs)
        };
        assert_eq!(verbs(json!("rm")).unwrap(), ["rm"]);
        assert_eq!(verbs(json!(["rm", "pull", "rm"])).unwrap(), ["rm", "pull"]);
        assert_eq!(verbs(Value::Null).unwrap(), [""; 0]);
        assert!(verbs(json!(7)).is_err() && verbs(json!([7])).is_err());
    }
}
