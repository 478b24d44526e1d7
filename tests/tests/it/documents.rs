//! Checks all documents: their links lead somewhere, long ones list their contents, and those with procedures say for
//! each block of commands or settings which script of `just systemd` runs it, or why none does. Also checks the form of
//! errors.
//! `BLESS=1 cargo test -p blobd-tests --test it documents` writes the lists.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A document with more sections than this needs a list of contents.
const SECTIONS_WITHOUT_CONTENTS: usize = 3;

const CONTENTS: &str = "## Contents";

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a parent").to_path_buf()
}

/// The Markdown files of the top level, of `docs` and of its folders, with their text.
fn documents() -> BTreeMap<PathBuf, String> {
    let mut folders = vec![repository(), repository().join("docs")];
    let mut found = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                found.insert(path.clone(), fs::read_to_string(&path).unwrap());
            } else if path.is_dir() && folder != repository() {
                folders.push(path);
            }
        }
    }
    found
}

/// The lines outside of blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        !is_code && !fence
    })
}

/// The level and the text of each heading.
fn headings(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).filter_map(|line| {
        let level = line.bytes().take_while(|byte| *byte == b'#').count();
        let title = line.get(level..)?.strip_prefix(' ')?;
        (level > 0).then_some((level, title))
    })
}

/// The anchor that code hosts give to a heading.
fn anchor(title: &str) -> String {
    let kept = title.to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
}

/// The targets of all links.
fn links(text: &str) -> Vec<&str> {
    let starts = prose(text).flat_map(|line| line.split("](").skip(1));
    starts.filter_map(|rest| rest.split(')').next()).collect()
}

#[test]
fn links_in_documents_point_to_existing_files_and_headings() {
    let documents = documents();
    assert!(documents.len() > 15, "{:?}", documents.keys());
    let mut broken = Vec::new();
    for (document, text) in &documents {
        for link in links(text).into_iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').map_or((link, None), |(file, at)| (file, Some(at)));
            let target = if file.is_empty() { document.clone() } else { document.with_file_name(file) };
            let target = target.canonicalize().ok();
            let is_there = match (target.as_ref(), heading) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(path), Some(heading)) => documents
                    .get(path)
                    .is_some_and(|text| headings(text).any(|(_, title)| anchor(title) == heading)),
            };
            if !is_there {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// [`links_in_documents_point_to_existing_files_and_headings`] checks where the answers are.
#[test]
fn index_answers_at_least_thirty_questions_and_lists_every_document() {
    let index = fs::read_to_string(repository().join("docs/README.md")).unwrap();
    let questions = index.split("\n## Questions\n").nth(1).unwrap();
    let answered = questions.lines().filter(|line| line.starts_with("| ") && line.contains("](")).count();
    assert!(answered >= 30, "{answered}");
    let is_in_docs = |path: &PathBuf| path.starts_with(repository().join("docs"));
    let names = documents().into_keys().filter(is_in_docs);
    let names = names.map(|path| path.strip_prefix(repository().join("docs")).unwrap().display().to_string());
    let missing: Vec<_> =
        names.filter(|name| name != "README.md" && !index.contains(&format!("({name})"))).collect();
    assert!(missing.is_empty(), "docs/README.md does not list {missing:?}");
}

/// The list of contents that a document must have.
fn contents(text: &str) -> String {
    let sections = headings(text).filter(|(level, title)| *level == 2 && *title != "Contents");
    let lines = sections.map(|(_, title)| format!("- [{title}](#{})", anchor(title)));
    format!("{CONTENTS}\n\n{}\n", lines.collect::<Vec<_>>().join("\n"))
}

/// The text with its list of contents replaced, or inserted before the first section.
pub(crate) fn with_contents(text: &str) -> String {
    let list = contents(text);
    let Some(start) = text.find("\n## ").map(|newline| newline + 1) else { return text.to_owned() };
    let (head, sections) = text.split_at(start);
    let rest = match sections.strip_prefix(CONTENTS) {
        Some(old) => after_list(old),
        None => sections,
    };
    format!("{head}{list}\n{rest}")
}

/// The parts of the sources that have texts for users.
const SOURCES: [&str; 3] = ["store-format", "client", "daemon"];

/// `found, X expected` in a literal of this line: the word is the last one of a text, or of a part of it.
fn has_found_before_expected(line: &str) -> bool {
    let code = line.trim_start();
    let is_end = |(at, word): (usize, &str)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        let in_literal = before.matches('"').count() % 2 == 1 || after.starts_with('"');
        in_literal
            && before.ends_with(' ')
            && !before.ends_with(": ")
            && after.starts_with(['"', ';', ',', ':', '.'])
    };
    !code.starts_with("//") && line.match_indices("expected").any(is_end)
}

fn sources_below(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests" || name == "target");
        if path.is_dir() && !is_test {
            sources_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
            found.push(path);
        }
    }
}

