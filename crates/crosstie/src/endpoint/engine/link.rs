//! One connection of an endpoint: its queue pairs, and its begin, end and drain.
//!
//! ```text
//!   channels        0 .. n-1                        n .. 2n-1
//!                   transfers: READ, WRITE,         messages, all WRITE+IMM: control messages
//!                   WRITE+IMM of the program        on channel n, parts of messages on all of them
//!   receives        imm_window + 1 on each          2 x messages + 22 on channel n, messages + 1 on the others
//!   queue           one completion queue for all
//! ```
//!
//! The receives are posted before the connection begins, and each is posted again before what it brought is handed on. The peer has
//! credit for fewer messages than that, so it never finds a receive queue empty (invariant I5).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::endpoint::imm_matching::{ImmEvent, ImmMatching};
use crosstie_protocol::endpoint::imm_window::{ImmReceiver, ImmSender};
use crosstie_protocol::endpoint::message::{
    ArrivedParts, CONTROL_SIZE, Control, MAX_CONTROL_PIECES, MAX_WITHDRAWALS, control_imm,
};
use crosstie_protocol::endpoint::pairing::Pairing;
use crosstie_protocol::endpoint::send_queue::SendQueue;
use crosstie_protocol::endpoint::slots::{SlotKey, Slots};
use crosstie_protocol::endpoint::wr_id::{WorkKind, WrId};
use crosstie_protocol::signaling::Signaling;

use super::super::address::EndpointAddress;
use super::super::cause::{Cause, ConnectError, Peer};
use super::super::config::{EndpointConfig, MAX_MESSAGES, SEND_DEPTH};
use super::super::operation::Op;
use super::super::path::{Path, provider_name};
use super::channel::{CONTROL, Channel, SIGNAL_INTERVAL};
use super::posting::Queues;
use super::shared::Shared;
use super::slot::SlotWork;
use super::taken::{POLL_BATCH, TakenCompletions};
use super::unclaimed::Unclaimed;
use crate::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, Device, DeviceError, Mr, Pd, PostError, QpConfig, QpState,
    RecvWr, RemoteAddr, SendOp, SendWr, Status,
};

/// Receives for control messages besides announced buffers: credit, the end of the connection, and withdrawals of both sides.
const SPARE_RECEIVES: u16 = 6 + 2 * MAX_WITHDRAWALS;
/// Where control messages begin in the memory for them. Before that is what the peer READs.
const CONTROLS_AT: usize = 64;
/// Longest wait for the completions of queue pairs in ERR. After it they are reset.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// How often a silent peer that operations wait for is probed.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// How many receives a side with this limit of announced buffers keeps posted for control messages and for the messages on the same channel.
/// It has as many pieces of memory for control messages, which are used in turn.
///
/// **No piece is written again before its control message has been read.** At any time at most `messages` + 4 + 2 x [`MAX_WITHDRAWALS`] control
/// messages are sent and not read, fewer than there are pieces:
///
/// - at most `messages` buffers: each holds a slot of its `recv` until its message arrives, or the peer answers that it is withdrawn; the peer
///   does either when it has read of the buffer;
/// - at most [`MAX_WITHDRAWALS`] withdrawals: one more is made when the peer has answered one; and as many answers, since the peer keeps to the
///   same limit;
/// - at most three times credit for immediates: each is for half of the window at least (or for one, if the window is smaller than four), and
///   the peer sends no immediate without credit that it has read (tested in `imm_window.rs`);
/// - one end of the connection, after which nothing is sent.
///
/// Control messages are read in their order, from a private copy that is made before anything is done with it: before its receive is posted
/// again, and before it makes the peer do what lets this side send another one. The order of one queue pair keeps a later WRITE from passing an
/// earlier one. A peer that breaks these rules damages its own control messages, no more.
fn control_pieces(messages: u16) -> u16 {
    2 * messages + SPARE_RECEIVES
}

const _: () = assert!(2 * MAX_MESSAGES + SPARE_RECEIVES <= MAX_CONTROL_PIECES);
const _: () = assert!(SEND_DEPTH >= Signaling::<SIGNAL_INTERVAL>::MIN_DEPTH);

pub(super) fn peer_of(address: &EndpointAddress) -> Peer {
    Peer(address.queue_pairs[0])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Connected,
    /// Ended, and not drained: the device may still touch memory.
    Ended(Cause, Instant),
    Drained(Cause),
}

