//! PUSH, PULL and PUT (RHiNET §1): one-sided access to the memory of other members, with futures of [`endpoint`](crate::endpoint).
//!
//! Each pair of members has an endpoint of its own, in the protection domain of the group. So a member reaches memory that was
//! allocated or registered through this group, of this creation of it, and nothing else. Descriptions of memory that come from
//! another group, another epoch or a dead member are refused and counted. When a member is declared dead, its endpoints are closed at
//! all others: no write that it begins then has an effect there. One that a device is executing at that moment may still end.
//!
//! ```text
//!   PUSH   buffer here  ──────>  region there      zero-copy WRITE
//!   PULL   buffer here  <──────  region there      zero-copy READ
//!   PUT    a few bytes  ──────>  region there      copied at the call, no buffer needed
//! ```

use core::ops::RangeBounds;
use core::pin::Pin;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::task::{Context, Poll};
use std::sync::{Arc, Mutex, PoisonError};

use crosstie_protocol::group::{GroupId, MemberId, MemberRegion};

use super::Group;
use super::config::limits::{MAX_PUT, PUT_SLOTS};
use super::error::GroupError;
use crate::device::{Device, DeviceAddress, DeviceError, Pd, RemoteMemory};
use crate::endpoint::{
    Buffer, BufferReturn, Completed, Endpoint, EndpointConfig, Failed, Lend, NotStarted, OneBuffer,
    OperationFuture, PoolBuffer, Progress, Refused,
};
use crate::region::{RegisterError, Rights, StableMemory};

/// The endpoints of a member.
#[derive(Debug)]
pub(super) struct OneSided {
    id: GroupId,
    me: MemberId,
    address: DeviceAddress,
    /// Not connected: it allocates and registers memory.
    local: Endpoint,
    pub(super) peers: Box<[Option<Endpoint>]>,
    puts: Arc<PutPool>,
    /// Operations that were refused because their memory belongs to another group.
    foreign: AtomicU64,
}

/// An endpoint that will be connected to each peer.
pub(super) struct UnconnectedEndpoints {
    local: Endpoint,
    pub(super) peers: Vec<Option<Endpoint>>,
}

impl UnconnectedEndpoints {
    pub(super) fn new(
        device: &Device,
        pd: &Arc<Pd>,
        members: usize,
        me: MemberId,
        progress: Progress,
    ) -> Result<UnconnectedEndpoints, DeviceError> {
        let config = EndpointConfig { messages: 1, imm_window: 1, progress, ..EndpointConfig::default() };
        let open = |member| {
            if member == me.index() { Ok(None) } else { Endpoint::new(device, pd, &config).map(Some) }
        };
        let idle = EndpointConfig { operations: 1, slots: 1, progress: Progress::Caller, ..config.clone() };
        Ok(UnconnectedEndpoints {
            local: Endpoint::new(device, pd, &idle)?,
            peers: (0..members).map(open).collect::<Result<_, _>>()?,
        })
    }

    /// After every endpoint was connected.
    pub(super) fn connected(
        self,
        id: GroupId,
        me: MemberId,
        device: &Device,
    ) -> Result<OneSided, DeviceError> {
        Ok(OneSided {
            id,
            me,
            address: device.address(),
            puts: Arc::new(PutPool::new(self.local.allocate(PUT_SLOTS * MAX_PUT)?)),
            local: self.local,
            peers: self.peers.into_boxed_slice(),
            foreign: AtomicU64::new(0),
        })
    }
}

/// Memory of another member, or of this one, that PUSH, PULL and PUT can reach. Made by [`Group::import`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberMemory {
    group: GroupId,
    member: MemberId,
    remote: RemoteMemory,
    rights: Rights,
}

impl MemberMemory {
    /// Whose memory it is.
    pub fn member(&self) -> MemberId {
        self.member
    }

    pub(super) fn remote(&self) -> RemoteMemory {
        self.remote
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.remote.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.remote.len == 0
    }
}

impl OneSided {
    pub(super) fn endpoint(&self, member: MemberId) -> Option<&Endpoint> {
        self.peers.get(member.index())?.as_ref()
    }

    pub(super) fn describe(&self, buffer: &Buffer) -> MemberRegion {
        let region = buffer.region().describe(&self.address);
        match region.slice(buffer.start() as u64, buffer.len() as u64) {
            Ok(region) => MemberRegion { group: self.id, member: self.me, region },
            Err(error) => unreachable!("a buffer is inside its region: {error}"),
        }
    }

    /// The memory that a member has described. The description was checked by the gate.
    pub(super) fn import(&self, described: &MemberRegion) -> Result<MemberMemory, GroupError> {
        let endpoint = self.endpoint(described.member).ok_or(GroupError::NoSuchPeer(described.member))?;
        let remote = endpoint.import(&described.region, Rights::default()).map_err(GroupError::NotStarted)?;
        let rights = described.region.rights();
        Ok(MemberMemory { group: described.group, member: described.member, remote, rights })
    }

