//! The mark phase of garbage collection, as a pure function.
//!
//! It knows nothing of blobs or files: the caller says what the roots are and what each node
//! refers to. If the references of one node cannot be read, there is no answer at all, so that
//! nothing is ever deleted on the strength of half a graph.

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
    mut references: impl FnMut(N) -> Result<Vec<N>, E>,
) -> Result<BTreeSet<N>, E> {
    let mut reached = BTreeSet::new();
    let mut unvisited: Vec<N> = roots.into_iter().collect();
    while let Some(node) = unvisited.pop() {
        if reached.insert(node) {
            unvisited.extend(references(node)?);
        }
    }
    Ok(reached)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreferenced_nodes_are_not_reached() {
        let references = |node: u8| Ok::<_, ()>(if node < 3 { vec![node + 1] } else { vec![] });
        assert_eq!(reachable([0], references), Ok([0, 1, 2, 3].into()));
        assert_eq!(reachable([2], references), Ok([2, 3].into()));
        assert_eq!(reachable([], references), Ok([].into()));
    }

    #[test]
    fn cycles_end() {
        assert_eq!(reachable([0], |node: u8| Ok::<_, ()>(vec![(node + 1) % 4])), Ok([0, 1, 2, 3].into()));
    }

    #[test]
    fn one_unreadable_node_yields_no_set() {
        let references = |node: u8| if node == 7 { Err("unreadable") } else { Ok(vec![node + 1]) };
        assert_eq!(reachable([0], references), Err("unreadable"));
    }
}
