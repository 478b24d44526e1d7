//! Tables for terminals of any width: no line is longer than the terminal, and no two different rows look the same.

use std::collections::HashSet;

use blobd_store_format::text::printable;

use self::cut::{Cut, distinct_cuts, end_cut};

pub mod cut;

/// A table whose first row is the heading. If the rows are wider than the terminal, columns that say nothing are left out,
/// names are cut in the middle and texts at the end, and then other columns are left out.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
    right: Vec<usize>,
    /// The columns that may be cut.
    cut: Vec<(usize, Cut)>,
    /// The columns that are left out first, in this order.
    left_out_first: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Row {
    Cells(Vec<String>),
    /// A line of text between the rows.
    Line(String),
}

impl Row {
    fn cells(&self) -> &[String] {
        match self {
            Self::Cells(cells) => cells,
            Self::Line(_) => &[],
        }
    }
}

/// The space between two columns.
const GAP: usize = 2;

impl Table {
    /// A table with these headings. `right` lists the columns that are aligned to the right. The first column has names,
    /// and the last one, unless it is aligned to the right, texts.
    #[must_use]
    pub fn new(headings: &[&str], right: &[usize]) -> Self {
        let mut cut = vec![(0, Cut::Middle)];
        let last = headings.len().saturating_sub(1);
        cut.extend((last > 0 && !right.contains(&last)).then_some((last, Cut::End)));
        let headings = headings.iter().map(|heading| printable(heading)).collect();
        Self { rows: vec![Row::Cells(headings)], right: right.to_vec(), cut, left_out_first: Vec::new() }
    }

    /// A table with these rows; see [`Self::new`].
    pub fn with_rows<R: IntoIterator<Item = String>>(
        headings: &[&str],
        right: &[usize],
        rows: impl IntoIterator<Item = R>,
    ) -> Self {
        let mut table = Self::new(headings, right);
        rows.into_iter().for_each(|row| table.row(row));
        table
    }

    /// These columns have names, and the first one only if it is among them.
    #[must_use]
    pub fn with_names_in(mut self, columns: &[usize]) -> Self {
        self.cut.retain(|(column, cut)| *cut == Cut::End && !columns.contains(column));
        self.cut.extend(columns.iter().map(|column| (*column, Cut::Middle)));
        self
    }

    /// These columns have texts or values.
    #[must_use]
    pub fn with_texts_in(mut self, columns: &[usize]) -> Self {
        self.cut.retain(|(column, _)| !columns.contains(column));
        self.cut.extend(columns.iter().map(|column| (*column, Cut::End)));
        self
    }

    /// The labels in the first column are never cut, and the values in the second one at the end.
    #[must_use]
    pub fn of_values(mut self) -> Self {
        self.cut = vec![(1, Cut::End)];
        self
    }

    /// The columns with these headings say least, and are left out first on a narrow terminal, in this order.
    #[must_use]
    pub fn leaving_out_first(mut self, headings: &[&str]) -> Self {
        let place = |heading: &&str| self.headings().iter().position(|other| other == heading);
        self.left_out_first = headings.iter().filter_map(place).collect();
        self
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(Row::Cells(cells.into_iter().map(|cell| printable(&cell)).collect()));
    }

    /// Adds a line below the last row, whatever the widths of the columns are.
    pub fn line(&mut self, line: &str) {
        self.rows.push(Row::Line(printable(line)));
    }

    /// The number of rows, without the headings.
    pub fn row_count(&self) -> usize {
        self.rows.len().saturating_sub(1)
    }

    /// Whether it has more than its headings.
    pub fn has_rows(&self) -> bool {
        self.row_count() > 0
    }

    /// Keeps at most `most` rows below the heading. The last one then says how many are left out.
    pub fn shorten(&mut self, most: usize) {
        let shown = most.max(1) - 1;
        let left_out = self.row_count() - shown.min(self.row_count());
        if self.row_count() > most {
            self.rows.truncate(shown + 1);
            self.line(&format!("and {left_out} more"));
        }
    }

    /// The lines, none of which is longer than `width` characters.
    #[must_use]
    pub fn render(&self, width: usize) -> String {
        let natural = self.natural_widths();
        let columns = self.columns_that_fit(&natural, width);
        let widths = self.fitted_widths(&columns, &natural, width);
        let cells = self.shown_cells(&columns, &widths);
        let mut cells = cells.iter();
        let mut text = String::new();
        for row in &self.rows {
            let line = match row {
                Row::Cells(_) => self.aligned(cells.next().map_or(&[], Vec::as_slice), &columns, &widths),
                Row::Line(line) => line.clone(),
            };
            text.push_str(&end_cut(line.trim_end(), width));
            text.push('\n');
        }
        text
    }

    fn headings(&self) -> &[String] {
        self.rows.first().map_or(&[], Row::cells)
    }