    pub(super) fn foreign(&self) -> u64 {
        self.foreign.load(Relaxed)
    }

    fn check(&self, memory: &MemberMemory, needs: Rights) -> Result<&Endpoint, NotStarted> {
        if memory.group != self.id {
            self.foreign.fetch_add(1, Relaxed);
            return Err(NotStarted::ForeignRegion);
        }
        if !memory.rights.contain(needs) {
            return Err(NotStarted::MissingRights(memory.rights));
        }
        self.endpoint(memory.member).ok_or(NotStarted::NotConnected)
    }
}

const READ: Rights = Rights { read: true, write: false, atomic: false };
const WRITE: Rights = Rights { read: false, write: true, atomic: false };

/// PUSH, PULL and PUT. They need [`GroupConfig::one_sided`](super::GroupConfig::one_sided).
impl Group {
    fn one_sided(&self) -> Result<&OneSided, GroupError> {
        self.one_sided.as_deref().ok_or(GroupError::NotOneSided)
    }

    /// Allocates a buffer that members may read and write once they have its description: zeroed, aligned to a page.
    pub fn allocate(&self, len: usize) -> Result<Buffer, GroupError> {
        let allocated = self.one_sided()?.local.allocate(len);
        allocated.map_err(|error| GroupError::Device(error.to_string()))
    }

    /// Registers memory of the program in place, as a buffer that members may read and write once they have its description.
    /// [`Buffer::into_memory`] gives it back.
    pub fn register<M: StableMemory>(&self, memory: M) -> Result<Buffer, RegisterError<M>> {
        match self.one_sided() {
            Ok(one_sided) => one_sided.local.register(memory),
            Err(error) => Err(RegisterError { memory, error: DeviceError::Refused(error.to_string()) }),
        }
    }

    /// Describes a buffer to the other members. Send the [bytes](MemberRegion::encode) to them; they give them to
    /// [`Group::import`].
    pub fn describe(&self, buffer: &Buffer) -> Result<MemberRegion, GroupError> {
        Ok(self.one_sided()?.describe(buffer))
    }

    /// The memory that another member has described. A description of another group, another creation of this group, or a dead
    /// member is refused and counted ([`Counters::dropped`](super::Counters::dropped)).
    pub fn import(&self, description: &[u8]) -> Result<MemberMemory, GroupError> {
        let one_sided = self.one_sided()?;
        let mut engine = self.shared.engine();
        let checked = engine.check_region(description);
        self.shared.release(engine);
        one_sided.import(&checked.map_err(GroupError::ForeignMemory)?)
    }

    /// PUSH: writes a range of a buffer into the memory of a member, at `offset`. The member takes no part and is not told.
    ///
    /// ```
    /// use crosstie::bootstrap::{Bootstrap, Limits, local};
    /// use crosstie::device::Device;
    /// use crosstie::group::{Group, GroupConfig, MemberId};
    ///
    /// let members = local::in_process(2, Limits::default())?;
    /// std::thread::scope(|scope| {
    ///     for mut job in members {
    ///         scope.spawn(move || {
    ///             let device = Device::open(&"software".parse().unwrap()).unwrap();
    ///             let config = GroupConfig::new(7).one_sided(true);
    ///             let group = Group::join(&mut job, &device, &config).unwrap();
    ///             let buffer = group.allocate(4096).unwrap();
    ///             let descriptions = job.all_gather(&group.describe(&buffer).unwrap().encode()).unwrap();
    ///             if group.member() == MemberId::new(0) {
    ///                 let memory = group.import(&descriptions[1]).unwrap();
    ///                 let source = group.allocate(5).unwrap();
    ///                 source.write(0, b"hello").unwrap();
    ///                 group.push(source, .., &memory, 8).unwrap().wait().unwrap();
    ///                 group.put(b", member 1", &memory, 13).unwrap().wait().unwrap();
    ///             }
    ///             group.barrier(0).wait().unwrap();
    ///             if group.member() == MemberId::new(1) {
    ///                 assert_eq!(&buffer.to_vec()[8..23], b"hello, member 1");
    ///             }
    ///         });
    ///     }
    /// });
    /// # Ok::<(), crosstie::bootstrap::Error>(())
    /// ```
    pub fn push<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        to: &MemberMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let checked = self.one_sided().map_err(|_| NotStarted::NotConnected);
        match checked.and_then(|one_sided| one_sided.check(to, WRITE)) {
            Ok(endpoint) => endpoint.write(buffer, range, &to.remote, offset),
            Err(cause) => Err(Refused { cause, buffer }),
        }
    }

    /// PULL: reads memory of a member, from `offset` on, into a range of a buffer. The member takes no part and is not told.
    pub fn pull<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        from: &MemberMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let checked = self.one_sided().map_err(|_| NotStarted::NotConnected);
        match checked.and_then(|one_sided| one_sided.check(from, READ)) {
            Ok(endpoint) => endpoint.read(buffer, range, &from.remote, offset),
            Err(cause) => Err(Refused { cause, buffer }),
        }
    }

    /// PUT: writes up to 256 bytes into the memory of a member, at `offset`. The bytes are copied, so the caller can use them again at
    /// once. Dropping the returned value does not stop the write.
    pub fn put(&self, bytes: &[u8], to: &MemberMemory, offset: u64) -> Result<Put, GroupError> {
        let one_sided = self.one_sided()?;
        let endpoint = one_sided.check(to, WRITE).map_err(GroupError::NotStarted)?;
        if bytes.len() > MAX_PUT {
            return Err(GroupError::PutTooLong { len: bytes.len(), max: MAX_PUT });
        }
        let (pool, member) = (&one_sided.puts, to.member);
        let slot =
            pool.take().ok_or(GroupError::NotStarted(NotStarted::TooManyOperations(PUT_SLOTS as u32)))?;
        let start = usize::from(slot) * MAX_PUT;
        // The slot is inside the pool's memory.
        if let Err(outside) = pool.memory.write(start, bytes) {
            pool.free(slot);
            return Err(GroupError::NotStarted(NotStarted::Local(outside)));
        }
        let range = start..start + bytes.len();
        match endpoint.write(pool.memory.clone(), range, &to.remote, offset) {
            Ok(operation) => Ok(Put { operation: Some(operation), slot, member, pool: pool.clone() }),
            Err(refused) => {
                pool.free(slot);
                Err(GroupError::NotStarted(refused.cause))
            }
        }
    }
}

