//! Mistakes, each with the expected error: what happened, and what to do next.

use super::user::Step;

const fn step(line: &'static str, code: i32, shows: &'static [&'static str]) -> Step {
    Step { line, code, shows }
}

/// The steps that prepare the store for the mistakes.
pub(super) const PREPARATION: &[Step] = &[
    step("blobd pull llama3:8b", 0, &[]),
    step("blobd import models/tuned-8b.gguf", 0, &[]),
    step("blobd tag llama3:8b kept:1 && blobd pin kept:1", 0, &[]),
    step("echo text > notes.txt; head -c 100000 models/tuned-8b.gguf > half.gguf", 0, &[]),
];

pub(super) const STEPS: &[Step] = &[
    // Names of commands that people know from elsewhere.
    step("blobd", 2, &["blobd pull", "blobd help"]),
    step("blobd pul llama3:8b", 2, &["pull"]),
    step("blobd list", 0, &["llama3:8b"]),
    step("blobd stop llama3:8b", 2, &["blobd release"]),
    step("blobd run llama3:8b", 2, &["blobd exec"]),
    step("blobd upload llama3:8b", 2, &["blobd push"]),
    step("blobd help nothere", 2, &["nothere: no such command", "`blobd help` lists"]),
    // Names of models.
    step("blobd pull", 2, &["no argument given", "usage: blobd pull"]),
    step("blobd pull llama3:9b", 3, &["llama3:9b", "not found"]),
    step("blobd pull 'llama 3'", 2, &["llama 3"]),
    step("blobd show lama3:8b --stored", 3, &["llama3:8b"]),
    step("blobd show llama3", 0, &["llama3 is llama3:8b"]),
    step("blobd rm llama3", 3, &["did you mean llama3:8b?"]),
    step("blobd rm nothere:1", 3, &["nothere:1", "blobd ls"]),
    step("blobd rm kept:1", 7, &["pinned", "blobd unpin kept:1"]),
    step("blobd tag tuned-8b kept:1", 7, &["pinned", "--force"]),
    step("blobd tag llama3:8b", 2, &["no argument given", "usage: blobd tag"]),
    step("blobd rename nothere:1 x:1", 3, &["nothere:1"]),
    step("blobd undelete tuned-8b", 3, &["trash"]),
    step("blobd diff llama3:8b", 2, &["no argument given", "usage: blobd diff"]),
    step("blobd tensor llama3:8b output.weights", 3, &["output.weight"]),
    // Files.
    step("blobd import nothere.gguf", 3, &["nothere.gguf"]),
    step("blobd import notes.txt", 1, &["notes.txt", "GGUF"]),
    step("blobd import half.gguf", 1, &["half.gguf"]),
    step("mkdir nothing; blobd import nothing", 1, &["nothing", "no weights", "name the folder"]),
    step(
        "blobd import notes.txt models/other-8b.gguf",
        1,
        &["notes.txt", "other-8b", "1 of 2 files was not imported"],
    ),
    step("blobd export tuned-8b -o notes.txt", 4, &["notes.txt", "--force"]),
    step("blobd export tuned-8b -o -", 2, &["terminal"]),
    step("blobd export tuned-8b -o nothere/x.gguf", 3, &["nothere"]),
    step("blobd mount notes.txt", 3, &["blobd serve"]),
    // Values.
    step("blobd fit llama3:8b --vram 8", 2, &["8MiB or 8GiB"]),
    step("blobd fit llama3:8b --vram lots", 2, &["lots", "write for example 200GiB"]),
    step("blobd limit fast", 2, &["fast"]),
    step("blobd pull llama3:8b --limit-rate fast", 2, &["fast"]),
    step("blobd edit llama3:8b x:1 --set name", 2, &["KEY=VALUE"]),
    step("blobd ls --frmat json", 2, &["--format"]),
    step("blobd completions tcsh", 2, &["bash", "zsh", "fish"]),
    step("blobd rm --older-than soon", 2, &["soon", "30d"]),
    // Places.
    step("blobd --socket nothere.sock ls", 8, &["nothere.sock", "blobd serve"]),
    step("blobd --root notes.txt ls", 1, &["notes.txt"]),
    step("blobd --root /proc/blobd ls", 3, &["/proc/blobd", "contains no store"]),
    step("blobd --config nothere.toml ls", 2, &["nothere.toml"]),
    step("echo 'rot = \"/x\"' > bad.toml; blobd --config bad.toml ls", 2, &["bad.toml:1", "rot", "root"]),
    step("echo 'root = ' > bad.toml; blobd --config bad.toml ls", 2, &["bad.toml:1"]),
    step(
        "printf '[space]\\nquota = -5\\n' > bad.toml; blobd --config bad.toml ls",
        2,
        &["bad.toml:2:9", "quota", "expected"],
    ),
    // Processes.
    step("blobd release 999999", 3, &["999999"]),
    step("blobd exec", 2, &["no argument given", "usage: blobd exec"]),
    step("blobd exec -- nothere", 3, &["nothere"]),
    step("blobd ls 2>/dev/full >/dev/full", 6, &[]),
    step("blobd show nothere 2>&1 | head -0", 0, &[]),
    step("blobd login", 2, &["no argument given", "usage: blobd login"]),
    step("blobd logout nothere.example", 3, &["nothere.example"]),
];
