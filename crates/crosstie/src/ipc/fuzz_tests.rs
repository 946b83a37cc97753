//! Fuzz targets: a lane that the peer writes, from both ends, and the layout that a server sends.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use super::lane::{Lane, LaneLayout};
use super::*;
use crate::fuzzing::{Steps, fuzz};
use crate::memory::segment::Segment;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const CONFIG: Config = Config {
    max_clients: 2,
    queue_depth: 3,
    request_limit: 40,
    response_limit: 40,
    wait_strategy: crate::WaitStrategy::Park,
};

/// Writes `word` to the word `at` of a segment, modulo its length.
fn write_word(segment: &Segment, at: u64, word: u64) {
    let place = segment.bytes(at % (segment.len() / 8) * 8, 8).expect("inside the segment");
    // SAFETY: an aligned word inside the segment, which all sides access atomically.
    unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) }.store(word, Relaxed);
}

/// Steps `0 word position`: write a word; `1`: call; `2`: serve; `3`: poll; `4`: wait without time.
fn examples() -> [Vec<u8>; 3] {
    let write = |at: u8, word: u64| [&[0, at][..], &word.to_le_bytes()].concat();
    [
        vec![1, 2, 3, 1, 1, 2, 3, 3],
        [&[1][..], &write(16, 1 << 33 | 1 << 32 | 8), &[2, 3], &write(17, 7), &[2, 3, 4]].concat(),
        [&[1, 2][..], &write(16, 1 << 33 | 8), &[3, 1, 2, 3]].concat(),
    ]
}

/// A client that writes anything into its lane: the server hands out valid requests only, and serves the other client.
#[test]
fn fuzz_ipc_server() {
    let name = format!("fuzz-ipc-server-{}", std::process::id());
    fuzz(CRATE, "ipc_server", examples(), |input| {
        let mut server = Server::<[u8], [u8]>::create(&name, &CONFIG).unwrap();
        let mut hostile = Client::<[u8], [u8], ()>::connect(&name).unwrap();
        let mut correct = Client::<[u8], [u8], u8>::connect(&name).unwrap();
        let (mut steps, mut made, mut answered) = (Steps(input), 0, 0);
        while !steps.is_empty() {
            match steps.byte() % 5 {
                0 => {
                    let (at, word) = (u64::from(steps.byte()), steps.word());
                    // Its own lane, and the page with the server's parker that all clients can write.
                    let segment = hostile.transport.segments()[usize::from(at >= 200)];
                    write_word(segment, at, word);
                }
                1 => drop(hostile.call(&[1, 2, 3], ())),
                2 => {
                    made += u32::from(correct.call(&[9; 9], 5).is_ok());
                    server.poll();
                    let mut received = 0;
                    while let Some(request) = server.recv() {
                        received += 1;
                        assert!(request.message().len() <= 40 && received <= 2 * 3);
                        let response = request.message().to_vec();
                        request.reply(&response).unwrap();
                    }
                    let polled = correct.poll(|token, response| {
                        assert_eq!((token, response), (5, &[9; 9][..]));
                        answered += 1;
                    });
                    polled.unwrap();
                }
                3 => drop(hostile.poll(|(), response| assert!(response.len() <= 40))),
                _ => drop(hostile.wait(Some(Duration::ZERO))),
            }
        }
        assert_eq!(made, answered, "the other client is served");
    });
}

/// A server that writes anything into a lane: the client gets a valid response or an error, and every token back.
#[test]
fn fuzz_ipc_client() {
    let name = format!("fuzz-ipc-client-{}", std::process::id());
    fuzz(CRATE, "ipc_client", examples(), |input| {
        let mut server = Server::<[u8], bool>::create(&name, &CONFIG).unwrap();
        let mut client = Client::<[u8], bool, ()>::connect(&name).unwrap();
        let (mut steps, mut made, mut ended) = (Steps(input), 0, 0);
        while !steps.is_empty() {
            match steps.byte() % 5 {
                0 => {
                    let (at, word) = (u64::from(steps.byte()), steps.word());
                    write_word(client.transport.segments()[0], at, word);
                }
                1 => made += u32::from(client.call(&[1, 2, 3], ()).is_ok()),
                2 => {
                    server.serve(|request| {
                        request.reply(&true).unwrap();
                    });
                }
                3 => drop(client.poll(|(), _| ended += 1)),
                _ => drop(client.wait(Some(Duration::ZERO))),
            }
            assert!(client.in_flight() <= client.queue_depth());
        }
        client.disconnect(|()| ended += 1);
        assert_eq!(made, ended, "every token is handed back once");
    });
}

/// The reply of a server's handshake, with a segment as long as the server says: the client maps it or refuses it.
#[test]
fn fuzz_ipc_layout() {
    let layout = LaneLayout { queue_depth: 3, request_limit: 40, response_limit: 40 };
    fuzz(CRATE, "ipc_layout", [layout.as_bytes().to_vec()], |input| {
        let Ok(layout) = LaneLayout::read_from_bytes(input) else { return };
        // The file has the size of a small lane, whatever the layout says.
        let small = LaneLayout { queue_depth: 3, request_limit: 40, response_limit: 40 };
        let file = Lane::create(&small).unwrap().file().unwrap();
        if let Ok(Some(lane)) = Lane::open(file.into(), &layout) {
            assert!(layout.bytes() <= small.bytes(), "{layout:?}");
            assert!(lane.slots() >= layout.queue_depth as usize);
        }
    });
}
