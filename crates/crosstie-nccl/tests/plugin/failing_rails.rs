//! The traffic of NCCL's all_reduce between two processes, over two rails that fail and return at random.
//!
//! Each process has one thread for all its comms, as NCCL's progress thread: several channels, each with a comm for sending and
//! one for receiving, up to 32 requests in flight on each, messages of 4 bytes to 4 MiB, some of them groups. Every byte is
//! checked. The devices of both processes are `fault:SEED/KIND=N...:software`, so that requests, acknowledgements and ports
//! fail, links stall, at one end or at both.
//!
//! `CROSSTIE_SEED` repeats a run; `CROSSTIE_STRESS_SECONDS` runs more of them.

use std::collections::VecDeque;
use std::io::{BufRead, Read, Write};
use std::time::{Duration, Instant};

use crate::Case;
use crate::net::{HANDLE_LEN, HOST, NULL, Net, OPTIONAL, Ptr, log};
use crate::pair::listen;
use crate::peers::{Peer, from_hex, to_hex};
use crate::rng::{Random, choose_seed};

pub(crate) const CASES: &[Case] = &[
    ("all_reduce_traffic_survives_rails_that_fail_and_return", survives_rails_that_fail_and_return),
    ("all_reduce_traffic_ends_when_acknowledged_receives_fail", ends_when_acknowledged_receives_fail),
];

/// No run takes so long, even on a loaded machine with two cores. It is longer than the 60 s after which rails that stay away
/// end the connection, so that a run that ends so is told apart from one that hangs.
const LIMIT: Duration = Duration::from_secs(150);
const CHANNELS: usize = 3;
/// Requests in flight per comm, as NCCL's limit is.
const DEPTH: usize = 32;
/// Memory of a comm.
const MEMORY: usize = 12 << 20;
const LONGEST: usize = 4 << 20;

/// The buffers of a message: both processes know them from the seed.
fn sizes_of(seed: u64, channel: usize, number: usize) -> Vec<usize> {
    let mut random = Random(seed ^ (channel as u64) << 48 ^ (number as u64) << 8);
    let mut size = |longest: u64| {
        // As many messages of 4 to 8 bytes as of 2 to 4 MiB.
        let bits = 2 + random.below(longest);
        (4usize << (bits - 2)) + random.index(4 << (bits - 2))
    };
    if number % 11 == 5 {
        let count = 2 + number % 7;
        return (0..count).map(|_| size(13)).collect();
    }
    vec![size(20).min(LONGEST)]
}

fn word(seed: u64, channel: usize, number: usize, part: usize) -> u64 {
    Random(seed ^ (channel as u64) << 40 ^ (number as u64) << 4 ^ part as u64).next()
}

