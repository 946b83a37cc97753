//! One end of one rail of a connection: its queues, and the memory that the peer writes.
//!
//! An endpoint lives as long as its rail works. When the rail has failed, a new endpoint is made.
//!
//! ```text
//!  sender's endpoint                          receiver's endpoint
//!    cts: slots x group lines of 64 bytes  <-- clear-to-send: WRITE on queue pair 0
//!    queue pair 0..n ------------------------> WRITE, WRITE+IMM: takes a receive
//!                                              records: slots x 72 bytes, for groups
//!                                              staging: slots x staging bytes, for short messages
//! ```

use crosstie_protocol::rails::{CTS_LEN, MAX_SLOTS, RECORD_LEN};
use crosstie_protocol::signaling::Signaling;

use super::agreement::{Agreement, EndpointAddress, Role};
use super::context::Context;
use super::counters::RailCells;
use crate::device::{
    Access, Completion, ConnectConfig, Cq, CqConfig, CqError, Data, DeviceError, Mr, PostError, Posted,
    QpConfig, RcQp, RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Srq, SrqConfig,
};

/// One end of one rail.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Endpoint {
    // What each message needs comes first.
    pub(super) qps: Vec<RcQp>,
    next_qp: usize,
    /// Receives posted and not completed.
    pub(super) posted: u32,
    /// Receiver: the requests of queue pair 0, all of them clear-to-sends and probes.
    pub(super) signaling: Signaling<SIGNAL_INTERVAL>,
    /// How often the rail was built before.
    pub(super) epoch: u32,
    /// The peer's `memory` and `staging`, once connected.
    pub(super) peer: RemoteMemory,
    pub(super) peer_staging: RemoteMemory,
    /// Sender: clear-to-sends. Receiver: records.
    pub(super) memory: Mr,
    pub(super) cq: Cq,
    /// The receiver's receives, if it has several queue pairs. Otherwise its queue pair has them.
    srq: Option<Srq>,
    role: Role,
    /// Sender: records that the leader rail sends. Receiver: clear-to-sends of groups, and the source of staged messages.
    pub(super) source: Mr,
    /// Receiver: where staged messages arrive.
    pub(super) staging: Option<Mr>,
}

/// `wr_id` of a probe.
pub(super) const PROBE: u64 = u64::MAX;
/// `wr_id` of clear-to-sends.
pub(super) const CLEAR_TO_SEND: u64 = u64::MAX - 1;

/// One clear-to-send in this many has a completion. Which rail carries one depends on the traffic, so it is counted on each rail.
pub(super) const SIGNAL_INTERVAL: u32 = 64;
/// What the peer may do.
const ACCESS: Access = Access::REMOTE_WRITE;

const EMPTY: RemoteMemory = RemoteMemory { addr: 0, len: 0, rkey: 0, reserved: 0 };

