//! Which module uses which of its siblings.

use std::collections::{BTreeMap, BTreeSet};

use super::circles::circles;
use super::source::Module;

/// A module's path from the crate's root.
type ModulePath = Vec<String>;

/// For each module the siblings that it or its submodules use.
#[derive(Debug, Default)]
pub(crate) struct Siblings(BTreeMap<ModulePath, BTreeSet<ModulePath>>);

impl Siblings {
    /// Those of a crate.
    pub(crate) fn of(root: &Module) -> Self {
        let mut siblings = Self::default();
        siblings.add_module(&Names { root }, root, &[]);
        siblings
    }

    fn add_module(&mut self, names: &Names<'_>, module: &Module, path: &[String]) {
        for used in module.paths.iter().filter_map(|named| names.resolve(path, named)) {
            self.add(path, &used);
        }
        for child in &module.children {
            let below: ModulePath = path.iter().cloned().chain([child.name.clone()]).collect();
            self.add_module(names, child, &below);
        }
    }

    /// Adds the edge between the siblings that two modules are or are below of.
    fn add(&mut self, user: &[String], used: &[String]) {
        let common = user.iter().zip(used).take_while(|(one, other)| one == other).count();
        if let (Some(from), Some(to)) = (user.get(..=common), used.get(..=common)) {
            self.0.entry(from.to_vec()).or_default().insert(to.to_vec());
        }
    }

    /// The names of the siblings that a module uses.
    pub(crate) fn used_by(&self, path: &[String]) -> Vec<String> {
        self.0.get(path).into_iter().flatten().filter_map(|used| used.last().cloned()).collect()
    }

    /// The sets of siblings that use each other in a circle.
    pub(crate) fn circles(&self) -> Vec<Vec<String>> {
        let names = |circle: Vec<ModulePath>| circle.iter().map(|path| path.join("::")).collect();
        circles(&self.0).into_iter().map(names).collect()
    }
}

/// Finds the module that declares what a path names.
struct Names<'t> {
    root: &'t Module,
}

/// The most re-exports to follow, in case they form a cycle.
const MAX_REEXPORTS: usize = 16;

impl Names<'_> {
    /// The module in which the item of a path is declared; none for items of other crates.
    fn resolve(&self, from: &[String], path: &[String]) -> Option<ModulePath> {
        self.resolve_within(from, path, MAX_REEXPORTS)
    }

    fn resolve_within(&self, from: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
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
                let import = self.import(from, first)?;
                // Otherwise `use x::y` in a module that imports another `x` would recurse for ever.
                (import.first() != Some(first)).then_some(())?;
                let named: Vec<String> = import.iter().chain(rest).cloned().collect();
                self.resolve_within(from, &named, depth)
            }
        }
    }

    /// Follows names from a module, through submodules and re-exports.
    fn descend(&self, mut at: ModulePath, names: &[String], depth: usize) -> Option<ModulePath> {
        for (place, name) in names.iter().enumerate() {
            let module = self.find(&at)?;
            if module.children.iter().any(|child| child.name == *name) {
                at.push(name.clone());
                continue;
            }
            let Some(import) = self.import(&at, name) else { return Some(at) };
            let named: Vec<String> = import.iter().chain(names.get(place + 1..)?).cloned().collect();
            // An item of another crate, re-exported here, counts as this module's.
            return self.resolve_within(&at, &named, depth).or(Some(at));
        }
        Some(at)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::inline;

    fn used_by(text: &str, module: &str) -> Vec<String> {
        let path: ModulePath = module.split("::").map(str::to_owned).collect();
        Siblings::of(&inline(text)).used_by(&path)
    }

    #[test]
    fn uses_are_found_in_declarations_types_calls_and_macros() {
        let modules = "mod b { pub struct B; pub fn f() {} }";
        for user in [
            "mod a { use crate::b::B; }",
            "mod a { use super::b::{self, B as C}; }",
            "mod a { fn g(b: super::b::B) {} }",
            "mod a { fn g() { crate::b::f(); } }",
            "mod a { fn g() { println!(\"{:?}\", (1, crate::b::f())); } }",
            "mod a { mod c { use super::super::b; } }",
            "use b::B; mod a { use crate::B; }",
            "use b as c; mod a { use super::c::B; }",
        ] {
            assert_eq!(used_by(&format!("{modules} {user}"), "a"), ["b"], "{user}");
        }
    }

    #[test]
    fn what_a_module_and_its_submodules_share_is_no_edge() {
        assert!(used_by("mod a { pub struct A; mod b { use super::A; } use b::C; }", "a").is_empty());
        assert!(used_by("mod a { mod b { use super::A; } pub struct A; }", "a::b").is_empty());
        assert_eq!(used_by("mod a { mod b { use super::c::C; } mod c { pub struct C; } }", "a::b"), ["c"]);
    }

    #[test]
    fn unit_tests_and_other_crates_are_left_out() {
        let text = "mod b {} mod a { use std::fmt; #[cfg(test)] mod tests { use crate::b; } \
                    #[cfg(test)] use crate::b; #[cfg(test)] fn f() { crate::b::g() } }";
        assert!(used_by(text, "a").is_empty());
    }

    #[test]
    fn circles_are_found_among_siblings_at_every_level() {
        let text = "mod x { mod a { use super::b::B; } mod b { use super::c::C; } mod c { use super::a; } \
                    mod d { use super::a; } }";
        assert_eq!(Siblings::of(&inline(text)).circles(), [["x::a", "x::b", "x::c"]]);
        let through_submodules = "mod a { mod c { use crate::b::B; } } mod b { use crate::a::A; }";
        assert_eq!(Siblings::of(&inline(through_submodules)).circles(), [["a", "b"]]);
        assert!(Siblings::of(&inline("mod a { use super::b; } mod b {}")).circles().is_empty());
    }

    #[test]
    fn names_that_lead_in_a_circle_end() {
        let text = "use self::b::X; mod a { use crate::X; } mod b { pub use super::X; }";
        assert_eq!(used_by(text, "a"), ["b"], "the last module that was followed to");
    }
}
