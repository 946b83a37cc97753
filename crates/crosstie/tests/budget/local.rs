//! Calls of `ipc`, `delegation` and `flux`, with 32 bytes each way.

use std::collections::VecDeque;

use crosstie_testkit::{allocations, child, seccomp};
use zerocopy::{FromBytes, IntoBytes};

const WARM_UP: u64 = 2_000;
const MEASURED: u64 = 100_000;

/// A message of 32 bytes: a type, or a byte string.
trait Message: crosstie::Message {
    fn of(words: &[u64; 4]) -> &Self;
    fn words(&self) -> [u64; 4];
}

impl Message for [u64; 4] {
    #[inline(always)]
    fn of(words: &[u64; 4]) -> &Self {
        words
    }
    #[inline(always)]
    fn words(&self) -> [u64; 4] {
        *self
    }
}

impl Message for [u8] {
    fn of(words: &[u64; 4]) -> &Self {
        words.as_bytes()
    }
    fn words(&self) -> [u64; 4] {
        FromBytes::read_from_bytes(self).unwrap()
    }
}

/// How calls and replies are made.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    depth: usize,
    /// Receive all requests, then reply in reverse order.
    reversed: bool,
}

const PATTERNS: [Pattern; 5] = [
    Pattern { depth: 1, reversed: false },
    Pattern { depth: 8, reversed: false },
    Pattern { depth: 32, reversed: false },
    Pattern { depth: 32, reversed: true },
    Pattern { depth: 64, reversed: false },
];

/// More than 32 calls in flight are for flux alone.
fn patterns(kind: &str) -> impl Iterator<Item = Pattern> + use<'_> {
    PATTERNS.into_iter().filter(move |pattern| pattern.depth <= 32 || kind == "flux")
}

/// Both sides in one thread: makes a number of calls in a pattern, until all have their responses.
type Pair = Box<dyn FnMut(u64, Pattern)>;

/// Server and client of a service.
macro_rules! pair {
    ($service:ident, $message:ty) => {{
        use crosstie::$service::*;
        let name = format!("budget-{}", std::process::id());
        let mut server = Server::<$message, $message>::create(&name, &Config::default()).unwrap();
        let mut client = Client::<$message, $message, u64>::connect(&name).unwrap();
        let (mut deferred, mut made) = (Vec::with_capacity(64), 0u64);
        Box::new(move |calls: u64, pattern: Pattern| {
            let end = made + calls;
            while made < end || client.in_flight() > 0 {
                while made < end && client.in_flight() < pattern.depth {
                    client.call(<$message>::of(&[made; 4]), made).unwrap();
                    made += 1;
                }
                server.serve(|request| {
                    let words = request.message().words();
                    if pattern.reversed {
                        deferred.push((request.defer(), words));
                    } else {
                        request.reply(<$message>::of(&words)).unwrap();
                    }
                });
                while let Some((ticket, words)) = deferred.pop() {
                    server.reply(ticket, <$message>::of(&words)).unwrap();
                }
                client.poll(|token, response| assert_eq!(response.words(), [token; 4])).unwrap();
            }
        })
    }};
}

/// Two nodes of a network.
fn flux_pair() -> Pair {
    use crosstie::flux::{Config, Node, network};
    let mut nodes: Vec<Node<[u64; 4], [u64; 4], u64>> = network(2, &Config::default()).unwrap();
    let (mut callee, mut caller) = (nodes.pop().unwrap(), nodes.pop().unwrap());
    let (mut deferred, mut made) = (VecDeque::with_capacity(64), 0u64);
    Box::new(move |calls, pattern| {
        let end = made + calls;
        while made < end || caller.in_flight() > 0 {
            while made < end && caller.in_flight() < pattern.depth {
                caller.call(1, [made; 4], made).unwrap();
                made += 1;
            }
            callee.serve(|request| {
                assert_eq!(request.client(), 0);
                if pattern.reversed {
                    deferred.push_back(request.defer());
                } else {
                    request.reply_with(|words| words).unwrap();
                }
            });
            while let Some((request, ticket)) = deferred.pop_back() {
                callee.reply(ticket, request).unwrap();
            }
            caller.poll(|token, response| assert_eq!(response, [token; 4]));
            caller.take_lost(|_| unreachable!());
        }
    })
}

const KINDS: [&str; 5] = ["ipc, typed", "ipc, bytes", "delegation, typed", "delegation, bytes", "flux"];

fn pair(kind: &str) -> Pair {
    match kind {
        "ipc, typed" => pair!(ipc, [u64; 4]),
        "ipc, bytes" => pair!(ipc, [u8]),
        "delegation, typed" => pair!(delegation, [u64; 4]),
        "delegation, bytes" => pair!(delegation, [u8]),
        _ => flux_pair(),
    }
}

#[test]
fn calls_do_not_allocate() {
    for kind in KINDS {
        let mut pair = pair(kind);
        for pattern in patterns(kind) {
            pair(WARM_UP, pattern);
            allocations::assert_none(format_args!("{kind}, {pattern:?}"), || pair(MEASURED, pattern));
        }
    }
}

#[test]
fn calls_make_no_system_call() {
    if let Some(task) = child::task() {
        let mut pair = pair(&task);
        pair(WARM_UP, PATTERNS[0]);
        seccomp::without_system_calls(&[], || patterns(&task).for_each(|pattern| pair(MEASURED, pattern)));
    }
    seccomp::assert_no_system_calls(calls_make_no_system_call, &KINDS);
}

#[cfg(not(debug_assertions))]
#[test]
fn calls_stay_within_their_instruction_limits() {
    use crosstie_testkit::callgrind;
    const CALLS: u32 = 3200;
    if let Some(task) = child::task() {
        let (kind, depth) = task.split_once(": ").unwrap();
        let (mut pair, pattern) = (pair(kind), Pattern { depth: depth.parse().unwrap(), reversed: false });
        pair(WARM_UP, pattern);
        return callgrind::measure(&mut || pair(CALLS.into(), pattern));
    }
    callgrind::assert_limits(
        calls_stay_within_their_instruction_limits,
        &[
            ("ipc, typed: 1", CALLS, 425),
            ("ipc, typed: 32", CALLS, 241),
            ("ipc, bytes: 1", CALLS, 547),
            ("ipc, bytes: 32", CALLS, 368),
            ("delegation, typed: 1", CALLS, 502),
            ("delegation, typed: 32", CALLS, 332),
            ("delegation, bytes: 1", CALLS, 633),
            ("delegation, bytes: 32", CALLS, 462),
            ("flux: 1", CALLS, 487),
            ("flux: 32", CALLS, 263),
        ],
    );
}
