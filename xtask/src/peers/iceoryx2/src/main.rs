//! Requests and responses of 32 bytes with iceoryx2, between two processes on two cores that poll.
//!
//! `iceoryx2-requests DEPTH SECONDS CORE CORE` prints one JSON object: responses per second, the median round trip, wrong responses.

use std::collections::VecDeque;
use std::error::Error;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use iceoryx2::prelude::*;

const WORDS: usize = 4;
type Message = [u64; WORDS];
/// The last request: the server ends.
const END: u64 = u64::MAX;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", name, depth, core] => serve(name, depth.parse()?, core.parse()?),
        [depth, seconds, here, there] => {
            let name = format!("requests-{}", std::process::id());
            let server = Command::new(std::env::current_exe()?)
                .args(["server", &name, depth, there])
                .stdin(Stdio::null())
                .spawn()?;
            measure(&name, depth.parse()?, Duration::from_secs_f64(seconds.parse()?), here.parse()?, server)
        }
        _ => Err("iceoryx2-requests DEPTH SECONDS CORE CORE".into()),
    }
}

macro_rules! service {
    ($node:expr, $name:expr, $depth:expr) => {
        $node
            .service_builder(&$name.try_into()?)
            .request_response::<Message, Message>()
            .max_active_requests_per_client($depth)
            .max_loaned_requests($depth)
            .max_response_buffer_size(1)
            .max_clients(1)
            .max_servers(1)
            .open_or_create()?
    };
}

fn serve(name: &str, depth: usize, core: usize) -> Result<(), Box<dyn Error>> {
    pin(core)?;
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let server = service!(node, name, depth).server_builder().create()?;
    let mut last = Instant::now();
    loop {
        while let Some(request) = server.receive()? {
            if request[0] == END {
                return Ok(());
            }
            request.send_copy(request.map(|word| !word))?;
            last = Instant::now();
        }
        if last.elapsed() > PATIENCE {
            return Err("no request".into());
        }
    }
}

fn measure(
    name: &str,
    depth: usize,
    time: Duration,
    core: usize,
    mut server: Child,
) -> Result<(), Box<dyn Error>> {
    pin(core)?;
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = service!(node, name, depth);
    let began = Instant::now();
    while service.dynamic_config().number_of_servers() == 0 {
        if began.elapsed() > PATIENCE || server.try_wait()?.is_some() {
            return Err("the server did not start".into());
        }
    }
    let client = service.client_builder().create()?;
    let mut pending = VecDeque::with_capacity(depth);
    let (mut next, mut done, mut errors) = (0u64, 0u64, 0u64);
    let mut times = Vec::with_capacity(1 << 20);
    let began = Instant::now();
    let mut now = began;
    while now - began < time || !pending.is_empty() {
        while pending.len() < depth && now - began < time {
            let request = [next, next ^ 7, !next, next << 1];
            pending.push_back((request, Instant::now(), client.send_copy(request)?));
            next += 1;
        }
        // Responses come in the order of the requests: there is one server, which answers at once.
        while let Some((request, sent, response)) = pending.front() {
            let Some(found) = response.receive()? else { break };
            errors += u64::from(*found != request.map(|word| !word));
            let ns = sent.elapsed().as_nanos() as u32;
            if times.len() < times.capacity() {
                times.push(ns);
            }
            drop(found);
            pending.pop_front();
            done += 1;
        }
        now = Instant::now();
        if now - began > time + PATIENCE {
            return Err("no response".into());
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    drop(client.send_copy([END; WORDS])?);
    server.wait()?;
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or(0);
    println!("{{\"ops_per_s\": {:.0}, \"p50_ns\": {median}, \"errors\": {errors}}}", done as f64 / seconds);
    Ok(())
}

fn pin(core: usize) -> Result<(), Box<dyn Error>> {
    // SAFETY: the set is initialised, and its size is given.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}
