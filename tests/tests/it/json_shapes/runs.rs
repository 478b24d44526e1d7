//! Every command with the options that change its output, on a store in many states.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::reader::Reader;
use blobd_tests::registry::Fault;
use blobd_tests::store_dir::{blob_path, flip_byte, names};
use blobd_tests::wait::eventually;
use rustix::process::Signal;

use super::imports::pushes;
use super::sample::Sample;
use super::session::{Session, until_document, until_document_and};
use super::signatures::signatures;

/// Runs everything on the empty store in `root`, in an order in which one command prepares the next.
pub(super) fn run_all(session: &mut Session, sample: &Sample, root: &Path) {
    empty_store(session);
    adding(session, sample);
    showing(session, sample);
    numbers(session, sample);
    changing(session, sample);
    some_failing(session, sample);
    eviction(session, sample, root);
    interrupted(session, sample);
    pulling_partly(session, sample, root);
    pulling_twice(session, sample);
    pulling_from_a_repository(session, sample);
    removing(session, sample, root);
    damage(session, root);
    evicting(session, sample);
    credentials(session, sample);
    lower_stores(session, sample);
    explaining(session, sample);
}

/// Commands without a daemon above two lower stores, one of which is not there.
fn lower_stores(session: &mut Session, sample: &Sample) {
    if session.has_daemon {
        return;
    }
    let [below, absent] = ["below", "absent"].map(|name| sample.path(name));
    let folder = Path::new(&below).with_extension("models");
    fs::create_dir_all(&folder).unwrap();
    for seed in [71, 72] {
        let file = ModelFile::dense_of(seed, 1, 64).write_to(&folder, &format!("below{seed}.gguf"));
        Blobd::at_root(Path::new(&below)).run(["import", file.to_str().unwrap()]).succeeds();
    }
    let uid = rustix::process::geteuid().as_raw();
    let soft = format!("[quotas]\nusers = {{ {uid} = {{ soft = '1 B' }} }}");
    let both = sample.config("lower.toml", &format!("lower = [{below:?}, {absent:?}]\n{soft}"));
    let gone = sample.config("gone.toml", &format!("lower = [{absent:?}]"));
    let line = |session: &mut Session, form: &str, rest: &str| {
        session.line(form, &format!("{rest} --config {}", both.display()));
    };
    line(session, "ls", "");
    line(session, "promote --dry-run", "below71");
    line(session, "promote", "below71");
    line(session, "promote", "below71");
    line(session, "history", "below71");
    line(session, "tag", "below72 alias72");
    line(session, "gc --dry-run", "");
    let config = gone.to_str().unwrap();
    session.fails_after_output("verify", ["verify", "alias72", "--config", config], "not_found");
    session.line("rm", "--yes below71 alias72");
    session.line("log", "--limit 1000 --until 2100-01-01");
}

fn explaining(session: &mut Session, sample: &Sample) {
    for shell in ["bash", "zsh", "fish"] {
        session.line("completions", shell);
    }
    session.line("man", "");
    session.line("man", "pull");
    session.ok("man --dir DIR", ["man", "--dir", &sample.path("man1")]);
    session.line("help", "");
    session.line("help", "ls");
    session.line("version", "");
    configuration(session, sample);
}

fn configuration(session: &mut Session, sample: &Sample) {
    const TEXT: &str = "insecure_registries = [\"lan:5000\"]\nsocket = \"/nonexistent/s\"\n\
        [mirrors]\n\"a.example\" = \"https://b.example\"\n\"c.example\" = [\"https://d.example\"]\n";
    let config = sample.config("settings.toml", TEXT);
    session.line("config show", "");
    session.line("config show", &format!("--config {}", config.display()));
    session.line("config show", "--socket /nonexistent/s");
    let (root, socket) = (sample.path("bare"), sample.path("bare.sock"));
    let mut serve = Blobd::at_root(root.as_ref()).command();
    serve.env_remove("BLOBD_CONFIG").args(["serve", "--socket", &socket]).stderr(Stdio::null());
    let mut without_file = serve.spawn().unwrap();
    eventually("the daemon listens", || Path::new(&socket).exists());
    session.line("config show", &format!("--socket {socket}"));
    without_file.kill().unwrap();
    without_file.wait().unwrap();
}

