//! One process reads a buffer of another one, on one machine or two.
//!
//! Started without further settings, it starts its second process itself:
//!
//! ```text
//! cargo run --release --example endpoint_fetch
//! ```
//!
//! In two terminals, or on two hosts with an RDMA device each (`--features verbs`, device for example `verbs:r0`):
//!
//! ```text
//! (umask 077; head -c 32 /dev/urandom | base64 > secret); export CROSSTIE_SECRET_FILE=secret  # the same for both
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=0 endpoint_fetch [DEVICE [BYTES]]
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=1 endpoint_fetch [DEVICE [BYTES]]
//! ```

mod pair;

use std::error::Error;
use std::time::Instant;

use crosstie::device::DeviceSpec;
use crosstie::endpoint::{Endpoint, EndpointAddress, EndpointConfig};
use crosstie::region::{DESCRIPTOR_SIZE, RemoteRegion, Rights};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceSpec = arguments.next().unwrap_or("software".into()).parse()?;
    let len: usize = arguments.next().unwrap_or("67108864".into()).parse()?;

    let mut job = pair::join()?;
    let endpoint = Endpoint::open(&device, &EndpointConfig::default())?;
    let address = pair::exchange(&mut job, &endpoint.address().to_bytes())?;
    endpoint.connect(&EndpointAddress::from_bytes(&address)?)?;
    // The buffer of the first process, and the memory of the second one that it is read into.
    let buffer = endpoint.allocate(len)?;
    if job.rank() == 0 {
        buffer.write(0, &pattern(len))?;
        pair::exchange(&mut job, &endpoint.describe(&buffer).encode())?;
    } else {
        let descriptor: [u8; DESCRIPTOR_SIZE] =
            pair::exchange(&mut job, &[])?.try_into().map_err(|_| "the peer did not send a descriptor")?;
        // The address in it is that of the connected peer, or this is an error.
        let remote = endpoint
            .import(&RemoteRegion::decode(&descriptor)?, Rights { read: true, ..Rights::default() })?;
        let begin = Instant::now();
        // The operation takes the buffer and gives it back with its result.
        let read = endpoint.read(buffer, .., &remote, 0)?;
        let buffer = read.wait()?.buffer;
        let took = begin.elapsed();
        if buffer.to_vec() != pattern(len) {
            return Err("wrong bytes were read".into());
        }
        println!("read {len} bytes in {took:.2?}, {:.1} GB/s", len as f64 / took.as_secs_f64() / 1e9);
    }
    // The first process keeps its buffer until the second one has read it.
    job.barrier()?;
    job.finish()?;
    Ok(())
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}
