//! Flushing memory of a GPU. Here it is memory of the host.

use crosstie::device::fault::Plan;
use crosstie::device::{Access, Device, MultiRegion, Status};
use crosstie::rails::*;

use super::pair::*;

const WRITTEN: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

fn memory(rails: &Rails, access: Access) -> Memory {
    rails.adopt(MultiRegion::allocate(rails.domains(), 4096, access).unwrap()).unwrap()
}

/// Rail 1 has the faults of a plan. The flusher is the only user of the devices.
fn context(plan: Plan) -> (Rails, Flusher) {
    let devices: Vec<Device> = vec![software(), software().with_faults(plan)];
    let rails = Rails::new(devices, Config::default()).unwrap();
    let flusher = Flusher::new(&rails).unwrap();
    (rails, flusher)
}

fn wait(flusher: &mut Flusher, flush: Flush) {
    until(|| flusher.test(flush).then_some(()));
}

#[test]
fn flushes_are_done_in_any_number_at_once() {
    let (rails, mut flusher) = context(Plan::none());
    let memory = memory(&rails, WRITTEN | Access::REMOTE_READ);
    for round in 0..100 {
        let flushes: Vec<Flush> =
            (0..=round).map(|n| flusher.start(&memory, (round + n) % 4096, 3).unwrap()).collect();
        flushes.iter().for_each(|flush| wait(&mut flusher, *flush));
        // One that is done stays done.
        assert!(flushes.iter().all(|flush| flusher.test(*flush)));
    }
    assert_eq!(flusher.rails(), 3);
}

#[test]
fn a_flush_survives_a_rail_whose_read_fails() {
    for (failures, left) in [(1, 3), (2, 1)] {
        let plan = (0..failures).fold(Plan::none(), |plan, k| plan.fail_completion(k, Status::RetryExceeded));
        let (rails, mut flusher) = context(plan);
        let memory = memory(&rails, WRITTEN | Access::REMOTE_READ);
        let flushes = [0, 8].map(|offset| flusher.start(&memory, offset, 3).unwrap());
        flushes.into_iter().for_each(|flush| wait(&mut flusher, flush));
        assert_eq!(flusher.rails(), left, "{failures} failures");
        // As long as the connection does not use the rail, it is left out; then it is tried again.
        for (up, usable) in [(1, left), (3, 3)] {
            let flush = flusher.start(&memory, 0, up).unwrap();
            wait(&mut flusher, flush);
            assert_eq!(flusher.rails(), usable);
        }
    }
}

#[test]
fn a_flush_that_cannot_read_anything_ends() {
    let (rails, mut flusher) = context(Plan::none());
    // A mistake of the program: the key does not allow it.
    let memory = memory(&rails, WRITTEN);
    let flush = flusher.start(&memory, 0, 3).unwrap();
    wait(&mut flusher, flush);
    assert_eq!(flusher.rails(), 0);
    let (other, _) = context(Plan::none());
    assert_eq!(flusher.start(&self::memory(&other, WRITTEN), 0, 3), Err(RequestError::WrongMemory));
    assert!(matches!(flusher.start(&memory, 4096, 3), Err(RequestError::OutOfRegion(_))));
}