#[test]
fn errors_say_what_was_expected_before_what_was_found() {
    assert!(has_found_before_expected(r#"#[error("{found} bytes, {expected} expected")]"#));
    assert!(has_found_before_expected(r#"    format!("digest {found}, {} expected; pull it again", a)"#));
    assert!(!has_found_before_expected(r#"#[error("size: wrong: expected {expected}, found {found}")]"#));
    let mut sources = Vec::new();
    SOURCES.iter().for_each(|part| sources_below(&repository().join(part), &mut sources));
    assert!(sources.len() > 300, "{}", sources.len());
    let mut wrong = Vec::new();
    for path in sources {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| has_found_before_expected(line));
        wrong.extend(lines.map(|line| format!("{}: {}", path.display(), line.trim())));
    }
    assert!(wrong.is_empty(), "write `subject: what is wrong: expected X, found Y`:\n{}", wrong.join("\n"));
}

#[test]
fn skipped_tests_are_recorded_for_the_summary() {
    let mut sources = Vec::new();
    ["daemon", "client", "tests/src", "tests/tests"]
        .iter()
        .for_each(|part| sources_below(&repository().join(part), &mut sources));
    let prints = |line: &&str| line.contains("println!(\"skipped: ");
    for path in sources {
        let text = fs::read_to_string(&path).unwrap();
        let found: Vec<_> = text.lines().filter(prints).collect();
        let is_other = path.components().any(|part| part.as_os_str() == "bin");
        assert!(is_other || found.is_empty(), "{}: call `skipped`: {found:?}", path.display());
    }
}

/// What follows the list, even if it is not a section.
fn after_list(text: &str) -> &str {
    let is_of_list = |line: &&str| line.trim().is_empty() || line.starts_with("- [");
    let length: usize = text.split_inclusive('\n').take_while(is_of_list).map(str::len).sum();
    &text[length..]
}

#[test]
fn long_documents_list_their_contents() {
    let is_blessing = std::env::var_os("BLESS").is_some();
    for (document, text) in documents() {
        let is_in_docs = document.parent().is_some_and(|folder| folder.ends_with("docs"));
        let sections = headings(&text).filter(|(level, title)| *level == 2 && *title != "Contents").count();
        if !is_in_docs || sections <= SECTIONS_WITHOUT_CONTENTS {
            continue;
        }
        let wanted = with_contents(&text);
        if is_blessing {
            fs::write(&document, wanted).unwrap();
        } else {
            assert!(text == wanted, "{}: run this test with BLESS=1 to write the list", document.display());
        }
    }
}

#[test]
fn list_of_contents_is_inserted_and_replaced() {
    let text = "# T\n\nIntro.\n\n## A `b` c\n\n```sh\n## no heading\n```\n\n### Below\n\n## D\n";
    let listed = with_contents(text);
    assert!(
        listed.starts_with("# T\n\nIntro.\n\n## Contents\n\n- [A `b` c](#a-b-c)\n- [D](#d)\n\n## A `b` c\n")
    );
    assert_eq!(with_contents(&listed), listed);
    assert_eq!(
        with_contents(&listed.replace("## D", "## E")),
        listed.replace("## D", "## E").replace("[D](#d)", "[E](#e)")
    );
    let with_text = listed.replace("## A", "A paragraph.\n\n## A");
    assert_eq!(with_contents(&with_text), with_text, "nothing but the list is replaced");
}

/// Documents whose blocks a reader types, and which `just systemd` therefore runs word for word.
const PROCEDURES: [&str; 2] = ["INSTALL.md", "OPERATIONS.md"];

/// The blocks of code that a reader types: the language of each, and the line above it.
fn blocks(text: &str) -> Vec<(&str, &str)> {
    let (mut above, mut is_code, mut found) = ("", false, Vec::new());
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            if !is_code && language != "text" {
                found.push((language, above));
            }
            is_code = !is_code;
        }
        above = line;
    }
    found
}

/// What is wrong with the marks of a document's blocks, where `scripts` run them.
fn unmarked(document: &str, text: &str, scripts: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut wrong = Vec::new();
    for (language, above) in blocks(text) {
        let inner =
            above.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")).unwrap_or_default();
        if let Some(name) = inner.strip_prefix("test: ") {
            let mentions = |line: &str| {
                let mut words = line.split(|letter: char| letter.is_whitespace() || "\"')".contains(letter));
                words.any(|word| word == document) && words.next() == Some(name)
            };
            if names.contains(&name) {
                wrong.push(format!("{document}: {name}: two blocks have this name"));
            } else if !scripts.lines().any(mentions) {
                wrong.push(format!("{document}: {name}: no script in tests/systemd/inside runs it"));
            }
            names.push(name);
        } else if inner.strip_prefix("not run: ").is_none_or(str::is_empty) {
            wrong.push(format!(
                "{document}: a block of {language} after {above:?}: expected <!-- test: NAME --> or <!-- not run: REASON --> \
                 in the line above it"
            ));
        }
    }
    wrong
}

#[test]
fn every_block_of_a_procedure_is_run_under_systemd_or_has_a_reason() {
    let scripts = fs::read_dir(repository().join("tests/systemd/inside")).unwrap();
    let scripts = scripts.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let scripts: String = scripts.collect();
    for document in PROCEDURES {
        let text = fs::read_to_string(repository().join("docs").join(document)).unwrap();
        assert!(blocks(&text).len() > 10, "{document}");
        let wrong = unmarked(document, &text, &scripts);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

#[test]
fn block_without_a_mark_or_a_script_is_found() {
    let marked = "<!-- test: a -->\n```sh\nls\n```\n\n<!-- not run: takes a registry -->\n```console\n$ ls\n```\n\n```text\nx\n```\n";
    assert_eq!(unmarked("D.md", marked, "check x run_block D.md a\n"), [""; 0]);
    assert!(unmarked("D.md", marked, "check x run_block D.md ab\n")[0].contains("no script"));
    assert!(
        unmarked("D.md", &marked.replace("takes a registry", ""), "x D.md a")[0].contains("block of console")
    );
    assert!(unmarked("D.md", &format!("{marked}```toml\n```\n"), "x D.md a")[0].contains("block of toml"));
    assert!(unmarked("D.md", &format!("{marked}{marked}"), "x D.md a")[0].contains("two blocks"));
}
