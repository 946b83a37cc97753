//! Two contexts of this process, connected.

use std::ops::Range;
use std::time::{Duration, Instant};

use crosstie::device::fault::Control;
use crosstie::device::{Device, fault::Plan};
use crosstie::rails::*;
use crosstie_testkit::wait;
pub(crate) use crosstie_testkit::wait::TIMEOUT as HANG;

#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) here: Rails,
    pub(crate) there: Rails,
    pub(crate) sender: SendConnection,
    pub(crate) receiver: RecvConnection,
    /// The faults of the sender's and of the receiver's devices.
    pub(crate) faults: [Vec<Control>; 2],
}

pub(crate) fn software() -> Device {
    Device::open_software(&crosstie::device::software::Config { space: 4 << 30 }).unwrap()
}

impl Pair {
    /// Software devices.
    pub(crate) fn plain(rails: usize, config: Config) -> Pair {
        Pair::over(|| (0..rails).map(|_| software()).collect(), config)
    }

    /// Software devices with faults.
    pub(crate) fn faulty(rails: usize, config: Config) -> Pair {
        Pair::over(|| (0..rails).map(|_| software().with_faults(Plan::none())).collect(), config)
    }

    pub(crate) fn over(open: impl Fn() -> Vec<Device>, config: Config) -> Pair {
        let (senders, receivers) = (open(), open());
        let faults =
            [&senders, &receivers].map(|devices| devices.iter().filter_map(Device::faults).collect());
        let here = Rails::new(senders, config.clone()).unwrap();
        let there = Rails::new(receivers, config).unwrap();
        let (sender, receiver) = connect(&here, &there);
        Pair { here, there, sender, receiver, faults }
    }

    /// Sends `len` bytes of pattern `seed` and checks every byte.
    pub(crate) fn transfer(&mut self, from: &Memory, to: &Memory, len: usize, seed: u64) {
        self.try_transfer(from, to, len, seed).unwrap();
    }

    /// As [`Pair::transfer`], on a connection that may end.
    pub(crate) fn try_transfer(
        &mut self,
        from: &Memory,
        to: &Memory,
        len: usize,
        seed: u64,
    ) -> Result<(), RequestError> {
        let bytes = pattern(len, seed);
        from.write(0, &bytes).unwrap();
        to.write(0, &vec![0xee; to.len()]).unwrap();
        let buffer = RecvBuffer { memory: to, range: 0..to.len(), tag: 0 };
        let receive = self.receiver.irecv(&[buffer])?.expect("a free slot");
        let started = Instant::now();
        let (mut send, mut sent, mut received) = (None, None, None);
        while sent.is_none() || received.is_none() {
            match send {
                None => send = self.sender.isend(from, 0..len, 0)?,
                Some(send) if sent.is_none() => sent = self.sender.test(send)?,
                Some(_) => {}
            }
            if received.is_none() {
                received = self.receiver.test(receive)?;
            }
            self.sender.progress();
            self.receiver.progress();
            check_hang(started);
        }
        assert_eq!(sent, Some(len));
        assert_eq!(received.unwrap().sizes(), [len]);
        check(to, 0, &bytes);
        check(to, len, &vec![0xee; (to.len() - len).min(256)]);
        Ok(())
    }

    /// Lets both ends work until `done`.
    pub(crate) fn progress_until(&mut self, mut done: impl FnMut(&mut Pair) -> bool) {
        self.progress_until_some(|pair| done(pair).then_some(()));
    }

    /// Lets both ends work until `step` returns something.
    pub(crate) fn progress_until_some<T>(&mut self, mut step: impl FnMut(&mut Pair) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            if let Some(found) = step(self) {
                return found;
            }
            self.sender.progress();
            self.receiver.progress();
            if started.elapsed() > HANG {
                panic!("nothing happens: {self:#?}");
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Posts a buffer with tag 0.
    pub(crate) fn receive(&mut self, memory: &Memory, range: Range<usize>) -> RecvRequest {
        self.receiver.irecv(&[RecvBuffer { memory, range, tag: 0 }]).unwrap().expect("a free slot")
    }

    /// Starts to send as soon as the receiver has a buffer with this tag.
    pub(crate) fn send(&mut self, memory: &Memory, range: Range<usize>, tag: u32) -> SendRequest {
        self.progress_until_some(|pair| pair.sender.isend(memory, range.clone(), tag).unwrap())
    }

    /// Waits until a message is sent. Returns its length.
    pub(crate) fn finish_send(&mut self, send: SendRequest) -> usize {
        self.progress_until_some(|pair| pair.sender.test(send).unwrap())
    }

    /// Waits until a message has arrived. Returns the sizes of its buffers.
    pub(crate) fn finish_receive(&mut self, receive: RecvRequest) -> Vec<usize> {
        self.progress_until_some(|pair| pair.receiver.test(receive).unwrap()).sizes().to_vec()
    }
}

/// Waits until `step` returns something; only what `step` calls makes progress.
pub(crate) fn until<T>(step: impl FnMut() -> Option<T>) -> T {
    wait::find("messages or rails", step)
}

pub(crate) fn connect(here: &Rails, there: &Rails) -> (SendConnection, RecvConnection) {
    let mut listener = there.listen().unwrap();
    let mut connecting = here.connect(&listener.handle()).unwrap();
    let (mut sender, mut receiver) = (None, None);
    wait::eventually("both ends are connected", || {
        if sender.is_none() {
            sender = connecting.poll().unwrap();
        }
        if receiver.is_none() {
            receiver = listener.accept().unwrap();
        }
        sender.is_some() && receiver.is_some()
    });
    (sender.unwrap(), receiver.unwrap())
}

pub(crate) fn check_hang(started: Instant) {
    assert!(started.elapsed() < HANG, "nothing happens");
}

/// Bytes that depend on their position and on `seed`.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn check(memory: &Memory, at: usize, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    memory.read(at, &mut bytes).unwrap();
    if let Some(wrong) = bytes.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("byte {} is {:#x}, not {:#x}", at + wrong, bytes[wrong], expected[wrong]);
    }
}
