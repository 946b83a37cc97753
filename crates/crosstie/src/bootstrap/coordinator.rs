//! The thread beside rank 0 that the ranks meet at.
//!
//! It holds one connection to every rank, rank 0 included, and moves bytes only when a socket is ready: no peer,
//! slow or silent, keeps it from the others. It promises:
//!
//! - Nobody takes a seat without proving the secret; a rank has one seat, and the first to prove it keeps it.
//! - Those who have not proved it are bounded in number ([`MAX_UNAUTHENTICATED`]) and in time ([`HANDSHAKE_TIMEOUT`]).
//! - The first thing that goes wrong (a rank missing, gone, or breaking the protocol) ends the job: every other rank,
//!   also one that joins later, is told that cause, once, and nothing after it.
//! - It ends when rank 0's connection closes, after at most [`FLUSH_TIMEOUT`].

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::error::{Error, Operation, Violation};
use super::frame::{Frame, Opener, Sealer};
use super::handshake::{CLAIM, NONCE, Transcript, VERDICT, Verdict};
use super::limits::{FLUSH_TIMEOUT, HANDSHAKE_TIMEOUT, Limits, MAX_UNAUTHENTICATED};
use super::round::Round;
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::{Stream, is_momentary};

/// Frame kinds that only the coordinator sends. Operations and their results use the number of their [`Operation`].
pub(super) const ABORT: u8 = 16;

/// How long to leave the listener alone after it failed (usually: no file descriptor left).
const LISTENER_REST: Duration = Duration::from_millis(100);

/// The most bytes taken from one connection before the others get their turn.
const READ_TURN: usize = 1 << 20;

pub(super) struct Coordinator {
    size: u32,
    secret: Secret,
    limits: Limits,
    listener: Option<TcpListener>,
    listener_rests_until: Option<Instant>,
    strangers: VecDeque<Stranger>,
    seats: Vec<Seat>,
    stage: Stage,
    refusals: Refusals,
    scratch: Vec<u8>,
}

enum Stage {
    Joining { until: Instant },
    Idle,
    Round { round: Round, until: Instant },
    Failed(Error),
}

enum Seat {
    Empty,
    Taken(Box<Link>),
    Left,
}

#[derive(Default)]
struct Refusals {
    secret: u32,
    duplicate: u32,
    size: u32,
}

/// A connection that has not proved the secret.
struct Stranger {
    stream: Stream,
    /// The rank it was made for, when this process made it; such a one is never turned away for being slow.
    made_for: Option<u32>,
    until: Instant,
    nonce: [u8; NONCE],
    received: Vec<u8>,
}

/// A rank's connection.
struct Link {
    stream: Stream,
    sealer: Sealer,
    opener: Opener,
    outgoing: VecDeque<Outgoing>,
}

struct Outgoing {
    bytes: Arc<[u8]>,
    written: usize,
}

impl Coordinator {
    pub(super) fn new(
        size: u32,
        secret: Secret,
        limits: Limits,
        listener: Option<TcpListener>,
    ) -> io::Result<Self> {
        if let Some(listener) = &listener {
            listener.set_nonblocking(true)?;
        }
        Ok(Coordinator {
            size,
            secret,
            limits,
            listener,
            listener_rests_until: None,
            strangers: VecDeque::new(),
            seats: (0..size).map(|_| Seat::Empty).collect(),
            stage: Stage::Joining { until: Instant::now() + limits.join_timeout },
            refusals: Refusals::default(),
            scratch: vec![0; 64 << 10],
        })
    }

    /// Expects `rank` at the other end of a connection that this process made itself.
    pub(super) fn expect(&mut self, rank: u32, stream: Stream) -> super::Result<()> {
        let until = Instant::now() + self.limits.join_timeout;
        self.greet(stream, Some(rank), until)
            .map_err(|error| Error::io(format!("greeting rank {rank}"), &error))
    }

    /// Serves until rank 0 leaves.
    pub(super) fn run(mut self) {
        while !matches!(self.seats[0], Seat::Left) {
            self.expire(Instant::now());
            // A poll that fails for good leaves nothing to serve with: the ranks see their connections close.
            let Ok(ready) = self.wait() else { return };
            self.serve_members(&ready);
            self.serve_strangers(&ready);
            if ready.listener {
                self.accept();
            }
        }
        self.farewell();
    }

    // --- time ---

