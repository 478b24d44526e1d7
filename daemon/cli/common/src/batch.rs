//! A command for several items: each of them is tried, and each failure is reported.

use std::path::Path;

use blobd_client::protocol::error::FailedItem;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::output::{print_error, print_json, printable};
use crate::{ErrorBody, ErrorCode, Global, internal};

/// The items of a command that goes on after one has failed.
#[derive(Debug)]
pub struct Batch<'g, T> {
    global: &'g Global,
    count: usize,
    /// Whether the command prints each result as a line of JSON.
    has_lines: bool,
    done: Vec<T>,
    failed: Vec<FailedItem>,
}

impl<'g, T: Serialize> Batch<'g, T> {
    /// A batch of `count` items that are still to be done.
    pub const fn new(global: &'g Global, count: usize) -> Self {
        Self { global, count, has_lines: false, done: Vec::new(), failed: Vec::new() }
    }

    /// For a command that prints its results as lines of JSON itself: each failure is a line too.
    pub fn of_lines(global: &'g Global, count: usize) -> Self {
        Self { has_lines: true, ..Self::new(global, count) }
    }

    /// Adds the result for one item. If there are several items, reports a failure immediately.
    pub fn add(&mut self, name: &impl ToString, result: Result<T, ErrorBody>) -> Option<&T> {
        match result {
            Ok(done) => {
                self.done.push(done);
                self.done.last()
            }
            Err(error) => {
                let failed = FailedItem { name: name.to_string(), error };
                if self.count > 1 {
                    self.report(&failed);
                }
                self.failed.push(failed);
                None
            }
        }
    }

    fn report(&self, failed: &FailedItem) {
        let FailedItem { name, error } = failed;
        if !self.global.json {
            report_next(self.global, self.failed.iter().map(|before| &before.error), error);
        } else if self.has_lines {
            // The exit code says that there was a failure, even if nobody reads the lines.
            let _ = print_json(&json!({ "status": "failed", "name": name, "error": error }));
        }
    }

    /// The results of the items that are done.
    pub fn done(&self) -> &[T] {
        &self.done
    }

    /// The items that have failed, with their errors.
    pub fn failed(&self) -> &[FailedItem] {
        &self.failed
    }

    /// With `--json`, prints the results under `key` and the failures under `failed`; then see [`Self::result`].
    pub fn finish(self, key: &str, what: [&str; 2]) -> Result<(), ErrorBody> {
        self.finish_with(key, &Map::new(), what)
    }

    /// As [`Self::finish`]; the keys of `more`, which is an object, join the document.
    pub fn finish_with(self, key: &str, more: &impl Serialize, what: [&str; 2]) -> Result<(), ErrorBody> {
        let Self { global, count, done, failed, .. } = &self;
        if global.json && (*count > 1 || failed.is_empty()) {
            let mut document = Map::new();
            document.insert(key.to_owned(), value(done)?);
            if !failed.is_empty() {
                document.insert("failed".to_owned(), value(failed)?);
            }
            if let Value::Object(more) = value(more)? {
                document.extend(more);
            }
            print_json(&document)?;
        }
        self.result(what)
    }

    /// Fails if any item has failed. `what` says what was not done, for one item and for several: `files was not
    /// imported`.
    pub fn result(self, what: [&str; 2]) -> Result<(), ErrorBody> {
        result(self.count, self.failed.into_iter().map(|failed| failed.error).collect(), what)
    }
}

/// Prints each error; of several with the same hint, only the last shows it.
pub fn report_each(global: &Global, errors: &[ErrorBody]) {
    for (index, error) in errors.iter().enumerate() {
        report_next(global, errors.iter().take(index), error);
    }
}

/// Prints a hint only once for all failures that share it.
fn report_next<'e>(global: &Global, mut before: impl Iterator<Item = &'e ErrorBody>, error: &ErrorBody) {
    let is_known = before.any(|before| before.hint == error.hint);
    let hint = error.hint.clone().filter(|_| !is_known);
    print_error(global.json, global.quiet, &ErrorBody { hint, ..error.clone() });
}

