//! Quotas in commands without a daemon.

use std::fs;

use blobd_client::protocol::space::UserUsage;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;

#[test]
fn commands_without_a_daemon_use_the_entry_of_their_user() {
    let folder = tmpfs_directory();
    let (config, uid) = (folder.path().join("config.toml"), rustix::process::geteuid().as_raw());
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    let import = |name: &str| blobd.run(["import", path.to_str().unwrap(), "--name", name, "--json"]);
    fs::write(&config, "[quotas.default]\nhard = '1000 B'\n").unwrap();
    import("a").succeeds();
    fs::write(&config, format!("[quotas.users.{uid}]\nsoft = '1000 B'\nhard = '2000 B'\n")).unwrap();
    let usage = blobd.line("df --users --json").succeeds().json();
    let usage: UserUsage = serde_json::from_value(usage).unwrap();
    let own = usage.users.iter().find(|user| user.uid == Some(uid)).unwrap();
    let quota = own.quota.unwrap();
    assert_eq!((quota.soft_bytes, quota.hard_bytes), (Some(1000), Some(2000)), "{own:?}");
    let other = ModelFile::dense(2).write_to(folder.path(), "o.gguf");
    let refused = blobd.run(["import", other.to_str().unwrap(), "--json"]).exits_with(6).error();
    assert_eq!(refused.code.name(), "over_quota", "{refused}");
}