fn empty_store(session: &mut Session) {
    for form in
        ["ls", "ls --trash", "df", "ps", "gc", "gc --dry-run", "verify", "reindex", "limit", "doctor", "demo"]
    {
        session.line(form, "");
    }
    // Without a store there is a note, and nothing to ask registries for.
    let mut doctor = Blobd::at_root(Path::new("/nonexistent/blobd")).command();
    doctor.args(["--json", "doctor", "--registries"]);
    session.record_options(&doctor);
    session.succeeded("doctor", &command::run(&mut doctor));
}

fn adding(session: &mut Session, sample: &Sample) {
    let [base, moe] = ["base", "moe"].map(|name| sample.path(&format!("{name}.gguf")));
    session.ok("import", ["import", &base, &moe]);
    for name in ["other", "separate", "odd", "raw", "bare", "llama", "large", "fresh", "spare", "orphan"] {
        let path = sample.path(&format!("{name}.gguf"));
        session.ok("import", ["import", &path, "--name", name]);
    }
    session.ok("import", ["import", &sample.path("seeing/seeing.gguf"), "--with-sidecars"]);
    session.line("rm", "seeing");
    let url = sample.registry.url();
    session.ok("pull --dry-run", ["pull", "--dry-run", &format!("{url}/me/chat:1")]);
    session.ok("pull", ["pull", &format!("{url}/me/chat:1")]);
    session.ok("pull", ["pull", &format!("{url}/me/images:1"), "--name", "images", "--limit-rate", "1GB"]);
    session.ok("pull", ["pull", &format!("{url}/big-00001-of-00002.gguf"), "--name", "big"]);
    session.ok("pull --dry-run", ["pull", "--dry-run", &format!("{url}/files/tiny.gguf"), "--name", "tiny"]);
    session.ok("pull --dry-run", ["pull", "--dry-run", &format!("{url}/me/relative:1")]);
    session.ok("pull", ["pull", &format!("{url}/me/relative:1"), &format!("{url}/me/chat:1")]);
    session.ok("pull", ["pull", &format!("{url}/me/indexed:1")]);
    session.ok("pull", ["pull", &format!("{url}/me/packed:1"), "--name", "packed"]);
    session.line("show", "packed");
    session.line("rm", "packed");
    session.line("outdated", "");
    session.ok("pull", ["pull", "--all"]);
    pushes(session, sample);
    signatures(session, sample);
    // The second time nothing changes.
    session.line("tag", "base alias");
    session.line("tag", "base alias");
    session.line("tag", "moe alias --force");
    session.line("pin", "alias");
    session.line("tag", "base alias --force");
    session.ok("import", ["import", "--name", "alias", "--force", &base]);
    session.ok("import", ["import", "--name", "alias", "--force", &sample.path("fresh.gguf")]);
    session.line("unpin", "alias");
    session.ok("pull", ["pull", &format!("{url}/files/tiny.gguf"), "--name", "alias", "--force"]);
    session.line("tag", "base alias --force");
    for _ in 0..2 {
        session.ok("pull", ["pull", &format!("{url}/files/tagged.gguf"), "--name", "tagged"]);
    }
    session.line("pin", "alias fresh");
    session.line("unpin", "alias");
    session.line("ls", "");
    session.line("ls", "chat");
    session.line("ls", "--sort used --reverse --filter pinned=false --filter family=llama --format table");
    session.line("df", "");
    session.line("df -v", "");
    session.line("df --users", "");
}

