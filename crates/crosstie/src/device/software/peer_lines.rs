//! Peer lines: the cache lines in which peers announce what they are doing, and the owner's record of who writes which.
//!
//! For each peer device the owner creates one small segment with a table of [`PeerLine`]s. Only this peer maps it, so a peer
//! cannot write the lines of another one. The owner assigns a fresh line to every connection (`RcQp::ready_to_receive`) and
//! to every datagram sender (`Request::PEER_LINE`). **A line has one writer from assignment to withdrawal**: an old peer of a
//! queue pair that was reset or removed writes to its old line, never to the line of the new peer.
//!
//! A line is assigned again when its writer has closed it ([`OpenLine`] does that when it is dropped), or when the peer is
//! gone. Until then it stays in the record, and every removal of an object looks at it (`quiescence.rs`). A peer that never
//! closes its lines uses up its own table and gets an error; other peers do not notice.
//!
//! A datagram sender also has a number, with which it marks the receives that it takes. There are [`MAX_DATAGRAM_SENDERS`] of them, and the
//! devices of one process have at most [`MAX_DATAGRAM_SENDERS_PER_PROCESS`]. A number is given out again as soon as its sender is gone:
//! the receives that the sender had taken were collected by then (`SharedRecvQueue::announce_return`).
//!
//! Everything that the owner decides about lines it decides from the record here, which is private memory.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::error::os;
use super::layout::{
    LINES_PER_PEER, MAX_DATAGRAM_SENDERS, MAX_DATAGRAM_SENDERS_PER_PROCESS, PEER_LINES_LEN, PeerLine,
};
use crate::device::DeviceError;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};
use crate::ring::{presence, reservation};

/// What a line is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineUse {
    /// A connection of a queue pair in protection domain `pd`.
    Connection { pd: u32 },
    /// The datagram sender with this number. It reaches all datagram queue pairs, of any protection domain.
    Datagrams { sender: u32 },
}

/// A line that is assigned to a peer.
#[derive(Clone, Debug)]
pub(super) struct AssignedLine {
    /// The peer's device.
    pub(super) gid: [u8; 16],
    pub(super) index: u32,
    /// Identifies the assignment, see [`presence`].
    pub(super) tenure: u64,
    pub(super) usage: LineUse,
    pub(super) line: SharedRef<PeerLine>,
}

/// The lines of all peers.
#[derive(Debug, Default)]
pub(super) struct PeerLines {
    peers: HashMap<[u8; 16], PeerTable>,
    numbers: SenderNumbers,
}

/// The numbers of datagram senders.
#[derive(Debug, Default)]
struct SenderNumbers {
    /// Those from here on were never given out.
    unused: u32,
    free: VecDeque<u32>,
}

impl SenderNumbers {
    fn take(&mut self) -> Option<u32> {
        if self.unused < MAX_DATAGRAM_SENDERS {
            self.unused += 1;
            return Some(self.unused - 1);
        }
        self.free.pop_front()
    }

    fn give_back(&mut self, number: u32) {
        self.free.push_back(number);
    }
}

/// The lines of one peer.
#[derive(Debug)]
struct PeerTable {
    segment: Arc<Segment>,
    lines: SharedSlice<PeerLine>,
    records: Vec<Option<Record>>,
    free: Vec<u32>,
    /// Lines of connections that we no longer use and that the peer has not closed yet.
    retired: Vec<u32>,
    /// Lines of datagram senders.
    senders: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    tenure: u64,
    usage: LineUse,
}

impl PeerLines {
    /// The segment with the lines of peer `gid`, to hand over to it.
    pub(super) fn segment(&mut self, gid: &[u8; 16]) -> io::Result<Arc<Segment>> {
        Ok(self.table(gid)?.segment.clone())
    }

