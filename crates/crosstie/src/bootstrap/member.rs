//! A rank's own end: a connection to the coordinator, and [`Bootstrap`] on top of it.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::Bootstrap;
use super::coordinator::ABORT;
use super::error::{Error, Result, Operation, Violation};
use super::frame::{Frame, Opener, Sealer};
use super::handshake::{NONCE, Transcript, VERDICT, Verdict};
use super::limits::{GRACE_PERIOD, Limits};
use super::local::Children;
use super::round::{pack, pack_words, unpack, unpack_words};
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::Stream;

/// One rank of a job whose ranks meet at rank 0: what [`local`](super::local) and [`tcp`](super::tcp) return.
///
/// Dropping it leaves the job: ranks that still wait get [`Error::RankDisconnected`]. Dropping rank 0 ends the job, and ends
/// by force the ranks that it spawned unless [`finish`](Bootstrap::finish) was called.
pub struct Member {
    rank: u32,
    size: u32,
    limits: Limits,
    link: Option<Link>,
    failed: Option<Error>,
    host: Option<Host>,
    children: Children,
}

/// A connection on which both sides have proved the secret.
pub(super) struct Link {
    stream: Stream,
    sealer: Sealer,
    opener: Opener,
}

/// Why no connection came about.
pub(super) enum NoLink {
    /// The coordinator has spoken, or this side cannot go on: trying again is of no use.
    Refused(Error),
    /// The stream broke or stalled.
    Broken(io::Error),
}

impl From<io::Error> for NoLink {
    fn from(error: io::Error) -> Self {
        NoLink::Broken(error)
    }
}

impl Link {
    /// Proves the secret to the coordinator at the other end of `stream`, and has it proved.
    pub(super) fn open(
        mut stream: Stream,
        rank: u32,
        size: u32,
        secret: &Secret,
        limits: &Limits,
        peer: &str,
        deadline: Instant,
    ) -> std::result::Result<Self, NoLink> {
        let member_nonce = random_bytes().map_err(NoLink::Refused)?;
        stream.write_full(&member_nonce, deadline)?;
        let mut coordinator_nonce = [0; NONCE];
        stream.read_full(&mut coordinator_nonce, deadline)?;
        let transcript = Transcript { coordinator_nonce, member_nonce, rank, size };
        stream.write_full(&transcript.claim(secret), deadline)?;
        let mut verdict = [0; VERDICT];
        stream.read_full(&mut verdict, deadline)?;
        match transcript.verify_verdict(secret, &verdict) {
            Some(Verdict::Accepted) => {
                let (sealer, opener) = transcript.member_side(secret, limits.max_message);
                Ok(Link { stream, sealer, opener })
            }
            Some(Verdict::DuplicateRank) => Err(NoLink::Refused(Error::DuplicateRank { rank })),
            Some(Verdict::SizeMismatch(theirs)) => {
                Err(NoLink::Refused(Error::SizeMismatch { ours: size, theirs }))
            }
            None => Err(NoLink::Refused(Error::WrongSecret { peer: peer.to_owned() })),
        }
    }

    /// As [`open`](Link::open), over a connection inside the machine that is not tried twice.
    pub(super) fn open_local(
        stream: Stream,
        rank: u32,
        size: u32,
        secret: &Secret,
        limits: &Limits,
    ) -> Result<Self> {
        let deadline = Instant::now() + limits.join_timeout + GRACE_PERIOD;
        Link::open(stream, rank, size, secret, limits, "rank 0", deadline).map_err(|no_link| match no_link {
            NoLink::Refused(error) => error,
            NoLink::Broken(error) => lost(&error, Operation::Join, limits),
        })
    }

    fn send(&mut self, kind: u8, payload: Vec<u8>, deadline: Instant) -> io::Result<()> {
        let sealed = self.sealer.seal(kind, Arc::from(payload));
        self.stream.write_full(&sealed.head, deadline)?;
        self.stream.write_full(&sealed.payload, deadline)?;
        self.stream.write_full(&sealed.tag, deadline)
    }

    fn receive(&mut self, deadline: Instant) -> io::Result<std::result::Result<Frame, Violation>> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.opener.next() {
                Ok(Some(frame)) => return Ok(Ok(frame)),
                Ok(None) => {}
                Err(violation) => return Ok(Err(violation)),
            }
            match self.stream.read_some(&mut buffer, deadline)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.opener.extend(&buffer[..count]),
            }
        }
    }
}

