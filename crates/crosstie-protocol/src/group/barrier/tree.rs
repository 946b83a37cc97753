//! The tree of a barrier: every member computes its own part from the same list (RHiNET §4.1).

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::super::member::{MemberId, MemberSet};

/// How the members of a barrier form a tree.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TreeOptions {
    /// Most children of a member: 2 for RHiNET's binary tree. A wide tree has fewer steps, but more work for each member.
    pub fanout: usize,
    /// The host, or switch, of each member. Members of one host then form a tree of their own below the first of them, and the
    /// first ones form a tree: only `2 * (hosts - 1)` messages cross hosts. Empty: the order of the member list.
    pub hosts: Box<[u16]>,
}

impl Default for TreeOptions {
    fn default() -> Self {
        TreeOptions { fanout: 2, hosts: Box::default() }
    }
}

/// One member's part of the tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tree {
    /// `None`: this member is the root, or does not take part.
    pub parent: Option<MemberId>,
    /// At most twice the fan-out.
    pub children: Vec<MemberId>,
    /// Of the root: its first child. Of that one: the root. Each of the two tells the other when its side has arrived.
    pub partner: Option<MemberId>,
}

impl Tree {
    /// The part of member `me` in the tree of the members `active`. The root is the first of them.
    ///
    /// ```
    /// use crosstie_protocol::group::{MemberId, MemberSet, Tree, TreeOptions};
    /// let tree = Tree::new(MemberId::new(1), &MemberSet::first(6), &TreeOptions::default());
    /// assert_eq!(tree.parent, Some(MemberId::new(0)));
    /// assert_eq!(tree.children, [3, 4].map(MemberId::new));
    /// assert_eq!(tree.partner, tree.parent);
    /// ```
    pub fn new(me: MemberId, active: &MemberSet, options: &TreeOptions) -> Self {
        let mut tree = Tree::default();
        tree.rebuild(me, active, options);
        tree
    }

    /// Like [`Tree::new`], without new memory for the tree itself.
    pub(super) fn rebuild(&mut self, me: MemberId, active: &MemberSet, options: &TreeOptions) {
        let fanout = options.fanout.max(1);
        let host = |member: MemberId| options.hosts.get(member.index()).copied().unwrap_or(0);
        self.parent = None;
        self.partner = None;
        self.children.clear();
        if !active.contains(me) {
            return;
        }
        let near: Vec<MemberId> = active.iter().filter(|member| host(*member) == host(me)).collect();
        if near.first() == Some(&me) {
            // The first members of all hosts. The far children first: their messages take longest.
            let mut leaders: Vec<MemberId> = Vec::new();
            for member in active.iter() {
                if !leaders.iter().any(|leader| host(*leader) == host(member)) {
                    leaders.push(member);
                }
            }
            self.add_level(me, &leaders, fanout);
        }
        self.add_level(me, &near, fanout);
        if self.parent.is_none() {
            self.partner = self.children.first().copied();
        } else if let Some(root) = active.iter().next() {
            let is_far = |member: &MemberId| host(*member) != host(root);
            let first_child = active.iter().find(is_far).or_else(|| active.iter().nth(1));
            self.partner = first_child.filter(|child| *child == me).map(|_| root);
        }
    }

    /// The neighbours of `me` in the heap order of `list`.
    fn add_level(&mut self, me: MemberId, list: &[MemberId], fanout: usize) {
        let Some(index) = list.iter().position(|member| *member == me) else { return };
        if index > 0 {
            self.parent = Some(list[(index - 1) / fanout]);
        }
        let children = list.iter().skip(index * fanout + 1).take(fanout);
        self.children.extend(children);
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_members_compute_the_same_tree(
            active in prop::collection::btree_set(0usize..64, 1..40),
            fanout in 1usize..9,
            hosts in prop::collection::vec(0u16..5, 0..64),
        ) {
            let active: MemberSet = active.into_iter().map(MemberId::new).collect();
            let options = TreeOptions { fanout, hosts: hosts.into() };
            let tree = |member| Tree::new(member, &active, &options);
            let roots: Vec<_> = active.iter().filter(|member| tree(*member).parent.is_none()).collect();
            prop_assert_eq!(&roots, &[active.iter().next().unwrap()], "one root, the first member");
            let (root, partner) = (roots[0], tree(roots[0]).partner);
            prop_assert_eq!(partner, tree(root).children.first().copied());
            for member in active.iter().filter(|member| *member != root) {
                prop_assert_eq!(tree(member).partner, (Some(member) == partner).then_some(root));
            }
            let mut far = 0;
            for member in active.iter() {
                let part = tree(member);
                prop_assert!(part.children.len() <= 2 * fanout);
                for child in &part.children {
                    prop_assert_eq!(tree(*child).parent, Some(member));
                }
                if let Some(parent) = part.parent {
                    prop_assert!(tree(parent).children.contains(&member));
                    let host = |m: MemberId| options.hosts.get(m.index()).copied().unwrap_or(0);
                    far += usize::from(host(parent) != host(member));
                }
                // Every member reaches the root.
                let (mut at, mut steps) = (member, 0);
                while let Some(parent) = tree(at).parent {
                    at = parent;
                    steps += 1;
                    prop_assert!(steps < 64);
                }
            }
            let host = |m: MemberId| options.hosts.get(m.index()).copied().unwrap_or(0);
            let mut hosts: Vec<u16> = active.iter().map(host).collect();
            hosts.sort_unstable();
            hosts.dedup();
            prop_assert_eq!(far, hosts.len() - 1, "each host is entered once");
        }
    }

    #[test]
    fn binary_tree_has_logarithmic_depth() {
        for members in [2usize, 3, 4, 7, 8, 64, 1000, 1024] {
            let active = MemberSet::first(members);
            let mut at = MemberId::new(members - 1);
            let mut depth = 0;
            while let Some(parent) = Tree::new(at, &active, &TreeOptions::default()).parent {
                at = parent;
                depth += 1;
            }
            assert_eq!(depth, members.ilog2(), "{members} members");
        }
    }
}
