//! Setting connections up, and closing them: listen, connect, accept and close.
//!
//! NCCL calls `connect` with the same 128-byte buffer until it gets a comm. The first 64 bytes are the listener's handle; the
//! key of the attempt is kept behind it.
//!
//! ```text
//!   0                               64       72                     128
//!   | handle of crosstie::rails     | key    | zero                  |
//! ```

use core::ffi::c_int;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crosstie::rails::{Connecting, Counters, Flusher, Handle, Listener, Rails};

use crate::comm::{RECVS, RecvComm, Requests, SENDS, SendComm};
use crate::fault::Fault;
use crate::header::HANDLE_LEN;
use crate::key::{Key, Kind};
use crate::log::{info, trace};
use crate::memory::RecentMemory;
use crate::network::{self, MAX_COMMS, NetDevice};
use crate::table::Table;

const KEY_AT: usize = Handle::LEN;
const _: () = assert!(KEY_AT + 8 <= HANDLE_LEN);

/// Attempts to connect that are under way.
const MAX_CONNECTING: u32 = 1 << 12;
/// NCCL asks for the result of an attempt many times in a second. One for which it has not asked for so long was given up.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// A listener.
pub(crate) struct ListenComm {
    listener: Listener,
    rails: Rails,
    device: &'static NetDevice,
}

struct ConnectAttempt {
    handle: [u8; Handle::LEN],
    connecting: Connecting,
    rails: Rails,
    device: &'static NetDevice,
    /// The communicator, from version 11 of the interface on.
    context: Option<Key>,
    asked_at: Instant,
}

static LISTENS: LazyLock<Table<ListenComm>> = LazyLock::new(|| Table::new(Kind::Listen, MAX_COMMS));
static CONNECTING: LazyLock<Table<ConnectAttempt>> =
    LazyLock::new(|| Table::new(Kind::Connecting, MAX_CONNECTING));

/// `listen`: the comm, and the bytes that the sender needs.
pub(crate) fn listen(device: c_int, traffic_class: u8) -> Result<(Key, [u8; HANDLE_LEN]), Fault> {
    let device = network::device(device)?;
    let rails = device.rails(traffic_class)?;
    let listener = rails.listen()?;
    let mut bytes = [0; HANDLE_LEN];
    bytes[..Handle::LEN].copy_from_slice(&listener.handle().to_bytes());
    let key = LISTENS.insert(ListenComm { listener, rails, device })?;
    Ok((key, bytes))
}

/// `connect`: begins an attempt, or asks for the result of the one that is noted in `bytes`. There is no limit on how long an attempt
/// takes: NCCL calls `accept` at the other end when that rank reaches its first collective.
pub(crate) fn connect(
    context: Option<Key>,
    device: c_int,
    class: u8,
    bytes: &mut [u8; HANDLE_LEN],
) -> Result<Option<Key>, Fault> {
    let now = Instant::now();
    let device = network::device(device)?;
    let handle: [u8; Handle::LEN] = core::array::from_fn(|at| bytes[at]);
    let key = Key::from_bits(u64::from_le_bytes(core::array::from_fn(|at| bytes[KEY_AT + at])));
    let connected = {
        // The bytes came from a peer at first: a key is ours only if the attempt has the same handle.
        let known = CONNECTING.lock(key).ok().filter(|attempt| attempt.handle == handle);
        match known {
            Some(mut attempt) => {
                attempt.asked_at = now;
                attempt.connecting.poll()
            }
            None => {
                forget_connects(|attempt| now.duration_since(attempt.asked_at) > ABANDONED_AFTER);
                let rails = device.rails(class)?;
                let connecting = rails.connect(&Handle::from_bytes(&handle)?)?;
                let attempt = ConnectAttempt { handle, connecting, rails, device, context, asked_at: now };
                let key = CONNECTING.insert(attempt)?;
                bytes[KEY_AT..KEY_AT + 8].copy_from_slice(&key.bits().to_le_bytes());
                return Ok(None);
            }
        }
    };
    if matches!(connected, Ok(None)) {
        return Ok(None);
    }
    bytes[KEY_AT..KEY_AT + 8].fill(0);
    let attempt = CONNECTING.remove(key)?;
    let Some(connection) = connected? else { return Ok(None) };
    let ConnectAttempt { rails, device, .. } = attempt;
    trace!("connected for sending: {}", device.name().to_string_lossy());
    let make = |key: Key| {
        let (requests, recent) = (Requests::new(key), RecentMemory::default());
        SendComm { connection, rails, device, requests, recent }
    };
    SENDS.insert_with(make).map(Some)
}

