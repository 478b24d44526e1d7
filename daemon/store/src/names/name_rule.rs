//! Who may change which names. A name never gets other content unless that is asked for, and only the user who added a
//! name and administrators take it away.

use blobd_store_format::digest::Digest;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{PullSource, PulledSource};

use crate::ledger::charge_limit::Account;
use crate::names::Names;
use crate::names::pins::Pinner;
use crate::names::records::NameOrigin;
use crate::{StoreError, TrashedModel};

/// A user who changes names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameUser {
    pub uid: u32,
    /// Whether the user may change names that others have added or pinned, and those without a record of that.
    pub is_administrator: bool,
}

impl NameUser {
    /// A name without a record of who added it, such as that of a lower store, belongs to administrators.
    fn check_adder(self, name: &Reference, account: Option<Account>) -> Result<(), StoreError> {
        let adder = account.map(|account| account.adder());
        if self.is_administrator || adder == Some(self.uid) {
            return Ok(());
        }
        Err(StoreError::NameOfAnother { name: name.short(), adder, by: self.uid })
    }
}

impl TrashedModel {
    /// Checks whether a user may restore the model: the name is still the user's who had added it.
    pub fn check_own(&self, user: NameUser) -> Result<(), StoreError> {
        user.check_adder(&self.reference, self.account)
    }
}

/// Which names that have other content a commit may take. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameRule {
    pub uid: u32,
    /// Any name that is not pinned and that this user has added: the user has asked to replace it.
    pub replace: bool,
    /// With `replace`, also names that are pinned. The pin stays with the name.
    pub replace_pinned: bool,
    /// With `replace`, also names that other users have added.
    pub replace_of_others: bool,
    /// A name that follows this source: the commit has the source's newest version.
    pub update_from: Option<PulledSource>,
    /// With `update_from`, whether the name is the source's own: then other users' names are updated too, and names
    /// whose content came from there but is fixed to a digest. Content that another program's store calls a copy from there
    /// is updated only for the user who has added it: anybody can claim that, and the source may never have had it.
    pub is_own_name: bool,
}

impl NameRule {
    pub fn replacing_any() -> Self {
        Self { replace: true, replace_pinned: true, replace_of_others: true, ..Self::default() }
    }

    pub(crate) fn user(&self) -> NameUser {
        NameUser { uid: self.uid, is_administrator: self.replace_of_others }
    }

    fn updates_name(&self, kept: &NameOrigin) -> bool {
        self.updates(kept.source.as_deref())
            || (self.is_own_name && (self.updates(kept.origin.as_deref()) || self.updates_copy(kept)))
    }

    fn updates(&self, followed: Option<&str>) -> bool {
        let followed = followed.and_then(|source| source.parse::<PulledSource>().ok());
        let is_followed = |(new, followed): (&PulledSource, PulledSource)| {
            new.components.is_same_part(&followed.components) && is_same_source(&new.source, &followed.source)
        };
        self.update_from.as_ref().zip(followed).is_some_and(is_followed)
    }

    /// Whether the content is said to be a copy of what the rule's source had.
    fn updates_copy(&self, kept: &NameOrigin) -> bool {
        let copied = match kept.origin.as_deref().and_then(Origin::parse) {
            Some(Origin::Copy(copied)) => copied,
            _ => return false,
        };
        // A cache says at which commit it has the file; the name means that of the default branch.
        let new = self.update_from.as_ref().and_then(|new| new.source.followed());
        new.is_some_and(|new| is_same_source(&new, &copied) || new.is_same_model(&copied))
    }
}

/// Whether a name that follows `followed`, or whose fixed content came from there, is updated by a pull from `new`. At
/// a registry, names that differ in upper and lower case may be different models.
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

impl Names {
    /// Whether a commit by this rule updates the name: it follows the rule's source.
    pub(crate) fn follows(&self, stored: &Reference, present: Digest, rule: &NameRule) -> bool {
        rule.update_from.is_some() && rule.updates_name(&self.name_origin(stored, present))
    }

    /// Checks whether a commit may give the tag `stored`, which has the manifest `present`, to another one.
    pub fn check_name(&self, stored: &Reference, present: Digest, rule: &NameRule) -> Result<(), StoreError> {
        let name = stored.short();
        let kept = self.name_origin(stored, present);
        let is_update = rule.updates_name(&kept);
        if self.is_pinned(stored) && !(rule.replace && rule.replace_pinned) {
            return Err(StoreError::Pinned { name });
        }
        if !(is_update && rule.is_own_name) || rule.updates_copy(&kept) {
            self.check_adder(stored, present, rule.user())?;
        }
        if rule.replace || is_update {
            return Ok(());
        }
        Err(StoreError::NameTaken { name, digest: present, origin: kept.origin })
    }

    /// Checks whether a user may remove, rename, unpin or repair the name `stored`: only the user who added it and
    /// administrators may, and only administrators while one of them has pinned it. The caller has locked the tags, or
    /// checks again when they are locked.
    pub fn check_change(&self, stored: &Reference, user: NameUser) -> Result<(), StoreError> {
        self.check_own(stored, user)?;
        match self.pinner_of(stored) {
            None => Ok(()),
            Some(Pinner::User(pinner)) if pinner == user.uid => Ok(()),
            _ if user.is_administrator => Ok(()),
            Some(_) => Err(StoreError::PinOfAnother { name: stored.short(), by: user.uid }),
        }
    }

    /// The same without the pin: for a user who pins the name, or adds to what it needs.
    pub fn check_own(&self, stored: &Reference, user: NameUser) -> Result<(), StoreError> {
        match self.tagged_digest(stored)? {
            Some(present) => self.check_adder(stored, present, user),
            None => Err(StoreError::no_such_model(stored)),
        }
    }

    fn check_adder(&self, stored: &Reference, present: Digest, user: NameUser) -> Result<(), StoreError> {
        user.check_adder(stored, self.account_of(stored, present))
    }
}

#[cfg(test)]
mod tests;
