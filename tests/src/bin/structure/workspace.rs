//! The packages of the workspace, read from `cargo metadata`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// A package of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Its folder in the workspace.
    pub(crate) directory: String,
    /// The packages of the workspace that its library and binaries use.
    pub(crate) uses: Vec<String>,
    /// Its library and binaries.
    pub(crate) targets: Vec<Target>,
}

/// A library or binary.
#[derive(Debug)]
pub(crate) struct Target {
    /// `library`, or the name of the binary.
    pub(crate) name: String,
    /// The file of its root module.
    pub(crate) root: PathBuf,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<RawPackage>,
    workspace_root: PathBuf,
}

#[derive(Deserialize)]
struct RawPackage {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<RawDependency>,
    targets: Vec<RawTarget>,
}

#[derive(Deserialize)]
struct RawDependency {
    name: String,
    /// Absent for normal dependencies; `dev` for those of tests.
    kind: Option<String>,
}

#[derive(Deserialize)]
struct RawTarget {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

/// All packages of the workspace that the current directory is in, by name.
pub(crate) fn packages() -> Result<Vec<Package>, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    let members: Vec<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    let described = |package| describe(package, &members, &metadata.workspace_root);
    let mut packages: Vec<Package> = metadata.packages.iter().map(described).collect();
    packages.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(packages)
}

fn describe(package: &RawPackage, members: &[&str], workspace: &Path) -> Package {
    let uses = package.dependencies.iter().filter(|dependency| dependency.kind.is_none());
    let uses = uses.map(|dependency| dependency.name.clone());
    let directory = package.manifest_path.parent().unwrap_or(workspace);
    let directory = directory.strip_prefix(workspace).unwrap_or(directory);
    Package {
        name: package.name.clone(),
        directory: directory.display().to_string(),
        uses: uses.filter(|name| members.contains(&name.as_str())).collect(),
        targets: package.targets.iter().filter_map(target).collect(),
    }
}

fn target(target: &RawTarget) -> Option<Target> {
    let is = |wanted: &[&str]| target.kind.iter().any(|kind| wanted.contains(&kind.as_str()));
    let name = match () {
        () if is(&["lib", "cdylib", "staticlib"]) => "library".to_owned(),
        () if is(&["bin"]) => target.name.clone(),
        () => return None,
    };
    Some(Target { name, root: target.src_path.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The packages that each package uses.
    const EDGES: [(&str, &[&str]); 18] = [
        (
            "blobd",
            &[
                "blobd-cli",
                "blobd-cli-common",
                "blobd-client",
                "blobd-fixtures",
                "blobd-server",
                "blobd-store-format",
            ],
        ),
        (
            "blobd-cli",
            &[
                "blobd-cli-common",
                "blobd-cli-import",
                "blobd-cli-mount",
                "blobd-cli-show",
                "blobd-client",
                "blobd-keys",
                "blobd-model",
                "blobd-store-format",
            ],
        ),
        ("blobd-cli-common", &["blobd-client", "blobd-model", "blobd-store-format"]),
        ("blobd-cli-import", &["blobd-cli-common", "blobd-client", "blobd-model", "blobd-store-format"]),
        ("blobd-cli-mount", &["blobd-cli-common", "blobd-client", "blobd-store-format"]),
        ("blobd-cli-show", &["blobd-cli-common", "blobd-client", "blobd-model", "blobd-store-format"]),
        ("blobd-client", &["blobd-model", "blobd-store-format"]),
        ("blobd-client-c", &["blobd-client", "blobd-model", "blobd-store-format"]),
        ("blobd-fixtures", &["blobd-store-format"]),
        ("blobd-keys", &["blobd-store-format"]),
        ("blobd-model", &["blobd-store-format"]),
        ("blobd-preload", &[]),
        ("blobd-registry", &["blobd-store-format"]),
        (
            "blobd-server",
            &[
                "blobd-client",
                "blobd-keys",
                "blobd-model",
                "blobd-registry",
                "blobd-store",
                "blobd-store-format",
            ],
        ),
        ("blobd-sha256", &[]),
        ("blobd-store", &["blobd-model", "blobd-sha256", "blobd-store-format"]),
        ("blobd-store-format", &[]),
        // It drives the binary, and the library of each crate.
        (
            "blobd-tests",
            &[
                "blobd-client",
                "blobd-fixtures",
                "blobd-model",
                "blobd-registry",
                "blobd-server",
                "blobd-sha256",
                "blobd-store",
                "blobd-store-format",
            ],
        ),
    ];

    /// A new edge needs a reason in `docs/ARCHITECTURE.md`: the command line knows neither the store nor the server, a
    /// client not the store, the store no registry.
    #[test]
    fn crates_use_the_crates_that_the_architecture_allows_and_no_others() {
        let used = |mut package: Package| {
            package.uses.sort();
            (package.name, package.uses)
        };
        let found: Vec<_> = packages().unwrap().into_iter().map(used).collect();
        let allowed = EDGES.map(|(name, uses)| {
            (name.to_owned(), uses.iter().map(|used| (*used).to_owned()).collect::<Vec<_>>())
        });
        assert_eq!(found, allowed);
    }
}
