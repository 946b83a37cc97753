//! The peers of a device: links to them, which of them have mapped our segment, and the lines that they write.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::error::os;
use super::link::Link;
use super::lock::locked;
use super::peer_lines::{AssignedLine, LineUse, PeerLines};
use super::watch::Watch;
use crate::device::{DeviceAddress, DeviceError};

/// The peers of one device.
#[derive(Debug)]
pub(super) struct Peers {
    /// The name of the device.
    gid: [u8; 16],
    links: Mutex<HashMap<[u8; 16], Arc<Link>>>,
    /// Peer devices that have mapped our segment, with the number of connections of each.
    connected: Mutex<HashMap<[u8; 16], usize>>,
    pub(super) lines: Mutex<PeerLines>,
}

impl Peers {
    pub(super) fn new(gid: [u8; 16]) -> Peers {
        Peers { gid, links: Mutex::default(), connected: Mutex::default(), lines: Mutex::default() }
    }

    // Links.

    /// The link to a peer device; connects to the peer if it is not connected yet.
    pub(super) fn link(&self, to: &DeviceAddress, watch: &Watch) -> Result<Arc<Link>, DeviceError> {
        if to.provider != DeviceAddress::SOFTWARE {
            return Err(DeviceError::BadAddress("it is not the address of a software device"));
        }
        if let Some(link) = self.known_link(&to.gid) {
            return Ok(link);
        }
        // Without the lock: the peer may take its time, and the service thread needs the lock when another peer ends.
        let link = Arc::new(Link::connect(self.gid, to.gid)?);
        let mut links = locked(&self.links);
        if let Some(link) = live_link(&links, &to.gid) {
            // Another thread was faster. Our connection is closed again.
            return Ok(link);
        }
        watch.add_link(&link).map_err(os("watching the peer's process"))?;
        links.insert(to.gid, link.clone());
        Ok(link)
    }

    /// The link to a peer device, if there is one.
    pub(super) fn known_link(&self, gid: &[u8; 16]) -> Option<Arc<Link>> {
        live_link(&locked(&self.links), gid)
    }

    pub(super) fn remove_link(&self, link: &Arc<Link>) {
        let mut links = locked(&self.links);
        if links.get(&link.gid).is_some_and(|known| Arc::ptr_eq(known, link)) {
            links.remove(&link.gid);
        }
    }

    /// Drops all links.
    pub(super) fn clear_links(&self) {
        locked(&self.links).clear();
    }

    /// The process of a peer device, if there is a link to it.
    pub(super) fn process(&self, gid: &[u8; 16]) -> Option<u32> {
        let link = locked(&self.links).get(gid).cloned()?;
        Some(link.pid.map_or(std::process::id(), |pid| pid.as_raw_nonzero().get() as u32))
    }

    /// The error of a call that gave up waiting for the peer with this device.
    pub(super) fn busy_error(&self, gid: Option<&[u8; 16]>) -> DeviceError {
        DeviceError::PeerBusy { process: gid.and_then(|gid| self.process(gid)) }
    }

    // Who has mapped our segment.

    /// A peer has connected, and gets our segment.
    pub(super) fn add_connection(&self, gid: [u8; 16]) {
        *locked(&self.connected).entry(gid).or_default() += 1;
    }

    /// A connection of a peer has ended. Returns whether it was the last one: then the peer is no longer working on our segment.
    pub(super) fn remove_connection(&self, gid: &[u8; 16]) -> bool {
        let mut connected = locked(&self.connected);
        if let Some(count) = connected.get_mut(gid) {
            *count -= 1;
            if *count > 0 {
                return false;
            }
        }
        connected.remove(gid);
        true
    }

    /// Whether the device with this name is connected to us, so that it may be working on our segment.
    pub(super) fn is_connected(&self, gid: &[u8; 16]) -> bool {
        locked(&self.connected).contains_key(gid)
    }

    // Lines.

    /// Assigns a peer line to a new connection with device `gid`.
    pub(super) fn assign_line(
        &self,
        gid: [u8; 16],
        tenure: u64,
        usage: LineUse,
        taken: u64,
    ) -> Result<AssignedLine, DeviceError> {
        locked(&self.lines).assign(gid, tenure, usage, taken)
    }

    /// Takes a peer line back that is not used here any more, as soon as its writer has closed it.
    pub(super) fn retire_line(&self, line: &AssignedLine) {
        let mut lines = locked(&self.lines);
        let gone = !self.is_connected(&line.gid);
        lines.retire(line, gone);
        if gone {
            lines.forget_gone_peer(&line.gid);
        }
    }

    /// Takes the line of a datagram sender back that is gone.
    pub(super) fn reclaim_line(&self, line: &AssignedLine) {
        let mut lines = locked(&self.lines);
        // Its device may be connected again by now; what had the line open before is gone all the same.
        lines.retire(line, true);
        if !self.is_connected(&line.gid) {
            lines.forget_gone_peer(&line.gid);
        }
    }
}

fn live_link(links: &HashMap<[u8; 16], Arc<Link>>, gid: &[u8; 16]) -> Option<Arc<Link>> {
    links.get(gid).filter(|link| !link.is_dead()).cloned()
}