/// A stalled or closed connection, in terms of the job.
fn lost(error: &io::Error, during: Operation, limits: &Limits) -> Error {
    match error.kind() {
        io::ErrorKind::TimedOut => {
            let waited = if during == Operation::Join { limits.join_timeout } else { limits.operation_timeout };
            Error::Timeout { during, waited: waited + GRACE_PERIOD }
        }
        _ => Error::RankDisconnected { rank: 0 },
    }
}

impl Member {
    pub(super) fn new(rank: u32, size: u32, limits: Limits, link: Link) -> Self {
        let children = Children::default();
        Member { rank, size, limits, link: Some(link), failed: None, host: None, children }
    }

    /// Makes this member the one that ends with the coordinator and the processes it spawned.
    pub(super) fn with_host(mut self, host: Host, children: Children) -> Self {
        self.host = Some(host);
        self.children = children;
        self
    }

    /// Waits until all ranks have joined.
    pub(super) fn gather(mut self) -> Result<Self> {
        let deadline = Instant::now() + self.limits.join_timeout + GRACE_PERIOD;
        self.receive(Operation::Join, deadline)?;
        Ok(self)
    }

    fn operate(&mut self, step: Operation, payload: Vec<u8>) -> Result<Vec<u8>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.limits.check_message(payload.len())?;
        let deadline = Instant::now() + self.limits.operation_timeout + GRACE_PERIOD;
        if let Some(link) = &mut self.link
            && let Err(error) = link.send(step as u8, payload, deadline)
            && error.kind() == io::ErrorKind::TimedOut
        {
            return Err(self.fail(lost(&error, step, &self.limits)));
        }
        // If the connection closed under the sending, the reason may still lie in what was received.
        self.receive(step, deadline)
    }

    fn receive(&mut self, step: Operation, deadline: Instant) -> Result<Vec<u8>> {
        let Some(link) = &mut self.link else { return Err(self.fail(Error::RankDisconnected { rank: 0 })) };
        let rank = self.rank;
        let error = match link.receive(deadline) {
            Ok(Ok(frame)) if frame.kind == step as u8 => return Ok(frame.payload),
            Ok(Ok(frame)) if frame.kind == ABORT => Error::from_wire(&frame.payload)
                .unwrap_or(Error::Protocol { rank, violation: Violation::Layout }),
            Ok(Ok(_)) => Error::Protocol { rank, violation: Violation::Kind },
            Ok(Err(violation)) => Error::Protocol { rank, violation },
            Err(error) => lost(&error, step, &self.limits),
        };
        Err(self.fail(error))
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error.clone());
        error
    }

    fn malformed(&mut self, violation: Violation) -> Error {
        let rank = self.rank;
        self.fail(Error::Protocol { rank, violation })
    }

    fn blobs(&mut self, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        match unpack(payload, self.size) {
            Ok(blobs) => Ok(blobs.into_iter().map(<[u8]>::to_vec).collect()),
            Err(violation) => Err(self.malformed(violation)),
        }
    }
}

impl Bootstrap for Member {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.limits.check_blob(blob.len())?;
        let payload = self.operate(Operation::AllGather, blob.to_vec())?;
        self.blobs(&payload)
    }

    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        super::check_count(blobs, self.size)?;
        blobs.iter().try_for_each(|blob| self.limits.check_blob(blob.len()))?;
        let payload = self.operate(Operation::Exchange, pack(blobs))?;
        self.blobs(&payload)
    }

    fn barrier(&mut self) -> Result<()> {
        self.operate(Operation::Barrier, Vec::new()).map(drop)
    }

    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>> {
        let payload = self.operate(Operation::Sum, pack_words(words))?;
        match unpack_words(&payload) {
            Ok(total) if total.len() == words.len() => Ok(total),
            _ => Err(self.malformed(Violation::Layout)),
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.barrier()?;
        self.children.wait(Instant::now() + self.limits.operation_timeout)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.children.end();
        // The coordinator ends when this connection does, so the order matters.
        self.link = None;
        self.host = None;
    }
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// The coordinator's thread. Dropping it waits for its end, which follows the closing of rank 0's connection.
pub(super) struct Host(Option<JoinHandle<()>>);

impl Host {
    /// Runs `body` as the coordinator's thread.
    pub(super) fn start(body: impl FnOnce() + Send + 'static) -> Result<Self> {
        let thread = std::thread::Builder::new().name("crosstie-coordinator".into()).spawn(body);
        let thread = thread.map_err(|error| Error::io("starting the coordinator's thread", &error))?;
        Ok(Host(Some(thread)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic over there has been reported by its hook, and the ranks have seen their connections close.
            drop(thread.join());
        }
    }
}
