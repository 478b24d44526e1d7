//! Compares values with the shapes of docs/JSON.md, strictly: no key that is not documented, none missing.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::notation::{Point, Type, Types};

/// The points that values have shown.
pub(super) type Seen = BTreeSet<Point>;

/// Where a value differs from its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) path: String,
    pub(super) reason: String,
}

impl Types {
    /// The points that a value of this type shows, or how it differs from the type.
    pub(super) fn check(&self, value: &Json, type_name: &str) -> Result<Seen, Vec<Mismatch>> {
        let mut check = Check { types: self, seen: Seen::new(), mismatches: Vec::new() };
        check.value(value, &Type::Named(type_name.to_owned()), "$");
        if check.mismatches.is_empty() { Ok(check.seen) } else { Err(check.mismatches) }
    }
}

struct Check<'t> {
    types: &'t Types,
    seen: Seen,
    mismatches: Vec<Mismatch>,
}

impl Check<'_> {
    fn value(&mut self, value: &Json, expected: &Type, path: &str) {
        match expected {
            Type::Literal(literal) if value != literal => self.refuse(path, value, &literal.to_string()),
            Type::Literal(_) => {}
            Type::Named(name) => self.named(value, name, path),
            Type::Union(parts) => self.union(value, parts, path),
            Type::Array(element, point) => match value.as_array() {
                None => self.refuse(path, value, "a list"),
                Some(elements) => {
                    for (index, found) in elements.iter().enumerate() {
                        self.seen.insert(*point);
                        self.value(found, element, &format!("{path}[{index}]"));
                    }
                }
            },
            Type::Record(entry, point) => match value.as_object() {
                None => self.refuse(path, value, "an object"),
                Some(entries) => {
                    for (key, found) in entries {
                        self.seen.insert(*point);
                        self.value(found, entry, &format!("{path}.{key}"));
                    }
                }
            },
            Type::Object(_) | Type::All(_) => self.object(value, expected, path),
        }
    }

    fn named(&mut self, value: &Json, name: &str, path: &str) {
        let text = value.as_str();
        let is_right = match name {
            "string" => text.is_some(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "unknown" => true,
            "Count" | "Bytes" => value.is_u64(),
            "Digest" => text.is_some_and(is_digest),
            "Time" => text.is_some_and(is_time),
            declared => return self.value(value, self.types.declared(declared), path),
        };
        if !is_right {
            self.refuse(path, value, name);
        }
    }

    /// The value must be of one of the types; the mismatches of the type that fits best are reported.
    fn union(&mut self, value: &Json, parts: &[(Type, Point)], path: &str) {
        let mut best: Option<Vec<Mismatch>> = None;
        for (part, point) in parts {
            let mut attempt = Check { types: self.types, seen: Seen::new(), mismatches: Vec::new() };
            attempt.value(value, part, path);
            if attempt.mismatches.is_empty() {
                self.seen.insert(*point);
                self.seen.extend(attempt.seen);
                return;
            }
            if best.as_ref().is_none_or(|best| attempt.mismatches.len() < best.len()) {
                best = Some(attempt.mismatches);
            }
        }
        self.mismatches.extend(best.into_iter().flatten());
    }

    fn object(&mut self, value: &Json, expected: &Type, path: &str) {
        let types = self.types;
        let Some(entries) = value.as_object() else { return self.refuse(path, value, "an object") };
        let members = types.members(expected);
        for member in &members {
            let found = entries.get(&member.key);
            if let Some([present, absent]) = member.optional {
                self.seen.insert(if found.is_some() { present } else { absent });
            }
            match found {
                Some(found) => self.value(found, &member.value, &format!("{path}.{}", member.key)),
                None if member.optional.is_some() => {}
                None => self.note(format!("{path}.{}", member.key), "missing".to_owned()),
            }
        }
        for key in entries.keys() {
            if !members.iter().any(|member| member.key == *key) {
                self.note(format!("{path}.{key}"), "not documented".to_owned());
            }
        }
    }

    fn refuse(&mut self, path: &str, value: &Json, expected: &str) {
        let mut found = value.to_string();
        found.truncate(found.char_indices().nth(200).map_or(found.len(), |(end, _)| end));
        self.note(path.to_owned(), format!("{expected} expected, found {found}"));
    }

    fn note(&mut self, path: String, reason: String) {
        self.mismatches.push(Mismatch { path, reason });
    }
}

fn is_digest(text: &str) -> bool {
    let hex = text.strip_prefix("sha256:").unwrap_or_default();
    hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// RFC 3339 in UTC: `2026-11-23T15:31:42Z`, with or without fractions of a second.
fn is_time(text: &str) -> bool {
    let Some(text) = text.strip_suffix('Z') else { return false };
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let form: String = seconds.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    form == "0000-00-00T00:00:00" && fraction.bytes().all(|byte| byte.is_ascii_digit())
}

/// Parses one JSON document and refuses a key that an object has twice, which other parsers may hide.
pub(super) fn parse_strictly(text: &str) -> Result<Json, serde_json::Error> {
    let Unique(value) = serde_json::from_str(text)?;
    Ok(value)
}

/// A value without repeated keys.
struct Unique(Json);

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> serde::de::Visitor<'de> for UniqueVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut elements = Vec::new();
        while let Some(Unique(element)) = list.next_element()? {
            elements.push(element);
        }
        Ok(elements.into())
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries = serde_json::Map::new();
        while let Some((key, Unique(value))) = map.next_entry::<String, Unique>()? {
            if entries.insert(key.clone(), value).is_some() {
                return Err(serde::de::Error::custom(format!("key {key:?}: twice in one object")));
            }
        }
        Ok(entries.into())
    }
}

#[test]
fn differences_from_a_shape_are_found() {
    let mut types = Types::default();
    types.add(
        "type List = { models: Model[], note?: string }\n\
         type Model = { name: string, size: Bytes, modified: Time, digest: Digest | null, kind: \"a\" | \"b\" }",
    );
    let model = serde_json::json!({
        "name": "m", "size": 1, "modified": "2026-11-23T15:31:42Z", "digest": null, "kind": "a",
    });
    let check = |change: &str, value: Json| {
        let mut model = model.clone();
        model[change] = value;
        let mismatches = types.check(&serde_json::json!({ "models": [model] }), "List").err();
        mismatches.map(|mismatches| mismatches.into_iter().map(|one| one.path).collect::<Vec<_>>())
    };
    assert_eq!(check("size", 2.into()), None);
    assert_eq!(check("digest", format!("sha256:{}", "0".repeat(64)).into()), None);
    for (key, wrong) in [
        ("size", Json::from(-1)),
        ("size", 1.5.into()),
        ("size", "1".into()),
        ("modified", 1_700_000_000.into()),
        ("modified", "2026-11-23 15:31:42".into()),
        ("digest", "sha256:00".into()),
        ("kind", "c".into()),
        ("extra", 1.into()),
    ] {
        assert_eq!(check(key, wrong.clone()), Some(vec![format!("$.models[0].{key}")]), "{key} {wrong}");
    }
    assert!(types.check(&serde_json::json!({}), "List").is_err(), "a key is missing");
    let seen = types.check(&serde_json::json!({ "models": [] }), "List").unwrap();
    let seen: Vec<_> = seen.into_iter().map(|point| types.points[point].as_str()).collect();
    assert_eq!(seen, ["List.note absent"]);
    assert!(parse_strictly(r#"{"a":1,"a":2}"#).is_err());
    assert_eq!(parse_strictly(r#"{"a":[1,{"b":null}]}"#).unwrap()["a"][1]["b"], Json::Null);
}