/// Ends attempts to connect that nobody will ask for again: NCCL has no call for it.
fn forget_connects(condition: impl Fn(&ConnectAttempt) -> bool) {
    CONNECTING.remove_if(condition);
}

/// Ends the attempts to connect of a communicator that is over.
pub(crate) fn forget_connects_of(context: Key) {
    forget_connects(|attempt| attempt.context == Some(context));
}

/// `accept`: the next connection, if there is one.
pub(crate) fn accept(listen: Key) -> Result<Option<Key>, Fault> {
    let mut comm = LISTENS.lock(listen)?;
    let Some(connection) = comm.listener.accept()? else { return Ok(None) };
    let (rails, device) = (comm.rails.clone(), comm.device);
    drop(comm);
    let flusher = if device.has_gpu_memory() { Some(Box::new(Flusher::new(&rails)?)) } else { None };
    trace!("connected for receiving: {}", device.name().to_string_lossy());
    let make = |key: Key| {
        let (requests, recent) = (Requests::new(key), RecentMemory::default());
        RecvComm { connection, rails, device, requests, recent, flusher }
    };
    RECVS.insert_with(make).map(Some)
}

/// `closeListen`. Closing NULL does nothing.
pub(crate) fn close_listen(key: Key) -> Result<(), Fault> {
    if key.bits() != 0 {
        drop(LISTENS.remove(key)?);
    }
    Ok(())
}

/// `closeSend`. Requests that are not done are gone. Closing NULL does nothing.
pub(crate) fn close_send(key: Key) -> Result<(), Fault> {
    if key.bits() != 0 {
        let mut comm = SENDS.remove(key)?;
        let cause = comm.connection.cause().map(|cause| cause.to_string());
        log_counters("sent", comm.device, &comm.connection.counters(), cause);
    }
    Ok(())
}

/// `closeRecv`. Requests that are not done are gone. Closing NULL does nothing.
pub(crate) fn close_recv(key: Key) -> Result<(), Fault> {
    if key.bits() != 0 {
        let mut comm = RECVS.remove(key)?;
        let cause = comm.connection.cause().map(|cause| cause.to_string());
        log_counters("received", comm.device, &comm.connection.counters(), cause);
    }
    Ok(())
}

/// Writes what a connection has done to NCCL's log: a line, and a line for each rail.
fn log_counters(verb: &str, device: &NetDevice, counters: &Counters, cause: Option<String>) {
    let masks: Vec<String> = counters
        .masks
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
        .map(|(mask, count)| format!("{mask:#x}: {count}"))
        .collect();
    info!(
        "{verb} {} messages ({} staged) over {}; rail masks {{{}}}; violations {}{}",
        counters.messages,
        counters.staged,
        device.name().to_string_lossy(),
        masks.join(", "),
        counters.violations.iter().sum::<u64>(),
        cause.map_or(String::new(), |cause| format!("; ended: {cause}")),
    );
    for (rail, (c, spec)) in counters.rails.iter().zip(device.specs()).enumerate() {
        info!(
            "  rail {rail} {spec}: {} bytes, {} work requests, {} completions, {} retries, {} replays ({} bytes), {} probes, \
             {} failures, {} returns, p50 {:?}, p99 {:?}, {}",
            c.bytes,
            c.work_requests,
            c.completions,
            c.retries,
            c.replays,
            c.replayed_bytes,
            c.probes,
            c.failures,
            c.returns,
            Duration::from_nanos(c.p50_ns),
            Duration::from_nanos(c.p99_ns),
            if c.is_up { "up" } else { "down" },
        );
    }
}
