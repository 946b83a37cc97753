//! A pool of registered memory for bulk payloads: bounded, kept, and reused.

use crate::device::{Access, Mr, Pd};

/// The smallest region.
const MIN_REGION: usize = 1 << 16;
/// Number of region sizes between one power of two and the next. With eight, a region is at most an eighth longer than its
/// payload, and there are still few sizes.
const SIZES_PER_DOUBLING: usize = 8;

/// A region of a pool, in use by one payload.
pub(super) struct PooledRegion(Box<Mr>);

impl PooledRegion {
    #[inline]
    pub(super) fn mr(&self) -> &Mr {
        &self.0
    }
}

/// Why a pool has no region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRegion {
    /// The memory is in use. It will be put back.
    InUse,
    /// Nothing of the pool is in use, and still the device has no memory.
    NoMemory,
}

/// Regions for one purpose. At most `limit` bytes exist at a time.
///
/// Regions that are put back are kept, so that in the steady state nothing is registered. When the pool is full, an idle region
/// that is larger than needed is reused; only if there is no such region, idle regions are dropped to make room, all of them smaller
/// than the new one. So for any mix of sizes registration stops after a while.
pub(super) struct RegionPool {
    access: Access,
    limit: usize,
    in_use: usize,
    idle: Vec<PooledRegion>,
    idle_bytes: usize,
}

impl RegionPool {
    pub(super) fn new(access: Access, limit: usize) -> RegionPool {
        RegionPool { access, limit, in_use: 0, idle: Vec::new(), idle_bytes: 0 }
    }

    /// Takes a region of at least `len` bytes. `len` is at most the limit of the pool.
    pub(super) fn take(&mut self, pd: &Pd, len: usize) -> Result<PooledRegion, NoRegion> {
        let size = self.region_size(len);
        debug_assert!(len <= size);
        if let Some(at) = self.idle.iter().position(|region| region.mr().len() == size) {
            return Ok(self.reuse(at));
        }
        if self.in_use + self.idle_bytes + size > self.limit {
            let larger = |region: &PooledRegion| region.mr().len() >= len;
            let best = (0..self.idle.len())
                .filter(|index| larger(&self.idle[*index]))
                .min_by_key(|index| self.idle[*index].mr().len());
            if let Some(at) = best {
                return Ok(self.reuse(at));
            }
            if self.in_use + size > self.limit {
                return Err(NoRegion::InUse);
            }
            while self.in_use + self.idle_bytes + size > self.limit {
                self.drop_idle_region();
            }
        }
        loop {
            match pd.allocate(size, self.access) {
                Ok(mr) => {
                    self.in_use += size;
                    return Ok(PooledRegion(Box::new(mr)));
                }
                Err(_) if !self.idle.is_empty() => self.drop_idle_region(),
                Err(_) if self.in_use > 0 => return Err(NoRegion::InUse),
                Err(_) => return Err(NoRegion::NoMemory),
            }
        }
    }

    /// The size of a region for a payload of `len` bytes.
    fn region_size(&self, len: usize) -> usize {
        let step = (len.next_power_of_two() / (2 * SIZES_PER_DOUBLING)).max(1);
        len.next_multiple_of(step).max(MIN_REGION).min(self.limit)
    }

    /// Puts a region of this pool back. Neither the peer nor the device accesses it any more.
    pub(super) fn put_back(&mut self, region: PooledRegion) {
        self.in_use -= region.mr().len();
        self.idle_bytes += region.mr().len();
        self.idle.push(region);
    }

    fn reuse(&mut self, at: usize) -> PooledRegion {
        let region = self.idle.swap_remove(at);
        self.idle_bytes -= region.mr().len();
        self.in_use += region.mr().len();
        region
    }

