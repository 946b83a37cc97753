//! The traffic of NCCL's all_reduce between two processes. Every byte is checked.
//!
//! Each process has one thread for all its comms, as NCCL's progress thread: channels, each with a comm for sending and one for
//! receiving, up to 32 requests in flight on each, messages of up to 4 MiB, some of them groups.

use std::collections::VecDeque;
use std::io::BufRead;
use std::time::{Duration, Instant};

use crosstie_testkit::actor::Actor;
use crosstie_testkit::child;

use crate::net::{HANDLE_LEN, HOST, NULL, Net, OPTIONAL, Ptr, log, wait_for};
use crate::pair::{connect_and_accept, listen};
use crate::rng::Random;

/// No run takes so long, even on a loaded machine with two cores. It is longer than the 60 s after which rails that stay away
/// end the connection, so that a run that ends so is told apart from one that hangs.
const LIMIT: Duration = Duration::from_secs(150);
/// Requests in flight per comm, as NCCL's limit is.
const DEPTH: usize = 32;
/// Memory of a comm.
const MEMORY: usize = 12 << 20;

/// The buffers of a message: both processes know them from the seed.
fn sizes_of(seed: u64, channel: usize, number: usize) -> Vec<usize> {
    let mut random = Random(seed ^ (channel as u64) << 48 ^ (number as u64) << 8);
    let mut size = |longest: u64| {
        // As many messages of 4 to 8 bytes as of 2 to 4 MiB, and as many without bytes.
        match random.below(longest + 1) {
            0 => 0,
            bits => (2usize << bits) + random.index(2 << bits),
        }
    };
    if number % 11 == 5 {
        let count = 2 + number % 7;
        return (0..count).map(|_| size(13)).collect();
    }
    vec![size(20)]
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
pub(crate) struct Circle {
    pub(crate) bytes: Vec<u8>,
    pub(crate) key: Ptr,
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
pub(crate) struct Channel<'a> {
    net: &'a Net,
    number: usize,
    /// Of what is sent here, and of what is received.
    seeds: [u64; 2],
    count: usize,
    /// How many messages it may have sent beyond those that it has received.
    ahead: usize,
    listen: Ptr,
    pub(crate) send: Ptr,
    pub(crate) recv: Ptr,
    pub(crate) from: Circle,
    pub(crate) to: Circle,
    pub(crate) receives: VecDeque<(Ptr, usize, usize)>,
    /// Requests of messages under way: the request of each buffer, NULL when it is done, and where the message begins.
    sends: VecDeque<Vec<(Ptr, usize)>>,
    /// The buffers of the next message that are not sent yet, and their memory.
    unsent: Option<Unsent>,
    posted: usize,
    sent: usize,
    pub(crate) received: usize,
}

fn ok(rc: i32) -> Result<(), i32> {
    if rc == 0 { Ok(()) } else { Err(rc) }
}

impl<'a> Channel<'a> {
    /// Connects with the peer that has this handle. Both processes exchange `count` messages in each direction.
    pub(crate) fn connect(
        net: &'a Net,
        number: usize,
        seeds: [u64; 2],
        count: usize,
        ahead: usize,
        listen: Ptr,
        peer: [u8; HANDLE_LEN],
    ) -> Channel<'a> {
        let (send, recv) = connect_and_accept(net, 0, peer, listen);
        Channel {
            net,
            number,
            seeds,
            count,
            ahead,
            listen,
            send,
            recv,
            from: Circle::new(net, send),
            to: Circle::new(net, recv),
            receives: VecDeque::new(),
            sends: VecDeque::new(),
            unsent: None,
            posted: 0,
            sent: 0,
            received: 0,
        }
    }

    /// Runs until all messages are exchanged, or a call fails, or `go_on` says no. Returns the result of the failed call.
    pub(crate) fn run(&mut self, mut go_on: impl FnMut(&Channel<'_>) -> bool) -> i32 {
        wait_for("messages of the other process", || match self.step() {
            Err(rc) => Some(rc),
            Ok(_) => (self.is_done() || !go_on(self)).then_some(0),
        })
    }

    /// The requests that have not ended.
    pub(crate) fn outstanding(&self) -> Vec<Ptr> {
        let unsent = self.unsent.iter().flat_map(|(_, _, requests)| requests);
        let sends = self.sends.iter().flatten().chain(unsent).map(|(request, _)| *request);
        let receives = self.receives.iter().map(|(request, ..)| *request);
        sends.chain(receives).filter(|request| !request.is_null()).collect()
    }

    fn is_done(&self) -> bool {
        self.received == self.count && self.sent == self.count && self.sends.is_empty()
    }

    /// Does what can be done now. Returns whether anything moved.
    pub(crate) fn step(&mut self) -> Result<bool, i32> {
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
            let may_send = self.sent < self.count
                && self.sent < self.received.saturating_add(self.ahead)
                && self.sends.len() < DEPTH;
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
        assert_eq!(self.net.irecv_consumed(self.recv, n, request), 0);
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

    /// As NCCL does it, also after an error: first the memory, then the comms. Returns what `deregMr` returned.
    pub(crate) fn close(&self) -> [i32; 2] {
        let net = self.net;
        let results = [net.dereg_mr(self.recv, self.to.key), net.dereg_mr(self.send, self.from.key)];
        assert_eq!((net.close_send(self.send), net.close_recv(self.recv)), (0, 0));
        assert_eq!(net.close_listen(self.listen), 0);
        results
    }
}

/// Starts a process that exchanges `count` messages over each of some channels, see [`run_child`].
pub(crate) fn start(
    seed: u64,
    rank: usize,
    count: usize,
    channels: usize,
    ahead: usize,
    variables: &[(&str, &str)],
) -> Actor {
    let seed = (seed & !1).to_string();
    let [rank, count, channels, ahead] = [rank, count, channels, ahead].map(|number| number.to_string());
    Actor::start_with(&["--child", "traffic", &seed, &rank, &count, &channels, &ahead], variables).unwrap()
}

/// What is sent and received by the process with this rank.
pub(crate) fn seeds(seed: u64, rank: u64) -> [u64; 2] {
    [seed & !1 ^ rank, seed & !1 ^ 1 ^ rank]
}

/// Reads one handle that a process has printed.
pub(crate) fn read_handle(mut from: impl BufRead) -> [u8; HANDLE_LEN] {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    child::from_hex(&line).try_into().unwrap()
}

/// The part of one process: `SEED RANK COUNT CHANNELS AHEAD`. Prints its handles and reads those of the peer; then prints `rc N` and the plugin's
/// log.
pub(crate) fn run_child(arguments: &[String]) {
    let [seed, rank, count, channels, ahead] =
        [0, 1, 2, 3, 4].map(|at: usize| arguments[at].parse::<u64>().unwrap());
    let net = Net::open(11);
    let listens: Vec<(Ptr, [u8; HANDLE_LEN])> = (0..channels).map(|_| listen(&net, 0)).collect();
    listens.iter().for_each(|(_, handle)| println!("{}", child::to_hex(handle)));
    let peers: Vec<_> = listens.iter().map(|_| read_handle(std::io::stdin().lock())).collect();
    let channels = listens.into_iter().zip(peers).enumerate();
    let mut channels: Vec<Channel<'_>> = channels
        .map(|(number, ((listen, _), peer))| {
            Channel::connect(&net, number, seeds(seed, rank), count as usize, ahead as usize, listen, peer)
        })
        .collect();
    let (mut rc, mut idle, began) = (0, 0, Instant::now());
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
    channels.iter().for_each(|channel| assert_eq!(channel.close(), [0, 0]));
    drop(net);
    log().iter().for_each(|line| println!("{line}"));
}