fn value(value: &impl Serialize) -> Result<Value, ErrorBody> {
    serde_json::to_value(value).map_err(internal)
}

/// The failure of a single item, or a summary with the code that all failures have in common.
pub fn result(count: usize, mut errors: Vec<ErrorBody>, [one, many]: [&str; 2]) -> Result<(), ErrorBody> {
    let Some(first) = errors.first() else { return Ok(()) };
    let code = first.code;
    if count <= 1 {
        return errors.pop().map_or(Ok(()), Err);
    }
    let code = if errors.iter().all(|error| error.code == code) { code } else { ErrorCode::Internal };
    let what = if errors.len() == 1 { one } else { many };
    Err(ErrorBody::new(code, format!("{} of {count} {what}", errors.len())))
}

/// An error of an import that says which model it is about, and where on this machine the file is. The daemon knows a file
/// only by its path in the model.
pub fn located<'f>(
    error: ErrorBody,
    model: Option<&str>,
    files: impl IntoIterator<Item = (&'f str, &'f Path)>,
) -> ErrorBody {
    let of_file = files.into_iter().find_map(|(path, source)| {
        let rest = error.message.strip_prefix(path)?.strip_prefix(": ")?;
        let place = match source.ends_with(path) {
            true => source.display().to_string(),
            false => format!("{path} ({})", source.display()),
        };
        Some(format!("{}: {rest}", printable(&place)))
    });
    let message = of_file.unwrap_or_else(|| error.message.clone());
    let message = match model {
        Some(model) if !message.starts_with(model) => format!("{model}: {message}"),
        _ => message,
    };
    ErrorBody { message, ..error }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: [&str; 2] = ["files was not imported", "files were not imported"];

    fn errors(codes: &[ErrorCode]) -> Vec<ErrorBody> {
        codes.iter().map(|code| ErrorBody::new(*code, "x: reason").with_hint("mend it")).collect()
    }

    #[test]
    fn failure_of_the_only_item_is_that_of_the_command() {
        let error = result(1, errors(&[ErrorCode::NotFound]), WHAT).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::NotFound, "x: reason"));
        assert_eq!(error.hint.as_deref(), Some("mend it"));
        assert_eq!(result(1, Vec::new(), WHAT), Ok(()));
    }

    #[test]
    fn failures_of_several_items_are_counted_and_have_their_common_code() {
        let error = result(3, errors(&[ErrorCode::NotFound, ErrorCode::NotFound]), WHAT).unwrap_err();
        assert_eq!(error, ErrorBody::new(ErrorCode::NotFound, "2 of 3 files were not imported"));
        let error = result(3, errors(&[ErrorCode::NotFound, ErrorCode::NoSpace]), WHAT).unwrap_err();
        assert_eq!(error.code, ErrorCode::Internal);
        let error = result(2, errors(&[ErrorCode::NoSpace]), WHAT).unwrap_err();
        assert_eq!(error.message, "1 of 2 files was not imported");
    }

    #[test]
    fn errors_name_the_model_and_the_file() {
        let located = |message: &str, source: &str| {
            let error = ErrorBody::new(ErrorCode::InvalidInput, message);
            located(error, Some("hf.co/a/b"), [("a", Path::new("/x")), ("sub/m", Path::new(source))]).message
        };
        assert_eq!(located("sub/m: wrong", "/hub/sub/m"), "hf.co/a/b: /hub/sub/m: wrong");
        assert_eq!(located("sub/m: wrong", "/hub/blobs/1"), "hf.co/a/b: sub/m (/hub/blobs/1): wrong");
        assert_eq!(located("other: wrong", "/hub/sub/m"), "hf.co/a/b: other: wrong");
        assert_eq!(located("hf.co/a/b: exists", "/hub/sub/m"), "hf.co/a/b: exists");
    }
}
