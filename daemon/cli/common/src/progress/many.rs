//! Bars of work on several items at the same time, and one of it all.

use std::sync::atomic::{AtomicU64, Ordering};

use blobd_client::protocol::event::ImportProgress;
use indicatif::{MultiProgress, ProgressDrawTarget};

use super::{Bar, Progress, Shown, TICK_INTERVAL};

/// The bars of a command. On a terminal, the one of everything is above those of the items. Lines are only about
/// everything.
#[derive(Debug)]
pub struct Bars {
    /// `None` if there are no bars, or only one.
    each: Option<MultiProgress>,
    all: Bar,
    is_single: bool,
    /// The bytes of all items that are done, and those of all items.
    done: AtomicU64,
    total: u64,
}

/// The progress of one of several items.
#[derive(Debug)]
pub struct ItemBar<'b> {
    bars: &'b Bars,
    shown: Option<Shown>,
    /// The bytes that were added to those of all items.
    counted: AtomicU64,
}

impl Progress {
    /// Bars for items with these bytes together. `label` is that of the only item, or of all.
    pub fn bars(&self, label: &str, total: u64, count: usize) -> Bars {
        let all = self.bar(label, total);
        let shows_each = count > 1 && self.0.has_bars && !self.0.quiet;
        let each = shows_each.then(|| {
            let each = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
            each.add(all.shown.bar.clone());
            each
        });
        Bars { each, all, is_single: count == 1, done: AtomicU64::new(0), total }
    }
}

impl Bars {
    /// A bar for one item of `total` bytes.
    pub fn item(&self, label: &str, total: u64) -> ItemBar<'_> {
        let shown = self.each.as_ref().map(|each| {
            let Shown { bar, view } = Shown::new(0, label, total);
            let bar = each.add(bar);
            bar.enable_steady_tick(TICK_INTERVAL);
            Shown { bar, view }
        });
        ItemBar { bars: self, shown, counted: AtomicU64::new(0) }
    }

    /// Prints something while the bars are not on the screen. That of an only item has ended when its result is printed.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        if self.is_single {
            self.all.shown.bar.finish_and_clear();
        }
        match &self.each {
            Some(each) => each.suspend(print),
            None => self.all.shown.bar.suspend(print),
        }
    }

    /// Removes all bars from the screen.
    pub fn clear(self) {
        self.all.clear();
    }
}

impl ItemBar<'_> {
    /// Shows how far the import of the item is.
    pub fn show(&self, progress: ImportProgress) {
        if let Some(shown) = &self.shown {
            shown.change(|view, now| view.show_import(&progress, now));
        }
        if self.bars.is_single {
            return self.bars.all.shown.change(|view, now| view.show_import(&progress, now));
        }
        let completed = progress.completed;
        let before = self.counted.swap(completed, Ordering::Relaxed);
        let done = &self.bars.done;
        done.fetch_add(completed.saturating_sub(before), Ordering::Relaxed);
        // A repeated request begins again.
        done.fetch_sub(before.saturating_sub(completed), Ordering::Relaxed);
        self.bars.all.set(done.load(Ordering::Relaxed), self.bars.total);
    }
}

impl Drop for ItemBar<'_> {
    fn drop(&mut self) {
        if let (Some(shown), Some(each)) = (&self.shown, &self.bars.each) {
            shown.bar.finish_and_clear();
            each.remove(&shown.bar);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lock;
    use super::*;

    fn read(completed: u64, total: u64) -> ImportProgress {
        ImportProgress { completed, total, ..ImportProgress::default() }
    }

    #[test]
    fn only_item_has_the_bar_of_all() {
        let bars = Progress::new(true).bars("a", 0, 1);
        bars.item("a", 0).show(read(4, 10));
        assert_eq!((bars.all.position(), lock(&bars.all.shown.view).total()), (4, 10));
    }

    #[test]
    fn bytes_of_all_items_are_added() {
        let bars = Progress::new(true).bars("2 models", 30, 2);
        let (first, second) = (bars.item("a", 10), bars.item("b", 20));
        first.show(read(4, 10));
        second.show(read(20, 20));
        first.show(read(10, 10));
        second.show(read(5, 20));
        assert_eq!(bars.all.position(), 15);
        second.show(read(20, 20));
        assert_eq!(bars.all.position(), 30);
        drop((first, second));
        assert_eq!(bars.suspend(|| 7), 7);
        bars.clear();
    }
}
