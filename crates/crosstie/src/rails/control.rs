//! The control thread of a connection: it exchanges frames with the peer, builds rails again, and notices that the peer ends.
//! It sleeps while nothing happens.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::rails::MAX_RAILS;
use rustix::event::{PollFd, PollFlags};

use super::agreement::{Agreement, EndpointAddress, Role};
use super::connections::Core;
use super::context::Context;
use super::endpoint::{Endpoint, PROBE};
use super::error::Cause;
use super::frames::Frame;
use super::mailbox::{Mail, Mailbox, Order};
use crate::bootstrap::channel::{Channel, ChannelError, ChannelEvent};

/// How often the acknowledgement of a probe is looked for.
const PROBE_POLL: Duration = Duration::from_millis(1);
/// How often a port that is down is looked at.
const PORT_POLL: Duration = Duration::from_millis(20);
/// How long a connection that was closed here stays open, for the last frame to leave and for what the peer still sends.
const LINGER: Duration = Duration::from_secs(1);
/// How many frames of a peer that is gone are read for its last one: more than the kernel keeps.
const LAST_FRAMES: usize = 1 << 17;
/// How long the receiver may take to accept an offered endpoint.
const OFFER_TIMEOUT: Duration = Duration::from_secs(10);

/// A rail that is built again.
enum Rebuild {
    Waiting { at: Instant },
    Offered { endpoint: Box<Endpoint>, deadline: Instant },
    Probing { endpoint: Box<Endpoint>, left: usize, deadline: Instant },
}

/// The state of the control thread.
pub(super) struct Control {
    context: Arc<Context>,
    mailbox: Arc<Mailbox>,
    channel: Channel,
    role: Role,
    agreed: Agreement,
    rebuilds: [Option<(Rebuild, u32, Duration)>; MAX_RAILS],
    /// Receiver: endpoints that the sender has not confirmed yet.
    accepted: [Option<Box<Endpoint>>; MAX_RAILS],
}

/// Why the thread ends.
enum End {
    Closed,
    PeerClosed { next: u64, open: Vec<u64> },
    Cause(Cause),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> End {
        End::Cause(Cause::PeerGone)
    }
}

impl From<ChannelError> for End {
    fn from(error: ChannelError) -> End {
        match error {
            // Somebody on the network has changed a frame, or the peer is no crosstie.
            ChannelError::Violation(violation) => End::Cause(Cause::PeerError(violation.to_string())),
            _ => End::Cause(Cause::PeerGone),
        }
    }
}

impl Control {
    pub(super) fn new(
        context: Arc<Context>,
        mailbox: Arc<Mailbox>,
        channel: Channel,
        role: Role,
        agreed: Agreement,
    ) -> Control {
        Control {
            context,
            mailbox,
            channel,
            role,
            agreed,
            rebuilds: Default::default(),
            accepted: Default::default(),
        }
    }

    /// Runs until the connection ends.
    pub(super) fn run(mut self, core: &Core) {
        let end = match self.serve(core) {
            Ok(never) => match never {},
            Err(End::Cause(Cause::PeerGone)) => self.read_last_frame(),
            Err(end) => end,
        };
        let mail = match end {
            End::Closed => None,
            End::PeerClosed { next, open } => Some(Mail::PeerClosed { next, open }),
            End::Cause(cause) => {
                if let Cause::Violation(violation) = &cause {
                    self.send(&Frame::Error(violation.to_string())).ok();
                }
                Some(Mail::Ended(cause))
            }
        };
        self.mailbox.set_ended();
        match mail {
            None => {
                // A socket that is closed with unread bytes would tell the peer that bytes were lost, and the peer might not get the
                // last frame.
                rustix::net::shutdown(&self.channel, rustix::net::Shutdown::Write).ok();
                self.linger(|_| false);
            }
            Some(mail) => {
                self.mailbox.put_mail(mail);
                // Ends all requests, and frees what the connection holds, also if the program does not call any more.
                while let Some(again) = core.attend() {
                    std::thread::sleep(again);
                }
            }
        }
    }

