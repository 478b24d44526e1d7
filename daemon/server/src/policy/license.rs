//! Identifiers of licenses: as SPDX names them, or by the title of a license's text.

/// No license is stated.
pub(super) const UNKNOWN: &str = "unknown";
/// A text that is not in [`TITLES`].
pub(crate) const OTHER: &str = "other";

/// How much of a text is searched for its title.
const TITLE_BYTES: usize = 400;

/// The beginnings of licenses' texts in lower case, with single spaces, and their SPDX identifiers, or the identifiers
/// of Hugging Face for licenses that SPDX does not list. The first that occurs counts, so more specific ones come
/// first. `docs/USERS.md` has the same table.
const TITLES: [(&str, &str); 21] = [
    ("apache license version 2.0", "apache-2.0"),
    ("apache license, version 2.0", "apache-2.0"),
    ("mit license", "mit"),
    ("permission is hereby granted, free of charge", "mit"),
    ("bsd 3-clause", "bsd-3-clause"),
    ("bsd 2-clause", "bsd-2-clause"),
    ("gnu affero general public license version 3", "agpl-3.0"),
    ("gnu general public license version 3", "gpl-3.0"),
    ("attribution-noncommercial-sharealike 4.0", "cc-by-nc-sa-4.0"),
    ("attribution-noncommercial-noderivatives 4.0", "cc-by-nc-nd-4.0"),
    ("attribution-noncommercial 4.0", "cc-by-nc-4.0"),
    ("attribution-sharealike 4.0", "cc-by-sa-4.0"),
    ("attribution 4.0", "cc-by-4.0"),
    ("cc0 1.0 universal", "cc0-1.0"),
    ("llama 4 community license", "llama4"),
    ("llama 3.3 community license", "llama3.3"),
    ("llama 3.2 community license", "llama3.2"),
    ("llama 3.1 community license", "llama3.1"),
    ("meta llama 3 community license", "llama3"),
    ("llama 2 community license", "llama2"),
    ("gemma terms of use", "gemma"),
];

/// The identifier of a license text: the text itself if it is one, as in `general.license`, else by its title.
pub(super) fn of_text(text: &str) -> String {
    let trimmed = text.trim();
    if let Some(identifier) = spdx(trimmed) {
        return identifier;
    }
    let start: String = trimmed.chars().take(TITLE_BYTES).collect();
    let start = start.split_whitespace().collect::<Vec<_>>().join(" ").to_ascii_lowercase();
    let known = TITLES.iter().find(|(title, _)| start.contains(title));
    known.map_or(OTHER, |(_, identifier)| identifier).to_owned()
}

/// The identifiers in an SPDX expression such as `MIT OR (Apache-2.0 WITH LLVM-exception)`, without exceptions.
pub(super) fn of_expression(text: &str) -> Vec<String> {
    let words = text.split(|c: char| c.is_whitespace() || "()".contains(c)).filter(|word| !word.is_empty());
    let (mut identifiers, mut is_exception) = (Vec::new(), false);
    for word in words {
        match word {
            "AND" | "OR" => {}
            "WITH" => is_exception = true,
            _ if std::mem::take(&mut is_exception) => {}
            word => identifiers.push(spdx(word).unwrap_or_else(|| OTHER.to_owned())),
        }
    }
    identifiers
}

/// The text in lower case if it can be an identifier: one word of letters, digits, `.`, `-` and `+`.
fn spdx(text: &str) -> Option<String> {
    const MAX_BYTES: usize = 64;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-+".contains(c);
    let is_one = !text.is_empty() && text.len() <= MAX_BYTES && text.chars().all(is_allowed);
    is_one.then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_an_identifier_or_begins_with_a_known_title() {
        for (text, identifier) in [
            ("MIT", "mit"),
            ("  Apache-2.0\n", "apache-2.0"),
            (
                "                                 Apache License\n                           Version 2.0, January 2004",
                "apache-2.0",
            ),
            ("MIT License\n\nCopyright (c) 2024", "mit"),
            ("Copyright (c) 2024 X\n\nPermission is hereby granted, free of charge, to any person", "mit"),
            ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nLlama 3.1 Version", "llama3.1"),
            ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
            ("Attribution-NonCommercial 4.0 International", "cc-by-nc-4.0"),
            ("The weights of this model are pseudo-random numbers.", OTHER),
            ("", OTHER),
        ] {
            assert_eq!(of_text(text), identifier, "{text}");
        }
        assert_eq!(spdx("two words"), None);
    }

    #[test]
    fn expression_has_the_identifiers_of_its_licenses() {
        assert_eq!(of_expression("MIT"), ["mit"]);
        assert_eq!(of_expression("MIT OR (Apache-2.0 WITH LLVM-exception)"), ["mit", "apache-2.0"]);
        assert_eq!(of_expression(" "), [""; 0]);
        assert_eq!(of_expression("see/LICENSE"), [OTHER]);
    }

    #[test]
    fn every_title_and_its_identifier_are_documented() {
        let documented = include_str!("../../../../docs/USERS.md").to_lowercase();
        for (title, identifier) in TITLES {
            assert!(documented.contains(&format!("| {title} | `{identifier}` |")), "{title}");
        }
    }
}
