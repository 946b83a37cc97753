//! What a wrapped device knows: its requests, where each is, and what the plan has in store for them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::super::{
    Completion, DeviceAddress, Event, Opcode, PostError, QpConfig, RecvWr, SendWr, Status, UdQp,
};
use super::endpoint::{Endpoint, Inner, Place, Sent, Stored};
use super::plan::{Hold, Plan};

/// See the module's picture.
#[derive(Debug)]
pub(super) struct State {
    plan: Plan,
    ticks: u64,
    posts: u64,
    completions: u64,
    port: Port,
    dead: Vec<DeviceAddress>,
    events: VecDeque<Event>,
    next_id: u64,
    /// Requests in the wrapped device, by the number they have there.
    requests: HashMap<u64, Request>,
    /// By number. Ordered, so that what happens to all happens in the same order in every run.
    qps: BTreeMap<u32, Endpoint>,
    cqs: HashMap<u32, Queue>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    Up,
    /// Until this tick, or until told.
    Down(Option<u64>),
}

#[derive(Debug)]
struct Request {
    wr_id: u64,
    owner: Owner,
}

/// The queue that a request was posted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Send(u32),
    Recv(u32),
    Srq(u32),
}

/// A completion queue: what was taken from the wrapped one and is not shown yet.
#[derive(Debug)]
struct Queue {
    depth: usize,
    /// Unsignaled requests that may be in the wrapped device at once without filling its queue.
    silent_limit: usize,
    silent: usize,
    polls: u64,
    overrun: bool,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    completion: Completion,
    /// Shown from this poll on.
    from: u64,
    /// Shown earlier if another queue pair's completion passes it.
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
            dead: Vec::new(),
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

    pub(super) fn is_dead(&self, peer: &DeviceAddress) -> bool {
        self.dead.contains(peer)
    }

    pub(super) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    // Objects.

    pub(super) fn add_cq(&mut self, cq: u32, depth: u32, inner_depth: u32) {
        let silent_limit = match inner_depth.saturating_sub(depth) {
            0 => depth as usize, // as deep as the device allows: no headroom, they count against the depth
            headroom => headroom as usize,
        };
        let queue = Queue {
            depth: depth as usize,
            silent_limit,
            silent: 0,
            polls: 0,
            overrun: false,
            waiting: VecDeque::new(),
        };
        self.cqs.insert(cq, queue);
    }

    pub(super) fn remove_cq(&mut self, cq: u32) {
        self.cqs.remove(&cq);
    }

    pub(super) fn add_qp(&mut self, inner: Inner, config: QpConfig, send_cq: u32, recv_cq: u32) -> u32 {
        let qp_num = inner.qp_num();
        self.qps.insert(qp_num, Endpoint::new(inner, config, send_cq, recv_cq));
        qp_num
    }

    /// The queue pair's handle is there, so it is in the table.
    pub(super) fn qp(&mut self, qp_num: u32) -> &mut Endpoint {
        self.qps.get_mut(&qp_num).expect("a queue pair is in the table while its handle lives")
    }

    /// Forgets what is outstanding, without completions.
    pub(super) fn clear_qp(&mut self, qp_num: u32) {
        let endpoint = self.qp(qp_num);
        let silent = endpoint.sends.iter().filter(|s| s.is_silent()).count();
        endpoint.sends.clear();
        endpoint.stalled_since = None;
        endpoint.broken = None;
        endpoint.peer = None;
        let send_cq = endpoint.send_cq;
        if let Some(queue) = self.cqs.get_mut(&send_cq) {
            queue.silent -= silent.min(queue.silent);
        }
        self.requests.retain(|_, r| r.owner != Owner::Send(qp_num) && r.owner != Owner::Recv(qp_num));
    }

    pub(super) fn remove_qp(&mut self, qp_num: u32) -> Option<Endpoint> {
        self.clear_qp(qp_num);
        self.qps.remove(&qp_num)
    }

    /// Completions of a queue pair that are not shown yet are never shown.
    pub(super) fn hide_completions(&mut self, qp_num: u32) {
        for queue in self.cqs.values_mut() {
            queue.waiting.retain(|w| w.completion.qp_num != qp_num);
        }
    }

    pub(super) fn remove_srq(&mut self, srq: u32) {
        self.requests.retain(|_, r| r.owner != Owner::Srq(srq));
    }

