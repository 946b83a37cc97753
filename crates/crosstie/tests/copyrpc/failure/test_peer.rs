//! One side of several connections, and what two sides do together.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crosstie::copyrpc::{
    CallFailed, Config, Connection, ConnectionConfig, Context, NotCalled, NotPosted, NotReplied, RecvHandle,
    ReplyError,
};
use crosstie::device::{Device, DeviceSpec, Mr, RemoteMemory};

use crate::connect_pair;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
/// The length of a bulk payload that has two pieces.
pub(crate) const LONG: usize = 300_000;

/// Index of the connection, number of the call.
pub(crate) type User = (u32, u64);

/// What a side calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Requests of eight bytes, answered with the same bytes.
    Small,
    /// Every second request is a bulk payload, and every third response.
    Bulk,
}

impl Workload {
    /// The request of the call with this number, and the length of its response.
    fn request(self, number: u64) -> (Vec<u8>, usize) {
        if self == Workload::Small {
            return (number.to_le_bytes().to_vec(), 8);
        }
        let mut bytes = vec![number as u8; if number.is_multiple_of(2) { LONG } else { 40 }];
        let response = if number.is_multiple_of(3) { LONG } else { 24 };
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..16].copy_from_slice(&(response as u64).to_le_bytes());
        (bytes, response)
    }

    fn response(self, request: &[u8]) -> Vec<u8> {
        if self == Workload::Small {
            return request.to_vec();
        }
        let word = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap());
        assert!(request == self.request(word(0)).0, "request {}: other bytes", word(0));
        vec![!(word(0) as u8); word(8) as usize]
    }

    /// Calls in flight that keep a connection busy.
    pub(crate) fn depth(self) -> usize {
        match self {
            Workload::Small => 16,
            Workload::Bulk => 6,
        }
    }

    /// A connection for such calls.
    pub(crate) fn config(self) -> ConnectionConfig {
        match self {
            Workload::Small => ring(4096),
            Workload::Bulk => bulk(1 << 20),
        }
    }
}

pub(crate) fn ring(bytes: usize) -> ConnectionConfig {
    ConnectionConfig {
        ring: bytes,
        credit: bytes / 4,
        pending_calls: 64,
        bulk: 0,
        ..ConnectionConfig::default()
    }
}

pub(crate) fn bulk(bulk: usize) -> ConnectionConfig {
    ConnectionConfig { pending_calls: 16, bulk, ..ring(4096) }
}

/// Two connected sides.
pub(crate) fn sides(workload: Workload) -> (TestPeer, TestPeer) {
    let (mut left, mut right) = (TestPeer::software(workload), TestPeer::software(workload));
    left.connect(&mut right, &workload.config());
    (left, right)
}

/// One side: a context, its connections, and its open calls.
pub(crate) struct TestPeer {
    pub(crate) workload: Workload,
    pub(crate) context: Context<User>,
    pub(crate) connections: Vec<Connection<User>>,
    next: u64,
    pub(crate) open: BTreeSet<User>,
    pub(crate) failed: Vec<(User, CallFailed)>,
    pub(crate) answered: u64,
    unsent: Vec<(RecvHandle<User>, Vec<u8>)>,
    /// READs under way, regions for more, and the number of READs that completed.
    reading: BTreeSet<u64>,
    pub(crate) regions: Vec<Mr>,
    pub(crate) read: u64,
    unread: u64,
}

impl TestPeer {
    pub(crate) fn new(device: Device, config: &Config, workload: Workload) -> TestPeer {
        TestPeer {
            workload,
            context: Context::new(device, config).unwrap(),
            connections: vec![],
            next: 0,
            open: BTreeSet::new(),
            failed: vec![],
            answered: 0,
            unsent: vec![],
            reading: BTreeSet::new(),
            regions: vec![],
            read: 0,
            unread: 0,
        }
    }

    pub(crate) fn software(workload: Workload) -> TestPeer {
        TestPeer::new(Device::open(&DeviceSpec::Software).unwrap(), &Config::default(), workload)
    }

    /// Adds a connection.
    pub(crate) fn connect(&mut self, other: &mut TestPeer, config: &ConnectionConfig) {
        let (here, there) = connect_pair(&self.context, &other.context, config);
        self.connections.push(here);
        other.connections.push(there);
    }