    fn drop_idle_region(&mut self) {
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
    fn regions_are_reused_and_bounded() {
        let pd = pd(256 << 20);
        let mut pool = RegionPool::new(Access::LOCAL_WRITE, 1 << 20);
        let first = pool.take(&pd, 250_000).unwrap();
        assert_eq!(first.mr().len(), 1 << 18);
        let address = first.mr().remote().addr;
        pool.put_back(first);
        let again = pool.take(&pd, 1 << 18).unwrap();
        assert_eq!(again.mr().remote().addr, address, "reused");
        let rest: Vec<_> = (0..3).map(|_| pool.take(&pd, 1 << 18).unwrap()).collect();
        assert_eq!(pool.take(&pd, 1).err(), Some(NoRegion::InUse));
        rest.into_iter().for_each(|region| pool.put_back(region));
        // A larger region is reused if there is no room for one of the right size.
        let small = pool.take(&pd, 1).unwrap();
        assert_eq!(small.mr().len(), 1 << 18);
        pool.put_back(small);
        pool.put_back(again);
        // Idle regions are dropped to make room for one that is larger than all of them.
        let whole = pool.take(&pd, 1 << 20).unwrap();
        assert_eq!((whole.mr().len(), pool.in_use, pool.idle_bytes), (1 << 20, 1 << 20, 0));
        pool.put_back(whole);
    }

    #[test]
    fn regions_are_at_most_an_eighth_longer_than_their_payload() {
        let pool = RegionPool::new(Access::LOCAL_WRITE, 1 << 30);
        assert_eq!([1, 1 << 16].map(|len| pool.region_size(len)), [MIN_REGION; 2]);
        assert_eq!(pool.region_size((1 << 16) + 1), 9 << 13);
        assert_eq!(pool.region_size((1 << 20) + 8), 9 << 17);
        for len in (MIN_REGION + 1..1 << 23).step_by(1009) {
            let size = pool.region_size(len);
            assert!(len <= size && size - len < len / SIZES_PER_DOUBLING, "{size} for {len}");
            assert_eq!(pool.region_size(size), size, "the size of a full region");
        }
        for power in 16..30 {
            assert_eq!(pool.region_size(1 << power), 1 << power);
        }
    }

    /// Whatever sizes are taken, and however many at a time, registration comes to an end.
    #[test]
    fn registration_stops_under_any_mix_of_sizes() {
        let pd = pd(256 << 20);
        let mut pool = RegionPool::new(Access::LOCAL_WRITE, 8 << 20);
        let mut taken = std::collections::VecDeque::new();
        let (mut number, mut registered, mut last) = (1u64, std::collections::HashSet::new(), 0);
        for take in 0..20_000 {
            number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = (number >> 33) as usize % ((1 << 20) + 8) + 1;
            match pool.take(&pd, len) {
                Ok(region) => {
                    assert!(len <= region.mr().len());
                    last = if registered.insert(region.mr().remote().rkey) { take } else { last };
                    taken.push_back(region);
                }
                Err(cause) => assert_eq!(cause, NoRegion::InUse),
            }
            assert!(pool.in_use + pool.idle_bytes <= 8 << 20);
            while taken.len() > (number >> 20) as usize % 8 {
                taken.pop_front().into_iter().for_each(|region| pool.put_back(region));
            }
        }
        assert!(last < 10_000, "a region was registered at take {last}, the {}th", registered.len());
    }

    #[test]
    fn a_limit_that_is_not_a_power_of_two_can_be_used_whole() {
        let pd = pd(256 << 20);
        let mut pool = RegionPool::new(Access::LOCAL_WRITE, 100_000);
        assert_eq!(pool.take(&pd, 100_000).unwrap().mr().len(), 100_000);
    }

    #[test]
    fn device_without_memory_is_distinguished_from_memory_in_use() {
        let pd = pd(64 << 20);
        let mut pool = RegionPool::new(Access::LOCAL_WRITE, 1 << 30);
        assert_eq!(pool.take(&pd, 1 << 30).err(), Some(NoRegion::NoMemory));
        let region = pool.take(&pd, 1 << 20).unwrap();
        assert_eq!(pool.take(&pd, 1 << 29).err(), Some(NoRegion::InUse));
        pool.put_back(region);
        assert_eq!(pool.take(&pd, 1 << 29).err(), Some(NoRegion::NoMemory));
    }
}
