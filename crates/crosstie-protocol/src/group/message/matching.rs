//! Matching of tagged messages with posted receives, wholly at the receiver (RHiNET §6).
//!
//! A message that arrives before its receive is posted waits in the list of unexpected messages. Rules of MPI: a receive names a
//! source or any source, a tag or any tag; among messages that match, the one that arrived first is taken, and among receives
//! that match, the one that was posted first.

use alloc::boxed::Box;

use thiserror::Error;

use super::super::Limits;
use super::super::member::MemberId;

/// A receive with this tag matches messages with every tag.
pub const ANY_TAG: Option<u64> = None;

/// A posted receive, for [`Matcher::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PostedId {
    index: u32,
    generation: u32,
}

/// A receive and a message that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matched<R, M> {
    /// What was given to [`Matcher::post`].
    pub receive: R,
    /// What was given to [`Matcher::arrive`].
    pub message: M,
    /// The message's sender.
    pub source: MemberId,
    /// The message's tag.
    pub tag: u64,
}

/// Too many receives are posted, or too many messages are unexpected. Hands the argument back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the table of posted receives or unexpected messages is full")]
pub struct MatcherFull<T>(pub T);

/// Posted receives `R` and unexpected messages `M`. Both tables have a fixed size.
///
/// ```
/// use crosstie_protocol::group::MemberId;
/// use crosstie_protocol::group::message::{ANY_TAG, Matcher};
/// let peer = MemberId::new(3);
/// let mut matcher = Matcher::<&str, &str>::new(8, 8);
/// assert!(matcher.arrive(peer, 5, "early").unwrap().is_none());
/// assert!(matcher.post(Some(peer), Some(9), "nine").unwrap().1.is_none());
/// let matched = matcher.post(None, ANY_TAG, "any").unwrap().1.unwrap();
/// assert_eq!((matched.receive, matched.message, matched.tag), ("any", "early", 5));
/// assert_eq!(matcher.arrive(peer, 9, "nine").unwrap().unwrap().receive, "nine");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Matcher<R, M> {
    posted: List<(Option<MemberId>, Option<u64>, R)>,
    unexpected: List<(MemberId, u64, M)>,
}

impl<R, M> Matcher<R, M> {
    /// A matcher with room for this many posted receives and unexpected messages.
    pub fn new(posted: usize, unexpected: usize) -> Self {
        Matcher { posted: List::new(posted), unexpected: List::new(unexpected) }
    }

    /// Posts a receive. It matches an unexpected message at once, or later messages.
    #[inline]
    #[expect(clippy::type_complexity, reason = "a pair of options, used once")]
    pub fn post(
        &mut self,
        source: Option<MemberId>,
        tag: Option<u64>,
        receive: R,
    ) -> Result<(Option<PostedId>, Option<Matched<R, M>>), MatcherFull<R>> {
        let found = self.unexpected.take_first(|(from, message_tag, _)| {
            source.is_none_or(|source| source == *from) && tag.is_none_or(|tag| tag == *message_tag)
        });
        if let Some((source, tag, message)) = found {
            return Ok((None, Some(Matched { receive, message, source, tag })));
        }
        match self.posted.push((source, tag, receive)) {
            Ok((index, generation)) => Ok((Some(PostedId { index, generation }), None)),
            Err((_, _, receive)) => Err(MatcherFull(receive)),
        }
    }

    /// A message has arrived. It matches a posted receive at once, or later receives.
    #[inline]
    pub fn arrive(
        &mut self,
        source: MemberId,
        tag: u64,
        message: M,
    ) -> Result<Option<Matched<R, M>>, MatcherFull<M>> {
        if let Some(receive) = self.take_receive(source, tag) {
            return Ok(Some(Matched { receive, message, source, tag }));
        }
        match self.unexpected.push((source, tag, message)) {
            Ok(_) => Ok(None),
            Err((_, _, message)) => Err(MatcherFull(message)),
        }
    }

    /// Takes the first receive that matches a message with this source and tag. If no receive matches, returns `None` and does not store the
    /// message.
    #[inline]
    pub fn take_receive(&mut self, source: MemberId, tag: u64) -> Option<R> {
        let found = self.posted.take_first(|(from, wanted, _)| {
            from.is_none_or(|from| from == source) && wanted.is_none_or(|wanted| wanted == tag)
        });
        found.map(|(_, _, receive)| receive)
    }

    /// Cancels a posted receive. `None` if it was matched or cancelled before.
    pub fn cancel(&mut self, id: PostedId) -> Option<R> {
        self.posted.remove(id.index, id.generation).map(|(_, _, receive)| receive)
    }

    /// The first unexpected message that a receive would match: source, tag and message.
    pub fn probe(&self, source: Option<MemberId>, tag: Option<u64>) -> Option<(MemberId, u64, &M)> {
        let mut next = self.unexpected.first;
        while next != NONE {
            let node = &self.unexpected.nodes[next as usize];
            if let Some((from, message_tag, message)) = &node.value
                && source.is_none_or(|source| source == *from)
                && tag.is_none_or(|tag| tag == *message_tag)
            {
                return Some((*from, *message_tag, message));
            }
            next = node.next;
        }
        None
    }

    /// Takes the next posted receive that names `source`, which is dead, and that no message can match any more. Receives from
    /// any source stay.
    pub fn take_receive_from(&mut self, source: MemberId) -> Option<R> {
        self.posted.take_first(|(from, _, _)| *from == Some(source)).map(|(_, _, receive)| receive)
    }

