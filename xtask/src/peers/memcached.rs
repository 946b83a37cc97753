//! memcached, loaded by a small client in this file: gets and sets 1:1, 8-byte keys and values, the meta protocol (the most
//! compact one), a pipeline of requests on each connection. Every byte of every response is checked.
//!
//! One thread serves all connections: while it serves one, the requests of the others are in flight. Each connection has its
//! own keys and gets its responses in order, so the result of a get is known when it is sent.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::server::{CONNECTIONS, Connection, KEYS, Server, package_version};
use super::{Cores, Figures};
use crate::error::{Error, with_path};
use crate::packages::{Packages, is_root};
use crate::process::run_for_output;

const PROGRAM: &str = "memcached";
/// The maximum number of latency samples.
const SAMPLES: usize = 1 << 20;

/// A running memcached.
pub(super) struct Memcached {
    pub(super) version: String,
    server: Server,
    cores: Cores,
}

impl Memcached {
    /// Installs memcached if it is missing and starts it, with one thread: the client uses the other core.
    pub(super) fn start(cores: Cores) -> Result<Memcached, Error> {
        [PROGRAM].into_iter().collect::<Packages>().install()?;
        let server = Server::start(PROGRAM, cores, |socket| {
            let mut arguments = vec!["-s", socket, "-t", "1", "-m", "256"];
            // memcached refuses to run as root without this option.
            if is_root() {
                arguments.extend(["-u", "root"]);
            }
            arguments.into_iter().map(str::to_owned).collect()
        })?;
        Ok(Memcached { version: package_version(PROGRAM)?, server, cores })
    }

