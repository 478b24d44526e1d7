//! What a file says of its tensors, in little memory.
//!
//! A file may have 131,072 tensors. A string and a list of dimensions for each of them took three times the memory of their
//! text, and the plan and the recipe of a file had copies. So a [`TensorTable`] has all names in one string and all
//! dimensions in one list, and the layout of a file hands it on to the plan, and the plan to the recipe.

use std::collections::BTreeMap;

use crate::tensor::Experts;

/// The tensors of a file, without their places.
#[derive(Clone, Debug, Default)]
pub(crate) struct TensorTable {
    rows: Vec<Row>,
    /// All names, one after the other.
    names: String,
    /// The dimensions of all tensors, one after the other.
    dimensions: Vec<u64>,
    /// The names of the types. A file with very many may repeat some.
    type_names: Vec<Box<str>>,
    /// Keyed by the index of the tensor, because few tensors are stacks of experts.
    experts: BTreeMap<usize, Experts>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    size: u64,
    name_end: usize,
    dimensions_end: usize,
    type_name: u32,
}

/// A tensor of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableRow<'t> {
    pub(crate) name: &'t str,
    pub(crate) type_name: &'t str,
    pub(crate) shape: &'t [u64],
    pub(crate) size: u64,
    pub(crate) experts: Option<Experts>,
}

impl TensorTable {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn push(&mut self, row: TableRow<'_>) {
        let TableRow { name, type_name, shape, size, experts } = row;
        if let Some(experts) = experts {
            self.experts.insert(self.rows.len(), experts);
        }
        self.names.push_str(name);
        self.dimensions.extend_from_slice(shape);
        let (name_end, dimensions_end) = (self.names.len(), self.dimensions.len());
        let type_name = self.number_of_type(type_name);
        self.rows.push(Row { size, name_end, dimensions_end, type_name });
    }

    pub(crate) fn append(&mut self, other: &Self) {
        other.iter().for_each(|row| self.push(row));
    }

    pub(crate) fn get(&self, index: usize) -> Option<TableRow<'_>> {
        let row = self.rows.get(index)?;
        let before = index.checked_sub(1).and_then(|before| self.rows.get(before));
        let (name_start, start) = before.map_or((0, 0), |before| (before.name_end, before.dimensions_end));
        let type_name = usize::try_from(row.type_name).ok().and_then(|number| self.type_names.get(number));
        Some(TableRow {
            name: self.names.get(name_start..row.name_end).unwrap_or_default(),
            type_name: type_name.map(|name| &**name).unwrap_or_default(),
            shape: self.dimensions.get(start..row.dimensions_end).unwrap_or_default(),
            size: row.size,
            experts: self.experts.get(&index).copied(),
        })
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = TableRow<'_>> + Clone {
        // The row of each index below the length is there.
        let empty = TableRow { name: "", type_name: "", shape: &[], size: 0, experts: None };
        (0..self.rows.len()).map(move |index| self.get(index).unwrap_or(empty))
    }

    /// The number of a type's name, which is added if it is not one of the latest.
    fn number_of_type(&mut self, name: &str) -> u32 {
        /// More than any format has. A hostile recipe can have a type for each tensor.
        const MAX_COMPARED: usize = 64;
        let oldest = self.type_names.len().saturating_sub(MAX_COMPARED);
        let latest = self.type_names.iter().enumerate().skip(oldest);
        let known = latest.rev().find(|(_, known)| ***known == *name).map(|(number, _)| number);
        let number = known.unwrap_or_else(|| {
            self.type_names.push(name.into());
            self.type_names.len().saturating_sub(1)
        });
        // There are at most as many as tensors in a recipe of 160 MiB, or in files with headers of 100 MB.
        u32::try_from(number).unwrap_or(u32::MAX)
    }
}

/// Tables are equal if their tensors are; the numbers of the type names may differ.
impl PartialEq for TensorTable {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for TensorTable {}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    type Given = (String, u8, Vec<u64>, u64, Option<u64>);

    fn table(given: &[Given], names: &[String]) -> TensorTable {
        let mut table = TensorTable::default();
        for ((name, _, shape, size, stride), type_name) in given.iter().zip(names) {
            let experts = stride.map(|stride| Experts { count: 2, stride });
            table.push(TableRow { name, type_name, shape, size: *size, experts });
        }
        table
    }

    proptest! {
        #[test]
        fn table_returns_what_was_pushed(
            given in vec((any::<String>(), any::<u8>(), vec(any::<u64>(), 0..4), any::<u64>(), any::<Option<u64>>()), 0..200),
        ) {
            // More types than are compared.
            let names: Vec<String> = given.iter().map(|(_, number, ..)| number.to_string()).collect();
            let table = table(&given, &names);
            prop_assert_eq!(table.len(), given.len());
            for (row, ((name, _, shape, size, stride), type_name)) in table.iter().zip(given.iter().zip(&names)) {
                let experts = stride.map(|stride| Experts { count: 2, stride });
                let expected = TableRow { name, type_name, shape, size: *size, experts };
                prop_assert_eq!(row, expected);
            }
            let mut twice = table.clone();
            twice.append(&table);
            prop_assert!(twice.iter().eq(table.iter().chain(table.iter()).collect::<Vec<_>>()));
            prop_assert_eq!(twice == table, given.is_empty());
        }
    }
}
