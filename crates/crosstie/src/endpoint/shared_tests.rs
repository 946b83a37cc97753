//! Threads that find the engine taken. In these tests this thread has it, so that its own calls find it taken.

use super::test_pair::{config, connected};

#[test]
fn holder_of_the_engine_starts_what_was_submitted_in_order_before_it_unlocks() {
    let (here, there) = connected(&config());
    let target = there.allocate(64).unwrap();
    let writes = here.shared.with_engine(|_, _| {
        let write = |imm| here.write_imm(here.allocate(8).unwrap(), .., &target.remote(), 0, imm).unwrap();
        let writes: Vec<_> = (0..5).map(write).collect();
        assert!(writes.iter().all(|write| !write.is_ended()), "only the holder starts them");
        writes
    });
    // Nobody has called `progress`.
    assert!(writes.iter().all(|write| write.is_ended()), "the holder has looked again");
    for imm in 0..5 {
        assert_eq!(there.imm_recv().unwrap().wait().unwrap().imm, Some(imm), "in the order of the calls");
    }
    assert!(writes.into_iter().all(|write| write.wait().is_ok()));
}

/// A thread drops a future together with its immediate, and calls again: the new call gets that immediate, not a later one.
#[test]
fn returned_immediate_goes_before_later_ones_also_while_another_thread_has_the_engine() {
    let (here, there) = connected(&config());
    let target = there.allocate(64).unwrap();
    for imm in 0..3 {
        here.write_imm(here.allocate(8).unwrap(), .., &target.remote(), 0, imm).unwrap().wait().unwrap();
    }
    let first = there.imm_recv().unwrap();
    assert!(first.is_ended());
    let second = there.shared.with_engine(|engine, table| {
        drop(first);
        let second = there.imm_recv().unwrap();
        engine.take_submitted(table);
        assert!(second.is_ended());
        second
    });
    assert_eq!(second.wait().unwrap().imm, Some(0));
    for imm in 1..3 {
        assert_eq!(there.imm_recv().unwrap().wait().unwrap().imm, Some(imm));
    }
}
