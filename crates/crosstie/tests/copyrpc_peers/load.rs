//! A workload whose every byte is known: request and response follow from the number of a call. So both sides can check them,
//! and check that each call ends exactly once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::rng::Random;
use crosstie::copyrpc::{
    CallFailed, Connection, Context, NotCalled, Payload, RecvHandle, ReplyError, Request,
};

/// What is attached to a call: the index of the connection in the run, and the number of the call.
pub(crate) type User = (u32, u64);

/// Without any progress for this long, the test fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(15);

/// Requests of at least this many bytes start with a header: number, length of the response, connection, action.
const HEADER: usize = 16;
const ANSWER: u16 = 0;
/// The other side drops the request.
const DROP: u16 = 1;
/// The last call of a connection.
const LAST_CALL: u16 = 2;

fn pattern(number: u64, bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(i as u8).wrapping_add((i >> 8) as u8);
    }
}

/// Calls to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) calls: u64,
    /// Calls in flight at a time; as many as possible if `usize::MAX`.
    pub(crate) depth: usize,
    /// Longest request and response; the longest possible if `usize::MAX`.
    pub(crate) request: usize,
    pub(crate) response: usize,
    /// `(n, len)`: one request in `n` and one response in `n` has up to `len` bytes instead.
    pub(crate) long: Option<(usize, usize)>,
    /// One call in so many is dropped by the other side; none if zero.
    pub(crate) drops: usize,
}

impl Default for Load {
    fn default() -> Load {
        Load { calls: 0, depth: 16, request: 64, response: 64, long: None, drops: 0 }
    }
}

/// How requests are answered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplyMode {
    /// Requests that are held before one of them is answered.
    pub(crate) keep: usize,
    /// Whether a random one is answered, rather than the oldest.
    pub(crate) shuffled: bool,
    /// Whether requests are detached before they are answered.
    pub(crate) detached: bool,
}

/// One connection of a run.
pub(crate) struct Caller {
    pub(crate) connection: Connection<User>,
    load: Load,
    random: Random,
    made: u64,
    expected: HashMap<u64, Expected>,
    is_last_answered: bool,
    /// The other side has made its last call.
    peer_is_done: bool,
    last_received: Option<u64>,
    /// A call that was refused, to be tried again unchanged.
    refused: Option<(Vec<u8>, usize, Expected)>,
    pub(crate) refusals: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Expected {
    Pattern(u64, usize),
    Echo(Vec<u8>),
    Nothing,
}

impl Caller {
    pub(crate) fn new(connection: Connection<User>, load: Load, seed: u64) -> Caller {
        Caller {
            connection,
            load,
            random: Random(seed),
            made: 0,
            expected: HashMap::new(),
            is_last_answered: false,
            peer_is_done: false,
            last_received: None,
            refused: None,
            refusals: 0,
        }
    }

    fn prepare(&mut self, index: u32) -> Option<(Vec<u8>, usize, Expected)> {
        let (longest_request, longest_response) = self.connection.max_lengths().expect("connected");
        let number = self.made;
        let mut request = vec![0; self.random.index(self.load.request.min(longest_request) + 1)];
        let mut response = self.random.index(self.load.response.min(longest_response) + 1);
        if let Some((one_in, longest)) = self.load.long {
            if self.random.index(one_in) == 0 {
                request = vec![0; self.random.index(longest + 1)];
            }
            if self.random.index(one_in) == 0 {
                response = self.random.index(longest + 1);
            }
        }
        let is_last = number == self.load.calls;
        if is_last {
            if !self.expected.is_empty() {
                return None;
            }
            request = vec![0; HEADER];
            response = 0;
        }
        pattern(number, &mut request);
        if request.len() < HEADER {
            response = request.len();
            return Some((request.clone(), response, Expected::Echo(request)));
        }
        let dropped = self.load.drops > 0 && self.random.index(self.load.drops) == 0;
        let action = if is_last { LAST_CALL } else { [ANSWER, DROP][usize::from(dropped)] };
        request[..8].copy_from_slice(&number.to_le_bytes());
        request[8..12].copy_from_slice(&(response as u32).to_le_bytes());
        request[12..14].copy_from_slice(&(index as u16).to_le_bytes());
        request[14..16].copy_from_slice(&action.to_le_bytes());
        let expected = if action == DROP { Expected::Nothing } else { Expected::Pattern(number, response) };
        Some((request, response, expected))
    }

