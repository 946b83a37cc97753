//! The datagram queue pair of a member: one receive port for the message packets of all members.

use crosstie_protocol::group::{HEADER_SIZE, MAX_MTU, MemberId};

use super::config::limits::SEND_QUEUE;
use super::link::{SendKey, SendQueue};
use crate::device::{
    Access, Ah, Completion, Cq, CqConfig, CqError, Data, Device, DeviceError, Mr, OutOfRegion, Pd, PostError,
    Posted, QpConfig, RecvWr, SendOp, UdQp,
};

/// Bytes of a receive: the device's header and a packet, rounded up to whole cache lines.
pub(super) const DATAGRAM_SLOT: usize = (UdQp::GRH + HEADER_SIZE + MAX_MTU).next_multiple_of(64);

/// Where the datagrams to one other member go.
#[derive(Debug)]
pub(super) struct PeerPort {
    pub(super) address: Ah,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
}

/// The datagram queue pair.
#[derive(Debug)]
pub(super) struct DatagramPort {
    qp: UdQp,
    pub(super) recv_cq: Cq,
    send_cq: Cq,
    pub(super) receives: Mr,
    peers: Vec<Option<PeerPort>>,
    pub(super) queue: SendQueue,
    pub(super) max_inline: usize,
}

impl DatagramPort {
    pub(super) fn new(
        device: &Device,
        pd: &Pd,
        receives: usize,
        max_inline: u32,
    ) -> Result<DatagramPort, DeviceError> {
        let recv_cq = device.create_cq(&CqConfig { depth: 2 * receives as u32 })?;
        let send_cq = device.create_cq(&CqConfig { depth: SEND_QUEUE })?;
        let sizes = QpConfig {
            max_send_wr: SEND_QUEUE,
            max_recv_wr: receives as u32,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline,
        };
        let qp = pd.create_ud(&sizes, &send_cq, &recv_cq, None)?;
        Ok(DatagramPort {
            qp,
            recv_cq,
            send_cq,
            receives: pd.allocate(receives * DATAGRAM_SLOT, Access::LOCAL_WRITE)?,
            peers: Vec::new(),
            queue: SendQueue::default(),
            max_inline: max_inline as usize,
        })
    }

    pub(super) fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Starts to send and to receive.
    pub(super) fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        self.qp.activate(qkey)?;
        for slot in 0..self.receives.len() / DATAGRAM_SLOT {
            self.post_receive(slot).map_err(|error| DeviceError::Refused(error.to_string()))?;
        }
        Ok(())
    }

    pub(super) fn add_peer(&mut self, peer: MemberId, port: PeerPort) {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(port);
    }

    /// Whether a datagram of this queue pair can come from this member.
    pub(super) fn is_from(&self, completion: &Completion, sender: MemberId) -> bool {
        let port = self.peers.get(sender.index()).and_then(Option::as_ref);
        port.is_some_and(|port| port.qp_num == completion.src_qp)
    }

    pub(super) fn post_receive(&mut self, slot: usize) -> Result<(), PostError> {
        let sge = self.receives.sge(slot * DATAGRAM_SLOT..(slot + 1) * DATAGRAM_SLOT);
        let sge = sge.map_err(|OutOfRegion { .. }| PostError::Invalid("no such receive slot"))?;
        self.qp.post_recv(&RecvWr { wr_id: slot as u64, sges: &[sge] })
    }

    /// Posts a packet. `slot`: the staging slot that holds its bytes.
    pub(super) fn post(
        &mut self,
        to: MemberId,
        data: Data<'_>,
        slot: Option<u16>,
    ) -> Result<Posted, PostError> {
        let Some(Some(port)) = self.peers.get(to.index()) else {
            return Err(PostError::Invalid("not a peer"));
        };
        let PeerPort { address, qp_num, qkey } = port;
        let qp = &mut self.qp;
        self.queue
            .post(SendOp::Send, data, SendKey::DATAGRAM, slot, |wr| qp.post(address, *qp_num, *qkey, wr))
    }

    /// Takes completions of the send queue. `free_slot` gets staging slots that became free.
    pub(super) fn poll_sends(&mut self, mut free_slot: impl FnMut(u16)) -> Result<(), CqError> {
        let queue = &mut self.queue;
        while self.send_cq.poll(32, |completion| {
            let key = SendKey::decode(completion.wr_id);
            queue.complete(key.posted);
            if key.slot != 0 {
                free_slot(key.slot - 1);
            }
        })? == 32
        {}
        Ok(())
    }
}
