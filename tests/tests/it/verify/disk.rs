//! Damage on the disk while the page cache is correct: a verification through the page cache would not find it.
//! Needs root, a loop device and ext4; skipped without them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{blob_path, check_blobs, names};
use blobd_tests::temp_dirs::disk_directory;
use tempfile::TempDir;

use super::{TENSOR, corrupt, tensor_digest};

const BLOCK_BYTES: u64 = 4096;

/// An ext4 file system in a file, mounted as long as this lives.
struct LoopDisk {
    folder: TempDir,
}

impl LoopDisk {
    fn mount() -> Result<Self, String> {
        let folder = disk_directory();
        let (image, point) = (folder.path().join("image"), folder.path().join("mounted"));
        File::create(&image).and_then(|file| file.set_len(64 << 20)).map_err(|error| error.to_string())?;
        fs::create_dir(&point).map_err(|error| error.to_string())?;
        run("mkfs.ext4", &["-q", "-F", "-b", "4096", path(&image)])?;
        run("mount", &["-o", "loop", path(&image), path(&point)])?;
        Ok(Self { folder })
    }

    fn point(&self) -> PathBuf {
        self.folder.path().join("mounted")
    }

    /// Inverts a byte of the first block of a file, on the disk and nowhere else.
    fn flip_on_disk(&self, file: &Path, offset: u64) {
        let extents = run("filefrag", &["-v", path(file)]).unwrap();
        // `   0:        0..       1:      34304..     34305:      2: …`
        let first = extents.lines().find(|line| line.trim_start().starts_with("0:")).expect(&extents);
        let physical = first.split(':').nth(2).and_then(|range| range.split("..").next()).expect(first);
        let place = physical.trim().parse::<u64>().expect(first) * BLOCK_BYTES + offset;
        let image = File::options().read(true).write(true).open(self.folder.path().join("image")).unwrap();
        let (mut byte, mut expected) = ([0], [0]);
        image.read_exact_at(&mut byte, place).unwrap();
        File::open(file).unwrap().read_exact_at(&mut expected, offset).unwrap();
        assert_eq!(byte, expected, "this is not the file's block");
        image.write_all_at(&[!byte[0]], place).unwrap();
        image.sync_all().unwrap();
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &[path(&self.point())]) {
            eprintln!("{error}");
        }
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a printable path")
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

#[test]
fn damage_under_a_correct_page_cache_is_found_and_repaired_from_it() {
    let disk = match LoopDisk::mount() {
        Ok(disk) => disk,
        Err(reason) => return skipped(format_args!("{reason}")),
    };
    let root = disk.point().join("store");
    let blobd = Blobd::at_root(&root);
    let model = ModelFile::dense(1);
    let file = model.write_to(disk.folder.path(), "m.gguf");
    blobd.run(["import", path(&file)]).succeeds();
    let digest = tensor_digest(&blobd, "m", TENSOR);
    let blob = blob_path(&root, &digest);
    let cached = || format!("sha256:{}", sha256(&fs::read(&blob).unwrap()));
    // Now it is in the page cache, and stays there.
    assert_eq!(cached(), digest);
    let _open = File::open(&blob).unwrap();
    disk.flip_on_disk(&blob, 100);
    assert_eq!(cached(), digest, "the page cache is correct");

    let [found] = corrupt(&blobd.line("verify --json").exits_with(5)).try_into().unwrap();
    assert_eq!(found["digest"], digest);
    assert!(!blob.exists());
    assert_eq!(names(&root.join("quarantine")).len(), 1);
    // The bytes are still in the page cache, so that no registry is needed.
    let [found] = corrupt(&blobd.line("verify --repair --json").succeeds()).try_into().unwrap();
    assert_eq!((found["repaired"].as_bool(), found.get("fetched_bytes")), (Some(true), None));
    blobd.line("verify").succeeds();
    check_blobs(&root);
    assert!(blobd.run(["export", "m", "-o", "-"]).stdout == model.bytes());
}
