//! Connections whose peer is played by a test, frame by frame and request by request: what no correct peer does, and the order of
//! what both ends do.

mod connect_tests;
mod receiver_tests;
mod sender_tests;

use std::net::TcpListener;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crosstie_protocol::rails::{CTS_LEN, ClearToSend, MAX_RAILS};

use super::agreement::{Agreement, Role};
use super::connect::{ENDS, Handle, SENDER};
use super::context::Context;
use super::control::wait;
use super::endpoint::Endpoint;
use super::frames::{Frame, MAX_PAYLOAD};
use super::{Config, Memory, Rails, RecvConnection, SendConnection, Split};
use crate::bootstrap::Secret;
use crate::bootstrap::channel::{Channel, ChannelError, ChannelEvent};
use crate::device::{Completion, Data, Device, SendOp, SendWr, software};

/// How long anything may take before a test fails instead of hanging.
const HANG: Duration = Duration::from_secs(20);
const RAILS: usize = 2;

/// Rail 0 carries all bytes. Nothing happens because time passes: no probes, and no rail is built again.
fn config() -> Config {
    const NEVER: Duration = Duration::from_secs(3600);
    Config {
        split: Split::Fixed([1, 0, 0, 0]),
        staging: Some(0),
        stall_timeout: NEVER,
        rebuild_pause: (NEVER, NEVER),
        ..Config::default()
    }
}

fn software() -> Device {
    Device::open_software(&software::Config { space: 1 << 30 }).unwrap()
}

fn rails() -> Rails {
    Rails::new(vec![software(), software()], config()).unwrap()
}

/// Waits until `step` returns something.
fn until<T>(step: impl FnMut() -> Option<T>) -> T {
    crosstie_testkit::wait::find("frames or completions", step)
}

/// One end of a connection without the code that drives it.
struct Peer {
    channel: Channel,
    context: Arc<Context>,
    agreed: Agreement,
    endpoints: Vec<Endpoint>,
}

impl Peer {
    /// A receiver, and the sender that the test plays.
    fn sender(there: &Rails) -> (RecvConnection, Peer) {
        let mut listener = there.listen().unwrap();
        let handle = listener.handle();
        let playing = thread::spawn(move || {
            let context = rails().context;
            let config = &context.config;
            let agreed = Agreement {
                rails: RAILS,
                slots: config.slots,
                max_group: config.max_group,
                data_qps: config.data_qps,
                staging: 0,
            };
            let endpoints = create_endpoints(&context, Role::Sender, &agreed);
            let channel =
                Channel::connect(handle.address(), SENDER, ENDS, &handle.secret().unwrap(), MAX_PAYLOAD);
            let mut peer = Peer { channel: channel.unwrap(), context, agreed, endpoints };
            assert_eq!(peer.next_event().unwrap(), ChannelEvent::Open);
            let addresses = peer.endpoints.iter().map(Endpoint::address).collect();
            peer.send(&Frame::Hello(agreed, 1, addresses));
            let Some(Frame::Welcome(welcome, addresses)) = peer.read() else { panic!("no welcome") };
            assert_eq!(welcome, agreed);
            for (endpoint, address) in peer.endpoints.iter_mut().zip(&addresses) {
                endpoint.connect(address, &peer.context).unwrap();
            }
            peer.send(&Frame::Ready);
            peer
        });
        let receiver = until(|| listener.accept().unwrap());
        (receiver, playing.join().unwrap())
    }

    /// A sender, and the receiver that the test plays.
    fn receiver(here: &Rails) -> (SendConnection, Peer) {
        let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut connecting = here.connect(&Handle::new(socket.local_addr().unwrap(), [7; 32])).unwrap();
        let playing = thread::spawn(move || {
            let context = rails().context;
            let secret = Secret::new([7; 32]).unwrap();
            let channel = Channel::from_accepted(socket.accept().unwrap().0, &secret, MAX_PAYLOAD).unwrap();
            let agreed = Agreement { rails: RAILS, slots: 1, max_group: 1, data_qps: 1, staging: 0 };
            let mut peer = Peer { channel, context, agreed, endpoints: Vec::new() };
            assert_eq!(peer.next_event().unwrap(), ChannelEvent::JoinRequest { rank: SENDER, size: ENDS });
            peer.channel.accept_join().unwrap();
            let Some(Frame::Hello(agreed, _, addresses)) = peer.read() else { panic!("no hello") };
            peer.agreed = agreed;
            peer.endpoints = create_endpoints(&peer.context, Role::Receiver, &agreed);
            for (endpoint, address) in peer.endpoints.iter_mut().zip(&addresses) {
                endpoint.connect(address, &peer.context).unwrap();
            }
            let addresses = peer.endpoints.iter().map(Endpoint::address).collect();
            peer.send(&Frame::Welcome(agreed, addresses));
            assert_eq!(peer.read(), Some(Frame::Ready));
            peer
        });
        let sender = until(|| connecting.poll().unwrap());
        (sender, playing.join().unwrap())
    }