    fn natural_widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(|row| row.cells().len()).max().unwrap_or_default();
        let widest = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.cells().get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        (0..columns).map(widest).collect()
    }

    fn cut_of(&self, column: usize) -> Option<Cut> {
        self.cut.iter().find(|(other, _)| *other == column).map(|(_, cut)| *cut)
    }

    /// Leaves out columns until the others fit: those without a value, then those that say least, then any from the right.
    fn columns_that_fit(&self, natural: &[usize], width: usize) -> Vec<usize> {
        let needed = |columns: &[usize], least: fn(Cut) -> usize| {
            let of_column = |column: &usize| {
                let natural = natural.get(*column).copied().unwrap_or_default();
                self.cut_of(*column).map_or(natural, |cut| natural.min(least(cut)))
            };
            total_width(columns.iter().map(of_column))
        };
        let mut columns: Vec<usize> = (0..natural.len()).collect();
        let mut leave_out = |column: usize, least: fn(Cut) -> usize| {
            if needed(&columns, least) > width {
                let others: Vec<usize> = columns.iter().copied().filter(|other| *other != column).collect();
                if self.tells_rows_apart(&others) {
                    columns = others;
                }
            }
        };
        let later = || (1..natural.len()).rev();
        for column in later().filter(|column| self.says_nothing(*column)) {
            leave_out(column, Cut::comfortable_width);
        }
        for column in &self.left_out_first {
            leave_out(*column, Cut::comfortable_width);
        }
        for column in later().filter(|column| self.cut_of(*column) != Some(Cut::Middle)) {
            leave_out(column, Cut::min_width);
        }
        columns
    }

    fn says_nothing(&self, column: usize) -> bool {
        let cells = self.rows.iter().skip(1).filter_map(|row| row.cells().get(column));
        cells.into_iter().all(|cell| matches!(cell.as_str(), "" | "-" | "0 B"))
    }

    /// Whether rows that differ also differ in these columns.
    fn tells_rows_apart(&self, columns: &[usize]) -> bool {
        let rows = || self.rows.iter().skip(1).map(Row::cells).filter(|cells| !cells.is_empty());
        let chosen = |cells: &'_ [String]| -> Vec<String> {
            columns.iter().filter_map(|column| cells.get(*column)).cloned().collect()
        };
        let all: HashSet<&[String]> = rows().collect();
        all.len() == rows().map(chosen).collect::<HashSet<_>>().len()
    }

    /// Makes the widest of the columns that may be cut narrower until all fit.
    fn fitted_widths(&self, columns: &[usize], natural: &[usize], width: usize) -> Vec<usize> {
        // The width of a column, and how narrow it may become.
        let limits = |column: &usize| {
            let natural = natural.get(*column).copied().unwrap_or_default();
            let cut = self.cut_of(*column);
            cut.map_or((natural, natural), |cut| (natural.min(width), natural.min(cut.min_width())))
        };
        let mut widths: Vec<(usize, usize)> = columns.iter().map(limits).collect();
        let mut excess = total_width(widths.iter().map(|(width, _)| *width)).saturating_sub(width);
        while excess > 0 {
            let can_shrink = widths.iter_mut().filter(|(width, least)| width > least);
            let Some((widest, _)) = can_shrink.max_by_key(|(width, _)| *width) else { break };
            *widest -= 1;
            excess -= 1;
        }
        widths.into_iter().map(|(width, _)| width).collect()
    }

    /// The cells of all rows, cut to their columns. If texts that are cut at the end make two rows look the same, they are
    /// cut elsewhere.
    fn shown_cells(&self, columns: &[usize], widths: &[usize]) -> Vec<Vec<String>> {
        let of_columns = |is_distinct: bool| -> Vec<Vec<String>> {
            columns
                .iter()
                .zip(widths)
                .map(|(column, width)| self.shown_column(*column, *width, is_distinct))
                .collect()
        };
        let rows = self.rows.iter().filter(|row| matches!(row, Row::Cells(_))).count();
        let in_rows = |columns: Vec<Vec<String>>| -> Vec<Vec<String>> {
            let mut columns: Vec<_> = columns.into_iter().map(Vec::into_iter).collect();
            (0..rows).map(|_| columns.iter_mut().filter_map(Iterator::next).collect()).collect()
        };
        let shown = in_rows(of_columns(false));
        let distinct = |rows: &[Vec<String>]| rows.iter().collect::<HashSet<_>>().len();
        let full: HashSet<&[String]> =
            self.rows.iter().map(Row::cells).filter(|cells| !cells.is_empty()).collect();
        if distinct(&shown) == full.len() { shown } else { in_rows(of_columns(true)) }
    }

    fn shown_column(&self, column: usize, width: usize, is_distinct: bool) -> Vec<String> {
        let rows = || self.rows.iter().filter(|row| matches!(row, Row::Cells(_)));
        let cell = |row: &'_ Row| row.cells().get(column).map_or("", String::as_str).to_owned();
        let is_name = is_distinct || self.cut_of(column) == Some(Cut::Middle);
        let cells: Vec<String> = rows().map(cell).collect();
        let cuts =
            if is_name { distinct_cuts(cells.iter().map(String::as_str), width) } else { Default::default() };
        let shown = |cell: &String| cuts.get(cell.as_str()).cloned().unwrap_or_else(|| end_cut(cell, width));
        // The heading of a table of values is the name of what they belong to.
        let heading = cells.iter().take(1).map(|cell| {
            distinct_cuts([cell.as_str()].into_iter(), width)
                .remove(cell.as_str())
                .unwrap_or_else(|| cell.clone())
        });
        heading.chain(cells.iter().skip(1).map(shown)).collect()
    }

    /// The last column on the left is not padded. The width may be millions, which format strings cannot pad to.
    fn aligned(&self, cells: &[String], columns: &[usize], widths: &[usize]) -> String {
        let mut line = String::new();
        for (place, (cell, (column, width))) in cells.iter().zip(columns.iter().zip(widths)).enumerate() {
            let is_right = self.right.contains(column);
            let is_padded = is_right || place + 1 < cells.len();
            let padding = if is_padded { width.saturating_sub(cell.chars().count()) } else { 0 };
            let spaces = std::iter::repeat_n(' ', padding);
            if is_right {
                line.extend(spaces);
                line.push_str(cell);
            } else {
                line.push_str(cell);
                line.extend(spaces);
            }
            line.extend(std::iter::repeat_n(' ', GAP));
        }
        line
    }
}

