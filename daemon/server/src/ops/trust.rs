//! Whether a model is signed as the rules `[[trust]]` demand: asked before its content leaves, and before it is fetched.

use blobd_client::protocol::signatures::{SignatureDetails, SignatureState, TrustDecision};
use blobd_store::{Store, StoredFile};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::host;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::Bundle;
use blobd_store_format::source::HubFile;

use super::OpError;
use super::signable_files::{SignableFiles, parts};
use crate::trust::{AppliedRule, NamedKey, Trust, TrustMode, TrustRule};

/// Refuses a stored model that a rule says must be signed, if it is not. Reads no file of the model, and its signatures only
/// until they were found to be right.
pub(super) fn check(
    trust: &Trust,
    store: &Store,
    (name, manifest): (&Reference, &Manifest),
) -> Result<(), OpError> {
    let Some(applied) = rule_for(trust, store, (name, manifest.digest()))? else { return Ok(()) };
    match flaw(applied, store, (name, manifest))? {
        None => Ok(()),
        Some(flaw) => refuse_or_warn(applied, name, manifest.digest(), &flaw),
    }
}

/// Refuses a model, or warns of it in the log, as the rule says.
pub(super) fn refuse_or_warn(
    applied: AppliedRule<'_>,
    name: &Reference,
    manifest: Digest,
    flaw: &str,
) -> Result<(), OpError> {
    let (message, demand) = (format!("model {}: {flaw}", name.short()), applied.description());
    if applied.rule.mode == TrustMode::Enforce {
        let hint = format!(
            "{demand}; `blobd verify {0} --signatures` shows its signatures, `blobd sign {0}` adds one",
            name.short()
        );
        return Err(OpError::DeniedByPolicy { message, hint });
    }
    if applied.note_warned(manifest) {
        tracing::warn!("{message}; {demand}");
    }
    Ok(())
}

/// Whether a model is of a hub, whose repositories have their signatures in a file.
pub(super) fn is_at_hub(reference: &Reference) -> bool {
    host::canonical(reference.host()).eq_ignore_ascii_case(HubFile::HOST)
}

/// What `verify --signatures` says about the rule for a model.
pub(super) fn decision(
    trust: &Trust,
    store: &Store,
    model: (&Reference, &Manifest),
) -> Result<Option<TrustDecision>, OpError> {
    let Some(applied) = rule_for(trust, store, (model.0, model.1.digest()))? else { return Ok(None) };
    Ok(Some(TrustDecision {
        pattern: applied.rule.pattern.to_string(),
        mode: applied.rule.mode.name().to_owned(),
        satisfied: flaw(applied, store, model)?.is_none(),
    }))
}

fn rule_for<'t>(
    trust: &'t Trust,
    store: &Store,
    (name, manifest): (&Reference, Digest),
) -> Result<Option<AppliedRule<'t>>, OpError> {
    if trust.is_empty() {
        return Ok(None);
    }
    let names = names(store, name, manifest)?;
    Ok(trust.rule_for(&names))
}

/// The name of a model, and those that it had where it came from. A record that cannot be read is an error: without it, the
/// rules for the source would not apply.
fn names(store: &Store, name: &Reference, manifest: Digest) -> Result<Vec<Reference>, OpError> {
    let own = store.names().name_origin(name, manifest).origin;
    let recorded = store.names().recorded_origin(manifest)?;
    let origins = own.into_iter().chain(recorded);
    let of_origin = |origin: String| match Origin::parse(&origin)? {
        Origin::Import(_) => None,
        Origin::Url(source) | Origin::Copy(source) | Origin::Source(source) => source.name().ok(),
        // It is not what was signed any more.
        Origin::Edit { name, .. } => Some(name),
    };
    Ok(std::iter::once(name.clone()).chain(origins.filter_map(of_origin)).collect())
}

/// Why a stored model is not signed as the rule demands; `None` if it is.
fn flaw(
    applied: AppliedRule<'_>,
    store: &Store,
    (name, manifest): (&Reference, &Manifest),
) -> Result<Option<String>, OpError> {
    if applied.is_known_as_signed(manifest.digest()) {
        return Ok(None);
    }
    let bundles = store.names().signatures(manifest.digest())?;
    let files = SignableFiles::of_model(store, name, manifest)?;
    let checked = bundles.iter().filter_map(|text| Bundle::parse(text.as_bytes()).ok());
    let found = checked.map(|bundle| files.check(&bundle, &applied.rule.keys, applied.rule.partial));
    let flaw = flaw_of(&applied.rule.keys, found.max_by_key(|found| found.state));
    if flaw.is_none() {
        applied.note_signed(manifest.digest());
    }
    Ok(flaw)
}

/// The files of a model that is not stored yet, as far as they are known.
pub(super) struct KnownFiles<'k> {
    pub(super) name: &'k Reference,
    pub(super) files: Vec<(Descriptor, Option<String>)>,
    /// Whether these are all.
    pub(super) is_all: bool,
}

/// What comparing such a model with its signatures says.
pub(super) struct Compared {
    /// What is wrong; `None` if nothing is.
    pub(super) flaw: Option<String>,
    /// Whether all of its files were compared, also those in archives.
    pub(super) is_all: bool,
}

/// Compares such a model with its signatures. `archive` finds the files in an archive, if they are known.
pub(super) fn compare_known<'b>(
    rule: &TrustRule,
    known: KnownFiles<'_>,
    bundles: impl IntoIterator<Item = &'b Bundle>,
    archive: impl Fn(&Descriptor) -> Result<Option<StoredFile>, OpError>,
) -> Result<Compared, OpError> {
    let KnownFiles { name, files: listed, mut is_all } = known;
    let mut files = Vec::new();
    for (file, name) in listed {
        let is_archive = file.media_type.archive_of_weights().is_some();
        match is_archive.then(|| archive(&file)).transpose()? {
            Some(None) => is_all = false,
            stored => files.extend(parts(&file, name.as_deref(), stored.flatten().as_ref())?),
        }
    }
    let files = SignableFiles::new(name, files);
    let check = |bundle: &Bundle| files.check(bundle, &rule.keys, rule.partial || !is_all);
    let best = bundles.into_iter().map(check).max_by_key(|checked| checked.state);
    Ok(Compared { flaw: flaw_of(&rule.keys, best), is_all })
}

/// What is wrong with the best signature of a model; `None` if nothing is.
fn flaw_of(keys: &[NamedKey], best: Option<SignatureDetails>) -> Option<String> {
    let keys = || keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>().join(" or ");
    match best {
        None => Some("not signed".to_owned()),
        Some(SignatureDetails { state: SignatureState::Signed, .. }) => None,
        Some(SignatureDetails { state: SignatureState::Wrong, reason, .. }) => {
            let reason = reason.unwrap_or_default();
            Some(format!("wrong signature: {reason}"))
        }
        Some(_) => Some(format!("wrong signature: expected one by {}, found one by another key", keys())),
    }
}
