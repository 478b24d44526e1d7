//! The verbs as commands that open the store themselves: no daemon runs.

use std::path::Path;

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::naming::{EditParams, Edited, KeyChange};
use blobd_client::protocol::naming::{Pinned, TrashList, Undeleted};
use blobd_client::protocol::naming::{Removed, Renamed, Tagged};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::response::{ModelDetails, ModelList};
use blobd_client::protocol::space::DiskUsage;
use blobd_client::protocol::upkeep::GcReport;
use blobd_client::protocol::upkeep::{DoctorReport, EvictionPlan};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use super::Verbs;
use crate::command::{Blobd, Run};
use crate::temp_dirs::tmpfs_directory;

/// A directory, and commands with it as their root.
#[derive(Debug)]
pub struct Commands {
    blobd: Blobd,
    folder: TempDir,
}

impl Commands {
    /// Commands on a store that does not exist yet.
    #[must_use]
    pub fn new() -> Self {
        let folder = tmpfs_directory();
        Self { blobd: Blobd::at_root(folder.path()), folder }
    }

    fn run(&self, words: &[&str]) -> Result<Run, ErrorBody> {
        let run = self.blobd.run(words.iter().chain(&["--json"]));
        if run.code == 0 {
            return Ok(run);
        }
        let error = run.error();
        assert_eq!(run.code, i32::from(error.code.exit_code()), "{error}");
        Err(error)
    }

    fn json<T: DeserializeOwned>(&self, words: &[&str]) -> Result<T, ErrorBody> {
        Ok(run_json(&self.run(words)?))
    }
}

fn run_json<T: DeserializeOwned>(run: &Run) -> T {
    serde_json::from_value(run.json()).unwrap_or_else(|error| panic!("{}: {error}", run.arguments))
}

impl Default for Commands {
    fn default() -> Self {
        Self::new()
    }
}

impl Verbs for Commands {
    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn import_with(&self, file: &Path, name: Option<&str>, force: bool) -> Result<Imported, ErrorBody> {
        let mut words = vec!["import", file.to_str().expect("a printable path")];
        words.extend(name.iter().flat_map(|name| ["--name", name]));
        words.extend(force.then_some("--force"));
        let response = self.run(&words)?.json();
        Ok(serde_json::from_value(response["imported"][0].clone()).expect("the shape of an import"))
    }

    fn export(&self, name: &str) -> Result<Vec<u8>, ErrorBody> {
        Ok(self.run(&["export", name, "-o", "-"])?.stdout)
    }

    fn list(&self) -> Result<ModelList, ErrorBody> {
        self.json(&["ls"])
    }

    fn show(&self, name: &str) -> Result<ModelDetails, ErrorBody> {
        self.json(&["show", name])
    }

    fn usage(&self) -> Result<DiskUsage, ErrorBody> {
        self.json(&["df"])
    }

    fn tag_with(&self, source: &str, target: &str, force: bool) -> Result<Tagged, ErrorBody> {
        self.json(&[&["tag", source, target][..], if force { &["--force"] } else { &[] }].concat())
    }

    fn rename(&self, source: &str, target: &str, force: bool) -> Result<Renamed, ErrorBody> {
        self.json(&[&["rename", source, target][..], if force { &["--force"] } else { &[] }].concat())
    }

    fn edit(&self, params: &EditParams) -> Result<Edited, ErrorBody> {
        let option = |KeyChange { key, value, value_type }: &KeyChange| match value {
            None => format!("--unset={key}"),
            Some(value) => {
                let value_type = value_type.as_ref().map_or_else(String::new, |name| format!(":{name}"));
                format!("--set={key}{value_type}={value}")
            }
        };
        let mut words = vec!["edit".to_owned(), params.source.to_string(), params.target.to_string()];
        words.extend(params.keys.iter().map(option));
        words.extend(params.template_layer.iter().map(|text| format!("--template-layer={text}")));
        words.extend(params.files.iter().map(|file| match &file.text {
            Some(text) => format!("--file={}={text}", file.path),
            None => format!("--remove-file={}", file.path),
        }));
        words.extend(params.force.then(|| "--force".to_owned()));
        words.extend(params.dry_run.then(|| "--dry-run".to_owned()));
        self.json(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn remove(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        self.json(&[&["rm"], names].concat())
    }

    fn plan_removal(&self, names: &[&str]) -> Result<Removed, ErrorBody> {
        self.json(&[&["rm", "--dry-run"], names].concat())
    }

    fn move_to_trash(&self, names: &[&str], keep_seconds: u64) -> Result<Removed, ErrorBody> {
        let keep = format!("--keep={keep_seconds}s");
        self.json(&[&["rm", &keep], names].concat())
    }

    fn undelete(&self, name: &str) -> Result<Undeleted, ErrorBody> {
        let response = self.run(&["undelete", name])?.json();
        Ok(serde_json::from_value(response["undeleted"][0].clone()).expect("the shape of an undeletion"))
    }

    fn trash(&self) -> Result<TrashList, ErrorBody> {
        self.json(&["ls", "--trash"])
    }

    fn pin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        let response = self.run(&["pin", name])?.json();
        Ok(serde_json::from_value(response["pins"][0].clone()).expect("the shape of a pin"))
    }

    fn unpin(&self, name: &str) -> Result<Pinned, ErrorBody> {
        let response = self.run(&["unpin", name])?.json();
        Ok(serde_json::from_value(response["pins"][0].clone()).expect("the shape of a pin"))
    }

    fn eviction_plan(&self, bytes: Option<u64>) -> Result<EvictionPlan, ErrorBody> {
        let wanted = bytes.map_or_else(String::new, |bytes| format!("={bytes}B"));
        self.json(&["gc", &format!("--plan-eviction{wanted}")])
    }

    fn doctor(&self) -> Result<DoctorReport, ErrorBody> {
        // If a check fails, the exit code is 1, but the report is complete.
        let run = self.blobd.run(["doctor", "--json"]);
        if run.stdout.is_empty() { Err(run.error()) } else { Ok(run_json(&run)) }
    }

    fn gc(&self, dry_run: bool) -> Result<GcReport, ErrorBody> {
        let words = if dry_run { &["gc", "--dry-run"][..] } else { &["gc"] };
        self.json(words)
    }
}
