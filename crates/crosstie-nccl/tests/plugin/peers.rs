//! Two processes: traffic in both directions as in a ring of NCCL, a peer that is killed, a peer that is stopped.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::Case;
use crate::net::{HANDLE_LEN, HOST, NULL, Net, OPTIONAL, Ptr, REMOTE_ERROR, SYSTEM_ERROR, wait_for};
use crate::pair::{Pair, check, fill, finish, listen, receive, send};

pub(crate) const CASES: &[Case] = &[
    ("two_processes_exchange_messages", two_processes_exchange_messages),
    ("requests_to_a_killed_process_end_with_an_error", requests_to_a_killed_process_end_with_an_error),
    ("calls_return_while_the_peer_is_stopped", calls_return_while_the_peer_is_stopped),
    ("memory_is_given_back_while_the_peer_is_stopped", memory_is_given_back_while_the_peer_is_stopped),
    ("memory_is_not_written_after_it_was_deregistered", memory_is_not_written_after_it_was_deregistered),
];

/// Runs the part of a child process.
pub(crate) fn run_child(role: &str, arguments: &[String]) {
    match role {
        "ring" => {
            let (seed, count) = (arguments[0].parse().unwrap(), arguments[1].parse().unwrap());
            let net = Net::open(11);
            let mut ring = Ring::new(&net, &mut stdin(), &mut std::io::stdout(), seed, count);
            let rc = ring.run(|_| true);
            ring.close();
            net.close();
            println!("rc {rc}");
        }
        "traffic" => crate::failing_rails::run_child(arguments),
        _ => crate::rails::run_child(role, arguments),
    }
}

fn stdin() -> impl BufRead {
    std::io::stdin().lock()
}

/// A child process of this test program.
pub(crate) struct Peer {
    pub(crate) child: Child,
    pub(crate) output: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Peer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("--child").args(arguments).envs(variables.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Peer { child, output }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for, so its process id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub(crate) fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> [u8; HANDLE_LEN] {
    core::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
}

/// Messages whose sizes both processes know from the seed.
fn sizes_of(seed: u64, number: usize) -> Vec<usize> {
    let mut state = seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state >> 29;
        state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 32;
        state as usize
    };
    let count = if next() % 4 == 0 { next() % 8 + 1 } else { 1 };
    (0..count).map(|_| [next() % 200, next() % 9000, next() % ROOM][next() % 3]).collect()
}

const ROOM: usize = 150_000;
const DEPTH: usize = 8;

/// One process of a ring of two: it sends to the other and receives from it, with one thread for both, as NCCL's does.
struct Ring<'a> {
    net: &'a Net,
    send: Ptr,
    recv: Ptr,
    listen: Ptr,
    seed: u64,
    count: usize,
    from: Vec<u8>,
    to: Vec<u8>,
    from_key: Ptr,
    to_key: Ptr,
    receives: VecDeque<(Ptr, usize)>,
    sends: Vec<(Ptr, usize)>,
    /// Tags of the group that is being sent.
    left: Vec<usize>,
    posted: usize,
    sent: usize,
    received: usize,
}