    fn table(&mut self, gid: &[u8; 16]) -> io::Result<&mut PeerTable> {
        match self.peers.entry(*gid) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => Ok(entry.insert(PeerTable::new()?)),
        }
    }

    /// Assigns a line to peer `gid`. `taken` is the number of receives that count as taken already.
    pub(super) fn assign(
        &mut self,
        gid: [u8; 16],
        tenure: u64,
        usage: LineUse,
        taken: u64,
    ) -> Result<AssignedLine, DeviceError> {
        let table = self.table(&gid).map_err(os("creating the table of peer lines"))?;
        let index = table.take_index().ok_or(DeviceError::Limit {
            what: "connections to one peer, including old ones that it has not left",
            asked: u64::from(LINES_PER_PEER) + 1,
            limit: LINES_PER_PEER.into(),
        })?;
        let line = &table.lines[index as usize];
        line.busy.store(0, Relaxed);
        line.claim.store(reservation::IDLE, Relaxed);
        line.taken.store(taken, Relaxed);
        line.cq_at.store(0, Relaxed);
        presence::assign(&line.tenure, tenure);
        table.records[index as usize] = Some(Record { tenure, usage });
        table.assigned(gid, index).ok_or(DeviceError::Exhausted { what: "peer lines" })
    }

    /// Assigns a line, and a number, to a datagram sender of peer `gid`. `of_process`: the devices of the peer's process, `gid` among them.
    pub(super) fn assign_datagram_sender(
        &mut self,
        gid: [u8; 16],
        tenure: u64,
        of_process: &[[u8; 16]],
    ) -> Result<AssignedLine, DeviceError> {
        let limit = MAX_DATAGRAM_SENDERS_PER_PROCESS;
        if self.count_senders(of_process) >= limit as usize {
            self.withdraw_closed_senders(of_process);
            if self.count_senders(of_process) >= limit as usize {
                let what = "datagram senders of one process";
                return Err(DeviceError::Limit { what, asked: u64::from(limit) + 1, limit: limit.into() });
            }
        }
        let sender = match self.numbers.take() {
            Some(sender) => sender,
            None => {
                let all: Vec<[u8; 16]> = self.peers.keys().copied().collect();
                self.withdraw_closed_senders(&all);
                self.numbers.take().ok_or(DeviceError::Exhausted { what: "datagram senders" })?
            }
        };
        let assigned = self.assign(gid, tenure, LineUse::Datagrams { sender }, 0);
        match (&assigned, self.peers.get_mut(&gid)) {
            (Ok(line), Some(table)) => table.senders.push(line.index),
            _ => self.numbers.give_back(sender),
        }
        assigned
    }

    fn count_senders(&self, devices: &[[u8; 16]]) -> usize {
        devices.iter().filter_map(|gid| self.peers.get(gid)).map(|table| table.senders.len()).sum()
    }

    /// Senders that have closed their line are gone, and so are their numbers.
    fn withdraw_closed_senders(&mut self, devices: &[[u8; 16]]) {
        for gid in devices {
            if let Some(table) = self.peers.get_mut(gid) {
                table.withdraw_closed_senders(&mut self.numbers);
            }
        }
    }

    /// Takes a line back that is no longer used here. If its writer may still write it, it stays in the record until the
    /// writer closes it. `gone`: the peer is gone and writes nothing any more.
    pub(super) fn retire(&mut self, line: &AssignedLine, gone: bool) {
        let Some(table) = self.peers.get_mut(&line.gid) else { return };
        if table.tenure(line.index) != Some(line.tenure) {
            return;
        }
        if gone || presence::withdraw(&table.lines[line.index as usize].tenure, line.tenure) {
            table.release(line.index);
            if let LineUse::Datagrams { sender } = line.usage {
                table.senders.retain(|index| *index != line.index);
                self.numbers.give_back(sender);
            }
        } else if !matches!(line.usage, LineUse::Datagrams { .. }) {
            table.retired.push(line.index);
        }
    }

    /// Forgets the table of a peer that is gone, once no line of it is in use.
    pub(super) fn forget_gone_peer(&mut self, gid: &[u8; 16]) {
        if let Some(table) = self.peers.get_mut(gid) {
            for index in std::mem::take(&mut table.retired) {
                table.release(index);
            }
            if table.records.iter().all(Option::is_none) {
                self.peers.remove(gid);
            }
        }
    }

    /// Whether the line still belongs to this assignment.
    pub(super) fn is_assigned(&self, line: &AssignedLine) -> bool {
        self.peers.get(&line.gid).is_some_and(|table| table.tenure(line.index) == Some(line.tenure))
    }

    /// All lines that are assigned, including retired ones.
    pub(super) fn all(&self) -> impl Iterator<Item = AssignedLine> {
        self.peers.iter().flat_map(|(gid, table)| {
            (0..table.records.len() as u32).filter_map(|index| table.assigned(*gid, index))
        })
    }
}

