//! memcached, loaded by a small client of our own: gets and sets 1:1, 8-byte keys and values, the meta protocol (its
//! leanest), so many to a pipeline on each connection. Every answer is checked to the byte.
//!
//! One thread has all connections: while it looks after one, the requests of the others are under way. A connection has
//! its own keys and gets its answers in order, so what a get must find is known when it is sent.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::server::{CONNECTIONS, Connection, KEYS, Server, version};
use super::{Cores, Figures};
use crate::error::{Error, with_path};
use crate::packages::{Packages, is_root};
use crate::process::run_for_output;

const PROGRAM: &str = "memcached";
/// Round trips of which the latency is kept.
const SAMPLES: usize = 1 << 20;

/// A memcached that runs.
pub(super) struct Memcached {
    pub(super) version: String,
    server: Server,
    cores: Cores,
}

impl Memcached {
    /// Installs it if it is missing, and starts it. It has one thread: the other core is the client's.
    pub(super) fn start(cores: Cores) -> Result<Memcached, Error> {
        [PROGRAM].into_iter().collect::<Packages>().install()?;
        let server = Server::start(PROGRAM, cores, |socket| {
            let mut arguments = vec!["-s", socket, "-t", "1", "-m", "256"];
            // It refuses to run as root unless it is told to.
            if is_root() {
                arguments.extend(["-u", "root"]);
            }
            arguments.into_iter().map(str::to_owned).collect()
        })?;
        Ok(Memcached { version: version(PROGRAM)?, server, cores })
    }

