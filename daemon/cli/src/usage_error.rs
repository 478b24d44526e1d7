//! Errors of the argument parser in the form of all other errors: `blobd: …`, a hint, or JSON.

use std::borrow::Cow;
use std::ffi::OsString;

use blobd_cli_common::global::GlobalOptions;
use blobd_store_format::source::without_userinfo;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

use crate::other_tools::{advice, nearest};
use crate::{ErrorBody, ErrorCode};

pub(super) fn body(error: &Error, arguments: &[OsString]) -> ErrorBody {
    let usage = Usage::new(error, arguments);
    let (message, hint) = match error.kind() {
        ErrorKind::InvalidSubcommand => unknown_command(&text(error, ContextKind::InvalidSubcommand), &usage),
        ErrorKind::UnknownArgument => unknown_argument(error, &usage),
        ErrorKind::MissingRequiredArgument => {
            (format!("{}: {}", usage.subject(), missing(&texts(error, ContextKind::InvalidArg))), None)
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            (format!("{}: no command given", usage.subject()), Some(usage.commands()))
        }
        ErrorKind::InvalidValue => invalid_value(error),
        ErrorKind::ValueValidation => refused_value(error),
        ErrorKind::ArgumentConflict => (conflict(error), None),
        ErrorKind::NoEquals => (
            format!("{}: wrong form: expected = before the value", text(error, ContextKind::InvalidArg)),
            None,
        ),
        _ => (first_line(error), None),
    };
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(hint.unwrap_or_else(|| usage.hint()))
}

/// The options that say how an error is printed, from arguments that could not be parsed.
pub(super) fn output_options(arguments: &[OsString]) -> GlobalOptions {
    let ours = arguments.iter().skip(1).take_while(|argument| *argument != "--");
    let has = |names: &[&str]| ours.clone().any(|argument| names.iter().any(|name| argument == name));
    GlobalOptions { json: has(&["--json"]), quiet: has(&["-q", "--quiet"]), ..GlobalOptions::default() }
}

pub(super) fn unknown(parent: &Command, word: &str) -> ErrorBody {
    // The full name is set only once the commands are built.
    let name = parent.get_bin_name().unwrap_or_else(|| parent.get_name());
    let command = if name.starts_with("blobd") { name.to_owned() } else { format!("blobd {name}") };
    let (message, hint) = unknown_command(word, &Usage { command, line: String::new() });
    ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(hint.unwrap_or_default())
}

struct Usage {
    command: String,
    line: String,
}

impl Usage {
    /// Some errors do not carry the usage: then the command is the first argument that is one.
    fn new(error: &Error, arguments: &[OsString]) -> Self {
        let usage = match error.get(ContextKind::Usage) {
            Some(ContextValue::StyledStr(usage)) => usage.to_string(),
            _ => String::new(),
        };
        let line =
            usage.trim().trim_start_matches("Usage:").trim().lines().next().unwrap_or_default().to_owned();
        let is_name = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
        let names: Vec<&str> = line.split_whitespace().take_while(is_name).collect();
        let mut blobd = crate::command();
        // Arguments cannot be displayed before.
        blobd.build();
        if !names.is_empty() {
            let line = without_global_options(&blobd, &line);
            return Self { command: names.join(" "), line };
        }
        let mut words = arguments.iter().skip(1).filter_map(|argument| argument.to_str());
        let used = words.find_map(|word| blobd.find_subcommand(word));
        let command = used.map_or_else(|| "blobd".to_owned(), |used| format!("blobd {}", used.get_name()));
        Self { command, line }
    }

    /// The command without the name of the program, with which the line of an error begins.
    fn subject(&self) -> &str {
        self.command.strip_prefix("blobd ").unwrap_or(&self.command)
    }

    fn commands(&self) -> String {
        let blobd = crate::command();
        let words = self.command.split_whitespace().skip(1);
        let used = words.fold(&blobd, |command, word| command.find_subcommand(word).unwrap_or(command));
        if used.get_name() == blobd.get_name() {
            return "`blobd help` lists the commands".to_owned();
        }
        let known =
            used.get_subcommands().map(|command| format!("`{} {}`", self.command, command.get_name()));
        format!("{}; `{} --help` explains them", known.collect::<Vec<_>>().join(", "), self.command)
    }

    fn hint(&self) -> String {
        let help = format!("`{} --help` explains it", self.command);
        if self.line.is_empty() { help } else { format!("usage: {}; {help}", self.line) }
    }
}