impl PeerTable {
    fn new() -> io::Result<PeerTable> {
        let segment = Arc::new(Segment::create(PEER_LINES_LEN)?);
        let lines = SharedSlice::new(&segment, 0, LINES_PER_PEER as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let [free, retired, senders] = [const { Vec::new() }; 3];
        Ok(PeerTable { segment, lines, records: Vec::new(), free, retired, senders })
    }

    fn tenure(&self, index: u32) -> Option<u64> {
        self.records.get(index as usize)?.map(|record| record.tenure)
    }

    fn assigned(&self, gid: [u8; 16], index: u32) -> Option<AssignedLine> {
        let Record { tenure, usage } = (*self.records.get(index as usize)?)?;
        let at = u64::from(index) * size_of::<PeerLine>() as u64;
        Some(AssignedLine { gid, index, tenure, usage, line: SharedRef::new(&self.segment, at)? })
    }

    fn take_index(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            for index in std::mem::take(&mut self.retired) {
                let tenure = self.tenure(index);
                if tenure.is_some_and(|tenure| presence::withdraw(&self.lines[index as usize].tenure, tenure))
                {
                    self.release(index);
                } else {
                    self.retired.push(index);
                }
            }
        }
        self.free.pop().or_else(|| {
            (self.records.len() < LINES_PER_PEER as usize).then(|| {
                self.records.push(None);
                self.records.len() as u32 - 1
            })
        })
    }

    fn release(&mut self, index: u32) {
        if self.records[index as usize].take().is_some() {
            // A peer that connects now cannot open it.
            self.lines[index as usize].tenure.store(0, Relaxed);
            self.free.push(index);
        }
    }

    /// Withdraws the lines of datagram senders that have closed theirs.
    fn withdraw_closed_senders(&mut self, numbers: &mut SenderNumbers) {
        for index in std::mem::take(&mut self.senders) {
            match self.records[index as usize] {
                Some(Record { tenure, usage: LineUse::Datagrams { sender } })
                    if presence::withdraw(&self.lines[index as usize].tenure, tenure) =>
                {
                    self.release(index);
                    numbers.give_back(sender);
                }
                _ => self.senders.push(index),
            }
        }
    }
}

/// A line at a peer that is ours to write, until this is dropped.
#[derive(Debug)]
pub(super) struct OpenLine {
    line: SharedRef<PeerLine>,
    tenure: u64,
}

impl OpenLine {
    /// Opens the line at `index` in the table that the peer made for us. `None` if it is not, or no longer, assigned with
    /// this `tenure`.
    pub(super) fn open(lines: &Arc<Segment>, index: u32, tenure: u64) -> Option<OpenLine> {
        let line: SharedRef<PeerLine> =
            SharedRef::new(lines, u64::from(index) * size_of::<PeerLine>() as u64)?;
        presence::open(&line.tenure, tenure).then_some(OpenLine { line, tenure })
    }
}

impl core::ops::Deref for OpenLine {
    type Target = PeerLine;
    #[inline]
    fn deref(&self) -> &PeerLine {
        &self.line
    }
}

impl Drop for OpenLine {
    fn drop(&mut self) {
        if self.line.is_of_this_process() {
            presence::close(&self.line.tenure, self.tenure);
        }
    }
}
