//! Four processes send messages to each other. `cargo run -p crosstie --example group_messages` starts all of them.

use crosstie::bootstrap;
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, MemberId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut job = bootstrap::from_env_or_local(4)?;
    let device = Device::open(&"software".parse()?)?;
    let group = Group::join(job.as_mut(), &device, &GroupConfig::new(1))?;
    let channel = group.open_channel(5, &group.channel_options())?;
    group.barrier(0).wait()?;
    let next = MemberId::new((group.member().index() + 1) % group.members());
    channel.send(next, format!("hello from {}", group.member()).as_bytes())?;
    channel.send(next, &vec![7; 100_000])?;
    for _ in 0..2 {
        let message = channel.recv()?;
        let text =
            if message.bytes.len() < 100 { String::from_utf8_lossy(&message.bytes) } else { "…".into() };
        println!("{} got {} bytes of {}: {text}", group.member(), message.bytes.len(), message.from);
    }
    channel.flush()?;
    group.barrier(0).wait()?;
    job.finish()?;
    Ok(())
}
