//! Memory that is registered again and again, as NCCL does for the buffers of its users.

use crosstie::device::{Access, DeviceError, Mr, MultiRegion, Pd};
use crosstie::rails::*;

use super::pair::*;

const LEN: usize = 300_000;
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// Registers `memory` on all rails.
fn register(rails: &Rails, memory: &mut [u8]) -> Memory {
    // SAFETY: the memory outlives its registrations, and is accessed through them only.
    let regions =
        unsafe { MultiRegion::register(rails.domains(), memory.as_mut_ptr(), memory.len(), ACCESS) };
    rails.adopt(regions.unwrap()).unwrap()
}

/// Takes all entries of the device's table of regions but two, so that each new region uses one of these two.
fn occupy(domain: &Pd, memory: &mut [u8]) -> Vec<Mr> {
    let mut held = Vec::new();
    loop {
        // SAFETY: as in `register`.
        match unsafe { domain.register(memory.as_mut_ptr(), memory.len(), ACCESS) } {
            Ok(region) => held.push(region),
            Err(DeviceError::Exhausted { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    held.truncate(held.len() - 2);
    held
}

/// Sends two halves as a group. A send of a group is posted when the group is complete, which is after the call that named its
/// memory: the device checks once more that the memory is registered.
fn transfer_group(pair: &mut Pair, from: &Memory, to: &Memory) {
    const HALF: usize = LEN / 2;
    let bytes = pattern(LEN, 77);
    from.write(0, &bytes).unwrap();
    let buffers = [0, 1].map(|tag| {
        let start = tag as usize * HALF;
        RecvBuffer { memory: to, range: start..start + HALF, tag }
    });
    let receive = pair.receiver.irecv(&buffers).unwrap().unwrap();
    for buffer in buffers.into_iter().rev() {
        pair.send(from, buffer.range, buffer.tag);
    }
    assert_eq!(pair.finish_receive(receive), [HALF; 2]);
    check(to, 0, &bytes);
    pair.progress_until(|pair| pair.sender.counters().messages == 5);
}

/// After 16,383 regions, the keys of an entry repeat, and addresses get a tag. Here those of one rail have one, and those of the
/// other have none.
#[test]
fn memory_is_reached_over_all_rails_after_forty_thousand_registrations() {
    let mut pair = Pair::plain(2, Config { split: Split::Fixed([1, 1, 0, 0]), ..Config::default() });
    let (mut from, mut to) = (vec![0u8; LEN], vec![0u8; LEN]);
    let (here, there) = (pair.here.clone(), pair.there.clone());
    // The sender's second rail and the receiver's first.
    let held = [occupy(&here.domains()[1], &mut from), occupy(&there.domains()[0], &mut to)];
    for _ in 0..40_000 {
        drop((register(&here, &mut from), register(&there, &mut to)));
    }
    let (from, to) = (register(&here, &mut from), register(&there, &mut to));
    assert!(from.remote(1).addr > 1 << 48 && to.remote(0).addr > 1 << 48, "no tag yet");
    assert!(from.remote(0).addr < 1 << 48 && to.remote(1).addr < 1 << 48);
    for n in 0..4 {
        pair.transfer(&from, &to, LEN - 1000 * n, n as u64);
    }
    transfer_group(&mut pair, &from, &to);
    let sent = pair.sender.counters();
    assert_eq!(sent.masks[3], 5, "both rails carried each message");
    assert_eq!((sent.rails[0].failures, sent.rails[1].failures), (0, 0));
    // Giving them back one by one would take seconds. The devices are closed without it.
    std::mem::forget(held);
}
