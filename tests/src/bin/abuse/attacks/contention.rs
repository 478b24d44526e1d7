//! All operations that lock the store at once: opens, imports and attempts to remove. Root removes the
//! imported models while they are open.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blobd_client::protocol::request::RemoveParams;
use blobd_tests::model::ModelFile;

use super::{Begin, REMOVABLE};
use crate::Outcome;
use crate::context::AttackContext;
use crate::environment::MODEL;

const OPENERS: usize = 4;
const IMPORTERS: usize = 4;
const REMOVERS: usize = 2;
/// From the start of one call of a thread to the start of its next.
const PERIOD: Duration = Duration::from_millis(150);

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    let context = context.clone();
    Ok(Box::new(move || {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let latest = || format!("{REMOVABLE}{}", NUMBER.load(Ordering::Relaxed));
        for importer in 0..IMPORTERS {
            let mut own_context = context.clone();
            own_context.folder = context.folder.join(importer.to_string());
            std::fs::create_dir_all(&own_context.folder)?;
            own_context.repeat(PERIOD, |context| {
                let number = NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
                context.import(&format!("{REMOVABLE}{number}"), &ModelFile::dense(number).bytes())?;
                context.count("imported");
                Ok(())
            });
        }
        for opener in 0..OPENERS {
            let mut held = None;
            context.repeat(PERIOD, move |context| {
                drop(held.take());
                let name = if opener % 2 == 0 { MODEL.to_owned() } else { latest() };
                held = Some(context.client().open(&name.parse()?)?);
                context.count("opened");
                Ok(())
            });
        }
        for _ in 0..REMOVERS {
            context.repeat(PERIOD, move |context| {
                let references = vec![latest().parse()?];
                let removed =
                    context.client().remove(&RemoveParams { references, ..RemoveParams::default() });
                context.count(if removed.is_ok() { "removed" } else { "not removed" });
                Ok(())
            });
        }
        Ok(())
    }))
}
