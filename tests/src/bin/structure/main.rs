//! `structure`: prints the crates of the workspace, their modules, and which module uses which.
//!
//! Edges are between siblings: a module counts together with its submodules, so that `a -> b` says that
//! something in `a` uses something in `b`, wherever it is declared or re-exported. Unit tests are left
//! out. Ends with exit code 1 if siblings use each other in a cycle.
//!
//! Paths are read from the syntax trees of the sources, `use` declarations and macro arguments included, and so are
//! calls of methods: one that a module defines for a type of another is a use of that module (`methods`).

mod cycles;
mod edges;
mod methods;
mod names;
mod source;
mod std_types;
mod types;
mod workspace;

use std::collections::BTreeSet;
use std::error::Error;
use std::process::ExitCode;

use edges::{Cycle, Siblings};
use source::Module;
use types::Declarations;
use workspace::{Package, packages};

fn main() -> ExitCode {
    match print_structure() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_cycles) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("structure: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints everything; returns the number of cycles.
fn print_structure() -> Result<usize, Box<dyn Error>> {
    let packages = packages()?;
    let methods = packages.iter().map(method_names).collect::<Result<Vec<_>, _>>()?;
    let (mut modules, mut unresolved, mut cycles) = (0, 0, Vec::new());
    for (place, package) in packages.iter().enumerate() {
        println!("{} ({})", package.name, package.directory);
        println!("  uses: {}", list(&package.uses));
        let others = methods.iter().enumerate().filter(|(other, _)| *other != place);
        let foreign: BTreeSet<String> = others.flat_map(|(_, names)| names).cloned().collect();
        for target in &package.targets {
            let tree = Module::read(&target.root)?;
            let siblings = Siblings::of(&tree, &foreign);
            println!("  {}", target.name);
            modules += print_modules(&tree, &siblings, &mut Vec::new());
            unresolved += siblings.unresolved;
            let named = |cycle| (format!("{} {}", package.name, target.name), cycle);
            cycles.extend(siblings.cycles().into_iter().map(named));
        }
        println!();
    }
    for (name, Cycle { modules, edges }) in &cycles {
        println!("cycle in {name}: {}", modules.join(", "));
        edges.iter().for_each(|edge| println!("  {edge}"));
    }
    println!("calls of methods that several modules define, on a receiver of unknown type: {unresolved}");
    println!("{} crates, {modules} modules, {} cycles", packages.len(), cycles.len());
    Ok(cycles.len())
}

/// The names of all methods that a package's types have.
fn method_names(package: &Package) -> Result<BTreeSet<String>, Box<dyn Error>> {
    let mut names = BTreeSet::new();
    for target in &package.targets {
        let declarations = Declarations::of(&Module::read(&target.root)?);
        names.extend(declarations.methods_by_name().into_keys().map(str::to_owned));
    }
    Ok(names)
}

/// Prints the modules below one, indented; says how many they are.
fn print_modules(module: &Module, siblings: &Siblings, path: &mut Vec<String>) -> usize {
    let mut count = 0;
    for child in &module.children {
        path.push(child.name.clone());
        let indent = "  ".repeat(1 + path.len());
        match siblings.used_by(path) {
            uses if uses.is_empty() => println!("{indent}{}", child.name),
            uses => println!("{indent}{} -> {}", child.name, list(&uses)),
        }
        count += 1 + print_modules(child, siblings, path);
        path.pop();
    }
    count
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "nothing of this workspace".to_owned() } else { names.join(", ") }
}