impl Endpoint {
    /// Creates the queues and the memory of an end of rail `rail`.
    pub(super) fn create(
        context: &Context,
        rail: usize,
        role: Role,
        agreed: &Agreement,
        epoch: u32,
    ) -> Result<Endpoint, DeviceError> {
        let (device, domain, config) = (&context.devices[rail], &context.domains[rail], &context.config);
        let attr = device.attr();
        let group = agreed.max_group as u32;
        let sends = match role {
            // A message is at most one WRITE per buffer and a WRITE+IMM; a lost part is sent again.
            Role::Sender => MAX_SLOTS as u32 * (group + 1) + 64,
            Role::Receiver => 4 * MAX_SLOTS as u32,
        };
        let sends = sends.min(attr.max_qp_wr).max(Signaling::<SIGNAL_INTERVAL>::MIN_DEPTH);
        let high_water = config.high_water.max(agreed.slots as u32 + config.low_water).min(attr.max_srq_wr);
        let depth = match role {
            Role::Sender => 2 * MAX_SLOTS as u32 * agreed.data_qps as u32 + 64,
            Role::Receiver => high_water + 4 * MAX_SLOTS as u32,
        };
        let cq = device.create_cq(&CqConfig { depth: depth.min(attr.max_cqe) })?;
        // One queue pair has a receive queue of its own, from which a sender takes with fewer instructions.
        let srq = match role {
            Role::Receiver if agreed.data_qps > 1 => {
                Some(domain.create_srq(&SrqConfig { max_wr: high_water, max_sge: 1 })?)
            }
            _ => None,
        };
        let has_own_queue = role == Role::Receiver && agreed.data_qps == 1;
        let qp_config = QpConfig {
            max_send_wr: sends,
            max_recv_wr: if has_own_queue { high_water.min(attr.max_qp_wr) } else { 1 },
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: (CTS_LEN as u32).min(attr.max_inline),
        };
        let qps = (0..agreed.data_qps)
            .map(|_| {
                let mut qp = domain.create_rc(&qp_config, &cq, &cq, srq.as_ref())?;
                // Receives can be posted from then on.
                qp.init(ACCESS)?;
                Ok(qp)
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        let cts_len = agreed.slots * agreed.max_group * CTS_LEN;
        let record_len = agreed.slots * RECORD_LEN;
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let (memory, source) = match role {
            Role::Sender => {
                (domain.allocate(cts_len, written)?, domain.allocate(record_len, Access::LOCAL_WRITE)?)
            }
            Role::Receiver => {
                (domain.allocate(record_len, written)?, domain.allocate(cts_len, Access::LOCAL_WRITE)?)
            }
        };
        let staging_len = agreed.slots * agreed.staging as usize;
        let staging = match role {
            Role::Receiver if staging_len > 0 => Some(domain.allocate(staging_len, written)?),
            _ => None,
        };
        let mut endpoint = Endpoint {
            cq,
            qps,
            srq,
            posted: 0,
            signaling: Signaling::new(),
            memory,
            source,
            staging,
            peer: EMPTY,
            peer_staging: EMPTY,
            next_qp: 0,
            epoch,
            role,
        };
        // A peer may send as soon as it is connected; the counters of the connection begin with its first request.
        endpoint
            .refill(config.low_water.max(1), high_water)
            .map_err(|error| DeviceError::Refused(format!("posting receives: {error}")))?;
        Ok(endpoint)
    }

    pub(super) fn address(&self) -> EndpointAddress {
        EndpointAddress {
            memory: self.memory.remote(),
            staging: self.staging.as_ref().map_or(EMPTY, Mr::remote),
            qps: self.qps.iter().map(RcQp::address).collect(),
        }
    }

    /// Connects the queue pairs with those of the peer.
    pub(super) fn connect(&mut self, peer: &EndpointAddress, context: &Context) -> Result<(), DeviceError> {
        let config = ConnectConfig {
            access: ACCESS,
            traffic_class: context.config.traffic_class,
            service_level: context.config.service_level,
            ..ConnectConfig::default()
        };
        for (qp, peer) in self.qps.iter_mut().zip(&peer.qps) {
            qp.connect(peer, &config)?;
        }
        self.peer = peer.memory;
        self.peer_staging = peer.staging;
        Ok(())
    }

    /// The queue pair of the next message: each in turn.
    #[inline]
    pub(super) fn take_qp(&mut self) -> usize {
        let qp = self.next_qp;
        self.next_qp = if qp + 1 < self.qps.len() { qp + 1 } else { 0 };
        qp
    }

    /// Posts receives up to `high` if fewer than `low` are left. Returns how many it posted.
    #[inline]
    pub(super) fn refill(&mut self, low: u32, high: u32) -> Result<u32, PostError> {
        if self.posted >= low || self.role == Role::Sender {
            return Ok(0);
        }
        self.post_receives(low, high)
    }

    fn post_receives(&mut self, low: u32, high: u32) -> Result<u32, PostError> {
        let (before, mut refused) = (self.posted, 0);
        let receive = RecvWr { wr_id: 0, sges: &[] };
        while self.posted < high {
            let posted = match &mut self.srq {
                Some(srq) => srq.post_recvs(&receive, high - self.posted),
                None => self.qps[0].post_recv(&receive).map(|()| 1),
            };
            match posted {
                Ok(count) => self.posted += count,
                Err(PostError::Full) if self.posted >= low => break,
                Err(error) if refused >= POST_RETRIES => return Err(error),
                Err(_) => refused += 1,
            }
        }
        Ok(self.posted - before)
    }

    /// Posts an empty WRITE, whose acknowledgement shows that the rail works.
    pub(super) fn post_probe(&mut self, qp: usize) -> Result<Posted, PostError> {
        let nowhere = SendOp::Write(RemoteAddr { addr: 0, rkey: 0 });
        self.qps[qp].post(&SendWr::new(PROBE, nowhere, Data::Inline(&[])).signaled())
    }

    /// Polls the completion queue.
    #[inline]
    pub(super) fn poll(&mut self, mut each: impl FnMut(&Completion)) -> Result<usize, CqError> {
        self.cq.poll(POLL_BATCH, &mut each)
    }

    /// Moves all queue pairs to ERR. They are not used any more; an error changes nothing.
    pub(super) fn fail(&mut self) {
        for qp in &mut self.qps {
            qp.fail().ok();
        }
    }
}

/// How often a post that a device refuses is tried again.
const POST_RETRIES: u64 = 16;
/// The most completions per poll.
pub(super) const POLL_BATCH: usize = 64;

/// Posts a request; a queue that is full is tried again.
#[inline]
pub(super) fn retry(
    cells: &RailCells,
    mut post: impl FnMut() -> Result<Posted, PostError>,
) -> Result<Posted, PostError> {
    let mut tries = 0;
    loop {
        match post() {
            Err(PostError::Full) if tries < POST_RETRIES => {
                cells.retries.add(1);
                tries += 1;
            }
            posted => return posted,
        }
    }
}
