//! Checks that `include/blobd_client.h` matches the public items in `src`. `BLESS=1 cargo test -p blobd-client-c`
//! generates it. The codes of errors are those of `docs/PROTOCOL.md`, which a test of blobd-client compares with
//! its `ErrorCode`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The modules with public items, in the order of the header.
const MODULES: [&str; 4] = ["lib", "metadata", "weights", "fit"];

const TOP: &str =
    "/* blobd's client library: opens a model from a blobd daemon and maps its tensors without a
 * copy. Link with -lblobd_client; a static library also takes -lpthread -ldl -lm.
 *
 * The library has no global state and starts no thread. Any number of threads may use a model at
 * once; close it only when no thread uses it any more. Each model, image and weights that a function
 * gets comes from the function that opens it, and was not closed. Strings are UTF-8.
 *
 * Generated from client/capi/src: change that and run `BLESS=1 cargo test -p blobd-client-c`. */
#ifndef BLOBD_CLIENT_H
#define BLOBD_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif
";
const BOTTOM: &str = "
#ifdef __cplusplus
}
#endif

#endif
";

#[test]
fn header_matches_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = |module: &str| fs::read_to_string(root.join(format!("src/{module}.rs"))).unwrap();
    let generated = header(&MODULES.map(source).join("\n"));
    let path = root.join("include/blobd_client.h");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &generated).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == generated, "{}: differs from src; run this test with BLESS=1", path.display());
}

#[test]
fn codes_of_the_header_are_the_exit_codes_of_the_protocol() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = fs::read_to_string(root.join("include/blobd_client.h")).unwrap();
    let (_, error) = header.split_once("typedef struct blobd_error {").unwrap();
    let (comment, _) = error.split_once("int code;").unwrap();
    let numbers = comment.split(|c: char| !c.is_ascii_digit());
    let listed: Vec<u8> = numbers.filter_map(|number| number.parse().ok()).collect();
    let protocol = fs::read_to_string(root.join("../../docs/PROTOCOL.md")).unwrap();
    let table = protocol.lines().skip_while(|line| !line.starts_with("| code |")).skip(2);
    let rows = table.take_while(|line| line.starts_with('|'));
    // 0 is no error.
    let mut expected = vec![0];
    expected.extend(rows.map(|row| row.split('|').nth(4).unwrap().trim().parse::<u8>().unwrap()));
    expected.sort_unstable();
    expected.dedup();
    assert!(expected.len() > 1, "the table of error codes was not found");
    assert_eq!(listed, expected);
}

/// The header: all public items of the source, in the same order.
fn header(source: &str) -> String {
    let mut out = TOP.to_owned();
    let mut lines = source.lines();
    let mut comment = Vec::new();
    // The function that a macro makes of each of its rows, `blobd_name: type;`.
    let mut template = String::new();
    while let Some(line) = lines.next().map(str::trim) {
        let row = line.strip_suffix(';').filter(|row| row.starts_with("blobd_"));
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text.trim().to_owned());
        } else if let Some((name, of)) = row.and_then(|row| row.split_once(": ")) {
            write_comment(&mut out, "", &std::mem::take(&mut comment));
            write_function(&mut out, &template.replace("$name", name).replace("$type", of));
        } else if let Some(rest) = line.strip_prefix("pub struct ") {
            write_comment(&mut out, "", &std::mem::take(&mut comment));
            match rest.split_once('(') {
                Some((name, _)) => writeln!(out, "typedef struct {0} {0};", snake(name)).unwrap(),
                None => write_struct(&mut out, &snake(rest.trim_end_matches(" {")), &mut lines),
            }
        } else if let Some(rest) = line.strip_prefix("pub ").filter(|rest| rest.contains("extern \"C\" fn "))
        {
            let mut text = rest.to_owned();
            while !text.ends_with('{') {
                text += lines.next().expect("a function has a body").trim();
            }
            if text.contains("$name") {
                template = text;
            } else {
                write_comment(&mut out, "", &std::mem::take(&mut comment));
                write_function(&mut out, &text);
            }
        } else if !line.starts_with('#') {
            comment.clear();
        }
    }
    out + BOTTOM
}

fn write_struct<'l>(out: &mut String, name: &str, lines: &mut impl Iterator<Item = &'l str>) {
    writeln!(out, "typedef struct {name} {{").unwrap();
    let mut comment = Vec::new();
    for line in lines.map(str::trim).take_while(|line| *line != "}") {
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text.trim().to_owned());
        } else if let Some(field) = line.strip_prefix("pub ") {
            write_comment(out, "    ", &std::mem::take(&mut comment));
            let (field, of) = field.trim_end_matches(',').split_once(": ").unwrap();
            writeln!(out, "    {};", declaration(of, field)).unwrap();
        }
    }
    writeln!(out, "}} {name};").unwrap();
}

fn write_function(out: &mut String, text: &str) {
    let (_, text) = text.split_once("extern \"C\" fn ").unwrap();
    let (name, rest) = text.split_once('(').unwrap();
    let (arguments, result) = rest.trim_end_matches('{').rsplit_once(')').unwrap();
    let argument = |argument: &str| {
        let (name, of) = argument.trim().split_once(": ").unwrap();
        declaration(of, name)
    };
    let arguments: Vec<_> =
        arguments.split(',').filter(|text| !text.trim().is_empty()).map(argument).collect();
    let result = result.trim().strip_prefix("-> ").unwrap_or("()");
    writeln!(out, "{}({});", declaration(result, name), arguments.join(", ")).unwrap();
}

fn write_comment(out: &mut String, indent: &str, lines: &[String]) {
    let lines: Vec<_> = lines.iter().map(|line| line.replace("# Safety", "Requirements:")).collect();
    let text = lines.join(&format!("\n{indent} * ")).replace(" * \n", " *\n");
    let between = if indent.is_empty() { "\n" } else { "" };
    writeln!(out, "{between}{indent}/* {text} */").unwrap();
}

/// The declaration of a name with its type in C.
fn declaration(of: &str, name: &str) -> String {
    if let Some((element, length)) =
        of.strip_prefix('[').and_then(|of| of.trim_end_matches(']').split_once("; "))
    {
        return format!("{}[{length}]", declaration(element, name));
    }
    if let Some(target) = of.strip_prefix("*const ").or_else(|| of.strip_prefix('&')) {
        return declaration(target, &format!("*{name}")).replacen("", "const ", 1);
    }
    if let Some(target) = of.strip_prefix("*mut ") {
        return declaration(target, &format!("*{name}"));
    }
    let of = match of {
        "()" | "c_void" => "void",
        "c_int" => "int",
        "c_char" => "char",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "f32" => "float",
        "f64" => "double",
        "usize" => "size_t",
        "bool" => "bool",
        own if own.starts_with("Blobd") => return format!("{} {name}", snake(own)),
        other => panic!("{other}: this type has no equivalent in C"),
    };
    format!("{of} {name}")
}

/// `BlobdModel` is `blobd_model` in C.
fn snake(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(letter.to_lowercase());
    }
    out
}
