//! Daemons that do not run, run twice, or serve another store; programs that do not exist.

use std::fs;

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;

use super::Situation;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "BLOBD_SOCKET names nothing",
        command: "BLOBD_SOCKET=/run/wrong.sock blobd ls",
        run: |fixture| fixture.run_by(&Blobd::at_socket(&fixture.path("wrong.sock")), &["ls"]),
        code: 8,
        happened: "wrong.sock",
        why: "nothing listens there",
        to_do: "start the daemon there with `blobd serve`",
    },
    Situation {
        did: "the socket of a daemon that was killed",
        command: "BLOBD_SOCKET=… blobd ls",
        run: |fixture| {
            let mut daemon = TestDaemon::start();
            daemon.kill();
            fixture.run_by(&Blobd::at_socket(&daemon.socket()), &["ls"])
        },
        code: 8,
        happened: "blobd.sock",
        why: "nothing listens there",
        to_do: "start the daemon there with `blobd serve`",
    },
    Situation {
        did: "a second daemon on the same store",
        command: "blobd serve",
        run: |fixture| {
            let daemon = TestDaemon::start();
            let (root, socket) = (daemon.root().display().to_string(), fixture.path("second"));
            fixture.run(&["serve", "--root", &root, "--socket", socket.to_str().unwrap()])
        },
        code: 4,
        happened: "held by",
        why: "only one process at a time can have a store open",
        to_do: "connect to that one, or stop it first",
    },
    Situation {
        did: "a second daemon on the same socket",
        command: "blobd serve --root other",
        run: |fixture| {
            let daemon = TestDaemon::start();
            fixture.run(&["serve", "--socket", daemon.socket().to_str().unwrap()])
        },
        code: 4,
        happened: "in use by another daemon",
        why: "in use by another daemon",
        to_do: "choose another --socket",
    },
    Situation {
        did: "a socket whose daemon serves another store",
        command: "BLOBD_SOCKET=… blobd rm m --root /srv/models",
        run: |fixture| {
            let daemon = TestDaemon::start();
            fixture.with_models(&["m"]).run(&["rm", "m", "--socket", daemon.socket().to_str().unwrap()])
        },
        code: 2,
        happened: ": serves ",
        why: ", not ",
        to_do: "leave out --root or --socket (BLOBD_ROOT, BLOBD_SOCKET)",
    },
    Situation {
        did: "mounting without a daemon",
        command: "blobd mount models/",
        run: |fixture| {
            fs::create_dir(fixture.path("models")).unwrap();
            fixture.run(&["mount", "models"])
        },
        code: 3,
        happened: "mount: ",
        why: "no daemon is running",
        to_do: "start it with `blobd serve`",
    },
    Situation {
        did: "mounting on a directory with files",
        command: "blobd mount models/",
        run: |fixture| {
            let daemon = TestDaemon::start();
            fs::create_dir(fixture.path("models")).unwrap();
            fixture.write("models/notes.txt", "");
            fixture.run_by(&daemon.command(), &["mount", "models"])
        },
        code: 2,
        happened: "models",
        why: "not empty",
        to_do: "empty directory",
    },
    Situation {
        did: "running a program that does not exist",
        command: "blobd exec -- lama-cli",
        run: |fixture| fixture.run(&["exec", "--", "lama-cli"]),
        code: 3,
        happened: "exec: lama-cli",
        why: "program not found",
        to_do: "check the name, and whether its directory is in PATH",
    },
    Situation {
        did: "ending leases of a process that has none",
        command: "blobd release 4194303",
        run: |fixture| fixture.run(&["release", "4194303"]),
        code: 3,
        happened: "process 4194303",
        why: "no leases",
        to_do: "`blobd ps` lists them",
    },
];
