//! The control plane: who is there, over TCP, in one thread.
//!
//! Membership is static: every node knows the address of every other. Of two nodes, the one of higher rank dials, again and
//! again until it is heard; see [`pair`] for what they say then. A node that cannot prove the secret is refused before
//! anything of it is read. Whoever dials as a rank takes the place of who had it: a node that was restarted is heard at once, also
//! where its predecessor's death was not noticed yet.

mod pair;

use std::collections::VecDeque;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie::bootstrap::channel::{Channel, ChannelEvent};
use crosstie::bootstrap::limits::HANDSHAKE_TIMEOUT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::config::Membership;
use super::network::{Command, Event};
use super::{NodeConfig, Shared};
use crate::Backend;
use pair::{Hello, MAX_FRAME, Pair, Step};

/// Connections that have not proved the secret, at one time. The oldest gives way to the newest.
const MAX_STRANGERS: usize = 64;
/// Time between two signs of life.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);
/// How long to leave the listener alone after it failed (usually: no file descriptor left).
const LISTENER_REST: Duration = Duration::from_millis(100);
/// Commands on their way to a daemon, at most: a few for each rank.
pub(super) const MAX_COMMANDS: usize = 4096;

/// What the secret is used for; see [`Secret::derive`].
const PURPOSE: &str = "crosstie-kv control 1";

pub(super) struct Control {
    hello: Hello,
    secret: Secret,
    listener: TcpListener,
    listener_rests_until: Option<Instant>,
    addresses: Vec<SocketAddr>,
    strangers: VecDeque<(Channel, Instant)>,
    /// By rank; the one of our own rank is never used.
    pairs: Vec<Pair>,
    /// By daemon.
    commands: Vec<SyncSender<Command>>,
    events: Receiver<Event>,
    /// Readable when there are events, or when it is time to stop.
    bell: UnixStream,
    shared: Arc<Shared>,
    next_beat: Instant,
}

impl Control {
    pub(super) fn new(
        config: &NodeConfig,
        membership: Membership,
        commands: Vec<SyncSender<Command>>,
        events: Receiver<Event>,
        bell: UnixStream,
        shared: Arc<Shared>,
    ) -> std::io::Result<Control> {
        membership.listener.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        let &NodeConfig { rank, nodes, daemons, backend, .. } = config;
        let incarnation = shared.incarnation;
        Ok(Control {
            hello: Hello { incarnation, rank, nodes, daemons, backend, reserved: [0; 3] },
            secret: membership.secret.derive(PURPOSE),
            listener: membership.listener,
            listener_rests_until: None,
            addresses: membership.addresses,
            strangers: VecDeque::new(),
            pairs: (0..nodes).map(|other| Pair::new(other, rank > other)).collect(),
            commands,
            events,
            bell,
            shared,
            next_beat: Instant::now() + BEAT_INTERVAL,
        })
    }

    /// Until the node stops.
    pub(super) fn run(mut self) {
        while !self.shared.is_stopping() {
            self.wait();
            self.take_events();
            self.accept();
            self.judge_strangers();
            self.dial();
            for rank in 0..self.pairs.len() {
                let step = self.pairs[rank].advance(&self.hello);
                self.follow(rank, step);
            }
            self.beat();
        }
    }

    fn wait(&mut self) {
        let now = Instant::now();
        let dials = self.pairs.iter().filter_map(|pair| pair.dial_at);
        let strangers = self.strangers.iter().map(|(_, until)| *until);
        let next = dials.chain(strangers).chain(self.listener_rests_until).min();
        let next = next.map_or(self.next_beat, |next| next.min(self.next_beat));
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        if self.listener_rests_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let channels = self.pairs.iter().filter_map(|pair| pair.channel.as_ref());
        for channel in channels.chain(self.strangers.iter().map(|(channel, _)| channel)) {
            let writes = if channel.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::new(channel, PollFlags::IN | writes));
        }
        let timeout = Timespec::try_from(next.saturating_duration_since(now)).ok();
        if poll(&mut fds, timeout.as_ref()).is_err_and(|errno| errno != rustix::io::Errno::INTR) {
            // Without poll there is still time.
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(fds);
        let mut rings = [0; 64];
        // What rang is looked at in any case.
        while self.bell.read(&mut rings).is_ok_and(|count| count == rings.len()) {}
    }

