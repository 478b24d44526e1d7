//! `sign` and `verify --signatures`: keeps signatures beside models, and compares them with the models' files.
//!
//! A signature is over digests, which the store has: no file of a model is read, however large it is.

use blobd_client::protocol::signatures::{
    GivenKey, SignParams, SignatureReport, SignatureState, SignaturesParams, Signed,
};
use blobd_keys::PublicKey;
use blobd_store::{Ingest, Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::{Bundle, SignatureError};
use blobd_store_format::text::quoted;

use super::OpError;
use super::policy::CallerPolicy;
use super::signable_files::{SignableFiles, shown};
use super::trust;
use crate::trust::{NamedKey, Trust};

/// The signatures of a model, and which of the given keys have made them.
pub fn signatures(
    store: &Store,
    policy: &CallerPolicy,
    params: &SignaturesParams,
) -> Result<SignatureReport, OpError> {
    let name = store.names().resolve(&params.reference)?;
    policy.check_named(store, &name)?;
    let manifest = store.names().manifest(&name)?;
    let given = parsed_keys(&params.keys)?;
    let keys = if given.is_empty() { policy.trust().keys() } else { given };
    let files = SignableFiles::of_model(store, &name, &manifest)?;
    let bundles = match &params.bundle {
        Some(given) => vec![given.clone()],
        None => store.names().signatures(manifest.digest())?,
    };
    let details = |text: String| {
        let bundle = Bundle::parse(text.as_bytes()).map_err(|error| refused(&name, &error))?;
        Ok(files.check(&bundle, &keys, false))
    };
    let signatures = bundles.into_iter().map(details).collect::<Result<Vec<_>, OpError>>()?;
    let best = signatures.iter().max_by_key(|found| found.state);
    Ok(SignatureReport {
        name: name.short(),
        digest: manifest.digest(),
        state: best.map_or(SignatureState::Unsigned, |best| best.state),
        key: best.and_then(|best| best.key.clone()),
        trust: trust::decision(policy.trust(), store, (&name, &manifest))?,
        files: files.listed(),
        signatures,
    })
}

/// Keeps a signature beside a model. It must be over the model's files; whose key has made it does not matter here.
pub fn sign(store: &Store, policy: &CallerPolicy, params: &SignParams) -> Result<Signed, OpError> {
    let name = store.names().resolve(&params.reference)?;
    let lease = store.liveness().leases().grant(format!("signing of {}", name.short()));
    let model = store.names().leased_model(&name, &lease)?;
    policy.check_stored(store, &model, None)?;
    let files = SignableFiles::of_model(store, &name, &model.manifest)?;
    let bundle = Bundle::parse(params.bundle.as_bytes()).map_err(|error| refused(&name, &error))?;
    let missing = files.compare(&bundle).map_err(|difference| OpError::Signature {
        subject: format!("model {}", name.short()),
        reason: format!("the signature is over another model: {difference}"),
        hint: "`blobd verify --signatures --json` lists the files of the model with their digests",
    })?;
    let manifest = model.manifest.digest();
    let is_new = add(store, policy.trust(), manifest, &bundle)?;
    Ok(Signed {
        name: name.short(),
        digest: manifest,
        key_id: bundle.key_id().map(str::to_owned),
        files: files.count() as u64,
        missing: shown(&missing),
        unchanged: !is_new,
    })
}

/// Keeps a signature. If there are too many, one by a key of the configuration stays.
fn add(store: &Store, trust: &Trust, manifest: Digest, bundle: &Bundle) -> Result<bool, OpError> {
    let keys = trust.keys();
    let is_by_other_key = |text: &str| {
        let known = Bundle::parse(text.as_bytes()).ok();
        let is_by =
            |known: &Bundle, key: &NamedKey| key.key.has_signed(&known.signed_bytes(), known.signature());
        known.is_none_or(|known| !keys.iter().any(|key| is_by(&known, key)))
    };
    Ok(store.names().add_signature(manifest, bundle, is_by_other_key)?)
}

/// Keeps those of the signatures that are over the files of a model that arrives. That happens before the model gets its name:
/// otherwise it would be refused as unsigned for a moment, and for ever if the daemon stopped in between.
///
/// If the model gets no name after all, the next collection removes them.
pub(super) fn add_arriving(
    ingest: &Ingest,
    trust: &Trust,
    (name, manifest): (&Reference, &Manifest),
    bundles: &[Bundle],
) -> Result<(), OpError> {
    let digest = manifest.digest();
    // A collection that runs now keeps them.
    ingest.lease().protect(digest);
    let files = SignableFiles::of_ingest(ingest, name, manifest)?;
    for bundle in bundles.iter().filter(|bundle| files.compare(bundle).is_ok()) {
        match add(ingest.store(), trust, digest, bundle) {
            // The store has as many signatures by configured keys as it keeps for one model.
            Err(OpError::Store(StoreError::TooManySignatures { .. })) => {}
            added => drop(added?),
        }
    }
    Ok(())
}

fn refused(name: &Reference, error: &SignatureError) -> OpError {
    OpError::Signature {
        subject: format!("model {}", name.short()),
        reason: error.to_string(),
        hint: "a signature is a file such as `blobd sign --output` or `model_signing sign key` writes",
    }
}

fn parsed_keys(given: &[GivenKey]) -> Result<Vec<NamedKey>, OpError> {
    if given.len() > SignaturesParams::MAX_KEYS {
        return Err(OpError::Signature {
            subject: "keys".to_owned(),
            reason: format!("expected at most {}, found {}", SignaturesParams::MAX_KEYS, given.len()),
            hint: "verify with fewer keys at a time",
        });
    }
    let parsed = |GivenKey { name, pem }: &GivenKey| match PublicKey::parse(pem) {
        Ok(key) => Ok(NamedKey { name: name.clone(), key }),
        Err(error) => {
            Err(OpError::Signature { subject: quoted(name), reason: error.to_string(), hint: error.hint() })
        }
    };
    given.iter().map(parsed).collect()
}