/// The width of columns with gaps between them.
fn total_width(widths: impl Iterator<Item = usize>) -> usize {
    widths.fold(0, |sum: usize, width| sum.saturating_add(width).saturating_add(GAP)).saturating_sub(GAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row<const N: usize>(cells: [&str; N]) -> [String; N] {
        cells.map(str::to_owned)
    }

    #[test]
    fn names_are_cut_in_the_middle() {
        let rows = [row(["a-very-long-name-of-a-model:latest", "4.35 GiB"]), row(["short:1", "12 B"])];
        let table = Table::with_rows(&["NAME", "SIZE"], &[1], rows);
        let text = table.render(30);
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert!(text.contains("a-very-…model:latest  4.35 GiB"), "{text}");
        assert!(table.render(200).contains("a-very-long-name-of-a-model:latest  4.35 GiB"));
    }

    #[test]
    fn values_are_cut_at_the_end() {
        let mut table = Table::new(&["name", "m:1"], &[]).of_values();
        table.row(row(["description", "a text that is longer than the line"]));
        assert_eq!(table.render(30), "name         m:1\ndescription  a text that is l…\n");
    }

    #[test]
    fn columns_that_say_least_are_left_out_first() {
        let name = "hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M";
        let rows = [row([name, "0123456789ab", "807 MB", "-", "2 hours ago"])];
        let table = Table::with_rows(&["NAME", "ID", "SIZE", "PIN", "MODIFIED"], &[2], rows);
        let table = table.leaving_out_first(&["ID", "MODIFIED"]);
        let headings = |width| {
            table
                .render(width)
                .lines()
                .next()
                .unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(headings(90), "NAME ID SIZE PIN MODIFIED");
        assert_eq!(headings(68), "NAME ID SIZE MODIFIED");
        assert_eq!(headings(60), "NAME SIZE MODIFIED");
        assert_eq!(headings(44), "NAME SIZE");
    }

    #[test]
    fn column_that_alone_tells_rows_apart_stays() {
        let rows = ["0123", "4567"].map(|id| row(["the-same-long-name-of-two-files", id]));
        let table = Table::with_rows(&["NAME", "ID"], &[], rows).leaving_out_first(&["ID"]);
        let expected = "NAME              ID\nthe-s…-two-files  0123\nthe-s…-two-files  4567\n";
        assert_eq!(table.render(22), expected);
    }

    #[test]
    fn texts_that_alone_tell_rows_apart_stay_different() {
        let text = "the same beginning of a text that is much longer than its column, then";
        let rows = ["one", "two"].map(|end| row(["m", &format!("{text} {end}")]));
        let shown = Table::with_rows(&["NAME", "NOTE"], &[], rows).render(40);
        let lines: HashSet<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 3, "{shown}");
        assert!(lines.iter().all(|line| line.chars().count() <= 40), "{shown}");
    }

    #[test]
    fn shortened_table_says_how_many_rows_are_left_out() {
        let mut table = Table::new(&["N"], &[]);
        (0..5).for_each(|number| table.row([number.to_string()]));
        let rows = |most: usize| {
            let mut table = table.clone();
            table.shorten(most);
            (table.row_count(), table.render(80))
        };
        assert_eq!(rows(5), (5, "N\n0\n1\n2\n3\n4\n".to_owned()));
        assert_eq!(rows(3), (3, "N\n0\n1\nand 3 more\n".to_owned()));
        assert_eq!(rows(0), (1, "N\nand 5 more\n".to_owned()));
    }

    #[test]
    fn value_of_any_length_can_be_a_cell() {
        let long = "x".repeat(100_000);
        let rows = [row([&long, "string", "1"]), row(["b", "string", &long])];
        let table = Table::with_rows(&["KEY", "TYPE", "VALUE"], &[], rows);
        let text = table.render(usize::MAX);
        assert_eq!(text.lines().nth(1), Some(format!("{long}  string  1").as_str()));
        assert!(text.lines().nth(2).unwrap().ends_with(&long));
        assert!(table.render(80).lines().all(|line| line.chars().count() <= 80));
    }
}
