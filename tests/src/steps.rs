//! The operations on a store in tests of crashes and faults, and their expected outcomes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{EditParams, KeyChange, PromoteParams, UndoParams};
use blobd_client::protocol::request::{
    GcParams, ImportFile, ImportParams, PinParams, RemoveParams, TagParams, UndeleteParams,
};
use blobd_client::protocol::signatures::{SignParams, SignaturesParams};
use blobd_server::ops::{self, OpError, Requester};
use blobd_store::{Ingest, Store};
use blobd_store_format::signature::{Bundle, SignedFile, Statement};

use crate::file_source::{import_files, in_memory, ingest_bytes};
use crate::pulls;
use crate::samples::{NAMED, UNNAMED, WHOLE, files, reference, weights};
use crate::store_state::{Key, StoreState};
use crate::verbs::InProcess;

/// One operation on a store. Names and files are given by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the verbs and their operands")]
pub enum Step {
    Import {
        file: usize,
        name: usize,
    },
    Pull {
        file: usize,
        name: usize,
    },
    /// A pull that is interrupted, and one that resumes it.
    PullInTwoParts {
        file: usize,
        name: usize,
    },
    /// A pull whose first copy of the file is damaged, so that it downloads a second one.
    PullTwice {
        file: usize,
        name: usize,
    },
    Tag {
        source: usize,
        target: usize,
    },
    /// Copies a model of a lower store, which [`Self::fill_lower_store`] makes.
    Promote {
        file: usize,
        name: usize,
    },
    /// Removes the key `general.name`, which only one file has.
    Edit {
        source: usize,
        target: usize,
    },
    Remove {
        name: usize,
    },
    /// `rm --keep`.
    MoveToTrash {
        name: usize,
    },
    Undelete {
        name: usize,
    },
    /// Takes back the newest change of the name, before which it meant this file; none if the name was new.
    Undo {
        name: usize,
        earlier: Option<usize>,
    },
    Pin {
        name: usize,
        pinned: bool,
    },
    /// Keeps a signature beside the model. It is always the same one.
    Sign {
        name: usize,
    },
    Collect,
    /// A transaction that is dropped before the commit.
    Abandon {
        file: usize,
    },
}

/// The possible outcomes of a step.
#[derive(Clone, Debug, Default)]
pub struct Outcomes {
    /// The possible contents of the store after success.
    pub states: Vec<StoreState>,
    /// The possible errors of a refusal, after which nothing has changed.
    pub refusals: Vec<ErrorCode>,
}

impl Step {
    /// Executes the step.
    ///
    /// # Errors
    /// The error that a client would get.
    pub fn take(self, store: &Arc<Store>) -> Result<(), ErrorBody> {
        let done = match self {
            Self::Import { file, name } => import(store, file, name),
            Self::Pull { file, name } => pulls::pull(store, file, &reference(name)),
            Self::PullInTwoParts { file, name } => pulls::pull_in_two_parts(store, file, &reference(name)),
            Self::PullTwice { file, name } => pulls::pull_twice(store, file, &reference(name)),
            Self::Tag { source, target } => {
                let params = TagParams {
                    source: reference(source),
                    target: reference(target),
                    force: true,
                    origin: None,
                };
                ops::tag(store, Requester::own(), &ops::CallerPolicy::default(), &params).map(|_| ())
            }
            Self::Promote { name, .. } => promote(store, name),
            Self::Edit { source, target } => edit(store, source, target),
            Self::Remove { name } => remove(store, name, None),
            Self::MoveToTrash { name } => remove(store, name, Some(1 << 20)),
            Self::Undelete { name } => ops::undelete(
                store,
                Requester::own(),
                &ops::CallerPolicy::default(),
                &UndeleteParams { reference: reference(name), name: None, force: false },
            )
            .map(|_| ()),
            Self::Undo { name, .. } => {
                let params = UndoParams { reference: Some(reference(name)), ..UndoParams::default() };
                ops::undo(store, Requester::own(), &ops::CallerPolicy::default(), &params).map(|_| ())
            }
            Self::Pin { name, pinned } => {
                ops::pin(store, Requester::own(), &PinParams { reference: reference(name), pinned })
                    .map(|_| ())
            }
            Self::Sign { name } => sign(store, name),
            Self::Collect => ops::gc(store, GcParams { dry_run: false, ..GcParams::default() }).map(|_| ()),
            Self::Abandon { file } => abandon(store, &files()[file].bytes),
        };
        done.map_err(|error| error.body())
    }

    /// The stores below the one that the step is taken on, if it needs one: that in `root`.
    #[must_use]
    pub fn lower_stores(self, root: &Path) -> Vec<PathBuf> {
        let needs_one = matches!(self, Self::Promote { .. });
        needs_one.then(|| root.to_path_buf()).into_iter().collect()
    }

