//! The classes of records. Each has files, a part of the queue and limits of its own, so that records of one class do
//! not displace those of another. The shares of all classes add up to the log.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// The store or the daemon has changed.
    Change,
    /// A client was given the content of a model.
    Open,
    /// Nothing was changed or given out: refused and failed requests, dry runs, requests that find nothing to change. The
    /// changes of a user who makes very many of them are here too.
    Attempt,
}

impl Class {
    pub(crate) const ALL: [Self; 3] = [Self::Change, Self::Open, Self::Attempt];

    /// For metrics, and for records about other records.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Change => "changes",
            Self::Open => "opens",
            Self::Attempt => "attempts",
        }
    }

    /// Files of earlier versions contain records of all classes, and are named like those of changes.
    pub(super) const fn file_prefix(self) -> &'static str {
        match self {
            Self::Change => "audit-",
            Self::Open => "opens-",
            Self::Attempt => "attempts-",
        }
    }

    /// The part of `total` that records of other classes never take.
    pub(super) const fn share(self, total: u64) -> u64 {
        match self {
            Self::Change => total / 2,
            Self::Open | Self::Attempt => total / 4,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ByClass<T>([T; 3]);

impl<T> ByClass<T> {
    pub(super) fn new(make: impl FnMut(Class) -> T) -> Self {
        Self(Class::ALL.map(make))
    }

    pub(crate) const fn get(&self, class: Class) -> &T {
        let [change, open, attempt] = &self.0;
        match class {
            Class::Change => change,
            Class::Open => open,
            Class::Attempt => attempt,
        }
    }

    pub(super) const fn get_mut(&mut self, class: Class) -> &mut T {
        let [change, open, attempt] = &mut self.0;
        match class {
            Class::Change => change,
            Class::Open => open,
            Class::Attempt => attempt,
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Class, &T)> {
        Class::ALL.into_iter().zip(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_classes_are_the_whole_log_and_no_two_have_the_same_files() {
        let shares = Class::ALL.map(|class| class.share(1 << 20));
        assert_eq!(shares.iter().sum::<u64>(), 1 << 20);
        let prefixes = Class::ALL.map(Class::file_prefix);
        assert!(prefixes.iter().all(|prefix| prefixes.iter().filter(|other| *other == prefix).count() == 1));
        let values = ByClass::new(Class::name);
        assert!(values.iter().all(|(class, name)| class.name() == *name && values.get(class) == name));
    }
}
