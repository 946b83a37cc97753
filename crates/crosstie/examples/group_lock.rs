//! Four processes share one lock. `cargo run -p crosstie --example group_lock` starts all of them.

use crosstie::bootstrap;
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut job = bootstrap::from_env_or_local(4)?;
    let device = Device::open(&"software".parse()?)?;
    let group = Group::join(job.as_mut(), &device, &GroupConfig::new(1))?;
    for _ in 0..3 {
        let guard = group.lock(0).acquire()?;
        println!("{} has the lock, fencing token {}", group.member(), guard.fence());
        guard.release()?;
    }
    if group.lock(1).try_acquire()?.is_none() {
        println!("{}: somebody else has lock 1", group.member());
    }
    group.barrier(0).wait()?;
    job.finish()?;
    Ok(())
}