    /// Makes up to `depth` calls on each connection. Connections that have failed refuse.
    pub(crate) fn call(&mut self, depth: usize) {
        for (index, connection) in self.connections.iter().enumerate() {
            while connection.pending_calls() < depth {
                let user = (index as u32, self.next);
                let (bytes, response) = self.workload.request(self.next);
                match connection.call(&bytes, response, user) {
                    Ok(()) => assert!(self.open.insert(user)),
                    Err(error) => {
                        assert_eq!(error.user, user);
                        let over = matches!(error.cause, NotCalled::Failed(_));
                        assert!(error.cause.is_back_pressure() || over, "{}", error.cause);
                        assert_eq!(over, connection.failure().is_some());
                        break;
                    }
                }
                self.next += 1;
            }
        }
    }

    /// READs from `from` into all free regions.
    pub(crate) fn read(&mut self, index: usize, from: RemoteMemory) {
        while let Some(region) = self.regions.pop() {
            let token = self.next;
            self.next += 1;
            match self.connections[index].read(region, 0..4096, from.at(0), token) {
                Ok(()) => assert!(self.reading.insert(token)),
                Err(error) => {
                    assert_eq!(error.token, token);
                    self.regions.push(error.region);
                    assert!(
                        !matches!(error.cause, NotPosted::NotConnected | NotPosted::Range(_)),
                        "{}",
                        error.cause
                    );
                    self.unread += 1;
                    break;
                }
            }
        }
    }

    /// Polls once, answers requests, and takes completed READs.
    pub(crate) fn turn(&mut self) {
        let TestPeer { workload, context, open, failed, answered, unsent, .. } = self;
        context.poll(|user, answer| {
            assert!(open.remove(&user), "{user:?} ends once");
            match answer {
                Ok(bytes) => {
                    assert!(
                        bytes.to_vec() == workload.response(&workload.request(user.1).0),
                        "{user:?}: another answer"
                    );
                    *answered += 1;
                }
                Err(cause) => failed.push((user, cause)),
            }
        });
        for (request, bytes) in std::mem::take(unsent) {
            reply(request, bytes, unsent);
        }
        while let Some(request) = context.recv() {
            let bytes = workload.response(&request.data().to_vec());
            reply(request, bytes, unsent);
        }
        while let Some(completion) = context.take_raw_completion() {
            assert!(self.reading.remove(&completion.token), "{completion:?} ends once");
            match completion.result {
                Ok(()) => {
                    let mut bytes = [0; 4096];
                    completion.region.read(0, &mut bytes).unwrap();
                    assert_eq!(bytes, [0x77; 4096]);
                    completion.region.write(0, &[0; 4096]).unwrap();
                    self.read += 1;
                }
                Err(_) => self.unread += 1,
            }
            self.regions.push(completion.region);
        }
    }
}

fn reply(request: RecvHandle<User>, bytes: Vec<u8>, unsent: &mut Vec<(RecvHandle<User>, Vec<u8>)>) {
    match request.reply(&bytes) {
        Ok(()) => {}
        Err(ReplyError { cause, request: Some(request) }) if cause.is_back_pressure() => {
            unsent.push((request, bytes));
        }
        // The connection may have ended, and a malicious peer may allow less than it asks for.
        Err(ReplyError { cause, .. }) => {
            assert!(matches!(cause, NotReplied::Failed(_) | NotReplied::TooLong { .. }), "{cause}");
        }
    }
}

/// Polls both sides in turn until no call or READ is open.
pub(crate) fn finish_open_calls(left: &mut TestPeer, right: &mut TestPeer, what: &str) {
    let begin = Instant::now();
    while !left.open.is_empty() || !right.open.is_empty() || !left.reading.is_empty() {
        left.turn();
        right.turn();
        assert!(
            begin.elapsed() < TIMEOUT,
            "{what}: open for ever: {:?} {:?} {:?}\n{:?}\n{:?}",
            left.open,
            right.open,
            left.reading,
            left.context.counters(),
            right.context.counters()
        );
    }
}

/// Makes calls in both directions over all connections, more than any ring, table or pool holds, so that a leak would show.
pub(crate) fn exercise(left: &mut TestPeer, right: &mut TestPeer, calls: u64, what: &str) {
    let goal = (left.answered + calls, right.answered + calls);
    let begin = Instant::now();
    while left.answered < goal.0 || right.answered < goal.1 {
        left.call(left.workload.depth());
        right.call(right.workload.depth());
        left.turn();
        right.turn();
        assert!(begin.elapsed() < TIMEOUT, "{what}: no progress: {:?}", left.context.counters());
    }
    finish_open_calls(left, right, what);
}
