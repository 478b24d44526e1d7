//! Work on several items at the same time, reported in their order.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::ErrorBody;

/// Runs jobs on as many threads as the machine has processors. A job is a list of items that are worked on one after the
/// other. Each result is reported as soon as those of all items before it are.
///
/// # Errors
/// That of `report`, after which no further job begins.
pub(crate) fn run_in_order<R: Send>(
    jobs: &[Vec<usize>],
    work: impl Fn(usize) -> R + Sync,
    mut report: impl FnMut(usize, R) -> Result<(), ErrorBody>,
) -> Result<(), ErrorBody> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(jobs.len());
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for item in job {
                        if sender.send((*item, work(*item))).is_err() {
                            return;
                        }
                    }
                }
            });
        }
        drop(sender);
        let mut items: Vec<usize> = jobs.iter().flatten().copied().collect();
        items.sort_unstable_by(|a, b| b.cmp(a));
        let mut finished = BTreeMap::new();
        for (item, result) in results {
            finished.insert(item, result);
            while let Some((item, result)) = items.last().and_then(|item| finished.remove_entry(item)) {
                items.pop();
                report(item, result)?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use blobd_cli_common::usage;

    #[test]
    fn each_item_is_worked_on_once_and_reported_in_order() {
        let jobs = [vec![4, 1], vec![0], vec![2, 3, 5], Vec::new(), vec![6]];
        let (worked, mut reported) = (Mutex::new(Vec::new()), Vec::new());
        let work = |item: usize| {
            // The first items take the longest.
            thread::sleep(std::time::Duration::from_millis(20_u64.saturating_sub(3 * item as u64)));
            worked.lock().unwrap().push(item);
            item * 2
        };
        let report = |item, result| {
            reported.push((item, result));
            Ok(())
        };
        run_in_order(&jobs, work, report).unwrap();
        assert_eq!(reported, (0..7).map(|item| (item, item * 2)).collect::<Vec<_>>());
        let worked = worked.into_inner().unwrap();
        assert_eq!(worked.len(), 7);
        let place = |item| worked.iter().position(|other| *other == item);
        assert!(place(4) < place(1) && place(2) < place(3), "{worked:?}");
        run_in_order(&[], |item| item, |_, _| Err(usage("nothing to report"))).unwrap();
    }

    #[test]
    fn no_job_begins_after_a_report_that_fails() {
        let jobs: Vec<_> = (0..1000).map(|item| vec![item]).collect();
        let worked = AtomicUsize::new(0);
        let work = |_| {
            worked.fetch_add(1, Ordering::Relaxed);
            thread::sleep(std::time::Duration::from_millis(1));
        };
        let result = run_in_order(&jobs, work, |_, ()| Err(usage("no output")));
        assert!(result.is_err() && worked.into_inner() < 500);
    }
}