fn showing(session: &mut Session, sample: &Sample) {
    let chat = sample.registry.name("me/chat:1");
    for name in ["base", "moe", "separate", "odd", "raw", "bare", "llama", "images", "big", &chat] {
        session.line("show", &format!("{name} --stored"));
        session.line("show", &format!("{name} --remote"));
        session.line("show --layers", &format!("{name} --tensors --metadata"));
        session.line("show --full", name);
        session.line("show --residency", name);
    }
    let shards = ["sharded-00001-of-00002.gguf", "sharded-00002-of-00002.gguf"];
    for (file, shard) in shards.iter().zip(ModelFile::dense(3).shards(2)) {
        fs::write(sample.path(file), shard.bytes()).unwrap();
    }
    for file in ["moe.gguf", "llama.gguf", shards[0]] {
        session.ok("show", ["show", &sample.path(file)]);
    }
    let adapter = ModelFile::empty().with("general.type", "adapter");
    let described = adapter
        .clone()
        .with("adapter.type", "lora")
        .with("adapter.lora.alpha", 16_f32)
        .with("general.base_model.count", 1_u32)
        .with("general.base_model.0.name", "Base");
    for (file, model) in [("adapter.gguf", adapter), ("described-adapter.gguf", described)] {
        fs::write(sample.path(file), model.bytes()).unwrap();
        session.ok("show", ["show", &sample.path(file)]);
    }
    let rule = "[[policy.rules]]\naction = \"deny\"\nname = \"base\"\nreason = \"not reviewed\"";
    let denying = sample.config("denying.toml", rule);
    session.line("show", &format!("base --config {}", denying.display()));
    session.ok("show", ["show", &sample.registry.name("me/half:1")]);
    session.ok("diff", ["diff", "base", &sample.registry.name("me/half:1")]);
    let unpulled = ["half", "lost"].map(|name| sample.registry.name(&format!("me/{name}:1")));
    session.ok("diff", ["diff", &unpulled[0], &unpulled[1]]);
    session.line("diff", "base other --stored");
    session.ok("show", ["show", &format!("{}/files/tiny.gguf", sample.registry.url())]);
    for form in
        ["show --template", "show --license", "show --system", "show --parameters", "show --modelfile"]
    {
        session.line(form, &chat);
    }
    session.line("show --hash", "base");
    session.ok("show --hash", ["show", "--hash=all", "base"]);
    checked_hashes(session, sample);
}

fn checked_hashes(session: &mut Session, sample: &Sample) {
    let listed = session.blobd.line("show base --hash=sha256").succeeds().text();
    let (right, part, wrong) = (sample.path("right"), sample.path("part"), sample.path("wrong"));
    fs::write(&right, &listed).unwrap();
    let head: String = listed.lines().take(2).map(|line| format!("{line}\n")).collect();
    fs::write(&part, head).unwrap();
    let other = session.blobd.line("show other --hash=sha256").succeeds().text();
    fs::write(&wrong, other.replace("other", "base")).unwrap();
    session.ok("show --check", ["show", "--check", &right, "base"]);
    session.ok("show --check", ["show", "--check", &part, "base"]);
    session.fails_after_output("show --check", ["show", "--check", &wrong, "base"], "corrupt");
}

