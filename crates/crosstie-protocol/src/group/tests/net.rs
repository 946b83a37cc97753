//! A network of groups for tests: one first-in, first-out link for each ordered pair of members.

use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

use super::super::*;

/// What one call of a group produced.
#[derive(Default)]
pub(super) struct Collected {
    pub(super) packets: Vec<(MemberId, u16, Control)>,
    pub(super) events: Vec<Event>,
}

impl Output for Collected {
    fn send(&mut self, to: MemberId, view: u16, packet: &Control) {
        self.packets.push((to, view, *packet));
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// All members and the packets between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Net {
    pub(super) groups: Vec<Group>,
    /// Indexed by sender, then receiver.
    pub(super) links: Vec<Vec<VecDeque<(u16, Control)>>>,
    pub(super) alive: Vec<bool>,
    pub(super) sent: u64,
}

impl Net {
    pub(super) fn new(members: usize, configure: impl Fn(&mut Config)) -> Self {
        let group = |me: usize| {
            let mut config = Config { locks: 1, ..Config::new(MemberId::new(me), members) };
            configure(&mut config);
            Group::new(&config).unwrap()
        };
        Net {
            groups: (0..members).map(group).collect(),
            links: vec![vec![VecDeque::new(); members]; members],
            alive: vec![true; members],
            sent: 0,
        }
    }

    /// All members turn one rule off.
    pub(super) fn with_broken_rule(mut self, rule: Option<super::BrokenRule>) -> Self {
        self.groups.iter_mut().for_each(|group| group.break_rule(rule));
        self
    }

    pub(super) fn members(&self) -> usize {
        self.groups.len()
    }

    /// Lets one member do something, and returns its events.
    pub(super) fn act(
        &mut self,
        member: usize,
        action: impl FnOnce(&mut Group, &mut Collected),
    ) -> Vec<Event> {
        let mut out = Collected::default();
        action(&mut self.groups[member], &mut out);
        for (to, view, packet) in out.packets {
            self.sent += 1;
            if self.alive[to.index()] {
                self.links[member][to.index()].push_back((view, packet));
            }
        }
        out.events
    }

    pub(super) fn can_deliver(&self, from: usize, to: usize) -> bool {
        !self.links[from][to].is_empty()
    }

    /// Delivers the oldest packet of a link.
    pub(super) fn deliver(&mut self, from: usize, to: usize) -> Vec<Event> {
        let (view, packet) = self.links[from][to].pop_front().expect("the link has a packet");
        self.act(to, |group, out| {
            if !group.dead().contains(MemberId::new(from)) {
                let handled = group.on_packet(MemberId::new(from), view, &packet, out);
                assert_eq!(handled, Ok(()), "{packet:?} from {from} to {to}");
            }
        })
    }

    /// A member stops. Packets that it has sent may still arrive.
    pub(super) fn kill(&mut self, member: usize) {
        self.alive[member] = false;
        for from in 0..self.members() {
            self.links[from][member].clear();
        }
    }

    /// `member` notices that `dead` is dead. Nothing of `dead` arrives after that.
    pub(super) fn notice(&mut self, member: usize, dead: usize) -> Vec<Event> {
        self.links[dead][member].clear();
        self.act(member, |group, out| group.member_died(MemberId::new(dead), out))
    }

    pub(super) fn has_noticed(&self, member: usize, dead: usize) -> bool {
        self.groups[member].dead().contains(MemberId::new(dead))
    }

    /// Whether somebody that lives knows of the death of a member.
    pub(super) fn is_known(&self, dead: usize) -> bool {
        (0..self.members()).any(|member| self.alive[member] && self.has_noticed(member, dead))
    }

    /// Whether no packet is on its way, and of every death somebody knows that lives.
    pub(super) fn is_quiet(&self) -> bool {
        let members = || 0..self.members();
        members().all(|member| self.alive[member] || self.is_known(member))
            && members()
                .filter(|to| self.alive[*to])
                .all(|to| members().all(|from| self.links[from][to].is_empty() || self.has_noticed(to, from)))
    }

    /// Whether all that live agree on one view: on all that live.
    pub(super) fn has_one_view(&self) -> bool {
        let gone: MemberSet =
            (0..self.members()).filter(|member| !self.alive[*member]).map(MemberId::new).collect();
        let live = || (0..self.members()).filter(|member| self.alive[*member]);
        let number = live().next().map(|member| self.groups[member].view().number);
        live()
            .map(|member| self.groups[member].view())
            .all(|view| view.gone == gone && Some(view.number) == number)
    }
}
