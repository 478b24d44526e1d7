//! The commands that are swept, and what each of them changes.

/// All of them.
pub(super) const OPERATIONS: [Operation; 24] = [
    Operation::of("first start", "ls", &[]),
    Operation::of("import", "import NEW --name new", &[("new", "NEW")]).of_blobs(),
    Operation::of("import of a relative", "import RELATIVE --name new", &[("new", "RELATIVE")]).of_blobs(),
    Operation::of(
        "import under an existing name",
        "import RELATIVE --name kept --force",
        &[("kept", "RELATIVE")],
    )
    .of_blobs(),
    Operation::of("import of a folder", "import in:NEW --name new", &[("new", "NEW")]).of_blobs(),
    Operation::of("moving import", "import --move in:NEW --name new", &[("new", "NEW")]).of_blobs(),
    Operation::of("load", "load saved:NEW --name new", &[("new", "NEW")]).of_blobs(),
    Operation::of("pull", "pull at:NEW --name new", &[("new", "NEW")]).of_blobs(),
    Operation::of("pull of a relative", "pull at:RELATIVE --name new", &[("new", "RELATIVE")]).of_blobs(),
    Operation::of("resumed pull", "pull at:BEGUN --name new", &[("new", "BEGUN")]).of_blobs(),
    Operation::of("pull of cut experts", "pull at:CUT --name new", &[("new", "CUT")]).of_blobs(),
    Operation::of("edit", "edit kept new --set general.name:string=edited", &[("new", "EDITED")]).of_blobs(),
    Operation::of("tag", "tag kept new", &[("new", "KEPT")]),
    Operation::of("rename", "rename kept new", &[("new", "KEPT"), ("kept", "")]).once(),
    Operation::of("rename over a model", "rename kept other --force", &[("other", "KEPT"), ("kept", "")])
        .after(&["import RELATIVE --name other"])
        .once(),
    Operation::of("rm", "rm kept", &[("kept", "")]).once().deleting(),
    Operation::of("rm to the trash", "rm --keep 1h kept", &[("kept", "")]).once(),
    Operation::of("undelete", "undelete kept", &[("kept", "KEPT")]).after(&["rm --keep 1h kept"]).once(),
    Operation::of("undo of a new name", "undo", &[("new", "")]).after(&["import NEW --name new"]).once(),
    Operation::of("undo of a replacement", "undo", &[("kept", "KEPT")])
        .after(&["import RELATIVE --name kept --force"])
        .once(),
    Operation::of("undo of a removal", "undo", &[("kept", "KEPT"), ("other", "RELATIVE")])
        .after(&["import RELATIVE --name other", "rm --keep 1h kept other"])
        .once(),
    // A crash between its two steps leaves the replaced model in the trash.
    Operation::of("undo of a rename", "undo", &[("kept", "KEPT"), ("other", ""), ("other", "RELATIVE")])
        .after(&["import RELATIVE --name other", "rename kept other --force"])
        .once()
        .completed_by("undelete other"),
    Operation::of("sign", "sign kept --key KEY", &[]),
    Operation::of("gc", "gc", &[]),
];

/// A command to run with a fault.
pub(super) struct Operation {
    pub(super) name: &'static str,
    /// Commands that prepare the store.
    pub(super) before: &'static [&'static str],
    /// The command. `NEW` and the other placeholders stand for the paths of models, `at:NEW` for the reference to pull,
    /// `in:NEW` for a folder with a copy of the model, `saved:NEW` for an archive that has it with its signature, `KEY` for a private key.
    pub(super) command: &'static str,
    /// The names that it changes, in the order in which the changes become durable, each with the placeholder of the model
    /// that the name then stands for; an empty one if the name is removed.
    pub(super) changes: &'static [(&'static str, &'static str)],
    /// Whether it stores new blobs: then it depends on the mode of durability.
    pub(super) brings_blobs: bool,
    /// Whether it fails or changes something else if it is repeated after it has succeeded.
    pub(super) only_once: bool,
    /// Whether it deletes a model.
    pub(super) deletes: bool,
    /// The command that makes the remaining changes if the same command cannot.
    pub(super) completed_by: Option<&'static str>,
}

impl Operation {
    const fn of(
        name: &'static str,
        command: &'static str,
        changes: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self {
            name,
            before: &[],
            command,
            changes,
            brings_blobs: false,
            only_once: false,
            deletes: false,
            completed_by: None,
        }
    }

    const fn of_blobs(self) -> Self {
        Self { brings_blobs: true, ..self }
    }

    const fn after(self, before: &'static [&'static str]) -> Self {
        Self { before, ..self }
    }

    const fn once(self) -> Self {
        Self { only_once: true, ..self }
    }

    const fn deleting(self) -> Self {
        Self { deletes: true, ..self }
    }

    const fn completed_by(self, command: &'static str) -> Self {
        Self { completed_by: Some(command), ..self }
    }

    pub(super) fn is_first_start(&self) -> bool {
        self.name == "first start"
    }

    pub(super) fn is_move(&self) -> bool {
        self.command.contains("--move")
    }

    pub(super) fn signature(&self) -> Signature {
        match self.command.split_once(' ') {
            Some(("sign", _)) => Signature::OfStored("kept"),
            Some(("load", _)) => Signature::OfArriving("new"),
            _ => Signature::Unchanged,
        }
    }
}

/// The model that gets a signature by a command.
pub(super) enum Signature {
    Unchanged,
    /// A stored one with this name.
    OfStored(&'static str),
    /// One that gets this name, and has come with its signature.
    OfArriving(&'static str),
}