    /// Takes the next posted receive, when no message can come any more.
    pub fn take_any_receive(&mut self) -> Option<R> {
        self.posted.take_first(|_| true).map(|(_, _, receive)| receive)
    }

    /// Receives that are posted.
    pub fn posted(&self) -> usize {
        self.posted.len as usize
    }

    /// Messages that no receive has matched yet.
    pub fn unexpected(&self) -> usize {
        self.unexpected.len as usize
    }
}

const NONE: u32 = u32::MAX;

/// A doubly linked list in a table of fixed size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct List<T> {
    nodes: Box<[Node<T>]>,
    first: u32,
    last: u32,
    free: u32,
    len: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node<T> {
    value: Option<T>,
    previous: u32,
    next: u32,
    generation: u32,
}

impl<T> List<T> {
    fn new(size: usize) -> Self {
        let size = size.clamp(1, Limits::MAX_TABLE) as u32;
        List {
            nodes: (1..=size)
                .map(|next| Node {
                    value: None,
                    previous: NONE,
                    next: if next == size { NONE } else { next },
                    generation: 0,
                })
                .collect(),
            first: NONE,
            last: NONE,
            free: 0,
            len: 0,
        }
    }

    #[inline]
    fn push(&mut self, value: T) -> Result<(u32, u32), T> {
        let index = self.free;
        if index == NONE {
            return Err(value);
        }
        let last = self.last;
        let node = &mut self.nodes[index as usize];
        self.free = node.next;
        node.value = Some(value);
        (node.previous, node.next) = (last, NONE);
        let generation = node.generation;
        if last == NONE {
            self.first = index;
        } else {
            self.nodes[last as usize].next = index;
        }
        self.last = index;
        self.len += 1;
        Ok((index, generation))
    }

    #[inline]
    fn take_first(&mut self, matches: impl Fn(&T) -> bool) -> Option<T> {
        let mut next = self.first;
        while next != NONE {
            let node = &self.nodes[next as usize];
            if node.value.as_ref().is_some_and(&matches) {
                let generation = node.generation;
                return self.remove(next, generation);
            }
            next = node.next;
        }
        None
    }

    fn remove(&mut self, index: u32, generation: u32) -> Option<T> {
        let node = self.nodes.get_mut(index as usize)?;
        if node.generation != generation {
            return None;
        }
        let value = node.value.take()?;
        node.generation = generation.wrapping_add(1);
        let (previous, next) = (node.previous, node.next);
        node.next = self.free;
        self.free = index;
        if previous == NONE {
            self.first = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
        if next == NONE {
            self.last = previous;
        } else {
            self.nodes[next as usize].previous = previous;
        }
        self.len -= 1;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Post(Option<usize>, Option<u64>),
        Arrive(usize, u64),
        Cancel(usize),
    }

    proptest! {
        /// The oracle: two plain vectors, searched from the front.
        #[test]
        fn matches_are_those_of_two_plain_lists(steps in prop::collection::vec(
            prop_oneof![
                (prop::option::of(0usize..3), prop::option::of(0u64..3)).prop_map(|(s, t)| Step::Post(s, t)),
                (0usize..3, 0u64..3).prop_map(|(s, t)| Step::Arrive(s, t)),
                (0usize..8).prop_map(Step::Cancel),
            ], 0..100)
        ) {
            let mut matcher = Matcher::<usize, usize>::new(8, 8);
            let mut posted: Vec<(Option<usize>, Option<u64>, usize, PostedId)> = Vec::new();
            let mut unexpected: Vec<(usize, u64, usize)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Post(source, tag) => {
                        let expected = unexpected.iter().position(|(s, t, _)| {
                            source.is_none_or(|source| source == *s) && tag.is_none_or(|tag| tag == *t)
                        });
                        match matcher.post(source.map(MemberId::new), tag, number) {
                            Ok((None, Some(matched))) => {
                                let (_, _, message) = unexpected.remove(expected.unwrap());
                                prop_assert_eq!(matched.message, message);
                            }
                            Ok((Some(id), None)) => {
                                prop_assert_eq!(expected, None);
                                posted.push((source, tag, number, id));
                            }
                            Err(MatcherFull(_)) => prop_assert!(expected.is_none() && posted.len() == 8),
                            other => prop_assert!(false, "{:?}", other),
                        }
                    }
                    Step::Arrive(source, tag) => {
                        let expected = posted.iter().position(|(s, t, _, _)| {
                            s.is_none_or(|s| s == source) && t.is_none_or(|t| t == tag)
                        });
                        match matcher.arrive(MemberId::new(source), tag, number) {
                            Ok(Some(matched)) => {
                                prop_assert_eq!(matched.receive, posted.remove(expected.unwrap()).2);
                            }
                            Ok(None) => {
                                prop_assert_eq!(expected, None);
                                unexpected.push((source, tag, number));
                            }
                            Err(MatcherFull(_)) => prop_assert!(expected.is_none() && unexpected.len() == 8),
                        }
                    }
                    Step::Cancel(which) if which < posted.len() => {
                        let (_, _, receive, id) = posted.remove(which);
                        prop_assert_eq!(matcher.cancel(id), Some(receive));
                        prop_assert_eq!(matcher.cancel(id), None);
                    }
                    Step::Cancel(_) => {}
                }
                prop_assert_eq!((matcher.posted(), matcher.unexpected()), (posted.len(), unexpected.len()));
            }
        }
    }
}