    fn expire(&mut self, now: Instant) {
        self.strangers.retain(|stranger| stranger.made_for.is_some() || stranger.until > now);
        if self.listener_rests_until.is_some_and(|until| until <= now) {
            self.listener_rests_until = None;
        }
        let missing = match &self.stage {
            Stage::Joining { until } if *until <= now => {
                let empty = |(rank, seat)| matches!(seat, &Seat::Empty).then_some(rank);
                Some(((0..).zip(&self.seats).filter_map(empty).collect(), Operation::Join, self.limits.join_timeout))
            }
            Stage::Round { round, until } if *until <= now => {
                Some((round.missing(), round.step(), self.limits.operation_timeout))
            }
            _ => None,
        };
        if let Some((ranks, during, waited)) = missing {
            let note = if during == Operation::Join { self.refusals.to_string() } else { String::new() };
            self.fail(Error::RankMissing { ranks, during, waited, note }, None);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let stage = match &self.stage {
            Stage::Joining { until } | Stage::Round { until, .. } => Some(*until),
            Stage::Idle | Stage::Failed(_) => None,
        };
        let strangers = self.strangers.iter().filter(|stranger| stranger.made_for.is_none());
        strangers.map(|stranger| stranger.until).chain(stage).chain(self.listener_rests_until).min()
    }

    fn wait(&self) -> io::Result<Ready> {
        let mut fds = Vec::with_capacity(self.seats.len() + self.strangers.len() + 1);
        let mut ranks = Vec::with_capacity(self.seats.len());
        for (rank, seat) in self.seats.iter().enumerate() {
            if let Seat::Taken(link) = seat {
                let writes = if link.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
                fds.push(PollFd::new(&link.stream, PollFlags::IN | writes));
                ranks.push(rank);
            }
        }
        fds.extend(self.strangers.iter().map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN)));
        if let (Some(listener), None) = (&self.listener, self.listener_rests_until) {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let timeout = self.next_deadline().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(errno) => return Err(errno.into()),
        }
        let mut events = fds.iter().map(PollFd::revents);
        let members = ranks.into_iter().zip(events.by_ref()).filter(|(_, event)| !event.is_empty()).collect();
        let strangers = events.by_ref().take(self.strangers.len()).map(|event| !event.is_empty()).collect();
        Ok(Ready { members, strangers, listener: events.next().is_some_and(|event| !event.is_empty()) })
    }

    // --- strangers ---

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok((stream, _)) => {
                if self.strangers.len() >= MAX_UNAUTHENTICATED.max(self.size as usize) {
                    self.turn_away_oldest();
                }
                let until = Instant::now() + HANDSHAKE_TIMEOUT;
                // A connection that is broken already concerns nobody else.
                drop(stream.set_nodelay(true).and_then(|()| self.greet(Stream::Tcp(stream), None, until)));
            }
            Err(error) if is_momentary(&error) => {}
            Err(_) => {
                self.turn_away_oldest();
                self.listener_rests_until = Some(Instant::now() + LISTENER_REST);
            }
        }
    }

    fn turn_away_oldest(&mut self) {
        if let Some(oldest) = self.strangers.iter().position(|stranger| stranger.made_for.is_none()) {
            self.strangers.remove(oldest);
        }
    }

    fn greet(&mut self, mut stream: Stream, made_for: Option<u32>, until: Instant) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let nonce = random_bytes().map_err(io::Error::other)?;
        // An empty socket takes 32 bytes at once.
        if stream.write(&nonce)? != NONCE {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let received = Vec::with_capacity(NONCE + CLAIM);
        self.strangers.push_back(Stranger { stream, made_for, until, nonce, received });
        Ok(())
    }

    fn serve_strangers(&mut self, ready: &Ready) {
        let mut ready = ready.strangers.iter();
        for mut stranger in std::mem::take(&mut self.strangers) {
            if !ready.next().is_some_and(|ready| *ready) {
                self.strangers.push_back(stranger);
                continue;
            }
            match stranger.read() {
                Ok(None) => self.strangers.push_back(stranger),
                Ok(Some((nonce, claim))) => self.judge(stranger, nonce, &claim),
                Err(_) => self.stranger_left(stranger.made_for),
            }
        }
    }

    fn stranger_left(&mut self, made_for: Option<u32>) {
        if let Some(rank) = made_for {
            self.leave(rank);
        }
    }

    fn judge(&mut self, mut stranger: Stranger, member_nonce: [u8; NONCE], claim: &[u8; CLAIM]) {
        let transcript = Transcript::verify_claim(&self.secret, stranger.nonce, member_nonce, claim);
        let refuse = |stream: &mut Stream, verdict: [u8; VERDICT]| {
            // Whoever is refused may already have gone; that changes nothing here.
            drop(stream.write(&verdict));
        };
        let Some(transcript) = transcript else {
            self.refusals.secret += 1;
            refuse(&mut stranger.stream, [0; VERDICT]);
            return self.stranger_left(stranger.made_for);
        };
        if transcript.size != self.size {
            self.refusals.size += 1;
            let verdict = Verdict::SizeMismatch(self.size);
            refuse(&mut stranger.stream, transcript.verdict(&self.secret, verdict));
            return self.stranger_left(stranger.made_for);
        }
        // A connection made here has its rank; whoever comes from elsewhere is never rank 0, which is here.
        let rank = transcript.rank;
        let rightful = stranger.made_for.map_or(rank != 0, |made_for| rank == made_for);
        let Some(seat @ Seat::Empty) = self.seats.get_mut(rank as usize).filter(|_| rightful) else {
            self.refusals.duplicate += 1;
            refuse(&mut stranger.stream, transcript.verdict(&self.secret, Verdict::DuplicateRank));
            return self.stranger_left(stranger.made_for);
        };
        let (sealer, opener) = transcript.coordinator_side(&self.secret, self.limits.max_message);
        let mut link = Link { stream: stranger.stream, sealer, opener, outgoing: VecDeque::new() };
        link.push(transcript.verdict(&self.secret, Verdict::Accepted));
        if let Stage::Failed(error) = &self.stage {
            link.send(ABORT, error.to_wire().unwrap_or_default().into());
        }
        *seat = Seat::Taken(Box::new(link));
        if matches!(self.stage, Stage::Joining { .. })
            && self.seats.iter().all(|seat| matches!(seat, Seat::Taken(_)))
        {
            self.stage = Stage::Idle;
            let nothing: Arc<[u8]> = Arc::from([]);
            self.send_all(|_| (Operation::Join as u8, nothing.clone()));
        } else {
            self.write(rank);
        }
    }

    // --- members ---

    fn serve_members(&mut self, ready: &Ready) {
        for (rank, events) in &ready.members {
            let rank = u32::try_from(*rank).expect("built from a u32");
            if events.contains(PollFlags::OUT) {
                self.write(rank);
            }
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                self.read(rank);
            }
        }
    }

    fn read(&mut self, rank: u32) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut taken = 0;
        while taken < READ_TURN {
            let Seat::Taken(link) = &mut self.seats[rank as usize] else { break };
            match link.stream.read(&mut scratch) {
                Ok(0) => self.leave(rank),
                Ok(count) => {
                    taken += count;
                    link.opener.extend(&scratch[..count]);
                    self.take_frames(rank);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_momentary(&error) => break,
                Err(_) => self.leave(rank),
            }
        }
        self.scratch = scratch;
    }

    fn take_frames(&mut self, rank: u32) {
        while let Seat::Taken(link) = &mut self.seats[rank as usize] {
            match link.opener.next() {
                Ok(None) => return,
                Ok(Some(frame)) => self.contribute(rank, frame),
                Err(violation) => return self.expel(rank, violation),
            }
        }
    }

    fn contribute(&mut self, rank: u32, frame: Frame) {
        let Some(step) = Operation::from_wire(frame.kind) else { return self.expel(rank, Violation::Kind) };
        if matches!(self.stage, Stage::Idle) {
            let until = Instant::now() + self.limits.operation_timeout;
            self.stage = Stage::Round { round: Round::new(step, rank, self.size), until };
        }
        let round = match &mut self.stage {
            Stage::Round { round, .. } => round,
            // Crossed with the abort that this rank is about to read.
            Stage::Failed(_) => return,
            Stage::Joining { .. } | Stage::Idle => return self.expel(rank, Violation::Kind),
        };
        match round.add(rank, step, frame.payload, &self.limits) {
            Ok(false) => {}
            Ok(true) => {
                let Stage::Round { round, .. } = std::mem::replace(&mut self.stage, Stage::Idle) else {
                    return;
                };
                match round.results(&self.limits) {
                    Ok(results) => self.send_all(|rank| (step as u8, results[rank].clone())),
                    Err(error) => self.fail(error, None),
                }
            }
            Err(Error::Protocol { rank, violation }) => self.expel(rank, violation),
            Err(error) => self.fail(error, None),
        }
    }

    /// Ends the job because of what `rank` sent, and hears no more of it.
    fn expel(&mut self, rank: u32, violation: Violation) {
        self.fail(Error::Protocol { rank, violation }, None);
        self.seats[rank as usize] = Seat::Left;
    }

    fn leave(&mut self, rank: u32) {
        self.seats[rank as usize] = Seat::Left;
        self.fail(Error::RankDisconnected { rank }, Some(rank));
    }

    /// Tells everybody, once, why the job is over.
    fn fail(&mut self, error: Error, except: Option<u32>) {
        if matches!(self.stage, Stage::Failed(_)) {
            return;
        }
        let payload: Arc<[u8]> = error.to_wire().unwrap_or_default().into();
        self.stage = Stage::Failed(error);
        for rank in (0..self.size).rev() {
            if Some(rank) == except {
                continue;
            }
            if let Seat::Taken(link) = &mut self.seats[rank as usize] {
                link.send(ABORT, payload.clone());
                self.write(rank);
            }
        }
    }

    fn send_all(&mut self, mut frame: impl FnMut(usize) -> (u8, Arc<[u8]>)) {
        for rank in 0..self.seats.len() {
            if let Seat::Taken(link) = &mut self.seats[rank] {
                let (kind, payload) = frame(rank);
                link.send(kind, payload);
            }
        }
        // Rank 0 last: once it has its result it may end this process, and with it whatever is still to be written.
        for rank in (0..self.size).rev() {
            self.write(rank);
        }
    }

    fn write(&mut self, rank: u32) {
        if let Seat::Taken(link) = &mut self.seats[rank as usize]
            && link.write().is_err()
        {
            self.leave(rank);
        }
    }

    /// Hands out what is still queued, in bounded time.
    fn farewell(mut self) {
        self.listener = None;
        self.strangers.clear();
        let until = Instant::now() + FLUSH_TIMEOUT;
        let mut links: Vec<Box<Link>> = self.seats.into_iter().filter_map(Seat::into_link).collect();
        loop {
            links.retain_mut(|link| link.write().is_ok() && !link.outgoing.is_empty());
            let left = until.saturating_duration_since(Instant::now());
            if links.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<_> =
                links.iter().map(|link| PollFd::new(&link.stream, PollFlags::OUT)).collect();
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

impl Seat {
    fn into_link(self) -> Option<Box<Link>> {
        match self {
            Seat::Taken(link) => Some(link),
            Seat::Empty | Seat::Left => None,
        }
    }
}

/// What poll found.
#[derive(Default)]
struct Ready {
    members: Vec<(usize, PollFlags)>,
    strangers: Vec<bool>,
    listener: bool,
}

impl Stranger {
    /// Reads on; the member's nonce and claim once they are complete. No byte beyond them is taken.
    #[allow(clippy::type_complexity)]
    fn read(&mut self) -> io::Result<Option<([u8; NONCE], [u8; CLAIM])>> {
        let mut buffer = [0; NONCE + CLAIM];
        let wanted = buffer.len() - self.received.len();
        match self.stream.read(&mut buffer[..wanted]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.received.extend_from_slice(&buffer[..count]),
            Err(error) if is_momentary(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let Some((nonce, claim)) = self.received.split_first_chunk::<NONCE>() else { return Ok(None) };
        Ok(claim.first_chunk::<CLAIM>().map(|claim| (*nonce, *claim)))
    }
}

impl Link {
    fn push(&mut self, bytes: impl Into<Arc<[u8]>>) {
        self.outgoing.push_back(Outgoing { bytes: bytes.into(), written: 0 });
    }

    fn send(&mut self, kind: u8, payload: Arc<[u8]>) {
        let sealed = self.sealer.seal(kind, payload);
        self.push(sealed.head);
        self.push(sealed.payload);
        self.push(sealed.tag);
    }

    /// Writes until the socket takes no more.
    fn write(&mut self) -> io::Result<()> {
        while let Some(front) = self.outgoing.front_mut() {
            let rest = &front.bytes[front.written..];
            if rest.is_empty() {
                self.outgoing.pop_front();
                continue;
            }
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => front.written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_momentary(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for Refusals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        for (count, why) in [
            (self.secret, "a wrong secret"),
            (self.duplicate, "a rank that was taken or does not exist"),
            (self.size, "another size of the job"),
        ] {
            if count > 0 {
                parts.push(format!("{count} refused for {why}"));
            }
        }
        f.write_str(&parts.join(", "))
    }
}
