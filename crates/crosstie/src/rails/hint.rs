//! What a program outside knows about the rails, through shared memory.
//!
//! ```text
//!  0         8                                    16
//! +---------+-------------------------------------+      expires: milliseconds of the monotonic clock, modulo 2^32;
//! | magic   | percent x 4 (u8) | expires (u32)    |      0 means never. The second word is written with one store.
//! +---------+-------------------------------------+
//! ```
//!
//! The memory is a sealed memfd, so that no other process can shrink it while it is read.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crosstie_protocol::rails::MAX_RAILS;

use super::error::SetupError;
use crate::memory::segment::{Segment, SharedRef};

const MAGIC: u64 = u64::from_le_bytes(*b"CTHINT\x00\x01");
const LEN: u64 = 4096;

/// A factor for the rate of each rail, in percent: 100 changes nothing, 0 excludes the rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Per rail.
    pub percent: [u8; MAX_RAILS],
}

impl Hint {
    /// Changes nothing.
    pub const NEUTRAL: Hint = Hint { percent: [100; MAX_RAILS] };

    /// The rate of a rail with this hint.
    #[inline]
    pub(super) fn apply(&self, rail: usize, rate: u64) -> u64 {
        let percent = u64::from(self.percent[rail]);
        if percent == 0 { 0 } else { (rate * percent / 100).max(1) }
    }
}

/// Gives hints to the contexts that read them: [`Config::hint`](super::Config::hint) is the [path](HintPublisher::path).
///
/// ```
/// use crosstie::rails::{Config, Hint, HintPublisher};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let publisher = HintPublisher::create()?;
/// publisher.set(Hint { percent: [100, 25, 100, 100] }, None);
/// let config = Config { hint: Some(publisher.path()), ..Config::default() };
/// # drop(config);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct HintPublisher {
    segment: Arc<Segment>,
    words: SharedRef<[AtomicU64; 2]>,
}

impl HintPublisher {
    /// Creates the shared memory, with a neutral hint.
    pub fn create() -> Result<HintPublisher, SetupError> {
        let os = |source| SetupError::Os { what: "creating the memory of hints", source };
        let segment = Arc::new(Segment::create(LEN).map_err(os)?);
        let words: SharedRef<[AtomicU64; 2]> =
            SharedRef::new(&segment, 0).ok_or_else(|| os(io::ErrorKind::InvalidData.into()))?;
        words[0].store(MAGIC, Relaxed);
        Ok(HintPublisher { segment, words })
    }

    /// Where processes of the same user find the memory, as long as this process lives. A symbolic link to it gives it a name.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.segment.fd().as_raw_fd()).into()
    }

    /// Gives a hint. Every message that is sent from now on takes it into account. After `valid_for` it is ignored, so that a
    /// publisher that is gone does no harm.
    pub fn set(&self, hint: Hint, valid_for: Option<Duration>) {
        let expires = valid_for.map_or(0, |time| now_ms().wrapping_add(time.as_millis() as u32).max(1));
        let percent = u32::from_le_bytes(hint.percent);
        self.words[1].store(u64::from(expires) << 32 | u64::from(percent), Relaxed);
    }
}

/// Milliseconds of the monotonic clock, which all processes of a machine share.
fn now_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec as u64 / 1_000_000) as u32
}

/// Reads the hint.
#[derive(Debug, Default)]
pub(super) struct HintReader {
    words: Option<SharedRef<[AtomicU64; 2]>>,
}

impl HintReader {
    pub(super) fn open(path: &Path) -> Result<HintReader, SetupError> {
        let open = || -> io::Result<HintReader> {
            let file = File::options().read(true).write(true).open(path)?;
            let segment = Arc::new(Segment::open(OwnedFd::from(file).into(), LEN)?);
            let words: Option<SharedRef<[AtomicU64; 2]>> = SharedRef::new(&segment, 0);
            let words = words.filter(|words| words[0].load(Relaxed) == MAGIC);
            words
                .map(|words| HintReader { words: Some(words) })
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it contains no hints"))
        };
        open().map_err(|source| SetupError::Os { what: "opening the memory of hints", source })
    }

    /// The hint as it is now: one load if there is none.
    #[inline]
    pub(super) fn read(&self) -> Hint {
        let Some(words) = &self.words else { return Hint::NEUTRAL };
        let word = words[1].load(Relaxed);
        let expires = (word >> 32) as u32;
        if word == 0 || (expires != 0 && (expires.wrapping_sub(now_ms()) as i32) < 0) {
            return Hint::NEUTRAL;
        }
        Hint { percent: (word as u32).to_le_bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_read_as_it_was_set_until_it_expires() {
        let publisher = HintPublisher::create().unwrap();
        let reader = HintReader::open(&publisher.path()).unwrap();
        assert_eq!(reader.read(), Hint::NEUTRAL);
        let hint = Hint { percent: [1, 0, 255, 100] };
        publisher.set(hint, None);
        assert_eq!(reader.read(), hint);
        publisher.set(hint, Some(Duration::from_secs(3600)));
        assert_eq!(reader.read(), hint);
        publisher.set(hint, Some(Duration::ZERO));
        while reader.read() == hint {
            std::thread::yield_now();
        }
        assert_eq!(reader.read(), Hint::NEUTRAL);
        assert_eq!((hint.apply(0, 1000), hint.apply(1, 1000), hint.apply(2, 1000)), (10, 0, 2550));
    }

    #[test]
    fn memory_without_hints_is_refused() {
        let path = std::env::temp_dir().join(format!("crosstie-no-hint-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        assert!(HintReader::open(&path).is_err(), "a file is not sealed");
        std::fs::remove_file(&path).unwrap();
        let segment = Segment::create(LEN).unwrap();
        let path = format!("/proc/self/fd/{}", segment.fd().as_raw_fd());
        assert!(HintReader::open(Path::new(&path)).is_err(), "no magic number");
    }
}
