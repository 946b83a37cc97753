//! Calls whose every byte is known: what is asked and answered follows from a call's number, so that both sides can check
//! it, and each call is seen to end exactly once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::rng::Random;
use crosstie::copyrpc::{CallFailed, Context, Endpoint, NotCalled, RecvHandle};

/// What is attached to a call: the endpoint's place among those of a run, and the call's number.
pub(crate) type User = (u32, u64);

/// Without any progress for this long, something hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(15);

/// Requests of at least so many bytes say what they are: number, bytes of the answer, endpoint, deed.
const HEADER: usize = 16;
const ANSWER: u16 = 0;
/// The other side shall drop it.
const DROP: u16 = 1;
/// The last one.
const GOODBYE: u16 = 2;

fn pattern(number: u64, bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(i as u8).wrapping_add((i >> 8) as u8);
    }
}

/// Calls to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) calls: u64,
    /// Unanswered at a time; as many as go if it is `usize::MAX`.
    pub(crate) depth: usize,
    /// Longest request and answer; the longest possible if `usize::MAX`.
    pub(crate) request: usize,
    pub(crate) response: usize,
    /// One request, and one answer, in so many has up to so many bytes instead.
    pub(crate) long: Option<(usize, usize)>,
    /// One call in so many is for the other side to drop; none if zero.
    pub(crate) drops: usize,
}

impl Default for Load {
    fn default() -> Load {
        Load { calls: 0, depth: 16, request: 64, response: 64, long: None, drops: 0 }
    }
}

/// How requests are answered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answering {
    /// Requests kept at a time before one of them is answered.
    pub(crate) keep: usize,
    /// Whether any of them, rather than the oldest.
    pub(crate) shuffled: bool,
    /// Whether the ring has their place back meanwhile.
    pub(crate) detached: bool,
}

/// One endpoint of a run.
pub(crate) struct Line {
    pub(crate) endpoint: Endpoint<User>,
    load: Load,
    random: Random,
    made: u64,
    expected: HashMap<u64, Expected>,
    goodbye: bool,
    /// The other side said goodbye.
    left: bool,
    heard: Option<u64>,
    /// A call that was refused, to be made again as it was.
    refused: Option<(Vec<u8>, usize, Expected)>,
    pub(crate) refusals: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Expected {
    Pattern(u64, usize),
    Echo(Vec<u8>),
    Nothing,
}

impl Line {
    pub(crate) fn new(endpoint: Endpoint<User>, load: Load, seed: u64) -> Line {
        Line {
            endpoint,
            load,
            random: Random(seed),
            made: 0,
            expected: HashMap::new(),
            goodbye: false,
            left: false,
            heard: None,
            refused: None,
            refusals: 0,
        }
    }

