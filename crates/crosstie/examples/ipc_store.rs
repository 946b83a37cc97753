//! A store of named counters in one process, and two clients in other processes: `cargo run --example ipc_store`.
//!
//! Each client increments counters by name and reads them back. Names have any length, so the messages are byte strings.

use std::collections::HashMap;
use std::error::Error;
use std::process::Command;

use crosstie::ipc::{Client, Config, Server};

const NAME: &str = "example-store";

fn serve() -> Result<(), Box<dyn Error>> {
    let mut server = Server::<[u8], [u8]>::create(NAME, &Config { max_clients: 2, ..Config::default() })?;
    let program = std::env::current_exe()?;
    let mut clients = Vec::new();
    for word in ["apples", "pears"] {
        clients.push(Command::new(&program).arg(word).spawn()?);
    }
    let mut counters: HashMap<Vec<u8>, u64> = HashMap::new();
    while server.counters().disconnects < 2 {
        server.wait(None);
        server.serve(|request| {
            let counter = counters.entry(request.message().to_vec()).or_default();
            *counter += 1;
            if let Err(error) = request.reply(&counter.to_le_bytes()) {
                eprintln!("{error}");
            }
        });
    }
    for mut client in clients {
        assert!(client.wait()?.success());
    }
    println!(
        "apples {}, pears {}, both {}",
        counters[&b"apples"[..]],
        counters[&b"pears"[..]],
        counters[&b"both"[..]]
    );
    Ok(())
}

fn run_client(word: &str) -> Result<(), Box<dyn Error>> {
    let mut client = Client::<[u8], [u8]>::connect(NAME)?;
    for round in 1..=10_000u64 {
        let count = client.exchange(word.as_bytes(), <[u8]>::to_vec)?;
        assert_eq!(count, round.to_le_bytes());
        client.exchange(b"both", |_| ())?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        Some(word) => run_client(&word),
        None => serve(),
    }
}
