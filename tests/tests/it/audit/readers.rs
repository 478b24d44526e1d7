//! Requests that read the log: how many of them there may be, and what they may see.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Stdio};

use blobd_client::protocol::request::PinParams;
use blobd_tests::daemon::TestDaemon;
use serde_json::Value as Json;

use super::super::access::{ADMIN, CONFIG, Shared, User, can_be_others};
use super::{eventual_records, import, is_of_daemon};

/// A follower that has printed the record of an import.
struct Follower(Child, BufReader<std::process::ChildStdout>);

impl Follower {
    fn start(shared: &Shared, user: User) -> Self {
        let mut command = shared.command(user, "log --follow --json");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut follower = Self(child, output);
        assert_eq!(follower.next()["verb"], "import");
        follower
    }

    fn next(&mut self) -> Json {
        loop {
            let mut line = String::new();
            self.1.read_line(&mut line).unwrap();
            let record = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
            if !is_of_daemon(&record) {
                return record;
            }
        }
    }

    /// What it prints before it ends by itself.
    fn rest(&mut self) -> (Option<i32>, String, String) {
        let (mut output, mut errors) = (String::new(), String::new());
        self.1.read_to_string(&mut output).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.0.wait().unwrap().code(), output, errors)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_user_has_few_followers_and_others_are_not_affected() {
    if !can_be_others() {
        return;
    }
    const OTHER: User = User { uid: 64005, groups: ADMIN.groups };
    let shared = Shared::start(CONFIG);
    shared.import();
    eventual_records(&shared.daemon.command(), "", &["import ok"]);
    let mut followers: Vec<Follower> = (0..4).map(|_| Follower::start(&shared, ADMIN)).collect();
    let error = shared.run(ADMIN, "log --follow --json").exits_with(4).error();
    assert_eq!(error.code.name(), "busy", "{error}");
    assert!(error.message.contains("uid 64004"), "{error}");
    shared.run(ADMIN, "log").succeeds();
    Follower::start(&shared, OTHER);
    shared.run(ADMIN, "pin m").succeeds();
    assert!(followers.iter_mut().all(|follower| follower.next()["verb"] == "pin"));
    followers.pop();
    blobd_tests::wait::eventually("the place of a follower that has ended is free", || {
        shared.request(ADMIN, "GET /v1/version").0 == 200 && is_free(&shared)
    });
}

fn is_free(shared: &Shared) -> bool {
    let mut child = shared.command(ADMIN, "log --follow --json").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    line.contains("\"verb\"")
}

#[test]
fn follower_that_loses_its_rights_sees_no_more_records() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start(CONFIG);
    shared.import();
    eventual_records(&shared.daemon.command(), "", &["import ok"]);
    let mut follower = Follower::start(&shared, ADMIN);
    // It may still read, but only its own records.
    shared.reload("socket_mode = \"0666\"\n[access]\nread = [\"@64200\"]\nadmin = []\n");
    shared.daemon.command().line("pin m").succeeds();
    shared.run(ADMIN, "rm m").exits_with(7);
    let own = follower.next();
    assert_eq!((&own["uid"], &own["result"]), (&ADMIN.uid.into(), &"denied".into()), "{own}");
    shared.reload("socket_mode = \"0666\"\n[access]\nread = []\nadmin = []\n");
    shared.daemon.command().line("unpin m").succeeds();
    let (code, output, errors) = follower.rest();
    assert_eq!((code, output.as_str()), (Some(7), ""), "{errors}");
    assert!(errors.contains("denied"), "{errors}");
}

/// Many records are sent in several batches, in the right order.
#[test]
fn all_records_are_sent_in_order() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    import(&blobd, daemon.scratch(), 1, "m");
    let mut expected = vec!["import ok"];
    let client = daemon.client();
    for number in 0..300 {
        let reference = "m".parse().unwrap();
        client.pin(&PinParams { reference, pinned: number % 2 == 0 }).unwrap();
        expected.push(if number % 2 == 0 { "pin ok" } else { "unpin ok" });
    }
    eventual_records(&blobd, "", &expected);
    let last = blobd.line("log --json -n 150").succeeds().text();
    assert_eq!(last.lines().count(), 150);
}