/// A `recv` that the peer knows of.
#[derive(Default)]
pub(super) struct AnnouncedRecv {
    /// `None` when the message has arrived.
    pub(super) op: Option<Op>,
    pub(super) parts: ArrivedParts,
    pub(super) limit: u64,
    /// The number of its message.
    pub(super) sequence: u32,
    /// Whether the peer was asked to withdraw the buffer.
    pub(super) is_withdrawn: bool,
}

pub(in crate::endpoint) struct Link {
    // Queue pairs are dropped first, then the queue, then memory.
    pub(super) queues: Queues,
    pub(super) cq: Cq,
    /// A word that the peer may READ, and where its control messages arrive: one piece for each receive of channel n.
    control: Mr,
    /// Where a READ of the peer's word goes.
    probed: Mr,
    /// The peer's piece for the next control message, and how many it has: see [`control_pieces`].
    next_piece: u16,
    peer_pieces: u16,
    next_probe: Instant,
    /// Whether anything arrived since the last probe.
    pub(super) has_received: bool,
    state: State,
    address: EndpointAddress,
    pub(super) peer: Option<EndpointAddress>,
    /// The channel of the next transfer.
    pub(super) next_channel: usize,
    pub(super) min_part: u64,
    pub(super) max_message: u64,
    pub(super) completions: TakenCompletions,
    /// Whether receives are counted, to notice an empty receive queue: fewer completions than `fewest_receives` that were taken together cannot
    /// be all receives of any queue pair. Those that were taken one batch after the other say nothing, because receives were posted again in between.
    pub(super) counts_receives: bool,
    pub(super) fewest_receives: usize,
    pub(super) slots: Slots,
    pub(super) work: Box<[Option<SlotWork>]>,
    /// Operations without a slot.
    pub(super) waiting: VecDeque<Op>,
    /// Slots with work requests that are not posted.
    pub(super) unposted: VecDeque<SlotKey>,
    pub(super) finished: Vec<SlotKey>,
    // Messages.
    pub(super) pairing: Pairing<Option<Op>>,
    pub(super) recv_slots: Slots,
    pub(super) announced: Box<[AnnouncedRecv]>,
    pub(super) waiting_recvs: VecDeque<Op>,
    pub(super) next_sequence: u32,
    pub(super) unclaimed: Unclaimed,
    // Immediates.
    pub(super) immediates: ImmMatching<Option<Op>>,
    pub(super) imm_receiver: ImmReceiver,
    pub(super) returned_events: VecDeque<ImmEvent>,
}

impl Link {
    pub(super) fn new(device: &Device, pd: &Arc<Pd>, config: &EndpointConfig) -> Result<Link, DeviceError> {
        let made = usize::from(config.qps);
        let messages = u32::from(config.messages);
        let receives = |channel: usize| match channel.cmp(&made) {
            core::cmp::Ordering::Less => config.imm_window + 1,
            core::cmp::Ordering::Equal => control_pieces(config.messages).into(),
            core::cmp::Ordering::Greater => messages + 1,
        };
        let depth = (0..2 * made).map(|channel| SEND_DEPTH + receives(channel)).sum();
        let cq = device.create_cq(&CqConfig { depth })?;
        let max_pieces = device.attr().max_sge.clamp(1, 8);
        let mut channels = Vec::with_capacity(2 * made);
        for channel in 0..2 * made {
            let qp_config = QpConfig {
                max_send_wr: SEND_DEPTH,
                max_recv_wr: receives(channel),
                max_send_sge: max_pieces,
                max_recv_sge: 1,
                max_inline: if channel >= made { CONTROL_SIZE as u32 } else { 0 },
            };
            channels.push(Channel {
                qp: pd.create_rc(&qp_config, &cq, &cq, None)?,
                sends: SendQueue::new(SEND_DEPTH as usize),
                receives: receives(channel),
                used_receives: 0,
            });
        }
        let fewest_receives = channels.iter().map(|channel| channel.receives as usize).min();
        let fewest_receives = fewest_receives.unwrap_or(0);
        let operations = config.operations as usize;
        let slots = Slots::new(usize::from(config.slots));
        let control = pd.allocate(
            CONTROLS_AT + usize::from(control_pieces(config.messages)) * CONTROL_SIZE,
            Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
        )?;
        let address = EndpointAddress {
            messages: config.messages,
            imm_window: config.imm_window,
            control: control.remote().at(0),
            queue_pairs: channels.iter().map(|channel| channel.qp.address()).collect(),
        };
        Ok(Link {
            control,
            next_piece: 0,
            peer_pieces: 0,
            probed: pd.allocate(8, Access::LOCAL_WRITE)?,
            next_probe: Instant::now(),
            has_received: false,
            queues: Queues {
                channels,
                made,
                qps: made,
                max_pieces: max_pieces as usize,
                imm_sender: ImmSender::new(0),
            },
            cq,
            state: State::Open,
            address,
            peer: None,
            next_channel: 0,
            min_part: config.min_part.max(1) as u64,
            max_message: device.attr().max_message.min(u32::MAX.into()),
            completions: TakenCompletions::new(),
            counts_receives: false,
            fewest_receives,
            work: (0..slots.len()).map(|_| None).collect(),
            waiting: VecDeque::with_capacity(operations),
            unposted: VecDeque::with_capacity(slots.len()),
            finished: Vec::with_capacity(POLL_BATCH),
            slots,
            pairing: Pairing::new(messages, operations),
            recv_slots: Slots::new(usize::from(config.messages)),
            announced: (0..config.messages).map(|_| AnnouncedRecv::default()).collect(),
            waiting_recvs: VecDeque::with_capacity(operations),
            next_sequence: 0,
            unclaimed: Unclaimed::default(),
            immediates: ImmMatching::new(config.imm_window as usize, operations),
            imm_receiver: ImmReceiver::new(config.imm_window),
            returned_events: VecDeque::new(),
        })
    }

