//! A map of single nodes, as C++ libraries have it.
//!
//! ```text
//!   nodes    | 40 | 10 | 70 | 20 |      in the order of insertion: neighbours in the tree are none in memory
//!   links    parent, left, right        as numbers of nodes
//! ```
//!
//! Its shape is that of a perfectly balanced tree, which no real one beats.

/// No node.
const NONE: u32 = u32::MAX;

/// Ranges of addresses, found by walking or by searching.
#[derive(Debug)]
pub(super) struct SegmentMap {
    nodes: Vec<Node>,
    root: u32,
    first: u32,
}

/// One range, with the links that lead on from it.
#[derive(Clone, Debug)]
struct Node {
    base: u64,
    len: u64,
    /// Where the range is in this process.
    local: u64,
    parent: u32,
    left: u32,
    right: u32,
}

impl SegmentMap {
    /// A map of `(base, len, local)`, inserted in this order. Ranges do not overlap.
    pub(super) fn new(segments: &[(u64, u64, u64)]) -> Self {
        let node =
            |&(base, len, local): &(u64, u64, u64)| Node { base, len, local, parent: NONE, left: NONE, right: NONE };
        let mut nodes: Vec<Node> = segments.iter().map(node).collect();
        let mut sorted: Vec<u32> = (0..).take(nodes.len()).collect();
        sorted.sort_by_key(|&index| nodes[index as usize].base);
        let root = link(&mut nodes, &sorted, NONE);
        let first = sorted.first().copied().unwrap_or(NONE);
        Self { nodes, root, first }
    }

    fn node(&self, index: u32) -> Option<&Node> {
        self.nodes.get(index as usize)
    }

    /// Walks all ranges in order until one contains the bytes; answers where they are.
    pub(super) fn walk(&self, address: u64, len: u64) -> Option<u64> {
        let mut at = self.first;
        while let Some(node) = self.node(at) {
            if let Some(local) = node.translate(address, len) {
                return Some(local);
            }
            at = self.successor(at);
        }
        None
    }

    /// Searches the last range that begins at or before the address.
    pub(super) fn search(&self, address: u64, len: u64) -> Option<u64> {
        let (mut at, mut found) = (self.root, None);
        while let Some(node) = self.node(at) {
            at = if node.base <= address {
                found = Some(node);
                node.right
            } else {
                node.left
            };
        }
        found?.translate(address, len)
    }

    /// The next in order: leftmost to the right, else up until we come from the left.
    fn successor(&self, index: u32) -> u32 {
        let Some(node) = self.node(index) else { return NONE };
        if let Some(mut right) = self.node(node.right) {
            let mut at = node.right;
            while let Some(left) = self.node(right.left) {
                at = right.left;
                right = left;
            }
            return at;
        }
        let (mut child, mut at) = (index, node.parent);
        while let Some(parent) = self.node(at)
            && parent.right == child
        {
            child = at;
            at = parent.parent;
        }
        at
    }
}

impl Node {
    fn translate(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.base)?;
        (offset + len <= self.len).then_some(self.local + offset)
    }
}

/// Makes a balanced tree of nodes that are sorted, and answers its root.
fn link(nodes: &mut [Node], sorted: &[u32], parent: u32) -> u32 {
    let middle = sorted.len() / 2;
    let Some(&root) = sorted.get(middle) else { return NONE };
    let left = link(nodes, &sorted[..middle], root);
    let right = link(nodes, &sorted[middle + 1..], root);
    let node = &mut nodes[root as usize];
    (node.parent, node.left, node.right) = (parent, left, right);
    root
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn walking_and_searching_find_what_a_list_finds(
            gaps in prop::collection::vec((0..50u64, 1..50u64), 0..60),
            order in any::<u64>(),
            asked in prop::collection::vec((0..7000u64, 0..10u64), 1..50),
        ) {
            let mut end = 1;
            let mut segments: Vec<(u64, u64, u64)> = gaps
                .iter()
                .map(|&(gap, len)| {
                    let base = end + gap;
                    end = base + len;
                    (base, len, 1_000_000 + 3 * base)
                })
                .collect();
            crate::random::Random::seeded(order).shuffle(&mut segments);
            let map = SegmentMap::new(&segments);
            for (address, len) in asked {
                let holds = |&&(base, size, _): &&(u64, u64, u64)| base <= address && address + len <= base + size;
                let model = segments.iter().find(holds).map(|(base, _, local)| local + address - base);
                // Bytes that begin just behind a range and are none may belong to it or to its neighbour.
                if len > 0 {
                    prop_assert_eq!(map.walk(address, len), model);
                    prop_assert_eq!(map.search(address, len), model);
                }
            }
        }
    }
}
