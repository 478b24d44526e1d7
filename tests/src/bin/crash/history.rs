//! The requested and acknowledged changes of a store, and so its permitted contents after a crash.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Outcome;

/// The models of a store: the SHA-256 of each model's file, by its name.
pub(crate) type Contents = BTreeMap<String, String>;

/// All changes of names in the order in which they began. Changes of one name never overlap: each name
/// belongs to one client.
#[derive(Debug, Default)]
pub(crate) struct History(Mutex<Vec<Change>>);

/// A name that is set or removed.
#[derive(Debug)]
struct Change {
    name: String,
    /// The SHA-256 of the file that the name stands for afterwards; `None` if it is removed.
    becomes: Option<String>,
    begun: u64,
    acknowledged: Option<u64>,
}

/// A change that has begun: its index in the history.
#[derive(Debug)]
#[must_use]
pub(crate) struct PendingChange(usize);

impl History {
    /// The history of a store with these contents, all of them acknowledged.
    pub(crate) fn of(contents: &Contents) -> Self {
        let change = |(name, content): (&String, &String)| Change {
            name: name.clone(),
            becomes: Some(content.clone()),
            begun: 0,
            acknowledged: Some(0),
        };
        Self(Mutex::new(contents.iter().map(change).collect()))
    }

    /// Records that a name is about to be set or removed. `now` is a logical time, such as the number of
    /// writes to the disk so far.
    pub(crate) fn begin(&self, name: &str, becomes: Option<&str>, now: u64) -> PendingChange {
        let mut changes = self.changes();
        let becomes = becomes.map(str::to_owned);
        changes.push(Change { name: name.to_owned(), becomes, begun: now, acknowledged: None });
        PendingChange(changes.len() - 1)
    }

    /// Records that the store has acknowledged the change.
    pub(crate) fn acknowledge(&self, change: &PendingChange, now: u64) {
        if let Some(change) = self.changes().get_mut(change.0) {
            change.acknowledged = Some(now);
        }
    }

    /// The file that a name stands for if all changes have happened.
    pub(crate) fn latest(&self, name: &str) -> Option<String> {
        self.changes().iter().rev().find(|change| change.name == name)?.becomes.clone()
    }

    /// The number of acknowledged changes.
    pub(crate) fn acknowledged_count(&self) -> usize {
        self.changes().iter().filter(|change| change.acknowledged.is_some()).count()
    }

    /// Checks the contents after a crash at the time `crash` (invariants I3 and I4): every acknowledged
    /// change has happened, and every other one has happened completely or not at all.
    ///
    /// # Errors
    /// The first name that stands for another file.
    pub(crate) fn check(&self, found: &Contents, crash: u64) -> Outcome<()> {
        let names: BTreeSet<String> = self.changes().iter().map(|change| change.name.clone()).collect();
        for name in names.iter().chain(found.keys()) {
            let allowed = self.allowed(name, crash);
            let content = found.get(name).cloned();
            if !allowed.contains(&content) {
                return Err(format!("I3/I4: {name} is {content:?}, expected one of {allowed:?}").into());
            }
        }
        Ok(())
    }

    /// The files that a name may stand for after a crash: the result of the last acknowledged change, or of
    /// any change that began after it.
    fn allowed(&self, name: &str, crash: u64) -> BTreeSet<Option<String>> {
        let mut allowed = BTreeSet::from([None]);
        let changes = self.changes();
        for change in changes.iter().filter(|change| change.name == name) {
            if change.acknowledged.is_some_and(|acknowledged| acknowledged <= crash) {
                allowed.clear();
            }
            if change.begun < crash || change.acknowledged == Some(0) {
                allowed.insert(change.becomes.clone());
            }
        }
        allowed
    }

    fn changes(&self) -> MutexGuard<'_, Vec<Change>> {
        // The list is consistent at any time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(content: Option<&str>) -> Contents {
        content.into_iter().map(|content| ("m".to_owned(), content.to_owned())).collect()
    }

    fn is_allowed(history: &History, content: Option<&str>, crash: u64) -> bool {
        history.check(&found(content), crash).is_ok()
    }

    #[test]
    fn acknowledged_model_must_exist() {
        let history = History::default();
        let change = history.begin("m", Some("a"), 10);
        history.acknowledge(&change, 20);
        assert!(is_allowed(&history, Some("a"), 20));
        assert!(!is_allowed(&history, None, 20));
        assert!(!is_allowed(&history, Some("b"), 20));
    }

    #[test]
    fn model_that_is_being_replaced_is_the_old_or_the_new_one() {
        let history = History::of(&found(Some("old")));
        let change = history.begin("m", Some("new"), 10);
        history.acknowledge(&change, 20);
        assert!(is_allowed(&history, Some("old"), 15) && is_allowed(&history, Some("new"), 15));
        assert!(!is_allowed(&history, None, 15));
        assert!(!is_allowed(&history, Some("new"), 10), "no change had begun");
    }

    #[test]
    fn removal_that_was_not_acknowledged_may_have_happened() {
        let history = History::of(&found(Some("a")));
        let _unacknowledged = history.begin("m", None, 10);
        assert!(is_allowed(&history, Some("a"), 15) && is_allowed(&history, None, 15));
    }

    #[test]
    fn model_that_was_never_requested_is_a_violation() {
        assert!(!is_allowed(&History::default(), Some("a"), 5));
    }
}