    pub(super) fn address(&self) -> &EndpointAddress {
        &self.address
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        self.peer.as_ref().map(peer_of)
    }

    pub(super) fn path(&self) -> Option<Path> {
        let (local, peer) = (self.address.device(), self.peer.as_ref()?.device());
        Some(Path { provider: provider_name(peer.provider), local, peer, queue_pairs: self.queues.qps })
    }

    pub(super) fn connect(
        &mut self,
        peer: &EndpointAddress,
        config: &EndpointConfig,
    ) -> Result<(), ConnectError> {
        if self.state != State::Open || self.peer.is_some() {
            return Err(ConnectError::Connected);
        }
        let provider = peer.device().provider;
        if !config.path.allows(provider) {
            return Err(ConnectError::Path { found: provider_name(provider), allowed: config.path });
        }
        let theirs = peer.queue_pairs.len() / 2;
        self.queues.qps = self.queues.made.min(theirs);
        self.queues.imm_sender = ImmSender::new(peer.imm_window);
        self.peer_pieces = control_pieces(peer.messages);
        let messages = config.messages.min(peer.messages);
        self.pairing = Pairing::new(messages.into(), config.operations as usize);
        self.recv_slots = Slots::new(messages.into());
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let connect = ConnectConfig { access, ..config.connect };
        // From here on the queue pairs have left RESET, so another attempt needs new ones.
        self.peer = Some(peer.clone());
        for index in 0..self.queues.qps {
            for (mine, other) in [(index, index), (self.queues.made + index, theirs + index)] {
                self.queues.channels[mine].qp.init(access)?;
                for number in 0..self.queues.channels[mine].receives {
                    self.post_receive(mine, number as u16).map_err(|error| DeviceError::Os {
                        what: "posting a receive",
                        source: std::io::Error::other(error),
                    })?;
                }
                self.queues.channels[mine].qp.connect(&peer.queue_pairs[other], &connect)?;
            }
        }
        self.state = State::Connected;
        Ok(())
    }

    /// Posts receive number `number` of a channel.
    #[inline]
    pub(super) fn post_receive(&mut self, channel: usize, number: u16) -> Result<(), PostError> {
        let slot = SlotKey { index: number, generation: 0 };
        let wr_id = WrId { kind: WorkKind::Receive, qp: channel as u8, slot, position: 0 }.encode();
        self.queues.channels[channel].qp.post_recv(&RecvWr { wr_id, sges: &[] })
    }

    /// Whether a control message can be posted.
    #[inline]
    pub(super) fn has_control_room(&self) -> bool {
        self.queues.channels[self.queues.made].sends.room() > 0
    }

    /// Posts a control message. Nothing waits for its completion: its bytes were taken with the post.
    #[inline]
    pub(super) fn post_control(&mut self, control: &Control) -> Result<(), PostError> {
        let Some(peer) = &self.peer else { return Err(PostError::Invalid("there is no peer")) };
        let (made, piece) = (self.queues.made, self.next_piece);
        let offset = CONTROLS_AT as u64 + u64::from(piece) * CONTROL_SIZE as u64;
        let to = RemoteAddr { addr: peer.control.addr.wrapping_add(offset), ..peer.control };
        let (op, bytes) = (SendOp::WriteImm(to, control_imm(piece)), control.encode());
        self.queues.channels[made].post(made, SendWr::new(0, op, Data::Inline(&bytes)), CONTROL)?;
        self.next_piece = if piece + 1 < self.peer_pieces { piece + 1 } else { 0 };
        Ok(())
    }

