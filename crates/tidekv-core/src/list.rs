//! Doubly linked lists of pages, with the links kept in one table beside the pages.
//!
//! ```text
//!   node   0      1        2        3        4        5        6
//!        [ -- ][list 0 ][list 1 ][page 0 ][page 1 ][page 2 ][page 3 ]      two lists, four pages
//!                  \________________/                  /
//!                   list 0 is a ring: list 0 -> page 0 -> page 2 -> list 0
//! ```
//!
//! A list is a ring through its own head node, so that linking and unlinking touch two neighbours and never
//! ask which list, which end, or whether it was the last one. A page has one node and is therefore in at most
//! one list: being Idle and Draining at once cannot be written down. Node 0 belongs to nobody; a page whose
//! links are 0 is in no list, so a new table is zeroed memory whatever the number of pages.

use crate::units::PageId;

const PREVIOUS: usize = 0;
const NEXT: usize = 1;

/// One of the lists that share a [`Links`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListId(pub(crate) u32);

/// The links of every list over one table of pages.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Links {
    /// `[previous, next]` of each node. Pairs of integers rather than a struct: the allocator hands those
    /// out zeroed without touching them.
    nodes: Vec<[u32; 2]>,
    lists: u32,
}

impl Links {
    /// Empty lists over pages that are in none of them.
    ///
    /// `lists + pages` stays below 2^32 because a pool has fewer than 2^31 blocks.
    pub(crate) fn new(lists: u32, pages: u32) -> Self {
        let mut nodes = vec![[0; 2]; 1 + lists as usize + pages as usize];
        for head in 1..=lists {
            nodes[head as usize] = [head; 2];
        }
        Self { nodes, lists }
    }

    pub(crate) fn is_empty(&self, list: ListId) -> bool {
        self.front(list).is_none()
    }

    pub(crate) fn front(&self, list: ListId) -> Option<PageId> {
        self.page_at(self.nodes[Self::head(list)][NEXT])
    }

    pub(crate) fn back(&self, list: ListId) -> Option<PageId> {
        self.page_at(self.nodes[Self::head(list)][PREVIOUS])
    }

    /// Whether the page is in any list.
    pub(crate) fn is_linked(&self, page: PageId) -> bool {
        self.nodes[self.node(page) as usize][NEXT] != 0
    }

    pub(crate) fn push_front(&mut self, list: ListId, page: PageId) {
        let head = list.0 + 1;
        self.link(head, page, self.nodes[head as usize][NEXT]);
    }

    pub(crate) fn push_back(&mut self, list: ListId, page: PageId) {
        let head = list.0 + 1;
        self.link(self.nodes[head as usize][PREVIOUS], page, head);
    }

    /// Takes the page out of the list it is in.
    pub(crate) fn remove(&mut self, page: PageId) {
        debug_assert!(self.is_linked(page), "page {page} is in no list");
        let node = self.node(page) as usize;
        let [previous, next] = std::mem::take(&mut self.nodes[node]);
        self.nodes[previous as usize][NEXT] = next;
        self.nodes[next as usize][PREVIOUS] = previous;
    }

    /// The pages of a list, front to back.
    pub(crate) fn iter(&self, list: ListId) -> impl Iterator<Item = PageId> + '_ {
        std::iter::successors(self.front(list), |&page| self.page_at(self.nodes[self.node(page) as usize][NEXT]))
    }

    /// Asserts that every link is answered by its neighbour, and that a list holds the pages it can reach.
    pub(crate) fn check_invariants(&self) {
        let mut reachable = 0;
        for list in (0..self.lists).map(ListId) {
            reachable += self.iter(list).count();
        }
        let mut linked = 0;
        for (node, &[previous, next]) in self.nodes.iter().enumerate() {
            assert_eq!(previous == 0, next == 0, "node {node} is linked on one side only");
            if next != 0 {
                assert_eq!(self.nodes[next as usize][PREVIOUS] as usize, node, "node {node}: next does not answer");
                assert_eq!(self.nodes[previous as usize][NEXT] as usize, node, "node {node}: previous does not answer");
                linked += usize::from(node > self.lists as usize);
            }
        }
        assert_eq!(reachable, linked, "linked pages that no list reaches");
    }

    fn link(&mut self, previous: u32, page: PageId, next: u32) {
        debug_assert!(!self.is_linked(page), "page {page} is in a list already");
        let node = self.node(page);
        self.nodes[node as usize] = [previous, next];
        self.nodes[previous as usize][NEXT] = node;
        self.nodes[next as usize][PREVIOUS] = node;
    }

    fn head(list: ListId) -> usize {
        list.0 as usize + 1
    }

    fn node(&self, page: PageId) -> u32 {
        self.lists + 1 + page.0
    }

    /// The page of a node, or `None` for a head: the ring is back where it began.
    fn page_at(&self, node: u32) -> Option<PageId> {
        node.checked_sub(self.lists + 1).map(PageId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const FIRST: ListId = ListId(0);
    const SECOND: ListId = ListId(1);

    fn pages(links: &Links, list: ListId) -> Vec<u32> {
        links.iter(list).map(|page| page.0).collect()
    }

    #[test]
    fn both_ends_and_the_middle() {
        let mut links = Links::new(2, 5);
        assert!(links.is_empty(FIRST));
        assert_eq!(links.back(FIRST), None);
        links.push_back(FIRST, PageId(3));
        links.push_back(FIRST, PageId(4));
        links.push_front(FIRST, PageId(0));
        assert_eq!(pages(&links, FIRST), [0, 3, 4]);
        assert_eq!((links.front(FIRST), links.back(FIRST)), (Some(PageId(0)), Some(PageId(4))));
        links.remove(PageId(3));
        assert_eq!(pages(&links, FIRST), [0, 4]);
        links.check_invariants();
    }

    #[test]
    fn a_removed_page_may_join_another_list() {
        let mut links = Links::new(2, 2);
        links.push_back(FIRST, PageId(1));
        links.remove(PageId(1));
        assert!(!links.is_linked(PageId(1)));
        links.push_front(SECOND, PageId(1));
        assert!(links.is_linked(PageId(1)));
        assert_eq!((pages(&links, FIRST), pages(&links, SECOND)), (vec![], vec![1]));
        links.check_invariants();
    }

    #[test]
    #[should_panic(expected = "in a list already")]
    #[cfg(debug_assertions)]
    fn a_page_is_in_at_most_one_list() {
        let mut links = Links::new(2, 1);
        links.push_back(FIRST, PageId(0));
        links.push_back(SECOND, PageId(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 2 } else { 128 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Against two queues. `(page, list, front)`: a linked page is removed, any other is pushed.
        #[test]
        fn behaves_as_plain_queues(moves in prop::collection::vec((0..6u32, 0..2usize, any::<bool>()), 0..40)) {
            let mut links = Links::new(2, 6);
            let mut model = [VecDeque::new(), VecDeque::new()];
            for (page, list, front) in moves {
                if model.iter().any(|queue| queue.contains(&page)) {
                    links.remove(PageId(page));
                    model.iter_mut().for_each(|queue| queue.retain(|&other| other != page));
                } else if front {
                    links.push_front([FIRST, SECOND][list], PageId(page));
                    model[list].push_front(page);
                } else {
                    links.push_back([FIRST, SECOND][list], PageId(page));
                    model[list].push_back(page);
                }
                links.check_invariants();
                prop_assert_eq!(pages(&links, FIRST), Vec::from(model[0].clone()));
                prop_assert_eq!(pages(&links, SECOND), Vec::from(model[1].clone()));
            }
        }
    }
}
