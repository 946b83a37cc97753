//! Frames on an authenticated connection.
//!
//! ```text
//! 0     1           5              5 + len
//! kind  len u32 LE  payload (len)  tag (32) = HMAC(key of this direction, number u64 | kind | len | payload)
//! ```
//!
//! Both ends count the frames; the frame number is not sent. So a frame that is changed, repeated, lost or reordered
//! fails the check of its tag. The decoder compares `len` with its limit as soon as it has the header, and its memory
//! grows only as bytes arrive. Payloads are authenticated but not encrypted: do not put confidential data into a blob.

use std::sync::Arc;

use super::error::Violation;
use super::secret::{HmacSha256, TAG_BYTES};

const HEADER_BYTES: usize = 5;

/// Numbers and authenticates the outgoing frames of one direction.
pub(super) struct FrameEncoder {
    key: HmacSha256,
    number: u64,
}

/// A frame ready to be written: its three parts, in order. The payload may be shared with frames to other ranks.
pub(super) struct EncodedFrame {
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) payload: Arc<[u8]>,
    pub(super) tag: [u8; TAG_BYTES],
}

impl FrameEncoder {
    pub(super) fn new(key: HmacSha256) -> Self {
        FrameEncoder { key, number: 0 }
    }

    /// Adds header and tag. The caller makes sure that `payload` is within the receiver's limit.
    pub(super) fn encode(&mut self, kind: u8, payload: Arc<[u8]>) -> EncodedFrame {
        let length = u32::try_from(payload.len()).expect("limits are below 4 GiB");
        let mut header = [kind; HEADER_BYTES];
        header[1..].copy_from_slice(&length.to_le_bytes());
        let tag = tag(&self.key, self.number, &header, &payload).finish();
        self.number += 1;
        EncodedFrame { header, payload, tag }
    }
}

/// A received frame whose tag was correct.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) payload: Vec<u8>,
}

/// Collects the incoming bytes of one direction and returns whole frames.
///
/// After a violation every call returns that violation.
pub(super) struct FrameDecoder {
    key: HmacSha256,
    number: u64,
    limit: usize,
    bytes: Vec<u8>,
    violation: Option<Violation>,
}

impl FrameDecoder {
    pub(super) fn new(key: HmacSha256, limit: usize) -> Self {
        FrameDecoder { key, number: 0, limit, bytes: Vec::new(), violation: None }
    }

    pub(super) fn extend(&mut self, bytes: &[u8]) {
        if self.violation.is_none() {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// Returns the next whole frame, or `None` while bytes are missing.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Violation> {
        if let Some(violation) = self.violation {
            return Err(violation);
        }
        let result = self.try_next();
        if let Err(violation) = result {
            self.violation = Some(violation);
            self.bytes = Vec::new();
        }
        result
    }

    fn try_next(&mut self) -> Result<Option<Frame>, Violation> {
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>().copied() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
        if length > self.limit {
            return Err(Violation::Length);
        }
        let end = HEADER_BYTES + length + TAG_BYTES;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let rest = self.bytes.split_off(end);
        let mut frame = std::mem::replace(&mut self.bytes, rest);
        let received: [u8; TAG_BYTES] = *frame.last_chunk().expect("the length was checked");
        frame.truncate(HEADER_BYTES + length);
        if !tag(&self.key, self.number, &header, &frame[HEADER_BYTES..]).verify(&received) {
            return Err(Violation::Tag);
        }
        frame.drain(..HEADER_BYTES);
        self.number += 1;
        Ok(Some(Frame { kind: header[0], payload: frame }))
    }
}

fn tag(key: &HmacSha256, number: u64, header: &[u8; HEADER_BYTES], payload: &[u8]) -> HmacSha256 {
    let mut hmac = key.clone();
    hmac.update(&number.to_le_bytes());
    hmac.update(header);
    hmac.update(payload);
    hmac
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 100;

    fn pair() -> (FrameEncoder, FrameDecoder) {
        let key = HmacSha256::new(b"some key");
        (FrameEncoder::new(key.clone()), FrameDecoder::new(key, LIMIT))
    }

    fn concat(encoded: &EncodedFrame) -> Vec<u8> {
        [&encoded.header[..], &encoded.payload, &encoded.tag].concat()
    }

    #[test]
    fn replayed_frame_is_rejected() {
        let (mut encoder, mut decoder) = pair();
        let first = concat(&encoder.encode(1, Arc::from(*b"one")));
        decoder.extend(&first);
        assert_eq!(decoder.next(), Ok(Some(Frame { kind: 1, payload: b"one".to_vec() })));
        decoder.extend(&first);
        assert_eq!(decoder.next(), Err(Violation::Tag));
        // No later frame is accepted either.
        decoder.extend(&concat(&encoder.encode(1, Arc::from(*b"two"))));
        assert_eq!(decoder.next(), Err(Violation::Tag));
    }

    #[test]
    fn dropped_frame_is_detected() {
        let (mut encoder, mut decoder) = pair();
        let lost = encoder.encode(1, Arc::from(*b"one"));
        assert_eq!(lost.header[0], 1);
        decoder.extend(&concat(&encoder.encode(1, Arc::from(*b"two"))));
        assert_eq!(decoder.next(), Err(Violation::Tag));
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let mut encoder = pair().0;
        let frame = concat(&encoder.encode(1, Arc::from(*b"payload")));
        for bit in 0..frame.len() * 8 {
            let (_, mut decoder) = pair();
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            decoder.extend(&changed);
            // After a flip in the length the decoder may wait for bytes that never come.
            assert!(!matches!(decoder.next(), Ok(Some(_))), "bit {bit}");
        }
    }

    #[test]
    fn oversized_length_is_rejected_from_the_header_alone() {
        let (_, mut decoder) = pair();
        decoder.extend(&[1]);
        decoder.extend(&(LIMIT as u32 + 1).to_le_bytes());
        assert_eq!(decoder.next(), Err(Violation::Length));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_become_a_frame(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 0..8),
        ) {
            let (_, mut decoder) = pair();
            for chunk in chunks {
                decoder.extend(&chunk);
                prop_assert!(!matches!(decoder.next(), Ok(Some(_))));
                prop_assert!(decoder.bytes.len() <= HEADER_BYTES + LIMIT + TAG_BYTES);
            }
        }

        #[test]
        fn frames_decode_whatever_the_chunk_size(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..=LIMIT), 0..6),
            cut in 1_usize..50,
        ) {
            let (mut encoder, mut decoder) = pair();
            let mut wire = Vec::new();
            for (kind, payload) in payloads.iter().enumerate() {
                wire.extend(concat(&encoder.encode(kind as u8, Arc::from(&payload[..]))));
            }
            let mut seen = Vec::new();
            for chunk in wire.chunks(cut) {
                decoder.extend(chunk);
                while let Some(frame) = decoder.next().expect("no violation") {
                    prop_assert_eq!(usize::from(frame.kind), seen.len());
                    seen.push(frame.payload);
                }
            }
            prop_assert_eq!(seen, payloads);
        }
    }
}