    /// Makes the lower store in `root` that the step needs, if it needs one. What was imported above before uses
    /// nothing of it.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn fill_lower_store(self, root: &Path) {
        if let Self::Promote { file, name } = self {
            let lower = InProcess::open(root);
            import(&lower.store, file, name).expect("a model in the lower store");
        }
    }

    /// The expected outcomes.
    #[must_use]
    pub fn outcomes(self, before: &StoreState) -> Outcomes {
        match self {
            Self::Import { file, name }
            | Self::Pull { file, name }
            | Self::PullInTwoParts { file, name }
            | Self::PullTwice { file, name }
            | Self::Promote { file, name } => set_tag(before, name, file + 1),
            Self::Tag { source, target } => match before.get(Key::Tag(source)) {
                0 => Outcomes::refused(ErrorCode::NotFound),
                file => set_tag(before, target, file),
            },
            Self::Edit { source, target } => match before.get(Key::Tag(source)) {
                0 => Outcomes::refused(ErrorCode::NotFound),
                file if file == NAMED + 1 => set_tag(before, target, UNNAMED + 1),
                // There is no name to remove, so the target is the same model.
                file => set_tag(before, target, file),
            },
            Self::Remove { name } | Self::MoveToTrash { name } if before.get(Key::Tag(name)) == 0 => {
                Outcomes::refused(ErrorCode::NotFound)
            }
            Self::Remove { name } | Self::MoveToTrash { name } if before.get(Key::Pin(name)) == 1 => {
                Outcomes::refused(ErrorCode::Denied)
            }
            Self::Remove { name } => Outcomes::done(before.with(Key::Tag(name), 0)),
            Self::MoveToTrash { name } => move_to_trash(before, name),
            Self::Undelete { name } => undelete(before, name),
            Self::Undo { name, earlier: None } => move_to_trash(before, name),
            Self::Undo { name, earlier: Some(file) } => undo(before, name, file),
            Self::Pin { name, .. } | Self::Sign { name } if before.get(Key::Tag(name)) == 0 => {
                Outcomes::refused(ErrorCode::NotFound)
            }
            Self::Pin { name, pinned } => Outcomes::done(before.with(Key::Pin(name), pinned.into())),
            Self::Sign { name } => Outcomes::done(before.with(Key::Signatures(name), 1)),
            Self::Collect | Self::Abandon { .. } => Outcomes::done(before.clone()),
        }
    }

    /// The fact that is durable after success, even if its value did not change.
    #[must_use]
    pub const fn subject(self) -> Option<Key> {
        match self {
            Self::Import { name, .. }
            | Self::Pull { name, .. }
            | Self::PullInTwoParts { name, .. }
            | Self::PullTwice { name, .. }
            | Self::Promote { name, .. }
            | Self::Tag { target: name, .. }
            | Self::Edit { target: name, .. }
            | Self::Remove { name }
            | Self::MoveToTrash { name }
            | Self::Undelete { name }
            | Self::Undo { name, .. } => Some(Key::Tag(name)),
            Self::Pin { name, .. } => Some(Key::Pin(name)),
            Self::Sign { name } => Some(Key::Signatures(name)),
            Self::Collect | Self::Abandon { .. } => None,
        }
    }
}

impl Outcomes {
    fn done(state: StoreState) -> Self {
        Self { states: vec![state], ..Self::default() }
    }

    fn refused(code: ErrorCode) -> Self {
        Self { refusals: vec![code], ..Self::default() }
    }
}

/// All steps replace the model that has the name, which is in the trash then.
fn set_tag(before: &StoreState, name: usize, model: usize) -> Outcomes {
    let set = before.with(Key::Tag(name), model);
    match before.get(Key::Tag(name)) {
        0 => Outcomes::done(set),
        present if present == model => Outcomes::done(set),
        present => {
            let record = Key::Trash(name, present - 1);
            Outcomes::done(set.with(record, before.get(record) + 1))
        }
    }
}

/// A record's name is made from its content, with times in seconds: two records of one model may be the same
/// file.
fn move_to_trash(before: &StoreState, name: usize) -> Outcomes {
    let gone = before.with(Key::Tag(name), 0);
    let record = Key::Trash(name, before.get(Key::Tag(name)) - 1);
    let count = before.get(record);
    let mut outcomes = Outcomes::done(gone.with(record, count + 1));
    outcomes.states.extend((count > 0).then_some(gone));
    outcomes
}

