//! The mark phase of garbage collection, as a pure function.
//!
//! The caller gives the roots and the references of each node. If the references of one node cannot
//! be read, there is no result, so that nothing is deleted because of an incomplete graph.

use std::collections::BTreeSet;

/// Every node that can be reached from `roots`, the roots included.
///
/// # Errors
/// The first error of `references`; then no set is returned.
///
/// # Example
/// ```
/// use blobd_store_format::reach::reachable;
///
/// let references = |node: char| match node {
///     'a' => Ok(vec!['b', 'c']),
///     'c' => Ok(vec!['a']),
///     'x' => Err("x is unreadable"),
///     _ => Ok(vec![]),
/// };
/// assert_eq!(reachable(['a'], references)?, ['a', 'b', 'c'].into());
/// assert!(reachable(['a', 'x'], references).is_err());
/// # Ok::<(), &str>(())
/// ```
pub fn reachable<N: Ord + Copy, E>(
    roots: impl IntoIterator<Item = N>,
    references: impl FnMut(N) -> Result<Vec<N>, E>,
) -> Result<BTreeSet<N>, E> {
    mark(BTreeSet::new(), roots, references)
}

/// Marks which nodes of `listed` can be reached from `roots`.
///
/// # Errors
/// The first error of `references`; then no marks are returned.
///
/// # Example
/// ```
/// use blobd_store_format::reach::mark_listed;
///
/// let references = |node: u8| Ok::<_, ()>(if node < 3 { vec![node + 1] } else { vec![] });
/// let marks = mark_listed(vec![3, 2, 0], [1], references)?;
/// assert_eq!(marks.unreached().collect::<Vec<_>>(), [0]);
/// # Ok::<(), ()>(())
/// ```
pub fn mark_listed<N: Ord + Copy, E>(
    listed: Vec<N>,
    roots: impl IntoIterator<Item = N>,
    references: impl FnMut(N) -> Result<Vec<N>, E>,
) -> Result<Marks<N>, E> {
    mark(Marks::new(listed), roots, references)
}

/// A sorted list of nodes with one mark each; uses less memory than a set.
#[derive(Clone, Debug)]
pub struct Marks<N> {
    /// Sorted and unique.
    listed: Vec<N>,
    reached: Vec<bool>,
    /// Reached nodes that are not listed; normally few.
    others: BTreeSet<N>,
}

impl<N: Ord + Copy> Marks<N> {
    fn new(mut listed: Vec<N>) -> Self {
        listed.sort_unstable();
        listed.dedup();
        Self { reached: vec![false; listed.len()], listed, others: BTreeSet::new() }
    }

    /// The listed nodes that were not reached, in order.
    pub fn unreached(&self) -> impl Iterator<Item = N> + '_ {
        self.listed.iter().zip(&self.reached).filter(|(_, reached)| !**reached).map(|(node, _)| *node)
    }
}

trait Visited<N> {
    /// Adds a node; returns whether it was new.
    fn visit(&mut self, node: N) -> bool;
}

impl<N: Ord> Visited<N> for BTreeSet<N> {
    fn visit(&mut self, node: N) -> bool {
        self.insert(node)
    }
}

impl<N: Ord + Copy> Visited<N> for Marks<N> {
    fn visit(&mut self, node: N) -> bool {
        let place = self.listed.binary_search(&node).ok();
        match place.and_then(|place| self.reached.get_mut(place)) {
            Some(reached) => !std::mem::replace(reached, true),
            None => self.others.insert(node),
        }
    }
}

/// Takes the set by value, so that an error leaves no incomplete set.
fn mark<V: Visited<N>, N: Copy, E>(
    mut visited: V,
    roots: impl IntoIterator<Item = N>,
    mut references: impl FnMut(N) -> Result<Vec<N>, E>,
) -> Result<V, E> {
    let mut unvisited: Vec<N> = roots.into_iter().collect();
    while let Some(node) = unvisited.pop() {
        if visited.visit(node) {
            unvisited.extend(references(node)?);
        }
    }
    Ok(visited)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unreferenced_nodes_are_not_reached() {
        let references = |node: u8| Ok::<_, ()>(if node < 3 { vec![node + 1] } else { vec![] });
        assert_eq!(reachable([0], references), Ok([0, 1, 2, 3].into()));
        assert_eq!(reachable([2], references), Ok([2, 3].into()));
        assert_eq!(reachable([], references), Ok([].into()));
    }

    #[test]
    fn cycles_terminate() {
        assert_eq!(reachable([0], |node: u8| Ok::<_, ()>(vec![(node + 1) % 4])), Ok([0, 1, 2, 3].into()));
    }

    #[test]
    fn one_unreadable_node_yields_no_set() {
        let references = |node: u8| if node == 7 { Err("unreadable") } else { Ok(vec![node + 1]) };
        assert_eq!(reachable([0], references), Err("unreadable"));
        assert_eq!(mark_listed(vec![1], [0], references).err(), Some("unreadable"));
    }

    proptest! {
        #[test]
        fn marks_are_the_reachable_part_of_the_list(
            edges in prop::collection::vec((0u8..30, 0u8..30), 0..60),
            roots in prop::collection::vec(0u8..30, 0..4),
            listed in prop::collection::vec(0u8..30, 0..40),
        ) {
            let references = |node: u8| {
                Ok::<_, ()>(edges.iter().filter(|edge| edge.0 == node).map(|edge| edge.1).collect())
            };
            let reached = reachable(roots.clone(), references).unwrap();
            let marks = mark_listed(listed.clone(), roots, references).unwrap();
            let expected: BTreeSet<u8> = listed.into_iter().filter(|node| !reached.contains(node)).collect();
            prop_assert!(marks.unreached().eq(expected));
        }
    }
}