fn numbers(session: &mut Session, sample: &Sample) {
    for pair in ["base other", "base alias", "moe separate", "other base", "odd llama", "base big"] {
        session.line("diff", pair);
        session.line("diff --values", pair);
    }
    session.line("diff", "base other --remote");
    session.line("diff", &format!("llama {}", sample.registry.name("me/chat:1")));
    session.line("diff", &format!("{} llama", sample.registry.name("me/chat:1")));
    session.line("tensor", "base output.weight --stats");
    session.line("tensor", "odd odd.weight");
    session.line("tensor --expert", "2 moe blk.0.ffn_up_exps.weight");
    session.line("tensor --values", "0..4 odd odd.weight");
    session.line("tensor --values", "0..4 base output.weight");
    session.line("tensor --values", "0..4 moe blk.0.ffn_up_exps.weight --expert 1");
    for form in ["tensor --dump -o FILE", "tensor --npy -o FILE"] {
        let option = form.split(' ').nth(1).unwrap();
        let file = sample.path("tensor.out");
        session.ok(form, ["tensor", "base", "output.weight", option, "--force", "-o", &file]);
    }
    let chat = sample.registry.name("me/chat:1");
    session.line("tensor --file", &format!("draft {chat} output_norm.weight"));
    session.ok("fit", ["fit", &sample.path("llama.gguf"), "--layers"]);
    session.line("fit", "moe --cpu-moe --remote");
    session.line("fit", "separate");
    session.line("fit", &format!("{chat} --ctx 0"));
    session.line("fit", &format!("{chat} --ctx 512 --batch 64 --parallel 2"));
    session.line(
        "fit",
        "llama --stored --basis llama.cpp --cache-type-k q8_0 --cache-type-v q8_0 --ctx 1000000",
    );
    session.line("fit --vram", "64GiB llama");
    session.line("fit --vram", "64GiB moe --cpu-moe");
    let run = session.run(["fit", "--vram", "1KiB", "llama"]);
    assert_eq!(run.code, 1, "it does not fit, which is no error");
    session.succeeded("fit --vram", &Run { code: 0, ..run });
    session.line("warm", "moe --component model");
    for (index, options) in
        [&["-o"][..], &["--merge", "-o"], &["--split-max-size", "2MB", "-o"]].iter().enumerate()
    {
        let folder = sample.path(&format!("out-{index}"));
        fs::create_dir_all(&folder).unwrap();
        let model = if index == 2 { "large" } else { "big" };
        session
            .ok("export", ["export", model].iter().copied().chain(options.iter().copied()).chain([&*folder]));
    }
    session.ok("export", ["export", "llama", "-o", &sample.path("llama.gguf")]);
    session.ok("export", ["export", "llama", "--force", "-o", &sample.path("template")]);
    let archive = sample.path("saved.tar");
    session.ok("save", ["save", "llama", "--force", "-o", &archive]);
    session.ok("load --list", ["load", &archive, "--list"]);
    session.ok("load", ["load", &archive, "--force", "--name", "llama"]);
    let inventory = sample.path("inventory");
    session.ok("inventory", ["inventory", "--force", "-o", &inventory]);
    session.ok("save", ["save", "llama", "--given", &inventory, "--force", "-o", &archive]);
    let file = sample.path("big-endian.gguf");
    session.ok("export", ["export", "base", "--endian", "big", "--alignment", "64", "-o", &file]);
    session.ok(
        "export",
        ["export", &chat, "--component", "template", "--force", "-o", &sample.path("template")],
    );
}

fn changing(session: &mut Session, sample: &Sample) {
    let chat = sample.registry.name("me/chat:1");
    session.line("edit --dry-run", "base edited --set general.name=new --unset general.url");
    session.line("edit", "base edited --set general.name=new --unset general.url");
    session.line("edit", "base edited --set general.name=new --unset general.url");
    session.line("edit", "base edited --set general.name=newer --force");
    session.line("edit", &format!("{chat} c1 --template x"));
    session.line("edit", &format!("{chat} c2 --template-layer y"));
    session.line("edit", "base c3 --template-layer y");
    session.line("rm", "c1 c2 c3 edited");
    session.line("history", "edited");
}

/// Commands for several things of which one fails.
fn some_failing(session: &mut Session, sample: &Sample) {
    let [fresh, broken] = ["fresh.gguf", "broken.gguf"].map(|name| sample.path(name));
    session.fails_after_output("import", ["import", &fresh, &broken], "invalid_input");
    session.fails_after_output("import", ["import", "/absent", &broken], "internal");
    for form in ["pin", "unpin", "verify"] {
        session.fails_after_output(form, [form, "absent", "fresh"], "not_found");
    }
    session.line("rm --keep", "7d spare");
    session.fails_after_output("undelete", ["undelete", "absent", "spare"], "not_found");
    let [here, absent] = ["me/chat:1", "me/absent:1"].map(|name| sample.registry.name(name));
    session.fails_after_output("pull", ["pull", &absent, &here], "not_found");
    session.fails_after_output("pull --dry-run", ["pull", "--dry-run", &absent, &here], "not_found");
    session.line("pin", "fresh");
    let own = rustix::process::geteuid().as_raw();
    session.line("log", &format!("--failed --verb verify --since 1d --user {own}"));
    session.line("log", "--model fresh --limit 1000");
}

