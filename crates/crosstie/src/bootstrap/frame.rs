//! Frames on an authenticated connection.
//!
//! ```text
//! 0     1           5              5 + len
//! kind  len u32 LE  payload (len)  tag (32) = HMAC(key of this direction, number u64 | kind | len | payload)
//! ```
//!
//! The frame number is counted by both sides and not sent, so a frame that is changed, repeated, left out or moved
//! fails its tag. `len` is checked against the limit as soon as it is read; memory grows only as bytes arrive.
//! Payloads are authentic but not hidden: do not put into a blob what the network may not see.

use std::sync::Arc;

use super::error::Violation;
use super::secret::{Keyed, TAG};

const HEAD: usize = 5;

/// Numbers and tags outgoing frames of one direction.
pub(super) struct Sealer {
    key: Keyed,
    number: u64,
}

/// A frame ready to be written: its three parts in order. The payload is shared between receivers.
pub(super) struct Sealed {
    pub(super) head: [u8; HEAD],
    pub(super) payload: Arc<[u8]>,
    pub(super) tag: [u8; TAG],
}

impl Sealer {
    pub(super) fn new(key: Keyed) -> Self {
        Sealer { key, number: 0 }
    }

    /// The caller keeps `payload` within the limit.
    pub(super) fn seal(&mut self, kind: u8, payload: Arc<[u8]>) -> Sealed {
        let length = u32::try_from(payload.len()).expect("limits are below 4 GiB");
        let mut head = [kind; HEAD];
        head[1..].copy_from_slice(&length.to_le_bytes());
        let tag = tag(&self.key, self.number, &head, &payload).finish();
        self.number += 1;
        Sealed { head, payload, tag }
    }
}

/// A frame whose tag held.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) payload: Vec<u8>,
}

/// Collects incoming bytes of one direction and hands out frames.
///
/// After a violation it hands out nothing more.
pub(super) struct Opener {
    key: Keyed,
    number: u64,
    limit: usize,
    bytes: Vec<u8>,
    broken: Option<Violation>,
}

impl Opener {
    pub(super) fn new(key: Keyed, limit: usize) -> Self {
        Opener { key, number: 0, limit, bytes: Vec::new(), broken: None }
    }

    pub(super) fn extend(&mut self, bytes: &[u8]) {
        if self.broken.is_none() {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// The next whole frame, or `None` while bytes are missing.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Violation> {
        if let Some(violation) = self.broken {
            return Err(violation);
        }
        let result = self.try_next();
        if let Err(violation) = result {
            self.broken = Some(violation);
            self.bytes = Vec::new();
        }
        result
    }

    fn try_next(&mut self) -> Result<Option<Frame>, Violation> {
        let Some(head) = self.bytes.first_chunk::<HEAD>().copied() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > self.limit {
            return Err(Violation::Length);
        }
        let end = HEAD + length + TAG;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let rest = self.bytes.split_off(end);
        let mut frame = std::mem::replace(&mut self.bytes, rest);
        let received: [u8; TAG] = *frame.last_chunk().expect("the length was checked");
        frame.truncate(HEAD + length);
        if !tag(&self.key, self.number, &head, &frame[HEAD..]).matches(&received) {
            return Err(Violation::Tag);
        }
        frame.drain(..HEAD);
        self.number += 1;
        Ok(Some(Frame { kind: head[0], payload: frame }))
    }
}

fn tag(key: &Keyed, number: u64, head: &[u8; HEAD], payload: &[u8]) -> Keyed {
    let mut keyed = key.clone();
    keyed.update(&number.to_le_bytes());
    keyed.update(head);
    keyed.update(payload);
    keyed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 100;

    fn pair() -> (Sealer, Opener) {
        let key = Keyed::new(b"some key");
        (Sealer::new(key.clone()), Opener::new(key, LIMIT))
    }

    fn bytes(sealed: &Sealed) -> Vec<u8> {
        [&sealed.head[..], &sealed.payload, &sealed.tag].concat()
    }

    #[test]
    fn a_replayed_frame_is_refused() {
        let (mut sealer, mut opener) = pair();
        let first = bytes(&sealer.seal(1, Arc::from(*b"one")));
        opener.extend(&first);
        assert_eq!(opener.next(), Ok(Some(Frame { kind: 1, payload: b"one".to_vec() })));
        opener.extend(&first);
        assert_eq!(opener.next(), Err(Violation::Tag));
        // and nothing gets through afterwards
        opener.extend(&bytes(&sealer.seal(1, Arc::from(*b"two"))));
        assert_eq!(opener.next(), Err(Violation::Tag));
    }

    #[test]
    fn a_dropped_frame_is_noticed() {
        let (mut sealer, mut opener) = pair();
        let lost = sealer.seal(1, Arc::from(*b"one"));
        assert_eq!(lost.head[0], 1);
        opener.extend(&bytes(&sealer.seal(1, Arc::from(*b"two"))));
        assert_eq!(opener.next(), Err(Violation::Tag));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let mut sealer = pair().0;
        let frame = bytes(&sealer.seal(1, Arc::from(*b"payload")));
        for bit in 0..frame.len() * 8 {
            let (_, mut opener) = pair();
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            opener.extend(&changed);
            // A flipped length bit may leave the opener waiting for bytes that never come.
            assert!(!matches!(opener.next(), Ok(Some(_))), "bit {bit}");
        }
    }

    #[test]
    fn an_oversized_length_is_refused_from_the_head_alone() {
        let (_, mut opener) = pair();
        opener.extend(&[1]);
        opener.extend(&(LIMIT as u32 + 1).to_le_bytes());
        assert_eq!(opener.next(), Err(Violation::Length));
    }

    proptest! {
        #[test]
        fn raw_bytes_never_become_a_frame(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 0..8),
        ) {
            let (_, mut opener) = pair();
            for chunk in chunks {
                opener.extend(&chunk);
                prop_assert!(!matches!(opener.next(), Ok(Some(_))));
                prop_assert!(opener.bytes.len() <= HEAD + LIMIT + TAG);
            }
        }

        #[test]
        fn frames_survive_any_split(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..=LIMIT), 0..6),
            cut in 1_usize..50,
        ) {
            let (mut sealer, mut opener) = pair();
            let mut wire = Vec::new();
            for (kind, payload) in payloads.iter().enumerate() {
                wire.extend(bytes(&sealer.seal(kind as u8, Arc::from(&payload[..]))));
            }
            let mut seen = Vec::new();
            for chunk in wire.chunks(cut) {
                opener.extend(chunk);
                while let Some(frame) = opener.next().expect("no violation") {
                    prop_assert_eq!(usize::from(frame.kind), seen.len());
                    seen.push(frame.payload);
                }
            }
            prop_assert_eq!(seen, payloads);
        }
    }
}