/// The parser names options that were given as if the command needed them.
fn without_global_options(blobd: &Command, line: &str) -> String {
    let given = blobd.get_arguments().filter(|option| option.is_global_set());
    let given = given.map(|option| format!(" {option}"));
    given.chain([" [OPTIONS]".to_owned()]).fold(line.to_owned(), |line, option| line.replace(&option, ""))
}

fn unknown_command(word: &str, usage: &Usage) -> (String, Option<String>) {
    let command = crate::command();
    if usage.command != "blobd" {
        return (format!("{} {word}: no such command", usage.command), Some(usage.commands()));
    }
    (format!("{word}: no such command"), Some(advice(word, &command)))
}

fn unknown_argument(error: &Error, usage: &Usage) -> (String, Option<String>) {
    let argument = text(error, ContextKind::InvalidArg);
    if !argument.starts_with('-') {
        return (format!("{argument}: one argument too many for `{}`", usage.command), None);
    }
    if argument == "--force" && usage.command == "blobd gc" {
        let hint = "it needs no force: it deletes only what no model needs; `blobd rm MODEL` removes a model, and \
                    `blobd gc --dry-run` says what keeps the rest";
        return ("--force: no option of `blobd gc`".to_owned(), Some(hint.to_owned()));
    }
    let suggested = text(error, ContextKind::SuggestedArg);
    let plain = |text: &str| text.trim_start_matches('-').to_owned();
    let (typed, known) = (plain(&argument), plain(&suggested));
    // The parser's idea of similar is generous.
    let is_near = known.starts_with(&typed) || nearest(&typed, std::iter::once(known.as_str())).is_some();
    let hint = (!suggested.is_empty() && is_near).then(|| format!("did you mean {suggested}?"));
    (format!("{argument}: no option of `{}`", usage.command), hint)
}

fn invalid_value(error: &Error) -> (String, Option<String>) {
    let (argument, value) = (text(error, ContextKind::InvalidArg), text(error, ContextKind::InvalidValue));
    let possible = texts(error, ContextKind::ValidValue);
    if value.is_empty() {
        let (option, name) = argument.split_once([' ', '=']).unwrap_or((&argument, "a value"));
        let expected = if possible.is_empty() { bare(name) } else { one_of(&possible) };
        return (format!("{option}: no value given: expected {expected}"), None);
    }
    let expected = format!("wrong value: expected {}, found {value:?}", one_of(&possible));
    let problem = if possible.is_empty() { format!("wrong value {value:?}") } else { expected };
    let argument = argument.split([' ', '=']).next().unwrap_or_default();
    let suggested = text(error, ContextKind::SuggestedValue);
    let hint = (!suggested.is_empty()).then(|| format!("did you mean {suggested}?"));
    (format!("{argument}: {problem}"), hint)
}

/// If the parser of the value has a hint, that is returned too.
fn refused_value(error: &Error) -> (String, Option<String>) {
    let (argument, value) = (text(error, ContextKind::InvalidArg), text(error, ContextKind::InvalidValue));
    let quoted = format!("{:?}", without_secrets(&value));
    let source = std::error::Error::source(error);
    let body = source.and_then(|source| source.downcast_ref::<ErrorBody>());
    let reason = match (body, source) {
        (Some(body), _) => body.message.clone(),
        (None, Some(source)) => source.to_string(),
        (None, None) => "refused".to_owned(),
    };
    let reason = if reason.contains(&quoted) { reason } else { format!("{quoted}: {reason}") };
    (format!("{argument}: {reason}"), body.and_then(|body| body.hint.clone()))
}

/// Removes user, password and query from a URL.
fn without_secrets(value: &str) -> Cow<'_, str> {
    if !value.contains("://") {
        return Cow::Borrowed(value);
    }
    without_userinfo(value.split('?').next().unwrap_or_default())
}

fn conflict(error: &Error) -> String {
    let argument = text(error, ContextKind::InvalidArg);
    let others = texts(error, ContextKind::PriorArg);
    match others.as_slice() {
        [other] if *other == argument => format!("{argument}: given more than once"),
        [] => format!("{argument}: cannot be used with other options"),
        others => format!("{argument}: cannot be used with {}", others.join(", ")),
    }
}

/// `no argument given: expected SRC and DST`
fn missing(arguments: &[String]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|argument| bare(argument)).collect();
    format!("no argument given: expected {}", arguments.join(" and "))
}

