//! One side of a test case: its device, and a channel to the other side.

use std::sync::Arc;
use std::time::Duration;

use crosstie::device::{ConnectConfig, Device, DeviceSpec, Pd};
use crosstie::endpoint::{
    Buffer, Completed, Endpoint, EndpointAddress, EndpointConfig, Lend, OperationFuture, Refused,
};
use crosstie::region::{DESCRIPTOR_SIZE, RemoteRegion, Rights};

use crate::harness::channel::Channel;
use crate::harness::{self, TestSetup};

/// No operation of a test takes longer, unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// What transfers need.
pub(crate) const READ_WRITE: Rights = Rights { read: true, write: true, atomic: false };

/// One side of a case.
pub(crate) struct TestPeer {
    /// 0 or 1.
    pub(crate) index: usize,
    pub(crate) seed: u64,
    setup: TestSetup,
    channel: Channel,
    device: Option<(Device, Arc<Pd>)>,
}

impl harness::Participant for TestPeer {
    fn new(index: usize, setup: TestSetup, channel: Channel) -> TestPeer {
        TestPeer { index, seed: setup.seed, setup, channel, device: None }
    }

    fn wait_for_other(&mut self) {
        self.meet();
    }
}

impl TestPeer {
    /// Whether the device is Soft-RoCE in an emulated machine, where everything takes about a thousand times longer.
    pub(crate) fn is_slow(&self) -> bool {
        matches!(self.setup.specs[0], DeviceSpec::Verbs { .. })
    }

    /// This number of operations, or fewer on a slow device.
    pub(crate) fn scaled(&self, count: usize) -> usize {
        if self.is_slow() { (count / 50).clamp(10, 100) } else { count }
    }

    pub(crate) fn config(&self) -> EndpointConfig {
        // The default of 67 ms for an acknowledgement, seven times, can be too short for a guest that waits for a core.
        let timeout = if self.is_slow() { 17 } else { ConnectConfig::default().timeout };
        EndpointConfig {
            connect: ConnectConfig { timeout, ..ConnectConfig::default() },
            deadline: Some(HANG),
            ..EndpointConfig::default()
        }
    }

    /// An endpoint that is not connected. All endpoints of a side have the same device and protection domain.
    pub(crate) fn open(&mut self, config: &EndpointConfig) -> Endpoint {
        let (device, pd) = self.device.get_or_insert_with(|| {
            let device = self.setup.open_for(self.index);
            let pd = Arc::new(device.alloc_pd().expect("a protection domain"));
            (device, pd)
        });
        Endpoint::new(device, pd, config).expect("an endpoint")
    }

    /// Connects an endpoint to one of the other side, which does the same.
    pub(crate) fn connect(&mut self, endpoint: &Endpoint) {
        let theirs = self.exchange(&endpoint.address().to_bytes());
        endpoint.connect(&EndpointAddress::from_bytes(&theirs).expect("an address")).expect("connected");
        // Neither side starts before both are connected.
        self.meet();
    }

    pub(crate) fn connected(&mut self, config: &EndpointConfig) -> Endpoint {
        let endpoint = self.open(config);
        self.connect(&endpoint);
        endpoint
    }

    /// Tells the other side where a buffer is, and returns where its buffer is.
    pub(crate) fn exchange_regions(&mut self, endpoint: &Endpoint, buffer: &Buffer) -> RemoteRegion {
        let theirs = self.exchange(&endpoint.describe(buffer).encode());
        let theirs: [u8; DESCRIPTOR_SIZE] = theirs.try_into().expect("a descriptor");
        RemoteRegion::decode(&theirs).expect("a descriptor")
    }

    /// Both sides use the seed of side 0 from now on. Two hosts have chosen different ones.
    pub(crate) fn agree_on_seed(&mut self) {
        let theirs = self.exchange(&self.seed.to_le_bytes());
        if self.index == 1 {
            self.seed = u64::from_le_bytes(theirs.try_into().expect("a seed"));
        }
    }

    pub(crate) fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.channel.send(bytes).expect("the other side is there");
        self.channel.recv().expect("the other side is there")
    }

    /// Waits until the other side calls this too.
    pub(crate) fn meet(&mut self) {
        self.exchange(&[]);
    }
}

/// The operation, which must have been started.
pub(crate) fn started<B: Lend + std::fmt::Debug>(
    started: Result<OperationFuture<B>, Refused<B>>,
) -> OperationFuture<B> {
    started.unwrap_or_else(|refused| panic!("not started: {}", refused.cause))
}

/// Waits for an operation, which must succeed.
pub(crate) fn finish<B: Lend + std::fmt::Debug>(
    operation: Result<OperationFuture<B>, Refused<B>>,
) -> Completed<B> {
    wait(started(operation))
}

/// Waits for an operation, which must succeed.
pub(crate) fn wait<B: Lend>(operation: OperationFuture<B>) -> Completed<B> {
    match operation.wait_for(HANG) {
        Ok(Ok(completed)) => completed,
        Ok(Err(failed)) => panic!("{}", failed.cause),
        Err(_) => panic!("not ended after {HANG:?}"),
    }
}

/// Bytes that are different for each `number` and position.
pub(crate) fn pattern(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (number.wrapping_mul(31).wrapping_add(at).wrapping_mul(2654435761) >> 13) as u8)
        .collect()
}
