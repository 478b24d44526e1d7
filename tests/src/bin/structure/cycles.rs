//! Cycles in a graph.

use std::collections::{BTreeMap, BTreeSet};

/// The sets of two or more nodes that can all be reached from each other, in order.
pub(crate) fn cycles<N: Ord + Clone>(edges: &BTreeMap<N, BTreeSet<N>>) -> Vec<Vec<N>> {
    let reached: BTreeMap<&N, BTreeSet<&N>> =
        edges.keys().map(|node| (node, reachable(edges, node))).collect();
    let leads = |from: &N, to: &N| reached.get(from).is_some_and(|nodes| nodes.contains(to));
    let mut found: BTreeSet<Vec<N>> = BTreeSet::new();
    for node in edges.keys() {
        let cycle: Vec<N> =
            edges.keys().filter(|other| leads(node, other) && leads(other, node)).cloned().collect();
        if cycle.len() > 1 {
            found.insert(cycle);
        }
    }
    found.into_iter().collect()
}

fn reachable<'g, N: Ord>(edges: &'g BTreeMap<N, BTreeSet<N>>, start: &'g N) -> BTreeSet<&'g N> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![start]);
    while let Some(node) = next.pop() {
        next.extend(edges.get(node).into_iter().flatten().filter(|used| reached.insert(*used)));
    }
    reached
}
