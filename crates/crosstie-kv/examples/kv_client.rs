//! The client library: one operation at a time, a counter that several clients share, and many operations at a time, on 8-byte keys
//! and on byte strings. Uses a running node, or starts a node in this process.
//!
//! ```text
//! cargo run --release -p crosstie-kv --example kv_client                  starts a node in this process
//! cargo run --release -p crosstie-kv --example kv_client -- NAME          attaches to the node NAME
//! cargo run --release -p crosstie-kv --example kv_client -- NAME SECONDS  measures for SECONDS, with eight operations in flight
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie_kv::client::{self, BeginBytesError, BeginError, Client, SwapOutcome};
use crosstie_kv::node::{Node, NodeConfig};
use crosstie_kv::wire::{BytesOp, Op, Status, WordRequest};

const DEPTH: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let own_node = match arguments.first() {
        Some(_) => None,
        None => Some(Node::start(&NodeConfig {
            daemons: 2,
            ..NodeConfig::single(&format!("kv-example-{}", std::process::id()))
        })?),
    };
    let name = own_node.as_ref().map_or_else(|| arguments[0].as_str(), Node::name);

    one_at_a_time(name)?;
    shared_counter(name)?;
    mixed_pipeline(name)?;
    let seconds = arguments.get(1).map_or(Ok(0.2), |text| text.parse())?;
    measure_throughput(name, Duration::from_secs_f64(seconds))?;
    if let Some(node) = own_node {
        node.stop()?;
    }
    Ok(())
}

fn one_at_a_time(name: &str) -> Result<(), Box<dyn Error>> {
    let mut client = Client::attach(name)?;
    // A call without a response for this long returns an error.
    client.set_timeout(Duration::from_secs(2));
    let info = *client.info();
    println!("rank {} of {}, {} daemons, {:?}", info.rank, info.nodes, info.daemons, info.backend);

    client.put(1, 100)?;
    println!("get(1)                        {:?}", client.get(1)?);
    println!("compare_and_swap(1, 100, 101) {:?}", client.compare_and_swap(1, 100, 101)?);
    println!("compare_and_swap(1, 100, 102) {:?}", client.compare_and_swap(1, 100, 102)?);

    client.put_bytes(b"greeting", b"hello")?;
    let greeting = client.get_bytes(b"greeting")?.unwrap_or_default();
    println!("get_bytes(greeting)           {}", String::from_utf8_lossy(&greeting));
    println!("delete_bytes(greeting)        {}", client.delete_bytes(b"greeting")?);
    Ok(())
}

/// Two clients increment one counter: each retries until no other client was faster.
fn shared_counter(name: &str) -> Result<(), Box<dyn Error>> {
    const COUNTER: u64 = 2;
    let count = |name: &str| -> Result<(), Box<dyn Error + Send + Sync>> {
        let mut client = Client::attach(name)?;
        for _ in 0..1000 {
            let mut now = client.get(COUNTER)?.unwrap_or(0);
            while let SwapOutcome::Mismatch(other) = client.compare_and_swap(COUNTER, now, now + 1)? {
                now = other;
            }
        }
        Ok(())
    };
    let mut client = Client::attach(name)?;
    client.put(COUNTER, 0)?;
    std::thread::scope(|scope| {
        let counting = [(); 2].map(|()| scope.spawn(|| count(name)));
        counting.into_iter().try_for_each(|thread| thread.join().expect("counting does not panic"))
    })
    .map_err(|error| error.to_string())?;
    println!("two clients counted to        {:?}", client.get(COUNTER)?);
    Ok(())
}

/// Words and byte strings in flight at the same time. Each response comes with the token of its operation.
fn mixed_pipeline(name: &str) -> Result<(), Box<dyn Error>> {
    let mut client = Client::<u64>::attach_pipelined(name)?;
    let (mut words, mut bytes) = (0, 0);
    let mut poll = |client: &mut Client<u64>| {
        client.wait(None);
        words += client.poll(|number, response| assert_eq!((response.status, number % 2), (Status::Done, 0)));
        // The value is borrowed from the buffer it arrived in: nothing is copied.
        client.poll_bytes(|_, response| bytes += response.value.len());
    };
    let page = [b'x'; 4096];
    for number in 0..100 {
        if number % 2 == 0 {
            let put = WordRequest { value: number, ..WordRequest::new(Op::Put, 0, 1000 + number) };
            // Back-pressure is an error value: poll for responses, then try again.
            while let Err(error) = client.begin(put, number) {
                match error {
                    BeginError::Full(_) => poll(&mut client),
                    BeginError::ServerGone(_) => return Err(client::Error::ServerGone.into()),
                }
            }
        } else {
            let key = number.to_le_bytes();
            for op in [BytesOp::Put { key: &key, value: &page }, BytesOp::Get { key: &key }] {
                while let Err(error) = client.begin_bytes(op, number) {
                    match error {
                        BeginBytesError::Full(_) => poll(&mut client),
                        error => return Err(error.to_string().into()),
                    }
                }
            }
        }
    }
    while client.in_flight() > 0 {
        poll(&mut client);
    }
    println!("a batch                       {words} words put, {bytes} bytes got");
    Ok(())
}

fn measure_throughput(name: &str, time: Duration) -> Result<(), Box<dyn Error>> {
    let mut client = Client::<u64>::attach_pipelined(name)?;
    let (begun, mut key, mut ended, mut gone) = (Instant::now(), 0u64, 0u64, 0u64);
    let mut over = false;
    while !over || client.in_flight() > 0 {
        while !over && client.in_flight() < DEPTH {
            let request = match key % 2 {
                0 => WordRequest { value: key, ..WordRequest::new(Op::Put, 0, key / 2 % 10_000) },
                _ => WordRequest::new(Op::Get, 0, key / 2 % 10_000),
            };
            match client.begin(request, key) {
                Ok(()) => key += 1,
                Err(BeginError::Full(_)) => break,
                Err(error) => return Err(error.to_string().into()),
            }
            over = key.is_multiple_of(1024) && begun.elapsed() >= time;
        }
        let responses = client.poll(|_, response| gone += u64::from(response.status == Status::NodeGone));
        ended += responses as u64;
        if responses == 0 {
            client.wait(Some(Duration::from_millis(100)));
        }
    }
    let rate = ended as f64 / begun.elapsed().as_secs_f64();
    println!("{ended} operations, {rate:.0} per second, {gone} for nodes that are gone");
    Ok(())
}