    // Time, ports and peers.

    /// Something happened: whatever was waiting for its time may be due.
    pub(super) fn tick(&mut self, ticks: u64) {
        self.ticks += ticks;
        match self.port {
            Port::Up => return,
            Port::Down(Some(until)) if self.ticks >= until => return self.port_up(),
            Port::Down(_) => {}
        }
        let (now, patience) = (self.ticks, self.plan.patience());
        for qp_num in self.all_qps() {
            let endpoint = self.qp(qp_num);
            if endpoint.stalled_since.is_some_and(|since| now - since >= patience) {
                endpoint.stalled_since = None;
                endpoint.break_with(Some(Status::RetryExceeded));
                self.advance(qp_num);
            }
        }
    }

    /// Whether time must go on for somebody to get ahead.
    pub(super) fn is_stalling(&self) -> bool {
        self.port != Port::Up || self.cqs.values().any(|q| !q.waiting.is_empty())
    }

    pub(super) fn port_down(&mut self, ticks: Option<u64>) {
        if self.port == Port::Up {
            self.events.push_back(Event::PortDown);
        }
        self.port = Port::Down(ticks.map(|n| self.ticks + n));
    }

    pub(super) fn port_up(&mut self) {
        if self.port == Port::Up {
            return;
        }
        self.port = Port::Up;
        self.events.push_back(Event::PortUp);
        for qp_num in self.all_qps() {
            self.qp(qp_num).stalled_since = None;
            self.advance(qp_num);
        }
    }

    pub(super) fn kill(&mut self, peer: DeviceAddress) {
        if !self.is_dead(&peer) {
            self.dead.push(peer);
        }
        for qp_num in self.all_qps() {
            let endpoint = self.qp(qp_num);
            if endpoint.peer != Some(peer) || endpoint.is_broken() {
                continue;
            }
            if endpoint.sends.is_empty() {
                endpoint.break_with(None);
                self.events.push_back(Event::QpFatal(qp_num));
            } else {
                endpoint.break_with(Some(Status::RetryExceeded));
                self.advance(qp_num);
            }
        }
    }

    fn all_qps(&self) -> Vec<u32> {
        self.qps.keys().copied().collect()
    }

    // Posting.

    /// Counts a post; what the plan has for it happens.
    pub(super) fn begin_post(&mut self, owner: Owner) -> Result<u64, PostError> {
        let k = self.posts;
        self.posts += 1;
        self.tick(1);
        if let Some(ticks) = self.plan.outage(k) {
            self.port_down(Some(ticks));
        }
        if self.plan.kills(k)
            && let Owner::Send(qp_num) = owner
            && let Some(peer) = self.qp(qp_num).peer
        {
            self.kill(peer);
        }
        self.plan.refusal(k).map_or(Ok(k), Err)
    }

    pub(super) fn post_recv(&mut self, qp_num: u32, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let owner = Owner::Recv(qp_num);
        self.begin_post(owner)?;
        let id = self.fresh_id();
        self.qp(qp_num).inner.post_recv(&RecvWr { wr_id: id, sges: wr.sges })?;
        self.posted_recv(id, wr.wr_id, owner);
        Ok(())
    }

    /// Notes a receive that the wrapped device has taken.
    pub(super) fn posted_recv(&mut self, id: u64, wr_id: u64, owner: Owner) {
        self.requests.insert(id, Request { wr_id, owner });
    }

    pub(super) fn post_rc(&mut self, qp_num: u32, wr: &SendWr<'_>) -> Result<(), PostError> {
        let k = self.begin_post(Owner::Send(qp_num))?;
        let loss = self.plan.loss(k);
        let (port, now, id) = (self.port, self.ticks, self.fresh_id());
        let endpoint =
            self.qps.get_mut(&qp_num).expect("a queue pair is in the table while its handle lives");
        let behind = endpoint.sends.back().is_some_and(|s| !matches!(s.place, Place::Gone));
        let place = if let Some(status) = loss {
            endpoint.check(wr)?;
            Place::Lost(status)
        } else if behind || port != Port::Up {
            endpoint.check(wr)?;
            endpoint.stalled_since.get_or_insert(now);
            Place::Stalled(Stored::new(wr))
        } else {
            let queue = self.cqs.get(&endpoint.send_cq);
            if !wr.signaled && queue.is_some_and(|q| q.silent >= q.silent_limit) {
                return Err(PostError::Full);
            }
            endpoint.inner.post(&SendWr { wr_id: id, signaled: true, ..*wr })?;
            Place::Gone
        };
        self.posted_send(qp_num, id, wr, place);
        self.advance(qp_num);
        Ok(())
    }

