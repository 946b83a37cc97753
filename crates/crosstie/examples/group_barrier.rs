//! Four processes meet at a barrier. `cargo run -p crosstie --example group_barrier` starts all of them.

use std::time::Duration;

use crosstie::bootstrap;
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, GroupError, PacketKind};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut job = bootstrap::from_env_or_local(4)?;
    let device = Device::open(&"software".parse()?)?;
    let group = Group::join(job.as_mut(), &device, &GroupConfig::new(1))?;
    let barrier = group.barrier(0);
    for _ in 0..1000 {
        barrier.wait()?;
    }
    // Member 3 is late; the error of the others names it.
    if group.member().index() == 3 {
        std::thread::sleep(Duration::from_millis(300));
        barrier.wait()?;
    } else {
        match barrier.wait_timeout(Duration::from_millis(50)) {
            Err(error @ GroupError::BarrierTimedOut { .. }) => println!("{}: {error}", group.member()),
            other => println!("{}: {other:?}", group.member()),
        }
        barrier.wait()?;
    }
    let sent = group.counters();
    let (up, down) = (sent.sent(PacketKind::BarrierArrive), sent.sent(PacketKind::BarrierRelease));
    println!("{}: 1001 rounds, {up} arrivals and {down} releases sent", group.member());
    job.finish()?;
    Ok(())
}
