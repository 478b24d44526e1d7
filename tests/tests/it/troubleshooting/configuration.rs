//! Wrong configuration files.

use super::Situation;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "an unknown key",
        command: "blobd ls",
        run: |fixture| fixture.configured("[space]\nquotta = \"1 GiB\"\n", &["ls"]),
        code: 2,
        happened: "config.toml:2:1",
        why: "unknown key \"quotta\"",
        to_do: "did you mean space.quota?",
    },
    Situation {
        did: "a key in the wrong section",
        command: "blobd ls",
        run: |fixture| fixture.configured("quota = \"1 GiB\"\n", &["ls"]),
        code: 2,
        happened: "config.toml:1:1",
        why: "unknown key \"quota\"",
        to_do: "space.quota belongs to the section [space]",
    },
    Situation {
        did: "a value of the wrong type",
        command: "blobd ls",
        run: |fixture| fixture.configured("single_user = 1\n", &["ls"]),
        code: 2,
        happened: "config.toml:1:15: single_user",
        why: "expected true or false, found 1",
        to_do: "expected true or false",
    },
    Situation {
        did: "a size that is not a number",
        command: "blobd ls",
        run: |fixture| fixture.configured("[space]\nquota = \"much\"\n", &["ls"]),
        code: 2,
        happened: "config.toml:2:9: space.quota",
        why: "found \"much\"",
        to_do: "expected a size such as",
    },
    Situation {
        did: "eviction without a limit",
        command: "blobd ls",
        run: |fixture| fixture.configured("[space]\nevict = \"all\"\n", &["ls"]),
        code: 2,
        happened: "space.evict",
        why: "found neither",
        to_do: "expected quota or min_free beside it",
    },
    Situation {
        did: "a configuration file that does not exist",
        command: "blobd ls --config absent.toml",
        run: |fixture| fixture.run(&["ls", "--config", "absent.toml"]),
        code: 2,
        happened: "absent.toml: cannot read",
        why: "No such file or directory",
        to_do: "create it, or leave out --config and BLOBD_CONFIG",
    },
];