    /// Posts a datagram; `forward` gives it to the wrapped device under the number it is told.
    pub(super) fn post_ud(
        &mut self,
        qp_num: u32,
        to: &DeviceAddress,
        wr: &SendWr<'_>,
        forward: impl FnOnce(&mut UdQp, &SendWr<'_>) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        let k = self.begin_post(Owner::Send(qp_num))?;
        let lost = self.plan.drops(k) || self.port != Port::Up || self.is_dead(to);
        let id = self.fresh_id();
        let endpoint = self.qp(qp_num);
        let place = if lost {
            endpoint.check(wr)?;
            Place::Dropped
        } else {
            let Inner::Ud(inner) = &mut endpoint.inner else {
                return Err(PostError::Invalid("datagrams go through datagram queue pairs"));
            };
            forward(inner, &SendWr { wr_id: id, signaled: true, ..*wr })?;
            Place::Gone
        };
        self.posted_send(qp_num, id, wr, place);
        self.advance(qp_num);
        Ok(())
    }

    fn posted_send(&mut self, qp_num: u32, id: u64, wr: &SendWr<'_>, place: Place) {
        self.requests.insert(id, Request { wr_id: wr.wr_id, owner: Owner::Send(qp_num) });
        let sent = Sent { id, wr_id: wr.wr_id, signaled: wr.signaled, place };
        let silent = sent.is_silent();
        let endpoint = self.qp(qp_num);
        endpoint.sends.push_back(sent);
        let send_cq = endpoint.send_cq;
        if let Some(queue) = self.cqs.get_mut(&send_cq).filter(|_| silent) {
            queue.silent += 1;
        }
    }

    /// Does what can be done with the oldest sends of a queue pair.
    pub(super) fn advance(&mut self, qp_num: u32) {
        loop {
            let port_up = self.port == Port::Up;
            let endpoint = self.qp(qp_num);
            let broken = endpoint.is_broken();
            let Some(front) = endpoint.sends.front() else { return };
            match front.place {
                Place::Lost(status) if !broken => endpoint.break_with(Some(status)),
                Place::Dropped if !broken => self.end_here(qp_num, Status::Success),
                Place::Stalled(_) | Place::Lost(_) | Place::Dropped if broken => {
                    let status = endpoint.next_failure();
                    self.end_here(qp_num, status);
                }
                _ => {
                    if !(port_up && !broken && self.release(qp_num)) {
                        return;
                    }
                }
            }
        }
    }

    /// Sends the first stalled request of a queue pair on its way, if it is next. Says whether it did.
    fn release(&mut self, qp_num: u32) -> bool {
        let endpoint = self.qp(qp_num);
        let send_cq = endpoint.send_cq;
        let Some(sent) = endpoint.sends.iter_mut().find(|s| !matches!(s.place, Place::Gone)) else {
            return false;
        };
        let Place::Stalled(stored) = &sent.place else { return false };
        let posted = stored.with(sent.id, |wr| endpoint.inner.post(wr));
        sent.place = match posted {
            Ok(()) => Place::Gone,
            // It was checked when it was accepted, so the device is at fault.
            Err(_) => Place::Lost(Status::LocalQpOperation),
        };
        if sent.is_silent()
            && let Some(queue) = self.cqs.get_mut(&send_cq)
        {
            queue.silent += 1;
        }
        true
    }

    /// Ends the oldest send, which the wrapped device does not have.
    fn end_here(&mut self, qp_num: u32, status: Status) {
        let endpoint = self.qp(qp_num);
        let Some(sent) = endpoint.sends.pop_front() else { return };
        let send_cq = endpoint.send_cq;
        self.requests.remove(&sent.id);
        if sent.signaled || !status.is_success() {
            let opcode = if status.is_success() { Opcode::Send } else { Opcode::Unspecified };
            let completion =
                Completion { wr_id: sent.wr_id, status, opcode, byte_len: 0, imm: None, qp_num, src_qp: 0 };
            self.show(send_cq, completion);
        }
    }

    // Completing.

    /// A completion came out of the wrapped queue.
    pub(super) fn take_in(&mut self, cq: u32, mut completion: Completion) {
        // Requests of queue pairs that were reset or destroyed are not in the table any more.
        let Some(request) = self.requests.remove(&completion.wr_id) else { return };
        let id = core::mem::replace(&mut completion.wr_id, request.wr_id);
        let qp_num = match request.owner {
            Owner::Send(qp_num) | Owner::Recv(qp_num) => qp_num,
            Owner::Srq(_) => completion.qp_num,
        };
        let sending = matches!(request.owner, Owner::Send(_));
        let Some(endpoint) = self.qps.get_mut(&qp_num) else {
            // A receive of a shared queue, taken by a queue pair that is no more.
            return self.show(cq, completion);
        };
        let mut visible = true;
        if sending {
            let place = endpoint.sends.iter().position(|s| s.id == id);
            if let Some(sent) = place.and_then(|at| endpoint.sends.remove(at)) {
                visible = sent.signaled;
                if let Some(queue) = self.cqs.get_mut(&cq).filter(|_| !sent.signaled) {
                    queue.silent -= queue.silent.min(1);
                }
            }
        }
        if endpoint.broken.is_some() {
            completion.status = if sending { endpoint.next_failure() } else { Status::Flushed };
        } else if completion.status.is_success()
            && visible
            && let Some(status) = self.plan.failure(self.completions)
        {
            let acknowledged = sending && matches!(endpoint.inner, Inner::Rc(_));
            completion.status = match status {
                Status::RetryExceeded | Status::ResponseTimeout if !acknowledged => Status::LocalQpOperation,
                status => status,
            };
            endpoint.break_with(None);
        }
        if !completion.status.is_success() {
            completion.opcode = Opcode::Unspecified;
            completion.imm = None;
            visible = true;
        }
        if visible {
            self.show(cq, completion);
        }
        self.advance(qp_num);
    }

    /// Puts a completion where polls find it, after whatever the plan lets it wait for.
    fn show(&mut self, cq: u32, completion: Completion) {
        let k = self.completions;
        self.completions += 1;
        let Some(queue) = self.cqs.get_mut(&cq) else { return };
        let (delay, overtakable) = match self.plan.hold(k) {
            None => (0, false),
            Some(Hold::Polls(n)) => (n, false),
            Some(Hold::Overtaken) => (Hold::PATIENCE, true),
        };
        queue.waiting.push_back(Waiting { completion, from: queue.polls + u64::from(delay), overtakable });
        if queue.waiting.len() > queue.depth && !queue.overrun {
            queue.overrun = true;
            self.events.push_back(Event::CqOverrun);
            for qp_num in self.all_qps() {
                let endpoint = self.qp(qp_num);
                if (endpoint.send_cq == cq || endpoint.recv_cq == cq) && !endpoint.is_broken() {
                    endpoint.break_with(None);
                    self.advance(qp_num);
                }
            }
        }
    }

    /// Moves up to `max` completions that may be shown into `shown`. False when the queue has overrun.
    pub(super) fn hand_out(&mut self, cq: u32, max: usize, shown: &mut Vec<Completion>) -> bool {
        let Some(queue) = self.cqs.get_mut(&cq) else { return true };
        if queue.overrun {
            return false;
        }
        let mut blocked: Vec<u32> = Vec::new();
        let mut at = 0;
        while shown.len() < max && at < queue.waiting.len() {
            let next = &queue.waiting[at];
            let qp_num = next.completion.qp_num;
            if blocked.contains(&qp_num) || next.from > queue.polls {
                if !blocked.contains(&qp_num) {
                    blocked.push(qp_num);
                }
                at += 1;
                continue;
            }
            let Some(next) = queue.waiting.remove(at) else { break };
            shown.push(next.completion);
            for passed in queue.waiting.iter_mut().take(at).filter(|w| w.overtakable) {
                passed.from = queue.polls;
            }
        }
        queue.polls += 1;
        true
    }

    /// Whether a poll would show something now.
    pub(super) fn has_shown(&self, cq: u32) -> bool {
        let Some(queue) = self.cqs.get(&cq) else { return false };
        queue.overrun || queue.waiting.iter().any(|w| w.from <= queue.polls)
    }
}
