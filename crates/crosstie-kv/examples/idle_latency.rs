//! The latency of single requests to an idle store: one request, then a pause, as a service with little traffic sees it.
//!
//! ```text
//! cargo run --release -p crosstie-kv --example idle_latency -- NAME [REQUESTS [PAUSE_MS]]    attaches to the node NAME
//! ```
//!
//! Prints a line for each way into the store: 8-byte keys and byte strings, of this node and, in a cluster, of other nodes.

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie_kv::client::{self, Client};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().ok_or("give the name of a running node")?;
    let requests = arguments.get(1).map_or(Ok(100), |text| text.parse::<usize>())?.max(1);
    let pause = Duration::from_millis(arguments.get(2).map_or(Ok(150), |text| text.parse())?);
    let mut client = Client::attach(name)?;
    let (rank, map) = (client.info().rank, client.shard_map());
    let find = |is_local: bool, rank_of: &dyn Fn(u64) -> u32| {
        (1..10_000).find(|number| (rank_of(*number) == rank) == is_local)
    };
    for (is_local, place) in [(true, "local"), (false, "remote")] {
        let Some(word) = find(is_local, &|number| map.shard_of_word(number).rank) else { continue };
        let string = find(is_local, &|number| map.shard_of_bytes(&number.to_le_bytes()).rank);
        let string = string.unwrap_or_default().to_le_bytes();
        client.put(word, 1)?;
        client.put_bytes(&string, b"value")?;
        measure(&mut client, &format!("8-byte key, {place}"), requests, pause, |client| {
            client.get(word).map(drop)
        })?;
        measure(&mut client, &format!("byte string, {place}"), requests, pause, |client| {
            client.get_bytes(&string).map(drop)
        })?;
    }
    Ok(())
}

fn measure(
    client: &mut Client,
    what: &str,
    requests: usize,
    pause: Duration,
    mut request: impl FnMut(&mut Client) -> Result<(), client::Error>,
) -> Result<(), client::Error> {
    let mut times = Vec::new();
    for _ in 0..requests {
        std::thread::sleep(pause);
        let start = Instant::now();
        request(client)?;
        times.push(start.elapsed());
    }
    times.sort();
    let at = |per_cent: usize| times[(times.len() - 1) * per_cent / 100];
    println!(
        "{what:<20}  median {:>8.1?}  p90 {:>8.1?}  max {:>8.1?}  of {} requests",
        at(50),
        at(90),
        at(100),
        times.len()
    );
    Ok(())
}