    fn take_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            let (Event::Opened { rank, epoch, .. }
            | Event::Connected { rank, epoch }
            | Event::Up { rank, epoch }
            | Event::Failed { rank, epoch, .. }) = event;
            let rank = rank as usize;
            let pair = &mut self.pairs[rank];
            if pair.epoch != epoch || pair.channel.is_none() {
                continue;
            }
            let step = match event {
                Event::Opened { address, .. } => pair.opened(address),
                Event::Connected { .. } => pair.connected(),
                Event::Up { .. } => {
                    pair.up();
                    let incarnation = pair.incarnation();
                    self.shared.peer_is_up(rank, incarnation);
                    None
                }
                Event::Failed { why, .. } => Some(Step::Down(why)),
            };
            self.follow(rank, step);
        }
    }

    /// Does what follows, until nothing does.
    fn follow(&mut self, rank: usize, step: Option<Step>) {
        match step {
            None => {}
            Some(Step::Down(why)) => self.down(rank, why),
            Some(Step::Command(command)) => {
                if self.command(rank, command) {
                    // There may be more to hear.
                    let step = self.pairs[rank].advance(&self.hello);
                    self.follow(rank, step);
                } else {
                    self.down(rank, "the daemon of this node does not listen".to_owned());
                }
            }
        }
    }

    fn command(&self, rank: usize, command: Command) -> bool {
        let holder = Backend::connection_owner(self.hello.backend, rank as u32, self.hello.daemons);
        self.commands[holder as usize].try_send(command).is_ok()
    }

    fn down(&mut self, rank: usize, why: String) {
        let epoch = self.pairs[rank].epoch;
        self.pairs[rank].end(self.hello.rank as usize > rank);
        self.shared.peer_is_down(rank, why);
        // A daemon that does not listen is about to end, and its connections with it.
        self.command(rank, Command::Close { rank: rank as u32, epoch });
    }

    fn accept(&mut self) {
        let now = Instant::now();
        if self.listener_rests_until.is_some_and(|until| until > now) {
            return;
        }
        self.listener_rests_until = None;
        // As many as may be strangers at a time, so that a flood of them does not keep us here.
        for _ in 0..MAX_STRANGERS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.strangers.len() == MAX_STRANGERS {
                        self.strangers.pop_front();
                    }
                    // One that is broken already concerns nobody else.
                    if let Ok(channel) = Channel::from_accepted(stream, &self.secret, MAX_FRAME) {
                        self.strangers.push_back((channel, now + HANDSHAKE_TIMEOUT));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.listener_rests_until = Some(now + LISTENER_REST);
                    return;
                }
            }
        }
    }

    fn judge_strangers(&mut self) {
        let now = Instant::now();
        for (mut channel, until) in std::mem::take(&mut self.strangers) {
            match channel.poll_event() {
                Ok(Some(ChannelEvent::JoinRequest { rank, size })) => self.judge(channel, rank, size),
                Ok(None) if until > now => self.strangers.push_back((channel, until)),
                Ok(_) => {}
                Err(_) => self.shared.count_refusal(),
            }
        }
    }

    fn judge(&mut self, mut channel: Channel, rank: u32, size: u32) {
        if size != self.hello.nodes {
            self.shared.count_refusal();
            return channel.reject_size(self.hello.nodes);
        }
        // Lower ranks are dialled, they do not dial.
        if rank <= self.hello.rank || rank >= size {
            self.shared.count_refusal();
            return channel.reject_rank();
        }
        if channel.accept_join().is_err() {
            return;
        }
        let rank = rank as usize;
        if self.pairs[rank].channel.is_some() {
            self.down(rank, "it has come back".to_owned());
        }
        self.pairs[rank].begin(channel);
        let step = self.pairs[rank].greet(&self.hello);
        self.follow(rank, step);
    }

    fn dial(&mut self) {
        let now = Instant::now();
        for rank in 0..self.pairs.len() {
            if self.pairs[rank].dial_at.is_none_or(|at| at > now) {
                continue;
            }
            let Hello { rank: ours, nodes, .. } = self.hello;
            match Channel::connect(self.addresses[rank], ours, nodes, &self.secret, MAX_FRAME) {
                Ok(channel) => self.pairs[rank].begin(channel),
                Err(error) => self.down(rank, error.to_string()),
            }
        }
    }

    fn beat(&mut self) {
        let now = Instant::now();
        if now < self.next_beat {
            return;
        }
        self.next_beat = now + BEAT_INTERVAL;
        for rank in 0..self.pairs.len() {
            let step = self.pairs[rank].beat();
            self.follow(rank, step);
        }
    }
}
