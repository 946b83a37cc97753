//! A registered region that is used as a ring.

use core::ops::Deref;

use super::Mr;
use crate::memory::copy;
use crate::memory::shared_bytes::SharedBytes;

/// What is loaded from a ring that is too short, or not mapped here.
static ZEROS: [u64; 2] = [0; 2];

/// A region whose bytes are loaded in pieces of 16, without a check of each.
#[derive(Debug)]
pub(crate) struct RingRegion {
    region: Mr,
    start: *const u8,
    /// Offsets are masked with it. So no load leaves the region.
    mask: usize,
    /// Bytes that can be read.
    len: usize,
}

impl RingRegion {
    /// The length should be a power of two; what is beyond is not loaded.
    pub(crate) fn new(region: Mr) -> RingRegion {
        let (start, len) = (region.as_ptr().cast_const(), region.len());
        if len < 16 || start.is_null() || !start.cast::<u64>().is_aligned() {
            return RingRegion { region, start: (&raw const ZEROS).cast(), mask: 0, len: 0 };
        }
        RingRegion { region, start, mask: (1 << len.ilog2()) - 16, len }
    }

    /// Loads the 16 bytes at an offset, as two numbers. Offsets are multiples of 16, and are counted on beyond the end.
    #[inline]
    pub(crate) fn load_words(&self, offset: usize) -> [u64; 2] {
        // SAFETY: the masked offset is a multiple of 16, and at least 16 bytes before the end of the region, which is valid for reads as
        // long as `self` has it, and aligned to 8. (Or both are zero, and the static has 16 bytes.) There are no references to the region.
        let bytes: [u8; 16] = unsafe { copy::load(self.start.add(offset & self.mask)) };
        let words = u128::from_le_bytes(bytes);
        [words as u64, (words >> 64) as u64]
    }
}

impl RingRegion {
    /// A range of the ring, to be copied out. `None` if it is not inside of the ring.
    #[inline]
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Option<SharedBytes<'_>> {
        if len > self.len || offset > self.len - len {
            return None;
        }
        // SAFETY: `offset + len <= self.len`, and so many bytes at `start` are valid for reads as long as `self` has the region.
        Some(unsafe { SharedBytes::new(self.start.add(offset), len) })
    }
}

impl Deref for RingRegion {
    type Target = Mr;
    #[inline]
    fn deref(&self) -> &Mr {
        &self.region
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::{Access, Device, software};

    #[test]
    fn loads_stay_inside_the_region() {
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let pd = device.alloc_pd().unwrap();
        for len in [1, 15, 16, 48, 64, 4096] {
            let ring = RingRegion::new(pd.allocate(len, Access::LOCAL_WRITE).unwrap());
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            ring.write(0, &bytes).unwrap();
            let used = if len < 16 { 0 } else { 1usize << len.ilog2() };
            for offset in [0, 16, 32, 48, 4080, 4096, 1 << 40, usize::MAX] {
                let mut expected = [0; 16];
                if used > 0 {
                    ring.read(offset % used / 16 * 16, &mut expected).unwrap();
                }
                let in_range = offset.checked_add(16).is_some_and(|end| end <= len);
                assert_eq!(ring.bytes(offset, 16).is_some(), in_range && len >= 16, "{len} {offset}");
                assert_eq!(
                    ring.load_words(offset).map(u64::to_le_bytes).as_flattened(),
                    expected,
                    "{len} {offset}"
                );
            }
        }
    }
}
