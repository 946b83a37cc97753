//! READ and WRITE of the application: one-sided operations on memory that two peers have told each other about.
//!
//! The memory region of an operation is moved into it, and comes back with its completion. So the application cannot touch
//! the region while the device may access it.

use std::ops::Range;

use super::{Connection, Context};
use crate::copyrpc::error::RawError;
use crate::copyrpc::operation::RawCompletion;
use crate::device::{Access, DeviceError, Mr, RemoteAddr, SendOp};

impl<U> Context<U> {
    /// Allocates registered memory, zeroed: for [`Connection::read`] and [`Connection::write`] of this side or, with the access flags for
    /// it, of a peer that knows its [address](Mr::remote).
    pub fn allocate(&self, len: usize, access: Access) -> Result<Mr, DeviceError> {
        self.core.pd.allocate(len, access)
    }

    /// READs and WRITEs that were posted and have not completed. Those that have completed are
    /// [taken](Context::take_raw_completion) or can be.
    pub fn raw_operations_in_flight(&self) -> u64 {
        let counters = &self.core.counters;
        counters.raw_reads.get() + counters.raw_writes.get() - counters.raw_completed.get()
    }

    /// Takes the next READ or WRITE that has completed. Each is returned once. [Poll](Context::poll) for more.
    pub fn take_raw_completion(&self) -> Option<RawCompletion> {
        self.core.raw_completions.borrow_mut().pop_front()
    }
}

impl<U> Connection<U> {
    /// READs from the peer's memory into `range` of the region.
    ///
    /// The operation owns the region. [`Context::take_raw_completion`] returns it together with the token, when the device no
    /// longer accesses it; an error returns it at once. The READ is posted at once: before calls that were not flushed.
    ///
    /// ```
    /// # use crosstie::copyrpc::{Config, ConnectionConfig, Context};
    /// # use crosstie::device::{Access, ConnectConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let here = Context::<()>::open(&"software".parse()?, &Config::default())?;
    /// # let there = Context::<()>::open(&"software".parse()?, &Config::default())?;
    /// # let (near, far) = (here.create_connection(&ConnectionConfig::default())?,
    /// #                    there.create_connection(&ConnectionConfig::default())?);
    /// # near.connect(&far.address(), &ConnectConfig::default())?;
    /// # far.connect(&near.address(), &ConnectConfig::default())?;
    /// let shared = there.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    /// shared.write(100, b"posted")?;
    /// let address = shared.remote(); // sent to the reader, for example by a call
    ///
    /// let region = here.allocate(4096, Access::LOCAL_WRITE)?;
    /// near.read(region, 0..6, address.at(100), 7)?;
    /// let completion = loop {
    ///     here.poll(|(), _| ());
    ///     if let Some(completion) = here.take_raw_completion() {
    ///         break completion;
    ///     }
    /// };
    /// assert_eq!((completion.token, completion.result), (7, Ok(())));
    /// let mut bytes = [0; 6];
    /// completion.region.read(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"posted");
    /// # Ok(()) }
    /// ```
    ///
    /// The region cannot be used before the operation has completed:
    ///
    /// ```compile_fail,E0382
    /// # use crosstie::copyrpc::Connection;
    /// # use crosstie::device::{Mr, RemoteAddr};
    /// fn f(connection: &Connection<()>, region: Mr, from: RemoteAddr) {
    ///     connection.read(region, 0..8, from, 1).unwrap();
    ///     region.write(0, b"too soon").unwrap();
    /// }
    /// ```
    #[expect(clippy::result_large_err, reason = "the region is returned, without an allocation")]
    pub fn read(
        &self,
        region: Mr,
        range: Range<usize>,
        from: RemoteAddr,
        token: u64,
    ) -> Result<(), RawError> {
        self.post_raw(SendOp::Read(from), region, range, token)
    }

    /// WRITEs `range` of the region into the peer's memory. The operation owns the region, as for [`read`](Connection::read). The
    /// bytes arrive before any call that is made after this.
    #[expect(clippy::result_large_err, reason = "the region is returned, without an allocation")]
    pub fn write(&self, region: Mr, range: Range<usize>, to: RemoteAddr, token: u64) -> Result<(), RawError> {
        self.post_raw(SendOp::Write(to), region, range, token)
    }

    #[expect(clippy::result_large_err, reason = "the region is returned, without an allocation")]
    fn post_raw(&self, op: SendOp, region: Mr, range: Range<usize>, token: u64) -> Result<(), RawError> {
        let posted = self.connection.post_raw(op, range, region, token);
        // Also if the limit is reached: the flush lets the poll look for completions.
        self.core.schedule_flush(&self.connection);
        posted
    }
}
