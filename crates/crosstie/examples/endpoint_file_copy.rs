//! Copies a file from one process to another, on one machine or two, with a progress bar and a checksum.
//!
//! Started without further settings, it starts its second process itself:
//!
//! ```text
//! cargo run --release --example endpoint_file_copy -- SOURCE TARGET
//! ```
//!
//! In two terminals, or on two hosts with an RDMA device each (`--features verbs`, device for example `verbs:r0`); rank 0 has the
//! source, rank 1 gets the target:
//!
//! ```text
//! (umask 077; head -c 32 /dev/urandom | base64 > secret); export CROSSTIE_SECRET_FILE=secret  # the same for both
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=0 endpoint_file_copy SOURCE TARGET [DEVICE]
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=1 endpoint_file_copy SOURCE TARGET [DEVICE]
//! ```
//!
//! The file travels as messages: its length, its chunks, its SHA-256. A few buffers circulate between reading, `send` and waiting, so
//! the disk, the network and the other disk work at the same time. The target appears under its name when its checksum is right.

mod pair;

use std::collections::VecDeque;
use std::error::Error;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crosstie::device::DeviceSpec;
use crosstie::endpoint::{Endpoint, EndpointAddress, EndpointConfig};
use sha2::{Digest, Sha256};

/// Bytes of a chunk.
const CHUNK: usize = 1 << 20;
/// Chunks that are under way at a time.
const IN_FLIGHT: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, target, rest @ ..] = arguments.as_slice() else {
        return Err("usage: endpoint_file_copy SOURCE TARGET [DEVICE]".into());
    };
    let device: DeviceSpec = rest.first().map_or("software", String::as_str).parse()?;

    let mut job = pair::join()?;
    let endpoint = Endpoint::open(&device, &EndpointConfig::default())?;
    let address = pair::exchange(&mut job, &endpoint.address().to_bytes())?;
    endpoint.connect(&EndpointAddress::from_bytes(&address)?)?;
    job.barrier()?;
    match job.rank() {
        0 => send_file(&endpoint, Path::new(source))?,
        _ => receive_file(&endpoint, Path::new(target))?,
    }
    // Neither process closes its endpoint before the other has everything.
    job.barrier()?;
    job.finish()?;
    Ok(())
}

fn send_file(endpoint: &Endpoint, source: &Path) -> Result<(), Box<dyn Error>> {
    let mut file = File::open(source).map_err(|error| format!("{}: {error}", source.display()))?;
    let len = file.metadata()?.len();
    send_message(endpoint, &len.to_le_bytes())?;
    let mut idle = (0..IN_FLIGHT).map(|_| endpoint.allocate(CHUNK)).collect::<Result<Vec<_>, _>>()?;
    let (mut under_way, mut hash, mut chunk) = (VecDeque::new(), Sha256::new(), vec![0; CHUNK]);
    let mut left = len;
    while left > 0 {
        let buffer = match idle.pop() {
            Some(buffer) => buffer,
            None => {
                let oldest: crosstie::endpoint::OperationFuture<_> =
                    under_way.pop_front().ok_or("no chunk is under way")?;
                oldest.wait()?.buffer
            }
        };
        let now = CHUNK.min(usize::try_from(left).unwrap_or(CHUNK));
        file.read_exact(&mut chunk[..now])?;
        hash.update(&chunk[..now]);
        buffer.write(0, &chunk[..now])?;
        under_way.push_back(endpoint.send(buffer, ..now)?);
        left -= now as u64;
    }
    for sent in under_way {
        sent.wait()?;
    }
    send_message(endpoint, &hash.finalize())
}

fn receive_file(endpoint: &Endpoint, target: &Path) -> Result<(), Box<dyn Error>> {
    let len = u64::from_le_bytes(receive_message(endpoint)?);
    let mut partial = target.to_path_buf().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let mut file = File::create(&partial).map_err(|error| format!("{}: {error}", partial.display()))?;
    let (mut bar, mut hash, mut chunk) = (Bar::new(len), Sha256::new(), vec![0; CHUNK]);
    let chunks = len.div_ceil(CHUNK as u64);
    // Buffers that wait for chunks; each is given to `recv` again when its chunk is written, as long as more chunks come.
    let mut waiting = VecDeque::new();
    for _ in 0..chunks.min(IN_FLIGHT as u64) {
        waiting.push_back(endpoint.recv(endpoint.allocate(CHUNK)?, ..)?);
    }
    let mut done = 0;
    for number in 0..chunks {
        let next: crosstie::endpoint::OperationFuture<_> =
            waiting.pop_front().ok_or("no chunk is awaited")?;
        let received = next.wait()?;
        let now = received.bytes as usize;
        received.buffer.read(0, &mut chunk[..now])?;
        if number + (IN_FLIGHT as u64) < chunks {
            waiting.push_back(endpoint.recv(received.buffer, ..)?);
        }
        hash.update(&chunk[..now]);
        file.write_all(&chunk[..now])?;
        done += now as u64;
        bar.show(done);
    }
    let expected: [u8; 32] = receive_message(endpoint)?;
    let found: [u8; 32] = hash.finalize().into();
    if done != len || found != expected {
        return Err(format!("{}: the copy differs from the source", partial.display()).into());
    }
    file.sync_all()?;
    std::fs::rename(&partial, target)?;
    let hex: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
    let took = bar.begin.elapsed();
    println!("{len} bytes in {took:.2?}, {:.0} MB/s, sha256 {hex}", len as f64 / took.as_secs_f64() / 1e6);
    Ok(())
}

fn send_message(endpoint: &Endpoint, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let buffer = endpoint.allocate(bytes.len())?;
    buffer.write(0, bytes)?;
    endpoint.send(buffer, ..)?.wait()?;
    Ok(())
}

fn receive_message<const N: usize>(endpoint: &Endpoint) -> Result<[u8; N], Box<dyn Error>> {
    let received = endpoint.recv(endpoint.allocate(N)?, ..)?;
    let received = received.wait()?;
    let mut bytes = [0; N];
    if received.bytes != N as u64 {
        return Err("the peer sent something else".into());
    }
    received.buffer.read(0, &mut bytes)?;
    Ok(bytes)
}

/// A progress bar on standard error, if that is a terminal.
struct Bar {
    len: u64,
    begin: Instant,
    shown: Option<Instant>,
    is_terminal: bool,
}

impl Bar {
    fn new(len: u64) -> Bar {
        Bar { len, begin: Instant::now(), shown: None, is_terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, done: u64) {
        let due = self.shown.is_none_or(|shown| shown.elapsed() > Duration::from_millis(100));
        if !self.is_terminal || (!due && done < self.len) {
            return;
        }
        self.shown = Some(Instant::now());
        let share = done as f64 / self.len.max(1) as f64;
        let filled = (share * 40.0) as usize;
        let speed = done as f64 / self.begin.elapsed().as_secs_f64() / 1e6;
        let end = if done == self.len { "\n" } else { "" };
        eprint!("\r[{:<40}] {:3.0} % {speed:.0} MB/s {end}", "#".repeat(filled), share * 100.0);
    }
}
