//! Everything that takes a lock of the store, at once: opens, imports, attempts to remove. Root removes
//! what was imported while it is open.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blobd_client::protocol::request::RemoveParams;
use blobd_tests::model::ModelFile;

use super::{Begin, REMOVABLE};
use crate::Outcome;
use crate::arena::MODEL;
use crate::ground::Ground;

const OPENERS: usize = 4;
const IMPORTERS: usize = 4;
const REMOVERS: usize = 2;
/// From one call of a thread to its next.
const PERIOD: Duration = Duration::from_millis(150);

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let ground = ground.clone();
    Ok(Box::new(move || {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let latest = || format!("{REMOVABLE}{}", NUMBER.load(Ordering::Relaxed));
        for importer in 0..IMPORTERS {
            let mut ground_of_one = ground.clone();
            ground_of_one.folder = ground.folder.join(importer.to_string());
            std::fs::create_dir_all(&ground_of_one.folder)?;
            ground_of_one.repeat(PERIOD, |ground| {
                let number = NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
                ground.import(&format!("{REMOVABLE}{number}"), &ModelFile::dense(number).bytes())?;
                ground.count("imported");
                Ok(())
            });
        }
        for opener in 0..OPENERS {
            let mut held = None;
            ground.repeat(PERIOD, move |ground| {
                drop(held.take());
                let name = if opener % 2 == 0 { MODEL.to_owned() } else { latest() };
                held = Some(ground.client().open(&name.parse()?)?);
                ground.count("opened");
                Ok(())
            });
        }
        for _ in 0..REMOVERS {
            ground.repeat(PERIOD, move |ground| {
                let references = vec![latest().parse()?];
                let removed = ground.client().remove(&RemoveParams { references, keep_seconds: None });
                ground.count(if removed.is_ok() { "removed" } else { "not removed" });
                Ok(())
            });
        }
        Ok(())
    }))
}
