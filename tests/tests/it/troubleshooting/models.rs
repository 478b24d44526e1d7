//! Names of models that are wrong, taken or protected.

use super::Situation;

pub(super) const SITUATIONS: &[Situation] = &[
    Situation {
        did: "a model that does not exist",
        command: "blobd rm llama3:8b",
        run: |fixture| fixture.run(&["rm", "llama3:8b"]),
        code: 3,
        happened: "model llama3:8b: not in the store",
        why: "not in the store",
        to_do: "`blobd ls` lists the models",
    },
    Situation {
        did: "a mistyped name",
        command: "blobd rm lama3",
        run: |fixture| fixture.with_models(&["llama3"]).run(&["rm", "lama3"]),
        code: 3,
        happened: "model lama3:latest: not in the store",
        why: "not in the store",
        to_do: "did you mean llama3:latest?",
    },
    Situation {
        did: "a path in place of a name",
        command: "blobd pull ./model.gguf",
        run: |fixture| fixture.run(&["pull", "./model.gguf"]),
        code: 2,
        happened: "\"./model.gguf\": is a path of this machine",
        why: "expected the name of a model or a URL",
        to_do: "`blobd import ./model.gguf` stores files of this machine",
    },
    Situation {
        did: "a pattern for a command that takes one model",
        command: "blobd show 'llama*'",
        run: |fixture| fixture.with_models(&["llama3", "llama2"]).run(&["show", "llama*"]),
        code: 2,
        happened: "llama*: matches 2 models",
        why: "expected one",
        to_do: "name one of them",
    },
    Situation {
        did: "removing a pinned model",
        command: "blobd rm llama3",
        run: |fixture| {
            fixture.with_models(&["llama3"]).run(&["pin", "llama3"]);
            fixture.run(&["rm", "llama3"])
        },
        code: 7,
        happened: "model llama3:latest",
        why: "is pinned",
        to_do: "run `blobd unpin llama3:latest` first",
    },
    Situation {
        did: "a name that is taken",
        command: "blobd rename a b",
        run: |fixture| fixture.with_models(&["a", "b"]).run(&["rename", "a", "b"]),
        code: 4,
        happened: "model b:latest: exists already",
        why: "exists already",
        to_do: "give another name, or replace that model with --force",
    },
    Situation {
        did: "a model that is not in the trash",
        command: "blobd undelete llama3",
        run: |fixture| fixture.run(&["undelete", "llama3"]),
        code: 3,
        happened: "model llama3:latest: not in the trash",
        why: "not in the trash",
        to_do: "`blobd ls --trash` lists the models there",
    },
    Situation {
        did: "a removal that has freed the data",
        command: "blobd undo",
        run: |fixture| {
            fixture.with_models(&["llama3"]).run(&["rm", "llama3"]);
            fixture.run(&["undo"])
        },
        code: 3,
        happened: "model llama3:latest: its earlier version",
        why: "is no longer stored",
        to_do: "import it again",
    },
    Situation {
        did: "a mistyped tensor",
        command: "blobd tensor m token_embed.weight",
        run: |fixture| fixture.with_models(&["m"]).run(&["tensor", "m", "token_embed.weight"]),
        code: 3,
        happened: "model m:latest",
        why: "no tensor \"token_embed.weight\"",
        to_do: "the most similar names are",
    },
    Situation {
        did: "an unfinished download that does not exist",
        command: "blobd partial rm llama3:8b",
        run: |fixture| fixture.run(&["partial", "rm", "llama3:8b"]),
        code: 3,
        happened: "llama3:8b: no unfinished download",
        why: "no unfinished download has this name or ID",
        to_do: "`blobd partial ls` lists them",
    },
];
