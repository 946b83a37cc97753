//! A counter in one process that two other processes increment, through one shared ring.
//!
//! ```text
//! cargo run --release --example delegation_counter
//! ```

use std::process::Command;
use std::time::Duration;

use crosstie::delegation::{Client, Config, Server};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

#[derive(Clone, Copy, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Add {
    amount: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    match (args.next(), args.next()) {
        (Some(name), Some(amount)) => count(&name, amount.parse()?),
        _ => serve(&format!("counter-{}", std::process::id())),
    }
}

/// The client: adds `amount` a thousand times, with up to 32 calls in flight.
fn count(name: &str, amount: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut client = Client::<Add, u64, u32>::connect(name)?;
    let (mut made, mut highest) = (0, 0);
    while made < 1000 || client.in_flight() > 0 {
        while made < 1000 && client.call(&Add { amount }, made).is_ok() {
            made += 1;
        }
        client.wait(None)?;
        client.poll(|_call, total| highest = highest.max(*total))?;
    }
    println!("added {amount} a thousand times, the highest total seen was {highest}");
    Ok(())
}

/// The server: starts two clients, and owns the counter until both have ended.
fn serve(name: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut server = Server::<Add, u64>::create(name, &Config::default())?;
    let mut clients = ["1", "10"]
        .map(|amount| Command::new(std::env::current_exe()?).args([name, amount]).spawn())
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let mut total = 0;
    while !clients.iter_mut().all(|client| matches!(client.try_wait(), Ok(Some(_)))) {
        server.wait(Some(Duration::from_millis(10)));
        server.serve(|request| {
            total += request.message().amount;
            if let Err(error) = request.reply(&total) {
                eprintln!("{error}");
            }
        });
    }
    println!("total {total}");
    Ok(())
}
