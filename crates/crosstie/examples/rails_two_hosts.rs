//! Sends messages from one machine to another over one to four rails, and prints what each rail carried.
//!
//! On the receiving machine, which has the address 10.0.0.1, and on the sending one, in any order:
//!
//! ```text
//! (umask 077; head -c 32 /dev/urandom | base64 > secret)     # once; copy it to the other machine
//! export CROSSTIE_SECRET_FILE=secret
//! rails_two_hosts receive 10.0.0.1:7010 verbs:mlx5_0,verbs:mlx5_1
//! rails_two_hosts send    10.0.0.1:7010 verbs:mlx5_0,verbs:mlx5_1
//! ```
//!
//! Without a NIC, in two terminals of one machine: `127.0.0.1:7010 software,software`.

use std::error::Error;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie::device::Device;
use crosstie::rails::{Config, Counters, Handle, Rails, RecvBuffer, SendConnection, SetupError};

const LEN: usize = 1 << 20;
const MESSAGES: u64 = 32;
/// How much later than the sender the receiver may be started.
const PATIENCE: Duration = Duration::from_secs(60);

const USAGE: &str = "usage: rails_two_hosts receive|send ADDRESS:PORT DEVICE[,DEVICE]...";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, address, devices] = &arguments[..] else { return Err(USAGE.into()) };
    let address: SocketAddr = address.parse()?;
    // Rail `r` of one machine is connected with rail `r` of the other.
    let mut opened = Vec::new();
    for device in devices.split(',') {
        opened.push(Device::open(&device.parse()?)?);
    }
    let rails = Rails::new(opened, Config::default())?;
    let secret = Secret::from_env()?;
    match role.as_str() {
        "receive" => receive(&rails, address, &secret),
        "send" => send(&rails, &Handle::with_secret(address, &secret)),
        _ => Err(USAGE.into()),
    }
}

fn receive(rails: &Rails, address: SocketAddr, secret: &Secret) -> Result<(), Box<dyn Error>> {
    let mut listener = rails.listen_with_secret(address, secret)?;
    println!("waiting for a sender at {address}");
    let mut receiver = wait(|| listener.accept())?;
    let memory = rails.allocate(LEN)?;
    let mut bytes = vec![0; LEN];
    for number in 0..MESSAGES {
        let buffer = RecvBuffer { memory: &memory, range: 0..LEN, tag: 0 };
        let request = wait(|| receiver.irecv(std::slice::from_ref(&buffer)))?;
        let received = wait(|| receiver.test(request))?;
        memory.read(0, &mut bytes)?;
        if received.sizes() != [LEN] || bytes != message(number) {
            return Err(format!("message {number} is wrong").into());
        }
    }
    report("received", &receiver.counters());
    Ok(())
}

fn send(rails: &Rails, handle: &Handle) -> Result<(), Box<dyn Error>> {
    let mut sender = connect(rails, handle)?;
    let memory = rails.allocate(LEN)?;
    for number in 0..MESSAGES {
        memory.write(0, &message(number))?;
        // The receiver has to post a buffer first.
        let request = wait(|| sender.isend(&memory, 0..LEN, 0))?;
        wait(|| sender.test(request))?;
    }
    report("sent", &sender.counters());
    Ok(())
}

/// Connects as soon as somebody listens.
fn connect(rails: &Rails, handle: &Handle) -> Result<SendConnection, SetupError> {
    let begin = Instant::now();
    loop {
        let mut connecting = rails.connect(handle)?;
        match wait(|| connecting.poll()) {
            Err(SetupError::Handshake(error))
                if error.kind() == ErrorKind::ConnectionRefused && begin.elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(100));
            }
            connected => return connected,
        }
    }
}

/// Calls `step` until it has a result. A program would do something else meanwhile.
fn wait<T, E>(mut step: impl FnMut() -> Result<Option<T>, E>) -> Result<T, E> {
    loop {
        match step()? {
            Some(result) => return Ok(result),
            None => std::thread::yield_now(),
        }
    }
}

/// The bytes of a message.
fn message(number: u64) -> Vec<u8> {
    (0..LEN as u64).map(|at| (at * (number + 3) % 251) as u8).collect()
}

fn report(verb: &str, counters: &Counters) {
    println!("{verb} {} messages of {LEN} bytes, checked by the receiver", counters.messages);
    for (number, rail) in counters.rails.iter().enumerate() {
        println!("rail {number}: {} bytes, {} failures", rail.bytes, rail.failures);
    }
}
