//! Checks whether a library can be preloaded into a program. Without this check a statically linked
//! program that is given the path of a model would run and report that the file does not exist.
//!
//! Programs whose own calls the library cannot see, static ones and those in Go, may be run for their child processes, such
//! as `ollama serve`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::{env, io};

use blobd_cli_common::usage;

use crate::{ErrorBody, ErrorCode};

/// The most scripts that are interpreters of each other; the kernel allows five.
const MAX_DEPTH: usize = 5;
/// Most programs have about a dozen program headers.
const MAX_HEADERS: u64 = 256;

/// Refuses a program that is not found, or into which no library can be preloaded. One that only its child processes can
/// profit from is refused if an argument is the path of a model.
pub(super) fn check(program: &OsStr, arguments: &[OsString]) -> Result<(), ErrorBody> {
    let names_model = |argument: &OsString| argument.as_bytes().windows(7).any(|part| part == b"/blobd/");
    check_at_depth(program, arguments.iter().any(names_model), 0)
}

fn check_at_depth(program: &OsStr, names_model: bool, depth: usize) -> Result<(), ErrorBody> {
    let path = find(program)?;
    let unreadable = |error: io::Error| {
        ErrorBody::new(ErrorCode::Denied, format!("exec: {}: {error}", path.display()))
            .with_hint("blobd must read the program file to check it; make the file readable for this user")
    };
    let file = File::open(&path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.permissions().mode();
    if mode & 0o6000 != 0 {
        return Err(refused(&path, "is setuid or setgid, and the system ignores LD_PRELOAD for it"));
    }
    match inspect(&file).map_err(unreadable)? {
        Kind::Dynamic => Ok(()),
        Kind::Script(words) if depth < MAX_DEPTH => {
            let [interpreter, arguments @ ..] = &*words else { return Ok(()) };
            check_at_depth(interpreter, names_model, depth + 1)?;
            // `#!/usr/bin/env python3`
            let is_env = Path::new(interpreter).file_name() == Some(OsStr::new("env"));
            let named = arguments.iter().find(|word| !word.as_bytes().starts_with(b"-"));
            named.filter(|_| is_env).map_or(Ok(()), |named| check_at_depth(named, names_model, depth + 1))
        }
        Kind::Script(_) => Err(refused(&path, "has more than five nested interpreters")),
        Kind::Static | Kind::Go if !names_model => Ok(()),
        Kind::Go => {
            Err(refused(&path, "is written in Go, and makes system calls that the library does not see"))
        }
        Kind::Static => Err(refused(&path, "is linked statically, so no library can be preloaded")),
        Kind::Musl => Err(refused(&path, "uses musl, and the preloaded library requires glibc")),
        Kind::Foreign => Err(refused(&path, "is not a program for this machine")),
    }
}

fn refused(path: &Path, reason: &str) -> ErrorBody {
    usage(format!("exec: {}: {reason}", path.display()))
        .with_hint("give the program a real file: `blobd export REF -o model.gguf`")
}

fn find(program: &OsStr) -> Result<PathBuf, ErrorBody> {
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let places: Vec<PathBuf> = if program.as_bytes().contains(&b'/') {
        vec![program.into()]
    } else {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).map(|folder| folder.join(program)).collect()
    };
    places.into_iter().find(is_program).ok_or_else(|| {
        let message = format!("exec: {}: program not found", program.to_string_lossy());
        let body = ErrorBody::new(ErrorCode::NotFound, message);
        body.with_hint("check the name, and whether its directory is in PATH and the file may be executed")
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Dynamic,
    /// Written in Go, and linked dynamically.
    Go,
    Static,
    Musl,
    /// Not ELF, or for another machine.
    Foreign,
    Script(Vec<OsString>),
}

fn inspect(file: &File) -> io::Result<Kind> {
    const LONGEST_LINE: usize = 256;
    let mut head = [0; LONGEST_LINE];
    let length = file.read_at(&mut head, 0)?;
    let head = head.get(..length).unwrap_or_default();
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
        return Ok(Kind::Script(words.map(|word| OsString::from_vec(word.to_vec())).collect()));
    }
    let (Some(kind), Some(machine)) = (head.get(..6), number(head, 18, 2)) else { return Ok(Kind::Foreign) };
    // 64 bits, least significant byte first.
    if kind != b"\x7fELF\x02\x01" || machine != MACHINE {
        return Ok(Kind::Foreign);
    }
    interpreter(file, head)
}

/// Finds out which dynamic linker an ELF file names.
fn interpreter(file: &File, head: &[u8]) -> io::Result<Kind> {
    const INTERPRETER: u64 = 3;
    const NOTE: u64 = 4;
    const LONGEST_PATH: usize = 4096;
    let (mut kind, mut is_go) = (Kind::Static, false);
    let (Some(table), Some(size), Some(count)) =
        (number(head, 32, 8), number(head, 54, 2), number(head, 56, 2))
    else {
        return Ok(Kind::Foreign);
    };
    for index in 0..count.min(MAX_HEADERS) {
        let mut header = [0; 56];
        let Some(offset) = index.checked_mul(size).and_then(|offset| in_file(offset.checked_add(table)?))
        else {
            break;
        };
        if file.read_at(&mut header, offset)? < header.len() {
            break;
        }
        let header_type = number(&header, 0, 4);
        if header_type != Some(INTERPRETER) && header_type != Some(NOTE) {
            continue;
        }
        let (offset, length) = (number(&header, 8, 8), number(&header, 32, 8));
        let length = usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX).min(LONGEST_PATH);
        let mut content = vec![0; length];
        let length = file.read_at(&mut content, offset.and_then(in_file).unwrap_or(0))?;
        content.truncate(length);
        let has = |text: &[u8]| content.windows(text.len()).any(|part| part == text);
        match header_type {
            Some(NOTE) => is_go |= has(GO_NOTE),
            _ if has(b"ld-musl") => kind = Kind::Musl,
            _ => kind = Kind::Dynamic,
        }
    }
    Ok(if is_go && kind == Kind::Dynamic { Kind::Go } else { kind })
}

