//! The declarations in docs/JSON.md, in the notation that `json_shapes` reads.

use super::rust_types::{Field, Kind, Presence, RustTypes, Shape};

/// The longest line of the document's blocks.
const WIDTH: usize = 118;
/// Where comments begin at the latest, if the line is not longer.
const COMMENT_COLUMN: usize = 36;

/// The document with a new declaration of each type that has the name of a Rust type. All else is as it was: prose,
/// the comments above declarations, and types that no Rust type makes.
pub(super) fn renewed(document: &str, types: &RustTypes) -> String {
    let mut text = String::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        let name = line.strip_prefix("type ").and_then(|rest| rest.split(' ').next());
        match name.filter(|name| types.find(name).is_some()) {
            None => text += &format!("{line}\n"),
            Some(name) => {
                if line.ends_with('{') {
                    lines.find(|line| *line == "}").expect("the end of a type");
                } else if line.ends_with('=') {
                    // The last alternative has no sign after it.
                    let mut rest = lines.clone();
                    while rest.next().is_some_and(|line| line.starts_with("  ")) {
                        lines.next();
                    }
                }
                text += &declaration(name, types);
            }
        }
    }
    text
}

fn declaration(name: &str, types: &RustTypes) -> String {
    let (head, rows, end) = match &types.get(name).shape {
        Shape::Texts(texts) => {
            let rows: Vec<_> =
                texts.iter().map(|(text, doc)| (format!("  | \"{text}\""), doc.clone())).collect();
            (format!("type {name} ="), rows, "")
        }
        Shape::Object(fields) => {
            let flat = fields
                .iter()
                .filter(|field| field.presence == Presence::Flat)
                .map(|field| named(&field.kind));
            let flat: String = flat.map(|name| format!("{name} & ")).collect();
            (format!("type {name} = {flat}{{"), members(fields, types), "}\n")
        }
    };
    let longest =
        rows.iter().map(|(code, _)| code.chars().count() + 2).filter(|length| *length <= COMMENT_COLUMN);
    let column = longest.max().unwrap_or(COMMENT_COLUMN);
    let rows = rows.iter().map(|(code, doc)| commented(code, doc, column));
    format!("{head}\n{}{end}", rows.collect::<String>())
}

fn members(fields: &[Field], types: &RustTypes) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for field in fields {
        let mut value = value(&field.kind, &field.key);
        if field.presence == Presence::Nullable {
            value += " | null";
        }
        match field.presence {
            Presence::Flat => {}
            Presence::OptionalFlat => {
                let inner = members(types.fields(named(&field.kind)), types);
                rows.extend(
                    inner
                        .into_iter()
                        .map(|(code, doc)| (code.replacen(": ", "?: ", 1).replace("??", "?"), doc)),
                );
            }
            Presence::Optional => rows.push((format!("  {}?: {value},", field.key), field.doc.clone())),
            Presence::Always | Presence::Nullable => {
                rows.push((format!("  {}: {value},", field.key), field.doc.clone()));
            }
        }
    }
    rows
}

fn named(kind: &Kind) -> &str {
    kind.named().expect("a flat field has a type with fields")
}

fn value(kind: &Kind, key: &str) -> String {
    let is_size = key.contains("bytes")
        || ["size", "offset", "length", "stride", "total", "completed", "reused"].contains(&key);
    match kind {
        Kind::Text => "string".to_owned(),
        Kind::Digest => "Digest".to_owned(),
        Kind::Time => "Time".to_owned(),
        Kind::Unsigned(_) | Kind::Signed if is_size => "Bytes".to_owned(),
        Kind::Unsigned(_) | Kind::Signed => "Count".to_owned(),
        Kind::Float => "number".to_owned(),
        Kind::Bool => "boolean".to_owned(),
        Kind::True => "true".to_owned(),
        Kind::Json(alias) => alias.clone().unwrap_or_else(|| "unknown".to_owned()),
        Kind::List(inner) => format!("{}[]", value(inner, key)),
        Kind::Map(inner) => format!("Record<string, {}>", value(inner, key)),
        Kind::Named(name) => name.clone(),
    }
}

/// A line of code with its comment, which may need more lines.
fn commented(code: &str, doc: &str, column: usize) -> String {
    if doc.is_empty() {
        return format!("{code}\n");
    }
    let mut text = String::new();
    let mut line = format!("{code:column$}//");
    if !line.contains(" //") {
        line = format!("{code}  //");
    }
    for word in doc.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            text += &format!("{line}\n");
            line = format!("{:column$}//  ", "");
        }
        line += &format!(" {word}");
    }
    text + &line + "\n"
}