fn fill(bytes: &mut [u8], word: u64) {
    for (at, chunk) in bytes.chunks_mut(8).enumerate() {
        let value = (word.wrapping_add(at as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        chunk.copy_from_slice(&value[..chunk.len()]);
    }
}

fn check(bytes: &[u8], word: u64, what: &str) {
    for (at, chunk) in bytes.chunks(8).enumerate() {
        let value = (word.wrapping_add(at as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        assert_eq!(chunk, &value[..chunk.len()], "{what}: wrong bytes at {}", 8 * at);
    }
}

/// Memory that is handed out in a circle.
struct Circle {
    bytes: Vec<u8>,
    key: Ptr,
    next: usize,
    used: VecDeque<(usize, usize)>,
}

impl Circle {
    fn new(net: &Net, comm: Ptr) -> Circle {
        let mut circle = Circle { bytes: vec![0; MEMORY], key: NULL, next: 0, used: VecDeque::new() };
        let key = &raw mut circle.key;
        assert_eq!(net.reg_mr(comm, circle.bytes.as_mut_ptr(), MEMORY, HOST, key), 0);
        circle
    }

    /// A range that is not in use, if there is one.
    fn take(&mut self, len: usize) -> Option<usize> {
        let free_until = match self.used.front() {
            None => {
                self.next = 0;
                MEMORY
            }
            Some((first, _)) if *first >= self.next => *first,
            Some((first, _)) if self.next + len > MEMORY => {
                if len > *first {
                    return None;
                }
                self.next = 0;
                *first
            }
            Some(_) => MEMORY,
        };
        // Never full to the last byte, so that an empty circle is told apart from a full one.
        if self.next + len >= free_until {
            return None;
        }
        let at = self.next;
        self.next += len;
        self.used.push_back((at, len));
        Some(at)
    }

    fn give_back(&mut self) {
        self.used.pop_front();
    }

    fn at(&mut self, at: usize) -> *mut u8 {
        self.bytes.as_mut_ptr().wrapping_add(at)
    }
}

/// A message that is being sent: the sizes of its buffers, where its memory begins, and the requests so far.
type Unsent = (Vec<usize>, usize, Vec<(Ptr, usize)>);

/// One channel: a comm in each direction.
struct Channel<'a> {
    net: &'a Net,
    number: usize,
    /// Of what is sent here, and of what is received.
    seeds: [u64; 2],
    count: usize,
    listen: Ptr,
    send: Ptr,
    recv: Ptr,
    from: Circle,
    to: Circle,
    receives: VecDeque<(Ptr, usize, usize)>,
    /// Requests of messages under way: the request of each buffer, NULL when it is done, and where the message begins.
    sends: VecDeque<Vec<(Ptr, usize)>>,
    /// The buffers of the next message that are not sent yet, and their memory.
    unsent: Option<Unsent>,
    posted: usize,
    sent: usize,
    received: usize,
}

fn ok(rc: i32) -> Result<(), i32> {
    if rc == 0 { Ok(()) } else { Err(rc) }
}

impl Channel<'_> {
    fn is_done(&self) -> bool {
        self.received == self.count && self.sent == self.count && self.sends.is_empty()
    }

    /// Does what can be done now. Returns whether anything moved.
    fn step(&mut self) -> Result<bool, i32> {
        let moved = self.post_receive()? | self.send_next()? | self.test_sends()? | self.test_receive()?;
        Ok(moved)
    }

    fn post_receive(&mut self) -> Result<bool, i32> {
        if self.posted == self.count || self.receives.len() == DEPTH {
            return Ok(false);
        }
        let wanted = sizes_of(self.seeds[1], self.number, self.posted);
        let total = wanted.iter().sum();
        let Some(at) = self.to.take(total) else { return Ok(false) };
        let n = wanted.len();
        let mut offset = at;
        let mut data: Vec<*mut u8> = Vec::new();
        for size in &wanted {
            data.push(self.to.at(offset));
            self.to.bytes[offset..offset + size].fill(0xee);
            offset += size;
        }
        let (mut sizes, mut keys) = (wanted, vec![self.to.key; n]);
        let mut tags: Vec<i32> = (0..n as i32).collect();
        let mut request = OPTIONAL;
        ok(self.net.irecv(
            self.recv,
            n as i32,
            data.as_mut_ptr(),
            sizes.as_mut_ptr(),
            tags.as_mut_ptr(),
            keys.as_mut_ptr(),
            &raw mut request,
        ))?;
        if request.is_null() {
            self.to.used.pop_back();
            self.to.next = at;
            return Ok(false);
        }
        self.receives.push_back((request, n, at));
        self.posted += 1;
        Ok(true)
    }

    fn send_next(&mut self) -> Result<bool, i32> {
        if self.unsent.is_none() {
            // In a ring, a rank passes on what it has received.
            let may_send =
                self.sent < self.count && self.sent < self.received + 12 && self.sends.len() < DEPTH;
            if !may_send {
                return Ok(false);
            }
            let sizes = sizes_of(self.seeds[0], self.number, self.sent);
            let Some(at) = self.from.take(sizes.iter().sum()) else { return Ok(false) };
            let mut offset = at;
            for (part, size) in sizes.iter().enumerate() {
                let word = word(self.seeds[0], self.number, self.sent, part);
                fill(&mut self.from.bytes[offset..offset + size], word);
                offset += size;
            }
            let requests = vec![(NULL, 0); sizes.len()];
            self.unsent = Some((sizes, at, requests));
        }
        let Some((sizes, at, requests)) = &mut self.unsent else { return Ok(false) };
        let mut moved = false;
        for tag in (0..sizes.len()).rev() {
            if !requests[tag].0.is_null() {
                continue;
            }
            let offset = *at + sizes[..tag].iter().sum::<usize>();
            let data = self.from.bytes.as_mut_ptr().wrapping_add(offset);
            let mut request = OPTIONAL;
            ok(self.net.isend(self.send, data, sizes[tag], tag as i32, self.from.key, &raw mut request))?;
            if request.is_null() {
                break;
            }
            requests[tag] = (request, sizes[tag]);
            moved = true;
        }
        if requests.iter().all(|(request, _)| !request.is_null()) {
            let requests = self.unsent.take().map(|(_, _, requests)| requests).unwrap_or_default();
            self.sends.push_back(requests);
            self.sent += 1;
        }
        Ok(moved)
    }

    fn test_sends(&mut self) -> Result<bool, i32> {
        let mut moved = false;
        for (request, size) in self.sends.iter_mut().flatten().filter(|(request, _)| !request.is_null()) {
            let (mut done, mut sizes) = (0, [-1; 9]);
            ok(self.net.test(*request, &raw mut done, sizes.as_mut_ptr()))?;
            if done == 1 {
                assert_eq!(sizes[0] as usize, *size);
                *request = NULL;
                moved = true;
            }
        }
        while self.sends.front().is_some_and(|parts| parts.iter().all(|(request, _)| request.is_null())) {
            self.sends.pop_front();
            self.from.give_back();
        }
        Ok(moved)
    }

    fn test_receive(&mut self) -> Result<bool, i32> {
        let Some((request, n, at)) = self.receives.front().copied() else { return Ok(false) };
        let (mut done, mut sizes) = (0, [-1; 9]);
        ok(self.net.test(request, &raw mut done, sizes.as_mut_ptr()))?;
        if done == 0 {
            return Ok(false);
        }
        self.receives.pop_front();
        let wanted = sizes_of(self.seeds[1], self.number, self.received);
        assert_eq!(n, wanted.len());
        let mut offset = at;
        for (part, size) in wanted.iter().enumerate() {
            let what = format!("channel {}, message {}, buffer {part}", self.number, self.received);
            assert_eq!(sizes[part] as usize, *size, "{what}: the size");
            check(
                &self.to.bytes[offset..offset + size],
                word(self.seeds[1], self.number, self.received, part),
                &what,
            );
            offset += size;
        }
        self.to.give_back();
        self.received += 1;
        Ok(true)
    }

    /// As NCCL does it, also after an error: first the memory, then the comms.
    fn close(self) {
        let net = self.net;
        assert_eq!(net.dereg_mr(self.send, self.from.key), 0);
        assert_eq!(net.dereg_mr(self.recv, self.to.key), 0);
        assert_eq!(net.close_send(self.send), 0);
        assert_eq!(net.close_recv(self.recv), 0);
        assert_eq!(net.close_listen(self.listen), 0);
    }
}

/// The part of one process: `SEED RANK COUNT`. Prints `rc N` and the plugin's log.
pub(crate) fn run_child(arguments: &[String]) {
    let seed: u64 = arguments[0].parse().unwrap();
    let rank: usize = arguments[1].parse().unwrap();
    let count: usize = arguments[2].parse().unwrap();
    let began = Instant::now();
    let net = Net::open(11);
    let listens: Vec<(Ptr, [u8; HANDLE_LEN])> = (0..CHANNELS).map(|_| listen(&net, 0)).collect();
    let mut output = std::io::stdout();
    listens.iter().for_each(|(_, handle)| writeln!(output, "{}", to_hex(handle)).unwrap());
    output.flush().unwrap();
    let peers: Vec<String> = std::io::stdin().lock().lines().take(CHANNELS).map(Result::unwrap).collect();
    let seeds = [seed ^ rank as u64, seed ^ 1 ^ rank as u64];
    let mut channels: Vec<Channel<'_>> = Vec::new();
    for (number, ((listen, _), peer)) in listens.into_iter().zip(peers).enumerate() {
        let mut handle = from_hex(peer.trim());
        let (mut send, mut recv) = (NULL, NULL);
        while send.is_null() || recv.is_null() {
            if send.is_null() {
                assert_eq!(net.connect(0, handle.as_mut_ptr(), &raw mut send), 0);
            }
            if recv.is_null() {
                assert_eq!(net.accept(listen, &raw mut recv), 0);
            }
            assert!(began.elapsed() < LIMIT, "the connections were not made");
            std::thread::yield_now();
        }
        channels.push(Channel {
            net: &net,
            number,
            seeds,
            count,
            listen,
            send,
            recv,
            from: Circle::new(&net, send),
            to: Circle::new(&net, recv),
            receives: VecDeque::new(),
            sends: VecDeque::new(),
            unsent: None,
            posted: 0,
            sent: 0,
            received: 0,
        });
    }
    let (mut rc, mut idle) = (0, 0);
    'traffic: while !channels.iter().all(Channel::is_done) {
        let mut moved = false;
        for channel in &mut channels {
            match channel.step() {
                Ok(step) => moved |= step,
                Err(failed) => {
                    rc = failed;
                    break 'traffic;
                }
            }
        }
        idle = if moved { 0 } else { idle + 1 };
        if idle > 50 {
            if began.elapsed() > LIMIT {
                rc = -1;
                break;
            }
            std::thread::yield_now();
        }
    }
    println!("rc {rc}");
    for c in &channels {
        println!(
            "channel {}: posted {}, received {}, sent {} of {}, {} sends under way",
            c.number,
            c.posted,
            c.received,
            c.sent,
            c.count,
            c.sends.len()
        );
    }
    channels.into_iter().for_each(Channel::close);
    net.close();
    log().iter().for_each(|line| println!("{line}"));
}

/// The two rails of a process.
fn devices(random: &mut Random, receives_fail: bool) -> String {
    let rail = |random: &mut Random| {
        if random.below(4) == 0 {
            return "software".to_owned();
        }
        let mut kinds = Vec::new();
        for (kind, least, most) in [
            ("lose", 40, 400),
            ("fail", 40, 400),
            ("down", 100, 800),
            ("stall", 200, 1500),
            ("refuse", 16, 256),
            ("hold", 4, 32),
        ] {
            if random.below(3) == 0 {
                kinds.push(format!("{kind}={}", least + random.below(most - least)));
            }
        }
        if receives_fail && random.below(2) == 0 {
            kinds.push(format!("fail-receive={}", 100 + random.below(300)));
        }
        format!("fault:{}/{}:software", random.next() >> 32, kinds.join("/"))
    };
    format!("{}+{}", rail(random), rail(random))
}

/// What a process printed: its result, and the rest.
struct Outcome {
    rc: String,
    lines: Vec<String>,
}

impl Outcome {
    fn has(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }

    fn failures(&self) -> u64 {
        let words = self
            .lines
            .iter()
            .flat_map(|line| line.split(", "))
            .filter_map(|part| part.strip_suffix(" failures"));
        words.filter_map(|number| number.parse::<u64>().ok()).sum()
    }
}

/// Runs two processes until both have ended.
fn run(seed: u64, count: usize, receives_fail: bool) -> [Outcome; 2] {
    let mut random = Random(seed);
    let rails = [devices(&mut random, receives_fail), devices(&mut random, receives_fail)];
    println!("  seed {seed}: {} and {}", rails[0], rails[1]);
    let (seed_text, count) = ((seed & !1).to_string(), count.to_string());
    let start = |rank: usize| {
        let variables = [("CROSSTIE_NCCL_DEVICES", rails[rank].as_str())];
        Peer::start(&["traffic", &seed_text, &rank.to_string(), &count], &variables)
    };
    let mut peers = [start(0), start(1)];
    let handles = peers.each_mut().map(|peer| (0..CHANNELS).map(|_| peer.read_line()).collect::<Vec<_>>());
    for (rank, peer) in peers.iter_mut().enumerate() {
        let mut input = peer.child.stdin.take().unwrap();
        handles[1 - rank].iter().for_each(|handle| writeln!(input, "{handle}").unwrap());
    }
    std::thread::scope(|scope| {
        let readers = peers.each_mut().map(|peer| {
            scope.spawn(move || {
                let mut lines: Vec<String> = peer.output.by_ref().lines().map(Result::unwrap).collect();
                let status = peer.child.wait().unwrap();
                let rc = if lines.is_empty() { String::new() } else { lines.remove(0) };
                lines.push(format!("{status}"));
                Outcome { rc: if status.success() { rc } else { format!("{rc}; {status}") }, lines }
            })
        });
        readers.map(|reader| reader.join().unwrap())
    })
}

fn fail(seed: u64, ends: &[Outcome; 2]) -> ! {
    for (rank, end) in ends.iter().enumerate() {
        println!("  process {rank}: {}", end.rc);
        end.lines.iter().for_each(|line| println!("    {line}"));
    }
    panic!("CROSSTIE_SEED={seed}");
}

/// Calls `run` for some seeds, or for as long as `CROSSTIE_STRESS_SECONDS` says.
fn for_seeds(mut run: impl FnMut(u64)) {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let (began, first) = (Instant::now(), choose_seed());
    for round in 0u64.. {
        let is_over = match seconds {
            Some(seconds) => began.elapsed() > Duration::from_secs(seconds),
            None => round == 4,
        };
        if is_over {
            break;
        }
        run(first.wrapping_add(round << 20));
    }
}

fn survives_rails_that_fail_and_return() {
    let mut failures = 0;
    for_seeds(|seed| {
        let ends = run(seed, 100, false);
        if ends.iter().any(|end| end.rc != "rc 0" || !end.has("violations 0")) {
            fail(seed, &ends);
        }
        failures += ends.iter().map(Outcome::failures).sum::<u64>();
    });
    println!("  {failures} failures of rails");
}

/// A device that fails after it has acknowledged a message and before it has reported it: either the sender still has the
/// message, or both ends learn the cause. Neither end waits.
fn ends_when_acknowledged_receives_fail() {
    let mut lost = 0;
    for_seeds(|seed| {
        let ends = run(seed, 100, true);
        let is_whole = ends.iter().all(|end| end.rc == "rc 0");
        let is_explained = ends.iter().any(|end| end.has("a device failed between the acknowledgement"))
            && ends.iter().all(|end| matches!(end.rc.as_str(), "rc 0" | "rc 2" | "rc 6"));
        if !is_whole && !is_explained {
            fail(seed, &ends);
        }
        lost += u64::from(!is_whole);
    });
    println!("  {lost} runs ended with a lost message");
}
