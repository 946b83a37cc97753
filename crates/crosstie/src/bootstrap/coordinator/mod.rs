//! The coordinator: the thread in rank 0's process to which all ranks connect.
//!
//! It has one connection to every rank, rank 0 included, and moves bytes only when a socket is ready, so that a slow
//! or silent peer does not delay the others. It promises:
//!
//! - No peer joins as a rank without proving the secret. Each rank joins once; the first process that proves the secret
//!   for a rank keeps it.
//! - Unauthenticated connections are limited in number ([`MAX_UNAUTHENTICATED`]) and in time ([`HANDSHAKE_TIMEOUT`]).
//! - The first failure (a rank is missing, disconnects, or violates the protocol) ends the job. The coordinator sends
//!   this cause once to every other rank, also to one that joins later, and nothing after it.
//! - It ends at most [`FLUSH_TIMEOUT`] after rank 0's connection closes.
//!
//! ```text
//! State       Joining ── all ranks joined ──> Idle ── first call of an operation ──> Collective
//!                                              ^                                        │
//!                                              └──── all ranks have called it ──────────┘
//!             any of them ── a rank missing, disconnected, or in violation ──> Failed
//!
//! RankState   NotJoined ── handshake ──> Joined(connection) ── closed, or a violation ──> Left
//! ```

mod collective;
mod connection;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::collective::Collective;
use self::connection::{JoinMessage, RankConnection, UnauthenticatedConnection};
use super::abort::{self, ABORT};
use super::error::{Error, Operation, Result, Violation};
use super::frame::Frame;
use super::handshake::{JoinResponse, NONCE_BYTES, REQUEST_BYTES, RESPONSE_BYTES, Transcript};
use super::limits::{FLUSH_TIMEOUT, HANDSHAKE_TIMEOUT, Limits, MAX_UNAUTHENTICATED};
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::{Stream, is_transient};
use crate::process::OwnThread;

/// How long to stop accepting after the listener failed (usually because no file descriptor is left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most bytes read from one connection before the others are served.
const MAX_READ_BYTES: usize = 1 << 20;

/// See the [module](self). [`Coordinator::run`] is the body of its thread.
pub(super) struct Coordinator {
    size: u32,
    secret: Secret,
    limits: Limits,
    listener: Option<TcpListener>,
    /// Set after the listener failed: until then no connection is accepted.
    accept_paused_until: Option<Instant>,
    unauthenticated: VecDeque<UnauthenticatedConnection>,
    ranks: Vec<RankState>,
    state: State,
    rejections: Rejections,
    read_buffer: Vec<u8>,
}

enum State {
    Joining { deadline: Instant },
    Idle,
    Collective { collective: Collective, deadline: Instant },
    Failed(Error),
}

enum RankState {
    NotJoined,
    Joined(Box<RankConnection>),
    Left,
}