    fn send(&mut self, frame: &Frame) {
        frame.send(&mut self.channel).unwrap();
    }

    /// The next frame; `None` if the connection has ended.
    fn read(&mut self) -> Option<Frame> {
        match self.next_event() {
            Ok(ChannelEvent::Frame { kind, payload }) => {
                Some(Frame::decode(kind, &payload).expect("a frame"))
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                assert!(matches!(error, ChannelError::Closed | ChannelError::Io(_)), "{error}");
                None
            }
        }
    }

    fn next_event(&mut self) -> Result<ChannelEvent, ChannelError> {
        next_event(&mut self.channel)
    }

    /// Writes `bytes` to `at` of the memory that the peer gave for this rail, with or without an immediate.
    fn write(&mut self, rail: usize, at: usize, bytes: &[u8], imm: Option<u32>) {
        let endpoint = &mut self.endpoints[rail];
        let to = endpoint.peer.at(at as u64);
        endpoint.source.write(at, bytes).unwrap();
        let sges = [endpoint.source.sge(at..at + bytes.len()).unwrap()];
        let op = imm.map_or(SendOp::Write(to), |imm| SendOp::WriteImm(to, imm));
        endpoint.qps[0].post(&SendWr::new(1, op, Data::Regions(&sges))).unwrap();
    }

    /// As a receiver: tells the sender the buffers of message `number`; their tags are their indices.
    fn clear_to_send(&mut self, number: u64, memory: &Memory, ranges: &[Range<usize>]) {
        let at = number as usize % self.agreed.slots * self.agreed.max_group * CTS_LEN;
        for (index, range) in ranges.iter().enumerate().rev() {
            let (mut addrs, mut rkeys) = ([0; MAX_RAILS], [0; MAX_RAILS]);
            for rail in 0..RAILS {
                let remote = memory.remote(rail);
                (addrs[rail], rkeys[rail]) = (remote.at(range.start as u64).addr, remote.rkey);
            }
            let (size, count) = (range.len() as u64, ranges.len() as u8);
            let cts = ClearToSend { addrs, rkeys, size, tag: index as u32, index: index as u8, count };
            self.write(0, at + index * CTS_LEN, &cts.encode(number), None);
        }
    }

    /// Memory of the end that the test plays.
    fn allocate(&self, len: usize) -> Memory {
        Rails { context: self.context.clone() }.allocate(len).unwrap()
    }

    /// The next completion of a rail, if there is one.
    fn poll(&mut self, rail: usize) -> Option<Completion> {
        let mut polled = None;
        self.endpoints[rail].cq.poll(1, |completion| polled = Some(*completion)).unwrap();
        polled
    }
}

/// A channel whose ends are open.
fn channels() -> (Channel, Channel) {
    let secret = Secret::new([7; 32]).unwrap();
    let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let at = socket.local_addr().unwrap();
    let mut connected = Channel::connect(at, SENDER, ENDS, &secret, MAX_PAYLOAD).unwrap();
    let mut accepted = Channel::from_accepted(socket.accept().unwrap().0, &secret, MAX_PAYLOAD).unwrap();
    until(|| {
        connected.poll_event().unwrap();
        accepted.poll_event().unwrap()
    });
    accepted.accept_join().unwrap();
    assert_eq!(next_event(&mut connected).unwrap(), ChannelEvent::Open);
    (connected, accepted)
}

/// Waits for the next event of a channel.
fn next_event(channel: &mut Channel) -> Result<ChannelEvent, ChannelError> {
    let started = Instant::now();
    loop {
        if let Some(event) = channel.poll_event()? {
            return Ok(event);
        }
        assert!(started.elapsed() < HANG, "nothing arrives");
        wait(channel, None, Some(HANG)).unwrap();
    }
}

fn create_endpoints(context: &Context, role: Role, agreed: &Agreement) -> Vec<Endpoint> {
    (0..RAILS).map(|rail| Endpoint::create(context, rail, role, agreed, 0).unwrap()).collect()
}
