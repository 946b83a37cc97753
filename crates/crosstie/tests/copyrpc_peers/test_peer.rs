//! One side of a test case: its device, and a channel to the other side.

use crosstie::copyrpc::{Config, Connection, ConnectionAddress, ConnectionConfig, Context};
use crosstie::device::{ConnectConfig, DeviceSpec};
use zerocopy::{FromBytes, IntoBytes};

use crate::harness::channel::Channel;
use crate::harness::{self, TestSetup};

/// One side of a case.
pub(crate) struct TestPeer {
    /// 0 or 1.
    pub(crate) index: usize,
    pub(crate) seed: u64,
    setup: TestSetup,
    channel: Channel,
}

impl harness::Participant for TestPeer {
    fn new(index: usize, setup: TestSetup, channel: Channel) -> TestPeer {
        TestPeer { index, seed: setup.seed, setup, channel }
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

    /// This number of calls, or fewer on a slow device.
    pub(crate) fn scaled(&self, calls: u64) -> u64 {
        if self.is_slow() { (calls / 50).clamp(20, 1000) } else { calls }
    }

    pub(crate) fn context<U>(&self) -> Context<U> {
        self.context_with(&Config::default())
    }

    pub(crate) fn context_with<U>(&self, config: &Config) -> Context<U> {
        Context::new(self.setup.open_for(self.index), config).expect("a context")
    }

    /// Creates a connection and connects it to one that the other side creates at the same time.
    pub(crate) fn connect<U>(&mut self, context: &Context<U>, config: &ConnectionConfig) -> Connection<U> {
        let connection = context.create_connection(config).expect("a connection");
        let theirs = self.exchange(connection.address().as_bytes());
        let theirs = ConnectionAddress::read_from_bytes(&theirs).expect("an address");
        // The default of 67 ms for an acknowledgement, seven times, can be too short for a guest that waits for a core.
        let timeout = if self.is_slow() { 17 } else { ConnectConfig::default().timeout };
        connection
            .connect(&theirs, &ConnectConfig { timeout, ..ConnectConfig::default() })
            .expect("connected");
        // Neither side calls before both are connected.
        self.meet();
        connection
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
