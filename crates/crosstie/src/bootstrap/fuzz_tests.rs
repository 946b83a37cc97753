//! Fuzz targets: the bytes of a rendezvous, before and after the peer has proved the secret.

use std::sync::Arc;

use super::abort;
use super::frame::{Frame, FrameDecoder, FrameEncoder};
use super::handshake::{JoinResponse, NONCE_BYTES, REQUEST_BYTES, RESPONSE_BYTES, Transcript};
use super::payload::{pack_blobs, unpack_blobs, unpack_words};
use super::secret::{HmacSha256, Secret};
use crate::fuzzing::{Steps, fuzz};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const LIMIT: usize = 200;

fn secret() -> Secret {
    Secret::new("the secret of the job").expect("long enough")
}

/// Bytes before the peer has proved anything: only the exact request is accepted.
#[test]
fn fuzz_bootstrap_handshake() {
    let (secret, nonce) = (secret(), [3; NONCE_BYTES]);
    let transcript = Transcript { coordinator_nonce: nonce, member_nonce: nonce, rank: 1, size: 2 };
    let request = transcript.join_request(&secret);
    let responses = [JoinResponse::Accepted, JoinResponse::DuplicateRank, JoinResponse::SizeMismatch(3)];
    let responses = responses.map(|response| (transcript.join_response(&secret, response), response));
    let examples = responses.iter().map(|(bytes, _)| bytes.to_vec()).chain([request.to_vec()]);
    fuzz(CRATE, "bootstrap_handshake", examples, |input| {
        if let Ok(bytes) = <&[u8; REQUEST_BYTES]>::try_from(input) {
            let accepted = Transcript::verify_join_request(&secret, nonce, nonce, bytes).is_some();
            assert_eq!(accepted, *bytes == request, "a proof is accepted only if it is right");
        }
        if let Ok(bytes) = <&[u8; RESPONSE_BYTES]>::try_from(input) {
            let expected = responses.iter().find(|(known, _)| known == bytes).map(|(_, response)| *response);
            assert_eq!(transcript.verify_join_response(&secret, bytes), expected);
        }
    });
}

/// A stream of frames that a peer with the right key sent, and that was cut, changed, repeated or continued on its way. Only
/// frames that were sent come out, in their order, and no more memory is used than one frame needs.
///
/// Input: `kind, length, payload` for each frame up to `kind` 0; then `position, value` for each byte of the stream to change.
#[test]
fn fuzz_bootstrap_frames() {
    let key = HmacSha256::new(b"some key");
    let examples =
        [vec![1, 3, 7, 8, 9, 2, 0, 0, 5, 1], vec![3, 60, 1, 2, 3], [&[4, 8][..], &[9; 8], &[0; 9]].concat()];
    fuzz(CRATE, "bootstrap_frames", examples, |input| {
        let (mut encoder, mut decoder) =
            (FrameEncoder::new(key.clone()), FrameDecoder::new(key.clone(), LIMIT));
        let (mut steps, mut sent, mut stream) = (Steps(input), Vec::new(), Vec::new());
        while let kind @ 1.. = steps.byte() {
            let len = usize::from(steps.byte()) % (LIMIT + 1);
            let payload = steps.take(len).to_vec();
            let encoded = encoder.encode(kind, Arc::from(&payload[..]));
            stream.extend([&encoded.header[..], &encoded.payload, &encoded.tag].concat());
            sent.push(Frame { kind, payload });
        }
        while !steps.is_empty() && !stream.is_empty() {
            let at = steps.word() as usize % stream.len();
            stream[at] = steps.byte();
        }
        let mut received = 0;
        for chunk in stream.chunks(1 + input.len() % 70) {
            decoder.extend(chunk);
            while let Ok(Some(frame)) = decoder.next() {
                assert_eq!(Some(&frame), sent.get(received), "only what was sent, in order");
                received += 1;
            }
        }
    });
}

/// The payloads of operations and of an abort: all of a peer that knows the secret and sends invalid bytes.
#[test]
fn fuzz_bootstrap_payloads() {
    let ranks = [1u32, 2].map(u32::to_le_bytes).concat();
    let examples = [
        [&[2][..], &pack_blobs(&[&b"abc"[..], b""])].concat(),
        [&[0, 1, 2][..], &7u64.to_le_bytes(), &2u32.to_le_bytes(), &ranks, b"note"].concat(),
        vec![0, 2, 1, 0, 0, 0],
        [&[0, 3][..], &[1; 16]].concat(),
        vec![0, 4, 2, 3, 0, 0, 0, 0, 1, 0, 0, 0],
        vec![0, 5, 1, 0, 0, 0],
        vec![0, 6, 1, 9, 0, 0, 0],
    ];
    fuzz(CRATE, "bootstrap_payloads", examples, |input| {
        let Some((count, payload)) = input.split_first() else { return };
        if let Ok(blobs) = unpack_blobs(payload, u32::from(*count)) {
            assert_eq!(pack_blobs(&blobs), payload);
        }
        if let Ok(words) = unpack_words(payload) {
            assert_eq!(words.len() * 8, payload.len());
        }
        if let Some(error) = abort::decode(payload) {
            assert!(!error.to_string().is_empty());
            // The note may have been changed to valid UTF-8; everything else is the same again.
            let again = abort::encode(&error).and_then(|bytes| abort::decode(&bytes));
            assert!(again.is_some(), "{error}");
        }
    });
}
