//! Fuzz targets: the segment that the server and all clients share, and the reply of a server's handshake.

use std::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use super::layout::{AcceptReply, RingLayout, SharedRing};
use super::*;
use crate::fuzzing::{Steps, fuzz};
use crate::memory::copy::copy;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

fn config() -> Config {
    Config {
        max_clients: 2,
        queue_depth: 3,
        ring_depth: 8,
        request_limit: 40,
        response_limit: 40,
        ..Config::default()
    }
}

/// A client that writes anything into the segment. The ring may stop, but the server hands out valid requests only, and its
/// clients can disconnect. Steps: `0, position in words (2 bytes), word`: write; `1`: call; `2`: serve; `3`: poll; `4`: wait.
#[test]
fn fuzz_delegation_server() {
    let name = format!("fuzz-delegation-{}", std::process::id());
    let write = |at: u16, word: u64| [&[0][..], &at.to_le_bytes(), &word.to_le_bytes()].concat();
    let examples = [
        vec![1, 2, 3, 1, 1, 2, 3, 3],
        [&[1][..], &write(8, 5), &[2, 3], &write(32, 1 << 40), &[1, 2, 3, 4]].concat(),
        [&[1, 1, 1, 2][..], &write(16, 7), &[3, 1, 2, 3]].concat(),
    ];
    fuzz(CRATE, "delegation_server", examples, |input| {
        let mut server = Server::<[u8], [u8]>::create(&name, &config()).unwrap();
        let mut hostile = Client::<[u8], [u8], ()>::connect(&name).unwrap();
        let mut correct = Client::<[u8], [u8], ()>::connect(&name).unwrap();
        let segment = hostile.transport.ring.segment.clone();
        let mut steps = Steps(input);
        let (mut made, mut ended) = (0, 0);
        while !steps.is_empty() {
            match steps.byte() % 5 {
                0 => {
                    let at = u64::from(steps.byte()) | u64::from(steps.byte()) << 8;
                    let word = steps.word();
                    let target = segment.bytes(at % (segment.len() / 8) * 8, 8).unwrap();
                    // SAFETY: eight bytes inside the segment, which is accessed through atomics and copies that tolerate races.
                    unsafe { copy((&raw const word).cast(), target.as_ptr(), 8) };
                }
                1 => {
                    hostile.call(&[1, 2, 3], ()).ok();
                    made += u32::from(correct.call(&[9; 9], ()).is_ok());
                }
                2 => {
                    server.poll();
                    let mut received = 0;
                    while let Some(request) = server.recv() {
                        received += 1;
                        assert!(request.message().len() <= 40);
                        assert!(received <= 64, "one drain is bounded");
                        let response = request.message().to_vec();
                        match request.reply(&response) {
                            Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                3 => {
                    hostile.poll(|(), response| assert!(response.len() <= 40)).ok();
                    correct.poll(|(), response| ended += u32::from(response.len() <= 40)).ok();
                }
                _ => drop(hostile.wait(Some(Duration::ZERO))),
            }
        }
        correct.disconnect(|()| ended += 1);
        assert_eq!(made, ended, "every token is handed back once");
    });
}

/// The reply of a server's handshake, with a segment of another size: the client maps it or refuses it.
#[test]
fn fuzz_delegation_layout() {
    let small = RingLayout::new(&config(), None, None);
    let example = AcceptReply { layout: small, key: 1 };
    let ring = SharedRing::create(small).unwrap();
    fuzz(CRATE, "delegation_layout", [example.as_bytes().to_vec()], |input| {
        let Ok(AcceptReply { layout, .. }) = AcceptReply::read_from_bytes(input) else { return };
        let file = ring.segment.fd().try_clone_to_owned().unwrap();
        if let Ok(Some(opened)) = SharedRing::open(file.into(), layout) {
            assert!(layout.bytes() <= small.bytes(), "{layout:?}");
            assert_eq!(opened.resp_depth, layout.resp_depth());
        }
    });
}
