//! The state of a wrapped device: its requests, its completions, and the effect of the plan on them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::super::InlineData;
use super::super::{
    Completion, CqError, DeviceAddress, Event, Opcode, PostError, Posted, QpConfig, RcQp, RecvWr, SendWr,
    Signal, Status, UdQp,
};
use super::plan::{Hold, Plan};
use super::qp::{InnerQp, SendState, StoredWr, TrackedQp, TrackedSend};

/// Everything behind the device's lock. The module documentation has a diagram of the sends.
#[derive(Debug)]
pub(super) struct State {
    plan: Plan,
    ticks: u64,
    posts: u64,
    completions: u64,
    port: Port,
    /// Bytes per second, and when the link has passed all requests so far.
    link: Option<(u64, Instant)>,
    killed_peers: Vec<DeviceAddress>,
    events: VecDeque<Event>,
    next_id: u64,
    /// Outstanding requests, by the `wr_id` that they have in the wrapped device.
    requests: HashMap<u64, PendingRequest>,
    /// By queue pair number. Ordered, so that an event that affects all is applied in the same order in every run.
    qps: BTreeMap<u32, TrackedQp>,
    cqs: HashMap<u32, CqState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    Up,
    /// Until this tick, or until `port_up` is called.
    Down(Option<u64>),
    /// The link passes nothing until this tick. No event says so.
    Stalled(u64),
}

#[derive(Debug)]
struct PendingRequest {
    wr_id: u64,
    owner: RequestQueue,
}

/// The queue that a request was posted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestQueue {
    Send(u32),
    Recv(u32),
    Srq(u32),
}

/// A completion queue: the completions that were taken from the wrapped queue and not handed out yet.
#[derive(Debug)]
struct CqState {
    depth: usize,
    /// Unsignaled requests that can be in the wrapped device at once without overrunning its queue.
    hidden_limit: usize,
    hidden: usize,
    polls: u64,
    overrun: bool,
    held: VecDeque<HeldCompletion>,
}

#[derive(Debug)]
struct HeldCompletion {
    completion: Completion,
    /// The send request that completed: it and those before it leave the send queue when the completion is handed out.
    sent: Option<u64>,
    /// Handed out from this poll on.
    from: u64,
    /// Handed out earlier if a completion of another queue pair overtakes it.
    overtakable: bool,
}

impl State {
    pub(super) fn new(plan: Plan) -> State {
        State {
            plan,
            ticks: 0,
            posts: 0,
            completions: 0,
            port: Port::Up,
            link: None,
            killed_peers: Vec::new(),
            events: VecDeque::new(),
            next_id: 0,
            requests: HashMap::new(),
            qps: BTreeMap::new(),
            cqs: HashMap::new(),
        }
    }

    pub(super) fn posts(&self) -> u64 {
        self.posts
    }

