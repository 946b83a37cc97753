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
//! Everything that the owner decides about lines it decides from the record here, which is private memory.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::layout::{LINES_PER_PEER, MAX_DATAGRAM_SENDERS, PEER_LINES_LEN, PeerLine};
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
    /// By number: whether the datagram sender exists.
    datagram_senders: Vec<bool>,
}

/// The lines of one peer.
#[derive(Debug)]
struct PeerTable {
    segment: Arc<Segment>,
    lines: SharedSlice<PeerLine>,
    records: Vec<Option<Record>>,
    free: Vec<u32>,
    /// Lines that we no longer use and that the peer has not closed yet.
    retired: Vec<u32>,
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
        let table = self.table(&gid).map_err(super::state::os("creating the table of peer lines"))?;
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

    /// Assigns a line, and a number, to a datagram sender of peer `gid`.
    pub(super) fn assign_datagram_sender(
        &mut self,
        gid: [u8; 16],
        tenure: u64,
    ) -> Result<AssignedLine, DeviceError> {
        // Senders that have closed their line are gone, and so are their numbers.
        for table in self.peers.values_mut() {
            for sender in table.withdraw_closed_senders() {
                self.datagram_senders[sender as usize] = false;
            }
        }
        let sender = match self.datagram_senders.iter().position(|exists| !exists) {
            Some(sender) => sender,
            None if self.datagram_senders.len() < MAX_DATAGRAM_SENDERS as usize => {
                self.datagram_senders.push(false);
                self.datagram_senders.len() - 1
            }
            None => return Err(DeviceError::Exhausted { what: "datagram senders" }),
        };
        let line = self.assign(gid, tenure, LineUse::Datagrams { sender: sender as u32 }, 0)?;
        self.datagram_senders[sender] = true;
        Ok(line)
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
                self.datagram_senders[sender as usize] = false;
            }
        } else {
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
        Ok(PeerTable { segment, lines, records: Vec::new(), free: Vec::new(), retired: Vec::new() })
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

    /// Withdraws the lines of datagram senders that have closed theirs; returns the numbers of the senders.
    fn withdraw_closed_senders(&mut self) -> Vec<u32> {
        let mut closed = Vec::new();
        for index in 0..self.records.len() {
            if let Some(Record { tenure, usage: LineUse::Datagrams { sender } }) = self.records[index]
                && presence::withdraw(&self.lines[index].tenure, tenure)
            {
                self.release(index as u32);
                closed.push(sender);
            }
        }
        closed
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
