//! Finds the module that declares what a path names.

use super::source::Module;

/// A module's path from the crate's root.
pub(crate) type ModulePath = Vec<String>;

/// An item: the module that declares it, and what is left of its path, such as a type and its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) module: ModulePath,
    pub(crate) rest: Vec<String>,
}

/// The names of a crate.
pub(crate) struct Names<'t> {
    pub(crate) root: &'t Module,
}

/// The most re-exports to follow, in case they form a cycle.
const MAX_REEXPORTS: usize = 16;

impl Names<'_> {
    /// Follows a path that is written in the module `from`; none for items of other crates.
    pub(crate) fn resolve(&self, from: &[String], path: &[String]) -> Option<Named> {
        self.resolve_within(from, path, MAX_REEXPORTS)
    }

    fn resolve_within(&self, from: &[String], path: &[String], depth: usize) -> Option<Named> {
        let depth = depth.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.descend(Vec::new(), rest, depth),
            "self" => self.descend(from.to_vec(), rest, depth),
            "super" => {
                let above = rest.iter().take_while(|name| *name == "super").count();
                let base = from.get(..from.len().checked_sub(1 + above)?)?;
                self.descend(base.to_vec(), rest.get(above..)?, depth)
            }
            _ if self.find(from)?.children.iter().any(|child| child.name == *first) => {
                self.descend(from.to_vec(), path, depth)
            }
            _ => {
                let Some(import) = self.import(from, first) else {
                    let declares = self.find(from)?.declares(first);
                    return declares.then(|| Named { module: from.to_vec(), rest: path.to_vec() });
                };
                // Otherwise `use x::y` in a module that imports another `x` would recurse for ever.
                (import.first() != Some(first)).then_some(())?;
                let named: Vec<String> = import.iter().chain(rest).cloned().collect();
                self.resolve_within(from, &named, depth)
            }
        }
    }

    /// Follows names from a module, through submodules and re-exports.
    fn descend(&self, mut at: ModulePath, names: &[String], depth: usize) -> Option<Named> {
        for (place, name) in names.iter().enumerate() {
            let module = self.find(&at)?;
            if module.children.iter().any(|child| child.name == *name) {
                at.push(name.clone());
                continue;
            }
            let rest = names.get(place..)?.to_vec();
            let Some(import) = self.import(&at, name) else { return Some(Named { module: at, rest }) };
            let named: Vec<String> = import.iter().chain(names.get(place + 1..)?).cloned().collect();
            // An item of another crate, re-exported here, counts as this module's.
            return self.resolve_within(&at, &named, depth).or(Some(Named { module: at, rest }));
        }
        Some(Named { module: at, rest: Vec::new() })
    }

    /// Whether this is a struct, enum, union or trait.
    pub(crate) fn is_type(&self, named: &Named) -> bool {
        let module = self.find(&named.module);
        module.is_some_and(|module| named.rest.first().is_some_and(|name| module.declares_type(name)))
    }

    fn find(&self, path: &[String]) -> Option<&Module> {
        path.iter()
            .try_fold(self.root, |module, name| module.children.iter().find(|child| child.name == *name))
    }

    fn import(&self, module: &[String], name: &str) -> Option<&[String]> {
        let imports = &self.find(module)?.imports;
        let import = imports.iter().find(|import| import.name.as_deref() == Some(name))?;
        Some(&import.path)
    }
}