    fn prepare(&mut self, index: u32) -> Option<(Vec<u8>, usize, Expected)> {
        let (longest_request, longest_response) = self.endpoint.max_lengths().expect("connected");
        let number = self.made;
        let mut request = vec![0; self.random.place(self.load.request.min(longest_request) + 1)];
        let mut response = self.random.place(self.load.response.min(longest_response) + 1);
        if let Some((one_in, longest)) = self.load.long {
            if self.random.place(one_in) == 0 {
                request = vec![0; self.random.place(longest + 1)];
            }
            if self.random.place(one_in) == 0 {
                response = self.random.place(longest + 1);
            }
        }
        let goodbye = number == self.load.calls;
        if goodbye {
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
        let dropped = self.load.drops > 0 && self.random.place(self.load.drops) == 0;
        let deed = if goodbye { GOODBYE } else { [ANSWER, DROP][usize::from(dropped)] };
        request[..8].copy_from_slice(&number.to_le_bytes());
        request[8..12].copy_from_slice(&(response as u32).to_le_bytes());
        request[12..14].copy_from_slice(&(index as u16).to_le_bytes());
        request[14..16].copy_from_slice(&deed.to_le_bytes());
        let expected = if deed == DROP { Expected::Nothing } else { Expected::Pattern(number, response) };
        Some((request, response, expected))
    }

    /// Calls as often as the depth and the peer allow. Says whether any call was made.
    fn call(&mut self, index: u32) -> bool {
        let mut any = false;
        while self.made <= self.load.calls && self.expected.len() < self.load.depth {
            let Some((request, response, expected)) = self.refused.take().or_else(|| self.prepare(index))
            else {
                break;
            };
            let number = self.made;
            match self.endpoint.call(&request, response, (index, number)) {
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
        self.goodbye |= number == self.load.calls;
    }
}

/// Has all lines make their calls and answer those of the other side until both sides are done.
pub(crate) fn drive(context: &Context<User>, lines: &mut [Line], answering: Answering, seed: u64) {
    let mut kept: Vec<RecvHandle<User>> = Vec::new();
    let mut unsent: Unsent = Vec::new();
    let mut random = Random(seed);
    let mut last = Instant::now();
    let mut idle = 0;
    while lines.iter().any(|line| !line.goodbye || !line.left) {
        let mut progress = false;
        for (index, line) in lines.iter_mut().enumerate() {
            progress |= line.call(index as u32);
        }
        let polled = context.poll(|(index, number), answer| {
            lines[index as usize].answered(number, answer.map(|bytes| bytes.to_vec()));
        });
        let mut came = 0;
        for (request, bytes) in std::mem::take(&mut unsent) {
            reply(request, bytes, &mut unsent);
        }
        while let Some(mut request) = context.recv() {
            came += 1;
            check_order(lines, &request);
            if answering.detached {
                // What it says is needed before its place is given back.
                let bytes = request.data().to_vec();
                request.detach();
                assert!(request.data().is_empty());
                answer(lines, request, &bytes, &mut unsent);
            } else {
                kept.push(request);
            }
            if kept.len() > answering.keep {
                answer_one(lines, &mut kept, answering.shuffled, &mut random, &mut unsent);
            }
        }
        if came == 0 && polled == 0 && !kept.is_empty() {
            answer_one(lines, &mut kept, answering.shuffled, &mut random, &mut unsent);
            came += 1;
        }
        progress |= polled + came > 0;
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
            let state: Vec<_> = lines
                .iter()
                .map(|l| (l.made, l.expected.len(), l.refused.is_some(), l.goodbye, l.left))
                .collect();
            panic!("no progress: {state:?}, {:?}", context.counters());
        }
    }
    context.flush();
    assert!(lines.iter().all(|line| line.endpoint.pending_calls() == 0 && line.endpoint.failure().is_none()));
}

/// Requests of a line come in the order in which they were made.
fn check_order(lines: &mut [Line], request: &RecvHandle<User>) {
    let mut header = [0; HEADER];
    if request.data().copy_to(&mut header) == HEADER {
        let number = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
        let line = &mut lines[usize::from(u16::from_le_bytes([header[12], header[13]]))];
        assert!(line.heard < Some(number), "request {number} after {:?}", line.heard);
        line.heard = Some(number);
    }
}

/// Answers that were refused for the moment.
type Unsent = Vec<(RecvHandle<User>, Vec<u8>)>;

fn answer_one(
    lines: &mut [Line],
    kept: &mut Vec<RecvHandle<User>>,
    shuffled: bool,
    random: &mut Random,
    unsent: &mut Unsent,
) {
    let which = if shuffled { random.place(kept.len()) } else { 0 };
    let request = kept.remove(which);
    let bytes = request.data().to_vec();
    answer(lines, request, &bytes, unsent);
}

/// Answers a request, whose bytes are checked.
fn answer(lines: &mut [Line], request: RecvHandle<User>, bytes: &[u8], unsent: &mut Unsent) {
    if bytes.len() < HEADER {
        let mut right = bytes.to_vec();
        // All of it follows from the first byte.
        let base = bytes.first().copied().unwrap_or(0);
        right.iter_mut().enumerate().for_each(|(i, byte)| *byte = base.wrapping_add(i as u8));
        assert!(bytes == right, "a short request with other bytes");
        return reply(request, bytes.to_vec(), unsent);
    }
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let number = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    let len = u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes")) as usize;
    let (line, deed) = (&mut lines[usize::from(word(12))], word(14));
    let mut right = vec![0; bytes.len()];
    pattern(number, &mut right);
    assert!(bytes[HEADER..] == right[HEADER..], "request {number}: other bytes");
    line.left |= deed == GOODBYE;
    if deed == DROP {
        return;
    }
    assert!(request.response_limit() >= len as u64);
    let mut right = vec![0; len];
    pattern(!number, &mut right);
    reply(request, right, unsent);
}

fn reply(request: RecvHandle<User>, bytes: Vec<u8>, unsent: &mut Unsent) {
    match request.reply(&bytes) {
        Ok(()) => {}
        Err((cause, Some(request))) if cause.is_back_pressure() => unsent.push((request, bytes)),
        Err((cause, _)) => panic!("a reply always has room: {cause}"),
    }
}