impl<'a> Ring<'a> {
    fn new(
        net: &'a Net,
        input: &mut impl BufRead,
        output: &mut impl Write,
        seed: u64,
        count: usize,
    ) -> Ring<'a> {
        let (listen_comm, handle) = listen(net, 0);
        writeln!(output, "{}", to_hex(&handle)).unwrap();
        output.flush().unwrap();
        let mut line = String::new();
        input.read_line(&mut line).unwrap();
        let mut peer = from_hex(line.trim());
        let (mut send, mut recv) = (NULL, NULL);
        wait_for("the connections with the other process", || {
            if send.is_null() {
                assert_eq!(net.connect(0, peer.as_mut_ptr(), &raw mut send), 0);
            }
            if recv.is_null() {
                assert_eq!(net.accept(listen_comm, &raw mut recv), 0);
            }
            (!send.is_null() && !recv.is_null()).then_some(())
        });
        let len = DEPTH * 8 * ROOM;
        let (mut from, mut to) = (vec![0; len], vec![0; len]);
        let (mut from_key, mut to_key) = (NULL, NULL);
        assert_eq!(net.reg_mr(send, from.as_mut_ptr(), len, HOST, &raw mut from_key), 0);
        assert_eq!(net.reg_mr(recv, to.as_mut_ptr(), len, HOST, &raw mut to_key), 0);
        Ring {
            net,
            send,
            recv,
            listen: listen_comm,
            seed,
            count,
            from,
            to,
            from_key,
            to_key,
            receives: VecDeque::new(),
            sends: Vec::new(),
            left: Vec::new(),
            posted: 0,
            sent: 0,
            received: 0,
        }
    }

    /// Runs until all messages are exchanged, or a call fails, or `go_on` says no. Returns the result of the failed call.
    fn run(&mut self, mut go_on: impl FnMut(&Ring<'_>) -> bool) -> i32 {
        wait_for("messages of the other process", || match self.step() {
            Err(rc) => Some(rc),
            Ok(()) if self.received == self.count && self.sent == self.count && self.sends.is_empty() => {
                Some(0)
            }
            Ok(()) => (!go_on(self)).then_some(0),
        })
    }

    fn step(&mut self) -> Result<(), i32> {
        let ok = |rc: i32| if rc == 0 { Ok(()) } else { Err(rc) };
        if self.posted < self.count && self.posted < self.received + DEPTH {
            let n = sizes_of(self.seed ^ 1, self.posted).len();
            let at = self.posted % DEPTH * 8 * ROOM;
            let mut data: Vec<*mut u8> =
                (0..n).map(|i| self.to.as_mut_ptr().wrapping_add(at + i * ROOM)).collect();
            let (mut sizes, mut keys) = (vec![ROOM; n], vec![self.to_key; n]);
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
            assert_ne!(request, OPTIONAL);
            if !request.is_null() {
                self.receives.push_back((request, n));
                self.posted += 1;
            }
        }
        if self.sent < self.count && self.sends.len() < DEPTH {
            let sizes = sizes_of(self.seed, self.sent);
            let at = self.sent % (2 * DEPTH) / 2 * 8 * ROOM;
            if self.left.is_empty() && self.sends.is_empty() {
                self.left = (0..sizes.len()).collect();
                for (i, size) in sizes.iter().enumerate() {
                    fill(&mut self.from[at + i * ROOM..][..*size], self.sent * 8 + i);
                }
            }
            if let Some(tag) = self.left.last().copied() {
                let data = self.from.as_mut_ptr().wrapping_add(at + tag * ROOM);
                let mut request = OPTIONAL;
                ok(self.net.isend(self.send, data, sizes[tag], tag as i32, self.from_key, &raw mut request))?;
                if !request.is_null() {
                    self.sends.push((request, sizes[tag]));
                    self.left.pop();
                    self.sent += usize::from(self.left.is_empty());
                }
            }
        }
        let mut failed = 0;
        let net = self.net;
        self.sends.retain(|(request, size)| {
            let (mut done, mut sizes) = (0, [-1; 8]);
            let rc = net.test(*request, &raw mut done, sizes.as_mut_ptr());
            failed = if rc == 0 { failed } else { rc };
            assert!(done == 0 || sizes[0] as usize == *size);
            rc == 0 && done == 0
        });
        ok(failed)?;
        if let Some((request, n)) = self.receives.front().copied() {
            let (mut done, mut sizes) = (0, [-1; 9]);
            ok(net.test(request, &raw mut done, sizes.as_mut_ptr()))?;
            if done == 1 {
                self.receives.pop_front();
                assert_eq!(net.irecv_consumed(self.recv, n, request), 0);
                let wanted = sizes_of(self.seed ^ 1, self.received);
                let at = self.received % DEPTH * 8 * ROOM;
                for (i, size) in wanted.iter().enumerate() {
                    assert_eq!(sizes[i] as usize, *size, "message {}", self.received);
                    check(&self.to[at + i * ROOM..][..*size], self.received * 8 + i);
                }
                assert_eq!(sizes[n], -1);
                self.received += 1;
            }
        }
        Ok(())
    }

    /// As NCCL does it, also after an error: first the memory, then the comms. Returns what `deregMr` returned.
    fn close(&mut self) -> [i32; 2] {
        let net = self.net;
        let results = [net.dereg_mr(self.recv, self.to_key), net.dereg_mr(self.send, self.from_key)];
        assert_eq!(net.close_send(self.send), 0);
        assert_eq!(net.close_recv(self.recv), 0);
        assert_eq!(net.close_listen(self.listen), 0);
        results
    }
}

/// Starts the other process and connects with it.
fn ring_with_peer<'a>(net: &'a Net, seed: u64, count: usize) -> (Peer, Ring<'a>) {
    println!("  seed {seed}");
    let (text, other_seed) = (count.to_string(), (seed ^ 1).to_string());
    let mut peer = Peer::start(&["ring", &other_seed, &text], &[]);
    let mut input = peer.child.stdin.take().unwrap();
    let ring = Ring::new(net, &mut peer.output, &mut input, seed, count);
    (peer, ring)
}

fn seed() -> u64 {
    let chosen = std::env::var("CROSSTIE_SEED").ok().and_then(|seed| seed.parse().ok());
    chosen.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 & !1
    })
}

