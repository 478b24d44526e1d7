//! Bars of work on several items at the same time, and one of it all.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Bar, Progress, Template};
use crate::output::printable;

/// The bars of a command. On a terminal, the one of everything is above those of the items. Lines are only about
/// everything.
#[derive(Debug)]
pub struct Bars {
    /// `None` if there are no bars, or only one.
    each: Option<MultiProgress>,
    all: Bar,
    is_single: bool,
}

/// The progress of one of several items.
#[derive(Debug)]
pub struct ItemBar<'b> {
    bars: &'b Bars,
    bar: Option<ProgressBar>,
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
            each.add(all.bar.clone());
            each
        });
        Bars { each, all, is_single: count == 1 }
    }
}

impl Bars {
    /// A bar for one item of `total` bytes.
    pub fn item(&self, label: &str, total: u64) -> ItemBar<'_> {
        let bar = self.each.as_ref().map(|each| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
            bar.set_message(printable(label));
            Template::Transferring.apply_to(&bar);
            each.add(bar)
        });
        ItemBar { bars: self, bar, counted: AtomicU64::new(0) }
    }

    /// Prints something while the bars are not on the screen.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        match &self.each {
            Some(each) => each.suspend(print),
            None => self.all.bar.suspend(print),
        }
    }

    /// Removes all bars from the screen.
    pub fn clear(self) {
        self.all.clear();
    }
}

impl ItemBar<'_> {
    pub fn set(&self, completed: u64, total: u64) {
        if let Some(bar) = &self.bar {
            if bar.length() != Some(total) {
                bar.set_length(total);
            }
            bar.set_position(completed);
        }
        if self.bars.is_single {
            self.bars.all.set(completed, total);
            return;
        }
        let before = self.counted.swap(completed, Ordering::Relaxed);
        let all = &self.bars.all.bar;
        all.inc(completed.saturating_sub(before));
        // A repeated request begins again.
        all.dec(before.saturating_sub(completed));
    }
}

impl Drop for ItemBar<'_> {
    fn drop(&mut self) {
        if let (Some(bar), Some(each)) = (&self.bar, &self.bars.each) {
            bar.finish_and_clear();
            each.remove(bar);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_item_has_the_bar_of_all() {
        let bars = Progress::new(true).bars("a", 0, 1);
        bars.item("a", 0).set(4, 10);
        assert_eq!(bars.all.position(), 4);
        assert_eq!(bars.all.bar.length(), Some(10));
    }

    #[test]
    fn bytes_of_all_items_are_added() {
        let bars = Progress::new(true).bars("2 models", 30, 2);
        let (first, second) = (bars.item("a", 10), bars.item("b", 20));
        first.set(4, 10);
        second.set(20, 20);
        first.set(10, 10);
        second.set(5, 20);
        assert_eq!(bars.all.position(), 15);
        second.set(20, 20);
        assert_eq!(bars.all.position(), 30);
        drop((first, second));
        assert_eq!(bars.suspend(|| 7), 7);
        bars.clear();
    }
}