/// How many peers were rejected, by cause. Rank 0 reports it when ranks are missing.
#[derive(Default)]
struct Rejections {
    wrong_secret: u32,
    wrong_rank: u32,
    wrong_size: u32,
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
            accept_paused_until: None,
            unauthenticated: VecDeque::new(),
            ranks: (0..size).map(|_| RankState::NotJoined).collect(),
            state: State::Joining { deadline: Instant::now() + limits.join_timeout },
            rejections: Rejections::default(),
            read_buffer: vec![0; 64 << 10],
        })
    }

    /// Adds a connection that this process created itself, with `rank` at its other end.
    pub(super) fn add_connection(&mut self, rank: u32, stream: Stream) -> Result<()> {
        let deadline = Instant::now() + self.limits.join_timeout;
        self.start_handshake(stream, Some(rank), deadline)
            .map_err(|error| Error::io(format!("starting the handshake with rank {rank}"), &error))
    }

    /// Serves the ranks until rank 0 leaves.
    pub(super) fn run(mut self) {
        while !matches!(self.ranks[0], RankState::Left) {
            self.expire_deadlines(Instant::now());
            // Without poll this thread cannot serve the ranks: it ends, and they see their connections close.
            let Ok(ready) = self.wait() else { return };
            self.serve_ranks(&ready);
            self.serve_unauthenticated(&ready);
            if ready.listener {
                self.accept();
            }
        }
        self.flush_and_close();
    }

    // --- time ---

    fn expire_deadlines(&mut self, now: Instant) {
        self.unauthenticated
            .retain(|connection| connection.expected_rank.is_some() || connection.deadline > now);
        if self.accept_paused_until.is_some_and(|until| until <= now) {
            self.accept_paused_until = None;
        }
        let missing = match &self.state {
            State::Joining { deadline } if *deadline <= now => {
                let not_joined = |(rank, state)| matches!(state, &RankState::NotJoined).then_some(rank);
                let ranks = (0..).zip(&self.ranks).filter_map(not_joined).collect();
                Some((ranks, Operation::Join, self.limits.join_timeout))
            }
            State::Collective { collective, deadline } if *deadline <= now => {
                Some((collective.missing_ranks(), collective.operation(), self.limits.operation_timeout))
            }
            _ => None,
        };
        if let Some((ranks, during, waited)) = missing {
            let note = if during == Operation::Join { self.rejections.to_string() } else { String::new() };
            self.fail_job(Error::RankMissing { ranks, during, waited, note }, None);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let state = match &self.state {
            State::Joining { deadline } | State::Collective { deadline, .. } => Some(*deadline),
            State::Idle | State::Failed(_) => None,
        };
        let handshakes = self.unauthenticated.iter().filter(|connection| connection.expected_rank.is_none());
        handshakes.map(|connection| connection.deadline).chain(state).chain(self.accept_paused_until).min()
    }

    /// Waits until a socket is ready or the next deadline has passed.
    fn wait(&self) -> io::Result<Ready> {
        let mut fds = Vec::with_capacity(self.ranks.len() + self.unauthenticated.len() + 1);
        let mut ranks = Vec::with_capacity(self.ranks.len());
        for (rank, state) in self.ranks.iter().enumerate() {
            if let RankState::Joined(connection) = state {
                let writes = if connection.outgoing.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
                fds.push(PollFd::new(&connection.stream, PollFlags::IN | writes));
                ranks.push(rank);
            }
        }
        let unauthenticated = self.unauthenticated.iter();
        fds.extend(unauthenticated.map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
        if let (Some(listener), None) = (&self.listener, self.accept_paused_until) {
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
        let ranks = ranks.into_iter().zip(events.by_ref()).filter(|(_, event)| !event.is_empty()).collect();
        let unauthenticated =
            events.by_ref().take(self.unauthenticated.len()).map(|event| !event.is_empty()).collect();
        Ok(Ready { ranks, unauthenticated, listener: events.next().is_some_and(|event| !event.is_empty()) })
    }

    // --- unauthenticated connections ---

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok((stream, _)) => {
                if self.unauthenticated.len() >= MAX_UNAUTHENTICATED.max(self.size as usize) {
                    self.close_oldest_unauthenticated();
                }
                let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
                let started = stream
                    .set_nodelay(true)
                    .and_then(|()| self.start_handshake(Stream::Tcp(stream), None, deadline));
                // A connection that is broken already needs no report: no rank has joined on it.
                drop(started);
            }
            Err(error) if is_transient(&error) => {}
            Err(_) => {
                self.close_oldest_unauthenticated();
                self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }

    fn close_oldest_unauthenticated(&mut self) {
        let oldest = self.unauthenticated.iter().position(|connection| connection.expected_rank.is_none());
        if let Some(oldest) = oldest {
            self.unauthenticated.remove(oldest);
        }
    }

    /// Sends the coordinator's nonce on a new connection.
    fn start_handshake(
        &mut self,
        mut stream: Stream,
        expected_rank: Option<u32>,
        deadline: Instant,
    ) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let nonce = random_bytes().map_err(io::Error::other)?;
        // The send buffer of a new socket is empty, so it takes 32 bytes at once.
        if stream.write(&nonce)? != NONCE_BYTES {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let received = Vec::with_capacity(NONCE_BYTES + REQUEST_BYTES);
        self.unauthenticated.push_back(UnauthenticatedConnection {
            stream,
            expected_rank,
            deadline,
            nonce,
            received,
        });
        Ok(())
    }

    fn serve_unauthenticated(&mut self, ready: &Ready) {
        let mut ready = ready.unauthenticated.iter();
        for mut connection in std::mem::take(&mut self.unauthenticated) {
            if !ready.next().is_some_and(|ready| *ready) {
                self.unauthenticated.push_back(connection);
                continue;
            }
            match connection.read() {
                Ok(None) => self.unauthenticated.push_back(connection),
                Ok(Some(message)) => self.handle_join_request(connection, &message),
                Err(_) => self.fail_expected_rank(connection.expected_rank),
            }
        }
    }

    /// When the connection of an expected rank fails before that rank has joined, the job cannot become complete.
    fn fail_expected_rank(&mut self, expected_rank: Option<u32>) {
        if let Some(rank) = expected_rank {
            self.handle_disconnect(rank);
        }
    }

    /// Verifies a join request, and accepts the rank or rejects it.
    fn handle_join_request(&mut self, mut connection: UnauthenticatedConnection, message: &JoinMessage) {
        let transcript =
            Transcript::verify_join_request(&self.secret, connection.nonce, message.nonce, &message.request);
        let reject = |stream: &mut Stream, response: [u8; RESPONSE_BYTES]| {
            // A rejected peer may have disconnected already; that changes nothing here.
            drop(stream.write(&response));
        };
        let Some(transcript) = transcript else {
            self.rejections.wrong_secret += 1;
            reject(&mut connection.stream, [0; RESPONSE_BYTES]);
            return self.fail_expected_rank(connection.expected_rank);
        };
        if transcript.size != self.size {
            self.rejections.wrong_size += 1;
            let response = JoinResponse::SizeMismatch(self.size);
            reject(&mut connection.stream, transcript.join_response(&self.secret, response));
            return self.fail_expected_rank(connection.expected_rank);
        }
        // On a connection that this process created, only the expected rank may join. On an accepted connection, any
        // rank but 0 may: rank 0 is in this process.
        let rank = transcript.rank;
        let allowed = connection.expected_rank.map_or(rank != 0, |expected| rank == expected);
        let state = self.ranks.get_mut(rank as usize).filter(|_| allowed);
        let Some(state @ RankState::NotJoined) = state else {
            self.rejections.wrong_rank += 1;
            let response = JoinResponse::DuplicateRank;
            reject(&mut connection.stream, transcript.join_response(&self.secret, response));
            return self.fail_expected_rank(connection.expected_rank);
        };
        let (encoder, decoder) = transcript.coordinator_codec(&self.secret, self.limits.max_message);
        let mut joined =
            RankConnection { stream: connection.stream, encoder, decoder, outgoing: VecDeque::new() };
        joined.queue_bytes(transcript.join_response(&self.secret, JoinResponse::Accepted));
        if let State::Failed(error) = &self.state {
            joined.queue_frame(ABORT, abort::encode(error).unwrap_or_default().into());
        }
        *state = RankState::Joined(Box::new(joined));
        if matches!(self.state, State::Joining { .. })
            && self.ranks.iter().all(|state| matches!(state, RankState::Joined(_)))
        {
            self.state = State::Idle;
            let empty: Arc<[u8]> = Arc::from([]);
            self.send_to_all(|_| (Operation::Join as u8, empty.clone()));
        } else {
            self.write_to(rank);
        }
    }

    // --- ranks that have joined ---

    fn serve_ranks(&mut self, ready: &Ready) {
        for (rank, events) in &ready.ranks {
            let rank = u32::try_from(*rank).expect("built from a u32");
            if events.contains(PollFlags::OUT) {
                self.write_to(rank);
            }
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                self.read_from(rank);
            }
        }
    }

    fn read_from(&mut self, rank: u32) {
        let mut buffer = std::mem::take(&mut self.read_buffer);
        let mut total = 0;
        while total < MAX_READ_BYTES {
            let RankState::Joined(connection) = &mut self.ranks[rank as usize] else { break };
            match connection.stream.read(&mut buffer) {
                Ok(0) => self.handle_disconnect(rank),
                Ok(count) => {
                    total += count;
                    connection.decoder.extend(&buffer[..count]);
                    self.handle_frames(rank);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) => break,
                Err(_) => self.handle_disconnect(rank),
            }
        }
        self.read_buffer = buffer;
    }

    fn handle_frames(&mut self, rank: u32) {
        while let RankState::Joined(connection) = &mut self.ranks[rank as usize] {
            match connection.decoder.next() {
                Ok(None) => return,
                Ok(Some(frame)) => self.handle_contribution(rank, frame),
                Err(violation) => return self.handle_violation(rank, violation),
            }
        }
    }

    fn handle_contribution(&mut self, rank: u32, frame: Frame) {
        let Some(operation) = Operation::from_wire(frame.kind) else {
            return self.handle_violation(rank, Violation::Kind);
        };
        if matches!(self.state, State::Idle) {
            let deadline = Instant::now() + self.limits.operation_timeout;
            self.state =
                State::Collective { collective: Collective::new(operation, rank, self.size), deadline };
        }
        let collective = match &mut self.state {
            State::Collective { collective, .. } => collective,
            // The rank sent this frame before it read the abort that is on its way to it.
            State::Failed(_) => return,
            State::Joining { .. } | State::Idle => return self.handle_violation(rank, Violation::Kind),
        };
        match collective.add(rank, operation, frame.payload, &self.limits) {
            Ok(false) => {}
            Ok(true) => {
                let State::Collective { collective, .. } = std::mem::replace(&mut self.state, State::Idle)
                else {
                    return;
                };
                match collective.into_results(&self.limits) {
                    Ok(results) => self.send_to_all(|rank| (operation as u8, results[rank].clone())),
                    Err(error) => self.fail_job(error, None),
                }
            }
            Err(Error::Protocol { rank, violation }) => self.handle_violation(rank, violation),
            Err(error) => self.fail_job(error, None),
        }
    }

    /// Ends the job because `rank` violated the protocol, and closes its connection.
    fn handle_violation(&mut self, rank: u32, violation: Violation) {
        self.fail_job(Error::Protocol { rank, violation }, None);
        self.ranks[rank as usize] = RankState::Left;
    }

    /// Ends the job because the connection of `rank` closed or broke.
    fn handle_disconnect(&mut self, rank: u32) {
        self.ranks[rank as usize] = RankState::Left;
        self.fail_job(Error::RankDisconnected { rank }, Some(rank));
    }

    /// Sends the cause of the failure to all ranks but `except`. Does nothing when the job has failed before.
    fn fail_job(&mut self, error: Error, except: Option<u32>) {
        if matches!(self.state, State::Failed(_)) {
            return;
        }
        let payload: Arc<[u8]> = abort::encode(&error).unwrap_or_default().into();
        self.state = State::Failed(error);
        for rank in (0..self.size).rev() {
            if Some(rank) == except {
                continue;
            }
            if let RankState::Joined(connection) = &mut self.ranks[rank as usize] {
                connection.queue_frame(ABORT, payload.clone());
                self.write_to(rank);
            }
        }
    }

    fn send_to_all(&mut self, mut frame: impl FnMut(usize) -> (u8, Arc<[u8]>)) {
        for rank in 0..self.ranks.len() {
            if let RankState::Joined(connection) = &mut self.ranks[rank] {
                let (kind, payload) = frame(rank);
                connection.queue_frame(kind, payload);
            }
        }
        // Rank 0 last: once it has its result it may end this process, and what is not written by then is lost.
        for rank in (0..self.size).rev() {
            self.write_to(rank);
        }
    }

    fn write_to(&mut self, rank: u32) {
        if let RankState::Joined(connection) = &mut self.ranks[rank as usize]
            && connection.write_queued().is_err()
        {
            self.handle_disconnect(rank);
        }
    }

    /// Writes what is still queued, for at most [`FLUSH_TIMEOUT`], and closes all connections.
    fn flush_and_close(mut self) {
        self.listener = None;
        self.unauthenticated.clear();
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let mut connections: Vec<Box<RankConnection>> =
            self.ranks.into_iter().filter_map(RankState::into_connection).collect();
        loop {
            connections.retain_mut(|connection| {
                connection.write_queued().is_ok() && !connection.outgoing.is_empty()
            });
            let left = deadline.saturating_duration_since(Instant::now());
            if connections.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<_> = connections
                .iter()
                .map(|connection| PollFd::new(&connection.stream, PollFlags::OUT))
                .collect();
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

impl RankState {
    fn into_connection(self) -> Option<Box<RankConnection>> {
        match self {
            RankState::Joined(connection) => Some(connection),
            RankState::NotJoined | RankState::Left => None,
        }
    }
}

/// The sockets that poll reported as ready.
#[derive(Default)]
struct Ready {
    ranks: Vec<(usize, PollFlags)>,
    unauthenticated: Vec<bool>,
    listener: bool,
}

impl std::fmt::Display for Rejections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        for (count, cause) in [
            (self.wrong_secret, "a wrong secret"),
            (self.wrong_rank, "a rank that has already joined or does not exist"),
            (self.wrong_size, "a different number of ranks"),
        ] {
            if count > 0 {
                parts.push(format!("{count} rejected for {cause}"));
            }
        }
        f.write_str(&parts.join(", "))
    }
}

/// The handle of the coordinator's thread. Dropping it waits for the thread, which ends after rank 0's connection closes.
pub(super) struct CoordinatorThread(Option<OwnThread>);

impl CoordinatorThread {
    /// Runs `body` in the coordinator's thread.
    pub(super) fn start(body: impl FnOnce() + Send + 'static) -> Result<Self> {
        let thread = std::thread::Builder::new().name("crosstie-coordinator".into()).spawn(body);
        let thread = thread.map_err(|error| Error::io("starting the coordinator's thread", &error))?;
        Ok(CoordinatorThread(Some(thread.into())))
    }
}

impl Drop for CoordinatorThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // If it panicked, the ranks have seen their connections close.
            thread.join();
        }
    }
}
