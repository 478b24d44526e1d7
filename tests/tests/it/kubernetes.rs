//! The manifests in `docs/KUBERNETES.md`: they agree with each other, with the image and with the units, and their
//! commands and their configuration do what the document says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::store_dir::{blob_path, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde::Deserialize as _;
use serde_json::Value as Json;

use super::multi_user::can_be_others;

const DOCUMENT: &str = include_str!("../../../docs/KUBERNETES.md");
const IMAGE: &str = include_str!("../../../packaging/Containerfile");
const SOCKET_UNIT: &str = include_str!("../../../systemd/system/blobd.socket");

/// The documents in the YAML below `<!-- test: NAME -->`.
fn manifests(name: &str) -> Vec<Json> {
    let after = DOCUMENT.split(&format!("<!-- test: {name} -->\n```yaml\n")).nth(1).expect(name);
    let text = after.split("```").next().unwrap();
    serde_norway::Deserializer::from_str(text).map(|found| Json::deserialize(found).unwrap()).collect()
}

struct Cluster {
    config: String,
    /// The pod of the daemon, and the only container of it that stays.
    pod: Json,
    container: Json,
    /// The pod of an engine.
    engine: Json,
}

fn cluster() -> Cluster {
    let [mut config, mut daemon_set]: [Json; 2] = manifests("daemon").try_into().unwrap();
    let Json::String(config) = config["data"]["config.toml"].take() else { panic!("no configuration") };
    let pod = daemon_set["spec"]["template"].take();
    assert_eq!(daemon_set["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]);
    let container = pod["spec"]["containers"][0].clone();
    Cluster { config, pod, container, engine: manifests("engine").remove(0) }
}

/// The value of `NAME=VALUE` in a line of the image or of a unit, quotes left out.
fn value_of<'a>(text: &'a str, name: &str) -> &'a str {
    let after = text.split(&format!("{name}=")).nth(1).expect(name);
    after.split_whitespace().next().unwrap().trim_matches('"')
}

/// Where the volume of this name is in a container.
fn mount_path<'a>(container: &'a Json, volume: &str) -> &'a str {
    let mounts = container["volumeMounts"].as_array().unwrap();
    mounts.iter().find(|mount| mount["name"] == volume).expect(volume)["mountPath"].as_str().unwrap()
}

fn host_path<'a>(pod: &'a Json, volume: &str) -> &'a str {
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    volumes.iter().find(|found| found["name"] == volume).expect(volume)["hostPath"]["path"].as_str().unwrap()
}

#[test]
fn manifests_agree_with_the_image_and_the_units() {
    let Cluster { config, pod, container, engine } = cluster();
    let uid: u32 = IMAGE.split("--uid ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let context = &container["securityContext"];
    assert_eq!((&context["runAsUser"], &context["runAsGroup"]), (&uid.into(), &uid.into()));
    assert!(config.contains(&format!("socket_group = {uid}\n")), "{config}");
    assert_eq!(engine["spec"]["securityContext"]["supplementalGroups"][0], uid);
    assert_ne!(engine["spec"]["securityContext"]["runAsUser"], uid, "the owner of the blobs can change them");

    let socket = Path::new(value_of(IMAGE, "BLOBD_SOCKET"));
    assert_eq!(socket, Path::new(value_of(SOCKET_UNIT, "ListenStream")));
    let directory = socket.parent().unwrap().to_str().unwrap();
    let mounted = &engine["spec"]["containers"][0];
    assert_eq!(mounted["env"][0]["name"], "BLOBD_SOCKET");
    assert_eq!(Path::new(mounted["env"][0]["value"].as_str().unwrap()), socket);
    for container in [&container, &pod["spec"]["initContainers"][0], mounted] {
        assert_eq!(mount_path(container, "socket"), directory);
    }
    assert_eq!([host_path(&pod, "socket"), host_path(&engine, "socket")], [directory; 2]);
    assert_eq!(mount_path(&container, "store"), value_of(IMAGE, "BLOBD_ROOT"));
    assert_eq!(mount_path(&container, "config"), format!("{}/blobd", value_of(IMAGE, "XDG_CONFIG_HOME")));

    let unit = include_str!("../../../systemd/system/blobd.service");
    let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace >= value_of(unit, "TimeoutStopSec").parse().unwrap());
}

/// The exit code of a probe, by which the kubelet judges, and its output, which the kubelet would log.
fn probe(container: &Json, name: &str, socket: &Path) -> (i32, Vec<u8>) {
    let words: Vec<_> = container[name]["exec"]["command"].as_array().expect(name).iter().collect();
    assert_eq!(words[0], "blobd");
    let run = Blobd::at_socket(socket).run(words[1..].iter().map(|word| word.as_str().unwrap()));
    (run.code, run.stdout)
}

