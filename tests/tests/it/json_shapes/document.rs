//! Reads docs/JSON.md: its sections, the shapes in them, and the table of errors.

use std::collections::BTreeMap;

use super::notation::Types;

const DOCUMENT: &str = include_str!("../../../../docs/JSON.md");

/// The content of the document.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) types: Types,
    /// The shape of each documented command line, such as `blobd ls --trash`.
    pub(super) shapes: BTreeMap<String, Shape>,
    /// The commands that have a section of their own.
    pub(super) sections: Vec<String>,
    /// The commands listed under "Commands without JSON of their own".
    pub(super) without_json: Vec<String>,
    pub(super) errors: Vec<ErrorRow>,
}

/// The shape of a command's output.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) type_name: String,
    /// Whether each line of the output has this shape, instead of the output being one document.
    pub(super) per_line: bool,
}

/// A row of the table of errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ErrorRow {
    pub(super) code: String,
    pub(super) exit_code: i32,
    /// `None` if the daemon never responds with this error.
    pub(super) http_status: Option<u16>,
}

impl Document {
    pub(super) fn read() -> Self {
        let mut types = Types::default();
        blocks(DOCUMENT).into_iter().for_each(|block| types.add(block));
        let mut shapes = BTreeMap::new();
        for (line, type_name) in &types.commands {
            let per_line = line.strip_suffix(", one per line");
            let command = per_line.unwrap_or(line).to_owned();
            let shape = Shape { type_name: type_name.clone(), per_line: per_line.is_some() };
            assert!(shapes.insert(command, shape).is_none(), "{line}: documented twice");
        }
        let headings = DOCUMENT.lines().filter_map(|line| line.strip_prefix("### "));
        let (_, without) = DOCUMENT.split_once("## Commands without JSON of their own\n").expect("a section");
        let without = without.split("\n## ").next().unwrap_or_default();
        let without = without.lines().filter_map(|line| line.strip_prefix("- `")?.split('`').next());
        Self {
            types,
            shapes,
            sections: headings.map(str::to_owned).collect(),
            without_json: without.map(str::to_owned).collect(),
            errors: DOCUMENT.lines().filter_map(error_row).collect(),
        }
    }

    /// The shape of a documented command line.
    pub(super) fn shape(&self, command: &str) -> &Shape {
        self.shapes.get(command).unwrap_or_else(|| panic!("{command}: no shape in docs/JSON.md"))
    }
}

/// The contents of the blocks of shapes.
fn blocks(document: &str) -> Vec<&str> {
    let after_openings = document.split("\n```ts\n").skip(1);
    after_openings.map(|rest| rest.split("\n```").next().unwrap_or_default()).collect()
}

/// ``| `busy` | … | 4 | 409 |``
fn error_row(line: &str) -> Option<ErrorRow> {
    let cells: Vec<_> = line.split('|').map(str::trim).collect();
    let ["", code, _meaning, exit_code, http_status, ""] = cells[..] else { return None };
    let code = code.strip_prefix('`')?.strip_suffix('`')?.to_owned();
    Some(ErrorRow { code, exit_code: exit_code.parse().ok()?, http_status: http_status.parse().ok() })
}