    /// Makes as many calls as the depth and the peer allow. Returns whether any call was made.
    fn call(&mut self, index: u32) -> bool {
        let mut any = false;
        while self.made <= self.load.calls && self.expected.len() < self.load.depth {
            let Some((request, response, expected)) = self.refused.take().or_else(|| self.prepare(index))
            else {
                break;
            };
            let number = self.made;
            match self.connection.call(&request, response, (index, number)) {
                Ok(()) => {
                    any = true;
                    self.made += 1;
                    assert!(self.expected.insert(number, expected).is_none());
                }
                Err(error) => {
                    assert_eq!(error.user, (index, number), "handed back");
                    assert!(error.cause.is_back_pressure(), "call {number}: {}", error.cause);
                    assert!(!matches!(error.cause, NotCalled::NotConnected));
                    self.refusals += 1;
                    self.refused = Some((request, response, expected));
                    break;
                }
            }
        }
        any
    }

    fn answered(&mut self, number: u64, answer: Result<Vec<u8>, CallFailed>) {
        let expected = self.expected.remove(&number).expect("answered once, and only what was asked");
        let answer = answer.unwrap_or_else(|cause| panic!("call {number}: {cause}"));
        match expected {
            Expected::Pattern(number, len) => {
                let mut right = vec![0; len];
                pattern(!number, &mut right);
                assert!(answer == right, "call {number}: another answer");
            }
            Expected::Echo(bytes) => assert!(answer == bytes, "call {number}: no echo"),
            Expected::Nothing => assert!(answer.is_empty(), "call {number} was to be dropped"),
        }
        self.is_last_answered |= number == self.load.calls;
    }
}

/// Has all callers make their calls and answer those of the other side until both sides are done. Requests are taken from the queue and
/// from a handler in turn, at random.
pub(crate) fn drive(context: &Context<User>, callers: &mut [Caller], reply_mode: ReplyMode, seed: u64) {
    let (kept, unsent) = (Vec::new(), Vec::new());
    let mut server = Server { callers, reply_mode, kept, unsent, random: Random(seed), came: 0 };
    let mut last = Instant::now();
    let mut idle = 0;
    while server.callers.iter().any(|caller| !caller.is_last_answered || !caller.peer_is_done) {
        let mut progress = false;
        for (index, caller) in server.callers.iter_mut().enumerate() {
            progress |= caller.call(index as u32);
        }
        server.came = 0;
        let polled = if server.random.index(2) == 0 {
            let handled = context
                .serve(&mut server, Server::handle, |server, user, answer| server.answered(user, answer));
            handled - server.came
        } else {
            context.poll(|user, answer| server.answered(user, answer))
        };
        for (request, bytes) in std::mem::take(&mut server.unsent) {
            note_reply(request.reply(&bytes), bytes, &mut server.unsent);
        }
        // Sometimes requests stay in the queue, where a handler finds them.
        while server.random.index(8) > 0
            && let Some(request) = context.recv()
        {
            check_order(server.callers, request.data());
            server.came += 1;
            server.take(request);
        }
        let mut came = server.came;
        if came == 0 && polled == 0 && !server.kept.is_empty() {
            server.answer_one();
            came += 1;
        }
        progress |= polled + came > 0;
        let callers = &*server.callers;
        if progress {
            idle = 0;
            last = Instant::now();
            continue;
        }
        idle += 1;
        if idle > 100 {
            context.wait(Duration::from_micros(500));
        }
        if last.elapsed() > TIMEOUT {
            let state: Vec<_> = callers
                .iter()
                .map(|l| (l.made, l.expected.len(), l.refused.is_some(), l.is_last_answered, l.peer_is_done))
                .collect();
            panic!("no progress: {state:?}, {:?}", context.counters());
        }
    }
    context.flush();
    assert!(
        server
            .callers
            .iter()
            .all(|caller| caller.connection.pending_calls() == 0 && caller.connection.failure().is_none())
    );
}

/// What answers the requests of the other side.
struct Server<'c> {
    callers: &'c mut [Caller],
    reply_mode: ReplyMode,
    kept: Vec<RecvHandle<User>>,
    unsent: Unsent,
    random: Random,
    /// Requests of this round.
    came: usize,
}