/// Takes the newest record. Of several within one second it may be any. A name that another model has is not
/// replaced, and the error depends on whether the name is pinned.
fn undelete(before: &StoreState, name: usize) -> Outcomes {
    let mut outcomes = Outcomes::default();
    let tagged = before.get(Key::Tag(name));
    let taken = if before.get(Key::Pin(name)) == 1 { ErrorCode::Denied } else { ErrorCode::Busy };
    for file in 0..files().len() {
        let record = Key::Trash(name, file);
        match before.get(record) {
            0 => {}
            count if tagged == 0 || tagged == file + 1 => {
                outcomes.states.push(before.with(Key::Tag(name), file + 1).with(record, count - 1));
            }
            _ => outcomes.refusals.push(taken),
        }
    }
    if outcomes.states.is_empty() && outcomes.refusals.is_empty() {
        outcomes.refusals.push(ErrorCode::NotFound);
    }
    outcomes
}

/// Takes the file from the trash. A record that cannot be removed from there is no failure.
fn undo(before: &StoreState, name: usize, file: usize) -> Outcomes {
    let mut outcomes = set_tag(before, name, file + 1);
    let record = Key::Trash(name, file);
    let without_record = |state: &StoreState| state.with(record, state.get(record).saturating_sub(1));
    let done: Vec<_> = outcomes.states.iter().map(without_record).collect();
    outcomes.states.splice(0..0, done);
    outcomes
}

fn import(store: &Arc<Store>, file: usize, name: usize) -> Result<(), OpError> {
    let params = ImportParams { name: Some(reference(name)), force: true, ..ImportParams::new("model.gguf") };
    let (params, files): (_, &[_]) = match file {
        WHOLE => {
            let listed = [listed("model.gguf", weights(WHOLE)), listed("other.bin", &files()[WHOLE].bytes)];
            let files = [weights(WHOLE), &files()[WHOLE].bytes];
            (ImportParams { files: listed.into(), ..params }, &files.map(in_memory))
        }
        file => (params, &[in_memory(&files()[file].bytes)]),
    };
    let (files, never) = (files.iter().collect::<Vec<_>>(), AtomicBool::new(false));
    import_files(store, &params, &files, &never, &mut |_, _| ()).map(|_| ())
}

fn listed(path: &str, bytes: &[u8]) -> ImportFile {
    ImportFile {
        path: path.to_owned(),
        size: bytes.len() as u64,
        component: None,
        digest: None,
        was_read: false,
        offset: 0,
        stream: false,
    }
}

fn edit(store: &Arc<Store>, source: usize, target: usize) -> Result<(), OpError> {
    let unnamed = KeyChange { key: "general.name".to_owned(), value: None, value_type: None };
    let params = EditParams {
        source: reference(source),
        target: reference(target),
        keys: vec![unnamed],
        template_layer: None,
        files: Vec::new(),
        force: true,
        dry_run: false,
    };
    ops::edit(store, Requester::own(), &ops::CallerPolicy::default(), &params, &mut |_, _| true).map(|_| ())
}

fn promote(store: &Arc<Store>, name: usize) -> Result<(), OpError> {
    let params = PromoteParams { reference: reference(name), dry_run: false };
    let policy = ops::CallerPolicy::default();
    ops::promote(store, Requester::own(), &policy, &params, &mut |_, _| true).map(drop)
}

fn remove(store: &Store, name: usize, keep_seconds: Option<u64>) -> Result<(), OpError> {
    ops::remove(
        store,
        &|_, _| None,
        Requester::own(),
        &RemoveParams { references: vec![reference(name)], keep_seconds, ..RemoveParams::default() },
    )
    .map(|_| ())
}

fn sign(store: &Store, name: usize) -> Result<(), OpError> {
    let (reference, policy) = (reference(name), ops::CallerPolicy::default());
    let report = ops::signatures(store, &policy, &SignaturesParams::new(reference.clone(), Vec::new()))?;
    let files = report.files.into_iter();
    let files = files.map(|file| SignedFile { path: file.path, digest: file.digest }).collect();
    let payload = Statement::new(&report.name, files).and_then(|statement| statement.to_json());
    // Whose key has made it does not matter to the store.
    let bundle = payload.and_then(|payload| Bundle::compose("a test", &payload, b"signature"));
    let bundle = bundle.expect("a signature").text().to_owned();
    ops::sign(store, &policy, &SignParams { reference, bundle }).map(drop)
}

fn abandon(store: &Arc<Store>, bytes: &[u8]) -> Result<(), OpError> {
    let mut ingest = Ingest::begin(store, store.liveness().leases().grant("a test"))?;
    ingest_bytes(&mut ingest, bytes)
        .map(|_| ())
        .map_err(|source| OpError::Ingest { name: "model.gguf".to_owned(), source })
}
