//! Letting clients in and out: what the watcher's thread does, and how the server hears of it.

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::IntoBytes;

use super::lane::{Board, Lane, Shape};
use crate::neighbor::greeting::{Greeting, Refusal};
use crate::neighbor::host::{Admission, GuestId, Guests};

/// What the watcher's thread and the server share.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) board: Board,
    shape: Shape,
    greeting: Greeting,
    max_clients: usize,
    news: Mutex<News>,
    /// Counts changes of `news`, ever.
    version: AtomicU32,
}

/// Who came and went since the server last asked.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) arrived: Vec<(GuestId, Lane)>,
    pub(super) left: Vec<GuestId>,
    /// Clients that are in, heard of or not.
    present: usize,
}

impl Door {
    pub(super) fn new(board: Board, shape: Shape, greeting: Greeting, max_clients: usize) -> Door {
        Door { board, shape, greeting, max_clients, news: Mutex::default(), version: AtomicU32::new(0) }
    }

    /// Changes whenever there is news.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        // Acquire, partner: the Release add in `tell`; though the mutex behind it would do.
        self.version.load(Acquire)
    }

    /// What is new.
    pub(super) fn take_news(&self) -> (Vec<(GuestId, Lane)>, Vec<GuestId>) {
        let mut news = self.news();
        (std::mem::take(&mut news.arrived), std::mem::take(&mut news.left))
    }

    fn news(&self) -> MutexGuard<'_, News> {
        // Every change is one statement; a panic leaves nothing half done.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, news: MutexGuard<'_, News>) {
        drop(news);
        // Release, partner: the Acquire load in `version`.
        self.version.fetch_add(1, Release);
        self.board.bell().wake();
    }
}

impl Guests for Door {
    fn admit(&self, guest: GuestId, hello: &[u8]) -> Admission {
        if let Some(refusal) = self.greeting.objection(hello) {
            return refusal.into();
        }
        let mut news = self.news();
        if news.present >= self.max_clients {
            return Refusal::full(self.max_clients).into();
        }
        let files = Lane::create(&self.shape).and_then(|lane| {
            let files = vec![lane.file()?, self.board.file()?];
            Ok((lane, files))
        });
        match files {
            Ok((lane, files)) => {
                news.arrived.push((guest, lane));
                news.present += 1;
                self.tell(news);
                Admission::Welcome { reply: self.shape.as_bytes().to_vec(), files }
            }
            Err(error) => Refusal::system(&error).into(),
        }
    }

    fn farewell(&self, guest: GuestId) -> bool {
        let mut news = self.news();
        news.present -= 1;
        // The server may never ask: what it has not heard of, it need not hear of.
        let unheard = news.arrived.len();
        news.arrived.retain(|(id, _)| *id != guest);
        if news.arrived.len() == unheard {
            news.left.push(guest);
        }
        self.tell(news);
        true
    }
}