    /// The peer is gone: a frame could not be sent, or the stream has ended. Perhaps it said why: a peer may close the connection
    /// and exit while frames to it are under way, and what it sent before that can still be read.
    fn read_last_frame(&mut self) -> End {
        for _ in 0..LAST_FRAMES {
            match self.take_frame() {
                Ok(Some(Frame::Close { next, open })) => return End::PeerClosed { next, open },
                Ok(Some(Frame::Error(text))) => return End::Cause(Cause::PeerError(text)),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        End::Cause(Cause::PeerGone)
    }

    /// The connection was not wanted: ends without a word.
    pub(super) fn give_up(&self) {
        self.mailbox.set_ended();
    }

    /// Writes what is left, and reads what the peer still sends, until `is_done` or the connection has ended, for a limited time.
    fn linger(&mut self, is_done: impl Fn(&Channel) -> bool) {
        let deadline = Instant::now() + LINGER;
        while !is_done(&self.channel) {
            let left = deadline.saturating_duration_since(Instant::now());
            let polled = self.channel.poll_event();
            let is_over = match polled {
                Ok(Some(_)) => left.is_zero(),
                Ok(None) => left.is_zero() || wait(&self.channel, None, Some(left)).is_err(),
                Err(_) => true,
            };
            if is_over {
                return;
            }
        }
    }

    fn serve(&mut self, core: &Core) -> Result<core::convert::Infallible, End> {
        let mut needs_attention = false;
        loop {
            // First: frames may have come together with the last one of the handshake.
            while let Some(frame) = self.take_frame()? {
                self.handle(frame)?;
            }
            let mut timeout = self.advance_rebuilds(Instant::now())?;
            if self.mailbox.take_unattended() || needs_attention {
                let again = core.attend();
                needs_attention = again.is_some();
                timeout = timeout.into_iter().chain(again).min();
            }
            if wait(&self.channel, Some(&self.mailbox), timeout)? {
                for order in self.mailbox.take_orders() {
                    self.obey(order)?;
                }
            }
        }
    }

    fn send(&mut self, frame: &Frame) -> Result<(), End> {
        Ok(frame.send(&mut self.channel)?)
    }

    fn obey(&mut self, order: Order) -> Result<(), End> {
        match order {
            Order::Send(frame) => self.send(&frame),
            Order::Rebuild { rail, epoch } => {
                let pause = self.context.config.rebuild_pause.0;
                self.rebuilds[rail] = Some((Rebuild::Waiting { at: Instant::now() + pause }, epoch, pause));
                Ok(())
            }
            Order::Close(last) => {
                // If the peer is gone, it needs no last frame.
                if self.send(&last).is_ok() {
                    self.linger(|channel| !channel.wants_write());
                }
                Err(End::Closed)
            }
        }
    }

    /// The next frame that has arrived completely.
    fn take_frame(&mut self) -> Result<Option<Frame>, End> {
        let frame = match self.channel.poll_event()? {
            None => return Ok(None),
            Some(ChannelEvent::Frame { kind, payload }) => Frame::decode(kind, &payload),
            Some(_) => None,
        };
        match frame {
            Some(frame) => Ok(Some(frame)),
            None => Err(End::Cause(Cause::PeerError("it sent an invalid frame".into()))),
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), End> {
        let unexpected = || End::Cause(Cause::PeerError("it sent a frame that was not due".into()));
        match (frame, self.role) {
            (Frame::Close { next, open }, _) => Err(End::PeerClosed { next, open }),
            (Frame::Error(text), _) => Err(End::Cause(Cause::PeerError(text))),
            (Frame::RailError { rail, epoch }, Role::Sender) => {
                self.mailbox.put_mail(Mail::RailError { rail, epoch });
                Ok(())
            }
            (Frame::Fence { rail, epoch, next, entries }, Role::Receiver) => {
                self.mailbox.put_mail(Mail::Fence { rail, epoch, next, entries });
                Ok(())
            }
            (Frame::Answer { rail, epoch, entries }, Role::Sender) => {
                self.mailbox.put_mail(Mail::Answer { rail, epoch, entries });
                Ok(())
            }
            (Frame::Offer { rail, epoch, endpoint }, Role::Receiver)
                if rail < self.agreed.rails && endpoint.qps.len() == self.agreed.data_qps =>
            {
                let made = self.accept_offer(rail, epoch, &endpoint);
                self.accepted[rail] = made;
                let endpoint = self.accepted[rail].as_ref().map(|endpoint| endpoint.address());
                self.send(&Frame::Accept { rail, epoch, endpoint })
            }
            (Frame::Accept { rail, epoch, endpoint }, Role::Sender) if rail < self.agreed.rails => {
                self.continue_offer(rail, epoch, endpoint);
                Ok(())
            }
            (Frame::Return { rail, epoch }, Role::Receiver) => {
                if let Some(endpoint) = self.accepted[rail].take_if(|endpoint| endpoint.epoch == epoch) {
                    self.mailbox.put_mail(Mail::Returned { rail, endpoint });
                }
                Ok(())
            }
            _ => Err(unexpected()),
        }
    }

    /// Receiver: creates its end of a new endpoint and connects it. `None` if the rail does not work yet.
    fn accept_offer(&self, rail: usize, epoch: u32, peer: &EndpointAddress) -> Option<Box<Endpoint>> {
        if self.context.is_port_down(rail) {
            return None;
        }
        let mut endpoint = Endpoint::create(&self.context, rail, self.role, &self.agreed, epoch).ok()?;
        endpoint.connect(peer, &self.context).ok()?;
        Some(Box::new(endpoint))
    }

    /// Sender: the receiver has accepted or refused an offered endpoint.
    fn continue_offer(&mut self, rail: usize, epoch: u32, peer: Option<EndpointAddress>) {
        let now = Instant::now();
        let Some((rebuild, expected, pause)) = self.rebuilds[rail].take() else { return };
        let (Rebuild::Offered { mut endpoint, .. }, true) = (rebuild, epoch == expected) else {
            // An answer to an offer that was given up. The next offer has another epoch.
            let waiting = Rebuild::Waiting { at: now + pause };
            self.rebuilds[rail] = Some((waiting, expected.wrapping_add(1), pause));
            return;
        };
        let count = self.agreed.data_qps;
        let connected = peer.is_some_and(|peer| {
            peer.qps.len() == count
                && endpoint.connect(&peer, &self.context).is_ok()
                && (0..count).all(|qp| endpoint.post_probe(qp).is_ok())
        });
        self.rebuilds[rail] = Some(if connected {
            let deadline = now + self.context.config.probe_timeout;
            (Rebuild::Probing { endpoint, left: count, deadline }, epoch, pause)
        } else {
            self.pause_rebuild(now, epoch, pause)
        });
    }

    /// An attempt failed: wait longer before the next.
    fn pause_rebuild(&self, now: Instant, epoch: u32, pause: Duration) -> (Rebuild, u32, Duration) {
        let pause = (2 * pause).min(self.context.config.rebuild_pause.1);
        (Rebuild::Waiting { at: now + pause }, epoch.wrapping_add(1), pause)
    }

    /// Does what is due for the rails that are built again. Returns when to do it again.
    fn advance_rebuilds(&mut self, now: Instant) -> Result<Option<Duration>, End> {
        let mut next: Option<Duration> = None;
        let mut at_latest = |after: Duration| next = Some(next.map_or(after, |next| next.min(after)));
        for rail in 0..MAX_RAILS {
            let Some((rebuild, epoch, pause)) = self.rebuilds[rail].take() else { continue };
            self.rebuilds[rail] = match rebuild {
                Rebuild::Waiting { at } if at > now => {
                    at_latest(at - now);
                    Some((Rebuild::Waiting { at }, epoch, pause))
                }
                Rebuild::Waiting { .. } if self.context.is_port_down(rail) => {
                    at_latest(PORT_POLL);
                    Some((Rebuild::Waiting { at: now + PORT_POLL }, epoch, pause))
                }
                Rebuild::Waiting { .. } => {
                    match Endpoint::create(&self.context, rail, self.role, &self.agreed, epoch) {
                        Ok(endpoint) => {
                            self.send(&Frame::Offer { rail, epoch, endpoint: endpoint.address() })?;
                            at_latest(OFFER_TIMEOUT);
                            let deadline = now + OFFER_TIMEOUT;
                            Some((Rebuild::Offered { endpoint: Box::new(endpoint), deadline }, epoch, pause))
                        }
                        Err(_) => {
                            let paused = self.pause_rebuild(now, epoch, pause);
                            at_latest(paused.2);
                            Some(paused)
                        }
                    }
                }
                Rebuild::Offered { endpoint, deadline } if deadline > now => {
                    at_latest(deadline - now);
                    Some((Rebuild::Offered { endpoint, deadline }, epoch, pause))
                }
                Rebuild::Probing { mut endpoint, mut left, deadline } => {
                    let mut failed = false;
                    let polled = endpoint.poll(|completion| {
                        failed |= !completion.status.is_success();
                        left -= usize::from(completion.wr_id == PROBE && left > 0);
                    });
                    if failed || polled.is_err() || (left > 0 && now >= deadline) {
                        let paused = self.pause_rebuild(now, epoch, pause);
                        at_latest(paused.2);
                        Some(paused)
                    } else if left == 0 {
                        self.send(&Frame::Return { rail, epoch })?;
                        self.mailbox.put_mail(Mail::Returned { rail, endpoint });
                        None
                    } else {
                        at_latest(PROBE_POLL);
                        Some((Rebuild::Probing { endpoint, left, deadline }, epoch, pause))
                    }
                }
                Rebuild::Offered { .. } => {
                    let paused = self.pause_rebuild(now, epoch, pause);
                    at_latest(paused.2);
                    Some(paused)
                }
            };
        }
        Ok(next)
    }
}

/// Waits until something has arrived, or there is room for what is to be written, or there is an order. Returns whether there is an order.
pub(super) fn wait(
    channel: &Channel,
    mailbox: Option<&Mailbox>,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let timeout = timeout.map(|timeout| rustix::time::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let write = if channel.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
    let channel = PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN | write);
    let woken = match mailbox {
        Some(mailbox) => {
            let mut fds = [channel, PollFd::from_borrowed_fd(mailbox.wake_fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, timeout.as_ref()).map(|_| !fds[1].revents().is_empty())
        }
        None => rustix::event::poll(&mut [channel], timeout.as_ref()).map(|_| false),
    };
    match woken {
        Err(rustix::io::Errno::INTR) => Ok(false),
        woken => Ok(woken?),
    }
}