    /// Gets and sets in turn for so long, so many to a pipeline.
    pub(super) fn measure(&self, pipeline: usize, seconds: f64) -> Result<Figures, Error> {
        let (socket, cores) = (self.server.socket(), self.cores);
        // On a thread of its own, which can keep to the cores and leave ours alone.
        let measured = thread::scope(|scope| {
            let client = scope.spawn(move || {
                keep_to(cores)?;
                load(socket, pipeline, Duration::from_secs_f64(seconds))
            });
            client.join()
        });
        measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Confines the calling thread.
fn keep_to(cores: Cores) -> Result<(), Error> {
    let link = "/proc/thread-self";
    let target = fs::read_link(link).map_err(with_path(link))?;
    let thread = target.file_name().unwrap_or_default();
    run_for_output(Command::new("taskset").args(["-p", "-c", &cores.to_string()]).arg(thread)).map(drop)
}

/// One connection and what it will hear.
struct Client {
    connection: Connection,
    /// The first of its keys.
    first: u32,
    /// The value of each of them.
    values: Vec<u32>,
    random: u64,
    written: u32,
    requests: Vec<u8>,
    expected: Vec<u8>,
    sent: Instant,
}

impl Client {
    /// Connects, and stores all its keys.
    fn new(socket: &Path, nth: usize) -> Result<Client, Error> {
        let share = KEYS / CONNECTIONS as u32;
        let mut client = Client {
            connection: Connection::new(socket, PROGRAM)?,
            first: share * nth as u32,
            values: vec![0; share as usize],
            random: 0x9e37_79b9_7f4a_7c15 ^ nth as u64,
            written: 0,
            requests: Vec::new(),
            expected: Vec::new(),
            sent: Instant::now(),
        };
        for start in (0..share).step_by(64) {
            (start..share.min(start + 64)).for_each(|at| client.set(at));
            client.send()?;
            client.receive()?;
        }
        Ok(client)
    }

    /// So many requests, gets and sets in turn.
    fn fill(&mut self, pipeline: usize) {
        for _ in 0..pipeline {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let at = (((self.random >> 32) * self.values.len() as u64) >> 32) as u32;
            self.written = self.written.wrapping_add(1);
            if self.written.is_multiple_of(2) { self.set(at) } else { self.get(at) }
        }
    }

    fn set(&mut self, at: u32) {
        let value = self.written;
        self.values[at as usize] = value;
        self.requests.extend_from_slice(b"ms ");
        self.requests.extend_from_slice(&hex(self.first + at));
        self.requests.extend_from_slice(b" 8\r\n");
        self.requests.extend_from_slice(&hex(value));
        self.requests.extend_from_slice(b"\r\n");
        self.expected.extend_from_slice(b"HD\r\n");
    }

    fn get(&mut self, at: u32) {
        self.requests.extend_from_slice(b"mg ");
        self.requests.extend_from_slice(&hex(self.first + at));
        self.requests.extend_from_slice(b" v\r\n");
        self.expected.extend_from_slice(b"VA 8\r\n");
        self.expected.extend_from_slice(&hex(self.values[at as usize]));
        self.expected.extend_from_slice(b"\r\n");
    }

    fn send(&mut self) -> Result<(), Error> {
        self.sent = Instant::now();
        self.connection.send(&self.requests)?;
        self.requests.clear();
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Error> {
        self.connection.expect(&self.expected)?;
        self.expected.clear();
        Ok(())
    }
}

/// Eight digits.
fn hex(number: u32) -> [u8; 8] {
    std::array::from_fn(|at| b"0123456789abcdef"[(number >> (28 - 4 * at) & 15) as usize])
}

/// Loads the server at `socket`. The median is that of a pipeline's round trip.
fn load(socket: &Path, pipeline: usize, duration: Duration) -> Result<Figures, Error> {
    let clients: Result<Vec<Client>, Error> = (0..CONNECTIONS).map(|nth| Client::new(socket, nth)).collect();
    let mut clients = clients?;
    let mut latencies = Vec::with_capacity(SAMPLES);
    let started = Instant::now();
    for client in &mut clients {
        client.fill(pipeline);
        client.send()?;
    }
    let mut done = 0u64;
    while started.elapsed() < duration {
        for client in &mut clients {
            client.receive()?;
            if latencies.len() < SAMPLES {
                latencies.push(client.sent.elapsed().as_nanos() as f64);
            }
            done += pipeline as u64;
            client.fill(pipeline);
            client.send()?;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    clients.iter_mut().try_for_each(Client::receive)?;
    latencies.sort_by(f64::total_cmp);
    let p50_ns = latencies.get(latencies.len() / 2).copied().unwrap_or(0.0);
    Ok(Figures { per_second: done as f64 / seconds, p50_ns, cache_line_ns: None })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A server of so many connections that speaks what the client needs; `lies` makes every hundredth get wrong.
    fn serve(listener: &UnixListener, lies: bool) {
        thread::scope(|scope| {
            for _ in 0..CONNECTIONS {
                let Ok((stream, _)) = listener.accept() else { return };
                scope.spawn(move || {
                    let mut writer = stream.try_clone().expect("a second handle");
                    let mut lines = BufReader::new(stream).split(b'\n');
                    let mut values: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
                    let mut gets = 0;
                    while let Some(Ok(line)) = lines.next() {
                        let words: Vec<&[u8]> = line.trim_ascii_end().split(|byte| *byte == b' ').collect();
                        let answer = match words.as_slice() {
                            [b"ms", key, b"8"] => {
                                let Some(Ok(value)) = lines.next() else { return };
                                values.insert(key.to_vec(), value.trim_ascii_end().to_vec());
                                b"HD\r\n".to_vec()
                            }
                            [b"mg", key, b"v"] => {
                                gets += 1;
                                match values.get(*key) {
                                    Some(value) if !(lies && gets % 100 == 0) => {
                                        [b"VA 8\r\n", value.as_slice(), b"\r\n"].concat()
                                    }
                                    _ => b"EN\r\n".to_vec(),
                                }
                            }
                            _ => b"CLIENT_ERROR\r\n".to_vec(),
                        };
                        // The client goes when it has seen enough.
                        if writer.write_all(&answer).is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }

    fn loaded(name: &str, pipeline: usize, lies: bool) -> Result<Figures, Error> {
        let socket = std::env::temp_dir().join(format!("crosstie-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).expect("a socket");
        let found = thread::scope(|scope| {
            scope.spawn(|| serve(&listener, lies));
            load(&socket, pipeline, Duration::from_millis(50))
        });
        fs::remove_file(&socket).expect("the socket goes");
        found
    }

    #[test]
    fn gets_find_what_sets_stored() {
        for pipeline in [1, 16] {
            let found = loaded(&format!("good-{pipeline}"), pipeline, false).expect("figures");
            assert!(found.per_second > 0.0 && found.p50_ns > 0.0, "{found:?}");
        }
    }

    #[test]
    fn a_wrong_answer_is_an_error() {
        let told = loaded("lies", 16, true).expect_err("it lies").to_string();
        assert!(told.contains("EN"), "{told}");
    }

    #[test]
    fn keys_and_values_have_eight_digits() {
        assert_eq!(&hex(0), b"00000000");
        assert_eq!(&hex(0x12ab_cdef), b"12abcdef");
    }
}
