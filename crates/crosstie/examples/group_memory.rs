//! Four processes reach each other's memory with PUSH, PULL and PUT, and send tagged messages. `cargo run -p crosstie --example
//! group_memory` starts all of them.

use crosstie::bootstrap;
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, MemberId};

const BLOCK: usize = 64 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut job = bootstrap::from_env_or_local(4)?;
    let device = Device::open(&"software".parse()?)?;
    let group = Group::join(job.as_mut(), &device, &GroupConfig::new(1).one_sided(true))?;
    let (me, members) = (group.member().index(), group.members());
    let next = MemberId::new((me + 1) % members);
    let previous = MemberId::new((me + members - 1) % members);

    // A window that the other members write to, and its description.
    let window = group.allocate(2 * BLOCK)?;
    let descriptions = job.all_gather(&group.describe(&window)?.encode())?;
    let memory = group.import(&descriptions[next.index()])?;

    // PUSH a block into the window of the next member, and PUT a few bytes behind it.
    let block = group.allocate(BLOCK)?;
    block.write(0, &[me as u8; BLOCK])?;
    let block = group.push(block, .., &memory, 0)?.wait()?.buffer;
    group.put(format!("from {}", group.member()).as_bytes(), &memory, BLOCK as u64)?.wait()?;
    group.barrier(0).wait()?;
    let bytes = window.to_vec();
    let text = String::from_utf8_lossy(&bytes[BLOCK..BLOCK + 13]).into_owned();
    println!("{}: window has {BLOCK} bytes of {}, and \"{text}\"", group.member(), bytes[0]);

    // PULL the block back out of the next member's window.
    let block = group.pull(block, .., &memory, 0)?.wait()?.buffer;
    assert!(block.to_vec().iter().all(|byte| *byte == me as u8));

    // A tagged message: the receiver pulls it out of the sender's buffer.
    let tagged = group.open_tagged(5, &group.tagged_options())?;
    group.barrier(0).wait()?;
    let receive = tagged.irecv(Some(previous), Some(7), group.allocate(BLOCK)?)?;
    let send = tagged.isend(next, 7, block, ..)?;
    let (info, buffer) = receive.wait()?;
    send.wait()?;
    println!("{}: {} bytes of {} with tag {}", group.member(), info.len, info.from, info.tag);
    assert!(buffer.to_vec().iter().all(|byte| usize::from(*byte) == previous.index()));
    group.barrier(0).wait()?;
    job.finish()?;
    Ok(())
}
