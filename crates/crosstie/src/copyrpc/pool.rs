//! Registered memory for bulk payloads: bounded, kept, and used again.

use crate::device::{Access, Mr, Pd};

/// The smallest region.
const SMALLEST: usize = 1 << 16;
/// Sizes from one power of two to the next. So a region is at most an eighth longer than its payload, and still few sizes serve all.
const SIZES: usize = 8;

/// Memory of a pool, lent to one payload.
pub(super) struct Region(Box<Mr>);

impl Region {
    #[inline]
    pub(super) fn mr(&self) -> &Mr {
        &self.0
    }
}

/// Why a pool has no region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRegion {
    /// What is lent comes back.
    InUse,
    /// Nothing is lent, and yet the device has no memory.
    NoMemory,
}

/// Regions for one purpose. At most `limit` bytes exist at a time.
///
/// What comes back is kept, so that in the steady state nothing is registered; regions of sizes that nobody asks for
/// any more make room for others. That ends: once the pool is full, only smaller ones make room, for a larger one, and larger ones
/// serve for smaller payloads.
pub(super) struct Pool {
    access: Access,
    limit: usize,
    lent: usize,
    idle: Vec<Region>,
    idle_bytes: usize,
}

impl Pool {
    pub(super) fn new(access: Access, limit: usize) -> Pool {
        Pool { access, limit, lent: 0, idle: Vec::new(), idle_bytes: 0 }
    }

    /// A region of at least `len` bytes; `len` is at most the pool's limit.
    pub(super) fn take(&mut self, pd: &Pd, len: usize) -> Result<Region, NoRegion> {
        let size = self.size(len);
        debug_assert!(len <= size);
        if let Some(at) = self.idle.iter().position(|region| region.mr().len() == size) {
            return Ok(self.lend(at));
        }
        if self.lent + self.idle_bytes + size > self.limit {
            let larger = |region: &Region| region.mr().len() >= len;
            let best = (0..self.idle.len())
                .filter(|at| larger(&self.idle[*at]))
                .min_by_key(|at| self.idle[*at].mr().len());
            if let Some(at) = best {
                return Ok(self.lend(at));
            }
            if self.lent + size > self.limit {
                return Err(NoRegion::InUse);
            }
            while self.lent + self.idle_bytes + size > self.limit {
                self.drop_one();
            }
        }
        loop {
            match pd.allocate(size, self.access) {
                Ok(mr) => {
                    self.lent += size;
                    return Ok(Region(Box::new(mr)));
                }
                Err(_) if !self.idle.is_empty() => self.drop_one(),
                Err(_) if self.lent > 0 => return Err(NoRegion::InUse),
                Err(_) => return Err(NoRegion::NoMemory),
            }
        }
    }

    /// Bytes of the region for a payload of `len`.
    fn size(&self, len: usize) -> usize {
        let step = (len.next_power_of_two() / (2 * SIZES)).max(1);
        len.next_multiple_of(step).max(SMALLEST).min(self.limit)
    }

    /// Takes a region of this pool back. Nobody touches it any more.
    pub(super) fn give(&mut self, region: Region) {
        self.lent -= region.mr().len();
        self.idle_bytes += region.mr().len();
        self.idle.push(region);
    }

    fn lend(&mut self, at: usize) -> Region {
        let region = self.idle.swap_remove(at);
        self.idle_bytes -= region.mr().len();
        self.lent += region.mr().len();
        region
    }