/// `<REF|PATTERN>...` as `REF or PATTERN`; an option as it is typed.
fn bare(argument: &str) -> String {
    let is_option = argument.starts_with('-');
    let plain: String = argument.trim_end_matches("...").chars().filter(|c| !"<>[]".contains(*c)).collect();
    if is_option { argument.to_owned() } else { plain.replace('|', " or ") }
}

/// `name, size or used`
fn one_of(values: &[String]) -> String {
    match values {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        values => values.join(", "),
    }
}

fn first_line(error: &Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}

fn text(error: &Error, kind: ContextKind) -> String {
    texts(error, kind).into_iter().next().unwrap_or_default()
}

fn texts(error: &Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        Some(ContextValue::StyledStr(text)) => vec![text.to_string()],
        Some(ContextValue::StyledStrs(texts)) => texts.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> (String, String) {
        let arguments = std::iter::once("blobd").chain(line.split_whitespace()).map(OsString::from);
        let arguments: Vec<OsString> = arguments.collect();
        let body = body(&crate::command().try_get_matches_from(&arguments).unwrap_err(), &arguments);
        assert_eq!(body.code, ErrorCode::InvalidRequest);
        (body.message, body.hint.unwrap())
    }

    #[test]
    fn errors_name_the_argument_first_and_say_what_to_do() {
        for (line, message, hint) in [
            ("delete-all", "delete-all: no such command", "`blobd help` lists the commands"),
            ("improt x", "improt: no such command", "did you mean `blobd import`?"),
            ("ls --trahs", "--trahs: no option of `blobd ls`", "did you mean --trash?"),
            ("ls --nope", "--nope: no option of `blobd ls`", "`blobd ls --help` explains it"),
            ("tag", "tag: no argument given: expected SRC and DST", "usage: blobd tag <SRC> <DST>; "),
            ("show", "show: no argument given: expected REF or PATH", "`blobd show --help`"),
            ("tag a b c", "c: one argument too many for `blobd tag`", "usage: blobd tag"),
            ("gc --dry-run --dry-run", "--dry-run: given more than once", "usage: blobd gc"),
            (
                "gc --dry-run --plan-eviction",
                "--dry-run: cannot be used with --plan-eviction[=<SIZE>]",
                "usage",
            ),
            ("partial", "partial: no command given", "`blobd partial ls`, `blobd partial rm`; "),
            ("partial lst", "blobd partial lst: no such command", "`blobd partial ls`, `blobd partial rm`; "),
            ("--json", "blobd: no command given", "`blobd help` lists the commands"),
            ("ls --root", "--root: no value given: expected DIR", "--help` explains it"),
            (
                "ls --sort x",
                "--sort: wrong value: expected name, size, modified or used, found \"x\"",
                "--help`",
            ),
            ("ls --sort", "--sort: no value given: expected name, size, modified or used", "--help`"),
            ("gc --socket /s --nope", "--nope: no option of `blobd gc`", "usage: blobd gc; "),
            ("gc --force", "--force: no option of `blobd gc`", "`blobd rm MODEL` removes a model"),
        ] {
            let (found, advice) = error(line);
            assert_eq!(found, message, "{line}");
            assert!(advice.contains(hint), "{line}: {advice}");
        }
        let (message, _) = error("pull http://me:s3cret@h.example/a/m:latest");
        assert!(
            message.contains("\"http://…@h.example/a/m:latest\"") && !message.contains("s3cret"),
            "{message}"
        );
        let (message, hint) = error("--quiet rm a/..b/c");
        assert_eq!(hint, "`blobd rm --help` explains it");
        assert!(message.starts_with("[REF|PATTERN]...: \"a/..b/c\": reference: "), "{message}");
    }

    #[test]
    fn errors_are_one_line_and_begin_in_lower_case() {
        let lines =
            "nope,show,ls --x,history a b,pull --limit-rate x y,gc --plan-eviction=x,show a --tensors=x";
        for line in lines.split(',') {
            let (message, hint) = error(line);
            assert!(!message.contains('\n') && !hint.contains('\n'), "{line}: {message} {hint}");
            assert!(!message.starts_with(|c: char| c.is_uppercase()), "{line}: {message}");
        }
    }

    #[test]
    fn json_is_recognised_wherever_it_stands_but_not_after_the_end_of_options() {
        let options = |line: &str| {
            let arguments: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            output_options(&arguments)
        };
        assert!(options("blobd ls --nope --json").json && options("blobd --json nope").json);
        assert!(!options("blobd exec --nope -- program --json").json);
        assert!(options("blobd -q nope").quiet);
    }
}
