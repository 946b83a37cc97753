//! The operations: a method of [`Endpoint`] with the description, and one of [`Submit`], which checks the arguments.

use core::ops::{Range, RangeBounds};

use super::batch::Batch;
use super::buffer::{Buffer, resolve};
use super::cause::{NotStarted, Refused};
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::lend::OneBuffer;
use super::operation::{Kind, What};
use crate::device::{RemoteAddr, RemoteMemory};

/// Of operations without memory of the peer.
const NOWHERE: RemoteAddr = RemoteAddr { addr: 0, rkey: 0 };

impl Endpoint {
    /// Reads bytes of the peer's memory at `offset` of `remote` into a range of a buffer. The peer's program takes no part.
    ///
    /// Large reads are split over the queue pairs. One operation moves at most [`DeviceAttr::max_message`](crate::device::DeviceAttr)
    /// bytes; a [`Batch`] moves any number.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let remote = there.allocate(4096)?;
    /// remote.write(100, b"over there")?;
    /// let read = here.read(here.allocate(10)?, .., &remote.remote(), 100)?;
    /// let done = read.wait()?;
    /// assert_eq!(done.buffer.to_vec(), b"over there");
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn read<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().read(buffer, range, remote, offset)
    }

    /// Writes a range of a buffer into the peer's memory, at `offset` of `remote`. The peer's program takes no part and is not told; see
    /// [`write_imm`](Endpoint::write_imm).
    ///
    /// Large writes are split over the queue pairs. Operations have no order among each other, unless there is one
    /// [queue pair](super::EndpointConfig::qps), as by default: then `write`s, `write_imm`s and batches take effect in the order of the calls, so
    /// they also wait for a `write_imm` that waits for the peer.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let (buffer, remote) = (here.allocate(4096)?, there.allocate(4096)?);
    /// buffer.write(0, b"hello")?;
    /// let write = here.write(buffer, ..5, &remote.remote(), 8)?;
    /// let done = write.wait()?;
    /// assert_eq!((done.bytes, done.buffer.len()), (5, 4096));
    /// assert_eq!(&remote.to_vec()[8..13], b"hello");
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn write<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().write(buffer, range, remote, offset)
    }

    /// Writes as [`write`](Endpoint::write) does, and then gives the peer's [`imm_recv`](Endpoint::imm_recv) an immediate: a number of the
    /// program. The bytes are in the peer's memory before the immediate is. It is never split.
    ///
    /// The peer has room for [`imm_window`](super::EndpointConfig::imm_window) immediates that its program has not taken. When it is
    /// full, the operation waits, and its deadline ends the wait. With one queue pair later transfers wait behind it.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let (buffer, remote) = (here.allocate(4096)?, there.allocate(4096)?);
    /// let write = here.write_imm(buffer, .., &remote.remote(), 0, 99)?;
    /// let event = there.imm_recv()?.wait()?;
    /// assert_eq!((event.imm, event.bytes), (Some(99), 4096));
    /// write.wait()?;
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn write_imm<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
        imm: u32,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().write_imm(buffer, range, remote, offset, imm)
    }

    /// Takes the next immediate that the peer's `write_imm`, or an announcement of a batch, has sent, in the order of their arrival. It
    /// does not matter whether the immediate or the call comes first. [`Completed::imm`](super::Completed::imm) is the number.
    ///
    /// It waits as long as the connection lives, unless it is started [`within`](Endpoint::within) a time. One that ends, or whose future is
    /// dropped, loses no immediate: the next call gets it.
    #[inline]
    pub fn imm_recv(&self) -> Result<OperationFuture<()>, Refused<()>> {
        self.submit_to_wait().imm_recv()
    }

    /// Sends a range of a buffer to the peer's next [`recv`](Endpoint::recv): the k-th `send` belongs to the k-th `recv`. The bytes go straight
    /// into the buffer of that `recv`; the operation waits until the peer has announced it. Large messages are split over the queue pairs.
    ///
    /// A message that is longer than the buffer ends with [`Cause::TooLong`](super::Cause::TooLong), and the buffer stays for the next
    /// `send`. A `send` that ends before it has a buffer counts as if it had never been called.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let buffer = here.allocate(4096)?;
    /// buffer.write(0, b"a message")?;
    /// let send = here.send(buffer, ..9)?;
    /// let recv = there.recv(there.allocate(1 << 20)?, ..)?;
    /// let message = recv.wait()?;
    /// assert_eq!(&message.buffer.to_vec()[..message.bytes as usize], b"a message");
    /// send.wait()?;
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn send<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().send(buffer, range)
    }

    /// Receives the next message of the peer into a range of a buffer, see [`send`](Endpoint::send).
    /// [`Completed::bytes`](super::Completed::bytes) is the length of the message.
    ///
    /// It waits as long as the connection lives, unless it is started [`within`](Endpoint::within) a time. One that ends before its message
    /// came loses no message: the next `recv` gets it, also if the peer had sent it by then. A `recv` whose buffer is too short for a message
    /// that waits so ends with [`Cause::TooLong`](super::Cause::TooLong), and the message stays for the next one.
    ///
    /// The peer knows the buffer and may write into it, so a `recv` that ends early keeps it until the peer has answered that it does not, or
    /// until the connection has ended and is drained.
    #[inline]
    pub fn recv<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit_to_wait().recv(buffer, range)
    }

    /// Writes the blocks of a batch. The result has the batch, with its buffers and, after a failure, the numbers of the blocks that
    /// [failed](Batch::failures).
    ///
    /// The blocks are checked against their buffers and regions first. The call posts as many work requests as the send queues have
    /// room for; the progress thread, or [`progress`](Endpoint::progress), posts the rest.
    pub fn write_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.submit().write_batch(batch)
    }

    /// Reads the blocks of a batch, see [`write_batch`](Endpoint::write_batch).
    pub fn read_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.submit().read_batch(batch)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::read`].
    #[inline]
    pub fn read<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::Read, buffer, range, remote, offset)
    }

    /// See [`Endpoint::write`].
    #[inline]
    pub fn write<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::Write, buffer, range, remote, offset)
    }

    /// See [`Endpoint::write_imm`].
    #[inline]
    pub fn write_imm<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
        imm: u32,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::WriteImm(imm), buffer, range, remote, offset)
    }

    /// See [`Endpoint::imm_recv`].
    pub fn imm_recv(&self) -> Result<OperationFuture<()>, Refused<()>> {
        self.start((), |()| Ok(What { kind: Kind::ImmRecv, range: 0..0, remote: NOWHERE }))
    }

    /// See [`Endpoint::send`].
    #[inline]
    pub fn send<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.start(buffer, |buffer| {
            let range = self.check_range(buffer.as_ref(), range)?;
            // Where it goes is known when the peer has announced a buffer.
            Ok(What { kind: Kind::Send, range, remote: NOWHERE })
        })
    }

    /// See [`Endpoint::recv`].
    #[inline]
    pub fn recv<B: OneBuffer>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.start(buffer, |buffer| {
            let buffer = buffer.as_ref();
            let range = self.check_range(buffer, range)?;
            let remote = buffer.region().remote().at(range.start as u64);
            Ok(What { kind: Kind::Recv(0), range, remote })
        })
    }

    /// See [`Endpoint::write_batch`].
    pub fn write_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.batch(Kind::WriteBatch, batch)
    }

    /// See [`Endpoint::read_batch`].
    pub fn read_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.batch(Kind::ReadBatch, batch)
    }

    #[inline]
    fn transfer<B: OneBuffer>(
        &self,
        kind: Kind,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.start(buffer, |buffer| {
            let range = self.check_range(buffer.as_ref(), range)?;
            match offset.checked_add(range.len() as u64) {
                Some(end) if end <= remote.len => Ok(What { kind, range, remote: remote.at(offset) }),
                _ => Err(NotStarted::Remote { offset, len: range.len() as u64, region: remote.len }),
            }
        })
    }

    fn batch(&self, kind: Kind, mut batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        batch.0.failures.clear();
        batch.0.work_requests = 0;
        self.start(batch, |batch| {
            batch.check()?;
            if kind == Kind::ReadBatch && batch.0.blocks.announcements() > 0 {
                return Err(NotStarted::AnnouncedRead);
            }
            Ok(What { kind, range: 0..0, remote: NOWHERE })
        })
    }

    /// The range of the buffer's region.
    #[inline]
    fn check_range(
        &self,
        buffer: &Buffer,
        range: impl RangeBounds<usize>,
    ) -> Result<Range<usize>, NotStarted> {
        let range = resolve(buffer, range).map_err(NotStarted::Local)?;
        if range.len() as u64 > self.max_message() {
            return Err(NotStarted::TooLong(range.len() as u64));
        }
        Ok(range)
    }
}