    /// The control message in a piece of memory, if there is such a piece.
    pub(super) fn load_control(&self, piece: u16) -> Option<[u8; CONTROL_SIZE]> {
        self.control.load(CONTROLS_AT + usize::from(piece) * CONTROL_SIZE).ok()
    }

    /// Why nothing can be started; `None` while connected.
    #[inline]
    pub(super) fn refusal(&self) -> Option<Cause> {
        match self.state {
            State::Connected => None,
            State::Open => Some(Cause::Closed),
            State::Ended(cause, _) | State::Drained(cause) => Some(cause),
        }
    }

    #[inline]
    pub(super) fn is_connected(&self) -> bool {
        matches!(self.state, State::Connected)
    }

    pub(super) fn is_drained(&self) -> bool {
        matches!(self.state, State::Open | State::Drained(_))
    }

    pub(super) fn is_draining(&self) -> bool {
        matches!(self.state, State::Ended(..))
    }

    /// Whether only a completion can make something happen.
    pub(super) fn is_idle(&self) -> bool {
        self.unposted.is_empty()
    }

    pub(in crate::endpoint) fn cq(&mut self) -> &mut Cq {
        &mut self.cq
    }

    pub(super) fn leased_slots(&self) -> u64 {
        (self.slots.len() - self.slots.free() + self.recv_slots.len() - self.recv_slots.free()) as u64
    }

    /// Tells the peer that this side closes the connection, if that is possible at once. If not, the peer finds out from its device.
    pub(super) fn announce_close(&mut self) {
        if self.is_connected() && self.has_control_room() {
            self.post_control(&Control::Close).ok();
        }
    }

    /// Ends the connection: every operation ends. Those whose memory the device may still touch give it back later.
    #[cold]
    pub(super) fn end(&mut self, shared: &mut Shared<'_>, cause: Cause) {
        if matches!(self.state, State::Ended(..) | State::Drained(_)) {
            return;
        }
        let was_connected = self.is_connected();
        self.state = State::Ended(cause, Instant::now());
        shared.status.end(cause);
        shared.counters.violations += u64::from(cause == Cause::Violation);
        if was_connected {
            if !matches!(cause, Cause::PeerClosed | Cause::Closed | Cause::RemoteGone(_))
                && self.has_control_room()
            {
                // Where the device delivers at once, the peer need not find out by itself.
                self.post_control(&Control::Close).ok();
            }
            for (index, channel) in self.queues.channels.iter_mut().enumerate() {
                // A queue pair that is in ERR already, or was never connected, has nothing to flush.
                channel.qp.fail().ok();
                channel.mark_end(index);
            }
        }
        // What is wrong with one operation is not what is wrong with the others.
        let code = match cause {
            Cause::RemoteAccess(_) | Cause::LocalProtection(_) | Cause::Device(_) | Cause::NotAccepted(_) => {
                Cause::Flushed
            }
            cause => cause,
        };
        self.end_waiting(shared, code);
        for index in 0..self.work.len() as u16 {
            if let (Some(key), Some(work)) = (self.slots.current(index), &mut self.work[usize::from(index)]) {
                work.stop(code);
                if self.slots.outstanding(key) == 0 {
                    self.finished.push(key);
                }
            }
        }
        self.finish_slots(shared);
        for announced in &mut self.announced {
            if let Some(op) = &announced.op {
                shared.table.end(op.key(), code.encode());
            }
        }
    }

    /// Ends the operations that have nothing at the device.
    fn end_waiting(&mut self, shared: &mut Shared<'_>, cause: Cause) {
        let code = cause.encode();
        self.unposted.clear();
        while let Some(op) = self.waiting.pop_front().or_else(|| self.next_waiting_recv()) {
            shared.give_back_unposted(op, self.peer(), cause);
        }
        while let Some(op) = self.pairing.take_send() {
            op.into_iter().for_each(|op| _ = shared.give_back(op, code));
        }
        while let Some(op) = self.immediates.take_call() {
            op.into_iter().for_each(|op| _ = shared.give_back(op, code));
        }
    }

