//! `structure`: prints the crates of the workspace, their modules, and which module uses which.
//!
//! Edges are between siblings: a module counts together with its submodules, so that `a -> b` says that
//! something in `a` uses something in `b`, wherever it is declared or re-exported. Unit tests are left
//! out. Ends with exit code 1 if siblings use each other in a circle.
//!
//! Paths are read from the syntax trees of the sources, `use` declarations and macro arguments included.
//! What only a type checker could find (a method whose type is never named) is not seen.

mod circles;
mod edges;
mod source;
mod workspace;

use std::error::Error;
use std::process::ExitCode;

use edges::Siblings;
use source::Module;
use workspace::packages;

fn main() -> ExitCode {
    match print_structure() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_circles) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("structure: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints everything; says how many circles there are.
fn print_structure() -> Result<usize, Box<dyn Error>> {
    let packages = packages()?;
    let (mut modules, mut circles) = (0, Vec::new());
    for package in &packages {
        println!("{} ({})", package.name, package.directory);
        println!("  uses: {}", list(&package.uses));
        for target in &package.targets {
            let tree = Module::read(&target.root)?;
            let siblings = Siblings::of(&tree);
            println!("  {}", target.name);
            modules += print_modules(&tree, &siblings, &mut Vec::new());
            let named =
                |circle: Vec<String>| format!("{} {}: {}", package.name, target.name, circle.join(" <-> "));
            circles.extend(siblings.circles().into_iter().map(named));
        }
        println!();
    }
    println!("{} crates, {modules} modules, {} circles", packages.len(), circles.len());
    circles.iter().for_each(|circle| println!("circle: {circle}"));
    Ok(circles.len())
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
