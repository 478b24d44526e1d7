//! Which names a commit may give to a model: a name never gets other content unless that is asked for.

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{PullSource, PulledSource};

use super::history::NameOrigin;
use super::{Store, StoreError};

/// Which names that have other content a commit may take. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameRule {
    /// The user who takes the name.
    pub uid: u32,
    /// Any name that is not pinned and that this user has added: the user has asked to replace it.
    pub replace: bool,
    /// With `replace`, also names that are pinned. The pin stays with the name.
    pub replace_pinned: bool,
    /// With `replace`, also names that other users have added.
    pub replace_of_others: bool,
    /// A name that follows this source: the commit has the source's newest version.
    pub update_from: Option<PullSource>,
    /// With `update_from`, whether the name is the source's own: then other users' names are updated too, and names
    /// whose content came from there but is fixed to a digest.
    pub is_own_name: bool,
}

impl NameRule {
    /// The rule for a commit that may replace any name.
    #[must_use]
    pub fn replacing_any() -> Self {
        Self { replace: true, replace_pinned: true, replace_of_others: true, ..Self::default() }
    }

    fn updates_name(&self, kept: &NameOrigin) -> bool {
        self.updates(kept.source.as_deref()) || (self.is_own_name && self.updates(kept.origin.as_deref()))
    }

    fn updates(&self, followed: Option<&str>) -> bool {
        let followed = followed.and_then(|source| source.parse::<PulledSource>().ok());
        let is_followed =
            |(new, followed): (&PullSource, PulledSource)| is_same_source(new, &followed.source);
        self.update_from.as_ref().zip(followed).is_some_and(is_followed)
    }
}

/// Whether a name that follows `followed`, or whose fixed content came from there, is updated by a pull from `new`. At a
/// registry, names that differ in upper and lower case may be different models.
fn is_same_source(new: &PullSource, followed: &PullSource) -> bool {
    let Some(new) = new.followed() else { return false };
    match (&new, followed) {
        (PullSource::Registry(new), PullSource::Registry(followed)) => {
            let model = |name: &Reference| (name.repository(), name.tag().to_owned());
            new.host() == followed.host() && model(new) == model(followed)
        }
        _ => Some(new) == followed.followed().or_else(|| followed.latest()),
    }
}

impl Store {
    /// Whether a commit by this rule updates the name: it follows the rule's source.
    pub(crate) fn follows(&self, stored: &Reference, present: Digest, rule: &NameRule) -> bool {
        rule.update_from.is_some() && rule.updates_name(&self.name_origin(stored, present))
    }

    /// Checks whether a commit may give the tag `stored`, which has the manifest `present`, to another one.
    ///
    /// # Errors
    /// [`StoreError::Pinned`], [`StoreError::NameOfAnother`], [`StoreError::NameTaken`].
    pub fn check_name(&self, stored: &Reference, present: Digest, rule: &NameRule) -> Result<(), StoreError> {
        let name = stored.short();
        let kept = self.name_origin(stored, present);
        let is_update = rule.updates_name(&kept);
        if self.is_pinned(stored) && !(rule.replace && rule.replace_pinned) {
            return Err(StoreError::Pinned { name });
        }
        let may_take_of_others = (rule.replace && rule.replace_of_others)
            || (is_update && (rule.is_own_name || rule.replace_of_others));
        let other = self.account_of(stored, present).filter(|account| account.uid != rule.uid);
        match other {
            Some(account) if !may_take_of_others => Err(StoreError::NameOfAnother { name, uid: account.uid }),
            _ if rule.replace || is_update => Ok(()),
            _ => Err(StoreError::NameTaken { name, digest: present, origin: kept.origin }),
        }
    }
}

#[cfg(test)]
mod tests;
