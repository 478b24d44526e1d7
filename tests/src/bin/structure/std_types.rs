//! What is known of the standard library: enough of `Option`, `Result`, collections and iterators to type the calls
//! that are chained to them.

use super::types::{Known, unwrapped};

/// Methods of the standard library and of other crates with names of several words that types of this workspace have too.
pub(crate) const COMMON: [&str; 14] = [
    "and_then",
    "as_bytes",
    "as_mut",
    "as_path",
    "as_ref",
    "as_slice",
    "as_str",
    "get_mut",
    "is_dir",
    "is_empty",
    "is_file",
    "read_to_end",
    "to_vec",
    "wait_while",
];

/// The arguments of a type of this name.
pub(crate) fn arguments(known: &Known, of: &str) -> Vec<Known> {
    match unwrapped(known) {
        Known::Foreign(name, inner) if name == of => inner.clone(),
        _ => Vec::new(),
    }
}

pub(crate) fn argument(known: &Known, place: usize) -> Known {
    match unwrapped(known) {
        Known::Foreign(_, inner) => inner.get(place).cloned().unwrap_or_default(),
        _ => Known::Unknown,
    }
}

fn is_map(name: &str) -> bool {
    matches!(name, "HashMap" | "BTreeMap")
}

/// The type of a collection's or iterator's elements.
pub(crate) fn element(known: &Known) -> Known {
    match unwrapped(known) {
        Known::Foreign(name, inner) if is_map(name) => Known::Foreign("()".to_owned(), inner.clone()),
        known => argument(known, 0),
    }
}

pub(crate) fn result_of(callable: &Known) -> Known {
    match unwrapped(callable) {
        Known::Foreign(name, parts) if name.starts_with("Fn") => parts.last().cloned().unwrap_or_default(),
        _ => Known::Unknown,
    }
}

fn option(of: Known) -> Known {
    Known::Foreign("Option".to_owned(), vec![of])
}

fn iterator(of: Known) -> Known {
    Known::Foreign("Iterator".to_owned(), vec![of])
}

fn is_option(known: &Known) -> bool {
    matches!(known, Known::Foreign(name, _) if matches!(name.as_str(), "Option" | "Result"))
}

/// The parameters of the closure that a method of the standard library calls.
pub(crate) fn parameters_of_std(receiver: &Known, name: &str) -> Vec<Known> {
    match name {
        "fold" | "try_fold" | "scan" => vec![Known::Unknown, element(receiver)],
        "map_or_else" | "unwrap_or_else" | "or_else" | "map_err" | "inspect_err" => Vec::new(),
        "get_or_init" | "or_insert_with" | "then" => Vec::new(),
        "retain" if matches!(unwrapped(receiver), Known::Foreign(name, _) if is_map(name)) => {
            vec![argument(receiver, 0), argument(receiver, 1)]
        }
        _ => vec![element(receiver), element(receiver)],
    }
}

/// The result of a method of the standard library, given that of the closure that is passed to it.
pub(crate) fn result_of_std(receiver: &Known, name: &str, closure: Known) -> Known {
    let receiver = unwrapped(receiver);
    let map = matches!(receiver, Known::Foreign(name, _) if is_map(name));
    match name {
        "clone" | "to_owned" | "as_ref" | "as_mut" | "as_deref" | "as_deref_mut" | "borrow"
        | "into_inner" | "to_vec" | "filter" | "inspect" | "inspect_err" | "map_err" | "ok" | "ok_or"
        | "ok_or_else" | "or" | "or_else" | "cloned" | "copied" | "rev" | "skip" | "chain" | "peekable"
        | "by_ref" | "as_slice" | "lock" | "read" | "write" | "skip_while" | "take_while" | "step_by"
        | "fuse" | "collect" => receiver.clone(),
        "take" => receiver.clone(),
        "unwrap" | "expect" | "unwrap_or" | "unwrap_or_else" | "unwrap_or_default" if is_option(receiver) => {
            argument(receiver, 0)
        }
        "unwrap" | "expect" | "unwrap_or_else" => receiver.clone(),
        "map" if is_option(receiver) => option(closure),
        "and_then" => closure,
        "map_or" | "map_or_else" | "is_some_and" => closure,
        "map" => iterator(closure),
        "filter_map" | "flat_map" | "flatten" | "map_while" => iterator(element(&closure)),
        "iter" | "into_iter" | "iter_mut" | "drain" => iterator(element(receiver)),
        "values" | "values_mut" | "into_values" => iterator(argument(receiver, 1)),
        "keys" | "into_keys" => iterator(argument(receiver, 0)),
        "get" | "get_mut" | "remove" | "insert" if map => option(argument(receiver, 1)),
        "entry" if map => argument(receiver, 1),
        "or_default" | "or_insert" | "or_insert_with" => receiver.clone(),
        "enumerate" => iterator(Known::Foreign("()".to_owned(), vec![Known::Unknown, element(receiver)])),
        "get_or_init" => argument(receiver, 0),
        "next" | "first" | "last" | "pop" | "get" | "get_mut" | "find" | "min_by_key" | "max_by_key"
        | "pop_front" | "pop_back" | "nth" | "peek" | "first_mut" | "last_mut" | "min" | "max" => {
            option(element(receiver))
        }
        "find_map" => closure,
        "then" | "then_some" => option(closure),
        _ => Known::Unknown,
    }
}