fn eviction(session: &mut Session, sample: &Sample, root: &Path) {
    session.line("gc --plan-eviction", "");
    if session.has_daemon {
        return;
    }
    // Garbage would be enough for the plan.
    session.line("gc", "");
    plan_evictions(session, sample, "pullable");
    // As if it were not known where the models are from.
    let (origins, aside) = (root.join("origins"), root.with_extension("origins"));
    let (histories, histories_aside) = (root.join("history"), root.with_extension("histories"));
    fs::rename(&origins, &aside).unwrap();
    fs::rename(&histories, &histories_aside).unwrap();
    session.line("ls", "");
    plan_evictions(session, sample, "all");
    fs::remove_dir_all(&origins).ok();
    fs::rename(&aside, &origins).unwrap();
    fs::remove_dir_all(&histories).ok();
    fs::rename(&histories_aside, &histories).unwrap();
    // As of a store of an earlier version.
    fs::rename(&histories, &aside).unwrap();
    session.line("history", "base");
    fs::rename(&aside, &histories).unwrap();
}

fn plan_evictions(session: &mut Session, sample: &Sample, policy: &str) {
    let lines = format!("[space]\nquota = \"100 MiB\"\nevict = \"{policy}\"");
    let config = sample.config(&format!("{policy}.toml"), &lines);
    let config = config.to_str().unwrap();
    session.line("df", &format!("--config {config}"));
    session.ok("gc --plan-eviction", ["gc", "--plan-eviction=10KB", "--config", config]);
}

/// Commands that evict models, because the quota is used up.
fn evicting(session: &mut Session, sample: &Sample) {
    session.line("pin", "moe large base");
    if session.has_daemon {
        return;
    }
    let lost = sample.registry.name("me/lost:1");
    let file = sample.path("orphan.gguf");
    for (form, arguments) in [
        ("import", &["import", &*file, "--name", "evicting"][..]),
        ("pull", &["pull", &*lost]),
        ("edit", &["edit", "large", "large-2", "--set", "general.name=odd"]),
        ("tag", &["tag", "moe", "a/b:c"]),
    ] {
        let used = session.line("df", "")["used_bytes"].clone();
        if form == "pull" {
            for policy in ["never", "all"] {
                let lines = format!("[space]\nquota = \"{used} B\"\nevict = \"{policy}\"");
                let config = sample.config("plan.toml", &lines);
                let config = config.to_str().unwrap();
                session.ok("pull --dry-run", ["pull", "--dry-run", &*lost, "--config", config]);
            }
        }
        let config = sample.config("tight.toml", &format!("[space]\nquota = \"{used} B\"\nevict = \"all\""));
        let done = session.ok(form, arguments.iter().copied().chain(["--config", config.to_str().unwrap()]));
        if form == "tag" {
            session.line("history", done["evicted"][0]["name"].as_str().unwrap());
            session.line("log", "--verb evict --result ok");
        }
    }
}

/// A model with the components that belong to it, and without them.
fn pulling_from_a_repository(session: &mut Session, sample: &Sample) {
    // A daemon has its own configuration, without a mirror of the hub.
    if session.has_daemon {
        return;
    }
    let config = sample.config("hub.toml", &format!("[mirrors]\n\"hf.co\" = \"{}\"", sample.registry.url()));
    let config = ["--config", config.to_str().unwrap()];
    let source = "hf.co/me/seeing:Q4_K_M";
    session.ok("pull --dry-run", ["pull", "--dry-run", source].into_iter().chain(config));
    session.ok("pull", ["pull", source, "--projector", "F16"].into_iter().chain(config));
    session.ok("pull", ["pull", source, "--no-projector", "--no-draft"].into_iter().chain(config));
    session.line("rm", source);
}

/// Downloads that end in the middle: one is resumed, one is abandoned.
fn pulling_partly(session: &mut Session, sample: &Sample, root: &Path) {
    pull_partly(session, sample, root, "half");
    pull_partly(session, sample, root, "lost");
    session.line("df", "");
    session.line("partial ls", "");
    let half = sample.registry.name("me/half:1");
    session.ok("pull --dry-run", ["pull", "--dry-run", &half]);
    session.ok("pull", ["pull", &half]);
}

