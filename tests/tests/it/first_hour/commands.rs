//! Every command of the README, in the order in which a person might try them.

use super::user::Step;

const fn step(line: &'static str, shows: &'static [&'static str]) -> Step {
    Step { line, code: 0, shows }
}

/// Without a daemon first; then with one.
pub(super) const STEPS: &[Step] = &[
    step("blobd help", &["pull", "import", "Examples:"]),
    step("blobd help pull", &["Usage: blobd pull"]),
    step("blobd doctor", &["ok"]),
    step("blobd ls", &["no models"]),
    step("blobd pull llama3:8b", &["llama3:8b", "downloaded"]),
    step("blobd pull llama3:8b", &["llama3:8b"]),
    step("blobd pull --dry-run llama3:70b", &["llama3:70b"]),
    step("blobd import models/*.gguf", &["tuned-8b", "other-8b", "shared"]),
    step("blobd ls", &["NAME", "llama3:8b", "tuned-8b"]),
    step("blobd ls -q", &["llama3:8b"]),
    step("blobd show llama3:8b", &["llama3:8b", "architecture"]),
    step("blobd show tuned-8b --tensors", &["output.weight"]),
    step("blobd diff llama3:8b tuned-8b", &["output.weight"]),
    step("blobd tensor llama3:8b output.weight", &["output.weight", "mean"]),
    step("blobd fit llama3:8b --vram 8GiB", &["fits", "yes"]),
    step("blobd df", &["total", "saved"]),
    step("blobd df -v", &["llama3:8b"]),
    step("blobd tag llama3:8b mine:1", &["mine:1"]),
    step("blobd rename mine:1 mine:2", &["mine:2"]),
    step("blobd promote mine:2", &["whole in the writable store already"]),
    Step { line: "blobd push mine:2", code: 2, shows: &["takes no models of users"] },
    step("blobd pin mine:2", &["mine:2"]),
    step("blobd unpin mine:2", &["mine:2"]),
    step("blobd edit llama3:8b edited:1 --set general.name=Mine", &["edited:1"]),
    step("blobd export tuned-8b -o tuned.gguf", &["tuned.gguf"]),
    step("blobd save tuned-8b -o tuned.tar", &["tuned.tar", "1 model"]),
    step("blobd inventory -o all.inventory", &["files and tensors of"]),
    step("blobd load tuned.tar", &["tuned-8b", "0 B new"]),
    step("cmp tuned.gguf models/tuned-8b.gguf", &[]),
    step("blobd verify", &["no damage"]),
    step("blobd history tuned-8b", &["import"]),
    step("blobd log --model tuned-8b", &["import", "ok"]),
    step("blobd outdated", &["1 current, 0 outdated"]),
    step("blobd partial ls", &["no unfinished downloads"]),
    step("blobd rm --keep 7d mine:2", &["mine:2"]),
    step("blobd ls --trash", &["mine:2"]),
    step("blobd undelete mine:2", &["mine:2"]),
    step("blobd rm mine:2", &["removed mine:2"]),
    step("blobd gc --dry-run", &["nothing to delete"]),
    step("blobd gc", &["nothing to delete"]),
    step("blobd reindex", &["the index was right"]),
    Step {
        line: "blobd login localhost:1 --user me --password-stdin < /dev/null",
        code: 2,
        shows: &["empty"],
    },
    Step { line: "blobd logout localhost:1", code: 3, shows: &["no credentials"] },
    step("blobd completions bash | grep complete", &["complete -F", "blobd"]),
    step("blobd man pull | grep '^.TH'", &["BLOBD-PULL"]),
    step("blobd serve > serve.log 2>&1 & echo $! > daemon.pid", &[]),
    step("until test -S \"$(sed -n 's/.* on //p' serve.log)\"; do sleep 0.1; done", &[]),
    step("blobd ls", &["llama3:8b"]),
    step("blobd ps", &["no model is open"]),
    step("blobd warm llama3:8b", &["llama3:8b"]),
    step("blobd health", &["ok", "space", "responds"]),
    step("blobd limit", &["no limit"]),
    step("blobd limit 10MB", &["10 MB/s"]),
    step("blobd limit off", &["no limit"]),
    step("blobd config show", &["config.toml", "space.quota", "not set", "uses these settings"]),
    Step { line: "blobd release llama3:8b", code: 3, shows: &["no leases"] },
    step("blobd exec -- head -c 4 /blobd/tuned-8b.gguf", &["GGUF"]),
    // Whether it may mount depends on the machine; it says what is missing.
    step(
        "mkdir shown; timeout -s INT 5 blobd mount shown > mount.log 2>&1; ! grep -q panicked mount.log",
        &[],
    ),
    step(
        "blobd web --no-open > web.log & until grep -q once web.log || ! kill -0 $!; do sleep 0.1; done; \
         kill $!; wait; cat web.log",
        &["http://127.0.0.1:", "#", "works once"],
    ),
    step("blobd pull llama3:8b-instruct", &["llama3:8b-instruct"]),
    step("blobd demo | tail -3", &["same SHA-256"]),
];
