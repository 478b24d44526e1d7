//! `sign` and `verify --signatures`: keeps signatures beside models, and compares them with the models' files.
//!
//! A signature is over digests, which the store has: no file of a model is read, however large it is.

use blobd_client::protocol::signatures::{
    GivenKey, SignParams, SignatureDetails, SignatureReport, SignatureState, SignaturesParams, Signed,
};
use blobd_keys::PublicKey;
use blobd_store::Store;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_paths::{self, paths};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::{Bundle, ModelFile, SignatureError, SignedFile};
use blobd_store_format::text::quoted;

use super::OpError;
use super::policy::CallerPolicy;
use super::trust;
use crate::trust::{NamedKey, Trust};

/// The files of a model that its signatures list.
#[derive(Debug)]
pub(crate) struct SignableFiles(Vec<SignableFile>);

#[derive(Debug)]
struct SignableFile {
    name: Option<String>,
    path: String,
    digest: Digest,
}

impl SignableFiles {
    /// All files except for the configuration of the manifest, with their paths in an export. Reads recipes of archives only,
    /// for the files in them.
    pub(crate) fn of_model(store: &Store, name: &Reference, manifest: &Manifest) -> Result<Self, OpError> {
        let mut found = Vec::new();
        for (file, name) in manifest.files().zip(manifest.names()).skip(1) {
            if file.media_type.archive_of_weights().is_some() {
                let members = store.content().stored_file(file)?.members()?;
                if !members.is_empty() {
                    found.extend(members.into_iter().map(|member| (member.file.descriptor, member.name)));
                    continue;
                }
            }
            found.push((file.clone(), name.map(str::to_owned)));
        }
        let listed = found.iter().map(|(file, name)| file_paths::ListedFile {
            media_type: &file.media_type,
            name: name.as_deref(),
            digest: file.digest,
            extension: None,
        });
        let paths = paths(&format!("{}-{}", name.model(), name.tag()), &listed.collect::<Vec<_>>());
        let files = found.into_iter().zip(paths);
        Ok(Self(files.map(|((file, name), path)| SignableFile { name, path, digest: file.digest }).collect()))
    }

    fn listed(&self) -> Vec<SignedFile> {
        let mut files: Vec<_> =
            self.0.iter().map(|file| SignedFile { path: file.path.clone(), digest: file.digest }).collect();
        files.dedup();
        files
    }

    fn compare<'b>(&self, bundle: &'b Bundle) -> Result<Vec<&'b str>, String> {
        let file = |file: &'_ SignableFile| (file.name.clone(), file.path.clone(), file.digest);
        let files: Vec<_> = self.0.iter().map(file).collect();
        let files: Vec<_> = files
            .iter()
            .map(|(name, path, digest)| ModelFile { name: name.as_deref(), path, digest: *digest })
            .collect();
        bundle.statement().compare(&files).map_err(|difference| difference.to_string())
    }

    /// What a signature says about these files. A model that lacks files which are signed is wrong, unless `may_lack_files`.
    pub(crate) fn check(&self, bundle: &Bundle, keys: &[NamedKey], may_lack_files: bool) -> SignatureDetails {
        let compared = self.compare(bundle);
        let mut details = SignatureDetails {
            state: SignatureState::UnknownKey,
            key: None,
            key_id: bundle.key_id().map(str::to_owned),
            signed_files: bundle.statement().files().len() as u64,
            missing: compared.as_deref().map(shown).unwrap_or_default(),
            reason: None,
            bundle: bundle.text().to_owned(),
        };
        let signed = bundle.signed_bytes();
        let Some(signer) = keys.iter().find(|known| known.key.has_signed(&signed, bundle.signature())) else {
            // The bundle names a key that has not made this signature.
            let named = keys.iter().find(|known| bundle.key_id() == Some(known.key.id().as_str()));
            if let Some(NamedKey { name, .. }) = named {
                details.state = SignatureState::Wrong;
                details.reason = Some(format!("it names the key {name}, which did not sign this"));
            }
            return details;
        };
        details.key = Some(signer.name.clone());
        details.state = SignatureState::Wrong;
        match compared.as_deref() {
            Err(difference) => details.reason = Some(difference.clone()),
            Ok([first, others @ ..]) if !may_lack_files => {
                let others = match others.len() {
                    0 => String::new(),
                    count => format!(" and {count} others"),
                };
                details.reason =
                    Some(format!("the model lacks {}{others}, which were signed", quoted(first)));
            }
            Ok(_) => details.state = SignatureState::Signed,
        }
        details
    }
}

fn shown(missing: &[&str]) -> Vec<String> {
    const MAX_SHOWN: usize = 20;
    missing.iter().take(MAX_SHOWN).map(|path| (*path).to_owned()).collect()
}

/// The signatures of a model, and which of the given keys have made them.
pub(crate) fn signatures(
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
pub(crate) fn sign(store: &Store, policy: &CallerPolicy, params: &SignParams) -> Result<Signed, OpError> {
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
        files: files.0.len() as u64,
        missing: shown(&missing),
        unchanged: !is_new,
    })
}

/// Keeps a signature. If there are too many, one by a key of the configuration stays.
pub(super) fn add(store: &Store, trust: &Trust, manifest: Digest, bundle: &Bundle) -> Result<bool, OpError> {
    let keys = trust.keys();
    let is_by_other_key = |text: &str| {
        let known = Bundle::parse(text.as_bytes()).ok();
        let is_by =
            |known: &Bundle, key: &NamedKey| key.key.has_signed(&known.signed_bytes(), known.signature());
        known.is_none_or(|known| !keys.iter().any(|key| is_by(&known, key)))
    };
    Ok(store.names().add_signature(manifest, bundle, is_by_other_key)?)
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