    fn drop_one(&mut self) {
        if let Some(region) = self.idle.pop() {
            self.idle_bytes -= region.mr().len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, software};

    fn pd(space: u64) -> Pd {
        Device::open_software(&software::Config { space }).unwrap().alloc_pd().unwrap()
    }

    #[test]
    fn regions_are_used_again_and_bounded() {
        let pd = pd(256 << 20);
        let mut pool = Pool::new(Access::LOCAL_WRITE, 1 << 20);
        let first = pool.take(&pd, 250_000).unwrap();
        assert_eq!(first.mr().len(), 1 << 18);
        let address = first.mr().remote().addr;
        pool.give(first);
        let again = pool.take(&pd, 1 << 18).unwrap();
        assert_eq!(again.mr().remote().addr, address, "used again");
        let rest: Vec<_> = (0..3).map(|_| pool.take(&pd, 1 << 18).unwrap()).collect();
        assert_eq!(pool.take(&pd, 1).err(), Some(NoRegion::InUse));
        rest.into_iter().for_each(|region| pool.give(region));
        // A larger one serves if there is no room for one of the right size.
        let small = pool.take(&pd, 1).unwrap();
        assert_eq!(small.mr().len(), 1 << 18);
        pool.give(small);
        pool.give(again);
        // Idle ones make room for one that is larger than all of them.
        let whole = pool.take(&pd, 1 << 20).unwrap();
        assert_eq!((whole.mr().len(), pool.lent, pool.idle_bytes), (1 << 20, 1 << 20, 0));
        pool.give(whole);
    }

    #[test]
    fn regions_are_hardly_longer_than_what_they_are_for() {
        let pool = Pool::new(Access::LOCAL_WRITE, 1 << 30);
        assert_eq!([1, 1 << 16].map(|len| pool.size(len)), [SMALLEST; 2]);
        assert_eq!(pool.size((1 << 16) + 1), 9 << 13);
        assert_eq!(pool.size((1 << 20) + 8), 9 << 17);
        for len in (SMALLEST + 1..1 << 23).step_by(1009) {
            let size = pool.size(len);
            assert!(len <= size && size - len < len / SIZES, "{size} for {len}");
            assert_eq!(pool.size(size), size, "a size is its own");
        }
        for power in 16..30 {
            assert_eq!(pool.size(1 << power), 1 << power);
        }
    }

    /// Whatever sizes are asked for, and however many are lent: registering comes to an end.
    #[test]
    fn all_sizes_together_settle() {
        let pd = pd(256 << 20);
        let mut pool = Pool::new(Access::LOCAL_WRITE, 8 << 20);
        let mut lent = std::collections::VecDeque::new();
        let (mut number, mut registered, mut last) = (1u64, std::collections::HashSet::new(), 0);
        for take in 0..20_000 {
            number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = (number >> 33) as usize % ((1 << 20) + 8) + 1;
            match pool.take(&pd, len) {
                Ok(region) => {
                    assert!(len <= region.mr().len());
                    last = if registered.insert(region.mr().remote().rkey) { take } else { last };
                    lent.push_back(region);
                }
                Err(cause) => assert_eq!(cause, NoRegion::InUse),
            }
            assert!(pool.lent + pool.idle_bytes <= 8 << 20);
            while lent.len() > (number >> 20) as usize % 8 {
                lent.pop_front().into_iter().for_each(|region| pool.give(region));
            }
        }
        assert!(last < 10_000, "a region was registered at take {last}, the {}th", registered.len());
    }

    #[test]
    fn a_limit_that_is_no_power_of_two_can_be_used_whole() {
        let pd = pd(256 << 20);
        let mut pool = Pool::new(Access::LOCAL_WRITE, 100_000);
        assert_eq!(pool.take(&pd, 100_000).unwrap().mr().len(), 100_000);
    }

    #[test]
    fn a_device_without_memory_is_told_from_one_that_waits() {
        let pd = pd(64 << 20);
        let mut pool = Pool::new(Access::LOCAL_WRITE, 1 << 30);
        assert_eq!(pool.take(&pd, 1 << 30).err(), Some(NoRegion::NoMemory));
        let region = pool.take(&pd, 1 << 20).unwrap();
        assert_eq!(pool.take(&pd, 1 << 29).err(), Some(NoRegion::InUse));
        pool.give(region);
        assert_eq!(pool.take(&pd, 1 << 29).err(), Some(NoRegion::NoMemory));
    }
}