/// A byte of a tensor and a byte of the configuration are wrong at first.
fn pulling_twice(session: &mut Session, sample: &Sample) {
    let reference = sample.registry.name("me/damaged:1");
    let place = format!("/cdn/{}", super::layer_digest(&session.blobd, &reference));
    sample.registry.add_fault(&place, 1, Fault::FlipInFile(600 << 10));
    let config = format!("/cdn/sha256:{}", sha256(br#"{"model_family":"damaged"}"#));
    sample.registry.add_fault(&config, 1, Fault::FlipInFile(3));
    session.ok("pull", ["pull", &reference]);
    sample.registry.clear_faults();
}

fn pull_partly(session: &mut Session, sample: &Sample, root: &Path, name: &str) {
    let reference = sample.registry.name(&format!("me/{name}:1"));
    let place = format!("/cdn/{}", super::layer_digest(&session.blobd, &reference));
    sample.registry.add_fault(&place, 1, Fault::CutAfter(600 << 10));
    sample.registry.add_fault(&place, usize::MAX, Fault::Status(410));
    session.fails_after_output("pull", ["pull", &reference], "upstream");
    sample.registry.clear_faults();
    assert!(!names(&root.join("partial")).is_empty());
}

fn removing(session: &mut Session, sample: &Sample, root: &Path) {
    session.line("rm --keep", "7d spare");
    session.line("ls --trash", "");
    session.line("ls --trash", "nothing");
    session.line("df", "");
    session.line("undelete", "spare");
    session.line("rm --keep", "7d spare");
    session.line("tag", "moe spare");
    session.line("undelete", "spare --name restored");
    session.line("rm", "restored");
    session.line("rm --keep", "7d spare");
    session.line("tag", "base spare");
    session.line("undelete", "spare --force");
    session.line("undo", "spare");
    session.line("undelete", "spare --force");
    session.line("edit", "base undone --set general.name=undone");
    session.line("undo", "");
    session.line("tag", "moe alias-2");
    session.line("undo --dry-run", "");
    session.line("undo", "");
    session.line("tag", "moe alias-2");
    session.line("rename", "alias-2 alias-3");
    session.line("undo", "");
    session.line("rename", "alias-2 alias-3");
    session.line("rename", "alias-3 alias --force");
    for name in ["alias", "alias-3", "spare", "base"] {
        session.line("history", name);
    }
    session.line("rm --dry-run", "alias base moe* --unused --older-than 1d");
    session.fails_after_output("rm --dry-run", ["rm", "--dry-run", "absent", "alias"], "not_found");
    session.fails_after_output("rm", ["rm", "absent", "alias"], "not_found");
    session.line("rm --keep", "0s spare");
    session.line("partial rm", "--older-than 30d");
    session.line("partial rm", "--all");
    pull_partly(session, sample, root, "lost");
    abandon_downloads(root);
    session.line("partial ls", "");
    fs::create_dir_all(root.join("staging/left-over")).unwrap();
    fs::write(root.join("blobs").join(format!("sha256-{}", "0".repeat(64))), b"of no model").unwrap();
    // A recipe of a model whose name is lost.
    session.line("edit", "base lost --set general.name=lost");
    fs::remove_dir_all(root.join("manifests/registry.ollama.ai/library/lost")).unwrap();
    session.line("gc --dry-run", "");
    session.line("gc", "");
}

/// Makes unfinished downloads look as if they were last continued eight days ago.
fn abandon_downloads(root: &Path) {
    let then = SystemTime::now() - Duration::from_secs(8 * 24 * 60 * 60);
    for name in names(&root.join("partial")) {
        let journal = fs::File::options().write(true).open(root.join("partial").join(name).join("journal"));
        journal.unwrap().set_modified(then).unwrap();
    }
}

fn damage(session: &mut Session, root: &Path) {
    for (model, form) in [("fresh", "verify"), ("relative", "verify --repair")] {
        let model = session.blobd.run(["ls", model, "--json"]).succeeds().json()["models"][0]["name"].clone();
        let model = model.as_str().unwrap();
        let shown = session.line("show", model);
        let tensor = shown["tensors"][0]["digest"].as_str().unwrap();
        flip_byte(&blob_path(root, tensor), 77);
        if form == "verify" {
            session.fails_after_output("verify", ["verify", model], "corrupt");
            session.line("ls", "");
            session.line("df", "");
            session.fails_after_output("doctor", ["doctor"], "internal");
            if session.has_daemon {
                session.line("health", "");
                session.fails_after_output("health", ["health", "--strict"], "internal");
            } else {
                session.line_fails("not_found", "health");
            }
        } else {
            session.line(form, model);
        }
    }
    session.line("gc --quarantine", "");
}

fn credentials(session: &mut Session, sample: &Sample) {
    let config = sample.config("login.toml", "");
    let config = config.to_str().unwrap().to_owned();
    let mut login = |arguments: &[&str]| {
        let mut command = session.blobd.command();
        command.arg("--json").arg("login").args(arguments).args(["--config", &config]);
        session.record_options(&command);
        command.stdin(fs::File::open(sample.path("secret")).unwrap());
        let run = blobd_tests::command::run(&mut command);
        session.succeeded("login", &run);
    };
    fs::write(sample.path("secret"), "secret\n").unwrap();
    login(&["registry.example.org", "--user", "me", "--password-stdin"]);
    login(&["hf.co", "--token-stdin"]);
    session.ok("logout", ["logout", "hf.co", "--config", &config]);
}

/// Commands that need a daemon: sessions of other processes, its limit, a mount.
pub(super) fn with_clients(session: &mut Session, daemon: &TestDaemon) {
    session.ok("limit RATE", ["limit", "20MB"]);
    session.line("limit", "");
    session.line("health", "");
    session.ok("limit RATE", ["limit", "off"]);
    let reader = Reader::open(&daemon.socket(), "llama");
    session.line("ps", "");
    session.line("df", "");
    session.line("release", &reader.pid().to_string());
    let second = Reader::open(&daemon.socket(), "llama");
    session.line("rm", "llama");
    session.line("df", "");
    session.line("ps", "");
    session.line("gc", "");
    warm_and_locked(session);
    page(session);
    mounted(session, daemon);
    session.line("release", "llama");
    drop(second);
    session.line("gc", "");
}

/// `web` goes on until it is stopped.
fn page(session: &mut Session) {
    let run = until_document(session, &["web", "--port", "0", "--no-open", "--read-only"], Signal::INT);
    session.succeeded("web", &run);
}

/// `warm --lock` goes on until it is stopped.
fn warm_and_locked(session: &mut Session) {
    let run = until_document(session, &["warm", "moe", "--lock", "4KiB"], Signal::TERM);
    session.succeeded("warm --lock", &run);
}

/// `mount` goes on until it is unmounted.
fn mounted(session: &mut Session, daemon: &TestDaemon) {
    let directory = daemon.scratch().join("mount");
    fs::create_dir(&directory).unwrap();
    let device = fs::File::options().read(true).write(true).open("/dev/fuse");
    if device.is_err() || !rustix::process::geteuid().is_root() {
        skipped("mount: needs /dev/fuse and root");
        session.outputs.insert("blobd mount".to_owned(), (b"{}".to_vec(), false));
        return;
    }
    let run = until_document(session, &["mount", directory.to_str().unwrap()], Signal::TERM);
    session.check("mount", &run);
}

/// Ctrl-C stops a pull, which says that it can be resumed.
fn interrupted(session: &mut Session, sample: &Sample) {
    let reference = sample.registry.name("me/half:1");
    sample.registry.add_fault("/cdn/", usize::MAX, Fault::StallAfter(64 << 10, Duration::from_secs(600)));
    let arguments = ["pull", &reference, "--name", "stopped"];
    let listed = |blobd: &Blobd| blobd.line("ps --json").succeeds().json()["pulls"][0].clone();
    let run = until_document_and(session, &arguments, Signal::INT, |session| {
        // Without a daemon, this process asks the one that pulls.
        eventually("the pull is listed with its size", || listed(&session.blobd)["total_bytes"].is_u64());
        session.line("ps", "");
    });
    session.check("pull", &run);
    session.check_failure(&run, "interrupted");
    // A daemon notices later than the test that the client is gone. Until then the faults have to stop its download.
    eventually("the pull has ended", || listed(&session.blobd).is_null());
    sample.registry.clear_faults();
}