/// The type and the name of the note with the ID of a Go program's build.
const GO_NOTE: &[u8] = b"\x04\0\0\0Go\0\0";

/// The kernel refuses larger file offsets.
fn in_file(offset: u64) -> Option<u64> {
    i64::try_from(offset).is_ok().then_some(offset)
}

/// A little-endian number of `length` bytes.
fn number(bytes: &[u8], offset: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(offset..offset.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// This machine's `e_machine` in ELF: x86-64 or AArch64.
const MACHINE: u64 = if cfg!(target_arch = "x86_64") { 62 } else { 183 };

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn kind_of(bytes: &[u8]) -> Kind {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        inspect(&file).unwrap()
    }

    fn elf(header_type: u8, path: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18..20].copy_from_slice(&u16::try_from(MACHINE).unwrap().to_le_bytes());
        (file[32], file[54], file[56]) = (64, 56, 1);
        (file[64], file[64 + 8]) = (header_type, 120);
        file[64 + 32..64 + 40].copy_from_slice(&(path.len() as u64).to_le_bytes());
        file.extend(path);
        file
    }

    #[test]
    fn dynamic_linker_determines_the_kind_of_a_program() {
        assert_eq!(kind_of(&elf(3, b"/lib64/ld-linux-x86-64.so.2\0")), Kind::Dynamic);
        assert_eq!(kind_of(&elf(3, b"/lib/ld-musl-x86_64.so.1\0")), Kind::Musl);
        assert_eq!(kind_of(&elf(1, b"")), Kind::Static);
        assert_eq!(kind_of(&elf(4, GO_NOTE)), Kind::Static, "Go programs are linked statically by default");
        assert_eq!(inspect(&File::open("/bin/sh").unwrap()).unwrap(), Kind::Dynamic);
    }

    #[test]
    fn scripts_name_their_interpreter() {
        let words = ["/usr/bin/env", "-S", "python3"].map(OsString::from).to_vec();
        assert_eq!(kind_of(b"#! /usr/bin/env -S\tpython3\nprint()"), Kind::Script(words));
        assert_eq!(kind_of(b"#!"), Kind::Script(vec![]));
    }

    #[test]
    fn other_and_truncated_files_are_never_taken_for_dynamic_programs() {
        let whole = elf(3, b"/lib/ld.so\0");
        for length in 0..64 {
            assert_ne!(kind_of(&whole[..length]), Kind::Dynamic, "{length}");
        }
        let mut other = whole.clone();
        other[18] = 40;
        assert_eq!(kind_of(&other), Kind::Foreign);
        let mut far = whole;
        far[32..40].fill(0xff);
        far[56] = 0xff;
        assert_eq!(kind_of(&far), Kind::Static);
    }

    #[test]
    fn go_program_is_run_unless_it_is_given_the_path_of_a_model() {
        let mut file = vec![0; 64 + 2 * 56];
        file[..120].copy_from_slice(&elf(3, b"")[..120]);
        file[56] = 2;
        for (at, offset, content) in [(64, 176, &b"/lib64/ld-linux-x86-64.so.2\0"[..]), (120, 204, GO_NOTE)] {
            file[at] = if content == GO_NOTE { 4 } else { 3 };
            file[at + 8..at + 16].copy_from_slice(&u64::to_le_bytes(offset));
            file[at + 32..at + 40].copy_from_slice(&(content.len() as u64).to_le_bytes());
        }
        file.extend(b"/lib64/ld-linux-x86-64.so.2\0");
        file.extend(GO_NOTE);
        assert_eq!(kind_of(&file), Kind::Go);
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("ollama");
        std::fs::write(&program, &file).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let check = |argument: &str| check(program.as_os_str(), &[argument.into()]);
        assert!(check("serve").is_ok());
        let error = check("--model=/blobd/tiny.gguf").unwrap_err();
        assert!(error.message.contains("written in Go"), "{error:?}");
    }

    #[test]
    fn unknown_command_is_not_found() {
        let error = check(OsStr::new("blobd-no-such-program"), &[]).unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(check(OsStr::new("sh"), &[]).is_ok());
    }
}