#[test]
fn probes_distinguish_a_degraded_daemon_from_one_that_does_not_respond() {
    let container = cluster().container;
    let mut daemon = TestDaemon::start();
    let socket = daemon.socket();
    let probes = || {
        let names = ["startupProbe", "livenessProbe", "readinessProbe"];
        let (codes, output): (Vec<_>, Vec<_>) =
            names.into_iter().map(|name| probe(&container, name, &socket)).unzip();
        assert!(output.concat().is_empty());
        codes
    };
    assert_eq!(probes(), [0, 0, 0]);
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    let shown = daemon.command().line("show m --json").succeeds().json();
    flip_byte(&blob_path(daemon.root(), shown["tensors"][0]["digest"].as_str().unwrap()), 3);
    daemon.command().line("verify m").exits_with(5);
    assert_eq!(probes(), [0, 0, 1], "it is degraded");
    daemon.stop();
    assert_eq!(probes(), [3, 3, 3], "it does not answer");
}

/// Prepares the directories, and starts the daemon on them, as the containers of the pod do. Its socket's directory is
/// the returned daemon's folder.
fn start(cluster: &Cluster, config: &Path) -> TestDaemon {
    let folder = tmpfs_directory();
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let command = cluster.pod["spec"]["initContainers"][0]["command"].as_array().unwrap();
    let words = command.iter().map(|word| {
        let word = word.as_str().unwrap();
        let word = word.replace("/var/lib/blobd", &text(folder.path().join("store")));
        word.replace("/run/blobd", &text(folder.path().to_path_buf()))
    });
    let words: Vec<_> = words.collect();
    command::run(Command::new(&words[0]).args(&words[1..])).succeeds();
    let context = &cluster.container["securityContext"];
    assert!(context["allowPrivilegeEscalation"] == false && context["capabilities"]["drop"][0] == "ALL");
    let [user, group] = [&context["runAsUser"], &context["runAsGroup"]];
    let (user, group) = (format!("--reuid={user}"), format!("--regid={group}"));
    let variable = format!("BLOBD_CONFIG={}", config.display());
    let drop = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups"];
    let wrapper = [&["setpriv", "--pdeathsig=KILL", &user, &group][..], &drop, &["env", &variable]].concat();
    TestDaemon::start_under(&wrapper, folder)
}

#[test]
fn containers_of_the_manifest_serve_an_engine_and_refuse_root_of_a_pod() {
    if !can_be_others() {
        return;
    }
    let cluster = cluster();
    // Like a ConfigMap, it belongs to root.
    let config = tempfile::NamedTempFile::new().unwrap();
    fs::write(config.path(), &cluster.config).unwrap();
    command::run(Command::new("chmod").arg("0644").arg(config.path())).succeeds();
    let daemon = start(&cluster, config.path());
    let socket = daemon.socket();

    let run_as = |user: &Json, groups: &Json, line: &str| {
        let identity = [format!("--reuid={user}"), format!("--regid={user}"), format!("--groups={groups}")];
        let mut command = Command::new("setpriv");
        command.args(identity).arg(programs::blobd()).args(line.split_whitespace());
        Blobd::at_socket(&socket).prepare(&mut command);
        command::run(&mut command)
    };
    let context = &cluster.container["securityContext"];
    let owner = (&context["runAsUser"], &context["runAsGroup"]);
    let model = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    run_as(owner.0, owner.1, &format!("import {} --name m", model.display())).succeeds();

    let pod = &cluster.engine["spec"]["securityContext"];
    let (engine, groups) = (&pod["runAsUser"], &pod["supplementalGroups"][0]);
    run_as(engine, groups, "show m").succeeds();
    let wrapper = format!("setpriv --reuid={engine} --regid={engine} --groups={groups} --");
    let wrapper: Vec<_> = wrapper.split(' ').collect();
    drop(Reader::try_open(&wrapper, &socket, &["m"]).unwrap());
    run_as(engine, engine, "show m").exits_with(7);
    let root = Json::from(0);
    run_as(&root, &root, "show m").succeeds();
    for line in ["gc", "rm m"] {
        run_as(&root, &root, line).exits_with(7);
    }
    run_as(owner.0, owner.1, "gc").succeeds();

    let report = run_as(owner.0, owner.1, "doctor --json").json();
    let checks = report["checks"].as_array().unwrap().iter();
    let is_of_the_machine = |check: &Json| check["name"] == "file system";
    let wrong = |check: &&Json| {
        (check["status"] == "warning" || check["status"] == "failure") && !is_of_the_machine(check)
    };
    let wrong: Vec<_> = checks.filter(wrong).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}