    /// Gives back operations that have ended and have nothing at the device.
    pub(super) fn reap_ended(&mut self, shared: &mut Shared<'_>) -> usize {
        let before = shared.counters.held_operations;
        let (peer, code) = (self.peer(), Cause::Cancelled.encode());
        for queue in [&mut self.waiting, &mut self.unclaimed.recalled, &mut self.waiting_recvs] {
            for _ in 0..queue.len() {
                let Some(op) = queue.pop_front() else { break };
                if op.is_ended(shared.table) {
                    shared.give_back_unposted(op, peer, Cause::Cancelled);
                } else {
                    queue.push_back(op);
                }
            }
        }
        let mut reap = |op: &mut Option<Op>| match op.take_if(|op| op.is_ended(shared.table)) {
            Some(op) => {
                shared.give_back(op, code);
                true
            }
            None => false,
        };
        self.pairing.remove_ended(&mut reap);
        self.immediates.remove_ended(&mut reap);
        self.unclaimed.is_due = self.is_connected();
        // Transfers that wait for the send queue, or for credit, stop at the next post.
        self.post_waiting(shared);
        (before - shared.counters.held_operations) as usize
    }

    /// Finds queue pairs that went to ERR without a completion.
    pub(super) fn check_queue_pairs(&mut self, shared: &mut Shared<'_>) {
        if self.is_connected() {
            let used = self.queues.channels[..self.queues.qps]
                .iter()
                .chain(&self.queues.channels[self.queues.made..self.queues.made + self.queues.qps]);
            if used.into_iter().any(|channel| channel.qp.state() == QpState::Error) {
                // Completions that say why come first.
                self.poll(shared);
                self.end(shared, Cause::RemoteGone(Status::RetryExceeded));
            }
        }
    }

    /// READs a word of the peer, if operations wait for the peer and nothing was heard of it for a while. If the peer is gone, the
    /// READ fails, and the connection ends. Devices that notice by themselves end it earlier.
    pub(super) fn probe_peer(&mut self, shared: &mut Shared<'_>, now: Instant) {
        if !self.is_connected() || now < self.next_probe {
            return;
        }
        self.next_probe = now + PROBE_INTERVAL;
        let waits = self.recv_slots.free() < self.recv_slots.len()
            || self.pairing.waiting_sends() > 0
            || self.immediates.waiting_calls() > 0
            || !self.unposted.is_empty();
        let was_silent = !core::mem::take(&mut self.has_received);
        let made = self.queues.made;
        // A request whose completion is to come tells the same.
        if !waits || !was_silent || self.queues.channels[made].sends.awaits_completion() {
            return;
        }
        let (Some(peer), Ok(sge)) = (&self.peer, self.probed.sge(0..8)) else { return };
        let op = SendOp::Read(peer.control);
        match self.queues.channels[made].post(
            made,
            SendWr::new(0, op, Data::Regions(&[sge])).signaled_if_queued(),
            CONTROL,
        ) {
            Ok(_) => shared.counters.work_requests += 1,
            // Tried again later.
            Err(PostError::Full) => {}
            Err(_) => self.end(shared, Cause::NotAccepted(0)),
        }
    }

    /// Gives back what is left of an ended connection, when the device does not touch memory any more: all work requests have
    /// completed, and the queue pairs are reset, so that no peer is inside an operation on a `recv` buffer.
    pub(super) fn try_drain(&mut self, shared: &mut Shared<'_>) {
        let State::Ended(cause, since) = self.state else { return };
        self.poll(shared);
        let flushed = self.queues.channels.iter().all(|channel| channel.sends.is_empty());
        if !flushed && since.elapsed() < FLUSH_LIMIT {
            return;
        }
        // All of them, so that none waits for another.
        let busy = self.queues.channels.iter_mut().filter_map(|channel| channel.qp.try_reset().err()).count();
        if busy > 0 {
            return;
        }
        // Requests whose completion has not come: nobody knows whether they took effect.
        let (code, peer) = (Cause::Flushed, self.peer());
        for channel in &mut self.queues.channels {
            channel.sends.drain(|posted| {
                if let (WorkKind::Transfer | WorkKind::MessageData, true) =
                    (posted.kind, self.slots.is_leased(posted.slot))
                    && let Some(work) = &mut self.work[usize::from(posted.slot.index)]
                {
                    work.fail(shared, &posted, peer, code);
                }
            });
        }
        for index in 0..self.work.len() as u16 {
            if let (Some(key), Some(work)) = (self.slots.current(index), &mut self.work[usize::from(index)]) {
                work.stop(code);
                self.slots.drop_work(key);
                self.finished.push(key);
            }
        }
        self.finish_slots(shared);
        for index in 0..self.announced.len() as u16 {
            if let Some(op) = self.announced[usize::from(index)].op.take() {
                shared.give_back(op, code.encode());
            }
            if let Some(key) = self.recv_slots.current(index) {
                self.recv_slots.release(key);
            }
        }
        self.state = State::Drained(cause);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