    /// Measures alternating gets and sets, `pipeline` of them per round trip.
    pub(super) fn measure(&self, pipeline: usize, seconds: f64) -> Result<Figures, Error> {
        let (socket, cores) = (self.server.socket(), self.cores);
        // In a new thread, so that the affinity of this thread does not change.
        let measured = thread::scope(|scope| {
            let client = scope.spawn(move || {
                pin_current_thread(cores)?;
                load(socket, pipeline, Duration::from_secs_f64(seconds))
            });
            client.join()
        });
        measured.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Restricts the calling thread to these cores.
fn pin_current_thread(cores: Cores) -> Result<(), Error> {
    let link = "/proc/thread-self";
    let target = fs::read_link(link).map_err(with_path(link))?;
    let thread = target.file_name().unwrap_or_default();
    run_for_output(Command::new("taskset").args(["-p", "-c", &cores.to_string()]).arg(thread)).map(drop)
}

/// One connection, its requests and the responses that they must get.
struct Client {
    connection: Connection,
    /// The first of its keys.
    first_key: u32,
    /// The current value of each key.
    values: Vec<u32>,
    random: u64,
    written: u32,
    requests: Vec<u8>,
    expected: Vec<u8>,
    sent: Instant,
}

impl Client {
    /// Connects and stores all keys of this connection.
    fn new(socket: &Path, nth: usize) -> Result<Client, Error> {
        let share = KEYS / CONNECTIONS as u32;
        let mut client = Client {
            connection: Connection::new(socket, PROGRAM)?,
            first_key: share * nth as u32,
            values: vec![0; share as usize],
            random: 0x9e37_79b9_7f4a_7c15 ^ nth as u64,
            written: 0,
            requests: Vec::new(),
            expected: Vec::new(),
            sent: Instant::now(),
        };
        for start in (0..share).step_by(64) {
            (start..share.min(start + 64)).for_each(|index| client.add_set(index));
            client.send()?;
            client.receive()?;
        }
        Ok(client)
    }

    /// Adds `pipeline` requests, gets and sets alternating.
    fn add_requests(&mut self, pipeline: usize) {
        for _ in 0..pipeline {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let index = (((self.random >> 32) * self.values.len() as u64) >> 32) as u32;
            self.written = self.written.wrapping_add(1);
            if self.written.is_multiple_of(2) { self.add_set(index) } else { self.add_get(index) }
        }
    }

    fn add_set(&mut self, index: u32) {
        let value = self.written;
        self.values[index as usize] = value;
        self.requests.extend_from_slice(b"ms ");
        self.requests.extend_from_slice(&hex(self.first_key + index));
        self.requests.extend_from_slice(b" 8\r\n");
        self.requests.extend_from_slice(&hex(value));
        self.requests.extend_from_slice(b"\r\n");
        self.expected.extend_from_slice(b"HD\r\n");
    }

    fn add_get(&mut self, index: u32) {
        self.requests.extend_from_slice(b"mg ");
        self.requests.extend_from_slice(&hex(self.first_key + index));
        self.requests.extend_from_slice(b" v\r\n");
        self.expected.extend_from_slice(b"VA 8\r\n");
        self.expected.extend_from_slice(&hex(self.values[index as usize]));
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

/// Returns a number as eight hexadecimal digits.
fn hex(number: u32) -> [u8; 8] {
    std::array::from_fn(|at| b"0123456789abcdef"[(number >> (28 - 4 * at) & 15) as usize])
}

/// Loads the server at `socket`. The median is that of the round trip of a whole pipeline.
fn load(socket: &Path, pipeline: usize, duration: Duration) -> Result<Figures, Error> {
    let clients: Result<Vec<Client>, Error> = (0..CONNECTIONS).map(|nth| Client::new(socket, nth)).collect();
    let mut clients = clients?;
    let mut latencies = Vec::with_capacity(SAMPLES);
    let started = Instant::now();
    for client in &mut clients {
        client.add_requests(pipeline);
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
            client.add_requests(pipeline);
            client.send()?;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    clients.iter_mut().try_for_each(Client::receive)?;
    latencies.sort_by(f64::total_cmp);
    let p50_ns = latencies.get(latencies.len() / 2).copied().unwrap_or(0.0);
    Ok(Figures::new(done as f64 / seconds, p50_ns))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A server that implements the commands of the client. With `wrong`, every hundredth response to a get is wrong.
    fn serve(listener: &UnixListener, wrong: bool) {
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
                        let response = match words.as_slice() {
                            [b"ms", key, b"8"] => {
                                let Some(Ok(value)) = lines.next() else { return };
                                values.insert(key.to_vec(), value.trim_ascii_end().to_vec());
                                b"HD\r\n".to_vec()
                            }
                            [b"mg", key, b"v"] => {
                                gets += 1;
                                match values.get(*key) {
                                    Some(value) if !(wrong && gets % 100 == 0) => {
                                        [b"VA 8\r\n", value.as_slice(), b"\r\n"].concat()
                                    }
                                    _ => b"EN\r\n".to_vec(),
                                }
                            }
                            _ => b"CLIENT_ERROR\r\n".to_vec(),
                        };
                        // The client disconnects when the measurement is over.
                        if writer.write_all(&response).is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }

    fn load_test_server(name: &str, pipeline: usize, wrong: bool) -> Result<Figures, Error> {
        let socket = std::env::temp_dir().join(format!("crosstie-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).expect("a socket");
        let found = thread::scope(|scope| {
            scope.spawn(|| serve(&listener, wrong));
            load(&socket, pipeline, Duration::from_millis(50))
        });
        fs::remove_file(&socket).expect("remove the socket");
        found
    }

    #[test]
    fn gets_return_what_sets_stored() {
        for pipeline in [1, 16] {
            let found = load_test_server(&format!("good-{pipeline}"), pipeline, false).expect("figures");
            assert!(found.per_second > 0.0 && found.p50_ns > 0.0, "{found:?}");
        }
    }

    #[test]
    fn wrong_response_is_an_error() {
        let text = load_test_server("wrong", 16, true).expect_err("a wrong response").to_string();
        assert!(text.contains("EN"), "{text}");
    }

    #[test]
    fn keys_and_values_have_eight_digits() {
        assert_eq!(&hex(0), b"00000000");
        assert_eq!(&hex(0x12ab_cdef), b"12abcdef");
    }
}
