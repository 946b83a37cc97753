//! One side of the measured connection: its device, its queues, its memory.

use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Device, Mr, Pd, QpAddress, QpConfig, RcQp, RecvWr, RemoteAddr,
    RemoteMemory, SendOp,
};
use crosstie::telemetry::Counters;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::plan::{Op, Plan};
use super::sender::{Sender, SignalPolicy};
use crate::error::Error;
use crate::spin_wait::SpinWait;

/// What every byte is that a READ finds.
pub(super) const PATTERN: u8 = 0x5A;

/// What one side tells the other.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct PeerInfo {
    address: QpAddress,
    slots: RemoteMemory,
    control: RemoteMemory,
}

impl PeerInfo {
    /// A slot of that side.
    #[inline]
    pub(super) fn slot(&self, payload: usize, slot: usize) -> RemoteAddr {
        self.slots.at((slot * stride(payload)) as u64)
    }

    /// Where that side wants to be told how many messages are consumed.
    #[inline]
    pub(super) fn consumed(&self) -> SendOp {
        SendOp::Write(self.control.at(0))
    }
}

/// One side.
///
/// ```text
/// slots    what the other side aims at: one for each message in flight, or, for SEND, for each receive; each from a new line
/// source   (in `sender`) where requests take their bytes from, or READs and atomics put them: the same shape
/// control  the number of messages that the other side has consumed
/// ```
pub(super) struct Connection {
    pub(super) payload: usize,
    pub(super) depth: usize,
    pub(super) op: Op,
    pub(super) qp: RcQp,
    pub(super) sender: Sender,
    pub(super) recv_cq: Cq,
    /// Receives posted, each with a slot of its own.
    pub(super) receives: usize,
    pub(super) slots: Mr,
    control: Mr,
    /// Keeps what was registered in place; dropped after `slots`.
    _in_place: Option<Vec<u64>>,
    peer: Option<PeerInfo>,
    pub(super) spin: SpinWait,
    /// Messages whose data was wrong.
    pub(super) errors: u64,
    _pd: Pd,
}

/// Receives that a side keeps posted, if its messages are small.
const POSTED_RECEIVES: usize = 256;

impl Connection {
    pub(super) fn new(plan: &Plan, device: &Device, spin: SpinWait) -> Result<Connection, Error> {
        plan.check(device)?;
        let Plan { op, payload, depth, .. } = *plan;
        let pd = device.alloc_pd()?;
        // Receives in stock, as anybody would have who expects messages; large ones only as many as there can be.
        let receives = if payload <= 4096 { POSTED_RECEIVES.max(depth + 1) } else { depth + 1 };
        let places = if op == Op::Send { receives } else { depth + 1 };
        let signals = SignalPolicy::new(depth);
        let config = QpConfig {
            max_send_wr: signals.queue(),
            max_recv_wr: receives as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: Plan::max_inline(device),
        };
        let cq = device.create_cq(&CqConfig { depth: config.max_send_wr + 1 })?;
        let recv_cq = device.create_cq(&CqConfig { depth: config.max_recv_wr + 1 })?;
        let mut qp = pd.create_rc(&config, &cq, &recv_cq, None)?;
        qp.init(Access::ALL)?;
        let memory = places * stride(payload);
        let mut in_place = plan.in_place.then(|| vec![0u64; memory / 8]);
        #[allow(unsafe_code, reason = "registers memory in place")]
        let slots = match &mut in_place {
            // SAFETY: the vector is kept beside the region and outlives it (field order), its memory never moves, and
            // nothing reads or writes it but through the region.
            Some(words) => unsafe { pd.register(words.as_mut_ptr().cast(), memory, Access::ALL)? },
            None => pd.allocate(memory, Access::ALL)?,
        };
        let source = pd.allocate(memory, Access::ALL)?;
        // Touches every page, so that no slice pays for that, and gives READs something to find.
        source.write(0, &vec![1; memory])?;
        slots.write(0, &vec![if op == Op::Read { PATTERN } else { 0 }; memory])?;
        let inline = plan.is_inline(device).then_some([1; 220]);
        let sender = Sender { op, payload, source, inline, cq, counters: Counters::default(), signals };
        let control = pd.allocate(64, Access::ALL)?;
        let mut connection = Connection {
            payload,
            depth,
            op,
            qp,
            sender,
            recv_cq,
            receives,
            slots,
            control,
            _in_place: in_place,
            peer: None,
            spin,
            errors: 0,
            _pd: pd,
        };
        if op.is_received() {
            for slot in 0..receives {
                connection.post_receive(slot)?;
            }
        }
        Ok(connection)
    }

    /// What the other side needs to know.
    pub(super) fn peer_info(&self) -> PeerInfo {
        PeerInfo { address: self.qp.address(), slots: self.slots.remote(), control: self.control.remote() }
    }

    /// Connects to the side whose info this is.
    pub(super) fn connect(&mut self, info: &[u8]) -> Result<(), Error> {
        let info = PeerInfo::read_from_bytes(info).map_err(|_| Error::Protocol)?;
        self.qp.connect(&info.address, &ConnectConfig::default())?;
        self.peer = Some(info);
        Ok(())
    }

    #[inline]
    pub(super) fn peer(&self) -> Result<PeerInfo, Error> {
        self.peer.ok_or(Error::Protocol)
    }

    /// Posts a receive; a SEND lands in the slot.
    #[inline]
    pub(super) fn post_receive(&mut self, slot: usize) -> Result<(), Error> {
        self.sender.counters.receives += 1;
        let wr_id = slot as u64;
        if self.op == Op::Send {
            let at = slot * stride(self.payload);
            let sges = [self.slots.sge(at..at + self.payload)?];
            self.qp.post_recv(&RecvWr { wr_id, sges: &sges })?;
        } else {
            self.qp.post_recv(&RecvWr { wr_id, sges: &[] })?;
        }
        Ok(())
    }

    /// How many messages the other side says it has consumed.
    #[inline]
    pub(super) fn consumed(&self) -> Result<u64, Error> {
        let mut word = 0u64;
        self.control.read(0, word.as_mut_bytes())?;
        Ok(word)
    }
}

/// Whether a slot of this memory begins with the number `seq`; its first line is read in any case.
#[inline]
pub(super) fn slot_holds(memory: &Mr, payload: usize, slot: usize, seq: u64) -> Result<bool, Error> {
    let mut line = [0u64; 8];
    let seen = payload.min(64);
    memory.read(slot * stride(payload), &mut line.as_mut_bytes()[..seen])?;
    Ok(seen < 8 || line[0] == seq)
}

/// From one slot to the next.
#[inline]
pub(super) fn stride(payload: usize) -> usize {
    payload.max(1).next_multiple_of(64)
}