fn two_processes_exchange_messages() {
    let net = Net::open(11);
    let (mut peer, mut ring) = ring_with_peer(&net, seed(), 1500);
    assert_eq!(ring.run(|_| true), 0);
    assert_eq!(peer.read_line(), "rc 0");
    assert_eq!(ring.close(), [0, 0]);
    assert!(peer.child.wait().unwrap().success());
    net.close();
}

fn requests_to_a_killed_process_end_with_an_error() {
    let net = Net::open(11);
    let bystander = Pair::new(&net);
    for round in 0..6 {
        let (peer, mut ring) = ring_with_peer(&net, seed() ^ round << 8, usize::MAX);
        let until = 3 + 17 * round as usize;
        assert_eq!(ring.run(|ring| ring.received < until), 0);
        peer.signal(libc::SIGKILL);
        let rc = ring.run(|_| true);
        assert_eq!(rc, REMOTE_ERROR);
        // Every request has ended.
        for (request, _) in ring.receives.iter().copied().chain(ring.sends.iter().copied()) {
            let mut done = 0;
            let rc = wait_for("the end of a request", || {
                let rc = net.test(request, &raw mut done, core::ptr::null_mut());
                (rc != 0 || done == 1).then_some(rc)
            });
            assert!(done == 1 || rc == REMOTE_ERROR);
        }
        assert_eq!(ring.close(), [0, 0]);
    }
    let mut from = crate::pair::Buffer::new(&net, bystander.send, 9000);
    let mut to = crate::pair::Buffer::new(&net, bystander.recv, 9000);
    let received = receive(&net, bystander.recv, &mut to, &[(0, 9000, 0)]);
    let sent = send(&net, bystander.send, &mut from, 0, 9000, 0);
    assert_eq!((finish(&net, received, 1), finish(&net, sent, 1)), (vec![9000], vec![9000]));
    from.free();
    to.free();
    bystander.close();
    net.close();
}

fn calls_return_while_the_peer_is_stopped() {
    let net = Net::open(11);
    let (mut peer, mut ring) = ring_with_peer(&net, seed(), 400);
    assert_eq!(ring.run(|ring| ring.received < 100), 0);
    peer.signal(libc::SIGSTOP);
    for _ in 0..20_000 {
        assert_eq!(ring.step(), Ok(()), "a stopped peer is no error");
    }
    assert!(ring.received < 400);
    peer.signal(libc::SIGCONT);
    assert_eq!(ring.run(|_| true), 0);
    assert_eq!(peer.read_line(), "rc 0");
    assert_eq!(ring.close(), [0, 0]);
    net.close();
}

fn memory_is_given_back_while_the_peer_is_stopped() {
    let net = Net::open(11);
    for round in 0..4 {
        let (mut peer, mut ring) = ring_with_peer(&net, seed() ^ round << 8, usize::MAX);
        assert_eq!(ring.run(|ring| ring.received < 20 + 7 * round as usize), 0);
        peer.signal(libc::SIGSTOP);
        // A peer that was stopped inside a write may write when it continues: then the memory is not given back.
        let given_back = ring.close();
        println!("  deregMr: {given_back:?}");
        assert!(given_back.iter().all(|rc| *rc == 0 || *rc == SYSTEM_ERROR));
        if given_back == [0, 0] {
            ring.to.fill(0x33);
        }
        peer.signal(libc::SIGCONT);
        assert_eq!(peer.read_line(), format!("rc {REMOTE_ERROR}"));
        if given_back == [0, 0] {
            assert!(ring.to.iter().all(|byte| *byte == 0x33), "memory was written after deregMr");
        }
    }
    net.close();
}

fn memory_is_not_written_after_it_was_deregistered() {
    let net = Net::open(11);
    for round in 0..12 {
        let (mut peer, mut ring) = ring_with_peer(&net, seed() ^ round << 8, usize::MAX);
        // A receive is outstanding: otherwise nothing would end when its memory is taken away.
        assert_eq!(ring.run(|ring| ring.received < 5 * round as usize || ring.receives.is_empty()), 0);
        // The other process goes on sending meanwhile.
        assert_eq!(net.dereg_mr(ring.recv, ring.to_key), 0);
        ring.to.fill(0x44);
        assert_eq!(peer.read_line(), format!("rc {REMOTE_ERROR}"));
        assert!(ring.to.iter().all(|byte| *byte == 0x44), "memory was written after deregMr");
        assert_eq!(net.dereg_mr(ring.send, ring.from_key), 0);
        assert_eq!((net.close_send(ring.send), net.close_recv(ring.recv)), (0, 0));
        assert_eq!(net.close_listen(ring.listen), 0);
    }
    net.close();
}
