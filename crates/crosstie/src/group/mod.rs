//! Process groups: locks, barriers and messages between their members.
//!
//! A group has an id, a secret and a member list. Only members reach each other: packets of other groups, earlier creations of the group
//! and unopened channels are dropped and counted ([`Counters::dropped`]).
//!
//! | call | what it does | messages |
//! | --- | --- | --- |
//! | [`Group::lock`] | distributed queue, first come, first served; fencing tokens; `try`, time-out, cancellation | 0 if this member had it last, else at most 3 |
//! | [`Group::barrier`] | tree over all members; time-out, future, changing membership | 2(N-1) |
//! | [`Group::open_channel`] | SEND/RECEIVE: order per sender, messages of any length, over RC or UD | 1 per packet of 2 KiB, and acknowledgements |
//! | [`Group::open_tagged`] | `isend`, `irecv` with tags: matched at the receiver; long messages are PULLed | as above; 2 and a READ for a long one |
//! | [`Group::push`], [`Group::pull`], [`Group::put`] | one-sided access to the memory of members | 1 WRITE or READ |
//!
//! Promises:
//! - Every call ends. When a member dies, locks that it held pass on, barriers end with an error that names it, and sends to it fail.
//! - A packet comes from the member that it names as its sender: the members connect their queue pairs themselves, through the job.
//! - Packets are served while the application does something else: by a thread of the group, which parks when nothing comes.
//! - A message costs no allocation and no system call in the steady state.
//!
//! ```
//! use crosstie::bootstrap::{Limits, local};
//! use crosstie::device::Device;
//! use crosstie::group::{Group, GroupConfig};
//!
//! let members = local::in_process(2, Limits::default())?;
//! std::thread::scope(|scope| {
//!     for mut job in members {
//!         scope.spawn(move || {
//!             let device = Device::open(&"software".parse().unwrap()).unwrap();
//!             let group = Group::join(&mut job, &device, &GroupConfig::new(7)).unwrap();
//!             let guard = group.lock(0).acquire().unwrap();
//!             println!("member {} has the lock, token {}", group.member(), guard.fence());
//!             drop(guard);
//!             group.barrier(0).wait().unwrap();
//!         });
//!     }
//! });
//! # Ok::<(), crosstie::bootstrap::Error>(())
//! ```

mod barrier;
mod channel;
mod combined;
mod config;
mod counters;
mod datagram;
mod driver;
mod engine;
mod error;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod link;
mod lock;
mod message;
mod one_sided;
mod setup;
mod tagged;
mod wires;

use std::sync::Arc;
use std::time::Instant;

pub use crosstie_protocol::group::message::{OnGap, OnRefusal, Options as ChannelOptions};
pub use crosstie_protocol::group::{
    BarrierError, DropCounters, Dropped, FenceTable, LockCounters, LockError, LockState, MemberId,
    MemberRegion, MemberSet, PacketKind, StaleToken, Status, Token, TreeOptions, View,
};

pub use barrier::{Barrier, BarrierWait};
pub use config::{GroupConfig, ProgressMode, Transport};
pub use counters::Counters;
pub use error::{GroupError, JoinError, MemberReport};
pub use lock::{Lock, LockFuture, LockGuard};
pub use message::{Channel, Message, RecvFuture};
pub use one_sided::{MemberMemory, Put};
pub use tagged::{
    DEFAULT_EAGER_MAX, MessageInfo, Received, RecvRequest, SendRequest, Tagged, TaggedFailed, TaggedOptions,
};

use crate::bootstrap::Bootstrap;
use crate::device::Device;
use crate::process::{Creator, OwnThread};
use config::limits;
use driver::Shared;

/// One member's handle of a process group.
///
/// Dropping it leaves the group: the other members then see this one as dead, and calls of [`Lock`]s, [`Barrier`]s and [`Channel`]s that
/// still exist fail with [`GroupError::Left`]. Programs that end together call a barrier, or [`Bootstrap::finish`], before.
#[derive(Debug)]
pub struct Group {
    shared: Arc<Shared>,
    thread: Option<OwnThread>,
    creator: Creator,
    member: MemberId,
    members: usize,
    one_sided: Option<Arc<one_sided::OneSided>>,
}

impl Group {
    /// Joins a group. All ranks of the job call this at the same time, or [`Group::skip`].
    pub fn join(job: &mut dyn Bootstrap, device: &Device, config: &GroupConfig) -> Result<Group, JoinError> {
        let engine = setup::join(job, device, config)?;
        let (member, members, one_sided) = (engine.me(), engine.members, engine.one_sided.clone());
        let shared = Arc::new(Shared::new(engine, config.wait));
        let thread = match config.progress {
            ProgressMode::Thread => Some(shared.start_thread().map_err(JoinError::Thread)?.into()),
            ProgressMode::Manual => None,
        };
        Ok(Group { shared, thread, creator: Creator::this_process(), member, members, one_sided })
    }

    /// Lets the other ranks of the job make a group without this one.
    pub fn skip(job: &mut dyn Bootstrap) -> Result<(), JoinError> {
        setup::skip(job)
    }

    /// This member.
    pub fn member(&self) -> MemberId {
        self.member
    }

    /// Number of members, dead ones included.
    pub fn members(&self) -> usize {
        self.members
    }

    /// The members that are known to be dead.
    pub fn dead(&self) -> MemberSet {
        // Not a use of the engine: a program that only looks must not keep the group's thread from serving.
        *self.shared.lock().machine.dead()
    }

    /// The members on which all members of the view agree, and its number.
    pub fn view(&self) -> View {
        self.shared.lock().machine.view()
    }

    /// Lock number `id`.
    pub fn lock(&self, id: u32) -> Lock {
        Lock { shared: self.shared.clone(), id }
    }

    /// Barrier number `id`.
    pub fn barrier(&self, id: u32) -> Barrier {
        Barrier { shared: self.shared.clone(), id }
    }

    /// Serves packets once, without waiting. Returns how many there were. Needed with [`ProgressMode::Manual`] only.
    pub fn progress(&self) -> usize {
        let mut engine = self.shared.engine();
        let count = engine.progress_before_park();
        self.shared.release(engine);
        let endpoints = self.one_sided.iter().flat_map(|one_sided| one_sided.peers.iter().flatten());
        count + endpoints.map(|endpoint| endpoint.progress()).sum::<usize>()
    }

    /// Declares a member dead, for example one that is stopped while it holds a lock. Any member can do so, and it is final: all others
    /// learn of it, the tokens of the expelled member are older than those that follow, and its calls fail with
    /// [`GroupError::Expelled`] when it runs again.
    pub fn expel(&self, member: MemberId) -> Result<(), GroupError> {
        if member.index() >= self.members || member == self.member {
            return Err(GroupError::NoSuchPeer(member));
        }
        let mut engine = self.shared.engine();
        engine.expel(member);
        self.shared.release(engine);
        Ok(())
    }

    /// What this member has done so far.
    pub fn counters(&self) -> Counters {
        // Not a use of the engine, as for `dead`.
        self.shared.lock().snapshot()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A forked child is no member.
        if !self.creator.is_this_process() {
            return;
        }
        self.shared.stop_thread();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
        let mut engine = self.shared.lock();
        engine.leave();
        self.shared.release(engine);
        let begin = Instant::now();
        while !self.shared.lock().has_left() && begin.elapsed() < limits::LEAVE_WAIT {
            std::thread::yield_now();
        }
        // Who does not take it sees the link close.
        self.shared.lock().wires.closing.clear();
    }
}
