//! Puts, gets and swaps, through a node that runs or, without one, through one of its own.
//!
//! ```text
//! cargo run --release --example kv_client                  starts a node in this process
//! cargo run --release --example kv_client -- NAME          attaches to the node of that name
//! cargo run --release --example kv_client -- NAME SECONDS  and measures for so long, with eight operations at a time
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie_kv::client::{BeginError, Client, Swap};
use crosstie_kv::message::{Op, Request, Status};
use crosstie_kv::node::{Node, NodeConfig};

const DEPTH: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let own = match arguments.first() {
        Some(_) => None,
        None => Some(Node::start(&NodeConfig {
            daemons: 2,
            ..NodeConfig::alone(&format!("kv-example-{}", std::process::id()))
        })?),
    };
    let name = own.as_ref().map_or_else(|| arguments[0].as_str(), Node::name);

    one_at_a_time(name)?;
    let seconds = arguments.get(1).map_or(Ok(0.2), |text| text.parse())?;
    many_at_a_time(name, Duration::from_secs_f64(seconds))?;
    if let Some(node) = own {
        node.stop()?;
    }
    Ok(())
}

fn one_at_a_time(name: &str) -> Result<(), Box<dyn Error>> {
    let mut client = Client::attach(name)?;
    let info = *client.info();
    println!("rank {} of {}, {} daemons, {:?}", info.rank, info.nodes, info.daemons, info.backend);

    client.put(1, 100)?;
    println!("get(1)                        {:?}", client.get(1)?);
    println!("compare_and_swap(1, 100, 101) {:?}", client.compare_and_swap(1, 100, 101)?);
    println!("compare_and_swap(1, 100, 102) {:?}", client.compare_and_swap(1, 100, 102)?);
    assert_eq!(client.compare_and_swap(2, 0, 1)?, Swap::NotFound);

    client.put_bytes(b"greeting", b"hello")?;
    let greeting = client.get_bytes(b"greeting")?.unwrap_or_default();
    println!("get_bytes(greeting)           {}", String::from_utf8_lossy(&greeting));
    println!("delete_bytes(greeting)        {}", client.delete_bytes(b"greeting")?);
    Ok(())
}

fn many_at_a_time(name: &str, time: Duration) -> Result<(), Box<dyn Error>> {
    let mut client = Client::<u64>::pipelined(name)?;
    let (begun, mut key, mut ended, mut gone) = (Instant::now(), 0u64, 0u64, 0u64);
    let mut over = false;
    while !over || client.in_flight() > 0 {
        while !over && client.in_flight() < DEPTH {
            let request = match key % 2 {
                0 => Request { value: key, ..Request::new(Op::Put, 0, key / 2 % 10_000) },
                _ => Request::new(Op::Get, 0, key / 2 % 10_000),
            };
            match client.begin(request, key) {
                Ok(()) => key += 1,
                Err(BeginError::Full(_)) => break,
                Err(error) => return Err(error.to_string().into()),
            }
            over = key.is_multiple_of(1024) && begun.elapsed() >= time;
        }
        let answered = client.poll(|_, response| gone += u64::from(response.status == Status::NodeGone));
        ended += answered as u64;
        if answered == 0 {
            client.wait(Some(Duration::from_millis(100)));
        }
    }
    let rate = ended as f64 / begun.elapsed().as_secs_f64();
    println!("{ended} operations, {rate:.0} per second, {gone} for nodes that are gone");
    Ok(())
}
