//! Writes one of the states that a crash may leave to a directory.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::choices::CrashChoices;
use super::tree::{Content, FileNode, Id, Node, Tree};

/// The possible contents of a file that was written since its last sync, the durable version first.
#[derive(Clone, Copy)]
enum Found {
    Durable,
    Zeros,
    Beginning,
    All,
}

/// Creates `target` with a state after a crash.
pub(super) fn lay_out(tree: &Tree, choices: &mut CrashChoices, target: &Path) {
    fs::create_dir(target).unwrap();
    // A file with two names stays one file.
    let mut files: BTreeMap<Id, PathBuf> = BTreeMap::new();
    let mut unvisited = vec![(0, target.to_path_buf())];
    while let Some((directory, path)) = unvisited.pop() {
        let Node::Dir(names) = tree.node(directory) else { continue };
        for (name, versions) in names {
            let Some(id) = choices.choose(versions).flatten() else { continue };
            let path = path.join(name);
            match (tree.node(id), files.get(&id)) {
                (Node::Dir(_), _) => {
                    fs::create_dir(&path).unwrap();
                    unvisited.push((id, path));
                }
                (Node::File(_), Some(first)) => fs::hard_link(first, path).unwrap(),
                (Node::File(file), None) => {
                    lay_out_file(file, &tree.shadow(id), choices, &path);
                    files.insert(id, path);
                }
            }
        }
    }
}

fn lay_out_file(file: &FileNode, now: &Path, choices: &mut CrashChoices, path: &Path) {
    let found = match file.content {
        Content::All => Found::All,
        Content::Older(_) | Content::Nothing => choices
            .choose(&[Found::Durable, Found::Zeros, Found::Beginning, Found::All])
            .unwrap_or(Found::All),
    };
    let mode = choices.choose(&[file.durable_mode, file.mode]).unwrap_or(file.mode);
    if matches!(found, Found::All) && mode == file.mode {
        return fs::hard_link(now, path).unwrap();
    }
    write_found(found, file, now, choices, path);
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn write_found(found: Found, file: &FileNode, now: &Path, choices: &mut CrashChoices, path: &Path) {
    let mut to = File::create(path).unwrap();
    let from = File::open(now).unwrap();
    let length = from.metadata().unwrap().len();
    let copied = match (found, &file.content) {
        (Found::Durable, Content::Older(content)) => io::copy(&mut content.as_slice(), &mut to),
        (Found::Durable, _) => Ok(0),
        (Found::Zeros, _) => to.set_len(length).map(|()| length),
        (Found::Beginning, _) => io::copy(&mut from.take(choices.below(length + 1)), &mut to),
        (Found::All, _) => io::copy(&mut from.take(length), &mut to),
    };
    copied.unwrap();
}
