//! Records of the daemon's starts, stops and reloads, and of the log being switched on or off.

use std::io;

use blobd_client::protocol::audit::AuditRecord;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::upkeep::{AppliedBy, Setting};
use serde_json::{Value, json};

use super::class::Class;
use super::directory::LogDirectory;
use super::series::last_record;
use super::{AuditLog, LogEvent, LogSettings, notice};

/// The verbs of these records, besides `audit`.
pub(crate) const LIFECYCLE_VERBS: [&str; 3] = ["start", "stop", "reload"];

fn own_record<const N: usize>(verb: &str, details: [(&'static str, Value); N]) -> AuditRecord {
    let pid = i32::try_from(std::process::id()).ok();
    let result = "ok".to_owned();
    AuditRecord { verb: verb.to_owned(), pid, result, ..notice(None, LogEvent::On, details) }
}

pub(crate) fn start_record(socket: &str, store: &str) -> AuditRecord {
    let version = env!("CARGO_PKG_VERSION");
    own_record("start", [("version", json!(version)), ("socket", json!(socket)), ("store", json!(store))])
}

/// `None` if the daemon ended without a signal.
pub(crate) fn stop_record(signal: Option<&str>) -> AuditRecord {
    own_record("stop", [("signal", json!(signal))])
}

/// The settings that differ with their earlier values, or why the configuration stays as it was.
pub(crate) fn reload_record(result: Result<&[(Setting, Setting)], &ErrorBody>) -> AuditRecord {
    let change = |(old, new): &(Setting, Setting)| {
        let takes_effect = match new.applied_by {
            AppliedBy::Restart => "restart",
            _ => "now",
        };
        json!({ "key": new.key, "from": old.value, "to": new.value, "takes_effect": takes_effect })
    };
    match result {
        Ok(changes) => {
            let changes: Vec<Value> = changes.iter().map(change).collect();
            own_record("reload", [("changes", changes.into())])
        }
        Err(error) => AuditRecord {
            result: error.code.name().to_owned(),
            message: Some(error.message.clone()),
            ..own_record("reload", [])
        },
    }
}

/// Starts the log, or leaves it off. A log that has records already gets one when it is switched off or on.
pub(crate) fn switch(log: &AuditLog, settings: LogSettings, is_on: bool) -> io::Result<()> {
    let was_off = last_state(&settings.directory);
    match (is_on, was_off) {
        (true, was_off) => {
            log.start(settings)?;
            if was_off == Some(true) {
                log.record(notice(None, LogEvent::On, []));
            }
            Ok(())
        }
        (false, Some(false)) => {
            let last = AuditLog::default();
            last.start(settings)?;
            last.record(notice(None, LogEvent::Off, []));
            last.stop();
            Ok(())
        }
        (false, _) => Ok(()),
    }
}

/// Whether the log was last switched off; `None` if there is no readable log.
fn last_state(directory: &LogDirectory) -> Option<bool> {
    if !directory.exists() {
        return None;
    }
    let last = last_record(directory, Class::Change).ok()??;
    Some(last.verb == "audit" && last.result == LogEvent::Off.name())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use blobd_store::StoreOwner;

    use super::super::{Filter, Latest, LogReader, Rotation};
    use super::*;

    fn settings(path: &Path) -> LogSettings {
        let rotation = Rotation { max_bytes: 1 << 20, keep: 2 };
        LogSettings {
            directory: LogDirectory::at(path, StoreOwner::for_process()),
            rotation,
            is_forwarded: false,
        }
    }

    fn results(path: &Path) -> Vec<String> {
        let latest = Latest { limit: 100, count_earlier: 0, up_to: u64::MAX };
        let directory = LogDirectory::at(path, StoreOwner::for_process()).into();
        let mut reader = LogReader::find(directory, Filter::default(), latest, &|| true).unwrap().unwrap();
        let records = reader.next_found().unwrap().records;
        records.into_iter().map(|record| format!("{} {}", record.verb, record.result)).collect()
    }

    #[test]
    fn log_says_once_when_it_was_switched_off_and_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let run = |is_on| {
            let log = AuditLog::default();
            switch(&log, settings(&path), is_on).unwrap();
            log.record(AuditRecord { verb: "rm".into(), result: "ok".into(), ..AuditRecord::default() });
            log.stop();
        };
        run(false);
        assert!(!path.exists(), "no log, and none begins");
        for is_on in [true, false, false, true, true] {
            run(is_on);
        }
        assert_eq!(results(&path), ["rm ok", "audit off", "audit on", "rm ok", "rm ok"]);
    }
}