/// Slots of registered memory for the bytes of PUTs.
#[derive(Debug)]
struct PutPool {
    memory: PoolBuffer,
    slots: Mutex<PutSlots>,
}

#[derive(Debug)]
struct PutSlots {
    free: Vec<u16>,
    /// Slots that nobody waits for and that the device may still read.
    abandoned: Vec<(u16, Abandoned)>,
}

#[derive(Debug)]
enum Abandoned {
    Running(OperationFuture<PoolBuffer>),
    Returning(BufferReturn<PoolBuffer>),
}

impl Abandoned {
    /// Whether the device does not read the slot any more.
    fn is_over(&mut self) -> bool {
        match self {
            Abandoned::Running(operation) => match operation.try_take() {
                None => false,
                Some(Ok(_)) => true,
                Some(Err(mut failed)) => {
                    let over = failed.buffer.try_take().is_some();
                    *self = Abandoned::Returning(failed.buffer);
                    over
                }
            },
            Abandoned::Returning(buffer) => buffer.try_take().is_some(),
        }
    }
}

impl PutPool {
    fn new(memory: Buffer) -> PutPool {
        let slots =
            PutSlots { free: (0..PUT_SLOTS as u16).collect(), abandoned: Vec::with_capacity(PUT_SLOTS) };
        PutPool { memory: memory.into_pool(), slots: Mutex::new(slots) }
    }

    fn take(&self) -> Option<u16> {
        let PutSlots { free, abandoned } = &mut *self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if free.is_empty() {
            abandoned.retain_mut(|(slot, abandoned)| {
                let over = abandoned.is_over();
                if over {
                    free.push(*slot);
                }
                !over
            });
        }
        free.pop()
    }

    fn free(&self, slot: u16) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).free.push(slot);
    }

    fn abandon(&self, slot: u16, abandoned: Abandoned) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).abandoned.push((slot, abandoned));
    }
}

/// A PUT in flight: a future, or [wait](Put::wait) for it.
#[derive(Debug)]
pub struct Put {
    operation: Option<OperationFuture<PoolBuffer>>,
    slot: u16,
    member: MemberId,
    pool: Arc<PutPool>,
}

impl Put {
    /// Waits until the bytes are in the member's memory.
    pub fn wait(mut self) -> Result<(), GroupError> {
        match self.operation.take() {
            Some(operation) => self.end(operation.wait()),
            None => Ok(()),
        }
    }

    fn end(&self, result: Result<Completed<PoolBuffer>, Failed<PoolBuffer>>) -> Result<(), GroupError> {
        match result {
            Ok(_) => {
                self.pool.free(self.slot);
                Ok(())
            }
            Err(failed) => {
                self.pool.abandon(self.slot, Abandoned::Returning(failed.buffer));
                Err(GroupError::Operation { member: self.member, cause: failed.cause })
            }
        }
    }
}

impl Future for Put {
    type Output = Result<(), GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(operation) = &mut self.operation else { return Poll::Ready(Ok(())) };
        match Pin::new(operation).poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                self.operation = None;
                Poll::Ready(self.end(result))
            }
        }
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.take() {
            self.pool.abandon(self.slot, Abandoned::Running(operation));
        }
    }
}