    pub(super) fn completions(&self) -> u64 {
        self.completions
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(super) fn is_killed(&self, peer: &DeviceAddress) -> bool {
        self.killed_peers.contains(peer)
    }

    pub(super) fn next_request_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    // Objects.

    pub(super) fn add_cq(&mut self, cq: u32, depth: u32, inner_depth: u32) {
        let hidden_limit = match inner_depth.saturating_sub(depth) {
            0 => depth as usize, // no deeper queue is possible, so unsignaled requests count against the depth
            headroom => headroom as usize,
        };
        let queue = CqState {
            depth: depth as usize,
            hidden_limit,
            hidden: 0,
            polls: 0,
            overrun: false,
            held: VecDeque::new(),
        };
        self.cqs.insert(cq, queue);
    }

    pub(super) fn remove_cq(&mut self, cq: u32) {
        self.cqs.remove(&cq);
    }

    pub(super) fn add_qp(&mut self, inner: InnerQp, config: QpConfig, send_cq: u32, recv_cq: u32) -> u32 {
        let qp_num = inner.qp_num();
        self.qps.insert(qp_num, TrackedQp::new(inner, config, send_cq, recv_cq));
        qp_num
    }

    /// A queue pair whose handle exists, so that it is in the table.
    pub(super) fn qp(&mut self, qp_num: u32) -> &mut TrackedQp {
        self.qps.get_mut(&qp_num).expect("a queue pair is in the table while its handle lives")
    }

    /// Drops all outstanding requests without completions.
    pub(super) fn clear_qp(&mut self, qp_num: u32) {
        let qp = self.qp(qp_num);
        let hidden = qp.sends.iter().filter(|s| s.is_hidden()).count();
        qp.clear_sends();
        qp.stalled_since = None;
        qp.broken = None;
        qp.receive_failed = false;
        qp.peer = None;
        let send_cq = qp.send_cq;
        if let Some(queue) = self.cqs.get_mut(&send_cq) {
            queue.hidden -= hidden.min(queue.hidden);
        }
        self.requests
            .retain(|_, r| r.owner != RequestQueue::Send(qp_num) && r.owner != RequestQueue::Recv(qp_num));
    }

    pub(super) fn remove_qp(&mut self, qp_num: u32) -> Option<TrackedQp> {
        self.clear_qp(qp_num);
        self.qps.remove(&qp_num)
    }

    /// Drops the completions of a queue pair that were not handed out yet.
    pub(super) fn drop_held_completions(&mut self, qp_num: u32) {
        for queue in self.cqs.values_mut() {
            queue.held.retain(|w| w.completion.qp_num != qp_num);
        }
    }

    pub(super) fn remove_srq(&mut self, srq: u32) {
        self.requests.retain(|_, r| r.owner != RequestQueue::Srq(srq));
    }

    // Time, ports and peers.

    /// Advances time: the port may come up, and stalled requests may fail.
    pub(super) fn tick(&mut self, ticks: u64) {
        self.ticks += ticks;
        if self.link.is_some() {
            for qp_num in self.all_qps() {
                self.advance_sends(qp_num);
            }
        }
        match self.port {
            Port::Up => return,
            Port::Down(Some(until)) | Port::Stalled(until) if self.ticks >= until => return self.port_up(),
            Port::Stalled(_) => return,
            Port::Down(_) => {}
        }
        let (now, retry_ticks) = (self.ticks, self.plan.retry_ticks());
        for qp_num in self.all_qps() {
            let qp = self.qp(qp_num);
            if qp.stalled_since.is_some_and(|since| now - since >= retry_ticks) {
                qp.stalled_since = None;
                qp.fail_with(Some(Status::RetryExceeded));
                self.advance_sends(qp_num);
            }
        }
    }

    /// Whether something waits for ticks or polls to pass.
    pub(super) fn needs_ticks(&self) -> bool {
        self.port != Port::Up || self.link.is_some() || self.cqs.values().any(|q| !q.held.is_empty())
    }

    pub(super) fn port_down(&mut self, ticks: Option<u64>) {
        if !matches!(self.port, Port::Down(_)) {
            self.events.push_back(Event::PortDown);
        }
        self.port = Port::Down(ticks.map(|n| self.ticks + n));
        // Requests that wait for the link stall from now on.
        let now = self.ticks;
        for qp_num in self.all_qps() {
            let qp = self.qp(qp_num);
            if qp.sends.iter().any(|sent| matches!(sent.state, SendState::Stalled(_))) {
                qp.stalled_since.get_or_insert(now);
            }
        }
    }

    fn stall(&mut self, ticks: u64) {
        if self.port == Port::Up {
            self.port = Port::Stalled(self.ticks + ticks);
        }
    }

    pub(super) fn set_rate(&mut self, bytes_per_second: Option<u64>) {
        self.link = bytes_per_second.map(|rate| (rate.max(1), Instant::now()));
        if self.link.is_none() {
            for qp_num in self.all_qps() {
                self.qp(qp_num).sends.iter_mut().for_each(|sent| sent.due = None);
                self.advance_sends(qp_num);
            }
        }
    }

    /// When the bytes of a request have passed the link, if its rate is limited.
    fn pass_link(&mut self, wr: &SendWr<'_>) -> Option<Instant> {
        let (rate, free_at) = self.link.as_mut()?;
        let time =
            Duration::from_nanos((u128::from(wr.data.len()) * 1_000_000_000 / u128::from(*rate)) as u64);
        *free_at = (*free_at).max(Instant::now()) + time;
        Some(*free_at)
    }

    pub(super) fn port_up(&mut self) {
        match core::mem::replace(&mut self.port, Port::Up) {
            Port::Up => return,
            Port::Down(_) => self.events.push_back(Event::PortUp),
            Port::Stalled(_) => {}
        }
        for qp_num in self.all_qps() {
            self.qp(qp_num).stalled_since = None;
            self.advance_sends(qp_num);
        }
    }

    pub(super) fn kill_peer_device(&mut self, peer: DeviceAddress) {
        if !self.is_killed(&peer) {
            self.killed_peers.push(peer);
        }
        for qp_num in self.all_qps() {
            let qp = self.qp(qp_num);
            if qp.peer != Some(peer) || qp.is_in_error() {
                continue;
            }
            if qp.sends.is_empty() {
                qp.fail_with(None);
                self.events.push_back(Event::QpFatal(qp_num));
            } else {
                qp.fail_with(Some(Status::RetryExceeded));
                self.advance_sends(qp_num);
            }
        }
    }

    fn all_qps(&self) -> Vec<u32> {
        self.qps.keys().copied().collect()
    }

    // Posting.

    /// Counts a post and applies the plan to it. Returns the number of the post, or the planned error.
    pub(super) fn begin_post(&mut self, owner: RequestQueue) -> Result<u64, PostError> {
        let k = self.posts;
        self.posts += 1;
        self.tick(1);
        if let Some(ticks) = self.plan.outage(k) {
            self.port_down(Some(ticks));
        }
        if let Some(ticks) = self.plan.stalls(k) {
            self.stall(ticks);
        }
        if self.plan.kills(k)
            && let RequestQueue::Send(qp_num) = owner
            && let Some(peer) = self.qp(qp_num).peer
        {
            self.kill_peer_device(peer);
        }
        self.plan.refusal(k).map_or(Ok(k), Err)
    }

    pub(super) fn post_recv(&mut self, qp_num: u32, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let owner = RequestQueue::Recv(qp_num);
        self.begin_post(owner)?;
        let id = self.next_request_id();
        self.qp(qp_num).inner.post_recv(&RecvWr { wr_id: id, sges: wr.sges })?;
        self.track_recv(id, wr.wr_id, owner);
        Ok(())
    }

    /// Records a receive that was posted to the wrapped device.
    pub(super) fn track_recv(&mut self, id: u64, wr_id: u64, owner: RequestQueue) {
        self.requests.insert(id, PendingRequest { wr_id, owner });
    }

    /// Posts a request; `forward` posts it to the wrapped device.
    pub(super) fn post_rc(
        &mut self,
        qp_num: u32,
        wr: &SendWr<'_>,
        forward: fn(&mut RcQp, &SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<Posted, PostError> {
        let k = self.begin_post(RequestQueue::Send(qp_num))?;
        let loss = self.plan.loss(k);
        let (port, now, id) = (self.port, self.ticks, self.next_request_id());
        self.qp(qp_num).check(wr)?;
        let due = self.pass_link(wr);
        let qp = self.qps.get_mut(&qp_num).expect("a queue pair is in the table while its handle lives");
        let behind = qp.sends.back().is_some_and(|s| !matches!(s.state, SendState::Posted));
        let state = if let Some(status) = loss {
            SendState::Lost(status)
        } else if behind || port != Port::Up || due.is_some() {
            if matches!(port, Port::Down(_)) {
                qp.stalled_since.get_or_insert(now);
            }
            SendState::Stalled(StoredWr::new(wr))
        } else {
            let queue = self.cqs.get(&qp.send_cq);
            if wr.signal == Signal::OnFailure && queue.is_some_and(|q| q.hidden >= q.hidden_limit) {
                return Err(PostError::Full);
            }
            let InnerQp::Rc(inner) = &mut qp.inner else {
                return Err(PostError::Invalid("a datagram needs an address handle"));
            };
            forward(inner, &SendWr { wr_id: id, signal: Signal::Always, ..*wr })?;
            SendState::Posted
        };
        self.track_send(qp_num, id, wr, state, due);
        self.advance_sends(qp_num);
        Ok(Posted::Queued)
    }

    /// Posts a datagram; `forward` posts it to the wrapped device.
    pub(super) fn post_ud(
        &mut self,
        qp_num: u32,
        to: &DeviceAddress,
        wr: &SendWr<'_>,
        forward: impl FnOnce(&mut UdQp, &SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<Posted, PostError> {
        let k = self.begin_post(RequestQueue::Send(qp_num))?;
        let lost = self.plan.drops(k) || self.port != Port::Up || self.is_killed(to);
        let id = self.next_request_id();
        let qp = self.qp(qp_num);
        qp.check(wr)?;
        let state = if lost {
            SendState::Dropped
        } else {
            let InnerQp::Ud(inner) = &mut qp.inner else {
                return Err(PostError::Invalid("a datagram needs a datagram queue pair"));
            };
            forward(inner, &SendWr { wr_id: id, signal: Signal::Always, ..*wr })?;
            SendState::Posted
        };
        self.track_send(qp_num, id, wr, state, None);
        self.advance_sends(qp_num);
        Ok(Posted::Queued)
    }

    fn track_send(&mut self, qp_num: u32, id: u64, wr: &SendWr<'_>, state: SendState, due: Option<Instant>) {
        self.requests.insert(id, PendingRequest { wr_id: wr.wr_id, owner: RequestQueue::Send(qp_num) });
        let sent = TrackedSend { id, wr_id: wr.wr_id, signaled: wr.signal != Signal::OnFailure, state, due };
        let hidden = sent.is_hidden();
        let qp = self.qp(qp_num);
        qp.push_send(sent);
        let send_cq = qp.send_cq;
        if let Some(queue) = self.cqs.get_mut(&send_cq).filter(|_| hidden) {
            queue.hidden += 1;
        }
    }

    /// Posts, completes or fails the oldest sends of a queue pair, as far as possible.
    pub(super) fn advance_sends(&mut self, qp_num: u32) {
        loop {
            let port_up = self.port == Port::Up;
            let qp = self.qp(qp_num);
            let broken = qp.is_in_error();
            let Some(front) = qp.sends.front() else { return };
            match front.state {
                SendState::Lost(status) if !broken => qp.fail_with(Some(status)),
                SendState::Dropped if !broken => self.complete_oldest_send(qp_num, Status::Success),
                SendState::Stalled(_) | SendState::Lost(_) | SendState::Dropped if broken => {
                    let status = qp.next_failure();
                    self.complete_oldest_send(qp_num, status);
                }
                _ => {
                    if !(port_up && !broken && self.post_next_stalled(qp_num)) {
                        return;
                    }
                }
            }
        }
    }

    /// Posts the first stalled request of a queue pair, if it is the next to be posted. Returns whether it did.
    fn post_next_stalled(&mut self, qp_num: u32) -> bool {
        let qp = self.qp(qp_num);
        let send_cq = qp.send_cq;
        let Some(sent) = qp.sends.iter_mut().find(|s| !matches!(s.state, SendState::Posted)) else {
            return false;
        };
        let SendState::Stalled(stored) = &sent.state else { return false };
        if sent.due.is_some_and(|due| due > Instant::now()) {
            return false;
        }
        let posted = stored.with(sent.id, |wr| qp.inner.post_detached(wr));
        sent.state = match posted {
            Ok(_) => SendState::Posted,
            // The request was checked when it was accepted, so the device failed.
            Err(_) => SendState::Lost(Status::LocalQpOperation),
        };
        if sent.is_hidden()
            && let Some(queue) = self.cqs.get_mut(&send_cq)
        {
            queue.hidden += 1;
        }
        true
    }

    /// Completes the oldest send, which was not posted to the wrapped device.
    fn complete_oldest_send(&mut self, qp_num: u32, status: Status) {
        let qp = self.qp(qp_num);
        let Some(sent) = qp.sends.pop_front() else { return };
        let send_cq = qp.send_cq;
        self.requests.remove(&sent.id);
        if sent.signaled || !status.is_success() {
            let opcode = if status.is_success() { Opcode::Send } else { Opcode::Unspecified };
            let completion = Completion {
                wr_id: sent.wr_id,
                status,
                opcode,
                byte_len: 0,
                imm: None,
                qp_num,
                src_qp: 0,
                data: InlineData::None,
            };
            self.enqueue_completion(send_cq, completion, Some(sent.id));
        }
    }

    // Completing.

    /// Processes a completion of the wrapped queue.
    pub(super) fn accept_completion(&mut self, cq: u32, mut completion: Completion) {
        // The requests of queue pairs that were reset or destroyed are no longer in the table.
        let Some(request) = self.requests.remove(&completion.wr_id) else { return };
        let id = core::mem::replace(&mut completion.wr_id, request.wr_id);
        let qp_num = match request.owner {
            RequestQueue::Send(qp_num) | RequestQueue::Recv(qp_num) => qp_num,
            RequestQueue::Srq(_) => completion.qp_num,
        };
        let sending = matches!(request.owner, RequestQueue::Send(_));
        let Some(qp) = self.qps.get_mut(&qp_num) else {
            // A receive of a shared queue, taken by a queue pair that was destroyed since.
            return self.enqueue_completion(cq, completion, None);
        };
        let mut visible = true;
        if sending {
            let index = qp.sends.iter().position(|s| s.id == id);
            if let Some(sent) = index.and_then(|at| qp.sends.remove(at)) {
                visible = sent.signaled;
                if let Some(queue) = self.cqs.get_mut(&cq).filter(|_| !sent.signaled) {
                    queue.hidden -= queue.hidden.min(1);
                }
            }
        }
        if qp.broken.is_some() && sending {
            completion.status = qp.next_failure();
        } else if qp.receive_failed {
            completion.status = Status::Flushed;
        } else if qp.broken.is_none()
            && completion.status.is_success()
            && visible
            && let Some(status) = self.plan.failure(self.completions, sending)
        {
            let acknowledged = sending && matches!(qp.inner, InnerQp::Rc(_));
            completion.status = match status {
                Status::RetryExceeded | Status::ResponseTimeout if !acknowledged => Status::LocalQpOperation,
                status => status,
            };
            qp.receive_failed = !sending;
            qp.fail_with(None);
        }
        if !completion.status.is_success() {
            completion.opcode = Opcode::Unspecified;
            completion.imm = None;
            completion.data = InlineData::None;
            visible = true;
        }
        if visible {
            self.enqueue_completion(cq, completion, sending.then_some(id));
        }
        self.advance_sends(qp_num);
    }

    /// Queues a completion for the caller, held back as long as the plan says.
    fn enqueue_completion(&mut self, cq: u32, completion: Completion, sent: Option<u64>) {
        let k = self.completions;
        self.completions += 1;
        let Some(queue) = self.cqs.get_mut(&cq) else { return };
        let (delay, overtakable) = match self.plan.hold(k) {
            None => (0, false),
            Some(Hold::Polls(n)) => (n, false),
            Some(Hold::Overtaken) => (Hold::MAX_POLLS, true),
        };
        queue.held.push_back(HeldCompletion {
            completion,
            sent,
            from: queue.polls + u64::from(delay),
            overtakable,
        });
        if queue.held.len() > queue.depth && !queue.overrun {
            queue.overrun = true;
            self.events.push_back(Event::CqOverrun);
            for qp_num in self.all_qps() {
                let qp = self.qp(qp_num);
                if (qp.send_cq == cq || qp.recv_cq == cq) && !qp.is_in_error() {
                    qp.fail_with(None);
                    self.advance_sends(qp_num);
                }
            }
        }
    }

    /// Takes the next completion that is not held back.
    pub(super) fn take_ready(&mut self, cq: u32, to: &mut Completion) -> Result<bool, CqError> {
        let Some(queue) = self.cqs.get_mut(&cq) else { return Ok(false) };
        if queue.overrun {
            return Err(CqError::Overrun);
        }
        let now = queue.polls;
        let mut blocked: Vec<u32> = Vec::new();
        for at in 0..queue.held.len() {
            let next = &queue.held[at];
            let qp_num = next.completion.qp_num;
            if blocked.contains(&qp_num) {
                continue;
            }
            if next.from > now {
                blocked.push(qp_num);
                continue;
            }
            let Some(next) = queue.held.remove(at) else { break };
            for passed in queue.held.iter_mut().take(at).filter(|w| w.overtakable) {
                passed.from = now + 1;
            }
            if let (Some(id), Some(qp)) = (next.sent, self.qps.get_mut(&qp_num)) {
                qp.free_places(id);
            }
            *to = next.completion;
            return Ok(true);
        }
        // A poll takes completions until there is none.
        queue.polls += 1;
        Ok(false)
    }

    /// Whether a poll would hand out a completion now.
    pub(super) fn has_ready(&self, cq: u32) -> bool {
        let Some(queue) = self.cqs.get(&cq) else { return false };
        queue.overrun || queue.held.iter().any(|w| w.from <= queue.polls)
    }
}
