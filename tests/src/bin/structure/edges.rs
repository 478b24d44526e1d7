//! Which module uses which of its siblings.

use std::collections::{BTreeMap, BTreeSet};

use super::cycles::cycles;
use super::methods::{MethodUses, method_uses};
use super::names::{ModulePath, Names};
use super::source::Module;

/// For each module the siblings that it or its submodules use.
#[derive(Debug, Default)]
pub(crate) struct Siblings {
    used: BTreeMap<ModulePath, BTreeSet<ModulePath>>,
    /// Methods and paths through which one sibling uses another.
    through: BTreeMap<(ModulePath, ModulePath), BTreeSet<String>>,
    /// Calls of methods whose receiver is unknown and that several modules define.
    pub(crate) unresolved: usize,
}

/// A cycle of siblings that use each other.
#[derive(Debug)]
pub(crate) struct Cycle {
    pub(crate) modules: Vec<String>,
    /// Which of them uses which, and through which methods and paths.
    pub(crate) edges: Vec<String>,
}

impl Siblings {
    /// Those of a crate. A method that a type of `foreign` has too may be that type's.
    pub(crate) fn of(root: &Module, foreign: &BTreeSet<String>) -> Self {
        let mut siblings = Self::default();
        siblings.add_module(&Names { root }, root, &[]);
        let MethodUses { uses, unresolved } = method_uses(root, foreign);
        siblings.unresolved = unresolved;
        for (user, used, method) in uses {
            siblings.add(&user, &used, method);
        }
        siblings
    }

    fn add_module(&mut self, names: &Names<'_>, module: &Module, path: &[String]) {
        for named in &module.paths {
            if let Some(used) = names.resolve(path, named) {
                self.add(path, &used.module, named.join("::"));
            }
        }
        for child in &module.children {
            let below: ModulePath = path.iter().cloned().chain([child.name.clone()]).collect();
            self.add_module(names, child, &below);
        }
    }

    /// Adds the edge between the siblings that contain two modules.
    fn add(&mut self, user: &[String], used: &[String], through: String) {
        let common = user.iter().zip(used).take_while(|(one, other)| one == other).count();
        if let (Some(from), Some(to)) = (user.get(..=common), used.get(..=common)) {
            self.used.entry(from.to_vec()).or_default().insert(to.to_vec());
            self.through.entry((from.to_vec(), to.to_vec())).or_default().insert(through);
        }
    }

    /// The names of the siblings that a module uses.
    pub(crate) fn used_by(&self, path: &[String]) -> Vec<String> {
        self.used.get(path).into_iter().flatten().filter_map(|used| used.last().cloned()).collect()
    }

    /// The sets of siblings that use each other in a cycle.
    pub(crate) fn cycles(&self) -> Vec<Cycle> {
        cycles(&self.used).iter().map(|modules| self.cycle(modules)).collect()
    }

    fn cycle(&self, modules: &[ModulePath]) -> Cycle {
        let within =
            self.through.iter().filter(|((from, to), _)| modules.contains(from) && modules.contains(to));
        let edge = |((from, to), through): (&(ModulePath, ModulePath), &BTreeSet<String>)| {
            let through: Vec<&str> = through.iter().map(String::as_str).collect();
            format!("{} -> {}: {}", from.join("::"), to.join("::"), through.join(", "))
        };
        Cycle {
            modules: modules.iter().map(|path| path.join("::")).collect(),
            edges: within.map(edge).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::inline;

    fn used_by(text: &str, module: &str) -> Vec<String> {
        let path: ModulePath = module.split("::").map(str::to_owned).collect();
        Siblings::of(&inline(text), &BTreeSet::new()).used_by(&path)
    }

    fn cycles(text: &str) -> Vec<Vec<String>> {
        let siblings = Siblings::of(&inline(text), &BTreeSet::new());
        siblings.cycles().into_iter().map(|cycle| cycle.modules).collect()
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
    fn use_within_a_module_and_its_submodules_is_not_an_edge() {
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
    fn cycles_are_found_among_siblings_at_every_level() {
        let text = "mod x { mod a { use super::b::B; } mod b { use super::c::C; } mod c { use super::a; } \
                    mod d { use super::a; } }";
        assert_eq!(cycles(text), [["x::a", "x::b", "x::c"]]);
        let through_submodules = "mod a { mod c { use crate::b::B; } } mod b { use crate::a::A; }";
        assert_eq!(cycles(through_submodules), [["a", "b"]]);
        assert!(cycles("mod a { use super::b; } mod b {}").is_empty());
    }

    #[test]
    fn cycle_through_methods_is_found_and_names_them() {
        let text = "struct Store; mod tags { use crate::Store; impl Store { pub fn tag(&self) { self.record() } } } \
                    mod history { use crate::Store; impl Store { pub fn record(&self) {} pub fn last(&self) { self.tag() } } }";
        let siblings = Siblings::of(&inline(text), &BTreeSet::new());
        let [cycle] = <[Cycle; 1]>::try_from(siblings.cycles()).unwrap();
        assert_eq!(cycle.modules, ["history", "tags"]);
        assert_eq!(cycle.edges, ["history -> tags: Store::tag", "tags -> history: Store::record"]);
    }

    #[test]
    fn cyclic_reexports_terminate() {
        let text = "use self::b::X; mod a { use crate::X; } mod b { pub use super::X; }";
        assert_eq!(used_by(text, "a"), ["b"], "the last module that was followed to");
    }
}