impl Server<'_> {
    fn answered(&mut self, (index, number): User, answer: Result<Payload<'_>, CallFailed>) {
        self.callers[index as usize].answered(number, answer.map(|bytes| bytes.to_vec()));
    }

    /// Answers a request in place, or keeps it.
    fn handle(&mut self, request: Request<'_, User>) {
        self.came += 1;
        check_order(self.callers, request.data());
        if self.reply_mode.keep > 0 || self.reply_mode.detached || self.random.index(4) == 0 {
            return self.take(request.defer());
        }
        let response = response(self.callers, &request.data().to_vec(), request.response_limit());
        if let Some(bytes) = response {
            note_reply(request.reply(&bytes), bytes, &mut self.unsent);
        }
    }

    /// Keeps a request, and answers one if there are enough.
    fn take(&mut self, mut request: RecvHandle<User>) {
        if self.reply_mode.detached {
            // Copy the payload before the ring space is released.
            let bytes = request.data().to_vec();
            request.detach();
            assert!(request.data().is_empty());
            self.answer(request, &bytes);
        } else {
            self.kept.push(request);
        }
        if self.kept.len() > self.reply_mode.keep {
            self.answer_one();
        }
    }

    fn answer_one(&mut self) {
        let which = if self.reply_mode.shuffled { self.random.index(self.kept.len()) } else { 0 };
        let request = self.kept.remove(which);
        let bytes = request.data().to_vec();
        self.answer(request, &bytes);
    }

    fn answer(&mut self, request: RecvHandle<User>, bytes: &[u8]) {
        if let Some(bytes) = response(self.callers, bytes, request.response_limit()) {
            note_reply(request.reply(&bytes), bytes, &mut self.unsent);
        }
    }
}

/// Requests of a caller come in the order in which they were made.
fn check_order(callers: &mut [Caller], request: Payload<'_>) {
    let mut header = [0; HEADER];
    if request.copy_to(&mut header) == HEADER {
        let number = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
        let caller = &mut callers[usize::from(u16::from_le_bytes([header[12], header[13]]))];
        assert!(caller.last_received < Some(number), "request {number} after {:?}", caller.last_received);
        caller.last_received = Some(number);
    }
}

/// Replies that were refused for now.
type Unsent = Vec<(RecvHandle<User>, Vec<u8>)>;

/// Checks the bytes of a request. Returns the response; `None` if the request is to be dropped.
fn response(callers: &mut [Caller], bytes: &[u8], limit: u64) -> Option<Vec<u8>> {
    if bytes.len() < HEADER {
        let mut right = bytes.to_vec();
        // The whole payload follows from its first byte.
        let base = bytes.first().copied().unwrap_or(0);
        right.iter_mut().enumerate().for_each(|(i, byte)| *byte = base.wrapping_add(i as u8));
        assert!(bytes == right, "a short request with other bytes");
        return Some(right);
    }
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let number = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    let len = u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes")) as usize;
    let (caller, action) = (&mut callers[usize::from(word(12))], word(14));
    let mut right = vec![0; bytes.len()];
    pattern(number, &mut right);
    assert!(bytes[HEADER..] == right[HEADER..], "request {number}: other bytes");
    caller.peer_is_done |= action == LAST_CALL;
    if action == DROP {
        return None;
    }
    assert!(limit >= len as u64);
    let mut right = vec![0; len];
    pattern(!number, &mut right);
    Some(right)
}

/// Keeps a request whose reply was refused for now.
fn note_reply(replied: Result<(), ReplyError<User>>, bytes: Vec<u8>, unsent: &mut Unsent) {
    match replied {
        Ok(()) => {}
        Err(ReplyError { cause, request: Some(request) }) if cause.is_back_pressure() => {
            unsent.push((request, bytes));
        }
        Err(error) => panic!("a reply always has room: {error}"),
    }
}
