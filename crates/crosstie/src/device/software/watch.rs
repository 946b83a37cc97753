//! What the service thread of a device waits for: the descriptors in its epoll instance.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use rustix::event::epoll;

use super::link::Link;
use super::lock::locked;
use super::wakeup::Wakeup;

/// Epoll token of the listening socket.
pub(super) const LISTENER: u64 = 0;
/// Epoll token of the eventfd.
pub(super) const WAKEUP: u64 = 1;
/// All other tokens are `id << 2 | kind`, with these kinds; ids start at 1.
pub(super) const PEER_SOCKET: u64 = 0;
pub(super) const PEER_PROCESS: u64 = 1;
const LINK_SOCKET: u64 = 2;
const LINK_PROCESS: u64 = 3;

/// The epoll instance of the service thread, and the links that it watches.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) epoll: OwnedFd,
    pub(super) wakeup: Arc<Wakeup>,
    /// Links whose peers are watched, by the id in their epoll tokens.
    links: Mutex<HashMap<u64, Arc<Link>>>,
    next_id: AtomicU64,
}

impl Watch {
    pub(super) fn open() -> io::Result<Watch> {
        let watch = Watch {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wakeup: Arc::new(Wakeup::open()?),
            links: Mutex::default(),
            next_id: AtomicU64::new(1),
        };
        watch.add(&*watch.wakeup, WAKEUP)?;
        Ok(watch)
    }

    /// Wakes the service thread.
    pub(super) fn wake(&self) {
        self.wakeup.wake();
    }

    /// An id for tokens.
    pub(super) fn take_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Watches a descriptor for reading.
    pub(super) fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?)
    }

    /// Watches a link, to notice when the peer is gone and when the link is broken off.
    pub(super) fn add_link(&self, link: &Arc<Link>) -> io::Result<()> {
        let id = self.take_id();
        link.set_watcher(&self.wakeup);
        // The thread finds the link when it handles its first event.
        let mut links = locked(&self.links);
        let socket = epoll::EventData::new_u64(id << 2 | LINK_SOCKET);
        epoll::add(&self.epoll, link.socket(), socket, epoll::EventFlags::RDHUP)?;
        if let Some(process) = &link.process {
            self.add(process, id << 2 | LINK_PROCESS).inspect_err(|_| self.remove_descriptors(link))?;
        }
        links.insert(id, link.clone());
        Ok(())
    }

    /// Watches a link no longer, and returns it.
    pub(super) fn take_link(&self, id: u64) -> Option<Arc<Link>> {
        let link = locked(&self.links).remove(&id)?;
        self.remove_descriptors(&link);
        Some(link)
    }

    fn remove_descriptors(&self, link: &Link) {
        // A failure is harmless: nothing else than the end of these descriptors is left to watch.
        epoll::delete(&self.epoll, link.socket()).ok();
        if let Some(process) = &link.process {
            epoll::delete(&self.epoll, process).ok();
        }
    }

    /// The ids of the links that threads of this process have broken off.
    pub(super) fn broken_links(&self) -> Vec<u64> {
        locked(&self.links).iter().filter(|(_, link)| link.is_dead()).map(|(id, _)| *id).collect()
    }

    /// Drops the links. The service thread has ended.
    pub(super) fn clear(&self) {
        locked(&self.links).clear();
    }
}
