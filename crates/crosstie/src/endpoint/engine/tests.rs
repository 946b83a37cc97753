use super::super::test_pair::{config, connected};

/// I2: a transfer that the device executes while it is posted uses up the generation of the slot that its `wr_id` names, so that no later
/// request has the same `wr_id`, and a forged completion of it finds nobody.
#[test]
fn transfer_that_completes_at_once_uses_up_its_wr_id() {
    let (here, there) = connected(&config());
    let target = there.allocate(64).unwrap();
    let next = || here.shared.with_engine(|engine, _| engine.link.slots.next().unwrap());
    for _ in 0..3 {
        let slot = next();
        let write = here.write(here.allocate(8).unwrap(), .., &target.remote(), 0).unwrap();
        assert!(write.is_ended(), "at once");
        let next_slot = next();
        assert_eq!(next_slot.index, slot.index, "it is the next slot again");
        assert_ne!(next_slot.generation, slot.generation);
    }
}
